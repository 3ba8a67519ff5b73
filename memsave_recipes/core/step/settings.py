"""What is asked of a step, as values: its global batch, its plan and memory, its optimizer.

The flags of a recipe are such values (``training/arguments.py``); nothing here reads a command line.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, replace
from typing import Any, ClassVar, Final, Literal, Self

import torch
from torch import nn

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.activations.streaming import ALL, FROZEN
from memsave_recipes.core.plans import BUDGET_WORDS, Plan
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import GIB, to_gib

AUTO = "auto"
REGIONS: Final = "regions"
"""The other value of ``--compile``: each layer that repeats."""


class StepSettings:
    """How a global batch is to be computed; a dataclass that has these fields inherits the rest.

    Args:
        global_batch_size: samples of one optimizer step.
        micro_batch_size: samples of one forward on a rank; ``auto``: to be found; ``None``: a rank's whole share.
        shard: ``none``, ``full``, or how many ranks share the weights.
        activation_checkpointing: the strategy.
        compile: ``regions``, ``none``, or ``auto``: on CUDA.
        memory_budget_gib: of device memory for a step.
        logging_steps: after which the losses are read; until then they stay on the device.
        sequence_parallel: how many ranks share each row.
        reduces_once: in shards, gradients once a step, or of every micro-batch; ``None``: a search finds it, and
            without one they are of every micro-batch.
    """

    global_batch_size: int
    micro_batch_size: int | str | None
    shard: str | None
    activation_checkpointing: str | None
    memory_budget_gib: float | None
    logging_steps: int
    sequence_parallel: int = 1
    compile: str = NONE
    reduces_once: bool | None = None
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def named_micro_batch(self) -> int | None:
        """``micro_batch_size``, where it is a number."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None

    @property
    def keeps_micro_batch(self) -> bool:
        """Whether no search may take another micro-batch than the one that is named."""
        return False

    @property
    def budget_strategy(self) -> str:
        """The strategy that leaves the plan to a search for a budget."""
        return "budget"

    def layout(self, num_processes: int) -> BatchLayout:
        """How a global batch is computed; undivided with ``auto``, until a size is found.

        Raises:
            InputError: as ``BatchLayout``.
        """
        return BatchLayout.of(self.global_batch_size, self.named_micro_batch, num_processes, self.sequence_parallel)

    def micro_batch_of_blocks(self, layout: BatchLayout) -> int | None:
        """Return the samples that a block takes at once, where blocks run in micro-batches by themselves."""
        return None

    def convert(self, model: nn.Module) -> None:
        """Change the layers of ``model`` that are to compute otherwise: none."""

    @property
    def in_shards(self) -> bool:
        """Whether a rank holds a part of the weights."""
        return self.shard not in (None, NONE)

    @property
    def reductions(self) -> tuple[bool, ...]:
        """Whether gradients in shards are reduced once a step: both ways to compare, or the one to take."""
        both = self.in_shards and self.searches and self.reduces_once is None
        return (False, True) if both else (bool(self.reduces_once),)

    @property
    def solves(self) -> bool:
        """Whether a plan is to be found for a budget."""
        return self.activation_checkpointing in BUDGET_WORDS

    def named_plan(
        self, model: nn.Module, running_blocks: Callable[[], Mapping[str, bool] | None] = lambda: None
    ) -> Plan:
        """Return the plan that the strategy names for ``model``, not compiled by ``compile``.

        Args:
            running_blocks: finds those for ``plan_blocks``, where the strategy depends on them.

        Raises:
            InputError: as ``plan_blocks``.
        """
        strategy = self.activation_checkpointing or "none"
        return plan_blocks(model, strategy, None if strategy == "none" else running_blocks())

    @property
    def pays_to_compile(self) -> bool:
        """Whether there are steps enough for it, under ``auto``, as far as the settings say."""
        return True

    def compiles_on(self, device: torch.device) -> bool:
        """Return whether layers compute compiled on such a device."""
        return self.compile == REGIONS or (self.compile == AUTO and device.type == "cuda" and self.pays_to_compile)

    def may_compile_on(self, device: torch.device) -> bool:
        """Return whether layers compute compiled there, or may by a plan."""
        strategy = self.activation_checkpointing or ""
        return self.compiles_on(device) or strategy == "budget" or strategy.startswith("compiled")

    @property
    def searches(self) -> bool:
        """Whether a micro-batch or a plan is to be found for a budget."""
        return self.micro_batch_size == AUTO or self.solves

    @property
    def budget_bytes(self) -> int | None:
        """``memory_budget_gib`` in bytes."""
        return None if self.memory_budget_gib is None else int(self.memory_budget_gib * GIB)

    def with_micro_batch(self, size: int | str | None, budget_bytes: int, **changes: Any) -> Self:
        """Return the same with another micro-batch and ``changes``; with a budget where a plan is still to be found."""
        solves = changes.get("activation_checkpointing", self.activation_checkpointing) in BUDGET_WORDS
        gib = to_gib(budget_bytes) if solves else None
        return replace(self, micro_batch_size=size, memory_budget_gib=gib, **changes)


class OptimizerSettings:
    """An optimizer, as far as the memory of a step depends on it.

    Args:
        optimizer: ``adamw``, ``adamw_bf16``, ``adamw_8bit``, ``muon``, ``adafactor`` or ``sgd``.
        optimizer_in_backward: whether each parameter is stepped as soon as its gradient is there.
        offload_optimizer: ``none``, ``state`` waits on the host (``core/host/state.py``), or ``step``
            (``core/host/step.py``).
        stream_weights: ``none``, or weights of layers wait on the ``host`` (``core/activations/streaming.py``).
        weight_decay: of matrices.
        momentum: of ``sgd``.
        ema_decay: of the average of the weights; ``None``: there is none.
    """

    optimizer: str
    optimizer_in_backward: bool
    weight_decay: float
    momentum: float
    ema_decay: float | None = None
    offload_optimizer: str = NONE
    stream_weights: Literal["none", "host"] = "none"
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def has_masters(self) -> bool:
        """Whether float32 masters of the weights are stepped (``core/host/masters.py``) where the weights are."""
        return False

    @property
    def streamed(self) -> str:
        """The weights of layers that wait on the host: of those that train, where the host steps them."""
        if self.stream_weights == "none":
            return NONE
        return ALL if self.offload_optimizer == "step" else FROZEN

    def steps_on_host(self, device: torch.device) -> bool:
        """Return whether gradients leave such a device for the host, where the optimizer steps."""
        return self.offload_optimizer == "step" and device.type != "cpu"

    def waits_on_host(self, device: torch.device) -> bool:
        """Return whether state leaves such a device for the host until it is stepped."""
        return self.offload_optimizer == "state" and device.type != "cpu"

    @property
    def rounds_at_random(self) -> bool:
        """Whether updates of weights in bfloat16 are rounded up or down at random."""
        return self.optimizer == "adamw_bf16"

    @property
    def goes_in_shards(self) -> bool:
        """Whether the optimizer steps weights in shards. Adafactor's means and its clipping are of whole tensors."""
        return self.optimizer != "adafactor"
