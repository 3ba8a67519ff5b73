"""The page of compiled layers: that of its figures, of all types, within what a fused layer needs."""

import json

from triton_kernels.models import model_of_types
from triton_kernels.page import RESULTS, page_of

FIGURES = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_figures():
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page_of(FIGURES)
    assert {kind: row["model"] for kind, row in FIGURES["rows"].items()} == {
        kind: model.name for kind, model in model_of_types().items()
    }


def test_no_kernel_spills_and_layers_take_few_graphs():
    """Layers with and without a sliding window have a graph each."""
    for kind, row in FIGURES["rows"].items():
        for layer in row["layers"]:
            assert all(code["spilled_bytes"] == 0 for code in layer["machine_code"].values()), kind
            assert layer["graphs"]["forward"] == layer["graphs"]["backward"] <= 2, kind


def test_a_layer_of_gpt2_moves_what_a_fused_one_has_to():
    """Eager, 930 bytes of an element: benchmarks/mfu.py."""
    (layer,) = FIGURES["rows"]["gpt2"]["layers"]
    moved = sum(layer[name]["read"] + layer[name]["written"] for name in ("forward", "backward"))
    assert 100 < moved <= 175
