"""Trains a Llama in a plain loop of torch: bfloat16 autocast, SDPA, fused AdamW; whole rows of random tokens.

    python benchmarks/gpu_day/plain_loop.py FOLDER --config_overrides hidden_size=1024,...,vocab_size=8192 ...

The flags are those of ``recipes/language_modeling.py``. Writes results.json, with the median of the step.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

WARM_UP = 4  # steps


def read_flags() -> argparse.Namespace:
    """As the recipe has them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config_overrides", required=True)
    sizes = ("block_size", "global_batch_size", "micro_batch_size", "max_steps")
    for name in (*sizes, "logging_steps"):  # it does not log
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def add_gradients(loss_of: Callable[[Tensor], Tensor], ids: Tensor, share: float) -> None:
    """Those of a micro-batch that is this share of a step."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = loss_of(ids)
    (loss * share).backward()


def train_step(loss_of: Callable[[Tensor], Tensor], optimizer: Optimizer, rows: Tensor, micro_batch_size: int) -> None:
    """Micro-batches of a global batch, clipping and the update."""
    for ids in rows.split(micro_batch_size):
        add_gradients(loss_of, ids, len(ids) / len(rows))
    torch.nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Train and write."""
    flags = read_flags()
    shape = {name: int(value) for name, value in (pair.split("=") for pair in flags.config_overrides.split(","))}
    config = LlamaConfig(attn_implementation="sdpa", use_cache=False, **shape)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = torch.randint(config.vocab_size, (flags.global_batch_size, flags.block_size), device=device)
    seconds = []
    for _ in range(flags.max_steps):
        began = perf_counter()
        train_step(lambda ids: model(input_ids=ids, labels=ids).loss, optimizer, rows, flags.micro_batch_size)
        torch.accelerator.synchronize()
        seconds.append(perf_counter() - began)
    peak_gib = torch.accelerator.max_memory_allocated() / 2**30
    results = {"perf": {"step_time_s": median(seconds[WARM_UP:])}, "memory": {"peak_allocated_gib": peak_gib}}
    (flags.folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
