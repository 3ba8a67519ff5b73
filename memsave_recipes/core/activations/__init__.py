"""Apply an activation plan to a model and remove it; gradients are the same as without checkpointing.

NOTE [ decisions ]
* An ``nn.Sequential`` is a stack that we run ourselves, so any neighbouring children can recompute together. A
  BatchNorm or an in-place ReLU belongs to the block before it, so every boundary is safe. Dense blocks of a DenseNet
  are split into layers.
* Layers of transformers models (``GradientCheckpointingLayer``) are called by the model. Those that return a bare
  tensor can recompute together, the others one by one. Each runs when the model calls it, so its states may be read
  and layers left out: ``spans.py``. A model may name its own stacks in a class attribute ``activation_stacks``.
* A child of an ``nn.Sequential`` that its parent loops over is a layer that the model calls: replacing the ``forward``
  of such a Sequential would have no effect. Equal layers in an ``nn.ModuleList`` are found in the same way, each by
  itself; also in a tower that has no layers of transformers, beside a decoder that has (Llama 3.2's, Florence-2's).
* ``bottleneck`` is DenseNet's ``memory_efficient=True``, as a strategy and not an argument of the model, so that
  BatchNorm counts once and the plan can be removed.
* A block whose input waits on the host recomputes by itself, and so does a block that offloads: so its costs are
  measured as a whole, including the wait for copies. To join several blocks would only save host memory, and need more
  device memory while they recompute.
* Blocks run in micro-batches only for BatchNorm over the global batch; all other models accumulate gradients in the
  training loop. Each block does this by itself, as every further BatchNorm in it costs another run.
* Applying a plan replaces the ``forward`` of module instances, nothing else: no parameter, buffer, hook or state-dict
  key changes. Without gradients the model runs as if there were no plan.
"""

from memsave_recipes.core.activations.apply import PlanHandle, apply_plan, plan_blocks
from memsave_recipes.core.activations.blocks import block_names, find_bottlenecks, find_stacks

__all__ = ["PlanHandle", "apply_plan", "block_names", "find_bottlenecks", "find_stacks", "plan_blocks"]
