"""Items that a second process makes while the first one goes on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from memsave_recipes.core.processes import serve_parent_only

T = TypeVar("T")
STDOUT, STDERR = 1, 2
NEXT = "next"


@contextmanager
def ahead(items: Iterator[T], *, all_at_once: bool = False) -> Iterator[Iterator[T]]:
    """Let another process make ``items``: the first from now on, any further one when it is asked for.

    That process is a fork, as torch's data workers are: it imports nothing again. It writes nothing, and is killed at
    the end. Where it is lost, on systems other than Linux, and where torch has been built for a device, whose threads
    of autograd no fork has, ``items`` are made here.

    Args:
        items: they, and the exceptions that making them raises, can be pickled.
        all_at_once: go on with the next one at once.
    """
    if sys.platform != "linux" or torch.backends.cuda.is_built() or torch.accelerator.is_available():
        yield items
        return
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(items, theirs, all_at_once), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _received(ours, items, all_at_once)
    finally:
        process.kill()
        process.join()
        ours.close()


def _send(items: Iterator[T], parent: Connection, all_at_once: bool) -> None:
    serve_parent_only()
    torch.set_num_threads(1)  # a fork has none of the threads that OpenMP counts on
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.dup2(nowhere, STDERR)
    try:
        for item in items:
            parent.send(([item], None))
            if not all_at_once:
                parent.recv()
        parent.send(([], None))
    except Exception as error:
        parent.send(([], error))


def _received(child: Connection, items: Iterator[T], all_at_once: bool) -> Iterator[T]:
    for number in count():
        try:
            if number and not all_at_once:
                child.send(NEXT)
            found, error = child.recv()
        except (EOFError, OSError):
            yield from islice(items, number, None)
            return
        if error is not None:
            raise error
        if not found:
            return
        yield from found
