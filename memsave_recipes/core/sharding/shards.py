"""Cut a model up over the ranks, in place: ``shard(trained, model, plan, groups, device)``.

Notes: ``docs/design/sharding.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.sharding.groups import ShardGroups
from memsave_recipes.core.sharding.tensors import GATHERED_DTYPE, first_row, local
from memsave_recipes.core.sharding.units import check_parameters, units_of

REDUCES_ONCE = "reduces_once_a_step"
Rows = Callable[[int, int], Tensor]
"""``rows(begin, end)`` of a tensor that is not there yet."""


def shard(
    trained: nn.Module,
    model: nn.Module,
    plan: Plan,
    groups: ShardGroups,
    device: torch.device,
    flag: str = "full",
    unread: Mapping[nn.Parameter, Rows] | None = None,
    *,
    with_masters: bool = False,
) -> None:
    """Replace the parameters of ``trained`` by shards (``DTensor``) that are gathered unit by unit as it runs.

    Find heads, blocks and layers for adapters before: ``fully_shard`` gives modules other classes. Make the optimizer
    after.

    Args:
        trained: the root, as it is called in training.
        model: inside of it, with the blocks; the same one where it is trained by itself.
        plan: that will be applied; it joins blocks into units.
        flag: the value of ``--shard``, for errors.
        unread: the parameters, on ``device``, that stand for others: NOTE [ weights that are not there yet ].
        with_masters: keep shards in float32: rule 5 of NOTE [ as under DDP ].

    Raises:
        InputError: as ``units_of``, or a parameter cannot be cut up.
    """
    units = units_of(model, plan, flag)
    unread = unread or {}
    check_parameters(trained, flag, unread)
    policy = _policy_of_masters(trained, flag) if with_masters else MixedPrecisionPolicy()
    vars(model)[GATHERED_DTYPE] = policy.param_dtype
    device = torch.device("cpu") if device.type == "cpu" else device  # torch copies what is there to a "cpu:0"
    trained.to(device)
    absent = _on_meta(trained, unread)
    _send_from_rank_0([parameter.detach() for parameter in trained.parameters() if not parameter.is_meta])
    mesh = groups.mesh(device)
    for unit in units:
        modules: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
        _widen(unit.modules if with_masters else ())
        fully_shard(modules, mesh=mesh, reshard_after_forward=not unit.stays, mp_policy=policy)
        _read(unit.modules, absent, device)
    _widen((trained,) if with_masters else ())
    fully_shard(trained, mesh=mesh, mp_policy=policy)
    _read((trained,), absent, device)
    in_a_step = _InAStep(trained, list(trained.buffers()))
    trained.register_forward_pre_hook(in_a_step.before_forward)
    trained.register_forward_hook(_free_without_gradients)
    vars(trained)["no_sync"] = in_a_step.no_sync
    reduce_once_a_step(trained, False)


def _policy_of_masters(trained: nn.Module, flag: str) -> MixedPrecisionPolicy:
    """Return how float32 shards are gathered in the one dtype of the weights, and gradients reduced in float32."""
    dtypes = {parameter.dtype for parameter in trained.parameters()}
    if len(dtypes) > 1:
        raise InputError(
            f"shard {flag}: masters in shards are for weights of one dtype, and these have "
            f"{' and '.join(sorted(map(str, dtypes)))}: take float32 with mixed precision bf16"
        )
    return MixedPrecisionPolicy(dtypes.pop(), torch.float32, cast_forward_inputs=False)


def _widen(modules: Iterable[nn.Module]) -> None:
    """Make masters of the weights that train."""
    for module in modules:
        for weight in module.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor):
                weight.data = weight.data.float()


def reduce_once_a_step(trained: nn.Module, wanted: bool) -> None:
    """From now on gradients are reduced in the last backward of a step alone, or in every one: rule 4."""
    vars(trained)[REDUCES_ONCE] = wanted


@contextmanager
def callable_in_parts(trained: nn.Module) -> Iterator[None]:
    """Inside, modules of ``trained`` may be called without it, by all ranks alike and without gradients."""
    if isinstance(trained, FSDPModule):
        trained.unshard()
    try:
        yield
    finally:
        free_gathered(trained)


def free_gathered(trained: nn.Module) -> None:
    """Free every gathered weight: ``parameters()`` are shards again."""
    for unit in _units(trained):
        unit.reshard()


@contextmanager
def noting_gathered(trained: nn.Module, note: Callable[[list[Tensor]], object]) -> Iterator[None]:
    """Inside, ``note`` is given the whole weights of each unit when a forward has gathered them, and at the end."""
    units: list[Any] = _units(trained)

    def note_those_of(unit: nn.Module, *_: object) -> None:
        note([parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)])

    hooks = [unit.register_forward_pre_hook(note_those_of) for unit in units]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if units:
            note_those_of(trained)


def _units(trained: nn.Module) -> list[FSDPModule]:
    return [module for module in trained.modules() if isinstance(module, FSDPModule)]


def _free_without_gradients(trained: nn.Module, *_: object) -> None:
    """Rule 3."""
    if not torch.is_grad_enabled():
        free_gathered(trained)


@dataclass(frozen=True, eq=False)
class _Absent:
    """A parameter that is not there yet, by a module that has it."""

    module: nn.Module
    name: str
    rows: Rows

    @property
    def parameter(self) -> Any:
        """As it is in the module now: whole, then in shards."""
        return self.module.get_parameter(self.name)


def _on_meta(trained: nn.Module, unread: Mapping[nn.Parameter, Rows]) -> list[_Absent]:
    """Replace the parameters that are ``unread`` by others without memory; each of them once, also where it is tied."""
    bare: dict[nn.Parameter, nn.Parameter] = {}
    absent = []
    for module in trained.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in unread:
                continue
            if parameter not in bare:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                bare[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                absent.append(_Absent(module, name, unread[parameter]))
            setattr(module, name, bare[parameter])
    return absent


@torch.no_grad()
def _read(modules: Iterable[nn.Module], absent: list[_Absent], device: torch.device) -> None:
    """Give memory to this rank's parts of the ``absent`` parameters in ``modules`` that have none, and read them."""
    inside = {part for module in modules for part in module.modules()}
    here = [one for one in absent if one.module in inside and one.parameter.is_meta]
    for module in modules if here else ():
        # As ``to_empty``, by which torch gives memory to shards on the meta device; that one empties all others, too.
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for one in here:
        part, begin = local(one.parameter), first_row(one.parameter)
        if part.numel():
            part.copy_(one.rows(begin, begin + len(part)))


@torch.no_grad()
def _send_from_rank_0(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, 0)


@dataclass(eq=False)
class _InAStep:
    """Rules 2 and 4."""

    trained: Any
    buffers: list[Tensor]
    are_due: bool = True
    ends_step: bool = True

    def before_forward(self, *_: object) -> None:
        if self.are_due and self.buffers:
            self._send()
        self.are_due = self.ends_step and torch.is_grad_enabled()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a step goes on after the forward, and after its backward."""
        before = self.ends_step
        self._end_step(False)
        try:
            yield
        finally:
            self._end_step(before)

    def _end_step(self, ends_step: bool) -> None:
        self.ends_step = ends_step
        self.trained.set_requires_gradient_sync(ends_step or not vars(self.trained)[REDUCES_ONCE])

    @torch.no_grad()
    def _send(self) -> None:
        """As bytes, in one message: they are small, and of several dtypes."""
        parts = [buffer.reshape(-1).view(torch.uint8) for buffer in self.buffers]
        message = torch.cat(parts)
        dist.broadcast(message, 0)
        for buffer, part in zip(self.buffers, message.split([len(part) for part in parts]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # where its bytes are aligned
