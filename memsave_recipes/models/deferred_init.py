"""A model from scratch whose weights are not there until each rank draws the rows that it is to have.

Operations that initialise a weight are recorded, and done again when it is needed, as in torchdistX
(https://pytorch.org/torchdistx/latest/deferred_init.html): here with the bits of a model that was made at once.

NOTE [ deferred initialization ]
1. What ``torch.empty`` makes in two or more dimensions has no memory: it is a fake tensor, on the host for all who ask.
   What is then done to it in place is recorded. Where that draws numbers, so is the state of the generator, and they
   are drawn into memory that is given up at once, so that whatever comes later draws its own.
2. A rank takes rows of such a parameter by doing again, on memory for all of it, what was recorded. It so holds one
   whole parameter at a time, and draws the numbers of all.
3. Vectors are there, and so is what is made with numbers in it (zeros, ones) and buffers.
4. Whatever else is done with a tensor without memory ends the attempt, and the model is made whole: its numbers are
   looked at (torch 2.13 draws a truncated normal distribution until all fit), or go into another tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from memsave_recipes.models.slices import Rows, WholeOnly, replace_parameters, with_stand_ins

CPU, ATEN = torch.device("cpu"), torch.ops.aten
OVERWRITING = {ATEN.normal_, ATEN.uniform_, ATEN.zero_, ATEN.fill_}  # whatever was there before
View = tuple[torch.Size, tuple[int, ...], int]  # size, strides and offset of a tensor in its memory


def deferred_init(make: Callable[[], PreTrainedModel], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model from scratch in ``dtype`` with stand-ins on ``device``: NOTE [ deferred initialization ].

    Raises ``WholeOnly`` by rule 4; the generator may have advanced.
    """
    with _Recording() as recording:
        model = make()
    if any(isinstance(buffer, FakeTensor) for buffer in model.buffers()):
        raise WholeOnly("its initialisation leaves a buffer to be drawn")
    drawn = {weight: recording.rows_of(weight) for weight in model.parameters() if isinstance(weight, FakeTensor)}
    on_meta: dict[nn.Parameter, Tensor] = {
        weight: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for weight in drawn
    }
    replaced = replace_parameters(model, on_meta)
    model.to(dtype)  # type: ignore[arg-type]  # a decorator of transformers hides the type of its ``to``
    rows = {replaced[weight]: draw for weight, draw in drawn.items()}
    return with_stand_ins(model, rows, device, "weights: each rank initialises its part")


@dataclass(frozen=True, eq=False)
class _Written:
    """An operation in place on a tensor without memory; ``state`` is that of the generator where it draws numbers."""

    function: Any
    view: View
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    state: Tensor | None

    def onto(self, memory: Tensor, generator: torch.Generator) -> None:
        options = self.options
        if self.state is not None:
            generator.set_state(self.state)
            options = {**options, "generator": generator}
        self.function(memory.as_strided(*self.view), *self.arguments, **options)


@dataclass(frozen=True, eq=False)
class _Unmade:
    """The memory that a tensor does not have, and what was written into it, in order."""

    num_elements: int
    dtype: torch.dtype
    written: list[_Written] = field(default_factory=list)

    def write(self, one: _Written) -> None:
        """Record it, and draw its numbers in passing: rule 1 of NOTE [ deferred initialization ]."""
        if one.state is not None:
            one.onto(self.empty(), torch.default_generator)
        if one.function.overloadpacket in OVERWRITING and one.view[0].numel() == self.num_elements:
            self.written.clear()
        self.written.append(one)

    def empty(self) -> Tensor:
        return torch.empty(self.num_elements, dtype=self.dtype)

    def made(self) -> Tensor:
        """Do again what was recorded: rule 2."""
        memory, generator = self.empty(), torch.Generator()
        for one in self.written:
            one.onto(memory, generator)
        return memory


class _Recording(TorchDispatchMode):
    """Records, inside, by NOTE [ deferred initialization ]."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._fakes = FakeTensorMode()
        self._unmade: dict[torch.UntypedStorage, _Unmade] = {}

    def rows_of(self, weight: Tensor) -> Rows:
        """Return what draws rows of a tensor without memory; raise ``WholeOnly`` where nothing was written."""
        unmade, view = self._memory_of(weight), _view_of(weight)
        if not unmade.written:
            raise WholeOnly("its initialisation leaves a weight as it is")
        return lambda begin, end: unmade.made().as_strided(*view)[begin:end]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function is ATEN.empty.memory_format and len(arguments[0]) > 1 and options.get("device") in (None, CPU):
            with self._fakes:
                tensor: Tensor = function(*arguments, **options)
            self._unmade[tensor.untyped_storage()] = _Unmade(tensor.numel(), tensor.dtype)
            return tensor
        unmade = [one for one in tree_leaves((arguments, options)) if isinstance(one, FakeTensor)]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if not unmade or not (draws or function._schema.is_mutable or function is ATEN._local_scalar_dense.default):
            return function(*arguments, **options)
        if len(unmade) > 1 or not _is_in_place(function, arguments) or options.get("generator") is not None:
            raise WholeOnly(f"its initialisation calls {function} on a weight")
        state = torch.get_rng_state() if draws else None
        values, options = tree_map_only(Tensor, Tensor.clone, (arguments[1:], options))
        self._memory_of(arguments[0]).write(_Written(function, _view_of(arguments[0]), values, options, state))
        return arguments[0]

    def _memory_of(self, tensor: Tensor) -> _Unmade:
        unmade = self._unmade.get(tensor.untyped_storage())
        if unmade is None or unmade.dtype != tensor.dtype:
            raise WholeOnly("its initialisation computes with a weight")
        return unmade


def _is_in_place(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Tell whether it writes into its first argument, which has no memory, and leaves the shape of that alone."""
    is_named_so = function.overloadpacket.__name__.endswith("_") and torch.Tag.inplace_view not in function.tags
    return is_named_so and isinstance(arguments[0], FakeTensor)


def _view_of(tensor: Tensor) -> View:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())
