"""The loops that are compared: torch by hand, ours, and those of Accelerate, Lightning Fabric, Trainer and TRL."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import torch
from torch import Tensor, nn

import memsave_recipes as memsave
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, SampleOrder
from memsave_recipes.core.step.memory import memory_of_optimizer
from memsave_recipes.data.text.packing import count_valid
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind
from memsave_recipes.run.report import RunReport
from memsave_recipes.run.trackers import RunLabels, resolve_trackers, start_trackers
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.launch.start import Accelerator
from side_by_side.work import LEARNING_RATE, PADDING, Documents, Watch, Work, on_device, padded, summed_loss

MAX_GRAD_NORM, LOGGING_STEPS = 1.0, 10
Loop = Callable[[Work, Watch], None]


def torch_loop(
    work: Work, watch: Watch, *, dtype: torch.dtype = torch.float32, micro_batch_size: int | None = None
) -> None:
    """What one would write by hand: the sum of all tokens' losses, divided by how many there are in the step."""
    size = micro_batch_size or work.micro_batch_size
    model = work.make_model().to(dtype)
    optimizer = work.make_optimizer(model)
    micro_batches = iter(work.make_loader(size))
    for _ in range(work.total_steps):
        step = on_device(islice(micro_batches, work.global_batch_size // size))
        num_tokens = sum(map(count_valid, step))
        for micro_batch in step:
            (summed_loss(model, micro_batch) / num_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(model, optimizer)


def whole_batch_loop(work: Work, watch: Watch, *, dtype: torch.dtype) -> None:
    """One forward and backward a step."""
    torch_loop(work, watch, dtype=dtype, micro_batch_size=work.global_batch_size)


def our_loop(
    work: Work, watch: Watch, *, strategy: str = "none", is_budget: bool = False, loss: LossKind = "auto"
) -> None:
    """The loop of recipes/language_modeling.py, with all that it measures and writes."""
    with TemporaryDirectory() as folder:
        accelerator = Accelerator(log_with=resolve_trackers(["none"], Path(folder)))
        bare = work.make_model()
        optimizer = work.make_optimizer(bare)
        model, optimizer = accelerator.prepare(CausalLMLoss(bare, loss), optimizer)
        labels = RunLabels(project="", group="", name="", tags=[], config={}, output_dir=Path(folder))
        start_trackers(accelerator, labels)
        documents = Documents(work)
        batches = GlobalBatches(
            accelerator,
            documents,
            order=SampleOrder(num_samples=len(documents), global_batch_size=work.global_batch_size, seed=None),
            layout=BatchLayout.of(work.global_batch_size, work.micro_batch_size, accelerator.num_processes),
            num_steps=work.total_steps,
            seed=0,
            count_valid=count_valid,
            collate_fn=padded,
        )
        plan = memsave.make_plan(
            model,
            batches.largest_forward(batches.layout)(),
            strategy=strategy,
            budget_gib=work.budget_gib if is_budget else None,
            static=replace(memory_of_optimizer(optimizer), gradients_resident=True),
        )

        def loss_of(micro_batch: Batch) -> Tensor:
            return model(**micro_batch)

        def train_step(batch: GlobalBatch) -> Tensor:
            for micro_batch in batch.forwards(model):
                loss_sum = loss_of(micro_batch)
                batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return grad_norm

        report = RunReport(accelerator, batches, model, optimizer)
        with memsave.apply_plan(model, plan):
            for batch in report.clock.loading(batches):
                report.count_flops(batch, loss_of)
                with report.measured(batch.step):
                    grad_norm = train_step(batch)
                report.count(batch, grad_norm)
                if (batch.step + 1) % LOGGING_STEPS == 0:
                    figures, _ = report.end_window(batch.step + 1, learning_rate=LEARNING_RATE)
                    accelerator.log(figures, step=batch.step + 1)
                watch(bare, optimizer)


def accelerate_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """As Accelerate's examples accumulate: every micro-batch has its own mean, and these have the same weight."""
    accelerator = Accelerator(gradient_accumulation_steps=work.accumulation_steps)
    bare = work.make_model()
    if is_checkpointed:
        bare.gradient_checkpointing_enable()
    loader = work.make_loader(work.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(bare, work.make_optimizer(bare), loader)
    for batch in islice(loader, work.total_steps * work.accumulation_steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch(bare, optimizer)


def accelerate_tokens_loop(work: Work, watch: Watch) -> None:
    """As Accelerate's guide accumulates samples of several sizes: the step's tokens are counted before its forwards."""
    accelerator = Accelerator(gradient_accumulation_steps=work.accumulation_steps)
    bare = work.make_model()
    loader = work.make_loader(work.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(bare, work.make_optimizer(bare), loader)
    micro_batches = iter(loader)
    for _ in range(work.total_steps):
        step = list(islice(micro_batches, work.accumulation_steps))
        num_tokens = sum(map(count_valid, step))
        for micro_batch in step:  # Accelerate divides by the number of micro-batches
            accelerator.backward(summed_loss(model, micro_batch) * work.accumulation_steps / num_tokens)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(bare, optimizer)


def fabric_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """Lightning Fabric, as its guide to accumulation writes the loop."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=harness.this_device().type, devices=1)
    fabric.launch()
    bare = work.make_model()
    if is_checkpointed:
        bare.gradient_checkpointing_enable()
    model, optimizer = fabric.setup(bare, work.make_optimizer(bare))
    micro_batches = iter(fabric.setup_dataloaders(work.make_loader(work.micro_batch_size)))
    for _ in range(work.total_steps):
        for index, batch in enumerate(islice(micro_batches, work.accumulation_steps), start=1):
            with fabric.no_backward_sync(model, enabled=index < work.accumulation_steps):
                fabric.backward(model(**batch).loss / work.accumulation_steps)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(bare, optimizer)


def trainer_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        flags = TrainingArguments(**_flags_of_trainers(work, folder), gradient_checkpointing=is_checkpointed)
        _train(Trainer, watch, work.make_model(), flags, train_dataset=Documents(work), data_collator=padded)


def trl_loop(work: Work, watch: Watch, *, is_checkpointed: bool = True) -> None:
    """TRL's SFTTrainer, with its own collator."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in Documents(work).rows]})
    vocabulary = Tokenizer(WordLevel({"<pad>": PADDING, "</s>": 1}, unk_token="<pad>"))  # asked for, and not used
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>")
    with TemporaryDirectory() as folder:
        flags = _flags_of_trainers(work, folder)
        flags = SFTConfig(**flags, gradient_checkpointing=is_checkpointed, bf16=False, max_length=None)
        _train(SFTTrainer, watch, work.make_model(), flags, train_dataset=rows, processing_class=tokenizer)


def _flags_of_trainers(work: Work, folder: str) -> dict[str, Any]:
    on_cpu = harness.this_device().type == "cpu"
    return {
        "output_dir": folder,
        "per_device_train_batch_size": work.micro_batch_size,
        "gradient_accumulation_steps": work.accumulation_steps,
        "max_steps": work.total_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "logging_steps": LOGGING_STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "remove_unused_columns": False,
    }


def _train(trainer_class: Any, watch: Watch, model: Any, flags: Any, **data: Any) -> None:
    from transformers import PrinterCallback, TrainerCallback

    class Watched(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            watch(parts["model"], parts["optimizer"])

    trainer = trainer_class(model=model, args=flags, callbacks=[Watched()], **data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
