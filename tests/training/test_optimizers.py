"""Optimizers by name, the state that each keeps, and the one that steps in the backward."""

import gc
import weakref
from functools import partial
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD
from transformers import get_scheduler
from workloads import peak_bytes

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import CPU, CUDA
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.memory import clipping_bytes, counters_bytes, update_bytes
from memsave_recipes.core.step.memory import state_bytes as known_state_bytes
from memsave_recipes.training.arguments import OptimizerArguments, Schedule
from memsave_recipes.training.optimizers import (
    check_in_backward,
    clip_gradients,
    describe_lost_updates,
    describe_warm_up,
    make_optimizer,
    make_scheduler,
)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 128))


def train(model, optimizer, scheduler, num_steps=5):
    random = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(8, 128, generator=random)
        loss = (model(inputs) - inputs).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_bytes(optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


@pytest.mark.parametrize(
    ("name", "most_bytes_a_parameter"),
    [("adamw", 8.0), ("adafactor", 0.3), ("adamw_8bit", 2.7), ("sgd", 4.0), ("muon", 6.1)],
)
def test_every_optimizer_learns_with_the_state_it_is_known_for(name, most_bytes_a_parameter):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = build()
    optim = OptimizerArguments(optimizer=name, learning_rate=1e-3 if name != "sgd" else 1e-4)
    optimizer = make_optimizer(optim, model)
    losses = train(model, optimizer, make_scheduler(optim, optimizer, 20), 20)
    assert losses[-1] < 0.95 * losses[0]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert state_bytes(optimizer) <= most_bytes_a_parameter * num_parameters


@pytest.mark.parametrize("name", ["adamw", "adafactor", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("shapes", [[(64, 32, 3, 3), (64,), (96, 128)], [(100, 200), (200, 100)], [(5000,), (3, 3)]])
def test_an_update_and_clipping_take_no_more_than_is_known(name, shapes):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    optim = OptimizerArguments(optimizer=name)
    optimizer = make_optimizer(optim, model)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    parameters = list(model)
    update = peak_bytes(optimizer.step)
    assert update <= update_bytes(name, parameters, CPU) <= 1.05 * update + 2000
    assert peak_bytes(lambda: clip_gradients(optim, Accelerator(), model)) <= clipping_bytes(parameters, CPU)
    state = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(optimizer)}
    known = known_state_bytes(name, parameters, momentum=optim.momentum)
    known += counters_bytes(name, len(parameters), CPU)
    assert sum(storage.nbytes() for storage in state.values()) <= known


def tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def test_frozen_parameters_have_no_state():
    model = build()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(OptimizerArguments(), model)
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == [*model[2].parameters()]


NEEDED = {"cosine_with_min_lr": '{"min_lr_rate": 0.1}', "warmup_stable_decay": '{"num_decay_steps": 0}'}
"""Arguments without which a schedule of transformers cannot be made."""


@pytest.mark.parametrize("warmup_steps", [0, 3, 4])
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_every_schedule_warms_up_and_has_an_end(schedule, warmup_steps):
    named = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": NEEDED.get(schedule, "{}")}
    num_steps, optim = 4, OptimizerArguments(**named, warmup_steps=warmup_steps, learning_rate=1.0)
    optimizer = make_optimizer(optim, build())
    scheduler = make_scheduler(optim, optimizer, num_steps)
    rates = []
    for _ in range(num_steps):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    is_warm = schedule == "constant" or warmup_steps == 0
    assert rates[0] == (1.0 if is_warm else 0.0)
    if not is_warm:
        assert rates[:warmup_steps] == [step / warmup_steps for step in range(num_steps)][:warmup_steps]


@pytest.fixture
def memory_is_nan():
    """What torch leaves uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def momentum_of(optimizer):
    return [state["momentum_buffer"] for state in optimizer.state.values()]


def same_bits(ones, others):
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32)) for one, other in pairs)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_momentum_begins_with_the_first_step_that_counts(memory_is_nan, weight_decay):
    """A fused step that ``found_inf`` leaves out, as gradient scalers and the gate do, before any other."""
    optim = OptimizerArguments(optimizer="sgd", learning_rate=1e-4, weight_decay=weight_decay)
    never_bad, first_bad = build(), build()
    optimizers = [make_optimizer(optim, model) for model in (never_bad, first_bad)]
    first_bad(torch.ones(8, 128)).sum().backward()
    optimizers[1].found_inf = torch.tensor(1.0)
    optimizers[1].step()
    optimizers[1].zero_grad()
    optimizers[1].load_state_dict(optimizers[1].state_dict())  # a checkpoint of that state
    optimizers[1].found_inf = torch.tensor(0.0)
    for model, optimizer in zip((never_bad, first_bad), optimizers, strict=True):
        train(model, optimizer, make_scheduler(optim, optimizer, 5))
    assert same_bits(never_bad.parameters(), first_bad.parameters())
    assert same_bits(*map(momentum_of, optimizers))


@pytest.mark.parametrize("gradient", [0.0, -0.0, 1e-45, 0.3])
def test_the_first_momentum_is_the_gradient_bit_for_bit(gradient):
    """As it is in torch's own optimizer, the sign of a zero with it."""
    buffers = []
    optim = OptimizerArguments(optimizer="sgd")
    for make in (partial(make_optimizer, optim), lambda model: SGD(model.parameters(), momentum=0.9, fused=True)):
        model = build()
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        buffers.append(momentum_of(optimizer))
    assert same_bits(*buffers)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "muon"])
def test_stepping_in_the_backward_gives_the_same_weights(name):
    results = []
    for in_backward in (False, True):
        model = build()
        optim = OptimizerArguments(
            optimizer=name, learning_rate=1e-3, warmup_steps=2, optimizer_in_backward=in_backward, max_grad_norm=0
        )
        optimizer = make_optimizer(optim, model)
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does; it makes the groups anew
        train(model, optimizer, make_scheduler(optim, optimizer, 5))
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for usual, in_the_backward in zip(*results, strict=True):
        assert torch.equal(usual, in_the_backward)


def test_stepping_in_the_backward_never_holds_two_gradients():
    model = build()
    optim = OptimizerArguments(optimizer_in_backward=True, max_grad_norm=0)
    optimizer = make_optimizer(optim, model)  # noqa: F841  # its hooks hold it weakly
    alive = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(other.grad is not None for other in model.parameters()))
        )
    model(torch.randn(2, 128)).sum().backward()
    assert alive == [0, 0, 0, 0]  # each was stepped and freed by the hook before this one
    assert clip_gradients(optim, None, model) is None


def test_a_model_whose_optimizer_steps_in_the_backward_is_freed():
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(OptimizerArguments(optimizer_in_backward=True, max_grad_norm=0), model)
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("changes", "layout", "precision", "reason"),
    [
        ({}, (8, 4, 1), "no", "2 accumulation steps"),
        ({}, (8, 4, 2), "no", "2 ranks"),
        ({"max_grad_norm": 1.0}, (8, 8, 1), "no", "max_grad_norm 0"),
        ({}, (8, 8, 1), "fp16", "take bf16"),
    ],
)
def test_contradictions_are_refused_with_the_reason(changes, layout, precision, reason):
    optim = OptimizerArguments(**{"optimizer_in_backward": True, "max_grad_norm": 0.0, **changes})
    with pytest.raises(InputError, match=f"--optimizer_in_backward .*{reason}"):
        check_in_backward(optim, BatchLayout.of(*layout), precision)


def test_what_does_not_contradict_passes():
    check_in_backward(OptimizerArguments(), BatchLayout.of(8, 1, 4), "fp16")
    check_in_backward(
        OptimizerArguments(optimizer_in_backward=True, max_grad_norm=0.0), BatchLayout.of(8, None, 1), "bf16"
    )


def test_8bit_without_its_library(monkeypatch):
    monkeypatch.setattr("memsave_recipes.training.optimizers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'memsave-recipes\[bitsandbytes\]'"):
        make_optimizer(OptimizerArguments(optimizer="adamw_8bit"), build())


@pytest.mark.parametrize("warmup_steps", [0, 3, 7])
def test_linear_is_that_of_transformers_bit_for_bit(warmup_steps):
    num_steps, optim = 7, OptimizerArguments(warmup_steps=warmup_steps)
    optimizer = make_optimizer(optim, build())
    (factor, *_) = make_scheduler(optim, optimizer, num_steps).lr_lambdas
    (expected, *_) = get_scheduler("linear", optimizer, warmup_steps, max(num_steps, warmup_steps + 1)).lr_lambdas
    assert [factor(step) for step in range(13)] == [expected(step) for step in range(13)]


@pytest.mark.parametrize(
    ("schedule", "arguments", "factors"),
    [
        ("cosine_with_min_lr", '{"min_lr_rate": 0.25}', {0: 1, 5: 0.625, 10: 0.25}),
        ("cosine_with_min_lr", '{"min_lr": 0.5}', {0: 1, 5: 0.625, 10: 0.25}),
        ("warmup_stable_decay", '{"num_decay_steps": 4, "decay_type": "linear"}', {0: 1, 6: 1, 8: 0.5, 10: 0}),
        ("warmup_stable_decay", '{"num_decay_steps": 0.4, "decay_type": "linear"}', {0: 1, 6: 1, 8: 0.5, 10: 0}),
        ("warmup_stable_decay", '{"num_stable_steps": 2, "num_decay_steps": 2, "min_lr_ratio": 0.5}', {0: 1, 9: 0.5}),
        ("polynomial", '{"power": 2, "lr_end": 0}', {0: 1, 5: 0.25, 10: 0}),
        ("inverse_sqrt", '{"timescale": 4}', {0: 1, 12: 0.5}),
    ],
)
def test_a_schedule_has_its_arguments(schedule, arguments, factors):
    flags = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": arguments, "learning_rate": 2.0}
    for optimizer in ("adamw", "muon"):
        optim = OptimizerArguments(optimizer=optimizer, **flags)
        (factor, *_) = make_scheduler(optim, make_optimizer(optim, build()), 10).lr_lambdas
        assert {step: factor(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        ("cosine", "0.1", "an object in JSON"),
        ("cosine", "{min_lr: 1}", "an object in JSON"),
        ("cosine", '{"min_lr_rate": 0.1}', "must be of num_cycles"),
        ("cosine", '{"last_epoch": 3}', "must be of num_cycles"),
        ("constant", '{"num_cycles": 1}', "left out: --lr_scheduler_type constant takes none"),
        ("warmup_stable_decay", "{}", "num_decay_steps"),
        ("cosine_with_min_lr", "{}", "min_lr"),
        ("polynomial", '{"power": "two"}', "does not take them"),
        ("polynomial", '{"lr_end": 5}', r"lr_end is in \[0, 1\]"),
        ("polynomial", '{"lr_end": 1.0}', "does not take them"),
        ("polynomial", '{"power": -1}', "no rate is below 0 or above --learning_rate"),
        ("polynomial", '{"power": 1' + "0" * 400 + "}", "an object in JSON"),
        ("inverse_sqrt", '{"timescale": -20}', "no rate is below 0 or above --learning_rate"),
        ("cosine_with_min_lr", '{"min_lr_rate": 1e40}', r"min_lr_rate is in \[0, 1\]"),
        ("cosine_with_min_lr", '{"min_lr_rate": -5}', r"min_lr_rate is in \[0, 1\]"),
        ("cosine_with_min_lr", '{"min_lr": 1.5}', r"min_lr is in \[0, 1\]"),
        ("cosine_with_min_lr", '{"min_lr_rate": NaN}', "of finite numbers"),
        ("cosine", '{"num_cycles": -Infinity}', "of finite numbers"),
        ("cosine", '{"num_cycles": 1e999}', "of finite numbers"),
        ("warmup_stable_decay", '{"num_decay_steps": 200}', "num_decay_steps 200 do not fit the 10 steps of the run"),
        ("warmup_stable_decay", '{"num_decay_steps": 1.5}', "a number of steps or a share of the run"),
        ("warmup_stable_decay", '{"num_decay_steps": 1, "num_stable_steps": 0.9}', "num_stable_steps is a number of"),
        ("warmup_stable_decay", '{"num_decay_steps": true}', "a number of steps or a share of the run"),
        ("warmup_stable_decay", '{"num_decay_steps": -1}', "a number of steps or a share of the run"),
        ("warmup_stable_decay", '{"num_decay_steps": 2, "min_lr_ratio": 2}', r"min_lr_ratio is in \[0, 1\]"),
        ("warmup_stable_decay", '{"num_decay_steps": 6, "num_stable_steps": 5}', "do not fit the 10 steps"),
        ("warmup_stable_decay", '{"num_decay_steps": 3, "num_stable_steps": 5}', "do not fit the 10 steps"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(schedule, arguments, message):
    def make():
        optim = OptimizerArguments(lr_scheduler_type=schedule, lr_scheduler_kwargs=arguments, learning_rate=1.0)
        return make_scheduler(optim, make_optimizer(optim, build()), 10)

    with pytest.raises(InputError, match=message) as error:
        make()
    assert error.value.one_line.startswith("--lr_scheduler_kwargs")


@pytest.mark.parametrize("schedule", sorted({*get_args(Schedule)} - {"warmup_stable_decay"}))
def test_a_warm_up_that_is_longer_than_the_run_is_said(schedule):
    """By the last rate, which the line tells."""
    named = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": NEEDED.get(schedule, "{}")}
    optim = OptimizerArguments(**named, warmup_steps=20, learning_rate=1.0)
    optimizer = make_optimizer(optim, build())
    scheduler = make_scheduler(optim, optimizer, 10)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    said = f"the run of 10 steps, so the rate ends at {scheduler.get_last_lr()[0]:.0%} of --learning_rate"
    assert describe_warm_up(optim, 10) is None if schedule == "constant" else said in describe_warm_up(optim, 10)
    assert describe_warm_up(optim, 20) is None
    assert describe_warm_up(optim, 0) is None  # of --eval_only


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "adamw_bf16"])
def test_every_adamw_has_the_betas_and_the_epsilon(name):
    """A first step without memory goes by g / (|g| + epsilon): by half the rate where 1e-8 is |g|."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = OptimizerArguments(optimizer=name, adam_beta1=0.0, adam_beta2=0.0, learning_rate=0.25)
    optimizer = make_optimizer(optim, model)
    before = model[1].bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-8)
    optimizer.step()
    assert torch.allclose(before - model[1].bias, torch.full((4,), 0.125))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_adafactor_changes_one_parameter_after_the_other_on_every_device(device):
    """The change of the second (100, 200) beside that of the first; means over rows, columns and both; one vector."""
    parameters = [torch.empty(100, 200), torch.empty(100, 200), torch.empty(50)]
    numbers = 64 if device == CPU else 16 * 512
    expected = numbers + 4 * (2 * 20_000 + 100 + 200 + 1) + 4 * 50
    assert update_bytes("adafactor", parameters, device) == expected


def test_an_accelerator_clips_with_a_block_for_every_norm_and_partial_sums():
    parameters = [torch.empty(2**20, device="meta"), torch.empty(10, device="meta")]  # 16 sums for each
    assert clipping_bytes(parameters, CUDA) == (2 + 1 + 1 + 16) * 512
    assert clipping_bytes(parameters, CPU) == (2 + 2 + 16) * 4


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_torch_is_told_which_kernel_to_take_and_not_left_to_the_device(name):
    for group in make_optimizer(OptimizerArguments(optimizer=name), build()).param_groups:
        assert group.get("use_muon") or group.get("fused") or group["foreach"] is False


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        ({"learning_rate": 1e-5}, True),
        ({"learning_rate": 1e-3}, False),
        ({"learning_rate": 1e-5, "optimizer": "adamw_bf16"}, False),
        ({"learning_rate": 1e-5, "optimizer": "sgd"}, False),
        ({"learning_rate": 1e-5, "optimizer": "muon"}, True),
        ({"learning_rate": 1e-3, "optimizer": "muon"}, False),
        ({"learning_rate": 1e-5, "optimizer": "adafactor"}, True),
        ({"learning_rate": 1e-2, "optimizer": "adafactor"}, False),
        ({"learning_rate": 1e-5, "optimizer": "adamw_8bit"}, True),
        ({"learning_rate": 1e-3, "optimizer": "adamw_8bit"}, False),
    ],
)
def test_updates_that_bfloat16_rounds_away_are_told(flags, is_told):
    """And so they are: of a step with gradients of one size, the weights that stay."""
    model, optim = build().to(torch.bfloat16), OptimizerArguments(**flags)
    line = describe_lost_updates(optim, model)
    assert (line is not None) == is_told
    assert describe_lost_updates(optim, build()) is None
    if not is_told:
        return
    assert "--optimizer adamw_bf16" in line
    if optim.optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    make_optimizer(optim, model).step()
    pairs = zip(before, model.parameters(), strict=True)
    num_same = sum(int((one == other).sum()) for one, other in pairs)
    share = num_same / sum(parameter.numel() for parameter in before)
    assert share >= float(line.partition("note: ")[2].partition("%")[0]) / 100 - 0.01
