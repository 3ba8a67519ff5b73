"""The teaching recipe on one process; test_topologies.py runs it on two."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memsave_recipes.core.errors import InputError

RECIPE = "ddp_equals_accumulation"
SHORT = ["--global_batch_size", "7", "--max_steps", "2"]
Train = Callable[..., dict[str, Any]]
BITWISE = ("bitwise", "bitwise_GPT-2", "bitwise_VGG16-BN")


def test_every_cut_is_exact_and_the_usual_loop_is_not(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equivalence = train(*SHORT, output="all")["equivalence"]
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


def test_bfloat16_keeps_the_bits(train: Train) -> None:
    equivalence = train(*SHORT, "--micro_batch_size", "3", "--dtype", "bfloat16", output="bfloat16")["equivalence"]
    assert [equivalence[f"largest_difference_{loop}"] for loop in BITWISE] == [0, 0, 0]


def test_saved_weights_are_compared(train: Train, tmp_path: Path) -> None:
    one_cut = ["--micro_batch_size", "3"]
    train(*SHORT, *one_cut, output="first")
    against_first = [*one_cut, "--compare_with", str(tmp_path / "first")]
    same = train(*SHORT, *against_first, "--activation_checkpointing", "full", output="same")
    other = train(*SHORT, *against_first, "--seed", "1", output="other")
    assert same["equivalence"]["largest_difference_to_it"] <= 1e-15
    assert same["equivalence"]["same_bits_as_it"] == {3: True}
    assert other["equivalence"]["same_bits_as_it"] == {3: False}
    assert other["equivalence"]["largest_difference_to_it"] > 0.01


def test_it_goes_on_like_any_run(train: Train, tmp_path: Path) -> None:
    flags = ["--micro_batch_size", "3", "--save_every", "1"]
    first = train(*SHORT, *flags, output="run")
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    again = train(*SHORT, *flags, "--resume", output="run")
    assert again["equivalence"] == first["equivalence"]
    assert again["train_loss"] == first["train_loss"]
    steps = [json.loads(row)["step"] for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [json.loads(row)["step"] for row in rows]


def test_a_run_without_weights_cannot_be_compared(train: Train, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--compare_with"):
        train(*SHORT, "--compare_with", str(tmp_path), output="run")


def test_a_global_batch_that_no_data_fill_is_refused(train: Train) -> None:
    """The proof would cut it up in every way, also into parts without a sample."""
    with pytest.raises(InputError, match="--global_batch_size 1000000000: must be at most 1,437"):
        train(*SHORT, "--global_batch_size", "1000000000", output="run")
