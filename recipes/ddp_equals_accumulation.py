"""Show that DDP equals accumulation: a global batch cut up in every way trains the same weights, to the last digits.

On the CPU of any machine, without a network, half a minute each; on GPUs with `single_gpu.yaml` and `multi_gpu.yaml`:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/ddp_equals_accumulation.py --output_dir out/one
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml recipes/ddp_equals_accumulation.py \
        --output_dir out/two --compare_with out/one

A small vision transformer learns scanned digits, half of which have lost their label: as with the tokens of a text,
micro-batches of one size then hold different numbers of labels. It is trained anew for every micro-batch size, with the
loop of all recipes and with the usual one, and the weights after each step are set beside those of one micro-batch a
rank. Expect differences of 1e-16, which is rounding, for the first and of up to 0.4 for the second.

The columns "bitwise" are the loop of all recipes with `--bitwise_topology`, for that model, for a GPT-2 with dropout
that reads the digits pixel by pixel, and for a narrow VGG16-BN with dropout under `--batchnorm global`. The ranks
together are set beside one rank that computes the same micro-batches alone. Expect 0, and with `--compare_with` the
same bits on another number of ranks.
"""

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from memsave_recipes.core.errors import BUDGET_FLAG
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.text import to_gib
from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.data.vision.images import ImageDataArguments, load_images
from memsave_recipes.models.convnets import CONVOLUTIONS, VGG, convolutions
from memsave_recipes.run.recipe import (
    Batch,
    BatchLayout,
    GlobalBatch,
    GlobalBatches,
    RecipeArguments,
    Run,
    Task,
    make_optimizer,
    make_scheduler,
    parse_arguments,
    require,
    run_recipe,
    seed_for,
)
from memsave_recipes.tools.compare import read_run
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm

IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 10}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
RECIPE = "ddp_equals_accumulation"
GREY_VALUES, PIXELS = 16, 64
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": PIXELS, "bos_token_id": None, "eos_token_id": None}
NARROWER = 16  # than VGG16
BITWISE = ("bitwise", "bitwise GPT-2", "bitwise VGG16-BN")
WEIGHTS = "final/model.safetensors"
WHY = """
Why: the loss of a global batch is the sum over all labels divided by their number, and a sum can be taken in parts. The
*exact* loop divides every part by the one number of the whole global batch. The *usual* loop takes the mean of each
micro-batch and then the mean of those: a label counts for more where few others share its micro-batch. *Bitwise* is
the exact loop with the parts added up in an order that does not depend on the ranks: not even the rounding differs.
"""


@dataclass(kw_only=True)
class Arguments(RecipeArguments):
    """A run that is short enough to be repeated for every micro-batch size, in a precision that shows equality.

    SGD without clipping has steps as wrong as the gradient; AdamW and clipping hide a wrong length.
    """

    global_batch_size: int = field(default=24, metadata={"help": "samples of one optimizer step, over all ranks"})
    micro_batch_size: int | None = field(default=None, metadata={"help": "the only one to try; default: every one"})
    max_steps: int = field(default=10, metadata={"help": "optimizer steps of each run"})
    dtype: Literal["float32", "bfloat16", "float64"] = field(default="float64", metadata={"help": "of the parameters"})
    optimizer: Literal["adamw", "sgd"] = field(default="sgd", metadata={"help": "AdamW, or SGD with --momentum"})
    learning_rate: float = field(default=0.1, metadata={"help": "at the end of the warm-up"})
    max_grad_norm: float = field(default=0.0, metadata={"help": "clip the gradient; 0 does not clip"})
    compare_with: str | None = field(default=None, metadata={"help": "--output_dir of a run on other ranks"})

    def __post_init__(self) -> None:
        super().__post_init__()
        budget, other = self.budget_bytes, self.compare_with
        require(budget is None, BUDGET_FLAG, f"{to_gib(budget or 0):g}", "left to the recipes that train once")
        require(self.verify == "off", "--verify", self.verify, "left to the recipes that train once")
        require(not self.eval_only, "--eval_only", True, "left out: the proof trains")
        require(not self.bitwise_topology, "--bitwise_topology", True, "left out: it has columns of its own")
        require(not self.in_shards, "--shard", self.shard, "left out: the proof sums whole gradients")
        require(not self.optimizer_in_backward, "--optimizer_in_backward", True, "left out where gradients add up")
        if other is not None:
            is_finished = os.path.isfile(Path(other, WEIGHTS))
            is_ours = is_finished and read_run(other).results.get("recipe") == RECIPE
            require(is_ours, "--compare_with", other, f"the --output_dir of a finished run of {RECIPE}")

    def layout(self, num_processes: int) -> BatchLayout:
        """One micro-batch a rank, which every other layout is set beside."""
        return BatchLayout.of(self.global_batch_size, None, num_processes)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train once for every micro-batch size and both loops; returns what ``results.json`` holds."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe=RECIPE) as run:
        return train(run.args, run)


def train(args: Arguments, run: Run) -> dict[str, Any]:
    """Train with the global batch cut up in every way, then once more as all recipes do, in the run's folder."""
    warnings.filterwarnings("ignore", "Grad strides do not match")  # DDP's, of micro-batches of 1; only slower
    with run.main_process_first():
        images = load_images(ImageDataArguments(image_size=16, augmentation="none"), seed=args.seed)
    size, num_images = args.global_batch_size, len(images.train)
    require(size <= num_images, "--global_batch_size", size, f"at most {num_images:,}, the images of the proof")
    batches = run.global_batches(images.train, count_valid=count_labels, collate_fn=collate_and_hide_labels)
    run.chose(dataset="digits")

    bare, task = build_vit().to(args.torch_dtype), describe(args)
    prepared = run.prepare(task, batches, bare)
    model, optimizer, scheduler = prepared.model, prepared.optimizer, prepared.scheduler
    vit = Learner(run, bare, model, task.loss_of)
    training = run.begin(prepared, data=images.fingerprint, work=f"vit-gbs{args.global_batch_size}-16px")
    begun = deepcopy(bare.state_dict())
    with training.paused():
        expected = vit.train(batches.anew(batches.layout, drop_last=args.drop_last), exact)
        cuts = list(train_cuts(vit, batches, expected))
    bare.load_state_dict(begun)

    for batch in training.steps():
        with training.measured(batch):
            exact(task.loss_of, model, batch)
            grad_norm = training.clip_gradients()
            if training.should_step(batch, grad_norm):
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        training.log_step(batch, grad_norm)
        named = ((f"{loop}/micro_batch_{cut['micro_batch_size']}", cut.get(loop)) for cut in cuts for loop in COLUMNS)
        training.log({name.replace(" ", "_"): of[batch.step] for name, of in named if of})
        training.save_if_due()

    equivalence = equivalence_of(batches.layout, cuts, expected[-1], args.compare_with)
    show(equivalence, args.max_steps, run.accelerator.print)
    return training.finish(bare, model="vit", equivalence=equivalence)


def describe(args: Arguments) -> Task:
    """The vision transformer with its loss."""
    return Task(
        run=args,
        optim=args,
        build_model=lambda **options: build_vit().to(args.torch_dtype),
        loss_of=partial(loss_of_images, dtype=args.torch_dtype),
        micro_batch=lambda size: {
            "images": torch.zeros(size, 3, 16, 16, dtype=torch.uint8),
            "labels": torch.zeros(size, dtype=torch.long),
        },
    )


def train_cuts(vit: "Learner", batches: GlobalBatches, expected: list[Tensor]) -> Iterator[dict[str, Any]]:
    """For every micro-batch size the differences to the ``expected`` weights, after each step of either loop."""
    args, accelerator, num_ranks = vit.run.args, vit.run.accelerator, batches.layout.num_processes
    larger = partial(loss_of_larger_images, dtype=args.torch_dtype)
    vit.bare.load_state_dict(vit.initial)  # the copy begins where it began
    learners = {
        "bitwise": vit.another(deepcopy(vit.bare), vit.loss_of),
        "bitwise GPT-2": vit.another(build_gpt2().to(args.torch_dtype), loss_of_pixels),
        "bitwise VGG16-BN": vit.another(build_vgg16_bn().to(args.torch_dtype), larger),
    }
    sizes = [args.micro_batch_size] if args.micro_batch_size else range(batches.layout.micro_batch_size, 0, -1)
    for asked in ProgressBar(sizes, shown=accelerator.is_main_process, unit="layout"):
        layout = BatchLayout.of(args.global_batch_size, asked, num_ranks)
        size = layout.micro_batch_size
        cut: dict[str, Any] = {"geometry": layout.describe(), "micro_batch_size": size}
        for name, backward in LOOPS.items():
            weights = vit.train(batches.anew(layout, drop_last=args.drop_last), backward)
            cut[name] = differences(weights, expected)
        if size <= args.global_batch_size // num_ranks:  # else there are fewer of them than ranks
            cut["sha256"] = {}
            for name, learner in learners.items():
                cut[name], cut["sha256"][name] = together_and_alone(learner, batches, size)
        yield cut


def together_and_alone(learner: "Learner", batches: GlobalBatches, size: int) -> tuple[list[float], str]:
    """Train by ``--bitwise_topology`` on all ranks together and on each of them alone.

    Returns:
        The differences after each step, and the digest of the last weights.
    """
    in_lockstep = isinstance(learner.bare, VGG)
    kind, drop_last = LockstepLayout if in_lockstep else IndexedLayout, in_lockstep or learner.run.args.drop_last
    layouts = [kind.of(batches.layout.global_batch_size, size, count) for count in (1, batches.layout.num_processes)]
    alone, together = (batches.anew(layout, drop_last=drop_last) for layout in layouts)
    expected, weights = learner.train(alone, exact, alone=True), learner.train(together, exact)
    return differences(weights, expected), hashlib.sha256(weights[-1].cpu().view(torch.uint8).numpy()).hexdigest()


Loss = Callable[[nn.Module, Batch], Tensor]
"""Of a micro-batch, summed over its labels."""


def exact(loss_of: Loss, model: nn.Module, batch: GlobalBatch) -> None:
    """As in every recipe: every part is divided by the number of labels in the whole global batch."""
    for micro_batch in batch.forwards(model):
        batch.backward(loss_of(model, micro_batch))


def usual(loss_of: Loss, model: nn.Module, batch: GlobalBatch) -> None:
    """The mean over the micro-batches of the mean over each one's labels."""
    for micro_batch in batch.forwards(model):
        mean = loss_of(model, micro_batch) / count_labels(micro_batch).clamp(min=1)
        batch.accelerator.backward(mean / len(batch.micro_batches))  # as `accelerator.accumulate` divides it


LOOPS = {"exact": exact, "usual": usual}
COLUMNS = (*LOOPS, *BITWISE)


@dataclass
class Learner:
    """A model that is trained anew from the same weights, with either loop.

    Args:
        bare: inside ``model``, which is prepared.
    """

    run: Run
    bare: nn.Module
    model: nn.Module
    loss_of: Loss

    def __post_init__(self) -> None:
        self.initial = deepcopy(self.bare.state_dict())

    def another(self, bare: nn.Module, loss_of: Loss) -> "Learner":
        """One of another model."""
        return Learner(self.run, bare, self.run.accelerator.prepare(bare), loss_of)

    def train(self, batches: GlobalBatches, backward: Callable[..., None], *, alone: bool = False) -> list[Tensor]:
        """The weights after each step; ``alone`` without the other ranks, which do the same."""
        args, accelerator = self.run.args, self.run.accelerator
        self.bare.load_state_dict(self.initial)
        model = self.bare if alone else self.model
        optimizer = make_optimizer(args, self.bare)
        # The scheduler is not prepared: Accelerate's would move it once for every rank.
        scheduler = make_scheduler(args, optimizer, args.max_steps)
        optimizer = accelerator.prepare(optimizer)
        weights = []
        for batch in batches:
            backward(self.loss_of, model, batch)
            accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            weights.append(parameters_to_vector(self.bare.parameters()).detach())
        return weights


def loss_of_images(model: nn.Module, micro_batch: Batch, *, dtype: torch.dtype) -> Tensor:
    """Over the labels of a micro-batch."""
    pixels = to_pixel_values(micro_batch["images"], None, mean=[0.5] * 3, std=[0.5] * 3, dtype=dtype)
    return F.cross_entropy(model(pixels).logits, micro_batch["labels"], reduction="sum")


def loss_of_larger_images(model: nn.Module, micro_batch: Batch, *, dtype: torch.dtype) -> Tensor:
    """Over the labels of a micro-batch, whose images VGG16 halves five times."""
    pixels = to_pixel_values(micro_batch["images"], None, mean=[0.5] * 3, std=[0.5] * 3, dtype=dtype)
    return F.cross_entropy(model(F.interpolate(pixels, scale_factor=2)), micro_batch["labels"], reduction="sum")


def loss_of_pixels(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Over the grey values of the images with a label, each told by those before it."""
    tokens = micro_batch["images"][:, 0, ::2, ::2].flatten(1).long() * GREY_VALUES // 256  # (B, 64)
    logits = model(tokens, use_cache=False).logits[:, :-1]
    hidden = (micro_batch["labels"] == IGNORED_LABEL)[:, None]
    targets = tokens[:, 1:].masked_fill(hidden, IGNORED_LABEL)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def equivalence_of(
    undivided: BatchLayout, cuts: list[dict[str, Any]], weights: Tensor, compare_with: str | None
) -> dict[str, Any]:
    """The differences of all cuts and, where another run is named, to its weights."""
    largest = {loop: max((max(cut[loop]) for cut in cuts if loop in cut), default=None) for loop in COLUMNS}
    found = {
        "reference": undivided.describe(),
        **{f"largest_difference_{loop.replace(' ', '_')}": difference for loop, difference in largest.items()},
        "geometries": cuts,
    }
    if compare_with is None:
        return found
    other = ViTForImageClassification.from_pretrained(Path(compare_with, WEIGHTS).parent)
    other_weights = parameters_to_vector(other.parameters()).detach().to(weights)
    found |= {"compared_with": compare_with, "largest_difference_to_it": differences([weights], [other_weights])[0]}
    return found | {"same_bits_as_it": same_bits(cuts, read_run(compare_with).results["equivalence"]["geometries"])}


def same_bits(cuts: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[int, bool]:
    """By micro-batch size, for those of both runs: whether the weights of the bitwise loops have the same bits."""
    digests, expected = ({cut["micro_batch_size"]: cut.get("sha256") for cut in run} for run in (cuts, others))
    return {size: digest == expected[size] for size, digest in digests.items() if digest and expected.get(size)}


def build_vit() -> nn.Module:
    """Without BatchNorm, which sees how a batch is cut, dropout, and key biases, whose gradient is rounding alone."""
    return ViTForImageClassification(ViTConfig(qkv_bias=False, **IMAGE, **TINY))


def build_gpt2() -> nn.Module:
    """With dropout of 0.1."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=GREY_VALUES, **TINY_GPT2))


def build_vgg16_bn() -> nn.Module:
    """With a sixteenth of its channels, dropout of 0.5, and BatchNorm over the global batch."""
    widths = [one if isinstance(one, str) else one // NARROWER for one in CONVOLUTIONS["16"]]
    features = convolutions(widths, batch_norm=True)
    model = VGG(features, num_classes=10, out_channels=512 // NARROWER, pooled_size=1, hidden_size=4096 // NARROWER)
    global_batchnorm(model)
    return model


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


def show(equivalence: dict[str, Any], num_steps: int, write: Callable[[str], object]) -> None:
    """Write the differences after some of the steps, and why they are what they are."""
    steps = [step for step in (1, 2, 5, 10, 20, 50, 100) if step < num_steps] + [num_steps]
    steps_of = {loop: steps if loop in LOOPS else steps[-1:] for loop in COLUMNS}.__getitem__
    table = Table(title=f"Largest difference to {equivalence['reference']}, relative to the largest weight")
    table.add_column("micro-batches")
    for loop in COLUMNS:
        for step in steps_of(loop):
            table.add_column(f"{loop}\nstep {step}", justify="right")
    for cut in equivalence["geometries"]:
        figures = (f"{cut[loop][step - 1]:.0e}" if loop in cut else "-" for loop in COLUMNS for step in steps_of(loop))
        table.add_row(cut["geometry"].partition(" = ")[2], *figures)
    console = Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns, color_system=None)
    with console.capture() as drawn:
        console.print(table, WHY)
    write(drawn.get().rstrip())
    if "compared_with" in equivalence:
        difference, same = equivalence["largest_difference_to_it"], equivalence["same_bits_as_it"]
        write(f"Largest difference to the weights of {equivalence['compared_with']}: {difference:.0e}")
        write(f"The bitwise loops have the same bits there for {sum(same.values())} of {len(same)} micro-batch sizes")


if __name__ == "__main__":
    run_recipe(main)
