"""The training under trial: small, and with everything that can go wrong in a resume.

Dropout, BatchNorm, tied weights, augmentation, accumulation, a short last step of each epoch, a warm-up and a schedule.
In shards, layers of their own weights, whose rows the ranks do not divide.
What it does goes to a log a rank, a line at a time: every life's resumed step, every step's samples and loss, every
commit.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import get_scheduler

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.sharding import ShardGroups, shard, whole
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleKey, SampleOrder, seed_for
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.checkpoints import Checkpoints, StopSignals, TrainState

NUM_SAMPLES, NUM_STEPS, SEED = 28, 12, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, which may take several lives.

    Args:
        folder: its output folder; the checkpoints are in ``checkpoints/`` there.
        recipe: whether the image recipe trains, and not the loop of this module.
        shard: as the flag.
        broken: the defect that it has, see ``trials/broken.py``.
        step_s: sleeps so long in each step.
    """

    folder: Path
    recipe: bool = False
    shard: str = "none"
    world: int = 1
    workers: int = 0
    every_steps: int | None = 2
    global_batch_size: int = 8
    with_signals: bool = False
    broken: str = ""
    step_s: float = 0.0


class Samples(Dataset):
    """Random samples, each with noise that depends on the seed, the epoch and the sample alone."""

    def __init__(self) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 4, 6, generator=torch.Generator().manual_seed(SEED))

    def __getitem__(self, key: SampleKey) -> dict[str, Tensor]:
        label = key.index % 3 if key.counted else -100
        return {
            "x": self.inputs[key.index] + self.noise(key),
            "labels": torch.tensor(label),
            "index": torch.tensor(key.index if key.counted else -1),
        }

    def noise(self, key: SampleKey) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for(SEED, key.epoch, key.index))
        return 0.3 * torch.randn(4, 6, generator=generator)


class Net(nn.Module):
    """Two layers that share their weights, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, 6) -> (B, 3)
        normed = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        hidden = F.dropout(F.relu(normed), 0.3, self.training)
        return self.head(F.relu(self.second(hidden))).mean(dim=1)


class Layers(nn.Module):
    """A network of several units, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 7, 9, 5]
        self.layers = nn.Sequential(*(nn.Linear(*ends) for ends in pairwise(widths)))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, 6) -> (B, 3)
        return self.head(F.dropout(F.relu(self.layers(x)), 0.3, self.training)).mean(dim=1)


class Log:
    """Lines that outlive the process; one that a kill has torn, at the end of a page, is taken back."""

    def __init__(self, run: Run, rank: int) -> None:
        path = run.folder / f"log-{rank}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.truncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    def write(self, **line: Any) -> None:
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def train(run: Run, accelerator: Accelerator, log: Log) -> dict[str, Any]:
    """Train to the end, from wherever the last life got to; what is left at the end."""
    torch.manual_seed(SEED)
    order = SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=run.global_batch_size, seed=SEED)
    layout = BatchLayout.of(run.global_batch_size, 2, accelerator.num_processes)
    bare, model, optimizer, scheduler = prepare(run, accelerator)
    checkpoints = Checkpoints(
        accelerator,
        run.folder / "checkpoints",
        TrainState(accelerator, model, optimizer, scheduler),
        order=order,
        layout=layout,
        every_steps=run.every_steps,
        signals=StopSignals() if run.with_signals else None,
    )
    resumed = checkpoints.resume()
    first_step = resumed.step if resumed else 0
    seen = resumed.state if resumed else {"samples": 0}
    log.write(resumed=first_step, notices=resumed.notices if resumed else [])
    batches = GlobalBatches(
        accelerator,
        Samples(),
        order=order,
        layout=layout,
        num_steps=NUM_STEPS,
        seed=SEED,
        num_workers=run.workers,
    )
    batches.begin_after(first_step)
    for batch in batches:
        learning_rate = scheduler.get_last_lr()[0]
        train_step(accelerator, model, optimizer, scheduler, batch)
        time.sleep(run.step_s)
        seen["samples"] += batch.num_samples
        ids = [index for micro_batch in batch.micro_batches for index in micro_batch["index"].tolist() if index >= 0]
        log.write(step=batch.step, loss=float(batch.loss).hex(), lr=learning_rate, ids=ids, **seen)
        checkpoints.after_step(batch.step + 1, seen.copy)
    state = {**optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    # The running statistics of a BatchNorm are rank 0's: DDP gives them to the others before they are used.
    weights = bare.state_dict() if accelerator.is_main_process else dict(bare.named_parameters())
    return {"weights": digest(weights), "optimizer": digest(state), **seen}


def prepare(run: Run, accelerator: Accelerator) -> tuple[nn.Module, nn.Module, Any, Any]:
    """The model bare and prepared, the optimizer and the schedule."""
    groups = ShardGroups.of(run.shard, accelerator.num_processes)
    bare = Net() if groups is None else Layers()
    if groups is not None:
        shard(bare, bare, plan_blocks(bare, "none"), groups, accelerator.device)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.02, weight_decay=0.1, fused=True)
    scheduler = get_scheduler("cosine", optimizer, 3, NUM_STEPS)
    if groups is None:
        return bare, *accelerator.prepare(bare, optimizer), scheduler
    model = accelerator.prepare_model(bare, device_placement=False, evaluation_mode=True)
    return bare, model, accelerator.prepare_optimizer(optimizer), scheduler


def train_step(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, batch: GlobalBatch) -> None:
    for micro_batch in batch.forwards(model):
        logits = model(micro_batch["x"])
        loss_sum = F.cross_entropy(logits, micro_batch["labels"], reduction="sum")
        batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def digest(tree: Any) -> str:
    """Of every bit in a tree of tensors and values; for all ranks where tensors are in shards."""
    result = hashlib.sha256()
    _digest_into(result, tree)
    return result.hexdigest()


def _digest_into(result: Any, tree: Any) -> None:
    if isinstance(tree, Tensor):
        tree = whole(tree)
        result.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        result.update(tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, dict):
        for key in tree:
            result.update(repr(key).encode())
            _digest_into(result, tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            _digest_into(result, item)
    else:
        result.update(repr(tree).encode())
