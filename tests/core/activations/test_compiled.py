"""Compiled layers: the plain gradients within rounding, one graph for all layers, and the ratio that was asked for."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.compiled import Region
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.core.costs.throughput import ModelFlops
from memsave_recipes.core.plans import Action, Plan, Span

pytestmark = pytest.mark.usefixtures("kernels_can_be_compiled")

VOCABULARY = 96
TOKENS = torch.randint(0, VOCABULARY, (6, 64), generator=torch.Generator().manual_seed(1))
WEIGHT = "transformer.h.0.attn.c_attn.weight"


def gpt2(dropout=0.0, num_layers=2):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=num_layers,
        n_head=4,
        n_embd=64,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def compiled_gpt2(ratio, **shape):
    model = gpt2(**shape)
    return model, apply_plan(model, plan_blocks(model, f"compiled:{ratio}"))


def loss_of(model, tokens=TOKENS):
    return model(input_ids=tokens, labels=tokens).loss


def backward(model, tokens=TOKENS, *, seed=7):
    """The loss and the gradients of one micro-batch, and the state of the generator after it."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    return gradients_of(model) | {"loss": loss.detach(), "generator": torch.get_rng_state()}


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model, tokens=TOKENS):
    with SavedTensors(model) as saved:
        loss = loss_of(model, tokens)
    loss.backward()
    return saved.num_bytes


def without_generator(record):
    return {name: tensor for name, tensor in record.items() if name != "generator"}


def test_gradients_are_plains_within_rounding_and_all_layers_share_a_graph(graphs, assert_three_way):
    model, handle = compiled_gpt2(0.3)
    ours = backward(model)
    assert graphs() == 1
    exact, plain = without_generator(backward(gpt2().double())), backward(gpt2())
    assert torch.equal(ours["generator"], plain["generator"])
    assert_three_way(without_generator(ours), without_generator(plain), exact)
    assert any(not torch.equal(ours[name], plain[name]) for name in exact), "nothing was compiled"
    handle.remove()


def test_the_ratio_is_in_force_in_every_plan_of_a_process():
    plain = saved_bytes(gpt2())
    saved = {}
    for ratio in (0.3, 0.7, 0.3):
        model, handle = compiled_gpt2(ratio)
        saved.setdefault(ratio, []).append(saved_bytes(model))
        handle.remove()
        assert saved_bytes(model) == plain
    assert saved[0.3][0] == saved[0.3][1]
    assert saved[0.3][0] < saved[0.7][0] < plain
    assert torch._functorch.config.activation_memory_budget == 1
    assert torch._dynamo.config.recompile_limit == 8
    assert torch._dynamo.config.optimize_ddp is True


def test_only_a_mode_of_the_same_thread_observes_a_layer():
    """torch's flag for modes is of the process, and stays set where those of two threads cross."""

    def two_enter_and_leave(_):
        with FlopCounterMode(display=False):
            meet.wait()
        return Region.is_observed()

    meet = Barrier(2)
    with ThreadPoolExecutor(2) as threads, FlopCounterMode(display=False):
        assert list(threads.map(two_enter_and_leave, range(2))) == [False, False]
        assert Region.is_observed()
    assert not Region.is_observed()


def test_two_plans_at_once_keep_their_ratios():
    models = [compiled_gpt2(ratio)[0] for ratio in (0.3, 0.7)]
    first = [saved_bytes(model) for model in models]
    assert [saved_bytes(model) for model in models] == first
    assert first[0] < first[1]


@pytest.mark.slow
def test_micro_batches_of_other_sizes(graphs):
    """Accumulated, the last one smaller: a second graph serves every size, in as little memory."""
    model, handle = compiled_gpt2(0.3)
    per_token = saved_bytes(model) / TOKENS.numel()
    model.zero_grad()
    graphs()
    sizes = [(6, 64), (6, 64), (5, 64), (4, 64), (3, 64)]
    plain = gpt2()
    for samples, length in sizes:
        loss_of(model, TOKENS[:samples, :length]).backward()
        loss_of(plain, TOKENS[:samples, :length]).backward()
    assert graphs() == 1
    expected = gradients_of(plain)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert saved_bytes(model, TOKENS[:3]) / TOKENS[:3].numel() == pytest.approx(per_token, rel=0.03)
    handle.remove()


@pytest.mark.slow
def test_dropout_drops_what_plain_drops():
    model, handle = compiled_gpt2(0.3, dropout=0.2)
    ours, plain = backward(model), backward(gpt2(dropout=0.2))
    assert torch.equal(ours.pop("generator"), plain.pop("generator"))
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-6)
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_nothing_is_drawn_twice(ratio):
    """torch by itself draws again in the backward, and the gradient is that of another mask."""

    def attend(x, weight):
        x = F.dropout(torch.tanh(x @ weight) * x, 0.3)
        return F.scaled_dot_product_attention(x, x * 2, torch.cos(x @ weight), dropout_p=0.3) @ weight

    inputs = [torch.randn(2, 2, 8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)]
    records = []
    for function in (attend, partial(Region(ratio).run, attend)):
        torch.manual_seed(3)
        y = function(*inputs)
        records.append([y, *torch.autograd.grad(y.sum(), inputs), torch.get_rng_state()])
    for plain, ours in zip(*records, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_autocast(assert_three_way):
    """In bfloat16 rounding is all there is to see: our error is at most plain's own."""
    model, handle = compiled_gpt2(0.3)
    records = []
    for each in (model, gpt2()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each)
        loss.backward()
        records.append(gradients_of(each) | {"loss": loss.detach()})
    exact = without_generator(backward(gpt2().double()))
    rounding = 4 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
    assert_three_way(*records, exact, ulps=rounding)
    handle.remove()


def test_without_gradients_nothing_is_compiled(graphs):
    model, handle = compiled_gpt2(0.3)
    plain = gpt2()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    generated = [each.eval().generate(TOKENS[:1, :4], max_new_tokens=3, do_sample=False) for each in (model, plain)]
    assert torch.equal(*generated)
    assert graphs() == 0
    handle.remove()


def test_remove_restores_and_names_stay(graphs):
    model = gpt2()
    before = [dict(vars(module)) for module in model.modules()]
    keys = list(model.state_dict())
    with apply_plan(model, plan_blocks(model, "compiled")):
        assert list(model.state_dict()) == keys
    assert [dict(vars(module)) for module in model.modules()] == before
    backward(model)
    assert graphs() == 0


def test_a_deep_copy_computes_with_its_own_weights(graphs):
    model, _ = compiled_gpt2(0.3)
    backward(model)
    twin = copy.deepcopy(model)
    model.zero_grad()
    graphs()
    twin_gradients = backward(twin)
    assert graphs() == 0
    assert twin_gradients[WEIGHT].abs().max() > 0
    assert model.get_parameter(WEIGHT).grad is None


def test_neighbours_may_recompute_and_all_are_watched(graphs):
    model = gpt2(num_layers=4)
    names = plan_blocks(model, "none").blocks
    actions = [Action.COMPILE, Action.RECOMPUTE, Action.KEEP, Action.COMPILE]
    ratios = {Action.COMPILE: 0.3}
    spans = [Span(start=i, stop=i + 1, action=action, ratio=ratios.get(action)) for i, action in enumerate(actions)]
    plan = Plan(strategy="mixed", blocks=names, spans=tuple(spans))
    seen = []

    def watch(name, run, inputs, others):
        seen.append(name)
        return run(*inputs)

    with apply_plan(model, plan, watch=watch):
        ours = backward(model)
    assert seen == list(names)
    assert graphs() == 1
    for name, tensor in backward(gpt2(num_layers=4)).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def test_whoever_counts_operations_sees_all_of_them(graphs):
    counted = []
    for model in (compiled_gpt2(0.3)[0], gpt2()):
        with ModelFlops() as flops:
            backward(model)
        counted.append(flops.total)
    assert counted[0] == counted[1] > 0
    assert graphs() == 0


@pytest.mark.slow
def test_the_smaller_the_ratio_the_less_is_kept():
    saved = []
    for ratio in (0.0, 0.3, 0.5, 0.7, 1.0):
        model, handle = compiled_gpt2(ratio)
        saved.append(saved_bytes(model))
        handle.remove()
    assert all(less <= more for less, more in pairwise(saved))
    assert saved[0] < saved[-1] / 3
