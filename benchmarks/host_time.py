"""What a plan costs the host: Python a layer and micro-batch, beside transformers' own activation checkpointing.

    python benchmarks/host_time.py

The 24 layers of a Llama are so small that hardly anything but Python runs in a step. One thread makes a forward and a
backward under each plan in turn; a time is that of its processor. What a plan adds is its median less that of the model
without a plan, divided by the layers: the second run of a layer is part of it. On a GPU the host queues kernels in this
time, so it shows where a layer computes for less.

Layers that compute compiled stand beside the same layers under ``torch.compile`` alone: what a plan adds to a call.

Writes docs/results/host_time.json and host_time.md.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from memsave_recipes import apply_plan, make_plan
from memsave_recipes.core.activations import plan_blocks

LAYERS, QUICK_LAYERS = 24, 6
ROUNDS, QUICK_ROUNDS = 120, 2
WARM_UP, QUICK_WARM_UP = 36, 1
"""Steps: the first 32 of a block look closer at what it changes (NOTE [ side effects ])."""
PEER = "transformers' own"
TORCH, COMPILED = "torch.compile of each layer", "compiled, keep"
STRATEGIES = ("full", "selective", "segments:6", "nested:4", "offload")
TOKENS = 4


def llama(num_layers: int) -> nn.Module:
    """The same layers in every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=num_layers, **sizes)).train()


def steps(num_layers: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """A forward and a backward of each plan, on models of the same weights."""
    bare = llama(num_layers).to(device)
    models = {way: copy.deepcopy(bare) for way in ("plain", PEER, *STRATEGIES, TORCH, COMPILED)}
    for strategy in STRATEGIES:
        apply_plan(models[strategy], make_plan(models[strategy], strategy=strategy))
    models[PEER].gradient_checkpointing_enable({"use_reentrant": False})
    for layer in models[TORCH].model.layers:
        layer.compile(fullgraph=True)
    apply_plan(models[COMPILED], plan_blocks(models[COMPILED], "none").on_compiled_layers())
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    return {way: partial(step, model, ids) for way, model in models.items()}


def step(model: nn.Module, ids: torch.Tensor) -> None:
    """The gradients of one micro-batch, added to those that are there."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def measure(num_layers: int, warm_up: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row a plan: seconds of a step, and what it adds a layer."""
    calls = steps(num_layers, device)
    for call in calls.values():
        for _ in range(warm_up):
            call()
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for way in harness.turns(calls, rounds):
        began = time.process_time()
        calls[way]()
        seconds[way].append(time.process_time() - began)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    added = {way: (median - medians["plain"]) / num_layers for way, median in medians.items()}
    return [
        {"way": way, "step_s": median, "added_s": added[way], "ratio": added[way] / added[PEER]}
        for way, median in medians.items()
    ]


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """As the page and the terminal show them."""
    return [
        [row["way"], f"{row['step_s'] * 1e3:.1f} ms", f"{row['added_s'] * 1e6:.0f} us", f"x{row['ratio']:.2f}"]
        for row in rows
    ]


def above_torch(rows: list[dict[str, Any]]) -> float:
    """Seconds that a plan adds to a call of a compiled layer."""
    added = {row["way"]: row["added_s"] for row in rows}
    return added[COMPILED] - added[TORCH]


HEADINGS = ("plan", "step", "added a layer", "beside transformers' own")


def page(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """The results as a page."""
    return "\n".join(
        [
            "# Host time of a plan",
            "",
            f"Made by `python benchmarks/host_time.py` on {environment['device']}, one thread: a forward and a "
            f"backward of {LAYERS} tiny Llama layers of {TOKENS} tokens, processor time, medians of {ROUNDS} steps in "
            "turns. What is added includes the second run of the layer. Other work kept "
            f"{environment['busy_with_others']:.1f} of {environment['num_cpus']} CPUs busy, which lengthens all times.",
            "",
            harness.markdown_table(HEADINGS, cells(rows)),
            "",
            f"A plan adds {above_torch(rows) * 1e6:.0f} us to a call of a compiled layer.",
        ]
    )


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    torch.set_num_threads(1)
    device = harness.this_device()
    sizes = (QUICK_LAYERS, QUICK_WARM_UP, QUICK_ROUNDS) if flags.quick else (LAYERS, WARM_UP, ROUNDS)
    other_work = harness.OtherWork()
    rows = measure(*sizes, device)
    harness.show(HEADINGS, cells(rows))
    environment = {**harness.describe_machine(device, "transformers"), **other_work.figures()}
    results = {"rows": rows, "environment": environment}
    harness.write_results(flags.output_dir, "host_time", results, page(rows, environment))


if __name__ == "__main__":
    main()
