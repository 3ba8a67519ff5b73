"""What is around a layer, and what it does besides computing: precision, modes, hooks, errors, threads."""

import contextlib
import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peer_suites.adapter import (
    AS_TORCH,
    REFUSED,
    ROUNDED,
    SAME,
    Suite,
    body,
    in_turn,
    make,
    norm_and_linear,
    stack,
    total,
    train,
    x,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

suite = Suite()
half = partial(torch.autocast, "cpu", torch.bfloat16)


@suite.each({"bfloat16": torch.bfloat16, "float16": torch.float16})
def autocast_of_the_forward(put, value):
    return train(put(stack()), x(), within=lambda: torch.autocast("cpu", value))


@suite()
def autocast_of_the_backward_too(put):
    model = put(stack())
    with half():
        return train(model, x(), times=2)


@suite()
def autocast_without_its_cache(put):
    return train(put(stack()), x(), within=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))


@suite()
def autocast_off_inside_a_layer(put):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.n(x.float())) + self.l(x)

    model = put(stack(forward))
    with half():
        return train(model, x())


def residual(self, x):
    return x + body(self, x)


def differs_by_layer(enabled):
    def through(self, x):
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled(number)):
                x = block(x)
        return x

    return through


BY_LAYER = {"every other": lambda number: number % 2 == 0, "the last": lambda n: n == 3, "the first": lambda n: n == 0}


@suite.each(BY_LAYER, REFUSED, full=SAME, selective=SAME)
def autocast_differs_between_layers(put, value):
    return train(put(stack(residual, differs_by_layer(value))), x())


@suite.each({"bfloat16": torch.bfloat16, "float16": torch.float16}, REFUSED, full=SAME, selective=SAME)
def dtype_of_autocast_differs_between_layers(put, value):
    def through(self, x):
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16 if number % 2 else value):
                x = block(x)
        return x

    return train(put(stack(residual, through)), x())


def shared(order):
    def through(self, x):
        for number in order:
            x = self.blocks[number](x)
        return x

    return stack(residual, through)


@suite.each({"0101": (0, 1, 0, 1), "0123021": (0, 1, 2, 3, 0, 2, 1), "0012": (0, 0, 1, 2)}, ROUNDED)
def layer_used_twice_under_autocast(put, value):
    return train(put(shared(value)), x(), within=half)


@suite(REFUSED)
def weights_shared_between_layers_under_autocast(put):
    model = stack()
    for block in model.blocks[1:]:
        block.l = model.blocks[0].l
    return train(put(model), x(), within=half)


@suite(ROUNDED)
def autocast_around_two_forwards(put):
    model = put(stack())
    with half():
        loss = total([model(x()), model(x().flip(1))])
    loss.backward()
    return loss


@suite.each({"math": torch.nn.attention.SDPBackend.MATH}, AS_TORCH)
def attention_kernel_of_the_forward(put, value):
    def forward(self, x):
        q = self.l(self.n(x)).view(1, 2, 4, 4)
        return x + F.scaled_dot_product_attention(q, q, q).reshape(4, 8)

    return train(put(stack(forward)), x(), within=lambda: torch.nn.attention.sdpa_kernel(value))


@suite(AS_TORCH)
def default_dtype_of_the_forward(put):
    model = put(stack(lambda self, x: body(self, x) * torch.tensor(0.1)))
    torch.set_default_dtype(torch.float64)
    try:
        loss = total(model(x().float()))
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return loss


@suite()
def default_device_of_the_forward(put):
    return train(put(stack(lambda self, x: body(self, x) + torch.zeros(8))), x(), within=lambda: torch.device("cpu"))


@suite(AS_TORCH)
def input_of_inference_mode(put):
    with torch.inference_mode():
        inputs = x()
    return train(put(stack(lambda self, x: self.l(torch.tanh(x.clone()) * 2))), inputs)


@suite.each({"no_grad": torch.no_grad, "inference_mode": torch.inference_mode})
def evaluation_between_steps(put, value):
    model = put(stack(lambda self, x: F.dropout(body(self, x), 0.3, self.training)))
    losses = train(model, x())
    model.eval()
    with value():
        outputs = model(x())
    return losses, outputs.clone(), train(model.train(), x())


# nn.Sequential, and what Accelerate or anybody else puts in place of a forward.


def sequential():
    layer = type("Layer", (nn.Module,), {"forward": body})
    return nn.Sequential(*(make(layer, norm_and_linear()) for _ in range(4))).train()


def accelerated(put, first):
    """The dtypes of outputs under Accelerate's mixed precision: planned, and after the plan is removed."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of another test
    accelerator, model = Accelerator(mixed_precision="bf16", cpu=True), sequential()
    names, seen = [str(number) for number in range(4)], []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.append(str(output.dtype)))
    if first == "plan":
        model = accelerator.prepare_model(put(model, found=True))
    else:
        put(accelerator.prepare_model(model), found=True)
    losses = train(model, x())
    planned = seen[:4]
    put.remove()
    seen.clear()
    losses += train(model, x())
    assert len(names) == 4
    return losses, planned, seen


@suite.each({"plan first": "plan", "Accelerate first": "accelerate"})
def mixed_precision_of_accelerate(put, value):
    return accelerated(put, value)


@suite.each({"before the plan": True, "under the plan": False}, REFUSED)
def forward_of_a_sequential_replaced(put, value):
    model = sequential()

    def replace():
        own = model.forward
        model.forward = lambda x: own(x * 2) * 3

    if value:
        replace()
    put(model, found=True)
    if not value:
        replace()
    losses = train(model, x())
    put.remove()
    return losses, train(model, x())


@suite.each({"before the plan": True, "under the plan": False}, REFUSED)
def forward_of_a_layer_replaced(put, value):
    model = stack()

    def replace():
        own = model.blocks[1].forward
        model.blocks[1].forward = lambda x: own(x * 2) * 3

    if value:
        replace()
    put(model)
    if not value:
        replace()
    losses = train(model, x())
    put.remove()
    return losses, train(model, x())


@suite()
def sequential_that_is_indexed_and_sliced(put):
    return train(put(stack(through=lambda self, x: self.blocks[1:](self.blocks[0](x)) + self.blocks[-1](x))), x())


class DenseBlock(nn.Module):
    """Dense, norm and ReLU, by the name of another one."""

    def __init__(self):
        super().__init__()
        self.fc, self.n = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return torch.relu(self.n(self.fc(x)))


class _DenseBlock(DenseBlock):
    pass


@suite.each({"DenseBlock": DenseBlock, "_DenseBlock": _DenseBlock})
def class_by_the_name_of_another_one(put, value):
    return train(put(nn.Sequential(*(value() for _ in range(4))), found=True), x())


# Errors.


class Sudden(BaseException):
    pass


@suite.each({"error": ValueError, "interrupt": KeyboardInterrupt, "own": Sudden})
def error_in_the_second_run(put, value):
    runs = []

    def forward(self, x, strike):
        runs.append(1)
        y = body(self, x)
        if strike and len(runs) > 4:
            raise value
        return torch.tanh(y)

    model = put(stack(forward, parts=lambda: {"n": nn.BatchNorm1d(8)}))
    with contextlib.suppress(value):
        train(model, x(), strike=True)
    model.zero_grad()
    runs.clear()
    return train(model, x() * 2, strike=False)[:0], [model.blocks[0].l.weight.grad]


@suite()
def error_in_the_forward_and_the_next_step(put):
    def forward(self, x, fails):
        y = body(self, x)
        if fails:
            raise ValueError
        return y

    model = put(stack(forward, parts=lambda: {"n": nn.BatchNorm1d(8)}))
    with contextlib.suppress(ValueError):
        train(model, x(), fails=True)
    return train(model, x(), fails=False)


def falls_back(self, x):
    try:
        return torch.tanh(self.l(self.n(x)))
    except Exception:
        return torch.sin(self.l(x))


def falls_back_quietly(self, x):
    try:
        return torch.tanh(self.l(self.n(x)))
    except Exception:
        return x


def falls_back_and_goes_on(self, x):
    try:
        y = torch.tanh(self.l(self.n(x)))
    except Exception:
        y = x
    return y * torch.sigmoid(self.l(y))


def swallows(self, x):
    with contextlib.suppress(Exception):
        return torch.tanh(self.l(self.n(x)))
    return x


def swallows_everything(self, x):
    try:
        return torch.tanh(self.l(self.n(x)))
    except BaseException:
        return x


EXCEPTS = (falls_back, falls_back_quietly, falls_back_and_goes_on, swallows, swallows_everything)


@suite.each({one.__name__: one for one in EXCEPTS}, REFUSED)
def broad_except_in_a_layer(put, value):
    return train(put(stack(value)), x(), times=2)


@suite()
def try_and_finally_in_a_layer(put):
    def forward(self, x):
        try:
            return body(self, x)
        finally:
            self.calls = getattr(self, "calls", 0) + 1

    model = put(stack(forward))
    return train(model, x(), times=2), [block.calls for block in model.blocks]


SETTING = {"level": 0}


@suite(AS_TORCH)
def global_set_back_without_finally(put):
    def forward(self, x):
        SETTING["level"] += 1
        y = body(self, x)
        SETTING["level"] -= 1
        return y

    SETTING["level"] = 0
    return train(put(stack(forward)), x()), SETTING["level"]


# Threads and lives of graphs.


def in_threads(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
    return [future.result() for future in futures]


@suite()
def two_models_in_two_threads(put):
    models = [put(stack(parts=lambda: {"n": nn.BatchNorm1d(8)})) for _ in range(2)]
    return in_threads(*(lambda model=model: train(model, x(), times=10) for model in models))


@suite(REFUSED)
def one_model_in_two_threads(put):
    model = put(stack())
    return in_threads(*[lambda: train(model, x(), times=10)] * 2)


@suite(REFUSED)
def backwards_of_one_batchnorm_in_two_threads(put):
    """The counters and momenta; statistics depend on which thread is first."""
    model = put(stack(parts=lambda: {"n": nn.BatchNorm1d(8)}))
    for _ in range(20):
        losses = [total(model(x())) for _ in range(2)]
        in_threads(*(loss.backward for loss in losses))
    layers = [block.n for block in model.blocks]
    return [(layer.momentum, layer.num_batches_tracked) for layer in layers], list(model.state_dict())


@suite(REFUSED)
def backwards_of_one_graph_in_two_threads(put):
    outputs = put(stack())(x())
    return in_threads(*(lambda row=row: outputs[row].sum().backward(retain_graph=True) for row in (0, 1)))


@suite()
def memory_is_freed(put):
    """After the backward, and of a graph that is dropped, nothing lives but weights and gradients."""
    model, alive = put(stack()), []
    for backward in (True, False):
        inputs = x(grad=True) + 0
        alive.append(weakref.ref(inputs))
        loss = total(model(inputs))
        if backward:
            loss.backward()
        del inputs, loss
    gc.collect()
    return [one() is None for one in alive]


@suite()
def plan_removed_between_forward_and_backward(put):
    model = put(stack())
    loss = total(model(x()))
    put.remove()
    loss.backward()
    return loss, train(model, x())


@suite()
def copied_while_planned(put):
    model = put(stack())
    other = copy.deepcopy(model)
    return train(model, x()), train(other, x()), [one.grad for one in other.parameters()]


@suite()
def copied_between_forward_and_backward(put):
    model = put(stack())
    loss = total(model(x()))
    other = copy.deepcopy(model)
    loss.backward()
    return loss, train(other, x())


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(DenseBlock() for _ in range(4)))

    def forward(self, x):
        return in_turn(self, x)


@suite()
def pickled_while_planned(put):
    model = put(Pickled())
    torch.save(model, buffer := io.BytesIO())
    return train(pickle.loads(pickle.dumps(model)), x()), train(model, x()), buffer.tell() > 0


@suite()
def state_dict_there_and_back(put):
    model = put(stack())
    names = list(model.state_dict())
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
    return train(model, x()), names


@suite(REFUSED)
def planned_twice(put):
    return train(put(put(stack())), x())


# Hooks and modes.


@suite.each({"before": True, "after": False})
def hooks_on_the_layers(put, value):
    model, calls = stack(), []
    model = model if value else put(model)
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: calls.append(1))
        block.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model = put(model) if value else model
    return train(model, x(), times=2), len(calls)


@suite.each({"before": True, "after": False}, AS_TORCH)
def counting_hooks_inside(put, value):
    model, calls = stack(), []
    model = model if value else put(model)
    for block in model.blocks:
        block.n.register_forward_hook(lambda module, inputs, output: calls.append(1))
    return train(model if not value else put(model), x()), len(calls)


@suite()
def hooks_that_keep_features(put):
    model, kept = put(stack()), {}
    model.blocks[1].n.register_forward_hook(lambda module, inputs, output: kept.update(x=output) and None)
    model.blocks[1].register_forward_hook(lambda module, inputs, output: kept.update(y=output) and None)
    return train(model, x()), kept["x"], kept["y"]


@suite()
def hooks_that_replace_outputs_inside(put):
    model = put(stack())
    for block in model.blocks:
        block.n.register_forward_hook(lambda module, inputs, output: output * 2)
    return train(model, x())


@suite()
def pair_of_hooks_around_the_last_child(put):
    model = put(stack())
    model.level = 0

    def down(module, inputs, output):
        model.level -= 1

    def up(module, inputs):
        model.level += 1

    for block in model.blocks:
        block.l.register_forward_pre_hook(up)
        block.l.register_forward_hook(down)
    return train(model, x()), model.level


@suite()
def backward_hooks(put):
    model, seen = put(stack()), []
    model.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].sum()))
    model.blocks[1].l.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].sum()))
    return train(model, x()), seen


@suite()
def hooks_on_weights(put):
    model, seen = put(stack()), []
    for weight in model.parameters():
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.sum()))
    return train(model, x()), seen


@suite()
def hooks_on_all_modules(put):
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: calls.append(1) if i else None)
    try:
        return train(put(stack()), x()), len(calls) > 0
    finally:
        handle.remove()


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.tanh else output


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@suite(AS_TORCH)
def function_mode_of_the_forward(put):
    return train(put(stack(lambda self, x: self.l(torch.tanh(self.n(x))))), x(), within=Doubles)


@suite.each({"own": Watches, "flops": lambda: FlopCounterMode(display=False)})
def dispatch_mode_of_the_forward(put, value):
    return train(put(stack()), x(), within=value)


@suite()
def profiler_around_a_step(put):
    with torch.profiler.profile():
        return train(put(stack()), x())


# Reparametrised weights.

CHANGES = {
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "old weight norm": nn.utils.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@suite.each(CHANGES)
def weights_computed_from_others(put, value):
    model = stack()
    for block in model.blocks:
        value(block.l)
    return train(put(model), x(), times=2)


@suite.each({"new": parametrizations.spectral_norm, "old": nn.utils.spectral_norm}, REFUSED)
def spectral_norm(put, value):
    model = stack()
    for block in model.blocks:
        value(block.l)
    return train(put(model), x(), times=2)


@suite()
def parametrizations_cached_in_the_forward(put):
    model = stack()
    for block in model.blocks:
        parametrizations.weight_norm(block.l)
    return train(put(model), x(), within=parametrize.cached)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", suite.cases)
def test_case(name, judge):
    judge(suite.cases[name])
