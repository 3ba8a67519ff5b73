"""Train a causal language model, from scratch or from pretrained weights, in the memory that is there.

On the CPU of any machine, without a network (the text of Python's own library; two minutes on 2 cores):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/language_modeling.py \
        --model_type gpt2 --config_overrides "n_layer=4,n_head=4,n_embd=128" --block_size 256 \
        --global_batch_size 16 --micro_batch_size 4 --max_steps 200 --output_dir out/lm

On one GPU or several, fine-tuning a model of the Hub (or of a folder) on your text, all of it or by adapters:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml --mixed_precision bf16 \
        recipes/language_modeling.py --model_name_or_path MODEL --train_file DATA.jsonl --block_size 2048 \
        --activation_checkpointing full --lora --output_dir out/lora
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4 recipes/... (the same flags)

Expect: the same curve for every plan, geometry and number of ranks (no dropout unless --dropout asks for it); the
logits, often the largest tensor of all, are never made (--loss). `--help` lists the flags.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from memsave_recipes.activations import apply_plan
from memsave_recipes.checkpoints import TrainState
from memsave_recipes.compare.compare import compare
from memsave_recipes.compare.runs import read_run
from memsave_recipes.data.packing import check_positions, count_valid, fingerprint_of, keeps_documents_apart, pack, pad
from memsave_recipes.data.text import TextSplits, load_documents
from memsave_recipes.data.tokenizers import check_vocabulary, load_tokenizer
from memsave_recipes.distributed import main_process_first
from memsave_recipes.errors import InputError
from memsave_recipes.losses import default_chunk_bytes
from memsave_recipes.models.adapters import LoraArguments, add_lora, merged
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind, check_causal
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
from memsave_recipes.text import printable_lines
from memsave_recipes.training.arguments import CheckpointArguments, OptimizerArguments, RunArguments, require
from memsave_recipes.training.batch_layout import SampleOrder
from memsave_recipes.training.batching import Batch, GlobalBatch, GlobalBatches, evaluation_batches
from memsave_recipes.training.environment import deterministic_kernels
from memsave_recipes.training.non_finite import NonFiniteGuard
from memsave_recipes.training.optimizers import check_in_backward, clip_gradients, make_optimizer, make_scheduler
from memsave_recipes.training.parsing import flag_values, parse_arguments

BYTES_A_TOKEN = 5  # of text in a stream; English in a vocabulary of 50k has 4 to 5


@dataclass(kw_only=True)
class DataArguments:
    """Which text, in which tokens, in rows of which length."""

    dataset: str | None = field(default=None, metadata={"help": "python-stdlib (the default, built in) or a Hub id"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "which part of a Hub data set"})
    train_file: str | None = field(default=None, metadata={"help": "text in a .txt, .jsonl or .parquet"})
    validation_file: str | None = field(default=None, metadata={"help": "default: a twentieth of the training text"})
    text_column: str = field(default="text", metadata={"help": "where the text is in a .jsonl, .parquet or Hub set"})
    streaming: bool = field(default=False, metadata={"help": "read only as much of a Hub set as --max_steps needs"})
    tokenizer_name: str | None = field(default=None, metadata={"help": "folder or Hub id; default: the model's own"})
    vocab_size: int = field(default=8192, metadata={"help": "of the tokenizer that is trained where none is given"})
    block_size: int = field(default=1024, metadata={"help": "tokens of a row"})
    packing: bool = field(default=True, metadata={"help": "fill rows with several documents, kept apart; else pad"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "evaluate on so many rows; default: all"})

    def __post_init__(self) -> None:
        require(self.block_size >= 2, "--block_size", self.block_size, "at least 2")
        limit = self.max_eval_samples
        require(limit is None or limit >= 1, "--max_eval_samples", limit, "at least 1")
        require(self.vocab_size >= 260, "--vocab_size", self.vocab_size, "at least 260 (all bytes)")
        self.dataset = self.dataset or (None if self.train_file else "python-stdlib")


@dataclass(kw_only=True)
class ModelArguments(TransformerArguments):
    """Which causal language model, and how it makes its loss."""

    loss: LossKind = field(default="auto", metadata={"help": "chunked never makes the logits; auto: where it pays"})
    dropout: float = field(default=0.0, metadata={"help": "of every dropout layer; 0 gives every geometry one curve"})
    prompt: str | None = field(default=None, metadata={"help": "continued at the end; default: held-out text"})

    @property
    def one_row(self) -> bool:
        """Flash attention keeps documents apart only if a micro-batch is one long row."""
        return "flash" in (self.attn_implementation or "")


FLAGS = (DataArguments, ModelArguments, LoraArguments, RunArguments, OptimizerArguments, CheckpointArguments)


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Train as the flags say; returns what ``results.json`` holds."""
    flags = parse_arguments(*FLAGS, args=args)
    data, network, lora, run, optim, checkpointing = flags
    with open_run(run, checkpointing, flag_values(flags)) as opened:
        return train(opened, data, network, lora, opened.planned(run), optim, checkpointing, partial(task, args))


def train(
    opened: OpenRun,
    data: DataArguments,
    network: ModelArguments,
    lora: LoraArguments,
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
        text = load_text(data, run)
        tokenizer = load_tokenizer(
            data.tokenizer_name or network.model_name_or_path,
            text.train["text"],
            vocab_size=data.vocab_size,
            trust_remote_code=network.trust_remote_code,
        )
        in_rows = partial(pack, one_row=network.one_row) if data.packing else pad
        train, validation = (in_rows(part, tokenizer, data.block_size) for part in (text.train, text.validation))
        fingerprint = fingerprint_of(train, validation, tokenizer)
    order = SampleOrder(
        num_samples=len(train), global_batch_size=run.global_batch_size, seed=run.seed, drop_last=run.drop_last
    )
    num_steps = run.max_steps or ceil(run.num_epochs * order.steps_per_epoch)
    loading = {"num_workers": num_workers(run.dataloader_num_workers, accelerator)}
    num_samples = min(len(validation), data.max_eval_samples or len(validation))
    batches = GlobalBatches(
        accelerator,
        train,
        order=order,
        layout=layout,
        num_steps=num_steps,
        seed=run.seed,
        count_valid=count_valid,
        collate_fn=train.collate,
        **loading,
    )

    # Model
    model = build_transformer(
        AutoModelForCausalLM,
        network,
        dtype=run.torch_dtype,
        in_4bit=lora.load_in_4bit,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).to(accelerator.device)
    with accelerator.autocast():  # flash attention refuses float32
        check_model(model, tokenizer, data, network)
    saved_model = add_lora(model, lora, task_type="CAUSAL_LM")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    # Optimizer. The scheduler is not prepared: Accelerate's would move it once for every rank.
    optimizer = make_optimizer(optim, model)
    scheduler = make_scheduler(optim, optimizer, num_steps)
    with accelerator.autocast():
        loss_model = CausalLMLoss(model, network.loss)
    loss_model, optimizer = accelerator.prepare(loss_model, optimizer)
    loss_of = partial(summed_loss, loss_model)

    # Memory plan, and the micro-batch where that is left to the planner
    planned = plan_run(run, optim, accelerator, model, batches, loss_model, loss_of, task=on_paper, show=show_choice)
    layout = batches.layout
    plan_handle = apply_plan(model, planned.plan)
    equivalence = verify_plan(run.verify, accelerator, loss_model, plan_handle, batches, loss_of)
    settle_kernels(run.full_determinism, accelerator, loss_model, batches, loss_of)

    # Checkpoints: where the run goes on, and when it saves
    checkpoints = opened.checkpoints(TrainState(accelerator, loss_model, optimizer, scheduler), batches, fingerprint)
    resumed = checkpoints.resume_into(batches) if checkpointing.resume else None

    # From here on files are written
    settings = begin_run(
        accelerator,
        folder,
        project="memsave-language-modeling",
        work=f"{network.name}-gbs{run.global_batch_size}-{data.block_size}tok",
        flags=opened.flags,
        planned=planned,
        layout=layout,
        resumed=resumed,
    )
    accelerator.print(layout.describe(), planned.plan.describe(), sep="\n")
    for notice in (text.notice, order.notice, f"{num_trained:,} of {num_parameters:,} parameters train"):
        if notice:
            accelerator.print(notice)

    # The loop
    gate = NonFiniteGuard(accelerator, loss_model, optimizer, skips=checkpointing.skip_nonfinite)

    def train_step(batch: GlobalBatch) -> Tensor | None:
        for micro_batch in batch.forwards(loss_model):
            batch.backward(loss_of(micro_batch))
        grad_norm = clip_gradients(optim, accelerator, loss_model)
        if gate.should_step(batch, grad_norm):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return grad_norm

    held_out_rows = {"num_samples": num_samples, "collate_fn": validation.collate, **loading}

    def evaluate_if_due(step: int) -> None:
        if not report.evaluation_is_due(step, every=run.eval_steps):
            return
        with report.clock.paused(synchronize=True):
            held_out = evaluation_batches(accelerator, validation, layout.micro_batch_size, **held_out_rows)
            held_out = checkpoints.until_signal(held_out, step, report.state_dict)
            evaluated = evaluate_model(loss_model, accelerator, held_out, validation)
            if report.log_evaluation(step, evaluated) and checkpointing.save_best:
                checkpoints.save_best(step, partial(save_model, accelerator, saved_model))

    report = RunReport(accelerator, batches, loss_model, optimizer, settings)
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
        "recipe": "language_modeling",
        "model": network.name,
        "num_parameters": num_parameters,
        "num_trained_parameters": num_trained,
        "plan": planned.plan.strategy,
        "eval": report.evaluated,
        **equivalence,
        **report.results(),
    }
    write_results(accelerator, folder, results, checkpoints)
    if accelerator.is_main_process:
        # For a sample it is enough to be warned of an operator without a deterministic kernel.
        with accelerator.autocast(), deterministic_kernels(run.full_determinism):
            continued = sample(model, tokenizer, network.prompt or text.validation[0]["text"][:100])
        print("sample:", printable_lines(continued))
        show(compare([read_run(folder)]))
    finish_trackers(accelerator, results)
    return results


def task(args: list[str] | None = None) -> Task:
    """What ``memsave plan`` needs to know of a run, before there are text or weights."""
    data, network, lora, run, optim, _ = parse_arguments(*FLAGS, args=args)

    def build() -> PreTrainedModel:
        if lora.load_in_4bit:
            raise InputError("--load_in_4bit packs weights on a CUDA device, which no plan on paper can: leave it out")
        model = build_transformer(
            AutoModelForCausalLM,
            network,
            dtype=run.torch_dtype,
            with_weights=False,
            vocab_size=data.vocab_size,
            bos_token_id=0,
            eos_token_id=0,
        )
        add_lora(model, lora, task_type="CAUSAL_LM")
        return model

    def micro_batch(size: int) -> Batch:
        shape = (1, size * data.block_size) if network.one_row and data.packing else (size, data.block_size)
        names = ("input_ids", "labels", "position_ids" if data.packing else "attention_mask")
        return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names}

    return Task(
        run=run,
        optim=optim,
        build_model=build,
        trained=lambda model, loss, device: CausalLMLoss(model, loss or network.loss, default_chunk_bytes(device)),
        loss_of=summed_loss,
        micro_batch=micro_batch,
        takes_adapters=not lora.lora,
        losses=("full", "chunked") if network.loss == "auto" else (network.loss,),
    )


def summed_loss(loss_model: nn.Module, micro_batch: Batch) -> Tensor:
    """The loss of a micro-batch, summed over the tokens that count."""
    return loss_model(**micro_batch)


def load_text(data: DataArguments, run: RunArguments) -> TextSplits:
    """The documents that the flags name; of a stream, as many as fill the rows of ``--max_steps``."""
    if data.streaming:
        require(run.max_steps is not None, "--max_steps", run.max_steps, "given with --streaming, which reads for it")
    num_tokens = (run.max_steps or 0) * run.global_batch_size * data.block_size
    return load_documents(
        dataset=data.dataset,
        train_file=data.train_file,
        validation_file=data.validation_file,
        text_column=data.text_column,
        dataset_config_name=data.dataset_config_name,
        stream_bytes=BYTES_A_TOKEN * num_tokens if data.streaming else None,
    )


def check_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataArguments, network: ModelArguments
) -> None:
    """Refuse rows and tokens that the model cannot take."""
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_positions(data.block_size, getattr(model.config, "max_position_embeddings", None))
    check_causal(model, network.name)
    if data.packing and not keeps_documents_apart(model, one_row=network.one_row):
        raise InputError(f"{network.name} lets the documents of a packed row see one another: pass --no_packing")


@torch.no_grad()
def evaluate_model(
    loss_model: nn.Module, accelerator: Accelerator, batches: Iterable[Batch], rows: Any
) -> dict[str, float]:
    """Over ``batches`` of ``rows``: mean loss in nats a token, perplexity, and bits a byte, whatever the tokenizer."""
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss, tokens
    loss_model.eval()
    for batch in batches:
        totals += torch.stack([loss_model(**batch).double(), count_valid(batch).double()])
    loss_model.train()
    loss_sum, num_tokens = accelerator.reduce(totals, "sum").tolist()
    loss = loss_sum / num_tokens
    bits_per_byte = loss / math.log(2) * rows.num_tokens / rows.num_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int = 60) -> str:
    """``prompt`` as the model goes on with it, drawn at temperature 0.8, always in the same way; or why it does not.

    The run is finished, and fails no more.
    """
    num_positions = getattr(model.config, "max_position_embeddings", None) or 0
    num_tokens = min(num_tokens, num_positions // 2) if num_positions > 0 else num_tokens
    tokens = tokenizer(prompt, return_tensors="pt").input_ids[:, -num_tokens:].to(model.device)
    torch.manual_seed(0)
    model.eval()
    try:
        continued = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=tokenizer.eos_token_id,
        )
    except Exception as error:  # transformers' own loop does not run every model that trains
        return f"none, because generate() fails on {type(model).__name__}: {' '.join(str(error).split())}"
    return tokenizer.decode(continued[0])


if __name__ == "__main__":
    run_recipe(main, task)
