"""Two ranks report one run: samples and tokens are sums over the ranks, the memory is that of the larger one."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.run.report import RunReport
from memsave_recipes.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.batching import GlobalBatches

NUM_SAMPLES, GLOBAL_BATCH_SIZE, WIDTH, MIB = 16, 6, 4, 2**20
NUM_STEPS = 9  # three epochs of two steps of 6 samples and a step of 4
FIRST_WINDOW = 3  # steps, the warm-up among them


class Rows(torch.utils.data.Dataset):
    """Of the four positions of sample i, 1 + i % 4 are valid."""

    def __getitem__(self, key):
        labels = torch.arange(WIDTH)
        labels[1 + key.index % WIDTH if key.counted else 0 :] = IGNORED_LABEL
        return {"inputs": torch.ones(WIDTH), "labels": labels}


NUM_VALID = sum(1 + i % WIDTH for i in range(NUM_SAMPLES))  # in an epoch


@dataclass
class Recorder:
    """A tracker that keeps its rows."""

    rows: list
    name = "recorder"

    def log(self, values, step):
        self.rows.append({"step": step, **values})


def train(hungry_rank, accelerator):
    """Rows that the rank logged and its results; one rank's forward takes 64 MiB more than the other's."""
    recorder = Recorder([])
    if accelerator.is_main_process:
        accelerator.trackers = [recorder]
    batches = GlobalBatches(
        accelerator,
        Rows(),
        order=SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=GLOBAL_BATCH_SIZE, seed=0),
        layout=BatchLayout.of(GLOBAL_BATCH_SIZE, 2, accelerator.num_processes),
        num_steps=NUM_STEPS,
        seed=0,
        count_valid=lambda batch: (batch["labels"] != IGNORED_LABEL).sum(),
    )
    model = nn.Linear(WIDTH, WIDTH)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = RunReport(accelerator, batches, model, optimizer)

    def train_step(batch):
        for micro_batch in batch.forwards(model):
            outputs = model(micro_batch["inputs"])
            if accelerator.process_index == hungry_rank:
                outputs = outputs + torch.zeros(64 * MIB, dtype=torch.uint8)[0]
            batch.backward(outputs[micro_batch["labels"] != IGNORED_LABEL].sum())
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        with report.memory.measured(batch.step):
            train_step(batch)
        report.count(batch, torch.tensor(1.0))
        if batch.step + 1 in (FIRST_WINDOW, NUM_STEPS):
            report.log_window(batch.step + 1, learning_rate=0.1)
    return recorder.rows, report.results()


def test_sums_and_the_larger_peak(run_on_ranks):
    (rows, results), (rows_of_rank_1, results_of_rank_1) = run_on_ranks(partial(train, 1), 2)
    assert rows_of_rank_1 == []
    (_, row) = rows
    assert row["progress/samples_seen"] == results["samples_seen"] == 3 * NUM_SAMPLES
    assert row["progress/tokens_seen"] == results["tokens_seen"] == 3 * NUM_VALID
    steps = NUM_STEPS - FIRST_WINDOW
    assert row["perf/samples_per_sec"] * row["perf/step_time_s"] == pytest.approx(2 * NUM_SAMPLES / steps)
    assert row["perf/tokens_per_sec"] * row["perf/step_time_s"] == pytest.approx(2 * NUM_VALID / steps)
    assert row["memory/peak_allocated_gib"] > 64 / 1024
    assert results["memory"]["peak_allocated_gib"] == results_of_rank_1["memory"]["peak_allocated_gib"] > 64 / 1024


def test_the_peak_without_the_hungry_rank(run_on_ranks):
    (rows, results), _ = run_on_ranks(partial(train, None), 2)
    assert rows[-1]["memory/peak_allocated_gib"] < 1 / 1024
    assert results["memory"]["peak_allocated_gib"] < 1 / 1024
