"""Layers that are alike are traced once, and no byte of the chain is another one than that of a trace of all layers."""

from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    ResNetConfig,
    ViTConfig,
)
from workloads import estimate_on_target

from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.costs import estimate
from memsave_recipes.core.costs.block_costs import Workload, kinds_of
from memsave_recipes.core.costs.estimate import Estimator, fake_batch, fake_model
from memsave_recipes.core.costs.repeats import Repeats, find_repeats
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.core.plans.simulate import keep_all, simulate
from memsave_recipes.core.plans.solver import smallest_feasible, solve
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss

TARGET = find_target("rtx4090")
OFFLOADING = [action for action in Action if action.kind.on_host]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
LLAMA = LlamaConfig(num_hidden_layers=9, vocab_size=512, **HEADS)
SHORT_LLAMA = LlamaConfig(num_hidden_layers=3, vocab_size=64, **HEADS)
GPT2 = GPT2Config(n_layer=9, n_embd=64, n_head=4, vocab_size=512, n_positions=128)
GEMMA3 = Gemma3TextConfig(num_hidden_layers=20, vocab_size=512, head_dim=16, sliding_window=32, pad_token_id=0, **HEADS)
VIT = ViTConfig(num_hidden_layers=9, hidden_size=64, intermediate_size=128, num_attention_heads=4, image_size=64)
RESNET = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 7], layer_type="basic")


def language_model(config, adapters=False):
    def build():
        model = AutoModelForCausalLM.from_config(deepcopy(config)).train()  # tests set entries
        add_lora(model, LoraArguments(lora=adapters), task_type="CAUSAL_LM")
        return model

    return fake_model(build)


def workload(config, size=2, length=128, adapters=False):
    if config in (VIT, RESNET):
        model = fake_model(lambda: AutoModelForImageClassification.from_config(config).train())
        batch = fake_batch(model, {"pixel_values": torch.empty(size, 3, 64, 64)})
        return of(model, lambda: model(**batch).logits.float().sum(), batch)
    model = language_model(config, adapters)
    tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
    batch = fake_batch(model, {"input_ids": tokens, "labels": tokens, "position_ids": tokens})
    trained = CausalLMLoss(model, "full")
    return of(model, lambda: trained(**batch), batch)


def of(model, forward, batch):
    stacks = block_names(find_stacks(model))
    return Workload(model=model, forward=forward, batch=list(batch.values()), device=torch.device("cpu"), stacks=stacks)


def plans_for(workload, strategies=("none", "selective", "offload", "full_offload")):
    return [plan_for(strategy, workload.stacks) for strategy in strategies]


STRATEGIES = {"cuda": ("none", "selective", "offload", "full_offload"), "cpu": ("none", "selective")}


def repeats_of(workload, plans):
    return find_repeats(workload, plans, partial(kinds_of, workload.model))


def bytes_of(chain):
    """All figures of a chain but its seconds."""
    blocks = [replace(b, forward_s=0, backward_s=0, options=tuple(map(untimed, b.options))) for b in chain.blocks]
    return replace(chain, blocks=tuple(blocks))


def untimed(option):
    return replace(option, added_s=0.0)


def seconds_of(chain):
    blocks = [asdict(block) for block in chain.blocks]
    return [
        second
        for block in blocks
        for second in (block["forward_s"], block["backward_s"], *(one["added_s"] for one in block["options"]))
    ]


CASES = {  # the configuration, options of ``workload``, and how many layers are left out
    "Llama": (LLAMA, {}, 3),
    "ResNet, one stage of seven": (RESNET, {}, 1),
}


SLOW_CASES = {
    "GPT-2": (GPT2, {}, 3),
    "ViT": (VIT, {}, 3),
    "Llama with adapters": (LLAMA, {"adapters": True}, 3),
    "Gemma-3, local and global layers": (GEMMA3, {}, 8),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_no_byte_changes(case, monkeypatch):
    config, options, num_left_out = (CASES | SLOW_CASES)[case]
    short, whole = workload(config, **options), workload(config, **options)
    plans = plans_for(short)
    assert len(repeats_of(short, plans).like) == num_left_out
    some = estimate_on_target(short, plans, TARGET, autocast_dtype=torch.bfloat16)
    monkeypatch.setattr(estimate, "find_repeats", lambda workload, plans, kinds: Repeats(()))
    every = estimate_on_target(whole, plans, TARGET, autocast_dtype=torch.bfloat16)
    assert some.running == every.running
    for offload in ((), OFFLOADING[1:], OFFLOADING):
        found, expected = some.chain(offload=offload), every.chain(offload=offload)
        assert bytes_of(found) == bytes_of(expected)
        assert seconds_of(found) == pytest.approx(seconds_of(expected), rel=1e-7, abs=1e-13)
        least = smallest_feasible(expected)
        assert smallest_feasible(found) == least
        for plan in (keep_all(expected), solve(expected, least), solve(expected, int(1.2 * least))):
            assert simulate(found, plan).peak == simulate(expected, plan).peak


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, VIT])
def test_no_byte_changes_where_layers_are_compiled(config, monkeypatch):
    chains = []
    for find in (find_repeats, lambda workload, plans, kinds: Repeats(())):
        monkeypatch.setattr(estimate, "find_repeats", find)
        load = workload(config)
        plans = [plan_for(one, load.stacks).on_compiled_layers() for one in ("none", "compiled:0.5")]
        chains.append(estimate_on_target(load, plans, TARGET, autocast_dtype=torch.bfloat16).chain(saves_part=True))
    assert bytes_of(chains[0]) == bytes_of(chains[1])
    assert seconds_of(chains[0]) == pytest.approx(seconds_of(chains[1]), rel=1e-7, abs=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["rtx4090", "cpu"])
def test_an_estimator_that_knows_other_micro_batches_finds_the_same(word):
    target = find_target(word)

    def estimates(model):
        trained = CausalLMLoss(model, "full")
        estimator = Estimator(model, target, torch.bfloat16)
        for size in (1, 2):
            tokens = torch.empty(size, 32, dtype=torch.int64, device="meta")
            batch = fake_batch(model, {"input_ids": tokens, "labels": tokens, "position_ids": tokens})
            load = of(model, lambda batch=batch: trained(**batch), batch)
            plans = plans_for(load, STRATEGIES[target.device.type])
            alone = estimate_on_target(load, plans, target, autocast_dtype=torch.bfloat16).chain()
            yield estimator.estimate(load, plans).chain(), estimator.estimate(load, plans).chain(), alone

    for found, again, alone in estimates(language_model(SHORT_LLAMA)):
        assert found == again == alone


def test_the_model_is_left_as_it_was():
    load = workload(LLAMA)
    before = [(vars(module).get("forward"), len(module._forward_hooks)) for module in load.model.modules()]
    estimate_on_target(load, plans_for(load), TARGET)
    assert [(vars(m).get("forward"), len(m._forward_hooks)) for m in load.model.modules()] == before


def left_out_of(config, change):
    model = language_model(config)
    change(model)
    load = of(model, lambda: None, {})
    return list(repeats_of(load, plans_for(load, ["none"])).like)


def test_neighbours_of_one_kind_are_left_out_of_a_period_too():
    local_layers, periods = [3, 8, 9], [12, 13, 14, 15, 16, 17]  # layers 5, 11 and 17 are global
    names = left_out_of(GEMMA3, lambda model: None)
    assert names == [f"model.layers.{number}" for number in local_layers + periods]


def set_dropout(model):
    model.model.layers[4].self_attn.attention_dropout = 0.5


def freeze(model):
    model.model.layers[4].requires_grad_(False)


def widen(model):
    model.model.layers[4].mlp = nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64))


def tie(model):
    model.model.layers[4].mlp = model.model.layers[3].mlp


def set_entry(model):
    model.config.layer_kinds = ["a"] * 4 + ["b"] + ["a"] * 4


@pytest.mark.parametrize("change", [set_dropout, freeze, widen, tie, set_entry])
def test_a_layer_that_is_unlike_the_others_is_traced(change):
    assert len(left_out_of(LLAMA, lambda model: None)) == 4
    assert left_out_of(LLAMA, change) == []


@pytest.mark.parametrize("strategy", ["full", "every:2", "segments:2"])
def test_a_plan_that_recomputes_is_not_taken_for_one_that_keeps(strategy):
    load = workload(LLAMA)
    plan = plan_for(strategy, load.stacks)
    with pytest.raises(ValueError, match=f"plan is {strategy}"):
        repeats_of(load, [plan]).shorten_plan(plan)


def test_a_shortened_plan_has_the_action_of_the_whole_one():
    load = workload(LLAMA)
    for plan in plans_for(load, ("none", "selective", "full_offload", "nested:9")):
        shortened = repeats_of(load, [plan]).shorten_plan(plan)
        assert 0 < len(shortened.blocks) < len(plan.blocks)
        assert {span.action for span in shortened.spans} == {span.action for span in plan.spans}


class BetweenLayers(nn.Module):
    """Its forward does something between two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(9))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * 2
        return x


def test_where_the_model_does_something_between_layers_all_are_traced():
    model = fake_model(BetweenLayers)
    batch = fake_batch(model, {"x": torch.empty(4, 32)})
    load = of(model, lambda: model(**batch).sum(), batch)
    plans = plans_for(load, ["none"])
    assert repeats_of(load, plans).periods
    chain = estimate_on_target(load, plans, TARGET).chain()
    assert chain.decided_names == tuple(name for names in load.stacks for name in names)
