"""A card that is not there, for torch's compiler: inductor and Triton ask it for its properties, and nothing runs.

Needs a CUDA build of torch, as pip installs it on every machine, and no driver. ``absent_card`` is all that inductor
needs to write kernels for it; ``compiled`` is all that Triton and ptxas need to make machine code of one.
"""

import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode

FIRST_TORCH = "2.14"
THREADS_OF_A_WARP = 32
NAME = "kernel"
"""Of each kernel, so that those of several graphs are compiled once where they are equal."""


@dataclass(frozen=True)
class Card:
    """What compilers ask of a card: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".

    Args:
        target: the card's name for ``--target``.
        shared_bytes: that a block may take, by default and at most.
    """

    target: str
    name: str
    capability: tuple[int, int]
    multi_processor_count: int
    total_memory: int
    cache_bytes: int
    shared_bytes: tuple[int, int]

    @property
    def architecture(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    @property
    def properties(self) -> SimpleNamespace:
        """As ``torch.cuda.get_device_properties`` gives them."""
        usual, most = self.shared_bytes
        return SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multi_processor_count,
            total_memory=self.total_memory,
            L2_cache_size=self.cache_bytes,
            warp_size=THREADS_OF_A_WARP,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=2**16,
            shared_memory_per_block=usual,
            shared_memory_per_block_optin=most,
            gcnArchName="",
        )


CARDS = {
    80: Card("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 2**30, 40 * 2**20, (48 * 2**10, 163 * 2**10)),
    90: Card("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 2**30, 50 * 2**20, (48 * 2**10, 227 * 2**10)),
}


def why_not() -> str | None:
    """Say what is missing to compile for an absent card; ``None`` if nothing is."""
    if torch.__version__ < FIRST_TORCH:
        return f"torch {torch.__version__}: names of its compiler are those of {FIRST_TORCH}"
    if torch.version.cuda is None:
        return "torch is a build without CUDA: make test-triton installs one with it"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return "there is a driver, whose device would be asked" if torch.cuda.is_available() else None


@contextmanager
def absent_card(card: Card) -> Iterator[None]:
    """Let inductor and Triton find ``card``, inside; whatever would run on it fails."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch.utils._triton import has_triton

    with FakeTensorMode():  # torch's guard of devices that are not there, which the first one sets for good
        pass
    properties = card.properties
    of_cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: card.capability,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
    }
    of_dynamo = {name.lstrip("_"): staticmethod(function) for name, function in of_cuda.items()}
    of_dynamo["get_compute_capability"] = staticmethod(lambda *_: card.architecture)
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **of_cuda))
        for interface in (CudaInterface, CudaInterface.Worker):
            known = {name: function for name, function in of_dynamo.items() if hasattr(interface, name)}
            stack.enter_context(patch.multiple(interface, **known))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver(card))
        stack.callback(setattr, triton.runtime.driver, "_active", before)
        has_triton.cache_clear()
        stack.callback(has_triton.cache_clear)
        yield


class _Driver:
    """Triton's, which is asked for the target alone."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.card.architecture, THREADS_OF_A_WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


@dataclass(frozen=True)
class MachineCode:
    """Of a kernel: registers of a thread, and the bytes of a thread that do not fit into them."""

    registers: int
    spilled_bytes: int


@cache
def compile_kernel(source: str, card: Card) -> MachineCode:
    """Compile a kernel ``NAME`` that inductor wrote for ``card``, in its first configuration, down to machine code.

    The first is what runs where nothing is tuned; the others have other blocks.

    Raises:
        triton.TritonError, or what Triton raises: it refuses the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with absent_card(card), TemporaryDirectory() as folder:
        path = Path(folder, "kernel.py")
        path.write_text(source, encoding="utf-8")
        spec = spec_from_file_location(NAME, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, NAME)
        configuration = tuner.configs[0]
        constants = {**tuner.triton_meta["constants"], **configuration.kwargs}
        signature = {**tuner.triton_meta["signature"], **dict.fromkeys(constants, "constexpr")}
        constexprs = {(tuner.fn.arg_names.index(one),): value for one, value in constants.items()}
        log = io.StringIO()
        with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
            triton.knobs.compilation.always_compile = True  # or there is no log
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.compile(
                ASTSource(tuner.fn, signature, constexprs),
                target=GPUTarget("cuda", card.architecture, THREADS_OF_A_WARP),
                options={"num_warps": configuration.num_warps, "num_stages": configuration.num_stages},
            )
    said = log.getvalue()
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return MachineCode(int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", said))))
