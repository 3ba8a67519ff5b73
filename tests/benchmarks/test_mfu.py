"""Counts of a step by classes of kernels: FLOPs and bytes by hand, on two layers, one of which ``half`` runs again."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[2]
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


def test_graphs_and_waits_are_those_that_were_counted(counted):
    _, _, rows = counted
    assert {plan: row["graphs"] for plan, row in rows.items()} == {"none": 0, "compiled": 1, "half": 0}
    assert rows["none"]["waits"] == rows["half"]["waits"] == 0
    assert "waits" not in rows["compiled"]  # nothing compiles where they are counted


def test_layers_that_are_not_alike_count_each(load):
    """The first layer of adapters has no gradient of its input, so its backward is another."""
    mfu = load("mfu")
    rates = mfu.find_target(mfu.CARD).calibrated
    nothing = mfu.OfEach([0.0] * 16)
    counts = {"by_plan": {"none": (nothing, nothing)}, "num_blocks": 4, "elements": 10}
    first, other = ({"weights": 5, "forward": of_pass(1), "backward": of_pass(read)} for read in (2, 3))
    (*_, kernels, num_bytes, _, _) = mfu.compiled(counts, [first, other], rates)
    assert (kernels, num_bytes) == (4 * 2, 10 * (4 * 1 + 2 + 3 * 3))


def of_pass(read):
    return {"kernels": 1, "read": read, "written": 0, "of_weights": 0}


def test_every_figure_says_that_it_is_predicted(counted):
    mfu, _, rows = counted
    page = mfu.page_of(list(rows.values()), mfu.find_target(mfu.CARD).calibrated, {"device": "CPU", "versions": {}})
    assert "Nothing here was measured" in page
    assert "**predicted**" in page


MEASURED = """
import json, sys
from dataclasses import replace
from functools import partial
import mfu
mfu.peer_figures = partial(mfu.peer_figures, compiler=lambda model: model)  # nothing compiles for the stand-in
mfu.torch.compiler.reset = lambda: None  # nor has it CUDA graphs
sizes = (("n_layer", 2), ("n_embd", 32), ("n_head", 2), ("vocab_size", 512))
work = replace(mfu.WORKS[0], flags="--block_size 32", samples=2, micro_batches=2, config=sizes)
images = replace(mfu.WORKS[-2], flags="--image_size 32", samples=2, micro_batches=2, config=(
    ("hidden_size", 16), ("intermediate_size", 32), ("num_hidden_layers", 2), ("num_attention_heads", 2),
    ("image_size", 32),
))
mfu.WORKS = (work, images)
mfu.harness.QUICK_RESULTS = mfu.Path(sys.argv[1])
mfu.main([])
"""


@pytest.mark.slow
def test_a_device_is_measured_beside_the_predictions(on_devices, tmp_path):
    """On the stand-in, which has no kernels to name and compiles nothing."""
    environment = on_devices()
    path = os.pathsep.join([environment["PYTHONPATH"], str(ROOT / "benchmarks")])
    subprocess.run([sys.executable, "-c", MEASURED, tmp_path], env={**environment, "PYTHONPATH": path}, check=True)
    rows = json.loads((tmp_path / "mfu-stand-in.json").read_text(encoding="utf-8"))["rows"]
    plans = ["none", "compiled", "half"]
    peers = ["torch.compile by hand", "build-nanogpt's model, compiled"]
    assert [row["plan"] for row in rows] == [*plans, *peers, *plans]
    none, compiled, half, *_ = rows
    assert "triton" in compiled["refused"]
    assert none["measured"]["peak_bytes"] > half["measured"]["peak_bytes"] > 0
    assert all(row["measured"]["step_s"] > 0 for row in rows if "refused" not in row)
    assert none["units"] == 4 * 32
    page = (tmp_path / "mfu-stand-in.md").read_text(encoding="utf-8")
    assert "no figure here is a GPU's" in page


def test_kernels_are_of_the_class_of_what_launched_them(load):
    """By the operators that torch's profiler names, a millisecond each."""
    figures = load("gpu_day.step_figures")
    hidden = torch.ones(2, 8, 16, requires_grad=True)
    with torch.profiler.profile() as profiler:
        product = torch.nn.functional.linear(hidden, torch.ones(16, 16))
        attended = torch.nn.functional.scaled_dot_product_attention(product[None], product[None], product[None])
        attended.to(torch.bfloat16).sin().sum().backward()
    events = profiler.events()
    innermost = {event.name: figures.class_of_launch(event) for event in events if not event.cpu_children}
    assert innermost["aten::sin"] == innermost["aten::cos"] == "others"
    assert "casts" in {figures.class_of_launch(event) for event in events if event.name == "aten::copy_"}
    assert {figures.class_of_launch(event) for event in events if event.name in ("aten::mm", "aten::addmm")} <= {
        "products",
        "attention",
    }
    assert {figures.class_of_launch(event) for event in events if "attention" in event.name} == {"attention"}


def test_kernels_without_an_operator_count_too(load):
    figures = load("gpu_day.step_figures")
    product = launch("aten::mm", kernels=[2000], parent=launch("aten::linear"))
    cast = launch("aten::copy_", kernels=[500], parent=launch("aten::_to_copy"))
    on_device = [kernel(2000), kernel(500), kernel(300)]  # the last one is Triton's
    found = figures.kernels_ms([product, cast, *on_device])
    assert found == {"products": 2.0, "attention": 0.0, "casts": 0.5, "others": pytest.approx(0.3)}


def launch(name, kernels=(), parent=None):
    durations = [SimpleNamespace(duration=one) for one in kernels]
    return SimpleNamespace(name=name, kernels=durations, cpu_parent=parent, device_type=DeviceType.CPU)


def kernel(microseconds):
    span = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(kernels=[], device_type=DeviceType.CUDA, is_user_annotation=False, time_range=span)
