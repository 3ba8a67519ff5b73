"""Send a signal in the middle of a run: it finishes the step, saves, ends with the signal's code, goes on exactly."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from trials.killing import compare, prepare, reference
from trials.run import Run
from trials.world import Life, fresh, read_log, run_to_end

from memsave_recipes.training.launch import distributed

ONE, ALL, GROUP = "one rank", "all ranks", "the process group"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
MIDDLE = range(1, 8)  # steps after which the signal is sent
SIGNALLED_STEP_S = 0.05  # the five steps after these outlast a busy machine's pause before it is sent


def signal_trials(run: Run, number: signal.Signals, target: str, seeds: range) -> dict[str, Any]:
    """A trial a seed; what was not exact, what was not graceful, what hung, who was left behind."""
    run = replace(run, with_signals=True, every_steps=None, step_s=0.01)
    expected, _ = reference(replace(run, folder=run.folder / "reference", broken=""))
    outcome: dict[str, Any] = {"inexact": [], "graceful": 0, "ungraceful": [], "hangs": 0, "orphans": 0}
    for seed in seeds:
        trial, chance = fresh(replace(run, folder=run.folder / "trial")), random.Random(seed)
        life = Life(replace(trial, step_s=SIGNALLED_STEP_S), partial(_listen, run.broken))
        _wait_for_steps(trial, chance.choice(MIDDLE))
        _send(life, number, target, chance)
        codes = life.end()
        _note(outcome, trial, codes, CODES[number])
        outcome["orphans"] += not _all_gone(life.group)
        run_to_end(trial, partial(_listen, ""))
        outcome["inexact"] += compare(trial, expected)
    return outcome


def _listen(broken: str, rank: int) -> None:
    distributed.POLL_EVERY_S = 0.02  # these steps take a hundredth of a second
    prepare(broken, None, rank)


def _wait_for_steps(run: Run, count: int) -> None:
    deadline = time.monotonic() + 20
    while sum("step" in line for line in read_log(run)) < count and time.monotonic() < deadline:
        time.sleep(0.002)


def _send(life: Life, number: signal.Signals, target: str, chance: random.Random) -> None:
    if target == GROUP:
        os.killpg(life.group, number)
    for process in {ONE: [chance.choice(life.ranks)], ALL: life.ranks, GROUP: []}[target]:
        os.kill(process.pid or 0, number)


def _note(outcome: dict[str, Any], run: Run, codes: list[int | None], code: int) -> None:
    lines = [read_log(run, rank)[-2:] for rank in range(run.world)]
    saved = any("committed" in line for line in lines[0])
    outcome["hangs"] += None in codes
    if codes == [code] * run.world and saved:
        outcome["graceful"] += 1
    else:
        outcome["ungraceful"].append((codes, lines))


def _all_gone(group: int) -> bool:
    """Whether the data workers ended with their parents."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.killpg(group, 0)
            time.sleep(0.02)
            continue
        return True
    os.killpg(group, signal.SIGKILL)
    return False
