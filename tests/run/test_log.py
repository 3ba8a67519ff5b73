"""``run.log`` has what a run says on the terminal, and costs no run anything."""

import io
import logging
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rich.text import Text

from memsave_recipes.core.text import say
from memsave_recipes.run.failures import recorded, write_log
from memsave_recipes.tools.pages import new_table, show_all
from memsave_recipes.training.launch.start import Accelerator


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def lines_of(folder: Path) -> list[str]:
    """Those below the command line that each life of a run begins with."""
    first, *others = (folder / "run.log").read_text().splitlines()
    assert first.startswith("# 20")
    assert sys.argv[0] in first
    return others


def test_lines_before_and_after_the_run_has_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with recorded():
        say("before, äöü, 100 %d")
        say("an error", file=sys.stderr)
        assert list(tmp_path.iterdir()) == []
        write_log(tmp_path)
        say("after\nit")
        assert lines_of(tmp_path) == ["before, äöü, 100 %d", "an error", "after", "it"]
    say("nobody keeps this")
    assert lines_of(tmp_path) == ["before, äöü, 100 %d", "an error", "after", "it"]
    out, err = capsys.readouterr()
    assert out == "before, äöü, 100 %d\nafter\nit\nnobody keeps this\n"
    assert err == "an error\n"


def test_tables_are_kept_without_colours_and_streams_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = new_table()
    table.add_column("plan")
    table.add_row(Text("full", style="bold red"))
    with redirect_stdout(Terminal()) as terminal, recorded():
        write_log(tmp_path)
        show_all(table, "a sentence")
        assert sys.stdout is terminal
    assert "\x1b[" in terminal.getvalue()
    *_, row, _, sentence = lines_of(tmp_path)
    assert (row, sentence) == (" full", "a sentence")


def test_what_accelerate_prints_and_others_warn_of_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with recorded():
        write_log(tmp_path)
        Accelerator().print("a", "note", sep=": ")
        logging.getLogger("of.somebody").warning("logged")
        warnings.warn("warned of", stacklevel=1)
    first, second, third, *_ = lines_of(tmp_path)
    assert (first, second) == ("a: note", "logged")
    assert "UserWarning: warned of" in third
    assert capsys.readouterr().out == "a: note\n"


def test_warnings_stay_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with recorded():
        logging.getLogger("of.somebody").warning("logged")
    assert capsys.readouterr().err == "logged\n"


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for life in ("first", "second"):
        with recorded():
            say(life)
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
        say("goes on")
        say("and on")
    assert capsys.readouterr() == ("goes on\nand on\n", "")


def test_other_ranks_write_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with recorded():
        write_log(tmp_path)
        say("told by another rank")
    assert list(tmp_path.iterdir()) == []
