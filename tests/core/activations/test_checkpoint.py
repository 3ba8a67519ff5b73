"""The checkpoint that plans run blocks in: what its second run finds, what it refuses, and what it leaves behind."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

from memsave_recipes.core.activations import recompute as recompute_
from memsave_recipes.core.activations.recompute import recompute


@pytest.fixture
def x():
    return torch.linspace(0.1, 1, 8, requires_grad=True)


def in_turn(*functions):
    """A function that is another one in each run."""
    turns = iter(functions)
    return lambda x: next(turns)(x)


def plain(x):
    return x.sin().exp().cos()


def test_each_backward_of_a_kept_graph_runs_it_again(x):
    runs = []
    output = recompute(lambda x: runs.append(1) or plain(x), x, modules=[]).sum()
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    for number in (2, 3):
        (gradient,) = torch.autograd.grad(output, x, retain_graph=True)
        assert torch.equal(gradient, expected)
        assert len(runs) == number


def test_gradients_of_gradients(x):
    def second_gradient(output):
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0]

    assert torch.equal(second_gradient(recompute(plain, x, modules=[])), second_gradient(plain(x)))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda x: x.sin(), "this one 1 tensors, the first one 3"),
        (
            lambda x: x[:4].sin().exp().cos(),
            r"this one torch.float32 \(4,\) on cpu, the first one torch.float32 \(8,\)",
        ),
        (lambda x: x.double().sin().exp().cos(), "this one torch.float64"),
    ],
)
def test_a_second_run_that_saves_other_tensors_is_refused(x, second, words):
    output = recompute(in_turn(plain, second), x, modules=[])
    with pytest.raises(CheckpointError, match=words):
        output.sum().backward()


def test_a_write_on_an_input_is_refused(x):
    inputs = x * 1
    output = recompute(plain, inputs, modules=[])
    inputs.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("of_backward", [False, True])
def test_the_second_run_finds_autocast_and_the_default_device_of_the_first(x, of_backward):
    seen = []

    def function(x):
        kind = torch.get_autocast_dtype("cpu")
        seen.append((torch.is_autocast_enabled("cpu"), kind, torch.get_default_device()))
        return plain(x)

    def settings(are_here):
        return torch.autocast("cpu", torch.float16, enabled=are_here), torch.device("meta" if are_here else "cpu")

    autocast, device = settings(not of_backward)
    with autocast, device:
        output = recompute(function, x, modules=[]).sum()
    autocast, device = settings(of_backward)
    with autocast, device:
        output.backward(torch.ones((), device="cpu"))
    assert seen[0] == seen[1]
    assert seen[0][0] is not of_backward


@pytest.mark.parametrize("lower", [0.1, -0.5])
@pytest.mark.parametrize("function", [lambda x, **k: F.rrelu(x, **k), lambda x, **k: F.rrelu(x * 2, **k) * 3])
def test_noise_that_is_filled_after_it_is_saved_is_the_first_one(x, function, lower):
    """In memory that held other numbers."""
    gradients = []
    for run in (recompute, lambda function, *inputs, modules: function(*inputs)):
        torch.manual_seed(0)
        output = run(lambda x: function(x - 0.5, lower=lower, upper=0.6, training=True), x, modules=[])
        held = [torch.full((8,), float("nan")) for _ in range(64)]
        del held
        gradients += torch.autograd.grad(output.sum(), x)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("stops_early", [True, False])
def test_the_second_run_goes_on_to_its_end_if_torch_is_told_so(x, stops_early):
    ends = []
    with set_checkpoint_early_stop(stops_early):
        output = recompute(lambda x: (plain(x), ends.append(1))[0], x, modules=[])
    output.sum().backward()
    assert len(ends) == (1 if stops_early else 2)


def test_no_except_of_a_block_holds_the_end_up(x):
    def careful(x):
        try:
            return plain(x)
        except:  # noqa: E722
            return x.sqrt()

    (gradient,) = torch.autograd.grad(recompute(careful, x, modules=[]).sum(), x)
    assert torch.equal(gradient, *torch.autograd.grad(plain(x).sum(), x))


def test_no_device_is_asked_for_numbers_that_no_input_is_on(x, monkeypatch):
    monkeypatch.setattr(recompute_, "get_device_states", lambda *inputs: pytest.fail("asked"))
    recompute(plain, x, modules=[]).sum().backward()


def test_an_error_leaves_no_hooks_behind(x):
    with pytest.raises(ZeroDivisionError) as held:
        recompute(lambda x: x.sin() / (1 // 0), x, modules=[])
    assert held.value.__traceback__ is not None  # whoever holds it holds the frames, too
    (gradient,) = torch.autograd.grad(x.exp().sum(), x)
    assert torch.equal(gradient, x.detach().exp())


def test_nothing_is_held_after_the_backward(x):
    class Function:
        def __call__(self, x):
            return plain(x)

    function = Function()
    output, held = recompute(function, x * 1, modules=[]).sum(), weakref.ref(function)
    del function
    gc.disable()  # no cycle
    try:
        assert held() is not None
        output.backward()
        assert held() is None
    finally:
        gc.enable()
