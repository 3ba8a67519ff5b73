"""Storages, which a build without CUDA clones and resizes on the CPU alone."""

from typing import Any

import torch

_clone_elsewhere = torch.storage._StorageBase.clone
_resize_elsewhere = torch.UntypedStorage.resize_


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(storage: Any) -> Any:
    if storage.device.type != "cuda":
        return _clone_elsewhere(storage)
    return _bytes_of(storage).clone().untyped_storage()


def _resize(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _resize_elsewhere(storage, size)
    torch.ops.standin.resize_storage(_bytes_of(storage), int(size))
    return storage


def install() -> None:
    """Let storages of the devices be cloned and resized."""
    torch.storage._StorageBase.clone, torch.UntypedStorage.resize_ = _clone, _resize
