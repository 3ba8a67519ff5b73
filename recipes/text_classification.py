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

Expect an accuracy of 0.74 to 0.80 of the first line (the largest class has 0.17), and of every line the same curve for
every plan, and with --dropout 0 for every geometry and number of ranks: a text is padded to the longest of its
micro-batch and no further, and padding counts nowhere. `--help` lists the flags.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import evaluate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from memsave_recipes.activations import apply_plan
from memsave_recipes.checkpoints import TrainState
from memsave_recipes.compare.compare import compare
from memsave_recipes.compare.runs import read_run
from memsave_recipes.data.labelled_text import load_labelled_text
from memsave_recipes.data.tokenizers import check_inputs, check_length, check_vocabulary, load_text_tokenizer, tokenize
from memsave_recipes.distributed import main_process_first
from memsave_recipes.errors import InputError
from memsave_recipes.metrics import METRICS
from memsave_recipes.models.adapters import LoraArguments, add_lora, merged
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer
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
from memsave_recipes.training.arguments import CheckpointArguments, OptimizerArguments, RunArguments, require
from memsave_recipes.training.batch_layout import SampleOrder
from memsave_recipes.training.batching import Batch, GlobalBatch, GlobalBatches, evaluation_batches, gather_counted
from memsave_recipes.training.non_finite import NonFiniteGuard
from memsave_recipes.training.optimizers import check_in_backward, clip_gradients, make_optimizer, make_scheduler
from memsave_recipes.training.parsing import flag_values, parse_arguments

DEFAULT_CLASSES = 2  # where a plan is made before the texts are there


@dataclass(kw_only=True)
class DataArguments:
    """Which labelled texts, and how much of each."""

    dataset: str | None = field(default=None, metadata={"help": "docstrings (the default, built in) or a Hub id"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "part of a Hub data set, such as sst2"})
    train_file: str | None = field(default=None, metadata={"help": "texts and labels in a .csv, .jsonl or .parquet"})
    validation_file: str | None = field(default=None, metadata={"help": "goes with --train_file"})
    text_column: str | None = field(default=None, metadata={"help": "default: the first of the usual names"})
    text_pair_column: str | None = field(default=None, metadata={"help": "the second text, where pairs are classified"})
    label_column: str | None = field(default=None, metadata={"help": "default: the first of the usual names"})
    tokenizer_name: str | None = field(default=None, metadata={"help": "folder or Hub id; default: the model's own"})
    vocab_size: int = field(default=8192, metadata={"help": "of the tokenizer that is trained where none is given"})
    max_length: int = field(default=128, metadata={"help": "tokens after which a text or pair is cut off"})

    def __post_init__(self) -> None:
        require(self.vocab_size >= 258, "--vocab_size", self.vocab_size, "at least 258 (256 bytes, padding, boundary)")
        require(self.max_length >= 8, "--max_length", self.max_length, "at least 8")
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else "docstrings")


@dataclass(kw_only=True)
class FineTuningArguments(OptimizerArguments):
    """A learning rate that pretrained weights survive."""

    learning_rate: float = field(default=5e-5, metadata={"help": "take about 1e-3 from scratch, 3e-4 with --lora"})


FLAGS = (DataArguments, TransformerArguments, LoraArguments, RunArguments, FineTuningArguments, CheckpointArguments)


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Train as the flags say; returns what ``results.json`` holds."""
    flags = parse_arguments(*FLAGS, args=args)
    data, network, lora, run, optim, checkpointing = flags
    with open_run(run, checkpointing, flag_values(flags)) as opened:
        return train(opened, data, network, lora, opened.planned(run), optim, checkpointing, partial(task, args))


def train(
    opened: OpenRun,
    data: DataArguments,
    network: TransformerArguments,
    lora: LoraArguments,
    run: RunArguments,
    optim: FineTuningArguments,
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
        texts = load_labelled_text(
            dataset=data.dataset,
            dataset_config_name=data.dataset_config_name,
            train_file=data.train_file,
            validation_file=data.validation_file,
            text_column=data.text_column,
            text_pair_column=data.text_pair_column,
            label_column=data.label_column,
        )
        tokenizer = load_text_tokenizer(
            data.tokenizer_name or network.model_name_or_path,
            texts,
            vocab_size=data.vocab_size,
            trust_remote_code=network.trust_remote_code,
        )
        tokens = tokenize(texts, tokenizer, max_length=data.max_length)
    order = SampleOrder(
        num_samples=len(tokens.train), global_batch_size=run.global_batch_size, seed=run.seed, drop_last=run.drop_last
    )
    num_steps = run.max_steps or ceil(run.num_epochs * order.steps_per_epoch)
    loading = {"collate_fn": tokens.train.collate, "num_workers": num_workers(run.dataloader_num_workers, accelerator)}
    batches = GlobalBatches(
        accelerator, tokens.train, order=order, layout=layout, num_steps=num_steps, seed=run.seed, **loading
    )

    # Model
    model = build_model(
        network,
        texts.label_names,
        dtype=run.torch_dtype,
        in_4bit=lora.load_in_4bit,
        vocab_size=len(tokenizer),
        **{f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos", "cls", "sep")},
    )
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_inputs(model, tokens.train)
    check_length(data.max_length, model, tokenizer)
    saved_model = add_lora(model, lora, task_type="SEQ_CLS")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    # Optimizer. The scheduler is not prepared: Accelerate's would move it once for every rank.
    optimizer = make_optimizer(optim, model)
    scheduler = make_scheduler(optim, optimizer, num_steps)
    trained, optimizer = accelerator.prepare(model, optimizer)
    loss_of = partial(summed_loss, trained)

    # Memory plan, and the micro-batch where that is left to the planner
    planned = plan_run(run, optim, accelerator, model, batches, trained, loss_of, task=on_paper, show=show_choice)
    layout = batches.layout
    plan_handle = apply_plan(model, planned.plan)
    equivalence = verify_plan(run.verify, accelerator, trained, plan_handle, batches, loss_of)
    settle_kernels(run.full_determinism, accelerator, trained, batches, loss_of)

    # Checkpoints: where the run goes on, and when it saves
    checkpoints = opened.checkpoints(
        TrainState(accelerator, trained, optimizer, scheduler), batches, tokens.fingerprint
    )
    resumed = checkpoints.resume_into(batches) if checkpointing.resume else None

    # From here on files are written
    settings = begin_run(
        accelerator,
        folder,
        project="memsave-text-classification",
        work=f"{network.name}-gbs{run.global_batch_size}-{data.max_length}tok",
        flags=opened.flags,
        planned=planned,
        layout=layout,
        resumed=resumed,
    )
    accelerator.print(layout.describe(), planned.plan.describe(), texts.notice, sep="\n")
    for notice in (tokens.notice, order.notice, f"{num_trained:,} of {num_parameters:,} parameters train"):
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
            held_out = evaluation_batches(accelerator, tokens.validation, layout.micro_batch_size, **loading)
            held_out = checkpoints.until_signal(held_out, step, report.state_dict)
            evaluated = evaluate_model(trained, accelerator, held_out)
            if report.log_evaluation(step, evaluated) and checkpointing.save_best:
                checkpoints.save_best(step, partial(save_model, accelerator, saved_model))

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
    trained_model = merged(saved_model) if lora.lora_merge else saved_model
    save_final(accelerator, folder, partial(save_model, accelerator, trained_model), tokenizer.save_pretrained)
    results = {
        "recipe": "text_classification",
        "model": network.name,
        "num_parameters": num_parameters,
        "num_trained_parameters": num_trained,
        "plan": planned.plan.strategy,
        "eval": {**report.evaluated, "majority_share": texts.majority_share},
        **equivalence,
        **report.results(),
    }
    write_results(accelerator, folder, results, checkpoints)
    if accelerator.is_main_process:
        show(compare([read_run(folder)]))
    finish_trackers(accelerator, results)
    return results


def task(args: list[str] | None = None) -> Task:
    """What ``memsave plan`` needs to know of a run, before there are texts or weights."""
    data, network, lora, run, optim, _ = parse_arguments(*FLAGS, args=args)
    names = tuple(map(str, range(DEFAULT_CLASSES)))

    def build() -> PreTrainedModel:
        if lora.load_in_4bit:
            raise InputError("--load_in_4bit packs weights on a CUDA device, which no plan on paper can: leave it out")
        without_weights = {"with_weights": False, "vocab_size": data.vocab_size, "pad_token_id": 0}
        model = build_model(network, names, dtype=run.torch_dtype, **without_weights)
        add_lora(model, lora, task_type="SEQ_CLS")
        return model

    def micro_batch(size: int) -> Batch:
        shapes = {"input_ids": (size, data.max_length), "attention_mask": (size, data.max_length), "labels": (size,)}
        return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}

    return Task(
        run=run,
        optim=optim,
        build_model=build,
        loss_of=summed_loss,
        micro_batch=micro_batch,
        takes_adapters=not lora.lora,
        assumed=(f"{DEFAULT_CLASSES} classes", f"texts of {data.max_length} tokens"),
    )


def build_model(
    network: TransformerArguments, label_names: tuple[str, ...], *, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The model that the flags name, with one output a label; ``options`` are those of ``build_transformer``."""
    model = build_transformer(
        AutoModelForSequenceClassification,
        network,
        dtype=dtype,
        id2label=dict(enumerate(label_names)),
        label2id={name: index for index, name in enumerate(label_names)},
        use_cache=False,  # decoders would fill it again when they recompute
        **options,
    )
    if model.config.pad_token_id is None:  # decoders look for a text's last token by it
        model.config.pad_token_id = options["pad_token_id"]
    if model.config.is_encoder_decoder and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = model.config.pad_token_id  # as in T5's own configurations
    return model


def summed_loss(trained: nn.Module, micro_batch: Batch) -> Tensor:
    """The cross-entropy of a micro-batch, summed over its texts."""
    logits, labels = logits_and_labels(trained, micro_batch)
    return F.cross_entropy(logits, labels, reduction="sum")


def logits_and_labels(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, num_classes) in at least float32, and (B,)."""
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return logits if logits.dtype == torch.float64 else logits.float(), batch["labels"]


@torch.no_grad()
def evaluate_model(model: nn.Module, accelerator: Accelerator, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy, F1 and mean loss over ``batches``. F1 is that of the second of two classes, else their mean."""
    predictions: list[int] = []
    references: list[int] = []
    loss_sum = torch.tensor(0.0, device=accelerator.device)
    model.eval()
    for batch in batches:
        logits, labels = logits_and_labels(model, batch)
        loss_sum = loss_sum + F.cross_entropy(logits, labels, reduction="sum")
        predicted, expected = gather_counted(accelerator, logits.argmax(dim=-1), labels)
        predictions += predicted.tolist()
        references += expected.tolist()
    model.train()
    average = "binary" if logits.shape[-1] == 2 else "macro"
    figures = evaluate.load(str(METRICS)).compute(predictions=predictions, references=references, average=average)
    return {**figures, "loss": accelerator.reduce(loss_sum, "sum").item() / len(references)}


if __name__ == "__main__":
    run_recipe(main, task)
