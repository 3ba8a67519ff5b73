"""The teaching recipe on one process; test_topologies.py runs it on two."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from filelock import FileLock

from memsave_recipes.errors import InputError

RECIPE = Path(__file__).parents[2] / "recipes" / "ddp_equals_accumulation.py"
BITWISE = ("bitwise", "bitwise_GPT-2", "bitwise_VGG16-BN")


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    specification = importlib.util.spec_from_file_location("ddp_equals_accumulation", RECIPE)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def run(recipe: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(output: str, *flags: str) -> dict[str, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        short = ["--global_batch_size", "7", "--max_steps", "2", "--report_to", "none"]
        return recipe.main([*short, *flags, "--output_dir", str(tmp_path / output)])

    return run


def test_every_cut_is_exact_and_the_usual_loop_is_not(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equivalence = run("all")["equivalence"]
    cuts = equivalence["geometries"]
    assert [cut["micro_batch_size"] for cut in cuts] == [7, 6, 5, 4, 3, 2, 1]
    assert all(len(cut[loop]) == 2 for cut in cuts for loop in ("exact", "usual"))
    assert equivalence["largest_difference_exact"] <= 1e-15
    assert all(max(cut["usual"]) > 0.01 for cut in cuts[1:])
    assert [equivalence[f"largest_difference_{loop}"] for loop in BITWISE] == [0, 0, 0]
    printed = capsys.readouterr().out
    assert "(5+2) x 1 rank" in printed
    assert "Why: " in printed
    assert json.loads((tmp_path / "all" / "results.json").read_text())["equivalence"] == equivalence


def test_bfloat16_keeps_the_bits(run: Callable[..., dict[str, Any]]) -> None:
    equivalence = run("bfloat16", "--micro_batch_size", "3", "--dtype", "bfloat16")["equivalence"]
    assert [equivalence[f"largest_difference_{loop}"] for loop in BITWISE] == [0, 0, 0]


def test_saved_weights_are_compared(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    one_cut = ["--micro_batch_size", "3"]
    run("first", *one_cut)
    against_first = [*one_cut, "--compare_with", str(tmp_path / "first")]
    same = run("same", *against_first, "--activation_checkpointing", "full")
    other = run("other", *against_first, "--seed", "1")
    assert same["equivalence"]["largest_difference_to_it"] <= 1e-15
    assert same["equivalence"]["same_bits_as_it"] == {3: True}
    assert other["equivalence"]["same_bits_as_it"] == {3: False}
    assert other["equivalence"]["largest_difference_to_it"] > 0.01


def test_it_goes_on_like_any_run(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    flags = ["--micro_batch_size", "3", "--save_every", "1"]
    first = run("run", *flags)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    again = run("run", *flags, "--resume")
    assert again["equivalence"] == first["equivalence"]
    assert again["train_loss"] == first["train_loss"]
    steps = [json.loads(row)["step"] for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [json.loads(row)["step"] for row in rows]


def test_a_run_without_weights_cannot_be_compared(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--compare_with"):
        run("run", "--compare_with", str(tmp_path))


def test_a_global_batch_that_no_data_fill_is_refused(run: Callable[..., dict[str, Any]]) -> None:
    """The proof would cut it up in every way, also into parts without a sample."""
    with pytest.raises(InputError, match="--global_batch_size 1000000000: must be at most 1,437"):
        run("run", "--global_batch_size", "1000000000")


def test_a_folder_in_use_is_refused(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / "run.lock"), pytest.raises(InputError, match="has not ended"):
        run("run")
    assert not (tmp_path / "run" / "config.json").exists()
