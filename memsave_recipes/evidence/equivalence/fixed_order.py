"""Kernels that add in a fixed order, and the operators that have none.

NOTE [ a fixed order ]
1. Torch can be told to raise at an operator that has no deterministic kernel, or to warn. On CUDA the backward of flash
   and of memory-efficient attention has one, but takes it only where torch would raise: told to warn, it warns as well
   and adds in any order (ATen/native/transformers/cuda/attention_backward.cu of torch 2.11 to 2.13).
2. So torch is told to raise. Where an operator does, what was begun begins again with warnings, and it is named.
3. The flash-attn package takes its deterministic backward where transformers is asked for it by a variable.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memsave_recipes.evidence.equivalence.kept_state import KeptState
from memsave_recipes.evidence.equivalence.ranks import reducer_of_its_own, without_wrapper

FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"


@contextmanager
def in_fixed_order() -> Iterator[None]:
    """All operators take their deterministic kernels; torch raises at one that has none."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, variable = torch.backends.cudnn.benchmark, os.environ.get(FLASH_ATTENTION)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic")
            os.environ[FLASH_ATTENTION] = "1"
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark
        os.environ.pop(FLASH_ATTENTION)
        os.environ.update({} if variable is None else {FLASH_ATTENTION: variable})


def unordered_operator(error: RuntimeError) -> str | None:
    """The operator without a deterministic kernel that raised ``error``, if one did."""
    name, words, _ = str(error).partition(" does not have a deterministic implementation")
    if words:
        return name.splitlines()[-1]
    is_cublas = "not deterministic because it uses CuBLAS" in str(error)
    return "cuBLAS without CUBLAS_WORKSPACE_CONFIG=:4096:8" if is_cublas else None


def only_warn() -> None:
    """Of operators without a deterministic kernel: rule 2."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def take_fixed_order(model: nn.Module, trial: Callable[[], Any]) -> str | None:
    """From now on torch raises at an operator that has no deterministic kernel, unless ``trial()`` meets one.

    Args:
        model: what ``trial`` runs forward and backward, as wrapped for training. It is left as it was.

    Returns:
        That operator; torch then warns of it and of all others. ``None`` where every operator has a kernel.
    """
    state = KeptState(without_wrapper(model))
    torch.use_deterministic_algorithms(True)
    try:
        with reducer_of_its_own(model):
            trial()
        return None
    except RuntimeError as error:
        operator = unordered_operator(error)
        if operator is None:
            raise
        only_warn()
        return operator
    finally:
        state.put_back()
