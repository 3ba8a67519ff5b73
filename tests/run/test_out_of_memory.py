"""A run that finds no memory left ends with one page and exit code 3, wherever in the step it happened."""

import errno
from functools import partial

import pytest
import torch
from memory_budget import CUDA_WORDS, Budget
from torch import nn

from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.run import failures
from memsave_recipes.run.failures import OUT_OF_MEMORY, run_recipe
from memsave_recipes.run.report import RunReport
from memsave_recipes.training.batching import GlobalBatches

WIDTH, ROWS, LAYERS, MIB = 256, 1024, 4, 2**20  # a layer gives 1 MiB and has a weight of 256 KiB


class Rows(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return {"inputs": torch.randn(ROWS // 4, WIDTH)}


def fail_in(accelerator, *, step, budget):
    """The page, and what is left alive of the step's instruments."""
    batches = GlobalBatches(
        accelerator,
        Rows(),
        order=SampleOrder(num_samples=64, global_batch_size=4, seed=0),
        layout=BatchLayout.of(4, 4, accelerator.num_processes),
        num_steps=4,
        seed=0,
    )
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    report = RunReport(accelerator, batches, model, optimizer)

    def train_step(batch):
        for micro_batch in batch.forwards(model):
            loss_sum = model(micro_batch["inputs"].flatten(0, 1)).sum()
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        if batch.step < step:
            with report.measured(batch.step):
                train_step(batch)
            continue
        with pytest.raises(torch.OutOfMemoryError) as failure, Budget(budget), report.measured(batch.step):
            train_step(batch)
        return str(failure.value), type(failure.value.__cause__).__name__
    return None


def amounts(page):
    """Name to amount, of the page's tables."""
    rows = [line.strip().split("  ") for line in page.splitlines() if line.startswith("  ")]
    columns = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: row[1] for row in columns if len(row) > 1}


def test_after_the_recorded_step_the_page_has_its_breakdown(run_on_ranks):
    ((page, cause),) = run_on_ranks(partial(fail_in, step=2, budget=3 * MIB), 1)
    assert cause == "OutOfMemoryError"
    first, second, third, *_ = page.splitlines()
    assert first.startswith("out of memory in step 3 on rank 0 of 1 (")
    assert second.strip() == CUDA_WORDS
    assert third == "what filled it, at the peak of an earlier step, measured:"
    found = amounts(page)
    assert found["parameters"] == "1 MiB"
    assert found["optimizer state"] == "2 MiB"
    assert found["activations"] == "3 MiB"  # what the first three layers gave: it is in the last one's backward
    assert found["together"].endswith("MiB")


@pytest.mark.parametrize(("budget", "saved"), [(2, "2 MiB"), (4, "4 MiB")])
def test_in_the_first_forward_the_page_says_what_is_known_then(run_on_ranks, budget, saved):
    """Each layer saves its output; the first one the batch as well."""
    ((page, _),) = run_on_ranks(partial(fail_in, step=0, budget=budget * MIB), 1)
    found = amounts(page)
    assert page.splitlines()[2] == "what filled it, as far as it had come:"
    assert found["parameters"] == "1 MiB"
    assert found["gradients"] == found["optimizer state"] == "0 B"
    assert found["saved for the backward"] == saved


def other_errors(accelerator):
    batches = GlobalBatches(
        accelerator,
        Rows(),
        order=SampleOrder(num_samples=4, global_batch_size=4, seed=0),
        layout=BatchLayout.of(4, 4, 1),
        num_steps=1,
        seed=0,
    )
    model = nn.Linear(1, 1)
    report = RunReport(accelerator, batches, model, torch.optim.SGD(model.parameters(), lr=0.1))
    words = "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match=words) as failure, report.measured(0):
        raise RuntimeError(words)
    return type(failure.value).__name__


def test_other_errors_stay_what_they_are(run_on_ranks):
    assert run_on_ranks(other_errors, 1) == ["RuntimeError"]


def test_a_host_without_memory_is_out_of_memory_too():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "unable to mmap 4096 bytes from file </torch_7_1>: Cannot allocate memory (12)",
    ],
)
def test_libraries_and_drivers_say_it_in_words(words):
    assert is_out_of_memory(RuntimeError(words))


def test_a_process_that_cannot_be_forked_has_no_memory():
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("anything else"), OSError(errno.ENOSPC, "No space left"), InputError("out of memory, they said")],
)
def test_nothing_else_is_taken_for_it(error):
    assert not is_out_of_memory(error)


def end_of(error, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run_recipe(main)
    return end.value.code, capsys.readouterr().err


def test_the_exit_code_is_3_and_the_page_is_on_stderr(capsys):
    code, message = end_of(torch.OutOfMemoryError("out of memory in step 3\n  more"), capsys)
    assert code == OUT_OF_MEMORY == 3
    assert message == "out of memory in step 3\n  more\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_rank_that_failed_speaks(monkeypatch, capsys, rank):
    """All others after a moment, in which rank 0 has ended the run if it failed as well."""
    waited = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(failures.time, "sleep", waited.append)
    assert end_of(torch.OutOfMemoryError(f"rank {rank}"), capsys) == (3, f"rank {rank}\n")
    assert waited == ([] if rank == "0" else [failures.REPORT_DELAY_S])


def test_a_connection_of_something_else_is_no_rank_that_is_gone():
    def main():
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        run_recipe(main)


def test_an_unforeseen_error_keeps_its_traceback():
    def main():
        raise RuntimeError("unforeseen")

    with pytest.raises(RuntimeError, match="unforeseen"):
        run_recipe(main)
