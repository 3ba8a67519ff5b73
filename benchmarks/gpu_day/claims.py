"""What a day consists of: steps, their claims, the commands that a claim needs, and what became of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOLDS, FAILS, FIGURE, SKIPPED = VERDICTS = "holds", "fails", "figure", "skipped"

CUDA, TWO_DEVICES, NCCL, WAIT_WARNINGS = "a CUDA device", "two devices", "NCCL itself", "a device that warns of waits"
TRITON, LIGER, BITSANDBYTES, TRL = "Triton", "Liger's kernels", "bitsandbytes' CUDA library", "TRL"
FLASH_3, FLOAT8 = "FlashAttention-3", "torchao"
SHEET, OWN_MEMORY = "a data sheet of its device", "a device with memory of its own"
"""What a machine may lack."""

Found = tuple[bool | None, str]
"""Whether a claim holds, ``None`` for a figure that no claim depends on; and what was found."""


@dataclass(frozen=True)
class Outcome:
    """A command that has ended.

    Args:
        folder: that it wrote to.
    """

    code: int
    output: str
    folder: Path

    @property
    def last_line(self) -> str:
        """The last line of the output that is not blank."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "no output")

    def read(self, name: str) -> Any:
        """A JSON file of the folder.

        Raises:
            RuntimeError: the command failed.
        """
        if self.code:
            raise RuntimeError(f"exit code {self.code}: {self.last_line}")
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``; raises as ``read``."""
        results: dict[str, Any] = self.read("results.json")
        return results

    @property
    def memory(self) -> dict[str, Any]:
        """GiB and per cents; raises as ``read``."""
        memory: dict[str, Any] = self.results["memory"]
        return memory

    @property
    def step_s(self) -> float:
        """The median of the step; raises as ``read``."""
        return float(self.results["perf"]["step_time_s"])

    @property
    def losses(self) -> list[float]:
        """Of training, one a logging window; raises ``OSError`` where there are none."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program to run.

    Args:
        name: of its folder; a command with a name that has run is not run again.
        words: a script of the repository, or ``-m MODULE``, and its flags; ``{folder}`` is its folder. Or a function
            that makes them from the outcome of ``after``.
        launch: the file of ``accelerate_configs/`` to launch with, for a recipe; ``None`` for plain Python.
        is_run: it has a run's flags of its folder and of trackers.
        is_killed: it is killed after its first checkpoint, and resumed.
        is_benchmark: its folder is that of the day's results.
        limit_s: it is ended after so many seconds.
        environment: further variables.
    """

    name: str
    words: str | Callable[[Outcome], str]
    launch: str | None = None
    precision: str = "no"
    after: "Command | None" = None
    is_run: bool = True
    is_killed: bool = False
    is_benchmark: bool = False
    limit_s: float = 300
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that may be wrong.

    Args:
        runs: ``judge`` is called with their outcomes, in this order.
        needs: what the machine must have; the claim is skipped where it lacks one.
        is_of_speed: its outcome is a figure where times say nothing about a GPU.
    """

    text: str
    runs: tuple[Command, ...]
    judge: Callable[..., Found]
    needs: frozenset[str] = frozenset()
    is_of_speed: bool = False


@dataclass(frozen=True)
class Step:
    """Claims on one subject."""

    name: str
    claims: Sequence[Claim]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim; ``figure`` has a measured number that no claim depends on."""

    step: str
    claim: str
    verdict: str
    found: str
