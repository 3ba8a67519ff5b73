"""A split as one line of tokens on disk: document after document, each followed by the end-of-text token.

Tokenizing runs through ``datasets.map``: bounded memory, and cached under the content of documents and tokenizer. The
cache does not depend on the length of the rows that are cut from it later.

A long document is tokenized in parts, because the encoding of a text takes many times its memory.

NOTE [ parts ]
1. A part begins with a single space between two words. No token of byte-level BPE (with the words of GPT-2, Llama 3 or
   Qwen), WordPiece and Unigram reaches across it, so the tokens of the parts are those of the whole text.
2. A tokenizer that puts a space before every text, as that of Llama 2 does, would put a second one before that of the
   part. ``_parts_for`` tries it out and then leaves the part's own space out.
3. A part of 256 Ki characters without a single space ends behind a single line end between two lines without blanks at
   it, which is the same to byte-level BPE and WordPiece, or else anywhere. There a word may be merged otherwise than
   in the whole text. No text is lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import Features, List, Value
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase

from memsave_recipes.data.text.documents import LONG_BYTES, progress_bars
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Samples, digest_of

PART_CHARACTERS = 2**18
DOCUMENTS_AT_ONCE = 64
BYTES_AT_ONCE = 32 * 1024**2  # of documents that are long
CHARACTERS_AT_ONCE = 2**22
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
    mean_bytes = 1 + documents.data.nbytes // documents.data.num_rows  # of the table, which may hold another split too
    with progress_bars(len(documents) * mean_bytes > LONG_BYTES):
        pieces = documents.map(
            _tokenize,
            batched=True,
            batch_size=min(DOCUMENTS_AT_ONCE, 1 + BYTES_AT_ONCE // mean_bytes),
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


def parts_of(text: str, size: int) -> Iterator[str]:
    """Parts of at most ``size`` characters that make up ``text``, cut by rules 1 and 3 of NOTE [ parts ]."""
    start = 0
    while len(text) - start > size:
        latest = start + size
        stop = _before_space(text, start, latest) or _after_line(text, start, latest) or latest
        yield text[start:stop]
        start = stop
    yield text[start:]


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
    parts = [(number, part) for number, text in enumerate(texts) for part in _parts_for(tokenizer, text)]
    with tqdm(total=len(parts), unit=" parts", desc="long documents", delay=5, leave=False) as bar:
        for group in _groups(parts):
            encoded = tokenizer(
                [part for _, part in group],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # no warning that a document is longer than the model's positions
            )
            for (number, _), ids in zip(group, encoded["input_ids"], strict=True):
                tokens[number].append(np.asarray(ids, dtype=np.int32))
            bar.update(len(group))
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    return [np.concatenate([*document, end]) for document in tokens]


def _groups(parts: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Neighbouring parts of documents, so many that their encodings fit into memory."""
    group, num_characters = parts[:1], len(parts[0][1])
    for part in parts[1:]:
        num_characters += len(part[1])
        if num_characters > CHARACTERS_AT_ONCE:
            yield group
            group, num_characters = [], len(part[1])
        group.append(part)
    yield group


def _parts_for(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """``parts_of`` the text, without the space that ``tokenizer`` adds by itself: rule 2."""
    parts = parts_of(text, PART_CHARACTERS)
    yield next(parts)
    for part in parts:
        yield part.removeprefix(" ") if _adds_space(tokenizer) else part


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    texts = ["a b", "a", " b", "b"]
    whole, left, right, bare = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return bool(whole == left + bare != left + right)


def _before_space(text: str, start: int, latest: int) -> int | None:
    return _last_alone(" ", text, start, latest + 1)


def _after_line(text: str, start: int, latest: int) -> int | None:
    found = _last_alone("\n", text, start, latest)
    return None if found is None else found + 1


def _last_alone(mark: str, text: str, start: int, stop: int) -> int | None:
    """Where the last ``mark`` of ``text[start:stop]`` is that has no blank on either side, and something before it."""
    place = text.rfind(mark, start + 1, stop)
    while place > 0 and (text[place - 1].isspace() or text[place + 1 : place + 2].isspace()):
        place = text.rfind(mark, start + 1, place)
    return place if place > 0 else None
