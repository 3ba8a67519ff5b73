"""An optimizer that steps on the host: gradients leave the device in the backward, and new weights come back.

So the device holds weights and activations, and neither gradients nor optimizer state. That is ZeRO-Offload (Ren et al.
2021, https://arxiv.org/abs/2101.06840). torchao's ``CPUOffloadOptimizer`` neither adds gradients up on the host nor
clips them.

Notes: ``docs/design/host.md``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.optim import Optimizer

from memsave_recipes.core.activations.offload import Copies, SideStream
from memsave_recipes.core.activations.streaming import WeightStream
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.masters import (
    Masters,
    OptimizerOfMasters,
    attach_masters,
    identity_of,
    masters_in,
    weakly,
)
from memsave_recipes.core.host.state import ALIGNMENT, PinnedMemory, first_device, may_leave, pieces_of, refuse_unfit
from memsave_recipes.core.plans.chain import CUDA, allocated_bytes
from memsave_recipes.core.sharding.tensors import is_sharded, local, norms_over_ranks, with_part

LEAVING_BYTES = 2**26
"""Of gradients whose copies are not done, at most, when the backward goes on."""
STAGED_BYTES = 2**27
"""Of pinned memory for copies that are read, or cast, by the host; more if a single one is larger."""
NUM_KEYS, KEY = 61, 6364136223846793005
"""Of a digest: a prime, so that no row of a weight has this length, and the multiplier of Knuth's MMIX."""


class Away(Tensor):
    """Stands in ``weight.grad`` for a gradient on the host: it has no memory, and takes what autograd adds to it."""

    is_zero = False
    added: Tensor | None = None

    @staticmethod
    def __new__(cls, part: Tensor) -> "Away":
        """Stand for the gradient of ``part``."""
        make: Callable[..., Away] = Tensor._make_wrapper_subclass
        return make(cls, part.size(), part.stride(), dtype=part.dtype, device=part.device, storage_size=0)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Take zeros, or what is added; refuse all else, such as clipping."""
        if function is torch.ops.aten.zero_.default:
            args[0].is_zero, args[0].added = True, None
        elif function is torch.ops.aten.add_.Tensor and isinstance(args[0], Away) and not kwargs:
            args[0].added = args[1] if args[0].added is None else args[0].added + args[1]
        else:
            raise InputError(
                f"step_on_host: {function} reads parameter.grad, but the gradients are on the host: clip them by "
                "clip(max_norm) of what step_on_host returns"
            )
        return args[0]


class HostMasters(Masters):
    """The masters of parameters on a device, and their gradients on the host: NOTE [ steps on the host ].

    Args:
        parameters: that train, or may later.
        dtype: of the masters, unless parameters have more bits; ``None``: that of each parameter.
        up, down: copies in both directions.
        waiting: those of the parameters that wait on the host themselves.

    Attributes:
        of: the master of each parameter.
        when_thawed: is called when there are new ones.
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
        self._memory = PinnedMemory(down.empty_on_host)
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._all: list[nn.Parameter] = []
        self._stream: WeightStream | None = None
        self._made: set[Tensor] = set()
        self._digests: dict[nn.Parameter, int] = {}
        self._sent: list[nn.Parameter] = []
        self._sent_digests: Callable[[], dict[nn.Parameter, int]] = dict
        self._taken: dict[nn.Parameter, tuple[Tensor, tuple[Any, ...]]] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._leaves_in_backward = False
        self._last: Any = None
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._stepping: dict[Tensor, Future[Any]] = {}
        self._checked: Future[None] = Future()
        self._nodes: list[Node] = []
        self._ring = _Ring(0, down.empty_on_host)
        super().__init__(parameters, dtype)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make masters of more parameters; of those that are frozen when they have a gradient."""
        self._all = list(dict.fromkeys([*self._all, *(parameters := list(parameters))]))
        weights = [one for one in parameters if one.requires_grad]

        def empty_like(weight: nn.Parameter) -> Tensor:
            return with_part(self._memory.empty_like(local(weight.detach()), self.dtype_for(weight)), weight)

        def master(weight: nn.Parameter) -> nn.Parameter:
            is_one = weight in self._waiting and weight.dtype == self.dtype_for(weight)
            return weight if is_one else nn.Parameter(empty_like(weight))

        self._settle()
        self.of |= {weight: master(weight) for weight in weights}
        self._sums |= {weight: empty_like(weight) for weight in weights}
        self._weights = {self.of[one]: one for one in self._all if one in self.of}
        words = torch.empty(len(self.of), dtype=torch.int64, device="meta")
        self._words_now, self._words_sent = (self._memory.empty_like(words) for _ in range(2))
        self._ring = _Ring(ring_bytes(local(one).nbytes for one in self.of), self._down.empty_on_host)
        if self._leaves_in_backward:
            self._hook(weights)

    def leave_in_backward(self) -> None:
        """Let every gradient leave the device as soon as it is there."""
        self._leaves_in_backward = True
        self._hook(self.of)

    def _hook(self, weights: Iterable[nn.Parameter]) -> None:
        for weight in weights:
            if weight not in self._waiting:
                weight.register_post_accumulate_grad_hook(weakly(self._leave))

    def leave_stream(self, stream: WeightStream) -> None:
        """Take the gradients of weights that ``stream`` brings to the device."""
        self._stream, stream.leave = stream, lambda weight, gradient: self.take_gradient(weight, _averaged(gradient))

    def step_in_backward(self, step: Callable[[Tensor], Any]) -> None:
        """Let the thread ``step`` each master as soon as its gradient is on the host, one micro-batch a step."""
        self._step_one = step
        for weight in self._waiting.intersection(self.of):
            node = get_gradient_edge(weight).node  # runs once, after all uses of the weight in a backward
            node.register_hook(partial(weakly(self._step_soon), weight))
            self._nodes.append(node)

    def _step_soon(self, weight: nn.Parameter, *_: Any) -> None:
        master = self.of[weight]
        if self._step_one is not None and master.grad is self._sums[weight]:
            self._stepping[master] = self._thread.submit(_step_after, self._last, self._step_one, master)

    def pieces(self, masters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return those of a group in pieces: while one is stepped, the one before travels."""
        return pieces_of(masters)

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group's settings for a step on the host."""
        on_host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()}
        return {**on_host, "capturable": False} if "capturable" in group else on_host  # by a graph of the device

    def stepped(self) -> Iterator[Tensor]:
        """Yield the masters that the backward lets step, each when that is done."""
        stepping, self._stepping = self._stepping, {}
        if stepping:
            self._checked.result()
        for master, done in stepping.items():
            done.result()
            yield master

    def is_saved(self, master: Tensor) -> bool:
        """Return whether a master has bits, and more of them than its weight."""
        return master in self._made and master.dtype != self._weights[master].dtype

    @torch.no_grad()
    def load(self, saved: Mapping[Tensor, Tensor]) -> None:
        """Give masters the bits of those ``saved``; the next step compares all of them with their weights."""
        super().load(saved)
        self._made = {master for master in saved if master in self._weights}

    @torch.no_grad()
    def collect(self) -> None:
        """Wait until all gradients of the step are on the host, and masters are those of the weights.

        Where the thread steps, it waits.
        """
        if thawed := [weight for weight in self._all if weight not in self.of and weight.grad is not None]:
            self.add(thawed)
            self.when_thawed()
        for weight in self.of:
            if weight not in self._waiting:
                self._leave(weight)
        self._free_leaving(0)
        if self._stream is not None:
            self._stream.settle()
        if self._step_one is None and (stepped := [one for one, master in self.of.items() if master.grad is not None]):
            digests = self._copied_digests(stepped, self._words_now)
            self._check(stepped, digests, self._last)
            self._ring.drain()

    @torch.no_grad()
    def _check(self, weights: list[nn.Parameter], digests: Callable[[], dict[nn.Parameter, int]], copied: Any) -> None:
        """Renew the masters of those that have changed, by their digests of now."""
        copied.synchronize()
        now, known = digests(), self._digests | self._sent_digests()
        for weight in weights:
            self.renew(weight, is_known=known.get(weight) == now.get(weight))
        self._digests, self._sent_digests = known | now, dict

    def _settle(self) -> None:
        """Wait until no copy is under way."""
        if self._last is not None:
            self._last.synchronize()
        self._ring.drain()

    def _copied_digests(self, weights: list[nn.Parameter], host: Tensor) -> Callable[[], dict[nn.Parameter, int]]:
        """Begin to copy the digests of those on the device to ``host``; return what reads them when that is done."""
        there = [weight for weight in weights if weight not in self._waiting and local(weight).numel()]
        digests = host = host[: len(there)]
        if there:
            keys = torch.full((NUM_KEYS,), KEY, device=local(there[0]).device).cumprod(0)
            digests = torch.stack([_digest(local(weight), keys) for weight in there])
        self._last = self._down.start([(host, digests)])

        def read() -> dict[nn.Parameter, int]:
            return dict(zip(there, host[: len(digests)].tolist(), strict=True))  # so that digests are kept until then

        return read

    def renew(self, weight: nn.Parameter, *, is_known: bool = True) -> None:
        """Do as ``Masters``, and note that the master has been made."""
        super().renew(weight, is_known=is_known)
        self._made.add(self.of[weight])

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
        if not stepped:
            return torch.zeros(())
        norms = torch.stack([vector_norm(local(self._sums[weight])) for weight in stepped.values()])
        norm: Tensor = vector_norm(norms_over_ranks(norms, next(iter(stepped.values()))))
        nn.utils.clip_grads_with_norm_(stepped, max_norm, norm)
        return norm

    @torch.no_grad()
    def _leave(self, weight: nn.Parameter) -> None:
        """Take what has come to ``weight.grad``; forget what was taken before if that was cleared or replaced."""
        gradient, (taken, identity) = weight.grad, self._taken.pop(weight, (None, ()))
        if gradient is taken and (gradient is None or _identity(gradient) == identity):
            if gradient is not None:
                self._taken[weight] = gradient, identity
            return
        away = None if gradient is None or gradient is not taken else local(gradient)
        if isinstance(away, Away):
            if away.is_zero:
                self._settle()
                local(self._sums[weight]).zero_()
            gradient = away.added
        elif taken is not None:
            self._settle()
            self.of[weight].grad = None
        if gradient is not None:
            self.take_gradient(weight, gradient)
        if self._step_one is not None or self._leaves_in_backward:
            weight.grad = None
        if self._step_one is not None:
            self._step_soon(weight)
        elif self.of[weight].grad is not None:
            weight.grad = weight.grad if weight.grad is not None else _standing_for(weight)
            self._taken[weight] = weight.grad, _identity(weight.grad)

    @torch.no_grad()
    def clear(self) -> None:
        """Forget the gradients of the step."""
        if any(master.grad is not None for master in self._weights):
            self._settle()
        self._taken.clear()
        for weight, master in self.of.items():
            weight.grad = master.grad = None

    @torch.no_grad()
    def take_gradient(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Begin to copy a gradient of ``weight`` to the host, to be added to those of the step."""
        if gradient.is_sparse:
            raise InputError("step_on_host: a gradient is sparse: make the embedding with sparse=False")
        if self._step_one is not None and not self._stepping:
            digests = self._copied_digests(list(self.of), self._words_now)
            self._checked = self._thread.submit(self._check, list(self.of), digests, self._last)
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
        while allocated_bytes((gradient.nbytes for _, gradient in self._leaving), CUDA) > num_bytes:
            event, _ = self._leaving[0]
            self._down.wait(event)
            self._leaving.popleft()

    def send(self, masters: list[Tensor]) -> None:
        """Begin to copy stepped ``masters`` to the device, in the dtype of the weights."""
        for master in masters:
            weight, source = local(self._weights[master].detach()), local(master.detach())
            self._sent.append(self._weights[master])
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
        sent, self._sent = self._sent, []
        self._known |= {weight: _identity(weight) for weight in sent}
        self._sent_digests = self._copied_digests(sent, self._words_sent)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """What differs after a write to ``tensor``, unless its version does not count that, as of ``.data``."""
    part = local(tensor)
    return (part.is_zero, part.added is None) if isinstance(part, Away) else identity_of(tensor)


def _digest(part: Tensor, keys: Tensor) -> Tensor:
    """Return a sum of the bits of a dense tensor, each times the key of its place, without a copy of the tensor."""
    is_aligned = part.numel() * part.itemsize % 8 == 0 == part.storage_offset() * part.itemsize % 8
    flat = part.as_strided((part.numel(),), (1,))
    words = flat.view(torch.int64 if is_aligned else {2: torch.int16, 4: torch.int32}[part.itemsize])
    rest = len(words) % len(keys)
    sums = words[: len(words) - rest].view(-1, len(keys)).sum(0)
    sums[:rest] += words[len(words) - rest :]
    return (sums * keys).sum()


def _standing_for(weight: nn.Parameter) -> Tensor:
    """Return an ``Away`` for its gradient, as this rank's part where that is in shards."""
    away = Away(local(weight.detach()))
    return DTensor(away, weight._spec, requires_grad=False) if isinstance(weight, DTensor) else away


def _averaged(gradient: Tensor) -> Tensor:
    """The mean over the ranks, as DDP makes it of the gradients of weights on the device."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return gradient
    mean = gradient * (1 / num_ranks)
    dist.all_reduce(mean)
    return mean


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


def step_masters(
    optimizer: Optimizer,
    masters: HostMasters,
    *,
    leave_in_backward: bool = True,
    in_backward: bool = False,
    stream: WeightStream | None = None,
) -> None:
    """Do as ``attach_masters`` does, with gradients that leave the device and weights that are sent there.

    Args:
        leave_in_backward: let a gradient leave as soon as it is there: not where several ranks, or an order of their
            own, make the sum.
        stream: of weights that wait on the host.
    """
    attach_masters(optimizer, masters, in_backward=in_backward)
    if stream is not None:
        masters.leave_stream(stream)
    if leave_in_backward:
        masters.leave_in_backward()


def step_on_host(model: nn.Module, optimizer: Optimizer) -> HostMasters | None:
    """Let ``optimizer`` step float32 copies of the parameters of ``model`` on the host, where their gradients go.

    Clip by ``clip(max_norm)`` of what this returns: the parameters of the model have no gradients.

    Args:
        model: on its device.
        optimizer: torch's own, before a schedule or another wrapper takes it. What is frozen in it may train later.

    Returns:
        The copies; those of the first call if there is another; ``None``, and a warning, on a CPU, where all stays.

    Raises:
        InputError: ``keep_state_on_host`` or a schedule has taken it, it steps all parameters at once, or those of
            another model.
    """
    if (masters := masters_of(optimizer)) is not None:
        return masters
    refuse_unfit(optimizer)
    device, of_model = first_device(optimizer), list(model.parameters())
    stepped = {one: None for group in optimizer.param_groups for one in group["params"]}
    if any(one.requires_grad for one in stepped.keys() - set(of_model)):
        raise InputError(
            f"step_on_host: the optimizer steps parameters that {type(model).__name__} does not have: pass the model "
            "that it was made for"
        )
    if not may_leave(device):
        return None
    in_order = dict.fromkeys([*(one for one in of_model if one in stepped), *stepped])
    masters = masters_on_host(in_order, device, torch.float32)
    reduces_first = dist.is_initialized() and dist.get_world_size() > 1 and not is_sharded(model)
    step_masters(optimizer, masters, leave_in_backward=not reduces_first)
    cast(OptimizerOfMasters, optimizer).take_over()
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
    """Return the masters on the host that ``optimizer`` steps, if any; Accelerate may have wrapped it."""
    masters = masters_in(optimizer)
    return masters if isinstance(masters, HostMasters) else None
