"""No command and no recipe runs the code that comes with a model, nor asks whether to, whatever stands on the input."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from lives import loaded

from memsave_recipes.run.failures import run_recipe
from memsave_recipes.tools.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KNOWN = {"language_modeling": "llama", "text_classification": "bert", "image_classification": "vit"}
"""Types of transformers, by the recipes."""
AUTO_CLASSES = ("Config", "Model", "ModelForCausalLM", "ModelForSequenceClassification", "ModelForImageClassification")


@pytest.fixture(params=["a type of its own", "a type of transformers"])
def folder(request, tmp_path):
    """Makes a folder with custom code for the model of a recipe, and for its tokenizer and processors."""

    def make(recipe="language_modeling"):
        path = tmp_path / "model"
        path.mkdir()
        kind = "mine" if request.param == "a type of its own" else KNOWN[recipe]
        config = {"model_type": kind, "vocab_size": 300, **SIZES}
        mine = {
            "config": {**config, "auto_map": {f"Auto{name}": f"mine.{name}" for name in AUTO_CLASSES}},
            "tokenizer_config": {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}},
            "preprocessor_config": {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.Mine"}},
            "processor_config": {"processor_class": "Mine", "auto_map": {"AutoProcessor": "mine.Mine"}},
        }
        for name, entries in mine.items():
            (path / f"{name}.json").write_text(json.dumps(entries))
        (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
        return str(path)

    return make


@pytest.fixture
def hands_off(tmp_path, monkeypatch, capfd):
    """Afterwards nothing has run, been asked or been read."""
    given = io.StringIO("y\n" * 20)
    monkeypatch.setattr("sys.stdin", given)
    yield
    assert not (tmp_path / "ran").exists()
    assert given.tell() == 0
    assert "[y/N]" not in "".join(capfd.readouterr())


PLAN = [str(RECIPES / "language_modeling.py"), "--model_name_or_path", "{folder}", "--block_size", "16"]
PLAN += ["--global_batch_size", "2", "--target", "a100"]
WORDS = {
    "recipes": ([],),
    "fit": (["{folder}", "--card", "rtx4090", "--length", "16", "--global_batch_size", "2"],),
    "plan": (PLAN,),
    "frontier": (PLAN,),
    "predict": (["{folder}", "a prompt"], ["{folder}", "picture.png"]),
    "compare": (["{folder}"],),
    "wandb-workspace": (["{folder}"],),
}
"""After each command; ``launch`` has a test of its own."""


def test_every_command_is_here():
    assert {*WORDS} == {name for group in COMMANDS.values() for name, _, _ in group}


@pytest.mark.parametrize(("command", "words"), [(name, words) for name, cases in WORDS.items() for words in cases])
def test_no_command_runs_it(folder, hands_off, tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    place = folder()
    assert main([command, *(word.format(folder=place) for word in words)]) in (0, 2)


@pytest.mark.parametrize("given", ["--model_name_or_path", "--tokenizer_name"])
@pytest.mark.parametrize("recipe", KNOWN)
def test_no_recipe_runs_it(folder, hands_off, tmp_path, recipe, given):
    if given == "--tokenizer_name" and recipe == "image_classification":
        pytest.skip("it has no such flag")
    model = ["--model_type", KNOWN[recipe]] if given == "--tokenizer_name" else []
    AcceleratorState._reset_state(reset_partial_state=True)
    if recipe != "image_classification":
        (tmp_path / "texts.jsonl").write_text('{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}\n')
        model += ["--train_file", str(tmp_path / "texts.jsonl")]
    words = [given, folder(recipe), *model, "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    with loaded(recipe) as module, pytest.raises(SystemExit) as end:
        run_recipe(lambda: module.main(words))
    assert end.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["a type of its own"], indirect=True)
def test_no_launch_runs_it(folder, tmp_path):
    words = ["--config_file", "accelerate_configs/cpu.yaml", "recipes/language_modeling.py", "--report_to", "none"]
    words += ["--model_name_or_path", folder(), "--train_file", "README.md", "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "memsave_recipes.tools.cli", "launch", *words]
    ended = subprocess.run(command, input="y\n" * 20, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.returncode == 2
    assert "--trust_remote_code" in ended.stderr
    assert "[y/N]" not in ended.stdout + ended.stderr
    assert not (tmp_path / "ran").exists()
