"""What training would need on a GPU that is not here: models up to 8 billion parameters, without weights.

    python benchmarks/paper_models.py
    python benchmarks/paper_models.py --target h200 --models llama-3.1-8b vit-h

For each model the predicted peak of a whole AdamW step (parameters, gradients, both moments, activations) on a CUDA
device, plain and with every block recomputed, and what the prediction itself took: each runs in a process of its own,
so its memory is that of one. Expect seconds and less than a GiB. Prints one table; writes it (.md) and every raw figure
(.json) to docs/results/.

NOTE [ beside a published figure ]
1. torchtune's README ("Optimization flags", added on 2024-11-18, https://github.com/pytorch/torchtune) gives the peak
   *active* memory of full_finetune_single_device with Llama 3.2 3B, batch 2, sequence 4096, bf16, an A100. Its rows add
   up: 25.5 GiB baseline; 60.0 with packed data, which alone fills the 4096 tokens; 51.0 with torch.compile; 42.9 with
   the chunked cross-entropy; 24.9 with activation checkpointing. So the last two are packed, compiled and chunked.
2. Its cross-entropy is chunked after the head: the logits of all tokens are there, in bfloat16; ours never has them,
   but sums the head's gradient in float32. Its attention on packed data is flex attention, which has no mask in
   memory and saves what flash attention does, of keys and values that were repeated for every head.
3. Compiled layers save what a minimal cut through the graph of forward and backward has, and compute pointwise
   operations again where that is cheap. Our ``selective`` computes all of them again and plain, eager, none: 42.9 GiB
   must lie between. With checkpointing the peak is at the backward's end: all gradients are there, and beside them
   either the embedding's, before it joins the head's, or what the first layer saves, which compiled is less.
4. Nothing here is fitted to those figures: the terms of the table come from the model's shapes.
"""

import os
import platform
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import harness
import torch
from models import CASES, COMPARED, LLAMA_3B, workload_of_case
from rich import box
from rich.console import Console
from rich.table import Table

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs.estimate import Estimator
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.plans.simulate import simulate
from memsave_recipes.core.text import GIB

QUICK_MODEL = "gpt2"
STRATEGIES = ("none", "selective", "full")
PUBLISHED_GIB = {"none": 42.9, "full": 24.9}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was predicted of a model, and what that took. Bytes of parameters stand for those of all its state."""

    model: str
    num_parameters: int
    parameter_bytes: int
    peak_bytes: dict[str, int]  # by strategy, of a whole AdamW step
    peak_at: dict[str, str]
    step_s: dict[str, float]  # forward and backward, by the roofline
    activation_bytes_of_a_block: dict[str, int]
    seconds: float  # of the processor, whatever else it had to do
    resident_bytes: int


def predict(name: str, target: Target) -> Prediction:
    """In this process, whose peak of resident memory it takes."""
    case = CASES[name]
    begin = time.process_time()
    workload = workload_of_case(name, target.device)
    model = workload.model
    plans = {strategy: plan_blocks(model, strategy) for strategy in STRATEGIES}
    estimator = Estimator(model, target, case.autocast_dtype)
    measured = estimator.estimate(workload, [plans["none"], plans["selective"]])
    seconds = time.process_time() - begin
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    chain = measured.chain()
    chain = replace(chain, resident_bytes=chain.resident_bytes + 2 * parameter_bytes)  # AdamW's two moments
    simulated = {strategy: simulate(chain, plan) for strategy, plan in plans.items()}
    plain_s = sum(block.forward_s + block.backward_s for block in chain.blocks)
    middle = chain.blocks[chain.decided[len(chain.decided) // 2]]
    return Prediction(
        model=name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=parameter_bytes,
        peak_bytes={strategy: found.peak_bytes for strategy, found in simulated.items()},
        peak_at={strategy: f"{found.peak.phase} {found.peak.block}".strip() for strategy, found in simulated.items()},
        step_s={strategy: plain_s + found.added_s for strategy, found in simulated.items()},
        activation_bytes_of_a_block={option.action.value: option.saved_bytes for option in middle.options},
        seconds=seconds,
        resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def space(found: Prediction) -> Iterator[tuple[str, float]]:
    """What the figures are made of, in GiB; rules 2 and 3 of NOTE [ beside a published figure ]."""
    tokens = CASES[COMPARED].batch_size * CASES[COMPARED].size
    layers = LLAMA_3B["num_hidden_layers"]
    width, vocabulary = LLAMA_3B["hidden_size"], LLAMA_3B["vocab_size"]
    repeated = 2 * tokens * (width - LLAMA_3B["num_key_value_heads"] * LLAMA_3B["head_dim"]) * 2
    of_a_block = found.activation_bytes_of_a_block
    yield "both: parameters, gradients and two moments", 4 * found.parameter_bytes / GIB
    yield "checkpointing, at least: the embedding's gradient beside the head's", 2 * vocabulary * width / GIB
    yield (
        "checkpointing, ours: what else is there at the peak",
        (found.peak_bytes["full"] - 4 * found.parameter_bytes) / GIB,
    )
    yield "theirs: logits of all tokens", 2 * tokens * vocabulary / GIB
    yield "ours: the head's gradient in float32", 4 * vocabulary * width / GIB
    yield "theirs, no checkpointing: keys and values for every head", layers * repeated / GIB
    yield (
        "ours, eager, more than selective: pointwise results",
        (layers * (of_a_block["keep"] - of_a_block["select_ops"]) / GIB),
    )


def table_of(predictions: list[Prediction], target: Target) -> Table:
    """A row for each model."""
    took = ["predicted in (CPU time)", "with"]
    headings = ["model", "parameters", "batch", "plain", "selective", "full", "step, plain", *took]
    table = Table(*headings, box=box.MARKDOWN, title=f"AdamW on {target.name}: predicted peaks")
    for found in predictions:
        case = CASES[found.model]
        precision = "bf16" if case.dtype == torch.bfloat16 else "bf16 autocast"
        table.add_row(
            found.model,
            f"{found.num_parameters / 1e6:,.0f} M",
            f"{case.batch_size} x {case.size}, {precision}",
            *(f"{found.peak_bytes[strategy] / GIB:.1f} GiB" for strategy in STRATEGIES),
            f"{1000 * found.step_s['none']:.0f} ms",
            f"{found.seconds:.1f} s",
            f"{found.resident_bytes / GIB:.2f} GiB",
        )
    return table


def comparison_of(found: Prediction) -> Table:
    """Beside torchtune's figures."""
    table = Table("Llama 3.2 3B, 2 x 4096, bf16, AdamW", "GiB", box=box.MARKDOWN, title="Beside a published figure")
    table.add_row("torchtune: packed, compiled, chunked", f"{PUBLISHED_GIB['none']:.1f}")
    table.add_row("ours, estimated: none (eager)", f"{found.peak_bytes['none'] / GIB:.1f}")
    table.add_row("ours, estimated: selective", f"{found.peak_bytes['selective'] / GIB:.1f}")
    table.add_row("torchtune: the same, activation checkpointing", f"{PUBLISHED_GIB['full']:.1f}")
    table.add_row("ours, estimated: full", f"{found.peak_bytes['full'] / GIB:.1f}")
    for name, gib in space(found):
        table.add_row(f"- {name}", f"{gib:+.2f}")
    return table


def main() -> None:
    """See the module's docstring."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--target", default="a100", help="the device that is planned for")
    parser.add_argument("--models", nargs="+", choices=list(CASES), help=f"default: all; with --quick {QUICK_MODEL}")
    flags = harness.read_flags(parser, None)
    models = flags.models or ([QUICK_MODEL] if flags.quick else list(CASES))
    target = find_target(flags.target)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        predictions = list(pool.map(predict, models, [target] * len(models)))
    tables = [table_of(predictions, target)]
    tables += [comparison_of(found) for found in predictions if found.model == COMPARED]
    name = f"paper_models-{target.word}"
    console = Console(width=160)
    with console.capture() as page:
        console.print(*tables)
    print(page.get())
    target_record = asdict(target)
    target_record["device_type"] = target_record.pop("device").type
    record = {
        "benchmark": "paper_models",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "target": target_record,
        "published_gib": PUBLISHED_GIB,
        "predictions": [asdict(found) for found in predictions],
    }
    harness.write_results(flags.output_dir, name, record, page.get())


if __name__ == "__main__":
    main()
