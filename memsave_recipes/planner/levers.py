"""Levers: which flags free memory, and how much of it, computed from a run's own tensors.

NOTE [ predicted savings ]

1. Nothing is looked up or guessed: what cannot be computed from this run has no figure.
2. A figure is what becomes smaller *at the peak as it was*. With that gone the peak may lie elsewhere in the step, so
   less can come free, and figures of several levers do not simply add up.
3. Gradients and optimizer state count as they will be in every step, also where the run ended before they were made.
4. Activations shrink with the micro-batch; temporaries are left out, since some depend on the weights alone. Where a
   run ended inside its first forward, only what had been made until then is known: the figures are a lower bound.
5. ``full`` recomputation: from what the first forward saved in each block and outside (``ForwardMeter``).

A budget that nothing fits in: the smallest that works, what takes it, and what would bring it under; in one line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.errors import InputError
from memsave_recipes.models.adapters import adapters_on_meta
from memsave_recipes.planner.search import Candidate
from memsave_recipes.text import format_bytes, gib_that_suffice, to_gib
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.optimizers import state_bytes

SAME = "the same"


@dataclass(frozen=True, kw_only=True)
class Lever:
    """Something to type that frees memory.

    Args:
        flags: of the recipe, or of ``accelerate launch`` where it says so.
        freed_bytes: see NOTE [ predicted savings ]; ``None`` where that cannot be computed.
        curve: what becomes of the loss curve.
    """

    flags: str
    freed_bytes: int | None
    curve: str = SAME


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A run that has no memory left.

    Args:
        flags: all flags of the recipe with their values; a lever is only offered where its flag is among them.
        activations_bytes: at the peak, as far as they are known.
        freed_by_recomputation_bytes: ``ForwardMeter``'s.
    """

    flags: dict[str, Any]
    layout: BatchLayout
    model: nn.Module
    mixed_precision: str
    activations_bytes: int | None
    freed_by_recomputation_bytes: int | None

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that have gradients and optimizer state."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def largest_gradient_bytes(self) -> int:
        """Of one parameter."""
        return max((parameter.nbytes for parameter in self.trained), default=0)

    @property
    def gradients_bytes(self) -> int:
        """Those that are there together."""
        if self.flags.get("optimizer_in_backward"):
            return self.largest_gradient_bytes
        return sum(parameter.nbytes for parameter in self.trained)

    def state_bytes(self, parameters: list[Tensor]) -> int:
        """What the optimizer keeps for ``parameters`` from its first step on."""
        return state_bytes(self.flags.get("optimizer", ""), parameters, momentum=self.flags.get("momentum", 0))


def find_levers(situation: Situation) -> list[Lever]:
    """What would help, those that change no loss curve first, then by what they free."""
    makers = (
        _smaller_micro_batches,
        _recomputation,
        _chunked_loss,
        _optimizer_in_backward,
        _smaller_optimizers,
        _adapters,
        _half_precision,
    )
    found = [lever for make in makers for lever in make(situation) if lever.freed_bytes != 0]
    return sorted(found, key=lambda lever: (lever.curve != SAME, -(lever.freed_bytes or 0)))


def _smaller_micro_batches(situation: Situation) -> Iterator[Lever]:
    size = situation.layout.micro_batch_size
    if situation.flags.get("optimizer_in_backward"):
        return  # it cannot accumulate
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in situation.model.modules())
    activations = situation.activations_bytes
    for smaller in (size // 2, size // 4):
        if smaller:
            yield Lever(
                flags=f"--micro_batch_size {smaller}",
                freed_bytes=None if activations is None else activations * (size - smaller) // size,
                curve="BatchNorm sees fewer samples" if has_batchnorm else SAME,
            )


def _recomputation(situation: Situation) -> Iterator[Lever]:
    if situation.flags.get("activation_checkpointing") == "none":
        yield Lever(flags="--activation_checkpointing full", freed_bytes=situation.freed_by_recomputation_bytes)


def _chunked_loss(situation: Situation) -> Iterator[Lever]:
    """The log-probabilities in float32 and their gradient, which are both there when the backward begins."""
    vocabulary = getattr(getattr(_bare(situation.model), "config", None), "vocab_size", None)
    if situation.flags.get("loss") == "full" and vocabulary:
        rows = situation.layout.micro_batch_size * situation.flags["block_size"]
        yield Lever(flags="--loss auto", freed_bytes=2 * rows * vocabulary * torch.float32.itemsize)


def _optimizer_in_backward(situation: Situation) -> Iterator[Lever]:
    layout = situation.layout
    if situation.flags.get("optimizer_in_backward") is False and (
        layout.num_processes == layout.accumulation_steps == 1 and situation.mixed_precision != "fp16"
    ):
        freed = situation.gradients_bytes - situation.largest_gradient_bytes
        yield Lever(flags="--optimizer_in_backward --max_grad_norm 0", freed_bytes=freed, curve="nothing is clipped")


def _smaller_optimizers(situation: Situation) -> Iterator[Lever]:
    if situation.flags.get("optimizer") == "adamw":
        for other in ("adamw_8bit", "adafactor"):
            freed = situation.state_bytes(situation.trained) - state_bytes(other, situation.trained)
            yield Lever(flags=f"--optimizer {other}", freed_bytes=max(0, freed), curve="another optimizer's")


def _adapters(situation: Situation) -> Iterator[Lever]:
    """The frozen weights' gradients and state, less what adapters of all linear layers take in their place."""
    if situation.flags.get("lora") is False:
        adapters = adapters_on_meta(situation.model, situation.flags["lora_rank"])
        taken = 2 * sum(adapter.nbytes for adapter in adapters) + situation.state_bytes(adapters)  # with gradients
        freed = situation.gradients_bytes + situation.state_bytes(situation.trained) - taken
        yield Lever(flags="--lora", freed_bytes=max(0, freed), curve="adapters train, not the weights")


def _half_precision(situation: Situation) -> Iterator[Lever]:
    if situation.flags.get("dtype") != "float32":
        return
    if situation.mixed_precision == "no":
        yield Lever(flags="accelerate launch --mixed_precision bf16", freed_bytes=None, curve="rounded activations")
    parameters = sum(parameter.nbytes for parameter in situation.model.parameters())
    freed = (parameters + situation.gradients_bytes + situation.state_bytes(situation.trained)) // 2
    yield Lever(flags="--dtype bfloat16", freed_bytes=freed, curve="rounded weights")


def _bare(model: nn.Module) -> nn.Module:
    """The model inside its wrappers: the outermost module with a configuration."""
    return next((module for module in model.modules() if hasattr(module, "config")), model)


SHARDS = (2, 4, 8, 16, 32, 64)
LORA_RANK = 16  # the recipes' default


@dataclass(frozen=True)
class Reduction:
    """A way to need less, and the bytes that are needed with it."""

    words: str
    needed_bytes: int


def refusal(smallest: Candidate, model: nn.Module, optim: OptimizerArguments, *, takes_adapters: bool) -> InputError:
    """What to tell somebody whose budget is too small.

    Args:
        smallest: the candidate that needs least.
        model: that it trains.
        takes_adapters: whether ``--lora`` is a flag of the recipe, and off.
    """
    if not smallest.fits_host:
        return too_much_for_the_host(smallest)
    largest, num_bytes = max(smallest.parts.items(), key=lambda part: part[1])
    found = sorted(levers(smallest, model, optim, takes_adapters=takes_adapters), key=lambda lever: lever.needed_bytes)
    helpful = [lever for lever in found if lever.needed_bytes < smallest.needed_bytes]
    divides = "" if smallest.layout.micro_batch_size == 1 else "; a smaller --micro_batch_size, or auto, needs less"
    listed = ", ".join(f"{lever.words} {gib_that_suffice(lever.needed_bytes)}" for lever in helpful)
    return InputError(
        f"--memory_budget_gib {to_gib(smallest.budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest.needed_bytes)} (--micro_batch_size {smallest.layout.micro_batch_size}, plan "
        f"{smallest.strategy}), of which {largest} take {to_gib(num_bytes):.4g}"
        + divides
        + (f"; less is needed with {listed} GiB" if listed else "")
    )


def too_much_for_the_host(candidate: Candidate) -> InputError:
    """What to tell somebody whose host has no memory for what is offloaded."""
    there = format_bytes(candidate.host_budget_bytes or 0)
    return InputError(
        f"--activation_checkpointing {candidate.strategy}: a rank would move {format_bytes(candidate.host_bytes)} to "
        f"its host, which has {there} available for it: take full, or a smaller --micro_batch_size"
    )


def levers(
    candidate: Candidate, model: nn.Module, optim: OptimizerArguments, *, takes_adapters: bool
) -> Iterator[Reduction]:
    """What changes more than the plan: fewer weights that train, an optimizer with a smaller state, more devices."""
    trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if takes_adapters:
        adapters = adapters_on_meta(model, LORA_RANK)
        added = sum(adapter.nbytes for adapter in adapters)
        yield Reduction(
            "--lora",
            _needed_bytes(
                candidate,
                weights_bytes=candidate.weights_bytes + added,
                gradients=added / sum(parameter.nbytes for parameter in trained),
                state_bytes=state_bytes(optim.optimizer, adapters, momentum=optim.momentum),
            ),
        )
    if optim.optimizer == "adamw":
        yield Reduction(
            "--optimizer adamw_8bit", _needed_bytes(candidate, state_bytes=state_bytes("adamw_8bit", trained))
        )
    yield from _sharding(candidate)


def _sharding(candidate: Candidate) -> Iterator[Reduction]:
    """Weights, gradients and state over as few devices as suffice; two blocks at a time are gathered whole.

    FSDP: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.
    """
    largest_block = max(block.gradient_bytes for block in candidate.forecast.chain.blocks)
    for count in SHARDS:
        lever = Reduction(
            f"sharding over {count} devices",
            _needed_bytes(
                candidate,
                weights_bytes=candidate.weights_bytes // count + 2 * largest_block,
                gradients=1 / count,
                state_bytes=candidate.static.state_bytes // count,
            ),
        )
        if lever.needed_bytes <= candidate.budget_bytes:
            yield lever
            return


def _needed_bytes(
    candidate: Candidate, *, weights_bytes: int | None = None, gradients: float = 1.0, state_bytes: int
) -> int:
    """What the same plan needs with other weights and state, and a share of the gradients."""
    chain, static = candidate.forecast.chain, candidate.static
    weights_bytes = candidate.weights_bytes if weights_bytes is None else weights_bytes
    buckets_bytes = int(gradients * static.buckets_bytes)
    before = candidate.weights_bytes + static.state_bytes + static.buckets_bytes
    changed = replace(
        chain,
        blocks=tuple(replace(block, gradient_bytes=int(gradients * block.gradient_bytes)) for block in chain.blocks),
        resident_bytes=chain.resident_bytes - before + weights_bytes + state_bytes + buckets_bytes,
    )
    return replace(
        candidate,
        weights_bytes=weights_bytes,
        static=replace(static, state_bytes=state_bytes, buckets_bytes=buckets_bytes),
        forecast=replace(candidate.forecast, chain=changed),
    ).needed_bytes
