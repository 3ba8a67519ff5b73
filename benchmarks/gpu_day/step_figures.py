"""What steps take on the device that is here: seconds, memory, graphs, and kernels by class."""

from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import Any

import harness
import torch
from host_time import WARM_UP
from recipe_steps import Real
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.utils.flop_counter import flop_registry

from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.text import format_bytes

CLASSES = ("products", "attention", "casts", "others")
STEPS = 3
HAVE_FLOPS = frozenset(map(str, flop_registry))
STAND_IN_REMARK = "The device is a stand-in for CUDA: **no figure here is a GPU's**. "
Row = dict[str, Any]


def class_of(operation: str, flops: float) -> str:
    """The class of an operator."""
    if "attention" in operation:
        return "attention"
    if flops:
        return "products"
    return "casts" if operation.endswith("_to_copy") else "others"


class RandomData(Real):
    """With tokens or pixels that are drawn."""

    def batch(self, size: int) -> Batch:
        """A micro-batch."""
        batch = super().batch(size)
        words = getattr(getattr(self.model, "config", None), "vocab_size", 0)
        for name, most in (("input_ids", words), ("images", 256)):
            if name in batch:
                batch[name].random_(most)
        return batch | {"labels": batch["input_ids"]} if words else batch


def add_gradients(real: Real, batch: Batch) -> None:
    """A forward and a backward."""
    real.accelerator.backward(real.task.loss_of(real.trained, batch) / real.task.run.global_batch_size)


def figures_of(step: Callable[[], Any], micro_batch: Callable[[], Any], micro_batches: int) -> Row:
    """Seconds and peak of a step, graphs, and milliseconds of a micro-batch's kernels by class."""
    counters.clear()
    for _ in range(1 + ceil(WARM_UP / micro_batches)):
        step()
    torch.accelerator.reset_peak_memory_stats()
    step_s = median(harness.seconds_of(step) for _ in range(STEPS))
    peak_bytes = torch.accelerator.max_memory_allocated()
    with torch.profiler.profile() as profiler:
        micro_batch()
        harness.wait_for_device()
    graphs = counters["stats"]["unique_graphs"]
    return {"step_s": step_s, "peak_bytes": peak_bytes, "graphs": graphs, "kernels_ms": kernels_ms(profiler.events())}


def kernels_ms(events: Sequence[Any]) -> dict[str, float]:
    """By class, the milliseconds of the kernels in events of torch's profiler."""
    found = dict.fromkeys(CLASSES, 0.0)
    for event in events:
        for kernel in event.kernels:
            found[class_of_launch(event)] += kernel.duration / 1000
    on_device = [one for one in events if one.device_type != DeviceType.CPU and not one.is_user_annotation]
    whole = sum(event.time_range.elapsed_us() for event in on_device) / 1000
    return found | {"others": found["others"] + whole - sum(found.values())}  # with those that no operator launched


def class_of_launch(event: Any) -> str:
    """The class of what launched a kernel: of the innermost operator that has one."""
    if event is None:
        return "others"
    name = event.name.replace("::", ".")
    found = class_of(name, name in HAVE_FLOPS)
    return class_of_launch(event.cpu_parent) if found == "others" else found


def measured_page_of(rows: Sequence[Row], card: str, machine: Row, *, is_stand_in: bool) -> str:
    """The page of rows that were measured, beside what is predicted for a card."""
    headings = (
        *("model", "plan", "micro-batches", "tokens or images/s", "ms a step", "MFU", "peak", "graphs"),
        *(f"{name}, ms" for name in CLASSES),
    )
    named = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"From `benchmarks/mfu.py` on {machine['device']}; {named}. "
        f"{STAND_IN_REMARK if is_stand_in else ''}"
        "Steps of the recipes on random data, in bfloat16, and of loops by hand. In brackets what "
        f"[counts](mfu.md) predict for {card}. Milliseconds by class are those of the kernels of one "
        f"micro-batch.\n\n{harness.markdown_table(headings, map(measured_cells, rows))}"
    )


def measured_cells(row: Row) -> list[str]:
    """A row as text."""
    first = [row["model"], row["plan"], "{} x {}".format(*row["samples"])]
    if "refused" in row:
        return [*first, row["refused"], *["-"] * 8]
    found, expected = row["measured"], row.get("classes", {})
    step_s, mfu_pct = found["step_s"], 100 * row["peak_s"] / found["step_s"]
    return [
        *(*first, f"{row['units'] / step_s:,.0f}"),
        f"{1000 * step_s:.0f}" + (f" ({1000 * row['predicted_step_s']:.0f})" if expected else ""),
        f"{mfu_pct:.1f} %" + (f" ({row['predicted_mfu_pct']:.1f} %)" if expected else ""),
        *(format_bytes(found["peak_bytes"]), str(found["graphs"])),
        *(
            f"{ms:.1f}" + (f" ({1000 * expected[name][-1]:.1f})" if expected else "")
            for name, ms in found["kernels_ms"].items()
        ),
    ]
