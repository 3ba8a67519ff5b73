"""Fused operators for what models write in Python: GELU and RMSNorm as one operator of ATen each.

NOTE [ fused operators ]
1. Eager torch runs one operator after another. ``gelu_new`` of transformers is eight, in float32 under autocast, and
   what each saves is kept for the backward: most of the bytes that a layer of GPT-2 moves. An RMSNorm is six. ATen has
   both as one; on a CPU its RMSNorm is made of the same six.
2. What a module computes is tried on a few numbers, values and gradients, and replaced where ATen's operator has the
   same within rounding, in the same dtype, for inputs of float32 and of bfloat16. Any other module stays: gated norms,
   norms of groups, GELUs that are clipped.
3. Names and values of weights, and the configuration, stay: what is saved is the model of transformers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

FusedOps = Literal["auto", "none"]
EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""The names that models have for what keeps an RMSNorm from dividing by zero."""
PROBED = (torch.float32, torch.bfloat16)
ROUNDINGS = 8  # by how many units in the last place of the largest number two results may differ


class NormForm(NamedTuple):
    """How a model writes its RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Args:
        plus_one: whether the scale is one more than the weight, in float32, as in Gemma.
        keeps_dtype: whether the result has the input's dtype; else the wider one of input and weight.
    """

    eps: float
    plus_one: bool
    keeps_dtype: bool


Gelu: TypeAlias = Literal["none", "tanh"]
Fused: TypeAlias = NormForm | Gelu
"""What a module is within rounding: an RMSNorm, or a form of ATen's GELU."""
GELUS: tuple[Gelu, ...] = get_args(Gelu)
Function: TypeAlias = Callable[[Tensor], Tensor]
Found: TypeAlias = tuple[nn.Module, str, nn.Module, Fused]
"""A module that is the same as an operator, after its parent and its name there."""
_OF_MODELS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class FusedRMSNorm(nn.Module):
    """The RMSNorm of a model, in one operator; ``fuse_operators`` gives a module this class."""

    form: NormForm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise (..., D)."""
        return rms_norm(hidden_states, getattr(self, "weight", None), self.form)


def rms_norm(hidden: Tensor, weight: Tensor | None, form: NormForm) -> Tensor:
    """Normalise ``hidden`` (..., D), scaled by ``weight`` (D,), as ``form`` tells.

    The kernel takes one dtype. Under autocast it would be float32 (pytorch#188955), and so would what follows the norm.
    """
    scale = 1 + weight.float() if weight is not None and form.plus_one else weight
    wide = hidden.dtype if scale is None else torch.promote_types(hidden.dtype, scale.dtype)
    run = partial(F.rms_norm, hidden.to(wide), hidden.shape[-1:], scale if scale is None else scale.to(wide), form.eps)
    kind = hidden.device.type
    if wide.itemsize < 4 and kind != "meta" and torch.is_autocast_enabled(kind):  # which refuses meta
        with torch.autocast(kind, enabled=False):
            return run()
    return run().to(hidden.dtype) if form.keeps_dtype else run()


def fuse_operators(model: nn.Module) -> str | None:
    """Let each GELU and RMSNorm that ``model`` writes in Python run as one operator: NOTE [ fused operators ].

    Returns:
        The number and kinds of these modules, for people; ``None`` where there are none.
    """
    found = list(_written_in_python(model))
    if found:
        _OF_MODELS[model] = _counted(found)
    for parent, name, module, fused in found:
        if isinstance(fused, NormForm):
            vars(module)["form"], module.__class__ = fused, FusedRMSNorm
        else:  # in its place, because a model may hold an instance that transformers shares
            setattr(parent, name, nn.GELU(fused))
    return _OF_MODELS.get(model)


def fused_in(model: nn.Module) -> str | None:
    """Return a line on what ``fuse_operators`` has changed in ``model``."""
    fused = _OF_MODELS.get(model)
    return (
        fused and f"fused operators: {fused} are one of torch each; --fused_ops none leaves them as the model has them"
    )


def not_fused_in(model: nn.Module) -> str | None:
    """Return a line on what ``fuse_operators`` would gain in ``model``: on a CPU nothing of its norms."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    found = [one for one in _written_in_python(model) if not (on_cpu and isinstance(one[-1], NormForm))]
    gain = ", ".join({type(one[2]): _gain(*one[2:]) for one in found}.values())
    way = f"one of torch each after memsave_recipes.fuse_operators(model): {gain}, in place of all of them"
    return f"{_counted(found)} are several operators each, and {way}" if found else None


def _gain(module: nn.Module, fused: Fused) -> str:
    """Return the share of the bytes that ``module`` saves of bfloat16 which the operator in its place saves."""
    with _on_numbers():
        trial = _Trial.of(module)
        numbers = trial.numbers.bfloat16()
        before = _saved_bytes(trial.run, numbers)
        if isinstance(fused, NormForm):  # whose kernel, on a GPU, saves its input and a float32 a row
            after = numbers.nbytes + 4 * len(numbers)
        else:
            after = _saved_bytes(trial.candidates[fused], numbers)
    return f"a {type(module).__name__} saves {after / before:.0%} of its bytes for the backward"


def _saved_bytes(function: Function, numbers: Tensor) -> int:
    """Count the bytes that autograd saves of ``function`` of ``numbers`` (N, D), the input among them."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = function(numbers.clone().requires_grad_())  # which holds what is saved
    return sum(saved.values()) if value.requires_grad else 0


def _counted(found: list[Found]) -> str:
    kinds = Counter(type(module).__name__ for _, _, module, _ in found)
    return ", ".join(f"{count} {name}" for name, count in kinds.items())


def _written_in_python(model: nn.Module) -> Iterator[Found]:
    """Yield the parent and name of each such module, the module, and what it is the same as."""
    known: dict[Any, Fused | None] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            if _may_be_fused(module):
                key = type(module), repr(_settings(module))
                if key not in known:
                    known[key] = _same_as(module)
                if (fused := known[key]) is not None:
                    yield parent, name, module, fused


def _may_be_fused(module: nn.Module) -> bool:
    """Tell a GELU or a norm of one tensor, in Python, by its name and parts."""
    kind = type(module)
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    is_own = not kind.__module__.startswith("torch.") and kind is not FusedRMSNorm and not any(module.children())
    named = ("norm" in kind.__name__.lower() and names in (["weight"], [])) or "gelu" in kind.__name__.lower()
    return is_own and named and len(signature(kind.forward).parameters) == 2


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    weight = getattr(module, "weight", None)
    return own | {"weight": None if weight is None else (weight.shape, weight.dtype)}


@contextmanager
def _on_numbers() -> Iterator[None]:
    """Compute with numbers, wherever the model is."""
    with unset_fake_temporarily(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


class _Trial(NamedTuple):
    """A module as a function of a few numbers (N, D), and what it may be the same as."""

    run: Function
    numbers: Tensor
    candidates: dict[Fused, Function]

    @classmethod
    def of(cls, module: nn.Module) -> "_Trial":
        """Draw the numbers, and another weight."""
        weight = getattr(module, "weight", None)
        eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
        scale = None if weight is None else draw(len(weight)).to(weight.dtype)
        candidates: dict[Fused, Function]
        if isinstance(eps, float):
            numbers = draw(8, 16 if scale is None else len(scale))
            numbers[4:] *= eps**0.5  # so small that ``eps`` matters
            forms = [NormForm(eps, *how) for how in product((False, True), repeat=2)]
            candidates = {form: partial(rms_norm, weight=scale, form=form) for form in forms}
        else:
            numbers = torch.cat([draw(64, 1), 100 * draw(64, 1)])  # beyond the bounds of any clipping
            candidates = {form: partial(F.gelu, approximate=form) for form in GELUS}
        weights = {} if scale is None else {"weight": scale}

        def run(hidden: Tensor) -> Tensor:
            result: Tensor = functional_call(module, weights, hidden)
            return result

        return cls(run, numbers, candidates)


def _same_as(module: nn.Module) -> Fused | None:
    """Return what ``module`` is the same as: rule 2."""
    with _on_numbers():
        run, numbers, candidates = _Trial.of(module)
        try:
            if _num_operators(run, numbers) > 1:
                probes = [numbers.to(dtype) for dtype in PROBED]
                same = (form for form, other in candidates.items() if all(_agree(run, other, one) for one in probes))
                return next(same, None)
        except Exception:  # of a module of another kind, whatever it says
            pass
    return None


def _agree(run: Function, other: Function, numbers: Tensor) -> bool:
    """Tell whether two functions of ``numbers`` (N, D) have the same values and gradients within rounding."""
    expected, found = _value_and_gradient(run, numbers), _value_and_gradient(other, numbers)
    return all(
        one.dtype == other.dtype and one.shape == other.shape and bool(((one - other).abs() <= rounding).all())
        for one, other in zip(expected, found, strict=True)
        for rounding in [ROUNDINGS * torch.finfo(numbers.dtype).eps * (1 + one.abs().amax(-1, keepdim=True))]
    )


def _value_and_gradient(function: Function, numbers: Tensor) -> tuple[Tensor, Tensor]:
    hidden = numbers.clone().requires_grad_()
    value = function(hidden)
    (gradient,) = torch.autograd.grad(value, hidden, numbers.flip(0).to(value.dtype))
    return value.detach(), gradient


class _Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _num_operators(run: Function, numbers: Tensor) -> int:
    operators = _Operators()
    with operators:
        run(numbers)
    return operators.count
