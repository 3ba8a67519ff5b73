"""Masters of bfloat16 weights: the bits of float32 weights that get the same gradients, and no casts of weights."""

import copy

import pytest
import torch
from decoders import TOKENS, causal_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memsave_recipes.core.costs.preserve_state import preserve_state
from memsave_recipes.core.host.masters import MASTERS, masters_in
from memsave_recipes.core.proof.outcomes import reducer_of_its_own
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.optimizers import make_optimizer

RULES = {
    "adamw": {"weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "weight_decay": 0.1},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
}
NUM_STEPS, NUM_ADDED = 3, 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 4)).bfloat16()


def make(model, dtype="bfloat16_master", **options):
    flags = {"max_grad_norm": 0.0, "learning_rate": 1e-2, **options}
    return make_optimizer(RecipeArguments(output_dir="run", dtype=dtype, **flags), model)


def losses(model, step, count=1):
    """Of so many micro-batches of a step."""
    random = torch.Generator().manual_seed(step)
    for batch in torch.randn(count, 4, 16, generator=random).bfloat16():
        yield model(batch).float().pow(2).sum()


def train(model, optimizer, steps=range(NUM_STEPS), count=1):
    for step in steps:
        for loss in losses(model, step, count):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_float32(weights, optimizer, model, count=1):
    """Step ``weights`` by the gradients that rounded ones have, added up in float32."""
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for one, wide in zip(model.parameters(), weights.parameters(), strict=True):
                one.copy_(wide)
        for loss in losses(model, step, count):
            for wide, gradient in zip(weights.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                wide.grad = gradient.float() if wide.grad is None else wide.grad + gradient.float()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("in_backward", "count"), [(False, 1), (False, NUM_ADDED), (True, 1)])
def test_updates_have_the_bits_of_float32_weights(rule, in_backward, count):
    model = make_model()
    expected = copy.deepcopy(model).float()
    train_float32(expected, make(expected, "float32", **RULES[rule]), make_model(), count)
    optimizer = make(model, **RULES[rule], optimizer_in_backward=in_backward)
    train(model, optimizer, count=count)
    masters = masters_in(optimizer).of
    for one, wide in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(masters[one], wide)
        assert torch.equal(one, wide.bfloat16())
        assert one.dtype == torch.bfloat16
        assert one.grad is None


def test_a_saved_state_goes_on_with_the_same_bits():
    straight = make_model()
    train(straight, make(straight))
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, range(2))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert all(one.dtype == torch.float32 for one in state[MASTERS].values())
    again = make_model()
    resumed = make(again)
    resumed.load_state_dict(state)
    again.load_state_dict(weights)
    train(again, resumed, [2])
    assert all(map(torch.equal, again.parameters(), straight.parameters()))


def test_a_weight_that_others_have_changed_is_taken_over():
    model = make_model()
    optimizer = make(model, optimizer="sgd", learning_rate=0.0)
    master = masters_in(optimizer).of[model[0].weight]
    train(model, optimizer, [0])
    with torch.no_grad():
        master.view(-1)[1] += 1e-6  # a bit that the weight does not have
        model[0].weight.view(-1)[0] = 7.0
    expected = master.detach().clone()
    expected.view(-1)[0] = 7.0
    train(model, optimizer, [1])
    assert torch.equal(master, expected)


class Casts(TorchDispatchMode):
    """Counts casts of weights of a model."""

    def __init__(self, model):
        super().__init__()
        self.weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].untyped_storage().data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_masters", [True, False])
def test_a_micro_batch_casts_no_weight(has_masters):
    """And the residual stream is bfloat16; under autocast it is float32, and every matrix is cast."""
    model = causal_model("gpt2", torch.bfloat16 if has_masters else torch.float32)
    optimizer = make(model, "bfloat16_master" if has_masters else "float32")
    streams = []
    model.transformer.h[1].register_forward_pre_hook(lambda layer, args: streams.append(args[0].dtype))
    with Casts(model) as casts:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=not has_masters):
                model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert casts.count == 0 if has_masters else casts.count >= 2 * 4 * 3  # four matrices in each of three layers
    assert streams == 2 * [torch.bfloat16 if has_masters else torch.float32]
    optimizer.step()


def averaged(accelerator):
    """The gradients of two micro-batches, the weights after three steps, and the gradients of another reducer."""
    model = make_model()
    optimizer = make(model)
    prepared = accelerator.prepare_model(model)

    def backward(step):
        found = losses(prepared, 2 * step + accelerator.process_index, 2)
        with prepared.no_sync():
            next(found).backward()
        next(found).backward()
        return [one.grad.clone() for one in model.parameters()]

    with preserve_state(model), reducer_of_its_own(prepared):
        others = backward(0)
    gradients = []
    for step in range(NUM_STEPS):
        gradients.append(backward(step))
        optimizer.step()
        optimizer.zero_grad()
    return gradients[0], others, [one.detach().clone() for one in masters_in(optimizer).of.values()]


@pytest.fixture
def one_thread():
    """As ranks have: with two, sums in bfloat16 are rounded at other places."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
def test_ranks_average_in_float32(run_on_ranks):
    ranks = run_on_ranks(averaged, 2)
    model = make_model()
    optimizer = make(model)
    for step in range(NUM_STEPS):
        for rank in range(2):
            for loss in losses(model, 2 * step + rank, 2):
                (loss / 2).backward()
        if step == 0:
            expected = [one.grad.clone() for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    for gradients, others, masters in ranks:
        assert all(map(torch.equal, gradients, others))
        assert {one.dtype for one in gradients} == {torch.float32}
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(masters, list(masters_in(optimizer).of.values()), rtol=1e-4, atol=1e-5)
