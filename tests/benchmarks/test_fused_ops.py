"""The benchmark: what it wrote of a model, or of a network without equal layers, is what it counts today."""

import json
from pathlib import Path

import pytest
from samples import sample

RESULTS = json.loads((Path(__file__).parents[2] / "docs/results/fused_ops.json").read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("fused_ops", ["none", "auto"])
@pytest.mark.parametrize("name", sample(["GPT-2"], ["GPT-2", "SmolLM2 135M", "VGG16"]))
def test_a_row_is_what_is_counted(load, name, fused_ops):
    benchmark = load("fused_ops")
    (model,) = (one for one in benchmark.MODELS if one.name == name)
    assert benchmark.of_a_layer(model, fused_ops) == RESULTS[name][fused_ops]


def test_fused_operators_never_move_more(load):
    assert len(RESULTS) == len(load("fused_ops").MODELS)
    for row in RESULTS.values():
        less = row["auto"]["bytes"] < row["none"]["bytes"]
        assert less if row["auto"]["fused"] else row["auto"]["bytes"] == row["none"]["bytes"]
