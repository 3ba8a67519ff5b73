"""A real training step of a recipe's model, without its data and its loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState
from harness import ROOT
from models import RECIPES
from torch import Tensor, nn

from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.training.launch.start import Accelerator
from memsave_recipes.training.optimizers import clip_gradients, make_optimizer


def task_of(name: str, *flags: str) -> Task:
    """The recipe with the flags of a model, and others."""
    recipe = RECIPES[name]
    return read_task(ROOT / "recipes" / f"{recipe.name}.py", [*recipe.flags.split(), *flags])


@dataclass(frozen=True)
class Real:
    """A recipe's model and optimizer on this device, with weights that are not trained.

    ``trained`` is what a forward goes through, ``model`` has the blocks.
    """

    task: Task
    accelerator: Accelerator
    model: nn.Module
    trained: nn.Module
    optimizer: Any

    def batch(self, size: int) -> Batch:
        """A micro-batch of valid values."""
        blank = self.task.micro_batch(size)
        return {
            name: values_for(name, part, self.accelerator.device) if isinstance(part, Tensor) else part
            for name, part in blank.items()
        }

    def step(self, global_batch_size: int, micro_batch_size: int) -> None:
        """Forwards and backwards of a global batch, clipping and the update."""
        for first in range(0, global_batch_size, micro_batch_size):
            batch = self.batch(min(micro_batch_size, global_batch_size - first))
            self.accelerator.backward(self.task.loss_of(self.trained, batch) / global_batch_size)
        clip_gradients(self.task.optim, self.accelerator, self.trained)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self, step: Callable[[], None]) -> int:
        """All that torch's allocator holds at the highest moment of ``step``."""
        device = self.accelerator.device
        if device.type == "cpu":
            with break_down_peak(self.model, self.optimizer.optimizer, device) as peak:
                step()
            assert peak.breakdown is not None
            return peak.breakdown.total_bytes
        torch.accelerator.reset_peak_memory_stats()
        step()
        return torch.accelerator.max_memory_allocated()


def build(task: Task, precision: str = "no") -> Real:
    """What the recipe builds before its loop."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision)
    torch.manual_seed(0)
    model = task.planned_model().to(accelerator.device).train()
    optimizer = make_optimizer(task.optim, model)
    trained, optimizer = accelerator.prepare(task.trained(model, task.losses[0], accelerator.device), optimizer)
    return Real(task, accelerator, model, trained, optimizer)


def values_for(name: str, like: Tensor, device: torch.device) -> Tensor:
    """Valid values: packed rows of two documents, texts of which the last token is padding."""
    if name == "attention_mask":
        mask = torch.ones(like.shape, dtype=like.dtype, device=device)
        mask[:, -1] = 0
        return mask
    if name == "position_ids":
        return (torch.arange(like.shape[1], device=device) % (like.shape[1] // 2)).repeat(like.shape[0], 1)
    return torch.zeros(like.shape, dtype=like.dtype, device=device)
