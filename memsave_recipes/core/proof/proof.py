"""Run one global batch as baseline and under the plan from one state, compare the two, and put everything back.

The baseline is the model without checkpointing. Verdicts and tables call it *plain*.

Notes: ``docs/design/proof.md``.
"""

import copy
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import PlanHandle, apply_plan
from memsave_recipes.core.activations.blocks import Block, Layer
from memsave_recipes.core.activations.recompute import batchnorm_layers
from memsave_recipes.core.costs.memory import empty_cache, is_out_of_memory
from memsave_recipes.core.costs.preserve_state import (
    SavedState,
    device_of,
    hooked,
    preserve_state,
    read_rng,
)
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, plan_for
from memsave_recipes.core.proof.outcomes import (
    Difference,
    Key,
    Outcome,
    Verdict,
    agree,
    compare_runs,
    dense,
    difference_of,
    keys_of,
    out_of_step,
    reducer_of_its_own,
    shared_after,
    shared_at_the_start,
    swap_contents,
    verdict_of,
    without_wrapper,
)
from memsave_recipes.core.sharding.tensors import local


@contextmanager
def count_block_runs(blocks: Iterable[Block | Layer]) -> Iterator[Counter[str]]:
    """Count how often the innermost modules of each block are called, in the forward and in recomputations."""
    runs: Counter[str] = Counter()

    def count(name: str, *_: object) -> None:
        runs[name] += 1

    leaves = _leaves_of(blocks).items()
    with hooked(leaf.register_forward_pre_hook(partial(count, name)) for leaf, name in leaves):
        yield runs


def _leaves_of(blocks: Iterable[Block | Layer]) -> dict[nn.Module, str]:
    """Return the block of every module without children; a module that several blocks share belongs to none."""
    owners: dict[nn.Module, set[str]] = {}
    for block in blocks:
        for leaf in (module for part in block.modules for module in part.modules() if not any(module.children())):
            owners.setdefault(leaf, set()).add(block.name)
    return {leaf: names.pop() for leaf, names in owners.items() if len(names) == 1}


SLACK = 2.0
ROUNDING = 4.0


def compare_by_reference(plain: Outcome, planned: Outcome, reference: Outcome) -> Verdict:
    """Return the verdict by NOTE [ as exact as plain ]; ``reference`` is the baseline in float64."""
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
    """Return the error of all gradients together, relative to their size; 0 where it is not finite."""
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
def only_deterministic_kernels() -> Iterator[None]:
    """Let all operators take their deterministic kernels; torch raises at one that has none."""
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
    """Return the operator without a deterministic kernel that raised ``error``, if one did."""
    name, words, _ = str(error).partition(" does not have a deterministic implementation")
    if words:
        return name.splitlines()[-1]
    is_cublas = "not deterministic because it uses CuBLAS" in str(error)
    return "cuBLAS without CUBLAS_WORKSPACE_CONFIG=:4096:8" if is_cublas else None


def use_deterministic_kernels(model: nn.Module, trial: Callable[[], Any]) -> str | None:
    """Let torch raise from now on at an operator without a deterministic kernel, unless ``trial()`` meets one.

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
        torch.use_deterministic_algorithms(True, warn_only=True)
        return operator


Step = Callable[[], Tensor]
"""Forward and backward of one global batch, always the same one; returns its loss."""


def verify(model: nn.Module, plan: Plan | PlanHandle, step: Step) -> Verdict:
    """Return whether ``step`` has the same results with and without the plan; one verdict for all ranks.

    Args:
        model: run by ``step``, as wrapped for training; one that is in evaluation mode trains meanwhile.
        plan: one to apply meanwhile, or the handle of the one that is applied already.
        step: called two or three times.

    Raises:
        InputError: ``model`` cannot follow the plan.
        torch.OutOfMemoryError: a run found no memory, most likely the baseline.
    """
    if isinstance(plan, Plan):
        with apply_plan(without_wrapper(model), plan) as handle:
            return verify(model, handle, step)
    if plan.plan.blocks_under(Action.KEEP) == plan.plan.blocks and not plan.plan.compiled:
        return Verdict(status="nothing to verify", note="the plan keeps everything")
    inner = without_wrapper(model)
    try:
        with preserve_state(inner, everything=True) as state:
            return _Proof(model, plan, step, state).check()
    finally:
        empty_cache(device_of(inner))  # the baseline's activations, which training need not hold


def capture(model: nn.Module, loss: Tensor, state: SavedState) -> Outcome:
    """Return the results of a step, without copies; of gradients in shards, those of this rank."""
    inner = without_wrapper(model)
    tensors: dict[Key, Tensor] = {("loss", ""): loss.detach()}
    tensors |= {("gradient", name): local(p.grad) for name, p in inner.named_parameters() if p.grad is not None}
    tensors |= {("buffer", name): buffer for name, buffer in inner.named_buffers()}
    tensors |= {("parameter", name): parameter for name, parameter in state.changed_parameters()}
    tensors |= {("RNG", name): rng for name, rng in read_rng(state.device).items()}
    return Outcome(tensors=tensors)


@dataclass(frozen=True)
class _Proof:
    model: nn.Module
    handle: PlanHandle
    step: Step
    state: SavedState
    rounds: bool = False
    nondeterministic: list[str] = field(default_factory=list)

    def check(self) -> Verdict:
        with only_deterministic_kernels() if _has_nondeterministic_kernels(self.state.device) else nullcontext():
            if first := out_of_step(self.model, shared_at_the_start(self.model)):
                return Verdict(status="not synchronised", first=first)
            verdict = self.check_plan()
        notes = [f"{operator} adds in any order" for operator in self.nondeterministic]
        return replace(verdict, note=", ".join([*filter(None, [verdict.note]), *notes]))

    def check_plan(self) -> Verdict:
        """Compare bit for bit where the plan keeps bits, and compiled layers with eager ones: rule 5."""
        plan, within_rounding = self.handle.plan, replace(self, rounds=True).check_within_rounding
        if not plan.is_bitwise or plan.blocks_under(Action.KEEP) == plan.blocks:
            return within_rounding()
        verdict = self.check_bitwise()
        if not plan.compiled or not verdict.passed:
            return verdict
        self.state.restart()
        compiled = within_rounding()
        note = f"{verdict.describe()} with compiled layers that keep everything"
        return replace(compiled, note=", ".join(filter(None, [compiled.note, note])))

    def check_bitwise(self) -> Verdict:
        """Compare bit for bit: rule 1."""
        plan = self.handle.plan
        plain = self.run_baseline().on_host()
        self.state.restart()
        planned = self.run_planned()
        verdict = agree(compare_runs(plain, planned, kept_blocks=plan.blocks_under(Action.KEEP)))
        if verdict.passed and (first := out_of_step(self.model, shared_after(self.model, planned))):
            return replace(verdict, status="not synchronised", first=first)
        if verdict.status != "different" or verdict.first is None or verdict.first.kind == "run":
            return verdict
        self.state.restart()
        again = agree(compare_runs(plain, self.run_baseline()))
        return replace(again, status="not repeatable") if again.status == "different" else verdict

    def check_within_rounding(self) -> Verdict:
        """Compare errors against float64: rule 4."""
        plain = self.run_plain().on_host()
        self.state.restart()
        reference = self.run_plain_in_float64()
        self.state.restart()
        planned = self.run_planned()
        if reference.error is None or planned.error:
            return agree(compare_by_reference(plain, planned, reference))
        verdict = compare_runs(plain, planned)
        note = f"nothing in float64 to compare with: {reference.error}"
        return agree(verdict if verdict.passed else replace(verdict, status="unproven", note=note))

    def run_baseline(self) -> Outcome:
        """Run without the plan; where it compiles all layers, with compiled ones that keep everything."""
        plan, inner = self.handle.plan, without_wrapper(self.model)
        kept = replace(plan, spans=plan_for("none", [plan.blocks]).spans)
        with self.handle.paused(), apply_plan(inner, kept) if plan.compiled else nullcontext():
            return self._run()

    def run_plain(self) -> Outcome:
        """Run the model as it is."""
        with self.handle.paused():
            return self._run()

    def run_planned(self) -> Outcome:
        """Take an error under the plan as a difference, unless it tells the user what to do."""
        try:
            return self._run()
        except Exception as error:
            if isinstance(error, InputError) or is_out_of_memory(error):
                raise
            return Outcome(tensors={}, error=_in_one_line(error))

    def run_plain_in_float64(self) -> Outcome:
        """Run in float64; an error where there is no memory, or an operator does not support it."""
        try:
            with self.handle.paused():
                inner = without_wrapper(self.model)
                twin = copy.deepcopy(inner).double()
                twin.register_forward_pre_hook(_inputs_to_float64, with_kwargs=True)
                with swap_contents(inner, dict(vars(twin))):
                    return self._run_once().on_host()
        except Exception as error:
            return Outcome(tensors={}, error=_in_one_line(error))

    def _run(self) -> Outcome:
        """Begin again where a nondeterministic operator raised."""
        try:
            return self._run_once()
        except RuntimeError as error:
            operator = nondeterministic_operator(error)
            if operator is None:
                raise
        self.nondeterministic.append(operator)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.state.restart()
        return self._run_once()

    def _run_once(self) -> Outcome:
        if self.rounds:
            _without_dropout(without_wrapper(self.model))
        # A counter inside compiled code would be compiled too.
        counted = () if self.rounds or self.handle.plan.compiles else self.handle.blocks
        with reducer_of_its_own(self.model), count_block_runs(counted) as runs:
            return replace(capture(self.model, self.step(), self.state), block_runs=dict(runs))


def _has_nondeterministic_kernels(device: torch.device) -> bool:
    """Return whether the device has such operators."""
    return device.type != "cpu"


def _without_dropout(model: nn.Module) -> None:
    """Set evaluation mode, but for BatchNorm; ``SavedState`` puts it back."""
    model.eval()
    for layer in batchnorm_layers([model]):
        layer.train()


def _inputs_to_float64(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
