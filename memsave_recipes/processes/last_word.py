"""Word that a rank leaves of its end, for those that wait for it in a collective."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

ENDED_WITH = "memsave_recipes/ended_with"
SECOND_RANK_S = 2.0
"""The others let the rank that speaks end first: with it the launcher ends them, and nothing is said twice."""


def tell_ranks(code: int) -> None:
    """Leave word of the code that this one ends with."""
    if dist.is_initialized():
        _get_default_store().set(ENDED_WITH, str(code))


def code_of_another_rank() -> int | None:
    """The code that one of them has left; ``None`` where none did. Ask when a collective has failed."""
    try:
        if dist.is_initialized() and _get_default_store().check([ENDED_WITH]):
            return int(_get_default_store().get(ENDED_WITH))
    except RuntimeError:  # the process that kept the word has ended as well
        pass
    return None
