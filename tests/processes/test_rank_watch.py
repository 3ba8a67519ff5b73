"""A rank that keeps the others waiting ends the run, and is named; the work of rank 0 may take its time."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from accelerate.utils import gather_object
from ends_of_ranks import END_S, ends_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from memsave_recipes.distributed import (
    BEHIND,
    DONE,
    SILENT,
    Lateness,
    main_process_first,
    on_main_process,
    report_of,
)
from memsave_recipes.processes import LOST
from memsave_recipes.run.failures import run_recipe

LIMIT_S = 3.0


class TestLateness:
    """Three ranks, of which rank 1 is late; a tick a second."""

    def late_after(self, ticks, reports):
        lateness = Lateness(num_ranks=3, limit_s=3)
        found = [lateness.take_in(reports(tick), 1.0) for tick in range(1, ticks + 1)]
        return found[-1]

    def test_a_rank_that_reports_nothing_more(self):
        def reports(tick):
            return [report_of(tick, 5), report_of(min(tick, 2), 5), report_of(tick, 5)]

        assert self.late_after(5, reports) == {}
        assert self.late_after(6, reports) == {1: SILENT}

    def test_a_rank_that_is_behind_the_others(self):
        def reports(tick):
            return [report_of(tick, 6), report_of(tick, 5), report_of(tick, 6)]

        assert self.late_after(4, reports) == {}
        assert self.late_after(5, reports) == {1: BEHIND}

    def test_a_rank_that_is_slow_but_comes(self):
        def reports(tick):
            return [report_of(tick, tick // 3 + 1), report_of(tick, tick // 3), report_of(tick, tick // 3 + 1)]

        assert self.late_after(30, reports) == {}

    def test_all_that_compute_for_long_without_a_collective(self):
        def reports(tick):
            return [report_of(tick, 5 + (tick == 30))] + [report_of(tick, 5)] * 2

        assert self.late_after(30, reports) == {}

    def test_a_rank_that_is_done(self):
        def reports(tick):
            return [report_of(tick, 6), DONE if tick > 1 else report_of(tick, 5), report_of(tick, 6)]

        assert self.late_after(30, reports) == {}


def asleep(accelerator):
    """Rank 1 does not come to the gradients' all-reduce."""
    model = accelerator.prepare(nn.Linear(2, 2))
    for step in range(2):
        if step == 1 and accelerator.process_index == 1:
            time.sleep(10 * END_S)
        accelerator.backward(model(torch.ones(1, 2)).sum())


def stopped(accelerator):
    """Rank 1 is stopped as a whole."""
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    accelerator.wait_for_everyone()


def long_work(accelerator):
    """What only rank 0 does takes longer than ranks may wait for one another."""
    on_main_process(accelerator, partial(time.sleep, 2 * LIMIT_S))
    with main_process_first(accelerator):
        time.sleep(2 * LIMIT_S * accelerator.is_main_process)


def alone(accelerator):
    time.sleep(2 * LIMIT_S)


def in_a_backward(accelerator):
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())


def in_shards(accelerator):
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()


def with_objects(accelerator):
    gather_object([accelerator.process_index])


def on_the_first_rank(accelerator):
    on_main_process(accelerator, list)


def killed(rank, meeting, accelerator):
    """That rank is, and no launcher is there to end the other, which comes to ``meeting``."""

    def main():
        accelerator.wait_for_everyone()
        if accelerator.process_index == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        meeting(accelerator)

    run_recipe(main)


@pytest.mark.parametrize(
    ("rank", "meeting"),
    [(1, in_a_backward), (0, in_a_backward), (1, in_shards), (1, with_objects), (1, on_the_first_rank)],
)
def test_a_rank_whose_peer_was_killed_says_so_in_a_line(run_trial, tmp_path, rank, meeting):
    codes, printed = run_trial(ends_of, partial(killed, rank, meeting), tmp_path, LIMIT_S)
    assert codes == [-signal.SIGKILL if one == rank else LOST for one in range(2)]
    (line,) = [line for line in printed[1 - rank].splitlines() if not line.startswith("[")]
    assert line.startswith("error: another rank is gone (")
    assert line.endswith("the last checkpoint is as it was, go on with --resume")


@pytest.mark.parametrize(("program", "how"), [(asleep, BEHIND), (stopped, SILENT)])
def test_a_rank_that_is_waited_for_in_vain_ends_the_run(run_trial, tmp_path, program, how):
    codes, printed = run_trial(ends_of, program, tmp_path, LIMIT_S, program is not stopped)
    assert codes == [LOST, None if program is stopped else LOST]
    assert printed == [
        f"\nerror: for more than 0.05 minutes (--collective_timeout_minutes) rank 1 of 2 {how}: ended in the "
        "middle of a step; the last checkpoint is as it was, go on with --resume\n",
        "",
    ]


@pytest.mark.parametrize("program", [long_work, alone])
def test_nobody_is_missing_where_no_collective_waits(run_trial, tmp_path, program):
    assert run_trial(ends_of, program, tmp_path, LIMIT_S) == ([0, 0], ["", ""])
