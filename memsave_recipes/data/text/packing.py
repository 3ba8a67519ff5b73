"""Documents or conversations as rows of tokens: packed into rows without a view across them, or padded.

Notes: ``docs/design/data.md``.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerBase

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.data.text.chat_template import TokenizedConversations
from memsave_recipes.data.text.tokenizers import TokenLine, tokenize_documents
from memsave_recipes.models.packed_attention import evaluating

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Dataset[Batch]):
    """Rows of a line of tokens, packed or to be padded: NOTE [ packing ].

    A key is an ``int`` (a row that counts) or has ``index`` and ``counted``. A packed row of T tokens gives
    ``input_ids``, ``position_ids`` and ``labels``, int64 (T,), one to be padded the first and the last, int64 (1 to
    T,). The labels are -100 where nothing counts.

    Args:
        spans: of documents or conversations, by their places in the line, in the order of the rows; int64 (S, 2).
        first_spans: the first span of each row, and their number; int64 (N + 1,).
        one_row: by rule 5 of the note.
    """

    tokens: TokenLine
    spans: np.ndarray
    first_spans: np.ndarray
    block_size: int
    pad_token_id: int
    packing: bool
    one_row: bool = False

    def __len__(self) -> int:
        return len(self.first_spans) - 1

    def __getitem__(self, key: Any) -> Batch:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        spans = self.spans[self.first_spans[index] : self.first_spans[index + 1]]
        tokens = torch.from_numpy(self.tokens.read(spans))
        positions = torch.cat([torch.arange(length) for length in np.diff(spans)[:, 0]])
        is_label = torch.from_numpy(self.tokens.is_counted(spans)) & (positions > 0) & counted
        row = {"input_ids": tokens, "labels": torch.where(is_label, tokens, IGNORED_LABEL)}
        if not self.packing:
            return row
        num_filled = self.block_size - len(tokens)
        return {
            "input_ids": F.pad(row["input_ids"], (0, num_filled), value=self.pad_token_id),
            "position_ids": torch.cat([positions, torch.arange(num_filled)]),
            "labels": F.pad(row["labels"], (0, num_filled), value=IGNORED_LABEL),
        }

    def longest(self, count: int) -> list[int]:
        """Find the ``count`` rows with most tokens, of packed ones with most pairs of tokens that see each other."""
        sizes = lengths = np.diff(self.spans)[:, 0]
        if self.packing:  # masks of windows and dropout count the pairs
            num_filled = self.block_size - np.add.reduceat(lengths, self.first_spans[:-1])
            sizes = np.add.reduceat(lengths**2, self.first_spans[:-1]) + num_filled**2
        order: list[int] = np.argsort(-sizes, kind="stable").tolist()
        return order[:count]

    def collate(self, rows: list[Batch]) -> Batch:
        """Make a batch (B, T) with ``document_lengths``, or (1, B * T) with ``document_ends`` for ``one_row``.

        Without packing (B, longest), filled up on the right, where ``attention_mask`` is 0; with ``is_padded``.
        """
        if not self.packing:
            values = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL, "attention_mask": 0}
            samples = [row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
            batch: dict[str, Any] = {
                name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
                for name, value in values.items()
            }
            return batch | {"is_padded": not bool(batch["attention_mask"].all())}
        batch = default_collate(rows)
        if not self.one_row:
            return batch | {"document_lengths": document_lengths(batch["position_ids"])}
        batch = {name: values.view(1, -1) for name, values in batch.items()}
        return batch | document_ends(batch["position_ids"])


def rows_of_documents(
    documents: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    packing: bool = True,
    one_row: bool = False,
) -> Rows:
    """Cut the documents (column ``text``), one behind another, into rows of ``block_size`` tokens.

    Without ``packing`` each row holds at most so many tokens of one document. ``one_row``: rule 5 of NOTE [ packing ].
    """
    tokens = tokenize_documents(documents, tokenizer)
    starts, length = tokens.document_starts, tokens.document_starts[-1]
    if packing:
        row_starts = np.arange(0, length, block_size)
    else:
        row_starts = np.concatenate([np.arange(*bounds, block_size) for bounds in pairwise(starts)])
    bounds = np.union1d(starts, row_starts)  # with the end of the line
    return Rows(
        tokens=tokens,
        spans=np.stack([bounds[:-1], bounds[1:]], axis=1),
        first_spans=np.searchsorted(bounds, np.append(row_starts, length)),
        block_size=block_size,
        pad_token_id=_pad_token_id(tokenizer),
        packing=packing,
        one_row=one_row,
    )


def rows_of_conversations(
    tokens: TokenizedConversations,
    lengths: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    packing: bool = True,
    one_row: bool = False,
) -> Rows:
    """Put whole conversations into rows, as ``rows_of_documents``; ``lengths`` of ``lengths_within``, int64 (N,)."""
    kept = np.flatnonzero(lengths)
    rows = best_fit_decreasing(kept, lengths, block_size) if packing else kept[:, None]
    numbers = np.concatenate(rows)
    starts = tokens.document_starts[numbers]
    return Rows(
        tokens=tokens,
        spans=np.stack([starts, starts + lengths[numbers]], axis=1),
        first_spans=np.cumsum([0, *map(len, rows)]),
        block_size=block_size,
        pad_token_id=_pad_token_id(tokenizer),
        packing=packing,
        one_row=one_row,
    )


def best_fit_decreasing(numbers: np.ndarray, lengths: np.ndarray, block_size: int) -> list[list[int]]:
    """Put ``numbers``, int64 (M,), in rows: the longest first, each into the row with the least space that is enough.

    ``lengths``, int64 (N,), are in tokens, none above ``block_size``. Ties come in order.
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


def document_lengths(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the documents of each row of ``position_ids`` (B, T), as Python numbers."""
    starts = [(row == 0).nonzero().flatten() for row in position_ids]
    ends = torch.tensor([position_ids.shape[1]])
    return tuple(tuple(torch.cat([of_row, ends]).diff().tolist()) for of_row in starts)


def document_ends(position_ids: Tensor) -> dict[str, Any]:
    """Return where the documents of one row, ``position_ids`` (1, T), begin and end, as ``FlashAttentionKwargs``."""
    starts = (position_ids[0] == 0).nonzero().flatten()
    ends = F.pad(starts.to(torch.int32), (0, 1), value=position_ids.numel())  # (documents + 1,), from 0 to T
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def count_valid(batch: Batch) -> Tensor:
    """Count the labels of a batch that count in the loss, after the shift."""
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


def check_positions(block_size: int, max_positions: int | None) -> None:
    """Raise ``InputError`` where rows are longer than the model has positions; ``None`` or -1 means no limit."""
    if max_positions is not None and 0 <= max_positions < block_size:
        raise InputError(
            f"--block_size {block_size} is longer than the model's {max_positions} positions: lower it, or give a new "
            "model more with --config_overrides (n_positions or max_position_embeddings)"
        )


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, *, one_row: bool = False) -> bool:
    """Try whether packed documents do not see one another in a causal language model of transformers: rule 6.

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

    with evaluating(model):
        return effect(position_ids=positions) <= 1e-3 * effect()


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
