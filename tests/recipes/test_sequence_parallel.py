"""``--sequence_parallel``: rows that ranks share train the curve of one rank, go on elsewhere, and are counted once."""

import json
import os
import re
import shutil
import signal
from contextlib import nullcontext
from functools import cache, partial

import pytest
from lives import assert_the_same_weights, be_rank, curve
from samples import sample
from shared_rows import SHARED, flags_of_data, of

from memsave_recipes.training.checkpoints import Checkpoints, StoppedBySignal
from memsave_recipes.training.checkpoints.resume import find_newest
from memsave_recipes.training.launch import distributed

RECIPE = "language_modeling"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    steps = ["--max_steps", "4", "--eval_steps", "2", "--save_every", "2"]
    return [*flags_of_data(tmp_path_factory.mktemp("data")), *steps, "--report_to", "none"]


@pytest.fixture(scope="module")
def train(run_on_ranks, flags):
    """Train on so many forked ranks, into the folder; returns what was printed."""

    def run(folder, num_ranks, *more):
        words = [*flags, *more, "--output_dir", str(folder)]
        ranks = run_on_ranks(partial(be_rank, recipe=RECIPE, words=words), num_ranks, timeout_s=600)
        return "".join(printed for _, printed in ranks)

    return run


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """The folder of a run from the beginning, each done once."""

    @cache
    def once(num_ranks, *more):
        folder = tmp_path_factory.mktemp("run")
        train(folder, num_ranks, *more)
        return folder

    return once


def stopped_after_two(folder, target):
    """As if the run had been killed in its third step."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "checkpoints" / "step-4")
    shutil.rmtree(target / "final")
    (target / "results.json").unlink()
    return target


def results(folder):
    return json.loads((folder / "results.json").read_text())


def assert_the_same_curve(folder, expected, rel=1e-12):
    assert curve(folder) == pytest.approx(curve(expected), rel=rel)
    assert len(curve(folder)) == 4
    ours, theirs = map(results, (folder, expected))
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=rel)
    assert [ours[name] for name in ("tokens_seen", "samples_seen")] == [theirs["tokens_seen"], 20]


def test_a_run_of_one_rank_goes_on_with_rows_on_two(train, run, tmp_path):
    one = run(1, *of("mistral"))
    two = stopped_after_two(one, tmp_path / "two")
    printed = train(two, 2, *of("mistral"), *SHARED, "--activation_checkpointing", "full", "--resume")
    assert "note: --sequence_parallel was 1 and is 2: ranks add gradients in another order" in printed
    assert "going on as 5 samples = (2+2+1) x 1 group of 2 ranks: data-exact" in printed
    assert "rows are shared by 2 ranks" in printed
    assert_the_same_curve(two, one)
    flops = [results(folder)["perf"]["model_gflops_per_sample"] for folder in (two, one)]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)


def in_step_3(accelerator, *, number, words):
    """The recipe on a rank; when three steps are done the last rank gets a signal."""
    after_step, distributed.POLL_EVERY_S = Checkpoints.after_step, 0

    def with_a_signal(self, step, state):
        if step == 3 and accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), number)
        after_step(self, step, state)

    Checkpoints.after_step = with_a_signal
    with pytest.raises(StoppedBySignal):
        be_rank(accelerator, recipe=RECIPE, words=words)


@pytest.fixture(scope="module")
def ended(run_on_ranks, flags, tmp_path_factory):
    """The folder of a run whose last rank gets a signal; of each kind one."""

    @cache
    def once(number, num_ranks, *more):
        folder = tmp_path_factory.mktemp("ended")
        words = [*flags, *more, "--output_dir", str(folder)]
        lost = pytest.raises(RuntimeError, match=f"rank {num_ranks - 1}: ended without a result")
        with lost if number == signal.SIGKILL else nullcontext():
            run_on_ranks(partial(in_step_3, number=number, words=words), num_ranks, timeout_s=200)
        assert find_newest(folder / "checkpoints").step == (2 if number == signal.SIGKILL else 3)
        return folder

    return once


def sharing(ranks):
    return "--sequence_parallel", str(ranks)


KILL, TERM = signal.SIGKILL, signal.SIGTERM
ENDED = {
    "killed, two to one": (KILL, (4, 2), (2, 1)),
    "killed, two to four": (KILL, (4, 2), (4, 4)),
    "stopped, four to two": (TERM, (4, 4), (2, 2)),
    "stopped, one to two": (TERM, (2, 1), (4, 2)),
}
"""A signal to the last rank; how many ranks there were, and how many of them shared a row; and then."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDED)
def test_what_was_ended_goes_on_with_rows_on_another_number_of_ranks(run, train, ended, tmp_path, how):
    number, (num_before, shared_before), (num_ranks, shared) = ENDED[how]
    folder = tmp_path / "run"
    shutil.copytree(ended(number, num_before, *of("llama"), *sharing(shared_before)), folder)
    printed = train(folder, num_ranks, *of("llama"), *sharing(shared), "--resume")
    assert f"note: --sequence_parallel was {shared_before} and is {shared}: " in printed
    assert re.search(r"saved as 5 samples = .+, going on as 5 samples = .+: data-exact", printed)
    assert_the_same_curve(folder, run(1, *of("llama")))


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, TERM])
def test_what_was_ended_goes_on_as_before_with_the_same_bits(run, train, ended, tmp_path, number):
    more = (*of("llama"), *SHARED)
    folder, straight = tmp_path / "run", run(4, *more)
    shutil.copytree(ended(number, 4, *more), folder)
    train(folder, 4, *more, "--resume")
    assert curve(folder) == curve(straight)
    assert_the_same_weights(folder / "final", straight / "final")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["full", "selective", "full_tiled:8", "full_tiled_offload:8"])
def test_verify_holds_for_shared_rows(train, tmp_path, plan):
    more = ("--activation_checkpointing", plan, "--verify", "--dtype", "float32")
    dropping = of("gpt2", "attn_pdrop=0.1,embd_pdrop=0.1,resid_pdrop=0.1")
    assert "--verify: one global batch" in train(tmp_path / "run", 2, *dropping, *SHARED, *more)


@pytest.mark.slow
@pytest.mark.parametrize("more", sample([[]], [[], ["--shard", "full"]]))
def test_a_budget_is_searched_by_estimates(train, run, tmp_path, more):
    budget = ("--activation_checkpointing", "budget", "--micro_batch_size", "auto", "--memory_budget_gib", "0.0025")
    printed = train(tmp_path / "run", 2, *of("mistral"), *SHARED, *budget, *more)
    flag = "--shard full" if more else "--sequence_parallel 2"
    assert f"{flag}: planning by estimates for this CPU" in printed
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["memory"]["predicted_peak_gib"] <= 0.0025
    assert found["plan"] != "none"
    assert_the_same_curve(tmp_path / "run", run(1, *of("mistral")))


@pytest.mark.slow
def test_compiled_layers_have_the_curve_of_one_rank(run):
    one, two = run(1, *of("llama")), run(2, *of("llama"), *SHARED, "--compile", "--activation_checkpointing", "full")
    assert json.loads((two / "plan.json").read_text())["compiled"]
    assert curve(two) == pytest.approx(curve(one), rel=1e-6)


REFUSED = {
    ("--bitwise_topology",): "adds up the gradients of whole rows: leave one of them out",
    (): "1 rank cannot be divided into groups of 2: launch a multiple of 2, or leave it out",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_shared_rows_do_not_go_with_is_refused_in_a_line(refuse, flags, more):
    line = refuse(*flags, *of("llama"), *SHARED, *more)
    assert line.startswith("error: --sequence_parallel 2: ")
    assert REFUSED[more] in line


def test_fewer_than_one_rank_is_refused(refuse, flags):
    assert "--sequence_parallel 0: must be at least 1" in refuse(*flags, *of("llama"), "--sequence_parallel", "0")
