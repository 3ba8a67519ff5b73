"""Compile the layers that a model repeats, once for all of them, with a budget for the tensors that each saves.

Regional compilation (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html) takes seconds where a whole
model takes a minute. Inside the compiled layer torch's partitioner chooses tensors to save and to recompute so that
a given part of the bytes is enough (``torch._functorch.config.activation_memory_budget``: 1 is the fastest
backward, 0 saves the layer's inputs only). Fused kernels round at other places than the eager layer, so gradients are
equal within rounding, not bit for bit. A second run of a compiled layer has the bits of its first.

Notes: ``docs/design/activations.md``.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from shutil import which
from sysconfig import get_path
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx import Graph, GraphModule, Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

from memsave_recipes.core.activations.block_state import is_cache, replaced
from memsave_recipes.core.activations.planned_forward import PlannedForward
from memsave_recipes.core.activations.recompute import NOTHING, draws
from memsave_recipes.core.activations.spans import NestedPart
from memsave_recipes.core.errors import InputError

MAX_GRAPHS = 64
SMALLEST_RATIO = 1e-6
NEVER_COMPILED = "memsave_never_compiled"
"""An attribute of models whose layers no plan compiles; whoever builds the model sets it."""
WAYS_OUT = "use another strategy, on eager layers (--compile none)"
_numbers = count()
MANY_GRAPHS = dynamo_config.patch(recompile_limit=MAX_GRAPHS)
"""Only around calls that may need it, as it takes 8 us."""
ALL = 1.0
"""The ratio of the fastest backward."""
READ_VALUES = ("item", "tolist")
"""The methods of a tensor that give its values to Python."""


class Region:
    """Compiles layers under one ratio; those that are alike share a graph.

    A kind of layer whose first call torch cannot compile as one graph stays eager, with a warning.

    Args:
        ratio: the part of the bytes that a layer saves for the fastest backward that it may save, from 0 to 1.
        required: refuse such a layer.
    """

    def __init__(self, ratio: float, *, required: bool = False) -> None:
        def run_layer(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        name = f"{run_layer.__name__}_{next(_numbers)}"
        run_layer.__code__ = run_layer.__code__.replace(co_name=name)
        self.ratio, self.required = max(ratio, SMALLEST_RATIO), required
        self._compiles: dict[type, bool] = {}
        self._num_graphs, self._few_graphs = 0, min(dynamo_config.recompile_limit, MAX_GRAPHS)
        self._run_layer = torch.compile(run_layer, fullgraph=True, backend=self._graph)

    @staticmethod
    def is_observed() -> bool:
        """Whether somebody looks at each operator in this thread; a compiled layer has none."""
        return any(not mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``method(*args, **kwargs)``, compiled.

        Raises:
            InputError: it cannot be compiled as one graph, and has to be, or was in an earlier call.
        """
        kind = type(getattr(method, "__self__", method))
        if not self._compiles.get(kind, True):
            return method(*args, **kwargs)
        try:
            many_graphs = NOTHING if self._num_graphs < self._few_graphs else MANY_GRAPHS
            has_ddp = DistributedDataParallel._active_ddp_module is not None  # for it torch would cut a layer's graph
            with replaced(DistributedDataParallel, "_active_ddp_module", None) if has_ddp else NOTHING, many_graphs:
                outputs = self._run_layer(method, *args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise _refusal(kind, f"its inputs and settings take more than {MAX_GRAPHS} forms") from error
        except TorchDynamoException as error:
            reason = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
            if self.required or kind in self._compiles:
                raise _refusal(kind, reason) from error
            warnings.warn(f"{kind.__name__} computes eager: it cannot be one compiled graph ({reason})", stacklevel=2)
            self._compiles[kind] = False
            return method(*args, **kwargs)
        self._compiles[kind] = True
        return outputs

    def _graph(self, graph: GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph for the forward, and cut it into what runs there and in the backward.

        Newer versions of torch compile graphs that read values. These are refused, because their shapes are not known
        ahead, and they wait for the device as the eager layer does.
        """
        if any(map(_reads_values, graph.graph.nodes)):
            raise InputError("it reads the values of a tensor")
        self._num_graphs += 1
        options: dict[str, Any] = {"fallback_random": True, "joint_custom_pre_pass": _DrawOnce()}
        options["deterministic"] = True  # no measurement decides how sums are cut, so the next run has the same bits
        inductor: Callable[..., Any] = lookup_backend("inductor")
        with functorch_config.patch(activation_memory_budget=self.ratio):
            return inductor(graph, inputs, config_patches=options)


def _reads_values(node: Node) -> bool:
    """Whether a node gives values of a tensor to Python. A number of a module may be in a tensor of torch's own."""
    if node.op != "call_method" or node.target not in READ_VALUES:
        return False
    of_input = getattr(node.args[0], "meta", {}).get("grapharg")
    return not getattr(of_input, "pass_arg_as_tensor", False)


def _refusal(kind: type, reason: str) -> InputError:
    return InputError(f"strategy compiled: {kind.__name__} cannot be compiled as one graph ({reason}); {WAYS_OUT}")


def _refuse_cache(name: str, *args: Any, **kwargs: Any) -> int:
    """In place of the ``get_seq_length`` of a cache."""
    raise InputError(
        f"strategy compiled: {name} left this cache of keys and values empty, so nothing can go on with it: fill it "
        f"under torch.no_grad(), or {WAYS_OUT}"
    )


@dataclass
class CompiledLayer(PlannedForward):
    """A layer's forward, compiled where gradients are wanted; evaluation and generation run the eager one.

    Args:
        runs_again: whether it runs in the forward of an action that runs it a second time, and looks at its effects.
    """

    method: Callable[..., Any]
    module: nn.Module
    region: Region
    runs_again: bool = False

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``method``.

        Raises:
            InputError: it writes on a tensor, or cannot be compiled as one graph; later, where somebody goes on with
                the key-value cache that it was given, and left empty.
        """
        for given in filter(is_cache, (*args, *kwargs.values())):
            given.get_seq_length = partial(_refuse_cache, type(self.module).__name__)
        # A key-value cache asks for the number of the layer: one graph each. GPT-2 hands it on by position.
        args = tuple(None if is_cache(arg) else arg for arg in args)
        kwargs = {name: None if is_cache(arg) else arg for name, arg in kwargs.items()}
        if self.region.is_observed():
            return (self.method if self.runs_again else self.recomputed)(*args, **kwargs)
        if self.runs_again or self.recomputed.effects.is_looked_at:
            return self.region.run(self.method, *args, **kwargs)
        first_run, _ = self.recomputed.effects.around(partial(self.region.run, self.method, **kwargs))
        return first_run(*args)

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The same for a compiler that reads this code."""
        return self.method(*args, **kwargs)

    @cached_property
    def recomputed(self) -> NestedPart:
        """The layer as an observer sees it."""
        return NestedPart(self.module, self.method)


def check_compiler(model: nn.Module) -> None:
    """Whether torch finds its compilers for the devices of ``model``, and Python's headers, which its kernels include.

    Raises:
        InputError: something is missing.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if "mps" in devices:
        raise InputError(f"strategy compiled is not for an Apple GPU (mps): {WAYS_OUT}")
    needs = {
        "triton (pip install triton)": "cuda" in devices and find_spec("triton") is None,
        "a C compiler (gcc, clang, or the one that CC names)": "cuda" in devices and not _finds_c_compiler(),
        "a C++ compiler (g++, or the one that CXX names)": "cpu" in devices and not _finds_cpp_compiler(),
        "Python.h (of python3-dev or python3-devel)": not Path(get_path("include"), "Python.h").is_file(),
    }
    for name, is_missing in needs.items():
        if is_missing:
            raise InputError(f"strategy compiled needs {name}, which is not there: install it, or {WAYS_OUT}")


def _finds_c_compiler() -> bool:
    """Triton builds the launchers of its kernels with one."""
    return any(which(name) for name in (os.environ.get("CC", ""), "gcc", "clang"))


def _finds_cpp_compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


class _DrawOnce(CustomGraphPass):
    """Marks operators that draw random numbers to be saved, not drawn again."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if draws(node.target, node.args, node.kwargs):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> bytes:
        """For torch's cache of kernels."""
        return get_hash_for_files((__file__, draws.__code__.co_filename))
