"""Blocks that change more than their outputs give plain bit for bit under every strategy, or are refused by name."""

import copy
import random
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from samples import every_third, sample
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memsave_recipes as memsave
from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError

STRATEGIES = [
    *("full", "every:2", "segments:2", "nested:2", "selective", "offload", "full_offload"),
    *("full_tiled:8", "full_tiled_offload:8"),  # a micro-batch is one tile: several add up their gradients in parts
]
KEEPING = ("none", "offload")  # nothing runs twice
SIZE = 16


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(SIZE, 32), nn.GELU(), nn.Linear(32, SIZE)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Computes with the ``scale`` of a step; those below remember something of it."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def body(self, x):
        return x + self.mlp(x)

    def forward(self, x):
        scale = self.scale(x)  # first: a second run ends with the last tensor that is saved
        return self.body(x) * scale


class Counter(Block):
    calls = 0

    def scale(self, x):
        self.calls += 1
        return 1 / self.calls


class MeanOfAll(Block):
    """A tensor that is replaced."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(())

    def scale(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return 1 + self.mean


class History(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def scale(self, x):
        self.seen.append(x.detach().mean())
        return 1 + sum(self.seen)


class Named(Block):
    def __init__(self):
        super().__init__()
        self.seen = {"means": [], "calls": 0}

    def scale(self, x):
        self.seen["calls"] += 1
        self.seen["means"].append(x.detach().mean())
        return sum(self.seen["means"]) / self.seen["calls"]


class Window(Block):
    def __init__(self):
        super().__init__()
        self.last = deque(maxlen=3)

    def scale(self, x):
        self.last.append(x.detach().std())
        return sum(self.last)


class Lazy(Block):
    """Computes something once, in its first forward."""

    table = None

    def scale(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, SIZE).sin()
        return self.table


class Inner(Block):
    """Its child counts."""

    def __init__(self):
        super().__init__()
        self.inner = Counter()

    def scale(self, x):
        return self.inner.scale(x)


class Codebook(Block):
    """Vector quantisation's moving average, past the counters of autograd."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def scale(self, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return 1 + self.mean


class Teacher(Block):
    """A parameter that does not train and follows one that does."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Parameter(torch.ones(SIZE), requires_grad=False)

    def scale(self, x):
        self.teacher.data.lerp_(self.mlp.down.bias.detach(), 0.1)
        return self.teacher


class PlainTensor(Block):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(SIZE)

    def scale(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return 1 + self.mean


class Buffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def scale(self, x):
        self.mean.copy_(x.detach().mean(0))
        return 1 + self.mean.tanh()


class Normalised(Block):
    """Weights of norm 1, as weight clipping writes them."""

    def scale(self, x):
        self.mlp.up.weight.data.div_(self.mlp.up.weight.norm() + 1)
        return 1.0


class OwnGenerator(Block):
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def scale(self, x):
        return torch.rand(x.shape, generator=self.draws)


class OfPython(Block):
    def __init__(self):
        super().__init__()
        self.draws = random.Random(3)

    def scale(self, x):
        return self.draws.random()


@dataclass
class Moments:
    calls: int = 0


class Object(Block):
    def __init__(self):
        super().__init__()
        self.moments = Moments()

    def scale(self, x):
        self.moments.calls += 1
        return 1 / self.moments.calls


class OfClass(Block):
    """All blocks count together."""

    calls = 0

    def scale(self, x):
        type(self).calls += 1
        return 1 / type(self).calls


class InListOfClass(Block):
    seen: ClassVar[list[torch.Tensor]] = []

    def scale(self, x):
        self.seen.append(x.detach().mean())
        return 1 + sum(self.seen)


class Tallies(Block):
    def __init__(self):
        super().__init__()
        self.seen = Tally()

    def scale(self, x):
        self.seen.update(["calls"])
        return 1 / self.seen["calls"]


class DrawsOfPython(Block):
    """As the depth of a stochastic network."""

    def scale(self, x):
        return random.random()


class DrawsOfNumpy(Block):
    def scale(self, x):
        return float(np.random.uniform(0.5, 1.5))


class Holds(Block):
    """One thing, which ``use`` changes and reads."""

    def __init__(self):
        super().__init__()
        self.thing = self.make()

    def scale(self, x):
        return self.use(x)


class CallsSince:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return 1 / self.calls


class InSlots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


def closure():
    calls = 0

    def use():
        nonlocal calls
        calls += 1
        return 1 / calls

    return use


def generator():
    yield from range(1, 1000)


def follow(mean, x):
    return 1 + mean.mul_(0.9).add_(0.1 * x.detach().mean(0)).clone()


def add(array, x):
    array += x.detach().mean(0).numpy()
    return 1 + torch.from_numpy(array.copy())


def count_in(thing):
    thing.calls += 1
    return 1 / thing.calls


def next_byte(thing):
    thing[0] += 1
    return 1 / thing[0]


HELD = {  # what a block makes, how it uses it, and what it is told
    "tensor in a list": (lambda: [torch.zeros(SIZE)], lambda it, x: follow(it[0], x), "writes on its tensor thing"),
    "tensor in a dict": (
        lambda: {"a": (torch.zeros(SIZE),)},
        lambda it, x: follow(it["a"][0].data, x),
        "writes on its",
    ),
    "tensor in an object": (
        lambda: SimpleNamespace(mean=torch.zeros(SIZE)),
        lambda it, x: follow(it.mean, x),
        "changes its thing",
    ),
    "array": (lambda: np.zeros(SIZE, "float32"), add, "changes its thing"),
    "array in a list": (lambda: [np.zeros(SIZE, "float32")], lambda it, x: add(it[0], x), "changes its thing"),
    "generator of numpy": (lambda: np.random.default_rng(3), lambda it, x: it.random(), "changes its thing"),
    "former generator": (lambda: np.random.RandomState(3), lambda it, x: it.rand(), "changes its thing"),
    "bytes": (lambda: bytearray(1), lambda it, x: next_byte(it), "changes its thing"),
    "object in a list": (lambda: [SimpleNamespace(calls=0)], lambda it, x: count_in(it[0]), "changes its thing"),
    "object in an object": (
        lambda: SimpleNamespace(inner=Moments()),
        lambda it, x: count_in(it.inner),
        "changes its thing",
    ),
    "object with slots": (InSlots, lambda it, x: count_in(it), "changes its thing"),
    "object to call": (CallsSince, lambda it, x: it(), "changes its thing"),
    "method": (lambda: CallsSince().__call__, lambda it, x: it(), "changes its thing"),
    "function": (closure, lambda it, x: it(), "changes its thing"),
    "function in parts": (lambda: partial(closure()), lambda it, x: it(), "changes its thing"),
    "iterator": (lambda: count(1), lambda it, x: 1 / next(it), "changes its thing"),
    "generator of Python": (generator, lambda it, x: 1 / next(it), "changes its thing"),
    "module in a list": (
        lambda: [nn.Linear(SIZE, SIZE)],
        lambda it, x: follow(it[0].bias.data, x),
        "changes its thing",
    ),
}


def holding(name):
    """A block that holds one of them."""
    make, use, _ = HELD[name]
    return type("Holder", (Holds,), {"make": staticmethod(make), "use": lambda self, x: use(self.thing, x)})


def written(given, x):
    return given.add_(x.detach().mean(0)).clone()


GIVEN_ONCE = {  # what the model gives all blocks, how they use it, and what they are told
    "tensor": (lambda: torch.ones(SIZE), written, "writes on a tensor that it is given"),
    "bits of a tensor": (lambda: torch.ones(SIZE), lambda it, x: written(it.data, x), "writes on a tensor that it"),
    "tensor in a dict": (lambda: {"a": torch.ones(SIZE)}, lambda it, x: written(it["a"], x), "writes on a tensor that"),
    "array": (lambda: np.ones(SIZE, "float32"), add, "changes a ndarray that it is given"),
    "object": (Moments, lambda it, x: count_in(it), "changes a Moments that it is given"),
    "object in a list": (lambda: [Moments()], lambda it, x: count_in(it[0]), "changes a Moments that it is given"),
    "iterator": (lambda: iter(range(1, 1000)), lambda it, x: 1 / next(it), "changes a range_iterator that it is given"),
    "set": (lambda: {1.0, 2.0, 3.0, 4.0}, lambda it, x: it.pop(), "changes a set that it is given"),
}


def giving(name):
    """A model that gives one of them to all its blocks."""
    make, use, _ = GIVEN_ONCE[name]

    class Giving(Net):
        def forward(self, x):
            x, given = self.stem(x), make()
            for block in self.blocks:
                x = block(x, given)
            return self.head(x).square().mean()

    torch.manual_seed(0)
    return Giving(type("Given", (Block,), {"forward": lambda self, x, it: self.body(x * use(it, x))})).train()


class Pops(Block):
    def forward(self, *, held):
        return self.body(held.pop(0))


class Writes(Block):
    def forward(self, x, cache):
        cache["mean"] = x.mean() + cache.get("mean", 0)
        return self.body(x) * cache["mean"]


class Appends(Block):
    def forward(self, x, cache):
        cache.setdefault("all", []).append(x.mean())
        return self.body(x) * sum(cache["all"])


class Counts(Block):
    def forward(self, x, cache):
        cache["calls"] = cache.get("calls", 0) + 1
        return self.body(x) / cache["calls"]


class WritesInList(Block):
    def forward(self, x, cache):
        steps = cache.setdefault("steps", [0])
        steps[0] += 1
        return self.body(x) / steps[0]


class InDict(Block):
    """The state goes through in a dict."""

    def forward(self, state):
        state["x"] = self.body(state["x"])
        return state


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem, self.head = nn.Linear(8, SIZE), nn.Linear(SIZE, 3)
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x):
        x, cache = self.stem(x), {}
        for block in self.blocks:
            if isinstance(block, Pops):
                x = block(held=[x])
            elif isinstance(block, InDict):
                x = block({"x": x})["x"]
            else:
                x = block(x, cache) if isinstance(block, GIVEN) else block(x)
        return self.head(x).square().mean()


PUT_BACK = [Counter, MeanOfAll, History, Named, Window, Lazy, Inner, Tallies]
SHARED = [OfClass, InListOfClass, DrawsOfPython, DrawsOfNumpy]
"""These are put back, too."""
GIVEN = (Pops, Writes, Appends, Counts, WritesInList, InDict)
REFUSED = {
    Codebook: "Codebook writes on its buffer mean",
    Teacher: "Teacher writes on its parameter teacher",
    PlainTensor: "PlainTensor writes on its tensor mean",
    Buffer: "Buffer writes on its buffer mean",
    Normalised: "Linear writes on its parameter weight",
    OwnGenerator: "OwnGenerator changes its draws",
    OfPython: "OfPython changes its draws",
    Object: "Object changes its moments",
}


def net(kind):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    OfClass.calls = 0
    InListOfClass.seen.clear()
    return Net(kind).train()


def held(model):
    """What its modules hold but their functions."""
    plain = (int, float, list, dict, deque, torch.Tensor)
    return [
        {name: value for name, value in vars(layer).items() if isinstance(value, plain) and not name.startswith("_")}
        for layer in model.modules()
    ]


def steps(model):
    """Losses, gradients, parameters and what is held, of three steps."""
    optimizer, random_ = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        loss = model(torch.randn(5, 8, generator=random_))
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
        optimizer.step()
        optimizer.zero_grad()
    return [*found, list(model.parameters()), held(model)]


def is_same(one, other, equal=torch.equal):
    if isinstance(one, torch.Tensor):
        return equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key], equal) for key in one)
    if isinstance(one, list | deque):
        return len(one) == len(other) and all(is_same(*pair, equal) for pair in zip(one, other, strict=True))
    return one == other


class Quiet(Block):
    def scale(self, x):
        return 1


class CountsTokens(Mlp):
    """Statistics that nothing computes with."""

    tokens = 0

    def forward(self, x):
        self.tokens += len(x)
        return super().forward(x)


class Watched(Mlp):
    def __init__(self):
        super().__init__()
        self.means = []

    def forward(self, x):
        self.means.append(x.detach().mean())
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["full_tiled:2", "full_tiled_offload:2"])
@pytest.mark.parametrize("mlp", [CountsTokens, Watched])
def test_an_mlp_that_remembers_does_not_run_in_tiles(mlp, strategy):
    model, expected = net(Quiet), net(Quiet)
    for block in [*model.blocks, *expected.blocks]:
        block.mlp = mlp()
    with pytest.raises(InputError, match="Quiet has no MLP of its own"):
        apply_plan(model, plan_blocks(model, strategy))
    assert is_same(held(model), held(expected))  # also where it was tried


KINDS = [*PUT_BACK, *GIVEN]
FAST = {*product(KINDS, ["segments:2", "selective"]), *product([Counter, History, Writes], STRATEGIES)}


@pytest.mark.parametrize(("kind", "strategy"), sample(FAST, product(KINDS, STRATEGIES)))
def test_what_can_be_put_back_is(kind, strategy):
    expected, model = steps(net(kind)), net(kind)
    with apply_plan(model, plan_blocks(model, strategy)):
        found = steps(model)
    assert is_same(found, expected)


@pytest.mark.parametrize("strategy", ["full", "segments:2", "selective"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_all_blocks_share_is_put_back(kind, strategy):
    expected, after = steps(net(kind)), (OfClass.calls, len(InListOfClass.seen), random.random(), np.random.rand())
    model = net(kind)
    with apply_plan(model, plan_blocks(model, strategy)):
        found = steps(model)
    assert is_same(found, expected)
    assert (OfClass.calls, len(InListOfClass.seen), random.random(), np.random.rand()) == after


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one not in KEEPING])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_put_back_is_refused_by_name(kind, strategy):
    model = net(kind)
    with apply_plan(model, plan_blocks(model, strategy)), pytest.raises(InputError, match=REFUSED[kind]) as error:
        steps(model)
    assert error.value.one_line.endswith("use none")


@pytest.mark.parametrize("strategy", ["full", "segments:2", "nested:2"])
@pytest.mark.parametrize("name", [*HELD, *GIVEN_ONCE])
def test_so_is_whatever_else_it_holds_or_is_given(name, strategy):
    model, (*_, message) = (net(holding(name)), HELD[name]) if name in HELD else (giving(name), GIVEN_ONCE[name])
    with apply_plan(model, plan_blocks(model, strategy)), pytest.raises(InputError, match=message):
        steps(model)


COMPILED = [*KINDS, *REFUSED]


@pytest.mark.usefixtures("kernels_can_be_compiled")
@pytest.mark.parametrize("kind", sample([Teacher], COMPILED))
def test_compiled_layers_change_it_once_or_are_refused(kind):
    expected, model = steps(net(kind)), net(kind)
    with apply_plan(model, plan_blocks(model, "compiled:0.3")):
        if kind in REFUSED:
            with pytest.raises(InputError, match=f"{REFUSED[kind]} in every|{kind.__name__} cannot be compiled as one"):
                steps(model)
        else:
            assert is_same(steps(model), expected, partial(torch.allclose, rtol=1e-3, atol=1e-5))


@pytest.mark.usefixtures("kernels_can_be_compiled")
@pytest.mark.parametrize("kind", COMPILED)
def test_so_do_they_where_an_observer_sees_them_recomputed(kind):
    expected, model = steps(net(kind)), net(kind)
    with apply_plan(model, plan_blocks(model, "compiled:0.3")), FlopCounterMode(display=False):
        if kind in REFUSED:
            with pytest.raises(InputError, match=REFUSED[kind]):
                steps(model)
        else:
            assert is_same(steps(model), expected)


@pytest.mark.parametrize("kind", sample([Counter, History, Writes, InDict], KINDS))
def test_a_budget_is_kept_with_the_bits_of_plain(kind):
    batch = torch.randn(256, 8)
    model, twin = net(kind), net(kind)
    whole = memsave.make_plan(net(kind), [batch], strategy="full", predict=True).prediction.peak_bytes
    plan = memsave.make_plan(model, [batch], strategy="budget:bitwise", budget_gib=1.1 * whole / 2**30)
    with apply_plan(model, plan):
        found = steps(model)
    assert is_same(found, steps(twin))


@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_runs_once_may_do_as_it_likes(kind, strategy):
    expected, model = steps(net(kind)), net(kind)
    with apply_plan(model, plan_blocks(model, strategy)):
        assert is_same(steps(model), expected)


def many_steps(model, count):
    """The gradients of the last of them."""
    torch.manual_seed(0)
    random_ = torch.Generator().manual_seed(1)
    for _ in range(count):
        model.zero_grad()
        model(torch.randn(5, 8, generator=random_)).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


class Seldom(Block):
    """Counts large inputs."""

    large = 0

    def scale(self, x):
        self.large += int(x.max() > 2.5)
        return 1 / (1 + self.large)


class InEvaluation(Block):
    calls = 0

    def scale(self, x):
        self.calls += not self.training
        return 1 / (1 + self.calls)


LATE = 40
"""Steps after which something begins."""


class Queue(Block):
    """Fills after many steps, as a memory bank behind a warm-up."""

    def __init__(self):
        super().__init__()
        self.forwards, self.queue = 0, []

    def scale(self, x):
        self.forwards += 1
        if self.forwards > LATE:
            self.queue.append(x.detach().mean())
        return 1 + sum(self.queue)


class LateAverage(Queue):
    """Is ``None`` until it begins."""

    average = None

    def scale(self, x):
        self.forwards += 1
        if self.forwards > LATE:
            self.average = x.detach().mean() if self.average is None else 0.9 * self.average + 0.1 * x.detach().mean()
        return 1 if self.average is None else 1 + self.average


class LateDepth(Queue):
    def scale(self, x):
        self.forwards += 1
        return random.random() if self.forwards > LATE else 1


class LateBuffer(Queue):
    def scale(self, x):
        self.forwards += 1
        if self.forwards > LATE and not self._buffers:
            self.register_buffer("first", x.detach().mean(0))
        return 1 + self.first if self._buffers else 1


@pytest.mark.parametrize(
    ("kind", "strategy"),
    every_third(
        product(
            [Counter, Seldom, Queue, LateAverage, LateDepth, LateBuffer],
            ["full", "segments:2", "nested:2", "selective"],
        )
    ),
)
def test_what_begins_late_is_put_back(kind, strategy):
    model, twin = net(kind), net(kind)
    with apply_plan(model, plan_blocks(model, strategy)):
        found = many_steps(model, LATE + 3)
    random.seed(0)
    assert is_same(found, many_steps(twin, LATE + 3))
    assert is_same(held(model), held(twin))


def test_a_block_that_changes_in_evaluation_alone_is_put_back_there():
    model, twin = net(InEvaluation), net(InEvaluation)
    with apply_plan(model, plan_blocks(model, "segments:2")):
        found = many_steps(model, 2), many_steps(model.eval(), 3)
    assert is_same(list(found), [many_steps(twin, 2), many_steps(twin.eval(), 3)])


@pytest.mark.parametrize("kind", [Buffer, PlainTensor])
def test_a_block_that_writes_on_a_tensor_later_is_refused_then(kind):
    model = net(kind)
    for block in model.blocks:
        block.scale = lambda x: 1
    with apply_plan(model, plan_blocks(model, "full")):
        many_steps(model, LATE)
        for block in model.blocks:
            del block.scale
        with pytest.raises(InputError, match=REFUSED[kind]):
            many_steps(model, 1)


class UpAndDown(Block):
    """Lowers what it raised after its last saved tensor, where a second run does not come."""

    depth = 0

    def forward(self, x):
        self.depth += 1
        x = self.body(x) * self.depth
        self.depth -= 1
        return x


class SetAndDeleted(Block):
    def forward(self, x):
        assert not hasattr(self, "input")
        self.input = x
        x = self.body(self.input) * 2
        del self.input
        return x


class OwnSum(Block):
    """A buffer that is replaced, not written on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def scale(self, x):
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return 1 / self.largest


class MakesChild(Block):
    def scale(self, x):
        if not hasattr(self, "child"):
            self.child = nn.Linear(SIZE, SIZE)
        return self.child(x).tanh()


class StartsFromData(Block):
    """Takes its scale from its first batch, as ActNorm."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def scale(self, x):
        if not self.is_set:
            self.log.data.copy_(-x.detach().std(0).log())
            self.is_set.fill_(True)
        return self.log.exp()


class LazyLinear(Block):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(SIZE)

    def scale(self, x):
        return self.first(x).tanh()


@pytest.mark.parametrize("strategy", ["full", "segments:2", "nested:2", "selective", "every:2"])
@pytest.mark.parametrize("kind", [UpAndDown, SetAndDeleted, OwnSum, MakesChild, StartsFromData, LazyLinear])
def test_what_is_set_up_or_comes_and_goes_is_right(kind, strategy):
    model, twin = net(kind), net(kind)
    with apply_plan(model, plan_blocks(model, strategy)):
        found = many_steps(model, 3)
    assert is_same(found, many_steps(twin, 3))
    assert is_same(held(model), held(twin))


def test_gradients_that_a_block_makes_itself_are_refused():
    class LocalLoss(Block):
        def scale(self, x):
            self.mlp(x.detach()).square().mean().backward()
            return 1

    model = net(LocalLoss)
    with apply_plan(model, plan_blocks(model, "full")), pytest.raises(InputError, match="LocalLoss adds to the grad"):
        many_steps(model, 1)


def test_a_second_backward_finds_what_the_first_one_found():
    model, twin = net(Appends), net(Appends)
    batch = torch.randn(5, 8)
    for one in (model, twin):
        handle = apply_plan(one, plan_blocks(one, "full" if one is model else "none"))
        loss = one(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        handle.remove()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_copy_of_a_model_under_a_plan_has_its_own():
    model = net(Counter)
    with apply_plan(model, plan_blocks(model, "full")):
        steps(model)
        twin = copy.deepcopy(model)
        assert is_same(steps(twin), steps(model))
    assert [block.calls for block in model.blocks] == [6] * 4


def test_objects_that_stay_as_they_are_are_no_side_effect():
    class Configured(Block):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(scale=0.5, sizes=[1, 2])

        def scale(self, x):
            return self.config.scale

    model, twin = net(Configured), net(Configured)
    with apply_plan(model, plan_blocks(model, "full")):
        found = steps(model)
    assert is_same(found, steps(twin))


def test_a_tensor_whose_storage_is_freed_is_no_side_effect():
    class Freeing(Block):
        def __init__(self):
            super().__init__()
            self.gathered = SimpleNamespace(weight=torch.ones(4))
            self.gathered.weight.untyped_storage().resize_(0)

        def scale(self, x):
            return 0.5

    model, twin = net(Freeing), net(Freeing)
    with apply_plan(model, plan_blocks(model, "full")):
        found = steps(model)
    assert is_same(found, steps(twin))
