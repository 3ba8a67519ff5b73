"""Trainers side by side: the memory and time of a step, and how far from the training of whole batches in float64.

    python benchmarks/peers.py            # a quarter of an hour on one core
    python benchmarks/peers.py --quick

All train the same GPT-2 from the same weights on the same documents of uneven length, in the same order, with AdamW at
a constant rate and clipping. Other than the reference they compute a global batch in micro-batches, as trainers do
where memory is short. Each lives in a process of its own and makes a step when it is its turn, in an order that is
drawn anew every round, so that what else the machine does hits all of them alike. A peer that is not installed is left
out. Writes docs/results/peers-DEVICE.json and .md.

NOTE [ what is compared ]
1. *Peak*: weights, gradients, optimizer state, activations and temporaries at the highest moment of a step, as
   ``break_down_peak`` records all allocations of torch, whoever's the loop is. The larger of the last steps, which are
   not timed.
2. *Time*: from one update to the next, with loading and logging, as a ratio to that of the yardstick in the same round;
   the median and the middle half. Of a process's CPU time, too, which other work on the machine stretches less. A
   second yardstick shows what chance makes of equal loops.
3. *Loss*: after each step the mean loss of a token of the next global batch, computed from the weights in float64, for
   all in the same way, outside of the time. What trainers log does not count. The largest distance from the
   reference's, relative to it.
4. *Weights*: the distance from the reference's last weights, divided by how far these are from the first ones.
   Attention does not depend on the biases of its keys, so their gradients are nothing but rounding errors, which AdamW
   makes full steps of: they are left out.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import harness
import torch
from forked import EndStep, Runner
from safetensors.torch import load_file, save_file
from side_by_side.loops import (
    Loop,
    accelerate_loop,
    accelerate_tokens_loop,
    fabric_loop,
    our_loop,
    torch_loop,
    trainer_loop,
    trl_loop,
    whole_batch_loop,
)
from side_by_side.work import QUICK, Watch, Work
from torch import Tensor
from tqdm import tqdm

KEY_BIASES = "attn.c_attn.bias"
"""The end of the name of the biases of queries, keys and values."""


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Args:
        package: on the package index; ``module`` is what is imported.
        note: on its loss and its memory, for people.
    """

    loop: Loop
    package: str
    module: str
    note: str


REFERENCE, YARDSTICK, OURS = "torch, whole batches in float64", "torch, by hand", "memsave_recipes"
EXAMPLE, TRAINER, TRL, FABRIC = "Accelerate, example loop", "Trainer", "TRL SFTTrainer", "Lightning Fabric"
CHECKPOINTED = "gradient checkpointing"
TRL_HEAD = "its head works in buffers for 32,768 entries of a vocabulary at a time, whatever there are"
LEAN = f"{OURS}, full"
BUDGET = f"{OURS}, budget"

PEERS = {
    REFERENCE: Peer(partial(whole_batch_loop, dtype=torch.float64), "torch", "torch", "the reference"),
    "torch, whole batches": Peer(
        partial(whole_batch_loop, dtype=torch.float32), "torch", "torch", "how far float32 alone leads away"
    ),
    YARDSTICK: Peer(
        torch_loop, "torch", "torch", "the sum over tokens, divided by those of the step; no checkpointing"
    ),
    "the same again": Peer(torch_loop, "torch", "torch", "how far two equal loops are apart"),
    OURS: Peer(our_loop, "memsave-recipes", "memsave_recipes", "the recipe's loop with its defaults: `--loss auto`"),
    LEAN: Peer(
        partial(our_loop, strategy="full", loss="chunked"),
        "memsave-recipes",
        "memsave_recipes",
        "`--activation_checkpointing full --loss chunked`",
    ),
    BUDGET: Peer(
        partial(our_loop, strategy="budget:bitwise", is_budget=True, loss="chunked"),
        "memsave-recipes",
        "memsave_recipes",
        "`--activation_checkpointing budget:bitwise --loss chunked`, with the budget above",
    ),
    TRAINER: Peer(trainer_loop, "transformers", "transformers", "its defaults"),
    f"{TRAINER}, {CHECKPOINTED}": Peer(
        partial(trainer_loop, is_checkpointed=True), "transformers", "transformers", "`gradient_checkpointing=True`"
    ),
    EXAMPLE: Peer(accelerate_loop, "accelerate", "accelerate", "`accelerator.accumulate` and the model's mean loss"),
    f"{EXAMPLE}, {CHECKPOINTED}": Peer(
        partial(accelerate_loop, is_checkpointed=True),
        "accelerate",
        "accelerate",
        "the same with `model.gradient_checkpointing_enable()`",
    ),
    "Accelerate, loop for several sizes": Peer(
        accelerate_tokens_loop, "accelerate", "accelerate", "its guide's loop that counts the tokens of a step first"
    ),
    f"{TRL}, no checkpointing": Peer(
        partial(trl_loop, is_checkpointed=False),
        "trl",
        "trl",
        f"`gradient_checkpointing=False`; {TRL_HEAD}",
    ),
    TRL: Peer(trl_loop, "trl", "trl", f"its defaults, with gradient checkpointing; {TRL_HEAD}"),
    FABRIC: Peer(fabric_loop, "lightning", "lightning_fabric", "the loop of its guide to accumulation, mean loss"),
    f"{FABRIC}, {CHECKPOINTED}": Peer(
        partial(fabric_loop, is_checkpointed=True),
        "lightning",
        "lightning_fabric",
        "the same with `model.gradient_checkpointing_enable()`",
    ),
}
NOT_QUICK = (
    *("the same again", f"{TRL}, no checkpointing"),
    *(f"{EXAMPLE}, {CHECKPOINTED}", f"{FABRIC}, {CHECKPOINTED}"),
)
OWN_MODELS = (
    "pip resolves it beside torch 2.13, but its recipes train its own classes of models, of which none is a GPT-2"
)
LEFT_OUT = {"torchtune 0.6.1": OWN_MODELS, "litgpt 0.5.13": OWN_MODELS}
"""Peers that have no row, and why."""


def train(name: str, work: Work, folder: Path, end_step: EndStep) -> dict[str, Any]:
    """Run a loop; the last weights go into ``folder``, in float64."""
    watch = Watch(work, end_step)
    PEERS[name].loop(work, watch)
    save_file({key: value.detach().double().cpu() for key, value in watch.model.named_parameters()}, folder / name)
    own_s = time.process_time()
    return {"losses": watch.losses, "peak_bytes": max(watch.peaks), "cpu_seconds": watch.cpu_seconds, "own_s": own_s}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one loop: ``seconds``, ``cpu_seconds`` and ``losses`` of every step, ``own_s`` of CPU time in all."""

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    peak_bytes: int
    own_s: float
    weights: dict[str, Tensor]


def measure(work: Work, names: Sequence[str]) -> dict[str, Outcome]:
    """The loops of ``names``, a step of each in every round."""
    with TemporaryDirectory() as folder:
        runners = {name: Runner(partial(train, name, work, Path(folder))) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        steps = harness.turns(names, work.total_steps)
        for name in tqdm(steps, total=work.total_steps * len(names), unit="step"):
            seconds[name].append(runners[name].step())
        return {
            name: Outcome(**runner.close(), seconds=seconds[name], weights=load_file(Path(folder) / name))
            for name, runner in runners.items()
        }


def largest_distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Rule 3 of the NOTE."""
    return max(abs(own - other) / other for own, other in zip(losses, expected, strict=True))


def distance(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, as far as rule 4 of the NOTE counts them."""
    parts = []
    for name, tensor in weights.items():
        difference = tensor - expected[name]
        if name.endswith(KEY_BIASES):
            queries, _, values = difference.chunk(3)
            difference = torch.cat([queries, values])
        parts.append(difference.norm())
    return torch.stack(parts).norm().item()


def row_of(name: str, outcomes: dict[str, Outcome], work: Work) -> dict[str, Any]:
    """A row of the table."""
    timed = slice(work.num_warmup_steps, work.num_warmup_steps + work.num_timed_steps)
    own, reference, yardstick = outcomes[name], outcomes[REFERENCE], outcomes[YARDSTICK]
    ratio, quartiles = _ratio(own.seconds[timed], yardstick.seconds[timed])
    cpu_ratio, cpu_quartiles = _ratio(own.cpu_seconds[timed], yardstick.cpu_seconds[timed])
    first = {key: value.detach().double().cpu() for key, value in work.make_model().named_parameters()}
    return {
        "loop": name,
        "package": PEERS[name].package,
        "note": PEERS[name].note,
        "peak_bytes": own.peak_bytes,
        "peak_ratio": own.peak_bytes / yardstick.peak_bytes,
        "step_s": median(own.seconds[timed]),
        "time_ratio": ratio,
        "time_ratio_quartiles": quartiles,
        "cpu_time_ratio": cpu_ratio,
        "cpu_time_ratio_quartiles": cpu_quartiles,
        "loss_distance": largest_distance(own.losses, reference.losses),
        "weights_distance": distance(own.weights, reference.weights) / distance(reference.weights, first),
        "losses": own.losses,
    }


def _ratio(own: Sequence[float], yardstick: Sequence[float]) -> tuple[float, list[float]]:
    return harness.median_and_quartiles(harness.ratios(own, yardstick))


HEADINGS = ("loop", "peak", "of torch by hand", "time", "CPU time", "loss", "weights")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    times = [f"x{row[name]:.2f}<br>{_range(row[f'{name}_quartiles'])}" for name in ("time_ratio", "cpu_time_ratio")]
    distances = [f"{row[name]:.1e}" if row[name] else "0" for name in ("loss_distance", "weights_distance")]
    return [
        row["loop"],
        f"{harness.to_mib(row['peak_bytes']):,.1f} MiB",
        f"{100 * row['peak_ratio']:.0f} %",
        *times,
        *distances,
    ]


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def as_markdown(results: dict[str, Any]) -> str:
    """The page: conditions, the table, what each loop does."""
    work, rows = results["work"], results["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    threads = "1 thread" if results["num_threads"] == 1 else f"{results['num_threads']} threads"
    size = f"{work['n_layer']} layers, {work['n_embd']} wide, vocabulary {work['vocab_size']:,}"
    lines = [
        f"`python benchmarks/peers.py` on {results['device']}, {threads}; {versions}.",
        f"A GPT-2 ({size}) in float32, {work['micro_batch_size']} x {work['accumulation_steps']} documents of "
        f"{work['shortest']} to {work['longest']} tokens a step, {work['num_timed_steps']} timed steps of "
        f"{results['num_steps']}. The budget is {work['budget_gib'] * 1024:.0f} MiB.",
        "Peak: all that a step holds. Time and CPU time: of a step, as a ratio to torch by hand in the same round, the "
        "median and the middle half. Loss and weights: the distance from the training of whole batches in float64; "
        "the loss is the largest over the steps, relative, the weights are relative to how far they have moved.",
        f"Other work kept {results['busy_with_others']:.2f} of {results['num_cpus']} CPUs busy meanwhile: times are "
        "as uncertain as the two equal loops are apart, bytes and distances do not depend on it.",
        "",
        harness.markdown_table(HEADINGS, map(cells, rows)),
        "",
        *(f"* {row['loop']}: {row['note']}." for row in rows),
        *(f"* {name} has no row: {reason}." for name, reason in results["left_out"].items()),
    ]
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all loops that are installed; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    work = QUICK if flags.quick else Work()
    wanted = {name: peer for name, peer in PEERS.items() if not flags.quick or name not in NOT_QUICK}
    names = [name for name, peer in wanted.items() if find_spec(peer.module)]
    missing = {peer.package: "it is not installed here" for name, peer in wanted.items() if name not in names}
    device, other_work = harness.this_device(), harness.OtherWork()
    outcomes = measure(work, names)
    results = {
        "benchmark": "peers",
        **harness.describe_machine(device, *dict.fromkeys(PEERS[name].package for name in names)),
        **other_work.figures(sum(outcome.own_s for outcome in outcomes.values())),
        "work": asdict(work),
        "num_steps": work.total_steps,
        "left_out": missing | LEFT_OUT,
        "rows": [row_of(name, outcomes, work) for name in names],
    }
    harness.show(HEADINGS, map(cells, results["rows"]))
    harness.write_results(flags.output_dir, f"peers-{device.type}", results, as_markdown(results))
    return results


if __name__ == "__main__":
    main()
