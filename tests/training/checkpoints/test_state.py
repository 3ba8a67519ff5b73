"""What is saved comes back with every bit, for every kind of model and optimizer, and what does not fit is refused."""

import os
import resource
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler
from trials.run import digest

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.checkpoints import Checkpoints, TrainState
from memsave_recipes.training.checkpoints.commit import verify_manifest
from memsave_recipes.training.checkpoints.state import read_record
from memsave_recipes.training.launch.start import Accelerator
from memsave_recipes.training.optimizers import step_in_backward
from memsave_recipes.training.update_rules import MuonWithAdamW

OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "plain sgd": lambda parameters: SGD(parameters, lr=0.01, fused=True),
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.01),
    "muon": lambda parameters: MuonWithAdamW(
        [{"params": [p for p in parameters if p.ndim == 2]}],
        [{"params": [p for p in parameters if p.ndim != 2]}],
        lr=0.01,
        weight_decay=0.0,
    ),
}


def gpt2():
    """Tied weights."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=8, n_positions=16))


def convolutional():
    """BatchNorm, and weights that are not contiguous."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 6, 6))
    return model.to(memory_format=torch.channels_last)


def adapted():
    """LoRA: most parameters frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


MODELS = {"gpt2": gpt2, "convolutional": convolutional, "adapted": adapted}


def make_training(model_name="convolutional", optimizer_name="adamw", *, seed=0, in_backward=False, dtype=None):
    torch.manual_seed(seed)
    model = MODELS[model_name]().to(dtype or torch.float32)
    torch.manual_seed(0)
    if model_name == "adapted":  # the frozen weights are those the run began with
        for parameter in model.parameters():
            if not parameter.requires_grad:
                nn.init.normal_(parameter)
    optimizer = OPTIMIZERS[optimizer_name]([p for p in model.parameters() if p.requires_grad])
    if in_backward:
        step_in_backward(optimizer)
    scheduler = get_scheduler("cosine", optimizer, 2, 10)
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(model, optimizer)
    return TrainState(accelerator, prepared, optimizer, scheduler)


def train(training, steps, *, first=0):
    model, optimizer, scheduler = training.model, training.stateful["optimizer"], training.stateful["scheduler"]
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        if isinstance(model, nn.Sequential):
            dtype = model[0].weight.dtype
            loss = model(torch.randn(4, 3, 6, 6, dtype=dtype)).square().mean()
        else:
            tokens = torch.randint(0, 32, (2, 8))
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(training):
    return digest([training.model.state_dict(), *(part.state_dict() for part in training.stateful.values())])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_bit_comes_back_and_training_goes_on(tmp_path, model, optimizer):
    straight = make_training(model, optimizer)
    train(straight, 3)
    straight.rank_state(0, {"step": 3}).write(tmp_path)
    other = make_training(model, optimizer, seed=1)
    other.read(tmp_path)
    assert state_of(other) == state_of(straight)
    assert train(other, 3, first=3) == train(straight, 3, first=3)
    assert state_of(other) == state_of(straight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(tmp_path, dtype):
    straight = make_training(dtype=dtype)
    train(straight, 3)
    straight.rank_state(0, {}).write(tmp_path)
    other = make_training(dtype=dtype, seed=1)
    other.read(tmp_path)
    assert state_of(other) == state_of(straight)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd", "muon"])
def test_an_optimizer_that_steps_in_the_backward(tmp_path, optimizer):
    straight = make_training(optimizer_name=optimizer, in_backward=True)
    train(straight, 3)
    straight.rank_state(0, {}).write(tmp_path)
    other = make_training(optimizer_name=optimizer, in_backward=True, seed=1)
    other.read(tmp_path)
    assert train(other, 3, first=3) == train(straight, 3, first=3)
    assert state_of(other) == state_of(straight)


def test_an_optimizer_with_its_state_in_8_bits(tmp_path):
    """All of its parameters share a table of values, which is written once."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def make():
        model = nn.Linear(128, 64)
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01)
        scheduler = get_scheduler("linear", optimizer, 0, 10)
        return TrainState(Accelerator(), model, optimizer, scheduler)

    def train_linear(training):
        training.model(torch.ones(2, 128)).square().mean().backward()
        training.stateful["optimizer"].step()
        training.stateful["optimizer"].zero_grad()

    straight, other = make(), make()
    train_linear(straight)
    straight.rank_state(0, {}).write(tmp_path)
    other.read(tmp_path)
    for training in (straight, other):
        train_linear(training)
    assert digest(other.model.state_dict()) == digest(straight.model.state_dict())


def test_a_loss_scaler_comes_back(tmp_path):
    one, other = make_training(), make_training()
    for training, scale in ((one, 128.0), (other, 64.0)):
        training.stateful["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
        training.stateful["scaler"].scale(torch.ones(()))
    one.rank_state(0, {}).write(tmp_path)
    other.read(tmp_path)
    assert other.stateful["scaler"].get_scale() == 128.0


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    training = make_training("gpt2")
    training.rank_state(0, {}).write(tmp_path)
    parameters = sum(parameter.nbytes for parameter in training.model.parameters())
    assert parameters <= (tmp_path / "model-0.safetensors").stat().st_size < parameters + 4096
    other = make_training("gpt2", seed=1)
    other.read(tmp_path)
    assert other.model.lm_head.weight is other.model.transformer.wte.weight


def test_frozen_weights_are_not_written_but_have_to_be_the_same(tmp_path):
    training = make_training("adapted")
    train(training, 1)
    training.rank_state(0, {}).write(tmp_path)
    assert (tmp_path / "model-0.safetensors").stat().st_size < 2048
    other = make_training("adapted", seed=1)
    with torch.no_grad():
        next(parameter for parameter in other.model.parameters() if not parameter.requires_grad)[0] += 1
    with pytest.raises(InputError, match="the frozen weights are others than those it was trained with"):
        other.read(tmp_path)


@pytest.mark.parametrize(
    ("model", "optimizer"), [("gpt2", "adamw"), ("convolutional", "sgd"), ("convolutional", "adafactor")]
)
def test_another_model_or_optimizer_is_refused_in_one_line(tmp_path, model, optimizer):
    training = make_training("convolutional", "adamw")
    train(training, 1)
    training.rank_state(0, {}).write(tmp_path)
    with pytest.raises(InputError, match=r"does not fit this run .*: give the flags that it was started with") as error:
        make_training(model, optimizer).read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_of_other_sizes_is_refused_in_one_line(tmp_path):
    make_training().rank_state(0, {}).write(tmp_path)
    training = make_training()
    training.model[0] = nn.Conv2d(3, 5, 3)
    with pytest.raises(InputError, match="size mismatch") as error:
        training.read(tmp_path)
    assert "\n" not in str(error.value)


def test_the_record_comes_back_as_it_was(tmp_path):
    record = {"best": float("inf"), "clock": {"seconds": 0.1 + 0.2}, "runs": {"wandb": "x1"}, "order": (1, [2, None])}
    make_training().rank_state(0, record).write(tmp_path)
    assert read_record(tmp_path, set(record)) == record


@contextmanager
def files_of_at_most(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 3000, 12_000])
def test_a_full_disk_in_the_middle_of_any_file(tmp_path, limit):
    """The limit strikes in Python's own files, in the model's, in the optimizer's."""
    training, folder = make_training("gpt2"), tmp_path / "checkpoints"
    train(training, 1)
    samples = SampleOrder(num_samples=4, global_batch_size=4, seed=1)
    checkpoints = Checkpoints(Accelerator(), folder, training, order=samples, layout=BatchLayout.of(4, 4, 1))
    checkpoints.save(1, {})
    with files_of_at_most(limit), pytest.raises(InputError, match=r"step-2 cannot be written .* file too large"):
        checkpoints.save(2, {})
    assert os.listdir(folder) == ["step-1"]
    verify_manifest(folder / "step-1")
