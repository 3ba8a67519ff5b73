"""Progress bars; nothing else of the core imports this module, which needs tqdm."""

import sys
from collections.abc import Iterable
from threading import Timer
from typing import Any, ClassVar, Self

from tqdm import tqdm

BAR_AFTER_S = 5


class ProgressBar(tqdm):  # type: ignore[misc, unused-ignore]  # tqdm has no types
    """A bar of tqdm that appears on stderr after five seconds, where that is a terminal; every bar is one of these.

    Elsewhere a ``with`` block that takes longer says so, in one line, which others of its ``desc`` do not repeat.

    Args:
        shown: whether this process may show it; of several ranks, the first.
        options: of tqdm.
    """

    told: ClassVar[set[str]] = set()

    def __init__(self, iterable: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> None:
        disable = None if shown else True  # None: where the stream is no terminal
        super().__init__(iterable, disable=disable, **{"delay": BAR_AFTER_S, "leave": False, **options})
        line = f"{options.get('desc', 'working')} takes more than {BAR_AFTER_S} s ..."
        self._timer = Timer(BAR_AFTER_S, self._tell, [line]) if shown and self.disable else None

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.close()

    def _tell(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            print(line, file=sys.stderr, flush=True)
