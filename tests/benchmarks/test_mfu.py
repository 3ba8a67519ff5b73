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

from memsave_recipes.core.planner.task import choose_for_target
from memsave_recipes.core.text import GIB
from memsave_recipes.tools.fit.frontier import speed_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
WIDTH, WORDS, TOKENS, LAYERS = 768, 8192, 1024, 2


@pytest.fixture(scope="module")
def counted(load):
    mfu = load("mfu")
    sizes = (("n_layer", LAYERS), ("vocab_size", WORDS), ("activation_function", "gelu_pytorch_tanh"))
    work = replace(mfu.WORKS[0], samples=1, micro_batches=2, config=sizes)
    rows = mfu.rows_of(work, mfu.find_target(mfu.CARD).calibrated)
    return mfu, work, {row["plan"]: row for row in rows}


@pytest.fixture(scope="module")
def results():
    return json.loads((RESULTS / "mfu.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def published(results):
    """The rows of the page, by model and plan."""
    return {(row["model"], row["plan"]): row for row in results["rows"]}


def test_products_are_those_of_the_formula(counted):
    mfu, _, rows = counted
    of_layer, of_head = 12 * WIDTH**2, WIDTH * WORDS
    for plan in ("none", "compiled"):
        assert rows[plan]["classes"]["products"][mfu.FLOPS] == 3 * 2 * TOKENS * (LAYERS * of_layer + of_head)
    forward_again = rows["half"]["classes"]["products"][mfu.FLOPS] - rows["none"]["classes"]["products"][mfu.FLOPS]
    assert forward_again == 2 * TOKENS * 8 * WIDTH**2  # it ends before the last product, which nobody saves


@pytest.mark.parametrize(
    ("model", "name", "layers", "tokens", "words"),
    [
        ("GPT-2 124M, 50,257 words", "GPT-2", 12, 16 * 1024, 50257),
        ("Llama 3.2 1B, autocast", "Llama 3.2 1B", 16, 8192, 128256),
    ],
)
def test_compiled_layers_and_loss_move_what_the_real_compiler_says(load, published, model, name, layers, tokens, words):
    """Layers move what the code for cards does, and the loss 6 bytes a logit; embedding and last norm are eager."""
    mfu = load("mfu")
    (layer,) = json.loads((RESULTS / "triton_kernels.json").read_text(encoding="utf-8"))["rows"][name]
    passes = [layer[name] for name in ("forward", "backward")]
    of_layer = tokens * layer["width"] * sum(one["read"] + one["written"] for one in passes)
    of_layer += layer["weights"] * sum(one["of_weights"] for one in passes)
    moved = sum(published[model, "compiled"]["classes"][name][mfu.BYTES] for name in ("casts", "others"))
    expected = layers * of_layer + 6 * tokens * words
    assert expected < moved < 1.1 * expected


def test_compiled_layers_move_less_than_eager_ones(counted):
    mfu, _, rows = counted
    moved = {plan: sum(rows[plan]["classes"][name][mfu.BYTES] for name in ("casts", "others")) for plan in rows}
    assert moved["compiled"] < 0.7 * moved["none"]
    assert moved["none"] < moved["half"]


@pytest.mark.slow
@pytest.mark.compiles_ahead
def test_a_compiled_step_is_that_of_memsave_plan(counted):
    mfu, work, rows = counted
    with work.task("--activation_checkpointing", "none") as task:
        launch = mfu.Launch(target=mfu.find_target(mfu.CARD), mixed_precision="bf16")
        (candidate,) = choose_for_target(task, launch, 80 * GIB).candidates
        speed = speed_of(task, launch, candidate)
    assert rows["compiled"]["predicted_step_s"] == pytest.approx(candidate.step_s, rel=0.01)
    assert rows["compiled"]["predicted_mfu_pct"] == pytest.approx(speed.mfu_pct, rel=0.01)


def test_graphs_and_waits_are_those_that_were_counted(counted):
    _, _, rows = counted
    assert {plan: row["graphs"] for plan, row in rows.items()} == {"none": 0, "compiled": 2, "half": 0}
    assert rows["none"]["waits"] == rows["half"]["waits"] == 0
    assert "waits" not in rows["compiled"]  # nothing compiles where they are counted


def test_blocks_in_sequence_are_not_compiled(published):
    assert {plan for model, plan in published if model == "DenseNet-121"} == {"none", "half"}


def test_the_row_of_gpt2_is_what_is_counted_now(load, published):
    mfu = load("mfu")
    work, rates = mfu.WORKS[0], mfu.find_target(mfu.CARD).calibrated
    with work.task() as task:
        counts = mfu.counts_of(work, task, rates, ["none"])
    row = mfu.row_of(work, "none", counts, counts["by_plan"]["none"], rates)
    before = published[work.name, "none"]
    assert {name: before[name] for name in row} == row


@pytest.mark.parametrize("plan", ["none", "compiled"])
@pytest.mark.parametrize("figure", ["KERNELS", "BYTES"])
def test_an_odd_vocabulary_is_no_dearer_than_an_even_one(load, published, plan, figure):
    mfu = load("mfu")
    odd, even = (
        sum(one[getattr(mfu, figure)] for one in published[f"GPT-2 124M, {words} words", plan]["classes"].values())
        for words in ("50,257", "50,304")
    )
    assert odd <= 1.01 * even


def test_the_page_is_of_these_rows_and_says_that_all_is_predicted(load, results):
    mfu = load("mfu")
    page = mfu.page_of(results["rows"], mfu.find_target(mfu.CARD).calibrated, results)
    assert (RESULTS / "mfu.md").read_text(encoding="utf-8").rstrip() == page
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
