"""What a step computes and moves, by classes of kernels, what that predicts, and on a GPU what it takes.

    python benchmarks/mfu.py --counts    # needs g++, no GPU and no Triton
    python benchmarks/mfu.py             # on a GPU: measures, beside what is predicted for it

Counts are those of the planner's fake tensors: operators of one micro-batch with the kernels of CUDA, each at least one
kernel. Under ``compiled`` torch's compiler fuses those of the layers and of a language model's loss, as in ``memsave
plan``. Seconds are bytes and FLOPs at the rates of ``core/costs/cards.json`` that kernels reach. Waits are those of
docs/results/step_counts.json; the host's time is this CPU's, of layers so small that nothing else takes any.

On a GPU each row trains a few steps in this process, as the recipe does, on random data. Two loops by hand are beside
GPT-2's: torch.compile of the model of transformers, and of one that is written out.

Writes docs/results/mfu.json and .md, or mfu-CARD of a GPU; with ``STANDIN`` set (tests/standin) out/benchmarks has it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import known_models
import torch
from fit_page import OfEach
from gpu_day.machine import STAND_IN, kind_of_machine
from gpu_day.plain_gpt2 import PEERS, peer_figures
from gpu_day.step_figures import (
    CLASSES,
    RandomData,
    add_gradients,
    class_of,
    figures_of,
    measured_page_of,
)
from host_time import WARM_UP
from recipe_steps import build
from torch._dynamo.utils import counters

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs import estimate
from memsave_recipes.core.costs.repeats import Repeats
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import has_layers_to_compile
from memsave_recipes.core.planner.task import Estimates, Launch, Task
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.tools.fit.subject import find_subject

STEPS = harness.RESULTS / "step_counts.json"
CARD = "h100"
KERNELS, BYTES, FLOPS, SECONDS = range(4)
OPTIMIZER_PASSES, ADDING_PASSES = 10, 3
"""Over the bytes of the weights that train: AdamW reads four and writes three, clipping reads two and writes one; a
further micro-batch adds its gradients to others."""
STRATEGIES = {"none": "none", "compiled": "compiled:1", "full": "full", "half": "every:2"}
"""By plan. ``half`` is run, and counted as the mean of ``none`` and ``full``: every second block is recomputed."""
COUNTED = ("none", "compiled", "full")
HOST_ROUNDS = 100
TINY = {
    "gpt2": {"n_embd": 16, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64},
    "vit": {"num_attention_heads": 2, "image_size": 32},
}
"""By type, layers so small that the host's time is all. A DenseNet's widths are its own."""
TINY_ROWS = {"language_modeling": "--block_size 8", "image_classification": "--image_size 32"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A model of ``known_models.py``, its flags, the samples of a micro-batch and the micro-batches of a step.

    Args:
        config: what is other than the model's.
    """

    name: str
    model: str
    flags: str
    samples: int
    micro_batches: int
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def recipe(self) -> str:
        """By what its rows are."""
        return "language_modeling" if "--block_size" in self.flags else "image_classification"

    @property
    def known(self) -> known_models.KnownModel:
        """The model."""
        model = next(one for one in known_models.MODELS if one.name == self.model)
        return replace(model, config={**model.config, **dict(self.config)})

    @contextmanager
    def task(self, *flags: str) -> Iterator[Task]:
        """The recipe's, with the loss of large vocabularies; ``flags`` are further ones."""
        sizes = ["--global_batch_size", str(self.samples * self.micro_batches), "--micro_batch_size", str(self.samples)]
        with TemporaryDirectory() as folder:
            subject = find_subject(self.known.write(Path(folder)))
            words = [*subject.flags, *self.flags.split(), *sizes, *flags]
            task = read_task(harness.ROOT / "recipes" / f"{subject.recipe}.py", words)
            yield replace(task, losses=task.losses[-1:])


WORKS = (
    Work("GPT-2 124M, 50,257 words", "GPT-2", "--block_size 1024", 16, 32),
    Work("GPT-2 124M, 50,304 words", "GPT-2", "--block_size 1024", 16, 32, (("vocab_size", 50304),)),
    Work("Llama 3.2 1B, autocast", "Llama 3.2 1B", "--block_size 2048", 4, 8),
    Work("Llama 3.2 1B, bfloat16", "Llama 3.2 1B", "--block_size 2048 --dtype bfloat16", 4, 8),
    Work("Llama 3.1 8B, LoRA", "Llama 3.1 8B", "--block_size 2048 --lora --dtype bfloat16", 4, 4),
    Work("ViT-B/16", "ViT-B/16", "--image_size 224", 64, 4),
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


def counts_of(work: Work, task: Task, rates: Target, plans: Sequence[str] = COUNTED) -> Row:
    """The counts of a micro-batch under each plan that the model can have, and the sizes that rows need."""
    estimates = Estimates(task, Launch(target=Counting.of(rates), mixed_precision="bf16"))
    plans = [plan for plan in plans if plan != "compiled" or has_layers_to_compile(estimates.model)]
    layout = BatchLayout.of(work.samples, None, 1)
    torch.compiler.reset()
    counters.clear()
    with replaced(estimate, "find_repeats", lambda *_: Repeats(())):  # all layers are traced
        measured = estimates.of(
            layout, task.losses[-1], lambda workload: [plan_for(STRATEGIES[plan], workload.stacks) for plan in plans]
        )
    runs = [run for _, trace in measured.traces for run in trace.seconds]
    nothing = OfEach([0.0] * 4 * len(CLASSES))
    weights = [weight for weight in estimates.model.parameters() if weight.requires_grad]
    return {
        "by_plan": {plan: sum(run, start=nothing) for plan, run in zip(plans, runs, strict=True)},
        "graphs": counters["stats"]["unique_graphs"],
        "model_flops": estimates.model_flops(layout, task.losses[-1]),
        "trained_bytes": sum(weight.nbytes for weight in weights),
        "units": task.micro_batch(1)["input_ids"].numel() if work.recipe == "language_modeling" else 1,
    }


def row_of(work: Work, plan: str, counts: Row, micro_batch: OfEach, rates: Target) -> Row:
    """A row: the counts of a micro-batch, and what they predict of a step."""
    by_class = {name: list(micro_batch[4 * place : 4 * place + 4]) for place, name in enumerate(CLASSES)}
    between = OPTIMIZER_PASSES + ADDING_PASSES * (work.micro_batches - 1)
    step_s = work.micro_batches * sum(one[SECONDS] for one in by_class.values())
    step_s += between * counts["trained_bytes"] / rates.bytes_per_s
    of_peak = (flops / rates.flops_per_s[precision] for precision, flops in counts["model_flops"].items())
    peak_s = work.micro_batches * sum(of_peak)
    return {
        "model": work.name,
        "plan": plan,
        "samples": [work.samples, work.micro_batches],
        "units": work.samples * work.micro_batches * counts["units"],
        "classes": by_class,
        "peak_s": peak_s,
        "predicted_step_s": step_s,
        "predicted_mfu_pct": 100 * peak_s / step_s,
    }


def rows_of(work: Work, rates: Target) -> Iterator[Row]:
    """The rows of a model; none under ``compiled`` where it has no layers that compile."""
    with work.task() as task:
        counts = counts_of(work, task, rates)
    by_plan = counts["by_plan"]
    steps = json.loads(STEPS.read_text(encoding="utf-8"))["rows"]
    of_adamw = [row for row in steps if (row["recipe"], row["optimizer"]) == (work.recipe, "AdamW")]
    waits = {row["plan"]: row.get("waits") for row in of_adamw}
    yield row_of(work, "none", counts, by_plan["none"], rates) | {"graphs": 0, "waits": waits["none"]}
    if "compiled" in by_plan:
        yield row_of(work, "compiled", counts, by_plan["compiled"], rates) | {"graphs": counts["graphs"]}
    half = (by_plan["none"] + by_plan["full"]) * 0.5
    yield row_of(work, "half", counts, half, rates) | {"graphs": 0, "waits": waits["full"]}


def host_ms(work: Work) -> dict[str, float]:
    """By plan, the processor time of this CPU in a forward and backward of all layers, tiny."""
    kind = work.known.config.get("model_type")
    if kind is None:
        return {}
    tiny = {"hidden_size": 16, "intermediate_size": 16, **TINY[kind]}
    small = replace(work, samples=1, micro_batches=1, config=(*work.config, *tiny.items()))
    with small.task(*TINY_ROWS[work.recipe].split()) as task:
        real = RandomData(**vars(build(task, "bf16")))
    micro_batch, found = partial(add_gradients, real, real.batch(1)), {}
    for plan in ("none", "compiled", "half"):
        with apply_plan(real.model, plan_blocks(real.model, STRATEGIES[plan])):
            found[plan] = least_ms(micro_batch)
    return found


def least_ms(call: Callable[[], Any]) -> float:
    """The processor time of a call, the least of ``HOST_ROUNDS``: other work on the machine lengthens it."""
    seconds = []
    for _ in range(WARM_UP + HOST_ROUNDS):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return 1000 * min(seconds[WARM_UP:])


def measured_recipe(work: Work, plan: str) -> Row:
    """Steps of the recipe under a plan, on the device that is here."""
    with work.task() as task, harness.this_device():
        real = RandomData(**vars(build(task, "bf16")))
    with apply_plan(real.model, plan_blocks(real.model, STRATEGIES[plan])):
        step = partial(real.step, work.samples * work.micro_batches, work.samples)
        return figures_of(step, partial(add_gradients, real, real.batch(work.samples)), work.micro_batches)


def with_measured(work: Work, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows of a model and those of its peers, with what was measured, or why it could not be."""
    calls = [(row, partial(measured_recipe, work, row["plan"])) for row in rows]
    if work.model == "GPT-2":
        shared = {name: rows[0][name] for name in ("model", "samples", "units", "peak_s")}
        batch = (work.micro_batches, work.samples, rows[0]["units"] // (work.micro_batches * work.samples))
        calls += [(shared | {"plan": name}, partial(peer_figures, name, work.known.config, batch)) for name in PEERS]
    for row, call in calls:
        torch.compiler.reset()
        harness.empty_device()
        try:
            yield row | {"measured": call()}
        except (InputError, torch.OutOfMemoryError) as error:
            yield row | {"refused": str(error).splitlines()[0]}


def page_of(rows: Sequence[Row], rates: Target, machine: Row) -> str:
    """The page of counts."""
    named = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        "From `benchmarks/mfu.py --counts`: kernels and bytes of one micro-batch, counted on fake tensors, by class; "
        "*casts* change the dtype of activations and weights, *others* are norms, activations, sums and the loss. "
        "Nothing here was measured on a GPU. Milliseconds and MFU are **predicted** for an H100 whose host takes no "
        "time, by the rates of `core/costs/cards.json`, fitted to one run and checked by another "
        f"([what the seconds mean](../design/predictions.md#what-the-seconds-mean)): {rates.shares.run}. `compiled`: "
        "layers, and the loss of a language model, as torch's compiler fuses them for `memsave plan`; their casts are "
        "parts of *others*. [triton_kernels](triton_kernels.md) has the code that it writes for such layers. `half`: "
        "every second block recomputed, eager (the mean of `none` and `full`). DenseNet's blocks are in sequence, and "
        "no plan compiles such. *Graphs* are those of the layers and of the loss. *Waits* of the host for the device "
        "in a step are the recipe's, from [step_counts](step_counts.md), under `none` and `full`. They are counted on "
        "a stand-in for CUDA, for which nothing compiles, so those of `compiled` are not known. *Host* is processor "
        f"time of the CPU that counted ({machine['device']}), not measured beside a GPU: a forward and backward of as "
        "many layers, so small that launching takes most of it. Compiled layers run C++ there, which needs no launcher "
        f"of Triton's, and the loss is eager. The least of {HOST_ROUNDS} such times; other work, which lengthens them, "
        f"kept {machine['busy_with_others']:.1f} of {machine['num_cpus']} CPUs busy. "
        f"Versions: {named}.\n\n{harness.markdown_table(HEADINGS, map(cells, rows))}"
    )


HEADINGS = (
    *("model", "plan", "micro-batches", *(f"{name}: kernels, GB" for name in CLASSES)),
    *("graphs", "waits", "host, ms", "ms a step", "MFU"),
)


def cells(row: Row) -> list[str]:
    """Of the page of counts."""
    return [
        *(row["model"], row["plan"], "{} x {}".format(*row["samples"])),
        *(f"{one[KERNELS]:.0f}, {one[BYTES] / 1e9:.1f}" for one in row["classes"].values()),
        *(str(row["graphs"]), str(row.get("waits", "-"))),
        f"{row['host_ms']:.0f}" if "host_ms" in row else "-",
        *(f"{1000 * row['predicted_step_s']:.0f}", f"{row['predicted_mfu_pct']:.1f} %"),
    ]


def main(args: Sequence[str] | None = None) -> None:
    """Count all rows, and measure them where there is a GPU."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--counts", action="store_true", help="count alone, for an H100; so it is where no GPU is")
    flags = harness.read_flags(parser, args)
    works = WORKS[: 1 if flags.quick else None]
    if flags.counts or not torch.cuda.is_available():
        if not flags.counts:
            print("no GPU is here to measure on: counting alone, as with --counts")
        count(works, flags.output_dir)
    else:
        measure(works, flags.output_dir)


def count(works: Sequence[Work], folder: Path) -> None:
    """Write the page of counts."""
    torch.set_num_threads(1)
    rates, rows, other_work = find_target(CARD).calibrated, [], harness.OtherWork()
    for work in works:
        of_host = {} if torch.cuda.is_available() else host_ms(work)
        for row in rows_of(work, rates):
            rows.append(row | ({"host_ms": of_host[row["plan"]]} if row["plan"] in of_host else {}))
    machine = {**harness.describe_machine(torch.device("cpu"), "transformers"), **other_work.figures()}
    results = {"card": CARD, "rows": rows, **machine}
    harness.write_results(folder, "mfu", results, page_of(rows, rates, machine))


def measure(works: Sequence[Work], folder: Path) -> None:
    """Write the page of this GPU, again after each row."""
    is_stand_in = kind_of_machine(is_tiny=False) == STAND_IN
    rates = find_target(CARD if is_stand_in else "cuda").calibrated
    name, folder = ("mfu-stand-in", harness.QUICK_RESULTS) if is_stand_in else (f"mfu-{rates.word}", folder)
    machine = harness.describe_machine(harness.this_device(), "triton", "transformers")
    rows: list[Row] = []
    for work in works:
        for row in with_measured(work, list(rows_of(work, rates))):
            rows.append(row)
            page = measured_page_of(rows, rates.name, machine, is_stand_in=is_stand_in)
            harness.write_results(folder, name, {"card": rates.word, "rows": rows, **machine}, page)


if __name__ == "__main__":
    main()
