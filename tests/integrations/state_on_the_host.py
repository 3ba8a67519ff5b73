"""``python state_on_the_host.py FOLDER``: trainings on a stand-in for CUDA, without state on the host and with it."""

import gc
import sys
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator

sys.path.append(str(Path(__file__).parents[1]))

from integrations.trainings import BASE, chats, differing, llama, padded, rows, tokenizer, weights_of
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import memsave_recipes as memsave
from memsave_recipes.core.host import state as host_state
from memsave_recipes.core.host import step as host_step
from memsave_recipes.integrations import planned_training

ARGUMENTS = {**BASE, "use_cpu": False, "per_device_train_batch_size": 4, "max_steps": 4}
SAVES = {"save_strategy": "steps", "save_steps": 2}
PRECISIONS = {
    "float32": {},
    "bfloat16": {"bf16": True, "gradient_accumulation_steps": 2},
    "float16": {"fp16": True, "max_grad_norm": 0.1},
}
RESUMED = [("float32-state", "state"), ("without", "state"), ("float32-state", "none")]
RESUMED += [("float32-step", "step"), ("without", "step"), ("float32-step", "none")]
"""What the training that saved had on the host, and the one that goes on."""


class PeakAtBegin(TrainerCallback):
    """The most bytes on the device until the first step."""

    def on_train_begin(self, *args, **kwargs):
        self.peak_bytes = torch.cuda.max_memory_allocated()


def train(folder, offload_optimizer, *, resume=None, **arguments):
    """Weights after the training, and the most bytes on the device before its first step."""
    gc.collect()  # of the training before, whose trainer refers to itself
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    callback, peak = memsave.MemsaveCallback(strategy="full", offload_optimizer=offload_optimizer), PeakAtBegin()
    trainer = Trainer(
        model=llama(dropout=0.0),
        args=TrainingArguments(str(folder), **{**ARGUMENTS, **arguments}),
        train_dataset=rows([48] * 16),
        data_collator=padded,
        callbacks=[callback, peak],
    )
    trainer.train(resume_from_checkpoint=resume)
    assert_waits(trainer.optimizer, on_host=offload_optimizer != "none")
    peak_of_step, predicted = torch.cuda.max_memory_allocated() - before, callback.plan.prediction.peak_bytes
    assert peak_of_step <= 1.03 * predicted
    assert (
        predicted <= (1.6 if offload_optimizer == "step" else 1.03) * peak_of_step
    )  # all gradients may be on their way
    return on_host(trainer.model), peak.peak_bytes - before


def on_host(model):
    return {name: weight.cpu() for name, weight in weights_of(model).items()}


def refuse_a_late_callback(folder):
    """Which comes when its trainer has been made."""
    arguments = TrainingArguments(str(folder), **ARGUMENTS)
    trainer = Trainer(model=llama(dropout=0.0), args=arguments, train_dataset=rows([48] * 16), data_collator=padded)
    trainer.add_callback(memsave.MemsaveCallback(strategy="full", offload_optimizer="state"))
    with pytest.raises(memsave.InputError, match=r"offload_optimizer: .* pass callbacks=\[\.\.\.\] to Trainer"):
        trainer.train()


def assert_waits(optimizer, *, on_host):
    """All tensors of the state that are large."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    kinds = {value.device.type for value in state if value.nbytes >= host_state.SMALLEST_BYTES}
    assert kinds == {"cpu" if on_host else "cuda"}


def tune(folder, callbacks):
    """With TRL; weights after the training."""
    trainer = SFTTrainer(
        model=llama(dropout=0.0),
        args=SFTConfig(str(folder), activation_checkpointing=False, **ARGUMENTS),
        train_dataset=chats(),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    trainer.train()
    if callbacks:
        assert_waits(trainer.optimizer, on_host=True)
    return on_host(trainer.model)


class Module(lightning.LightningModule):
    """That keeps its state where ``keeps`` is called, before its schedule."""

    def __init__(self, keeps):
        super().__init__()
        self.network, self.keeps = llama(dropout=0.0), keeps

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        self.keeps(optimizer)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_train_end(self):
        assert_waits(self.trainer.optimizers[0], on_host=self.keeps is memsave.keep_state_on_host)


def fit(folder, keeps, *, epochs=2, resume=None):
    """With Lightning; weights after the training, of which ``folder`` has a checkpoint."""
    lightning.seed_everything(0, verbose=False)
    module = Module(keeps)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cuda", devices=1, max_epochs=epochs, default_root_dir=folder, **off)
    loader = torch.utils.data.DataLoader(rows([48] * 8), batch_size=4, collate_fn=padded)
    trainer.fit(module, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return on_host(module.network)


def accelerated(model, optimizer):
    """Both as Accelerate prepares them, and its backward."""
    accelerator = Accelerator()
    return *accelerator.prepare(model, optimizer), accelerator.backward


def in_fabric(model, optimizer):
    """Both as Fabric sets them up, and its backward."""
    fabric = lightning.Fabric(accelerator="cuda", devices=1)
    return *fabric.setup(model, optimizer), fabric.backward


def loop(wrapped, *, on_the_host):
    """Weights after a loop of one's own, in which a micro-batch alone, and one after the other, make a step."""
    model = llama(dropout=0.0).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    masters = memsave.step_on_host(model, optimizer) if on_the_host else None
    trained, stepped, backward = wrapped(model, optimizer)
    for count in (1, 2, 1):
        for batch in [padded(rows([48] * 4))] * count:
            backward(trained(**{name: value.cuda() for name, value in batch.items()}).loss)
        if masters is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            masters.clip(0.5)
        stepped.step()
        model.zero_grad()
    return on_host(model)


def main(folder: Path) -> None:
    host_state.PIECE_BYTES = 2**15
    planned_training.LEAVING_BYTES = host_step.LEAVING_BYTES = 2**14
    refuse_a_late_callback(folder / "late")
    expected, _ = train(folder / "without", "none", **SAVES)
    weights_bytes = sum(weight.nbytes for weight in expected.values())
    for name, precision in PRECISIONS.items():
        plain = expected if name == "float32" else train(folder / "plain", "none", **precision)[0]
        for offload in ("state", "step"):
            found, _ = train(folder / f"{name}-{offload}", offload, **precision, **SAVES)
            assert not differing(plain, found), (name, offload)
    for before, after in RESUMED:
        resume = str(folder / before / "checkpoint-2")
        found, peak_bytes = train(folder / f"{before}-{after}", after, resume=resume)
        assert not differing(expected, found), (before, after)
        assert (peak_bytes < 2 * weights_bytes) is (after != "none"), "the state is twice the weights"
    plain = tune(folder / "trl-plain", [])
    for offload in ("state", "step"):
        callback = memsave.MemsaveCallback(strategy="full", offload_optimizer=offload)
        assert not differing(plain, tune(folder / f"trl-{offload}", [callback])), offload
    for wrapped in (lambda model, optimizer: (model, optimizer, torch.Tensor.backward), accelerated, in_fabric):
        assert not differing(*(loop(wrapped, on_the_host=there) for there in (False, True))), wrapped
    fitted = fit(folder / "plain", lambda optimizer: None)
    assert not differing(fitted, fit(folder / "two", memsave.keep_state_on_host))
    fit(folder / "one", memsave.keep_state_on_host, epochs=1)
    resumed = fit(folder / "on", memsave.keep_state_on_host, resume=folder / "one" / "last.ckpt")
    assert not differing(fitted, resumed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
