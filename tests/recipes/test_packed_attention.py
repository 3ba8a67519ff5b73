"""Packed rows in the recipe: attention by document or masks, told, written down, and kept by a resumed run."""

import json
from importlib.util import find_spec

import pytest
import torch
from lives import SHAPES, curve, scratch, write_rows

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.flags import rules_of
from memsave_recipes.training.checkpoints.resume import check_same_flags

RECIPE = "language_modeling"
BY_DOCUMENT = "packed rows: attention by document, without masks"


@pytest.fixture
def flags(tmp_path):
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(60)]
    path = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    return [
        *("--train_file", path, "--block_size", "48", "--global_batch_size", "4", "--micro_batch_size", "2"),
        *("--max_steps", "3", "--logging_steps", "1"),
        *("--save_every", "2"),
    ]


@pytest.fixture
def with_masks(recipe, monkeypatch):
    """Let the runs that follow attend with masks, or as another word says."""

    def set_to(word="mask"):
        monkeypatch.setattr(recipe.Arguments.__dataclass_fields__["packed_attention"], "default", word)

    return set_to


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_attention_by_document_is_told_and_has_the_curve_of_masks(
    train, with_masks, tmp_path, flags, capsys, model_type
):
    flags += [*scratch(model_type), "--dtype", "float64"]
    results = [train(*flags, output="auto")]
    with_masks()
    results += [train(*flags, output="mask")]
    printed = capsys.readouterr().out
    assert printed.count(BY_DOCUMENT) == printed.count("packed rows: attention with masks (as this run began)") == 1
    assert curve(tmp_path / "auto") == pytest.approx(curve(tmp_path / "mask"), rel=1e-12)
    by_document, by_masks = (one["eval"]["loss"] for one in results)
    assert by_document == pytest.approx(by_masks, rel=1e-12)


def test_verify_holds_for_adapters_of_a_model_that_attends_by_document(train, flags, capsys):
    train(*flags, *scratch("llama"), "--lora", "--activation_checkpointing", "full", "--verify")
    assert BY_DOCUMENT in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() and find_spec("triton") is None, reason="compiles by Triton")
def test_compiled_layers_with_dropout_keep_masks(train, flags, capsys):
    flags += ["--model_type", "llama", "--config_overrides", f"{SHAPES['llama']},attention_dropout=0.1"]
    train(*flags, "--activation_checkpointing", "compiled", "--max_steps", "1")
    assert "attention with masks (its layers are compiled, with dropout)" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_layers_attend_by_document(train, tmp_path, flags, capsys):
    """Not in float64, which ``--verify`` takes for exact: a Llama's norms are in float32 there, too."""
    flags += scratch("llama")
    train(*flags, output="plain")
    train(*flags, "--compile", "--verify", output="compiled")
    assert capsys.readouterr().out.count(BY_DOCUMENT) == 2
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "plain"), rel=1e-6)


def test_a_resumed_run_attends_by_document_as_it_began(train, tmp_path, flags, capsys):
    flags += [*scratch("llama"), "--lr_scheduler_type", "constant"]
    train(*flags, output="whole")
    train(*flags, "--max_steps", "2", output="cut")
    train(*flags, "--resume", output="cut")
    assert capsys.readouterr().out.count(BY_DOCUMENT) == 3
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_a_run_with_masks_goes_on_with_them(train, with_masks, tmp_path, flags, capsys):
    flags += [*scratch("llama"), "--lr_scheduler_type", "constant"]
    with_masks()
    train(*flags, "--max_steps", "2", output="old")
    with_masks("auto")
    capsys.readouterr()
    train(*flags, "--resume", output="old")
    assert "packed rows: attention with masks" in capsys.readouterr().out
    assert config(tmp_path / "old")["packed_attention"] == "mask"


def test_a_run_of_before_does_not_go_on_by_document(recipe):
    rules = rules_of(recipe.Arguments)
    flags = {"lr_scheduler_type": "constant", "packed_attention": "auto"}
    assert check_same_flags({"lr_scheduler_type": "constant"}, flags, rules) == []
    with pytest.raises(InputError, match="--packed_attention was mask and is document"):
        check_same_flags({"lr_scheduler_type": "constant"}, {**flags, "packed_attention": "document"}, rules)
