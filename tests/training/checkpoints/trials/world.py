"""Launch the ranks of a run's life, as a launcher would: all in a process group, and when one dies, all end."""

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from nursery import free_port
from trials.recipe import train_recipe
from trials.run import Log, Run, train

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch.start import Accelerator, drain_gloo

FORK = get_context("fork")
HANG_S = 30
DONE, REFUSED, FAILED = 0, 2, 1


class Life:
    """The processes of one launch."""

    def __init__(self, run: Run, prepare: Callable[[int], None] = lambda rank: None) -> None:
        """``prepare(rank)`` is called in each rank before it begins."""
        port = free_port()
        self.group = 0
        self.ranks: list[ForkProcess] = []
        for rank in range(run.world):
            process = FORK.Process(target=_be_rank, args=(run, rank, port, self.group, prepare))
            process.start()
            self.group = self.group or process.pid or 0
            self.ranks.append(process)
            with suppress(PermissionError, ProcessLookupError):  # it does so itself, and may have ended since
                os.setpgid(process.pid or 0, self.group)

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.ranks[rank].kill()

    def end(self, timeout_s: float = HANG_S) -> list[int | None]:
        """Wait until all have ended, or one has died, which ends the others; their exit codes, ``None`` for a hang."""
        deadline = time.monotonic() + timeout_s
        alive = list(self.ranks)
        while alive and wait([process.sentinel for process in alive], max(0.0, deadline - time.monotonic())):
            alive = [process for process in alive if process.exitcode is None]
            if any(process.exitcode is not None and process.exitcode < 0 for process in self.ranks):
                break
        codes = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
            process.join()
        return codes


def run_to_end(run: Run, prepare: Callable[[int], None] = lambda rank: None) -> list[int | None]:
    """One life without a fault."""
    return Life(run, prepare).end()


def results(run: Run) -> dict[str, Any]:
    """What every rank had at the end, and every line of its log."""
    return {
        str(rank): {"result": _read_json(run.folder / f"result-{rank}.json"), "log": read_log(run, rank)}
        for rank in range(run.world)
    }


def read_log(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    path = run.folder / f"log-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fresh(run: Run) -> Run:
    """``run`` with an empty folder."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    return run


def _be_rank(run: Run, rank: int, port: int, group: int, prepare: Callable[[int], None]) -> None:
    os.setpgid(0, group)
    if run.world > 1:
        world = {"WORLD_SIZE": run.world, "RANK": rank, "LOCAL_WORLD_SIZE": run.world, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in world.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os._exit(_live(run, rank, prepare))


def _live(run: Run, rank: int, prepare: Callable[[int], None]) -> int:
    log = Log(run, rank)
    try:
        log_commits(log)
        prepare(rank)
        result = train_recipe(run, log) if run.recipe else train(run, Accelerator(), log)
        (run.folder / f"result-{rank}.json").write_text(json.dumps(result))
        if torch.distributed.is_initialized():  # a recipe has ended its world
            torch.distributed.barrier()
        code = DONE
    except SystemExit as stop:
        log.write(stopped=stop.code)
        code = int(stop.code or 0)
    except InputError as error:
        log.write(refused=error.one_line)
        code = REFUSED
    except Exception:
        log.write(failed=traceback.format_exc())
        code = FAILED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    drain_gloo()
    return code


def log_commits(log: Log) -> None:
    """Note every step folder that gets its name."""
    rename = os.rename

    def rename_and_tell(source: Any, target: Any) -> None:
        rename(source, target)
        name = Path(target).name
        if name.startswith("step-"):
            log.write(committed=int(name.removeprefix("step-")))

    os.rename = rename_and_tell


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
