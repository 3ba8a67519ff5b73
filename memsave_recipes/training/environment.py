"""What a run runs on: versions, commit and hardware."""

import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

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
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def device_name(device: torch.device) -> str:
    """What people call the device: ``NVIDIA H100 80GB HBM3``, the processor's name, or just its type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type == "cpu" else device.type


def _processor_name() -> str:
    # Only Linux writes the name down where anyone can read it; platform.processor() is often empty there.
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor() or "cpu"


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
