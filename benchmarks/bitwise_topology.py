"""What `--bitwise_topology` costs: its step beside the usual one, on the ranks of the launch.

    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu_ddp.yaml benchmarks/bitwise_topology.py

Both train the same vision transformer on the same micro-batches with AdamW and clipping, each with a model of its own
in the same processes, and take turns in an order that is the same on all ranks. All ranks begin a step together; its
time is that of rank 0. Micro-batches are those of a step over all ranks. Run it on a quiet machine with a core for each
rank. The ratio is meant to be at most 1.03 where a step takes 20 ms or more.

Writes docs/results/bitwise_topology.json.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import harness
from loop_overhead import WORKS, Training, Work

from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.training.exact.batch_layouts import IndexedLayout
from memsave_recipes.training.launch.start import Accelerator, describe_environment

LAYOUTS = {"usual": BatchLayout, "the same again": BatchLayout, "bitwise topology": IndexedLayout}
YARDSTICK = "usual"
NUM_MICRO_BATCHES = (4, 6)
"""Of a step, over all ranks; each is measured."""


def steps(work: Work, accelerator: Accelerator, layout: type[BatchLayout]) -> Callable[[], Any]:
    """A function that makes the next step of a training."""
    training = Training(work, accelerator, layout)
    batches = iter(training.batches)
    return lambda: training.step(next(batches))


def measure(work: Work, accelerator: Accelerator) -> list[dict[str, Any]]:
    """For every way its median step and its ratio to the usual one."""
    ways = {name: steps(work, accelerator, layout) for name, layout in LAYOUTS.items()}
    seconds = harness.time_in_turns(ways, work.total_steps, before=accelerator.wait_for_everyone)
    rows = []
    for name, own in seconds.items():
        timed, baseline = own[work.num_warmup_steps :], seconds[YARDSTICK][work.num_warmup_steps :]
        ratio, quartiles = harness.median_and_quartiles(harness.ratios(timed, baseline))
        row = {"micro_batches": work.accumulation_steps, "step": name}
        step_ms = 1000 * harness.median_and_quartiles(timed)[0]
        rows.append({**row, "step_ms": step_ms, "ratio": ratio, "ratio_quartiles": quartiles})
    return rows


def main() -> None:
    """Measure, print on rank 0 and write."""
    flags = harness.read_flags(harness.make_parser(__doc__), None)
    work = WORKS["loop_overhead"]
    work = replace(work, num_steps=8, num_warmup_steps=2) if flags.quick else work
    accelerator = Accelerator()
    rows = [
        row for number in NUM_MICRO_BATCHES for row in measure(replace(work, accumulation_steps=number), accelerator)
    ]
    if accelerator.is_main_process:
        cells = [
            [str(row["micro_batches"]), row["step"], f"{row['step_ms']:.2f} ms", f"{row['ratio']:.3f}"] for row in rows
        ]
        title = f"{work.num_steps} steps of micro-batches of {work.micro_batch_size} images"
        harness.show(("micro-batches", "step", "median", "ratio to usual"), cells, title=title)
        about = {key: value for key, value in asdict(work).items() if key != "accumulation_steps"}
        content = {"work": about, "steps": rows, "environment": describe_environment(accelerator)}
        harness.write_results(flags.output_dir, "bitwise_topology", content)
    accelerator.end_training()


if __name__ == "__main__":
    main()
