"""Layers that the model calls one by one, and that recompute together.

NOTE [ one checkpoint for several calls ]
1. torch's checkpoint takes one function. Here it is given one that does nothing in its first run, and the hooks that it
   puts around it, which keep a place in line instead of a tensor, are put around every layer of the span in turn. In
   the backward the function runs again: now all the layers, each on what the one before gave.
2. So every layer runs when the model calls it, and returns a tensor of plain training's own graph. Whoever reads it
   (hidden states in a loss, the features of a tower) has the right values and gradients, and layers may be left out.
3. The second run hands each layer what the one before returned. Only a call that is given that very tensor, unchanged,
   and that comes later in the span joins the calls before it; any other one begins a span of its own.
4. Where the model draws random numbers between two layers, the second run begins the later one where it began.
5. Autograd alone keeps a span alive. Known limit: a layer that is given what an earlier one of its span returned,
   besides the state, makes a cycle with the graph, which a backward opens and nothing else does.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import get_device_states, set_device_states

from memsave_recipes.activations.recompute import recompute

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass
class JointLayers:
    """The layers of one span. ``last`` is the span that the next call may join."""

    modules: list[nn.Module]
    last: "weakref.ref[_Calls] | None" = None

    def run(self, position: int, call: Callable[..., Any], *state: Any) -> Any:
        """The call of the layer at ``position``, by the NOTE."""
        if len(state) != 1 or not isinstance(state[0], Tensor):
            return recompute(call, *state, modules=[self.modules[position]])
        calls = self.last() if self.last else None
        hooks = calls.hooks_for(position, *state) if calls else None
        if calls is None or hooks is None:
            calls = _Calls(len(self.modules))
            recompute(calls, *state, modules=self.modules)
            hooks = calls.let_go_of_hooks()
        self.last = weakref.ref(calls)
        return calls.run(hooks, position, call, *state)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: its calls are its own."""
        return {**self.__dict__, "last": None}


@dataclass(eq=False)
class _Calls:
    """The calls of a span so far, in order."""

    num_layers: int
    calls: list[tuple[Callable[..., Any], "_RandomState | None"]] = field(default_factory=list)
    position: int = -1  # of the last one
    hooks: tuple[Any, ...] = ()  # of the checkpoint, by weak references once there is a call
    returned: "weakref.ref[Tensor] | None" = None
    version: int = 0  # of what was returned
    random_state: "_RandomState | None" = None  # after the last one, if another one may follow

    def __call__(self, *state: Any) -> None:
        """What the checkpoint runs: nothing the first time, then all calls."""
        if not self.calls:
            self.hooks = _top_saved_tensors_default_hooks(True) or ()
            return
        for call, random_state in self.calls:
            if random_state is not None:
                random_state.restore()
            state = (call(*state),)

    def let_go_of_hooks(self) -> Hooks:
        """They hold the checkpoint, which holds this object."""
        pack, unpack = self.hooks
        self.hooks = (weakref.ref(pack), weakref.ref(unpack))
        return pack, unpack

    def hooks_for(self, position: int, state: Tensor) -> Hooks | None:
        """Of the checkpoint, if a call of the layer at ``position`` with ``state`` can join: rule 3 of the NOTE."""
        pack, unpack = (hook() for hook in self.hooks)
        follows = position > self.position and self.returned is not None and self.returned() is state
        return (pack, unpack) if follows and state._version == self.version and pack and unpack else None

    def run(self, hooks: Hooks, position: int, call: Callable[..., Any], state: Tensor) -> Any:
        """Run the layer at ``position``, and note what a second run has to know."""
        began = _RandomState.now(state)
        moved = self.random_state is not None and not began.equals(self.random_state)
        self.calls.append((call, began if moved else None))
        with saved_tensors_hooks(*hooks):
            returned = call(state)
        self.position = position
        self.random_state = _RandomState.now(state) if position + 1 < self.num_layers else None
        if isinstance(returned, Tensor):
            self.returned, self.version = weakref.ref(returned), returned._version
        else:
            self.returned = None
        return returned


@dataclass(frozen=True)
class _RandomState:
    """Of the generators that a layer may draw from: the CPU's, and those of its state's devices."""

    device_type: str
    on_cpu: Tensor
    devices: list[int]
    on_devices: list[Tensor]

    @classmethod
    def now(cls, state: Tensor) -> "_RandomState":
        return cls(state.device.type, torch.get_rng_state(), *get_device_states(state))

    def restore(self) -> None:
        torch.set_rng_state(self.on_cpu)
        set_device_states(self.devices, self.on_devices, device_type=self.device_type)

    def equals(self, other: "_RandomState") -> bool:
        """No observer is asked: these are no tensors of the model, nor fake ones where it is made of those."""
        with _disable_current_modes():
            ours, theirs = [self.on_cpu, *self.on_devices], [other.on_cpu, *other.on_devices]
            return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
