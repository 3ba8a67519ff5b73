"""How long a row of an 8B model may be on eight cards that share it: full fine-tuning of Llama-3.1-8B, predicted.

    python benchmarks/rows_over_cards.py --quick     # up to 2,048 tokens: shows that it runs
    python benchmarks/rows_over_cards.py             # ten minutes on one core

Of each plan and card, `memsave plan --largest block_size --num_processes 8 --shard full`: weights, gradients and the
state of AdamW in bfloat16 are in shards over the cards, and the loss is in chunks. The command chooses how many cards
share a row. Seconds are the data sheet's lower bounds of an H100 for the forward and the backward of one row,
with 450 GB/s between cards. Nothing is measured.

Writes docs/results/rows_over_cards.json and .md.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fit_models
import harness

from memsave_recipes.tools.cli import main as memsave

MODEL = "Llama-3.1-8B"
CARDS_GIB = (24, 48, 80)
NUM_CARDS = 8
POSITIONS, QUICK_POSITIONS = 2**24, 2048
PLANS = ("full", "full_tiled", "full_tiled_offload")
HEADINGS = ("plan", *(f"{gib} GiB" for gib in CARDS_GIB), "cards a row", "a step, 80 GiB", "host of a card, 80 GiB")


def longest(word: str, plan: str, gib: int) -> dict[str, Any]:
    """The longest row that fits, how many cards share it, its seconds and what it takes of the host; or nothing."""
    flags = ["plan", "language_modeling", "--model_name_or_path", word, "--largest", "block_size"]
    flags += ["--target", "h100", "--target_memory", f"{gib}GiB", "--mixed_precision", "bf16", "--dtype", "bfloat16"]
    flags += ["--num_processes", str(NUM_CARDS), "--shard", "full", "--interconnect", "450", "--loss", "chunked"]
    flags += ["--micro_batch_size", "1", "--global_batch_size", "1", "--block_size", "65536"]
    flags += ["--activation_checkpointing", plan, "--json", "-"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if memsave(flags):
            raise RuntimeError(f"memsave plan was refused: {plan}, {gib} GiB")
    record = json.loads(printed.getvalue())
    (chosen,) = (one for one in record["candidates"] if one["fits"])
    return {
        "tokens": record["largest"]["value"],
        "sequence_parallel": record["sequence_parallel"],
        **{name: chosen[name] for name in ("step_s", "host_bytes", "needed_bytes")},
    }


def row_of(plan: str, cards: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A row of the table."""
    last = list(cards.values())[-1]
    yield from (plan, *(f"{card['tokens']:,}" for card in cards.values()), str(last["sequence_parallel"]))
    yield f"{last['step_s']:,.0f} s"
    yield f"{last['host_bytes'] / 2**30:.0f} GiB" if last["host_bytes"] else "-"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict all rows; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        positions = QUICK_POSITIONS if flags.quick else POSITIONS
        word = fit_models.write(MODEL, Path(folder), max_position_embeddings=positions)
        for plan in PLANS[:1] if flags.quick else PLANS:
            found[plan] = {f"{gib} GiB": longest(word, plan, gib) for gib in CARDS_GIB}
    rows = [tuple(row_of(plan, cards)) for plan, cards in found.items()]
    harness.show(HEADINGS, rows)
    results = {"benchmark": "rows_over_cards", "model": MODEL, "num_cards": NUM_CARDS, "target": "h100", "plans": found}
    harness.write_results(flags.output_dir, "rows_over_cards", results, harness.markdown_table(HEADINGS, rows))
    return results


if __name__ == "__main__":
    main()
