"""The page of compiled layers: that of its figures, of all types, within what a fused layer needs."""

import json

from triton_kernels.models import MODELS, model_of_types
from triton_kernels.page import RESULTS, page_of

FIGURES = json.loads(RESULTS.read_text(encoding="utf-8"))
GRAPHS = {"swin": 3}
SPILLED_BYTES = {("swin", "sm_80"): 64}
"""Of kernels that inductor wrote for the larger card."""


def test_the_page_is_that_of_the_figures():
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page_of(FIGURES)
    assert {kind: row["model"] for kind, row in FIGURES["rows"].items()} == {
        kind: model.name for kind, model in model_of_types().items()
    }


def test_every_type_of_the_page_of_fit_is_compiled():
    """Networks of ``memsave`` have no configuration: their blocks are in sequence."""
    assert set(model_of_types()) == {model.config["model_type"] for model in MODELS if model.config}


def test_kernels_keep_to_registers_and_layers_take_few_graphs():
    """Layers with and without a sliding or a shifted window have a graph each; Swin's first holds its rate of drops."""
    for kind, row in FIGURES["rows"].items():
        for layer in row["layers"]:
            for architecture, code in layer["machine_code"].items():
                assert code["spilled_bytes"] <= SPILLED_BYTES.get((kind, architecture), 0), kind
            assert layer["graphs"]["forward"] == layer["graphs"]["backward"] <= GRAPHS.get(kind, 2), kind


def test_a_layer_of_gpt2_moves_what_a_fused_one_has_to():
    """Eager, 930 bytes of an element: benchmarks/mfu.py."""
    (layer,) = FIGURES["rows"]["gpt2"]["layers"]
    moved = sum(layer[name]["read"] + layer[name]["written"] for name in ("forward", "backward"))
    assert 100 < moved <= 175
