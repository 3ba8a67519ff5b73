"""Counts of a step by classes of kernels: FLOPs and bytes by hand, on two layers, one of which ``half`` runs again."""

import json
from dataclasses import replace

import pytest

WIDTH, WORDS, TOKENS, LAYERS = 768, 8192, 1024, 2


@pytest.fixture(scope="module")
def counted(load):
    mfu = load("mfu")
    sizes = (("n_layer", LAYERS), ("vocab_size", WORDS), ("activation_function", "gelu_pytorch_tanh"))
    work = replace(mfu.WORKS[0], samples=1, micro_batches=2, config=sizes)
    layers = json.loads(mfu.TRITON.read_text(encoding="utf-8"))["rows"]
    rows = mfu.rows_of(work, mfu.find_target(mfu.CARD).calibrated, layers)
    return mfu, layers["gpt2"]["layers"][0], {row["plan"]: row for row in rows}


def test_products_are_those_of_the_formula(counted):
    mfu, _, rows = counted
    of_layer, of_head = 12 * WIDTH**2, WIDTH * WORDS
    for plan in ("none", "compiled"):
        assert rows[plan]["classes"]["products"][mfu.FLOPS] == 3 * 2 * TOKENS * (LAYERS * of_layer + of_head)
    forward_again = rows["half"]["classes"]["products"][mfu.FLOPS] - rows["none"]["classes"]["products"][mfu.FLOPS]
    assert forward_again == 2 * TOKENS * 8 * WIDTH**2  # it ends before the last product, which nobody saves


def test_a_compiled_layer_moves_what_the_compiler_says(counted):
    mfu, layer, rows = counted
    moved = {plan: sum(rows[plan]["classes"][name][mfu.BYTES] for name in ("casts", "others")) for plan in rows}
    fused = (
        LAYERS * TOKENS * WIDTH * sum(layer[name]["read"] + layer[name]["written"] for name in ("forward", "backward"))
    )
    fused += LAYERS * layer["weights"] * sum(layer[name]["of_weights"] for name in ("forward", "backward"))
    assert fused < moved["compiled"] < moved["none"]
    assert rows["compiled"]["predicted_mfu_pct"] > rows["none"]["predicted_mfu_pct"] > 0


def test_every_figure_says_that_it_is_predicted(counted):
    mfu, _, rows = counted
    page = mfu.page_of(list(rows.values()), mfu.find_target(mfu.CARD).calibrated, {"torch": "0"})
    assert "Nothing here was measured" in page
    assert "**predicted**" in page
