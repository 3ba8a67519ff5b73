"""What a step asks of a GPU, counted: operators and waits of the host, beside loops by hand.

    python benchmarks/step_counts.py        # needs g++, and no GPU

Runs on the stand-in for CUDA (tests/standin/README.md), which counts each operator that computes or copies, a fused
one once, and each wait of the host. Counted is the fourth step: it is neither measured nor logged nor saved. The plain
loops are what one writes by hand: a model of transformers, autocast, clipping, the fused AdamW, a schedule, a summed
loss. All train small models in bfloat16 with two micro-batches a step, on batches of the same shapes. The graphs of
compiled layers are those of all steps until then, on the CPU, as nothing compiles for the stand-in.

Writes docs/results/step_counts.json and .md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import harness

SITE = harness.ROOT / "tests" / "standin" / "site"
NUM_MICRO_BATCHES, SIZE, STEPS, COUNTED = 2, 4, 6, 4
LAYERS = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
SIZES = f"--global_batch_size {NUM_MICRO_BATCHES * SIZE} --micro_batch_size {SIZE} --max_steps {STEPS}"
ONLY = f"{SIZES} --logging_steps 100 --eval_steps 100 --report_to none"
RECIPES = {
    "image_classification": f"--model_type vit --config_overrides {LAYERS},patch_size=8 --augmentation none",
    "language_modeling": f"--model_type llama --config_overrides {LAYERS},vocab_size=512 --block_size 32",
    "text_classification": f"--model_type bert --config_overrides {LAYERS},vocab_size=300 --max_length 24",
}
PLANS = ("none", "full", "selective")
BUDGET_GIB = {"image_classification": 0.39142, "language_modeling": 0.3925, "text_classification": 0.39185}
"""Little more than the least, most of which the context of the device takes."""
COMPILED = "compiled"
OPTIMIZERS = {
    "SGD": "--optimizer sgd",
    "Muon": "--optimizer muon",
    "AdamW, stochastic rounding": "--dtype bfloat16 --optimizer adamw_bf16",
    "Adafactor": "--optimizer adafactor",
}
PLAIN, ADAMW = "plain torch", "AdamW"
HEADINGS = ("recipe", "plan", "optimizer", "operators a step", "waits a step", "compiled graphs")
WHAT_IS_MORE = (
    "Beside `plain torch`, ours has in a step the divisor of the exact mean and its gradient, a look whether the norm "
    "is finite, and the count of updates that AdamW takes back where it is not. In a micro-batch it has a mark in the "
    "gradient where the loss is not finite, and the division of the loss that is logged. It does not divide the loss "
    "that goes backward. Images are divided once and not twice, and nothing asks the device whether rows of text are "
    "packed or padded. A plan adds the operators of the second run."
)
Row = dict[str, Any]


def cases(recipe: str) -> Iterator[tuple[str, str, str]]:
    """Plan, optimizer, and the flags for both."""
    for plan in PLANS:
        yield plan, ADAMW, f"--activation_checkpointing {plan}"
    yield "budget", ADAMW, f"--activation_checkpointing budget --memory_budget_gib {BUDGET_GIB[recipe]}"
    for optimizer, flags in OPTIMIZERS.items() if recipe == "language_modeling" else ():
        yield "none", optimizer, flags


class Counted(Exception):
    """All is counted, so nothing has to be evaluated and saved."""


def run(recipe: str, flags: str) -> None:
    """Train in this process until ``Counted``."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with tempfile.TemporaryDirectory() as folder, suppress(Counted):
        words = [*RECIPES[recipe].split(), *ONLY.split(), *flags.split(), "--output_dir", str(Path(folder) / "run")]
        import_module(recipe).main(words)


def so_far() -> tuple[int, int]:
    """Operators and waits of this process."""
    if "STANDIN" not in os.environ:
        return 0, 0
    from cuda_standin import waits

    return waits.launches(), waits.waits.total()


def since(before: tuple[int, int]) -> Row:
    """Those of a step."""
    operators, num_waits = so_far()
    return Row(operators=operators - before[0], waits=num_waits - before[1])


def counts_of(run: Callable[[], None]) -> Row:
    """Operators and waits of a step of a run, which ends with it."""
    from memsave_recipes.run.training_run import TrainingRun

    steps, found = TrainingRun.steps, Row()

    def counted(training: TrainingRun) -> Iterator[Any]:
        before = so_far()
        for number, batch in enumerate(steps(training), 1):
            yield batch
            if number == COUNTED:
                found.update(since(before))
                raise Counted
            before = so_far()

    TrainingRun.steps = counted  # type: ignore[method-assign]
    try:
        run()
    finally:
        TrainingRun.steps = steps  # type: ignore[method-assign]
    return found


def plain_counts(recipe: str) -> Row:
    """Operators and waits of a step of a loop by hand."""
    import torch

    model, batches = _model_and_batches(recipe)
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    loss_sum = torch.zeros((), device="cuda")
    found = Row()
    for _ in range(COUNTED):
        before = so_far()
        for on_host in batches:
            batch = {name: part.to("cuda", non_blocking=True) for name, part in on_host.items()}
            if recipe == "image_classification":
                batch["pixel_values"] = (batch["pixel_values"].float() / 255 - 0.5) / 0.5
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**batch).loss / NUM_MICRO_BATCHES
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found = since(before)
    return found


def _model_and_batches(recipe: str) -> tuple[Any, list[dict[str, Any]]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
    from transformers import AutoModelForSequenceClassification as TextClassifier

    layers: dict[str, Any] = {name: int(value) for name, value in (pair.split("=") for pair in LAYERS.split(","))}
    images = torch.zeros(SIZE, 3, 64, 64, dtype=torch.uint8)
    tokens, labels = torch.ones(SIZE, 32, dtype=torch.long), torch.zeros(SIZE, dtype=torch.long)
    mask = torch.ones_like(tokens)
    mask[0, 16:] = 0
    made: tuple[str, Any, dict[str, Any], dict[str, torch.Tensor]] = {
        "image_classification": (
            "vit",
            AutoModelForImageClassification,
            {"patch_size": 8, "image_size": 64, "num_labels": 10},
            {"pixel_values": images, "labels": labels},
        ),
        "language_modeling": (
            "llama",
            AutoModelForCausalLM,
            {"vocab_size": 512},
            {"input_ids": tokens, "labels": tokens},
        ),
        "text_classification": (
            "bert",
            TextClassifier,
            {"vocab_size": 300, "num_labels": 6},
            {"input_ids": tokens, "attention_mask": mask, "labels": labels},
        ),
    }[recipe]
    kind, auto, options, batch = made
    config = AutoConfig.for_model(kind, **layers, **options, use_cache=False)
    return auto.from_config(config), [{name: part.pin_memory() for name, part in batch.items()}] * NUM_MICRO_BATCHES


def graphs_of(recipe: str) -> Row:
    """The graphs that torch compiles for a run, from its first step on."""
    from torch._dynamo.utils import counters

    counters.clear()
    counts_of(partial(run, recipe, f"--activation_checkpointing {COMPILED}"))
    return Row(plan=COMPILED, optimizer=ADAMW, graphs=counters["stats"]["unique_graphs"])


def count(recipe: str) -> list[Row]:
    """The rows of a recipe that this process can count: with the stand-in, or without it."""
    if "STANDIN" not in os.environ:
        return [Row(recipe=recipe, **graphs_of(recipe))]
    rows = [Row(plan=PLAIN, optimizer=ADAMW, **plain_counts(recipe))]
    for plan, optimizer, flags in cases(recipe):
        rows.append(Row(plan=plan, optimizer=optimizer, **counts_of(partial(run, recipe, flags))))
    return [{"recipe": recipe, **row} for row in rows]


def counted_elsewhere(recipe: str, standin: dict[str, str]) -> list[Row]:
    """What a process of its own counts, which has the stand-in where ``standin`` says so."""
    path = os.pathsep.join(map(str, (SITE, harness.ROOT, harness.ROOT / "recipes")))
    settings = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "bf16", "PYTHONPATH": path, **standin}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--count", recipe, str(file)]
        env = {**os.environ, **settings, "STANDIN_WAITS": folder}
        subprocess.run(command, env=env, check=True, stdout=sys.stderr)
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def page_of(rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """The page."""
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    names = ("recipe", "plan", "optimizer", "operators", "waits", "graphs")
    cells = [[str(row.get(name, "-")) for name in names] for row in rows]
    return (
        "From `benchmarks/step_counts.py`, on the stand-in for CUDA: operators that compute or copy and waits of the "
        f"host in the fourth step, which has {NUM_MICRO_BATCHES} micro-batches of {SIZE} samples and is neither "
        "measured nor logged. Models of two layers in bfloat16. An operator is at least one kernel; a fused one counts "
        f"once, and so does one on a list of tensors. `{PLAIN}` is a loop by hand: the model of transformers, "
        f"autocast, clipping, the fused AdamW and a schedule. `{COMPILED}` ran on the CPU, as nothing compiles for the "
        f"stand-in: its graphs are those of the first {COUNTED} steps. Versions: {named}."
        f"\n\n{harness.markdown_table(HEADINGS, cells)}\n\n{WHAT_IS_MORE}"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Count all rows."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--count", nargs=2, metavar=("RECIPE", "FILE"), help="count in this process alone")
    flags = harness.read_flags(parser, args)
    if flags.count:
        recipe, file = flags.count
        Path(file).write_text(json.dumps(count(recipe)), encoding="utf-8")
        return
    ways: tuple[dict[str, str], ...] = ({"STANDIN": "1"}, {})
    rows = [row for recipe in RECIPES for standin in ways for row in counted_elsewhere(recipe, standin)]
    versions = harness.describe_machine(harness.this_device(), "accelerate", "transformers")["versions"]
    results = {"counted_step": COUNTED, "rows": rows, "versions": versions}
    harness.write_results(flags.output_dir, "step_counts", results, page_of(rows, versions))


if __name__ == "__main__":
    main()
