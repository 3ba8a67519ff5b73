"""Selective plans: plain's result bit for bit, no product or convolution twice, and fewer bytes kept."""

import warnings
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from bits import different, loss_of, record_of, train_step
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from memsave_recipes.core.activations import apply_plan, plan_blocks, recompute
from memsave_recipes.core.activations.recompute import KEPT_OPERATORS, _known_of, draws, kept_by_policy, select_ops
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span

aten = torch.ops.aten
MODELS = ["vgg_small", "densenet_small", "vit", "gpt2", "resnet", "llama", "noisy_cnn"]


def resnet():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck", num_labels=5)
    return ResNetForImageClassification(config)


def llama():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **shape))


def noisy_cnn():
    """BatchNorm, dropout and activations in place, all inside one block."""
    children = []
    for width in (3, 8, 8):
        layers = [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout2d(0.3, inplace=True), nn.SiLU(True)]
        children.append(nn.Sequential(*layers, nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Dropout(0.2)))
    return nn.Sequential(nn.Sequential(*children), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.fixture
def make(make_case):
    """``make_case`` with three more models, each in the case of its kind."""

    def build(name):
        if name in ("resnet", "llama", "noisy_cnn"):
            case = make_case("gpt2" if name == "llama" else "vgg_small")
            torch.manual_seed(0)
            case.model = {"resnet": resnet, "llama": llama, "noisy_cnn": noisy_cnn}[name]().train()
            return case
        return make_case(name)

    return build


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_micro_batches_give_plain_bit_for_bit(make, name, bf16):
    expected = train_step(make(name), bf16=bf16, micro_batches=2)
    case = make(name)
    with apply_plan(case.model, plan_blocks(case.model, "selective")) as handle:
        assert handle.plan.blocks_under(Action.SELECT_OPS) == handle.plan.blocks
        assert not different(train_step(case, bf16=bf16, micro_batches=2), expected)


@pytest.mark.parametrize("name", ["densenet_small", "gpt2", "noisy_cnn"])
def test_two_forwards_before_one_backward(make, name):
    def both(case):
        torch.manual_seed(7)
        losses = [loss_of(case, bf16=True), loss_of(case, bf16=True)]
        sum(losses).backward()
        return record_of(case, losses)

    expected, case = both(make(name)), make(name)
    with apply_plan(case.model, plan_blocks(case.model, "selective")):
        assert not different(both(case), expected)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_and_batchnorm_are_really_there(make, name):
    """So that the tests above cannot pass for want of anything to get wrong."""
    case = make(name)
    first, second = loss_of(case, bf16=False), loss_of(case, bf16=False)
    assert (first != second) == (name in ("vgg_small", "vit", "gpt2", "noisy_cnn"))
    assert any("num_batches" in name for name, _ in case.model.named_buffers()) == (
        name in ("densenet_small", "resnet", "noisy_cnn")
    )


def step_flops(case, strategy):
    with apply_plan(case.model, plan_blocks(case.model, strategy)), FlopCounterMode(display=False) as counter:
        case.loss_of(case.model, case.batch).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_no_flop_runs_twice(make, name):
    case = make(name)
    plain = step_flops(case, "none")
    assert step_flops(case, "selective") == plain
    assert step_flops(case, "full") > plain


def kept_bytes(case, strategy):
    with apply_plan(case.model, plan_blocks(case.model, strategy)):
        with SavedTensors(case.model) as saved, kept_by_policy() as kept:
            loss = case.loss_of(case.model, case.batch)
        loss.backward()
    assert saved.storages.items() >= kept.items()
    return saved.num_bytes


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vgg_small"])
def test_fewer_bytes_are_kept_than_plain_keeps(make, name):
    case = make(name)
    full, some, plain = (kept_bytes(case, strategy) for strategy in ("full", "selective", "none"))
    assert full < some < plain


def test_kept_bytes_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 24), nn.GELU())
    with kept_by_policy() as outer, kept_by_policy() as kept:
        output = select_ops(model, torch.randn(4, 8), modules=[model])
    assert sorted(kept.values()) == [4 * 16 * 4, 4 * 24 * 4]
    assert outer == kept
    with kept_by_policy() as nothing:
        output.sum().backward()
    assert not nothing


def test_hooks_around_it_see_its_inputs_alone():
    """Torch 2.15 warns that a later one would show them what is kept, too, and count it twice."""
    linear, inputs, seen = nn.Linear(8, 16), torch.randn(4, 8), set()
    with (
        warnings.catch_warnings(action="error"),
        kept_by_policy() as kept,
        saved_tensors_hooks(lambda tensor: seen.add(tensor.untyped_storage().data_ptr()) or tensor, lambda one: one),
    ):
        output = select_ops(lambda x: linear(x).exp(), inputs, modules=[linear])
    empty = 0  # torch 2.11's checkpoint saves a tensor without memory, too
    assert seen - {empty} == {inputs.untyped_storage().data_ptr()}
    assert list(kept.values()) == [4 * 16 * 4]
    output.sum().backward()
    assert linear.weight.grad is not None


def gradients(function, *inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(3)
    function(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves]


def noise_then_dropout(x, weight):
    return F.dropout((x @ weight) * torch.rand_like(x), 0.5) * F.dropout(x, 0.5)


def selected(function):
    return lambda *inputs: select_ops(function, *inputs, modules=[])


def test_an_operator_that_draws_runs_again_even_if_it_is_in_the_list(monkeypatch):
    monkeypatch.setattr(recompute, "KEPT_OPERATORS", KEPT_OPERATORS | {"aten::rand_like"})
    inputs = torch.randn(16, 16), torch.randn(16, 16)
    expected = gradients(noise_then_dropout, *inputs)
    assert all(map(torch.equal, gradients(selected(noise_then_dropout), *inputs), expected))
    monkeypatch.setattr(recompute, "draws", lambda *call: False)  # the negative control
    assert not all(map(torch.equal, gradients(selected(noise_then_dropout), *inputs), expected))


ATTENTIONS = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._flash_attention_forward.default,
    aten._efficient_attention_forward.default,
]


def is_kept(op, args, kwargs):
    return _known_of(op).may_be_kept and not draws(op, args, kwargs)


@pytest.mark.parametrize("op", ATTENTIONS, ids=lambda op: op.name())
def test_attention_is_kept_only_if_it_draws_nothing(op):
    names = [argument.name for argument in op._schema.arguments]
    args = [None] * names.index("dropout_p")
    assert is_kept(op, (*args, 0.0), {})
    assert is_kept(op, tuple(args), {"dropout_p": 0.0})
    assert not is_kept(op, (*args, 0.1), {})
    assert not is_kept(op, tuple(args), {"dropout_p": 0.1})


def test_every_fused_attention_of_this_torch_is_in_the_list():
    fused = {name for name in torch._C._dispatch_get_all_op_names() if "aten::_scaled_dot_product" in name}
    forwards = {name.partition(".")[0] for name in fused if "backward" not in name}
    assert forwards - {"aten::_scaled_dot_product_attention_math"} <= KEPT_OPERATORS  # that one is made of products


def test_every_operator_that_torch_counts_flops_of_is_in_the_list():
    from torch.utils.flop_counter import flop_registry

    counted = {f"aten::{packet.__name__}" for packet in flop_registry if str(packet).startswith("aten.")}
    counted = {name for name in counted if "backward" not in name}
    below = {"_convolution", "cudnn_convolution", "_slow_conv2d_forward", "convolution_overrideable"}
    assert counted - KEPT_OPERATORS <= {f"aten::{name}" for name in below}  # what a convolution calls


def test_what_is_mutable_or_cheap_runs_again():
    assert is_kept(aten.mm.default, (), {})
    assert not is_kept(aten.mm.out, (), {})
    for op in (aten.native_dropout.default, aten.gelu.default, aten.native_batch_norm.default, aten._to_copy.default):
        assert not is_kept(op, (), {})


@pytest.mark.parametrize("name", ["llama", "noisy_cnn"])
def test_remove_restores_the_model_exactly(make, name):
    case = make(name)
    before = {module: dict(module.__dict__) for module in case.model.modules()}
    handle = apply_plan(case.model, plan_blocks(case.model, "selective"))
    assert any(dict(module.__dict__) != attributes for module, attributes in before.items())
    handle.remove()
    assert {module: dict(module.__dict__) for module in case.model.modules()} == before


def test_in_place_modules_outside_the_selective_blocks_stay_as_they_are(make):
    case = make("densenet_small")
    plan = plan_blocks(case.model, "none")
    spans = (Span(start=0, stop=1, action=Action.SELECT_OPS), Span(start=1, stop=len(plan.blocks), action=Action.KEEP))
    in_place = [name for name, module in case.model.named_modules() if getattr(module, "inplace", False)]
    assert plan.blocks[0].startswith("features.conv0")
    with apply_plan(case.model, Plan(strategy="mine", blocks=plan.blocks, spans=spans)):
        now = [name for name, module in case.model.named_modules() if getattr(module, "inplace", False)]
    assert set(in_place) - set(now) == {"features.relu0"}


def writes_on_what_is_kept(x, weight):
    return F.relu_(x @ weight).square()


def adds_to_a_view_of_what_is_kept(x, weight):
    y = x @ weight
    y[:2] += 1
    return y.square()


def writes_twice_and_reads_between(x, weight):
    y = x @ weight
    z = y.sin_() + x
    return y.mul_(2) + z


def normalises_the_weights_of_a_router(x, weight):
    chosen, experts = (x @ weight).softmax(-1).topk(2)
    chosen /= chosen.sum(dim=-1, keepdim=True)
    return chosen.square() * experts


def writes_on_a_transposed_product(x, weight):
    y = torch.mm(weight, x).t()
    y.add_(x)
    return y.exp() @ weight


WRITERS = [
    writes_on_what_is_kept,
    adds_to_a_view_of_what_is_kept,
    writes_twice_and_reads_between,
    normalises_the_weights_of_a_router,
    writes_on_a_transposed_product,
]


@pytest.mark.parametrize("function", WRITERS)
def test_writing_in_place_on_what_is_kept_gives_plain_bit_for_bit(function):
    inputs = torch.randn(4, 4), torch.randn(4, 4)
    assert all(map(torch.equal, gradients(selected(function), *inputs), gradients(function, *inputs)))


@pytest.mark.parametrize("function", WRITERS)
def test_writing_in_place_on_what_is_kept_keeps_no_more_bytes(function):
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def without_the_writes(x, weight):
        return x @ weight if function is not normalises_the_weights_of_a_router else (x @ weight).topk(2).values

    with kept_by_policy() as expected:
        select_ops(without_the_writes, x, weight, modules=[])
    with kept_by_policy() as kept:
        select_ops(function, x, weight, modules=[])
    products = 1 + (function is writes_on_a_transposed_product)
    assert sum(kept.values()) == sum(expected.values()) + (products - 1) * x.nbytes


def test_the_copy_has_the_layout_of_the_output():
    """Kernels may round otherwise on another one."""
    strides = []

    def function(x, weight):
        y = F.conv2d(x, weight)
        strides.append(y.stride())
        return y.add_(1).square()

    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    weight = torch.randn(6, 4, 3, 3, requires_grad=True)
    select_ops(function, x, weight, modules=[]).sum().backward()
    assert strides[0] == strides[1] != torch.empty(2, 6, 3, 3).stride()


def test_without_the_copy_the_second_run_would_take_what_was_written(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(recompute._FirstRun, "_keep_copies", lambda *_: None)
    output = selected(writes_on_what_is_kept)(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    with pytest.raises(InputError, match="written on in place after it ran"):
        output.sum().backward()


def writes_on_a_view_of_its_input(x, weight):
    x.view(-1)[3:].mul_(2)
    return (x @ weight).square()


def test_writing_in_place_on_an_input_is_refused_in_the_forward():
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with pytest.raises(InputError, match=r"aten::mul_.Tensor writes in place on an input of the block") as error:
        select_ops(writes_on_a_view_of_its_input, x, weight, modules=[nn.Linear(1, 1)])
    assert "Linear cannot run under selective" in error.value.one_line
    assert "out of place" in error.value.one_line


def test_writing_in_place_on_what_runs_again_is_right():
    def function(x, weight):
        y = (x @ weight).sin()
        y[:2] += 1
        return F.relu_(y.mul_(2) + x)

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    assert all(map(torch.equal, gradients(selected(function), *inputs), gradients(function, *inputs)))


def test_writing_on_a_kept_output_afterwards_is_named():
    def function(x, weight):
        y = x @ weight
        return y, y.square()

    y, squares = select_ops(function, torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), modules=[])
    y.add_(1)
    with pytest.raises(InputError, match="written on in place after it ran"):
        squares.sum().backward()


def test_a_second_run_that_uses_other_operators_is_named():
    once = iter([False, True])

    def function(x):
        return (x.sin() if next(once) else x).exp().square()

    output = select_ops(function, torch.randn(4, requires_grad=True), modules=[])
    with pytest.raises(InputError, match="its second run uses other operators"):
        output.sum().backward()


def test_an_error_leaves_no_mode_behind():
    """Whoever goes on with another plan, as the planner does, holds the error meanwhile."""
    modes = []
    with suppress(InputError):
        try:
            select_ops(lambda x: x.add_(1), torch.randn(4), modules=[])
        finally:
            modes.append(_get_current_dispatch_mode())
    assert modes == [None]


def test_the_modules_of_a_block_are_looked_through_once(make, monkeypatch):
    case = make("llama")
    apply_plan(case.model, plan_blocks(case.model, "selective"))
    modules, seen, walks = nn.Module.modules, [], []
    monkeypatch.setattr(nn.Module, "modules", lambda self: seen.append(type(self).__name__) or modules(self))
    for _ in range(2):
        seen.clear()
        loss_of(case, bf16=False).backward()
        walks.append(seen.count("LlamaDecoderLayer"))
    assert walks[0] >= 3
    assert walks[1] == 0


def test_one_backward_only():
    output = select_ops(lambda x: (x @ x).sin(), torch.randn(4, 4, requires_grad=True), modules=[])
    output.sum().backward(retain_graph=True)
    with pytest.raises(InputError, match="only allowed to backward once"):
        output.sum().backward()


def test_a_compiled_function_inside_is_compiled_by_itself():
    """Torch would compile what a mode does with an operator, too, where a graph breaks."""
    first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    @torch.compile(backend="eager")
    def compiled(x):
        product = (x @ first).relu()
        torch._dynamo.graph_break()
        return (product @ second).sin()

    def block(x):
        return torch.tanh(compiled(x.cos()) @ first)

    inputs = torch.randn(4, 8, requires_grad=True), first, second
    expected = torch.autograd.grad(block(inputs[0]).sum(), inputs)
    counters.clear()
    for _ in range(2):
        with kept_by_policy() as kept:
            output = select_ops(block, inputs[0], modules=[])
        assert all(map(torch.equal, torch.autograd.grad(output.sum(), inputs), expected))
        assert len(kept) == 3
    assert not counters["stats"]


def test_without_gradients_the_plan_is_ignored(make):
    case = make("noisy_cnn")
    case.model.eval()
    expected = case.model(case.batch)
    apply_plan(case.model, plan_blocks(case.model, "selective"))
    with torch.no_grad(), kept_by_policy() as kept:
        assert torch.equal(case.model(case.batch), expected)
    assert not kept


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


FACTORS = [
    ((4, 3, 5), (1, 5, 2), False),  # the one that differs
    ((4, 3, 5), (1, 5, 2), True),
    ((1, 3, 5), (4, 5, 2), False),
    ((4, 3, 5), (4, 5, 2), False),
    ((4, 3, 5), (5, 2), False),
    ((3, 5), (4, 5, 2), False),
    ((4, 3, 5), (5,), False),
    ((2, 4, 3, 5), (1, 5, 2), False),
    ((2, 4, 3, 5), (1, 1, 5, 2), False),
]


@pytest.mark.parametrize(("first", "second", "trains"), FACTORS)
def test_which_kernel_a_product_takes_under_a_policy(first, second, trains):
    """One product takes another kernel, as docs/activation_plans.md says: no bits are promised for it."""
    factors = torch.randn(first, requires_grad=True), torch.randn(second, requires_grad=trains)
    products = {"aten::mm", "aten::bmm", "aten::mv"}
    with profile() as profiled:
        torch.matmul(*factors)
    with _Names() as names:
        torch.matmul(*factors)
    plain = [event.name for event in profiled.events() if event.name in products]
    watched = [name for name in names.seen if name in products]
    assert (plain == watched) == ((first, second, trains) != FACTORS[0])
