"""A causal language model on rows of 6 to 24 random tokens, of which 30 to 100 % count. Launched by test_topologies.py.

Leaves ``final/model.safetensors`` and, for each rank, ``rank*.json`` with the samples of every step.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.run.folder import save_model
from memsave_recipes.run.trackers import finish_trackers
from memsave_recipes.step.batch_layout import Batch, BatchLayout, SampleKey, SampleOrder
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch import start_accelerator
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler
from memsave_recipes.training.parsing import parse_arguments

VOCABULARY, LONGEST_ROW, NUM_ROWS = 64, 24, 101


class Rows(Dataset):
    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        random = torch.Generator().manual_seed(key.index)
        length = int(torch.randint(6, LONGEST_ROW + 1, (), generator=random))
        tokens = torch.randint(VOCABULARY, (length,), generator=random)
        num_masked = int(0.7 * length * torch.rand((), generator=random)) if key.counted else length
        labels = torch.where(torch.arange(length) < num_masked, IGNORED_LABEL, tokens)
        return {"tokens": tokens, "labels": labels, "id": key.index if key.counted else None}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = pad_sequence([row["tokens"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED_LABEL)
    return {"tokens": tokens, "labels": labels, "ids": [row["id"] for row in rows if row["id"] is not None]}


def count_targets(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


def main() -> None:
    run, optim = parse_arguments(RunArguments, OptimizerArguments)
    accelerator = start_accelerator()
    torch.manual_seed(run.seed)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_positions": LONGEST_ROW, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **shape, **dropouts)
    model = GPT2LMHeadModel(config).to(run.torch_dtype)
    optimizer = make_optimizer(optim, model)
    scheduler = make_scheduler(optim, optimizer, run.max_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = []
    for batch in GlobalBatches(
        accelerator,
        Rows(),
        order=SampleOrder(num_samples=NUM_ROWS, global_batch_size=run.global_batch_size, seed=run.seed),
        layout=BatchLayout.of(run.global_batch_size, run.micro_batch_size, accelerator.num_processes),
        num_steps=run.max_steps,
        seed=run.seed,
        count_valid=count_targets,
        collate_fn=collate,
    ):
        for micro_batch in batch.forwards(model):
            logits = model(micro_batch["tokens"], use_cache=False).logits[:, :-1]
            targets = micro_batch["labels"][:, 1:]
            batch.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        accelerator.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ids.append([index for micro_batch in batch.micro_batches for index in micro_batch["ids"]])
    Path(run.output_dir).mkdir(exist_ok=True)
    Path(run.output_dir, f"rank{accelerator.process_index}.json").write_text(json.dumps(ids))
    save_model(accelerator, model, Path(run.output_dir, "final"))
    finish_trackers(accelerator, {})


if __name__ == "__main__":
    main()
