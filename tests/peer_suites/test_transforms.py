"""Transforms of functions, forward-mode differentiation, and torch's compiler around, inside of and before a plan."""

from functools import partial

import pytest
import torch
from peer_suites.adapter import AS_TORCH, REFUSED, SAME, Suite, body, stack, total, train, x
from samples import sample
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

suite = Suite()


def residual(self, x):
    return x + body(self, x)


def weights_of(model):
    return {name: weight.detach() for name, weight in model.named_parameters()}


def loss_at(model):
    return lambda weights, row: functional_call(model, weights, (row,)).square().sum()


def dual(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x(), torch.ones(4, 8)))).tangent


def dual_of_weights(model):
    weights = weights_of(model)
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(one, torch.ones_like(one)) for name, one in weights.items()}
        return forward_ad.unpack_dual(functional_call(model, weights, (x(),))).tangent


def dual_over_reverse(model):
    with forward_ad.dual_level():
        inputs = forward_ad.make_dual(x(grad=True), torch.ones(4, 8))
        (gradient,) = torch.autograd.grad(total(model(inputs)), inputs, create_graph=True)
        return forward_ad.unpack_dual(gradient).tangent


def in_batches(model):
    return vmap(model)(x(3, 4, 8))


def in_batches_then_backward(model):
    return total(in_batches(model)).backward()


RIGHT_IN_TORCH = {
    "jvp": lambda model: jvp(model, (x(),), (torch.ones(4, 8),))[1],
    "forward mode": dual,
    "forward mode of weights": dual_of_weights,
    "forward mode over reverse mode": dual_over_reverse,
    "vmap": in_batches,
    "jacfwd": lambda model: jacfwd(model)(x(1, 8)),
    "linearize": lambda model: torch.func.linearize(model, x())[1](torch.ones(4, 8)),
    "vmap without gradients": lambda model: torch.no_grad()(in_batches)(model),
    "vmap over weights": lambda model: vmap(lambda w, row: functional_call(model, w, (row,)), in_dims=(0, None))(
        {name: torch.stack([one, one * 2]) for name, one in weights_of(model).items()}, x()
    ),
    "functional jacobian": lambda model: torch.autograd.functional.jacobian(model, x(1, 8)),
}


@suite.each(RIGHT_IN_TORCH, REFUSED)
def transform(put, value):
    return value(put(stack(residual)))


REFUSED_BY_TORCH = {
    "grad": lambda model: grad(loss_at(model))(weights_of(model), x()),
    "vjp": lambda model: vjp(model, x())[1](torch.ones(4, 8)),
    "jacrev": lambda model: jacrev(model)(x(1, 8)),
    "hessian": lambda model: hessian(lambda row: model(row).sum())(x(1, 8)),
    "gradients of samples": lambda model: vmap(grad(loss_at(model)), in_dims=(None, 0))(weights_of(model), x(4, 1, 8)),
    "vmap and a backward": in_batches_then_backward,
}


@suite.each(REFUSED_BY_TORCH, AS_TORCH)
def transform_that_torch_refuses(put, value):
    return value(put(stack(residual)))


@suite(SAME, selective=REFUSED)
def functional_hessian(put):
    model = put(stack(residual))
    return torch.autograd.functional.hessian(lambda row: model(row).square().sum(), x(1, 8))


@suite()
def gradients_in_a_batch(put):
    outputs = put(stack(residual))(inputs := x(1, 8, grad=True))
    return torch.autograd.grad(outputs, inputs, torch.eye(8).view(8, 1, 8), is_grads_batched=True)


@suite(SAME, selective=REFUSED)
def check_of_gradients(put):
    model = put(stack(residual).double())
    return torch.autograd.gradcheck(model, x(1, 8).double().requires_grad_())


@suite(SAME, selective=REFUSED)
def check_of_second_gradients(put):
    model = put(stack(residual).double())
    return torch.autograd.gradgradcheck(model, x(1, 8).double().requires_grad_())


@suite()
def gradients_of_samples_by_hand(put):
    model, rows = put(stack(residual)), []
    for row in x(4, 1, 8):
        rows.append(torch.autograd.grad(total(model(row)), list(model.parameters())))
    return rows


# torch.compile


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compiled(backend, **how):
    torch._dynamo.reset()
    return lambda function: torch.compile(function, backend=backend, **how)


COMPILED = ("full", "segments:2", "selective")
compiles = partial(suite, REFUSED, strategies=COMPILED)
BACKENDS = {"eager": ("eager", {}), "aot_eager": ("aot_eager", {}), "whole graph": ("aot_eager", {"fullgraph": True})}


@suite.each(BACKENDS, REFUSED, strategies=COMPILED)
def compiled_around_a_plan(put, value):
    backend, how = value
    model = put(stack(residual))
    return train(compiled(backend, **how)(model), x(), times=2)


@compiles()
def model_compiled_in_place_under_a_plan(put):
    model = put(stack(residual))
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    return train(model, x(), times=2)


@compiles()
def layers_compiled_before_the_plan(put):
    model = stack(residual)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train(put(model), x(), times=2)


@compiles()
def layers_compiled_under_the_plan(put):
    model = put(stack(residual))
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train(model, x(), times=2)


@compiles()
def parts_of_layers_compiled(put):
    model = stack(residual)
    for block in model.blocks:
        block.l = compiled("aot_eager")(block.l)
    return train(put(model), x(), times=2)


def breaks(self, x):
    y = self.n(x)
    torch._dynamo.graph_break()
    return x + torch.tanh(self.l(y))


@compiles()
def graph_break_in_a_layer(put):
    model = put(stack(breaks))
    return train(compiled("aot_eager")(model), x(), times=2)


@compiles()
def graph_break_in_a_layer_compiled_by_itself(put):
    model = stack(breaks)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train(put(model), x(), times=2)


@compiles()
def compiled_with_dropout(put):
    model = put(stack(lambda self, x: x + nn.functional.dropout(body(self, x), 0.3)))
    return train(compiled("aot_eager")(model), x(), times=2)


@compiles()
def planned_after_the_model_was_compiled(put):
    model = stack(residual)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager")
    train(whole, x())
    model.zero_grad()
    put(model)
    return train(whole, x())


@compiles()
def evaluation_of_a_compiled_model(put):
    model = put(stack(residual))
    with torch.no_grad():
        return compiled("aot_eager")(model)(x())


@suite(REFUSED)
def traced_with_gradients(put):
    return torch.jit.trace(put(stack(residual)), x())(x().flip(1))


SLOW = "compiled", "graph", "linearize"
FAST = [name for name in suite.cases if not any(word in name for word in SLOW)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sample(FAST, suite.cases))
def test_case(name, judge):
    judge(suite.cases[name])
