"""What a step on the host costs beside torch's own optimizer on the same cores.

    python benchmarks/host_step.py --quick             # a tiny model: shows that it runs
    python benchmarks/host_step.py                     # 250 million parameters, 8 GiB, two minutes
    python benchmarks/host_step.py --num_numbers 1e9   # 32 GiB

The parameters are those of layers of Llama-3.1-8B, as many as make so many numbers, with gradients that are there. Ours
is ``--offload_optimizer step`` (``memsave_recipes/core/host/step.py``) without the copies to a device, which this
machine may not have: masters are stepped in pieces, and weights in bfloat16 are made of float32 masters. The yardstick
steps the same parameters by one call of the same optimizer: torch's fused AdamW, bitsandbytes' AdamW in 8 bits (where
it is installed) and AdamW with stochastic rounding. They take turns; a ratio is that of two steps of one round.

A last row compares updates beside a backward with updates after it. For want of a device the backward sleeps as long as
the step takes, layer by layer.

Prints the table and writes docs/results/host_step.json.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, cycle, takewhile
from typing import Any

import harness
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_recipes.core.host.step import HostMasters, step_masters
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import make_optimizer

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *2 * [(14336, 4096)], (4096, 14336), (4096,), (4096,)]
QUICK_LAYER = [(64, 64), (256, 64), (64,)]
WAYS: dict[str, tuple[OptimizerArguments, torch.dtype]] = {
    "AdamW, float32": (OptimizerArguments(), torch.float32),
    "AdamW, bfloat16 weights": (OptimizerArguments(), torch.bfloat16),
    "8-bit AdamW": (OptimizerArguments(optimizer="adamw_8bit"), torch.float32),
    "bfloat16, stochastic rounding": (OptimizerArguments(optimizer="adamw_bf16"), torch.bfloat16),
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


class WithoutDevice(HostMasters):
    """Masters of weights whose digests, which the device makes, take no time."""

    def _copied_digests(self, weights: list[nn.Parameter], host: Tensor) -> Callable[[], dict[nn.Parameter, int]]:
        self._last = self._down.start([])
        return dict


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
    of_masters = torch.bfloat16 if optim.rounds_at_random else torch.float32
    yardstick = stepping(optim, [nn.Parameter(torch.full(size, 0.5, dtype=of_masters)) for size in sizes])
    weights = [nn.Parameter(torch.full(size, 0.5, dtype=dtype)) for size in sizes]
    masters = WithoutDevice(weights, of_masters, NoCopies(), NoCopies())
    ours = stepping(optim, list(masters.of.values()))
    step_masters(ours, masters, leave_in_backward=False)
    masters.collect()  # which makes them of their weights
    return {"its own": yardstick.step, "ours": ours.step}


class _Layer(torch.autograd.Function):
    """What has the gradient of a weight a while after that of the layer behind it."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *of_output: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return of_output[0], torch.full_like(ctx.weight, 1e-3), None


def step_with_backward(sizes: list[tuple[int, ...]], backward_s: float, *, in_backward: bool) -> Callable[[], Any]:
    """A backward and the host's step, beside it or after it."""
    weights = [nn.Parameter(torch.full(size, 0.5)) for size in sizes]
    masters = WithoutDevice(weights, torch.float32, NoCopies(), NoCopies())
    optimizer = stepping(OptimizerArguments(), list(masters.of.values()))
    optimizer.zero_grad()
    step_masters(optimizer, masters, in_backward=in_backward)
    numbers = sum(weight.numel() for weight in weights)

    def step() -> None:
        output = torch.zeros(())
        for weight in weights:
            output = _Layer.apply(output, weight, backward_s * weight.numel() / numbers)  # type: ignore[no-untyped-call]
        output.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measure_beside(sizes: list[tuple[int, ...]], backward_s: float, rounds: int) -> dict[str, Any]:
    """The seconds of a step whose updates are made after the backward, and how many of them are left beside it."""
    ways = {"after": False, "beside": True}
    both = {name: step_with_backward(sizes, backward_s, in_backward=way) for name, way in ways.items()}
    for call in both.values():
        call()  # which makes the state
    seconds = harness.time_in_turns(both, rounds)
    middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds["beside"], seconds["after"]))
    after_s, _ = harness.median_and_quartiles(seconds["after"])
    return {"way": "beside the backward", "own_s": after_s, "ratio": middle, "quartiles": quartiles}


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
    rounds = 4 if flags.quick else 15
    rows = [measure(way, sizes, rounds) for way in ways]
    rows.append(measure_beside(sizes, rows[0]["own_s"], rounds))
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
