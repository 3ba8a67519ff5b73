"""Weights that are not there until each rank takes the rows that it is to have: from files, or by drawing them.

Notes: ``docs/design/models.md``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from memsave_recipes.core.text import read_json

ON_META = {"": "meta"}  # a ``device_map`` with which ``from_pretrained`` reads no weight
SPREAD = 0.02  # of the numbers of stand-ins, as most models of transformers begin
INITIALIZED = "_is_hf_initialized"  # by this attribute transformers leaves a tensor, or a module, as it is
Rows = Callable[[int, int], Tensor]
"""``rows(begin, end)`` of a tensor, on the host and in the dtype of its file, or in the one that it is drawn in."""


class WholeOnly(Exception):
    """The weights of a model cannot be taken in slices; the message says why."""


@dataclass(frozen=True, eq=False)
class Slices:
    """Where the weights of a model are.

    Args:
        unread: its parameters that are stand-ins, and what reads or draws rows of each.
        line: says so to people; ``None`` where nobody asked for slices.
    """

    unread: Mapping[nn.Parameter, Rows] = field(default_factory=dict)
    line: str | None = None


_OF_MODELS: WeakKeyDictionary[nn.Module, Slices] = WeakKeyDictionary()


def slices_of(model: nn.Module) -> Slices:
    """Return where the weights of ``model`` are that are not in it."""
    return _OF_MODELS.get(model, Slices())


def leave_in_files(load: Callable[..., PreTrainedModel], source: str, device: torch.device) -> PreTrainedModel:
    """Load a model with stand-ins on ``device``: NOTE [ stand-ins ].

    ``load`` takes a ``device_map``; ``source`` is a folder or a name on the Hub. Raises ``WholeOnly`` by rule 5.
    """
    from memsave_recipes.models.hub import folder_of  # needs datasets, which are of no use to a plan with adapters

    model = load(device_map=ON_META)
    stored = _stored(folder_of(source))
    rows = _rows_of(model, stored)
    _make_others(model, stored, rows)
    with_stand_ins(model, rows, device, f"weights: each rank reads its slices of {source}")
    for parameter in slices_of(model).unread:
        setattr(parameter, INITIALIZED, True)
    return model


@torch.no_grad()
def take_whole(model: nn.Module, names: Collection[str]) -> None:
    """Put whole weights in the place of stand-ins in modules of these ``names``."""
    slices = slices_of(model)
    here = {one for name in names for one in model.get_submodule(name).parameters() if one in slices.unread}
    if not here:
        return
    replace_parameters(model, {one: slices.unread[one](0, len(one)).to(one, copy=True) for one in here})
    _OF_MODELS[model] = replace(slices, unread={one: read for one, read in slices.unread.items() if one not in here})


def let_go_of_stand_ins(model: nn.Module) -> None:
    """Keep no stand-in any more, once each rank has its rows of all weights."""
    _OF_MODELS[model] = Slices(line=slices_of(model).line)


def made_whole(model: PreTrainedModel, why: str) -> PreTrainedModel:
    """Note that slices of ``model`` were asked for, and why all weights are there."""
    _OF_MODELS[model] = Slices(line=f"weights: every rank has all of them first, because {why}")
    return model


def with_stand_ins(
    model: PreTrainedModel, rows: Mapping[nn.Parameter, Rows], device: torch.device, line: str
) -> PreTrainedModel:
    """Put stand-ins in the place of the parameters that have ``rows``."""
    generator = torch.Generator().manual_seed(0)
    experts = [parameter for parameter in rows if parameter.ndim > 2]
    largest = max((parameter.shape[-2:].numel() for parameter in experts), default=0)
    matrix = _numbers(largest, generator).to(device, experts[0].dtype if experts else None)
    new = replace_parameters(model, {one: _stand_in(one, generator, device, matrix) for one in rows})
    _OF_MODELS[model] = Slices({new[old]: read for old, read in rows.items()}, line)
    return model


def replace_parameters(model: nn.Module, tensors: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, nn.Parameter]:
    """Put ``tensors`` in the places of parameters; return the new one for each."""
    new = {old: nn.Parameter(tensor, requires_grad=old.requires_grad) for old, tensor in tensors.items()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, new.get(parameter, parameter))
    return new


def new_weights(model: nn.Module) -> set[nn.Parameter] | None:
    """Return the parameters that the files did not hold, or in another shape; ``None`` for a model from scratch.

    transformers marks what it has read. Weights packed into integers have always been read.
    """
    parameters = set(model.parameters())
    new = {one for one in parameters if not getattr(one, INITIALIZED, False) and one.is_floating_point()}
    return None if new == parameters else new


def mark_as_read(model: nn.Module, by: nn.Module) -> None:
    """Mark the parameters of ``model``, which no file was read for, that were read for another one of its class."""
    new = new_weights(by)
    there = {name for name, one in by.named_parameters() if new is not None and one not in new}
    for name, parameter in model.named_parameters():
        setattr(parameter, INITIALIZED, name in there)


@dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file."""

    path: Path
    key: str
    shape: tuple[int, ...]

    def rows(self, begin: int, end: int) -> Tensor:
        """Return pages of the file, which are read when they are copied."""
        with safe_open(self.path, framework="pt") as file:
            rows: Tensor = file.get_slice(self.key)[begin:end]
        return rows

    def whole(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.key)
        return tensor


def _stored(folder: Path) -> dict[str, _Stored]:
    found = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for key in file.offset_keys():
                found[key] = _Stored(path, key, tuple(file.get_slice(key).get_shape()))
    return found


def _files(folder: Path) -> list[Path]:
    """List them in the order in which transformers looks for them."""
    one, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if one.is_file():
        return [one]
    if not index.is_file():
        raise WholeOnly(f"{folder} is no folder with {SAFE_WEIGHTS_NAME}")
    files = read_json(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(files))]


def _rows_of(model: PreTrainedModel, stored: dict[str, _Stored]) -> dict[nn.Parameter, Rows]:
    """Find what reads each parameter: rule 5."""
    if getattr(model, "_weight_conversions", None):
        raise WholeOnly(f"{type(model).__name__} has other names or shapes than its files")
    for pair in model.all_tied_weights_keys.items():
        if all(_find(name, model, stored) for name in pair):
            raise WholeOnly(f"{' and '.join(pair)} are one weight, and both in its files")
    rows: dict[nn.Parameter, Rows] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = _find(name, model, stored)
        if tensor is not None and tensor.shape == tuple(parameter.shape):
            rows[parameter] = tensor.rows
    return rows


def _find(name: str, model: PreTrainedModel, stored: dict[str, _Stored]) -> _Stored | None:
    """Find the tensor of that name; files of a model without its head have no prefix."""
    return stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))


def _stand_in(parameter: Tensor, generator: torch.Generator, device: torch.device, matrix: Tensor) -> Tensor:
    """Make a stand-in by rule 2, from ``matrix`` for experts; a vector has numbers about 1, as norms do."""
    if parameter.ndim > 2:
        size = parameter.shape[-2:]
        return matrix[: size.numel()].to(parameter.dtype).view(size).expand(parameter.shape)
    num_diagonals = sum(size - 1 for size in parameter.shape) + 1
    numbers = _numbers(num_diagonals, generator).add_(1.0 if parameter.ndim == 1 else 0.0)
    return numbers.to(device, parameter.dtype).as_strided(parameter.shape, (1,) * parameter.ndim)


def _numbers(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, generator=generator).mul_(SPREAD)


@torch.no_grad()
def _make_others(model: PreTrainedModel, stored: dict[str, _Stored], rows: Mapping[nn.Parameter, Rows]) -> None:
    """Make by rule 3 what has no ``rows``; what is marked as initialised is left alone."""
    empty = partial(torch.empty_like, device="cpu")
    replace_parameters(model, {one: empty(one) for one in model.parameters() if one not in rows})
    saved = model.state_dict().keys()
    made: dict[Tensor, Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer not in made:
            made[buffer] = _read(name, buffer, model, stored) if name in saved else empty(buffer)
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, made[buffer])
    for module in model.modules():
        vars(module).pop(INITIALIZED, None)
    model.initialize_weights()


def _read(name: str, buffer: Tensor, model: PreTrainedModel, stored: dict[str, _Stored]) -> Tensor:
    tensor = _find(name, model, stored)
    if tensor is None or tensor.shape != tuple(buffer.shape):
        raise WholeOnly(f"{name} is not in its files, or of another size there")
    value = tensor.whole().to(buffer.dtype, copy=True)
    setattr(value, INITIALIZED, True)
    return value
