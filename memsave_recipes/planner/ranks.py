"""Ranks that measure and plan together, each in its own process: one plan for all, whatever each of them finds.

Only ``torch.distributed`` is asked, so the ranks may be those of Accelerate, of Lightning or of a script. Every method
is called on all ranks. The recipes have ``memsave_recipes.distributed`` for the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from memsave_recipes.errors import InputError
from memsave_recipes.profiling.memory import is_out_of_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training; by default a process that is alone."""

    rank: int = 0
    number: int = 1

    @classmethod
    def of_world(cls) -> "Ranks":
        """Those of the default process group, if there is one."""
        grouped = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if grouped else cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints."""
        return self.rank == 0

    def of_first(self, action: Callable[[], T]) -> T:
        """What the first rank's ``action()`` returns, on all ranks.

        Raises:
            InputError, RuntimeError: on all ranks, where the first one failed.
        """
        result: T | None = self.attempt(lambda: action() if self.is_first else None)
        found: T = self._of_all(result)[0]
        return found

    def largest(self, number: int) -> int:
        """The largest number of all ranks."""
        of_ranks: list[int] = self._of_all(number)
        return max(of_ranks)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """``action()`` of this rank; ``None`` on all ranks, where one of them ran out of memory.

        Raises:
            InputError, RuntimeError: on all ranks, where one failed otherwise; its own error on that one.
        """
        result, failed, other = None, False, None
        try:
            result = action()
        except Exception as error:  # not kept where memory is out: its frames hold the tensors of the failed step
            failed, other = (True, None) if is_out_of_memory(error) else (False, error)
        told = None if other is None else (isinstance(other, InputError), str(other) or type(other).__name__)
        of_ranks = self._of_all((failed, told))
        try:
            if other is not None:
                raise other
        finally:
            other = None  # it holds this frame, which would hold it, and the tensors of both, until they are collected
        for is_mistake, message in (told for _, told in of_ranks if told):
            raise InputError(message) if is_mistake else RuntimeError(f"another rank failed: {message}")
        return None if any(failed for failed, _ in of_ranks) else result

    def _of_all(self, value: Any) -> list[Any]:
        found = [value] * self.number
        if self.number > 1:
            dist.all_gather_object(found, value)
        return found
