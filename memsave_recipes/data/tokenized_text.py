"""Labelled texts as tokens: cut to a length once, padded to the longest of their micro-batch when they are needed."""

import inspect
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from memsave_recipes.data.labelled_text import LabelledText
from memsave_recipes.data.text_sources import LONG_BYTES, progress_bars
from memsave_recipes.data.tokenizers import digest_of_tokenizer, load_tokenizer
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint, Samples, digest_of

IGNORED_LABEL = -100  # what torch's cross-entropy leaves out by default
BOUNDARY = "<|boundary|>"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedText(torch.utils.data.Dataset):
    """One split, as what ``collate`` takes.

    A key is an ``int`` (a counted sample) or has ``index`` and ``counted``. A sample is ``input_ids``, whatever else
    the tokenizer makes, and ``label``, which is -100 where it is not counted.
    """

    rows: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase

    def longest(self, count: int) -> list[int]:
        """The ``count`` samples with most tokens."""
        lengths = [len(tokens) for tokens in self.rows["input_ids"]]
        return sorted(range(len(lengths)), key=lambda index: -lengths[index])[:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        sample = self.rows[index]
        return sample if counted else sample | {"label": IGNORED_LABEL}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` int64 (B, T), T tokens in the longest sample; ``labels`` int64 (B,)."""
        return dict(DataCollatorWithPadding(self.tokenizer)(samples))


@dataclass(frozen=True, kw_only=True)
class TokenizedSplits:
    """Two splits, how many of their texts have ``max_length`` tokens, and what tells whether they are the same."""

    train: TokenizedText
    validation: TokenizedText
    max_length: int
    num_full: int
    fingerprint: Fingerprint

    @property
    def notice(self) -> str | None:
        """How many texts have probably lost their end, in one line, where any have."""
        if not self.num_full:
            return None
        num_texts = len(self.train) + len(self.validation)
        return f"note: {self.num_full:,} of {num_texts:,} texts reach --max_length {self.max_length} and end there"


def load_text_tokenizer(
    tokenizer_name: str | None, texts: LabelledText, *, vocab_size: int, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer ``tokenizer_name``, or one trained on ``texts``, with what a classifier of texts needs.

    The trained one puts a token before, between and after texts: encoders classify by the state of the first token,
    decoders by that of the last. One that comes without a padding token pads with its end-of-text token.

    Raises:
        InputError: it cannot be loaded, or has neither token.
    """
    if tokenizer_name is None:
        # The boundary is one more token.
        return _with_boundaries(load_tokenizer(None, texts.documents(), vocab_size=vocab_size - 1))
    tokenizer = load_tokenizer(tokenizer_name, [], trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"--tokenizer_name {tokenizer_name} has no token to pad with: add a pad_token to it")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _with_boundaries(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A token of their own, since encoders learn nothing about the token that pads."""
    tokenizer.add_special_tokens({f"{kind}_token": BOUNDARY for kind in ("bos", "eos", "cls", "sep")})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOUNDARY} $A {BOUNDARY}",
        pair=f"{BOUNDARY} $A {BOUNDARY} $B {BOUNDARY}",
        special_tokens=[(BOUNDARY, tokenizer.cls_token_id)],
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # not every model takes token types
    return tokenizer


def check_length(max_length: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ``InputError`` where ``model`` or ``tokenizer`` cannot take texts of ``max_length`` tokens."""
    longest = tokenizer.model_max_length
    if (num_positions := getattr(model.config, "max_position_embeddings", None) or 0) > 0:  # XLNet's -1 is no limit
        longest = min(longest, num_positions)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            longest = min(longest, module.num_embeddings - module.padding_idx - 1)  # RoBERTa begins after the padding
    if max_length > longest:
        raise InputError(f"--max_length {max_length} is more than the {longest} tokens that the model takes: lower it")


def check_inputs(model: PreTrainedModel, texts: TokenizedText) -> None:
    """Raises ``InputError`` where the tokenizer has made something that ``model`` does not take."""
    made = set(texts.rows.column_names) - {"label"}
    if unknown := made - set(inspect.signature(model.forward).parameters):
        raise InputError(
            f"the tokenizer makes {', '.join(sorted(unknown))}, which {type(model).__name__} does not take: give the "
            "model's own --tokenizer_name"
        )


def tokenize(texts: LabelledText, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> TokenizedSplits:
    """Both splits as tokens, at most ``max_length`` of a text or pair, special ones included; ``datasets`` caches them.

    Raises:
        InputError: a text has no tokens at all.
    """
    train, validation = (_encode(rows, tokenizer, max_length) for rows in (texts.train, texts.validation))
    num_full, samples = 0, {}
    for split, rows in (("training", train), ("held-out", validation)):
        lengths = rows["length"][:]
        if 0 in lengths:
            raise InputError(f"the {split} text {lengths.index(0) + 1} has no tokens: remove its row")
        num_full += lengths.count(max_length)
        samples[f"{split} texts"] = _samples(rows, split)
    train, validation = (rows.remove_columns(["length", "digest"]) for rows in (train, validation))
    return TokenizedSplits(
        train=TokenizedText(rows=train, tokenizer=tokenizer),
        validation=TokenizedText(rows=validation, tokenizer=tokenizer),
        max_length=max_length,
        num_full=num_full,
        fingerprint=Fingerprint(
            samples=samples, label_names=texts.label_names, tokenizer=digest_of_tokenizer(tokenizer)
        ),
    )


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
