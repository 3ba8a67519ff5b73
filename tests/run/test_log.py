"""``run.log`` has the lines of the terminal, without what is redrawn, and costs no run anything."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from tqdm import tqdm

from memsave_recipes.run.failures import recorded, write_log


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@contextmanager
def recorded_on_a_terminal() -> Iterator[Terminal]:
    """It stands behind both streams."""
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal), recorded():
        yield terminal


def lines_of(folder: Path) -> list[str]:
    """Those below the command line that each life of a run begins with."""
    first, *others = (folder / "run.log").read_text().splitlines()
    assert first.startswith("# 20")
    assert sys.argv[0] in first
    return others


def test_lines_before_and_after_the_run_has_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with recorded():
        print("before, äöü")
        print("a warning", file=sys.stderr)
        assert list(tmp_path.iterdir()) == []
        write_log(tmp_path)
        print("after", "it", end="  \n\n")
        assert lines_of(tmp_path) == ["before, äöü", "a warning", "after it", ""]
    print("nobody keeps this")
    assert lines_of(tmp_path) == ["before, äöü", "a warning", "after it", ""]
    assert capsys.readouterr().out == "before, äöü\nafter it  \n\nnobody keeps this\n"


def test_the_streams_stay() -> None:
    with recorded_on_a_terminal() as terminal:
        assert sys.stdout is sys.stderr is terminal
        assert sys.stdout.isatty()


def test_bars_and_colours_are_left_out(tmp_path: Path) -> None:
    with recorded_on_a_terminal() as terminal:
        write_log(tmp_path)
        for step in tqdm(range(3), mininterval=0):
            for _ in tqdm(range(2), mininterval=0, leave=False):
                pass
            if step == 1:
                print("\x1b[1mnote\x1b[0m: in the \x1b]8;;http://x\x1b\\middle\x1b]8;;\x1b\\", file=sys.stderr)
        print("\r50 %\r100 %\r\nend")
    assert terminal.getvalue().count("\r") > 10
    assert lines_of(tmp_path) == ["note: in the middle", "100 %", "end"]


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for life in ("first", "second"):
        with recorded():
            print(life)
            write_log(tmp_path)
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("# ")] == ["first", "second"]
    assert len(lines) == 4


def test_an_error_that_nobody_expected_is_added(tmp_path: Path) -> None:
    def run() -> None:
        with recorded(), recorded():
            write_log(tmp_path)
            print(1 / 0)

    with pytest.raises(ZeroDivisionError):
        run()
    lines = lines_of(tmp_path)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["/dev/full", "/nonexistent/run.log"])
def test_a_disk_that_takes_nothing_ends_the_log_alone(tmp_path: Path, name: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run.log").symlink_to(name)
    with recorded():
        write_log(tmp_path)
        print("goes on")
        print("and on")
    assert capsys.readouterr().out == "goes on\nand on\n"


def test_other_ranks_write_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with recorded():
        write_log(tmp_path)
        print("told by another rank")
    assert list(tmp_path.iterdir()) == []
