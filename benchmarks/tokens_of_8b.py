"""How long the rows of an 8B model may be on cards of 24 to 80 GiB: LoRA on Llama-3.1-8B, predicted.

    python benchmarks/tokens_of_8b.py --quick     # up to 2,048 tokens: shows that it runs
    python benchmarks/tokens_of_8b.py             # some minutes on one core

Of each way to train, `memsave frontier --over block_size` at the rates of an H100, in bfloat16 and with the loss in
chunks, with the frozen weights on the device and on the host. Nothing is measured. Beside the curves stands what ALST
reports for Llama-8B on one H100: 500 thousand tokens, with weights and optimizer on the host
(https://arxiv.org/abs/2506.13996); there all weights train, here adapters do.

Writes docs/results/tokens_of_8b.json and .md, and docs/tokens_of_8b.png.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fit_models
import harness

from memsave_recipes.core.text import GIB
from memsave_recipes.tools.cli import main as memsave
from memsave_recipes.tools.pages.plot import write_curves_png

MODEL = "Llama-3.1-8B"
CARDS_GIB = (24, 48, 80)
POSITIONS, QUICK_POSITIONS = 2**20, 2048
SHOWN = ("none", "full", "full_tiled", "full_offload", "full_tiled_offload")
WAYS = {"LoRA": (), "LoRA, weights streamed": ("--stream_weights", "host")}
ALST = {"ALST, one H100: 500K": (80 * GIB, 500_000)}
HEADINGS = ("way", "plan", *(f"{gib} GiB" for gib in CARDS_GIB))


def curves_of(flags: Sequence[str], positions: int, folder: Path) -> list[dict[str, Any]]:
    """The curves of a way to train."""
    word = fit_models.write(MODEL, folder, max_position_embeddings=positions)
    file = folder / "curves.json"
    command = ["frontier", "language_modeling", "--model_name_or_path", word, "--over", "block_size"]
    command += ["--target", "h100", "--mixed_precision", "bf16", "--dtype", "bfloat16", "--global_batch_size", "1"]
    if memsave([*command, "--lora", *flags, "--json", str(file), "--png", str(folder / "one.png")]):
        raise RuntimeError("memsave frontier was refused")
    record = json.loads(file.read_text(encoding="utf-8"))
    return [curve for curve in record["curves"] if curve["strategy"] in SHOWN]


def longest(points: Sequence[dict[str, Any]], budget_bytes: int) -> int | None:
    """The longest row in a budget, between two points in proportion; ``None`` where the first does not fit."""
    found = None
    for one, other in zip(points, [*points[1:], None], strict=True):
        if one["needed_bytes"] <= budget_bytes:
            found = one["block_size"]
            if other is not None and other["needed_bytes"] > budget_bytes:
                share = (budget_bytes - one["needed_bytes"]) / (other["needed_bytes"] - one["needed_bytes"])
                found += int(share * (other["block_size"] - one["block_size"])) // 1024 * 1024
    return found


def longest_of(curves: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, int | None]]]:
    """The longest rows in 95 % of each card, by way and plan."""
    return {
        way: {
            curve["strategy"]: {f"{gib} GiB": longest(curve["points"], int(0.95 * gib * GIB)) for gib in CARDS_GIB}
            for curve in of_way
        }
        for way, of_way in curves.items()
    }


def rows_of(curves: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """The table."""
    for way, of_way in longest_of(curves).items():
        for plan, lengths in of_way.items():
            yield way, plan, *("-" if length is None else f"{length:,}" for length in lengths.values())


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict all curves; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    positions = QUICK_POSITIONS if flags.quick else POSITIONS
    with tempfile.TemporaryDirectory() as name:
        curves = {way: curves_of(words, positions, Path(name)) for way, words in WAYS.items()}
    lines = {
        f"{way}: {curve['strategy']}": [(point["needed_bytes"], point["block_size"]) for point in curve["points"]]
        for way, of_way in curves.items()
        for curve in of_way
    }
    rows = list(rows_of(curves))
    harness.show(HEADINGS, rows)
    results = {
        "benchmark": "tokens_of_8b",
        "model": MODEL,
        "target": "h100",
        "longest": longest_of(curves),
        "ways": curves,
    }
    harness.write_results(flags.output_dir, "tokens_of_8b", results, harness.markdown_table(HEADINGS, rows))
    cards = {f"{gib} GiB": gib * GIB for gib in CARDS_GIB}
    picture = flags.output_dir / "tokens_of_8b.png" if flags.quick else harness.ROOT / "docs" / "tokens_of_8b.png"
    write_curves_png(lines, picture, f"{MODEL}, one row a step, bfloat16 (predicted)", cards, ALST)
    return results


if __name__ == "__main__":
    main()
