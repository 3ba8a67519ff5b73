"""Kinds of layers and of models: torch's own, TorchScript, lazy, 8 bits; RReLU and its kin; configs."""

import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kornia.augmentation import RandomHorizontalFlip
from peer_suites.adapter import PLAIN, REFUSED, TORCH, Suite, body, in_turn, stack, train, x
from torch import nn

import memsave_recipes as memsave

suite = Suite()
residual = lambda self, x: x + self.part(body(self, x))  # noqa: E731

ACTIVATIONS = {
    "RReLU": nn.RReLU,
    "RReLU in place": partial(nn.RReLU, inplace=True),
    "GELU": nn.GELU,
    "Dropout": partial(nn.Dropout, 0.3),
    "AlphaDropout": partial(nn.AlphaDropout, 0.3),
    "FeatureAlphaDropout": partial(nn.FeatureAlphaDropout, 0.3),
    "Hardswish": nn.Hardswish,
    "PReLU": nn.PReLU,
    "GLU": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU()),
    "max pooling": lambda: nn.AdaptiveMaxPool1d(8),
    "fractional pooling": lambda: Wide(nn.FractionalMaxPool2d(1, output_size=(2, 4))),
}


class Wide(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x.repeat(1, 4).view(-1, 1, 4, 8)).view(-1, 8)


@suite.each(ACTIVATIONS, REFUSED)
def activation_at_the_end(put, value):
    return train(put(stack(lambda self, x: self.part(self.l(x)), parts=lambda: {"part": value()})), x(), times=2)


@suite.each(ACTIVATIONS, REFUSED)
def activation_at_the_start(put, value):
    return train(put(stack(lambda self, x: self.l(self.part(x * 1)), parts=lambda: {"part": value()})), x(), times=2)


@suite.each({"function": F.rrelu, "operator": lambda y, training: torch.ops.aten.rrelu(y, training=training)}, REFUSED)
def rrelu_as_a_function(put, value):
    return train(put(stack(lambda self, x: value(self.l(x), training=True))), x())


PARTS = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": lambda: Attention(),
    "bilinear": lambda: Twice(nn.Bilinear(8, 8, 8)),
    "embedding bag": lambda: Bag(),
    "sparse embedding": lambda: Embedded(),
    "local response": lambda: Wide(nn.Sequential(nn.LocalResponseNorm(2), nn.AdaptiveAvgPool2d((1, 8)))),
}


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.part = kind(8, 8, batch_first=True, dropout=0.1, num_layers=2)

    def forward(self, x):
        return self.part(x[None])[0][0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x):
        return self.part(x, x, x)[0]


class Twice(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x, x)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Embedding(4, 8, sparse=True)

    def forward(self, x):
        return x + self.part(torch.tensor([0, 1, 1, 3]))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.EmbeddingBag(4, 8)

    def forward(self, x):
        return x + self.part(torch.tensor([[0, 1], [1, 1], [2, 3], [3, 0]]))


@suite.each(PARTS)
def layer_of_torch(put, value):
    model = put(stack(residual, parts=lambda: {"part": value()}))
    losses = train(model, x(), times=2)
    for weight in model.parameters():  # a sparse gradient in a form that can be compared
        weight.grad = weight.grad.to_dense()
    return losses


@suite.each({"encoder": True, "decoder": False}, strategies=("full", "selective"))  # a list: each layer by itself
def transformer_of_torch(put, value):
    kind = nn.TransformerEncoderLayer if value else nn.TransformerDecoderLayer
    layer = kind(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True)
    whole = nn.TransformerEncoder(layer, 4) if value else nn.TransformerDecoder(layer, 4)
    inputs = (x(2, 3, 8),) if value else (x(2, 3, 8), x(2, 5, 8))
    return train(put(whole.train(), found=True), *inputs, times=2)


# TorchScript, lazy layers, buffers without a shape.


@suite.each({"linear": lambda: nn.Linear(8, 8), "sequence": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())}, REFUSED)
def scripted_part(put, value):
    part = torch.jit.script(value())
    return train(put(stack(residual, parts=lambda: {"part": part})), x())


@suite(REFUSED)
def scripted_part_beside_the_layers(put):
    head = torch.jit.script(nn.Linear(8, 8))
    return train(put(stack(through=lambda self, x: self.head(in_turn(self, x)), head=head)), x())


@suite(REFUSED)
def traced_part(put):
    part = torch.jit.trace(nn.Linear(8, 8), x())
    return train(put(stack(residual, parts=lambda: {"part": part})), x())


def lazy_linear():
    return nn.LazyLinear(8)


LAZY = {"linear": lazy_linear, "batchnorm": nn.LazyBatchNorm1d, "both": lambda: nn.Sequential(lazy_linear(), nn.Tanh())}


@suite.each(LAZY, REFUSED)
def lazy_part(put, value):
    return train(put(stack(residual, parts=lambda: {"part": value()})), x(), times=2)


@suite.each(LAZY, REFUSED)
def lazy_part_planned_with_a_batch(put, value):
    """A model that ``make_plan`` runs once has the weights of its own first forward."""
    model = stack(residual, parts=lambda: {"part": value()})
    if put.way not in (PLAIN, TORCH):
        put.plan(model, x())
    losses = train(put(model), x())
    torch.manual_seed(1)  # whenever the weights were drawn
    return losses


@suite()
def augmentation_of_kornia(put):
    part = RandomHorizontalFlip(p=0.5)
    forward = lambda self, image: torch.tanh(self.l(part(image)))  # noqa: E731
    return train(put(stack(forward, parts=lambda: {"l": nn.Conv2d(3, 3, 1)})), x(2, 3, 4, 4), times=2)


@suite.layer(REFUSED, parts=lambda: {"seen": torch.zeros((), dtype=torch.long)}, times=2)
def metric_that_counts_inside(self, x):
    self.seen.add_(len(x))
    return body(self, x)


# What models keep as their settings.


class Frozen(OrderedDict):
    """Refuses to change, as the settings of published models do."""

    def __init__(self, *given, **entries):
        super().__init__(*given, **entries)
        self.is_frozen = True

    def update(self, *args, **kwargs):
        raise TypeError("frozen")

    def __setitem__(self, name, value):
        if hasattr(self, "is_frozen"):
            raise TypeError("frozen")
        super().__setitem__(name, value)


class Slots:
    __slots__ = ("width",)


Settings = namedtuple("Settings", "width")


@dataclasses.dataclass(frozen=True)
class Data:
    width: int = 8


CONFIGS = {
    "dict": {"width": 8},
    "frozen dict": Frozen(width=8),
    "proxy": MappingProxyType({"width": 8}),
    "None": None,
    "namedtuple": Settings(8),
    "slots": Slots(),
    "words": "base",
    "dataclass": Data(),
    "namespace": SimpleNamespace(width=8),
}


@suite.each(CONFIGS)
def config_of_the_model(put, value):
    """Planned with a batch, which runs the model."""
    model = stack(config=value)
    if put.way not in (PLAIN, TORCH):
        memsave.make_plan(model, x(), strategy="budget:bitwise", budget_gib=1, blocks=put.plan(model, x()).blocks)
    return train(put(model), x(), times=2), model.config is value


@suite.each(CONFIGS)
def config_of_the_layers(put, value):
    return train(put(stack(parts=lambda: {"config": value})), x(), times=2)


@suite.each(CONFIGS)
def config_as_an_argument(put, value):
    return train(put(stack(lambda self, x, config: body(self, x))), x(), value)


# 8 and 4 bits.


class Adapted(nn.Module):
    """A frozen layer of bitsandbytes beside an adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def in_bits(bits, **how):
    bnb = pytest.importorskip("bitsandbytes")
    kind = partial(bnb.nn.Linear8bitLt, has_fp16_weights=False) if bits == 8 else bnb.nn.Linear4bit
    return kind(64, 64, **how)


BITS = {"8": partial(in_bits, 8), "8 with outliers": partial(in_bits, 8, threshold=6.0), "4": partial(in_bits, 4)}


@suite.each(BITS)
def frozen_layer_in_bits(put, value):
    parts = lambda: {"n": nn.Identity(), "l": Adapted(value())}  # noqa: E731
    model = stack(lambda self, x: x + body(self, x), parts=parts).to("cpu")
    return train(put(model), x(4, 64), times=2)


@suite.each(BITS)
def frozen_layer_in_bits_after_a_forward(put, value):
    parts = lambda: {"n": nn.Identity(), "l": Adapted(value())}  # noqa: E731
    model = stack(lambda self, x: x + body(self, x), parts=parts).to("cpu")
    model(x(4, 64))
    return train(put(model), x(4, 64), times=2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", suite.cases)
def test_case(name, judge):
    judge(suite.cases[name])
