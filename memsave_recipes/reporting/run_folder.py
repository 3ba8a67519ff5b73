"""The folder that holds everything a run writes: ``config.json``, ``plan.json``, ``results.json``, ``final/``."""

import json
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.errors import InputError

OURS = ("config.json", "plan.json", "metrics.jsonl", "results.json", "final", "tensorboard", "wandb")
OUR_SNAPSHOTS = "memory_snapshot*.pickle"
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "memsave-recipes")


def check_run_folder(output_dir: str, *, overwrite: bool) -> Path:
    """Refuse a folder that holds another run. Changes nothing, so that a mistake found later costs no earlier run.

    Raises:
        InputError: ``output_dir`` holds a run and ``overwrite`` is off, or is no folder.
    """
    folder = Path(output_dir)
    if any((folder / name).exists() for name in OURS) and not overwrite:
        raise InputError(f"--output_dir {folder} holds another run: name another folder or pass --overwrite")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file: name a folder")
    return folder


def claim_run_folder(folder: Path, config: dict[str, Any], plan: str) -> None:
    """Clear ``folder`` of an earlier run and write ``config.json`` and ``plan.json``. For the main process.

    Raises:
        InputError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*(folder / name for name in OURS), *folder.glob(OUR_SNAPSHOTS)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_json(folder / "config.json", config)
        (folder / "plan.json").write_text(plan + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output_dir {folder} cannot be written: {error.strerror}") from error


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Write the weights as safetensors, for a model of transformers or peft in its ``save_pretrained`` layout."""
    bare = accelerator.unwrap_model(model)
    if hasattr(bare, "save_pretrained"):
        bare.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    else:
        accelerator.save_model(bare, folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


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
