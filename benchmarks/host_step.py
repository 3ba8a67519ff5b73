"""What a step on the host costs beside torch's own optimizer on the same cores.

    python benchmarks/host_step.py --quick             # a tiny model: shows that it runs
    python benchmarks/host_step.py                     # 250 million parameters, 8 GiB, two minutes
    python benchmarks/host_step.py --num_numbers 1e9   # 32 GiB

The parameters are those of layers of Llama-3.1-8B, as many as make so many numbers, with gradients that are there. Ours
is ``--offload_optimizer step`` (``memsave_recipes/step/host_step.py``) without the copies to a device, which this
machine may not have: masters are stepped in pieces, and weights in bfloat16 are made of float32 masters. The yardstick
steps the same parameters by one call of the same optimizer: torch's fused AdamW, bitsandbytes' AdamW in 8 bits (where
it is installed) and AdamW with stochastic rounding. They take turns; a ratio is that of two steps of one round.

Prints the table and writes docs/results/host_step.json.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, cycle, takewhile
from typing import Any

import harness
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_recipes.step.host_step import HostMasters, step_masters
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import make_optimizer

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *2 * [(14336, 4096)], (4096, 14336), (4096,), (4096,)]
QUICK_LAYER = [(64, 64), (256, 64), (64,)]
WAYS: dict[str, tuple[OptimizerArguments, torch.dtype]] = {
    "AdamW, float32": (OptimizerArguments(), torch.float32),
    "AdamW, bfloat16 weights": (OptimizerArguments(), torch.bfloat16),
    "8-bit AdamW": (OptimizerArguments(optimizer="adamw_8bit"), torch.float32),
    "bfloat16, stochastic rounding": (OptimizerArguments(bf16_stochastic_round=True), torch.bfloat16),
}
HEADINGS = ("optimizer", "a step of its own", "ours beside it", "middle half")


class NoCopies:
    """Of a machine without a device: what the host does is all there is."""

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Return pageable memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.Event:
        """Copy nothing."""
        return torch.Event("cpu")

    def wait(self, event: torch.Event) -> None:
        """Wait for nothing."""


def shapes(layer: list[tuple[int, ...]], num_numbers: float) -> list[tuple[int, ...]]:
    """As many shapes of layers as have so many numbers, at least one layer."""
    sizes = accumulate(torch.Size(shape).numel() for shape in cycle(layer))
    count = sum(1 for _ in takewhile(lambda total: total <= num_numbers, sizes))
    return [shape for shape, _ in zip(cycle(layer), range(max(count, len(layer))))]


def stepping(optim: OptimizerArguments, parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer that the flags name, over ``parameters``, which have gradients."""
    optimizer = make_optimizer(optim, nn.ParameterList(parameters))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return optimizer


def calls(way: str, sizes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """A step by one call of the optimizer, and ours."""
    optim, dtype = WAYS[way]
    of_masters = torch.bfloat16 if optim.bf16_stochastic_round else torch.float32
    yardstick = stepping(optim, [nn.Parameter(torch.full(size, 0.5, dtype=of_masters)) for size in sizes])
    weights = [nn.Parameter(torch.full(size, 0.5, dtype=dtype)) for size in sizes]
    masters = HostMasters(weights, of_masters, NoCopies(), NoCopies())
    masters.take({})
    ours = stepping(optim, list(masters.of.values()))
    step_masters(ours, masters, leave_in_backward=False)
    return {"its own": yardstick.step, "ours": ours.step}


def measure(way: str, sizes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """The row of an optimizer."""
    both = calls(way, sizes)
    for call in both.values():
        call()  # which makes the state
    seconds = harness.time_in_turns(both, rounds)
    middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds["ours"], seconds["its own"]))
    own_s, _ = harness.median_and_quartiles(seconds["its own"])
    return {"way": way, "own_s": own_s, "ratio": middle, "quartiles": quartiles}


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns the content of the JSON file."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--num_numbers", type=float, default=2.5e8, help="numbers of all parameters together")
    flags = harness.read_flags(parser, args)
    sizes = shapes(QUICK_LAYER, 1e5) if flags.quick else shapes(LAYER, flags.num_numbers)
    has_bitsandbytes = find_spec("bitsandbytes") is not None
    ways = [way for way, (optim, _) in WAYS.items() if has_bitsandbytes or optim.optimizer != "adamw_8bit"]
    rows = [measure(way, sizes, 4 if flags.quick else 15) for way in ways]
    cells = [
        (
            row["way"],
            f"{1e3 * row['own_s']:.3g} ms",
            f"x{row['ratio']:.2f}",
            " - ".join(f"x{end:.2f}" for end in row["quartiles"]),
        )
        for row in rows
    ]
    harness.show(HEADINGS, cells)
    results = {
        "machine": harness.describe_machine(torch.device("cpu")),
        "num_numbers": sum(torch.Size(size).numel() for size in sizes),
        "rows": rows,
    }
    harness.write_results(flags.output_dir, "host_step", results, harness.markdown_table(HEADINGS, cells))
    return results


if __name__ == "__main__":
    main()
