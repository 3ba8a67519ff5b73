"""The graphs that torch compiles for a card that is not there, and the kernels of each: names, bytes, machine code.

Autograd's engine asks a driver for the streams of a device. So graphs are traced on the host, from fake tensors and
with the project's emulation of CUDA's kernels (``core/costs/estimate.py``), and each is put on the card before inductor
lowers it. All between is torch's own: dynamo, AOTAutograd, inductor's passes, the partition by the ratio. Compiled code
returns tensors of the right forms, and runs nothing.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from triton_kernels.card import NAME, Card, absent_card

from memsave_recipes.core.costs.estimate import cuda_kernels
from memsave_recipes.core.costs.targets import find_target

HOST = torch.device("cpu")
CARD = torch.device("cuda", 0)
READS_ON_HOST = "memsave"
"""The namespace of operators that take the ends of documents, which stay on the host."""
HEURISTICS = re.compile(r"^@triton_heuristics\.(\w+)\($", re.M)
LIBRARY_CALL = re.compile(r"\bextern_kernels\.\w+\(|\btorch\.ops\.[\w.]+\(")


@dataclass(frozen=True)
class Traffic:
    """What a kernel moves in a call, by inductor's own estimate, and the elements of each of its buffers."""

    read_bytes: int
    written_bytes: int
    elements: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel, and how often its graph calls it; its source calls it ``NAME``."""

    source: str
    calls: int
    traffic: Traffic

    @property
    def kind(self) -> str:
        """Its class by inductor: ``pointwise``, ``reduction``, ``persistent_reduction`` or what a later one has."""
        return HEURISTICS.findall(self.source)[0]


@dataclass(frozen=True)
class CompiledGraph:
    """A graph, and the tensors that a forward saves for its backward besides its inputs: their elements and bytes."""

    is_backward: bool
    kernels: list[Kernel]
    library_calls: int
    saved: list[tuple[int, int]]


@contextmanager
def compiling_for(card: Card) -> Iterator[list[CompiledGraph]]:
    """Collect, inside, the graphs that ``torch.compile`` makes for ``card`` of functions of fake tensors."""
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    graphs: list[CompiledGraph] = []
    compile_graphs = compile_fx.compile_fx

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if "inner_compile" in kwargs:  # it calls itself, with the region's settings
            return compile_graphs(*args, **kwargs)
        with cuda_kernels(find_target(card.target)):
            return compile_graphs(*args, inner_compile=lower, **kwargs)

    def lower(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
        results = list(graph.graph.nodes)[-1].args[0]
        values = [one.meta["val"] if isinstance(one, Node) else one for one in results]
        graphs.append(_lowered(graph, inputs, card, settings))

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [_like(value, value.device) if isinstance(value, Tensor) else value for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(config.patch(force_disable_caches=True))
        stack.enter_context(patch.object(compile_fx, "compile_fx", compiled))
        yield graphs


def _lowered(graph: GraphModule, inputs: Any, card: Card, settings: dict[str, Any]) -> CompiledGraph:
    """Lower a graph as inductor does, as far as the sources of its kernels."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.compile_fx import compile_fx_inner

    sources: dict[str, str] = {}
    traffic: dict[str, Traffic] = {}
    define = TritonScheduling.define_kernel

    def define_kernel(scheduling: Any, source: str, nodes: Any, kernel: Any) -> str:
        name = define(scheduling, source, nodes, kernel)
        traffic[name] = _traffic_of(kernel)
        return name

    def triton(_: Any, name: str, source: str, *__: Any, **___: Any) -> Any:
        sources[name] = source
        return SimpleNamespace()

    is_backward = bool(settings.get("is_backward"))
    saved = [] if is_backward else _saved(graph)
    with (
        absent_card(card),
        patch.object(TritonScheduling, "define_kernel", define_kernel),
        patch.object(AsyncCompile, "triton", triton),
    ):
        code = compile_fx_inner(graph, _put_on_card(graph, inputs), **settings).source_code
    body = code.partition("def call(")[2]
    kernels = [
        Kernel(source.replace(name, NAME), len(re.findall(rf"\b{name}\.run\(", body)), traffic[name])
        for name, source in sources.items()
    ]
    return CompiledGraph(is_backward, kernels, len(LIBRARY_CALL.findall(body)), saved)


def _saved(graph: GraphModule) -> list[tuple[int, int]]:
    """Elements and bytes of what the forward ``graph`` returns for its backward and does not take."""
    metadata = torch._guards.TracingContext.get().fw_metadata
    if metadata is None:  # there is no backward
        return []
    results = list(graph.graph.nodes)[-1].args[0][metadata.num_forward :]
    made = {one for one in results if isinstance(one, Node) and one.op != "placeholder"}
    values = [one.meta["val"] for one in made if isinstance(one.meta["val"], Tensor)]
    return [(value.numel(), value.numel() * value.itemsize) for value in values]


def _put_on_card(graph: GraphModule, inputs: Any) -> list[Any]:
    """Let a graph that was traced on the host compute on the card; return inputs for it."""
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node in graph.graph.nodes:
        if node.kwargs.get("device") == HOST:
            node.kwargs = {**node.kwargs, "device": CARD}
    graph.recompile()
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with V.fake_mode:
        moved = [
            _like(value, CARD) if isinstance(value, Tensor) and not _stays(node, value) else value
            for node, value in zip(places, inputs, strict=True)
        ]
    FakeTensorProp(graph, mode=V.fake_mode).propagate_dont_convert_inputs(*moved)
    return moved


def _stays(node: Node, value: Tensor) -> bool:
    """Tell whether only operators that read on the host take an input."""
    users = [getattr(user.target, "namespace", "") for user in node.users]
    return not value.is_floating_point() and set(users) == {READS_ON_HOST}


def _like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def _traffic_of(kernel: Any) -> Traffic:
    """Divide inductor's estimate of a kernel's bytes into those that it writes and those that it reads."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    def elements_of(name: str) -> int:
        return int(V.graph.sizevars.optimization_hint(V.graph.get_numel(name)))

    def elements_written(name: str) -> int:
        """Of a part of a buffer, no more than the kernel has elements for each place that it names."""
        places = {one.index if isinstance(one, MemoryDep) else one for one in accesses.get(name, ())}
        return min(elements_of(name), len(places) * computed)

    accesses = kernel.features.buf_accesses()
    computed = int(V.graph.sizevars.optimization_hint(prod(kernel.numels.values())))
    written = kernel.args.live_output_buffers()
    written_bytes = sum(elements_written(name) * V.graph.get_dtype(name).itemsize for name in written)
    names = {*written, *kernel.args.input_buffers}
    total = int(kernel.estimate_kernel_num_bytes())
    return Traffic(total - written_bytes, written_bytes, tuple(map(elements_of, names)))
