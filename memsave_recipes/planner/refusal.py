"""A budget that nothing fits in: the smallest that works, what takes it, and what would bring it under; in one line."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from memsave_recipes.errors import InputError
from memsave_recipes.models.adapters import adapters_on_meta
from memsave_recipes.planner.search import Candidate
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import state_bytes
from memsave_recipes.units import format_bytes, gib_that_suffice, to_gib

SHARDS = (2, 4, 8, 16, 32, 64)
LORA_RANK = 16  # the recipes' default


@dataclass(frozen=True)
class Lever:
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
    divides = "" if smallest.geometry.micro_batch_size == 1 else "; a smaller --micro_batch_size, or auto, needs less"
    listed = ", ".join(f"{lever.words} {gib_that_suffice(lever.needed_bytes)}" for lever in helpful)
    return InputError(
        f"--memory_budget_gib {to_gib(smallest.budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest.needed_bytes)} (--micro_batch_size {smallest.geometry.micro_batch_size}, plan "
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
) -> Iterator[Lever]:
    """What changes more than the plan: fewer weights that train, an optimizer with a smaller state, more devices."""
    trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if takes_adapters:
        adapters = adapters_on_meta(model, LORA_RANK)
        added = sum(adapter.nbytes for adapter in adapters)
        yield Lever(
            "--lora",
            _needed_bytes(
                candidate,
                weights_bytes=candidate.weights_bytes + added,
                gradients=added / sum(parameter.nbytes for parameter in trained),
                state_bytes=state_bytes(optim.optimizer, adapters, momentum=optim.momentum),
            ),
        )
    if optim.optimizer == "adamw":
        yield Lever("--optimizer adamw_8bit", _needed_bytes(candidate, state_bytes=state_bytes("adamw_8bit", trained)))
    yield from _sharding(candidate)


def _sharding(candidate: Candidate) -> Iterator[Lever]:
    """Weights, gradients and state over as few devices as suffice; two blocks at a time are gathered whole.

    FSDP: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.
    """
    largest_block = max(block.gradient_bytes for block in candidate.forecast.chain.blocks)
    for count in SHARDS:
        lever = Lever(
            f"sharding over {count} devices",
            _needed_bytes(
                candidate,
                weights_bytes=candidate.weights_bytes // count + 2 * largest_block,
                gradients=1 / count,
                state_bytes=candidate.beside.state_bytes // count,
            ),
        )
        if lever.needed_bytes <= candidate.budget_bytes:
            yield lever
            return


def _needed_bytes(
    candidate: Candidate, *, weights_bytes: int | None = None, gradients: float = 1.0, state_bytes: int
) -> int:
    """What the same plan needs with other weights and state, and a share of the gradients."""
    chain, beside = candidate.forecast.chain, candidate.beside
    weights_bytes = candidate.weights_bytes if weights_bytes is None else weights_bytes
    buckets_bytes = int(gradients * beside.buckets_bytes)
    before = candidate.weights_bytes + beside.state_bytes + beside.buckets_bytes
    changed = replace(
        chain,
        blocks=tuple(replace(block, gradient_bytes=int(gradients * block.gradient_bytes)) for block in chain.blocks),
        resident_bytes=chain.resident_bytes - before + weights_bytes + state_bytes + buckets_bytes,
    )
    return replace(
        candidate,
        weights_bytes=weights_bytes,
        beside=replace(beside, state_bytes=state_bytes, buckets_bytes=buckets_bytes),
        forecast=replace(candidate.forecast, chain=changed),
    ).needed_bytes
