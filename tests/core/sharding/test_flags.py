"""``--shard`` beside flags that need whole weights ends in one line that names both."""

from dataclasses import dataclass

import pytest
import torch

from memsave_recipes.core.errors import InputError
from memsave_recipes.models import adapters
from memsave_recipes.models.what_trains import TrainedPartArguments
from memsave_recipes.training.arguments import RecipeArguments


@dataclass(kw_only=True)
class WithAdapters(RecipeArguments, TrainedPartArguments):
    """The flags of a recipe for text."""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"shard": "1"}, "--shard 1: must be none, full, or how many ranks share the weights, from 2"),
        ({"shard": "half"}, "--shard half: must be none, full"),
        ({"optimizer": "adafactor"}, "--shard full: --optimizer adafactor has means over whole rows"),
        ({"optimizer_in_backward": True}, "--shard full: --optimizer_in_backward steps on gradients before"),
        ({"bitwise_topology": True, "micro_batch_size": 2}, "--shard full: --bitwise_topology adds up whole gradients"),
        ({"batchnorm": "global"}, "--shard full: --batchnorm global joins the micro-batches"),
        ({"batchnorm": "sync"}, "--shard full: --batchnorm sync has not been tried with it: leave one of them out"),
    ],
)
def test_flags_that_need_whole_weights_are_refused(flags, line):
    with pytest.raises(InputError) as refused:
        RecipeArguments(output_dir="run", **{"shard": "full", **flags})
    assert refused.value.one_line.startswith(line)
    RecipeArguments(output_dir="run", **{**flags, "shard": "none"})


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adamw_8bit"])
def test_optimizers_that_step_shards(name):
    RecipeArguments(output_dir="run", shard="full", optimizer=name)
    RecipeArguments(output_dir="run", shard="full", optimizer="adamw_bf16", dtype="bfloat16")


@pytest.mark.parametrize(
    ("flag", "value", "line"),
    [
        ("lora_entries", {"use_dora": True}, "--shard 2: use_dora of --lora_config measures the rows of whole weights"),
        (
            "stream_weights",
            "host",
            "--shard 2: --stream_weights keeps whole weights on the host: leave one of them out",
        ),
        ("load_in_4bit", True, "--shard 2: --load_in_4bit packs whole weights: leave one of them out"),
    ],
)
def test_what_is_done_to_whole_frozen_weights_is_refused(monkeypatch, flag, value, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(adapters, "find_spec", lambda name: name)
    with pytest.raises(InputError) as refused:
        WithAdapters(output_dir="run", shard="2", lora=True, **{flag: value})
    assert refused.value.one_line.startswith(line)
    WithAdapters(output_dir="run", lora=True, **{flag: value})


def test_both_ways_to_reduce_gradients_are_open_to_a_search_alone():
    budget = {"activation_checkpointing": "budget", "memory_budget_gib": 1}
    ways = {
        (False,): [{}, {"reduces_once": False}, {**budget, "reduces_once": False}],
        (True,): [{"reduces_once": True}, {**budget, "reduces_once": True}],
        (False, True): [budget, {"micro_batch_size": "auto"}],
    }
    for reductions, flags in ways.items():
        for one in flags:
            assert RecipeArguments(output_dir="run", shard="full", **one).reductions == reductions
    assert RecipeArguments(output_dir="run", **budget).reductions == (False,)
