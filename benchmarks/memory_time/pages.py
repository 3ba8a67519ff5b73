"""The page: a verdict for all models, and a table for each."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness import markdown_table, to_mib
from models import LANGUAGE_MODELS, TITLES

from memory_time.methods import OURS, SEGMENTS, SEQUENTIAL, WHOLE
from memory_time.verdicts import FASTER, MODERATE, OUT_OF_REACH, SAME_MEMORY, SLOWER, TIE, count

ABOUT = f"""\
*Share* is the activation peak against plain's: the exact peak of one forward and backward above parameters, buffers and
batch, less the gradients of all parameters, which are there at the end whatever the method. *Time* is that of a forward
and backward against plain's in the same round, median over rounds in which the methods take turns. Gradients of every
method are compared with plain's before it takes part.

**Ours** is `--activation_checkpointing budget`, at even budgets from the smallest that works to what plain needs, and
at the peaks of the others. For language models it includes the loss that never keeps the logits (`--loss chunked`) and
compiled layers; `budget:bitwise` does without these compiled layers. Others have plain's loss, unless their row says
otherwise, and plain with our loss has a row of its own. `checkpoint_sequential` is torch's, without reentry, over the
stages of the CNN; where it raises, our `segments:K` stands beside it, and so it does for transformers. `every n blocks`
is that of transformers where the model has it. `torch.compile` compiles GPT-2 and Llama whole, with their loss, under
`activation_memory_budget`. It was not tried with models of images and text, and does not take part with CNNs: when
tried once, on a busy CPU, ResNet-50 took 192 s to its first step and VGG16 34 s, and their gradients were 0.04 and
0.009 away from plain's. The cause is not known. Gemma 3, SmolVLM and Qwen3-VL train whole, with their vision towers.

Each point of the others meets the fastest of ours that needs no more memory (within {100 * SAME_MEMORY:g} % of plain's
activation peak); nothing is interpolated. What differs by no more than the noise of the run is "as fast".
"""
VERDICT_HEADINGS = ("model", "points of others", f"ours {FASTER}", TIE, SLOWER, OUT_OF_REACH, "noise", "claims")
HEADINGS = ("method", "activation peak", "share", "peak with gradients", "time", "gradients", "note")


def to_markdown(results: dict[str, Any], picture_of: dict[str, str]) -> str:
    """The whole page; ``picture_of`` has the file name of each model's plot."""
    models = results["models"]
    parts = [
        f"# Memory against time: ours and the others, {results['device']}\n",
        ABOUT,
        markdown_table(VERDICT_HEADINGS, [_verdict_cells(model) for model in models]),
        _beaten(models),
    ]
    for model in models:
        parts += [_title(model), f"![{TITLES[model['model']]}]({picture_of[model['model']]})\n", _rows(model)]
    return "\n".join(parts)


def verdict_cells(results: dict[str, Any]) -> list[list[str]]:
    """The verdict of every model, for the terminal."""
    return [_verdict_cells(model) for model in results["models"]]


def beaten(models: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each point at which another is faster than ours, or smaller than any of ours."""
    return [
        _beaten_line(model["model"], duel)
        for model in models
        for duel in _all_duels(model["verdict"])
        if duel["outcome"] in (SLOWER, OUT_OF_REACH)
    ]


def _all_duels(verdict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from verdict["duels"]
    for duel in verdict.get("duels_without_compiling", []):
        yield {**duel, "method": f"without compiling, {duel['method']}"}


def _beaten(models: Sequence[dict[str, Any]]) -> str:
    lines = beaten(models) or ["Nowhere."]
    return "\nWhere ours is beaten:\n\n" + "\n".join(f"* {line}" for line in lines) + "\n"


def _beaten_line(model: str, duel: dict[str, Any]) -> str:
    point = f"{TITLES[model]}: {duel['method']} at {duel['share']:.1%} takes x{duel['time_ratio']:.3f}"
    if duel["outcome"] == OUT_OF_REACH:
        return f"{point}; none of ours is as small"
    return f"{point}, the best of ours x{duel['ours_time_ratio']:.3f} ({duel['ours']}, at {duel['ours_share']:.1%})"


def _verdict_cells(model: dict[str, Any]) -> list[str]:
    verdict = model["verdict"]
    counts = count(verdict["duels"])
    numbers = [str(number) for number in (sum(counts.values()), *counts.values())]
    return [TITLES[model["model"]], *numbers, f"{verdict['noise']:.1%}", "<br>".join(_claims(model)) or "-"]


def _claims(model: dict[str, Any]) -> list[str]:
    verdict = model["verdict"]
    lines = []
    for name, where in (("moderate", f"from {MODERATE:.0%} on"), ("tight", f"below {MODERATE:.0%}")):
        if (found := verdict.get("added_time", {}).get(name, {})).get("points"):
            lines.append(
                f"added time by that of {SEQUENTIAL} {where}: {found['median']:.2f} (median of {found['points']}), "
                f"at most {found['largest']:.2f}; to be {found['most']}: {_yes(found['largest'] <= found['most'])}"
            )
    if model["model"] in LANGUAGE_MODELS:
        found = verdict["in_a_third"]
        lines.append(
            f"in a third of plain's activation peak: x{found['time_ratio']:.3f} at {found['share']:.1%} "
            f"({found['method']}); to be at most x1: {_yes(found['time_ratio'] <= 1)}"
            if found
            else "in a third of plain's activation peak: none of ours"
        )
        if found := verdict["duels_without_compiling"]:
            ways = ", ".join(f"{number} {outcome}" for outcome, number in count(found).items() if number)
            lines.append(f"ours without compiling, against others that do not compile: {ways}")
    return lines


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _words_of(size: dict[str, Any]) -> str:
    words = (f"{name} ({_words_of(one)})" if isinstance(one, dict) else f"{name} {one}" for name, one in size.items())
    return ", ".join(words)


def _title(model: dict[str, Any]) -> str:
    size = _words_of(model["size"])
    machine = model["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    plain = model["rows"][0]
    return (
        f"\n## {TITLES[model['model']]}\n\n{size}. {machine['device']}, {machine['num_threads']} threads; {versions}; "
        f"{model['rounds']} rounds. Plain: {min(plain['seconds']):.3g} to {max(plain['seconds']):.3g} s.\n"
    )


def _rows(model: dict[str, Any]) -> str:
    running = sorted((row for row in model["rows"] if "share" in row), key=lambda row: (-row["share"], row["method"]))
    reasons: dict[str, list[str]] = {}
    for row in model["rows"]:
        if "reason" in row:
            reasons.setdefault(row["reason"], []).append(row["method"])
    failed = [f"* {'; '.join(methods)}: {reason}" for reason, methods in reasons.items()]
    table = markdown_table(HEADINGS, [_cells(row) for row in running])
    return table + ("\n\nDid not take part:\n\n" + "\n".join(failed) if failed else "") + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    method = f"**{row['method']}**" if row["series"] in OURS else row["method"]
    if row["series"] == SEGMENTS:
        method += " (ours)"
    compiling = f"{row['first_s']:.0f} s until its first step was done" if row["series"] == WHOLE else ""
    notes = [note for note in (row["note"], (row["plan"] or "").partition(": ")[2], compiling) if note]
    return [
        method,
        f"{to_mib(row['activation_bytes']):,.1f} MiB",
        f"{row['share']:.1%}",
        f"{to_mib(row['peak_bytes']):,.1f} MiB",
        f"x{row['time_ratio']:.3f}",
        _gradients(row),
        "; ".join(notes) or "-",
    ]


def _gradients(row: dict[str, Any]) -> str:
    difference = f"±{row['gradient_difference']:.0e}"
    if not row["is_bitwise"]:
        return difference
    return "same bits" if row["loss"] == "full" else f"same bits as plain with this loss, {difference}"
