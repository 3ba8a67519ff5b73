"""``memsave fit`` on nine published models: lines that the recipes take, and sizes of memory that tell on the rows."""

import json
import shlex
from pathlib import Path

import pytest

from memsave_recipes.tools.cli import main
from memsave_recipes.tools.fit.recipe_task import read_task

ROOT = Path(__file__).parents[2]
NUM_PARAMETERS = {  # by the model's page, in millions
    "Llama-3.1-8B": 8030,
    "Qwen3-4B": 4022,
    "Gemma-3-4B": 3880,
    "Mistral-7B": 7242,
    "ModernBERT-base": 149,
    "ViT-L-16-384": 304,
    "ConvNeXt-L": 198,
    "VGG16": 134,
    "DenseNet-201": 18.1,
}
FAST = "VGG16"


def fitted(word: str, memory: str, file: Path) -> tuple[int, dict]:
    code = main(["fit", word, "--memory", memory, "--json", str(file)])
    return code, json.loads(file.read_text())


NAMES = [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in NUM_PARAMETERS if name != FAST)]


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_of_a_published_model_has_a_line_that_its_recipe_takes(load, name, tmp_path):
    word = load("fit_models").write(name, tmp_path)
    code, found = fitted(word, "24GiB", tmp_path / "fit.json")
    assert code == 0
    assert found["rungs"][0]["parts"]["parameters"] / 4e6 == pytest.approx(NUM_PARAMETERS[name], rel=0.02)
    fitting = [rung for rung in found["rungs"] if rung["fits"]]
    assert fitting
    for rung in fitting:
        words = shlex.split(rung["launch"])
        at = next(number for number, word in enumerate(words) if word.endswith(".py"))
        run = read_task(Path(words[at]), words[at + 1 :]).run
        assert run.micro_batch_size == rung["micro_batch_size"]
        assert run.activation_checkpointing == rung["strategy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral-7B", "ConvNeXt-L"])
def test_more_memory_is_never_worse(load, name, tmp_path):
    word = load("fit_models").write(name, tmp_path)
    seconds = {}
    for memory in load("fit").MEMORIES:
        code, found = fitted(word, memory, tmp_path / "fit.json")
        assert code == (2 if found["best"] is None else 0)
        for rung in found["rungs"]:
            if rung["fits"] and rung["num_processes"] == 1:
                assert rung["step_s"] <= 1.011 * seconds.get(rung["name"], rung["step_s"])
                seconds[rung["name"]] = rung["step_s"]


def test_its_page_tells_how_many_cases_are_fast(load):
    fit = load("fit")
    row = {"model": "VGG16", "memory": "8GiB", "best": None, "fitting": [], "seconds": 25.0, "cpu_s": 20.0}
    results = {"rows": [row], "load_average": 1.0, "machine": {"device": "a CPU"}}
    page = fit.to_markdown(results)
    assert "0 of 1 cases take at most 20 s" in page
    assert "| VGG16 | 8GiB | nothing fits |" in page
