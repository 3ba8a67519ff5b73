"""Tools of the proof: count block runs, compare with a float64 reference, and run with deterministic kernels.

NOTE [ as exact as plain ]
A plan that compiles rounds at other places, so its distance to the baseline in float64 has to be as small as the
baseline's own, in the root mean square of each tensor. Two computations of equal quality are nearer to it by turns
(measured: up to 1.4 times; a loss, which is one number, 21 times). Hence SLACK times the baseline's error, plus,
relative to the size of the tensor, the baseline's error over all gradients or ROUNDING ulp. Tensors that are not of
floating point have to be equal.

NOTE [ deterministic kernels ]
1. Torch can be told to raise at an operator that has no deterministic kernel, or to warn. On CUDA the backward of flash
   and of memory-efficient attention has one, but takes it only where torch would raise: told to warn, it warns as well
   and adds in any order (ATen/native/transformers/cuda/attention_backward.cu of torch 2.11 to 2.13).
2. So torch is told to raise. Where an operator does, the run begins again with warnings, and the operator is named.
3. The flash-attn package takes its deterministic backward where transformers is asked for it by a variable.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.activations import block_names, find_bottlenecks, find_stacks
from memsave_recipes.activations.blocks import Block
from memsave_recipes.equivalence.outcomes import (
    Difference,
    Key,
    Outcome,
    Verdict,
    dense,
    difference_of,
    keys_of,
    reducer_of_its_own,
    verdict_of,
    without_wrapper,
)
from memsave_recipes.plans import Plan
from memsave_recipes.profiling.preserve_state import preserve_state


@contextmanager
def count_block_runs(model: nn.Module, plan: Plan | None) -> Iterator[Counter[str]]:
    """How often the innermost modules of each block are called, in the forward and in recomputations."""
    runs: Counter[str] = Counter()
    leaves = _leaves_of_blocks(model, plan) if plan else {}
    handles = [leaf.register_forward_pre_hook(_Count(runs, name)) for leaf, name in leaves.items()]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


class _Count:
    def __init__(self, runs: Counter[str], name: str) -> None:
        self.runs = runs
        self.name = name

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self.runs[self.name] += 1


def _leaves_of_blocks(model: nn.Module, plan: Plan) -> dict[nn.Module, str]:
    """The block of every module without children; a module that several blocks share belongs to none."""
    owners: dict[nn.Module, set[str]] = {}
    for name, parts in _blocks_of(model, plan).items():
        for leaf in (module for part in parts for module in part.modules() if not any(module.children())):
            owners.setdefault(leaf, set()).add(name)
    return {leaf: names.pop() for leaf, names in owners.items() if len(names) == 1}


def _blocks_of(model: nn.Module, plan: Plan) -> dict[str, Iterable[nn.Module]]:
    """The modules of each block. The plan was made for the model, or for one that it wraps."""
    for module in model.modules():
        with suppress(AttributeError):  # most blocks bear the name of the one module that they are
            return {name: (module.get_submodule(name),) for name in plan.blocks}
        for stacks in (find_stacks(module), find_bottlenecks(module)):
            if tuple(name for names in block_names(stacks) for name in names) == plan.blocks:
                blocks = [block for stack in stacks for block in stack.blocks]
                return {b.name: b.modules if isinstance(b, Block) else (b.module,) for b in blocks}
    return {}


SLACK = 2.0
ROUNDING = 4.0


def compare_by_reference(plain: Outcome, planned: Outcome, reference: Outcome) -> Verdict:
    """The verdict by NOTE [ as exact as plain ]; ``reference`` is the baseline in float64."""
    differences: list[Difference] = []
    # Compiled code may draw from a generator of its own.
    keys = [key for key in keys_of(plain, planned) if key[0] != "RNG"]
    usual = _usual_error(plain, reference)
    for key in keys:
        one, other, exact = plain.tensors.get(key), planned.tensors.get(key), reference.tensors.get(key)
        if one is None or other is None or exact is None or not one.is_floating_point():
            differences += difference_of(key, one, other)
        else:
            differences += _excess(key, one, other, exact, usual)
    return verdict_of("as exact as plain", differences, len(keys), planned)


def _usual_error(plain: Outcome, reference: Outcome) -> float:
    """Of all gradients together, relative to their size; 0 where it is not finite."""
    keys = [key for key in reference.tensors if key[0] == "gradient" and key in plain.tensors]
    error = size = 0.0
    for key in keys:
        exact = _wide(reference.tensors[key])
        error += float((_wide(plain.tensors[key]) - exact).square().sum())
        size += float(exact.square().sum())
    return sqrt(error / size) if isfinite(error) and isfinite(size) and size else 0.0


def _excess(key: Key, plain: Tensor, planned: Tensor, reference: Tensor, usual: float) -> list[Difference]:
    exact = _wide(reference)
    ours, theirs = (_root_mean_square(_wide(x) - exact) for x in (planned, plain))
    rounding = max(usual, ROUNDING * torch.finfo(plain.dtype).eps) * _root_mean_square(exact)
    if ours <= SLACK * theirs + rounding:
        return []
    words = f"its error against float64 is {ours:.1e}, plain's {theirs:.1e}"
    return [replace(found, words=words) for found in difference_of(key, plain, planned)]


def _wide(tensor: Tensor) -> Tensor:
    return dense(tensor).cpu().double()


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"


@contextmanager
def deterministic_kernels() -> Iterator[None]:
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


def nondeterministic_operator(error: RuntimeError) -> str | None:
    """The operator without a deterministic kernel that raised ``error``, if one did."""
    name, words, _ = str(error).partition(" does not have a deterministic implementation")
    if words:
        return name.splitlines()[-1]
    is_cublas = "not deterministic because it uses CuBLAS" in str(error)
    return "cuBLAS without CUBLAS_WORKSPACE_CONFIG=:4096:8" if is_cublas else None


def only_warn() -> None:
    """Of operators without a deterministic kernel: rule 2."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def use_deterministic_kernels(model: nn.Module, trial: Callable[[], Any]) -> str | None:
    """From now on torch raises at an operator without a deterministic kernel, unless ``trial()`` meets one.

    Args:
        model: run forward and backward by ``trial``, as wrapped for training. Its state is preserved.

    Returns:
        That operator; torch then warns of it and of all others. ``None`` where every operator has a kernel.
    """
    torch.use_deterministic_algorithms(True)
    try:
        with preserve_state(without_wrapper(model), everything=True), reducer_of_its_own(model):
            trial()
        return None
    except RuntimeError as error:
        operator = nondeterministic_operator(error)
        if operator is None:
            raise
        only_warn()
        return operator
