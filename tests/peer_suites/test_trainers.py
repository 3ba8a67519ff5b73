"""What the tests of Trainer and Accelerate ask: under a plan, training leaves the same weights, logs and states."""

import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peer_suites.adapter import PLAIN, TORCH, Suite, stack, x
from samples import sample
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import memsave_recipes as memsave

suite = Suite()
BLOCKS = [f"blocks.{number}" for number in range(4)]
SETTINGS = SimpleNamespace(width=8)
BASE = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
SHORT = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 0.01}


class Rows(Dataset):
    """Points of a line with noise."""

    def __init__(self, length=18):
        self.inputs, self.labels = x(length, 8), x(length, 8).tanh()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"input_x": self.inputs[index], "labels": self.labels[index]}


def regression(config=SETTINGS):
    """The loss and the outputs, as models of transformers return them; ``config`` is what a user keeps there."""

    def through(self, input_x, labels=None):
        for block in self.blocks:
            input_x = block(input_x)
        return (input_x,) if labels is None else (nn.functional.mse_loss(input_x, labels), input_x)

    drops = lambda self, x: x + nn.functional.dropout(torch.tanh(self.l(self.n(x))), 0.1, self.training)  # noqa: E731
    return stack(drops, through, config=config)


def trainer_of(put, folder, model=None, *, kind=Trainer, callbacks=(), **arguments):
    """A Trainer whose model is under the plan: by the callback, or by torch's checkpoint around its layers."""
    torch.manual_seed(0)
    model = regression() if model is None else model
    if put.way in (PLAIN, TORCH):
        put(model)
    else:
        budget = 1.0 if put.way.startswith("budget") else None
        put.models.append(model)
        callbacks = [*callbacks, memsave.MemsaveCallback(budget, strategy=put.way, blocks=BLOCKS)]
    own = {name: arguments.pop(name) for name in ("optimizers", "compute_loss_func") if name in arguments}
    arguments = TrainingArguments(folder, **BASE | SHORT | arguments)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows(6)}
    return kind(model=model, args=arguments, callbacks=list(callbacks), **rows, **own)


def left_by(trainer):
    """Losses and norms of the log, and the weights."""
    words = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logged = [[row.get(word) for word in words] for row in trainer.state.log_history if "train_runtime" not in row]
    return logged, trainer.state.global_step, [weight.detach().clone() for weight in trainer.model.parameters()]


ARGUMENTS = {
    "as it is": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation over the end of an epoch": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 3},
    "last batch dropped": {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2},
    "no clipping": {"max_grad_norm": 0.0},
    "bfloat16": {"bf16": True},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "weight_decay": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluation accumulated": {"eval_strategy": "epoch", "eval_accumulation_steps": 1},
    "seed": {"seed": 7, "data_seed": 3},
    "evaluation on start": {"eval_on_start": True, "eval_strategy": "steps"},
    "averaged tokens": {"average_tokens_across_devices": False},
    "empty cache": {"torch_empty_cache_steps": 1},
}


@suite.each(ARGUMENTS)
def trainer(put, value):
    with tempfile.TemporaryDirectory() as folder:
        (run := trainer_of(put, folder, **value)).train()
    return left_by(run)


@suite.each({"None": None, "namespace": SETTINGS})
def trainer_of_a_model_with_a_config(put, value):
    with tempfile.TemporaryDirectory() as folder:
        (run := trainer_of(put, folder, regression(value))).train()
    return left_by(run)


@suite()
def trainer_that_trains_twice(put):
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(put, folder)
        run.train()
        run.train()
    return left_by(run)


@suite()
def trainer_that_evaluates_and_predicts(put):
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(put, folder)
        before = run.evaluate()["eval_loss"]
        run.train()
        return before, run.evaluate()["eval_loss"], run.predict(Rows(5)).predictions, left_by(run)


@suite()
def trainer_that_resumes(put):
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(put, folder, save_strategy="steps", save_steps=2).train()
        run = trainer_of(put, folder, save_strategy="steps", save_steps=2)
        run.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        return left_by(run)


@suite()
def trainer_that_stops_early_and_loads_the_best(put):
    words = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 8}
    words |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(put, folder, callbacks=[EarlyStoppingCallback(2)], **words)
        run.train()
    return left_by(run), run.state.best_global_step


@suite()
def trainer_with_an_optimizer_of_ones_own(put):
    torch.manual_seed(0)
    model = regression()
    optimizer = SGD([{"params": model.blocks[:2].parameters()}, {"params": model.blocks[2:].parameters()}], 0.1)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(put, folder, model, optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1))))
        run.train()
    return left_by(run)


def twice_the_loss(outputs, labels, num_items_in_batch=None):
    return 2 * nn.functional.mse_loss(outputs[1] if len(outputs) > 1 else outputs[0], labels)


class Doubling(Trainer):
    """Computes a loss of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


@suite.each({"function": {"compute_loss_func": twice_the_loss}, "subclass": {"kind": Doubling}})
def trainer_with_a_loss_of_ones_own(put, value):
    with tempfile.TemporaryDirectory() as folder:
        (run := trainer_of(put, folder, **value)).train()
    return left_by(run)


@suite()
def trainer_of_a_partly_frozen_model(put):
    torch.manual_seed(0)
    model = regression()
    model.blocks[0].requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        (run := trainer_of(put, folder, model)).train()
    return left_by(run)


@suite(strategies=("full", "budget:bitwise"))
def trainer_that_finds_its_batch_size(put):
    model = regression()

    def fill_memory(module, args, kwargs):
        if len(kwargs["input_x"]) > 2:
            raise RuntimeError("CUDA out of memory.")

    model.register_forward_pre_hook(fill_memory, with_kwargs=True)
    with tempfile.TemporaryDirectory() as folder:
        (run := trainer_of(put, folder, model, auto_find_batch_size=True)).train()
    return left_by(run)


# Accelerate


def prepared(put, accelerator, batch, *, accumulation=1):
    """Model and optimizer, prepared, and then under the plan by ``memsave.prepare``."""
    torch.manual_seed(0)
    bare = regression()
    model, optimizer = accelerator.prepare(bare, AdamW(bare.parameters(), lr=0.01))
    if put.way in (PLAIN, TORCH):
        put(bare)
    else:
        put.models.append(bare)
        put.undo.append(
            memsave.prepare(
                model,
                batch,
                optimizer,
                strategy=put.way,
                accumulation_steps=accumulation,
                blocks=BLOCKS,
                loss_fn=lambda outputs: outputs[0],
            ).remove
        )
    return bare, model, optimizer


def fresh_accelerator(**words):
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    GradientState._reset_state()
    return Accelerator(cpu=True, **words)


LOOPS = {
    "as it is": {},
    "bfloat16": {"mixed_precision": "bf16"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation in bfloat16": {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"},
}


def trained_by_accelerate(put, value):
    """After each forward and backward, the gradients; in the end, the weights."""
    accelerator = fresh_accelerator(**value)
    loader = accelerator.prepare(DataLoader(Rows(), batch_size=4, shuffle=False))
    steps = value.get("gradient_accumulation_steps", 1)
    bare, model, optimizer = prepared(put, accelerator, next(iter(loader)), accumulation=steps)
    schedule = accelerator.prepare(LambdaLR(optimizer, lambda step: 0.9**step))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)[0])
            seen += [accelerator.sync_gradients, bare.blocks[0].l.weight.grad.clone()]
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    torch.manual_seed(0)
    return seen, schedule.get_last_lr(), [weight.detach().clone() for weight in bare.parameters()]


def without_synchronising(put, value):
    """Gradients differ between ranks inside of ``no_sync``, and agree after it."""
    accelerator = fresh_accelerator()
    rows = Rows()
    batch = {"input_x": rows.inputs[accelerator.process_index :: 2], "labels": rows.labels[:9]}
    bare, model, _ = prepared(put, accelerator, batch)
    seen = []
    for synchronises in (False, True, True):
        with accelerator.no_sync(model) if not synchronises else accelerator.accumulate(model):
            accelerator.backward(model(**batch)[0])
        seen.append(bare.blocks[0].l.weight.grad.clone())
    return seen


suite.each(LOOPS)(trained_by_accelerate)
suite.each({"once": None})(without_synchronising)
ON_RANKS = [name for name in suite.cases if name.startswith(("trained_by", "without_sync"))]


def row_on_rank(name, accelerator):
    return suite.cases[name].row()


FEW = ("trainer[accumulation]", "trainer_of_a_model_with_a_config[None]", "trained_by_accelerate[accumulation]")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sample(FEW, suite.cases))
def test_case(name, judge):
    judge(suite.cases[name])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("name", sample(["without_synchronising[once]"], ON_RANKS))
def test_case_on_two_ranks(name, run_on_ranks, note_row):
    rows = run_on_ranks(partial(row_on_rank, name), 2)
    note_row(rows[0] | {"case": f"{name} on two ranks"})
    assert [row["faults"] for row in rows] == [[], []]
