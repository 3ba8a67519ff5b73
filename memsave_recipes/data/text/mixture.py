"""Documents of several sources, in shares that weights give.

NOTE [ mixture ]
1. A pass over a mixture has as much text as its sources have together; the weights say how much of that comes from
   each, in bytes of UTF-8 and up to a document. Bytes, because tokens follow them, whereas documents may differ in
   length from source to source.
2. A source with more text than its share leaves documents out, at random by the seed; they are the same ones in every
   pass. One with less repeats all its documents equally often, and some of them once more.
3. Documents of all sources follow one another in a random order by the seed, so that each part of the line of tokens
   has the mixture, and so has the text that a tokenizer is trained on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import datasets
import numpy as np

from memsave_recipes.errors import InputError


class _Part(NamedTuple):
    """What a pass takes from a source: documents by their indices, and their bytes."""

    indices: np.ndarray  # (M,)
    num_bytes: int


def mix(
    documents: datasets.Dataset, names: Sequence[str], weights: Sequence[float], seed: int
) -> tuple[datasets.Dataset, str]:
    """A pass over ``documents`` (``text``, and ``source`` from 0 on) by NOTE [ mixture ], and a line about it.

    Args:
        names: of the sources.
        weights: of the sources, above 0, with any sum.

    Raises:
        InputError: a source has no documents.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    num_bytes = _num_bytes(documents)
    source_of = documents.with_format("numpy")["source"][:]
    members = [np.flatnonzero(source_of == number) for number in range(len(names))]
    for name, indices in zip(names, members, strict=True):
        if not len(indices):
            raise InputError(f"--mix_weights: {name} has no text to train on: leave it and its weight out")
    shares = np.asarray(weights) / np.sum(weights) * num_bytes.sum()
    parts = [_drawn(indices, num_bytes, share, generator) for indices, share in zip(members, shares, strict=True)]
    mixed = documents.select(generator.permutation(np.concatenate([part.indices for part in parts])))
    return mixed, _note(names, members, parts)


def _drawn(indices: np.ndarray, num_bytes: np.ndarray, share: float, generator: np.random.Generator) -> _Part:
    """Documents with ``share`` bytes: all as often as they fit in whole, and random ones once more; one at least."""
    order = generator.permutation(indices)
    repeats, rest = divmod(share, int(num_bytes[indices].sum()))
    sums = np.concatenate([[0], np.cumsum(num_bytes[order])])
    nearest = int(np.abs(sums - rest).argmin())
    drawn = np.concatenate([np.tile(indices, int(repeats)), order[: nearest or (not repeats)]])
    return _Part(drawn, int(num_bytes[drawn].sum()))


def _note(names: Sequence[str], members: Sequence[np.ndarray], parts: Sequence[_Part]) -> str:
    total = sum(part.num_bytes for part in parts)
    taken = [
        f"{len(part.indices):,} documents from {name} (of {len(indices):,}; {part.num_bytes / total:.1%} of the bytes)"
        for name, indices, part in zip(names, members, parts, strict=True)
    ]
    return f"a pass takes {', '.join(taken)}"


def _num_bytes(documents: datasets.Dataset) -> np.ndarray:
    """Of each document in UTF-8, int64 (N,)."""
    measured = documents.map(_measure, batched=True, input_columns="text", remove_columns=documents.column_names)
    sizes: np.ndarray = measured.with_format("numpy")["num_bytes"][:]
    return sizes


def _measure(texts: list[str]) -> dict[str, list[int]]:
    return {"num_bytes": [len(text.encode()) for text in texts]}
