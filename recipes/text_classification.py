"""Train a classifier of texts or of pairs of texts, from scratch or from pretrained weights, in the memory there is.

On the CPU of any machine, without a network (docstrings: which library is each one from?; three minutes on 2 cores):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/text_classification.py --model_type bert \
        --config_overrides "hidden_size=128,num_hidden_layers=2,num_attention_heads=4,intermediate_size=256" \
        --global_batch_size 32 --learning_rate 1e-3 --warmup_steps 50 --output_dir out/text

On one GPU or several, fine-tuning a model of the Hub (or of a folder) on GLUE or on your own labelled texts:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml --mixed_precision bf16 \
        recipes/text_classification.py --config recipes/configs/bert_glue.yaml --dataset_config_name sst2 \
        --output_dir out/sst2
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/text_classification.py \
        --model_name_or_path MODEL --train_file TRAIN.csv --validation_file HELD_OUT.csv --lora --learning_rate 3e-4 \
        --output_dir out/lora

Expect an accuracy of 0.74 to 0.80 of the first line (the largest class has 0.17), and one loss curve for every plan.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsave_recipes.data.text.labelled_rows import LabelledRowArguments, check_model, load_labelled_rows
from memsave_recipes.models.labels import LabelLoss
from memsave_recipes.models.pretrained import (
    TransformerArguments,
    build_text_classifier,
    padding_known,
)
from memsave_recipes.models.saved import save_text_processor
from memsave_recipes.models.what_trains import ClassifierTrainingArguments, train_part
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

DEFAULT_CLASSES = 2  # where a plan is made before the texts are there


@dataclass(kw_only=True)
class Arguments(
    RecipeArguments, LabelArguments, ClassifierTrainingArguments, TransformerArguments, LabelledRowArguments
):
    """The flags of text classification; no model of texts has BatchNorm."""

    batchnorm: Literal["local", "global"] = field(default="local", init=False)
    learning_rate: float = field(default=5e-5, metadata={"help": "take about 1e-3 from scratch, 3e-4 with --lora"})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a text classifier as the flags say; returns the content of ``results.json``."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe="text_classification") as run:
        return train(run)


def train(run: Run) -> dict[str, Any]:
    """Train the classifier in the run's folder."""
    accelerator = Accelerator(**run.launch)
    args: Arguments = run.join(accelerator)

    # Data: each batch is one optimizer step, the same texts in the same order on any number of ranks
    with run.main_process_first():
        texts, tokens = load_labelled_rows(args)
    of_train = tokens.train.rows["label"][:]
    loss = args.label_loss(texts.problem_type, texts.label_names, of_train)
    batches = run.global_batches(tokens.train, collate_fn=tokens.train.collate, weights=loss.weights_of(of_train))

    # Model, optimizer and schedule
    tokenizer = tokens.train.tokenizer
    names = [f"{kind}_token_id" for kind in ("pad", "bos", "eos", "cls", "sep")]
    special = {name: getattr(tokenizer, name) for name in names}
    task = describe(args, texts.label_names, loss, vocab_size=len(tokenizer), **special)
    bare, model = run.build(task, batches, settle=partial(check_model, max_length=args.max_length, tokens=tokens))
    optimizer = make_optimizer(args, bare, batches.layout, seed=args.seed)
    scheduler = make_scheduler(args, optimizer, batches.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the scheduler: it would step once per process

    # The activation plan that the flags name, or the fastest that fits the memory
    plan = run.choose_plan(model, optimizer)
    handle = apply_plan(bare, plan)
    work, notices = f"{args.name}-gbs{args.global_batch_size}-{args.max_length}tok", (texts.notice, tokens.notice)
    training = run.begin(model, optimizer, scheduler, handle, data=tokens.fingerprint, work=work, notices=notices)

    labels = {"problem_type": texts.problem_type, "label_names": texts.label_names}
    options = {"logits_of": logits_of_texts, "with_f1": True, "exact": batches.layout.is_bitwise, **labels}
    validate = partial(evaluate_classifier, model, accelerator, **options)
    training.evaluate_if_due(validate, tokens.validation, collate_fn=tokens.train.collate)
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
        training.evaluate_if_due(validate, tokens.validation, collate_fn=tokens.train.collate)
        training.save_if_due()

    of_tokens = {"tokenizer": tokenizer, "samples": tokens.train, "max_length": args.max_length}
    save_tokens = partial(save_text_processor, **of_tokens, **labels)
    return training.finish(run.saved, save_tokens, evaluated=texts.baseline, model=args.name)


def task(argv: list[str] | None = None) -> Task:
    """The task of the flags, for ``memsave plan``: before there are texts or weights."""
    (args,) = parse_arguments(Arguments, args=argv)
    assumed = (f"{DEFAULT_CLASSES} classes", f"texts of {args.max_length} tokens")
    names = tuple(map(str, range(DEFAULT_CLASSES)))
    loss = args.label_loss(None, names)
    return describe(args, names, loss, assumed=assumed, vocab_size=args.vocab_size, pad_token_id=0)


def describe(
    args: Arguments,
    label_names: tuple[str, ...],
    loss: LabelLoss,
    *,
    assumed: tuple[str, ...] = (),
    **tokens: int | None,
) -> Task:
    """The model (of ``tokens``: ``vocab_size`` and special tokens), its loss and a micro-batch."""

    def micro_batch(size: int) -> Batch:
        texts = torch.empty(size, args.max_length, dtype=torch.int64, device="meta")
        return {"input_ids": texts, "attention_mask": texts.clone(), "labels": loss.labels_for(size, len(label_names))}

    options = {"in_4bit": args.load_in_4bit, "with_weights": False, "problem_type": loss.problem_type, **tokens}
    return Task(
        run=args,
        optim=args,
        build_model=partial(build_text_classifier, args, label_names, args.torch_dtype, **options),
        adapt=partial(train_part, flags=args, task_type="SEQ_CLS"),
        loss_of=partial(summed_loss, logits_of=logits_of_texts, loss=loss),
        micro_batch=micro_batch,
        takes_adapters=not args.freezes,
        assumed=assumed,
    )


def logits_of_texts(model: nn.Module, batch: Batch) -> Tensor:
    """The (B, num_classes) logits in at least float32."""
    with padding_known(batch.get("is_padded")):
        logits = model(**{name: value for name, value in batch.items() if name not in ("labels", "is_padded")}).logits
    return logits if logits.dtype == torch.float64 else logits.float()


if __name__ == "__main__":
    run_recipe(main, task)
