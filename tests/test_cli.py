"""``memsave compare`` reads folders of runs, names what it leaves out, and answers a mistake with one line and 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memsave_recipes.cli import main


def write_run(folder: Path, plan: str, peak: float) -> Path:
    folder.mkdir(parents=True)
    results = {"model": "vgg11", "plan": plan, "global_batch_size": 64, "memory": {"peak_allocated_gib": peak}}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
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


def test_the_baseline_can_be_chosen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "b-plain"), "--baseline", str(runs / "a-segments")]) == 0
    assert "+100 %" in capsys.readouterr().out


def test_broken_folders_are_named_and_left_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_run(runs / "killed", "none", 9.0) / "results.json").unlink()
    (write_run(runs / "torn", "none", 9.0) / "metrics.jsonl").write_text('{"st')
    assert main(["compare", str(runs), str(runs / "missing")]) == 0
    out, err = capsys.readouterr()
    skipped = {str(runs / name) for name in ("killed", "torn", "missing")}
    assert {line.removeprefix("skipped: ").split(" ")[0] for line in err.splitlines()} == skipped
    assert "b-plain" in out
    assert "killed" not in out


def test_no_run_at_all_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {tmp_path} holds no run: name an --output_dir, or a folder of them\n"


def test_a_broken_baseline_is_exit_code_2(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--baseline", str(runs)]) == 2
    assert "is not a finished run" in capsys.readouterr().err


def test_it_runs_as_a_module_and_without_torch(runs: Path) -> None:
    check = "import sys; from memsave_recipes.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for command in (["-m", "memsave_recipes.cli"], ["-c", check]):
        done = subprocess.run([sys.executable, *command, "compare", str(runs)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "segments:2" in done.stdout
