"""The teaching recipe on one process; test_topologies.py runs it on two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from memsave_recipes.core.errors import InputError

RECIPE = "ddp_equals_accumulation"
SHORT = ["--global_batch_size", "7", "--max_steps", "2"]


@pytest.fixture
def prove(recipe: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str, output: str) -> dict[str, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        found: dict[str, Any] = recipe.main([*SHORT, *flags, "--output_dir", str(tmp_path / output)])["equivalence"]
        return found

    return run


def test_every_cut_is_exact_and_the_usual_loop_is_not(
    prove: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prove(output="all")
    cuts = found["geometries"]
    assert [cut["micro_batch_size"] for cut in cuts] == [7, 6, 5, 4, 3, 2, 1]
    assert all(len(cut[loop]) == 2 for cut in cuts for loop in ("exact", "usual"))
    assert found["largest_difference_exact"] <= 1e-15
    assert all(max(cut["usual"]) > 0.01 for cut in cuts[1:])
    assert found["largest_difference_bitwise"] == 0
    assert "(5+2) x 1 rank" in capsys.readouterr().out
    assert json.loads((tmp_path / "all" / "results.json").read_text())["equivalence"] == found


def test_saved_weights_are_compared(prove: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    prove("--micro_batch_size", "3", output="first")
    against_first = ["--micro_batch_size", "3", "--compare_with", str(tmp_path / "first")]
    same, other = prove(*against_first, output="same"), prove(*against_first, "--seed", "1", output="other")
    assert same["largest_difference_to_it"] <= 1e-15
    assert same["same_bits_as_it"] == {3: True}
    assert other["same_bits_as_it"] == {3: False}
    assert other["largest_difference_to_it"] > 0.01


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compare_with", "nowhere"], "--compare_with nowhere: must be the --output_dir of a finished proof"),
        (["--global_batch_size", "1000000000"], "--global_batch_size 1000000000: must be at most 1,437"),
        (["--max_steps", "0"], "--max_steps 0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line(prove: Callable[..., dict[str, Any]], flags: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prove(*flags, output="run")
