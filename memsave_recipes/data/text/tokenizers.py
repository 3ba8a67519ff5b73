"""Tokenizers, loaded or trained; documents as one line of tokens on disk, and labelled texts as tokens.

NOTE [ chunks ]
A long document is tokenized in chunks, because the encoding of a text takes many times its memory.
1. A chunk begins with a single space between two words. No token of byte-level BPE (with the words of GPT-2, Llama 3 or
   Qwen), WordPiece and Unigram reaches across it, so the chunks have the tokens of the whole text.
2. Some tokenizers, such as Llama 2's, put a space before every text. ``_chunks_for`` finds that out, and leaves the
   chunk's own space out.
3. 256 Ki characters without a single space end behind a single line end, or else anywhere. There a word may be merged
   otherwise than in the whole text.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
import tokenizers
import torch
from datasets import Features, List, Value
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.data.fingerprint import Fingerprint, Samples, digest_of
from memsave_recipes.data.sources import LONG_BYTES, generated, progress_bars
from memsave_recipes.data.text.documents import END_OF_TEXT
from memsave_recipes.data.text.labelled_text import LabelledText
from memsave_recipes.models.hub import loading_by_name, open_tokenizer
from memsave_recipes.models.labels import label_of
from memsave_recipes.models.pretrained import VOCAB_SIZE

CHUNK_CHARACTERS = 2**18
DOCUMENTS_AT_ONCE = 64
BYTES_AT_ONCE = 32 * 1024**2  # of documents that are long
CHUNKS_AT_ONCE = 16  # whose encodings fit into memory
PIECE_TOKENS = 4096  # of a row on disk
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
    """The tokens of all documents of a split, each document followed by the end-of-text token.

    Args:
        pieces: rows of tokens on disk; no row holds tokens of two documents.
        piece_starts: where each piece begins in the line, and the length of the line; int64 (P + 1,).
        document_starts: where each document begins, and the length of the line; int64 (D + 1,).
        num_tokens: those that count in the loss.
        num_bytes: of their text in UTF-8.
    """

    pieces: datasets.Dataset
    piece_starts: np.ndarray
    document_starts: np.ndarray
    piece_digests: np.ndarray
    num_tokens: int
    num_bytes: int
    noun: ClassVar[str] = "document"

    def read(self, spans: np.ndarray, column: str = "input_ids") -> np.ndarray:
        """Read the tokens of ``spans``, int64 (S, 2), of the line; int64 (sum of their lengths,)."""
        breaks = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1  # neighbours are read at once
        read = []
        for run in np.split(spans, breaks):
            start, stop = run[0, 0], run[-1, 1]
            first, last = np.searchsorted(self.piece_starts, [start, stop - 1], side="right") - 1
            tokens = np.concatenate(self.pieces[int(first) : int(last) + 1][column])
            skipped = start - self.piece_starts[first]
            read.append(tokens[skipped : skipped + stop - start])
        return np.concatenate(read)

    def is_counted(self, spans: np.ndarray) -> np.ndarray:
        """Return which of these tokens count in the loss: all; bool (sum of their lengths,)."""
        return np.ones(np.diff(spans).sum(), dtype=bool)

    def samples(self, split: str) -> Samples:
        """Return the digests of the pieces, for a fingerprint; ``split`` names the documents in messages."""

        def name_of(piece: int) -> str:
            number = np.searchsorted(self.document_starts, self.piece_starts[piece], side="right")
            return f"{self.noun} {number} of the {split}"

        return Samples(digests=self.piece_digests, name_of=name_of)


def tokenize_documents(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> TokenLine:
    """Tokenize ``documents`` (column ``text``); ``datasets`` caches the tokens, whatever the length of the rows.

    A document begins as the tokenizer begins a text. Special tokens that are spelt out in it are taken as such. Raises
    ``InputError`` where the tokenizer has no end-of-text token.
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
        num_tokens=int(piece_starts[-1]),
        num_bytes=int(document_bytes.sum()),
    )


def chunks_of(text: str, size: int) -> Iterator[str]:
    """Cut ``text`` into chunks of at most ``size`` characters, by rules 1 and 3 of NOTE [ chunks ]."""
    start = 0
    while len(text) - start > size:
        latest = start + size
        stop = _last_alone(" ", text, start, latest + 1)
        if stop is None:
            line_end = _last_alone("\n", text, start, latest)
            stop = latest if line_end is None else line_end + 1
        yield text[start:stop]
        start = stop
    yield text[start:]


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    """Return the pieces of whole documents; ``document_bytes`` is 0 where a piece continues a document."""
    rows: dict[str, list[Any]] = {name: [] for name in PIECES}
    for text, tokens in zip(texts, _token_ids(texts, tokenizer), strict=True):
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            rows["input_ids"].append(piece)
            rows["num_tokens"].append(len(piece))
            rows["document_bytes"].append(0 if start else len(text.encode()))
            rows["digest"].append(digest_of(piece.tobytes()))
    return rows


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    beginning = tokenizer("")["input_ids"]  # the special tokens around a text
    if beginning and beginning[-1] == tokenizer.eos_token_id:
        beginning = beginning[:-1]
    tokens = [[np.asarray(beginning, dtype=np.int32)] for _ in texts]
    chunks = [(number, chunk) for number, text in enumerate(texts) for chunk in _chunks_for(tokenizer, text)]
    with ProgressBar(total=len(chunks), unit=" chunks", desc="tokenizing long documents") as bar:
        for first in range(0, len(chunks), CHUNKS_AT_ONCE):
            group = chunks[first : first + CHUNKS_AT_ONCE]
            encoded = tokenizer(
                [chunk for _, chunk in group],
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


def _chunks_for(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    chunks = chunks_of(text, CHUNK_CHARACTERS)
    yield next(chunks)
    for chunk in chunks:
        yield chunk.removeprefix(" ") if _adds_space(tokenizer) else chunk


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    texts = ["a b", "a", " b", "b"]
    whole, left, right, right_alone = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return bool(whole == left + right_alone != left + right)


def _last_alone(mark: str, text: str, start: int, stop: int) -> int | None:
    """Find the last ``mark`` in ``text[start:stop]`` without a blank on either side, and with something before it."""
    place = text.rfind(mark, start + 1, stop)
    while place > 0 and (text[place - 1].isspace() or text[place + 1 : place + 2].isspace()):
        place = text.rfind(mark, start + 1, place)
    return place if place > 0 else None


BOUNDARY = "<|boundary|>"
TRAINING_BYTES = 64 * 1024**2  # more text changes the merges little and takes long
LONG_WORD = re.compile(r"\w{1000,}|[^\w\s]{1000,}")  # for which training takes time by its square: base64, say
LONG_WORD_CHARACTERS = 100


def load_tokenizer(
    tokenizer_name: str | None,
    texts: Iterable[str],
    *,
    vocab_size: int = VOCAB_SIZE,
    model_type: str | None = None,
    trust_remote_code: bool = False,
    flag: str = "--tokenizer_name",
) -> PreTrainedTokenizerBase:
    """Load the tokenizer ``tokenizer_name`` (a folder or a Hub id), or train a byte-level BPE on ``texts``.

    The cache keeps the trained one. It has fewer than ``vocab_size`` tokens where the first 64 MiB, which it is trained
    on, have no more pairs to merge.
    ``AutoTokenizer`` splits words its own way for some types of models (Qwen 2, Qwen 3.5), whatever the files say: the
    training does as well, by the ``model_type`` that the tokenizer is saved with.

    Raises ``InputError`` where it cannot be loaded, has no vocabulary or wants to run code.
    """
    if tokenizer_name is not None:
        return _load(tokenizer_name, trust_remote_code, flag)
    has_room = vocab_size > 256  # for all bytes and the end of a text
    require(has_room, "--config_overrides", f"vocab_size={vocab_size}", "at least 260 to train a tokenizer")
    with progress_bars(False):
        rows = generated(
            _trained,
            Features(tokenizer=Value("large_string")),
            "the text",
            texts=tuple(_first_bytes(texts, TRAINING_BYTES)),  # of a list ``datasets`` would make shards
            vocab_size=vocab_size,
            untrained=_untrained(model_type).to_str(),
            version=tokenizers.__version__,
        )
    trained = tokenizers.Tokenizer.from_str(rows[0]["tokenizer"])
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def load_text_tokenizer(
    tokenizer_name: str | None,
    texts: LabelledText,
    *,
    vocab_size: int,
    model_type: str | None = None,
    trust_remote_code: bool = False,
    flag: str = "--tokenizer_name",
    splits_special_tokens: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer ``tokenizer_name``, or train one on ``texts``, with the special tokens of a classifier.

    The trained one puts a token before, between and after texts: encoders classify by the state of the first token,
    decoders by that of the last. With ``splits_special_tokens``, those that are spelt out in a text are words, since an
    encoder-decoder counts end tokens. Raises ``InputError`` where it has neither a padding nor an end-of-text token.
    """
    if tokenizer_name is None:
        # The boundary is one more token.
        tokenizer = _with_boundaries(
            load_tokenizer(None, texts.documents(), vocab_size=vocab_size - 1, model_type=model_type)
        )
    else:
        tokenizer = load_tokenizer(tokenizer_name, [], trust_remote_code=trust_remote_code, flag=flag)
    if splits_special_tokens:
        tokenizer.split_special_tokens = tokenizer.init_kwargs["split_special_tokens"] = True  # the latter is saved
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{flag} {tokenizer_name} has no token to pad with: add a pad_token to it")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ``InputError`` where a model with ``vocab_size`` embeddings cannot take every token of ``tokenizer``."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise InputError(
            f"the tokenizer has token ids up to {needed - 1} but the model only {vocab_size} embeddings: give the "
            f"model's own --tokenizer_name, or --config_overrides vocab_size={needed}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedText(torch.utils.data.Dataset[dict[str, Any]]):
    """A split of labelled texts, whose samples ``collate`` pads to a batch.

    A key is an ``int`` (a counted sample) or has ``index`` and ``counted``. A sample is what the tokenizer makes, and
    ``label``, as ``label_of`` makes it, of ``num_labels`` classes.
    """

    rows: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase
    num_labels: int

    def longest(self, count: int) -> list[int]:
        """Find the ``count`` samples with most tokens."""
        lengths = [len(tokens) for tokens in self.rows["input_ids"]]
        return sorted(range(len(lengths)), key=lambda index: -lengths[index])[:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        sample: dict[str, Any] = self.rows[index]
        return sample | {"label": label_of(sample["label"], self.num_labels, counted=counted)}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` int64 (B, T), T the longest sample; ``labels`` of ``LabelLoss``.

        ``is_padded`` is for ``padding_known``.
        """
        batch = dict(DataCollatorWithPadding(self.tokenizer)(samples))
        return batch | {"is_padded": not bool(batch["attention_mask"].all())}


class TokenizedSplits(NamedTuple):
    """Two splits, their fingerprint, and a line on the texts that have probably lost their end, if there are any."""

    train: TokenizedText
    validation: TokenizedText
    fingerprint: Fingerprint
    notice: str | None


def tokenize(texts: LabelledText, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> TokenizedSplits:
    """Tokenize both splits, at most ``max_length`` tokens of a text or pair; raise ``InputError`` if one has none."""
    all_lengths, samples, tokenized = [], {}, []
    for split, rows in (("training", texts.train), ("held-out", texts.validation)):
        encoded = _encode(rows, tokenizer, max_length)
        lengths = encoded["length"][:]
        if 0 in lengths:
            raise InputError(f"the {split} text {lengths.index(0) + 1} has no tokens: remove its row")
        all_lengths += lengths
        samples[f"{split} texts"] = _samples(encoded, split)
        rows, num_labels = encoded.remove_columns(["length", "digest"]), len(texts.label_names)
        tokenized.append(TokenizedText(rows=rows, tokenizer=tokenizer, num_labels=num_labels))
    fingerprint = Fingerprint(samples=samples, label_names=texts.label_names, tokenizer=digest_of_tokenizer(tokenizer))
    num_full, notice = all_lengths.count(max_length), None
    if num_full:
        notice = f"note: {num_full:,} of {len(all_lengths):,} texts reach --max_length {max_length} and end there"
    train, validation = tokenized
    return TokenizedSplits(train, validation, fingerprint, notice)


def check_length(
    max_length: int,
    config: PreTrainedConfig,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Raise ``InputError`` where the model or the tokenizer takes fewer than ``max_length`` tokens."""
    longest = inf if tokenizer is None else tokenizer.model_max_length
    num_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    if num_positions > 0:  # XLNet's -1 is no limit
        longest = min(longest, num_positions)
    for name, module in model.named_modules() if model is not None else ():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            longest = min(longest, module.num_embeddings - module.padding_idx - 1)  # RoBERTa begins after the padding
    if max_length > longest:
        raise InputError(f"--max_length {max_length} is more than the {longest} tokens that the model takes: lower it")


def check_inputs(model: PreTrainedModel, texts: TokenizedText, *others: TokenizedText) -> None:
    """Raise ``InputError`` where the tokenizer has made something that ``model`` does not take.

    An encoder-decoder classifies by the last end token, and a micro-batch needs as many of them in each row.
    """
    end = getattr(model.config, "eos_token_id", None) if model.config.is_encoder_decoder else None
    splits = (texts, *others) if isinstance(end, int) else ()
    counts = [tokens.count(end) for split in splits for tokens in split.rows["input_ids"][:]]
    for number in (at for at, count in enumerate(counts, start=1) if not count or count != counts[0]):
        split, place = ("training", number) if number <= len(texts) else ("held-out", number - len(texts))
        raise InputError(
            f"the {split} text {place} has {counts[number - 1]} end tokens (number {end}), the first one {counts[0]}, "
            f"and {type(model).__name__} needs as many in each, and one at least: give the model's own --tokenizer_name"
        )
    if splits and texts.tokenizer.pad_token_id == end:
        why = f"by which {type(model).__name__} classifies"
        raise InputError(f"the tokenizer pads with the end token, {why}: add a pad_token to it")
    made = set(texts.rows.column_names) - {"label"}
    if unknown := made - set(inspect.signature(model.forward).parameters):
        raise InputError(
            f"the tokenizer makes {', '.join(sorted(unknown))}, which {type(model).__name__} does not take: give the "
            "model's own --tokenizer_name"
        )


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary and special tokens; how it merges shows in the tokens that it makes."""
    tables = (tokenizer.get_vocab(), tokenizer.special_tokens_map)
    return f"{digest_of(repr([sorted(table.items()) for table in tables]).encode()):x}"


def _load(name: str, trust_remote_code: bool, flag: str) -> PreTrainedTokenizerBase:
    with loading_by_name(name, f"the tokenizer of {name}", f"check {flag}"):
        tokenizer: PreTrainedTokenizerBase = open_tokenizer(name, trust_remote_code=trust_remote_code)
    # transformers makes an empty GPT-2 tokenizer out of a folder that holds no more than a config.json.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise InputError(f"the tokenizer of {name} has no vocabulary: name a tokenizer with --tokenizer_name")
    return tokenizer


def _first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return


def _untrained(model_type: str | None) -> tokenizers.Tokenizer:
    """Without merges, with the words and the normal form that ``AutoTokenizer`` takes beside a ``model_type``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if model_type is not None:
        with TemporaryDirectory() as folder:
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
            Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}))
            opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
        tokenizer.normalizer, tokenizer.pre_tokenizer = opened.normalizer, opened.pre_tokenizer
    return tokenizer


def _trained(texts: tuple[str, ...], vocab_size: int, untrained: str, version: str) -> Iterator[dict[str, str]]:
    """Yield one row, the JSON of the tokenizer; ``version`` of the trainer is there for the cache."""
    tokenizer = tokenizers.Tokenizer.from_str(untrained)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty() and sum(map(len, texts)) > LONG_BYTES,
    )
    chunks = (LONG_WORD.sub(_in_parts, chunk) for text in texts for chunk in chunks_of(text, CHUNK_CHARACTERS))
    tokenizer.train_from_iterator(chunks, trainer)
    yield {"tokenizer": tokenizer.to_str()}


def _in_parts(word: re.Match[str]) -> str:
    return " ".join(word[0][at : at + LONG_WORD_CHARACTERS] for at in range(0, len(word[0]), LONG_WORD_CHARACTERS))


def _with_boundaries(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give ``tokenizer`` a special token for boundaries, since encoders learn nothing about the token that pads."""
    tokenizer.add_special_tokens({f"{kind}_token": BOUNDARY for kind in ("bos", "eos", "cls", "sep")})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOUNDARY} $A {BOUNDARY}",
        pair=f"{BOUNDARY} $A {BOUNDARY} $B {BOUNDARY}",
        special_tokens=[(BOUNDARY, tokenizer.cls_token_id)],
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # not every model takes token types
    return tokenizer


def _samples(rows: datasets.Dataset, split: str) -> Samples:
    digests = rows.with_format("numpy")["digest"][:]
    return Samples(digests=digests, name_of=lambda index: f"row {index + 1} of the {split} texts")


def _encode(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> datasets.Dataset:
    columns = [column for column in ("text", "text_pair") if column in rows.column_names]

    def encode(labels: list[int], *texts: list[str]) -> dict[str, Any]:
        encoded = tokenizer(*texts, truncation=True, max_length=max_length, return_attention_mask=False)
        lengths = [len(tokens) for tokens in encoded["input_ids"]]
        digests = [digest_of(repr(row).encode()) for row in zip(labels, *encoded.values(), strict=True)]
        return {**encoded, "length": lengths, "digest": digests}

    with progress_bars(rows.data.nbytes > LONG_BYTES):
        return rows.map(
            encode, batched=True, input_columns=["label", *columns], remove_columns=columns, desc="making tokens"
        )
