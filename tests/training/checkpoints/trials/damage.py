"""Damage the newest checkpoint of a run that was stopped half way, go on, and say what is not as it should be."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trials.killing import arm, compare, prepare, reference
from trials.run import Run
from trials.world import fresh, read_log, run_to_end


def flip_a_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def zero(path: Path, chance: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def append(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 64)))


DAMAGES: list[Callable[[Path, random.Random], None]] = [flip_a_bit, truncate, delete, zero, empty, append]


def stopped_run(run: Run) -> Run:
    """A run that was killed after its third save, with two checkpoints left."""
    run_to_end(fresh(run), partial(_arm_third_save))
    left = sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))
    assert left == ["step-4", "step-6"], left
    return run


def _arm_third_save(rank: int) -> None:
    if rank == 0:
        arm(True, "prune", False, 3)


def damage_trials(run: Run, seeds: range, how_many_damaged: int, stop_at: int | None = None) -> dict[str, Any]:
    """Damage the newest checkpoints, a trial a seed; damages that were not named, and ends that were wrong."""
    expected, _ = reference(replace(run, folder=run.folder / "reference", broken=""))
    stopped = stopped_run(replace(run, folder=run.folder / "stopped", broken=""))
    problems: dict[str, list[str]] = {}
    for seed in seeds:
        trial = replace(run, folder=run.folder / "trial")
        shutil.rmtree(trial.folder, ignore_errors=True)
        shutil.copytree(stopped.folder, trial.folder)
        done = damage_newest(trial, random.Random(seed), how_many_damaged)
        codes = run_to_end(trial, partial(prepare, run.broken, None))
        found = judge(trial, codes, expected, done)
        if found:
            problems[str(done)] = found
        if stop_at and len(problems) >= stop_at:
            break
    return problems


def damage_newest(run: Run, chance: random.Random, how_many: int) -> list[str]:
    done = []
    for name in ("step-6", "step-4")[:how_many]:
        folder = run.folder / "checkpoints" / name
        damage = chance.choice(DAMAGES)
        path = chance.choice(sorted(folder.iterdir()))
        damage(path, chance)
        done.append(f"{damage.__name__} {name}/{path.name}")
    return done


def judge(run: Run, codes: list[int | None], expected: dict[str, Any], done: list[str]) -> list[str]:
    """One damaged: it is named, and the one before is used. All damaged: one line that names them, exit code 2."""
    log = read_log(run)
    life = log[max(index for index, line in enumerate(log) if line.keys() & {"resumed", "refused"}) :]
    if len(done) == 2:
        words = life[0].get("refused", "")
        named = all(damaged.split()[1].split("/")[1] in words for damaged in done)
        right = codes == [2] * run.world and named and "step-6" in words and "step-4" in words and "\n" not in words
        return [] if right else [f"ended with {codes} and {life[0]}"]
    is_named = "step-6" in " ".join(life[0].get("notices", []))
    found = [] if is_named and life[0].get("resumed") == 4 else [f"the damage was not named: {life[0]}"]
    return found + [problem for problem in compare(run, expected) if "had been committed" not in problem]
