"""What torch's own tests ask of a checkpoint, by their meaning: graphs, gradients of gradients, hooks, nesting."""

import contextlib
from functools import partial

import pytest
import torch
from peer_suites.adapter import AS_TORCH, REFUSED, SAME, Suite, body, in_turn, stack, total, train, x
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

suite = Suite()
once = partial(suite, SAME, selective=REFUSED)  # a second backward, which `selective` refuses


@once()
def two_backwards_through_one_graph(put):
    loss = total(put(stack())(x()))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@once()
def graph_kept_for_nobody(put):
    loss = total(put(stack())(x()))
    loss.backward(retain_graph=True)
    return torch.autograd.grad(loss, loss, retain_graph=True), loss


@suite(raises=RuntimeError)
def second_backward_through_a_freed_graph(put):
    loss = total(put(stack())(x()))
    loss.backward()
    loss.backward()
    return loss


@suite.each({"plain": 0.0, "with dropout": 0.3}, SAME, selective=REFUSED)
def gradient_penalty(put, value):
    model, inputs = put(stack(lambda self, x: nn.functional.dropout(body(self, x), value))), x(grad=True)
    (grad,) = torch.autograd.grad(total(model(inputs)), inputs, create_graph=True)
    (loss := grad.square().sum()).backward()
    return loss, inputs.grad


@once()
def third_order(put):
    model, inputs = put(stack(count=4)), x(grad=True)
    grad = total(model(inputs))
    for _ in range(2):
        (grad,) = torch.autograd.grad(grad.sum(), inputs, create_graph=True)
    (loss := grad.sum()).backward()
    return loss, inputs.grad


def forces(self, x, create_graph):
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        (force,) = torch.autograd.grad(body(self, x).sum(), x, create_graph=create_graph)
    return body(self, x) + force


@suite.each({"for a backward": True, "alone": False}, SAME, selective=REFUSED)
def gradient_inside_a_layer(put, value):
    return train(put(stack(lambda self, x: forces(self, x, value))), x())


@once()
def backward_in_two_parts(put):
    model, inputs = put(stack()), x(grad=True)
    outputs = model(inputs)
    outputs[:2].sum().backward(retain_graph=True)
    outputs[2:].sum().backward()
    return outputs, inputs.grad


@suite()
def backward_to_some_weights(put):
    model = put(stack())
    total(model(x())).backward(inputs=[model.blocks[2].l.weight, model.blocks[0].n.bias])


@suite()
def gradient_of_the_first_weights(put):
    model = put(stack())
    return torch.autograd.grad(total(model(x())), list(model.blocks[0].parameters()))


@suite()
def outputs_of_several_branches(put):
    def forward(self, x):
        y = body(self, x)
        return y, x * 2, y.detach()

    def through(self, x):
        kept = []
        for block in self.blocks:
            x, *others = block(x)
            kept += others
        return x, kept

    return train(put(stack(forward, through)), x())


@suite.layer()
def no_gradients_inside(self, x):
    with torch.no_grad():
        scale = body(self, x).mean()
    return body(self, x) * scale


@suite()
def everything_detached(put):
    return total((put(stack(lambda self, x: body(self, x).detach()))(x()), x(grad=True)))


@suite.layer()
def hooks_on_tensors_inside(self, x):
    y = body(self, x)
    y.register_hook(lambda grad: grad * 2)
    return y * 1


@suite()
def retain_grad_inside(put):
    def forward(self, x):
        y = self.l(self.n(x))
        y.retain_grad()
        self.kept = y
        return torch.tanh(y)

    model = put(stack(forward))
    return train(model, x()), [block.kept.grad for block in model.blocks]


@suite()
def anomaly_mode(put):
    with torch.autograd.detect_anomaly(check_nan=True):
        return train(put(stack()), x())


@suite()
def saved_on_the_host_around(put):
    with torch.autograd.graph.save_on_cpu():
        return train(put(stack()), x())


@suite.layer()
def saved_on_the_host_inside(self, x):
    with torch.autograd.graph.save_on_cpu():
        return body(self, x)


@suite.each({"around the forward": False, "around both": True})
def saved_tensors_packed(put, value):
    model, packed = put(stack()), []
    hooks = saved_tensors_hooks(lambda t: t.detach().double(), lambda t: packed.append(1) or t.float())
    with hooks:
        loss = total(model(x()))
        if value:
            loss.backward()
    if not value:
        loss.backward()
    return loss


@suite(AS_TORCH)
def saved_tensors_hooks_disabled(put):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return train(put(stack()), x())


@suite()
def mutation_allowed(put):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return train(put(stack()), x())


class Cube(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return grad * 3 * first * second


class Doubled(torch.autograd.Function):
    """Writes on its input, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@once()
def own_function_that_reads_twice(put):
    return train(put(stack(lambda self, x: Cube.apply(body(self, x)))), x())


@suite(AS_TORCH)
def second_run_saves_others(put):
    runs = []

    def forward(self, x):
        runs.append(1)
        y = body(self, x)
        return y * y.exp() if len(runs) <= 4 else y * 2

    return train(put(stack(forward)), x())


# A checkpoint inside of a planned layer, and one around it.


def inside(self, x, **how):
    return x + checkpoint(self.l, self.n(x), **how)


@suite.each({"reentrant": True, "without": False})
def checkpoint_inside(put, value):
    return train(put(stack(lambda self, x: inside(self, x, use_reentrant=value))), x(grad=True))


@suite.each({"reentrant": True, "without": False})
def checkpoint_around(put, value):
    model = put(stack())
    (loss := total(checkpoint(model, x(grad=True), use_reentrant=value))).backward()
    return loss


@suite()
def three_checkpoints_deep(put):
    deep = lambda self, x: checkpoint(partial(inside, self, use_reentrant=False), x, use_reentrant=False)  # noqa: E731
    return train(put(stack(deep)), x())


@once()
def gradient_penalty_of_nested_checkpoints(put):
    model, inputs = put(stack(lambda self, x: inside(self, x, use_reentrant=False))), x(grad=True)
    (grad,) = torch.autograd.grad(total(model(inputs)), inputs, create_graph=True)
    (loss := grad.square().sum()).backward()
    return loss, inputs.grad


def policy(keep, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE


KEEPS = {"nothing": (), "products": (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)}


@suite.each(KEEPS)
def selective_checkpoint_inside(put, value):
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, value))
    return train(put(stack(lambda self, x: inside(self, x, use_reentrant=False, context_fn=contexts))), x())


@suite.each(KEEPS)
def selective_checkpoint_around(put, value):
    model = put(stack())
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, value))
    (loss := total(checkpoint(model, x(), use_reentrant=False, context_fn=contexts))).backward()
    return loss


@suite()
def checkpoint_sequential_around(put):
    model = put(stack(through=lambda self, x: checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)))
    return train(model, x(grad=True))


@suite()
def preserved_random_numbers_of_nested_dropout(put):
    def forward(self, x):
        drop = nn.functional.dropout
        return drop(checkpoint(lambda y: drop(self.l(y), 0.2), self.n(drop(x, 0.1)), use_reentrant=False), 0.3)

    return train(put(stack(forward)), x(), times=2), torch.rand(2)


@once()
def error_in_the_backward_then_backward_again(put):
    failing = [True]

    def fail(grad):
        if failing:
            failing.clear()
            raise ValueError

    model, inputs = put(stack()), x(grad=True)
    inner = inputs * 1
    inner.register_hook(fail)
    loss = total(model(inner))
    with contextlib.suppress(ValueError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return loss, inputs.grad


@suite()
def graph_dropped_without_backward(put):
    model = put(stack())
    for _ in range(3):
        model(x())
    return train(model, x())


@suite()
def step_in_a_backward_hook(put):
    model, waiting = put(stack()), [True]

    def step(grad):
        if waiting:
            waiting.clear()
            with torch.enable_grad():
                train(model, x().flip(1))

    loss = total(model(x()))
    model.blocks[1].l.weight.register_hook(step)
    loss.backward()
    return loss


@suite.model()
def gradients_off_inside_the_model(self, x):
    with torch.no_grad():
        x = self.blocks[1](self.blocks[0](x))
    return self.blocks[3](self.blocks[2](x))


@suite.each({"skipped": (0, 2), "repeated": (0, 0, 1, 1), "in circles": (0, 1, 0, 1), "backwards": (3, 2, 1, 0)})
def order_of_the_layers(put, value):
    def through(self, x):
        for number in value:
            x = self.blocks[number](x)
        return x

    return train(put(stack(through=through)), x())


@suite()
def two_forwards_and_their_backwards_reversed(put):
    model = put(stack())
    first, second = total(model(x())), total(model(x().flip(1)))
    second.backward()
    first.backward()
    return first, second


@suite()
def accumulated_and_clipped(put):
    model = put(stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, x(), times=2)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return norm, train(model, x()), in_turn(model, x())


@suite()
def steps_of_lbfgs(put):
    model = put(stack())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        (loss := total(model(x()))).backward()
        return loss

    return optimizer.step(closure), total(model(x()))


@suite(strategies=("full", "selective"))
def all_layers_as_one_block(put):
    return train(put(stack(), ["blocks"]), x())


@suite.layer()
def detached_inside(self, x):
    return body(self, x.detach()) + x.detach()


@suite.layer()
def own_function_that_writes(self, x):
    return Doubled.apply(self.l(torch.tanh(x)))


@pytest.mark.parametrize("name", suite.cases)
def test_case(name, judge):
    judge(suite.cases[name])
