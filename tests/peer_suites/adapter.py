"""A case of another project's suite under every plan, beside plain and ``torch.utils.checkpoint`` around the blocks.

A case is a function ``case(put)``: it builds a model, hands it to ``put``, which puts the plan on it, trains it, and
returns what is to be compared, beside the gradients and buffers of the model and the states of the generators.
"""

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import memsave_recipes as memsave
from memsave_recipes.core.errors import InputError

STRATEGIES = ("full", "segments:2", "nested:1", "selective")
PLAIN, TORCH = "plain", "torch"
SAME, BETTER, REFUSED, LOUD, AS_TORCH = "same", "better", "refused", "raises as torch", "as torch"
ROUNDED, DIFFERS, RAISES = "rounding", "differs", "raises"
RANK = {SAME: 0, BETTER: 0, REFUSED: 1, LOUD: 2, AS_TORCH: 3, ROUNDED: 3, DIFFERS: 4, RAISES: 4}
"""How far a verdict is from plain. ``as torch`` is silent; the last two are faults, as torch is right or raises."""

Outcome = dict[str, Any] | Exception


class Verified(Exception):
    """Ends a case with what ``memsave.verify`` says of its first step."""


class Put:
    """Puts one way of saving memory on the models of a case, or has ``train`` verify it."""

    def __init__(self, way: str, verifies: bool = False) -> None:
        self.way, self.verifies = way, verifies
        self.models: list[nn.Module] = []
        self.undo: list[Callable[[], Any]] = []

    def __call__(
        self,
        model: nn.Module,
        blocks: Iterable[str] = (),
        *,
        found: bool = False,
        torchs: Callable[[Any], Callable[[], Any]] | None = None,
    ) -> Any:
        """``model`` under the plan: of ``blocks``, of what is ``found``, or else of ``model.blocks``.

        Args:
            torchs: puts another checkpoint than torch's on the model, and returns what takes it off.
        """
        self.models.append(model)
        if self.way == TORCH and torchs:
            self.undo.append(torchs(model))
        elif self.way == TORCH:
            for module in map(model.get_submodule, self.plan(model, None, blocks, found=found).blocks):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
                self.undo.append(partial(_take_off, module, module.forward))
        elif self.verifies:
            vars(model)["to_verify"] = self.plan(model, None, blocks, found=found)
        elif self.way != PLAIN:
            self.undo.append(memsave.apply_plan(model, self.plan(model, None, blocks, found=found)).remove)
        return model

    def plan(self, model: Any, batch: Any, blocks: Iterable[str] = (), *, found: bool = False) -> memsave.Plan:
        """The plan for the model; of torch the one that has the same blocks."""
        names = list(blocks) or [f"blocks.{number}" for number in range(0 if found else len(model.blocks))]
        strategy = "full" if self.way == TORCH else self.way
        return memsave.make_plan(model, batch, strategy=strategy, blocks=names or None)

    def remove(self) -> None:
        """Take the plans off again."""
        while self.undo:
            self.undo.pop()()


def _take_off(module: nn.Module, forward: Any) -> None:
    if vars(module).get("forward") is forward:
        del module.forward


def outcome_of(case: Callable[[Put], Any], way: str, verifies: bool = False) -> Outcome:
    """What ``case`` leaves, or the error that it ends with."""
    put = Put(way, verifies)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        record: dict[str, Any] = {"returned": case(put)}
        record |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
        for number, model in enumerate(put.models):
            record |= {f"gradient of {number}.{name}": one.grad for name, one in model.named_parameters()}
            record |= {f"buffer {number}.{name}": one for name, one in model.named_buffers()}
        return {name: [_kept(leaf) for leaf in tree_leaves(value)] for name, value in record.items()}
    except Exception as error:
        return error.with_traceback(None)
    finally:
        put.remove()


def _kept(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return getattr(leaf, "to_local", lambda: leaf)().detach().clone()  # of a weight in shards, this rank's


def differing(one: Outcome, other: Outcome) -> str | None:
    """What differs first, in a few words; ``None`` where both are alike, bit for bit."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        if isinstance(one, Exception) and isinstance(other, Exception):
            return None
        error = one if isinstance(one, Exception) else other
        words = " ".join(str(error).split())
        return f"{type(error).__name__}: {words[:160]}"
    names = (name for name in one | other if not _equal(one.get(name), other.get(name)))
    return next(names, None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor | np.ndarray) and type(one) is type(other):
        equal = torch.equal if isinstance(one, Tensor) else np.array_equal
        return one.dtype == other.dtype and one.shape == other.shape and bool(equal(one, other))
    return type(one) is type(other) and bool(one == other)


def is_close(one: Outcome, other: Outcome) -> bool:
    """Whether all tensors are equal up to the rounding of 16 bits."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return False
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True) if isinstance(pair[0], Tensor)]
    return all(torch.allclose(*pair, rtol=0.05, atol=0.01) for pair in pairs)


def verdict_of(plain: Outcome, torchs: Outcome, ours: Outcome) -> str:
    """How ``ours`` is to be judged."""
    torch_is_right = differing(plain, torchs) is None
    if differing(plain, ours) is None:
        return SAME if torch_is_right else BETTER
    if isinstance(ours, Exception):
        if isinstance(ours, InputError):
            return REFUSED if "\n" not in str(ours) else RAISES
        # That torch goes on with wrong values is no better than an error.
        is_as_torch = type(ours) is type(torchs) or (isinstance(ours, RuntimeError) and not torch_is_right)
        return LOUD if is_as_torch else RAISES
    torch_raises = isinstance(torchs, Exception) and not isinstance(plain, Exception)
    return DIFFERS if torch_is_right or torch_raises else AS_TORCH


@dataclass
class Case:
    """A function of ``put``, the worst verdict that is right for each strategy, and what plain raises, if anything."""

    function: Callable[[Put], Any]
    expected: dict[str, str]
    raises: type[Exception] | None = None

    def row(self) -> dict[str, Any]:
        """The verdicts, in words what is not the same, and which verdicts are worse than expected."""
        plain, torchs = outcome_of(self.function, PLAIN), outcome_of(self.function, TORCH)
        ours = {strategy: outcome_of(self.function, strategy) for strategy in self.expected}
        verdicts = {strategy: verdict_of(plain, torchs, one) for strategy, one in ours.items()}
        rounds = [one for one in ours if self.expected[one] == ROUNDED and verdicts[one] == DIFFERS]
        verdicts |= {strategy: ROUNDED for strategy in rounds if is_close(plain, ours[strategy])}
        words = {strategy: differing(plain, one) for strategy, one in ours.items()}
        is_plain = isinstance(plain, self.raises) if self.raises else not isinstance(plain, Exception)
        return {
            "plain": differing({}, plain) if isinstance(plain, Exception) else "",
            "torch": differing(plain, torchs) or "",
            "verdicts": verdicts,
            "differing": {strategy: said for strategy, said in words.items() if said},
            "verify": {strategy: self._verified(strategy) for strategy in ours if verdicts[strategy] == AS_TORCH},
            "faults": [
                f"{strategy}: {verdict}, not {self.expected[strategy]} ({words[strategy]})"
                for strategy, verdict in verdicts.items()
                if RANK[verdict] > RANK[self.expected[strategy]]
            ]
            + ([] if is_plain else [f"plain: {plain!r}, not {self.raises}"]),
        }

    def _verified(self, strategy: str) -> str:
        """What ``memsave.verify`` says of the first step; some cases are more than a step."""
        outcome = outcome_of(self.function, strategy, verifies=True)
        return str(outcome) if isinstance(outcome, Verified) else "not tried"


@dataclass
class Suite:
    """Cases by name: ``@suite(AS_TORCH, selective=REFUSED)`` above one."""

    cases: dict[str, Case] = field(default_factory=dict)

    def __call__(
        self,
        expected: str = SAME,
        *,
        joint: str | None = None,
        strategies: Iterable[str] = STRATEGIES,
        raises: type[Exception] | None = None,
        **by: str,
    ) -> Callable[[Callable[[Put], Any]], Callable[[Put], Any]]:
        """Add a case; ``joint`` is expected of plans that join blocks, and plain ``raises``."""
        of = {strategy: joint or expected if ":" in strategy else expected for strategy in strategies}
        of |= {strategy: by[word] for strategy in of if (word := strategy.partition(":")[0]) in by}

        def add(function: Callable[[Put], Any]) -> Callable[[Put], Any]:
            self.cases[function.__name__.strip("_")] = Case(function, of, raises)
            return function

        return add

    def layer(self, expected: str = SAME, *, parts: Any = dict, times: int = 1, **by: Any) -> Callable[..., Any]:
        """Add the case of a model whose layers have the function as their forward."""
        return self._case(lambda forward: stack(forward, parts=parts), times, expected, by)

    def model(
        self, expected: str = SAME, *, forward: Any = None, parts: Any = dict, times: int = 1, **by: Any
    ) -> Callable[..., Any]:
        """Add the case of a model that has the function as its own forward; ``forward`` is that of its layers."""
        return self._case(lambda through: stack(forward or body, through, parts=parts), times, expected, by)

    def _case(self, built: Callable[..., Any], times: int, expected: str, by: dict[str, Any]) -> Callable[..., Any]:
        def add(function: Any) -> Any:
            def case(put: Put) -> Any:
                return train(put(built(function)), x(), times=times)

            case.__name__ = function.__name__
            self(expected, **by)(case)
            return function

        return add

    def each(self, values: dict[str, Any], *expected: str, **by: Any) -> Callable[[Callable[..., Any]], Any]:
        """Add a case ``function(put, value)`` for each of ``values``, by its name."""

        def add(function: Callable[..., Any]) -> Any:
            for name, value in values.items():
                one = partial(function, value=value)
                vars(one)["__name__"] = f"{function.__name__}[{name}]"
                self(*expected, **by)(one)
            return function

        return add


# Small models for the cases.


def x(*shape: int, grad: bool = False) -> Tensor:
    """The same numbers at every call."""
    return torch.randn(shape or (4, 8), generator=torch.Generator().manual_seed(1)).requires_grad_(grad)


def body(self: Any, x: Tensor) -> Tensor:
    """What a layer does, if a case does not say."""
    return torch.tanh(self.l(self.n(x)))


def in_turn(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """What a model does, if a case does not say."""
    for block in self.blocks:
        x = block(x, *args, **kwargs)
    return x


def norm_and_linear() -> dict[str, Any]:
    """The parts of a layer, if a case does not say."""
    return {"n": nn.LayerNorm(8), "l": nn.Linear(8, 8)}


def make(kind: type, parts: dict[str, Any]) -> Any:
    """A module of ``kind`` with these attributes; tensors among them are buffers."""
    module = kind()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    return module


def stack(
    forward: Callable[..., Any] = body,
    through: Callable[..., Any] = in_turn,
    *,
    parts: Callable[[], dict[str, Any]] = dict,
    count: int = 4,
    **more: Any,
) -> Any:
    """A model of ``count`` layers of a class of their own; ``more`` are its other attributes."""
    layer, model = type("Layer", (nn.Module,), {"forward": forward}), type("Model", (nn.Module,), {"forward": through})
    blocks = nn.Sequential(*(make(layer, norm_and_linear() | parts()) for _ in range(count)))
    return make(model, {"blocks": blocks, **more}).train()


def total(outputs: Any) -> Tensor:
    """A loss of all tensors that have gradients."""
    tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack([one.float().square().sum() for one in tensors]).sum()


def train(model: Any, *args: Any, times: int = 1, within: Any = nullcontext, between: Any = None, **kwargs: Any) -> Any:
    """The losses of steps: forwards ``within()`` a context, what is done ``between`` them and backwards."""

    def step() -> Tensor:
        with within():
            loss = total(model(*args, **kwargs))
        if between:
            between()
        loss.backward()
        return loss.detach()

    if plan := vars(model).get("to_verify"):
        raise Verified("passes" if memsave.verify(model, plan, step).passed else "finds it")
    return [step() for _ in range(times)]
