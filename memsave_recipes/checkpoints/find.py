"""The newest checkpoint that is whole; damaged ones are named, and never a reason to start from zero."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memsave_recipes.checkpoints.commit import discard
from memsave_recipes.checkpoints.manifest import Damaged, check_seal
from memsave_recipes.errors import InputError

STEP = "step"
BEST = "best"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and the newer ones that are damaged, each with what is wrong with it."""

    path: Path
    step: int
    damaged: dict[Path, str]

    @property
    def notices(self) -> list[str]:
        """What was skipped, a line each."""
        return [f"note: skipped the damaged checkpoint {path}: {reason}" for path, reason in self.damaged.items()]


def committed(folder: Path, kind: str = STEP) -> list[tuple[int, Path]]:
    """The checkpoints in ``folder``, whole or damaged, newest first; each with its step."""
    matches = ((re.fullmatch(rf"{kind}-(\d+)", path.name), path) for path in folder.glob(f"{kind}-*"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def find_newest(folder: Path, kind: str = STEP) -> Found | None:
    """The newest whole checkpoint; ``None`` where none was ever committed.

    Raises:
        InputError: there are checkpoints and all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for step, path in committed(folder, kind):
        try:
            check_seal(path)
        except Damaged as error:
            damaged[path] = str(error)
        else:
            return Found(path=path, step=step, damaged=damaged)
    if damaged:
        named = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise InputError(
            f"--resume finds no whole checkpoint in {folder} ({named}): put one back from a backup, or begin anew "
            "with --overwrite"
        )
    return None


def prune(folder: Path, kind: str, *, newest: int, keep: int, damaged: Iterable[Path] = ()) -> None:
    """Keep ``keep`` checkpoints up to step ``newest``, which has just been committed; give up all others.

    Those of later steps belong to a run that was not gone on with, because they are damaged.
    """
    known = set(damaged)
    candidates = [path for step, path in committed(folder, kind) if step <= newest and path not in known]
    kept = set(candidates[:keep])
    for _, path in committed(folder, kind):
        if path not in kept:
            discard(path)
