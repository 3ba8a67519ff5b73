"""What a loop does to weights and gradients between steps on the host is done as with an optimizer on the device."""

from copy import deepcopy

import pytest
import torch
from host_copies import CopiesInOrder, LateForTheHost
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host import state as host_state
from memsave_recipes.core.host import step as host_step
from memsave_recipes.core.host.state import StateOnHost, is_on_host, keep_state_on_host, move_state
from memsave_recipes.core.host.step import HostMasters, step_on_host

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


@pytest.fixture(autouse=True)
def late_copies(monkeypatch):
    """Also on a CPU, between whose memory copies are late."""

    def late_masters(parameters, device, dtype, waiting=()):
        return HostMasters(parameters, dtype, CopiesInOrder(), LateForTheHost(), waiting)

    monkeypatch.setattr(host_state, "SLAB_BYTES", 2**16)
    monkeypatch.setattr(host_step, "STAGED_BYTES", 2**12)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(host_step, "masters_on_host", late_masters)
        for module in (host_step, host_state):
            monkeypatch.setattr(module, "may_leave", lambda device: True)
        monkeypatch.setattr(host_state, "SideStream", lambda device: CopiesInOrder())


class Loop:
    """An optimizer of torch over a small model, which steps on the host or not."""

    def __init__(self, *, by_host, dtype=torch.float32, kind=AdamW, frozen=False, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4)).to(DEVICE, dtype)
        self.model[0].requires_grad_(not frozen)
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.01, **settings})
        self.masters = None
        if by_host:
            self.go_to_host()

    def go_to_host(self):
        self.masters = step_on_host(self.model, self.optimizer)

    def backward(self, number, factor=1.0):
        dtype = self.model[0].weight.dtype
        rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)).to(DEVICE, dtype)
        (self.model(rows).square().sum() * factor).backward()

    def clip(self):
        if self.masters is not None:
            return self.masters.clip(1.0)
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def steps(self, *numbers, clips=True):
        for number in numbers:
            self.backward(number)
            self.backward(number + 100)
            if clips:
                self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self):
        return [one.detach().cpu().clone() for one in self.model.parameters()]


def assert_same(one, other):
    assert all(map(torch.equal, one.weights, other.weights))
    assert not any(weight.isnan().any() for weight in one.weights)


@torch.no_grad()
def clamped(loop):
    for one in loop.model.parameters():
        one.clamp_(-0.1, 0.1)


def clamped_data(loop):
    for one in loop.model.parameters():
        one.data.clamp_(-0.1, 0.1)


def negated_data(loop):
    loop.model[0].weight.data.neg_()


def filled_data(loop):
    for one in (loop.model[0].bias, loop.model[2].weight):
        one.data.fill_(0.5)


def one_number(loop):
    loop.model[3].weight.data[1, 2] += 0.001


def rows_in_another_order(loop):
    loop.model[0].weight.data.copy_(loop.model[0].weight.data.flip(0))


def assigned(loop):
    loop.model[0].weight.data = torch.full_like(loop.model[0].weight, 0.25)


def loaded(loop):
    loop.model.load_state_dict(Loop(by_host=False, dtype=loop.model[0].weight.dtype).model.state_dict())


def initialised(loop):
    torch.manual_seed(3)
    loop.model[3].reset_parameters()


EDITS = [clamped, clamped_data, negated_data, filled_data, one_number, rows_in_another_order, assigned, loaded]
EDITS.append(initialised)


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_weights_train_on(edit, kind):
    """Between two steps, and between the norm and the step; again and again."""
    found, expected = (Loop(by_host=there, kind=kind) for there in (True, False))
    for loop in (found, expected):
        edit(loop)
        loop.steps(0, 1)
        edit(loop)
        loop.steps(2, clips=False)
        loop.backward(3)
        loop.clip()
        edit(loop)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        edit(loop)
        loop.steps(4)
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_weights_of_16_bits_are_taken_and_the_others_keep_their_masters(edit, dtype):
    loop = Loop(by_host=True, dtype=dtype).steps(0, 1)
    before = {
        weight: (weight.detach().cpu().clone(), master.detach().clone()) for weight, master in loop.masters.of.items()
    }
    edit(loop)
    loop.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    edited = loop.weights
    loop.steps(2)
    assert all(map(torch.equal, loop.weights, edited))
    for weight, (old, master) in before.items():
        now, is_kept = loop.masters.of[weight].detach(), weight.detach().cpu() == old
        assert torch.equal(now, torch.where(is_kept, master, weight.detach().cpu().float()))


@pytest.mark.parametrize("edit", EDITS)
def test_edited_weights_are_taken_beside_the_backward(edit):
    found, expected = (Loop(by_host=False, dtype=torch.bfloat16) for _ in range(2))
    for loop, in_backward in ((found, True), (expected, False)):
        masters = host_step.masters_on_host(list(loop.model.parameters()), DEVICE, torch.float32)
        loop.optimizer.param_groups[0]["params"] = list(masters.of.values())
        host_step.step_masters(loop.optimizer, masters, in_backward=in_backward)
        for number in range(4):
            loop.backward(number)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            edit(loop)
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_masters_have_no_fewer_bits_than_their_weights(dtype):
    found, expected = (nn.Linear(3, 4, dtype=dtype).to(DEVICE) for _ in range(2))
    found.load_state_dict(expected.state_dict())
    for model in (found, expected):
        optimizer = SGD(model.parameters(), lr=1e-3)
        if model is found:
            step_on_host(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 3, dtype=dtype, device=DEVICE)).abs().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


def by_model(loop):
    loop.model.zero_grad()


def by_zeros(loop):
    loop.model.zero_grad(set_to_none=False)


def by_optimizer(loop):
    loop.optimizer.zero_grad()


def by_hand(loop):
    for one in loop.model.parameters():
        one.grad = None


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("is_clipped", [True, False])
@pytest.mark.parametrize("throw_away", [by_model, by_zeros, by_optimizer, by_hand])
def test_a_gradient_that_is_thrown_away_is_gone(monkeypatch, throw_away, is_clipped, leaves):
    if not leaves:  # as under DDP
        monkeypatch.setattr(HostMasters, "leave_in_backward", lambda self: None)
    found, expected = (Loop(by_host=there) for there in (True, False))
    for loop in (found, expected):
        loop.steps(0)
        for _ in range(2):
            loop.backward(1, float("nan"))
            loop.backward(2)
            if is_clipped:
                assert not loop.clip().isfinite()
            throw_away(loop)
        loop.steps(3)
        loop.backward(4)
        throw_away(loop)
        assert loop.clip() == 0
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.steps(5)
    assert_same(found, expected)


def test_a_part_of_the_gradient_is_thrown_away_replaced_or_added_to():
    found, expected = (Loop(by_host=there) for there in (True, False))
    for loop in (found, expected):
        loop.steps(0)
        loop.backward(1)
        loop.model[0].zero_grad()
        loop.model[3].weight.grad = torch.ones_like(loop.model[3].weight)
        loop.model[3].bias.grad.add_(torch.ones_like(loop.model[3].bias))
        loop.clip()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.steps(2)
    assert_same(found, expected)


def test_clipping_what_is_on_the_host_is_refused():
    loop = Loop(by_host=True)
    loop.backward(0)
    with pytest.raises(
        InputError, match=r"step_on_host: .* clip them by clip\(max_norm\) of what step_on_host returns"
    ):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_what_thaws_or_is_added_trains(kind, clips):
    loops = [Loop(by_host=there, kind=kind, frozen=True, weight_decay=0.1) for there in (True, False)]
    for loop in loops:
        loop.steps(0, 1, clips=clips)
        loop.model[0].requires_grad_(True)
        loop.steps(2, clips=clips)
        loop.model[3].requires_grad_(False)
        loop.model.append(nn.Linear(4, 2, device=DEVICE, dtype=torch.float32))
        torch.manual_seed(1)
        loop.model[4].reset_parameters()
        loop.optimizer.add_param_group({"params": loop.model[4].parameters(), "lr": 0.02})
        loop.steps(3, 4, clips=clips)
        loop.model[3].requires_grad_(True)
        loop.steps(5, clips=clips)
        with pytest.raises(ValueError, match="more than one parameter group"):
            loop.optimizer.add_param_group({"params": [loop.model[0].weight]})
        loop.steps(6, clips=clips)
    assert_same(*loops)
    saved, expected = (loop.optimizer.state_dict() for loop in loops)
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_an_optimizer_goes_to_the_host_with_its_state_and_once(kind):
    settings = {"momentum": 0.9} if kind is SGD else {"amsgrad": True}
    found, expected = (Loop(by_host=False, kind=kind, **settings).steps(0, 1) for _ in range(2))
    found.go_to_host()
    masters = found.masters
    found.steps(2)
    found.go_to_host()
    assert found.masters is masters
    assert_same(found.steps(3), expected.steps(2, 3))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("by_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_optimizer_are_loaded_in_either_order(first, by_host, dtype):
    """Also after steps; from an optimizer on the device masters are made of the weights."""
    whole = Loop(by_host=by_host, dtype=dtype).steps(0, 1, 2)
    saved = deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    resumed = []
    for steps in ((), (7, 8)):
        loop = Loop(by_host=True, dtype=dtype).steps(*steps)
        for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
            getattr(loop, part).load_state_dict(deepcopy(saved[part == "optimizer"]))
        resumed.append(loop.steps(3, 4))
    assert_same(*resumed)
    if by_host or dtype == torch.float32:
        assert_same(resumed[0], whole.steps(3, 4))


@pytest.mark.parametrize("middle", ["none", "state"])
def test_masters_do_not_outlive_a_life_without_them(middle):
    """Step, the middle, step again; the first masters in place of the weights would take steps back."""
    first = Loop(by_host=True, dtype=torch.bfloat16).steps(0, 1)
    assert len(first.optimizer.state_dict()["masters"]) == 6
    lives = [Loop(by_host=False, dtype=torch.bfloat16, lr=0.1), Loop(by_host=True, dtype=torch.bfloat16)]
    if middle == "state":
        move_state(lives[0].optimizer, StateOnHost(DEVICE, CopiesInOrder(), CopiesInOrder()))
    before = first
    for life, steps in zip(lives, [(2, 3), ()], strict=True):
        life.optimizer.load_state_dict(deepcopy(before.optimizer.state_dict()))
        life.model.load_state_dict(before.model.state_dict())
        assert not any("master" in key for entry in life.optimizer.state.values() for key in entry)
        before = life.steps(*steps)
    assert "masters" not in lives[0].optimizer.state_dict()
    lives[1].optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert_same(lives[1].steps(4), lives[0])


def test_stale_masters_of_another_checkpoint_are_passed_over():
    """As those that release 0.3 saved with the state, which an optimizer on the device kept and saved on."""
    old, now = Loop(by_host=True, dtype=torch.bfloat16).steps(0, 1), Loop(by_host=True, dtype=torch.bfloat16)
    now.steps(0, 1, 2, 3)
    state = deepcopy(old.optimizer.state_dict())
    for number, master in state.pop("masters").items():
        state["state"][number]["master"] = master
    weights = now.weights
    now.optimizer.load_state_dict(state)
    assert not any("master" in entry for entry in now.optimizer.state.values())
    now.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert all(map(torch.equal, now.steps(4).weights, weights))


def test_settings_of_a_device_do_not_reach_the_host():
    rate = torch.tensor(0.01, device=DEVICE)
    found, expected = (Loop(by_host=there, lr=rate) for there in (True, False))
    found.optimizer.param_groups[0]["capturable"] = True
    found.steps(0, 1)
    assert found.optimizer.param_groups[0]["lr"].device.type == DEVICE.type
    assert_same(found, expected.steps(0, 1))


def linear():
    return nn.Linear(2, 2, device=DEVICE)


def scheduled(model):
    return LambdaLR(AdamW(model.parameters()), lambda step: 1.0).optimizer


def wrapped(model):
    optimizer = AdamW(model.parameters())
    optimizer.optimizer = AdamW(model.parameters())
    return optimizer


def moved(model, *, by_step):
    optimizer = AdamW(model.parameters())
    step_on_host(model, optimizer) if by_step else keep_state_on_host(optimizer)
    return optimizer


BOTH = {
    "LBFGS steps all parameters at once: leave it on the device": lambda model: torch.optim.LBFGS(model.parameters()),
    "the optimizer is wrapped already: pass it before prepare or setup": wrapped,
    "a schedule holds the optimizer's step already": scheduled,
    "the optimizer has no parameters": lambda model: AdamW([{"params": []}]),
}
OF_STEP = {
    "the optimizer steps parameters that Linear does not have": lambda model: AdamW(linear().parameters()),
    "keep_state_on_host and step_on_host exclude each other": lambda model: moved(model, by_step=False),
}
OF_STATE = {"keep_state_on_host and step_on_host exclude each other": lambda model: moved(model, by_step=True)}


@pytest.mark.parametrize("message", BOTH | OF_STEP)
def test_an_optimizer_that_cannot_step_on_the_host_is_refused(message):
    model = linear()
    optimizer = (BOTH | OF_STEP)[message](model)
    with pytest.raises(InputError, match=message):
        step_on_host(model, optimizer)


@pytest.mark.parametrize("message", BOTH | OF_STATE)
def test_an_optimizer_whose_state_cannot_wait_on_the_host_is_refused(message):
    optimizer = (BOTH | OF_STATE)[message](linear())
    with pytest.raises(InputError, match=message):
        keep_state_on_host(optimizer)


def test_state_goes_to_the_host_once():
    optimizer = moved(linear(), by_step=False)
    kind = type(optimizer)
    keep_state_on_host(optimizer)
    assert type(optimizer) is kind
    assert is_on_host(optimizer)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True, device=DEVICE)
    step_on_host(model, torch.optim.SparseAdam(model.parameters()))
    with pytest.raises(InputError, match="step_on_host: a gradient is sparse: make the embedding with sparse=False"):
        model(torch.tensor([1, 2], device=DEVICE)).sum().backward()


@pytest.mark.parametrize("numel", [1024, 1500, 2047])
@pytest.mark.parametrize("saved_by", ["step", "float32"])
def test_a_moment_that_is_large_in_float32_alone_is_stepped_on_the_device(numel, saved_by):
    """It has 4,096 to 8,191 bytes; of a step on the host, or of an optimizer of float32 weights."""
    first, model = nn.LayerNorm(numel, device=DEVICE), nn.LayerNorm(numel, device=DEVICE, dtype=torch.bfloat16)
    first.to(torch.bfloat16 if saved_by == "step" else torch.float32)
    before, optimizer = AdamW(first.parameters()), AdamW(model.parameters(), foreach=True)
    if saved_by == "step":
        step_on_host(first, before)
    move_state(optimizer, StateOnHost(DEVICE, CopiesInOrder(), CopiesInOrder()))
    rows = torch.randn(2, numel, device=DEVICE)
    first(rows.to(first.weight.dtype)).square().sum().backward()
    before.step()
    optimizer.load_state_dict(before.state_dict())
    model(rows.bfloat16()).square().sum().backward()
    optimizer.step()
    moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert {(one.dtype, one.device.type) for one in moments} == {(torch.bfloat16, DEVICE.type)}
    assert not optimizer.on_host._homes
