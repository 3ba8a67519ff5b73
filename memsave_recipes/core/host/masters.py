"""Masters of weights, which an optimizer steps in their place: float32 copies of weights in fewer bits.

Notes: ``docs/design/host.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memsave_recipes.core.sharding.tensors import local

MASTERS = "masters"
"""The key of the masters in a saved state, by the numbers of their parameters; torch's optimizers pass over it."""


class Masters:
    """The masters of whole parameters, where these are: NOTE [ masters on the device ].

    Args:
        parameters: of which those that train get one.
        dtype: of the masters, unless parameters have more bits.

    Attributes:
        of: the master of each parameter; a parameter in ``dtype`` is its own.
        when_thawed: is called when there are new ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = torch.float32) -> None:
        self._dtype = dtype
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self.when_thawed: Callable[[], None] = lambda: None
        self._weights: dict[Tensor, nn.Parameter] = {}
        self._known: dict[nn.Parameter, tuple[Any, ...]] = {}
        self._step_one: Callable[[Tensor], Any] | None = None
        self.add(parameters)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make masters of more parameters, whose gradients are added up in the dtype of the masters from now on."""
        for weight in parameters:
            if weight.requires_grad:
                dtype = self.dtype_for(weight)
                self.of[weight] = weight if weight.dtype == dtype else nn.Parameter(weight.detach().to(dtype))
                self._weights[self.of[weight]] = weight
                weight.grad_dtype = dtype

    def dtype_for(self, weight: Tensor) -> torch.dtype:
        """Return the dtype of the master of ``weight``."""
        return torch.promote_types(weight.dtype, self._dtype or weight.dtype)

    def step_in_backward(self, step: Callable[[Tensor], Any]) -> None:
        """Let the backward ``step`` each master as soon as the gradient of its weight is there."""
        self._step_one = step
        for weight in self.of:
            weight.register_post_accumulate_grad_hook(weakly(self._step_now))

    @torch.no_grad()
    def _step_now(self, weight: nn.Parameter) -> None:
        assert self._step_one is not None, "by its hook alone"
        master = self.of[weight]
        self._take_gradient(weight)
        weight.grad = None if master is not weight else weight.grad
        self._step_one(master)
        self.send([master])

    def stepped(self) -> Iterator[Tensor]:
        """Yield the masters that the backward has stepped and that are to be sent: none."""
        return iter(())

    def is_saved(self, master: Tensor) -> bool:
        """Return whether a master has more bits than its weight."""
        return master is not self._weights[master]

    @torch.no_grad()
    def load(self, saved: Mapping[Tensor, Tensor]) -> None:
        """Give masters the bits of those ``saved``; the next step compares all of them with their weights."""
        self._known.clear()
        for master in saved.keys() & self._weights.keys():
            local(master).copy_(local(saved[master]))

    def collect(self) -> None:
        """Give masters, which are those of the weights then, the gradients of these."""
        for weight in self.of:
            self._take_gradient(weight)

    def _take_gradient(self, weight: nn.Parameter) -> None:
        if weight.grad is not None:
            self.renew(weight)
        self.of[weight].grad = weight.grad

    def renew(self, weight: nn.Parameter, *, is_known: bool = True) -> None:
        """Give the master the bits of its weight, if that may have others than its own, rounded."""
        master, identity = local(self.of[weight]), identity_of(weight)
        if self.of[weight] is weight or (is_known and self._known.get(weight) == identity):
            return
        now = local(weight.detach()).to(master.device)
        if self.is_saved(self.of[weight]):
            torch.where(master.to(now.dtype) == now, master, now, out=master)
        else:
            master.copy_(now)
        self._known[weight] = identity

    def pieces(self, masters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return those of a group as they are stepped together: all at once."""
        return [found] if (found := list(masters)) else []

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group's settings for a step."""
        return group

    def send(self, masters: list[Tensor]) -> None:
        """Give the weights the bits of stepped ``masters``, rounded."""
        pairs = [(self._weights[master], master) for master in masters if self.is_saved(master)]
        if pairs:
            torch._foreach_copy_([weight.detach() for weight, _ in pairs], [master.detach() for _, master in pairs])
        self._known |= {weight: identity_of(weight) for weight, _ in pairs}

    def arrive(self) -> None:
        """Let the device wait for what was sent: it is there."""

    def clear(self) -> None:
        """Forget the gradients of the step."""
        for weight, master in self.of.items():
            weight.grad = master.grad = None


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what differs after a write to ``tensor``, unless its version does not count that, as of ``.data``."""
    part = local(tensor)
    return StorageWeakRef(part.untyped_storage()), tensor._version, part._version


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method for as long as its object is there: a cycle through a hook of a parameter is never freed."""
    of_object = WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := of_object()) is not None:
            bound(*args)

    return call


class OptimizerOfMasters(Optimizer):
    """What ``attach_masters`` puts before the methods of an optimizer."""

    masters: Masters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every master that has a gradient, and send it to its weight; return the loss of ``closure``, if any.

        The gradients are used up: trainers clear those of their model.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.masters.collect()
        for piece in self._stepped_pieces():
            self.masters.send(piece)
        self.masters.arrive()
        super().zero_grad()
        self.masters.clear()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # so torch calls hooks for each piece, not around the thread's

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of masters and weights."""
        self.masters.clear()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, of weights."""
        super().add_param_group(param_group)
        weights = self.param_groups[-1]["params"]
        if any(one in self.masters.of for one in weights):
            del self.param_groups[-1]
            raise ValueError("some parameters appear in more than one parameter group")
        self.masters.add(weights)
        self.take_over()

    def take_over(self) -> None:
        """Step masters in place of their weights, whose state they get."""
        saved = super().state_dict()
        for group in self.param_groups:
            group["params"] = [self.masters.of.get(one, one) for one in group["params"]]
        super().load_state_dict(saved)

    def _stepped_pieces(self) -> Iterator[list[Tensor]]:
        """Step what the backward has not; yield all that is stepped, piece by piece."""
        yield from ([master] for master in self.masters.stepped())
        for group in self.param_groups:
            for piece in self.masters.pieces(master for master in group["params"] if master.grad is not None):
                self._step_piece(group, piece)
                yield piece

    def _step_piece(self, group: dict[str, Any], piece: list[Tensor]) -> None:
        groups = self.param_groups
        self.param_groups = [{**self.masters.settings(group), "params": piece}]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_in_backward(self, number_of_group: int, master: Tensor) -> None:
        self._step_piece(self.param_groups[number_of_group], [master])
        master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the masters that have more bits than their weights."""
        saved = super().state_dict()
        wide = {number: one for number, one in enumerate(self._stepped) if self.masters.is_saved(one)}
        return {**saved, MASTERS: wide} if wide else saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, also of an optimizer without masters, before or after the weights."""
        state = {number: dict(entry) for number, entry in state_dict["state"].items()}
        saved = {number: entry.pop("master") for number, entry in state.items() if "master" in entry}  # by 0.3
        saved |= state_dict.get(MASTERS, {})
        super().load_state_dict({**state_dict, "state": state})
        self.masters.load({one: saved[number] for number, one in enumerate(self._stepped) if number in saved})

    @property
    def _stepped(self) -> list[nn.Parameter]:
        return [master for group in self.param_groups for master in group["params"]]


def attach_masters(optimizer: Optimizer, masters: Masters, *, in_backward: bool = False) -> None:
    """Let ``optimizer``, which steps ``masters``, take the gradients of their weights, and update these.

    Args:
        in_backward: step each master beside the rest of the backward, which is the only one of a step.
    """
    kind, stepping = type(optimizer), cast(OptimizerOfMasters, optimizer)
    optimizer.__class__ = type(kind.__name__, (OptimizerOfMasters, kind), {"masters": masters})
    if in_backward:
        numbers = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
        masters.step_in_backward(lambda master: stepping._step_in_backward(numbers[master], master))
    masters.when_thawed = weakly(stepping.take_over)
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # nothing there says found_inf


def masters_in(optimizer: Optimizer | None) -> Masters | None:
    """Return the masters that ``optimizer`` steps, if any; Accelerate may have wrapped it."""
    masters: Masters | None = getattr(getattr(optimizer, "optimizer", optimizer), "masters", None)
    return masters


def masters_beside_weights(optimizer: Optimizer | None) -> Masters | None:
    """Return those that are where their weights are, if any."""
    masters = masters_in(optimizer)
    return masters if type(masters) is Masters else None


def reduce_in_float32(model: nn.Module) -> None:
    """Let DDP average gradients of float32 whose weights have fewer bits: rule 3 of NOTE [ masters on the device ].

    For all ranks, with no gradients yet.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    left_out = model.parameters_to_ignore
    named = model.module.named_parameters()
    reduced = [one for name, one in named if one.requires_grad and name not in left_out]
    if all(one.grad_dtype == one.dtype for one in reduced):
        return
    cast(Any, model.reducer)._set_mixed_precision_param_dtype(torch.float32)
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    ends = [one.view_as(one) for one in reduced]
    torch.autograd.backward(ends, list(map(torch.zeros_like, ends)))
    for one in reduced:
        one.grad = None
