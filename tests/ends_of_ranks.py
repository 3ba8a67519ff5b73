"""Two forked ranks that end as under a launcher: with exit codes, and the store by which they hear of one another."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

from nursery import free_port
from torch.distributed import TCPStore

from memsave_recipes.training.launch.distributed import missing_ranks_end_the_run
from memsave_recipes.training.launch.start import Accelerator

FORK, END_S = get_context("fork"), 60
Program = Callable[[Accelerator], None]


def ends_of(
    program: Program, folder: Path, limit_s: float | None = None, all_end: bool = True
) -> tuple[list[int | None], list[str]]:
    """Exit code and words of both ranks of ``program(accelerator)``; ``None`` for a hang.

    Args:
        limit_s: how long a rank may keep the other waiting; ``None`` where the program has a watch of its own.
        all_end: whether to wait for the end of rank 1.
    """
    port = free_port()
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in world.items()}
    ranks = [FORK.Process(target=_be_rank, args=(program, folder, rank, limit_s)) for rank in range(2)]
    for process in ranks:
        process.start()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as the launcher keeps it
    ranks[0].join(END_S)
    ranks[1].join(END_S if all_end else 0)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    del store
    return codes, [(folder / f"printed-{rank}").read_text() for rank in range(2)]


def _be_rank(program: Program, folder: Path, rank: int, limit_s: float | None) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    printed = os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 2)
    accelerator = Accelerator()
    with nullcontext() if limit_s is None else missing_ranks_end_the_run(limit_s):
        program(accelerator)
    os._exit(0)
