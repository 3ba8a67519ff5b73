"""Packed rows in the recipe: attention by document or masks, told, written down, and kept by a resumed run."""

import json

import pytest
import torch
from lives import curve, scratch, write_rows

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.checkpoints.resume import LATER, check_same_flags

RECIPE = "language_modeling"
BY_DOCUMENT = "packed rows: attention by document, without masks"


@pytest.fixture
def flags(tmp_path):
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(60)]
    path = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    return [
        *("--train_file", path, "--block_size", "48", "--global_batch_size", "4", "--micro_batch_size", "2"),
        *("--max_steps", "3", "--logging_steps", "1", "--max_eval_samples", "4", "--vocab_size", "300"),
        *("--save_every", "2", "--keep_checkpoints", "5"),
    ]


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_attention_by_document_is_told_and_has_the_curve_of_masks(train, tmp_path, flags, capsys, model_type):
    flags += [*scratch(model_type), "--dtype", "float64"]
    flags += [] if torch.cuda.is_available() else ["--compile", "auto"]  # which is for GPUs
    results = [train(*flags, "--packed_attention", how, output=how) for how in ("auto", "mask")]
    printed = capsys.readouterr().out
    assert printed.count("--compile auto: none") == 2 * ("--compile" in flags)
    assert printed.count(BY_DOCUMENT) == printed.count("packed rows: attention with masks (as told)") == 1
    assert [config(tmp_path / how)["packed_attention"] for how in ("auto", "mask")] == ["document", "mask"]
    assert curve(tmp_path / "auto") == pytest.approx(curve(tmp_path / "mask"), rel=1e-12)
    by_document, by_masks = (one["eval"]["loss"] for one in results)
    assert by_document == pytest.approx(by_masks, rel=1e-12)


def test_verify_holds_for_adapters_of_a_model_that_attends_by_document(train, flags, capsys):
    train(*flags, *scratch("llama"), "--lora", "--activation_checkpointing", "full", "--verify")
    assert BY_DOCUMENT in capsys.readouterr().out


def test_compiled_layers_with_dropout_keep_masks(refuse, flags):
    flags += [*scratch("llama"), "--activation_checkpointing", "compiled", "--dropout", "0.1"]
    message = refuse(*flags, "--packed_attention", "document")
    assert "--packed_attention document" in message
    assert "its layers are compiled, with dropout" in message


@pytest.mark.slow
def test_compiled_layers_attend_by_document(train, tmp_path, flags, capsys):
    """Not in float64, which ``--verify`` takes for exact: a Llama's norms are in float32 there, too."""
    flags += scratch("llama")
    train(*flags, output="plain")
    train(*flags, "--compile", "--verify", output="compiled")
    assert capsys.readouterr().out.count(BY_DOCUMENT) == 2
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "plain"), rel=1e-6)


def test_padded_rows_have_no_documents(refuse, flags):
    message = refuse(*flags, *scratch("llama"), "--no_packing", "--packed_attention", "document")
    assert "--packed_attention" in message


@pytest.mark.parametrize("how", ["auto", "mask"])
def test_a_resumed_run_attends_as_it_began(train, tmp_path, flags, capsys, how):
    flags += [*scratch("llama"), "--packed_attention", how, "--lr_scheduler_type", "constant"]
    train(*flags, output="whole")
    train(*flags, "--max_steps", "2", output="cut")
    train(*flags, "--packed_attention", "auto", "--resume", output="cut")
    line = BY_DOCUMENT if how == "auto" else "attention with masks (as told)"
    assert capsys.readouterr().out.count(line) == 3
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_a_run_of_before_goes_on_with_masks(train, tmp_path, flags, capsys):
    flags += [*scratch("llama"), "--lr_scheduler_type", "constant"]
    train(*flags, "--packed_attention", "mask", "--max_steps", "2", output="old")
    path = tmp_path / "old/config.json"
    path.write_text(json.dumps({name: value for name, value in config(tmp_path / "old").items() if name not in LATER}))
    capsys.readouterr()
    train(*flags, "--resume", output="old")
    assert "packed rows: attention with masks" in capsys.readouterr().out
    assert config(tmp_path / "old")["packed_attention"] == "mask"


def test_a_run_of_before_does_not_go_on_by_document():
    flags = {"lr_scheduler_type": "constant", "packed_attention": "auto"}
    assert check_same_flags({"lr_scheduler_type": "constant"}, flags) == []
    with pytest.raises(InputError, match="--packed_attention was mask and is document"):
        check_same_flags({"lr_scheduler_type": "constant"}, {**flags, "packed_attention": "document"})
