"""An optimizer that steps on the host: gradients leave the device in the backward, and new weights come back.

So the device holds weights and activations, and neither gradients nor optimizer state. That is ZeRO-Offload (Ren et al.
2021, https://arxiv.org/abs/2101.06840). torchao's ``CPUOffloadOptimizer`` neither adds gradients up on the host nor
clips them.

NOTE [ steps on the host ]
1. The optimizer steps a *master* of every parameter that trains: a copy on the host, in float32 unless it rounds
   stochastically. Where the weights are float32, too, both have the same bits.
2. A gradient is copied as soon as autograd has made it, and freed when the copy is done. The first one of a step goes
   to its place on the host. A thread adds those of later micro-batches to it, in the dtype of the master: in float32
   these are the sums that the device would make.
3. All gradients are on the host before the first parameter is stepped, so clipping and the check for NaN are those of
   any run. With ``--optimizer_in_backward``, which does without both, the thread steps each master as soon as its
   gradient is whole. The weights follow after the backward, which may read them until then.
4. The masters are stepped in pieces (``pieces_of``). While one is stepped, the one before travels to the device.
5. Under DDP, and where gradients are added up in a fixed order, they stay on the device until the last backward ends.
6. A checkpoint holds the masters where they have more bits than the weights.
7. A weight that waits on the host itself (``--stream_weights``) is its own master if the dtypes are the same. It is
   stepped when no copy reads it. DDP passes over it: the ranks average each of its gradients before it leaves.
8. Of weights in shards each rank steps its parts: a master is a ``DTensor`` with its part on the host, so optimizers
   and checkpoints see shards. The norms of the parts are summed on the device, in one message. Torch's
   ``CPUOffloadPolicy`` serves where all weights may wait on the host as well, and neither clips without a process
   group of CPUs nor adds gradients of bfloat16 up in float32.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node, get_gradient_edge
from torch.linalg import vector_norm
from torch.optim import Optimizer

from memsave_recipes.activations.offload import Copies, SideStream
from memsave_recipes.activations.streaming import WeightStream
from memsave_recipes.plans.chain import allocated_bytes
from memsave_recipes.sharding.tensors import is_sharded, local, norms_over_ranks, with_part
from memsave_recipes.step.host_state import ALIGNMENT, PinnedMemory, may_leave, pieces_of, refuse_scheduled

LEAVING_BYTES = 2**26
"""Of gradients whose copies are not done, at most, when the backward goes on."""
STAGED_BYTES = 2**27
"""Of pinned memory for copies that are read, or cast, by the host; more if a single one is larger."""
MASTER = "master"
"""The key of a master in the saved state of its parameter."""


class HostMasters:
    """The masters of parameters on a device, and their gradients on the host: NOTE [ steps on the host ].

    Args:
        parameters: that train.
        dtype: of the masters; ``None``: that of each parameter.
        up, down: copies in both directions.
        waiting: those of the parameters that wait on the host themselves.

    Attributes:
        of: the master of each parameter.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        dtype: torch.dtype | None,
        up: Copies,
        down: Copies,
        waiting: Iterable[nn.Parameter] = (),
    ) -> None:
        self._up, self._down = up, down
        self._waiting = set(waiting)
        memory = PinnedMemory(down.empty_on_host)

        def empty_like(weight: nn.Parameter) -> Tensor:
            return with_part(memory.empty_like(local(weight.detach()), dtype), weight)

        def master(weight: nn.Parameter) -> nn.Parameter:
            is_one = weight in self._waiting and weight.dtype == (dtype or weight.dtype)
            return weight if is_one else nn.Parameter(empty_like(weight))

        self.of = {weight: master(weight) for weight in parameters}
        self._sums = {one: empty_like(one) for one in self.of}
        self._weights: dict[Tensor, nn.Parameter] = {master: one for one, master in self.of.items()}
        self._stream: WeightStream | None = None
        self._are_current = False
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._last: Any = None
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._step_one: Callable[[Tensor], Any] | None = None
        self._stepping: dict[Tensor, Future[Any]] = {}
        self._nodes: list[Node] = []
        self._ring = _Ring(ring_bytes(local(one).nbytes for one in self.of), down.empty_on_host)

    def leave_in_backward(self) -> None:
        """Let every gradient leave the device as soon as it is there."""
        for weight in self.of:
            if weight not in self._waiting:
                weight.register_post_accumulate_grad_hook(_weakly(self._leave))

    def leave_stream(self, stream: WeightStream) -> None:
        """Take the gradients of weights that ``stream`` brings to the device."""
        self._stream, stream.leave = stream, lambda weight, gradient: self.take_gradient(weight, _averaged(gradient))

    def step_in_backward(self, step: Callable[[Tensor], Any]) -> None:
        """Let the thread ``step`` each master as soon as its gradient is on the host, one micro-batch a step."""
        self._step_one = step
        for weight in self._waiting.intersection(self.of):
            node = get_gradient_edge(weight).node  # runs once, after all uses of the weight in a backward
            node.register_hook(partial(_weakly(self._step_soon), weight))
            self._nodes.append(node)

    def _step_soon(self, weight: nn.Parameter, *_: Any) -> None:
        master = self.of[weight]
        if self._step_one is not None and master.grad is self._sums[weight]:
            self._stepping[master] = self._thread.submit(_step_after, self._last, self._step_one, master)

    def stepped(self) -> Iterator[Tensor]:
        """Yield the masters that the backward lets step, each when that is done."""
        stepping, self._stepping = self._stepping, {}
        for master, done in stepping.items():
            done.result()
            yield master

    def is_wide(self, master: Tensor) -> bool:
        """Return whether a master has more bits than its weight."""
        return master.dtype != self._weights[master].dtype

    @torch.no_grad()
    def take(self, saved: Mapping[Tensor, Tensor]) -> None:
        """Give every master its bits of those ``saved``, else those of its weight."""
        for master, weight in self._weights.items():
            local(master).copy_(local(saved.get(master, weight)))
        self._are_current = True

    @torch.no_grad()
    def collect(self) -> None:
        """Wait until all gradients of the step are on the host, unless the thread does."""
        for weight in self.of:
            if weight not in self._waiting and weight.grad is not None:
                self._leave(weight)
        self._free_leaving(0)
        if self._stream is not None:
            self._stream.settle()
        if self._step_one is None:
            if self._last is not None:
                self._last.synchronize()
            self._ring.drain()

    @torch.no_grad()
    def clip(self, max_norm: float, unscale: Callable[[], Any] | None = None) -> Tensor:
        """Clip the gradients of the step by the norm of all of them, over all ranks; return that, on the host.

        Args:
            unscale: divides them by the scale of the loss, if there is one.
        """
        self.collect()
        if unscale is not None:
            unscale()
        stepped = {master: weight for master, weight in self._weights.items() if master.grad is not None}
        norms = torch.stack([vector_norm(local(self._sums[weight])) for weight in stepped.values()])
        norm: Tensor = vector_norm(norms_over_ranks(norms, next(iter(stepped.values()))))
        nn.utils.clip_grads_with_norm_(stepped, max_norm, norm)
        return norm

    def _leave(self, weight: nn.Parameter) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None, "called where there is one"
        self.take_gradient(weight, gradient)
        self._step_soon(weight)

    @torch.no_grad()
    def take_gradient(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Begin to copy a gradient of ``weight`` to the host, to be added to those of the step."""
        if not self._are_current:
            self.take({})
        master, total, gradient = self.of[weight], local(self._sums[weight]), local(gradient)
        if gradient.stride() != total.stride():  # copied in the layout of its memory alone
            gradient = torch.empty_strided(
                total.size(), total.stride(), dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        if master.grad is None and gradient.dtype == total.dtype:
            self._last = self._down.start([(total, gradient)])
        else:
            staged = self._ring.take(gradient)
            self._last = self._down.start([(staged, gradient)])
            added = self._thread.submit(_add, total, staged, after=self._last, is_first=master.grad is None)
            self._ring.give_back(added.result)
        master.grad = self._sums[weight]
        self._leaving.append((self._last, gradient))
        self._free_leaving(LEAVING_BYTES)

    def _free_leaving(self, num_bytes: int) -> None:
        """Keep so many bytes of gradients; the device waits until the others are copied, and frees them."""
        while allocated_bytes((gradient.nbytes for _, gradient in self._leaving), on_cpu=False) > num_bytes:
            event, _ = self._leaving[0]
            self._down.wait(event)
            self._leaving.popleft()

    def send(self, masters: list[Tensor]) -> None:
        """Begin to copy stepped ``masters`` to the device, in the dtype of the weights."""
        for master in masters:
            weight, source = local(self._weights[master].detach()), local(master.detach())
            if self._weights[master] in self._waiting:
                weight.copy_(source)
            elif weight.dtype == source.dtype:
                self._last = self._up.start([(weight, source)])
            else:
                staged = self._ring.take(weight).copy_(source)
                self._last = self._up.start([(weight, staged)])
                self._ring.give_back(self._last.synchronize)

    def arrive(self) -> None:
        """Let the device wait for the weights that were sent."""
        if self._last is not None:
            self._up.wait(self._last)


def _averaged(gradient: Tensor) -> Tensor:
    """The mean over the ranks, as DDP makes it of the gradients of weights on the device."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return gradient
    mean = gradient * (1 / num_ranks)
    dist.all_reduce(mean)
    return mean


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method for as long as its object is there: a cycle through a hook of a parameter is never freed."""
    of_object = WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := of_object()) is not None:
            bound(*args)

    return call


@torch.no_grad()
def _step_after(copied: Any, step: Callable[[Tensor], Any], master: Tensor) -> None:
    copied.synchronize()
    step(master)


def ring_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of pinned memory for copies of parameters of these sizes, which the host reads or casts."""
    return max(STAGED_BYTES, 1 << (max(sizes, default=0) + ALIGNMENT).bit_length())


def _add(total: Tensor, gradient: Tensor, *, after: Any, is_first: bool) -> None:
    after.synchronize()
    if is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


class _Ring:
    """Pinned memory that is used again in the order in which it was taken."""

    def __init__(self, num_bytes: int, empty_on_host: Callable[[int], Tensor]) -> None:
        self._num_bytes, self._empty_on_host = num_bytes, empty_on_host
        self._memory: Tensor | None = None
        self._end = 0
        self._taken = range(0)
        self._busy: deque[tuple[range, Callable[[], Any]]] = deque()

    def take(self, tensor: Tensor) -> Tensor:
        """Return memory for a dense ``tensor``, with its strides, as soon as it is free."""
        if self._memory is None:
            self._memory = self._empty_on_host(self._num_bytes)
        begin = self._end if self._end + tensor.nbytes <= self._num_bytes else 0
        self._taken = range(begin, begin + tensor.nbytes)
        self._end = -(-self._taken.stop // ALIGNMENT) * ALIGNMENT
        while any(_overlap(taken, self._taken) for taken, _ in self._busy):
            self._wait_for_one()
        flat = self._memory[begin : self._taken.stop].view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride())

    def give_back(self, wait: Callable[[], Any]) -> None:
        """Let the memory that was taken last be used again after ``wait``."""
        self._busy.append((self._taken, wait))

    def drain(self) -> None:
        """Wait until all memory is free."""
        while self._busy:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        _, wait = self._busy.popleft()
        wait()


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


class _OptimizerOfMasters(Optimizer):
    """What ``step_masters`` puts before the methods of an optimizer."""

    masters: HostMasters
    takes_found_inf = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every master that has a gradient, and send it to the device; return the loss of ``closure``, if any.

        The gradients are used up: trainers clear those of their model.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.masters.collect()
        for piece in self._stepped_pieces():
            self.masters.send(piece)
        self.masters.arrive()
        self.zero_grad()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # so torch calls hooks for each piece, not around the thread's

    def _stepped_pieces(self) -> Iterator[list[Tensor]]:
        """Step what the backward has not; yield all that is stepped, piece by piece."""
        yield from ([master] for master in self.masters.stepped())
        for group in self.param_groups:
            for piece in pieces_of(master for master in group["params"] if master.grad is not None):
                self._step_piece(group, piece)
                yield piece

    def _step_piece(self, group: dict[str, Any], piece: list[Tensor]) -> None:
        groups = self.param_groups
        self.param_groups = [{**group, "params": piece}]
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
        wide = {number: {MASTER: one} for number, one in enumerate(self._stepped) if self.masters.is_wide(one)}
        state = {number: {**entry, **wide.get(number, {})} for number, entry in saved["state"].items()}
        return {**saved, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, also of an optimizer on the device, once the weights have been loaded."""
        state = {number: dict(entry) for number, entry in state_dict["state"].items()}
        saved = {number: entry.pop(MASTER) for number, entry in state.items() if MASTER in entry}
        super().load_state_dict({**state_dict, "state": state})
        if state:
            self.masters.take({one: saved[number] for number, one in enumerate(self._stepped) if number in saved})

    @property
    def _stepped(self) -> list[nn.Parameter]:
        return [master for group in self.param_groups for master in group["params"]]


def step_masters(
    optimizer: Optimizer,
    masters: HostMasters,
    *,
    leave_in_backward: bool = True,
    in_backward: bool = False,
    stream: WeightStream | None = None,
) -> None:
    """Let ``optimizer``, which steps ``masters``, take their gradients from the device and send the weights there.

    Args:
        leave_in_backward: let a gradient leave as soon as it is there: not where several ranks, or an order of their
            own, make the sum.
        in_backward: step each master beside the rest of the backward, which is the only one of a step.
        stream: of weights that wait on the host.
    """
    kind, stepping = type(optimizer), cast(_OptimizerOfMasters, optimizer)
    optimizer.__class__ = type(kind.__name__, (_OptimizerOfMasters, kind), {"masters": masters})
    if in_backward:
        numbers = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
        masters.step_in_backward(lambda master: stepping._step_in_backward(numbers[master], master))
    if stream is not None:
        masters.leave_stream(stream)
    if leave_in_backward:
        masters.leave_in_backward()
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # nothing on the device says found_inf


def step_on_host(model: nn.Module, optimizer: Optimizer) -> HostMasters | None:
    """Let ``optimizer`` step float32 copies of the parameters of ``model`` on the host, where their gradients go.

    Clip by ``clip(max_norm)`` of what this returns: the parameters of the model have no gradients.

    Args:
        model: on its device.
        optimizer: torch's own, before its first step, and before a schedule or another wrapper takes it.

    Returns:
        The copies; ``None``, and a warning, on a CPU, where all stays.

    Raises:
        InputError: a schedule has taken its ``step`` already.
    """
    groups = optimizer.param_groups
    trained = {one for group in groups for one in group["params"] if one.requires_grad}
    device = local(next(iter(trained))).device
    if not may_leave(device):
        return None
    refuse_scheduled(optimizer)
    masters = masters_on_host([one for one in model.parameters() if one in trained], device, torch.float32)
    for group in groups:
        group["params"] = [masters.of[one] for one in group["params"] if one in trained]
    reduces_first = dist.is_initialized() and dist.get_world_size() > 1 and not is_sharded(model)
    step_masters(optimizer, masters, leave_in_backward=not reduces_first)
    return masters


def scale_on_host(scaler: GradScaler | None) -> None:
    """Let the ``scaler`` of the loss keep its numbers on the host, where gradients are unscaled: before its first use.

    It would bring them there by copies that it does not wait for.
    """
    if scaler is not None:
        scaler.scale(torch.zeros(()))


def masters_on_host(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    dtype: torch.dtype | None,
    waiting: Iterable[nn.Parameter] = (),
) -> HostMasters:
    """Make masters of ``parameters`` of an accelerator, as ``HostMasters`` does."""
    return HostMasters(parameters, dtype, SideStream(device), SideStream(device), waiting)


def masters_of(optimizer: Optimizer | None) -> HostMasters | None:
    """Return the masters that ``optimizer`` steps, if any; Accelerate may have wrapped it."""
    masters: HostMasters | None = getattr(getattr(optimizer, "optimizer", optimizer), "masters", None)
    return masters
