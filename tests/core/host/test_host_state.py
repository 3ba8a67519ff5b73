"""Optimizer state that waits on the host gives the bits of state that stays on the device."""

from copy import deepcopy

import pytest
import torch
from host_copies import CopiesInOrder, LateForTheHost
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves_with_path

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host import state as host_state
from memsave_recipes.core.host.state import StateOnHost, is_on_host, keep_state_on_host, move_state
from memsave_recipes.core.plans.chain import CPU, CUDA
from memsave_recipes.core.step.memory import optimizer_memory
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import make_optimizer

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
OPTIMIZERS = {
    "adamw": OptimizerArguments(learning_rate=1e-2, weight_decay=0.1),
    "adamw_bf16": OptimizerArguments(learning_rate=1e-2, optimizer="adamw_bf16"),
    "adamw_8bit": OptimizerArguments(learning_rate=1e-2, optimizer="adamw_8bit"),
    "muon": OptimizerArguments(learning_rate=1e-2, optimizer="muon", weight_decay=0.1),
    "adafactor": OptimizerArguments(learning_rate=1e-2, optimizer="adafactor"),
    "sgd": OptimizerArguments(learning_rate=1e-2, optimizer="sgd"),
    "in backward": OptimizerArguments(learning_rate=1e-2, optimizer_in_backward=True),
}


class Counted(CopiesInOrder):
    """The bytes of each copy that was started."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def start(self, pairs):
        self.sizes += [target.nbytes for target, _ in pairs]
        return super().start(pairs)


def make_model(dtype=torch.float32, memory_format=torch.channels_last):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 16),
        nn.Flatten(),
        nn.Linear(8, 512),
        nn.Linear(512, 64),
        nn.Linear(64, 64),
        nn.Linear(64, 2),
    ]
    return nn.Sequential(*layers).to(DEVICE, dtype=dtype, memory_format=memory_format)


def offload(optimizer):
    if DEVICE.type == "cpu":
        move_state(optimizer, StateOnHost(DEVICE, CopiesInOrder(), CopiesInOrder()))
    else:
        keep_state_on_host(optimizer)


def trained(optim, *, offloads, steps=4, first=0, state=None, weights=None):
    """Weights and the optimizer's saved state after some steps; or after more, from a saved state."""
    dtype = torch.bfloat16 if optim.rounds_at_random else torch.float32
    is_flat = optim.optimizer == "adamw_8bit"  # bitsandbytes makes weights contiguous, and then layers round otherwise
    model = make_model(dtype, torch.contiguous_format if is_flat else torch.channels_last)
    optimizer = make_optimizer(optim, model, seed=3)
    if offloads:
        offload(optimizer)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (first + step + 1))
    if state is not None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step in range(first, first + steps):
        random = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 16, 16, generator=random).to(DEVICE, dtype)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = torch.tensor(float(step == 2), device=DEVICE)  # that step changes nothing
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer


def saved(optimizer):
    """A copy of what a checkpoint would hold."""
    return deepcopy(optimizer.state_dict())


def assert_same_bits(these, others):
    for (name, one), other in zip(these.state_dict().items(), others.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(host_state, "PIECE_BYTES", 2**14)
    monkeypatch.setattr(host_state, "SLAB_BYTES", 2**16)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_have_the_bits_of_a_run_without(name):
    optim = OPTIMIZERS[name]
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    expected, _ = trained(optim, offloads=False)
    model, optimizer = trained(optim, offloads=True)
    assert_same_bits(model, expected)
    waiting = [
        tensor for entry in optimizer.state.values() for tensor in entry.values() if isinstance(tensor, torch.Tensor)
    ]
    assert all(tensor.device.type == "cpu" for tensor in waiting if tensor.nbytes >= 2**12)


@pytest.mark.parametrize("name", ["adamw", "in backward"])
def test_a_step_copies_each_large_tensor_up_once_and_down_once(name):
    model, up, down = make_model(), Counted(), Counted()
    optimizer = make_optimizer(OPTIMIZERS[name], model)
    move_state(optimizer, StateOnHost(DEVICE, up, down))
    moments = sorted(2 * [one.nbytes for one in model.parameters() if one.nbytes >= 2**12])
    for arriving in ([], moments):  # the first step makes the state
        up.sizes.clear(), down.sizes.clear()
        model(torch.ones(4, 3, 16, 16, device=DEVICE)).sum().backward()
        optimizer.step()
        assert sorted(up.sizes) == arriving
        assert sorted(down.sizes) == moments


def test_state_that_there_is_moves():
    expected, model = make_model(), make_model()
    plain, optimizer = (make_optimizer(OPTIMIZERS["adamw"], one) for one in (expected, model))
    for step in range(4):
        if step == 2:
            offload(optimizer)
        for network, stepped in ((expected, plain), (model, optimizer)):
            network(torch.full((4, 3, 16, 16), float(step), device=DEVICE)).square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    assert_same_bits(model, expected)


def test_what_is_saved_has_arrived():
    """Also where the last piece has small tensors alone, as here: a weight of 512 bytes, and its bias."""
    states = []
    for late in (False, True):
        model = make_model()
        optimizer = make_optimizer(OPTIMIZERS["adamw"], model)
        if late:
            move_state(optimizer, StateOnHost(DEVICE, CopiesInOrder(), LateForTheHost()))
        model(torch.ones(4, 3, 16, 16, device=DEVICE)).sum().backward()
        optimizer.step()
        states.append(optimizer.state_dict()["state"])
    for entry, other in zip(*(state.values() for state in states), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[key].cpu(), other[key].cpu())


def test_hooks_of_a_step_see_each_piece_alone():
    """The first momentum of SGD, which is made by a hook, would else be on the device all at once."""
    optimizer, seen = make_optimizer(OPTIMIZERS["sgd"], model := make_model()), []
    offload(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does: torch prepares the step again
    optimizer.register_step_pre_hook(lambda stepped, *_: seen.extend(one["params"] for one in stepped.param_groups))
    model(torch.ones(4, 3, 16, 16, device=DEVICE)).sum().backward()
    optimizer.step()
    assert len(seen) > 2
    assert sorted(id(one) for piece in seen for one in piece) == sorted(map(id, model.parameters()))


def test_an_optimizer_that_a_schedule_has_taken_is_refused():
    optimizer = torch.optim.AdamW(make_model().parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(InputError, match=r"offload_optimizer: .* before the schedule is made"):
        offload(schedule.optimizer)


def test_on_a_cpu_the_state_stays_and_a_warning_says_so():
    optimizer = torch.optim.AdamW(nn.Linear(64, 64).parameters())
    with pytest.warns(match="offload_optimizer: the model runs on a CPU, so all of it stays where it is"):
        keep_state_on_host(optimizer)
    assert not is_on_host(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_saved_state_goes_on_with_and_without(name, before, after):
    optim = OPTIMIZERS[name]
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    expected, whole = trained(optim, offloads=False, steps=7)
    model, optimizer = trained(optim, offloads=before, steps=3)
    state, weights = saved(optimizer), model.state_dict()
    resumed, again = trained(optim, offloads=after, steps=4, state=state, weights=weights, first=3)
    assert_same_bits(resumed, expected)
    state, other = (sorted(tree_leaves_with_path(saved(one)["state"]), key=str) for one in (again, whole))
    for (path, value), (same_path, expected_value) in zip(state, other, strict=True):
        assert path == same_path
        assert torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(expected_value).cpu()), path


BY_HAND = {  # numbers: weight 8192, bias 128, head 4096; pieces of 16 KiB, slabs of 64
    "whole": ({}, None, 2 * 512 + 3 * 512, 65536, 2 * 65536 + 2 * 32768, 2 * 65536),
    "in shards": ({}, 2, 2 * 512 + 3 * 512, 32768 + 16384, 2 * 32768 + 16384, 65536),
    "momentum": ({"optimizer": "sgd"}, None, 512, 32768, 2 * 32768 + 2 * 16384, 65536),
    "in the backward": ({"optimizer_in_backward": True}, None, 2 * 512 + 3 * 512, 65536, 2 * 98304, 2 * 65536),
    "none": ({"offload_optimizer": "none"}, None, 2 * (32768 + 512 + 16384) + 3 * 512, 0, 0, 0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_what_stays_visits_and_is_pinned_by_hand(case):
    flags, num_ranks, stays, visits, awaited, pinned = BY_HAND[case]
    optim = OptimizerArguments(**{"offload_optimizer": "state", "weight_decay": 0.0, **flags})
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32, bias=False))
    found = optimizer_memory(optim, model, CUDA, num_ranks=num_ranks)
    assert (found.state_bytes, found.host_bytes, found.awaited_bytes) == (stays, pinned, awaited)
    numbers = 16 * 512
    assert found.optimizer_bytes == visits + numbers
    of_each = {"0.weight": 65536 + numbers, "0.bias": numbers, "1.weight": 32768 + numbers}
    assert found.in_backward == (of_each if optim.optimizer_in_backward else {})


@pytest.mark.parametrize(
    ("flags", "dtype", "num_bytes"),
    [
        ({}, torch.float32, 7 * 4),
        ({}, torch.bfloat16, 7 * 4 + 4 + 2),  # and the master is cast
        ({"optimizer": "sgd"}, torch.float32, 5 * 4),
        ({"optimizer": "adamw_8bit"}, torch.float32, 20 * 28),
        ({"optimizer": "adamw_bf16"}, torch.bfloat16, 22 * 28),
    ],
)
def test_what_an_update_on_the_host_reads_and_writes(flags, dtype, num_bytes):
    optim, model = OptimizerArguments(offload_optimizer="step", **flags), nn.Linear(64, 128, bias=False, dtype=dtype)
    assert optimizer_memory(optim, model, CUDA).updated_bytes == 64 * 128 * num_bytes
    assert optimizer_memory(optim, model, CUDA, num_ranks=2).updated_bytes == 64 * 64 * num_bytes


def test_on_a_cpu_all_state_stays():
    optim, model = OptimizerArguments(offload_optimizer="state"), nn.Linear(64, 128)
    known = optimizer_memory(OptimizerArguments(), model, CPU)
    assert optimizer_memory(optim, model, CPU) == known
    assert known.state_bytes == 8 * (64 * 128 + 128) + 2 * 4
