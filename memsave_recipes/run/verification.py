"""Prove the plan of a run before its first step: ``--verify``."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.core.activations import PlanHandle
from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs.memory import (
    is_out_of_memory,
)
from memsave_recipes.core.proof import Verdict, use_deterministic_kernels, verify
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.text import first_line
from memsave_recipes.training.batching import GlobalBatches

GO_ON = "or go on with --verify warn"
OBJECTIONS = {
    "different": (
        "the plan changes the training step",
        f"train with --activation_checkpointing none or another plan, {GO_ON}",
    ),
    "not repeatable": (
        "two plain runs of one global batch from one state differ, so nothing can be said of the plan",
        f"keep what the model counts or draws in buffers and torch's generators, {GO_ON}",
    ),
    "not synchronised": (
        "ranks do not have the same",
        f"prepare the model after its last change, and let DDP broadcast its buffers, {GO_ON}",
    ),
    "not finite": (
        "the step is the same with and without the plan, but not finite",
        f"look for it in the data, the weights and --dtype, {GO_ON}",
    ),
    "unproven": ("there is no proof that the plan is as exact as plain", f"take a plan that does not compile, {GO_ON}"),
}


class VerificationFailed(Exception):
    """``--verify`` found that the plan changes the step, or no proof; all ranks know it."""


def verify_plan(
    mode: str,
    accelerator: Accelerator,
    model: nn.Module,
    handle: PlanHandle,
    batches: GlobalBatches,
    loss_of: Callable[[Batch], Tensor],
) -> dict[str, Any]:
    """Carry out ``--verify`` on the run's first global batch and restore all state; it costs two global batches.

    Args:
        mode: ``off``, ``stop`` or ``warn``.
        model: as prepared, with the plan of ``handle`` applied.
        loss_of: the summed loss of a micro-batch, as in training.

    Returns:
        The ``equivalence`` entry of ``results.json`` under that name; nothing with ``off``.

    Raises:
        VerificationFailed: with ``stop``, if there is no proof.
        torch.OutOfMemoryError: there is no memory left for the proof.
    """
    if mode == "off":
        return {}

    def step() -> Tensor:
        batch = next(iter(batches))
        for micro_batch in batch.forwards(model):
            loss = loss_of(micro_batch)
            accelerator.backward(loss, gradient=batch.share_of(loss))
        return torch.as_tensor(batch.loss)

    try:
        with replaced(accelerator, "scaler", None):  # of fp16: its first scales overflow, which would be no result
            verdict = verify(model, handle, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "error: no memory left in --verify, which also runs one global batch without the plan: leave it out, or "
            f"verify once with a smaller --micro_batch_size ({first_line(error)})"
        ) from error
    if verdict.passed:
        accelerator.print(f"--verify: one global batch, without the plan and with it: {verdict.describe()}")
    elif mode == "warn":
        accelerator.print(f"warning: {_objection(verdict, handle)}")
    else:
        raise VerificationFailed(f"error: {_objection(verdict, handle)}")
    return {"equivalence": verdict.to_dict()}


def settle_kernels(
    wanted: bool,
    accelerator: Accelerator,
    model: nn.Module,
    batches: GlobalBatches,
    loss_of: Callable[[Batch], Tensor],
) -> None:
    """Where ``wanted``, train by NOTE [ a fixed order ], and say where there is none; it costs a forward."""
    if not wanted:
        return

    def trial() -> None:
        accelerator.backward(loss_of(batches.largest_forward(batches.layout)()))

    with replaced(accelerator, "scaler", None):  # of fp16: its first scales overflow, which would be no result
        operator = use_deterministic_kernels(model, trial)
    if operator:
        accelerator.print(
            f"warning: --full_determinism: {operator} has no deterministic kernel, so the last bits of two runs may "
            "differ: on a GPU those of attention, too"
        )


def _objection(verdict: Verdict, handle: PlanHandle) -> str:
    found, hint = OBJECTIONS[verdict.status]
    return f"--verify, plan {handle.plan.strategy}: {found} ({verdict.describe()}): {hint}"
