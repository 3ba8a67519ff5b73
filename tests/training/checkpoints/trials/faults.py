"""A run with a fault that its environment makes, on as many ranks as it has: how every rank ends, and what is left."""

import errno
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trials.killing import compare, reference
from trials.run import Run
from trials.world import Life, fresh, read_log, run_to_end

from memsave_recipes.training.checkpoints import commit, locked_run_folder, state
from memsave_recipes.training.launch.start import Accelerator

LOCKS = ExitStack()  # until the process ends


def fault_trial(run: Run, fault: str) -> dict[str, Any]:
    """The codes and last lines of a run whose third save meets ``fault``, its checkpoints, and how it goes on."""
    expected, _ = reference(replace(run, folder=run.folder / "reference"))
    trial = fresh(replace(run, folder=run.folder / "trial"))
    codes = run_to_end(trial, partial(_third_save_meets, fault))
    ends = [read_log(trial, rank)[-1] for rank in range(run.world)]
    left = sorted(path.name for path in (trial.folder / "checkpoints").iterdir())
    for rank in range(run.world):  # what was refused is no part of the comparison that follows
        path = trial.folder / f"log-{rank}.jsonl"
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if "refused" not in line))
    run_to_end(trial)
    return {"codes": codes, "ends": ends, "left": left, "problems": compare(trial, expected)}


def _third_save_meets(fault: str, rank: int) -> None:
    saves, write, write_manifest = 0, state.RankState.write, commit.write_manifest

    def count_and_write(self: Any, folder: Path) -> list[Path]:
        nonlocal saves
        saves += 1
        if saves == 3 and fault == "defect" and rank == 0:
            raise ZeroDivisionError("a defect")
        return write(self, folder)

    def refuse(folder: Any, *others: Any) -> None:
        if saves == 3 and fault == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_manifest(folder, *others)

    state.RankState.write, commit.write_manifest = count_and_write, refuse


def unseen_by_rank_1(run: Run) -> dict[str, Any]:
    """How two ranks end of which one cannot see the checkpoints."""
    run_to_end(fresh(run))
    return {"codes": run_to_end(run, partial(_hide_from_1, run)), "ends": [read_log(run, rank)[-1] for rank in (0, 1)]}


def _hide_from_1(run: Run, rank: int) -> None:
    is_dir = Path.is_dir
    Path.is_dir = lambda path: is_dir(path) and (rank == 0 or "step-" not in path.name)


def change_of_world(run: Run, worlds: list[int]) -> list[dict[str, Any]]:
    """The samples of every step of a run that is stopped after its second save and goes on in another world."""
    fresh(run)
    lives = []
    for life, world in enumerate(worlds):
        codes = run_to_end(replace(run, world=world), partial(_stop_after_second_save, life < len(worlds) - 1))
        logs = [read_log(run, rank) for rank in range(world)]
        lives.append({"codes": codes, "last": [log[-1] for log in logs], "steps": _samples(logs), "log": logs[0]})
    return lives


def _stop_after_second_save(stops: bool, rank: int) -> None:
    if stops and rank == 0:
        from trials.killing import arm

        arm(True, "prune", False, 2)


def _samples(logs: list[list[dict[str, Any]]]) -> dict[int, list[int]]:
    """Of every step, over all ranks, in the order of the ranks; of a step done twice, the last time."""
    steps: dict[int, list[int]] = {}
    for log in logs:
        own = {line["step"]: line["ids"] for line in log if "step" in line}
        for step, ids in own.items():
            steps[step] = steps.get(step, []) + ids
    return steps


def two_runs(run: Run) -> dict[str, Any]:
    """A second run in the folder of one that has not ended, and a third after that one was killed."""
    fresh(run)
    first = Life(run, partial(_lock_and_wait, run))
    _wait_until(run, "locked")
    second, third = fresh_beside(run, "second"), fresh_beside(run, "third")
    codes_of_second = run_to_end(second, partial(_lock, run))
    first.kill([0])
    first.end()
    return {
        "second": (codes_of_second, [read_log(second, rank)[-1] for rank in range(run.world)]),
        "third": run_to_end(third, partial(_lock, run)),
    }


def fresh_beside(run: Run, name: str) -> Run:
    """A folder of its own for the logs; the lock is that of ``run``."""
    return fresh(replace(run, folder=run.folder.with_name(name)))


def _lock_and_wait(run: Run, rank: int) -> None:
    _lock(run, rank)
    (run.folder / "locked").touch()
    time.sleep(60)


def _lock(run: Run, rank: int) -> None:
    LOCKS.enter_context(locked_run_folder(Accelerator(), run.folder))


def _wait_until(run: Run, name: str) -> None:
    deadline = time.monotonic() + 20
    while not (run.folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
