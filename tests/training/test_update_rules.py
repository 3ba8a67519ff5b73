"""Muon with AdamW as one optimizer, and AdamW on bfloat16 weights with stochastic rounding."""

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
from workloads import peak_bytes

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import static_memory_of
from memsave_recipes.core.plans.chain import CPU
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.memory import (
    MOST_PACKED,
    NUMBER_BYTES,
    NUMBERS,
    TRANSPOSING,
    decay_groups,
    onednn_multiplies_bfloat16,
    parameters_by_optimizer,
    update_bytes,
)
from memsave_recipes.models.convnets import build_vgg
from memsave_recipes.training.arguments import OptimizerArguments, RecipeArguments
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler
from memsave_recipes.training.update_rules import StochasticAdamW, round_stochastically_

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
    with pytest.raises(InputError, match=r"optimizer muon is for matrices of hidden linear layers.*take adamw"):
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
    apart = [muon, AdamW(decay_groups(optim, two, shares["adamw"]), **options, fused=True)]
    results = [
        train(model, optimizers, [make_scheduler(optim, optimizer, 4) for optimizer in optimizers])
        for model, optimizers in ((one, [joint]), (two, apart))
    ]
    assert all(map(torch.equal, *results))


@pytest.fixture
def num_threads():
    """Sets how many torch has, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("widths", [(256, 256, 3), (64, 700, 9), (3, 2000, 1), (24, 8000, 1), (4000, 33, 2)])
def test_its_memory_is_predicted(num_threads, widths, dtype, threads):
    """The state to the byte, the temporaries of an update never low; by a tile too high where torch multiplies, and
    where oneDNN does by 2 MiB a thread.
    """
    num_threads(threads)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).to(dtype)
    optimizer = make_optimizer(MUON, model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    static = static_memory_of(MUON, model, BatchLayout.of(1, 1, 1))
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert static.state_bytes == sum(tensor.nbytes for tensor in state)
    update = peak_bytes(optimizer.step)
    by_onednn = 2 * update + threads * MOST_PACKED[0]
    most = by_onednn if onednn_multiplies_bfloat16() else update + NUMBERS * NUMBER_BYTES + TRANSPOSING
    assert update <= static.optimizer_bytes <= most


WIDE = 2**15


def stochastic(parameters, **options):
    return StochasticAdamW(parameters, **{"lr": 1e-3, "weight_decay": 0.1, "seed": 0, **options})


def rounded(value, *, seed=0):
    """``value`` in bfloat16, many times."""
    numbers = torch.full((WIDE,), value)
    round_stochastically_(numbers, bits(seed))
    return numbers


def bits(seed=0):
    return torch.randint(2**16, (WIDE,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 3e-39, -7e20])
def test_rounding_is_unbiased(value):
    """To one of the two neighbours, in the mean of 32,768 draws within 5 standard errors."""
    found = rounded(value)
    assert torch.equal(found, found.to(torch.bfloat16).float())
    low, high = found.min().item(), found.max().item()
    assert low < torch.tensor(value).item() < high
    assert found.unique().numel() == 2
    assert abs(found.double().mean().item() - torch.tensor(value).item()) < 5 * 0.5 * (high - low) / WIDE**0.5


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan")])
def test_what_bfloat16_has_stays(value):
    expected = torch.full((WIDE,), value)
    assert torch.equal(rounded(value).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32)  # all of it in the bits that are cut off
    numbers = nans.repeat(WIDE // 2).view(torch.float32)
    round_stochastically_(numbers, bits())
    assert not numbers.isfinite().any()


def drift(optimizer_of, *, num_steps=20):
    """By how much weights of 1 in bfloat16 fall in the mean, under a gradient of 1."""
    weight = nn.Parameter(torch.ones(WIDE, dtype=torch.bfloat16))
    optimizer = optimizer_of([weight])
    for _ in range(num_steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return 1 - weight.double().mean().item()


def test_a_small_update_counts_on_average():
    """20 steps of 1e-4, a fortieth of what bfloat16 tells apart there: all lost when rounded to nearest."""
    assert drift(lambda weights: AdamW(weights, lr=1e-4, weight_decay=0.0)) == 0
    assert drift(lambda weights: stochastic(weights, lr=1e-4, weight_decay=0.0)) == pytest.approx(20e-4, rel=0.1)


def test_a_second_moment_falls_on_average():
    """By a 1000th a step, which bfloat16 does not tell apart."""
    weight = nn.Parameter(torch.ones(WIDE, dtype=torch.bfloat16))
    optimizer = stochastic([weight])
    for gradient in (1.0, *(0.0,) * 50):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == pytest.approx(1e-3 * 0.999**50, rel=0.01)


def test_float32_weights_are_updated_as_by_adamw():
    """In slices, of any number of dimensions and in any order of memory."""
    torch.manual_seed(0)
    shapes = [(), (5,), (3, 2**18), (600, 1000), (4, 3, 8, 8)]
    ones = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    ones[-1].data = ones[-1].data.to(memory_format=torch.channels_last)
    others = [nn.Parameter(one.detach().clone()) for one in ones]
    optimizers = [stochastic(ones), AdamW(others, lr=1e-3, weight_decay=0.1)]
    for _ in range(3):
        for one, other in zip(ones, others, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other)


STOCHASTIC = OptimizerArguments(optimizer="adamw_bf16", learning_rate=1e-3, weight_decay=0.1)


def weights_after(optim, *, seed=0):
    torch.manual_seed(0)
    model = llama(tied=True).to(torch.bfloat16)
    optimizer = make_optimizer(optim, model, seed=seed)
    optimizer.load_state_dict(optimizer.state_dict())
    return train(model, [optimizer], [])


def test_the_random_bits_are_those_of_seed_step_and_parameter():
    """The same weights again, also when stepped in the backward; others with another seed."""
    straight = weights_after(STOCHASTIC)
    in_backward = OptimizerArguments(**{**vars(STOCHASTIC), "optimizer_in_backward": True, "max_grad_norm": 0.0})
    assert all(map(torch.equal, weights_after(in_backward), straight))
    assert not all(map(torch.equal, weights_after(STOCHASTIC, seed=1), straight))
    ones = [nn.Parameter(torch.ones(WIDE, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = stochastic(ones)
    for one in ones:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert not torch.equal(*ones)


def on_a_rank(accelerator):
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, make_optimizer(STOCHASTIC, model))
    for step in range(3):
        torch.manual_seed(100 * accelerator.process_index + step)
        model(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.detach()
    assert not torch.equal(weight, before)
    return weight.float().tolist()


def test_ranks_round_alike(run_on_ranks):
    one, other = run_on_ranks(on_a_rank, 2)
    assert one == other


@pytest.mark.parametrize("shape", [(1000, 600), (7,), (2, 3, 5)])
def test_stochastic_rounding_takes_a_slice(shape):
    model = nn.ParameterList([nn.Parameter(torch.randn(shape).to(torch.bfloat16))])
    optimizer = make_optimizer(STOCHASTIC, model)
    model[0].grad = torch.randn_like(model[0])
    optimizer.step()
    static = static_memory_of(STOCHASTIC, model, BatchLayout.of(1, 1, 1))
    assert static.state_bytes == 4 * model[0].numel()
    update = peak_bytes(optimizer.step)
    assert update <= update_bytes("adamw_bf16", model, CPU) <= 1.05 * update + 100


def bits_of(tensors):
    return [tensor.detach().reshape(-1).view(torch.uint8).clone() for tensor in tensors]


def test_other_optimizers_and_other_dtypes_are_refused():
    with pytest.raises(InputError, match=r"--optimizer adamw_bf16 .*float32: add --dtype bfloat16"):
        RecipeArguments(output_dir="x", optimizer="adamw_bf16")
