"""CPU time of loading images: an epoch of the image recipe's loader beside the loop of the official vision example.

    python benchmarks/image_loading.py

JPEG files of three sizes, made on the spot, are decoded and augmented in batches of 32, without data workers. The other
loop is written in the manner of Accelerate's ``examples/cv_example.py`` (https://github.com/huggingface/accelerate):
decode, cut out a random part, resize, scale to [0, 1]. The recipe normalises and warps on the device, which belongs to
the step; both hand over a batch of default collation. Both take turns; a ratio is that of two epochs of one round,
printed is the median.

*Kept* is the recipe's second epoch where the decoded images fit into memory; the example decodes in every epoch.

Writes docs/results/image_loading.json and .md.
"""

import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import harness
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from memsave_recipes.data.vision.decoding import ImageDataset
from memsave_recipes.data.vision.images import ImageDataArguments, load_images
from memsave_recipes.run.failures import run_recipe

SIZES, BATCH_SIZE, NUM_IMAGES, ROUNDS = (32, 64, 224), 32, 400, 15
HEADINGS = ("image", "recipe", "recipe, kept", "example", "recipe / example", "kept / example")


class ExampleDataset(Dataset[dict[str, Any]]):
    """The files of an image folder, decoded and augmented one by one."""

    def __init__(self, paths: list[Path], image_size: int) -> None:
        self.paths = paths
        self.image_size = image_size
        self.labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in paths}))}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        part = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box=random_box(*image.size))
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()
        return {"image": pixels.to(torch.float32).div(255), "label": self.labels[path.parent.name]}


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A part of an image as torchvision's ``RandomResizedCrop`` draws it by default: 8 to 100 % of the area at a ratio
    of 3/4 to 4/3 of the sides, or all of the image where ten draws do not fit into it.
    """
    for _ in range(10):
        area = width * height * uniform(0.08, 1)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
        own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < own_width <= width and 0 < own_height <= height:
            left = int(torch.randint(width - own_width + 1, ()))
            top = int(torch.randint(height - own_height + 1, ()))
            return left, top, left + own_width, top + own_height
    return 0, 0, width, height


def uniform(low: float, high: float) -> float:
    """A number of torch's generator."""
    return float(torch.empty(()).uniform_(low, high))


def write_images(folder: Path, image_size: int, count: int) -> None:
    """JPEG files of two classes, a third wider than high, whose shorter side has ``image_size`` pixels."""
    generator = np.random.default_rng(0)
    for index in range(count):
        colours = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        path = folder / ("cat", "dog")[index % 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (image_size * 4 // 3, image_size)
        Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)


def epoch_s(dataset: Dataset[Any]) -> float:
    """Seconds of CPU."""
    began = process_time()
    for batch in DataLoader(dataset, batch_size=BATCH_SIZE):
        assert isinstance(next(iter(batch.values())), Tensor)
    return process_time() - began


def measure(folder: Path, image_size: int, count: int, rounds: int) -> dict[str, Any]:
    """Microseconds of CPU for an image, in every round."""
    write_images(folder, image_size, count)
    kept: ImageDataset = load_images(ImageDataArguments(data_dir=str(folder), image_size=image_size), seed=0).train
    paths = [Path(image["path"]) for image in kept.rows["image"]]
    datasets = {
        "recipe": replace(kept, keeps_pixels=False),
        "kept": kept,
        "example": ExampleDataset(paths, image_size),
    }
    for dataset in datasets.values():  # the files are in the system's cache, and the pixels in ours
        epoch_s(dataset)
    microseconds: dict[str, list[float]] = {name: [] for name in datasets}
    for name in harness.turns(datasets, rounds):
        microseconds[name].append(1e6 * epoch_s(datasets[name]) / len(paths))
    ratios = {
        name: statistics.median(harness.ratios(microseconds[name], microseconds["example"]))
        for name in ("recipe", "kept")
    }
    medians = {name: statistics.median(values) for name, values in microseconds.items()}
    return {"image_size": image_size, "num_images": len(paths), "us": medians, "ratios": ratios}


def cells(row: dict[str, Any]) -> list[str]:
    """The row as text."""
    times = [f"{row['us'][name]:,.0f} us" for name in ("recipe", "kept", "example")]
    return [f"{row['image_size']} px", *times, *(f"x{row['ratios'][name]:.2f}" for name in ("recipe", "kept"))]


def main(args: list[str] | None = None) -> None:
    """Measure, print and write."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    torch.set_num_threads(1)
    count, rounds = (40, 2) if flags.quick else (NUM_IMAGES, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder, str(size)), size, count, rounds) for size in SIZES]
    table = list(map(cells, rows))
    machine = harness.describe_machine(torch.device("cpu"), "datasets")
    harness.show(HEADINGS, table, title="CPU time for an image")
    about = f"{machine['device']}, one thread; {rows[0]['num_images']} images, median of {rounds} rounds."
    lines = ["# Loading images", "CPU time for an image; `benchmarks/image_loading.py` says how it is measured.", about]
    page = "\n\n".join([*lines, harness.markdown_table(HEADINGS, table)])
    harness.write_results(flags.output_dir, "image_loading", {"machine": machine, "rounds": rounds, "rows": rows}, page)


if __name__ == "__main__":
    run_recipe(main)
