"""Digests of the training data that fit into a checkpoint: is it the same, and where does it begin to differ?

NOTE [ the same data ]
1. Each sample has a digest, in the order of the data set. Of more than 65,536 samples a few in a row share one.
2. Texts are compared by their tokens and labels, images of the Hub and built-in ones by their bytes and labels. Images
   in a folder are compared by name, size and label, because reading all of them takes long.
3. So an image in a folder that has the same name, size and label, but other pixels, passes.
4. What only one of two fingerprints has is not compared.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memsave_recipes.core.text import join_names

MAX_DIGESTS = 2**16
MAX_NAMED = 6

Record = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """The samples of a split: their digests, int64 (N,), and a name for the one at a place, from 0."""

    digests: np.ndarray
    name_of: Callable[[int], str]

    def record(self) -> Record:
        """Return the number of samples, and digests of groups of equally many, int64 (G,), for a checkpoint."""
        return {"count": len(self.digests), "digests": torch.from_numpy(self._of_groups())}

    def difference(self, saved: Record) -> str | None:
        """Say where they differ from those of an earlier ``record``; ``None`` where they do not."""
        count, size = len(self.digests), _group_size(len(self.digests))
        sizes = f"{saved['count']:,} were and {count:,} are" if saved["count"] != count else ""
        comparable = _group_size(saved["count"]) == size
        first = self._first_difference(saved["digests"].numpy()) * size if comparable else count
        if not sizes and first >= count:
            return None
        named = self.name_of(first) if first < count else ""
        if named and size > 1:
            named = f"among the {size:,} from {named} on"
        return ", ".join(filter(None, [sizes, named and f"the first that differs is {named}"]))

    def _of_groups(self) -> np.ndarray:
        size = _group_size(len(self.digests))
        if size == 1:
            return self.digests
        groups = (self.digests[start : start + size] for start in range(0, len(self.digests), size))
        return np.array([digest_of(group.tobytes()) for group in groups], dtype=np.int64)

    def _first_difference(self, saved: np.ndarray) -> int:
        """Find the first group that differs from ``saved``; the number of groups where none does."""
        groups = self._of_groups()
        common = min(len(groups), len(saved))
        differs = np.flatnonzero(groups[:common] != saved[:common])
        return int(differs[0]) if len(differs) else common


@dataclass(frozen=True, eq=False, kw_only=True)
class Fingerprint:
    """The data of a run: NOTE [ the same data ]. Splits are named as in ``training images: the first that differs``.

    Args:
        tokenizer: a digest of its vocabulary.
    """

    samples: dict[str, Samples]
    label_names: tuple[str, ...] = ()
    tokenizer: str = ""

    def record(self) -> Record:
        """Return all digests, for a checkpoint."""
        samples = {name: one.record() for name, one in self.samples.items()}
        return {"samples": samples, "label_names": list(self.label_names), "tokenizer": self.tokenizer}

    def differences(self, saved: Record) -> list[str]:
        """Say how the data differ from an earlier ``record``, in a few words each."""
        found = []
        if saved["label_names"] != list(self.label_names):
            found.append(f"class names: {_change_of_names(saved['label_names'], list(self.label_names))}")
        if saved["tokenizer"] != self.tokenizer:
            found.append("the tokenizer is another one")
        both = [name for name in self.samples if name in saved["samples"]]
        differences = {name: self.samples[name].difference(saved["samples"][name]) for name in both}
        return found + [f"{name}: {words}" for name, words in differences.items() if words]


def digest_of(content: bytes) -> int:
    """Return 64 bits of a BLAKE2 hash, as a signed number."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def sha256_of_file(path: str | Path) -> str:
    """Return the digest in hexadecimal, as ``sha256sum`` writes it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _group_size(count: int) -> int:
    return max(1, ceil(count / MAX_DIGESTS))


def _change_of_names(was: list[str], now: list[str]) -> str:
    gone, new = ([name for name in names if name not in other] for names, other in ((was, set(now)), (now, set(was))))
    changes = [f"{join_names(names, MAX_NAMED)} {how}" for names, how in ((gone, "gone"), (new, "new")) if names]
    return ", ".join(changes) or "in another order"
