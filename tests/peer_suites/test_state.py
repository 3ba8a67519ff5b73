"""State of layers and of the program: it counts once, and the second run finds what the first one did."""

import contextlib
import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peer_suites.adapter import AS_TORCH, REFUSED, Suite, body, in_turn, stack, total, train, x
from samples import sample
from torch import nn
from torch.func import functional_call

suite = Suite()


def scales(scale):
    """A layer that computes with what ``scale(self, x)`` remembers."""

    def forward(self, x, **given):
        factor = scale(self, x, **given)
        return x + body(self, x) * torch.as_tensor(factor)  # a tensor, which is saved

    return forward


def counter(self, x):
    self.count += 1
    return self.count


def mean_of_all(self, x):
    self.count = 0.9 * self.count + 0.1 * x.detach().mean()
    return 1 + self.count


def mean_with_its_graph(self, x):
    self.count = 0.9 * self.count + 0.1 * x.mean()
    return 1 + self.count


@suite.each({"counter": counter, "mean": mean_of_all})
def attribute_set_anew(put, value):
    return train(put(stack(scales(value), parts=lambda: {"count": 0})), x(), times=3)


@suite()
def recurrent_state_with_its_graph(put):
    model = put(stack(scales(mean_with_its_graph), parts=lambda: {"count": 0}))
    (loss := total([model(x()) for _ in range(3)])).backward()
    return loss


@suite(REFUSED)
def counter_in_a_buffer(put):
    return train(put(stack(scales(lambda self, x: self.count.add_(1)), parts=lambda: {"count": torch.zeros(())})), x())


@suite.each({"of a method": False, "of an attribute": True}, REFUSED)
def counter_in_a_closure(put, value):
    calls = 0

    def scale(*_):
        nonlocal calls
        calls += 1
        return calls

    held = lambda self, x: self.scale()  # noqa: E731
    return train(put(stack(scales(held if value else scale), parts=lambda: {"scale": scale})), x())


SEEN = []


@suite(AS_TORCH)
def counter_in_a_global_list(put):
    SEEN.clear()

    def scale(self, x):
        SEEN.append(1)
        return len(SEEN)

    return train(put(stack(scales(scale))), x())


GENERATOR = np.random.default_rng(0)


@suite(AS_TORCH)
def generator_of_numpy_in_a_global(put):
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return train(put(stack(scales(lambda self, x: GENERATOR.random()))), x())


def lazily(self, x):
    if self.table is None:
        self.table = torch.linspace(0.5, 1.5, 8)
    return self.table


def by_shape(self, x):
    if x.shape not in self.tables:
        self.tables[x.shape] = torch.linspace(0.5, 1.5, x.shape[-1])
    return self.tables[x.shape]


def lazy_buffer(self, x):
    if not hasattr(self, "late"):
        self.register_buffer("late", torch.linspace(0.5, 1.5, 8))
    return self.late


@suite.each(
    {"attribute": (lazily, "table", None), "dict": (by_shape, "tables", {}), "buffer": (lazy_buffer, "no", None)}
)
def computed_in_the_first_forward(put, value):
    scale, name, start = value
    return train(put(stack(scales(scale), parts=lambda: {name: copy.copy(start)})), x(), times=2)


def child_in_the_first_forward(self, x):
    if not hasattr(self, "child"):
        self.child = nn.Linear(8, 8)
    return self.child(x)


@suite()
def module_made_in_the_first_forward(put):
    return train(put(stack(scales(child_in_the_first_forward))), x(), times=2)


def queue(self, x, late):
    if late:
        self.seen.append(1.0)
    return 1 + sum(self.seen)


def temperature(self, x, late):
    self.heat = self.heat * 0.9 if late else self.heat
    return self.heat


def average_by_data(self, x, late):
    if late:
        self.mean.data.mul_(0.9)
    return self.mean


def plain_tensor(self, x, late):
    if late:
        self.held[0].mul_(0.9)
    return self.held[0]


def layer_drop(self, x, late):
    return random.random() if late else 1.0


def drop_of_numpy(self, x, late):
    return np.random.rand() if late else 1.0


def new_attribute(self, x, late):
    if late:
        self.extra = getattr(self, "extra", 1) + 1
    return getattr(self, "extra", 1)


def class_attribute(self, x, late):
    if late:
        type(self).shared = getattr(type(self), "shared", 1) + 1
    return getattr(self, "shared", 1)


LATE = (queue, temperature, plain_tensor, layer_drop, drop_of_numpy, new_attribute, class_attribute)


@suite.each({scale.__name__: scale for scale in LATE}, REFUSED)
@suite.each({"average_by_data": average_by_data}, AS_TORCH)
def begins_after_many_equal_runs(put, value):
    parts = lambda: {"seen": [], "heat": 1.0, "mean": torch.ones(()), "held": (torch.ones(()),)}  # noqa: E731
    model = put(stack(scales(value), parts=parts))
    return [train(model, x(), late=step >= 40) for step in range(45)]


@suite.each({"list": list, "deque": deque, "dict": dict}, REFUSED)
def begins_late_in_what_is_given(put, value):
    def scale(self, x, seen, late):
        if late and isinstance(seen, dict):
            seen[len(seen)] = 1
        elif late:
            seen.append(1)
        return 1 + len(seen)

    model, seen = put(stack(scales(scale))), value()
    return [train(model, x(), seen=seen, late=step >= 40) for step in range(45)], list(seen)


@suite()
def random_numbers_of_python_and_numpy(put):
    return train(put(stack(scales(lambda self, x: random.random() + np.random.rand()))), x(), times=2)


@suite(REFUSED)
def random_instance_of_python(put):
    return train(put(stack(scales(lambda self, x: self.own.random()), parts=lambda: {"own": random.Random(0)})), x())


@suite(REFUSED)
def own_generator_of_torch(put):
    parts = lambda: {"own": torch.Generator().manual_seed(0)}  # noqa: E731
    return train(put(stack(scales(lambda self, x: torch.rand(8, generator=self.own)), parts=parts)), x())


@suite(REFUSED)
def generator_as_an_argument(put):
    model = put(stack(scales(lambda self, x, generator: torch.rand(8, generator=generator))))
    return train(model, x(), generator=torch.Generator().manual_seed(0))


@suite()
def dropout_and_what_is_drawn_after_the_step(put):
    losses = train(put(stack(lambda self, x: F.dropout(body(self, x), 0.3), count=4)), x(), times=2)
    return losses, torch.rand(3)


@suite()
def seed_set_inside(put):
    def scale(self, x):
        torch.manual_seed(3)
        return torch.rand(8)

    return train(put(stack(scales(scale))), x(), times=2), torch.rand(3)


@suite()
def generator_forked_inside(put):
    def scale(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return torch.rand(8)

    return train(put(stack(scales(scale))), x(), times=2), torch.rand(3)


# Attributes up and down around the end of the second run.


def up_and_down(self, x):
    self.depth += 1
    y = body(self, x) * self.depth
    self.depth -= 1
    return y


def set_and_deleted(self, x):
    assert not hasattr(self, "busy")
    self.busy = True
    y = body(self, x)
    del self.busy
    return y


def swapped(self, x):
    kept, self.l = self.l, self.other
    y = body(self, x)
    self.l = kept
    return y


def pushed(self, x):
    self.stack.append(len(self.stack))
    y = body(self, x) * len(self.stack)
    self.stack.pop()
    return y


def counted_in_its_child(self, x):
    self.n.calls = getattr(self.n, "calls", 0) + 1
    y = body(self, x) * self.n.calls
    self.n.calls -= 1
    return y


def guarded(self, x):
    if self.depth:
        raise RuntimeError("called inside itself")
    return up_and_down(self, x)


@suite.each(
    {one.__name__: one for one in (up_and_down, set_and_deleted, swapped, pushed, counted_in_its_child, guarded)},
    REFUSED,
)
def back_at_the_end(put, value):
    parts = lambda: {"depth": 0, "stack": [], "other": nn.Linear(8, 8)}  # noqa: E731
    model = put(stack(value, parts=parts))
    return train(model, x(), times=3), [block.depth for block in model.blocks]


@suite(REFUSED)
def back_at_the_end_of_a_forward_that_is_late(put):
    def forward(self, x, late):
        return up_and_down(self, x) if late else body(self, x)

    model = put(stack(forward, parts=lambda: {"depth": 0}))
    return [train(model, x(), late=step >= 40) for step in range(43)], [block.depth for block in model.blocks]


@suite.layer(parts=lambda: {"depth": 0}, times=3)
def back_at_the_end_by_finally(self, x):
    try:
        self.depth += 1
        return body(self, x) * self.depth
    finally:
        self.depth -= 1


# Attributes that the model sets on its layers.


def with_condition(self, x):
    return x + torch.tanh(self.l(self.n(x)) * self.condition)


@suite.model(REFUSED, forward=with_condition, parts=lambda: {"condition": 1.0})
def condition_set_on_the_layers_between_two_forwards(self, x):
    outputs = []
    for scale in (1.0, 3.0):
        for block in self.blocks:
            block.condition = scale
        outputs.append(in_turn(self, x))
    return outputs[0] * 2 - outputs[1]


@suite.model(REFUSED, forward=with_condition, parts=lambda: {"condition": None})
def tensor_set_on_the_layers_between_two_forwards(self, x):
    outputs = []
    for number in (0, 1):
        for block in self.blocks:
            block.condition = x[number]
        outputs.append(in_turn(self, x))
    return outputs[0] * 2 - outputs[1]


@suite(REFUSED)
def attribute_set_between_forward_and_backward(put):
    model = put(stack(with_condition, parts=lambda: {"condition": 1.0}))
    loss = total(model(x()))
    for block in model.blocks:
        block.condition = 3.0
    loss.backward()
    return loss


@suite.model(REFUSED, forward=with_condition, parts=lambda: {"condition": None}, times=2)
def attribute_set_by_the_model_each_forward(self, x):
    for number, block in enumerate(self.blocks):
        block.condition = number + 1.0
        x = block(x)
        block.condition = None
    return x


@suite(AS_TORCH)
def evaluation_between_forward_and_backward(put):
    model = put(stack(lambda self, x: F.dropout(body(self, x), 0.3, training=self.training)))
    return train(model, x(), between=model.eval)


@suite(REFUSED)
def evaluation_between_forward_and_backward_same_shapes(put):
    model = put(stack(lambda self, x: body(self, x) * torch.tensor(2.0 if self.training else 1.0)))
    return train(model, x(), between=model.eval)


@suite(AS_TORCH)
def evaluation_between_forward_and_backward_of_batchnorm(put):
    model = put(stack(parts=lambda: {"n": nn.BatchNorm1d(8)}))
    return train(model, x(), between=model.eval)


@suite(AS_TORCH)
def weights_thaw_between_forward_and_backward(put):
    model, inputs = stack(), x(grad=True)
    model.blocks[0].requires_grad_(False)
    loss = total(put(model)(inputs))
    model.requires_grad_(True)
    loss.backward()
    return loss, inputs.grad


@suite(AS_TORCH)
def weights_freeze_between_forward_and_backward(put):
    model = put(stack())
    return train(model, x(), between=lambda: model.blocks.requires_grad_(False))


def weights_change_between_forward_and_backward(put, value):
    model = put(stack())
    loss = total(model(x()))
    with torch.no_grad():
        for weight in model.parameters():
            value(weight)
    loss.backward()
    return loss


suite.each({"counted": lambda p: p.add_(1)}, AS_TORCH, raises=RuntimeError)(weights_change_between_forward_and_backward)
suite.each({"by data": lambda p: p.data.add_(1)}, AS_TORCH)(weights_change_between_forward_and_backward)


@suite()
def optimizer_in_the_backward(put):
    model = stack()
    for weight in model.parameters():
        step = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p, step=step: [step.step(), step.zero_grad()].clear())
    put(model)
    return [total(model(x())).backward() for _ in range(3)], [weight.detach().clone() for weight in model.parameters()]


@suite(AS_TORCH)
def backward_outside_of_functional_call(put):
    model = put(stack())
    weights = {name: (one.detach() * 1.1).requires_grad_() for name, one in model.named_parameters()}
    (loss := total(functional_call(model, weights, (x(),)))).backward()
    return loss, [one.grad for one in weights.values()]


@suite()
def backward_inside_of_functional_call(put):
    model = put(stack())
    weights = {name: (one.detach() * 1.1).requires_grad_() for name, one in model.named_parameters()}

    def forward(self, x):
        (loss := total(in_turn(self, x))).backward()
        return loss

    holder = stack(through=forward)
    holder.blocks = model.blocks
    return functional_call(holder, weights, (x(),)).detach(), [one.grad for one in weights.values()]


@suite(AS_TORCH)
def step_of_meta_learning(put):
    model = put(stack())
    weights = dict(model.named_parameters())
    grads = torch.autograd.grad(total(model(x())), list(weights.values()), create_graph=True)
    fast = {name: one - 0.1 * grad for (name, one), grad in zip(weights.items(), grads, strict=True)}
    (loss := total(functional_call(model, fast, (x(),)))).backward()
    return loss


# Normalisation that keeps statistics.


class OwnCount(nn.BatchNorm1d):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return super().forward(x) * self.steps


class ConstantMomentum(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps)


class CountsItself(nn.BatchNorm1d):
    def forward(self, x):
        self.num_batches_tracked += 1
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum)


class ByHand(nn.BatchNorm1d):
    def forward(self, x):
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.running_mean)


class Renamed(nn.BatchNorm1d):
    def forward(self, x):
        self.seen = getattr(self, "seen", 0) + 1
        return super().forward(x) * self.seen


def cumulative(size):
    return nn.BatchNorm1d(size, momentum=None)


@suite.each({"plain": nn.BatchNorm1d, "cumulative": cumulative, "renamed": Renamed})
def batchnorm(put, value):
    return train(put(stack(parts=lambda: {"n": value(8)})), x(), times=2)


@suite.each({kind.__name__: kind for kind in (OwnCount, ConstantMomentum, CountsItself, ByHand)}, REFUSED)
def subclass_of_batchnorm(put, value):
    return train(put(stack(parts=lambda: {"n": value(8)})), x(), times=2)


@suite(REFUSED)
def instance_norm_that_tracks(put):
    parts = lambda: {"n": nn.InstanceNorm1d(8, affine=True, track_running_stats=True), "l": nn.Conv1d(8, 8, 1)}  # noqa: E731
    return train(put(stack(parts=parts)), x(2, 8, 5), times=2)


@suite.layer(REFUSED, parts=lambda: {"m": torch.zeros(8), "v": torch.ones(8)}, times=2)
def functional_batchnorm_on_buffers(self, x):
    return body(self, F.batch_norm(x, self.m, self.v, training=True))


@suite()
def two_forwards_of_batchnorm_and_one_backward(put):
    model = put(stack(parts=lambda: {"n": nn.BatchNorm1d(8)}))
    (loss := total([model(x()), model(x().flip(1))])).backward()
    return loss


# Gradients inside, losses beside the output, a layer that is called again.


def local_loss(self, x):
    (self.l(x.detach()).square().mean()).backward()
    return body(self, x)


def local_gradient_by_hand(self, x):
    grad = x.detach().mean(0)
    self.l.bias.grad = grad if self.l.bias.grad is None else self.l.bias.grad + grad
    return body(self, x)


@suite.each({one.__name__: one for one in (local_loss, local_gradient_by_hand)}, REFUSED)
def gradients_inside_a_layer(put, value):
    return train(put(stack(value)), x(), times=2)


@suite(AS_TORCH)
def gradients_inside_a_layer_late(put):
    def forward(self, x, late):
        return local_loss(self, x) if late else body(self, x)

    return [train(model, x(), late=step >= 40) for model in [put(stack(forward))] for step in range(43)]


@suite.each({"list": [], "attribute": None})
def auxiliary_loss_on_the_layer(put, value):
    def forward(self, x):
        loss = self.l(x).square().mean()
        if isinstance(self.losses, list):
            self.losses.append(loss)
        else:
            self.losses = loss
        return body(self, x)

    def through(self, x):
        for block in self.blocks:
            block.losses = [] if value == [] else None
        x = in_turn(self, x)
        return x, [block.losses for block in self.blocks]

    return train(put(stack(forward, through, parts=lambda: {"losses": None})), x(), times=2)


LOSSES = []


@suite()
def auxiliary_loss_in_a_global_list(put):
    def forward(self, x):
        LOSSES.append(self.l(x).square().mean())
        return body(self, x)

    def through(self, x):
        LOSSES.clear()
        return in_turn(self, x), list(LOSSES)

    return train(put(stack(forward, through)), x()), len(LOSSES)


def fails_once(at):
    def through(self, x):
        for number, block in enumerate(self.blocks):
            if number == at:
                with contextlib.suppress(ValueError):
                    block(x, fails=True)
            x = block(x)
        return x

    return through


@suite.each({"first": 0, "second": 1, "third": 2, "last": 3}, REFUSED)
def layer_called_again_after_an_error(put, value):
    def forward(self, x, fails=False):
        y = body(self, x)
        if fails:
            raise ValueError("not this time")
        return y

    return train(put(stack(forward, fails_once(value))), x())


@suite(AS_TORCH)
def something_printed_inside(put):
    SEEN.clear()

    def forward(self, x):
        SEEN.append("ran")
        return body(self, x)

    return train(put(stack(forward)), x()), len(SEEN)


FAST = [name for name in suite.cases if not name.startswith("begins_")]
BEGIN = ["begins_after_many_equal_runs[queue]", "begins_late_in_what_is_given[dict]"]


@pytest.mark.parametrize("name", sample([*FAST, *BEGIN], suite.cases))
def test_case(name, judge):
    judge(suite.cases[name])
