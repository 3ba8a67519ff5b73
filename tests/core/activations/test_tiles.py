"""MLPs in tiles: the plain gradients within rounding, one gradient a weight, two forwards and no third."""

import copy
import os
from itertools import product

import pytest
import torch
from decoders import (
    MODELS,
    TOKENS,
    assert_float64_rounding,
    causal_model,
    layers_of,
    offloading_engine,
    record,
    without_dropout,
)
from peft import LoraConfig, get_peft_model
from samples import sample
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from workloads import CPU, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.activations.tiles import find_mlps
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import StaticMemory, forecast, least_memory, plans_to_measure
from memsave_recipes.core.plans import Action
from memsave_recipes.core.plans.chain import CUDA
from memsave_recipes.training.optimizers import step_in_backward

TILES = (1, 32, 64, 4096)
FAST = {*product(["llama"], TILES), *product(MODELS, [32])}


@pytest.fixture(params=["full_tiled:16", "full_tiled_offload:16"])
def strategy(request, monkeypatch):
    """Of layers as a whole and of sublayers, whose inputs move."""
    monkeypatch.setitem(RUN, Action.OFFLOAD, offloading_engine().run)
    return request.param


@pytest.mark.parametrize(("model_type", "tile"), sample(FAST, product(MODELS, TILES)))
def test_the_gradients_of_plain_in_float64(model_type, tile):
    model = causal_model(model_type, torch.float64)
    expected, generator = record(model)
    found, generator_after = record(model, f"full_tiled:{tile}")
    assert torch.equal(generator, generator_after)
    assert_float64_rounding(model_type, found, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_as_exact_as_plain(model_type, autocast, assert_three_way):
    implementation = "eager" if model_type == "gemma2" else "sdpa"
    model = without_dropout(causal_model(model_type, attn_implementation=implementation))  # float64 draws other numbers
    exact, _ = record(copy.deepcopy(model).double())
    plain, _ = record(model, autocast=autocast)
    tiled, _ = record(model, "full_tiled:32", autocast=autocast)
    if autocast:  # its rounding of activations is plain's, whose sums over the tokens are longer
        for name, gradient in plain.items():
            assert (tiled[name] - gradient).abs().max() <= 0.02 * gradient.abs().max(), name
    else:
        assert_three_way(tiled, plain, exact)


def test_weights_of_16_bits_are_summed_in_32(assert_three_way):
    model = causal_model("llama", torch.bfloat16)
    exact, _ = record(copy.deepcopy(model).double())
    plain, _ = record(model)
    tiled, _ = record(model, "full_tiled:4")
    assert_three_way(tiled, plain, exact, ulps=2)


def test_dropout_draws_the_numbers_of_plain():
    model = causal_model("gpt2", resid_pdrop=0.2)
    expected, generator = record(model)
    found, generator_after = record(model, "full_tiled:16")
    assert torch.equal(generator, generator_after)
    assert all(torch.allclose(found[name], gradient, atol=1e-6) for name, gradient in expected.items())


def calls_of_the_first_linear_layer(model, plan):
    mlp = find_mlps(layers_of(model)[0])[0].module
    linear = next(part for part in mlp.modules() if not any(part.children()))
    calls = []
    with apply_plan(model, plan_blocks(model, plan)):
        hook = linear.register_forward_hook(lambda *_: calls.append(1))
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        hook.remove()
    return len(calls)


@pytest.mark.parametrize(("model_type", "runs"), [("llama", 2), ("qwen3", 2), ("gemma2", 3), ("gpt2", 3)])
def test_a_layer_that_saves_nothing_behind_its_mlp_runs_that_twice(model_type, runs):
    assert calls_of_the_first_linear_layer(causal_model(model_type), "full") == 2
    assert calls_of_the_first_linear_layer(causal_model(model_type), "full_tiled:50") == runs * 2  # tiles


def test_the_hooks_of_a_weight_run_once(strategy):
    model = causal_model("llama")
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
        parameter.register_hook(lambda gradient: gradient * 2)
    found, _ = record(model, strategy)
    expected, _ = record(causal_model("llama"))
    assert sorted(seen) == sorted(map(id, model.parameters()))
    assert all(
        torch.allclose(found[name], 2 * gradient, atol=1e-6) for name, gradient in expected.items() if name != "loss"
    )


def test_the_optimizer_steps_in_the_backward(strategy):
    models = [causal_model("llama") for _ in range(2)]
    for model, plan in zip(models, ("none", strategy), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_in_backward(optimizer)
        with apply_plan(model, plan_blocks(model, plan)):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_adapters_and_frozen_weights(strategy):
    model = causal_model("llama", torch.float64)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["gate_proj", "down_proj", "q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected, _ = record(model)
    found, _ = record(model, strategy)
    assert len(expected) > 1
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], gradient, rtol=1e-9) for name, gradient in expected.items())


def test_it_is_put_back_and_copied(strategy):
    model = causal_model("gpt2").eval()
    logits = model(input_ids=TOKENS).logits
    with apply_plan(model, plan_blocks(model, strategy)):
        with torch.no_grad():
            assert torch.equal(model(input_ids=TOKENS).logits, logits)
        twin = copy.deepcopy(model)
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(input_ids=TOKENS).logits.any()
    assert torch.equal(model(input_ids=TOKENS).logits, logits)


# Which modules


@pytest.mark.parametrize("model_type", MODELS)
def test_the_mlp_of_each_layer_is_found(model_type):
    model = causal_model(model_type)
    for layer in layers_of(model):
        assert [mlp.module for mlp in find_mlps(layer)] == [layer.mlp]


def test_a_model_without_values_is_believed():
    with torch.device("meta"):
        model = causal_model("llama")
    assert all(find_mlps(layer) for layer in layers_of(model))


def test_a_module_without_values_is_tried_once_until_its_parts_change():
    tried = []
    with torch.device("meta"):
        layer = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))])
    layer[0].register_forward_hook(lambda *_: tried.append(1))
    assert find_mlps(layer)
    first = len(tried)
    assert find_mlps(layer)
    assert len(tried) == first > 0
    layer[0][1] = nn.GLU()  # halves what the last takes
    assert find_mlps(layer) == []
    layer[0][1] = nn.GELU()
    for parameter in layer.to_empty(device="cpu").parameters():
        nn.init.normal_(parameter)
    assert find_mlps(layer)
    assert len(tried) == first + 3


class Mixing(nn.Module):
    """Looks like an MLP, but a token sees the others."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)) - x.mean(1, keepdim=True).mean())


class AddsMean(Mixing):
    """Which is the token in the middle, where they are evenly spaced."""

    def forward(self, x):
        return self.down(self.act(self.up(x + x.mean(1, keepdim=True))))


class DropsInside(Mixing):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


def test_what_is_no_mlp_is_left_alone():
    experts = MixtralSparseMoeBlock(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    for module in (
        Mixing(),
        AddsMean(),
        DropsInside(),
        experts,
        nn.Linear(8, 8),
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(8, 8)),
    ):
        assert find_mlps(nn.ModuleList([module])) == []
    assert find_mlps(nn.ModuleList([DropsInside().eval()])) == []


def test_a_model_without_mlps_is_refused():
    model = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    with pytest.raises(InputError, match=r"strategy full_tiled: BertLayer has no MLP.*use full"):
        apply_plan(model, plan_blocks(model, "full_tiled"))


def test_an_mlp_that_is_called_with_more_is_refused():
    model = causal_model("llama")
    mlp = layers_of(model)[0].mlp
    with (
        apply_plan(model, plan_blocks(model, "full_tiled")),
        pytest.raises(InputError, match="LlamaMLP takes more than one tensor"),
    ):
        mlp(torch.zeros(1, 2, 32), torch.zeros(1))


# Plans


def work_on(model, num_tokens, device=CPU):
    batch = torch.randint(0, 64, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    return workload_of(model, lambda model, batch: model(input_ids=batch, labels=batch).loss, batch, device=device)


def strategies(strategy, num_tokens, model_type="llama", device=CPU):
    workload = work_on(causal_model(model_type), num_tokens, device)
    return [plan.strategy for plan in plans_to_measure(strategy, workload)]


def test_a_budget_has_tiles_where_a_batch_has_more_tokens_than_one():
    assert strategies("budget", 1024) == ["none", "selective"]
    assert strategies("budget", 1025) == ["none", "selective", "full_tiled"]
    assert strategies("budget:bitwise", 1025) == ["none", "selective"]
    on_device = ["none", "selective", "offload", "full_offload", "full_tiled"]
    assert strategies("budget", 8191, device=CUDA) == on_device
    assert strategies("budget", 8192, device=CUDA) == [*on_device, "full_tiled_offload"]


@pytest.fixture(scope="module")
def measured():
    model = causal_model("llama", max_position_embeddings=2048)
    workload = work_on(model, 2048)
    return workload, measure(workload, plans_to_measure("budget", workload))


def test_the_plan_of_least_memory_has_tiles_and_fits_where_it_was_predicted(measured):
    workload, measurement = measured
    static = StaticMemory()
    least = least_memory(measurement, static)
    assert least.plan.blocks_under(Action.RECOMPUTE_TILED)
    assert least.plan.mlp_tile_tokens == 1024
    found = forecast(measurement, least.peak.total_bytes + least.reserve_bytes, static)
    assert found.plan.blocks_under(Action.RECOMPUTE_TILED)
    optimizer = torch.optim.SGD(workload.model.parameters())
    with apply_plan(workload.model, found.plan), break_down_peak(workload.model, optimizer, CPU) as peak:
        workload.forward().backward()
    assert peak.breakdown is not None
    assert 0.95 * found.peak.total_bytes <= peak.breakdown.total_bytes <= found.peak.total_bytes


@pytest.mark.parametrize(("plan", "mib"), [("none", 116), ("full", 47), ("full_tiled:256", 31)])
def test_the_figures_of_the_documentation(plan, mib):
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=128, max_position_embeddings=2048, use_cache=False, **shape)
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 128, (1, 2048))

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with apply_plan(model, plan_blocks(model, plan)):
        step()
        with break_down_peak(model, optimizer, CPU) as peak:
            step()
    assert peak.breakdown is not None
    assert peak.breakdown.total_bytes / 2**20 == pytest.approx(mib, abs=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_on_a_gpu(model_type):
    if model_type == "gpt2" and "STANDIN" in os.environ:
        pytest.skip("the stand-in has no fused attention with dropout")
    model = causal_model(model_type, max_position_embeddings=2048).cuda()
    tokens = torch.randint(0, 64, (2, 2048), device="cuda")

    def step(plan):
        model.zero_grad()
        torch.manual_seed(7)
        torch.cuda.reset_peak_memory_stats()
        with apply_plan(model, plan_blocks(model, plan)):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        return (
            [p.grad.clone() for p in model.parameters()],
            torch.cuda.get_rng_state(),
            torch.cuda.max_memory_allocated(),
        )

    step("none")
    plain, generator, _ = step("full")
    tiled, generator_after, _ = step("full_tiled:256")
    assert torch.equal(generator, generator_after)
    for one, other in zip(tiled, plain, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()
    _, _, full_bytes = step("full")
    _, _, tiled_bytes = step("full_tiled:256")
    assert tiled_bytes < full_bytes
