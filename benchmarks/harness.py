"""The harness of all benchmarks: flags, turns, timing, tables, a description of the machine, and files of results.

NOTE [ how time is measured ]
1. Methods take turns: each once a round, in an order drawn anew each round, so that a slow minute of the machine meets
   all of them.
2. A time begins and ends with a device at rest.
3. A time ratio is that of two times of one round; reported is the median over rounds, and where a spread is given, the
   middle half.
"""

import argparse
import gc
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter
from memsave_recipes.core.text import MIB
from memsave_recipes.run.folder import write_json
from memsave_recipes.training.launch.start import device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
QUICK_RESULTS = ROOT / "out" / "benchmarks"
T = TypeVar("T")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of every benchmark; ``read_flags`` completes them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: shows that it runs, measures little")
    parser.add_argument("--output_dir", type=Path, help="default: docs/results; with --quick out/benchmarks")
    return parser


def read_flags(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> argparse.Namespace:
    """The flags, with the folder that results go to; a quick run does not replace those in docs/."""
    flags = parser.parse_args(args)
    flags.output_dir = flags.output_dir or (QUICK_RESULTS if flags.quick else RESULTS)
    return flags


def this_device() -> torch.device:
    """The accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def launch_command(recipe: str, *words: object, config: str | None = None, launch: Iterable[object] = ()) -> list[str]:
    """A recipe under ``accelerate launch``.

    Args:
        config: a file of ``accelerate_configs/``; by default that of one rank on this device.
        launch: further flags of the launch.
    """
    config = config or ("cpu" if this_device().type == "cpu" else "single_gpu")
    where = ["--config_file", ROOT / f"accelerate_configs/{config}.yaml", *launch]
    command = [Path(sys.executable).with_name("accelerate"), "launch", *where, ROOT / f"recipes/{recipe}.py", *words]
    return [str(word) for word in command]


def wait_for_device() -> None:
    """Until it has done all that was queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def empty_device() -> None:
    """Give back memory that earlier turns reserved, so that the next method's is its own."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def seconds_of(call: Callable[[], Any]) -> float:
    """Rule 2 of the NOTE."""
    wait_for_device()
    began = perf_counter()
    call()
    wait_for_device()
    return perf_counter() - began


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The exact peak of one call, beyond what was there before; on a CPU torch's profiler tells every allocation."""

    def step(meter: Meter) -> None:
        call()
        meter.mark()

    return DeviceInstruments(device).read_memory(step)[-1].peak_bytes


def turns(methods: Iterable[T], rounds: int, *, shuffled: bool = True) -> Iterator[T]:
    """Rule 1 of the NOTE; without ``shuffled`` in the order that is given."""
    order, shuffle = list(methods), random.Random(0).shuffle
    for _ in range(rounds):
        if shuffled:
            shuffle(order)
        yield from list(order)


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    max_s: float = float("inf"),
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds of each call in every round.

    Args:
        max_s: a method takes no more turns once its own add up to this.
        before: runs before each call, outside of its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(calls, rounds):
        if sum(seconds[name]) < max_s:
            before()
            seconds[name].append(seconds_of(calls[name]))
    return seconds


def ratios(own: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Rule 3 of the NOTE: round by round, as far as both took their turns."""
    return [mine / other for mine, other in zip(own, baseline, strict=False)]


def median_and_quartiles(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and the ends of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, [low, high]


class OtherWork:
    """What else the machine computes from here on, beside this process and those that it has measured in."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = perf_counter(), _busy_s(), time.process_time()

    def figures(self, measured_s: float = 0.0) -> dict[str, Any]:
        """How many CPUs other work kept busy on average, and how many there are.

        Args:
            measured_s: CPU seconds of the other processes of the benchmark.
        """
        own_s = measured_s + time.process_time() - self._own_s
        others = (_busy_s() - self._busy_s - own_s) / (perf_counter() - self._began)
        return {"busy_with_others": max(0.0, others), "num_cpus": os.cpu_count()}


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def to_mib(num_bytes: int) -> float:
    """Bytes in MiB."""
    return num_bytes / MIB


def markdown_table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page; a line break in a cell becomes ``<br>``."""
    first = list(headings)
    lines = [first, ["---"] * len(first), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", "<br>") for line in lines)


def show(headings: Iterable[str], rows: Iterable[Sequence[str]], *lines: str, title: str | None = None) -> None:
    """Print a table with ``lines`` below it, 120 columns wide where there is no terminal to say how wide."""
    table = Table(*headings, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(cell.replace("<br>", "\n") for cell in row))
    console = Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns)
    console.print(table, *lines, sep="\n", highlight=False)


def describe_machine(device: torch.device, *packages: str) -> dict[str, Any]:
    """Hardware, and the versions of torch and of those ``packages`` that are installed."""
    installed = [name for name in ("torch", *packages) if find_spec(name.replace("-", "_"))]
    return {
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in installed},
    }


def write_results(folder: Path, name: str, results: dict[str, Any], page: str | None = None) -> None:
    """``NAME.json`` and, with a page, ``NAME.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", results)
    if page is not None:
        (folder / f"{name}.md").write_text(page.rstrip("\n") + "\n", encoding="utf-8")
