"""Models of which a part only looks like what is known: other classes' names, TorchScript, lazy modules, settings."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memsave_recipes as memsave
from memsave_recipes.core.costs.block_costs import kinds_of
from memsave_recipes.core.errors import InputError
from memsave_recipes.models.convnets import DenseBlock, DenseNet

ROWS = torch.linspace(-1, 1, 32).view(4, 8)


class Loop(nn.Module):
    def __init__(self, *layers, config=None):
        super().__init__()
        self.layers, self.config = nn.ModuleList(layers), config

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scripted(nn.Module):
    """Ends after its part in TorchScript."""

    def __init__(self):
        super().__init__()
        self.part, self.linear = scripted(), nn.Linear(8, 8)

    def forward(self, x):
        return x * self.linear(self.part(x))


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def scripted():
    return torch.jit.script(mlp())


def named_like_a_dense_block(name):
    """A class of this name, whose forward takes a tensor."""
    return type(name, (nn.Sequential,), {"forward": lambda self, x: nn.Sequential.forward(self, x)})


@pytest.mark.parametrize("name", ["DenseBlock", "_DenseBlock"])
def test_a_class_is_no_dense_block_by_its_name(name):
    kind = named_like_a_dense_block(name)
    model = nn.Sequential(*(kind(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    plan = memsave.make_plan(model, ROWS, strategy="full")
    assert plan.blocks == ("0", "1", "2")
    plain = model(ROWS)
    with memsave.apply_plan(model, plan):
        assert torch.equal(model(ROWS), plain)


class Own(DenseBlock):
    """With the forward that it inherits."""


@pytest.mark.parametrize("where", [("torchvision.models.densenet", "_DenseBlock.forward"), None])
def test_dense_blocks_of_other_libraries_and_their_heirs_are_opened(where):
    kind = Own
    if where:

        class Heir(DenseBlock):
            def forward(self, x):
                return super().forward(x)

        Heir.forward.__module__, Heir.forward.__qualname__ = where
        kind = Heir
    model = DenseNet(4, 8, (2, 2), num_classes=2)
    model.features.denseblock1.__class__ = kind
    assert "features.denseblock1.denselayer2" in memsave.make_plan(model, strategy="full").blocks


WITH_SLOTS = type("Slots", (), {"__slots__": ("sizes",)})()
WITH_SLOTS.sizes = [1, 2, 2]


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (None, 1),
        ("base", 1),
        (object(), 1),
        ({"width": 8}, 1),
        ({"sizes": [1, 2, 2]}, 2),
        (namedtuple("Settings", ["sizes"])((1, 2, 2)), 2),
        (SimpleNamespace(sizes=[1, 2, 2]), 2),
        (WITH_SLOTS, 2),
    ],
)
def test_a_configuration_may_be_anything(config, kinds):
    model = Loop(*(mlp() for _ in range(3)), config=config)
    assert len(set(kinds_of(model, ["layers.0", "layers.1", "layers.2"]))) == kinds
    memsave.make_plan(model, ROWS, strategy="budget:bitwise", budget_gib=1)
    assert model.config is config


@pytest.mark.parametrize("batch", [None, ROWS], ids=["no batch", "batch"])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Loop(*(Scripted() for _ in range(3))), ("layers.0", "layers.1", "layers.2")),
        (lambda: nn.Sequential(*(scripted() for _ in range(2)), mlp()), ("0", "1", "2")),
        (lambda: nn.Sequential(scripted(), Loop(mlp(), mlp())), ("0", "1")),
    ],
)
def test_parts_in_torchscript_are_planned(make, found, batch):
    model = make()
    plan = memsave.make_plan(model, batch, strategy="full")
    assert plan.blocks == found
    memsave.apply_plan(model, plan).remove()


@pytest.mark.parametrize("batch", [None, ROWS], ids=["no batch", "batch"])
@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (lambda: Loop(scripted(), mlp()), {"blocks": ["layers.0"]}, "^blocks layers.0: TorchScript runs it"),
        (lambda: Loop(scripted(), mlp()), {"blocks": torch.jit.ScriptModule}, "^blocks layers.0: TorchScript runs it"),
        (lambda: Loop(scripted(), scripted()), {}, "^strategy full: Loop has no blocks for it; use none$"),
        (lambda: torch.jit.script(mlp()), {}, "has no blocks for it; use none$"),
    ],
)
def test_what_no_plan_can_run_is_refused_in_one_line(make, arguments, words, batch):
    model = make()
    with pytest.raises(InputError, match=words):
        memsave.make_plan(model, batch, strategy="full", **arguments)


def test_a_lazy_module_is_measured_after_its_first_forward():
    model = Loop(*(nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8)) for _ in range(2)))
    with pytest.raises(InputError, match=r"^model: layers.0.0.weight of a lazy .*: run one forward first$"):
        memsave.make_plan(model, ROWS, strategy="full")
    plan = memsave.make_plan(model, strategy="full")
    memsave.apply_plan(model, plan).remove()
    model(ROWS)
    assert memsave.make_plan(model, ROWS, strategy="full").blocks == plan.blocks


class Graph(Loop):
    """Holds tensors of every kind, and mixes its rows by two sparse ones."""

    def __init__(self):
        super().__init__(mlp(), mlp())
        self.register_buffer("edges", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())
        self.conjugate = torch.ones(3, dtype=torch.cfloat).conj()
        self.ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        with torch.inference_mode():
            self.inferred = torch.ones(3)
        self.seen = torch.zeros(1)

    def forward(self, x, edges):
        self.seen.data += 1  # which counts no version
        self.edges.mul_(2)
        return super().forward(torch.sparse.mm(self.rows, torch.sparse.mm(self.edges, x)) + torch.sparse.mm(edges, x))


@pytest.mark.filterwarnings("ignore::UserWarning")  # some kinds are new in torch, others old
@pytest.mark.parametrize("strategy", ["none", "full", "budget:bitwise"])
def test_tensors_of_every_kind_are_put_back_and_counted(strategy):
    model = Graph()
    memsave.make_plan(model, (ROWS, torch.eye(4).to_sparse()), strategy=strategy, budget_gib=1)
    assert torch.equal(model.edges.to_dense(), torch.eye(4))
    assert model.seen == 0
