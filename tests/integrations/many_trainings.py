"""Training in FSDP2 under each plan of the command line, by Trainer and in a loop; writes ``outcomes.json``."""

import gc
import json
import os
import sys
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import torch
from accelerate import Accelerator
from integrations.trainings import BASE, llama, rows
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments

import memsave_recipes as memsave
from memsave_recipes.core.activations import offload

LENGTH = 64
SETTINGS = {
    "budget": {"budget_gib": 1, "strategy": "budget"},
    "state": {"strategy": "full", "offload_optimizer": "state"},
}


def whole_rows(features):
    ids = torch.tensor([feature["input_ids"][:LENGTH] for feature in features])
    positions = torch.arange(LENGTH).repeat(len(features), 1)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def outcome_of(plan, folder):
    """The SHA-256 of the weights, the losses and the peak on the device, or what is refused."""
    settings = SETTINGS.get(plan, {"strategy": plan})
    callbacks = [memsave.MemsaveCallback(**settings)] if plan != "trainer" else []
    options = {**BASE, "use_cpu": False, "max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": 2}
    try:
        trainer = Trainer(
            model=llama(layers=8, dropout=0.0),  # torch's attention of shared rows takes no dropout
            args=TrainingArguments(folder, per_device_train_batch_size=2, **options),
            train_dataset=rows([LENGTH + 8] * 24),
            data_collator=whole_rows,
            callbacks=callbacks,
        )
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    except memsave.InputError as refused:
        return {"refused": str(refused)}
    return {
        "weights": hash_of(trainer.model),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def hash_of(model):
    weights = sha256()
    for weight in model.parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weights.update(whole.detach().cpu().numpy().tobytes())
    return weights.hexdigest()


def weights_of_a_loop(plan):
    """The SHA-256 after three steps with ``memsave.prepare``; without it where ``plan`` is ``None``."""
    accelerator, model = Accelerator(), llama(dropout=0.0).train()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3))
    batch = {name: value.to(accelerator.device) for name, value in whole_rows(rows([LENGTH] * 2).to_list()).items()}
    with memsave.prepare(model, batch, optimizer, strategy=plan) if plan else nullcontext():
        for _ in range(3):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return hash_of(model)


if __name__ == "__main__":
    target, *plans = sys.argv[1:]
    offload._engine_for(torch.device("cuda", int(os.environ["LOCAL_RANK"]))).smallest_bytes = 1024
    outcomes = {plan: outcome_of(plan, target) for plan in plans}
    outcomes["loops"] = [weights_of_a_loop(plan) for plan in (None, "full", "selective")]
    if torch.distributed.get_rank() == 0:
        Path(target, "outcomes.json").write_text(json.dumps(outcomes))
