"""Exit codes and last messages of a recipe: expected failures end in one line, or on one page, with their own code.

The codes are those of ``docs/failures.md``; an unexpected error keeps its traceback and ends with 1. Out of memory ends
with 3 and a page: what filled the memory, which flags free how much, and the configuration that would fit. The page
allocates nothing on the full device: it uses earlier measurements, the shapes of existing tensors, and for
``planned_advice`` the planner's estimates. ``run.log`` keeps the lines that the run has written to the terminal.

NOTE [ the log of a run ]

1. The main process writes it, from its own stdout and stderr. Only their ``write`` is replaced while a run lasts: the
   streams stay, with their encoding, their descriptor, and their answer whether they are a terminal. Lines that C++
   writes past them, and lines of other processes, are on the terminal alone.
2. Before the run has its folder, lines are kept in memory. A run that is refused until then leaves no file behind.
3. Each line is handed to the system when it ends, in one call, so that a kill costs none. A run that goes on appends.
4. Progress bars, colours and blanks at the end of a line are left out.
5. An error of the log never ends the run: where a line cannot be written, the log ends.

"""

import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.checkpoints import StoppedBySignal
from memsave_recipes.errors import InputError
from memsave_recipes.planner.savings import Saving, Setup, savings_of
from memsave_recipes.planner.search import Candidate, Choice
from memsave_recipes.planner.task import Launch, Task, choose_for_target
from memsave_recipes.processes import (
    LOST,
    REPORT_DELAY_S,
    LostWorker,
    exit_code_of_another_rank,
    lost_worker,
    publish_exit_code,
)
from memsave_recipes.profiling.breakdown import MemoryBreakdown, persistent_tensors
from memsave_recipes.profiling.memory import ForwardMeter, is_out_of_memory, write_snapshot
from memsave_recipes.sharding import is_sharded
from memsave_recipes.step.batch_layout import BatchLayout
from memsave_recipes.step.settings import AUTO, StepSettings
from memsave_recipes.text import first_line, format_bytes, spaced, to_gib
from memsave_recipes.training.launch import device_name
from memsave_recipes.training.optimizers import NotFinite
from memsave_recipes.training.parsing import wants_traceback

LOG = "run.log"
CONTROLS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
"""ANSI's sequences for colours and the cursor, and those for titles and links (ECMA-48, xterm)."""
_recording: "RunLog | None" = None


class VerificationFailed(Exception):
    """``--verify`` found that the plan changes the step, or no proof; all ranks know it."""


class RunLog:
    """Takes in the text of both streams by the line; ``write_to`` gives it a file."""

    def __init__(self) -> None:
        self._lines: list[bytes] | None = []  # until there is a file
        self._file: BinaryIO | None = None
        self._process = os.getpid()

    def write_to(self, path: Path) -> None:
        """Append the lines so far, and from now on each line, to the file."""
        lines, self._lines = self._lines or [], None
        with suppress(OSError):
            self._file = path.open("ab", buffering=0)
        began = datetime.now(UTC).isoformat(" ", "seconds")
        self.add(f"# {began} {shlex.join(sys.argv)}")
        for line in lines:
            self._write(line)

    def add(self, line: str) -> None:
        """Take in a line."""
        if os.getpid() != self._process:  # a fork, such as a data worker
            return
        written = f"{line.rstrip()}\n".encode(errors="backslashreplace")
        if self._lines is not None:
            self._lines.append(written)
        else:
            self._write(written)

    def close(self) -> None:
        """Lines from now on are not kept."""
        self._lines = None
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, line: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(line)
        except OSError:
            self.close()


class _Lines:
    """Cuts the text of a stream into lines for ``add``, without progress bars and colours."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._begun = ""
        self._is_drawn = False

    def take(self, text: str) -> None:
        """The next text of the stream, as it was written in one call."""
        text = CONTROLS.sub("", text)
        if text.startswith("\r") and "\n" not in text:
            self._is_drawn = True
            return
        if text == "\n" and self._is_drawn and not self._begun:  # the end of a bar, or the way to the one below
            return
        *ended, self._begun = (self._begun + text).split("\n")
        for line in ended:
            self._is_drawn = False
            self._add(line.rstrip("\r").rpartition("\r")[2])


def write_log(folder: Path) -> None:
    """Have the lines of the run that is recorded, if one is, written to ``run.log`` in its folder from now on."""
    if _recording is not None:
        _recording.write_to(folder / LOG)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, the main process keeps the lines that it writes to the terminal, for ``write_log``.

    Where that is so already, it goes on. An error that leaves the block, and will be printed as a traceback, is added.
    """
    global _recording
    if _recording is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    log = _recording = RunLog()
    streams = dict.fromkeys((sys.stdout, sys.stderr))  # once where both are the same
    restore = [_copy_lines(stream, log.add) for stream in streams if stream is not None]
    try:
        yield
    except Exception:
        for line in traceback.format_exc().splitlines():
            log.add(line)
        raise
    finally:
        _recording = None
        log.close()
        for undo in restore:
            undo()


def _copy_lines(stream: TextIO, add: Callable[[str], None]) -> Callable[[], None]:
    """Let ``add`` have each line that is written to the stream; returns a function that ends this."""
    write, lines = stream.write, _Lines(add)

    def write_and_take(text: str) -> int:
        written = write(text)
        lines.take(text)
        return written

    def undo() -> None:
        if stream.write is write_and_take:  # else another one, such as wandb's, stands around it
            stream.write = write  # type: ignore[method-assign]

    stream.write = write_and_take  # type: ignore[method-assign]
    return undo


VIEWER = "https://pytorch.org/memory_viz"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run.

    Args:
        folder: the run's.
        flags: all flags of the recipe, with their values.
        blocks: names of the blocks of its activation checkpointing plan.
        compiles: whether the plan compiles some of them.
        predicted_peak_bytes: of a plan for a budget.
        name: of the run in dashboards.
    """

    folder: Path
    flags: dict[str, Any]
    blocks: tuple[str, ...]
    compiles: bool = False
    predicted_peak_bytes: int | None = None
    name: str = ""

    def snapshot_path(self, rank: int) -> Path:
        """The file for the allocator snapshot of a rank."""
        return self.folder / (f"memory_snapshot-rank{rank}.pickle" if rank else "memory_snapshot.pickle")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that ran out of memory.

    Args:
        step: counted from 0.
        breakdown: of the peak of an earlier step, if one was measured.
        forward_meter: of the first step.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: BatchLayout
    settings: RunSettings
    step: int
    error: RuntimeError
    breakdown: MemoryBreakdown | None
    forward_meter: ForwardMeter

    def page(self) -> str:
        """The page."""
        rows = [(name, format_bytes(size), "") for name, size in self.parts.items()]
        rows.append(("together", format_bytes(sum(self.parts.values())), ""))
        advice = [(saving.flags, _freed(saving), saving.curve) for saving in self.savings]
        width = max(len(name) for name, _, _ in [*rows, *advice])
        when = "as far as it had come" if self.breakdown is None else "at the peak of an earlier step, measured"
        return "\n".join(
            [
                f"out of memory in {self.where}",
                f"  {str(self.error).strip().splitlines()[0]}",
                f"what filled it, {when}:",
                *_table(rows, width),
                self.headline_of_advice,
                *_table(advice, width),
                self.write_snapshot(),
            ]
        )

    @property
    def where(self) -> str:
        """``step 3 on rank 0 of 4 (NVIDIA L4)``."""
        rank, device = self.accelerator.process_index, device_name(self.accelerator.device)
        return f"step {self.step + 1} on rank {rank} of {self.accelerator.num_processes} ({device})"

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind: as measured, or computed now."""
        if self.breakdown is not None:
            return {spaced(name.removesuffix("_bytes")): size for name, size in vars(self.breakdown).items()}
        stays = persistent_tensors(self.model, self.optimizer)
        parts = {spaced(label.use.value): sum(label.storages.values()) for label in stays}
        if self.accelerator.device.type == "cpu":
            return {**parts, "saved for the backward": self.forward_meter.num_bytes}
        peak = torch.accelerator.max_memory_allocated(self.accelerator.device)
        return {**parts, "activations and temporaries": max(0, peak - sum(parts.values()))}

    @property
    def headline_of_advice(self) -> str:
        """The line before the table of ``savings``, or in place of it."""
        if self.is_sharded:
            return (
                "what to change: a smaller --micro_batch_size, --activation_checkpointing full, or more ranks; how "
                "much that frees is not computed for weights in shards"
            )
        return "what to change, how much it can free at the peak of a step, and the loss curve then:"

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the weights."""
        return is_sharded(self.model)

    @property
    def savings(self) -> list[Saving]:
        """Flags that would help, where that can be computed."""
        if self.is_sharded:
            return []
        measured, meter = self.breakdown, self.forward_meter
        activations = meter.num_bytes if measured is None else measured.activations_bytes
        return savings_of(
            Setup(
                flags=self.settings.flags,
                layout=self.layout,
                model=self.model,
                mixed_precision=self.accelerator.mixed_precision,
                activations_bytes=activations or None,  # 0: it ended before anything was saved
                freed_by_recomputation_bytes=meter.freed_by_recomputation_bytes,
                device_type=self.accelerator.device.type,
            )
        )

    def write_snapshot(self) -> str:
        """Write the allocator snapshot of a CUDA device; returns a sentence with its path, or why there is none."""
        if self.accelerator.device.type != "cuda":
            return "no allocator snapshot: only CUDA devices have one"
        path = self.settings.snapshot_path(self.accelerator.process_index)
        try:
            write_snapshot(path)
        except (OSError, RuntimeError) as error:  # the page matters more
            return f"no allocator snapshot: {error}"
        return f"the allocator's state is in {path}: open it at {VIEWER}"


def planned_advice(task: Callable[[], Task]) -> str:
    """A line with the flags of the fastest configuration that is predicted to fit.

    Only candidates count that are predicted to need less than the configuration that failed.

    Args:
        task: the recipe's, under the flags of the run that failed.

    Raises:
        InputError: the recipe cannot be estimated with these flags.
    """
    failed = task()
    launch = Launch.here(int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    memory_bytes = launch.target.memory_bytes
    opened = replace(failed, run=_with_all_open(failed.run, memory_bytes))
    found = choose_for_target(opened, launch, memory_bytes)
    choice = _needing_less(found, failed.run, launch)
    if choice.chosen is None:
        return f"no plan of this recipe is predicted to fit in {format_bytes(memory_bytes)}: see memsave plan"
    return (
        f"the fastest that is predicted to fit in {format_bytes(memory_bytes)} (memsave plan): "
        f"{_flags(choice.chosen)}, {format_bytes(choice.chosen.needed_bytes)} in all"
    )


def _with_all_open(run: StepSettings, budget_bytes: int) -> StepSettings:
    """The flags with micro-batch size and strategy left to the planner."""
    return replace(
        run,
        micro_batch_size=AUTO if run.batchnorm == "local" else run.micro_batch_size,
        activation_checkpointing="budget:bitwise" if run.bitwise_topology else "budget",
        gradient_checkpointing=False,
        memory_budget_gib=to_gib(budget_bytes),
    )


def _needing_less(choice: Choice, run: StepSettings, launch: Launch) -> Choice:
    """The candidates that are predicted to need less than the configuration that failed, if that is among them."""
    size = run.layout(launch.num_processes).micro_batch_size
    same = [
        candidate.needed_bytes
        for candidate in choice.candidates
        if (candidate.layout.micro_batch_size, candidate.strategy) == (size, run.activation_checkpointing)
    ]
    limit = min(same, default=launch.target.memory_bytes + 1)
    return Choice(candidates=tuple(candidate for candidate in choice.candidates if candidate.needed_bytes < limit))


def _flags(candidate: Candidate) -> str:
    """The candidate as flags; a plan of the solver is made again, on the device."""
    flags = [f"--micro_batch_size {candidate.layout.micro_batch_size}"]
    flags.append(f"--activation_checkpointing {candidate.strategy}")
    if candidate.strategy == "budget":
        flags.append(f"--memory_budget_gib {to_gib(candidate.budget_bytes):.4g}")
    if candidate.loss is not None:
        flags.append(f"--loss {candidate.loss}")
    return " ".join(flags)


def _freed(saving: Saving) -> str:
    return "not known" if saving.freed_bytes is None else format_bytes(saving.freed_bytes)


def _table(rows: list[tuple[str, str, str]], width: int) -> list[str]:
    return [f"  {name:<{width}}  {figure:>9}  {remark}".rstrip() for name, figure, remark in rows]


USER_INPUT = 2
OUT_OF_MEMORY = 3
NOT_FINITE = 4
FAILED_VERIFICATION = 5
GO_ON_FROM_LAST = "the last checkpoint is as it was, go on with --resume"
PEER_IS_GONE = ("closed by peer", "reset by peer", "remote process exited")
"""In the errors of gloo's and NCCL's collectives."""


@recorded()
def run_recipe(main: Callable[[], Any], task: Callable[[], Task] | None = None) -> None:
    """Call ``main()`` and turn its exception into a message on stderr and an exit code. ``--debug`` adds the traceback.

    What all ranks know is told once: a user's mistake, a failed ``--verify``, numbers that are not finite, a stop by a
    signal. What one rank finds is told by that rank: a data worker that died, another rank that is gone, or no memory
    left, on the page that ``RunReport.run`` makes or, for an error outside the training steps, in torch's own words.
    """
    try:
        main()
    except InputError as error:
        if not error.found_by_one_rank:
            _exit_unless_main(USER_INPUT)
        _say_and_exit(f"error: {error.one_line}", USER_INPUT)
    except NotFinite as error:
        _exit_unless_main(NOT_FINITE)
        _say_and_exit(f"error: {error}", NOT_FINITE)
    except VerificationFailed as error:
        _exit_unless_main(FAILED_VERIFICATION)
        _say_and_exit(str(error), FAILED_VERIFICATION)
    except StoppedBySignal as stop:
        _exit_unless_main(stop.exit_code)
        _say_and_exit(stop.message, stop.exit_code)
    except (RuntimeError, MemoryError, OSError) as error:
        if worker := lost_worker(error):
            _end_without_worker(worker)
        if is_out_of_memory(error):
            _end_without_memory(error, task)
        code = exit_code_of_another_rank()
        if code is None and any(words in str(error) for words in PEER_IS_GONE):
            _say_and_exit(f"error: another rank is gone ({first_line(error)}); {GO_ON_FROM_LAST}", LOST)
        if code is None:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends one now, and the code would be that of it
        sys.exit(code)  # that rank has spoken


def _end_without_worker(worker: LostWorker) -> NoReturn:
    code = OUT_OF_MEMORY if worker.had_no_memory else LOST
    publish_exit_code(code)
    _say_and_exit(f"error: {worker.words}; {GO_ON_FROM_LAST}", code)


def _end_without_memory(error: Exception, task: Callable[[], Task] | None) -> NoReturn:
    what_happened = str(error) or "no memory is left on the host"
    publish_exit_code(OUT_OF_MEMORY)
    if not _is_rank_0():
        time.sleep(REPORT_DELAY_S)  # it speaks only if rank 0, and with it the launcher, has not ended by then
    if task is not None:
        print(what_happened, file=sys.stderr, flush=True)  # at once: the planner takes a moment
        _say_and_exit(_advice(task), OUT_OF_MEMORY)
    _say_and_exit(what_happened, OUT_OF_MEMORY)


def _advice(task: Callable[[], Task]) -> str:
    from memsave_recipes.run.failures import planned_advice

    try:
        return planned_advice(task)
    except Exception as error:  # the page has been printed, and the exit code matters more than advice
        return f"memsave plan could not say what would fit: {' '.join(str(error).split())}"


def _is_rank_0() -> bool:
    # Rank 0 reports the errors that all ranks find; those of one rank alone, such as a broken image in its share, are
    # told by that rank. The launcher ends all ranks when one exits, so the silent ones let rank 0 finish.
    return os.environ.get("RANK", "0") == "0"


def _exit_unless_main(code: int) -> None:
    if not _is_rank_0():
        time.sleep(REPORT_DELAY_S)
        sys.exit(code)


def _say_and_exit(message: str, code: int) -> NoReturn:
    if wants_traceback(sys.argv[1:]):
        traceback.print_exc()
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)
