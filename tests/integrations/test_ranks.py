"""Two ranks under DDP, with other batches on each: one plan, and the weights of a training without it."""

from integrations.trainings import (
    BASE,
    CHECKPOINTING,
    chats,
    llama,
    own_forwards,
    padded,
    rows,
    saves_memory,
    tokenizer,
    weights_of,
)
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import memsave_recipes as memsave

FULL, BUDGET = {"strategy": "full"}, {"budget_gib": 0.0046}


def in_the_trainer(accelerator, folder, settings):
    model, callback = llama(), memsave.MemsaveCallback(**settings) if settings else None
    lengths = [40 + index for index in range(16)]
    arguments = {**BASE, "per_device_train_batch_size": 2, "max_steps": 3}
    Trainer(
        model=model,
        args=TrainingArguments(folder, **arguments),
        train_dataset=rows(lengths),
        data_collator=padded,
        callbacks=[callback] if callback else [],
    ).train()
    assert not own_forwards(model)
    return numpy_of(model), callback.plan if callback else None


def in_trl(accelerator, folder, settings):
    """Its loss gathers metrics from all ranks."""
    model, callback = llama(), memsave.MemsaveCallback(**settings) if settings else None
    arguments = {**BASE, "per_device_train_batch_size": 2, "max_steps": 2, CHECKPOINTING: False}
    SFTTrainer(
        model=model,
        args=SFTConfig(folder, **arguments),
        train_dataset=chats(),
        processing_class=tokenizer(),
        callbacks=[callback] if callback else [],
    ).train()
    return numpy_of(model), callback.plan if callback else None


def in_a_loop(accelerator, folder, settings):
    model = llama().train()
    prepared, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3))
    batches = [padded(rows([48 - accelerator.process_index] * 2).to_list())] * 3
    handle = memsave.prepare(prepared, batches[0], optimizer, **settings) if settings else None
    for batch in batches:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if handle:
        handle.remove()
    return numpy_of(model), handle.plan if handle else None


def numpy_of(model):
    return {name: value.numpy() for name, value in weights_of(model).items()}


class Trained:
    """A training as a function of an accelerator, which pickles."""

    def __init__(self, train, *args):
        self.train, self.args = train, args

    def __call__(self, accelerator):
        return self.train(accelerator, *self.args)


def check(run_on_ranks, train, folder, settings):
    """Trains without a plan, and then with ``settings``; both ranks' weights stay the same, and so do their plans."""
    plain, *others = (
        outcome for chosen in (None, settings) for outcome in run_on_ranks(Trained(train, str(folder), chosen), 2)
    )
    for weights, _ in others:
        assert all((weights[name] == plain[0][name]).all() for name in plain[0])
    _, (_, plan), (_, other_plan) = others
    assert plan == other_plan
    assert plan.prediction
    assert saves_memory(plan)


def test_the_trainer(run_on_ranks, tmp_path):
    check(run_on_ranks, in_the_trainer, tmp_path, BUDGET)


def test_sft(run_on_ranks, tmp_path):
    check(run_on_ranks, in_trl, tmp_path, FULL)


def test_a_loop(run_on_ranks, tmp_path):
    check(run_on_ranks, in_a_loop, tmp_path, BUDGET)
