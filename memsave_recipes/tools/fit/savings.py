"""Which flags free memory, and how much: the advice of the out-of-memory page and of a budget that is too small.

Every figure is computed from the tensors of this run: how much less is in use at the peak. The peak may then be at
another point of the step, so less can come free, and savings do not add up. A budget's advice simulates the step again
instead (``needed_with``). Where a run ended inside its first forward, the figures of activations are a lower bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from memsave_recipes.core.activations.micro_batches import joined_batchnorm
from memsave_recipes.core.activations.offload import HOST_MEMORY
from memsave_recipes.core.activations.streaming import streamable_bytes, streamed_parameters
from memsave_recipes.core.errors import BUDGET_FLAG, InputError
from memsave_recipes.core.planner.budget import InShards, StaticMemory, shards_of, static_memory_of
from memsave_recipes.core.planner.search import Candidate, HostUse
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.sharding.units import sharded_units
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.memory import parameters_by_optimizer, state_bytes
from memsave_recipes.core.step.settings import PER_MICRO_BATCH, OptimizerSettings, why_not_in_backward
from memsave_recipes.core.step.update_rules import hidden_matrices
from memsave_recipes.core.text import gib_that_suffice, to_gib
from memsave_recipes.models.adapters import LoraArguments, added_by_lora

SAME_CURVE = "the same"
DEVICES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Something to type that frees memory.

    Args:
        weights_bytes, gradients_bytes, state_bytes: that it frees; below 0 where it adds some.
        activations_bytes: likewise, with the temporaries of the loss; ``None`` where that cannot be computed.
        curve: its effect on the loss curve.
    """

    flags: str
    weights_bytes: int = 0
    gradients_bytes: int = 0
    state_bytes: int = 0
    activations_bytes: int | None = 0
    curve: str = SAME_CURVE

    @property
    def freed_bytes(self) -> int | None:
        """The bytes that it frees, all together."""
        if self.activations_bytes is None:
            return None
        return max(0, self.weights_bytes + self.gradients_bytes + self.state_bytes + self.activations_bytes)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The run that needs too much memory.

    Args:
        flags: of the recipe with their values; a saving is only offered where its flag is among them.
        activations_bytes: at the peak, as far as they are known.
        freed_by_recomputation_bytes: ``ForwardMeter``'s.
    """

    flags: dict[str, Any]
    layout: BatchLayout
    model: nn.Module
    mixed_precision: str = "no"
    activations_bytes: int | None = None
    freed_by_recomputation_bytes: int | None = None
    device_type: str = "cpu"

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that have gradients and optimizer state."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gradients_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Return the bytes of gradients of ``parameters`` that exist at the same time."""
        sizes = [parameter.nbytes for parameter in parameters]
        return max(sizes, default=0) if self.flags.get("optimizer_in_backward") else sum(sizes)

    def state_bytes(self, optimizer: str) -> int:
        """Return the bytes of the state of an optimizer of this model from its first step on."""
        shares = parameters_by_optimizer(optimizer, self.model)
        return sum(self.state_bytes_of(name, share) for name, share in shares.items())

    def state_bytes_of(self, optimizer: str, parameters: Iterable[Tensor]) -> int:
        """Return the bytes of the state of ``parameters``, all of which the optimizer steps."""
        waits = self.flags.get("offload_optimizer", NONE) != NONE and self.device_type != "cpu"
        return self._state_bytes(optimizer, parameters, waits=waits)

    def waiting_bytes(self) -> int:
        """Return the bytes of the optimizer's state that could wait on the host."""
        shares = parameters_by_optimizer(self.optimizer, self.model)
        return sum(
            self._state_bytes(name, share, waits=False) - self._state_bytes(name, share, waits=True)
            for name, share in shares.items()
        )

    def _state_bytes(self, optimizer: str, parameters: Iterable[Tensor], *, waits: bool) -> int:
        momentum, on_cpu = self.flags.get("momentum", 0), self.device_type == "cpu"
        return state_bytes(optimizer, parameters, momentum=momentum, on_cpu=on_cpu, waits=waits)

    @property
    def optimizer(self) -> str:
        """The optimizer that the flags name; empty where they have no such flag."""
        name: str = self.flags.get("optimizer", "")
        return name


Rule = Callable[[Setup], Iterator[Saving]]


def savings_of(setup: Setup, rules: Sequence[Rule] | None = None) -> list[Saving]:
    """List the savings, those that change no loss curve first, then by what they free."""
    found = [saving for rule in rules or ALL_RULES for saving in rule(setup) if saving.freed_bytes != 0]
    return sorted(found, key=lambda saving: (saving.curve != SAME_CURVE, -(saving.freed_bytes or 0)))


def _smaller_micro_batches(setup: Setup) -> Iterator[Saving]:
    """Offer halves and quarters; the optimizer in the backward cannot accumulate, nor can BatchNorm that joins."""
    size, activations = setup.layout.micro_batch_size, setup.activations_bytes
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in setup.model.modules())
    if setup.flags.get("optimizer_in_backward") or joined_batchnorm(setup.model) is not None:
        return
    for smaller in (size // 2, size // 4):
        if smaller:
            yield Saving(
                flags=f"--micro_batch_size {smaller}",
                activations_bytes=None if activations is None else activations * (size - smaller) // size,
                curve="BatchNorm sees fewer samples" if has_batchnorm else SAME_CURVE,
            )


def _recomputation(setup: Setup) -> Iterator[Saving]:
    """Recompute every block."""
    if setup.flags.get("activation_checkpointing") == "none":
        freed = setup.freed_by_recomputation_bytes
        yield Saving(flags="--activation_checkpointing full", activations_bytes=freed)


def _chunked_loss(setup: Setup) -> Iterator[Saving]:
    """Free the log-probabilities in float32 and their gradient, both of which exist when the backward begins."""
    configs = (module.config for module in setup.model.modules() if hasattr(module, "config"))  # inside wrappers
    vocabulary = getattr(next(configs, None), "vocab_size", None)
    if setup.flags.get("loss") == "full" and vocabulary:
        rows = setup.layout.micro_batch_size * setup.flags["block_size"]
        yield Saving(flags="--loss auto", activations_bytes=2 * rows * vocabulary * torch.float32.itemsize)


def _optimizer_in_backward(setup: Setup) -> Iterator[Saving]:
    """Free all gradients but the largest one."""
    refusal = why_not_in_backward(setup.layout, setup.mixed_precision, clips=False)
    leave = setup.flags.get("offload_optimizer") == "step"  # anyway
    if setup.flags.get("optimizer_in_backward") is False and refusal is None and not leave:
        trained = setup.trained
        yield Saving(
            flags="--optimizer_in_backward --max_grad_norm 0",
            gradients_bytes=setup.gradients_bytes(trained) - max((p.nbytes for p in trained), default=0),
            curve="nothing is clipped",
        )


def _state_on_host(setup: Setup) -> Iterator[Saving]:
    """Keep optimizer state on the host, of which two pieces visit the device, when activations are gone."""
    if setup.flags.get("offload_optimizer") == NONE and setup.device_type not in HOST_MEMORY:
        yield Saving(flags="--offload_optimizer state", state_bytes=setup.waiting_bytes())


def _smaller_optimizers(setup: Setup) -> Iterator[Saving]:
    """Take an optimizer with less state than AdamW."""
    if setup.optimizer == "adamw":
        muon = ("muon",) if hidden_matrices(setup.model) else ()
        for other in ("adamw_8bit", "adafactor", *muon):
            freed = setup.state_bytes("adamw") - setup.state_bytes(other)
            yield Saving(flags=f"--optimizer {other}", state_bytes=freed, curve="another optimizer's")


def _adapters(setup: Setup) -> Iterator[Saving]:
    """Free gradients and state of frozen weights, and add adapters with theirs; our classifiers take none."""
    is_classifier = "freeze_backbone" in setup.flags
    takes_adapters = isinstance(setup.model, PreTrainedModel) or not is_classifier
    if takes_adapters and setup.flags.get("lora") is False and not setup.flags.get("freeze_backbone"):
        added = added_by_lora(setup.model, setup.flags["lora_rank"], is_classifier=is_classifier)
        yield Saving(
            flags="--lora",
            weights_bytes=-sum(adapter.nbytes for adapter in added),
            gradients_bytes=setup.gradients_bytes(setup.trained) - setup.gradients_bytes(added),
            state_bytes=setup.state_bytes(setup.optimizer) - setup.state_bytes_of(setup.optimizer, added),
            curve="adapters train, not the weights",
        )


def _streamed_weights(setup: Setup) -> Iterator[Saving]:
    """Free frozen weights of layers, but of the two that are on the device at a time."""
    is_off = setup.flags.get("stream_weights") == "none" and not setup.flags.get("load_in_4bit")
    if is_off and setup.device_type not in HOST_MEMORY:
        of_layers = sorted(streamable_bytes(setup.model))
        yield Saving(flags="--stream_weights host", weights_bytes=sum(of_layers[:-2]))


def _half_precision(setup: Setup) -> Iterator[Saving]:
    """Offer autocast, or everything in 16 bits."""
    if setup.flags.get("dtype") != "float32":
        return
    if setup.mixed_precision == "no":
        curve = "rounded activations"
        yield Saving(flags="accelerate launch --mixed_precision bf16", activations_bytes=None, curve=curve)
    if setup.mixed_precision == "fp16":
        frozen = sum(parameter.nbytes for parameter in setup.model.parameters() if not parameter.requires_grad)
        yield Saving(flags="--dtype float16", weights_bytes=frozen // 2, curve="rounded weights")
        return
    stochastic = " --bf16_stochastic_round" if setup.flags.get("bf16_stochastic_round") is False else ""
    yield Saving(
        flags="--dtype bfloat16" + (stochastic if setup.optimizer == "adamw" else ""),
        weights_bytes=sum(parameter.nbytes for parameter in setup.model.parameters()) // 2,
        gradients_bytes=setup.gradients_bytes(setup.trained) // 2,
        state_bytes=setup.state_bytes(setup.optimizer) // 2,
        curve="rounded weights",
    )


ALL_RULES: tuple[Rule, ...] = (
    _smaller_micro_batches,
    _recomputation,
    _chunked_loss,
    _optimizer_in_backward,
    _state_on_host,
    _smaller_optimizers,
    _adapters,
    _streamed_weights,
    _half_precision,
)


def budget_too_small(
    smallest: Candidate,
    model: nn.Module,
    task: Task,
    *,
    mixed_precision: str = "no",
    device_type: str = "cpu",
) -> InputError:
    """Return the error for a budget that nothing fits in: the smallest that works, its uses, and what needs less.

    Args:
        smallest: the candidate of ``task`` that needs least.
    """
    if not smallest.fits_host:
        return HostUse.of(smallest).too_small
    optim, lora = task.optim, False if task.takes_adapters else None
    setup = Setup(
        flags={"lora_rank": LoraArguments.lora_rank, **vars(optim), "lora": lora},
        layout=smallest.layout,
        model=model,
        mixed_precision=mixed_precision,
        device_type=device_type,
    )
    largest, num_bytes = max(smallest.parts.items(), key=lambda part: part[1])
    is_divisible = any(_smaller_micro_batches(setup))
    in_shards = smallest.forecast.in_shards is not None
    savings = [] if in_shards else beyond_the_plan(smallest, setup)  # of whole weights
    needed = {saving.flags: needed_with(saving, smallest, setup) for saving in savings}
    if optim.offload_optimizer == NONE and not in_shards and device_type not in HOST_MEMORY:
        needed["--offload_optimizer state"] = _with_state_on_host(smallest, model, optim, device_type).needed_bytes
    if optim.goes_in_shards and not in_shards and mixed_precision != "fp16":
        needed |= needed_in_shards(smallest, model, optim, device_type)
    helpful = sorted((size, flags) for flags, size in needed.items() if size < smallest.needed_bytes)
    listed = ", ".join(f"{flags} {gib_that_suffice(size)}" for size, flags in helpful)
    return InputError(
        f"{BUDGET_FLAG} {to_gib(smallest.budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest.needed_bytes)} (--micro_batch_size {smallest.layout.micro_batch_size}, plan "
        f"{smallest.strategy}), {to_gib(num_bytes):.4g} of it for the {largest}"
        + ("; a smaller --micro_batch_size, or auto, needs less" if is_divisible else "")
        + ("; shards over more ranks need less" if in_shards else "")
        + (f"; --reduce_gradients {PER_MICRO_BATCH} needs less" if smallest.reduces_once else "")
        + (f"; less is needed with {listed} GiB" if listed else "")
    )


def beyond_the_plan(candidate: Candidate, setup: Setup) -> list[Saving]:
    """List the savings that leave the activations as they are: fewer gradients, state and trained weights."""
    return savings_of(setup, (_optimizer_in_backward, _smaller_optimizers, _adapters, _streamed_weights))


def needed_in_shards(
    candidate: Candidate, model: nn.Module, optim: OptimizerSettings, device_type: str = "cpu"
) -> dict[str, int]:
    """Return the bytes that a rank needs under ``full`` with ``--shard full``, over as few devices as suffice.

    Empty where too many would be, the model cannot be cut up (weights on the host, or in 4 bits), or the chain has no
    gradients.
    """
    joins = candidate.layout.is_bitwise or joined_batchnorm(model) is not None
    whole = streamed_parameters(model) or not all(map(torch.is_floating_point, model.parameters()))
    if joins or whole or not candidate.static.gradients_stay:
        return {}
    for count in DEVICES:
        try:
            one = _in_shards(candidate, model, optim, count, device_type)
        except InputError:
            return {}
        if one.needed_bytes <= candidate.budget_bytes:
            return {f"--activation_checkpointing full --shard full over {count} devices": one.needed_bytes}
    return {}


def _in_shards(
    candidate: Candidate, model: nn.Module, optim: OptimizerSettings, count: int, device_type: str
) -> Candidate:
    chain, layout = candidate.forecast.chain, candidate.layout
    plan = plan_for("full", [chain.decided_names])
    layout = BatchLayout.of(layout.global_batch_size, layout.micro_batch_size, count)
    static = static_memory_of(optim, model, layout, num_shards=count, device_type=device_type)
    static = replace(static, losses_bytes=candidate.static.losses_bytes)
    ends = chain.blocks[0].name, chain.blocks[-1].name
    units = sharded_units(model, plan, count, "full", on_cpu=device_type == "cpu", ends=ends)
    shards = shards_of(units, optim, layout, num_ranks=count, device_type=device_type)
    in_shards = InShards(of_plan=lambda plan: shards, bytes_per_s=inf)
    changed = _with_static(candidate, static)
    forecast = replace(changed.forecast, plan=plan, in_shards=in_shards)
    return replace(changed, layout=layout, forecast=forecast)


def _with_state_on_host(
    candidate: Candidate, model: nn.Module, optim: OptimizerSettings, device_type: str
) -> Candidate:
    """Return the candidate with the same plan, and with optimizer state on the host."""
    on_host = replace(optim, offload_optimizer="state")
    static = static_memory_of(on_host, model, candidate.layout, device_type=device_type)
    return _with_static(candidate, replace(static, losses_bytes=candidate.static.losses_bytes))


def _with_static(candidate: Candidate, static: StaticMemory) -> Candidate:
    chain, before = candidate.forecast.chain, candidate.static
    without = replace(
        chain,
        resident_bytes=chain.resident_bytes - before.added_bytes,
        host_bytes=chain.host_bytes - before.host_bytes,
        gradients_resident=False,
    )
    forecast = replace(candidate.forecast, chain=static.added_to(without))
    return replace(candidate, static=static, forecast=forecast)


def needed_with(saving: Saving, candidate: Candidate, setup: Setup) -> int:
    """Return the bytes that the candidate's plan needs with a saving of weights, gradients and optimizer state."""
    chain, static = candidate.forecast.chain, candidate.static
    before = setup.gradients_bytes(setup.trained)
    share = (before - saving.gradients_bytes) / before if before else 1.0  # of each block's gradients and DDP's buckets
    buckets_bytes = int(share * static.buckets_bytes)
    freed_bytes = saving.weights_bytes + saving.state_bytes + static.buckets_bytes - buckets_bytes
    changed = replace(
        chain,
        blocks=tuple(replace(block, gradient_bytes=int(share * block.gradient_bytes)) for block in chain.blocks),
        resident_bytes=chain.resident_bytes - freed_bytes,
    )
    return replace(
        candidate,
        weights_bytes=candidate.weights_bytes - saving.weights_bytes,
        static=replace(static, state_bytes=static.state_bytes - saving.state_bytes, buckets_bytes=buckets_bytes),
        forecast=replace(candidate.forecast, chain=changed),
    ).needed_bytes
