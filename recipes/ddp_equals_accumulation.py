"""Show that DDP equals accumulation: a global batch cut up in every way trains the same weights, to the last digits.

On the CPU of any machine, without a network, some seconds each; on GPUs with `single_gpu.yaml` and `multi_gpu.yaml`:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/ddp_equals_accumulation.py --output_dir out/one
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml recipes/ddp_equals_accumulation.py \
        --output_dir out/two --compare_with out/one

A small vision transformer learns scanned digits, half of which have lost their label: as with the tokens of a text,
micro-batches of one size then hold different numbers of labels. It is trained anew for every micro-batch size. Expect
differences to one micro-batch a rank of 1e-16, which is rounding, for *exact*, the loop of all recipes; of up to 0.5
for *usual*, in which a label counts for more where few others share its micro-batch; and none for *bitwise*
(`--bitwise_topology`), whose ranks together are set beside one rank that computes the same micro-batches alone.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import default_collate
from transformers import ViTConfig, ViTForImageClassification

from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder, seed_for
from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.data.vision.images import ImageDataArguments, load_images
from memsave_recipes.run.recipe import (
    Accelerator,
    Batch,
    GlobalBatch,
    GlobalBatches,
    option,
    parse_arguments,
    require,
    run_recipe,
)
from memsave_recipes.training.exact.batch_layouts import IndexedLayout

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
RESULTS, WEIGHTS = "results.json", "weights.safetensors"


@dataclass(kw_only=True)
class Arguments:
    """The proof. SGD has steps as wrong as the gradient; AdamW and clipping would hide a wrong length."""

    output_dir: str = option("", "folder for the differences and the weights")
    global_batch_size: int = option(24, "samples of one optimizer step, over all ranks")
    micro_batch_size: int | None = option(None, "the only one to try; default: every one")
    max_steps: int = option(10, "optimizer steps of each training")
    seed: int = option(0, "seed of the weights and of the sample order")
    compare_with: str | None = option(None, "--output_dir of a proof on other ranks")

    def __post_init__(self) -> None:
        is_free = bool(self.output_dir) and not Path(self.output_dir, RESULTS).exists()
        require(is_free, "--output_dir", self.output_dir, f"a folder without a {RESULTS}")
        for name in ("global_batch_size", "micro_batch_size", "max_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name}", value, "at least 1")
        is_proof = self.compare_with is None or Path(self.compare_with, WEIGHTS).is_file()
        require(is_proof, "--compare_with", self.compare_with, "the --output_dir of a finished proof")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train once for every micro-batch size and loop; returns what ``results.json`` holds."""
    (args,) = parse_arguments(Arguments, args=argv)
    warnings.filterwarnings("ignore", "Grad strides do not match")  # DDP's, of micro-batches of 1; only slower
    accelerator = Accelerator()
    with accelerator.main_process_first():
        images = load_images(ImageDataArguments(image_size=16, augmentation="none"), seed=args.seed).train
    size, ranks = args.global_batch_size, accelerator.num_processes
    require(size <= len(images), "--global_batch_size", size, f"at most {len(images):,}, the images of the proof")
    torch.manual_seed(args.seed)  # without key biases, whose gradient is rounding alone
    bare = ViTForImageClassification(ViTConfig(qkv_bias=False, image_size=16, patch_size=4, num_labels=10, **SMALL))
    vit = Learner(args, accelerator, images, bare.double().to(accelerator.device))
    bitwise = Learner(args, accelerator, images, deepcopy(bare))  # another, whose gradients are added in a tree

    undivided = BatchLayout.of(size, None, ranks)
    expected = vit.train(undivided, exact)
    cuts: list[dict[str, Any]] = []
    for micro in [args.micro_batch_size] if args.micro_batch_size else range(undivided.micro_batch_size, 0, -1):
        layout = BatchLayout.of(size, micro, ranks)
        cut = {"geometry": layout.describe(), "micro_batch_size": layout.micro_batch_size}
        cut |= {loop.__name__: differences(vit.train(layout, loop), expected) for loop in (exact, usual)}
        if micro <= size // ranks:  # else there are fewer of them than ranks
            alone, together = (IndexedLayout.of(size, micro, count) for count in (1, ranks))
            weights = bitwise.train(together, exact)
            cut["bitwise"] = differences(weights, bitwise.train(alone, exact))
            cut["sha256"] = hashlib.sha256(weights[-1].cpu().numpy()).hexdigest()
        cuts.append(cut)

    found = {"reference": undivided.describe(), "geometries": cuts}
    for loop in ("exact", "usual", "bitwise"):
        found[f"largest_difference_{loop}"] = max(max(cut[loop]) for cut in cuts if loop in cut)
    if args.compare_with is not None:
        found |= compare(expected[-1], cuts, Path(args.compare_with))
    if accelerator.is_main_process:
        show(found)
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        save_file({"weights": expected[-1].cpu()}, Path(args.output_dir, WEIGHTS))
        Path(args.output_dir, RESULTS).write_text(json.dumps({"equivalence": found}, indent=2), encoding="utf-8")
    accelerator.end_training()
    return {"equivalence": found}


class Learner:
    """A model that is trained anew from the same weights, in any layout of the same global batches."""

    def __init__(self, args: Arguments, accelerator: Accelerator, images: Any, bare: nn.Module) -> None:
        self.args, self.accelerator, self.bare = args, accelerator, bare
        self.initial, self.model = deepcopy(bare.state_dict()), accelerator.prepare(bare)
        self.batches = GlobalBatches(
            accelerator,
            images,
            order=SampleOrder(num_samples=len(images), global_batch_size=args.global_batch_size, seed=args.seed),
            layout=BatchLayout.of(args.global_batch_size, None, accelerator.num_processes),
            num_steps=args.max_steps,
            seed=args.seed,
            count_valid=count_labels,
            collate_fn=collate_and_hide_labels,
        )

    def train(self, layout: BatchLayout, backward: Callable[..., None]) -> list[Tensor]:
        """The weights after each step; in a layout of one rank without the others, which do the same."""
        self.bare.load_state_dict(self.initial)
        model = self.bare if layout.num_processes == 1 else self.model
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)
        optimizer, weights = self.accelerator.prepare(optimizer), []
        for batch in self.batches.anew(layout):
            backward(self.accelerator, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            weights.append(parameters_to_vector(self.bare.parameters()).detach())
        return weights


def exact(accelerator: Accelerator, model: nn.Module, batch: GlobalBatch) -> None:
    """As in every recipe: every part is divided by the number of labels in the whole global batch."""
    for micro_batch in batch.forwards(model):
        loss = loss_of(model, micro_batch)
        accelerator.backward(loss, gradient=batch.share_of(loss))


def usual(accelerator: Accelerator, model: nn.Module, batch: GlobalBatch) -> None:
    """The mean over the micro-batches of the mean over each one's labels, as ``accelerator.accumulate`` has it."""
    for micro_batch in batch.forwards(model):
        mean = loss_of(model, micro_batch) / count_labels(micro_batch).clamp(min=1)
        accelerator.backward(mean / len(batch.micro_batches))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a micro-batch, summed over its labels."""
    pixels = to_pixel_values(batch["images"], None, mean=[0.5] * 3, std=[0.5] * 3, dtype=torch.float64)
    return F.cross_entropy(model(pixels).logits, batch["labels"], reduction="sum")


def collate_and_hide_labels(samples: list[dict[str, Any]]) -> Batch:
    """A batch that has lost the label of about every second sample: always the same ones."""
    batch = default_collate(samples)
    hidden = torch.tensor([seed_for(index) % 2 == 0 for index in batch["index"].tolist()])
    return batch | {"labels": batch["labels"].masked_fill(hidden, IGNORED_LABEL)}


def count_labels(batch: Batch) -> Tensor:
    """How many samples of a batch count in the loss."""
    return (batch["labels"] != IGNORED_LABEL).sum()


def differences(weights: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest difference of any weight after each step, relative to the largest weight."""
    steps = zip(weights, expected, strict=True)
    return [((here - there).abs().max() / there.abs().max()).item() for here, there in steps]


def compare(weights: Tensor, cuts: list[dict[str, Any]], other: Path) -> dict[str, Any]:
    """The difference to the weights of another proof, and whether the bitwise loops have the same bits there."""
    others = json.loads((other / RESULTS).read_text(encoding="utf-8"))["equivalence"]["geometries"]
    ours, theirs = ({cut["micro_batch_size"]: cut.get("sha256") for cut in run} for run in (cuts, others))
    (difference,) = differences([weights], [load_file(other / WEIGHTS)["weights"].to(weights)])
    same = {size: digest == theirs[size] for size, digest in ours.items() if digest and theirs.get(size)}
    return {"compared_with": str(other), "largest_difference_to_it": difference, "same_bits_as_it": same}


def show(found: dict[str, Any]) -> None:
    """Print the differences after the last step."""
    print(f"Largest difference to {found['reference']}, relative to the largest weight:")
    for cut in found["geometries"]:
        figures = (f"{loop} {cut[loop][-1]:.0e}" for loop in ("exact", "usual", "bitwise") if loop in cut)
        print(f"  {cut['geometry'].partition(' = ')[2]:36}", *figures, sep="  ")
    if "compared_with" in found:
        same, difference = found["same_bits_as_it"].values(), found["largest_difference_to_it"]
        print(
            f"to {found['compared_with']}: {difference:.0e}, bitwise the same bits for {sum(same)} of {len(same)} sizes"
        )


if __name__ == "__main__":
    run_recipe(main)
