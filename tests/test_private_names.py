"""Private names of libraries that the package uses: each is still there, and there is none beside those named here.

They may go or change with any version. Each test names the files that use the name, and what stands there then.
"""

import argparse
import ast
import pkgutil
import sys
from collections import defaultdict
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch._inductor.codegen.wrapper import EfficientPeakEstimate
from torch._inductor.graph import GraphLowering
from torch._library.custom_ops import CustomOpDef
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.core_model_loading import convert_and_load_state_dict_in_model

from memsave_recipes.core.activations.recompute import recompute
from memsave_recipes.core.costs.throughput import _recomputes

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "memsave_recipes").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
IMPORTED = frozenset(
    [
        "torch.Tensor._make_subclass",
        "torch.Tensor._make_wrapper_subclass",
        "torch._C",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableTorchDispatch",
        "torch._C._SetExcludeDispatchKeyGuard",
        "torch._C._current_autograd_node",
        "torch._C._distributed_c10d.GradBucket",
        "torch._C._distributed_c10d._compute_bucket_assignment_by_size",
        "torch._C._len_torch_function_stack",
        "torch._C._profiler.RecordScope",
        "torch._C._profiler._EventType",
        "torch._C._storage_Use_Count",
        "torch._C._SetExcludeDispatchKeyGuard",
        "torch._dynamo.config",
        "torch._dynamo.exc.FailOnRecompileLimitHit",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.lookup_backend",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._functorch.config",
        "torch._fused_sdp_choice",
        "torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode",
        "torch._inductor.codegen.wrapper.EfficientPeakEstimate",
        "torch._inductor.codegen.wrapper.buffer_reuse_key",
        "torch._inductor.compile_fx",
        "torch._inductor.config",
        "torch._inductor.cpp_builder.get_cpp_compiler",
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch._inductor.custom_graph_pass.get_hash_for_files",
        "torch._inductor.exc.InvalidCxxCompiler",
        "torch._inductor.graph.GraphLowering",
        "torch._inductor.ir",
        "torch._inductor.runtime.hints.DeviceProperties",
        "torch._inductor.virtualized.V",
        "torch._library.custom_ops._maybe_get_opdef",
        "torch._ops.OpOverload",
        "torch._subclasses.FakeTensor",
        "torch._subclasses.FakeTensorMode",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch._C._are_functorch_transforms_active",
        "torch.autograd.Variable._execution_engine",
        "torch.autograd.forward_ad._current_level",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._resolve_process_group",
        "torch.distributed.distributed_c10d._world",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.conv._ConvNd",
        "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
        "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "torch.ops.aten._convolution",
        "torch.ops.aten._flash_attention_backward",
        "torch.ops.aten._flash_attention_forward",
        "torch.ops.aten._fused_rms_norm",
        "torch.ops.aten._fused_rms_norm_backward",
        "torch.ops.aten._grouped_mm",
        "torch.ops.aten._index_put_impl_",
        "torch.ops.aten._local_scalar_dense",
        "torch.ops.aten._scaled_dot_product_attention_math",
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
        "torch.ops.aten._scaled_dot_product_flash_attention",
        "torch.ops.aten._scaled_dot_product_flash_attention_backward",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "torch.ops.aten._unsafe_view",
        "torch.ops.mkldnn._is_mkldnn_bf16_supported",
        "torch.optim._muon._adjust_lr",
        "torch.overrides._get_current_function_mode_stack",
        "torch.overrides._pop_mode_temporarily",
        "torch.optim._muon._zeropower_via_newtonschulz",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._pytree.TreeSpec",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_iter",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
        "torch.utils.checkpoint._enable_checkpoint_early_stop",
        "transformers.AttentionMaskInterface._global_mapping",
        "transformers.HfArgumentParser._parse_dataclass_field",
    ]
)


def hooked():
    return add_hook_to_module(nn.Linear(1, 1), ModelHook())


def fused():
    return torch.optim.AdamW([torch.ones(1, requires_grad=True)], fused=True)


def sparse():
    return torch.eye(2).to_sparse()


def fabric():
    return pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)


OF_OBJECTS = {
    "._FSDP_WRAPPED_QUANT_STATE_KEY": lambda: bitsandbytes.optim.AdamW8bit,
    "._apply": nn.Module,
    "._attn_implementation": PreTrainedConfig,
    "._backward_hooks": lambda: torch.ones(1),
    "._buffers": nn.Module,
    "._can_set_attn_implementation": lambda: PreTrainedModel,
    "._cdata": lambda: torch.ones(1).untyped_storage(),
    "._compiled_call_impl": nn.Module,
    "._format_action_invocation": lambda: argparse.HelpFormatter,
    "._get_default_metavar_for_optional": lambda: argparse.HelpFormatter,
    "._get_help_string": lambda: argparse.HelpFormatter,
    "._get_sequence_number_for_group": lambda: torch.distributed.ProcessGroup,
    "._get_size": lambda: EfficientPeakEstimate,
    "._hf_hook": hooked,
    "._indices": sparse,
    "._init_fn": lambda: SimpleNamespace(**dict.fromkeys(CustomOpDef.__init__.__code__.co_names)),
    "._keys_to_ignore_on_save": lambda: PreTrainedModel,
    "._modules": nn.Module,
    "._option_string_actions": argparse.ArgumentParser,
    "._overloadpacket": lambda: torch.ops.aten.mm.default,
    "._parameters": nn.Module,
    "._post_accumulate_grad_hooks": lambda: torch.ones(1, requires_grad=True),
    "._schema": lambda: torch.ops.aten.mm.default,
    "._set_mixed_precision_param_dtype": lambda: torch.distributed.Reducer,
    "._spec": lambda: torch.distributed.tensor.DTensor,
    "._step_supports_amp_scaling": fused,
    "._strategy": fabric,
    "._update_scheduler": lambda: GraphLowering,
    "._values": sparse,
    "._version": lambda: torch.ones(1),
    "._weight_conversions": lambda: SimpleNamespace(
        **dict.fromkeys(convert_and_load_state_dict_in_model.__code__.co_names)
    ),
}
"""Of what is no import, with an object that has it."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def roots_of(tree):
    """What the names of a file stand for that it imports, or that are short for a part of what it imports."""
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name for alias in node.names}
            roots |= {name: whole or name for name, whole in tops.items()}
        elif isinstance(node, ast.ImportFrom):
            roots |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            pairs = zip(*(getattr(side, "elts", [side]) for side in (node.targets[0], node.value)), strict=False)
            for target, value in pairs:
                root, dot, rest = ast.unparse(value).partition(".")
                if isinstance(value, ast.Attribute) and root in roots:
                    roots[ast.unparse(target)] = roots[root] + dot + rest
    return roots


def own_of(tree):
    """Functions, fields, and attributes of ``self`` that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def names_in(tree):
    """Whole dotted names of what is imported; of other objects the attribute, with a dot before it."""
    roots, own = roots_of(tree), set(own_of(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield f".{getattr(node.args[1], 'value', '')}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots:
                yield f"{roots[root]}.{rest}"
            elif root == "super()" or node.attr not in own:
                yield f".{node.attr}"


@cache
def uses():
    """By private name, the files that use it; of other packages than Python's own and ours."""
    found = defaultdict(set)
    for path in FILES:
        for name in names_in(ast.parse(path.read_text(encoding="utf-8"))):
            top, *_ = parts = name.split(".")
            if any(map(is_private, parts)) and top not in (*sys.stdlib_module_names, "memsave_recipes"):
                found[name].add(path.relative_to(ROOT).as_posix())
    return found


def files_of(name):
    return ", ".join(sorted(uses().get(name, ["no file"])))


def test_there_are_no_others():
    listed = IMPORTED | OF_OBJECTS.keys()
    assert {name: files_of(name) for name in uses().keys() - listed} == {}, "take a public name, or add it to the lists"
    assert listed - uses().keys() == set(), "no file uses them any more"


def test_another_one_would_be_seen():
    found = names_in(
        ast.parse(
            "import torch.fx._one\n"
            "from torch._two import three as four\n"
            "short, aten = torch.fx, torch.ops.aten\n"
            "class Ours(nn.Module):\n"
            "    def _own(self): self._also = super()._five(self._own, self._also, self._six)\n"
            "aten._seven(four._eight.data, getattr(short, '_nine'), torch.fx._one._ten)\n"
        )
    )
    expected = {"torch._two.three", "torch.ops.aten._seven", "torch._two.three._eight", "torch.fx._one._ten"}
    assert set(found) == expected | {"torch.fx._one", "._five", "._six", "._nine"}


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_what_is_imported_is_there(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        pytest.fail(f"{name} is gone, which these use: {files_of(name)}")


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_what_objects_have_is_there(name):
    assert hasattr(OF_OBJECTS[name](), name.removeprefix(".")), files_of(name)


# What no name in the files says


def test_a_checkpoint_that_runs_again_is_known_by_its_frame():
    """core/costs/throughput.py looks for the ``unpack_hook`` of torch's and of ours."""
    for run in (partial(recompute, modules=[]), partial(checkpoint, use_reentrant=False)):
        seen = []
        run(lambda x, seen=seen: seen.append(_recomputes()) or x.sin(), torch.ones(1, requires_grad=True)).backward()
        assert seen == [False, True]


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_caches_are_known_by_their_method_and_hold_layers(kind):
    """core/activations/block_state.py copies them, and core/activations/compiled.py refuses to go on with them."""
    assert callable(kind.get_seq_length)
    assert "layers" in signature(Cache.__init__).parameters
