"""Train a vision-language model, from scratch or from pretrained weights, in the memory that you have.

On the CPU of any machine, without a network (a toy: which digit is where in a grid?):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/image_text.py \
        --config recipes/configs/digit_grids.yaml --output_dir out/grids

On one GPU or several, fine-tune a model from the Hub (or from a folder) on your conversations: decoder and projector,
or LoRA adapters. Images are parts of the messages or a column `images`; the loss counts only the assistant's tokens:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml --mixed_precision bf16 recipes/image_text.py \
        --model_name_or_path MODEL --train_file DATA.jsonl --block_size 2048 --max_pixels 1000000 \
        --activation_checkpointing full --lora --output_dir out/photos
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/... (the same flags)

Expect the same loss curve for every plan, batch layout and number of ranks. `--help` lists the flags.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsave_recipes.data.image_rows import ImageTextArguments
from memsave_recipes.data.image_text import check_model, largest_micro_batch, load_image_text, training_texts
from memsave_recipes.data.processors import open_or_make_processor
from memsave_recipes.data.text.packing import count_valid
from memsave_recipes.models.image_text import (
    ImageTextModelArguments,
    build_image_text_model,
    right_answers,
    train_part_of_image_text,
    with_image_text_loss,
)
from memsave_recipes.models.saved import save_processor
from memsave_recipes.models.what_trains import TrainedPartArguments
from memsave_recipes.run.recipe import (
    Accelerator,
    Batch,
    RecipeArguments,
    Run,
    Task,
    apply_plan,
    make_optimizer,
    make_scheduler,
    parse_arguments,
    run_recipe,
    sum_over_ranks,
)


@dataclass(kw_only=True)
class Arguments(RecipeArguments, TrainedPartArguments, ImageTextModelArguments, ImageTextArguments):
    """The flags of models of images and text; no BatchNorm trains in them, and no weights are streamed."""

    batchnorm: Literal["local", "sync", "global"] = field(default="local", init=False)
    stream_weights: Literal["none", "host"] = field(default="none", init=False)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a model of images and text as the flags say; returns the content of ``results.json``."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe="image_text") as run:
        return train(run)


def train(run: Run) -> dict[str, Any]:
    """Train the model in the run's folder."""
    accelerator = Accelerator(**run.launch)
    args: Arguments = run.join(accelerator)

    # Data: each batch is one optimizer step, the same rows in the same order on any number of ranks
    with run.main_process_first():
        rows = load_image_text(args, partial(open_or_make_processor, args), dtype=args.torch_dtype)
    batches = run.global_batches(rows.train, count_valid=count_valid, collate_fn=rows.train.collate)

    # Model (``bare``; with its loss ``trained``), optimizer and schedule
    task = describe(args, rows.processor)
    bare, trained = run.build(task, batches, settle=partial(check_model, rows=rows, in_shards=args.in_shards))
    optimizer = make_optimizer(args, bare, batches.layout, seed=args.seed)
    scheduler = make_scheduler(args, optimizer, batches.num_steps)
    model, optimizer = accelerator.prepare(trained, optimizer)  # not the scheduler: it would step once per process

    # The activation plan that the flags name, or the fastest that fits, applied to ``bare``: the module with the blocks
    plan = run.choose_plan(model, optimizer)
    handle = apply_plan(bare, plan)
    work = f"{args.name}-gbs{args.global_batch_size}-{args.block_size}tok"
    training = run.begin(
        model, optimizer, scheduler, handle, data=rows.fingerprint, work=work, notices=(rows.notice, trained.notice)
    )

    validate = partial(evaluate, model, trained, accelerator, exact=batches.layout.is_bitwise)
    evaluation = {"collate_fn": rows.validation.collate}
    training.evaluate_if_due(validate, rows.validation, **evaluation)  # if --eval_only, or a signal cut one off
    for batch in training.steps():
        for micro_batch in batch.forwards(model):
            loss = summed_loss(model, micro_batch)
            accelerator.backward(loss, gradient=batch.share_of(loss))  # scales the sum to the global batch's mean
        grad_norm = training.clip_grad_norm_(args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if figures := training.end_step(grad_norm):
            accelerator.log(figures | trained.figures, step=training.step)
        training.evaluate_if_due(validate, rows.validation, **evaluation)
        training.save_if_due()

    save_others = partial(save_processor, processor=rows.processor, texts=rows.texts)
    return training.finish(run.saved, save_others, model=args.name)


def task(argv: list[str] | None = None) -> Task:
    """Describe the task of the flags for ``memsave plan``, which has neither images nor weights."""
    (args,) = parse_arguments(Arguments, args=argv)
    return describe(args, open_or_make_processor(args, training_texts(args)))


def describe(args: Arguments, processor: Any) -> Task:
    """Describe the model, its loss and the tensors of a micro-batch: the same for training and for planning."""
    return Task(
        run=args,
        optim=args,
        build_model=partial(build_image_text_model, args, processor, with_weights=False),
        adapt=partial(train_part_of_image_text, flags=args),
        trained=partial(with_image_text_loss, flag=args.loss),
        loss_of=summed_loss,
        micro_batch=partial(largest_micro_batch, processor, flags=args, dtype=args.torch_dtype),
        takes_adapters=not args.freezes,
        losses=(args.loss,),
    )


def summed_loss(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Return the loss of a micro-batch, summed over the tokens that count."""
    return model(**micro_batch)


@torch.no_grad()
def evaluate(
    model: nn.Module, trained: Any, accelerator: Accelerator, batches: Iterable[Batch], *, exact: bool
) -> dict[str, float]:
    """Return the mean loss in nats per token, and the share of answers that greedy decoding gets right.

    ``exact`` adds the losses up without rounding, so that the number of ranks does not matter.
    """
    model.eval()
    parts = []
    for batch in batches:
        loss = model(**batch)
        right, total = right_answers(batch["labels"], trained.is_best)
        parts.append(torch.stack([loss.cpu().double(), count_valid(batch).cpu(), right.cpu(), total.cpu()]))
    model.train()
    loss_sum, num_tokens, num_right, num_answers = sum_over_ranks(accelerator, parts, exact=exact).tolist()
    return {"loss": loss_sum / num_tokens, "exact_match": num_right / num_answers}


if __name__ == "__main__":
    run_recipe(main, task)
