"""Items that another process makes while this one goes on."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from memsave_recipes.core import processes as module
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.processes import ahead


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def pids(count):
    for _ in range(count):
        yield os.getpid()


def test_items_come_from_another_process_in_order():
    def items():
        yield "first"
        yield os.getpid()

    with ahead(items()) as made:
        first, pid = made
    assert first == "first"
    assert pid != os.getpid()


def test_the_first_is_made_before_it_is_asked_for(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"

    def items():
        first.touch()
        yield 1
        second.touch()
        yield 2

    with ahead(items()) as made:
        deadline = time.monotonic() + 60
        while not first.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert next(made) == 1
        assert not second.exists()
        assert next(made) == 2


def test_all_are_made_before_they_are_asked_for(tmp_path):
    last = tmp_path / "last"

    def items():
        yield 1
        yield 2
        last.touch()

    with ahead(items(), all_at_once=True) as made:
        deadline = time.monotonic() + 60
        while not last.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [*made] == [1, 2]


def test_an_error_is_raised_where_the_item_is_asked_for():
    def items():
        yield 1
        raise InputError("--length 3: too short")

    with ahead(items()) as made:
        assert next(made) == 1
        with pytest.raises(InputError, match="--length 3: too short"):
            next(made)


def test_what_a_lost_process_has_not_sent_is_made_here():
    here = os.getpid()

    def items():
        yield 1
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from pids(2)

    with ahead(items()) as made:
        assert [*made] == [1, here, here]


def test_its_process_ends_with_the_context():
    def items():
        yield from pids(1)
        time.sleep(600)

    with ahead(items()) as made:
        pid = next(made)
        assert pid in [process.pid for process in multiprocessing.active_children()]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (module.sys, "platform", "darwin"),
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.accelerator, "is_available", lambda: True),
    ],
    ids=["no Linux", "built for CUDA", "a device"],
)
def test_without_forks_items_are_made_here(monkeypatch, place, name, value):
    monkeypatch.setattr(place, name, value)
    with ahead(pids(2)) as made:
        assert [*made] == [os.getpid()] * 2
