"""Muon with AdamW as one optimizer: what each of them steps, and that it is what torch's own would do."""

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import AdamW, Muon
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from memsave_recipes.errors import InputError
from memsave_recipes.models.convnets import build_vgg
from memsave_recipes.planner.budget import static_memory_of
from memsave_recipes.profiling.trace_events import DeviceInstruments
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler, parameters_by_optimizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MUON = OptimizerArguments(optimizer="muon", learning_rate=1e-3, weight_decay=0.1)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_layer=2, n_head=2, n_embd=32, n_positions=16))


def llama(*, tied):
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **SMALL))


def bert():
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **SMALL))


def vit():
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL))


def names_of(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in parameters_by_optimizer("muon", model)[optimizer]}


@pytest.mark.parametrize(
    "model", [gpt2(), llama(tied=True), llama(tied=False), bert(), vit()], ids=lambda model: model.config.model_type
)
def test_muon_takes_the_matrices_of_hidden_layers(model):
    """By the parameters' names; a pooler is inside the body."""
    named = dict(model.named_parameters())
    others = ("embed", "wte", "wpe", "lm_head", "classifier", "norm", "ln_")
    expected = {name for name, p in named.items() if p.ndim == 2 and not any(word in name for word in others)}
    assert len(expected) >= 8
    assert names_of(model, "muon") == expected
    assert names_of(model, "adamw") == named.keys() - expected


def test_of_a_vgg_the_hidden_linear_layers():
    named = dict(build_vgg("vgg_small", num_classes=4).named_parameters())
    linear = [name for name, parameter in named.items() if parameter.ndim == 2]
    assert names_of(build_vgg("vgg_small", num_classes=4), "muon") == set(linear[:-1])


def test_adapters_are_matrices_of_hidden_layers():
    model = get_peft_model(llama(tied=False), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert len(names_of(model, "muon")) == 2 * 2 * 2
    assert names_of(model, "adamw") == set()
    optimizer = make_optimizer(MUON, model)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()


def test_a_model_without_such_matrices_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(InputError, match=r"--optimizer muon is for matrices of hidden linear layers.*take adamw"):
        make_optimizer(MUON, model)


def train(model, optimizers, schedulers, *, num_steps=4):
    random = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens = torch.randint(0, 50, (2, 8), generator=random)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for stepped in (*optimizers, *schedulers):
            stepped.step()
        model.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_weights_are_those_of_torchs_two_optimizers():
    """Bit for bit, with a schedule, weight decay, and state that has been loaded."""
    torch.manual_seed(0)
    one, two = llama(tied=True), llama(tied=True)
    two.load_state_dict(one.state_dict())
    optim = OptimizerArguments(**{**vars(MUON), "warmup_steps": 2})
    joint = make_optimizer(optim, one)
    joint.load_state_dict(joint.state_dict())  # as Accelerate does; it makes the groups anew
    shares = parameters_by_optimizer("muon", two)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    muon = Muon(shares["muon"], **options, adjust_lr_fn="match_rms_adamw")
    apart = [muon, AdamW(shares["adamw"], **options, fused=True)]
    results = [
        train(model, optimizers, [make_scheduler(optim, optimizer, 4) for optimizer in optimizers])
        for model, optimizers in ((one, [joint]), (two, apart))
    ]
    assert all(map(torch.equal, *results))


def peak_bytes(call):
    def step(meter):
        call()
        meter.mark()

    return DeviceInstruments(torch.device("cpu")).read_memory(step)[-1].peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("widths", [(512, 512, 3), (64, 700, 9), (3, 2000, 1)])
def test_its_memory_is_predicted(widths, dtype):
    """The state to the byte, the temporaries of an update never low."""
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).to(dtype)
    optimizer = make_optimizer(MUON, model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    static = static_memory_of(MUON, model, BatchLayout.of(1, 1, 1))
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert static.state_bytes == sum(tensor.nbytes for tensor in state)
    update = peak_bytes(optimizer.step)
    assert update <= static.optimizer_bytes <= 1.5 * update + torch.get_num_threads() * 2**18
