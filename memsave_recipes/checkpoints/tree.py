"""A tree of tensors and plain values as safetensors and JSON, exactly: no pickle is written, and none is ever read.

``state_dict`` of a model, an optimizer, a schedule or a loss scaler is such a tree. Tensors go to
``STEM-K.safetensors`` under the path of their keys, everything else to ``STEM.json``. Tensors that are the same memory
(tied weights, a table that all of an optimizer's parameters share) are written once. Floats keep every bit: JSON's text
of a float is the shortest one that reads back the same.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memsave_recipes.units import MIB

PART_BYTES = 256 * MIB
"""Of a file, about: a device's tensors are copied to the host a file at a time, and digests are made of several."""

Tree = Any
"""Tensors, dicts with keys of text or whole numbers, lists, tuples, None, truth values, numbers and text."""


class Unreadable(Exception):
    """A file does not hold a tree; the message names it."""


def write_tree(folder: Path, stem: str, tree: Tree) -> None:
    """Write ``tree`` to ``folder``.

    Raises:
        TypeError: something in it is of no known kind.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(tree, stem, tensors, {})
    content = json.dumps({"parts": len(_parts(tensors)), "tree": skeleton})
    (folder / f"{stem}.json").write_text(content, encoding="utf-8")
    for index, part in enumerate(_parts(tensors)):
        path = folder / _name(stem, index)
        save_file({name: tensor.cpu().contiguous() for name, tensor in part.items()}, path)


def read_tree(folder: Path, stem: str, *, mapped: bool = False) -> Tree:
    """Read what ``write_tree`` wrote, with every tensor on the CPU.

    Args:
        mapped: leave the tensors in the file, for a reader who copies them: they take no memory, on however many ranks.

    Raises:
        Unreadable: a file is missing or holds something else.
    """
    path = folder / f"{stem}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for index in range(content["parts"]):
            path = folder / _name(stem, index)
            tensors |= load_file(path)
        if not mapped:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return _unpack(content["tree"], tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise Unreadable(f"{path.name} cannot be read") from error


def num_bytes(tree: Tree) -> int:
    """Of the tensors that ``write_tree`` would write."""
    tensors: dict[str, Tensor] = {}
    _pack(tree, "", tensors, {})
    return sum(tensor.nbytes for tensor in tensors.values())


def _name(stem: str, index: int) -> str:
    return f"{stem}-{index}.safetensors"


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """``tensors`` in their order, in parts of about ``PART_BYTES``."""
    parts: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not parts or tensor.nbytes > room:
            parts.append({})
            room = PART_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def _pack(tree: Tree, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """The JSON of ``tree``; its tensors are put into ``tensors``, and ``seen`` knows them by their memory."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case Tensor():
            name = seen.setdefault(_identity(tree, path), path)
            tensors.setdefault(name, tree.detach())
            return {"tensor": name} if tree.is_contiguous() else {"tensor": name, "strides": _strides(tree)}
        case dict():
            return {"dict": [[_key(key), _pack(tree[key], f"{path}.{key}", tensors, seen)] for key in tree]}
        case list() | tuple():
            kind = "list" if isinstance(tree, list) else "tuple"
            return {kind: [_pack(item, f"{path}.{index}", tensors, seen) for index, item in enumerate(tree)]}
    raise TypeError(f"{path} is a {type(tree).__name__}, which has no place in a checkpoint")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Tree:
    match packed:
        case {"tensor": name, "strides": strides}:
            return torch.empty_strided(tensors[name].shape, strides, dtype=tensors[name].dtype).copy_(tensors[name])
        case {"tensor": name}:
            return tensors[name]
        case {"dict": entries}:
            return {key: _unpack(item, tensors) for key, item in entries}
        case {"list": items}:
            return [_unpack(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case None | bool() | int() | float() | str():
            return packed
    raise ValueError("it is no tree")


def _strides(tensor: Tensor) -> list[int]:
    """Of a tensor like this one, such as one in ``channels_last``.

    An optimizer's state has to keep those of its parameter: fused kernels run through the memory of both, and are
    silently wrong where it is arranged otherwise (AdamW on the CPU, torch 2.13).
    """
    return list(torch.empty_like(tensor, device="meta").stride())


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"{key!r} is neither text nor a whole number, so no key of a checkpoint")
    return key


def _identity(tensor: Tensor, path: str) -> Any:
    """The same for tensors that are the same memory; empty ones have none."""
    if not tensor.numel() or tensor.device.type == "meta":
        return path
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
