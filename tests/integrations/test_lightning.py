"""One callback in Lightning's Trainer: the same weights, within the budget, and nothing left behind."""

import subprocess
import sys

import lightning
import pytest
import torch
from integrations.trainings import CHECKPOINTING, differing, llama, own_forwards, padded, rows, saves_memory, weights_of
from lightning.pytorch.callbacks import Callback
from torch.optim import AdamW

import memsave_recipes as memsave
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.text import GIB, format_bytes

BUDGET_GIB = 0.006
PLANS = {"none": {"strategy": "none"}, "full": {"strategy": "full"}, "budget": {"budget_gib": BUDGET_GIB}}


class Module(lightning.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        self.network, self.fails_at, self.seen = llama(), fails_at, []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise RuntimeError("the power is gone")
        loss = self.network(**batch).loss
        self.seen.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=1e-3, fused=True)


class LaterPeaks(Callback):
    """Of every step from the fourth on; the callback under test measures the third."""

    def __init__(self):
        self.peaks = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= 3:
            self.window = break_down_peak(pl_module, trainer.optimizers[0], torch.device("cpu"))
            self.peak = self.window.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > 3:
            self.window.__exit__(None, None, None)
            batch_bytes = sum(tensor.nbytes for tensor in batch.values())
            self.peaks.append(self.peak.breakdown.total_bytes + batch_bytes)


def fitted(folder, callbacks, *, module=None, lengths=(48,) * 20, **arguments):
    lightning.seed_everything(0, verbose=False)
    loader = torch.utils.data.DataLoader(rows(list(lengths)), batch_size=4, shuffle=True, collate_fn=padded)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    arguments = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, **arguments}
    trainer = lightning.Trainer(callbacks=callbacks, **(dict.fromkeys(off, False) | arguments))
    module = module or Module()
    trainer.fit(module, loader)
    return module, trainer


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_weights_are_those_without_it(accumulation, tmp_path, capsys):
    plain, bare = fitted(tmp_path, [], accumulate_grad_batches=accumulation)
    for name, settings in PLANS.items():
        callback, later = memsave.MemsaveLightningCallback(**settings), LaterPeaks()
        callbacks = [callback, later] if accumulation == 1 else [callback]
        module, trainer = fitted(tmp_path, callbacks, accumulate_grad_batches=accumulation)
        assert not differing(weights_of(plain), weights_of(module)), name
        assert plain.seen == module.seen
        assert bare.callback_metrics == trainer.callback_metrics
        assert not own_forwards(module)
        assert "log" not in vars(module)
        printed = capsys.readouterr().out
        assert f"memsave: {callback.plan}" in printed
        assert "memsave: peak of step 3: " in printed
        if accumulation == 1:
            assert len(later.peaks) == 2
            assert max(later.peaks) <= callback.plan.prediction.peak_bytes
            assert f"peak of step 3: {format_bytes(max(later.peaks))}, " in printed
        if name == "budget":
            assert saves_memory(callback.plan)
            assert max([*later.peaks, 0]) <= BUDGET_GIB * GIB < callback.plan.prediction.baseline_peak_bytes


def test_an_exception_takes_it_off(tmp_path):
    module = Module(fails_at=2)
    callback = memsave.MemsaveLightningCallback(strategy="full")
    with pytest.raises(RuntimeError, match="the power is gone"):
        fitted(tmp_path, [callback], module=module)
    assert callback.plan.recomputed
    assert not own_forwards(module)


def test_a_checkpoint_is_as_ever(tmp_path):
    callback = memsave.MemsaveLightningCallback(strategy="full")
    module, _ = fitted(tmp_path, [callback], enable_checkpointing=True)
    (saved,) = tmp_path.glob("checkpoints/*.ckpt")
    loaded = Module.load_from_checkpoint(saved, weights_only=True)
    assert not differing(weights_of(module), weights_of(loaded))


def test_without_lightning_a_line_names_the_extra():
    script = (
        "import sys; sys.modules['lightning'] = None; import memsave_recipes; memsave_recipes.MemsaveLightningCallback"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: plans in Lightning need lightning, which is not installed: pip install 'memsave-recipes[lightning]'"
    )


class ManualModule(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused(tmp_path):
    with pytest.raises(memsave.InputError, match="automatic_optimization=False: the module steps its optimizers"):
        fitted(tmp_path, [memsave.MemsaveLightningCallback(strategy="full")], module=ManualModule())


def test_a_second_checkpointing_is_refused(tmp_path):
    module = Module()
    getattr(module.network, f"{CHECKPOINTING}_enable")()
    with pytest.raises(memsave.InputError, match=rf"checkpointed already, .*\.{CHECKPOINTING}_disable\(\)"):
        fitted(tmp_path, [memsave.MemsaveLightningCallback(strategy="full")], module=module)


def test_a_strategy_that_shards_is_refused(tmp_path, monkeypatch):
    class ShardingStrategy:
        pass

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    monkeypatch.setattr(type(trainer), "strategy", ShardingStrategy())
    with pytest.raises(memsave.InputError, match="strategy: ShardingStrategy shards or moves the model"):
        memsave.MemsaveLightningCallback(strategy="full").on_train_start(trainer, Module())


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_fabric(precision, tmp_path, capsys):
    def trained(**settings):
        fabric = lightning.Fabric(accelerator="cpu", precision=precision)
        fabric.seed_everything(0, verbose=False)
        model = llama().train()
        model, optimizer = fabric.setup(model, AdamW(model.parameters(), fused=True))
        batches = [padded(rows([48] * 4).to_list())] * 5
        if settings:
            handle = memsave.prepare(model, batches[0], optimizer, **settings)

        def step(batch):
            fabric.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

        for batch in batches[:-1]:
            step(batch)
        with break_down_peak(model.module, optimizer.optimizer, torch.device("cpu")) as peak:
            step(batches[-1])
        if settings:
            batch_bytes = sum(tensor.nbytes for tensor in batches[-1].values())
            peak_bytes = peak.breakdown.total_bytes + batch_bytes
            assert peak_bytes <= 1.02 * handle.plan.prediction.peak_bytes
            assert peak_bytes <= settings.get("budget_gib", 1) * GIB
            handle.remove()
            assert not own_forwards(model.module)
        return weights_of(model)

    plain = trained()
    for settings in PLANS.values():
        assert not differing(plain, trained(**settings))
        assert "memsave: peak of step 2: " in capsys.readouterr().out
