"""What frozen weights on the host save under LoRA, and what their copies cost.

    python benchmarks/streaming.py --quick     # a tiny model: shows that it runs
    python benchmarks/streaming.py             # a minute

Each row of the table is a step (forward and backward of one row of tokens) of a Llama with adapters on all linear
layers, in float32: the most that is on the device, weights included, and the time beside LoRA with every layer
recomputed.

* *LoRA*: without checkpointing;
* *full*: every layer recomputed;
* *full, streamed*: the same with `--stream_weights host`. On a CPU the copies are made within its own memory: the bytes
  are exact, the time is that of such copies, one after the other.

Prints the table and writes docs/results/streaming-DEVICE.json.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import harness
import torch
from long_context import CopiesAtOnce
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.offload import SideStream
from memsave_recipes.core.activations.streaming import WeightStream, resident_tensors, stream_weights
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss

SHAPE = {
    **{"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True},
}
QUICK_SHAPE = {**SHAPE, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 3, "vocab_size": 512}
WAYS = {"LoRA": "none", "full": "full", "full, streamed": "full"}
BASELINE, STREAMED = "full", "full, streamed"
HEADINGS = ("way", "weights on the device", "with a step's peak", "time", "middle half")


def adapted(shape: dict[str, Any]) -> LlamaForCausalLM:
    """A model with adapters that already do something."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).train()
    add_lora(model, LoraArguments(lora=True, lora_rank=8), task_type="CAUSAL_LM")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def streamed(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """Its frozen weights come from the host; on a CPU one layer after the other, as there is nothing beside it."""
    on_cpu = device.type == "cpu"
    stream = WeightStream(device, CopiesAtOnce() if on_cpu else SideStream(device), looks_ahead=not on_cpu)
    stream_weights(model, stream)
    return model


def step(model: LlamaForCausalLM, plan: str, tokens: Tensor) -> None:
    """A forward and backward, the gradients of which stay."""
    model.zero_grad()
    with apply_plan(model, plan_blocks(model, plan)):
        CausalLMLoss(model, "chunked", chunk_bytes=2**20)(tokens, tokens).backward()


def measure(shape: dict[str, Any], length: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each way.

    Raises:
        AssertionError: the adapters' gradients are not the same bits in all of them.
    """
    plain = adapted(shape)
    models = {"LoRA": plain, BASELINE: copy.deepcopy(plain), STREAMED: streamed(copy.deepcopy(plain), device)}
    tokens = (torch.arange(length)[None] % shape["vocab_size"]).to(device)
    for model in models.values():
        for tensor in resident_tensors(model):
            tensor.data = tensor.data.to(device)
    steps = {way: partial(step, model, WAYS[way], tokens) for way, model in models.items()}
    for one in steps.values():
        one()
    gradients = [[p.grad for p in model.parameters() if p.grad is not None] for model in models.values()]
    assert all(torch.equal(*pair) for other in gradients[1:] for pair in zip(gradients[0], other, strict=True))
    seconds = harness.time_in_turns(steps, rounds)
    rows = []
    for way, model in models.items():
        resident = sum(tensor.nbytes for tensor in resident_tensors(model))
        middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds[way], seconds[BASELINE]))
        peak = harness.peak_bytes(steps[way], device)
        rows.append(
            {
                **{"way": way, "resident_bytes": resident, "peak_bytes": resident + peak},
                **{"time_ratio": middle, "quartiles": quartiles},
            }
        )
    return rows


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    shape, length, rounds = (QUICK_SHAPE, 64, 3) if flags.quick else (SHAPE, 256, 15)
    device = harness.this_device()
    rows = measure(shape, length, rounds, device)
    cells = [
        (
            row["way"],
            f"{harness.to_mib(row['resident_bytes']):.1f} MiB",
            f"{harness.to_mib(row['peak_bytes']):.1f} MiB",
            f"x{row['time_ratio']:.2f}",
            " - ".join(f"x{end:.2f}" for end in row["quartiles"]),
        )
        for row in rows
    ]
    harness.show(HEADINGS, cells)
    results = {
        "machine": harness.describe_machine(device, "transformers", "peft"),
        "length": length,
        "rows": rows,
    }
    harness.write_results(
        flags.output_dir, f"streaming-{device.type}", results, harness.markdown_table(HEADINGS, cells)
    )
    return results


if __name__ == "__main__":
    main()
