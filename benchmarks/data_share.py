"""The share of a step that its data take: the CPU time of a sample's data beside that of its forward and backward.

    python benchmarks/data_share.py

One thread, no data workers; each recipe's own data in its usual sizes (224 pixels, rows of 1,024 tokens, texts of up to
128), in batches of 8 on the host. The step is a forward and a backward of one sample and a model with random weights,
in float32, on the same core. On a GPU the step is shorter, and data workers prepare meanwhile: there the samples that a
core prepares in a second are what counts.

The warp of ``--augmentation article`` is part of the step, on its device. It is timed on this core, and compiled, for
a batch as large.

Writes docs/results/data_share.json and .md.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import harness
import torch
from image_loading import write_images
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoModelForSequenceClassification as TextClassifier

from memsave_recipes.data.text.labelled_text import LabelledTextArguments, load_labelled_text
from memsave_recipes.data.text.rows import RowArguments, load_rows
from memsave_recipes.data.text.tokenizers import load_text_tokenizer, tokenize
from memsave_recipes.data.vision.augmentation import AUGMENTATIONS, warp
from memsave_recipes.data.vision.images import ImageDataArguments, load_images

BATCH, BATCHES, ROUNDS, STEPS = 8, 12, 9, 2
PIXELS, VOCABULARY = 224, 2048
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "image_classification": (AutoModelForImageClassification, "resnet", {"num_labels": 2}),
    "language_modeling": (AutoModelForCausalLM, "gpt2", {"use_cache": False}),
    "text_classification": (TextClassifier, "bert", {}),
}
HEADINGS = ("recipe", "sample", "data of a sample", "samples/s of a core", "model", "its step", "share of the step")
Batches = Iterator[dict[str, Any]]


def loaders(folder: Path) -> dict[str, tuple[str, DataLoader[Any]]]:
    """By recipe, what a sample is, and batches of them."""
    write_images(folder, PIXELS, BATCH * BATCHES * 2)
    images = load_images(ImageDataArguments(data_dir=str(folder), image_size=PIXELS), seed=0).train
    rows = load_rows(RowArguments(vocab_size=VOCABULARY), tokenizer_name=None).train
    texts = load_labelled_text(LabelledTextArguments())
    tokens = tokenize(texts, load_text_tokenizer(None, texts, vocab_size=VOCABULARY), max_length=128).train
    made: dict[str, tuple[str, Any, Any]] = {
        "image_classification": (f"a JPEG of {PIXELS} pixels", replace(images, keeps_pixels=False), None),
        "language_modeling": ("a packed row of 1,024 tokens", rows, rows.collate),
        "text_classification": ("a text of up to 128 tokens", tokens, tokens.collate),
    }
    first = range(BATCH * BATCHES)
    return {
        recipe: (what, DataLoader(dataset, BATCH, sampler=first, collate_fn=collate))
        for recipe, (what, dataset, collate) in made.items()
    }


def step(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """A forward and a backward."""
    model(**tensors).loss.backward()


def step_of(recipe: str) -> Callable[[], None]:
    """That of a sample, whose values do not matter."""
    auto, kind, options = MODELS[recipe]
    model = auto.from_config(AutoConfig.for_model(kind, **options)).train()
    length = 1024 if recipe == "language_modeling" else 128
    tokens, labels = torch.zeros(1, length, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    tensors = {
        "image_classification": {"pixel_values": torch.zeros(1, 3, PIXELS, PIXELS), "labels": labels},
        "language_modeling": {"input_ids": tokens, "labels": tokens},
        "text_classification": {"input_ids": tokens, "labels": labels},
    }
    return partial(step, model, tensors[recipe])


def cpu_s(call: Callable[[], Any]) -> float:
    """Seconds of CPU."""
    began = process_time()
    call()
    return process_time() - began


def median_s(call: Callable[[], Any], times: int) -> float:
    """After a call that warms up."""
    call()
    return statistics.median(cpu_s(call) for _ in range(times))


def warps(rounds: int) -> dict[str, Any]:
    """Microseconds of a sample's warp, eager and compiled, and whether both have the same bits."""
    article = AUGMENTATIONS["article"]
    assert article is not None
    images = torch.rand(BATCH, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0)) * 255
    maps = torch.stack([article.draw(seed=0, epoch=0, index=index, image_size=PIXELS) for index in range(BATCH)])
    ways = {"eager": warp, "compiled": torch.compile(warp)}
    eager, compiled = (way(images, maps) for way in ways.values())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in harness.turns(ways, rounds):
        seconds[name].append(cpu_s(partial(ways[name], images, maps)))
    return {
        "us": {name: 1e6 * statistics.median(values) / BATCH for name, values in seconds.items()},
        "same_bits": torch.equal(eager, compiled),
        "largest_difference": float((eager - compiled).abs().max()),
    }


def measure(rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row a recipe, in seconds of CPU a sample."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, (what, loader) in loaders(Path(folder)).items():
            data_s = median_s(lambda loader=loader: list(loader), rounds) / (BATCH * BATCHES)
            step_s = median_s(step_of(recipe), steps)
            kind = MODELS[recipe][1]
            rows.append({"recipe": recipe, "sample": what, "model": kind, "data_s": data_s, "step_s": step_s})
    return [{**row, "share": row["data_s"] / (row["data_s"] + row["step_s"])} for row in rows]


def cells(row: dict[str, Any]) -> list[str]:
    """The row as text."""
    data = [f"{1e6 * row['data_s']:,.0f} us", f"{1 / row['data_s']:,.0f}"]
    return [row["recipe"], row["sample"], *data, row["model"], f"{row['step_s']:.3f} s", f"{row['share']:.3%}"]


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    torch.set_num_threads(1)
    rounds, steps = (1, 1) if flags.quick else (ROUNDS, STEPS)
    other_work = harness.OtherWork()
    rows, of_warp = measure(rounds, steps), warps(rounds)
    machine = harness.describe_machine(torch.device("cpu"), "transformers", "datasets", "kornia")
    machine |= other_work.figures()
    table = list(map(cells, rows))
    bits = (
        "the same bits" if of_warp["same_bits"] else f"pixels that differ by up to {of_warp['largest_difference']:.2g}"
    )
    warped = (
        f"The warp of `--augmentation article` takes {of_warp['us']['eager']:,.0f} us of an image, compiled "
        f"{of_warp['us']['compiled']:,.0f} us with {bits}."
    )
    harness.show(HEADINGS, table, warped)
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    about = (
        f"CPU time on one core of {machine['device']}, as `benchmarks/data_share.py` measures it: batches of {BATCH}, "
        f"medians of {rounds} rounds and {steps} steps; {versions}. Other work kept "
        f"{machine['busy_with_others']:.1f} of {machine['num_cpus']} CPUs busy, which lengthens all times."
    )
    page = "\n\n".join(["# Data's share of a step", about, harness.markdown_table(HEADINGS, table), warped])
    results = {"machine": machine, "batch": BATCH, "rows": rows, "warp": of_warp}
    harness.write_results(flags.output_dir, "data_share", results, page)


if __name__ == "__main__":
    main()
