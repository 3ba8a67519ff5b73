"""Which flags fit the training of all weights of models of 1B to 14B on cards of 8 to 80 GiB, predicted.

    python benchmarks/full_fine_tuning.py --quick     # a small model: shows that it runs
    python benchmarks/full_fine_tuning.py             # some minutes on one core

Of each model and way to train, `memsave plan` under `full` and with the loss in chunks, for rows of 2,048 tokens one
at a time, at the rates of an A100. Nothing is measured.

Writes docs/results/full_fine_tuning.json and .md.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

from memsave_recipes.core.text import GIB
from memsave_recipes.tools.cli import main as memsave

HEADS = "num_attention_heads=32,num_key_value_heads=8"
BLOCK = 2048
MODELS = {  # sizes of the published config.json of Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B and Qwen2.5-14B
    "1B": f"hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,{HEADS},head_dim=64,tie_word_embeddings=true",
    "3B": "hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,num_key_value_heads=8,"
    "tie_word_embeddings=true",
    "8B": f"hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,{HEADS}",
    "14B": "hidden_size=5120,intermediate_size=13824,num_hidden_layers=48,num_attention_heads=40,num_key_value_heads=8",
}
SMALL = {"small": "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=2"}
AUTOCAST, IN_16_BITS = ("--mixed_precision", "bf16"), ("--dtype", "bfloat16", "--optimizer", "adamw_bf16")
STEP = ("--offload_optimizer", "step")
WEIGHTS = (*STEP, "--stream_weights", "host")
ON_HOST, IN_BACKWARD = ("--offload_optimizer", "state"), ("--optimizer_in_backward", "--max_grad_norm", "0")
WAYS = {
    "AdamW": AUTOCAST,
    "state on the host": (*AUTOCAST, *ON_HOST),
    "on the host, in the backward": (*AUTOCAST, *ON_HOST, *IN_BACKWARD),
    "step on the host": (*AUTOCAST, *STEP),
    "step and weights on the host": (*AUTOCAST, *WEIGHTS),
    "bfloat16": IN_16_BITS,
    "bfloat16, state on the host": (*IN_16_BITS, *ON_HOST),
    "bfloat16, on the host, in the backward": (*IN_16_BITS, *ON_HOST, *IN_BACKWARD),
    "bfloat16, step on the host": (*IN_16_BITS, *STEP),
    "bfloat16, step and weights on the host": (*IN_16_BITS, *WEIGHTS),
    "bfloat16, step on the host in float32": ("--dtype", "bfloat16", *STEP),
}
LORA = ("--dtype", "bfloat16", "--lora")
LORA_WAYS = {"LoRA": LORA, "LoRA, weights on the host": (*LORA, "--stream_weights", "host")}
CARDS_GIB, HOSTS_GIB = (8, 12, 16, 24, 48, 80), (32, 64, 128, 256)
USABLE, USABLE_OF_HOST = 0.95, 0.9
HEADINGS = ("model", "way", "the card needs", "card", "the host needs", "host", "a token", "LoRA's")


def command_of(sizes: str, way: Sequence[str]) -> list[str]:
    """``memsave plan`` for a model and a way."""
    model = ["--model_type", "llama", "--config_overrides", f"{sizes},vocab_size=128256", "--block_size", f"{BLOCK}"]
    step = ["--global_batch_size", "1", "--activation_checkpointing", "full", "--loss", "chunked"]
    return ["plan", "language_modeling", *model, *step, *way, "--target_memory", "1000GiB"]


def planned(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Its one candidate: bytes of the card and of the host, and seconds of a step."""
    file = folder / "plan.json"
    if memsave([*command, "--json", str(file)]):
        raise RuntimeError("memsave plan was refused")
    (candidate,) = json.loads(file.read_text(encoding="utf-8"))["candidates"]
    figures = {name: candidate[name] for name in ("needed_bytes", "host_bytes", "step_s")}
    return {"command": f"memsave {' '.join(command)}", **figures}


def smallest(sizes_gib: Sequence[int], num_bytes: float) -> str:
    """The smallest of these sizes that holds as much; a dash where none does."""
    return next((f"{gib} GiB" for gib in sizes_gib if num_bytes <= gib * GIB), "-")


def card_of(found: dict[str, Any]) -> str:
    """The smallest card of a way."""
    return smallest(CARDS_GIB, found["needed_bytes"] / USABLE)


def rows_of(model: str, ways: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of a model."""
    return [(model, way, *_figures(found), _lora_beside(found, ways)) for way, found in ways.items()]


def _figures(found: dict[str, Any]) -> tuple[str, ...]:
    """Memory of card and host, and the time of a token."""
    needed, on_host = found["needed_bytes"], found["host_bytes"]
    host = (f"{on_host / GIB:.1f} GiB", smallest(HOSTS_GIB, on_host / USABLE_OF_HOST)) if on_host else ("", "")
    return f"{needed / GIB:.1f} GiB", card_of(found), *host, time_of_a_token(found)


def _lora_beside(found: dict[str, Any], ways: dict[str, dict[str, Any]]) -> str:
    """The time of a token of the fastest LoRA that the card of a way holds."""
    sizes = [f"{gib} GiB" for gib in CARDS_GIB]
    cards = sizes[: sizes.index(card_of(found)) + 1] if card_of(found) in sizes else []
    fitting = [ways[lora] for lora in LORA_WAYS if card_of(ways[lora]) in cards]
    return time_of_a_token(min(fitting, key=lambda one: one["step_s"])) if fitting else "-"


def time_of_a_token(found: dict[str, Any]) -> str:
    """Of a step of one row."""
    return f"{1000 * found['step_s'] / BLOCK:.2f} ms"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Plan all models in all ways; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    models = SMALL if flags.quick else MODELS
    with tempfile.TemporaryDirectory() as name:
        found = {
            model: {way: planned(command_of(sizes, words), Path(name)) for way, words in (WAYS | LORA_WAYS).items()}
            for model, sizes in models.items()
        }
    rows = [row for model, ways in found.items() for row in rows_of(model, ways)]
    harness.show(HEADINGS, rows)
    results = {"benchmark": "full_fine_tuning", "usable": USABLE, "usable_of_host": USABLE_OF_HOST, "models": found}
    harness.write_results(flags.output_dir, "full_fine_tuning", results, harness.markdown_table(HEADINGS, rows))
    return results


if __name__ == "__main__":
    main()
