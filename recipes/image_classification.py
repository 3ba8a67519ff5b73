"""Train an image classifier, plain or with activation checkpointing, on one process or many, to the same result.

On the CPU of any machine, without a network (scikit-learn's scanned digits; a minute or two for the small models):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/image_classification.py \
        --model vgg_small --activation_checkpointing segments:4 --output_dir out/digits

On one GPU or several, with images in DIR/CLASS/, or in DIR/train/CLASS/ and DIR/validation/CLASS/:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/image_classification.py \
        --model vgg16 --data_dir DIR --activation_checkpointing segments:2 --output_dir out/vgg16
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/... (the same flags)

Expect the loss curve and the accuracy of training without checkpointing, digit for digit, in less memory and more time.
`Arguments` below lists the dataclasses that declare the flags; `--help` lists the flags.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.data.vision.images import ImageDataArguments, count_classes, load_images
from memsave_recipes.models.image_classifiers import (
    ImageModelArguments,
    build_image_classifier,
    check_image_size,
    normalization,
    train_part_of_images,
)
from memsave_recipes.models.labels import LabelLoss
from memsave_recipes.models.saved import save_image_classifier
from memsave_recipes.models.what_trains import ClassifierTrainingArguments
from memsave_recipes.run.recipe import (
    Accelerator,
    Batch,
    LabelArguments,
    RecipeArguments,
    Run,
    Task,
    apply_plan,
    evaluate_classifier,
    make_optimizer,
    make_scheduler,
    parse_arguments,
    run_recipe,
    summed_loss,
)

DEFAULT_CLASSES = 1000  # as in ImageNet, if a plan is made before the images are there


@dataclass(kw_only=True)
class Arguments(RecipeArguments, LabelArguments, ClassifierTrainingArguments, ImageModelArguments, ImageDataArguments):
    """The flags of image classification, without ``--load_in_4bit``."""

    load_in_4bit: bool = field(default=False, init=False)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train an image classifier as the flags say; returns the content of ``results.json``."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe="image_classification") as run:
        return train(run)


def train(run: Run) -> dict[str, Any]:
    """Train the classifier in the run's folder."""
    accelerator = Accelerator(**run.launch)
    args: Arguments = run.join(accelerator)

    # Data: each batch is one optimizer step, the same samples in the same order on any number of ranks
    with run.main_process_first():
        names, grey_bits = args.model_labels if args.eval_only else None, args.pretrained_grey_bits
        images = load_images(args, seed=args.seed, model_labels=names, grey_bits=grey_bits)
    of_train = images.train.rows["label"][:]
    loss = args.label_loss(images.problem_type, images.label_names, of_train)
    batches = run.global_batches(images.train, weights=loss.weights_of(of_train))

    # Model, optimizer and schedule
    task = describe(args, images.label_names, loss)
    bare, model = run.build(task, batches)
    optimizer = make_optimizer(args, bare, batches.layout, seed=args.seed)
    scheduler = make_scheduler(args, optimizer, batches.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the scheduler: it would step once per process

    # The activation plan that the flags name, or the fastest that fits the memory; ``model`` may be DDP around ``bare``
    plan = run.choose_plan(model, optimizer)
    handle = apply_plan(bare, plan)
    work = f"{args.name}-gbs{args.global_batch_size}-{args.image_size}px"
    training = run.begin(
        model, optimizer, scheduler, handle, data=images.fingerprint, work=work, notices=images.notices
    )

    labels = {"problem_type": images.problem_type, "label_names": images.label_names}
    options = {"logits_of": partial(logits_of_images, pixels=pixels_for(args)), "exact": batches.layout.is_bitwise}
    validate = partial(evaluate_classifier, model, accelerator, **options, **labels)
    training.evaluate_if_due(validate, images.validation)  # with --eval_only, or where a signal stopped it
    for batch in training.steps():
        for micro_batch in batch.forwards(model):
            loss_sum = task.loss_of(model, micro_batch)
            accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))  # of the mean over the global batch
        grad_norm = training.clip_grad_norm_(args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if figures := training.end_step(grad_norm):
            accelerator.log(figures, step=training.step)
        training.evaluate_if_due(validate, images.validation)
        training.save_if_due()

    save_others = partial(  # the files of final/ beside the weights
        save_image_classifier,
        architecture=args.architecture,
        **labels,
        dtype=args.torch_dtype,
        image_size=args.image_size,
        grey_bits=images.grey_bits,
        **normalization(args),
    )
    return training.finish(run.saved, save_others, model=args.name)


def task(argv: list[str] | None = None) -> Task:
    """Describe the task of the flags for ``memsave plan``, which has neither images nor weights."""
    (args,) = parse_arguments(Arguments, args=argv)
    known = count_classes(args)
    assumed = () if known else (f"{DEFAULT_CLASSES:,} classes",)
    names = tuple(map(str, range(known or DEFAULT_CLASSES)))
    return describe(args, names, args.label_loss(None, names), assumed=assumed)


def describe(args: Arguments, names: tuple[str, ...], loss: LabelLoss, *, assumed: tuple[str, ...] = ()) -> Task:
    """Describe the model, its loss and the tensors of a micro-batch: the same for training and for planning."""

    def micro_batch(size: int) -> Batch:
        images = torch.empty(size, 3, args.image_size, args.image_size, dtype=torch.uint8, device="meta")
        labels = torch.empty(size, len(names), device="meta") if args.mixes else loss.labels_for(size, len(names))
        batch = {"images": images, "labels": labels}
        return batch | {"affine": torch.empty(size, 2, 3, device="meta")} if args.affine else batch

    options = {"problem_type": loss.problem_type}
    checked = partial(check_image_size, args.image_size)
    return Task(
        run=args,
        optim=args,
        build_model=partial(build_image_classifier, args, names, args.image_size, args.torch_dtype, **options),
        adapt=partial(train_part_of_images, flags=args, image_size=args.image_size),
        loss_of=partial(summed_loss, logits_of=partial(logits_of_images, pixels=pixels_for(args)), loss=loss),
        micro_batch=micro_batch,
        takes_adapters=args.architecture is None and not args.freezes,
        check_samples=checked if args.batchnorm == "local" else None,
        assumed=assumed,
    )


def pixels_for(args: Arguments) -> Callable[..., Tensor]:
    """Return a function from (B, 3, S, S) bytes to the network's input, augmented if an affine map is given."""
    return partial(to_pixel_values, **normalization(args), dtype=args.torch_dtype)


def logits_of_images(model: nn.Module, batch: Batch, *, pixels: Callable[..., Tensor]) -> Tensor:
    """Return the (B, num_classes) logits in at least float32; models of transformers return them in a record."""
    output = model(pixels(batch["images"], batch.get("affine")))
    logits = getattr(output, "logits", output)
    return logits if logits.dtype == torch.float64 else logits.float()


if __name__ == "__main__":
    run_recipe(main, task)
