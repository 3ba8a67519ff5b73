"""What all loops of peers.py train, a GPT-2 on documents of uneven length, and what watches them train it."""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import harness
import torch
import torch.nn.functional as F
from forked import EndStep
from models import build_work
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from memsave_recipes.core.costs.breakdown import PeakOfStep, break_down_peak
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.step.memory import torch_optimizer
from memsave_recipes.data.text.packing import count_valid

LEARNING_RATE, PADDING = 1e-3, 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all train: a GPT-2, documents, and their batches.

    Args:
        shortest, longest: documents, in tokens; the logarithm of a length is drawn uniformly.
        num_warmup_steps: before the timed ones.
        num_recorded_steps: after them, for their peak.
        budget_gib: of our loop under ``budget:bitwise``.
    """

    vocab_size: int = 4096
    n_layer: int = 4
    n_embd: int = 128
    shortest: int = 16
    longest: int = 128
    micro_batch_size: int = 4
    accumulation_steps: int = 4
    num_warmup_steps: int = 3
    num_timed_steps: int = 20
    num_recorded_steps: int = 2
    budget_gib: float = 0.0424

    @property
    def total_steps(self) -> int:
        """Of each loop."""
        return self.num_warmup_steps + self.num_timed_steps + self.num_recorded_steps

    @property
    def global_batch_size(self) -> int:
        """Documents of a step."""
        return self.micro_batch_size * self.accumulation_steps

    def make_model(self) -> Any:
        """A ``GPT2LMHeadModel`` without dropout, always with the same weights, in training mode on the device."""
        shape = {name: getattr(self, name) for name in ("vocab_size", "n_layer", "n_embd")}
        return build_work("gpt2", {**shape, "n_head": 4, "batch_size": 1, "length": 2}, harness.this_device()).model

    def make_optimizer(self, model: nn.Module) -> AdamW:
        """Over all parameters."""
        return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def make_loader(self, batch_size: int) -> DataLoader:
        """The documents in their order."""
        return DataLoader(Documents(self), batch_size=batch_size, collate_fn=padded)


QUICK = Work(
    vocab_size=512,
    n_layer=2,
    n_embd=32,
    shortest=4,
    longest=32,
    micro_batch_size=2,
    accumulation_steps=3,
    num_timed_steps=3,
    num_recorded_steps=1,
    budget_gib=0.0015,
)


class Documents(Dataset):
    """A global batch more than the steps train, of tokens that are as frequent as the words of a language (Zipf)."""

    def __init__(self, work: Work) -> None:
        generator = torch.Generator().manual_seed(0)
        count = (work.total_steps + 1) * work.global_batch_size
        shortest, longest = math.log(work.shortest), math.log(work.longest)
        lengths = torch.exp(shortest + (longest - shortest) * torch.rand(count, generator=generator)).round().int()
        frequencies = 1 / torch.arange(1, work.vocab_size)  # without the token of the padding
        self.rows = [
            1 + torch.multinomial(frequencies, int(length), replacement=True, generator=generator) for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Batch:
        """By a number or our ``SampleKey``."""
        return {"input_ids": self.rows[key if isinstance(key, int) else key.index]}

    def longest(self, count: int) -> list[int]:
        """The numbers of the longest documents, by which our planner measures."""
        return sorted(range(len(self)), key=lambda number: -len(self.rows[number]))[:count]


def padded(documents: Sequence[Batch]) -> Batch:
    """(B, T), as long as the longest of them."""
    ids = pad_sequence([document["input_ids"] for document in documents], batch_first=True, padding_value=PADDING)
    is_padding = ids == PADDING
    labels = ids.masked_fill(is_padding, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": (~is_padding).long(), "labels": labels}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Over the tokens that count."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


class Watch:
    """What every loop calls after each step, with its model and optimizer: rules 1 and 3 of the NOTE in peers.py."""

    def __init__(self, work: Work, end_step: EndStep) -> None:
        self.work, self.end_step = work, end_step
        self.device = harness.this_device()
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.cpu_seconds: list[float] = []
        self._cpu_began = time.process_time()
        self._precise = work.make_model().double()
        self._micro_batches = islice(work.make_loader(work.micro_batch_size), work.accumulation_steps, None)
        self._peak: PeakOfStep | None = None
        self._recording = ExitStack()

    def __call__(self, model: nn.Module, optimizer: Any) -> None:
        """End a step; the optimizer may be wrapped."""
        self.cpu_seconds.append(time.process_time() - self._cpu_began)
        self.end_step(lambda: self._look(model, torch_optimizer(optimizer)))
        self._cpu_began = time.process_time()

    def _look(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._recording.close()
        if self._peak is not None:
            self.peaks.append(self._peak.breakdown.total_bytes)
        self.model = model
        self.losses.append(self._loss(model))
        if 0 < self.work.total_steps - len(self.losses) <= self.work.num_recorded_steps:
            self._peak = self._recording.enter_context(break_down_peak(model, optimizer, self.device))

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        self._precise.load_state_dict(model.state_dict())
        batch = on_device(islice(self._micro_batches, self.work.accumulation_steps))
        loss_sum = sum(summed_loss(self._precise, micro_batch).item() for micro_batch in batch)
        return loss_sum / int(sum(map(count_valid, batch)))


def on_device(micro_batches: Iterable[Batch]) -> list[Batch]:
    """Their tensors on the device of the benchmark."""
    device = harness.this_device()
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]
