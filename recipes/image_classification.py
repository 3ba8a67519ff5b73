"""Train an image classifier, plain or with activation checkpointing, on one process or many, to the same result.

On the CPU of any machine, without a network (scikit-learn's scanned digits; a minute or two for the small models):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/image_classification.py \
        --model vgg_small --activation_checkpointing segments:4 --output_dir out/digits

On one GPU or several, with images in DIR/train/CLASS/ and DIR/validation/CLASS/:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/image_classification.py \
        --model vgg16 --data_dir DIR --image_size 224 --activation_checkpointing segments:2 --output_dir out/vgg16
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/... (the same flags)

Expect: the loss curve and the accuracy of the plain run, digit for digit, in less memory and more time. The flags of
all recipes are in `memsave_recipes/training/arguments.py`, those of this one below; `--help` lists them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, Literal

import evaluate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForImageClassification
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from memsave_recipes.activations import apply_plan
from memsave_recipes.checkpoints import TrainState
from memsave_recipes.compare.compare import compare
from memsave_recipes.compare.runs import read_run
from memsave_recipes.data.augmentation import AUGMENTATIONS, to_pixel_values
from memsave_recipes.data.images import count_classes, load_images
from memsave_recipes.distributed import main_process_first
from memsave_recipes.errors import InputError
from memsave_recipes.metrics import METRICS
from memsave_recipes.models import MODELS, load_weights
from memsave_recipes.models.image_classifiers import check_image_size
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer, image_processor_config
from memsave_recipes.planner.run_plan import plan_run
from memsave_recipes.planner.task import Task
from memsave_recipes.processes import num_workers
from memsave_recipes.render.choice import show_choice
from memsave_recipes.render.run_table import show
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.folder import OpenRun, begin_run, open_run, save_final, save_model, write_results
from memsave_recipes.run.report import RunReport
from memsave_recipes.run.trackers import finish_trackers
from memsave_recipes.run.verification import settle_kernels, verify_plan
from memsave_recipes.training.arguments import AUTO, CheckpointArguments, OptimizerArguments, RunArguments, require
from memsave_recipes.training.batch_layout import SampleOrder
from memsave_recipes.training.batching import Batch, GlobalBatch, GlobalBatches, evaluation_batches, gather_counted
from memsave_recipes.training.launch import batchnorm_notice, synchronize_batchnorm
from memsave_recipes.training.non_finite import NonFiniteGuard
from memsave_recipes.training.optimizers import check_in_backward, clip_gradients, make_optimizer, make_scheduler
from memsave_recipes.training.parsing import flag_values, parse_arguments

DEFAULT_CLASSES = 1000  # ImageNet's, where a plan is made before the images are there


@dataclass(kw_only=True)
class DataArguments:
    """Which images, at which size, how augmented."""

    dataset: str | None = field(default=None, metadata={"help": "digits (the default, built in) or a Hub id"})
    data_dir: str | None = field(
        default=None, metadata={"help": "folder with train/ and validation/, a folder a class"}
    )
    image_size: int = field(default=32, metadata={"help": "images are scaled to this many pixels a side"})
    augmentation: Literal["digits", "article", "none"] | None = field(
        default=None, metadata={"help": "of the training images; default: digits for digits, else article"}
    )
    skip_broken_images: bool = field(default=False, metadata={"help": "leave out and count unreadable images"})

    def __post_init__(self) -> None:
        require(self.image_size >= 1, "--image_size", self.image_size, "at least 1")
        self.dataset = self.dataset or (None if self.data_dir else "digits")
        self.augmentation = self.augmentation or ("digits" if self.dataset == "digits" else "article")


@dataclass(kw_only=True)
class ModelArguments(TransformerArguments):
    """Which network: one of ours, or any image classifier of transformers."""

    model: str | None = field(default=None, metadata={"help": f"one of {', '.join(MODELS)}"})
    weights: str | None = field(default=None, metadata={"help": "for --model: a .safetensors or .pth of its weights"})
    channels_last: bool = field(
        default=False, metadata={"help": "weights of convolutions in the order that GPUs are fastest with"}
    )

    def __post_init__(self) -> None:
        ways = [self.model, self.model_name_or_path, self.model_type]
        if sum(way is not None for way in ways) != 1:
            raise InputError("give one of --model, --model_name_or_path and --model_type")
        if self.model is not None and self.model not in MODELS:
            raise InputError(f"--model {self.model} is not known: choose one of {', '.join(MODELS)}")
        if self.model is None and self.weights is not None:
            raise InputError("--weights are those of a --model: leave them out")
        if self.model is not None and (self.dropout is not None or self.attn_implementation is not None):
            raise InputError("--dropout and --attn_implementation shape models of transformers: leave them out")
        self.check_transformer()

    @property
    def name(self) -> str:
        """What the network is called in tables and dashboards."""
        return self.model or super().name


FLAGS = (DataArguments, ModelArguments, RunArguments, OptimizerArguments, CheckpointArguments)


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Train as the flags say; returns what ``results.json`` holds."""
    flags = parse_arguments(*FLAGS, args=args)
    data, network, run, optim, checkpointing = flags
    with open_run(run, checkpointing, flag_values(flags)) as opened:
        return train(opened, data, network, opened.planned(run), optim, checkpointing, partial(task, args))


def train(
    opened: OpenRun,
    data: DataArguments,
    network: ModelArguments,
    run: RunArguments,
    optim: OptimizerArguments,
    checkpointing: CheckpointArguments,
    on_paper: Callable[[], Task],
) -> dict[str, Any]:
    """The run itself, in a folder that is its own."""
    accelerator, folder = opened.accelerator, opened.folder
    layout = run.layout(accelerator.num_processes)
    check_in_backward(optim, layout, accelerator.mixed_precision, skip_nonfinite=checkpointing.skip_nonfinite)
    set_seed(run.seed)

    # Data
    with main_process_first(accelerator):
        images = load_images(
            dataset=data.dataset,
            data_dir=data.data_dir,
            image_size=data.image_size,
            augmentation=AUGMENTATIONS[data.augmentation],
            seed=run.seed,
            skip_broken_images=data.skip_broken_images,
        )
    order = SampleOrder(
        num_samples=len(images.train), global_batch_size=run.global_batch_size, seed=run.seed, drop_last=run.drop_last
    )
    num_steps = run.max_steps or ceil(run.num_epochs * order.steps_per_epoch)
    loading = {"num_workers": num_workers(run.dataloader_num_workers, accelerator)}
    batches = GlobalBatches(
        accelerator, images.train, order=order, layout=layout, num_steps=num_steps, seed=run.seed, **loading
    )
    pixels = partial(to_pixel_values, **normalization(network), dtype=run.torch_dtype)

    # Model
    model = build_model(network, images.label_names, run, data.image_size)
    if run.sync_batchnorm:
        model = synchronize_batchnorm(model, accelerator.device)
    else:
        check_image_size(model, data.image_size, 1 if run.micro_batch_size == AUTO else batches.smallest_micro_batch)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    # Optimizer. The scheduler is not prepared: Accelerate's would move it once for every rank.
    optimizer = make_optimizer(optim, model)
    scheduler = make_scheduler(optim, optimizer, num_steps)
    trained, optimizer = accelerator.prepare(model, optimizer)

    loss_of = partial(summed_loss, trained, pixels=pixels)

    # Memory plan, and the micro-batch where that is left to the planner
    planned = plan_run(run, optim, accelerator, model, batches, trained, loss_of, task=on_paper, show=show_choice)
    layout = batches.layout
    plan_handle = apply_plan(model, planned.plan)
    equivalence = verify_plan(run.verify, accelerator, trained, plan_handle, batches, loss_of)
    settle_kernels(run.full_determinism, accelerator, trained, batches, loss_of)

    # Checkpoints: where the run goes on, and when it saves
    checkpoints = opened.checkpoints(
        TrainState(accelerator, trained, optimizer, scheduler), batches, images.fingerprint
    )
    resumed = checkpoints.resume_into(batches) if checkpointing.resume else None

    # From here on files are written
    settings = begin_run(
        accelerator,
        folder,
        project="memsave-image-classification",
        work=f"{network.name}-gbs{run.global_batch_size}-{data.image_size}px",
        flags=opened.flags,
        planned=planned,
        layout=layout,
        resumed=resumed,
    )
    accelerator.print(layout.describe(), planned.plan.describe(), sep="\n")
    for notice in (images.notice, order.notice, batchnorm_notice(model, layout)):
        if notice:
            accelerator.print(notice)

    # The loop
    gate = NonFiniteGuard(accelerator, trained, optimizer, skips=checkpointing.skip_nonfinite)

    def train_step(batch: GlobalBatch) -> Tensor | None:
        for micro_batch in batch.forwards(trained):
            batch.backward(loss_of(micro_batch))
        grad_norm = clip_gradients(optim, accelerator, trained)
        if gate.should_step(batch, grad_norm):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return grad_norm

    def evaluate_if_due(step: int) -> None:
        if not report.evaluation_is_due(step, every=run.eval_steps):
            return
        with report.clock.paused(synchronize=True):
            held_out = evaluation_batches(accelerator, images.validation, layout.micro_batch_size, **loading)
            held_out = checkpoints.until_signal(held_out, step, report.state_dict)
            evaluated = evaluate_model(trained, accelerator, held_out, pixels)
            if report.log_evaluation(step, evaluated) and checkpointing.save_best:
                checkpoints.save_best(step, partial(save_model, accelerator, model))

    report = RunReport(accelerator, batches, trained, optimizer, settings)
    if resumed:
        report.load_state_dict(resumed.state)
        evaluate_if_due(resumed.step)  # a signal may have ended it
    progress = tqdm(batches, disable=not accelerator.is_main_process, unit="step")
    for batch in report.clock.loading(progress):
        learning_rate = scheduler.get_last_lr()[0]
        report.count_flops(batch, loss_of)  # once, beside the training
        grad_norm = report.run(batch.step, partial(train_step, batch))
        report.count(batch, grad_norm)
        plan_handle.check_first_step(accelerator.print)
        step, is_last = batch.step + 1, batch.step + 1 == num_steps
        if step % run.logging_steps == 0 or is_last:
            progress.set_postfix_str(report.log_window(step, learning_rate=learning_rate))
        if is_last:  # whatever fails from here on costs nothing
            with report.clock.paused():
                checkpoints.save(step, report.state_dict())
        evaluate_if_due(step)
        with report.clock.paused():
            checkpoints.after_step(step, report.state_dict)

    # Finish
    plan_handle.remove()
    save_final(accelerator, folder, partial(save_model, accelerator, model))
    results = {
        "recipe": "image_classification",
        "model": network.name,
        "num_parameters": num_parameters,
        "plan": planned.plan.strategy,
        "eval": report.evaluated,
        **equivalence,
        **report.results(),
    }
    write_results(accelerator, folder, results, checkpoints)
    if accelerator.is_main_process:
        show(compare([read_run(folder)]))
    finish_trackers(accelerator, results)
    return results


def task(args: list[str] | None = None) -> Task:
    """What ``memsave plan`` needs to know of a run, before there are images or weights."""
    data, network, run, optim, _ = parse_arguments(*FLAGS, args=args)
    known = count_classes(data.dataset, data.data_dir)
    names = tuple(map(str, range(known or DEFAULT_CLASSES)))

    def micro_batch(size: int) -> Batch:
        images = torch.empty(size, 3, data.image_size, data.image_size, dtype=torch.uint8, device="meta")
        batch = {"images": images, "labels": torch.empty(size, dtype=torch.int64, device="meta")}
        return batch if data.augmentation == "none" else batch | {"affine": torch.empty(size, 2, 3, device="meta")}

    return Task(
        run=run,
        optim=optim,
        build_model=partial(build_model, network, names, run, data.image_size, with_weights=False),
        loss_of=partial(summed_loss, pixels=partial(to_pixel_values, **normalization(network), dtype=run.torch_dtype)),
        micro_batch=micro_batch,
        assumed=() if known else (f"{DEFAULT_CLASSES:,} classes",),
    )


def build_model(
    network: ModelArguments,
    label_names: tuple[str, ...],
    run: RunArguments,
    image_size: int,
    with_weights: bool = True,
) -> nn.Module:
    """The network that the flags name, with one output a label."""
    if network.model is None:
        labels = {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
        if network.model_type is not None:
            labels["image_size"] = image_size
        model = build_transformer(
            AutoModelForImageClassification, network, dtype=run.torch_dtype, with_weights=with_weights, **labels
        )
    else:
        model = MODELS[network.model](num_classes=len(label_names))
        if network.weights is not None and with_weights:
            load_weights(model, network.weights)
        model = model.to(run.torch_dtype)
    check_image_size(model, image_size)
    return model.to(memory_format=torch.channels_last) if network.channels_last else model


def normalization(network: ModelArguments) -> dict[str, Any]:
    """The mean and deviation that a pretrained network expects; ImageNet's where it says nothing."""
    name = network.model_name_or_path
    expected = {} if name is None else image_processor_config(name)
    mean, std = expected.get("image_mean"), expected.get("image_std")
    return {"mean": mean or IMAGENET_DEFAULT_MEAN, "std": std or IMAGENET_DEFAULT_STD}


def summed_loss(trained: nn.Module, micro_batch: Batch, *, pixels: Callable[..., Tensor]) -> Tensor:
    """The cross-entropy of a micro-batch, summed over its images."""
    logits = logits_of(trained(pixels(micro_batch["images"], micro_batch.get("affine"))))
    return F.cross_entropy(logits, micro_batch["labels"], reduction="sum")


def logits_of(output: Any) -> Tensor:
    """The (B, num_classes) logits in at least float32; bare from our models, in a record from those of transformers."""
    logits = getattr(output, "logits", output)
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def evaluate_model(
    model: nn.Module, accelerator: Accelerator, batches: Iterable[Batch], pixels: Callable[..., Tensor]
) -> dict[str, float]:
    """Accuracy and mean loss over every sample of ``batches``, each once, however many ranks share them."""
    predictions: list[int] = []
    references: list[int] = []
    loss_sum = torch.tensor(0.0, device=accelerator.device)
    model.eval()
    for batch in batches:
        logits = logits_of(model(pixels(batch["images"], None)))
        loss_sum = loss_sum + F.cross_entropy(logits, batch["labels"], reduction="sum")
        predicted, expected = gather_counted(accelerator, logits.argmax(dim=-1), batch["labels"])
        predictions += predicted.tolist()
        references += expected.tolist()
    model.train()
    figures = evaluate.load(str(METRICS)).compute(predictions=predictions, references=references)
    return {**figures, "loss": accelerator.reduce(loss_sum, "sum").item() / len(references)}


if __name__ == "__main__":
    run_recipe(main, task)
