"""The layers of a recipe's model, compiled for a card: a row for each kind of them.

NOTE [ what grows with tokens ]
A micro-batch has 13 samples, and no weight of the layers has a multiple of 13 elements; it has 17 where one does, as a
table of Swin's 13 x 13 offsets. So a buffer with such a number of elements grows with the tokens, and all others are of
weights: their casts, and second passes of sums. What grows is linear in tokens, so a row gives it for each element of
the layer's input: "12 x width" bytes of a token.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from triton_kernels.card import CARDS, Card, compile_kernel
from triton_kernels.graphs import CompiledGraph, Kernel, compiling_for

from memsave_recipes.core.activations import find_stacks
from memsave_recipes.core.activations.block_state import is_cache
from memsave_recipes.core.activations.blocks import CalledLayers
from memsave_recipes.core.activations.compiled import Region
from memsave_recipes.core.costs.estimate import cuda_kernels, fake_batch
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.task import fake_planned_model
from memsave_recipes.tools.fit.recipe_task import read_task

HOST = torch.device("cpu")
ROOT = Path(__file__).parents[2]
IMAGES = 4  # dimensions
SAMPLES = (13, 17)
LOWERED_FOR = CARDS[90]
"""The card that inductor writes kernels for; Triton compiles the same kernels for all ``CARDS``."""
Row = dict[str, Any]


@dataclass(frozen=True)
class LayerCall:
    """A layer's forward, with what the model gives it."""

    layer: nn.Module
    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    @property
    def hidden(self) -> Tensor:
        """The layer's input."""
        return next(one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Tensor))

    @property
    def width(self) -> int:
        """The channels of images, the last size of all else."""
        return self.hidden.shape[1 if self.hidden.ndim == IMAGES else -1]

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for layers that are alike."""
        given = [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Tensor)]
        tensors = [*given, *self.layer.parameters()]
        return type(self.layer), *((one.shape, one.dtype, one.requires_grad) for one in tensors)


def calls_of(recipe: str, flags: Sequence[str], dtype: torch.dtype | None) -> list[LayerCall]:
    """The calls of the layers that a plan may compile, in a forward of a micro-batch of fake tensors.

    Args:
        dtype: autocast's; ``None`` for none.
    """
    task = read_task(ROOT / "recipes" / f"{recipe}.py", flags)
    target = find_target(LOWERED_FOR.target)
    model = fake_planned_model(task, target).train()
    trained = task.trained(model, task.losses[-1], HOST)
    blocks = [block for stack in find_stacks(model) if isinstance(stack, CalledLayers) for block in stack.blocks]
    weights = [weight for block in blocks for weight in block.module.parameters()]
    samples = next(number for number in SAMPLES if all(weight.numel() % number for weight in weights))
    batch = fake_batch(model, task.micro_batch(samples))
    calls: list[LayerCall] = []
    for block in blocks:
        _note(block.module, block.method, calls, samples)
    with next(model.parameters()).fake_mode, cuda_kernels(target), autocast(dtype):
        task.loss_of(trained, batch)
    return calls


def autocast(dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision as in a run."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


def _note(layer: nn.Module, name: str, calls: list[LayerCall], samples: int) -> None:
    method = getattr(layer, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [None if is_cache(one) else one for one in args]  # as ``CompiledLayer`` does
        named = {name: None if is_cache(one) else one for name, one in kwargs.items()}
        calls.append(LayerCall(layer, method, tuple(given), named, samples))
        return method(*args, **kwargs)

    vars(layer)[name] = forward


def rows_of(
    calls: Sequence[LayerCall], dtype: torch.dtype | None, ratio: float = 1.0, *, with_code: bool = True
) -> list[Row]:
    """Compile all layers, those that are alike by one region, as ``apply_plan`` does under ``compiled:RATIO``.

    Args:
        with_code: whether the kernels become machine code, too.
    """
    kinds: dict[Any, list[LayerCall]] = {}
    for call in calls:
        kinds.setdefault(call.form, []).append(call)
    return [_row(alike, dtype, ratio, with_code) for alike in kinds.values()]


def _row(alike: Sequence[LayerCall], dtype: torch.dtype | None, ratio: float, with_code: bool) -> Row:
    first, region = alike[0], Region(ratio)
    weights = list(first.layer.parameters())
    with weights[0].fake_mode, autocast(dtype), compiling_for(LOWERED_FOR) as graphs:
        for call in alike:
            region.run(call.method, *call.args, **call.kwargs)
    num_weights = sum(map(Tensor.numel, weights))
    passes = {name: [graph for graph in graphs if graph.is_backward == back] for name, back in PASSES}
    return {
        "layer": type(first.layer).__name__,
        "ratio": ratio,
        "width": first.width,
        "weights": num_weights,
        "saved": round(_growing_bytes(graphs[0].saved, first), 2),
        "graphs": {name: len(found) for name, found in passes.items()},
        **{name: _of_pass(found[0], first, num_weights) for name, found in passes.items() if found},
        "machine_code": machine_code(graphs) if with_code else {},
    }


PASSES = (("forward", False), ("backward", True))


def _growing_bytes(tensors: Sequence[tuple[int, int]], call: LayerCall) -> float:
    """Bytes of those that grow, for each element of the input."""
    return sum(size for number, size in tensors if number % call.samples == 0) / call.hidden.numel()


def _of_pass(graph: CompiledGraph, call: LayerCall, num_weights: int) -> Row:
    """Kernels of a graph, bytes for each element of the input, and bytes of weights for each weight."""
    elements = call.hidden.numel()
    growing = [one for one in graph.kernels if any(number % call.samples == 0 for number in one.traffic.elements)]
    others = [kernel for kernel in graph.kernels if kernel not in growing]
    return {**of_graph(graph, growing, elements), "of_weights": _bytes(others, num_weights)}


def of_graph(graph: CompiledGraph, growing: Sequence[Kernel], elements: int) -> Row:
    """Kernels of a graph, also by class, and the bytes that those of ``growing`` move for each of ``elements``."""
    moved = by_class(growing)
    return {
        "kernels": sum(kernel.calls for kernel in graph.kernels),
        "library_calls": graph.library_calls,
        "read": _bytes(growing, elements, "read_bytes"),
        "written": _bytes(growing, elements, "written_bytes"),
        "classes": {
            kind: {
                "kernels": sum(kernel.calls for kernel in alike),
                "bytes": _bytes(moved.get(kind, ()), elements),
            }
            for kind, alike in by_class(graph.kernels).items()
        },
    }


def _bytes(kernels: Iterable[Kernel], number: int, which: str = "num_bytes") -> float:
    return round(sum(kernel.calls * getattr(kernel.traffic, which) for kernel in kernels) / number, 2)


def by_class(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    found = defaultdict(list)
    for kernel in kernels:
        found[kernel.kind].append(kernel)
    return dict(sorted(found.items()))


def machine_code(graphs: Sequence[CompiledGraph]) -> Row:
    """By architecture and class, the most registers of a thread and the bytes that spill, over all kernels."""
    kernels = {kernel.source: kernel for graph in graphs for kernel in graph.kernels}
    return {
        f"sm_{card.architecture}": {kind: _code_of(alike, card) for kind, alike in by_class(kernels.values()).items()}
        for card in CARDS.values()
    }


def _code_of(kernels: Sequence[Kernel], card: Card) -> Row:
    codes = [compile_kernel(kernel.source, card) for kernel in kernels]
    return {
        "registers": max(code.registers for code in codes),
        "spilled_bytes": sum(code.spilled_bytes for code in codes),
    }
