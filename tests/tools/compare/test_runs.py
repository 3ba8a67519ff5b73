"""A finished run is read back as it was written; what is none is named."""

import json
import math
from pathlib import Path

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.tools.compare import find_runs, loss_curve, read_run


def write_run(folder: Path, rows: list[dict] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"model": "vgg11", "eval": {"accuracy": 0.5}, "steps": 2}))
    (folder / "config.json").write_text(json.dumps({"seed": 7}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or []))
    return folder


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [{"step": 1, "train/loss": 0.1 + 0.2}, {"step": 1, "eval/accuracy": 0.5}]
    run = read_run(write_run(tmp_path / "plain", rows))
    assert (run.name, run.path) == ("plain", tmp_path / "plain")
    assert run.results == {"model": "vgg11", "eval": {"accuracy": 0.5}, "steps": 2}
    assert run.config == {"seed": 7}
    assert loss_curve(run) == {1: 0.1 + 0.2}


def test_figures_and_texts_are_absent_rather_than_wrong(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.figure("eval", "accuracy") == 0.5
    assert run.text("model") == "vgg11"
    assert run.figure("eval", "f1") is run.figure("perf", "mfu_pct") is run.figure("model", "x") is None
    assert run.figure("model") is run.text("steps") is None


def test_loss_curve_has_the_training_loss_of_every_step(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": "NaN"},
        {"step": 2, "eval/loss": 9.0},
        {"step": 1, "train/loss": 2.5},
    ]
    curve = loss_curve(read_run(write_run(tmp_path / "run", rows)))
    assert curve.keys() == {1, 2}
    assert curve[1] == 2.5
    assert math.isnan(curve[2])


@pytest.mark.parametrize("missing", ["results.json", "config.json", "metrics.jsonl"])
def test_an_unfinished_run_names_its_folder_and_the_missing_file(missing: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / missing).unlink()
    with pytest.raises(InputError, match=rf"{folder} is not a finished run \(no {missing}\)"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", b'{"model"'),
        ("config.json", b"[]"),
        ("metrics.jsonl", b'{"step": 1}\n{"st'),
        ("config.json", b"\xff"),
    ],
)
def test_a_damaged_run_names_its_folder_and_the_file_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=name) as error:
        read_run(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_runs_are_found_at_any_depth_finished_or_not(tmp_path: Path) -> None:
    deep, shallow = write_run(tmp_path / "sweep" / "seed0"), write_run(tmp_path / "plain")
    (shallow / "results.json").unlink()
    assert find_runs(tmp_path) == [shallow, deep]
    assert find_runs(deep) == [deep]


def test_another_programs_results_are_no_run_of_ours(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "results.json").write_text('{"score": 3}')
    with pytest.raises(InputError, match="without figures of these recipes"):
        read_run(folder)


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_no_run_at_all_is_a_mistake(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=folder):
        find_runs(tmp_path / folder)
