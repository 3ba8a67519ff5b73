"""The page of compiled layers: that of its figures, of all models, within what a fused layer needs."""

import json
import re
from pathlib import Path

from triton_kernels.models import compiled_models
from triton_kernels.page import CLASSES, LOSS, PASSES, RESULTS, page_of, spills_of

FIGURES = json.loads(RESULTS.read_text(encoding="utf-8"))
LAYERS = [
    (compiled_models()[name].config["model_type"], layer) for name, rows in FIGURES["rows"].items() for layer in rows
]
GRAPHS = {"swin": 3}
SPILLED_BYTES = {
    **{("llama", "sm_80"): 1396, ("llama", "sm_90"): 1476, ("qwen2", "sm_80"): 1396, ("qwen2", "sm_90"): 1476},
    **{("mistral", "sm_80"): 760, ("qwen3", "sm_80"): 760, ("olmo2", "sm_80"): 500},
}
"""The most of a class in a layer: reductions hold 4,096 or 8,192 numbers. Inductor wrote the kernels for an H100."""
ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_figures():
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page_of(FIGURES)
    assert list(FIGURES["rows"]) == list(compiled_models())


def test_kernels_keep_to_registers_and_layers_take_few_graphs():
    """Layers with and without a sliding or a shifted window have a graph each; Swin's first holds its rate of drops."""
    for kind, layer in LAYERS:
        for architecture, classes in layer["machine_code"].items():
            most = SPILLED_BYTES.get((kind, architecture), 0)
            assert all(code["spilled_bytes"] <= most for code in classes.values()), kind
        assert layer["graphs"]["forward"] == layer["graphs"]["backward"] <= GRAPHS.get(kind, 2), kind


def test_classes_are_all_kernels():
    """Each graph's add up to all of it, and each has a column."""
    graphs = [layer[name] for _, layer in LAYERS for name in PASSES] + FIGURES[LOSS]
    for graph in graphs:
        classes = graph["classes"]
        assert set(classes) <= set(CLASSES)
        assert sum(one["kernels"] for one in classes.values()) == graph["kernels"]
        assert abs(sum(one["bytes"] for one in classes.values()) - graph["read"] - graph["written"]) < 0.03  # rounded


def test_the_page_names_the_layers_that_spill():
    def row(**spilled):
        return {"machine_code": {name: {"reduction": {"spilled_bytes": number}} for name, number in spilled.items()}}

    layers = [{"width": 8, **row(sm_80=4, sm_90=0)}, {"width": 16, **row(sm_80=0, sm_90=0)}]
    figures = {
        "rows": {"Model": layers},
        LOSS: [{"words": 1000, **row(sm_80=12, sm_90=0)}],
    }
    assert spills_of(figures) == (
        "On sm_80 kernels spill in Model of width 8 (4 bytes), the loss of 1,000 words (12 bytes). "
        "On sm_90 no kernel spills."
    )


def test_nothing_else_is_compiled():
    """The page has a row for each layer and for the loss, and says why optimizers have none."""
    of_planner = "core/costs/compiled_layers.py"  # runs on fake tensors
    found = {
        path.relative_to(ROOT / "memsave_recipes").as_posix()
        for path in (ROOT / "memsave_recipes").rglob("*.py")
        if re.search(r"torch\.compile\(|import triton", path.read_text(encoding="utf-8"))
    }
    assert found == {"core/activations/compiled.py", "core/losses.py", of_planner}


def test_a_layer_of_gpt2_moves_what_a_fused_one_has_to():
    """Eager, 930 bytes of an element: benchmarks/mfu.py."""
    (layer,) = FIGURES["rows"]["GPT-2"]
    moved = sum(layer[name]["read"] + layer[name]["written"] for name in PASSES)
    assert 100 < moved <= 175
