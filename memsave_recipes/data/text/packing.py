"""Documents or conversations as rows of tokens: packed into rows without a view across them, or padded.

NOTE [ packing ]
1. A packed row i is the tokens ``i * T`` to ``(i + 1) * T - 1`` of the line of all documents (``tokenizers.py``); only
   the last row is filled up, with a document of its own that does not count. No token is lost.
2. ``position_ids`` begin at 0 with every document. From them alone transformers builds the block-diagonal attention
   mask (``find_packed_sequence_indices`` in its ``masking_utils.py``), on two conditions: no ``attention_mask``, and
   ``use_cache=False``. With the cache, which is on by default, documents see one another and nothing says so.
3. A document that is longer than the rest of its row goes on in the next one as if it began there, at position 0.
4. The first token of a document in a row has the label -100, because it cannot be predicted from another document.
5. The batch says how long the documents of each row are, so that attention by document needs no mask
   (``models/packed_attention.py``). Flash attention finds the documents only where the batch is one row: ``one_row``
   puts the rows of a micro-batch behind one another. By 3 and 4 the loss is the same; other implementations would build
   a mask of (B * T)^2. The batch says where documents end, because transformers would look for that on the device, and
   wait for it in every layer.
6. Some models do not look at ``position_ids`` (BLOOM, OPT, Falcon, Mamba) or not in every layer (Qwen3-Next):
   ``keeps_documents_apart`` tries it out.
7. Conversations stay whole, because a reply without its question teaches nothing. The longest goes first, each into the
   row with the least space that it fits into (best-fit decreasing, Ding et al. 2024, https://arxiv.org/abs/2404.10830;
   TRL's ``bfd``), and rows are filled up as in 1. One that is longer than a row ends with the last reply that fits
   whole, or the model would learn not to stop; where none fits, it is left out (``--too_long``). Rules 2 and 4 to 6
   hold as they stand.

The padded alternative wastes the positions behind shorter samples of a micro-batch, and works with every model.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerBase

from memsave_recipes.data.text.chat_template import TokenizedConversations, TooLong
from memsave_recipes.data.text.tokenizers import TokenLine, digest_of_tokenizer, tokenize_documents
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint
from memsave_recipes.losses import IGNORED_LABEL

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class _DocumentsDataset(Dataset[Batch]):
    """Rows of a line of documents."""

    tokens: TokenLine

    @property
    def num_tokens(self) -> int:
        """Of all documents, each with its end."""
        return self.tokens.num_tokens

    @property
    def num_bytes(self) -> int:
        """Of all documents in UTF-8."""
        return self.tokens.num_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedDataset(_DocumentsDataset):
    """Rows of exactly T tokens: rules 1 to 5 of NOTE [ packing ].

    A key is an ``int`` (a row that counts) or has ``index`` and ``counted``. A row gives ``input_ids``,
    ``position_ids`` and ``labels``, int64 (T,); the labels are -100 where nothing counts.
    """

    block_size: int
    pad_token_id: int
    one_row: bool

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def _starts(self) -> range:
        return range(0, self.num_tokens, self.block_size)

    def __getitem__(self, key: Any) -> Batch:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        start = self._starts[index]
        stop = min(start + self.block_size, self.num_tokens)
        num_filled = start + self.block_size - stop
        tokens = torch.from_numpy(self.tokens.between(start, stop))
        position_ids = torch.cat([torch.from_numpy(self._positions(start, stop)), torch.arange(num_filled)])
        labels = F.pad(tokens, (0, num_filled), value=IGNORED_LABEL)
        labels[(position_ids == 0) if counted else slice(None)] = IGNORED_LABEL
        return {
            "input_ids": F.pad(tokens, (0, num_filled), value=self.pad_token_id),
            "position_ids": position_ids,
            "labels": labels,
        }

    def _positions(self, start: int, stop: int) -> np.ndarray:
        """How far each token is from the beginning of its document in this row, int64 (stop - start,)."""
        places = np.arange(start, stop)
        documents = np.searchsorted(self.tokens.document_starts, places, side="right") - 1
        positions: np.ndarray = places - np.maximum(self.tokens.document_starts[documents], start)
        return positions

    def longest(self, count: int) -> list[int]:
        """The ``count`` rows with most pairs of tokens that see each other: masks of windows and dropout count them."""
        bounds = np.union1d(self.tokens.document_starts, [*self._starts, len(self) * self.block_size])
        pairs = np.bincount(bounds[:-1] // self.block_size, weights=np.diff(bounds) ** 2)
        order: list[int] = np.argsort(-pairs, kind="stable").tolist()
        return order[:count]

    def collate(self, rows: list[Batch]) -> Batch:
        """As ``packed_batch``."""
        return packed_batch(rows, one_row=self.one_row)


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedDataset(_DocumentsDataset):
    """A document a sample, in as many samples of at most T tokens as it needs.

    A key is an ``int`` (a sample that counts) or has ``index`` and ``counted``. A sample gives ``input_ids`` and
    ``labels``, int64 (1 to T,).
    """

    starts: np.ndarray  # (N,)
    stops: np.ndarray  # (N,)
    pad_token_id: int

    def longest(self, count: int) -> list[int]:
        """The ``count`` samples with most tokens."""
        order: list[int] = np.argsort(self.starts - self.stops, kind="stable").tolist()
        return order[:count]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, key: Any) -> Batch:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        tokens = torch.from_numpy(self.tokens.between(self.starts[index], self.stops[index]))
        return {"input_ids": tokens, "labels": tokens.clone() if counted else torch.full_like(tokens, IGNORED_LABEL)}

    def collate(self, samples: list[Batch]) -> Batch:
        """As ``padded_batch``."""
        return padded_batch(samples, self.pad_token_id)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedConversations(Dataset[Batch]):
    """Rows of exactly T tokens with whole conversations: rule 7 of NOTE [ packing ].

    Keys and rows are those of ``PackedDataset``.

    Args:
        kept: the conversations that are not left out, by their numbers; int64 (M,).
        lengths: of each conversation the tokens that are taken; int64 (N,).
        rows: those of each row.
    """

    tokens: TokenizedConversations
    kept: np.ndarray
    lengths: np.ndarray
    rows: list[list[int]]
    block_size: int
    pad_token_id: int
    one_row: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Batch:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        samples = [_sample_of(self.tokens, number, int(self.lengths[number]), counted) for number in self.rows[index]]
        num_filled = self.block_size - sum(len(sample["input_ids"]) for sample in samples)
        fillers = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL}
        row = {
            name: F.pad(torch.cat([sample[name] for sample in samples]), (0, num_filled), value=filler)
            for name, filler in fillers.items()
        }
        lengths = [*(len(sample["input_ids"]) for sample in samples), num_filled]
        return row | {"position_ids": torch.cat([torch.arange(length) for length in lengths])}

    def longest(self, count: int) -> list[int]:
        """As of ``PackedDataset``."""
        filled = [self.lengths[numbers] for numbers in self.rows]
        pairs = np.array([(row**2).sum() + (self.block_size - row.sum()) ** 2 for row in filled])
        order: list[int] = np.argsort(-pairs, kind="stable").tolist()
        return order[:count]

    def collate(self, rows: list[Batch]) -> Batch:
        """As ``packed_batch``."""
        return packed_batch(rows, one_row=self.one_row)


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedConversations(Dataset[Batch]):
    """A conversation a sample, of at most T tokens; keys and samples are those of ``PaddedDataset``.

    Args:
        kept: the conversations that are not left out, by their numbers; int64 (M,).
        lengths: of each conversation the tokens that are taken; int64 (N,).
    """

    tokens: TokenizedConversations
    kept: np.ndarray
    lengths: np.ndarray
    block_size: int
    pad_token_id: int

    def longest(self, count: int) -> list[int]:
        """The ``count`` samples with most tokens."""
        order: list[int] = np.argsort(-self.lengths[self.kept], kind="stable").tolist()
        return order[:count]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, key: Any) -> Batch:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        number = int(self.kept[index])
        return _sample_of(self.tokens, number, int(self.lengths[number]), counted)

    def collate(self, samples: list[Batch]) -> Batch:
        """As ``padded_batch``."""
        return padded_batch(samples, self.pad_token_id)


Rows = PackedDataset | PaddedDataset | PackedConversations | PaddedConversations


def _sample_of(tokens: TokenizedConversations, number: int, length: int, counted: bool) -> Batch:
    """The beginning of a conversation; the label of its first token does not count, by rule 4."""
    row = tokens.rows[number]
    input_ids = torch.tensor(row["input_ids"][:length], dtype=torch.int64)
    is_counted = torch.tensor(row["counted"][:length], dtype=torch.bool) & counted
    is_counted[0] = False
    labels = torch.where(is_counted, input_ids, IGNORED_LABEL)
    return {"input_ids": input_ids, "labels": labels}


def packed_batch(rows: list[Batch], *, one_row: bool) -> Batch:
    """Rows as a batch (B, T) and ``document_lengths``, or (1, B * T) and ``document_ends`` with ``one_row``."""
    batch: dict[str, Any] = default_collate(rows)
    if not one_row:
        return batch | {"document_lengths": document_lengths(batch["position_ids"])}
    batch = {name: values.view(1, -1) for name, values in batch.items()}
    return batch | document_ends(batch["position_ids"])


def padded_batch(samples: list[Batch], pad_token_id: int) -> Batch:
    """Samples as a batch (B, longest), filled up on the right; ``attention_mask`` is 0 there."""
    return {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        for name, value in (("input_ids", pad_token_id), ("labels", IGNORED_LABEL))
    } | {"attention_mask": pad_sequence([torch.ones_like(sample["input_ids"]) for sample in samples], batch_first=True)}


def pack(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, *, one_row: bool = False
) -> PackedDataset:
    """Rows of ``block_size`` tokens that hold the documents (column ``text``) one behind another.

    Args:
        one_row: for flash attention, rule 5 of NOTE [ packing ].

    Raises:
        InputError: a row of fewer than 2 tokens, or a tokenizer without an end-of-text token.
    """
    _check_block_size(block_size)
    tokens = tokenize_documents(documents, tokenizer)
    return PackedDataset(tokens=tokens, block_size=block_size, pad_token_id=_pad_token_id(tokenizer), one_row=one_row)


def pad(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PaddedDataset:
    """Samples of at most ``block_size`` tokens, none of which holds tokens of two documents.

    Raises:
        InputError: as ``pack``.
    """
    _check_block_size(block_size)
    tokens = tokenize_documents(documents, tokenizer)
    ends = tokens.document_starts[1:]
    counts = -(-np.diff(tokens.document_starts) // block_size)  # samples of each document
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each sample in its document
    starts = np.repeat(tokens.document_starts[:-1], counts) + number * block_size
    stops = np.minimum(starts + block_size, np.repeat(ends, counts))
    return PaddedDataset(tokens=tokens, starts=starts, stops=stops, pad_token_id=_pad_token_id(tokenizer))


def pack_conversations(
    tokens: TokenizedConversations,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    one_row: bool = False,
    too_long: TooLong = "drop",
    split: str = "training",
) -> PackedConversations:
    """Rows of ``block_size`` tokens that hold whole conversations.

    Args:
        one_row: for flash attention, rule 5 of NOTE [ packing ].
        too_long: what becomes of those that are longer than a row.
        split: names the conversations in messages.

    Raises:
        InputError: a row of fewer than 2 tokens, no conversation with a reply within a row, or one that is longer where
            that is an error.
    """
    lengths, kept = _lengths_and_kept(tokens, block_size, too_long, split)
    return PackedConversations(
        tokens=tokens,
        kept=kept,
        lengths=lengths,
        rows=best_fit_decreasing(kept, lengths, block_size),
        block_size=block_size,
        pad_token_id=_pad_token_id(tokenizer),
        one_row=one_row,
    )


def pad_conversations(
    tokens: TokenizedConversations,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    too_long: TooLong = "drop",
    split: str = "training",
) -> PaddedConversations:
    """Samples of at most ``block_size`` tokens, a conversation each.

    Args:
        too_long, split: as of ``pack_conversations``.

    Raises:
        InputError: as ``pack_conversations``.
    """
    lengths, kept = _lengths_and_kept(tokens, block_size, too_long, split)
    return PaddedConversations(
        tokens=tokens, kept=kept, lengths=lengths, block_size=block_size, pad_token_id=_pad_token_id(tokenizer)
    )


def best_fit_decreasing(numbers: np.ndarray, lengths: np.ndarray, block_size: int) -> list[list[int]]:
    """``numbers`` in rows: the longest first, each into the row with the least space that is enough; ties in order.

    Args:
        numbers: int64 (M,).
        lengths: in tokens, at the place of each number, none above ``block_size``; int64 (N,).
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = defaultdict(list)
    spaces: list[int] = []  # those in ``by_space``, in order
    for number in numbers[np.argsort(-lengths[numbers], kind="stable")].tolist():
        length = int(lengths[number])
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[place]
        else:
            row, space = [], block_size
            rows.append(row)
        row.append(number)
        if left := space - length:
            if not by_space[left]:
                insort(spaces, left)
            by_space[left].append(row)
    return rows


def _lengths_and_kept(
    tokens: TokenizedConversations, block_size: int, too_long: TooLong, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Of each conversation the tokens that are taken; and those with one that counts, but for the first: rules 4, 7."""
    _check_block_size(block_size)
    num_longer = int((tokens.lengths > block_size).sum())
    if too_long == "error" and num_longer:
        raise InputError(
            f"--block_size {block_size} is too short for {num_longer:,} of {len(tokens.lengths):,} {split} "
            "conversations: raise it, or pass --too_long drop"
        )
    lengths = tokens.lengths_within(block_size, too_long)
    kept = np.flatnonzero(tokens.first_counted < lengths)
    if not len(kept):
        way_out = "" if too_long == "truncate" else ", or pass --too_long truncate"
        raise InputError(
            f"--block_size {block_size} has no room for a reply of any of the {len(lengths):,} {split} conversations: "
            f"raise it{way_out}"
        )
    return lengths, kept


def fingerprint_of(train: Rows, validation: Rows, tokenizer: PreTrainedTokenizerBase) -> Fingerprint:
    """The fingerprint of both splits; it does not depend on the length of their rows."""
    splits = {"training text": train, "held-out text": validation}
    return Fingerprint(
        samples={name: rows.tokens.samples(name) for name, rows in splits.items()},
        tokenizer=digest_of_tokenizer(tokenizer),
    )


def document_lengths(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """For each row, the tokens of its documents: Python numbers, which no layer has to fetch from a device.

    Args:
        position_ids: (B, T) on the host.
    """
    starts = [(row == 0).nonzero().flatten() for row in position_ids]
    ends = torch.tensor([position_ids.shape[1]])
    return tuple(tuple(torch.cat([of_row, ends]).diff().tolist()) for of_row in starts)


def document_ends(position_ids: Tensor) -> dict[str, Any]:
    """Where the documents of one row begin and end, as ``FlashAttentionKwargs`` of transformers.

    Args:
        position_ids: (1, T) on the host, where making it costs no wait.
    """
    starts = (position_ids[0] == 0).nonzero().flatten()
    ends = F.pad(starts.to(torch.int32), (0, 1), value=position_ids.numel())  # (documents + 1,), from 0 to T
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def count_valid(batch: Batch) -> Tensor:
    """How many labels of a batch count in the loss, after the shift."""
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


def check_positions(block_size: int, max_positions: int | None) -> None:
    """Raises ``InputError`` where rows are longer than the model has positions; ``None`` or -1 means no limit."""
    if max_positions is not None and 0 <= max_positions < block_size:
        raise InputError(
            f"--block_size {block_size} is longer than the model's {max_positions} positions: lower it, or give a new "
            "model more with --config_overrides (n_positions or max_position_embeddings)"
        )


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, *, one_row: bool = False) -> bool:
    """Whether packed documents do not see one another in a causal language model of transformers: rule 6.

    Two rows are run with two different beginnings; where ``position_ids`` work, the logits of the documents behind them
    stay the same. A thousandth of the change without ``position_ids`` passes as rounding.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(16, device=device).view(2, 8) % 4
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]], device=device)
    is_second = torch.arange(8, device=device) >= torch.tensor([[3], [5]], device=device)
    changed = torch.where(is_second, tokens, (tokens + 1) % 4)

    def effect(**options: Any) -> float:
        batches = [{"input_ids": ids, **options} for ids in (tokens, changed)]
        if one_row:
            batches = [{name: values.view(1, -1) for name, values in batch.items()} for batch in batches]
        first, second = (model(**batch, use_cache=False).logits.view(2, 8, -1)[is_second] for batch in batches)
        return float((first - second).abs().max())

    was_training = model.training
    model.eval()
    try:
        return effect(position_ids=positions) <= 1e-3 * effect()
    finally:
        model.train(was_training)


def _check_block_size(block_size: int) -> None:
    if block_size < 2:
        raise InputError(f"--block_size {block_size} leaves nothing to predict: raise it to at least 2")


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any token would do behind those that count."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
