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
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from memsave_recipes.activations import apply_plan, plan_blocks
from memsave_recipes.activations.global_batchnorm import global_batchnorm
from memsave_recipes.checkpoints import locked_run_folder
from memsave_recipes.compare import read_run
from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.data.vision.images import ImageDataArguments, load_images
from memsave_recipes.distributed import main_process_first
from memsave_recipes.errors import InputError, require
from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.models.convnets import CONVOLUTIONS, VGG, convolutions
from memsave_recipes.processes import num_workers
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.folder import begin_run, check_run_folder, save_final, write_results
from memsave_recipes.run.report import CardFacts, write_model_card
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.run.trackers import finish_trackers, log_metrics, resolve_trackers
from memsave_recipes.step.batch_layout import Batch, BatchLayout, IndexedLayout, LockstepLayout, SampleOrder, seed_for
from memsave_recipes.text import ProgressBar
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.launch import (
    describe_environment,
    deterministic_kernels,
    device_name,
    matmul_precision,
    start_accelerator,
)
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler
from memsave_recipes.training.parsing import parse_arguments

IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 10}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
RECIPE = "ddp_equals_accumulation"
PROJECT = "memsave-ddp-equals-accumulation"
GREY_VALUES, PIXELS = 16, 64
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": PIXELS, "bos_token_id": None, "eos_token_id": None}
LOOPS = ("exact", "usual")
NARROWER = 16  # than VGG16
BITWISE = ("bitwise", "bitwise GPT-2", "bitwise VGG16-BN")
COLUMNS = (*LOOPS, *BITWISE)
WEIGHTS = "final/model.safetensors"
AGAIN = "then start it again"
WHY = """
Why: the loss of a global batch is the sum over all labels divided by their number, and a sum can be taken in parts. The
*exact* loop divides every part by the one number of the whole global batch. The *usual* loop takes the mean of each
micro-batch and then the mean of those: a label counts for more where few others share its micro-batch. *Bitwise* is
the exact loop with the parts added up in an order that does not depend on the ranks: not even the rounding differs.
"""


@dataclass(kw_only=True)
class ProofArguments(RunArguments):
    """A run that is short enough to be repeated for every micro-batch size, in a precision that shows equality."""

    global_batch_size: int = field(default=24, metadata={"help": "samples of one optimizer step, over all ranks"})
    micro_batch_size: int | None = field(default=None, metadata={"help": "the only one to try; default: every one"})
    max_steps: int = field(default=10, metadata={"help": "optimizer steps of each run"})
    dtype: Literal["float32", "bfloat16", "float64"] = field(default="float64", metadata={"help": "of the parameters"})
    compare_with: str | None = field(default=None, metadata={"help": "--output_dir of a run on other ranks"})

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.memory_budget_gib
        require(budget is None, "--memory_budget_gib", budget, "left to the recipes that train once")
        require(self.verify == "off", "--verify", self.verify, "left to the recipes that train once")
        require(not self.eval_only, "--eval_only", True, "left out: the proof trains")
        require(not self.bitwise_topology, "--bitwise_topology", True, "left out: it has columns of its own")
        if self.compare_with is not None and not os.path.isfile(Path(self.compare_with, WEIGHTS)):
            raise InputError(
                f"--compare_with {self.compare_with} holds no {WEIGHTS}: name a finished run's --output_dir"
            )
        if self.compare_with is not None and read_run(self.compare_with).results.get("recipe") != RECIPE:
            raise InputError(f"--compare_with {self.compare_with} is a run of another recipe: name one of {RECIPE}")


@dataclass(kw_only=True)
class PlainOptimizerArguments(OptimizerArguments):
    """SGD without clipping, whose steps are as wrong as the gradient; AdamW and clipping hide a wrong length."""

    optimizer: Literal["adamw", "sgd"] = field(default="sgd", metadata={"help": "AdamW, or SGD with --momentum"})
    learning_rate: float = field(default=0.1, metadata={"help": "at the end of the warm-up"})
    max_grad_norm: float = field(default=0.0, metadata={"help": "clip the gradient; 0 does not clip"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.optimizer_in_backward, "--optimizer_in_backward", True, "left out where gradients add up")


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Train once for every micro-batch size and both loops; returns what ``results.json`` holds."""
    run, optim = parse_arguments(ProofArguments, PlainOptimizerArguments, args=args)
    folder = check_run_folder(run.output_dir, overwrite=run.overwrite)
    with deterministic_kernels(run.full_determinism), matmul_precision(run.matmul_precision):
        accelerator = start_accelerator(log_with=resolve_trackers(run.report_to, folder))
        with locked_run_folder(accelerator, folder):
            return prove(accelerator, folder, run, optim)


def prove(
    accelerator: Accelerator, folder: Path, run: ProofArguments, optim: PlainOptimizerArguments
) -> dict[str, Any]:
    """The runs themselves, in a folder that is theirs."""
    layout_of = partial(BatchLayout.of, run.global_batch_size, num_processes=accelerator.num_processes)
    undivided = layout_of(None)
    sizes = [run.micro_batch_size] if run.micro_batch_size else range(undivided.micro_batch_size, 0, -1)
    layouts = [layout_of(size) for size in sizes]
    set_seed(run.seed)
    warnings.filterwarnings("ignore", "Grad strides do not match")  # DDP's, of micro-batches of 1; only slower

    batches_of = global_batches(accelerator, run)
    bare = build_vit().to(run.torch_dtype)
    plan = plan_blocks(bare, run.activation_checkpointing)
    plan_handle = apply_plan(bare, plan)
    learner_of = partial(Learner, accelerator, optim, run.max_steps)
    vit, again = (learner_of(model, partial(loss_of_images, dtype=run.torch_dtype)) for model in (bare, deepcopy(bare)))
    gpt2 = learner_of(build_gpt2().to(run.torch_dtype), loss_of_pixels)
    bitwise = [BitwiseLoop(learner, batches_of(undivided), batches_of(undivided)) for learner in (again, gpt2)]
    vgg = learner_of(build_vgg16_bn().to(run.torch_dtype), partial(loss_of_larger_images, dtype=run.torch_dtype))
    together, alone = (batches_of(undivided, drop_last=True) for _ in range(2))
    bitwise.append(BitwiseLoop(vgg, together, alone, LockstepLayout))

    # From here on files are written
    flags = asdict(run) | asdict(optim)
    work = f"vit-gbs{run.global_batch_size}-16px"
    begin_run(accelerator, folder, project=PROJECT, work=work, flags=flags, planned=RunPlan(plan), layout=undivided)

    expected = vit.train(batches_of(undivided), vit.exact)
    cuts = []
    for layout in ProgressBar(layouts, shown=accelerator.is_main_process, unit="layout"):
        size = layout.micro_batch_size
        cut: dict[str, Any] = {"geometry": layout.describe(), "micro_batch_size": size}
        for name in LOOPS:
            cut[name] = differences(vit.train(batches_of(layout), getattr(vit, name)), expected)
        if size <= run.global_batch_size // accelerator.num_processes:  # else there are fewer of them than ranks
            cut["sha256"] = {}
            for name, loop in zip(BITWISE, bitwise, strict=True):
                cut[name], cut["sha256"][name] = loop.compare(run.global_batch_size, size)
        cuts.append(cut)
    for step in range(run.max_steps):
        named = ((f"{loop}/micro_batch_{cut['micro_batch_size']}", cut.get(loop)) for cut in cuts for loop in COLUMNS)
        log_metrics(accelerator, {name.replace(" ", "_"): of[step] for name, of in named if of}, step + 1)

    # Finish, with the weights of the undivided global batch
    plan_handle.remove()
    vector_to_parameters(expected[-1], bare.parameters())
    results = {
        "recipe": RECIPE,
        "model": "vit",
        "num_parameters": len(expected[-1]),
        "plan": plan.strategy,
        "global_batch_size": run.global_batch_size,
        "num_processes": accelerator.num_processes,
        "device": device_name(accelerator.device),
        "steps": run.max_steps,
        "equivalence": equivalence_of(undivided, cuts, expected[-1], run.compare_with),
    }
    facts = card_facts(accelerator, bare, flags, results, undivided)
    save_final(accelerator, folder, vit.model, partial(write_model_card, facts=facts), way_out=AGAIN)
    write_results(accelerator, folder, results, way_out=AGAIN)
    if accelerator.is_main_process:
        show(results["equivalence"], run.max_steps)
    finish_trackers(accelerator, results)
    return results


def global_batches(accelerator: Accelerator, run: ProofArguments) -> Callable[..., GlobalBatches]:
    """The same samples in the same order for every layout; with ``drop_last`` without the short step of an epoch."""
    with main_process_first(accelerator):
        images = load_images(ImageDataArguments(image_size=16, augmentation="none"), seed=run.seed)
    order = SampleOrder(
        num_samples=len(images.train), global_batch_size=run.global_batch_size, seed=run.seed, drop_last=run.drop_last
    )
    if order.notice:
        accelerator.print(order.notice)
    return lambda layout, drop_last=run.drop_last: GlobalBatches(
        accelerator,
        images.train,
        layout=layout,
        order=replace(order, drop_last=drop_last),
        num_steps=run.max_steps,
        seed=run.seed,
        num_workers=num_workers(run.dataloader_num_workers, accelerator),
        count_valid=count_labels,
        collate_fn=collate_and_hide_labels,
    )


class Learner:
    """A model that is trained anew from the same weights, with either loop.

    Args:
        loss_of: the loss of a micro-batch, summed over its labels.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        optim: PlainOptimizerArguments,
        num_steps: int,
        bare: nn.Module,
        loss_of: Callable[[nn.Module, Batch], Tensor],
    ) -> None:
        self.accelerator, self.optim, self.num_steps, self.loss_of = accelerator, optim, num_steps, loss_of
        self.bare, self.initial = bare, deepcopy(bare.state_dict())
        self.model = accelerator.prepare(bare)

    def train(
        self, batches: GlobalBatches, backward: Callable[[nn.Module, GlobalBatch], None], *, alone: bool = False
    ) -> list[Tensor]:
        """The weights after each step; ``alone`` without the other ranks, which do the same."""
        self.bare.load_state_dict(self.initial)
        model = self.bare if alone else self.model
        optimizer = make_optimizer(self.optim, self.bare)
        # The scheduler is not prepared: Accelerate's would move it once for every rank.
        scheduler = make_scheduler(self.optim, optimizer, self.num_steps)
        optimizer = self.accelerator.prepare(optimizer)
        weights = []
        for batch in batches:
            backward(model, batch)
            self.accelerator.clip_grad_norm_(model.parameters(), self.optim.max_grad_norm or float("inf"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            weights.append(parameters_to_vector(self.bare.parameters()).detach())
        return weights

    def exact(self, model: nn.Module, batch: GlobalBatch) -> None:
        """As in every recipe: every part is divided by the number of labels in the whole global batch."""
        for micro_batch in batch.forwards(model):
            batch.backward(self.loss_of(model, micro_batch))

    def usual(self, model: nn.Module, batch: GlobalBatch) -> None:
        """The mean over the micro-batches of the mean over each one's labels."""
        for micro_batch in batch.forwards(model):
            mean = self.loss_of(model, micro_batch) / count_labels(micro_batch).clamp(min=1)
            self.accelerator.backward(mean / len(batch.micro_batches))  # as `accelerator.accumulate` divides it


@dataclass(frozen=True)
class BitwiseLoop:
    """The loop of ``--bitwise_topology``, on all ranks together and on each of them alone."""

    learner: Learner
    together: GlobalBatches
    alone: GlobalBatches
    kind: type[IndexedLayout] = IndexedLayout

    def compare(self, global_batch_size: int, micro_batch_size: int) -> tuple[list[float], str]:
        """The differences after each step, and the digest of the last weights."""
        exact, num_ranks = self.learner.exact, self.learner.accelerator.num_processes
        self.together.layout = self.kind.of(global_batch_size, micro_batch_size, num_ranks)
        self.alone.layout = self.kind.of(global_batch_size, micro_batch_size, 1)
        expected = self.learner.train(self.alone, exact, alone=True)
        weights = self.learner.train(self.together, exact)
        return differences(weights, expected), hashlib.sha256(weights[-1].cpu().view(torch.uint8).numpy()).hexdigest()


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
    found |= {"compared_with": compare_with, "largest_difference_to_it": largest_difference(weights, other_weights)}
    return found | {"same_bits_as_it": same_bits(cuts, read_run(compare_with).results["equivalence"]["geometries"])}


def same_bits(cuts: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[int, bool]:
    """By micro-batch size, for those of both runs: whether the weights of the bitwise loops have the same bits."""
    digests, expected = ({cut["micro_batch_size"]: cut.get("sha256") for cut in run} for run in (cuts, others))
    return {size: digest == expected[size] for size, digest in digests.items() if digest and expected.get(size)}


def card_facts(
    accelerator: Accelerator, model: nn.Module, flags: dict[str, Any], results: dict[str, Any], layout: BatchLayout
) -> CardFacts:
    """The facts of the model card."""
    named = {key: results[key] for key in ("recipe", "model", "num_parameters", "plan")}
    return CardFacts(
        model=model,
        flags={**flags, "dataset": "digits"},
        results={**named, "eval": {}},
        steps=results["steps"],
        batch=layout.describe(),
        versions=describe_environment(accelerator)["versions"],
        mixed_precision=accelerator.mixed_precision,
    )


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
    """The ``largest_difference`` after each step."""
    return list(map(largest_difference, weights, expected))


def largest_difference(weights: Tensor, expected: Tensor) -> float:
    """Of any weight, relative to the largest weight."""
    return ((weights - expected).abs().max() / expected.abs().max()).item()


def show(equivalence: dict[str, Any], num_steps: int) -> None:
    """Print the differences after some of the steps, and why they are what they are."""
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
    Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns).print(table, WHY)
    if "compared_with" in equivalence:
        difference, same = equivalence["largest_difference_to_it"], equivalence["same_bits_as_it"]
        print(f"Largest difference to the weights of {equivalence['compared_with']}: {difference:.0e}")
        print(f"The bitwise loops have the same bits there for {sum(same.values())} of {len(same)} micro-batch sizes")


if __name__ == "__main__":
    run_recipe(main)
