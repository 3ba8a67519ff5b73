"""Memory against time of nine models: plans made for a budget and other methods, measured in turns.

    OMP_NUM_THREADS=1 python benchmarks/frontier.py                  # nine models at a size for a CPU
    python benchmarks/frontier.py --device cuda                      # VGG16, DenseNet-121, GPT-2 124M, Llama 1B
    python benchmarks/frontier.py --model vgg16 --repetitions 9      # one of them; the others stay in the files

How it is measured is in memory_time/bench.py, how ours is held against the others in memory_time/verdicts.py. A method
that raises, or whose gradients are not plain's, keeps its row with the reason and is in no plot. `ckptplan` takes part
where it is installed.

Writes frontier-DEVICE.json, .md and a plot for each model to docs/results/, and all plots in one to the folder above:
frontier.png, or on CUDA frontier-cuda.png.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from memory_time import pages, peers, picture
from memory_time.bench import Bench
from memory_time.methods import QUICK, SEQUENTIAL, Extent, plain
from memory_time.ours import ours
from memory_time.verdicts import judge
from models import SIZES, TITLES, build_work
from torch._inductor.utils import fresh_cache

from memsave_recipes.core.errors import InputError
from memsave_recipes.run.failures import run_recipe

PACKAGES = ("transformers", "ckptplan")


def measure(name: str, size: dict[str, Any], extent: Extent, rounds: int, device: torch.device) -> dict[str, Any]:
    """One model: its rows and what they say."""
    work = build_work(name, size, device)
    bench = Bench(work)
    baseline = bench.admit(plain(work))[0]
    if baseline.reason:
        raise InputError(f"--model {name} does not run plain on this device: {baseline.reason}")
    others = bench.admit(peers.peers(work, extent))
    raising = [entry.method for entry in others if entry.method.series == SEQUENTIAL and entry.reason]
    others += bench.admit(peers.segments(work, method.num_segments) for method in raising)
    others += bench.admit(peers.chunked_peers(work))
    bench.admit(ours(work, extent, [entry.peak_bytes for entry in others if entry.forward]))
    bench.take_turns(rounds)
    rows = bench.rows()
    torch._dynamo.reset()  # graphs hold on to their models
    verdict = judge(name, rows, bench.noise)
    about = {"model": name, "size": size, "machine": harness.describe_machine(device, *PACKAGES), "rounds": rounds}
    return {**about, "verdict": verdict, "rows": rows}


def write(results: dict[str, Any], newest: dict[str, Any], folder: Path) -> None:
    """JSON, page and picture of all models, and the plot of the newest."""
    device, models = results["device"], results["models"]
    folder.mkdir(parents=True, exist_ok=True)
    plots = {model["model"]: f"frontier-{model['model']}-{device}.png" for model in models}
    picture.write_model(newest, folder / plots[newest["model"]])
    picture.write_all(models, folder.parent / ("frontier.png" if device == "cpu" else f"frontier-{device}.png"))
    harness.write_results(folder, f"frontier-{device}", results, pages.to_markdown(results, plots))


def with_earlier(models: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """``models``, and those of an earlier run that were not measured again."""
    earlier = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else []
    by_name = {model["model"]: model for model in (*earlier, *models)}
    return [by_name[name] for name in TITLES if name in by_name]


def show(results: dict[str, Any]) -> None:
    """The verdicts, and where ours is beaten."""
    beaten = (f"beaten: {line}" for line in pages.beaten(results["models"]))
    harness.show(pages.VERDICT_HEADINGS, pages.verdict_cells(results), *beaten)


def parse_flags(args: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=TITLES, nargs="+", help="default: all that have a size for the device")
    parser.add_argument("--repetitions", type=int, default=5, help="rounds; default: 5")
    flags = harness.read_flags(parser, args)
    if flags.repetitions < 1:
        raise InputError(f"--repetitions {flags.repetitions} measures nothing: give at least 1")
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds none here; run without --device")
    sizes = SIZES["tiny" if flags.quick else flags.device]
    flags.model = flags.model or list(sizes)
    if unknown := set(flags.model) - set(sizes):
        raise InputError(f"--model {min(unknown)} has no size for {flags.device}: choose {', '.join(sizes)}")
    return flags


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say, writing after every model; returns what the JSON file holds."""
    flags = parse_flags(args)
    with fresh_cache():  # so that what compiles is seen to compile
        return run(flags)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """``main`` on parsed flags."""
    sizes, extent = SIZES["tiny" if flags.quick else flags.device], QUICK if flags.quick else Extent()
    results: dict[str, Any] = {"benchmark": "frontier", "device": flags.device, "models": []}
    for name in flags.model:
        model = measure(name, sizes[name], extent, flags.repetitions, torch.device(flags.device))
        models = with_earlier([*results["models"], model], flags.output_dir / f"frontier-{flags.device}.json")
        results["models"] = models
        write(results, model, flags.output_dir)
    show(results)
    return results


if __name__ == "__main__":
    run_recipe(main)
