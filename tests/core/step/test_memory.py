"""What a run reports of its memory and speed: from which step, over which ranks, in how many collectives."""

from functools import partial

import pytest
import torch
from torch import nn

from memsave_recipes.core.costs import throughput
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.text import GIB
from memsave_recipes.run.memory_watch import largest_in_gib
from memsave_recipes.run.report import RunReport
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.optimizers import gather_figures

NUM_SAMPLES, WIDTH, HIDDEN, MIB = 10, 4, 8, 2**20
PER_SAMPLE = 2 * WIDTH * HIDDEN * (3 + 2)  # FLOPs of two layers; the first needs no gradient of its input


class Points(torch.utils.data.Dataset):
    def __getitem__(self, key):
        label = key.index % WIDTH if key.counted else IGNORED_LABEL
        return {"inputs": torch.full((WIDTH,), float(key.index)), "labels": torch.tensor(label)}


class Recorder:
    """A tracker that keeps its rows."""

    name = "recorder"

    def __init__(self):
        self.rows = []

    def log(self, values, step):
        self.rows.append({"step": step, **values})


def make_report(
    accelerator,
    *,
    first_step=0,
    num_steps=6,
    global_batch_size=5,
    micro_batch_size=2,
    count_valid=None,
):
    torch.manual_seed(0)
    accelerator.trackers = [Recorder()] if accelerator.is_main_process else []
    batches = GlobalBatches(
        accelerator,
        Points(),
        order=SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=global_batch_size, seed=0),
        layout=BatchLayout.of(global_batch_size, micro_batch_size, accelerator.num_processes),
        num_steps=num_steps,
        seed=0,
        count_valid=count_valid,
    )
    batches.begin_after(first_step)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return RunReport(accelerator, batches, model, optimizer)


def train(accelerator, *, hungry_rank=None, **options):
    """The logged rows, the results, and every step's mean loss over the global batch."""
    report = make_report(accelerator, **options)
    model, optimizer = report.memory.model, report.memory.optimizer
    losses = []

    def loss_of(micro_batch):
        logits = model(micro_batch["inputs"])
        if accelerator.process_index == hungry_rank:
            logits = logits + torch.zeros(64 * MIB, dtype=torch.uint8)[0]
        return nn.functional.cross_entropy(logits, micro_batch["labels"], ignore_index=IGNORED_LABEL, reduction="sum")

    def train_step(batch):
        for micro_batch in batch.forwards(model):
            loss_sum = loss_of(micro_batch)
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
        optimizer.step()
        optimizer.zero_grad()

    for batch in report.clock.loading(report.batches):
        report.count_flops(batch, loss_of)
        with report.measured(batch.step):
            train_step(batch)
        report.count(batch)
        losses.append(accelerator.reduce(batch.loss, "sum").item())
        if (batch.step + 1) % 3 == 0 or batch.step + 1 == report.batches.steps.stop:
            accelerator.log(report.end_window(batch.step + 1, learning_rate=0.1)[0], step=batch.step + 1)
    rows = accelerator.trackers[0].rows if accelerator.is_main_process else []
    return rows, report.results(), losses


def count_collectives(accelerator):
    """How many collectives a logging window needs."""
    report = make_report(accelerator, num_steps=1)
    calls = []
    for name in ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "reduce", "gather", "barrier"):
        collective = getattr(torch.distributed, name)

        def counted(*args, collective=collective, name=name, **kwargs):
            calls.append(name)
            return collective(*args, **kwargs)

        setattr(torch.distributed, name, counted)
    accelerator.gather(torch.ones(1))
    assert calls, "the collectives of accelerate are not those that are counted here"
    calls.clear()
    batch = next(iter(report.batches))
    batch.loss = torch.tensor(1.0)
    report.count(batch)
    accelerator.log(report.end_window(1, learning_rate=0.1)[0], step=1)
    return calls


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_keys_and_sums(run_on_ranks, num_ranks):
    (rows, results, losses), *_ = run_on_ranks(train, num_ranks)
    (first, last) = rows
    assert first["train/loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert last["train/loss"] == results["train_loss"] == pytest.approx(sum(losses[3:]) / 3)
    assert {key for key in last if key.startswith("memory/")} == {"memory/host_rss_gib", "memory/peak_allocated_gib"}
    assert last["memory/peak_allocated_gib"] == results["memory"]["peak_allocated_gib"]
    assert last["perf/step_time_s"] > 0
    assert "perf/mfu_pct" not in last
    assert "mfu_pct" not in results["perf"]
    assert results["memory"]["source"] == "allocations of one instrumented step"
    assert results["memory"]["instrumented_step"] == 2


def sum_of_labels(batch):
    return batch["labels"].clamp(min=0).sum()


def test_samples_and_tokens_are_sums_over_ranks_and_short_steps(run_on_ranks):
    """Of 10 samples the steps take 4, 4 and 2; a window is an epoch, whose labels add up to 13."""
    options = {"count_valid": sum_of_labels, "global_batch_size": 4}
    ((_, row), results, _), _ = run_on_ranks(partial(train, **options), 2)
    assert row["progress/samples_seen"] == results["samples_seen"] == 2 * NUM_SAMPLES
    assert row["progress/tokens_seen"] == results["tokens_seen"] == 2 * 13
    assert row["perf/samples_per_sec"] * row["perf/step_time_s"] == pytest.approx(NUM_SAMPLES / 3)
    assert row["perf/tokens_per_sec"] * row["perf/step_time_s"] == pytest.approx(13 / 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_breakdown_adds_up(run_on_ranks, num_ranks):
    for _, results, _ in run_on_ranks(train, num_ranks):
        memory = results["memory"]
        assert sum(memory["breakdown"].values()) == pytest.approx(memory["peak_allocated_gib"])
        parameters = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH)
        assert memory["breakdown"]["parameters_gib"] == parameters / GIB
        assert memory["breakdown"]["optimizer_state_gib"] == pytest.approx(2 * parameters / GIB, rel=0.1)


@pytest.mark.parametrize(("micro_batch_size", "times"), [(3, 1), (1, 2)])
def test_ddps_buckets_are_gradients(run_on_ranks, micro_batch_size, times):
    """While it accumulates, DDP holds what earlier micro-batches gave beside its buckets."""
    (_, results, _), _ = run_on_ranks(partial(train, micro_batch_size=micro_batch_size), 2)
    breakdown = results["memory"]["breakdown"]
    a_layer = 4 * (WIDTH * HIDDEN + WIDTH) / GIB  # whose gradients are on their way into their bucket
    assert breakdown["gradients_gib"] == pytest.approx(times * breakdown["parameters_gib"], abs=a_layer)


@pytest.mark.parametrize("hungry_rank", [0, 1])
def test_the_larger_peak_its_rank_and_its_breakdown(run_on_ranks, hungry_rank):
    for _, results, _ in run_on_ranks(partial(train, hungry_rank=hungry_rank), 2):
        memory = results["memory"]
        assert memory["peak_rank"] == hungry_rank
        assert memory["breakdown"]["activations_gib"] > 64 / 1024
        assert sum(memory["breakdown"].values()) == pytest.approx(memory["peak_allocated_gib"])


def test_a_window_is_one_collective(run_on_ranks):
    for calls in run_on_ranks(count_collectives, 2):
        assert len(calls) == 1


def gather_large_numbers(accelerator):
    rank = accelerator.process_index
    return gather_figures(accelerator, {"bytes": 2**52 + rank, "loss": 0.1 * rank})


def test_gathered_bytes_are_exact(run_on_ranks):
    for gathered in run_on_ranks(gather_large_numbers, 3):
        assert gathered == {"bytes": [2**52, 2**52 + 1, 2**52 + 2], "loss": [0.0, 0.1, 0.2]}


def test_counts_are_no_bytes():
    of_ranks = {"device_used": [GIB, 3 * GIB], "num_ooms": [0.0, 2.0]}
    assert largest_in_gib(of_ranks) == {"device_used_gib": 3.0, "num_ooms": 2}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_the_flops_of_a_sample_depend_on_no_batch_layout(run_on_ranks, num_ranks, micro_batch_size):
    """Five samples on two ranks are 2 and 3, so one of them computes padding."""
    for _, results, _ in run_on_ranks(partial(train, micro_batch_size=micro_batch_size), num_ranks):
        assert results["perf"]["model_gflops_per_sample"] == pytest.approx(PER_SAMPLE / 1e9)


def train_on_a_known_device(accelerator):
    throughput.PEAK_TFLOPS[".*"] = {"float32": 1e-6}  # a megaflop
    return train(accelerator)


def test_utilization_where_the_peak_is_known(run_on_ranks):
    (rows, results, _), _ = run_on_ranks(train_on_a_known_device, 2)
    for perf in ({key.removeprefix("perf/"): value for key, value in rows[-1].items()}, results["perf"]):
        assert perf["mfu_pct"] == pytest.approx(100 * PER_SAMPLE * perf["samples_per_sec"] / (2 * 1e6))


def test_a_run_of_one_step_has_its_peak(run_on_ranks):
    ((_, results, _),) = run_on_ranks(partial(train, num_steps=1), 1)
    assert results["memory"]["instrumented_step"] == 1
    assert results["memory"]["breakdown"]["activations_gib"] > 0
    assert results["memory"]["saved_for_backward_gib"] > 0
    assert "model_gflops_per_sample" not in results["perf"]


def test_a_resumed_run_measures_its_own_first_steps(run_on_ranks):
    ((rows, results, _),) = run_on_ranks(partial(train, first_step=7, num_steps=12), 1)
    assert results["memory"]["instrumented_step"] == 9
    assert results["perf"]["model_gflops_per_sample"] == pytest.approx(PER_SAMPLE / 1e9)
    assert rows[-1]["memory/peak_allocated_gib"] > 0


@pytest.mark.parametrize(("num_steps", "instrumented"), [(4, 3), (2, 1)])
def test_a_short_last_step_of_an_epoch_is_not_measured(run_on_ranks, num_steps, instrumented):
    """Of 10 samples the steps take 8, 2, 8, 2."""
    options = {"num_steps": num_steps, "global_batch_size": 8, "micro_batch_size": 8}
    ((_, results, _),) = run_on_ranks(partial(train, **options), 1)
    ((_, full, _),) = run_on_ranks(partial(train, **options | {"num_steps": 1}), 1)
    assert results["memory"]["instrumented_step"] == instrumented
    saved, peak = (
        results["memory"][name] - full["memory"][name] for name in ("saved_for_backward_gib", "peak_allocated_gib")
    )
    assert saved == 0
    assert peak >= 0


def test_a_run_that_goes_on_at_a_short_step_measures_the_next_ones(run_on_ranks):
    ((_, results, _),) = run_on_ranks(partial(train, first_step=1, num_steps=6, global_batch_size=8), 1)
    assert results["memory"]["instrumented_step"] == 5


def test_a_run_without_a_step_has_none_to_measure(run_on_ranks):
    """It evaluates a saved model, or had ended before."""
    ((rows, results, _),) = run_on_ranks(partial(train, first_step=6, num_steps=6), 1)
    assert rows == []
    assert "peak_allocated_gib" not in results["memory"]
