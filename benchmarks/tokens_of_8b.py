"""How long the rows of an 8B model may be on cards of 24 to 80 GiB: LoRA on Llama-3.1-8B, predicted.

    python benchmarks/tokens_of_8b.py --quick     # up to 2,048 tokens: shows that it runs
    python benchmarks/tokens_of_8b.py             # some minutes on one core

Of each way to train, plan and length, `memsave plan` at the rates of an H100, in bfloat16 and with the loss in chunks,
with the frozen weights on the device and on the host. Lengths double until a step needs more than the largest card has.
Nothing is measured. Beside the curves stands what ALST reports for Llama-8B on one H100: 500 thousand tokens, with
weights and optimizer on the host (https://arxiv.org/abs/2506.13996); there all weights train, here adapters do.

Writes docs/results/tokens_of_8b.json and .md, and docs/tokens_of_8b.png.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fit_models
import harness
from matplotlib.ticker import LogLocator, NullFormatter

from memsave_recipes.core.text import GIB
from memsave_recipes.tools.cli import main as memsave
from memsave_recipes.tools.pages.plot import LINE_STYLES, NUM_COLORS, new_figure

MODEL = "Llama-3.1-8B"
CARDS_GIB = (24, 48, 80)
FIRST_LENGTH = 1024
POSITIONS, QUICK_POSITIONS = 2**20, 2048
PLANS = ("none", "full", "full_tiled", "full_offload", "full_tiled_offload")
WAYS = {"LoRA": (), "LoRA, weights streamed": ("--stream_weights", "host")}
ALST = {"ALST, one H100: 500K": (80 * GIB, 500_000)}
ENOUGH_GIB = 1000
NAMES = ("peak_bytes", "needed_bytes", "host_bytes", "parts")
HEADINGS = ("way", "plan", *(f"{gib} GiB" for gib in CARDS_GIB))


def need_of(word: str, flags: Sequence[str], plan: str, length: int, file: Path) -> dict[str, Any]:
    """What a step on one row of so many tokens needs."""
    command = ["plan", "language_modeling", "--model_name_or_path", word, "--lora", *flags, "--target", "h100"]
    command += ["--mixed_precision", "bf16", "--dtype", "bfloat16", "--loss", "chunked", "--block_size", str(length)]
    command += ["--global_batch_size", "1", "--micro_batch_size", "1", "--activation_checkpointing", plan]
    if memsave([*command, "--memory_budget_gib", str(ENOUGH_GIB), "--json", str(file)]):
        raise RuntimeError(f"memsave plan was refused: {plan}, {length} tokens")
    (found,) = json.loads(file.read_text(encoding="utf-8"))["candidates"]
    return {"block_size": length, **{name: found[name] for name in NAMES}}


def curve_of(word: str, flags: Sequence[str], plan: str, positions: int, file: Path) -> dict[str, Any]:
    """The needs of a plan, up to the first length that the largest card does not take."""
    points: list[dict[str, Any]] = []
    length = FIRST_LENGTH
    while length <= positions and (not points or points[-1]["needed_bytes"] <= budget_of(CARDS_GIB[-1])):
        points.append(need_of(word, flags, plan, length, file))
        length *= 2
    return {"strategy": plan, "points": points}


def curves_of(flags: Sequence[str], positions: int, folder: Path) -> list[dict[str, Any]]:
    """The curves of a way to train."""
    word = fit_models.write(MODEL, folder, max_position_embeddings=positions)
    return [curve_of(word, flags, plan, positions, folder / "plan.json") for plan in PLANS]


def budget_of(gib: int) -> int:
    """The bytes that a card leaves for a step, 95 %."""
    return int(0.95 * gib * GIB)


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
            curve["strategy"]: {f"{gib} GiB": longest(curve["points"], budget_of(gib)) for gib in CARDS_GIB}
            for curve in of_way
        }
        for way, of_way in curves.items()
    }


def rows_of(curves: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """The table."""
    for way, of_way in longest_of(curves).items():
        for plan, lengths in of_way.items():
            yield way, plan, *("-" if length is None else f"{length:,}" for length in lengths.values())


def write_png(
    curves: Mapping[str, Sequence[tuple[int, int]]],
    path: Path,
    title: str,
    cards: Mapping[str, int],
    marks: Mapping[str, tuple[int, int]],
) -> None:
    """Draw the length of rows against memory: a line for each plan, dotted ones for the memory of cards.

    Args:
        curves: by name, (bytes, tokens).
        cards: by name, bytes.
        marks: figures of others by name, (bytes, tokens).
    """
    figure = new_figure()
    axes = figure.subplots()
    for index, (name, points) in enumerate(curves.items()):
        needed, tokens = [num_bytes / GIB for num_bytes, _ in points], [length for _, length in points]
        style = LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)]
        axes.plot(needed, tokens, marker="o", markersize=4, linestyle=style, label=name)
    for name, num_bytes in cards.items():
        axes.axvline(num_bytes / GIB, color="0.6", linestyle=":")
        place = (num_bytes / GIB, 0.02)
        axes.annotate(name, place, xycoords=("data", "axes fraction"), rotation=90, ha="right", va="bottom")
    for name, (num_bytes, length) in marks.items():
        place = (num_bytes / GIB, length)
        axes.scatter(*place, marker="*", s=140, color="0.2", zorder=3)
        axes.annotate(name, place, xytext=(-8, 8), textcoords="offset points", ha="right", fontsize=9)
    axes.set(title=title, xlabel="memory needed, GiB", ylabel="tokens of a row")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=9, frameon=False)
    figure.savefig(path, format="png")


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
    write_png(lines, picture, f"{MODEL}, one row a step, bfloat16 (predicted)", cards, ALST)
    return results


if __name__ == "__main__":
    main()
