"""The environment of a run: versions, commit and hardware, and torch's settings for precision and determinism."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

INSTRUCTION_LIMITS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""The variables that keep the libraries of torch from an instruction set; torch's own shows in its capability."""
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "memsave-recipes")


def describe_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, commit and hardware, for ``config.json`` and the trackers."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git_commit": _git_commit(),
        "device": device_name(accelerator.device),
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def deterministic_kernels(wanted: bool, *, later: bool = False) -> Iterator[None]:
    """Where ``wanted``, torch takes kernels that add in a fixed order; it warns of an operator that has none.

    Begin before the device is used: cuBLAS reads its variable once. See
    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html

    Args:
        later: they are not taken yet, but ``--verify`` will.
    """
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted or later:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if wanted:
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # of the flash-attn package, read by transformers
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def matmul_precision(wanted: str | None) -> Iterator[None]:
    """Products of float32 matrices in the precision that is ``wanted``; torch's own default where none is."""
    before = torch.get_float32_matmul_precision()
    if wanted is not None:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def use_expandable_segments() -> None:
    """Have CUDA's allocator extend its segments, unless the user has set it up; this avoids fragmentation.

    Begin before the device is used. See https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    is_set_up = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.version.cuda is not None and not is_set_up:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_name(device: torch.device) -> str:
    """The device's name: ``NVIDIA H100 80GB HBM3``, the processor's name, or just its type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type == "cpu" else device.type


def _processor_name() -> str:
    return _read_cpuinfo().get("model name") or platform.processor() or "cpu"


def _processor() -> str:
    """All that decides how a CPU rounds: which one it is, and the instructions that are used of it."""
    fields = _read_cpuinfo()
    about = [f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if name in os.environ]
    return ", ".join([_processor_name(), *about, torch.backends.cpu.get_cpu_capability(), *limits])


def _read_cpuinfo() -> dict[str, str]:
    """Of the first processor. Only Linux writes this down where anyone can read it."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    if not shutil.which("git"):
        return "unknown"
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
