"""Compiled layers in a step on fake tensors: torch's compiler up to the schedule of its kernels, none of which runs.

Dynamo, AOTAutograd, inductor's passes, the partition by the ratio, lowering and fusion are torch's own, as in a run. In
place of code, a graph takes and frees the buffers of its kernels in their order, and adds the time of the bytes that
each moves, by inductor's own count. Calls of libraries run as operators on fake tensors. So autograd, its hooks
and the meter of the step see outputs, saved tensors and transients as those of the compiled layer.

Notes: ``docs/design/costs.md``.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import getitem
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config, ir
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.codegen.wrapper import EfficientPeakEstimate, buffer_reuse_key
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload
from torch.fx import Node
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memsave_recipes.core import losses
from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.compiled import MAX_GRAPHS, Region
from memsave_recipes.core.costs.fake_step import SimulatedClock
from memsave_recipes.core.costs.targets import Target

NO_MEMORY = (ir.NoneLayout, ir.MutationLayoutSHOULDREMOVE, ir.MultiOutputLayout)
"""Layouts of what is no buffer of its own."""

Buffers = dict[str, Any]
"""What a graph has in memory, by name; of a library's call with several results all of them."""


@dataclass(frozen=True)
class Form:
    """A tensor's view of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def read(cls, node: Any) -> "Form":
        """Read that of one of inductor's buffers or views."""
        layout = node.get_layout()
        size, stride = (tuple(map(_number, numbers)) for numbers in (layout.size, layout.stride))
        return cls(size, stride, _number(layout.offset), layout.dtype)

    def of(self, whole: Tensor) -> Tensor:
        """View the storage of ``whole``."""
        return whole.as_strided(self.size, self.stride, self.offset)


def _number(expression: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(expression))


@dataclass
class Step:
    """A fused kernel, a call of a library, one of its results, or memory alone.

    Args:
        name: of the buffer of a call or of its result.
        made: buffers that it takes memory for.
        shared: those in the memory of others, with these.
        taken: what others left behind, in whose memory these are.
        call: the operator of a library; ``None`` for a kernel.
        picked: the call whose result it is, and the position in what that returns.
        num_bytes: that a kernel reads and writes.
        freed: what nobody reads later.
    """

    name: str
    made: list[tuple[str, Form]] = field(default_factory=list)
    shared: list[tuple[str, str, Form]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    call: Node | None = None
    picked: tuple[str, list[Any]] | None = None
    num_bytes: int = 0
    freed: list[str] = field(default_factory=list)

    def run(self, buffers: Buffers) -> None:
        """Change the memory as the step does."""
        for name in self.taken:
            buffers.pop(name, None)
        if self.call is not None:
            buffers[self.name] = _called(self.call, buffers)
        if self.picked is not None:
            call, positions = self.picked
            buffers[self.name] = buffers[call]
            for position in positions:
                buffers[self.name] = getitem(buffers[self.name], position)
        for name, form in self.made:
            if not _is_large_enough(buffers.get(name), form):
                buffers[name] = torch.empty_strided(form.size, form.stride, dtype=form.dtype)
        for name, other, form in self.shared:
            buffers[name] = form.of(buffers[other])
        for name in self.freed:
            buffers.pop(name, None)


def _is_large_enough(tensor: Any, form: Form) -> bool:
    """Return whether a library's result, as the operator returns it, is the buffer."""
    places = 1 + sum((size - 1) * stride for size, stride in zip(form.size, form.stride, strict=True))
    return isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= places * form.dtype.itemsize


def _called(node: Node, buffers: Buffers) -> Any:
    """Run the operator of ``node`` on tensors of the forms that it was traced with, and on the graph's own inputs.

    One that is written in Python runs as it is written: its kernels count.
    """
    args, kwargs = tree_map_only(Node, lambda one: buffers.get(one.name, one.meta["val"]), (node.args, node.kwargs))
    operator: Any = node.target
    written = _maybe_get_opdef(operator)
    return (operator if written is None else written._init_fn)(*args, **kwargs)


class _Reader:
    """Reads the steps of a graph that inductor has lowered, as its scheduler would write their code."""

    def __init__(self, graph: GraphLowering) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        self.graph, self.scheduler = graph, graph.scheduler
        self.returned = [self._result(node) for node in graph.graph_outputs]
        self._kept = {one[0] for one in self.returned if isinstance(one, tuple)}
        self._made = set(graph.graph_inputs)
        self._peaks = EfficientPeakEstimate()
        self._overwritten = graph.wrapper_code.freed
        self._waiting: dict[Any, list[Any]] = {}  # freed buffers, for others of their size
        self.steps: list[Step] = []
        self._last_used: set[str] = set()
        frees_at_once = config.cpu_backend != "cpp"
        for node in self.scheduler.nodes:
            if node.is_extern():
                self._free()
            self.steps.append(self._step(node))
            if frees_at_once or node.is_extern():
                self._free()
        self._free()

    def _result(self, node: Any) -> Any:
        """Return the name of a buffer that the graph returns, with its form if it is a view; or a constant."""
        if isinstance(node, ir.NoneAsConstantBuffer):
            return None
        if isinstance(node, ir.ShapeAsConstantBuffer):
            return _number(node.expr)
        node = node.data if isinstance(node, ir.TensorBox) else node
        return node.get_name(), Form.read(node) if isinstance(node, ir.ReinterpretView) else None

    def _step(self, node: Any) -> Step:
        step = Step(node.node.get_name() if node.node is not None else node.get_name())
        if node.is_extern() and isinstance(node.node, ir.MultiOutput):
            call: Any = node.node.inputs[0]
            step.picked = call.get_name(), [position for _, position in node.node.indices]
        elif node.is_extern() and isinstance(getattr(node.node.fx_node, "target", None), OpOverload):
            step.call = node.node.fx_node
        else:
            step.num_bytes = node.get_read_write_buffers_sizes()
        in_place = self._decided_in_place(node)
        for buffer in node.get_outputs():
            if not self._stays_inside(buffer, node):
                self._make(buffer.node, in_place.get(buffer.get_name()), step)
        self.scheduler.completed_operations.update(node.get_operation_names())
        self._last_used |= node.last_usage
        return step

    def _free(self) -> None:
        """Free what nobody reads after the last step: on a CPU, kernels that follow one another are one function."""
        for name in filter(self._can_free, sorted(self._last_used)):
            self.steps[-1].freed.append(name)
            self._let_wait(self.graph.try_get_buffer(name))
        self._last_used.clear()

    def _let_wait(self, buffer: Any) -> None:
        """Let a freed buffer wait for another of its size, if it is no input of the graph and has memory of its own."""
        is_own = buffer is not None and buffer.get_name() not in {*self.graph.graph_inputs, *self._overwritten}
        if is_own and not isinstance(buffer.layout, NO_MEMORY) and not buffer.get_inputs_that_alias_output():
            line = SimpleNamespace(node=buffer, scheduler_node_index=len(self.steps) - 1)
            self._waiting.setdefault(buffer_reuse_key(buffer), []).append(line)

    def _taken_again(self, buffer: Any) -> str | None:
        """Return the name of a freed buffer whose memory ``buffer`` takes, as inductor's ``AllocateLine`` does."""
        now: Any = SimpleNamespace(node=buffer, scheduler_node_index=len(self.steps))
        waiting = self._waiting.get(buffer_reuse_key(buffer))
        if not waiting:
            return None
        line, peaks = waiting[-1], self._peaks
        follows = line.scheduler_node_index + 1 == now.scheduler_node_index
        if not follows and peaks._get_size(buffer) + peaks.peak_between(line, now) > peaks.overall_peak_memory:
            return None
        peaks.update_peak_between(line, now)
        waiting.pop()
        name: str = line.node.get_name()
        self.steps[line.scheduler_node_index].freed.remove(name)
        return name

    def _decided_in_place(self, node: Any) -> dict[str, str]:
        """Return the buffers that the kernel writes over others that nobody reads later."""
        found: dict[str, str] = {}
        kernel = SimpleNamespace(args=SimpleNamespace(make_inplace=lambda *_: None), inplace_update_buffers=found)
        with V.set_kernel_handler(kernel):
            for one in node.get_nodes():
                one.decide_inplace_update()
        return found

    def _stays_inside(self, buffer: Any, node: Any) -> bool:
        """Return whether a buffer is in no memory, as the kernel alone reads it.

        A kernel of a CPU may be several that share their outer loop; what one of them hands to another is in memory.
        """
        loops = node.get_outer_nodes() if isinstance(node, OuterLoopFusedSchedulerNode) else [node]
        inside = next(({*loop.get_nodes()} for loop in loops if buffer.defining_op in loop.get_nodes()), set())
        stays = len(inside) > 1 and all(user.is_weak or user.node in inside for user in buffer.users)
        if stays:
            self.graph.removed_buffers.add(buffer.get_name())
        return stays

    def _make(self, buffer: Any, over: str | None, step: Step) -> None:
        name, layout = buffer.get_name(), buffer.get_output_spec()
        if name in self._made or isinstance(layout, NO_MEMORY):
            return
        self._made.add(name)
        if isinstance(layout, ir.NonOwningLayout):
            other = layout.view.get_name()
            self._make(self.graph.get_buffer(other), None, step)
            step.shared.append((name, other, Form.read(buffer)))
        elif over in self._made:
            self._overwritten.add(over)
            step.shared.append((name, over, Form.read(buffer)))
        else:
            step.made.append((name, Form.read(buffer)))
            if buffer.should_allocate() and (freed := self._taken_again(buffer)) is not None:
                step.taken.append(freed)

    def _can_free(self, name: str) -> bool:
        known = self.scheduler.name_to_buf.get(name)
        return name not in self._kept and (known is None or known.can_free())


AS_ON_CARDS: dict[str, Any] = {"cpu_backend": "triton", "force_pointwise_cat": True}
"""What inductor would do on a card with graphs of the CPU: Triton's rules of fusion, and joins inside of kernels."""

CARD = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=2**16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
"""An H100's, by which inductor cuts up long sums for any card: what that moves is little."""


run_compiled = Region.run


@dataclass
class CompilerOfTarget:
    """Compiles layers for a target in steps on fake tensors, in place of ``Region``; layers that are alike once.

    Args:
        kernels: makes a context in which fake tensors go through the kernels of the target.
    """

    target: Target
    kernels: Callable[[], AbstractContextManager[Any]]
    _clock: SimulatedClock = field(default_factory=SimulatedClock)
    _regions: dict[float, Region] = field(default_factory=dict)
    _modes: list[Any] = field(default_factory=list)

    @contextmanager
    def compiling(self, clock: SimulatedClock) -> Iterator[None]:
        """Compile layers with it, inside; ``clock`` is that of the step."""

        def run(region: Region, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._run(run_compiled, self._regions.setdefault(region.ratio, region), method, *args, **kwargs)

        self._clock = clock
        with (
            replaced(Region, "run", run),
            replaced(Region, "is_observed", lambda *_: False),
            replaced(losses, "_compiled", lambda: partial(self._run, self._loss)),
        ):
            yield

    @cached_property
    def _loss(self) -> Callable[..., Any]:
        """Compile a copy, so that the loss itself has no graphs of fake tensors; only on CUDA is it compiled."""
        code = losses._fused.__code__
        names = {**vars(losses), "_sums_come_out": lambda factor: factor.itemsize < torch.float32.itemsize}
        return torch.compile(FunctionType(code.replace(co_name=f"{code.co_name}_on_target"), names))

    def _run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._without_modes(), self._as_torch_compiles():
            return compiled(*args, **kwargs)

    @contextmanager
    def _without_modes(self) -> Iterator[None]:
        """Leave the modes of the step, which would see what the compiler does; kernels run in them again."""
        with ExitStack() as stack:
            functions = [stack.enter_context(_pop_mode_temporarily()) for _ in _get_current_function_mode_stack()]
            dispatch = stack.enter_context(_disable_current_modes())
            self._modes = [*reversed(dispatch), *reversed(functions)]
            stack.callback(self._modes.clear)
            yield

    @contextmanager
    def _as_torch_compiles(self) -> Iterator[None]:
        on_cpu = self.target.device.type == "cpu"
        compile_graphs = compile_fx.compile_fx

        def compiled(*args: Any, **kwargs: Any) -> Any:
            with self.kernels():
                return compile_graphs(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # as caches are, on purpose
            stack.enter_context(dynamo_config.patch(automatic_dynamic_shapes=False, recompile_limit=MAX_GRAPHS))
            stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
            stack.enter_context(config.patch({"force_disable_caches": True, **({} if on_cpu else AS_ON_CARDS)}))
            stack.enter_context(replaced(compile_fx, "compile_fx", compiled))
            stack.enter_context(replaced(GraphLowering, "compile_to_module", lambda graph: self._scheduled(graph)))
            if not on_cpu:
                stack.enter_context(replaced(DeviceProperties, "create", lambda device: CARD))
            yield

    def _scheduled(self, graph: GraphLowering) -> Any:
        """Be ``GraphLowering.compile_to_module``: return what has a ``call``."""
        read, names = _Reader(graph), list(graph.graph_input_names)
        steps, results = read.steps, read.returned
        seconds = [self.target.seconds(None, torch.float32, 0, step.num_bytes) for step in steps]

        def call(inputs: list[Any]) -> list[Any]:
            buffers: Buffers = dict(zip(names, inputs, strict=True))
            inputs.clear()
            with ExitStack() as modes:
                for mode in self._modes:
                    modes.enter_context(mode)
                for step, seconds_of_kernel in zip(steps, seconds, strict=True):
                    step.run(buffers)
                    self._clock.now += seconds_of_kernel if step.num_bytes else 0.0
                return [_returned(one, buffers) for one in results]

        return SimpleNamespace(call=call)


def _returned(result: Any, buffers: Buffers) -> Any:
    if not isinstance(result, tuple):
        return result
    name, form = result
    return buffers[name] if form is None else form.of(buffers[name])
