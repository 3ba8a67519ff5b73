"""A split as one line of tokens on disk: document after document, each followed by the end-of-text token.

Tokenizing runs through ``datasets.map``: bounded memory, and cached under the content of documents and tokenizer. The
cache does not depend on the length of the rows that are cut from it later.

A document of more than 256 Ki characters is tokenized in parts that end with a line where possible, because the
encoding of a text takes about a hundred times its memory. No text is lost there, but a word or two in a part may be
merged otherwise than in one piece, and a tokenizer that puts a space before every text puts one before every part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from memsave_recipes.data.text import LONG_BYTES, progress_bars
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Samples, digest_of

PART_CHARACTERS = 2**18
PARTS_AT_ONCE = 64
PIECE_TOKENS = 4096  # of a row on disk: the most that is read in vain at either end of a span
PIECES = Features(
    {
        "input_ids": List(Value("int32")),
        "num_tokens": Value("int32"),
        "document_bytes": Value("int64"),
        "digest": Value("int64"),
    }
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenLine:
    """The tokens of all documents of a split, in their order.

    Args:
        pieces: rows of tokens on disk; no row holds tokens of two documents.
        piece_starts: where each piece begins in the line, and at last its length; int64 (P + 1,).
        document_starts: where each document begins, and at last the length of the line; int64 (D + 1,).
        piece_digests: of the tokens of each piece; int64 (P,).
        num_bytes: of all documents in UTF-8.
    """

    pieces: datasets.Dataset
    piece_starts: np.ndarray
    document_starts: np.ndarray
    piece_digests: np.ndarray
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Of all documents, with their beginnings and ends where the tokenizer marks them."""
        return int(self.piece_starts[-1])

    def between(self, start: int, stop: int) -> np.ndarray:
        """The tokens ``start`` to ``stop - 1`` of the line, int64 (stop - start,)."""
        first, last = np.searchsorted(self.piece_starts, [start, stop - 1], side="right") - 1
        tokens = np.concatenate(self.pieces[int(first) : int(last) + 1]["input_ids"])
        skipped = start - self.piece_starts[first]
        return tokens[skipped : skipped + stop - start]

    def samples(self, split: str) -> Samples:
        """The tokens by digests, for a fingerprint; ``split`` names them in messages."""

        def name_of(piece: int) -> str:
            number = np.searchsorted(self.document_starts, self.piece_starts[piece], side="right")
            return f"document {number} of the {split}"

        return Samples(digests=self.piece_digests, name_of=name_of)


def tokenize_documents(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> TokenLine:
    """The line of tokens of ``documents`` (column ``text``).

    A document begins as the tokenizer begins a text, such as with Llama's ``<|begin_of_text|>``. Special tokens that
    are spelt out in a text are taken as such, as everywhere in transformers.

    Raises:
        InputError: the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "the tokenizer has no end-of-text token (eos_token), so that no document would end: add one to its "
            "tokenizer_config.json, or leave --tokenizer_name out to train one"
        )
    share = len(documents) / documents.data.num_rows  # the table may hold the documents of another split as well
    with progress_bars(share * documents.data.nbytes > LONG_BYTES):
        pieces = documents.map(
            _tokenize,
            batched=True,
            batch_size=PARTS_AT_ONCE,
            input_columns="text",
            remove_columns=documents.column_names,
            features=PIECES,
            fn_kwargs={"tokenizer": tokenizer},
            desc="tokenizing",
        ).with_format("numpy")
    document_bytes = pieces["document_bytes"][:]
    piece_starts = np.concatenate([[0], np.cumsum(pieces["num_tokens"][:], dtype=np.int64)])
    return TokenLine(
        pieces=pieces.select_columns("input_ids"),
        piece_starts=piece_starts,
        document_starts=piece_starts[np.append(document_bytes > 0, True)],
        piece_digests=pieces["digest"][:],
        num_bytes=int(document_bytes.sum()),
    )


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    """The pieces of whole documents; ``document_bytes`` is 0 where a piece goes on with the document before it."""
    rows: dict[str, list[Any]] = {name: [] for name in PIECES}
    for text, tokens in zip(texts, _encode(texts, tokenizer), strict=True):
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            rows["input_ids"].append(piece)
            rows["num_tokens"].append(len(piece))
            rows["document_bytes"].append(0 if start else len(text.encode()))
            rows["digest"].append(digest_of(piece.tobytes()))
    return rows


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    beginning = tokenizer("")["input_ids"]  # the special tokens around a text
    if beginning and beginning[-1] == tokenizer.eos_token_id:
        beginning = beginning[:-1]
    tokens = [[np.asarray(beginning, dtype=np.int32)] for _ in texts]
    parts = [(number, part) for number, text in enumerate(texts) for part in _parts(text)]
    for first in range(0, len(parts), PARTS_AT_ONCE):
        numbers, group = zip(*parts[first : first + PARTS_AT_ONCE], strict=True)
        encoded = tokenizer(
            list(group),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a document is longer than the model's positions
        )
        for number, ids in zip(numbers, encoded["input_ids"], strict=True):
            tokens[number].append(np.asarray(ids, dtype=np.int32))
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    return [np.concatenate([*document, end]) for document in tokens]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PART_CHARACTERS:
        stop = text.rfind("\n", start, start + PART_CHARACTERS) + 1 or start + PART_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]
