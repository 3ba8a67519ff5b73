"""Train a causal language model, from scratch or from pretrained weights, in the memory that is there.

On the CPU of any machine, without a network (the text of Python's own library; two minutes on 2 cores):

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/language_modeling.py \
        --model_type gpt2 --config_overrides "n_layer=4,n_head=4,n_embd=128" --block_size 256 \
        --global_batch_size 16 --micro_batch_size 4 --max_steps 200 --output_dir out/lm

On one GPU or several, fine-tuning a model of the Hub (or of a folder) on your text or conversations, all of it or by
adapters. Conversations are written by the tokenizer's chat template, and the assistant's tokens count:

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
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.activations.streaming import place
from memsave_recipes.core.losses import WORDS, default_chunk_bytes
from memsave_recipes.data.text.documents import BYTES_A_TOKEN
from memsave_recipes.data.text.packing import check_positions, count_valid, keeps_documents_apart
from memsave_recipes.data.text.rows import RowArguments, TokenRows, load_rows
from memsave_recipes.data.text.tokenizers import check_vocabulary
from memsave_recipes.models.adapters import merged
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind, check_causal, continue_text, read_loss
from memsave_recipes.models.packed_attention import PackedAttention, set_packed_attention
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer, configuration_of
from memsave_recipes.models.saved import save_tokenizer
from memsave_recipes.models.sequence_parallel import SequenceArguments, SequenceGroup
from memsave_recipes.models.what_trains import TrainedPartArguments, train_part
from memsave_recipes.run.recipe import (
    Batch,
    BatchLayout,
    InputError,
    RecipeArguments,
    Run,
    Task,
    parse_arguments,
    require,
    run_recipe,
)
from memsave_recipes.training.evaluation import sum_over_ranks
from memsave_recipes.training.launch.start import deterministic_kernels

CHUNKS = ("chunked:8192", "chunked:1024")  # of tokens; beside full, which pads no odd vocabulary


@dataclass(kw_only=True)
class ModelArguments(TransformerArguments):
    """The causal language model and its loss."""

    loss: LossKind = field(
        default="auto",
        metadata={
            "help": "full; chunked, which never holds all logits, chunked:TOKENS, liger; auto: chunks if they pay"
        },
    )
    dropout: float = field(default=0.0, metadata={"help": "dropout probability; 0: the same loss in every layout"})
    prompt: str | None = field(default=None, metadata={"help": "text to continue at the end; default: a held-out one"})
    packed_attention: PackedAttention = field(
        default="auto", metadata={"help": "packed rows: document (each by itself) or mask; auto: document if equal"}
    )

    def check_transformer(self) -> None:
        """Check the loss, too."""
        super().check_transformer()
        read_loss(self.loss)

    @property
    def one_row(self) -> bool:
        """Flash attention keeps documents apart only if a micro-batch is one long row."""
        return "flash" in (self.attn_implementation or "")


@dataclass(kw_only=True)
class Arguments(RecipeArguments, TrainedPartArguments, SequenceArguments, ModelArguments, RowArguments):
    """The flags of language modeling; no language model has BatchNorm."""

    batchnorm: Literal["local", "global"] = field(default="local", init=False)
    sync_batchnorm: bool = field(default=False, init=False)

    @property
    def stream_bytes(self) -> int | None:
        """As much text as fills the rows of ``--max_steps``; ``None`` without ``--streaming``."""
        if not self.streaming:
            return None
        require(self.max_steps is not None, "--max_steps", self.max_steps, "given with --streaming, which reads for it")
        return BYTES_A_TOKEN * self.max_steps * self.global_batch_size * self.block_size


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a language model as the flags say; returns the content of ``results.json``."""
    (args,) = parse_arguments(Arguments, args=argv)
    with Run.open(args, recipe="language_modeling") as run:
        return train(run.args, run)


def train(args: Arguments, run: Run) -> dict[str, Any]:
    """Train the language model in the run's folder."""
    accelerator = run.accelerator
    check_positions(args.block_size, getattr(configuration_of(args), "max_position_embeddings", None))

    # Data: each batch is one optimizer step, the same rows in the same order on any number of ranks
    with run.main_process_first():
        rows = load_rows(
            args,
            tokenizer_name=args.tokenizer_name_or_path,
            model_type=args.model_type,
            trust_remote_code=args.trust_remote_code,
            stream_bytes=args.stream_bytes,
            one_row=args.one_row,
            seed=args.seed,
            eval_only=args.eval_only,
        )
    if args.show_labels and accelerator.is_main_process:
        rows.show_labels()
    batches = run.global_batches(rows.train, count_valid=count_valid, collate_fn=rows.train.collate)

    # Model with its loss, and optimizer
    tokenizer = rows.tokenizer
    task = describe(args, len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    bare = run.build(task)
    saved = task.adapt(bare)
    place(bare, accelerator.device, streamed=task.streamed)
    with accelerator.autocast():  # flash attention refuses float32
        check_model(bare, rows, args)
    group = SequenceGroup.of(args.sequence_parallel, accelerator.init_handler.timeout)
    packed_attention, line = attend(bare, args, group)
    run.chose(packed_attention=packed_attention)
    stop_at(bare, rows.end_of_turn)
    with accelerator.autocast():
        trained = CausalLMLoss(bare, args.loss, sequence_group=group)

    # With the activation plan that the flags name, or the fastest that fits the memory
    prepared = run.prepare(task, batches, bare, trained)
    model, optimizer, scheduler = prepared.model, prepared.optimizer, prepared.scheduler
    work = f"{args.name}-gbs{args.global_batch_size}-{args.block_size}tok"
    training = run.begin(
        prepared, data=rows.fingerprint, work=work, saved=saved, notices=(rows.notice, line, trained.notice)
    )

    evaluation = {"num_samples": args.max_eval_samples, "collate_fn": rows.validation.collate}
    validate = partial(evaluate_model, model, accelerator, tokens=rows.validation.tokens, layout=batches.layout)
    training.evaluate_if_due(validate, rows.validation, **evaluation)  # a signal may have ended that of a resumed run
    for batch in training.steps():
        with training.measured(batch):
            for micro_batch in batch.forwards(model):
                batch.backward(task.loss_of(model, micro_batch))
            grad_norm = training.clip_gradients()
            if training.should_step(batch, grad_norm):
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        training.log_step(batch, grad_norm)
        if trained.balancing_loss is not None and training.step % args.logging_steps == 0:
            training.log({"train/aux_loss": trained.balancing_loss.item()})
        training.evaluate_if_due(validate, rows.validation, **evaluation)
        training.save_if_due()

    figures = {"model": args.name, "num_trained_parameters": training.num_trained}
    save_tokens = partial(save_tokenizer, tokenizer=tokenizer, samples=rows.train)
    results = training.finish(merged(saved) if args.lora_merge else saved, save_tokens, **figures)
    with training.drawing_samples() as on_this_rank:
        if on_this_rank:
            with accelerator.autocast(), deterministic_kernels(args.full_determinism):  # here a warning is enough
                accelerator.print("sample:", continue_text(bare, tokenizer, rows.prompt(args.prompt)))
    return results


def task(argv: list[str] | None = None) -> Task:
    """The task of the flags, for ``memsave plan``: before there are text or weights."""
    (args,) = parse_arguments(Arguments, args=argv)
    if args.load_in_4bit:
        raise InputError("--load_in_4bit packs weights on a CUDA device, which cannot be estimated: leave it out")
    return describe(args, args.vocab_size, 0, 0)


def describe(args: Arguments, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None) -> Task:
    """The model, its loss and the tensors of a micro-batch: the same for training and for planning."""
    tokens = {"vocab_size": vocab_size, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    options = {"dtype": args.torch_dtype, "in_4bit": args.load_in_4bit, "with_weights": False, **tokens}
    group = SequenceGroup.estimated(args.sequence_parallel)
    words = vocab_size if args.model_type else configuration_of(args).get_text_config().vocab_size

    def micro_batch(size: int) -> Batch:
        shape = (1, size * args.block_size) if args.one_row and args.packing else (size, args.block_size)
        names = ("input_ids", "labels", "position_ids" if args.packing else "attention_mask")
        # One document a row: masks of windows and dropout's probabilities are the square of its length.
        lengths = {"document_lengths": ((args.block_size,),) * size} if args.packing and not args.one_row else {}
        return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names} | lengths

    return Task(
        run=args,
        optim=args,
        build_model=partial(build_model, args, **options),
        adapt=partial(train_part, flags=args, task_type="CAUSAL_LM"),
        trained=lambda model, loss, device: CausalLMLoss(model, loss or args.loss, default_chunk_bytes(device), group),
        loss_of=summed_loss,
        micro_batch=micro_batch,
        takes_adapters=not args.freezes,
        stream_weights=args.stream_weights == "host",
        losses=("full", "chunked") if args.loss == "auto" else (args.loss,),
        losses_on_accelerators=CHUNKS if words % WORDS else ("full", *CHUNKS),
    )


def build_model(args: Arguments, *, with_weights: bool, **options: Any) -> PreTrainedModel:
    """The model that the flags name; without weights it attends as it is to be planned."""
    model = build_transformer(AutoModelForCausalLM, args, with_weights=with_weights, **options)
    if not with_weights:
        attend(model, args, SequenceGroup.estimated(args.sequence_parallel))
    return model


def attend(
    model: PreTrainedModel, args: Arguments, group: SequenceGroup | None = None
) -> tuple[PackedAttention, str | None]:
    """Set the attention of packed rows, or of those that ranks share; how it is now, and a line on it."""
    if group is not None:
        group.adopt(model, compiles=compiles(model, args))
        return "document" if args.packing else args.packed_attention, group.line
    if not args.packing or args.one_row:
        if args.packed_attention == "document":
            raise InputError("--packed_attention document is for rows packed without flash attention: leave it out")
        return args.packed_attention, None
    return set_packed_attention(model, args.packed_attention, compiles=compiles(model, args))


def compiles(model: PreTrainedModel, args: Arguments) -> bool:
    """Whether the plan that is named compiles layers."""
    if args.solves:
        return False
    return plan_blocks(model, str(args.activation_checkpointing)).compiled_memory_ratio is not None


def summed_loss(model: nn.Module, micro_batch: Batch) -> Tensor:
    """The loss of a micro-batch, summed over the tokens that count."""
    return model(**micro_batch)


def check_model(model: PreTrainedModel, rows: TokenRows, args: Arguments) -> None:
    """Refuse rows and tokens that the model cannot take."""
    check_vocabulary(rows.tokenizer, model.config.get_text_config().vocab_size)
    check_causal(model, args.name)
    if args.packing and not keeps_documents_apart(model, one_row=args.one_row):
        raise InputError(f"{args.name} lets the documents of a packed row see one another: pass --no_packing")


def stop_at(model: PreTrainedModel, token: int | None) -> None:
    """Let ``generate``, also of the saved model, stop at ``token``, where the assistant's turns end."""
    if token is None or model.generation_config is None:
        return
    stops = model.generation_config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    model.generation_config.eos_token_id = list(dict.fromkeys([token, *stops]))


@torch.no_grad()
def evaluate_model(
    model: nn.Module, accelerator: Accelerator, batches: Iterable[Batch], tokens: Any, layout: BatchLayout
) -> dict[str, float]:
    """Over ``batches`` of ``tokens``: mean loss in nats a token, perplexity, bits a byte whatever the tokenizer.

    With a bitwise ``layout`` the losses are added up without rounding, so that the ranks do not matter.
    """
    model.eval()
    sums = [(model(**batch), count_valid(batch)) for batch in batches]
    model.train()
    losses, counts = (torch.stack(column).cpu().double() for column in zip(*sums, strict=True))
    parts = [*torch.stack([losses, counts], dim=1)]
    loss_sum, num_tokens = sum_over_ranks(accelerator, parts, exact=layout.is_bitwise).tolist()
    loss = loss_sum * layout.sequence_parallel / num_tokens  # each of them has counted the tokens of whole rows
    bits_per_byte = loss / math.log(2) * tokens.num_tokens / tokens.num_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


if __name__ == "__main__":
    run_recipe(main, task)
