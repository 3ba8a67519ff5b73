"""Kill a run again and again, at random times and at named points, and say what is not as it would have been.

A run in shards, or one that saves beside the training, is killed at a random time in one of its saves.
"""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import torch
from trials.broken import BREAK
from trials.run import NUM_STEPS, Run
from trials.world import DONE, Life, fresh, results, run_to_end

import memsave_recipes.training.batching
import memsave_recipes.training.checkpoints.commit
import memsave_recipes.training.checkpoints.resume
import memsave_recipes.training.checkpoints.saver
import memsave_recipes.training.checkpoints.state
import memsave_recipes.training.launch.distributed

CHECKPOINTS, BATCHING = memsave_recipes.training.checkpoints, memsave_recipes.training.batching
# Where a process can be killed: the function, and how often a life calls it at most.
POINTS: dict[str, tuple[Any, str, int]] = {
    "loss": (torch.nn.functional, "cross_entropy", 24),
    "backward": (BATCHING.GlobalBatch, "backward", 24),
    "clip": (accelerate.Accelerator, "clip_grad_norm_", 12),
    "optimizer": (torch.optim.AdamW, "step", 12),
    "schedule": (torch.optim.lr_scheduler.LambdaLR, "step", 12),
    "poll": (memsave_recipes.training.launch.distributed.RankPoll, "max", 12),
    "save": (CHECKPOINTS.saver.Checkpoints, "_write", 6),
    "space": (CHECKPOINTS.saver, "check_space", 6),
    "tensors": (CHECKPOINTS.state, "save_file", 12),
    "files": (CHECKPOINTS.state.RankState, "write", 6),
    "manifest": (CHECKPOINTS.commit, "write_manifest", 6),
    "digest": (CHECKPOINTS.commit, "sha256_of_file", 40),
    "sync": (CHECKPOINTS.commit, "sync", 60),
    "rename": (os, "rename", 10),
    "delete": (shutil, "rmtree", 4),
    "prune": (CHECKPOINTS.saver, "prune", 6),
    "find": (CHECKPOINTS.saver, "find_newest", 1),
    "verify": (CHECKPOINTS.resume, "verify_manifest", 1),
    "read": (CHECKPOINTS.state, "read_pytree", 4),
}
OF_RANK_0 = POINTS.keys() - {"loss", "backward", "clip", "optimizer", "schedule", "poll", "read"}
MAX_KILLS = 3
SAVES_OF_A_LIFE = 4
"""At most, of a run that is killed in one: so that each of its lives comes to a save."""
FIRST_SAVE_S = 0.05
"""About as long as the first save of a life takes; for a later one, the one before says it."""


def reference(run: Run) -> tuple[dict[str, Any], float]:
    """What the run leaves when nothing happens and nothing is saved, and how long that takes."""
    plain = fresh(replace(run, every_steps=None))
    began = time.monotonic()
    codes = run_to_end(plain, partial(prepare, run.broken, None))
    assert codes == [DONE] * run.world, results(plain)
    return results(plain), time.monotonic() - began


def kill_trials(run: Run, seeds: range, stop_at: int | None = None) -> dict[str, Any]:
    """A trial a seed; problems by seed, and how many kills struck. Ends early after ``stop_at`` seeds with problems."""
    expected, seconds = reference(replace(run, folder=run.folder / "reference"))
    problems: dict[int, list[str]] = {}
    kills = 0
    for seed in seeds:
        trial = replace(run, folder=run.folder / "trial")
        chance, struck = random.Random(seed), 0
        while not struck:  # a run can be done before it is killed
            struck = kill_and_finish(fresh(trial), chance, seconds)
        kills += struck
        found = compare(trial, expected)
        if found:
            problems[seed] = found
        if stop_at and len(problems) >= stop_at:
            break
    return {"problems": problems, "kills": kills, "trials": len(seeds)}


def kill_and_finish(run: Run, chance: random.Random, seconds: float) -> int:
    """Lives that are killed, then one that is not; how many kills struck."""
    kills = 0
    for _ in range(chance.randint(1, MAX_KILLS)):
        codes = killed_life(run, chance, seconds)
        if codes == [DONE] * run.world:
            return kills
        kills += -signal.SIGKILL in codes
    run_to_end(run, partial(prepare, run.broken, None))
    return kills


def killed_life(run: Run, chance: random.Random, seconds: float) -> list[int | None]:
    """A life with a kill, at a named point or at a random time, of one rank or of all."""
    victims = chance.choice([[rank] for rank in range(run.world)] + [list(range(run.world))])
    if run.shard != "none":
        nth, share = chance.randint(1, SAVES_OF_A_LIFE), chance.random()
        return Life(run, partial(prepare_to_die_saving, victims, nth, share)).end()
    if chance.random() < 0.5:
        point = chance.choice(list(POINTS))
        rank = 0 if point in OF_RANK_0 else victims[0]
        strike = (rank, len(victims) > 1, point, chance.random() < 0.5, chance.randint(1, POINTS[point][2]))
        return Life(run, partial(prepare, run.broken, strike)).end()
    life = Life(run, partial(prepare, run.broken, None))
    time.sleep(chance.uniform(0, seconds))
    life.kill(victims)
    return life.end()


def prepare(broken: str, strike: tuple[int, bool, str, bool, int] | None, rank: int) -> None:
    """Give a rank its defect, and the point at which it dies."""
    if broken:
        BREAK[broken]()
    if strike is not None and strike[0] == rank:
        arm(*strike[1:])


def prepare_to_die_saving(victims: list[int], nth: int, share: float, rank: int) -> None:
    """Let the first victim end itself, or its whole group, in its n-th save, when a share of that has passed."""
    if rank != victims[0]:
        return
    write = CHECKPOINTS.saver.Checkpoints._written
    seconds, calls = FIRST_SAVE_S, 0

    def write_and_die(*args: Any, **options: Any) -> bool:
        nonlocal seconds, calls
        calls += 1
        began = time.monotonic()
        if calls == nth:
            threading.Timer(share * seconds, _die, [len(victims) > 1]).start()
        written = write(*args, **options)
        if calls == nth:  # it was done sooner than the one before
            _die(len(victims) > 1)
        seconds = time.monotonic() - began
        return written

    CHECKPOINTS.saver.Checkpoints._written = write_and_die


def arm(everyone: bool, point: str, before: bool, nth: int) -> None:
    """End this process, or its whole group, just before or after the n-th call of a named point."""
    owner, name, _ = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and before:
            _die(everyone)
        result = original(*args, **kwargs)
        if calls == nth:
            _die(everyone)
        return result

    setattr(owner, name, call)


def _die(everyone: bool) -> None:
    if everyone:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def compare(run: Run, expected: dict[str, Any]) -> list[str]:
    """What is not as in a run that nothing happened to: weights, optimizer, any step of any life, a lost commit."""
    found: list[str] = []
    for rank, own in results(run).items():
        reference_of_rank = expected[rank]
        steps = {line["step"]: line for line in reference_of_rank["log"] if "step" in line}
        if own["result"] is None:
            found.append(f"rank {rank} has no result, and ends with {own['log'][-1:]}")
        elif own["result"] != reference_of_rank["result"]:
            found.append(f"rank {rank} ended with {own['result']} and not {reference_of_rank['result']}")
        done = {line["step"] for line in own["log"] if "step" in line}
        if rank == "0" and done != set(range(NUM_STEPS)):  # another rank may be killed before it can tell
            found.append(f"rank {rank} did the steps {sorted(done)}")
        found += [f"rank {rank}: {line}" for line in own["log"] if "step" in line and line != steps[line["step"]]]
        found += [f"rank {rank}: {line}" for line in own["log"] if "refused" in line]
        if rank == "0":
            found += lost_commits(own["log"])
    return found


def lost_commits(log: list[dict[str, Any]]) -> list[str]:
    """Lives that began before a step that had been committed."""
    committed, found = 0, []
    for line in log:
        if line.get("resumed", committed) < committed:
            found.append(f"went on from {line['resumed']} although {committed} had been committed")
        committed = max(committed, line.get("committed", 0))
    return found
