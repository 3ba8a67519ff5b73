"""``memsave`` reads folders of runs, names what it leaves out, and answers a mistake with one line and 2."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memsave_recipes.tools.cli import main


def write_run(folder: Path, plan: str, peak: float, steps: int = 1) -> Path:
    folder.mkdir(parents=True)
    results = {"model": "vgg11", "plan": plan, "global_batch_size": 64, "memory": {"peak_allocated_gib": peak}}
    rows = [{"step": n, "train/loss": 2.0 / n, "progress/samples_seen": 64 * n} for n in range(1, steps + 1)]
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a-segments", "segments:2", 0.5)
    write_run(tmp_path / "runs" / "b-plain", "none", 1.0)
    return tmp_path / "runs"


def test_a_folder_of_runs_is_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert out.index("b-plain") < out.index("a-segments")
    assert "-50 %" in out
    assert err == ""


def test_a_run_that_is_named_twice_is_shown_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), str(runs / "b-plain")]) == 0
    assert capsys.readouterr().out.count("b-plain") == 1


def test_a_command_that_has_moved_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "benchmarks/results_table.py" in line


@pytest.mark.parametrize("by", ["folder", "name"])
def test_the_baseline_can_be_chosen(by: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = str(runs / "a-segments") if by == "folder" else "a-segments"
    assert main(["compare", str(runs), "--baseline", named]) == 0
    assert "+100 %" in capsys.readouterr().out


def test_a_baseline_from_elsewhere_joins_the_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "b-plain"), "--baseline", str(runs / "a-segments")]) == 0
    assert "+100 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("nowhere", "is not a folder, and the name of 0 runs"), ("runs", "holds 2 runs"), ("empty", "holds no run")],
)
def test_a_baseline_that_is_not_one_run_is_exit_code_2(
    baseline: str, expected: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs.parent / "empty").mkdir()
    assert main(["compare", str(runs), "--baseline", str(runs.parent / baseline)]) == 2
    assert expected in capsys.readouterr().err


def test_broken_empty_and_foreign_folders_are_named_and_left_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(runs / "killed", "none", 9.0) / "results.json").unlink()
    (write_run(runs / "torn", "none", 9.0) / "metrics.jsonl").write_text('{"st')
    (write_run(runs / "foreign", "none", 9.0) / "results.json").write_text('{"score": 1}')
    empty = runs.parent / "empty"
    empty.mkdir()
    assert main(["compare", str(runs), str(runs / "missing"), str(empty)]) == 0
    out, err = capsys.readouterr()
    skipped = {str(empty), *(str(runs / name) for name in ("killed", "torn", "foreign", "missing"))}
    assert {line.removeprefix("skipped: ").split(" ")[0] for line in err.splitlines()} == skipped
    assert "b-plain" in out
    assert "killed" not in out


def test_no_run_at_all_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {tmp_path} holds no run: name an --output_dir, or a folder of them\n"
    assert main(["compare"]) == 2
    assert capsys.readouterr().err.startswith("error: the following arguments are required: DIR (")


@pytest.mark.parametrize("words", [[], ["compar"], ["compare", "--wat"], ["compare", "--html"], ["plan", ""]])
def test_words_that_make_no_command_are_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_recipes_are_not_copied_to_a_name_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--copy", "n" * 300]) == 2
    assert "cannot be written (File name too long)" in capsys.readouterr().err


def test_every_format_is_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {flag: tmp_path / f"out.{flag}" for flag in ("html", "png", "markdown")}
    assert (
        main(["compare", str(runs), *(word for flag, file in files.items() for word in (f"--{flag}", str(file)))]) == 0
    )
    assert "b-plain" in capsys.readouterr().out
    starts = {"html": b"<!DOCTYPE html>", "png": b"\x89PNG", "markdown": b"| run |"}
    for flag, file in files.items():
        assert file.read_bytes().startswith(starts[flag])


def test_markdown_without_a_file_takes_the_place_of_the_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| run |")
    assert "────" not in out


@pytest.mark.parametrize("flag", ["html", "png", "markdown"])
def test_a_file_that_cannot_be_written_is_one_line_and_exit_code_2(
    flag: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flag in ("html", "png"):
        pytest.importorskip("matplotlib")
    for target in (runs, runs / "nowhere" / "out"):
        assert main(["compare", str(runs), f"--{flag}", str(target)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: --{flag} {target} cannot be written (")
        assert err.count("\n") == 1


def test_forty_runs_are_read_without_what_is_slow_to_import(tmp_path: Path) -> None:
    for n in range(40):
        write_run(tmp_path / f"run{n}", "none", 1.0 + n, steps=200)
    check = (
        "import sys; from memsave_recipes.tools.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'wandb', 'trackio', 'matplotlib', 'numpy'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", check, "compare", str(tmp_path), "--markdown", str(tmp_path / "runs.md")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"run{n}" in done.stdout for n in range(40))


@pytest.mark.parametrize("flag", ["html", "png"])
def test_charts_without_matplotlib_are_one_line_and_exit_code_2(flag: str, runs: Path) -> None:
    block = "import sys; sys.modules['matplotlib'] = None; from memsave_recipes.tools.cli import main; "
    words = ["compare", str(runs), f"--{flag}", str(runs / "out")]
    done = subprocess.run([sys.executable, "-c", f"{block}sys.exit(main({words}))"], capture_output=True, text=True)
    assert done.returncode == 2
    hint = "pip install 'memsave-recipes[plots]'"
    assert done.stderr == f"error: charts need matplotlib, which is not installed: {hint}\n"


def test_it_runs_as_a_module(runs: Path) -> None:
    command = [sys.executable, "-m", "memsave_recipes.tools.cli", "compare", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "segments:2" in done.stdout


@pytest.mark.parametrize("command", ["recipes", "compare"])
def test_a_reader_that_has_gone_ends_it_in_silence(command: str, runs: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [command, str(runs)] if command == "compare" else [command]
    with os.fdopen(writing, "wb") as out:
        called = [sys.executable, "-m", "memsave_recipes.tools.cli", *words]
        done = subprocess.run(called, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


RUN = [sys.executable, "-m", "memsave_recipes.tools.cli"]


@pytest.mark.parametrize(
    ("to", "expected"), [(">&-", "stdout is closed"), (">/dev/full", "stdout takes no text"), (">/dev/null", None)]
)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_stdout_that_takes_nothing_is_one_line_and_exit_code_2(to, expected, buffered, runs: Path) -> None:
    line = f"{shlex.join([*RUN, 'compare', str(runs)])} {to}"
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == (2 if expected else 0)
    assert len(done.stderr.splitlines()) == bool(expected)
    assert f"error: {expected}" in done.stderr if expected else not done.stderr


def test_a_stdout_of_few_letters_gets_escapes(runs: Path) -> None:
    (runs / "a-segments").rename(runs / "é→")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*RUN, "compare", str(runs)], capture_output=True, env=environment, check=True)
    assert "é\\u2192".encode("latin-1") in done.stdout


@pytest.mark.parametrize(("name", "code"), [("a\x1b[31mb", 0), ("x" * 300, 2)])
def test_recipes_are_copied_whatever_the_folder_is_called(name, code, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "--copy", name]) == code
    out, err = capsys.readouterr()
    assert (out + err).splitlines()[0].replace("\n", "").isprintable()
    assert len(err.splitlines()) == (code == 2)
