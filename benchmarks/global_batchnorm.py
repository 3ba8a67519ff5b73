"""What BatchNorm over the whole global batch costs: time, peak and saved bytes of a step, beside local statistics.

    python benchmarks/global_batchnorm.py --quick   # the small models: shows that it runs
    python benchmarks/global_batchnorm.py

Each row is a step (forward and backward, no optimizer) of one global batch on this device:

* *one forward*: the whole batch at once, the baseline of all ratios;
* *accumulation*: micro-batches by themselves, with local statistics: another loss curve;
* *recompute*: the whole batch at once, every block recomputed: the statistics of the global batch, and bitwise;
* *in micro-batches*: every block recomputed in micro-batches, ``--batchnorm global --micro_batch_size N``.

Prints the table and writes docs/results/global_batchnorm.json.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.plans import Plan
from memsave_recipes.models.convnets import build_densenet, build_vgg
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm

MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg16_bn": partial(build_vgg, "vgg16_bn"),
    "densenet121": partial(build_densenet, "densenet121"),
    "resnet50": lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
}
QUICK = {
    "vgg_small_bn": partial(build_vgg, "vgg_small_bn"),
    "densenet_small": partial(build_densenet, "densenet_small"),
}
SIZES = {"image_size": 96, "global_batch_size": 16, "micro_batch_size": 4, "rounds": 9}
QUICK_SIZES = {"image_size": 32, "rounds": 3}
HEADINGS = ("model", "way", "time", "middle half", "peak", "curve")


def main(args: Sequence[str] | None = None) -> None:
    """Measure every way of every model."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    sizes = SIZES | QUICK_SIZES if flags.quick else SIZES
    device = harness.this_device()
    rows = [
        row for name, make in (QUICK if flags.quick else MODELS).items() for row in rows_of(name, make, sizes, device)
    ]
    cells = [
        (
            row["model"],
            row["way"],
            f"x{row['time_ratio']:.2f}",
            " - ".join(f"x{end:.2f}" for end in row["quartiles"]),
            f"{row['peak_mib']:.1f} MiB",
            row["curve"],
        )
        for row in rows
    ]
    harness.show(HEADINGS, cells)
    results = {"machine": harness.describe_machine(device, "transformers"), "flags": sizes, "rows": rows}
    harness.write_results(flags.output_dir, "global_batchnorm", results)


def rows_of(
    name: str, make: Callable[[], nn.Module], sizes: dict[str, int], device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for each way to compute a step of the model."""
    torch.manual_seed(0)
    model = make().to(device).train()
    images = torch.randn(sizes["global_batch_size"], 3, sizes["image_size"], sizes["image_size"], device=device)
    ways = dict(ways_of(model, images, sizes["micro_batch_size"]))
    for step in ways.values():
        step()
    seconds = harness.time_in_turns(ways, sizes["rounds"], before=harness.empty_device)
    for way, step in ways.items():
        middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds[way], seconds["one forward"]))
        yield {
            "model": name,
            "way": way,
            "time_ratio": middle,
            "quartiles": quartiles,
            "peak_mib": harness.to_mib(harness.peak_bytes(step, device)),
            "curve": "another" if way == "accumulation" else "the same",
        }


def ways_of(model: nn.Module, images: Tensor, micro_batch_size: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The ways by name, each a step that leaves the gradients cleared."""
    joined = copy.deepcopy(model)
    global_batchnorm(joined)
    full = plan_blocks(joined, "full")
    yield "one forward", partial(step_of, model, [images])
    yield "accumulation", partial(step_of, model, images.split(micro_batch_size))
    yield "recompute", partial(planned_step, joined, full, images)
    yield "in micro-batches", partial(planned_step, joined, full.in_micro_batches(micro_batch_size), images)


def planned_step(model: nn.Module, plan: Plan, images: Tensor) -> None:
    """A step of the whole batch under a plan."""
    with apply_plan(model, plan):
        step_of(model, [images])


def step_of(model: nn.Module, micro_batches: Sequence[Tensor]) -> None:
    """A forward and backward of each micro-batch."""
    for images in micro_batches:
        output = model(images)
        logits = getattr(output, "logits", output)
        F.cross_entropy(
            logits, torch.zeros(len(images), dtype=torch.long, device=images.device), reduction="sum"
        ).backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
