"""Trains with a recipe and counts what the host waits for on the device, by the line that causes it.

    accelerate launch ... benchmarks/gpu_day/waits.py FILE RECIPE [flags of the recipe]

Only whole steps count that are neither among the first nor logged. Writes their waits to FILE: torch warns of them
(``torch.cuda.set_sync_debug_mode``), those in a backward where it was called.
"""

import json
import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST, LAST = 3, 7  # steps that end before the waits are counted, and with them
PYTHONS = ("warnings.py", "_py_warnings.py")
"""Where Python shows a warning; the latter from 3.14 on."""
MESSAGE = "called a synchronizing CUDA operation"
ROOT = Path(__file__).parents[2]


def warns_of_waits() -> bool:
    """Whether torch tells that the host waits for this CUDA device."""
    one = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.item()
    torch.cuda.set_sync_debug_mode("default")
    return any(MESSAGE in str(one.message) for one in caught)


class Waits:
    """Counts from the update of step ``FIRST`` to that of ``LAST``."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.num_steps, self._show, self._optimizer = 0, warnings.showwarning, None

    def end_step(self, optimizer: Any, *_: Any) -> None:
        """Of the optimizer that ends its first step first, where others are inside or around it."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self.num_steps += 1
        if self.num_steps == FIRST:
            warnings.filterwarnings("always", message=MESSAGE)
            warnings.showwarning = self._count
            torch.cuda.set_sync_debug_mode("warn")
        elif self.num_steps == LAST:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show

    def _count(self, message: Any, *others: Any, **named: Any) -> None:
        if MESSAGE not in str(message):
            self._show(message, *others, **named)
            return
        frames = [one for one in traceback.extract_stack()[:-1] if Path(one.filename).name not in PYTHONS]
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "memsave_recipes")]
        lines = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in (*ours[-1:], frames[-1])]
        self.lines[" <- ".join(dict.fromkeys(lines))] += 1


def main() -> None:
    """Run the recipe as ``__main__`` would."""
    file, recipe, *flags = sys.argv[1:]
    if not warns_of_waits():
        raise RuntimeError("this device does not warn of waits")
    waits = Waits()
    handle = register_optimizer_step_post_hook(waits.end_step)
    results = runpy.run_path(recipe)["main"](flags)
    handle.remove()
    if waits.num_steps < LAST:
        raise RuntimeError(f"{waits.num_steps} steps have ended, too few to count")
    counted = {"micro_batches": (LAST - FIRST) * results["accumulation_steps"], "waits": dict(waits.lines)}
    Path(file).write_text(json.dumps(counted, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
