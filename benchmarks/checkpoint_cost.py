"""What a checkpoint costs: a save against the plain writing of the same bytes, and the call in every step.

    python benchmarks/checkpoint_cost.py [--folder DIR] [--repeats 7] [--quick]

A model and its AdamW state of about 192 and 576 MiB are saved by turns, in an order that is drawn anew every round: as
one write of the same bytes for each file, the same and waiting for the disk, with the commit layer (which waits for the
disk, computes digests, renames, and gives up an older checkpoint), and by Accelerate's ``save_state`` (which does none
of these). Printed is the median of the rounds. The target is at most twice the plain write that waits for the disk: a
checkpoint that is not on the disk is none.

``after_step`` is timed as well, where there is nothing to save.

Writes docs/results/checkpoint_cost.json and .md.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn

from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.text import format_bytes
from memsave_recipes.training.checkpoints import Checkpoints, StopSignals, TrainState
from memsave_recipes.training.checkpoints.commit import verify_manifest
from memsave_recipes.training.launch.start import Accelerator, describe_environment

LAYERS = {192: 16, 576: 48}  # MiB of weights and state: layers of 1024 x 1024 float32, with two of Adam's each
QUICK_LAYERS = {12: 1}
PLAIN, ON_DISK, OURS, SAVE_STATE = "plain write", "plain write, on disk", "commit layer", "accelerate save_state"
CALLS = 20_000


class Work:
    """A trained model, and the ways to save it."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.folder = folder
        self.accelerator = Accelerator()
        self.accelerator.free_memory()
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer = self.accelerator.prepare(model, optimizer)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        self.checkpoints = Checkpoints(
            self.accelerator,
            folder / "ours" / "checkpoints",
            TrainState(self.accelerator, model, optimizer, scheduler),
            order=SampleOrder(num_samples=8, global_batch_size=8, seed=0),
            layout=BatchLayout.of(8, None, 1),
            keep=1,
            every_minutes=60,
            signals=StopSignals(),
        )
        self.steps = 0
        self.commit()
        self.contents = [path.read_bytes() for path in self._newest().iterdir()]

    @property
    def num_bytes(self) -> int:
        """Of a checkpoint."""
        return sum(map(len, self.contents))

    def write_plainly(self, *, waits: bool) -> None:
        """The same bytes in as many files."""
        folder = self.folder / "plain"
        folder.mkdir(exist_ok=True)
        for index, content in enumerate(self.contents):
            with (folder / f"{index}.new").open("wb") as file:
                file.write(content)
                if waits:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(folder / f"{index}.new", folder / str(index))  # as a save does, it leaves one copy

    def commit(self) -> None:
        """A save, which gives up the one before."""
        self.steps += 1
        self.checkpoints.save(self.steps, {"clock": 1.0})

    def save_state(self) -> None:
        """Into a fixed folder, as its examples do."""
        self.accelerator.save_state(str(self.folder / "save_state"))

    def verify(self) -> None:
        """What a resume reads before it loads."""
        verify_manifest(self._newest())

    def after_steps(self) -> None:
        """The calls of a loop in which there is nothing to save."""
        for step in range(CALLS):
            self.checkpoints.after_step(step + 1, dict)

    def _newest(self) -> Path:
        return self.checkpoints.folder / f"step-{self.steps}"


def measure(folder: Path, num_layers: int, repeats: int) -> dict[str, Any]:
    """Medians in seconds, for a work of so many layers."""
    work = Work(folder, num_layers)
    ways: dict[str, Callable[[], None]] = {
        PLAIN: lambda: work.write_plainly(waits=False),
        ON_DISK: lambda: work.write_plainly(waits=True),
        OURS: work.commit,
        SAVE_STATE: work.save_state,
        "verify": work.verify,
    }
    # os.sync: nobody pays for what another left to be written
    seconds = harness.time_in_turns(ways, repeats, before=os.sync)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = harness.ratios(seconds[OURS], seconds[ON_DISK])
    per_call = harness.seconds_of(work.after_steps) / CALLS
    return {
        "bytes": work.num_bytes,
        "seconds": medians,
        "seconds_of_rounds": seconds,
        "ratio_to_plain_on_disk": medians[OURS] / medians[ON_DISK],
        "ratio_quartiles": harness.median_and_quartiles(ratios)[1],
        "ratio_to_plain": medians[OURS] / medians[PLAIN],
        "after_step_us": 1e6 * per_call,
    }


def as_markdown(rows: list[dict[str, Any]], device: str) -> str:
    """The table."""
    ways = (PLAIN, ON_DISK, OURS, SAVE_STATE, "verify")
    headings = ("checkpoint", *(f"{way} (s)" for way in ways), "ours / plain on disk", "`after_step` (us)")
    cells = []
    for row in rows:
        low, high = row["ratio_quartiles"]
        ratio = f"{row['ratio_to_plain_on_disk']:.2f} ({low:.2f} to {high:.2f})"
        times = (f"{row['seconds'][way]:.2f}" for way in ways)
        cells.append([format_bytes(row["bytes"]), *times, ratio, f"{row['after_step_us']:.2f}"])
    note = f"Medians; in brackets the middle half of the rounds. {device}."
    return f"{harness.markdown_table(headings, cells)}\n\n{note}"


def main() -> None:
    """Measure, print, write."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--folder", help="on the disk to be measured; default: the system's temporary one")
    parser.add_argument("--repeats", type=int, default=7)
    flags = harness.read_flags(parser, None)
    environment = describe_environment(Accelerator()) | {"num_cpus": os.cpu_count()}
    rows = []
    for num_layers in (QUICK_LAYERS if flags.quick else LAYERS).values():
        folder = Path(tempfile.mkdtemp(dir=flags.folder))
        try:
            rows.append(measure(folder, num_layers, 2 if flags.quick else flags.repeats))
        finally:
            shutil.rmtree(folder)
    page = as_markdown(rows, environment["device"])
    harness.write_results(flags.output_dir, "checkpoint_cost", {"rows": rows, "environment": environment}, page)
    print(page)


if __name__ == "__main__":
    main()
