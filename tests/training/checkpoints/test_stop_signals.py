"""What a signal does to a process: a note at first; ``tests/training/launch/test_forced_end.py`` has what follows."""

import os
import signal

import pytest

from memsave_recipes.training.checkpoints import StoppedBySignal, StopSignals
from memsave_recipes.training.launch.processes import EXIT_CODES


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
