"""What starting costs: processor seconds and imported modules until a command answers, and until a first step is done.

    python benchmarks/starting.py           # less than a minute on one core

Each start is a process of its own on one thread, and counts until it ends, or until the optimizer has made its first
step, of a model with hardly any weights. Seconds are the least of the rounds, of user and system together.

Writes docs/results/starting.json and .md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import harness

RECIPES = harness.ROOT / "recipes"
CHILD = """
import json, os, resource, runpy, sys
_, kind, file, *sys.argv = sys.argv

def record(*_):
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(file, "w") as out:
        json.dump({"cpu_s": used.ru_utime + used.ru_stime, "modules": sorted(sys.modules)}, out)
    os._exit(0)

try:
    if kind == "step":
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(record)
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif kind == "module":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "recipe":
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        __import__(sys.argv[0])
except SystemExit:
    pass
record()
"""
HEADINGS = ("start", "processor", "modules")
SMALL = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"


@dataclass(frozen=True)
class Start:
    """A process to start: ``kind`` is ``import``, ``module`` or ``recipe``; of a ``step`` the first is the end."""

    kind: str
    words: tuple[str, ...]


def step_of(recipe: str, *flags: str) -> Start:
    """The first step of a recipe."""
    sizes = ("--global_batch_size", "4", "--micro_batch_size", "4", "--max_steps", "1", "--report_to", "none")
    return Start("step", (str(RECIPES / f"{recipe}.py"), *sizes, *flags))


LLAMA = ("--model_type", "llama", "--config_overrides", SMALL + ",num_key_value_heads=2,vocab_size=512")
BERT = ("--model_type", "bert", "--config_overrides", SMALL)
STARTS = {
    "`import memsave_recipes`": Start("import", ("memsave_recipes",)),
    "`memsave --help`": Start("module", ("memsave_recipes.tools.cli", "--help")),
    "`memsave plan --help`": Start("module", ("memsave_recipes.tools.cli", "plan", "--help")),
    "`import torch`": Start("import", ("torch",)),
    "`recipes/language_modeling.py --help`": Start("recipe", (str(RECIPES / "language_modeling.py"), "--help")),
    "language modeling, first step": step_of("language_modeling", *LLAMA, "--block_size", "64"),
    "image classification, first step": step_of("image_classification", "--model", "vgg_small"),
    "text classification, first step": step_of("text_classification", *BERT),
}


def begin(start: Start) -> dict[str, Any]:
    """Start a process; returns the seconds of a processor that it took, and the names of the modules it imported."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "start.json"
        output = ("--output_dir", str(Path(folder) / "run")) if start.kind == "step" else ()
        command = [sys.executable, "-c", CHILD, start.kind, str(file), *start.words, *output]
        env = {**environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
        if not file.exists():
            raise RuntimeError(done.stderr)
        return dict(json.loads(file.read_text(encoding="utf-8")))


def rows_of(starts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The table."""
    for name, figures in starts.items():
        yield name, f"{figures['cpu_s']:.2f} s", f"{figures['num_modules']:,}"


def page_of(machine: Mapping[str, Any], starts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        "From `benchmarks/starting.py`: seconds of one processor, user and system together, and imported modules. A "
        f"first step ends when the optimizer has stepped; its model has hardly any weights. Installed are {versions}. "
        f"Other work kept {machine['busy_with_others']:.1f} of {machine['num_cpus']} processors busy."
        f"\n\n{harness.markdown_table(HEADINGS, rows_of(starts))}"
    )


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Start every command in turns; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    others = harness.OtherWork()
    begun: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
    for name in harness.turns(STARTS, 1 if flags.quick else 3):
        begun[name].append(begin(STARTS[name]))
    starts = {
        name: {"cpu_s": min(one["cpu_s"] for one in of_one), "num_modules": len(of_one[-1]["modules"])}
        for name, of_one in begun.items()
    }
    harness.show(HEADINGS, rows_of(starts))
    measured_s = sum(one["cpu_s"] for of_one in begun.values() for one in of_one)
    machine = {
        **harness.describe_machine(harness.this_device(), "accelerate", "transformers", "peft", "bitsandbytes"),
        **others.figures(measured_s),
    }
    results = {"machine": machine, "starts": starts}
    harness.write_results(flags.output_dir, "starting", results, page_of(machine, starts))
    return results


if __name__ == "__main__":
    main()
