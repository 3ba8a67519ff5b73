"""An optimizer that steps on the host gives the bits of one on the CPU, and leaves nothing on the device."""

import gc
import threading
import weakref
from copy import deepcopy
from functools import partial
from itertools import product
from math import isfinite
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from host_copies import CopiesInOrder, LateForTheHost
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from transformers import AlbertConfig, AlbertForMaskedLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.streaming import (
    WeightStream,
    leave_to_this_rank,
    place,
    stream_weights,
    streamed_parameters,
)
from memsave_recipes.core.costs.preserve_state import preserve_state
from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host import state as host_state
from memsave_recipes.core.host import step as host_step
from memsave_recipes.core.host.step import HostMasters, masters_of, scale_on_host, step_on_host
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.run import run_plan
from memsave_recipes.training import optimizers
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.exact.batch_layouts import IndexedLayout
from memsave_recipes.training.optimizers import check_offload, clip_gradients, make_optimizer
from memsave_recipes.training.weight_average import WeightAverage
from tests.decoders import causal_model

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
RULES = {
    "adamw": {"weight_decay": 0.1},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
}
STOCHASTIC = {"optimizer": "adamw_bf16"}
FIRST, LATER = 3, 4  # steps


def settings(*, offload="none", **options):
    options = {"learning_rate": 1e-2, "max_grad_norm": 0.5, **options}
    return OptimizerArguments(offload_optimizer=offload, **options)


def make_model(dtype=torch.float32, memory_format=torch.channels_last):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 16), nn.Flatten(), nn.Linear(8, 512), nn.Linear(512, 64), nn.Linear(64, 2)]
    return nn.Sequential(*layers).to(DEVICE, dtype=dtype, memory_format=memory_format)


def micro_batches(step):
    random = torch.Generator().manual_seed(step)
    return torch.randn(3, 4, 3, 16, 16, generator=random).to(DEVICE)


def run(optim, model, optimizer, *, steps, count=3):
    scheduler = LambdaLR(optimizer, lambda step: 1 / (steps[0] + step + 1))
    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    dtype = next(model.parameters()).dtype
    for step in steps:
        for images in micro_batches(step)[:count]:
            model(images.to(dtype)).square().sum().backward()
        norm = clip_gradients(optim, accelerator, model, optimizer)
        assert (norm is None) is optim.optimizer_in_backward
        assert norm is None or norm.isfinite()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def on_host(model, *, leaves=True, **options):
    """The optimizer that steps masters of ``model``, also on a CPU."""
    optim = settings(offload="step", **options)
    layout = None if leaves else BatchLayout.of(2, 1, num_processes=2)
    return optim, make_optimizer(optim, model, layout, seed=3)


def late_masters(parameters, device, dtype, waiting=()):
    return HostMasters(parameters, dtype, CopiesInOrder(), LateForTheHost(), waiting)


def offload_from_cpu(patch):
    for module in (optimizers, host_step):
        patch.setattr(module, "masters_on_host", late_masters)
        patch.setattr(module, "may_leave", lambda device: True)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(host_state, "PIECE_BYTES", 2**14)
    monkeypatch.setattr(host_state, "SLAB_BYTES", 2**16)
    monkeypatch.setattr(host_step, "STAGED_BYTES", 2**15)
    monkeypatch.setattr(host_step, "LEAVING_BYTES", 2**12)
    if DEVICE.type == "cpu":
        offload_from_cpu(monkeypatch)


def expected_weights(steps, model=None, count=3, **options):
    """Of an optimizer where the model is: kernels of the CPU, as the stand-in's are, give the same bits."""
    model, optim = model or make_model(), settings(**options)
    return run(optim, model, make_optimizer(optim, model, seed=3), steps=steps, count=count)


def assert_same_bits(these, others):
    for (name, one), other in zip(these.state_dict().items(), others.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("leaves", "count"), [(True, 3), (False, 3), (True, 1)])
@pytest.mark.parametrize("name", RULES)
def test_the_weights_have_the_bits_of_a_run_without(name, leaves, count):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")  # which makes every weight contiguous
    steps, kind = range(FIRST + LATER), torch.contiguous_format if name == "adamw_8bit" else torch.channels_last
    model, other = make_model(memory_format=kind), make_model(memory_format=kind)
    optim, optimizer = on_host(model, leaves=leaves, **RULES[name])
    run(optim, model, optimizer, steps=steps, count=count)
    assert_same_bits(model, expected_weights(steps, other, count, **RULES[name]))


def test_no_gradient_stays_on_the_device():
    model = make_model()
    _, optimizer = on_host(model)
    model(micro_batches(0)[0]).sum().backward()
    assert not any(parameter.grad.untyped_storage().nbytes() for parameter in model.parameters())
    masters_of(optimizer).collect()
    assert all(master.grad.device.type == "cpu" for master in masters_of(optimizer).of.values())


def test_bfloat16_weights_are_those_of_float32_masters():
    """By hand: sums, norm and update in float32, the gradient of each micro-batch and the weights in bfloat16."""
    model, by_hand = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optim, optimizer = on_host(model)
    masters = [nn.Parameter(parameter.detach().float().cpu()) for parameter in by_hand.parameters()]
    adamw = torch.optim.AdamW(masters, lr=optim.learning_rate, weight_decay=0.0, fused=True)
    scheduler = LambdaLR(adamw, lambda step: 1 / (step + 1))
    for step in range(LATER):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for images in micro_batches(step):
            by_hand(images.bfloat16()).square().sum().backward()
            for master, parameter in zip(masters, by_hand.parameters(), strict=True):
                master.grad += parameter.grad.float().cpu()
                parameter.grad = None
        nn.utils.clip_grad_norm_(masters, optim.max_grad_norm)
        adamw.step()
        scheduler.step()
        for master, parameter in zip(masters, by_hand.parameters(), strict=True):
            parameter.data.copy_(master)
    assert_same_bits(run(optim, model, optimizer, steps=range(LATER)), by_hand)


def test_stochastic_rounding_keeps_bfloat16_on_the_host():
    model = make_model(torch.bfloat16)
    optim, optimizer = on_host(model, **STOCHASTIC)
    run(optim, model, optimizer, steps=range(LATER))
    for parameter, master in masters_of(optimizer).of.items():
        assert master.dtype == torch.bfloat16
        assert torch.equal(parameter.cpu(), master)


@pytest.mark.parametrize("options", [{}, STOCHASTIC], ids=["adamw", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_run_goes_on_with_its_bits(dtype, options):
    if options and dtype == torch.float32:
        pytest.skip("rounds bfloat16")
    whole = make_model(dtype)
    optim, optimizer = on_host(whole, **options)
    run(optim, whole, optimizer, steps=range(FIRST))
    weights, state = deepcopy(whole.state_dict()), deepcopy(optimizer.state_dict())
    run(optim, whole, optimizer, steps=range(FIRST, FIRST + LATER))
    resumed = make_model(dtype)
    optim, optimizer = on_host(resumed, **options)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same_bits(run(optim, resumed, optimizer, steps=range(FIRST, FIRST + LATER)), whole)


@pytest.mark.parametrize("offloaded_first", [True, False])
def test_a_saved_run_goes_on_with_and_without(offloaded_first):
    expected = expected_weights(range(FIRST + LATER))
    model = make_model()
    optim, optimizer = on_host(model) if offloaded_first else (settings(), make_optimizer(settings(), model))
    run(optim, model, optimizer, steps=range(FIRST))
    weights, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    resumed = make_model()
    optim, optimizer = (settings(), make_optimizer(settings(), resumed)) if offloaded_first else on_host(resumed)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same_bits(run(optim, resumed, optimizer, steps=range(FIRST, FIRST + LATER)), expected)


def test_muon_is_refused():
    with pytest.raises(InputError, match=r"--offload_optimizer step: --optimizer muon.*take --offload_optimizer state"):
        settings(offload="step", optimizer="muon")


class OwnLoop:
    """AdamW in a loop that knows no recipe, on the host or not, with a scaler of the loss or without."""

    def __init__(self, *, by_host, scaler=None):
        self.model = make_model()
        self.model[0].bias.requires_grad = False
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scaler = scaler
        self.masters = step_on_host(self.model, self.optimizer) if by_host else None
        if by_host:
            scale_on_host(scaler)

    def train(self, num_steps):
        """The norms of the steps, and the scales after them."""
        return list(zip(*map(self._step, range(num_steps)), strict=True))

    def _step(self, step):
        loss = sum(self.model(images).square().sum() for images in micro_batches(step))
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        norm = self._clip(partial(self.scaler.unscale_, self.optimizer) if self.scaler else None)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return float(norm), self.scaler.get_scale() if self.scaler else 1.0

    def _clip(self, unscale):
        if self.masters is not None:
            return self.masters.clip(0.5, unscale)
        if unscale is not None:
            unscale()
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


def test_a_loop_of_ones_own_steps_on_the_host():
    ours, plain = OwnLoop(by_host=True), OwnLoop(by_host=False)
    assert ours.train(LATER) == plain.train(LATER)
    assert_same_bits(ours.model, plain.model)
    assert all(weight.grad is None for weight in ours.model.parameters())


def test_a_gradient_that_overflows_halves_the_scale_and_leaves_the_step_out():
    """The scale is so large that float32 holds the gradients of some steps alone."""
    settings = {"init_scale": 2.0**126, "growth_interval": 2}
    ours, plain = (OwnLoop(by_host=by, scaler=GradScaler(DEVICE.type, **settings)) for by in (True, False))
    (norms, scales), expected = ours.train(12), plain.train(12)
    assert [list(map(str, values)) for values in (norms, scales)] == [list(map(str, values)) for values in expected]
    assert_same_bits(ours.model, plain.model)
    is_finite = list(map(isfinite, norms))
    assert 3 < is_finite.count(False) < 12
    for before, after, was_finite in zip([2.0**126, *scales], scales, is_finite, strict=False):
        assert was_finite or after == before / 2
    assert ours.optimizer.state[ours.masters.of[ours.model[2].weight]]["step"] == is_finite.count(True)


def test_a_schedule_that_has_the_step_is_refused():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(InputError, match="a schedule holds the optimizer's step already"):
        step_on_host(model, optimizer)


IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [*RULES, "stochastic"])
def test_stepping_beside_the_backward_gives_the_bits_of_stepping_after_it(rule, dtype):
    if rule == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    if rule == "stochastic" and dtype == torch.float32:
        pytest.skip("rounds bfloat16")
    options, results = RULES.get(rule, STOCHASTIC), []
    for others in ({"max_grad_norm": 0}, IN_BACKWARD):
        model = make_model(dtype, torch.contiguous_format)
        optim, optimizer = on_host(model, **options, **others)
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does; it makes the groups anew
        results.append(run(optim, model, optimizer, steps=range(LATER), count=1))
    assert_same_bits(*results)


@pytest.mark.parametrize("others", [{}, IN_BACKWARD])
def test_hooks_of_a_step_see_each_piece_alone(others):
    """Around all of it they would run beside the thread that steps, as the one that makes SGD's first momentum did."""
    model, seen = make_model(), []
    optim, optimizer = on_host(model, **others)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_pre_hook(lambda stepped, *_: seen.extend(one["params"] for one in stepped.param_groups))
    run(optim, model, optimizer, steps=range(1), count=1)
    assert len(seen) > 2
    assert sorted(id(one) for piece in seen for one in piece) == sorted(map(id, masters_of(optimizer).of.values()))


@pytest.mark.parametrize("options", [{}, IN_BACKWARD])
@pytest.mark.parametrize("streams", [False, True])
def test_a_model_that_is_stepped_on_the_host_is_freed(options, streams):
    model = causal_model("llama").to(DEVICE)
    model = streaming(model=model) if streams else model
    optim, optimizer = on_host(model, **options)
    train_language(model, optim, optimizer, steps=range(1), count=1)
    gone = [weakref.ref(one) for one in (model.model.layers[0].mlp.up_proj.weight, masters_of(optimizer), optimizer)]
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None, None]


def test_what_fails_beside_the_backward_ends_the_step():
    model = make_model()
    optim, optimizer = on_host(model, **IN_BACKWARD)

    def fail(*_):
        raise ArithmeticError("within the thread")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="within the thread"):
        run(optim, model, optimizer, steps=range(1), count=1)


def streaming(dtype=torch.float32, model=None):
    """A language model, or ``model``, whose layers' weights wait on the host."""
    model = model or causal_model("llama", dtype).to(DEVICE)
    if DEVICE.type != "cpu":
        place(model.cpu(), DEVICE, streamed="all")
        return model
    stream_weights(model, WeightStream(DEVICE, CopiesInOrder()), trained=True)
    return model


def train_language(model, optim, optimizer, *, steps, plan="full", count=2):
    handle = apply_plan(model, plan_blocks(model, plan))
    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    for step in steps:
        for tokens in torch.randint(50, (count, 2, 8), generator=torch.Generator().manual_seed(step)).to(DEVICE):
            model(input_ids=tokens, labels=tokens).loss.backward()
        clip_gradients(optim, accelerator, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return {name: weight.cpu() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("plan", ["none", "full"])
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, STOCHASTIC)], ids=str
)
def test_streamed_weights_train_to_the_bits_of_those_on_the_device(dtype, options, plan):
    model, other = streaming(dtype), causal_model("llama", dtype).to(DEVICE)
    optim, optimizer = on_host(model, **options)
    assert len(streamed_parameters(model)) > 10
    _, optimizer_of_other = on_host(other, **options)
    found = train_language(model, optim, optimizer, steps=range(LATER), plan=plan)
    expected = train_language(other, optim, optimizer_of_other, steps=range(LATER), plan=plan)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert all(weight.device.type == "cpu" for weight in streamed_parameters(model))


@pytest.mark.parametrize("streams", [False, True])
def test_a_later_layer_is_stepped_while_the_backward_of_the_first_is_to_come(streams):
    model = causal_model("llama").to(DEVICE)
    model = streaming(model=model) if streams else model
    optim, optimizer = on_host(model, **IN_BACKWARD)
    later, stepped, seen = model.model.layers[1].mlp.up_proj.weight, threading.Event(), []
    master = masters_of(optimizer).of[later]
    optimizer.register_step_post_hook(lambda *_: stepped.set() if optimizer.state[master] else None)
    model.model.embed_tokens.weight.register_hook(lambda _: seen.append(stepped.wait(timeout=60)))
    train_language(model, optim, optimizer, steps=range(1), count=1)
    assert seen == [True]


def repeating():
    """A language model whose one layer runs four times."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "embedding_size": 16, "num_attention_heads": 2}
    return AlbertForMaskedLM(AlbertConfig(vocab_size=64, num_hidden_layers=4, **sizes)).to(DEVICE)


@pytest.mark.parametrize("plan", ["none", "full", "segments:1"])
@pytest.mark.parametrize("make", [partial(causal_model, "llama"), repeating], ids=["layers", "one layer"])
def test_streamed_weights_are_stepped_beside_the_backward_with_the_same_bits(make, plan):
    results = []
    for others in ({"max_grad_norm": 0}, IN_BACKWARD):
        model = streaming(model=make().to(DEVICE))
        optim, optimizer = on_host(model, **others)
        results.append(train_language(model, optim, optimizer, steps=range(LATER), plan=plan, count=1))
    after, beside = results
    assert all(torch.equal(beside[name], weight) for name, weight in after.items())


def test_gradients_outside_of_training_go_to_the_weights_on_the_host():
    model, other = streaming(), causal_model("llama", torch.float32).to(DEVICE)
    _, optimizer = on_host(model, **IN_BACKWARD)
    tokens = torch.arange(8).to(DEVICE)[None]
    with preserve_state(model, DEVICE):
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters()}
    other.train()(input_ids=tokens, labels=tokens).loss.backward()
    assert all(torch.equal(gradients[name], weight.grad.cpu()) for name, weight in other.named_parameters())
    assert all(master.grad is None for master in masters_of(optimizer).of.values())


def test_a_host_that_is_too_small_is_refused_before_masters_are_made(monkeypatch):
    monkeypatch.setattr(run_plan, "usable_host_bytes", lambda device: 2**10)
    task = SimpleNamespace(run=SimpleNamespace(shard=None), optim=settings(offload="step"))
    accelerator, layout = Accelerator(cpu=DEVICE.type == "cpu"), BatchLayout.of(8, 4, 1)
    with pytest.raises(InputError, match=r"--offload_optimizer: a rank would move .* to its host, which has 1 KiB"):
        run_plan.host_of(accelerator, task, make_model(), layout)
    task.optim = settings(offload="state")  # which takes memory when it is made
    assert run_plan.host_of(accelerator, task, make_model(), layout) == Host(2**10)


@pytest.mark.parametrize("offload", ["none", "state", "step"])
def test_a_run_tells_what_its_optimizer_takes_of_the_host(offload):
    run = SimpleNamespace(shard=None, activation_checkpointing="full")
    batches = SimpleNamespace(layout=BatchLayout.of(8, 4, 1))
    step = SimpleNamespace(accelerator=None, model=make_model(), batches=batches)
    task = SimpleNamespace(run=run, optim=settings(offload=offload))
    line, num_bytes = run_plan._host_memory(task, step, Host(2**30))
    assert (line is None) is (num_bytes == 0) is (offload == "none")
    assert offload == "none" or line.startswith("--offload_optimizer: at most")


class CountedCopies(CopiesInOrder):
    """Knows how often each tensor of weights or gradients, not of digests, was the target of a copy."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def start(self, pairs):
        self.sizes += [target.numel() for target, _ in pairs if target.is_floating_point()]
        return super().start(pairs)

    def taken(self):
        """The sizes of the copies since the last call."""
        sizes, self.sizes = sorted(self.sizes), []
        return sizes


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts copies of its own")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("streams", [False, True])
def test_each_gradient_goes_down_once_and_each_weight_up_once(monkeypatch, count, streams):
    """A micro-batch runs layers 0, 1, 2, 2, 1, 0, and what two neighbours share is copied once."""
    up, down, of_stream = CountedCopies(), CountedCopies(), CountedCopies()
    monkeypatch.setattr(
        optimizers,
        "masters_on_host",
        lambda parameters, _, dtype, waiting: HostMasters(parameters, dtype, up, down, waiting),
    )
    model = causal_model("llama")
    if streams:
        stream_weights(model, WeightStream(DEVICE, of_stream), trained=True)
    optim, optimizer = on_host(model)
    train_language(model, optim, optimizer, steps=range(2), count=count)  # which learns the order of the layers
    up.taken(), down.taken(), of_stream.taken()
    train_language(model, optim, optimizer, steps=range(2, 3), count=count)
    layer = sorted(one.numel() for one in model.model.layers[0].parameters())
    waiting = set(streamed_parameters(model))
    assert down.taken() == sorted(count * [one.numel() for one in model.parameters()])
    assert up.taken() == sorted(one.numel() for one in model.parameters() if one not in waiting)
    assert of_stream.taken() == (sorted((1 + 4 * count) * layer) if streams else [])


def averaged_in_between(model):
    """The losses of the average in the midst of a training, the average, and the trained weights."""
    average = WeightAverage(model, 0.5)
    optim, optimizer = on_host(model)
    tokens, losses = torch.arange(8).to(DEVICE)[None], []
    for step in range(LATER):
        train_language(model, optim, optimizer, steps=[step])
        average.update()
        with average.applied(), torch.no_grad():
            losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    return losses, [one.cpu() for one in (*average.tensors.values(), *model.state_dict().values())]


def test_the_average_of_streamed_weights_is_on_the_host_and_has_the_same_bits():
    model, other = streaming(), causal_model("llama").to(DEVICE)
    (losses, found), (expected_losses, expected) = averaged_in_between(model), averaged_in_between(other)
    assert losses == expected_losses
    assert len(set(losses)) == LATER
    assert all(map(torch.equal, found, expected))


def trained_by_ranks(accelerator):
    """Weights of a model of which layers are streamed and of one without, after 1 or 2 micro-batches a step."""
    results = []
    for count, stream in product((1, 2), (True, False)):
        model = causal_model("llama")
        if stream:
            stream_weights(model, WeightStream(DEVICE, CopiesInOrder()), trained=True)
            leave_to_this_rank(model)
        with pytest.MonkeyPatch.context() as patch:  # a rank is another process than that of the fixtures
            offload_from_cpu(patch)
            optim, optimizer = on_host(model, leaves=False)
        prepared = accelerator.prepare_model(model)
        for step in range(LATER):
            random = torch.Generator().manual_seed(10 * step + accelerator.process_index)
            *earlier, last = torch.randint(50, (count, 2, 8), generator=random)
            with prepared.no_sync():
                for tokens in earlier:
                    prepared(input_ids=tokens, labels=tokens).loss.backward()
            prepared(input_ids=last, labels=last).loss.backward()
            clip_gradients(optim, accelerator, prepared, optimizer)
            optimizer.step()
        results.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    return results


def test_streamed_weights_train_over_two_ranks(run_on_ranks):
    """A sum of two has the bits of one of DDP's; the sums of micro-batches are made in another order."""
    ranks = run_on_ranks(trained_by_ranks, 2)
    for one, other in zip(*ranks, strict=True):
        assert all(torch.equal(other[name], weight) for name, weight in one.items())
    (streamed, plain, streamed_accumulated, accumulated), _ = ranks
    assert all(torch.equal(streamed[name], weight) for name, weight in plain.items())
    assert not all(torch.equal(accumulated[name], weight) for name, weight in plain.items())
    for name, weight in accumulated.items():
        torch.testing.assert_close(streamed_accumulated[name], weight, rtol=1e-4, atol=1e-5)


def test_a_sum_in_a_fixed_order_is_refused():
    optim = settings(offload="step")
    optim.stream_weights = "host"
    with pytest.raises(InputError, match=r"--stream_weights host with --offload_optimizer step: .*leave one of them"):
        check_offload(optim, IndexedLayout.of(8, 4, 1))
    check_offload(optim, BatchLayout.of(8, 4, 2))
