"""Runs the commands of claims, each once, and judges what became of them."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from harness import ROOT

from gpu_day.claims import FAILS, FIGURE, HOLDS, SKIPPED, Claim, Command, Outcome, Step, Verdict

ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "STANDIN_DEVICES": "1"}
"""For what is not launched: Trainer spreads a model over all devices that it sees."""


@dataclass
class Day:
    """What this machine has, where runs lie, and where results go.

    Args:
        has: see ``machine.abilities``.
        has_clock: whether times say something about a GPU.
    """

    has: frozenset[str]
    has_clock: bool
    folder: Path
    results: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def verdicts_of(self, step: Step) -> Iterator[Verdict]:
        """One a claim; a claim whose command or judge breaks off fails."""
        for claim in step.claims:
            if missing := claim.needs - self.has:
                yield Verdict(step.name, claim.text, SKIPPED, f"needs {' and '.join(sorted(missing))}")
                continue
            try:
                yield self._judged(step, claim)
            except (RuntimeError, OSError, LookupError, ValueError) as error:
                yield Verdict(step.name, claim.text, FAILS, f"{type(error).__name__}: {error}")

    def _judged(self, step: Step, claim: Claim) -> Verdict:
        holds, found = claim.judge(*map(self.outcome, claim.runs))
        if holds is not None and claim.is_of_speed and not self.has_clock:
            holds, found = None, f"{found} (not judged: these times are not a GPU's)"
        return Verdict(step.name, claim.text, FIGURE if holds is None else HOLDS if holds else FAILS, found)

    def outcome(self, command: Command) -> Outcome:
        """Run the command, or remember how it ended.

        Raises:
            RuntimeError: it should be killed, and could not.
        """
        if command.name not in self.outcomes:
            if command.is_killed:
                self._begin_and_kill(command)
            self.outcomes[command.name] = self._ended(command, self._start(command, is_resumed=command.is_killed))
        return self.outcomes[command.name]

    def _start(self, command: Command, *, is_resumed: bool = False) -> subprocess.Popen[str]:
        words = command.words
        if not isinstance(words, str):
            assert command.after is not None
            words = words(self.outcome(command.after))
        folder = self._folder_of(command)
        flags = shlex.split(words.format(folder=folder))
        if command.launch:
            config = ROOT / "accelerate_configs" / f"{command.launch}.yaml"
            launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
            own = ["--output_dir", str(folder)]
            own += ["--report_to", "none", "--resume" if is_resumed else "--overwrite"] if command.is_run else []
            flags = [*launcher, "--mixed_precision", command.precision, *flags, *own]
        folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{command.name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *flags],
                cwd=ROOT,
                env=os.environ | ({} if command.launch else ONE_DEVICE) | command.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def _ended(self, command: Command, process: subprocess.Popen[str]) -> Outcome:
        """Wait for the process, no longer than its limit, which the last line of its output then tells."""
        told = ""
        try:
            process.wait(command.limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            told = f"\n{command.name} took longer than {command.limit_s:g} s"
        log = self.folder / f"{command.name}.log"
        output = log.read_text(encoding="utf-8", errors="replace") + told
        return Outcome(process.returncode, output, self._folder_of(command))

    def _folder_of(self, command: Command) -> Path:
        return self.results if command.is_benchmark else self.folder / command.name

    def _begin_and_kill(self, command: Command) -> None:
        """Begin the run and kill it after its first checkpoint."""
        process, deadline = self._start(command), time.monotonic() + command.limit_s
        checkpoints = self.folder / command.name / "checkpoints"
        while not any(checkpoints.glob("step-*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        has_ended = process.poll() is not None
        _kill(process)
        if has_ended or not any(checkpoints.glob("step-*")):
            raise RuntimeError(
                f"{command.name} could not be killed: it ended, or wrote no checkpoint in {command.limit_s:g} s"
            )


def _kill(process: subprocess.Popen[str]) -> None:
    """The ranks that a launch starts have sessions of their own."""
    if process.poll() is None:
        launch = psutil.Process(process.pid)
        launch.suspend()  # it would end the others, with time to save
        for one in (*launch.children(recursive=True), launch):
            one.kill()
    process.wait()
