"""In place of NCCL: gloo on the devices' memory. As NCCL it refuses tensors of the CPU; all is done on return."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = 2 << 32 | 28 << 16  # 2.28.0
FORWARDED = (
    "allgather",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


class Options:
    """``ProcessGroupNCCL.Options``: torch sets what it likes."""


class HostGroup(dist.ProcessGroup):
    """A process group with the constructor of ``ProcessGroupNCCL``."""

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._rank, self._size, self._name, self._num_calls = rank, size, options.group_name, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _set_sequence_number_for_group(self) -> None:
        self._num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Gather the sources of all ranks in ``output``, one after the other."""
        with _on_host() as at:
            rows = at(output).view(self._size, *source.shape)
            self._gloo.allgather([list(rows.unbind(0))], [at(source).contiguous()]).wait()
        return _done([output])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Sum or average the sources of all ranks, which gloo does not; this rank keeps its part in ``output``."""
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        assert average or opts is None or opts.reduceOp == dist.ReduceOp.SUM
        with _on_host() as at:
            total = at(source).clone()
            self._gloo.allreduce([total]).wait()
            part = total.view(self._size, *output.shape)[self._rank]
            at(output).copy_(part / self._size if average else part)
        return _done([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``all_gather_single``, for each."""
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source)
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As ``reduce_scatter_single``, for each."""
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return _done(outputs)

    # The names that they had before torch 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> dist.Work:
        """What was ``alltoall_base``."""
        return self.alltoall_base(*args, **kwargs)


@contextmanager
def _on_host() -> Iterator[Callable[[Any], Any]]:
    """Give what stands for tensors of a device on the CPU; nothing that looks at operators sees them."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield _alias


def _alias(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")  # NCCL's words
        return torch.ops.standin.on_host(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_alias, value))
    return value


def _done(outputs: Sequence[Tensor]) -> dist.Work:
    future = torch.futures.Future()
    future.set_result(list(outputs))
    return torch._C._distributed_c10d._create_work_from_future(future)


def _forward(name: str) -> Callable[..., dist.Work]:
    def collective(self: HostGroup, *args: Any, **kwargs: Any) -> dist.Work:
        self._num_calls += 1
        with _on_host() as at:
            mapped = args if name == "barrier" else [at(value) for value in args]
            getattr(self._gloo, name)(*mapped, **kwargs).wait()
        outputs = args[0] if args and isinstance(args[0], list) else []
        return _done(outputs[0] if outputs and isinstance(outputs[0], list) else outputs)

    collective.__name__ = name
    return collective


def install() -> None:
    """Let ``init_process_group("nccl")`` make a ``HostGroup``."""
    for name in FORWARDED:
        setattr(HostGroup, name, _forward(name))
    module = dist.distributed_c10d
    module.ProcessGroupNCCL = dist.ProcessGroupNCCL = HostGroup
    module.is_nccl_available = dist.is_nccl_available = lambda: True
    torch._C._nccl_version, torch._C._nccl_version_suffix = lambda: VERSION, lambda: b""
