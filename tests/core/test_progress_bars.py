"""Progress bars: after five seconds, on a terminal, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest

from memsave_recipes.core import progress
from memsave_recipes.core.progress import ProgressBar

END = "the end"


@contextmanager
def terminal():
    """A stream to write on, and a function that returns what the terminal behind it has shown."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))  # of no columns at first, into which no bar fits
    stream = os.fdopen(theirs, "w")

    def shown():
        stream.write(END)
        stream.flush()
        found = b""
        while not found.endswith(END.encode()):
            found += os.read(ours, 2**16)
        return found.decode().removesuffix(END)

    try:
        yield stream, shown
    finally:
        stream.close()
        os.close(ours)


def run_through_a_bar(**options):
    for _ in ProgressBar(range(3), desc="measuring blocks", mininterval=0, **options):
        pass


@pytest.mark.parametrize(("after_s", "shown"), [(0, True), (5, False)])
def test_a_terminal_has_it_after_some_seconds(monkeypatch, after_s, shown):
    monkeypatch.setattr(progress, "BAR_AFTER_S", after_s)
    with terminal() as (stream, read):
        monkeypatch.setattr(sys, "stderr", stream)
        run_through_a_bar()
        assert ("measuring blocks: 100%" in read()) is shown


def test_of_several_ranks_one_shows_it(monkeypatch):
    with terminal() as (stream, read):
        monkeypatch.setattr(sys, "stderr", stream)
        run_through_a_bar(shown=False, delay=0)
        assert read() == ""


@pytest.mark.parametrize(("after_s", "shown"), [(0.01, True), (5, True), (0.01, False)])
def test_elsewhere_a_line_tells_of_slow_work(monkeypatch, after_s, shown):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "BAR_AFTER_S", after_s)
    monkeypatch.setattr(ProgressBar, "told", set())
    for _ in range(2):
        with ProgressBar(desc="planning", shown=shown):
            time.sleep(0.3)
    assert stream.getvalue() == ("planning takes more than 0.01 s ...\n" if after_s < 1 and shown else "")


def test_another_stream_has_none(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run_through_a_bar(delay=0)
    assert stream.getvalue() == ""


FORKED = """
import os
from memsave_recipes.core.progress import ProgressBar
child = os.fork()
for _ in ProgressBar(range(3), delay=0, mininterval=0):
    pass
if child:
    os.waitpid(child, 0)
"""


def test_a_pipe_has_none_from_a_forked_process():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
