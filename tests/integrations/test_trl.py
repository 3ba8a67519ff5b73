"""One callback in TRL's SFTTrainer and DPOTrainer: the same weights, and a budget that holds."""

import pytest
from integrations.trainings import (
    BASE,
    CHECKPOINTING,
    LaterPeaks,
    chats,
    chats_with_images,
    differing,
    image_processor,
    llama,
    llava,
    own_forwards,
    plans_while_recorded,
    preferences,
    saves_memory,
    tokenizer,
    weights_of,
)
from peft import LoraConfig
from samples import sample
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import memsave_recipes as memsave
from memsave_recipes.core.text import GIB

SMALL = {**BASE, "per_device_train_batch_size": 4, "max_steps": 4, CHECKPOINTING: False, "max_length": 64}
LORA = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
PLANS = {"none": {"strategy": "none"}, "full": {"strategy": "full"}, "budget": {}}
CASES = {
    # name: (arguments of the config, adapters, budget_gib)
    "chat": ({}, None, 0.0325),
    "lora": ({}, LORA, 0.031),
    "packing": ({"packing": True}, None, 0.036),
}


def fine_tuned(folder, callbacks, adapters, **arguments):
    run = SFTTrainer(
        model=llama(),
        args=SFTConfig(str(folder), **{**SMALL, **arguments}),
        train_dataset=chats(),
        processing_class=tokenizer(),
        peft_config=adapters,
        callbacks=callbacks,
    )
    run.train()
    return run


def fine_tuned_on_images(folder, callbacks, frozen):
    run = SFTTrainer(
        model=llava(frozen),
        args=SFTConfig(str(folder), **{**SMALL, "max_length": None}),
        train_dataset=chats_with_images(),
        processing_class=image_processor(),
        callbacks=callbacks,
    )
    run.train()
    return run


def preferred(folder, callbacks, adapters):
    run = DPOTrainer(
        model=llama(dropout=0.0),
        ref_model=None if adapters else llama(dropout=0.0),
        args=DPOConfig(str(folder), **SMALL),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=adapters,
        callbacks=callbacks,
    )
    run.train()
    return run


def check(train, budget_gib, printed):
    """``train(callbacks)`` without a plan, and then under each."""
    plain = train([])
    others_bytes = sum(p.nbytes for p in plain.ref_model.parameters()) if getattr(plain, "ref_model", None) else 0
    for name, settings in PLANS.items():
        callback, later = memsave.MemsaveCallback(**(settings or {"budget_gib": budget_gib})), LaterPeaks()
        run = train([callback, later])
        assert not differing(weights_of(plain.model), weights_of(run.model)), name
        assert own_forwards(run.model) == own_forwards(plain.model)
        assert callback.plan.prediction, name
        assert "memsave: peak of step 2: " in printed().out
        losses = [[entry.get("loss") for entry in one.state.log_history] for one in (plain, run)]
        metrics = [[set(entry) for entry in one.state.log_history] for one in (plain, run)]
        assert losses[0] == losses[1]
        assert metrics[0] == metrics[1]
        if name == "budget":
            assert saves_memory(callback.plan)
            assert max(later.peaks) + others_bytes <= budget_gib * GIB < callback.plan.prediction.baseline_peak_bytes


@plans_while_recorded
@pytest.mark.parametrize("case", sample(["lora"], CASES))
def test_sft(case, tmp_path, capsys):
    arguments, adapters, budget_gib = CASES[case]
    check(lambda callbacks: fine_tuned(tmp_path, callbacks, adapters, **arguments), budget_gib, capsys.readouterr)


@plans_while_recorded
@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["frozen tower", "all"])
def test_sft_on_images(frozen, tmp_path, capsys):
    check(lambda callbacks: fine_tuned_on_images(tmp_path, callbacks, frozen), 0.039, capsys.readouterr)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["reference", "lora"])
def test_dpo(adapters, tmp_path, capsys):
    check(lambda callbacks: preferred(tmp_path, callbacks, adapters), 0.034 if adapters else 0.037, capsys.readouterr)


def test_the_checkpointing_that_trl_turns_on_is_refused(tmp_path):
    with pytest.raises(memsave.InputError, match=f"pass {CHECKPOINTING}=False to SFTConfig; TRL's default"):
        fine_tuned(tmp_path, [memsave.MemsaveCallback(1)], None, **{CHECKPOINTING: True})


def test_offloading_by_trl_is_refused(tmp_path):
    with pytest.raises(memsave.InputError, match="activation_offloading=True: pass activation_offloading=False"):
        fine_tuned(tmp_path, [memsave.MemsaveCallback(1)], None, activation_offloading=True)
