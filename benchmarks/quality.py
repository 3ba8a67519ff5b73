"""What a technique does to the result: the final metric over several seeds, beside peak and time.

    python benchmarks/quality.py                # four works, a quarter of an hour on one core
    python benchmarks/quality.py vit gpt2       # some of them
    python benchmarks/quality.py --quick

Each run is a recipe with the flags of its work and those of one technique, on equally many samples. Of every seed all
techniques take turns, so that a slow minute of the machine meets them all. Runs go to out/quality/WORK/TECHNIQUE-SEED;
one that has finished is not run again, and `results_table.py add out/quality/WORK` makes rows of the results table of
them. Writes docs/results/quality-DEVICE.json and .md.

NOTE [ how techniques are compared ]
1. With the plain run of the same seed, which begins with the same weights and sees the same samples in the same order:
   the difference of metrics and the ratio of times are those of two runs of one seed. Shown are the mean and the range
   of the differences, and the median of the ratios.
2. *Spread* is that of the plain runs: a difference below it is no effect of the technique.
3. *Same weights*: every tensor that the run saves is the plain run's, bit for bit, for all seeds.
4. Rates are as the techniques' own texts advise (LoRA and Adafactor take larger ones), and are not tuned for each.
"""

import importlib.util
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import harness
import torch
from forked import run_apart
from harness import ROOT
from safetensors.torch import load_file
from tqdm import tqdm

from memsave_recipes.core.text import GIB
from memsave_recipes.run.folder import write_json

RUNS = ROOT / "out/quality"
BASE = "base"
"""Stands in the flags of a work for the folder of the model that it fine-tunes."""
PLAIN = "plain"
COMMON = "--report_to none --overwrite --logging_steps 10"


@dataclass(frozen=True)
class Technique:
    """Flags of the recipe, and the mixed precision of the launch."""

    flags: str = ""
    mixed_precision: str = "no"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A recipe with the flags that all of its runs share.

    Args:
        metric: the one of the evaluation that is compared.
        base: flags of the run whose model is fine-tuned, if there is one; its seed is 0.
    """

    title: str
    recipe: str
    flags: str
    metric: str
    techniques: Mapping[str, Technique]
    base: str | None = None


FULL = Technique("--activation_checkpointing full")
MICRO_BATCHES = {"images": Technique("--micro_batch_size 16"), "rows": Technique("--micro_batch_size 2")}
STATE = {
    "8-bit AdamW": Technique("--optimizer adamw_8bit"),
    "Muon": Technique("--optimizer muon"),
}
PRECISION = {
    "bf16 autocast": Technique(mixed_precision="bf16"),
    "bf16 weights": Technique("--dtype bfloat16"),
    "bf16 weights, stochastic rounding": Technique("--dtype bfloat16 --optimizer adamw_bf16"),
}
DIGITS = "--dataset digits --global_batch_size 64 --learning_rate 2e-3 --warmup_steps 10 --eval_steps 1000"
GPT2 = (
    "--model_type gpt2 --config_overrides n_layer=3,n_head=4,n_embd=96,vocab_size=1024 --block_size 128 "
    "--global_batch_size 8 --learning_rate 2e-3 --warmup_steps 10 --eval_steps 1000"
)

WORKS = {
    "vit": Work(
        recipe="image_classification",
        title="ViT on digits",
        flags=f"--model_type vit {DIGITS} --augmentation none --image_size 16 --max_steps 300 --config_overrides "
        "hidden_size=64,num_hidden_layers=4,num_attention_heads=4,intermediate_size=256,patch_size=8",
        metric="accuracy",
        techniques={PLAIN: Technique(), "checkpointing": FULL, "4 micro-batches": MICRO_BATCHES["images"]}
        | STATE
        | PRECISION,
    ),
    "vgg_bn": Work(
        recipe="image_classification",
        title="VGG with BatchNorm on digits",
        flags=f"--model vgg_small_bn {DIGITS} --image_size 16 --max_steps 300",
        metric="accuracy",
        techniques={
            PLAIN: Technique(),
            "checkpointing": FULL,
            "4 micro-batches": MICRO_BATCHES["images"],
            "4 micro-batches, global BatchNorm": Technique("--micro_batch_size 16 --batchnorm global"),
        }
        | STATE
        | PRECISION,
    ),
    "gpt2": Work(
        recipe="language_modeling",
        title="GPT-2 on the text of Python's library",
        flags=f"{GPT2} --max_steps 100 --loss full",
        metric="bits_per_byte",
        techniques={
            PLAIN: Technique(),
            "checkpointing": FULL,
            "loss in chunks": Technique("--loss chunked"),
            "4 micro-batches": MICRO_BATCHES["rows"],
        }
        | STATE
        | {"Adafactor": Technique("--optimizer adafactor --learning_rate 1e-2")}
        | PRECISION,
    ),
    "fine_tuning": Work(
        recipe="language_modeling",
        title="Fine-tuning that GPT-2 on questions and answers",
        flags=f"--model_name_or_path {BASE} --dataset docstring-chats --chat_template chatml --block_size 128 "
        "--global_batch_size 8 --learning_rate 1e-3 --warmup_steps 5 --eval_steps 1000 "
        "--max_steps 60 --loss full",
        metric="loss",
        base=f"{GPT2} --max_steps 100",
        techniques={
            PLAIN: Technique(),
            "checkpointing": FULL,
            "LoRA": Technique("--lora --lora_rank 16 --learning_rate 4e-3"),
        }
        | STATE
        | {name: PRECISION[name] for name in ("bf16 weights", "bf16 weights, stochastic rounding")},
    ),
}
QUICK = {
    "vit": replace(
        WORKS["vit"],
        flags=f"{WORKS['vit'].flags} --max_steps 4",
        techniques={name: WORKS["vit"].techniques[name] for name in (PLAIN, "checkpointing", "Muon")},
    )
}
QUICK_SEEDS = 1


@dataclass(frozen=True)
class Results:
    """A finished run.

    Args:
        content: of ``results.json``.
        busy_with_others: the CPUs that other work kept busy meanwhile.
    """

    folder: Path
    content: dict[str, Any] = field(repr=False)
    busy_with_others: float

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """From the files that the run has left."""
        content, beside = (json.loads(path.read_text("utf-8")) for path in (folder / "results.json", _beside(folder)))
        return cls(folder, content, beside["busy_with_others"])

    @property
    def peak_bytes(self) -> int:
        """Of a whole step."""
        return round(self.content["memory"]["peak_allocated_gib"] * GIB)

    @property
    def step_s(self) -> float:
        """Of a step after the warm-up."""
        step_s: float = self.content["perf"]["step_time_s"]
        return step_s

    def metric(self, name: str) -> float:
        """Of the last evaluation."""
        value: float = self.content["eval"][name]
        return value

    def has_weights_of(self, other: "Results") -> bool:
        """Rule 3 of the NOTE, for one seed."""
        own, theirs = self._weights(), other._weights()
        return own.keys() == theirs.keys() and all(
            own[name].dtype == theirs[name].dtype and torch.equal(own[name], theirs[name]) for name in own
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / "final").glob("*model.safetensors")
        return load_file(file)


def words_of(work: Work, technique: str, seed: int, base: Path) -> list[str]:
    """The recipe's flags of a run but its folder; those of the technique come last, so that they count."""
    flags = [str(base) if word == BASE else word for word in shlex.split(work.flags)]
    return [*flags, *shlex.split(COMMON), "--seed", str(seed), *shlex.split(work.techniques[technique].flags)]


def _beside(folder: Path) -> Path:
    return folder.with_suffix(".json")


def run_recipe(recipe: str, words: list[str], mixed_precision: str, folder: Path) -> None:
    """The recipe's ``main`` in this process; beside the folder are what it prints and what else the machine did."""
    if harness.this_device().type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    spec = importlib.util.spec_from_file_location(recipe, ROOT / f"recipes/{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[recipe] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder.parent.mkdir(parents=True, exist_ok=True)
    other_work = harness.OtherWork()
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        module.main([*words, "--output_dir", str(folder)])
    write_json(_beside(folder), other_work.figures())


def results_of(recipe: str, words: list[str], mixed_precision: str, folder: Path) -> Results:
    """Those of the run in ``folder``, which runs now if it has not yet."""
    if not _beside(folder).is_file():
        run_apart(run_recipe, recipe, words, mixed_precision, folder)
    return Results.read(folder)


def measure(name: str, work: Work, seeds: Sequence[int], runs: Path) -> dict[str, list[Results]]:
    """The runs of each technique, one for each seed."""
    base = runs / name / BASE
    if work.base is not None:
        results_of(work.recipe, [*shlex.split(work.base), *shlex.split(COMMON)], "no", base)
    found: dict[str, list[Results]] = {technique: [] for technique in work.techniques}
    turns = list(_turns(work, seeds))
    for seed, technique in tqdm(turns, desc=name, unit="run"):
        folder = runs / name / f"{technique.replace(',', '').replace(' ', '_')}-{seed}"
        words, precision = words_of(work, technique, seed, base / "final"), work.techniques[technique].mixed_precision
        found[technique].append(results_of(work.recipe, words, precision, folder))
    return found


def _turns(work: Work, seeds: Sequence[int]) -> Iterator[tuple[int, str]]:
    order = harness.turns(work.techniques, len(seeds))
    return ((seed, next(order)) for seed in seeds for _ in work.techniques)


def rows_of(name: str, work: Work, found: dict[str, list[Results]]) -> list[dict[str, Any]]:
    """A row for each technique of a work."""
    return [_row_of(name, work, technique, own, found[PLAIN]) for technique, own in found.items()]


def _row_of(name: str, work: Work, technique: str, own: list[Results], plain: list[Results]) -> dict[str, Any]:
    values = [run.metric(work.metric) for run in own]
    differences = [value - run.metric(work.metric) for value, run in zip(values, plain, strict=True)]
    ratios = harness.ratios([run.step_s for run in own], [run.step_s for run in plain])
    precision = work.techniques[technique].mixed_precision
    launch = f"--mixed_precision {precision} " if precision != "no" else ""
    return {
        "work": name,
        "technique": technique,
        "flags": f"{launch}{work.techniques[technique].flags}".strip(),
        "metric": work.metric,
        "values": values,
        "mean": mean(values),
        "differences": differences,
        "same_weights": all(one.has_weights_of(other) for one, other in zip(own, plain, strict=True)),
        "peak_bytes": max(run.peak_bytes for run in own),
        "peak_ratio": max(run.peak_bytes for run in own) / max(run.peak_bytes for run in plain),
        "time_ratio": median(ratios),
        "time_ratios": ratios,
    }


HEADINGS = ("technique", "flags", "result", "of the seeds", "beside plain", "same weights", "peak", "of plain", "time")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    show = (lambda value: f"{100 * value:.1f} %") if row["metric"] == "accuracy" else "{:.3f}".format
    change = (lambda value: f"{100 * value:+.1f}") if row["metric"] == "accuracy" else "{:+.3f}".format
    low, high = min(row["differences"]), max(row["differences"])
    ends = f" ({change(low)} to {change(high)})" if low != high else ""
    is_plain = row["technique"] == PLAIN
    return [
        row["technique"],
        f"`{row['flags']}`" if row["flags"] else "-",
        show(row["mean"]),
        f"{show(min(row['values']))} to {show(max(row['values']))}",
        "-" if is_plain else f"{change(mean(row['differences']))}{ends}",
        "-" if is_plain else "yes" if row["same_weights"] else "no",
        f"{harness.to_mib(row['peak_bytes']):.1f} MiB",
        f"{100 * row['peak_ratio']:.0f} %",
        f"x{row['time_ratio']:.2f}",
    ]


def as_markdown(results: dict[str, Any]) -> str:
    """The page: a table for each work."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    threads = "1 thread" if results["num_threads"] == 1 else f"{results['num_threads']} threads"
    seeds = len(results["seeds"])
    parts = [
        f"`python benchmarks/quality.py` on {results['device']}, {threads}; {versions}.\n"
        f"Every technique on equally many samples, {seeds} seeds: the mean, the range over seeds, and the mean "
        "difference from the plain run of the same seed (with the range). Peak: of a whole step. Time: of a step, the "
        "median ratio to the plain run of the same seed.\n"
        f"Other work kept {results['busy_with_others']:.2f} of {results['num_cpus']} CPUs busy meanwhile: times have "
        "that spread, results and bytes do not depend on it."
    ]
    for name, about in results["works"].items():
        rows = [row for row in results["rows"] if row["work"] == name]
        better = "higher is better" if about["metric"] == "accuracy" else "lower is better"
        parts += [
            f"## {about['title']}",
            f"The result is {about['metric'].replace('_', ' ')}, {better}.",
            in_a_block(f"recipes/{about['recipe']}.py {about['flags']}"),
            *(["The base is trained with:", in_a_block(about["base"])] if about["base"] else []),
            harness.markdown_table(HEADINGS, map(cells, rows)),
        ]
    return "\n\n".join(parts)


def in_a_block(command: str) -> str:
    """A command of several lines."""
    lines = textwrap.wrap(command, 110, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", *(f"{line} \\" for line in lines[:-1]), lines[-1], "```"])


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what has not been run, and compare; returns the content of the JSON file."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each technique")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: out/quality, with --quick below it")
    flags = harness.read_flags(parser, args)
    if unknown := [name for name in flags.works if name not in WORKS]:
        parser.error(f"{unknown[0]} is no work: choose of {', '.join(WORKS)}")
    works, seeds = {name: WORKS[name] for name in flags.works or WORKS}, range(flags.seeds)
    runs = flags.runs or RUNS
    if flags.quick:
        works, seeds, runs = QUICK, range(QUICK_SEEDS), flags.runs or RUNS / "quick"
    found = {name: measure(name, work, seeds, runs) for name, work in works.items()}
    rows = [row for name, work in works.items() for row in rows_of(name, work, found[name])]
    all_runs = [run for of_work in found.values() for of_technique in of_work.values() for run in of_technique]
    results = {
        "benchmark": "quality",
        **harness.describe_machine(harness.this_device(), "transformers", "accelerate", "peft", "bitsandbytes"),
        "busy_with_others": mean(run.busy_with_others for run in all_runs),
        "num_cpus": os.cpu_count(),
        "seeds": list(seeds),
        "works": {
            name: {part: getattr(work, part) for part in ("title", "recipe", "flags", "metric", "base")}
            for name, work in works.items()
        },
        "rows": rows,
    }
    for name, work in works.items():
        harness.show(HEADINGS, (cells(row) for row in rows if row["work"] == name), title=work.title)
    harness.write_results(flags.output_dir, f"quality-{harness.this_device().type}", results, as_markdown(results))
    return results


if __name__ == "__main__":
    main()
