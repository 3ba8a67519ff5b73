"""What a step computes and moves, counted by classes of kernels, and what share of an H100's peak that predicts.

    python benchmarks/mfu.py                     # needs no GPU and no Triton

Counts are those of the planner's fake tensors: operators of one micro-batch with the kernels of CUDA, each at least one
kernel. Under ``compiled`` the products and the attention of the layers are the same, and all else in them is what
``make test-triton`` found torch's compiler to make of such a layer: docs/results/triton_kernels.json. Seconds are bytes
and FLOPs at the rates of ``core/costs/cards.json`` that kernels reach; nothing is measured, and the host takes no time.

Writes docs/results/mfu.json and .md.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import known_models
import torch
from fit_page import OfEach

from memsave_recipes.core.activations import find_stacks
from memsave_recipes.core.costs import estimate
from memsave_recipes.core.costs.preserve_state import replaced
from memsave_recipes.core.costs.repeats import Repeats
from memsave_recipes.core.costs.step_trace import StepTrace
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.planner.task import Estimates, Launch, read_task
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.tools.fit.ladder import find_subject

TRITON = harness.RESULTS / "triton_kernels.json"
CARD = "h100"
CLASSES = ("products", "attention", "casts", "others")
KERNELS, BYTES, FLOPS, SECONDS = range(4)
OPTIMIZER_PASSES, ADDING_PASSES = 10, 3
"""Over the bytes of the weights that train: AdamW reads four and writes three, clipping reads two and writes one; a
further micro-batch adds its gradients to others."""
STRATEGIES = ("none", "full")
"""The plans that are counted; ``half`` is the mean of both: every second block is recomputed."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A model of ``known_models.py``, its flags, the samples of a micro-batch and the micro-batches of a step.

    Args:
        kind: of its layers in docs/results/triton_kernels.json, where they are the same.
    """

    name: str
    model: str
    flags: str
    samples: int
    micro_batches: int
    kind: str | None = None
    config: tuple[tuple[str, Any], ...] = ()


WORKS = (
    Work("GPT-2 124M, 50,257 words", "GPT-2", "--block_size 1024 --dropout 0", 16, 32, "gpt2"),
    Work(
        "GPT-2 124M, 50,304 words",
        "GPT-2",
        "--block_size 1024 --dropout 0",
        16,
        32,
        "gpt2",
        (("vocab_size", 50304),),
    ),
    Work("Llama 3.2 1B, autocast", "Llama 3.2 1B", "--block_size 2048", 4, 8, "llama"),
    Work("Llama 3.2 1B, bfloat16", "Llama 3.2 1B", "--block_size 2048 --dtype bfloat16", 4, 8),
    Work("Llama 3.1 8B, LoRA", "Llama 3.1 8B", "--block_size 2048 --lora --dtype bfloat16", 4, 4),
    Work("ViT-B/16", "ViT-B/16", "--image_size 224", 64, 4, "vit"),
    Work("DenseNet-121", "DenseNet-121", "--image_size 224", 64, 4),
)


@dataclass(frozen=True, kw_only=True)
class Counting(Target):
    """A card whose "seconds" of an operator are four counts for each of ``CLASSES``."""

    rates: Target

    @classmethod
    def of(cls, target: Target) -> "Counting":
        """That of a card."""
        return cls(**{field.name: getattr(target, field.name) for field in fields(Target)}, rates=target)

    def seconds(self, operation: Any, dtype: torch.dtype, flops: float, num_bytes: int, *extent: Any) -> Any:
        """Count an operator: kernels, bytes, FLOPs and seconds."""
        counts = [0.0] * 4 * len(CLASSES)
        place = 4 * CLASSES.index(class_of(str(operation), flops))
        counts[place : place + 4] = 1, num_bytes, flops, self.rates.seconds(operation, dtype, flops, num_bytes, *extent)
        return OfEach(counts)


def class_of(operation: str, flops: float) -> str:
    """The class of an operator."""
    if "attention" in operation:
        return "attention"
    if flops:
        return "products"
    return "casts" if operation.endswith("_to_copy") else "others"


def counts_of(work: Work, recipe: str, flags: Sequence[str], rates: Target) -> Row:
    """The counts of a micro-batch under each plan, those of its blocks apart, and the sizes that rows need."""
    task = read_task(harness.ROOT / "recipes" / f"{recipe}.py", flags)
    estimates = Estimates(task, Launch(target=Counting.of(rates), mixed_precision="bf16"))
    with replaced(estimate, "find_repeats", lambda *_: Repeats(())):  # all layers are traced
        measured = estimates.of(
            BatchLayout.of(work.samples, None, 1),
            task.losses[-1],
            lambda workload: [plan_for(strategy, workload.stacks) for strategy in STRATEGIES],
        )
    blocks = [block for stack in find_stacks(estimates.model) for block in stack.blocks]
    weights = [weight for weight in estimates.model.parameters() if weight.requires_grad]
    first = next(part for part in measured.traces[0][1].parts if part.block is not None)
    return {
        "by_plan": dict(zip(STRATEGIES, (split(trace) for _, trace in measured.traces), strict=True)),
        "num_blocks": len(blocks),
        "elements": sum(first.outputs.values()) // torch.float32.itemsize,
        "trained_bytes": sum(weight.nbytes for weight in weights),
    }


def split(trace: StepTrace) -> tuple[OfEach, OfEach]:
    """The counts of a step in its blocks, and in all of it."""
    (run,) = trace.seconds
    forwards = [*(part.forward for part in trace.parts), trace.ends.forward]
    backwards = sorted(part.backward for part in trace.parts if part.backward is not None)
    ends = dict(zip(backwards, [*backwards[1:], trace.ends.backward], strict=True))
    of_blocks: list[OfEach] = []
    for part, (start, stop) in zip(trace.parts, pairwise(forwards), strict=True):
        if part.block is not None:
            of_blocks += run[start:stop]
            of_blocks += () if part.backward is None else run[part.backward : ends[part.backward]]
    return added(of_blocks), added(run)


def added(counts: Sequence[OfEach]) -> OfEach:
    """The sum of counts."""
    return sum(counts, start=OfEach([0.0] * 4 * len(CLASSES)))


def compiled(counts: Row, layer: Row, rates: Target) -> OfEach:
    """The counts of a micro-batch whose layers are compiled: all but their products and attention is Triton's."""
    inside, whole = counts["by_plan"]["none"]
    passes = [layer["forward"], layer["backward"]]
    num_bytes = counts["elements"] * sum(one["read"] + one["written"] for one in passes)
    num_bytes += layer["weights"] * sum(one["of_weights"] for one in passes)
    kernels = sum(one["kernels"] for one in passes)
    seconds = max(num_bytes / rates.bytes_per_s, kernels * rates.kernel_s)
    fused = [figure * counts["num_blocks"] for figure in (kernels, num_bytes, 0.0, seconds)]
    eager = OfEach([*[0.0] * 8, *inside[8:]])  # casts and others
    return whole - eager + OfEach([*[0.0] * 12, *fused])


def row_of(work: Work, column: str, counts: Row, micro_batch: OfEach, rates: Target) -> Row:
    """A row: the counts of a micro-batch, and what they predict of a step."""
    by_class = {name: list(micro_batch[4 * place : 4 * place + 4]) for place, name in enumerate(CLASSES)}
    between = OPTIMIZER_PASSES + ADDING_PASSES * (work.micro_batches - 1)
    step_s = work.micro_batches * sum(one[SECONDS] for one in by_class.values())
    step_s += between * counts["trained_bytes"] / rates.bytes_per_s
    _, whole = counts["by_plan"]["none"]
    flops = work.micro_batches * sum(whole[4 * place + FLOPS] for place in range(len(CLASSES)))
    return {
        "model": work.name,
        "plan": column,
        "samples": [work.samples, work.micro_batches],
        "classes": by_class,
        "predicted_step_s": step_s,
        "predicted_mfu_pct": 100 * flops / step_s / rates.flops_per_s["bfloat16"],
    }


def rows_of(work: Work, rates: Target, layers: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a model; none under ``compiled`` where no layer of its form was compiled."""
    model = next(one for one in known_models.MODELS if one.name == work.model)
    with TemporaryDirectory() as folder:
        subject = find_subject(replace(model, config={**model.config, **dict(work.config)}).write(Path(folder)))
        sizes = ["--global_batch_size", str(work.samples * work.micro_batches), "--micro_batch_size", str(work.samples)]
        counts = counts_of(work, subject.recipe, [*subject.flags, *work.flags.split(), *sizes], rates)
    none, full = (counts["by_plan"][strategy][1] for strategy in STRATEGIES)
    yield row_of(work, "none", counts, none, rates)
    if work.kind is not None:
        yield row_of(work, "compiled", counts, compiled(counts, layers[work.kind]["layers"][0], rates), rates)
    yield row_of(work, "half", counts, (none + full) * 0.5, rates)


def page_of(rows: Sequence[Row], rates: Target, versions: Mapping[str, str]) -> str:
    """The page."""
    headings = ("model", "plan", "micro-batches", *(f"{name}: kernels, GB" for name in CLASSES), "ms a step", "MFU")
    cells = [
        [
            row["model"],
            row["plan"],
            "{} x {}".format(*row["samples"]),
            *(f"{one[KERNELS]:.0f}, {one[BYTES] / 1e9:.1f}" for one in row["classes"].values()),
            f"{1000 * row['predicted_step_s']:.0f}",
            f"{row['predicted_mfu_pct']:.1f} %",
        ]
        for row in rows
    ]
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        "From `benchmarks/mfu.py`: kernels and bytes of one micro-batch, counted on fake tensors, by class; *casts* "
        "change the dtype of activations and weights, *others* are norms, activations, sums and the loss. Nothing "
        "here was measured. Milliseconds and MFU are **predicted** for an H100 whose host takes no time, by the rates "
        f"of `core/costs/cards.json` that come from one run: {rates.shares.run}. `compiled`: products and attention as "
        "under `none`, all else in the layers from [triton_kernels](triton_kernels.md), with the loss outside of them "
        "eager. `half`: every second block recomputed, eager (the mean of `none` and `full`). A model without a row "
        "under `compiled` has layers that page does not. "
        f"Versions: {named}.\n\n{harness.markdown_table(headings, cells)}"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Count all rows."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    rates, layers = find_target(CARD).calibrated, json.loads(TRITON.read_text(encoding="utf-8"))["rows"]
    rows = [row for work in WORKS[: 1 if flags.quick else None] for row in rows_of(work, rates, layers)]
    versions = harness.describe_machine(torch.device("cpu"), "transformers")["versions"]
    results = {"card": CARD, "rows": rows, "versions": versions}
    harness.write_results(flags.output_dir, "mfu", results, page_of(rows, rates, versions))


if __name__ == "__main__":
    main()
