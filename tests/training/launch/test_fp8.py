"""``--mixed_precision fp8``: which layers multiply in float8, the bits of plans around them, and what is refused."""

import json
from functools import partial
from importlib.util import find_spec
from itertools import chain, cycle

import pytest
import torch
from accelerate.state import AcceleratorState
from lives import assert_the_same_weights, be_rank, loaded
from torch import nn

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.groups import check_precision
from memsave_recipes.training.launch import float8
from memsave_recipes.training.launch.float8 import is_wide, measured_ratios, settle_float8
from memsave_recipes.training.launch.start import Accelerator

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
LLAMA = "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,hidden_size=64,intermediate_size=128"
FLAGS = [
    *("--model_type", "llama", "--config_overrides", f"{LLAMA},vocab_size=300", "--block_size", "32"),
    *("--global_batch_size", "4", "--micro_batch_size", "2", "--lr_scheduler_type", "constant"),
    *("--max_steps", "4", "--save_every", "2", "--report_to", "none"),
]
SHAPES = ["64x64", "64x128", "128x64"]
FASTER, SLOWER = (1.0, 2.0), (2.0, 1.0)
"""Seconds in float8, and in bfloat16."""


def takes(monkeypatch, *seconds):
    """As on a device on which layers take so long, shape by shape; a CPU emulates float8, at any speed."""
    of_steps = cycle(chain.from_iterable(seconds))

    def seconds_of(step):
        step()
        return next(of_steps)

    monkeypatch.setattr(float8, "MIN_WIDTH", 64)
    monkeypatch.setattr(float8, "seconds_of", seconds_of)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """As by ``accelerate launch --mixed_precision fp8``."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{number} is a number, and {number * number} its square. " for number in range(600)))
    return file


@pytest.fixture
def train(monkeypatch, tmp_path, text):
    """The recipe, whose layers are narrow, on a device on which float8 is faster."""
    takes(monkeypatch, FASTER)

    def run(*flags, output="run"):
        AcceleratorState._reset_state(reset_partial_state=True)
        words = [*FLAGS, "--train_file", text, "--output_dir", tmp_path / output, *flags]
        with loaded("language_modeling") as recipe:
            return recipe.main([*map(str, words)])

    return run


def ratios_of(folder):
    return json.loads((folder / "config.json").read_text())["float8_ratios"]


def test_wide_linear_layers_are_taken():
    assert is_wide(nn.Linear(2048, 4096, device="meta"))
    assert not is_wide(nn.Linear(2048, 1024, device="meta"))
    assert not is_wide(nn.Linear(2056, 4096, device="meta"))  # no multiple of 16
    assert not is_wide(nn.Bilinear(2048, 2048, 2048, device="meta"))


@needs_torchao
def test_prepare_puts_torchaos_layers_there(monkeypatch):
    monkeypatch.setattr(float8, "MIN_WIDTH", 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 32))
    weights = [id(weight) for weight in model.parameters()]
    accelerator = Accelerator()
    line = settle_float8(accelerator, model, {"64x64": 0.8, "64x128": 1.04}, compiles=True)
    assert line == (
        "fp8: 1 of 2 wide linear layers multiply in float8; time in float8 beside bfloat16: x0.80 for 64x64, x1.04 "
        "for 64x128"
    )
    prepared = accelerator.prepare(model)
    assert [type(layer).__name__ for layer in prepared] == ["Float8Linear", "Linear", "Linear"]
    assert [id(weight) for weight in prepared.parameters()] == weights


@needs_torchao
def test_runs_are_told_why_few_layers_are_taken(monkeypatch):
    accelerator = Accelerator()
    line = settle_float8(accelerator, nn.Linear(2, 2), {}, compiles=True)
    assert line == "fp8: no linear layer has 2,048 inputs and outputs, so all multiply in bfloat16"
    monkeypatch.setattr(float8, "MIN_WIDTH", 64)
    line = settle_float8(accelerator, nn.Linear(64, 64), {"64x64": 1.5}, compiles=False)
    assert line.endswith("x1.50 for 64x64; compiled layers may gain (--compile)")


@needs_torchao
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_clock_takes_the_first_layer_of_a_shape(monkeypatch, compiles, kernels_can_be_compiled):
    monkeypatch.setattr(float8, "MIN_WIDTH", 64)
    monkeypatch.setattr(float8, "MIN_TIMED_S", 0.01)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 80), nn.Linear(80, 64))
    unused = nn.Linear(128, 128)
    model.extra = unused
    ratios = measured_ratios(Accelerator(), model, lambda: model[:3](torch.ones(8, 64)), compiles=compiles)
    assert list(ratios) == ["64x64", "64x80"]
    assert all(0 < ratio < float("inf") for ratio in ratios.values())
    assert all(weight.grad is None for weight in model.parameters())


@needs_torchao
def test_a_plan_has_the_bits_of_the_plain_run_and_goes_on(train, monkeypatch, tmp_path, capsys):
    train(output="straight")
    assert "fp8: 14 of 14 wide linear layers multiply in float8; time" in capsys.readouterr().out
    assert ratios_of(tmp_path / "straight") == dict.fromkeys(SHAPES, 0.5)
    full = ["--activation_checkpointing", "full"]
    assert train(*full, "--verify", "--max_steps", "2")["equivalence"]["verdict"] == "identical"
    takes(monkeypatch, SLOWER)
    train(*full, "--resume")
    assert_the_same_weights(tmp_path / "run/final", tmp_path / "straight/final")
    assert ratios_of(tmp_path / "run") == dict.fromkeys(SHAPES, 0.5)


@needs_torchao
def test_a_run_of_an_earlier_version_goes_on_with_all_wide_layers(train, tmp_path, capsys):
    train(output="straight")
    train("--max_steps", "2")
    config = tmp_path / "run/config.json"
    was = json.loads(config.read_text())
    del was["float8_ratios"]
    config.write_text(json.dumps(was))
    train("--resume")
    assert "fp8: 14 of 14 wide linear layers multiply in float8\n" in capsys.readouterr().out
    assert_the_same_weights(tmp_path / "run/final", tmp_path / "straight/final")


@needs_torchao
def test_layers_that_are_slower_are_dropped(train, monkeypatch, tmp_path, capsys):
    takes(monkeypatch, SLOWER, FASTER, SLOWER)
    train(output="some")
    assert "fp8: 4 of 14 wide linear layers multiply in float8" in capsys.readouterr().out
    assert ratios_of(tmp_path / "some") == dict(zip(SHAPES, (2, 0.5, 2), strict=True))


@needs_torchao
def test_a_run_without_faster_layers_has_the_bits_of_bfloat16(train, monkeypatch, tmp_path):
    takes(monkeypatch, SLOWER)
    train(output="dropped")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(output="plain")
    assert_the_same_weights(tmp_path / "dropped/final", tmp_path / "plain/final")


@needs_torchao
def test_the_products_are_others(train, monkeypatch):
    in_8_bits = train(output="one")["eval"]["loss"]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    in_16_bits = train(output="two")["eval"]["loss"]
    assert in_8_bits != in_16_bits
    assert in_8_bits == pytest.approx(in_16_bits, rel=0.01)


@needs_torchao
@pytest.mark.slow
def test_compiled_layers_recompute_the_same(train, tmp_path, kernels_can_be_compiled):
    train("--compile", output="kept")
    train("--compile", "--activation_checkpointing", "full")
    assert_the_same_weights(tmp_path / "run/final", tmp_path / "kept/final")


def be_rank_in_float8(accelerator, *, words):
    """Of two on which other layers are faster."""
    AcceleratorState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        takes(patch, FASTER if accelerator.is_main_process else SLOWER)
        return be_rank(accelerator, recipe="language_modeling", words=words)


@needs_torchao
def test_ranks_agree_on_the_layers_of_the_first(train, run_on_ranks, tmp_path, text):
    train(output="one")
    words = [*FLAGS, "--train_file", text, "--output_dir", tmp_path / "two"]
    (_, printed), _ = run_on_ranks(partial(be_rank_in_float8, words=[*map(str, words)]), 2, timeout_s=150)
    assert "fp8: 14 of 14 wide linear layers" in printed
    assert ratios_of(tmp_path / "two") == dict.fromkeys(SHAPES, 0.5)
    losses = [json.loads((tmp_path / run / "results.json").read_text())["eval"]["loss"] for run in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(InputError, match="fp8 with the backend TE: plans go around torchao's layers alone"):
        Accelerator()


def test_so_is_a_machine_without_torchao(monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'memsave-recipes\[fp8\]'"):
        Accelerator()


def test_so_are_shards():
    with pytest.raises(InputError, match="shard full: layers that multiply in float8 have not been tried"):
        check_precision("full", "fp8")
