"""Whether a claim holds, from the outcomes of its commands; each says what was found."""

import json
import re
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from safetensors.torch import load_file

from gpu_day.claims import Found, Outcome
from memsave_recipes.core.planner.budget import FRAGMENTATION, RESERVE, WORKSPACES
from memsave_recipes.core.step.settings import REGIONS
from memsave_recipes.core.text import GIB, MIB, format_bytes

OUT_OF_MEMORY = 3
MOST_TOO_HIGH_PCT = 15
"""As ``tests/benchmarks/test_prediction.py`` has it: small models in bfloat16 under recomputation."""
SEGMENT_BYTES = 20 * MIB
"""What the caching allocator takes from the driver at once for blocks between 1 and 10 MiB."""
HOST_NOISE_BYTES = 64 * MIB
"""By how much two runs of the same program may differ on the host."""


def gib(size: float) -> str:
    """A size for people."""
    return format_bytes(round(size * GIB))


def passes(run: Outcome) -> Found:
    """The program ends without an error."""
    return run.code == 0, run.last_line


def proven(*, may_round: bool = False) -> Callable[[Outcome], Found]:
    """``--verify`` found the step of plain, or one that is as exact where a plan may round otherwise."""

    def judge(run: Outcome) -> Found:
        found = str(run.results["equivalence"]["verdict"])
        return found == "identical" or (may_round and "exact" in found), found

    return judge


def same_weights(run: Outcome, other: Outcome) -> Found:
    """Bit for bit."""
    ours, theirs = (_weights(one) for one in (run, other))
    names = ours.keys() | theirs.keys()
    differing = [name for name in names if not ours.keys() & theirs.keys() & {name}]
    differing += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    return bool(names) and not differing, f"{len(differing)} of {len(names)} tensors differ"


def same_losses(most: float) -> Callable[[Outcome, Outcome], Found]:
    """Of two runs, as far apart as ``most`` times their size."""

    def judge(run: Outcome, other: Outcome) -> Found:
        _ = run.results, other.results
        apart = [abs(one - two) / abs(two) for one, two in zip(run.losses, other.losses, strict=True)]
        holds = bool(apart) and all(share <= most for share in apart)  # no NaN is
        return holds, f"{len(apart)} losses, at most {max(apart, default=0.0):.1e} apart"

    return judge


def equals_accumulation(two: Outcome, one: Outcome) -> Found:
    """Of ``recipes/ddp_equals_accumulation.py``: rounding in float64 for the exact loop, no bit for the others."""
    _ = one.results
    found = two.results["equivalence"]
    bitwise = {name: value for name, value in found.items() if name.startswith("largest_difference_bitwise")}
    exact = max(found["largest_difference_to_it"], found["largest_difference_exact"])
    holds = exact <= 1e-12 and bool(bitwise) and not any(bitwise.values()) and all(found["same_bits_as_it"].values())
    return holds, f"exact {exact:.0e}, bitwise {max(bitwise.values(), default=float('nan')):.0e}"


def budget_kept(run: Outcome) -> Found:
    """The peak, with what the device has in use outside torch, is in the budget, and was not predicted below it."""
    memory, budget, outside = run.memory, run.read("config.json")["memory_budget_gib"], outside_gib(run.memory)
    used, error = memory["peak_allocated_gib"] + outside, memory["prediction_error_pct"]
    found = f"{gib(used)} of {gib(budget)}, {gib(outside)} of it outside torch; predicted {error:+.2f} %"
    return used <= budget and error >= 0, found


def outside_gib(memory: dict[str, Any]) -> float:
    """What the driver says is in use, beside what torch's allocator has: the context; nothing on a CPU."""
    return max(0.0, memory.get("device_used_gib", 0.0) - memory.get("peak_reserved_gib", 0.0))


def predicted(run: Outcome) -> Found:
    """The measured peak is not above the predicted one, nor far below."""
    error = run.memory["prediction_error_pct"]
    found = f"{gib(run.memory['peak_allocated_gib'])}, predicted {error:+.2f} %"
    return 0 <= error <= MOST_TOO_HIGH_PCT, found


def cases_predicted(device: str) -> Callable[[Outcome], Found]:
    """Of ``prediction.py``: no case too low, without the constants by no more than a budget keeps in reserve."""

    def judge(run: Outcome) -> Found:
        found = run.read(f"prediction-{device}.json")["summary"]
        lowest = min(found["lowest_pct"], found["lowest_without_constants_pct"] + 100 * RESERVE)
        return lowest >= 0, json.dumps(found)

    return judge


def host_memory_predicted(run: Outcome, plain: Outcome) -> Found:
    """The host's peak grows by what the line on offloading says at most, and by half of it at least."""
    memory, base, line = run.memory, plain.memory, re.search(r"at most ([\d.]+ \w+) of the host's memory", run.output)
    if line is None:
        return False, "no line on the host's memory"
    grown, said = GIB * (memory["host_peak_rss_gib"] - base["host_peak_rss_gib"]), bytes_of(line[1])
    holds = said / 2 - HOST_NOISE_BYTES <= grown <= said + HOST_NOISE_BYTES
    return holds, f"{format_bytes(grown)} more than plain, said {line[1]}"


def little_is_reserved(run: Outcome) -> Found:
    """The allocator holds no more beside the tensors than a plan for a whole device leaves to it."""
    allocated, reserved = (run.memory[f"peak_{name}_gib"] for name in ("allocated", "reserved"))
    most = allocated / (1 - FRAGMENTATION) + SEGMENT_BYTES / GIB
    return reserved <= most, f"{gib(reserved)} for {gib(allocated)} of tensors"


def ends_in_a_page(run: Outcome) -> Found:
    """Of a device that is full: the exit code, and a plan that fits."""
    has_way_out = "--activation_checkpointing" in run.output
    found = f"exit code {run.code}, {'with' if has_way_out else 'without'} a plan that fits"
    return run.code == OUT_OF_MEMORY and has_way_out, found


def loss_falls(run: Outcome) -> Found:
    """It is finite and lower at the end."""
    _ = run.results
    first, last = run.losses[0], run.losses[-1]
    return all(map(isfinite, run.losses)) and last < first, f"{first:.3f} to {last:.3f}"


def waits_at_most(most: float) -> Callable[[Outcome], Found]:
    """Of the host for the device in a micro-batch, on average."""

    def judge(run: Outcome) -> Found:
        found = run.read("waits.json")
        a_micro_batch = sum(found["waits"].values()) / found["micro_batches"]
        lines = [f"{count} at {line}" for line, count in found["waits"].items()]
        return a_micro_batch <= most, "; ".join(
            [f"{a_micro_batch:.2f} in {found['micro_batches']} micro-batches", *lines]
        )

    return judge


def ratio(most: float | None = None) -> Callable[[Outcome, Outcome], Found]:
    """The step's time, at most so many times another's; a figure without ``most``."""

    def judge(run: Outcome, other: Outcome) -> Found:
        times = run.step_s / other.step_s
        mfu = run.results["perf"].get("mfu_pct")
        share = f", {mfu:.1f} % of the peak rate" if mfu else ""
        found = f"{1000 * run.step_s:.1f} ms a step, x{times:.3f}{share}, {gib(run.memory['peak_allocated_gib'])}"
        return None if most is None else times <= most, found

    return judge


def seconds_measured(most_off: float) -> Callable[[Outcome], Found]:
    """A plan's measured forwards and backwards take the time of the step, but for the share ``most_off``."""

    def judge(run: Outcome) -> Found:
        _ = run.results
        line = re.search(r"one forward and backward ([\d.]+) ms", run.output)
        if line is None:
            return False, "no line on one forward and backward"
        step_s = float(line[1]) / 1000 * run.results["accumulation_steps"]
        off = step_s / run.step_s - 1
        return abs(off) <= most_off, f"{1000 * step_s:.1f} ms for a step of {1000 * run.step_s:.1f} ms, {off:+.0%}"

    return judge


def speed(run: Outcome) -> Found:
    """Tokens a second, the share of the peak rate, the step, whether its layers are compiled, and its memory."""
    perf, memory = run.results["perf"], run.memory
    share = f", {perf['mfu_pct']:.1f} % of the peak rate" if "mfu_pct" in perf else ""
    compiled = ", layers compiled" if run.read("config.json").get("compile") == REGIONS else ""
    step = f"{1000 * run.step_s:.1f} ms a step under {run.results['plan']}{compiled}"
    return None, f"{perf['tokens_per_sec']:,.0f} tokens/s{share}, {step}, {gib(memory['peak_allocated_gib'])}"


def profiled(plan: str, beside: str | None = None) -> Callable[[Outcome], Found]:
    """Of ``mfu.py`` on a GPU: the speed under a plan, times another's, and the kernels of a micro-batch by class."""

    def judge(run: Outcome) -> Found:
        row, found = _profile(run, plan), ""
        step_s = row["measured"]["step_s"]
        if beside is not None:
            found = f", x{step_s / _profile(run, beside)['measured']['step_s']:.3f} of {beside}"
        kernels = ", ".join(f"{name} {ms:.1f} ms" for name, ms in row["measured"]["kernels_ms"].items())
        share = f"{100 * row['peak_s'] / step_s:.1f} % of the peak rate"
        step = f"{1000 * step_s:.1f} ms a step{found}, {format_bytes(row['measured']['peak_bytes'])}"
        return None, f"{row['units'] / step_s:,.0f} tokens/s, {share}, {step}; a micro-batch: {kernels}"

    return judge


def seconds_expected(most_off: float) -> Callable[[Outcome, Outcome], Found]:
    """The step that ``memsave plan`` expects is the measured one, but for the share ``most_off``."""

    def judge(plan: Outcome, run: Outcome) -> Found:
        (first, *_) = plan.read("plan.json")["candidates"]
        off = first["step_s"] / run.step_s - 1
        return abs(off) <= most_off, f"{1000 * first['step_s']:.1f} ms for {1000 * run.step_s:.1f} ms, {off:+.0%}"

    return judge


def seconds_by_sheet(plan: Outcome, run: Outcome) -> Found:
    """The data sheet's seconds are lower bounds."""
    bound_s = plan.read("plan.json")["speed"]["bound_s"]
    found = f"{1000 * bound_s:.1f} ms by the data sheet for a step of {1000 * run.step_s:.1f} ms"
    return bound_s <= run.step_s, found


def peak_by_sheet(plan: Outcome, run: Outcome) -> Found:
    """With workspaces as they are assumed; the error without them is told, too."""
    (first, *_) = plan.read("plan.json")["candidates"]
    peak = GIB * run.memory["peak_allocated_gib"]
    assumed = first["peak_bytes"] + first["parts"].get(WORKSPACES, 0)
    errors = [100 * (size / peak - 1) for size in (assumed, first["peak_bytes"])]
    return assumed >= peak, f"{format_bytes(peak)}, predicted {errors[0]:+.2f} %, {errors[1]:+.2f} % without constants"


def trains_alike(run: Outcome) -> Found:
    """Of ``other_loops.py``: the losses of the same loop without a plan, and less memory."""
    found = run.read("loops.json")
    holds = found["losses"] == found["plain_losses"] and found["peak_bytes"] < found["plain_peak_bytes"]
    peaks = f"{format_bytes(found['peak_bytes'])} instead of {format_bytes(found['plain_peak_bytes'])}"
    return holds, f"{peaks}, losses {found['losses']} and {found['plain_losses']}"


def article_rows(device: str) -> Callable[[Outcome], Found]:
    """The methods of the article, their peaks, and times beside plain's."""

    def judge(run: Outcome) -> Found:
        rows = run.read(f"vgg16_article-{device}.json")["rows"]
        plain_s = rows[0]["step_time_s"]
        cells = [(row["method"], row["memory"]["peak_allocated_bytes"], row["step_time_s"] / plain_s) for row in rows]
        return None, "; ".join(f"{method} {format_bytes(peak)}, x{times:.3f}" for method, peak, times in cells)

    return judge


def bytes_of(size: str) -> float:
    """The bytes of ``format_bytes``'s words, such as ``1.5 MiB``."""
    number, unit = size.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def _profile(run: Outcome, plan: str) -> dict[str, Any]:
    """The row of a plan, also where the program ended after it; raises ``RuntimeError`` where there is none."""
    files = [json.loads(file.read_text(encoding="utf-8")) for file in run.folder.glob("mfu-*.json")]
    row: dict[str, Any] = next((row for file in files for row in file["rows"] if row["plan"] == plan), {})
    if "measured" not in row:
        raise RuntimeError(f"{plan}: {row.get('refused', f'exit code {run.code}: {run.last_line}')}")
    return row


def _weights(run: Outcome) -> dict[str, torch.Tensor]:
    _ = run.results
    files = sorted((run.folder / "final").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
