"""The checkpoint that plans run blocks in: what its second run finds, what it refuses, and what it leaves behind."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from memsave_recipes.activations.recompute import recompute


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
