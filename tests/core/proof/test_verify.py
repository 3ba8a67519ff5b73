"""The proof finds every fault that a plan can have, by its tensor, and leaves a healthy run as it was."""

import copy
import os
import random
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from samples import every_third
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.activations import PlanHandle, apply_plan, plan_blocks, spans
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span
from memsave_recipes.core.proof import Outcome, compare_runs, proof, use_deterministic_kernels, verify
from memsave_recipes.core.proof.outcomes import distance_in_ulp
from memsave_recipes.core.proof.proof import FLASH_ATTENTION, nondeterministic_operator
from memsave_recipes.models.convnets import build_vgg
from memsave_recipes.training.optimizers import step_in_backward

STRATEGIES = {
    "vgg_bn": ["full", "every:2", "segments:2"],
    "densenet_small": ["full", "every:2", "segments:2", "bottleneck"],
    "vit": ["full", "every:2", "segments:2"],
    "gpt2": ["full", "every:2", "segments:2"],
    "llama": ["full", "every:2", "segments:2"],
}


@pytest.fixture
def build(make_case):
    """A case by name: those that all tests know, a small VGG with BatchNorm and a tiny Llama."""

    def make(name):
        if name == "vgg_bn":
            case = make_case("vgg_small")
            case.model = build_vgg("vgg_small_bn", num_classes=10).train()
            return case
        if name != "llama":
            return make_case(name)
        case = make_case("gpt2")
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        case.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, **shape)).train()
        return case

    return make


def step_of(case, accumulation_steps=2):
    """A global batch whose micro-batches seed dropout as those of a run do."""

    def step():
        total = torch.tensor(0.0)
        for index in range(accumulation_steps):
            torch.manual_seed(100 + index)
            loss = case.loss_of(case.model, torch.roll(case.batch, 5 * index, dims=-1))
            loss.backward()
            total = total + loss.detach()
        return total

    return step


def verdict_on(case, strategy="full", **step):
    with apply_plan(case.model, plan_blocks(case.model, strategy)) as handle:
        return verify(case.model, handle, step_of(case, **step))


@pytest.mark.parametrize(("name", "strategy"), every_third((name, s) for name, of in STRATEGIES.items() for s in of))
def test_healthy_plans_are_identical(build, name, strategy):
    case = build(name)
    verdict = verdict_on(case, strategy)
    assert (verdict.status, verdict.num_different) == ("identical", 0)
    num_buffers, num_parameters = len(list(case.model.buffers())), len(list(case.model.parameters()))
    assert verdict.num_compared == 1 + num_parameters + num_buffers + 2  # the loss; the RNG of torch and Python


def test_without_a_plan_there_is_nothing_to_verify(build):
    case = build("vgg_bn")
    with apply_plan(case.model, plan_blocks(case.model, "none")) as handle:
        verdict = verify(case.model, handle, lambda: pytest.fail("nothing has to run"))
    assert verdict.passed
    assert verdict.describe() == "nothing to verify; the plan keeps everything"


def test_under_autocast(build):
    case = build("vgg_bn")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verdict_on(case).status == "identical"


# Operators without a deterministic kernel, of which a CPU has a few


class Unpooling(nn.Module):
    """Its ``max_unpool2d`` has no deterministic kernel on a CPU either."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1))

    def forward(self, x):
        pooled, places = F.max_pool2d(self.layers(x), 2, return_indices=True)
        return F.max_unpool2d(pooled, places, 2)


def unpooling_step(model):
    def step():
        torch.manual_seed(3)
        loss = model(torch.rand(2, 1, 8, 8)).square().sum()
        loss.backward()
        return loss.detach()

    return step


@pytest.fixture
def like_a_gpu(monkeypatch):
    monkeypatch.setattr(proof, "_has_nondeterministic_kernels", lambda device: True)


def kernels():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_proof_asks_for_kernels_that_only_errors_get(build, like_a_gpu, monkeypatch):
    """Attention's backward has a fixed order on CUDA only where torch would raise."""
    monkeypatch.delenv(FLASH_ATTENTION, raising=False)
    case, asked = build("gpt2"), []
    case.model.register_forward_pre_hook(lambda *_: asked.append((*kernels(), os.environ[FLASH_ATTENTION])))
    assert verdict_on(case).status == "identical"
    assert set(asked) == {(True, False, "1")}
    assert kernels() == (False, False)
    assert FLASH_ATTENTION not in os.environ


def test_the_proof_names_an_operator_without_one(like_a_gpu):
    model = Unpooling().train()
    with apply_plan(model, plan_blocks(model, "full")) as handle:
        verdict = verify(model, handle, unpooling_step(model))
    assert verdict.status == "identical"
    assert verdict.note == "max_unpooling2d_forward_out adds in any order"
    assert kernels() == (False, False)


def test_a_trial_takes_the_fixed_order_and_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    try:
        assert use_deterministic_kernels(model, lambda: model(torch.rand(2, 1, 8, 8)).sum().backward()) is None
        assert kernels() == (True, False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_trial_that_meets_an_operator_without_one_only_warns():
    model = Unpooling().train()
    before = copy.deepcopy(model.state_dict())
    try:
        assert use_deterministic_kernels(model, unpooling_step(model)) == "max_unpooling2d_forward_out"
        assert kernels() == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_other_errors_of_a_trial_are_raised(like_a_gpu):
    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            use_deterministic_kernels(nn.Linear(2, 2), lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    finally:
        torch.use_deterministic_algorithms(False)


def test_cublas_without_its_workspace_is_named():
    error = RuntimeError(
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
        "CuBLAS and you have CUDA >= 10.2."
    )
    assert nondeterministic_operator(error) == "cuBLAS without CUBLAS_WORKSPACE_CONFIG=:4096:8"


# The faults


def recompute_badly(function, *inputs, modules, again=nullcontext, **kwargs):
    """torch's own checkpoint; ``again`` is what the second run happens in."""
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs)


@pytest.fixture
def plant(monkeypatch):
    """Run another function wherever a plan recomputes."""
    return lambda function: monkeypatch.setitem(spans.RUN, Action.RECOMPUTE, function)


def test_a_double_batchnorm_update(build, plant):
    plant(recompute_badly)
    verdict = verdict_on(build("vgg_bn"), "full")
    assert verdict.status == "different"
    assert (verdict.first.kind, verdict.first.name) == ("buffer", "features.1.running_mean")
    assert verdict.first.ulp > 0


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_dropout_without_its_rng(build, plant, name):
    plant(partial(recompute_badly, preserve_rng_state=False))
    verdict = verdict_on(build(name), "full")
    assert verdict.status == "different"
    assert verdict.first.kind == "gradient"
    assert verdict.first.absolute > 1e-4


@contextmanager
def a_draw():
    torch.rand(1)
    yield


def test_rng_that_has_moved_on(build, plant):
    plant(partial(recompute_badly, preserve_rng_state=False, again=a_draw))
    verdict = verdict_on(build("llama"), "full")
    assert (verdict.first.kind, verdict.first.name, verdict.num_different) == ("RNG", "cpu", 1)


COUNTED = SimpleNamespace(calls=0)


class Counting(nn.Module):
    """Multiplies by how often it was called, which it counts in ``home``."""

    calls = 0

    def __init__(self, home):
        super().__init__()
        self.home = home
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x):
        if self.home == "buffer":
            self.count = self.count + 1  # another tensor, not another value
            return x * self.weight * torch.sin(self.count)
        holder = {"class": Counting, "global": COUNTED}.get(self.home, self)
        holder.calls = holder.calls + 1
        return x * self.weight * holder.calls


def counting_case(build, home):
    case = build("vit")
    Counting.calls = COUNTED.calls = 0
    case.model = nn.Sequential(nn.Linear(4, 4), Counting(home), nn.Linear(4, 4))
    case.batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    case.loss_of = lambda model, batch: model(batch).square().mean()
    return case


@pytest.mark.parametrize("home", ["attribute", "class"])
def test_a_counter_in_the_module_or_its_class_counts_once(build, home):
    case = counting_case(build, home)
    assert verdict_on(case).passed
    assert case.model[1].calls == 0


def test_a_counter_in_a_buffer_is_no_fault_and_put_back(build):
    case = counting_case(build, "buffer")
    assert verdict_on(case).status == "identical"
    assert case.model[1].count == 0


def test_a_global_counter_is_no_fault_of_the_plan(build):
    verdict = verdict_on(counting_case(build, "global"))
    assert (verdict.status, verdict.first.kind) == ("not repeatable", "loss")
    assert not verdict.passed


class Doubling(nn.Module):
    """Overwrites its input where autograd does not see it."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        (x.data if self.hidden else x).mul_(2)
        return self.linear(x)


@pytest.mark.parametrize(("hidden", "kind"), [(True, "gradient"), (False, "run")])
def test_in_place_on_an_input(build, hidden, kind):
    case = counting_case(build, "attribute")
    case.model = nn.Sequential(nn.Linear(4, 4), Doubling(hidden), nn.Linear(4, 4))
    verdict = verdict_on(case)
    assert (verdict.status, verdict.first.kind) == ("different", kind)
    if hidden:
        assert verdict.first.name == "1.linear.weight"
    else:
        assert "modified by an inplace operation" in verdict.first.words


class Projecting(nn.Module):
    """A frozen projection, whose product autocast makes in another precision, and a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("fixed", torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))

    def forward(self, x):
        return (x @ self.fixed).float() * self.weight


@pytest.mark.parametrize(("first", "kind"), [(Projecting, "gradient"), (partial(nn.Linear, 4, 4), "run")])
def test_another_autocast_in_the_recomputation(build, plant, first, kind):
    """What is saved in another dtype ends the run; what is saved in the same one is just wrong."""
    plant(partial(recompute_badly, again=partial(torch.autocast, "cpu", dtype=torch.bfloat16)))
    case = counting_case(build, "attribute")
    case.model = nn.Sequential(first(), nn.GELU())
    verdict = verdict_on(case, "segments:2" if kind == "gradient" else "full")
    assert (verdict.status, verdict.first.kind) == ("different", kind)
    assert verdict.first.name == ("0.weight" if kind == "gradient" else "")


def test_a_plan_that_runs_the_wrong_block(build):
    case = build("gpt2")
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        first, second = (case.model.transformer.h[i].forward for i in (0, 1))
        first.method, second.method = second.method, first.method
        verdict = verify(case.model, handle, step_of(case))
    assert (verdict.status, verdict.first.kind) == ("different", "loss")


@pytest.mark.parametrize("name", ["gpt2", "vgg_bn", "densenet_small"])
def test_a_plan_that_recomputes_another_block_than_it_says(build, name):
    """All tensors are right, and the memory is not."""
    case = build(name)
    blocks = plan_blocks(case.model, "full").blocks
    wanted = Plan(strategy="hand-made", blocks=blocks, spans=_one_recomputed(len(blocks), 1))
    applied = Plan(strategy="hand-made", blocks=blocks, spans=_one_recomputed(len(blocks), 2))
    with apply_plan(case.model, applied) as handle:
        handle.plan = wanted
        verdict = verify(case.model, handle, step_of(case))
    assert (verdict.status, verdict.first.kind, verdict.first.name) == ("different", "block", blocks[2])
    assert verdict.num_different == 1


def _one_recomputed(num_blocks, index):
    edges = [(0, index, Action.KEEP), (index, index + 1, Action.RECOMPUTE), (index + 1, num_blocks, Action.KEEP)]
    return tuple(Span(start=start, stop=stop, action=action) for start, stop, action in edges)


def without_nan(function, *inputs, modules):
    return tuple(torch.nan_to_num(tensor) for tensor in function(*inputs))


def nan_case(build):
    case = counting_case(build, "attribute")
    case.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        case.model[0].weight[1, 2] = torch.nan
    return case


def test_nan_that_the_plan_hides(build, plant):
    plant(without_nan)
    verdict = verdict_on(nan_case(build))
    assert (verdict.status, verdict.first.kind) == ("different", "loss")
    assert verdict.first.words == "1 of 1 values differ, 1 of them NaN in one run and a number in the other"


def test_nan_in_both_runs_is_equal_and_no_beginning(build):
    verdict = verdict_on(nan_case(build))
    assert (verdict.status, verdict.first.kind, verdict.passed) == ("not finite", "loss", False)
    assert verdict.num_different == 0


def outcome(**tensors):
    kinds = {"loss": ("loss", ""), "gradient": ("gradient", "w"), "buffer": ("buffer", "b")}
    return Outcome(tensors={kinds[name]: torch.tensor(values) for name, values in tensors.items()})


def test_nan_at_another_place():
    plain, planned = outcome(gradient=[torch.nan, 1.0, 2.0]), outcome(gradient=[1.0, torch.nan, 2.0])
    verdict = compare_runs(plain, planned)
    assert verdict.first.words == "2 of 3 values differ, 2 of them NaN in one run and a number in the other"
    assert (verdict.first.ulp, verdict.first.absolute) == (None, None)


# Comparing


def test_the_first_difference_is_the_first_in_a_step():
    plain = outcome(buffer=[1.0], gradient=[1.0, 2.0], loss=3.0)
    planned = outcome(buffer=[2.0], gradient=[1.0, 2.0 + 2**-22], loss=3.0)
    verdict = compare_runs(plain, planned)
    assert (verdict.num_compared, verdict.num_different) == (3, 2)
    assert verdict.first.describe() == "gradient w: 1 of 2 values differ, by up to 1 ulp (2.4e-07)"
    assert verdict.to_dict() == {
        "verdict": "different",
        "num_compared": 3,
        "num_different": 2,
        "first_kind": "gradient",
        "first_name": "w",
        "first_words": "1 of 2 values differ",
        "first_ulp": 1,
        "first_absolute": 2**-22,
    }


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (outcome(gradient=[1.0]), outcome(), "only the plain run has one"),
        (outcome(), outcome(gradient=[1.0]), "only the planned run has one"),
        (outcome(gradient=[1.0]), outcome(gradient=[[1.0]]), "(1,) in float32 became (1, 1) in float32"),
        (outcome(buffer=[1]), outcome(buffer=[3]), "1 of 1 values differ"),
        (outcome(loss=1.0), outcome(loss=torch.inf), "1 of 1 values differ"),
    ],
)
def test_what_else_can_differ(one, other, words):
    assert compare_runs(one, other).first.words == words


def test_zeros_of_both_signs_are_equal():
    assert compare_runs(outcome(gradient=[0.0]), outcome(gradient=[-0.0])).status == "identical"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distance_in_ulp(dtype):
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    one = torch.tensor([1.0, 1.0, -1.0, 0.0, tiny, 1.0], dtype=dtype)
    other = torch.tensor([1 + eps, 1 - eps, -1 - 2 * eps, tiny, -tiny, 1.0], dtype=dtype)
    assert distance_in_ulp(one, other).tolist() == [1, 2, 2, 1, 2, 0]
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    assert distance_in_ulp(largest, -largest) > 60_000


# Plans that compile


@pytest.fixture
def compiled(build):
    """A model of linear layers whose middle one is made by ``function`` under a plan that says it compiles."""

    @contextmanager
    def make(function, dtype=torch.float32):
        case = counting_case(build, "attribute")
        torch.manual_seed(0)
        layers = [nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)]
        case.model = nn.Sequential(*layers).to(dtype)
        case.batch = case.batch.repeat(8, 1).to(dtype)
        span = Span(start=0, stop=1, action=Action.COMPILE, ratio=0.5)
        with PlanHandle(Plan(strategy="compiled", blocks=("2",), spans=(span,))) as handle:
            handle.replace(layers[2], "forward", partial(function, layers[2]))
            yield case, handle

    return make


def in_another_order(layer, x):
    return x[:, 32:] @ layer.weight[:, 32:].T + x[:, :32] @ layer.weight[:, :32].T + layer.bias


def in_bf16(layer, x):
    return torch.nn.functional.linear(x.bfloat16(), layer.weight.bfloat16()).to(x) + layer.bias


def test_another_order_is_as_exact_as_plain(compiled):
    with compiled(in_another_order) as (case, handle):
        verdict = verify(case.model, handle, step_of(case))
        assert verdict.status == "as exact as plain"
        assert verdict.passed
        assert all(module.training for module in case.model.modules())
        assert {parameter.dtype for parameter in case.model.parameters()} == {torch.float32}


def test_less_precision_is_not(compiled):
    with compiled(in_bf16) as (case, handle):
        verdict = verify(case.model, handle, step_of(case))
    assert verdict.status == "different"
    assert "its error against float64 is" in verdict.first.words
    assert verdict.first.ulp > 100


def test_statistics_have_to_be_counted_once_there_too(compiled):
    def twice(layer, x):
        return layer.owner[3](in_another_order(layer, x)) * 0 + in_another_order(layer, x)

    with compiled(twice) as (case, handle):
        object.__setattr__(case.model[2], "owner", case.model)
        verdict = verify(case.model, handle, step_of(case))
    assert (verdict.first.kind, verdict.first.name) == ("buffer", "3.running_mean")


def test_without_float64_there_is_no_proof(compiled):
    class Single(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise RuntimeError("not implemented for 'Double'")
            return x

    with compiled(in_another_order) as (case, handle):
        case.model.append(Single())
        verdict = verify(case.model, handle, step_of(case))
    assert (verdict.status, verdict.passed) == ("unproven", False)
    assert verdict.note == "nothing in float64 to compare with: RuntimeError: not implemented for 'Double'"


# Nothing is left behind


def state_of(case):
    tensors = {**dict(case.model.named_parameters()), **dict(case.model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    attributes = {module: dict(vars(module)) for module in case.model.modules()}
    return values, attributes, torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("name", ["vgg_bn", "gpt2"])
def test_everything_is_put_back(build, plant, name, fault):
    case = build(name)
    if fault:
        plant(partial(recompute_badly, preserve_rng_state=False))
    frozen, other = case.model.get_submodule("features.1" if name == "vgg_bn" else "transformer.h.1"), None
    frozen.eval()
    other = next(iter(case.model.parameters()))
    other.grad = gradient = torch.ones_like(other)
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        values, attributes, rng, python_rng = state_of(case)
        replaced = [(module, attribute, value) for module, attribute, value, _ in handle.replaced]
        verdict = verify(case.model, handle, step_of(case))
        assert verdict.passed is not fault
        after = state_of(case)
        assert all(torch.equal(after[0][key], value) for key, value in values.items())
        assert after[1] == attributes
        assert torch.equal(after[2], rng)
        assert after[3] == python_rng
        assert [entry[:2] for entry in handle.replaced] == [entry[:2] for entry in replaced]
    assert other.grad is gradient
    assert torch.equal(gradient, torch.ones_like(other))
    assert all(p.grad is None for p in case.model.parameters() if p is not other)
    assert all("forward" not in vars(module) for module in case.model.modules())


def test_a_step_that_fails_leaves_nothing_behind_either(build):
    case = build("vgg_bn")
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        values = state_of(case)[0]

        def step():
            step_of(case)()
            raise KeyError("of the data")

        with pytest.raises(KeyError):
            verify(case.model, handle, step)
        assert all(torch.equal(state_of(case)[0][key], value) for key, value in values.items())
        assert all(parameter.grad is None for parameter in case.model.parameters())
        assert verify(case.model, handle, step_of(case)).status == "identical"


def test_no_memory_is_no_difference(build, plant):
    def exhausted(function, *inputs, modules):
        raise torch.OutOfMemoryError("no memory left")

    plant(exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        verdict_on(build("vit"))


def test_what_the_plan_tells_the_user_is_no_difference(build, plant):
    def refuse(function, *inputs, modules):
        raise InputError("take another plan")

    plant(refuse)
    with pytest.raises(InputError):
        verdict_on(build("vit"))


def test_an_optimizer_that_steps_in_the_backward_does_not(build):
    case = build("vit")
    before = copy.deepcopy(case.model.state_dict())
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    step_in_backward(optimizer)
    assert verdict_on(case).status == "identical"
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())
    step_of(case)()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())


def test_a_forward_that_moves_a_parameter_is_found_and_undone(build, plant):
    def move(function, *inputs, modules):
        with torch.no_grad():
            next(modules[0].parameters()).data.mul_(1 + 2**-20)
        return recompute_badly(function, *inputs, modules=modules)

    case = build("llama")
    before = copy.deepcopy(case.model.state_dict())
    plant(move)
    verdict = verdict_on(case)
    assert verdict.status == "different"
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())


def test_lifting_a_plan_and_setting_it_down(build):
    case = build("vgg_bn")
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        planned = {module: dict(vars(module)) for module in case.model.modules()}
        with handle.paused():
            assert all("forward" not in vars(module) for module in case.model.modules())
        assert {module: dict(vars(module)) for module in case.model.modules()} == planned


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x, settings):
        return (self.linear(x * settings.scale * Model.scale) + self.offset).tanh()


class Model(nn.Module):
    """Changes, after its layers ran, what they compute with."""

    scale = 1.0

    def __init__(self, change):
        super().__init__()
        self.layers, self.change = nn.ModuleList([Scaled(), Scaled()]), change

    def forward(self, x):
        settings, Model.scale = SimpleNamespace(scale=1.0), 1.0
        for layer in self.layers:
            x = layer(x, settings)
        self.change(self, settings)
        return x


CHANGES = {
    "an object that is given": lambda model, settings: setattr(settings, "scale", 2.0),
    "a global variable": lambda model, settings: setattr(Model, "scale", 2.0),
    "a buffer": lambda model, settings: model.layers[0].offset.add_(1),
    "a weight": lambda model, settings: model.layers[0].linear.bias.data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_nothing_else_finds_is_found(change, monkeypatch):
    monkeypatch.setattr(Model, "scale", 1.0)
    model = Model(CHANGES[change])

    def step():
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    verdict = verify(model, apply_plan(model, plan_blocks(model, "full")), step)
    assert verdict.status == "different"


def test_a_model_in_evaluation_mode_is_proven_as_it_will_train(build):
    case = build("gpt2")
    case.model.eval()
    modes = []
    case.model.register_forward_pre_hook(lambda module, _: modes.append({m.training for m in module.modules()}))
    assert verdict_on(case).passed
    assert modes == [{True}] * 4  # two micro-batches, plain and planned
    assert not any(module.training for module in case.model.modules())
