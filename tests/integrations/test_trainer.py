"""One callback in transformers' Trainer: the same weights, within the budget, and nothing left behind."""

import subprocess
import sys
from threading import Event, Thread

import pytest
import torch
from integrations.trainings import (
    BASE,
    CHECKPOINTING,
    LaterPeaks,
    differing,
    llama,
    padded,
    plans_while_recorded,
    rows,
    saves_memory,
    weights_of,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import memsave_recipes as memsave
from memsave_recipes.core.text import GIB

BUDGET_GIB = 0.0055
LENGTHS = [48] * 16


def trained(folder, callbacks=(), *, lengths=LENGTHS, model=None, trainer=Trainer, **arguments):
    arguments = {**BASE, "per_device_train_batch_size": 4, "max_steps": 4, **arguments}
    model = model or llama()
    run = trainer(
        model=model,
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=rows(lengths),
        data_collator=padded,
        callbacks=list(callbacks),
    )
    run.train()
    return run


def nothing_is_left(run):
    assert not [module for module in run.model.modules() if "forward" in vars(module)]
    assert not [name for name in ("compute_loss", "training_step") if name in vars(run)]
    assert not [p for p in run.model.parameters() if p._post_accumulate_grad_hooks]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {
        steps: weights_of(trained(tmp_path_factory.mktemp("plain"), gradient_accumulation_steps=steps).model)
        for steps in (1, 2)
    }


@pytest.mark.parametrize(
    ("settings", "accumulation"), [({"strategy": "full"}, 1), ({"budget_gib": BUDGET_GIB}, 2)], ids=["full", "budget"]
)
def test_the_weights_are_those_without_it(settings, accumulation, plain, tmp_path, capsys):
    callback, later = memsave.MemsaveCallback(**settings), LaterPeaks()
    run = trained(tmp_path, [callback, later], gradient_accumulation_steps=accumulation)
    assert not differing(plain[accumulation], weights_of(run.model))
    nothing_is_left(run)
    printed = capsys.readouterr().out
    predicted = callback.plan.prediction
    assert f"memsave: {callback.plan}" in printed
    assert "memsave: peak of step 2: " in printed
    assert len(later.peaks) == 2
    assert max(later.peaks) <= 1.01 * predicted.peak_bytes
    if "budget_gib" in settings:
        assert saves_memory(callback.plan)
        assert max(later.peaks) <= BUDGET_GIB * GIB < predicted.baseline_peak_bytes


@pytest.mark.slow
def test_under_bf16_no_casts_of_weights_are_left_behind(tmp_path):
    """Of the blocks that recompute, which is what is predicted; the trainer's autocast remembers its casts."""
    callback, later = memsave.MemsaveCallback(strategy="full"), LaterPeaks()
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, use_cache=False, **shape))
    trained(tmp_path, [callback, later], model=model, bf16=True, gradient_accumulation_steps=2)
    casts_bytes = sum(weight.nbytes // 2 for weight in model.model.layers.parameters())
    assert later.peaks
    assert max(later.peaks) <= callback.plan.prediction.peak_bytes + 0.1 * casts_bytes


@plans_while_recorded
def test_it_plans_again_for_longer_batches(tmp_path, capsys):
    lengths = [16] * 4 + [24] * 4 + [20] * 4 + [48] * 4
    without = weights_of(trained(tmp_path, lengths=lengths, train_sampling_strategy="sequential").model)
    callback, later = memsave.MemsaveCallback(BUDGET_GIB), LaterPeaks()
    run = trained(tmp_path, [callback, later], lengths=lengths, train_sampling_strategy="sequential")
    assert not differing(without, weights_of(run.model))
    assert capsys.readouterr().out.count("; planned again, ") == 2
    assert saves_memory(callback.plan)
    assert max(later.peaks) <= BUDGET_GIB * GIB


def test_it_goes_on_under_full_where_a_longer_batch_fits_no_budget(tmp_path, capsys):
    lengths = [16] * 4 + [160] * 4
    run = trained(
        tmp_path,
        [callback := memsave.MemsaveCallback(BUDGET_GIB)],
        lengths=lengths,
        max_steps=2,
        train_sampling_strategy="sequential",
    )
    assert run.state.global_step == 2
    assert callback.plan.strategy == "full"
    assert "is too small for any plan" in capsys.readouterr().out


class CountingTrainer(Trainer):
    """Keeps numbers beside its model, as TRL's trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.num_tokens, self.total = {"train": []}, 0, torch.zeros(())

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.num_tokens += int(inputs.pop("attention_mask").sum())
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses["train"].append(loss.item())
        self.total += loss.detach()
        return loss


def test_it_leaves_the_numbers_of_the_trainer_alone(tmp_path):
    runs = [
        trained(tmp_path, callbacks, trainer=CountingTrainer)
        for callbacks in ([], [memsave.MemsaveCallback(BUDGET_GIB)])
    ]
    plain, planned = ((run.losses, run.num_tokens, run.total) for run in runs)
    assert plain == planned
    assert plain[1] == 4 * 4 * 48


class FailingTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 2:
            raise RuntimeError("the power is gone")
        return loss


def test_an_exception_in_a_step_takes_it_off(tmp_path):
    callback, model = memsave.MemsaveCallback(strategy="full"), llama()
    with pytest.raises(RuntimeError, match="the power is gone"):
        trained(tmp_path, [callback], model=model, trainer=FailingTrainer)
    assert callback.plan.recomputed
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_second_training_is_planned_anew(tmp_path):
    run = trained(tmp_path, [callback := memsave.MemsaveCallback(strategy="full")])
    first = callback.plan
    run.train()
    assert callback.plan == first
    assert callback.plan is not first
    nothing_is_left(run)


class Full(LlamaForCausalLM):
    fits = 4

    def forward(self, input_ids=None, **others):
        if self.training and len(input_ids) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.parametrize(
    ("budget_gib", "kind"), [(BUDGET_GIB, LlamaForCausalLM), pytest.param(1.0, Full, marks=pytest.mark.slow)]
)
def test_a_batch_that_does_not_fit_is_made_smaller(budget_gib, kind, tmp_path, capsys, monkeypatch):
    def searched(kind, *callbacks):
        model = llama()
        model.__class__ = kind
        searching = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "max_steps": 2}
        return trained(tmp_path, callbacks, model=model, **searching)

    run = searched(kind, memsave.MemsaveCallback(budget_gib=budget_gib))
    nothing_is_left(run)
    assert run._train_batch_size < 8
    monkeypatch.setattr(Full, "fits", run._train_batch_size)
    plain = searched(Full)
    assert plain._train_batch_size == run._train_batch_size
    assert not differing(weights_of(run.model), weights_of(plain.model))
    printed = capsys.readouterr()
    assert ("is too small for any plan" in printed.out + printed.err) is (kind is LlamaForCausalLM)


def test_what_is_saved_is_as_ever(tmp_path, plain):
    trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], save_strategy="steps", save_steps=4)
    saved = type(llama()).from_pretrained(tmp_path / "checkpoint-4")
    assert not differing(plain[1], weights_of(saved))


@pytest.mark.parametrize("offload", ["state", "step"])
def test_on_a_cpu_the_optimizer_stays(tmp_path, plain, offload):
    callback = memsave.MemsaveCallback(strategy="full", offload_optimizer=offload)
    with pytest.warns(match="offload_optimizer: the model runs on a CPU, so all of it stays where it is"):
        run = trained(tmp_path, [callback])
    assert not differing(plain[1], weights_of(run.model))


class OwnStepTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


REFUSED = {
    "two checkpointings": (
        {CHECKPOINTING: True},
        f"{CHECKPOINTING}=True: a plan decides .* pass {CHECKPOINTING}=False to TrainingArguments",
    ),
    "compiled": ({"torch_compile": True}, "torch_compile=True: pass torch_compile=False"),
    "a step of its own": ({"trainer": OwnStepTrainer}, "training_step does not call compute_loss"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_stand_beside_a_plan_is_refused(arguments, message, tmp_path):
    model = llama()
    before = weights_of(model)
    with pytest.raises(memsave.InputError, match=message):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], model=model, **arguments)
    assert not differing(before, weights_of(model))
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_model_that_checkpoints_by_itself_is_refused(tmp_path):
    model = llama()
    getattr(model, f"{CHECKPOINTING}_enable")()
    with pytest.raises(memsave.InputError, match=rf"checkpointed already, .*\.{CHECKPOINTING}_disable\(\)"):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], model=model)


def test_a_model_under_a_plan_is_refused(tmp_path):
    model = llama()
    memsave.apply_plan(model, memsave.make_plan(model, strategy="full"))
    with pytest.raises(memsave.InputError, match=r"a plan is applied to model\.layers\.0 already"):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], model=model)


def test_ranks_that_share_layers_are_refused(tmp_path, monkeypatch):
    from accelerate.utils import ParallelismConfig

    class Shared(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            monkeypatch.setattr(self.accelerator.state, "parallelism_config", ParallelismConfig(tp_size=2))

    with pytest.raises(memsave.InputError, match=r"tp_size 2 shares layers between .*: train with tp_size=1, or"):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], trainer=Shared)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_engines_other_than_ddp_and_fsdp2_are_refused(kind, tmp_path, monkeypatch):
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    class Sharded(Trainer):
        def create_optimizer(self, *args):
            monkeypatch.setattr(self.accelerator.state, "distributed_type", DistributedType(kind))
            first = FullyShardedDataParallelPlugin(fsdp_version=1)
            monkeypatch.setattr(self.accelerator.state, "fsdp_plugin", first, raising=False)
            return super().create_optimizer(*args)

    monkeypatch.setattr("accelerate.Accelerator.prepare", lambda self, *models, **_: models)
    with pytest.raises(memsave.InputError, match=f"{kind} shards or moves the model"):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], trainer=Sharded)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "strategy budget:bitwise: needs budget_gib"),
        ({"budget_gib": 0}, "budget_gib 0: it must be above 0"),
        ({"budget_gib": float("inf")}, "budget_gib inf: it must be above 0, and a number of GiB"),
        ({"budget_gib": float("nan")}, "budget_gib nan: it must be above 0"),
        ({"budget_gib": "5"}, "budget_gib '5': it must be above 0, and a number of GiB"),
        ({"budget_gib": 1, "strategy": "full"}, "budget_gib 1: strategy full takes none"),
        ({"strategy": "full", "offload_optimizer": "all"}, "offload_optimizer 'all': it must be none or state or step"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(memsave.InputError, match=message):
        memsave.MemsaveCallback(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fulll"}, "strategy fulll: no such strategy"),
        ({"budget_gib": 2**-13}, "budget_gib 0.00012207 is too small for any plan: the smallest that works is "),
        ({"strategy": "full", "blocks": nn.Conv2d}, "blocks Conv2d: LlamaForCausalLM has no such modules"),
        ({"strategy": "full", "blocks": ["nope"]}, "blocks nope: LlamaForCausalLM has no module of that name"),
    ],
)
def test_bad_settings_are_told_before_a_weight_changes(settings, message, tmp_path):
    model = llama()
    before = weights_of(model)
    with pytest.raises(memsave.InputError, match=message):
        trained(tmp_path, [memsave.MemsaveCallback(**settings)], model=model)
    assert not differing(before, weights_of(model))


@pytest.mark.parametrize("is_the_same", [False, True])
def test_a_second_callback_is_refused_before_anything_changes(is_the_same, tmp_path):
    model, first = llama(), memsave.MemsaveCallback(strategy="full")
    second = first if is_the_same else memsave.MemsaveCallback(strategy="segments:2")
    with pytest.raises(memsave.InputError, match="callbacks: MemsaveCallback and MemsaveCallback"):
        trained(tmp_path, [first, second], model=model)
    assert not any("forward" in vars(module) for module in model.modules())
    trained(tmp_path, [first], model=model)


@pytest.mark.parametrize("part", ["", "model.layers.1"])
def test_a_model_that_is_compiled_in_place_is_refused(part, tmp_path):
    model = llama()
    model.get_submodule(part).compile(backend="eager")
    name = part or "LlamaForCausalLM"
    with pytest.raises(memsave.InputError, match=f"model: {name} is compiled in place"):
        trained(tmp_path, [memsave.MemsaveCallback(strategy="full")], model=model)
    with pytest.raises(memsave.InputError, match=f"model: {name} is compiled in place"):
        memsave.make_plan(model, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, strategy="full")


def test_a_training_in_another_thread_is_refused_while_one_is_under_way(tmp_path):
    began, end, refused = Event(), Event(), []

    class Waits(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            began.set()
            assert end.wait(60)

    def train_another():
        assert began.wait(60)
        try:
            trained(tmp_path, [memsave.MemsaveCallback(strategy="full")])
        except memsave.InputError as error:
            refused.append(str(error))
        finally:
            end.set()

    thread = Thread(target=train_another)
    thread.start()
    trained(tmp_path, [memsave.MemsaveCallback(strategy="full"), Waits()])
    thread.join()
    assert "a training with a plan runs in thread MainThread already" in refused[0]
    trained(tmp_path, [memsave.MemsaveCallback(strategy="full")])


def test_it_is_for_a_trainer():
    with pytest.raises(memsave.InputError, match="it is for transformers' Trainer"):
        memsave.MemsaveCallback(strategy="full").on_train_begin(None, None, None)


def test_the_package_loads_no_trainer():
    script = "import memsave_recipes, sys; print([n for n in ('transformers', 'trl', 'lightning') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
