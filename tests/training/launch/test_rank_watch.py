"""A rank that keeps the others waiting ends the run, and is named; the work of rank 0 may take its time."""

import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from accelerate.utils import gather_object
from ends_of_ranks import END_S, ends_of
from samples import sample
from torch import nn
from torch.distributed.fsdp import fully_shard

from memsave_recipes.models.sequence_parallel import SequenceGroup
from memsave_recipes.run.failures import OUT_OF_MEMORY, run_recipe
from memsave_recipes.training.launch.distributed import (
    BEHIND,
    DONE,
    SILENT,
    Lateness,
    main_process_first,
    on_main_process,
    report_of,
)
from memsave_recipes.training.launch.processes import LOST

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

    def test_a_rank_that_another_waits_for_in_a_group(self):
        """Rank 0 comes to the next exchange with rank 1, and rank 2 goes on."""

        def reports(tick):
            return [report_of(tick, min(tick, 5)), report_of(tick, min(tick, 4)), report_of(tick, tick)]

        assert self.late_after(30, reports) == {1: BEHIND}

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


def asleep_in_a_layer(accelerator):
    """Rank 1 does not come to an exchange of the rows that both share."""
    exchange = exchange_of_two()
    for step in range(2):
        if step == 1 and accelerator.process_index == 1:
            time.sleep(10 * END_S)
        exchange()


def exchange_of_two():
    group = SequenceGroup.of(2, timedelta(seconds=END_S))
    return partial(group._exchange, torch.ones(2, 1))


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


def ended_in_a_layer(end, accelerator):
    """Rank 1 is, while the other one waits for it in an exchange."""

    def main():
        exchange = exchange_of_two()
        exchange()
        if accelerator.process_index == 1:
            end()
        exchange()

    run_recipe(main)


def without_memory():
    raise MemoryError("no memory in a layer")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "codes", "told", "told_by_1"),
    [
        (without_memory, [OUT_OF_MEMORY, OUT_OF_MEMORY], "", "no memory in a layer\n"),
        (kill, [LOST, -signal.SIGKILL], "error: another rank is gone (", ""),
    ],
)
def test_a_rank_that_ends_in_a_layer_ends_those_that_share_its_rows(run_trial, tmp_path, end, codes, told, told_by_1):
    found, (by_0, by_1) = run_trial(ends_of, partial(ended_in_a_layer, end), tmp_path, LIMIT_S)
    lines = [line for line in by_0.splitlines() if not line.startswith("[")]
    assert (found, by_1) == (codes, told_by_1)
    assert len(lines) == bool(told)
    assert "".join(lines).startswith(told)


@pytest.mark.parametrize(("program", "how"), [(asleep, BEHIND), (asleep_in_a_layer, BEHIND), (stopped, SILENT)])
def test_a_rank_that_is_waited_for_in_vain_ends_the_run(run_trial, tmp_path, program, how):
    codes, printed = run_trial(ends_of, program, tmp_path, LIMIT_S, program is not stopped)
    assert codes == [LOST, None if program is stopped else LOST]
    assert printed == [
        f"\nerror: for more than 0.05 minutes rank 1 of 2 {how}: ended in the "
        "middle of a step; the last checkpoint is as it was, go on with --resume\n",
        "",
    ]


@pytest.mark.parametrize("program", sample([alone], [long_work, alone]))
def test_nobody_is_missing_where_no_collective_waits(run_trial, tmp_path, program):
    assert run_trial(ends_of, program, tmp_path, LIMIT_S) == ([0, 0], ["", ""])
