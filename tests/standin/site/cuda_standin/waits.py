"""What the host waits for, with the lines that cause it, and how many operators it launches.

``STANDIN_WAITS=FOLDER`` writes a file a process there when it ends.
"""

import atexit
import collections
import ctypes
import json
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

LIBRARY = torch.library.Library("aten", "IMPL")
FOLDER = os.environ.get("STANDIN_WAITS")
HERE = str(Path(__file__).parent)
waits: collections.Counter[tuple[str, str]] = collections.Counter()
"""By what was done and the line that did it, such as ``("item", "recipe.py:30 main < ...")``."""


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note(kind: bytes) -> None:
    waits[kind.decode(), _callers()] += 1


def _callers() -> str:
    """The innermost line of the checkout and, where another library waited for it, the innermost of all."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(HERE)]
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    named = [*ours[-1:], *frames[-1:]]
    lines = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in named]
    return " <- ".join(dict.fromkeys(lines)) or "autograd"  # whose own thread has no line of Python


def _write() -> None:
    assert FOLDER
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    rows = [{"kind": kind, "where": where, "count": count} for (kind, where), count in waits.most_common()]
    (Path(FOLDER) / f"{os.getpid()}.json").write_text(json.dumps(rows, indent=1))


_count: Callable[[], int]
_nested = 0  # operators that are a part of another one


def launches() -> int:
    """Operators of this process that computed on a device or copied, one each: a fused one is one."""
    return _count() - _nested


def as_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Count a ``kernel`` that is made of operators as one."""

    @wraps(kernel)
    def counted(*args: Any, **options: Any) -> Any:
        global _nested
        before = _count()
        try:
            return kernel(*args, **options)
        finally:
            _nested += _count() - before - 1

    return counted


def _count_lists_as_one() -> None:
    """Count an operator on a list of tensors as CUDA launches it; here it takes one after the other."""
    one_by_one = "CompositeExplicitAutograd"
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(one_by_one):
        if name.startswith("aten::_foreach_"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernel = partial(operator._op_dk, getattr(torch._C.DispatchKey, one_by_one))
            with warnings.catch_warnings(action="ignore"):  # of a kernel that is there: the one that it calls
                LIBRARY.impl(name, as_one(kernel), "CUDA")


def install(library: ctypes.CDLL) -> None:
    """Count operators from now on, and waits where a folder for them is named."""
    global _count
    _count = library.standin_launches
    _count_lists_as_one()
    if FOLDER:
        library.standin_on_wait(_note)
        atexit.register(_write)
