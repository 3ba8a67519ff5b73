"""``--mixed_precision fp8``: which layers multiply in float8, the bits of plans around them, and what is refused."""

from importlib.util import find_spec

import pytest
from accelerate.state import AcceleratorState
from lives import assert_the_same_weights, loaded
from torch import nn

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.groups import check_precision
from memsave_recipes.training.launch import start
from memsave_recipes.training.launch.start import Accelerator, describe_8_bits, takes_8_bits

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
LLAMA = "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,hidden_size=64,intermediate_size=128"
FLAGS = [
    *("--model_type", "llama", "--config_overrides", f"{LLAMA},vocab_size=300", "--block_size", "32"),
    *("--global_batch_size", "4", "--micro_batch_size", "2", "--lr_scheduler_type", "constant"),
    *("--max_steps", "4", "--save_every", "2"),
]


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """As by ``accelerate launch --mixed_precision fp8``."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """The recipe, whose layers are narrow."""
    monkeypatch.setattr(start, "WIDTH_OF_8_BITS", 64)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number, and {number * number} its square. " for number in range(600)))

    def run(*flags, output="run"):
        AcceleratorState._reset_state(reset_partial_state=True)
        words = [*FLAGS, "--train_file", text, "--report_to", "none", "--output_dir", tmp_path / output, *flags]
        with loaded("language_modeling") as recipe:
            return recipe.main([*map(str, words)])

    return run


def test_wide_linear_layers_are_taken():
    assert takes_8_bits(nn.Linear(2048, 4096, device="meta"), "")
    assert not takes_8_bits(nn.Linear(2048, 1024, device="meta"), "")
    assert not takes_8_bits(nn.Linear(2056, 4096, device="meta"), "")  # no multiple of 16
    assert not takes_8_bits(nn.Bilinear(2048, 2048, 2048, device="meta"), "")


@needs_torchao
def test_prepare_puts_torchaos_layers_there(monkeypatch):
    monkeypatch.setattr(start, "WIDTH_OF_8_BITS", 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    weights = [id(weight) for weight in model.parameters()]
    prepared = Accelerator().prepare(model)
    assert [type(layer).__name__ for layer in prepared] == ["Float8Linear", "Linear"]
    assert [id(weight) for weight in prepared.parameters()] == weights
    assert describe_8_bits(prepared, "fp8", compiles=True) == "fp8: 1 linear layers multiply in float8"
    assert "in compiled layers alone" in describe_8_bits(prepared, "fp8", compiles=False)


def test_a_run_without_wide_layers_is_told():
    line = "fp8: no linear layer has 2,048 inputs and outputs, so all multiply in bfloat16"
    assert describe_8_bits(nn.Linear(2, 2), "fp8", compiles=True) == line
    assert describe_8_bits(nn.Linear(2, 2), "bf16", compiles=True) is None


@needs_torchao
def test_a_plan_has_the_bits_of_the_plain_run_and_goes_on(train, tmp_path, capsys):
    train(output="straight")
    assert "fp8: 14 linear layers multiply in float8" in capsys.readouterr().out
    full = ["--activation_checkpointing", "full"]
    assert train(*full, "--verify", "--max_steps", "2")["equivalence"]["verdict"] == "identical"
    train(*full, "--resume")
    assert_the_same_weights(tmp_path / "run/final", tmp_path / "straight/final")


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


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(InputError, match="fp8 with the backend TE: plans go around torchao's layers alone"):
        Accelerator()


def test_so_is_a_machine_without_torchao(monkeypatch):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'memsave-recipes\[fp8\]'"):
        Accelerator()


def test_so_are_shards():
    with pytest.raises(InputError, match="shard full: layers that multiply in float8 have not been tried"):
        check_precision("full", "fp8")
