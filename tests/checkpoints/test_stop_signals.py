"""What a signal does to a process: a note at first, the end when it is meant a second time."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from memsave_recipes.checkpoints import StoppedBySignal, StopSignals
from memsave_recipes.checkpoints.signals import EXIT_CODES


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_signal_is_noted_and_the_first_one_counts(number):
    with StopSignals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == number


def test_the_handlers_that_were_there_come_back():
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    StopSignals().remove()
    assert {number: signal.getsignal(number) for number in EXIT_CODES} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_the_end_has_the_code_of_the_signal_and_a_line(tmp_path, number, code):
    stopped = StoppedBySignal(number, 7, tmp_path)
    assert stopped.code == code
    assert (
        stopped.message == f"{number.name}: stopped after 7 steps, all of them saved in {tmp_path}: go on with --resume"
    )


PROGRAM = """
    import sys, time
    from memsave_recipes.checkpoints import signals
    signals.SAME_KEYSTROKE_S = 0.2
    stop = signals.StopSignals()
    print("ready", flush=True)
    while not stop.received:
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep(20)
"""


def test_a_second_ctrl_c_ends_at_once_but_not_the_same_one_passed_on():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the same keystroke, from the launcher
        assert process.stdout.readline() == "noted\n"
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
