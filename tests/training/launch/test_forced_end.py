"""A first signal asks a run to stop; a second one, or too long a wait, ends it wherever it hangs."""

import signal
import subprocess
import sys

import pytest

from memsave_recipes.training.launch.processes import LOST, SignalHistory

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
SAME_KEYSTROKE_S = 0.2

# It waits as in a collective: in C, without Python's lock, in calls that a signal does not end.
HANGING = """
import ctypes, sys
from memsave_recipes.training.launch import processes
processes.SAME_KEYSTROKE_S = float(sys.argv[1])
processes.StopSignals(float(sys.argv[2]) or None)
print("ready", flush=True)
lock = (ctypes.c_char * 256)()
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)
"""


@pytest.fixture
def hanging():
    """Start one that hangs, with that limit after a signal."""
    started = []

    def start(limit_s=0.0):
        command = [sys.executable, "-c", HANGING, str(SAME_KEYSTROKE_S), str(limit_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lives_on(process):
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        return True
    return False


@pytest.mark.parametrize(
    "numbers",
    [(INT, INT), (USR1, TERM, TERM)],
    ids=lambda numbers: " ".join(number.name for number in numbers),
)
def test_a_second_signal_ends_a_run_that_hangs(hanging, numbers):
    process = hanging()
    for number in numbers[:-1]:
        process.send_signal(number)
        assert lives_on(process)
    process.send_signal(numbers[-1])
    _, printed = process.communicate(timeout=20)
    assert process.returncode == {INT: 130, TERM: 143}[numbers[-1]]
    assert printed == (
        f"\n{numbers[-1].name} after {numbers[0].name}: ended at once, in the middle of a step; "
        "the last checkpoint is as it was, go on with --resume\n"
    )


@pytest.mark.parametrize("number", [INT, TERM])
def test_what_a_launcher_passes_on_does_not_insist(number):
    insistence = SignalHistory()
    assert not insistence.forces_end(number, at=10.0)
    assert not insistence.forces_end(number, at=10.9)
    assert insistence.forces_end(number, at=11.0)


def test_a_step_without_an_end_has_one_after_a_signal(hanging):
    process = hanging(limit_s=0.5)
    assert lives_on(process)  # nothing has asked it to stop
    process.send_signal(TERM)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == LOST == 6
    assert printed.startswith("\nerror: 0.5 s after SIGTERM the run has not stopped: ended in the middle of a step")
