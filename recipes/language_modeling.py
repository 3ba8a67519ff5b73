"""Train a causal language model, from scratch or from pretrained weights, in the memory that you have.

On the CPU of any machine, without a network (the text of Python's own library; two minutes on 2 cores):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/language_modeling.py \
        --model_type gpt2 --config_overrides "n_layer=4,n_head=4,n_embd=128" --block_size 256 \
        --global_batch_size 16 --micro_batch_size 4 --max_steps 200 --output_dir out/lm

On one GPU or several, fine-tune a model from the Hub (or from a folder) on your text or conversations, the whole model
or LoRA adapters. The tokenizer's chat template formats conversations; the loss counts only the assistant's tokens:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml --mixed_precision bf16 \
        recipes/language_modeling.py --model_name_or_path MODEL --train_file DATA.jsonl --block_size 2048 \
        --activation_checkpointing full --lora --output_dir out/lora
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/... (the same flags)

Expect the same loss curve for every plan, batch layout and number of ranks. `--help` lists the flags.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsave_recipes.data.text.packing import count_valid
from memsave_recipes.data.text.rows import RowArguments, check_model, load_rows
from memsave_recipes.models.causal_lm import check_causal, continue_text
from memsave_recipes.models.language_model import (
    LanguageModelArguments,
    build_language_model,
    settle_language_model,
    with_loss,
)
from memsave_recipes.models.saved import save_tokenizer
from memsave_recipes.models.sequence_parallel import SequenceArguments
from memsave_recipes.models.what_trains import TrainedPartArguments, train_part
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
class Arguments(RecipeArguments, TrainedPartArguments, SequenceArguments, LanguageModelArguments, RowArguments):
    """The flags of language modeling, without ``--batchnorm``: no language model has BatchNorm."""

    batchnorm: Literal["local", "sync", "global"] = field(default="local", init=False)

    @property
    def of_model(self) -> dict[str, Any]:
        """Return what ``load_rows`` takes besides the flags of ``RowArguments``."""
        return {
            "tokenizer_name": self.tokenizer_name_or_path,
            "model_type": self.model_type,
            "trust_remote_code": self.trust_remote_code,
            "one_row": self.one_row,
            "max_positions": self.max_positions,
            "stream_bytes": self.stream_bytes,
            "vocab_size": self.vocab_size,
            "eval_only": self.eval_only,
        }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a language model as the flags say; returns the content of ``results.json``."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe="language_modeling") as run:
        return train(run)


def train(run: Run) -> dict[str, Any]:
    """Train the language model in the run's folder."""
    accelerator = Accelerator(**run.launch)
    args: Arguments = run.join(accelerator)

    # Data: each batch is one optimizer step, the same rows in the same order on any number of ranks
    with run.main_process_first():
        rows = load_rows(args, **args.of_model)
    batches = run.global_batches(rows.train, count_valid=count_valid, collate_fn=rows.train.collate)

    # Model (``bare``; with its loss ``trained``), optimizer and schedule
    tokenizer = rows.tokenizer
    task = describe(args, len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    bare, trained = run.build(task, batches, settle=partial(settle, args=args, accelerator=accelerator, rows=rows))
    optimizer = make_optimizer(args, bare, batches.layout, seed=args.seed)
    scheduler = make_scheduler(args, optimizer, batches.num_steps)
    model, optimizer = accelerator.prepare(trained, optimizer)  # not the scheduler: it would step once per process

    # The activation plan that the flags name, or the fastest that fits, applied to ``bare``: the module with the blocks
    plan = run.choose_plan(model, optimizer)
    handle = apply_plan(bare, plan)
    work, notices = f"{args.name}-gbs{args.global_batch_size}-{args.block_size}tok", (rows.notice, trained.notice)
    training = run.begin(model, optimizer, scheduler, handle, data=rows.fingerprint, work=work, notices=notices)

    shared = {"exact": batches.layout.is_bitwise, "shared_by": args.sequence_parallel, "tokens": rows.validation.tokens}
    validate = partial(evaluate, model, accelerator, **shared)
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

    save_tokens = partial(save_tokenizer, tokenizer=tokenizer, samples=rows.train)
    sample = partial(continue_text, bare, tokenizer, rows.prompt)
    return training.finish(run.saved, save_tokens, sample=sample, model=args.name)


def task(argv: list[str] | None = None) -> Task:
    """Describe the task of the flags for ``memsave plan``, which has neither text nor weights."""
    (args,) = parse_arguments(Arguments, args=argv)
    return describe(args, args.vocab_size, 0, 0)


def describe(args: Arguments, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None) -> Task:
    """Describe the model, its loss and the tensors of a micro-batch: the same for training and for planning."""
    tokens = {"vocab_size": vocab_size, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}

    def micro_batch(size: int) -> Batch:
        shape = (1, size * args.block_size) if args.one_row and args.packing else (size, args.block_size)
        names = ("input_ids", "labels", "position_ids" if args.packing else "attention_mask")
        # One document a row, the longest: masks of windows and dropout's probabilities grow with the length's square.
        lengths = {"document_lengths": ((args.block_size,),) * size} if args.packing and not args.one_row else {}
        return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names} | lengths

    return Task(
        run=args,
        optim=args,
        build_model=partial(build_language_model, args, with_weights=False, **tokens),
        adapt=partial(train_part, flags=args, task_type="CAUSAL_LM"),
        trained=partial(with_loss, flag=args.loss),
        loss_of=summed_loss,
        micro_batch=micro_batch,
        takes_adapters=not args.freezes,
        **args.losses(vocab_size),
    )


def settle(model: nn.Module, *, args: Arguments, accelerator: Accelerator, rows: Any) -> Iterable[str | None]:
    """Check that the model can take the rows; set its attention and the token at which its replies end."""
    check_causal(model, args.name)
    check_model(model, rows, args.name, one_row=args.one_row)
    timeout = accelerator.init_handler.timeout
    return settle_language_model(model, args, timeout=timeout, end_of_turn=rows.end_of_turn)


def summed_loss(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Return the loss of a micro-batch, summed over the tokens that count."""
    return model(**micro_batch)


@torch.no_grad()
def evaluate(
    model: nn.Module, accelerator: Accelerator, batches: Iterable[Batch], *, tokens: Any, exact: bool, shared_by: int
) -> dict[str, float]:
    """Return the mean loss in nats per token, perplexity, and bits per byte, which do not depend on the tokenizer.

    Args:
        tokens: the tokens of ``batches``, for their ``num_tokens`` and ``num_bytes``.
        exact: add the losses up without rounding, so that the number of ranks does not matter.
        shared_by: the ranks that share a row.
    """
    model.eval()
    sums = [(model(**batch), count_valid(batch)) for batch in batches]
    model.train()
    losses, counts = (torch.stack(column).cpu().double() for column in zip(*sums, strict=True))
    parts = [*torch.stack([losses, counts], dim=1)]
    loss_sum, num_tokens = sum_over_ranks(accelerator, parts, exact=exact).tolist()
    loss = loss_sum * shared_by / num_tokens  # each rank that shares a row has counted all its tokens
    bits_per_byte = loss / math.log(2) * tokens.num_tokens / tokens.num_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


if __name__ == "__main__":
    run_recipe(main, task)
