"""What layers are given and return: the first run gets exactly that, and the second one finds it as it was."""

from types import SimpleNamespace

import pytest
import torch
from peer_suites.adapter import AS_TORCH, REFUSED, SAME, Suite, body, in_turn, stack, total, train, x
from torch import nn

suite = Suite()


def scaled(self, x, t):
    return x + torch.tanh(self.l(self.n(x)) + torch.sin(t * torch.arange(1.0, 9.0)))


@suite()
def keywords_that_need_gradients(put):
    model, scale = put(stack(lambda self, x, scale: body(self, x) * scale)), x(8, grad=True)
    return train(model, x(), scale=scale), scale.grad


@suite.model(forward=lambda self, hidden: body(self, hidden))
def state_as_a_keyword(self, x):
    for block in self.blocks:
        x = block(hidden=x)
    return x


@suite()
def outputs_that_are_no_tensors(put):
    def through(self, x):
        names = []
        for block in self.blocks:
            x, name, none = block(x)
            names.append((name, none))
        self.names = names
        return x

    model = put(stack(lambda self, x: (body(self, x), "layer", None), through))
    return train(model, x()), model.names


@suite.each({"dict": dict, "namespace": SimpleNamespace})
def containers_as_state(put, value):
    def forward(self, state):
        h = state["h"] if isinstance(state, dict) else state.h
        return value(h=body(self, h))

    def through(self, x):
        state = value(h=x)
        for block in self.blocks:
            state = block(state)
        return state["h"] if isinstance(state, dict) else state.h

    return train(put(stack(forward, through)), x())


@suite()
def tuple_as_state(put):
    return train(put(stack(lambda self, pair: (body(self, pair[0]), pair[1] + pair[0]))), (x(), x()))


def appends(self, features):
    features.append(body(self, features[-1]))
    return features[-1]


def dense(self, x):
    features = [x]
    for block in self.blocks:
        block(features)
    return torch.cat(features, 1)


@suite(REFUSED)
def list_as_first_argument_grows(put):
    return train(put(stack(appends, dense)), x())


@suite.model(REFUSED, forward=appends)
def list_as_first_keyword_grows(self, x):
    features = [x]
    for block in self.blocks:
        block(features=features)
    return torch.cat(features, 1)


@suite.model(REFUSED, forward=lambda self, waiting: body(self, waiting.pop()))
def list_as_first_argument_is_popped(self, x):
    waiting = [x * number for number in range(1, 5)]
    out = 0
    for block in self.blocks:
        out = out + block(waiting)
    return out, len(waiting)


@suite()
def list_as_first_argument_is_read(put):
    return train(put(stack(lambda self, pair: [body(self, pair[0]), pair[1] * 2])), [x(), x(grad=True)])


@suite()
def list_as_later_argument_grows(put):
    def forward(self, x, seen):
        seen.append(x.detach().mean())
        return body(self, x)

    return train(put(stack(forward)), x(), seen := []), seen


def then(write):
    """A model that changes what its layers were given beside the state."""

    def through(self, x):
        t = torch.zeros(())
        for block in self.blocks:
            x = block(x, t)
            write(t)
        return x

    return through


@suite.each({"add": lambda t: t.add_(0.25), "fill": lambda t: t.fill_(0.5)}, AS_TORCH)
def second_argument_written_on_later(put, value):
    return train(put(stack(scaled, then(value))), x())


@suite(AS_TORCH)
def second_argument_written_on_by_data(put):
    return train(put(stack(scaled, then(lambda t: t.data.add_(0.25)))), x())


@suite.each(
    {"keyword": lambda t: {"t": t}, "in a tuple": lambda t: {"pair": (t,)}, "in a dict": lambda t: {"d": {"t": t}}},
    AS_TORCH,
)
def tensor_written_on_later(put, value):
    def forward(self, x, t=None, pair=(), d=None):
        return scaled(self, x, pair[0] if pair else d["t"] if d else t)

    def through(self, x):
        t = torch.zeros(())
        for block in self.blocks:
            x = block(x, **value(t))
            t += 0.25
        return x

    return train(put(stack(forward, through)), x())


@suite.model(AS_TORCH, forward=lambda self, x, mask: body(self, torch.where(mask > 0, x, 0.1)))
def mask_written_on_later(self, x):
    mask = torch.ones(8)
    for number, block in enumerate(self.blocks):
        x = block(x, mask=mask)
        mask[number] = 0
    return x


@suite.model(AS_TORCH, forward=lambda self, x, residual: body(self, x + residual))
def residual_written_on_later(self, x):
    residual = torch.zeros_like(x)
    for block in self.blocks:
        h = block(x, residual)
        residual += h.detach()
        x = h
    return x


@suite.each({"number": lambda s: s.update(t=s["t"] + 0.25), "another tensor": lambda s: s.update(t=torch.ones(()))})
def dict_changed_later(put, value):
    def through(self, x):
        settings = {"t": torch.zeros(())}
        for block in self.blocks:
            x = block(x, settings)
            value(settings)
        return x

    return train(put(stack(lambda self, x, settings: scaled(self, x, settings["t"]), through)), x())


@suite.model(AS_TORCH, forward=lambda self, x, settings: scaled(self, x, settings.t))
def object_changed_later(self, x):
    settings = SimpleNamespace(t=0.0)
    for block in self.blocks:
        x = block(x, settings)
        settings.t += 0.25
    return x


@suite(AS_TORCH)
def shared_buffer_changed_later(put):
    def through(self, x):
        for block in self.blocks:
            x = block(x)
            self.t += 0.25
        return x

    shared = torch.zeros(())
    return train(
        put(stack(lambda self, x: scaled(self, x, self.t), through, parts=lambda: {"t": shared}, t=shared)), x()
    )


@suite.model(forward=lambda self, x: self.l(torch.tanh(self.n(x))))
def outputs_written_on(self, x):
    for block in self.blocks:
        x = block(x).add_(1)
    return x


@suite.model(AS_TORCH, raises=RuntimeError)
def saved_outputs_written_on(self, x):
    for block in self.blocks:
        x = block(x).mul_(2)
    return x


@suite.model(forward=lambda self, x: (body(self, x), x[:2]))
def a_view_of_the_input_is_written_on(self, x):
    for block in self.blocks:
        x, view = block(x)
        view.detach().clone().mul_(2)
    return x


@suite.model(AS_TORCH, forward=lambda self, x: self.l(self.n(torch.tanh(x))))
def inputs_written_on_after_the_layer(self, x):
    for block in self.blocks:
        start = x * 1
        x = block(start)
        start.add_(1)
    return x


@suite.layer(AS_TORCH, raises=RuntimeError)
def relu_in_place_of_a_saved_tensor(self, x):
    return torch.relu_(torch.sigmoid(self.l(self.n(x))))


@suite.layer(AS_TORCH, raises=RuntimeError)
def a_layer_saves_then_writes(self, x):
    y = self.l(self.n(x)).tanh()
    y.mul_(2)
    return y


@suite(AS_TORCH, selective=REFUSED)
def a_layer_writes_on_its_input(put):
    return train(put(stack(lambda self, x: self.l(self.n(x.mul_(2))))), x(grad=True) + 0)


@suite.each({"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr})
def sparse_argument(put, value):
    forward = lambda self, x, adjacency: torch.relu(self.n(torch.sparse.mm(adjacency, self.l(x))))  # noqa: E731
    return train(put(stack(forward)), x(), value(torch.eye(4) * 2))


@suite(REFUSED)
def sparse_argument_that_trains(put):
    weights = torch.eye(4).to_sparse().requires_grad_()
    model = put(stack(lambda self, x, adjacency: body(self, torch.sparse.mm(adjacency, x))))
    return train(model, x(), weights), weights.grad.to_dense()


@suite.each(
    {name: name for name in ("cache", "past_key_values", "layer_past", "past_key_value", "memory", "use_cache")}
)
def a_tensor_by_the_name_of_a_cache(put, value):
    namespace = {"body": body}
    exec(f"def forward(self, x, {value}=None): return body(self, x) + (0 if {value} is None else {value})", namespace)
    memory = x(4, 8, grad=True)
    model = put(stack(namespace["forward"]))
    return train(model, x(), memory), train(model, x(), **{value: memory}), memory.grad


@suite.each({"object": SimpleNamespace, "dict": dict})
def an_object_by_the_name_of_a_cache(put, value):
    read = lambda cache: cache["scale"] if isinstance(cache, dict) else cache.scale  # noqa: E731
    return train(put(stack(lambda self, x, cache=None: body(self, x) * read(cache))), x(), cache=value(scale=3.0))


@suite()
def use_cache_returns_a_pair(put):
    def through(self, x):
        for block in self.blocks:
            x, keys = block(x, use_cache=True)
            x = x + keys
        return x

    forward = lambda self, x, use_cache=False: (body(self, x), self.n(x)) if use_cache else body(self, x)  # noqa: E731
    return train(put(stack(forward, through)), x())


@suite(REFUSED)
def a_list_of_pairs_by_the_name_of_a_cache(put):
    def forward(self, x, past_key_values=None):
        past_key_values.append(x.mean(0))
        return body(self, x) + sum(past_key_values)

    model = put(stack(forward))
    return train(model, x(), past_key_values=(seen := [])), seen


@suite.model(forward=lambda self, x: (body(self, x), self.l(x).exp()))
def some_outputs_unused(self, x):
    for block in self.blocks:
        x, _ = block(x)
    return x


@suite()
def input_without_gradient(put):
    return train(put(stack()), x())


@suite()
def input_with_gradient(put):
    inputs = x(grad=True)
    return train(put(stack()), inputs), inputs.grad


@suite()
def inputs_of_integers_and_none(put):
    def forward(self, x, index, scale, none):
        return body(self, x)[index] * scale if none is None else x

    return train(put(stack(forward)), x(), torch.tensor([3, 1, 0, 2]), 2, None)


@suite()
def first_layers_frozen(put):
    model = stack()
    model.blocks[:2].requires_grad_(False)
    return train(put(model), x())


@suite()
def empty_batch(put):
    return train(put(stack()), x(0, 8))


@suite()
def channels_last(put):
    parts = lambda: {"l": nn.Conv2d(8, 8, 3, padding=1), "n": nn.Identity()}  # noqa: E731
    image = x(2, 8, 6, 6).to(memory_format=torch.channels_last)
    model = put(stack(parts=parts))
    return train(model, image), model(image).is_contiguous(memory_format=torch.channels_last)


@suite()
def complex_numbers(put):
    def forward(self, z):
        return torch.complex(body(self, z.real), body(self, z.imag)).conj()

    def loss(self, z):
        return torch.view_as_real(in_turn(self, z).resolve_conj())

    return train(put(stack(forward, loss)), torch.complex(x(), x() * 2))


def jagged(rows):
    return torch.nested.nested_tensor([x(n, 8) for n in rows], layout=torch.jagged)


@suite()
def nested_tensor_jagged(put):
    out = put(stack(lambda self, x: x + torch.tanh(self.l(x))))(jagged((2, 3, 4)))
    (loss := total(out.values())).backward()
    return loss


@suite(SAME, selective=REFUSED)
def written_in_a_copy(put):
    return train(put(stack(lambda self, x: self.l(self.n(x.clone().mul_(2).add_(1))))), x(grad=True))


@suite.layer()
def outputs_that_are_views(self, x):
    return body(self, x).view(2, 2, 8).transpose(0, 1).reshape(4, 8)[:]


@pytest.mark.parametrize("name", suite.cases)
def test_case(name, judge):
    judge(suite.cases[name])
