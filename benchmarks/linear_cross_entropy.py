"""The loss of a large vocabulary, seven ways: time, memory beyond the gradients, and error against float64.

    python benchmarks/linear_cross_entropy.py
    python benchmarks/linear_cross_entropy.py --shape 8192 2048 128256 --precisions bfloat16   # your model's sizes

Every way computes the summed cross-entropy of a linear head and its gradients for hidden states and head: on all logits
at once, as `memsave_recipes.core.losses` does it, eager and compiled, as torch's own `linear_cross_entropy` does
(torch 2.13 or newer), in chunks under checkpoint, and with the kernels of Liger and of Apple's cut-cross-entropy. These
two are optional (`pip install liger-kernel cut-cross-entropy`) and need Triton, hence a GPU. A way that fails keeps its
row, with the reason. Prints one table; writes it (.md) and every figure (.json) to docs/results/.

NOTE [ how it is measured ]
1. Ways take turns in an order drawn anew each round, after a call of each that is not timed. The ratio is the median
   over rounds of the ratio to the full path in the same round. Who has taken a minute takes no more turns.
2. The peak is that of one call, the tensors that were there before and the gradients that it leaves taken off: on a CPU
   by torch's profiler, on an accelerator by its allocator.
3. Errors are relative, |found - exact| / |exact|, that of the gradients the larger of both. Exact is the full path in
   float64 on the same values, a few rows at a time. A tenth of the rows is ignored.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memsave_recipes.core.losses import default_chunk_bytes, linear_cross_entropy, num_chunks

QUICK_SHAPES = [(40, 16, 300)]
SHAPES_ON_CPU = [(1024, 512, 32_768), (512, 512, 131_072)]
SHAPES_ON_ACCELERATOR = [(8192, 768, 50_257), (8192, 2048, 128_256), (8192, 2304, 256_000)]  # GPT-2, Llama 1B, Gemma 2B
PRECISIONS = ["float32", "bfloat16", "autocast"]
MOST_S = 60
PACKAGES = ("liger-kernel", "cut-cross-entropy", "triton")
HEADINGS = ("rows x width\nx vocabulary", "way", "peak beyond\nthe gradients", "time", "loss\nerror", "gradient\nerror")

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss on all logits at once."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")


def _load_torch() -> Loss:
    from torch.nn import LinearCrossEntropyOptions

    return partial(F.linear_cross_entropy, reduction="sum", options=LinearCrossEntropyOptions())


def _load_checkpointed() -> Loss:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        count = num_chunks(len(hidden), len(weight), default_chunk_bytes(hidden.device))
        pairs = zip(hidden.chunk(count), labels.chunk(count), strict=True)
        losses = [checkpoint(full_cross_entropy, some, weight, theirs, use_reentrant=False) for some, theirs in pairs]
        return torch.stack(losses).sum()

    return loss


def _load_liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, weight, labels: fused(weight, hidden, labels)


def _load_apple() -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return partial(cut_cross_entropy, reduction="sum")


WAYS: dict[str, Callable[[], Loss]] = {
    "full logits": lambda: full_cross_entropy,
    "memsave_recipes": lambda: linear_cross_entropy,
    "the same, compiled": lambda: partial(linear_cross_entropy, compiles=True),
    "torch's own": _load_torch,
    "checkpoint": _load_checkpointed,
    "Liger": _load_liger,
    "cut-cross-entropy": _load_apple,
}
YARDSTICK = "full logits"


class Bench:
    """One work on one device. Under autocast all tensors are float32 and the products bfloat16."""

    def __init__(self, shape: tuple[int, int, int], precision: str, device: torch.device) -> None:
        num_rows, width, vocab_size = shape
        self.work = {"num_rows": num_rows, "width": width, "vocab_size": vocab_size, "precision": precision}
        self.device, self.autocasts = device, precision == "autocast"
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        leaves = [torch.randn(size, width, generator=generator, device=device) for size in (num_rows, vocab_size)]
        leaves[1] *= width**-0.5
        self.leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        self.labels = torch.randint(vocab_size, (num_rows,), generator=generator, device=device)
        self.labels[::10] = -100
        self.exact = self.compute_exact()

    def run(self, loss_of: Loss) -> list[Tensor]:
        """Forward and backward: loss and gradients."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocasts):
            loss = loss_of(*self.leaves, self.labels)
        try:
            loss.backward()
            return [loss.detach(), *(leaf.grad for leaf in self.leaves)]
        finally:
            for leaf in self.leaves:
                leaf.grad = None

    def compute_exact(self) -> list[Tensor]:
        """Loss and gradients in float64."""
        hidden, weight = (leaf.detach().double().requires_grad_() for leaf in self.leaves)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for some, labels in zip(hidden.split(128), self.labels.split(128), strict=True):
            loss = full_cross_entropy(some, weight, labels)
            loss.backward()
            total += loss.detach()
        return [total, hidden.grad, weight.grad]

    def errors(self, loss_of: Loss) -> dict[str, float]:
        """Those of loss and gradients."""
        pairs = zip(self.run(loss_of), self.exact, strict=True)
        loss, *gradients = (((own - exact).norm() / exact.norm()).item() for own, exact in pairs)
        return {"loss_error": loss, "gradient_error": max(gradients)}

    def peak_bytes(self, loss_of: Loss) -> int:
        """The peak of one call beyond its gradients."""
        peak = harness.peak_bytes(partial(self.run, loss_of), self.device)
        return peak - sum(leaf.nbytes for leaf in self.leaves)


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """A row for every way."""
    rows: dict[str, dict[str, Any]] = {name: {**bench.work, "way": name, "seconds": []} for name in WAYS}
    losses: dict[str, Loss] = {}
    for name, load in WAYS.items():
        try:
            loss_of = load()
            rows[name] |= {**bench.errors(loss_of), "peak_bytes": bench.peak_bytes(loss_of)}
            losses[name] = loss_of
        except Exception as error:  # whatever a peer dislikes here, or no memory for it, is what its row says
            rows[name]["does_not_run"] = str(error).strip().split("\n")[0]
    calls = {name: partial(bench.run, loss_of) for name, loss_of in losses.items()}
    for name, seconds in harness.time_in_turns(calls, rounds, max_s=MOST_S).items():
        rows[name]["seconds"] = seconds
    for name in losses:
        rows[name] |= ratios(rows[name], rows[YARDSTICK]) if YARDSTICK in losses else {}
    return list(rows.values())


def ratios(row: dict[str, Any], full: dict[str, Any]) -> dict[str, float]:
    """Of memory, and of time in the same round, as far as both took their turns."""
    time_ratios = harness.ratios(row["seconds"], full["seconds"])
    return {"peak_ratio": row["peak_bytes"] / full["peak_bytes"], "time_ratio": median(time_ratios)}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text; the sizes only where a new work begins."""
    sizes = "{num_rows} x {width} x {vocab_size}\n{precision}".format(**row) if row["way"] == YARDSTICK else ""
    if "does_not_run" in row:
        return [sizes, row["way"], f"does not run here:\n{row['does_not_run']}", "-", "-", "-"]
    peak_ratio, time_ratio = (f"  x{row[key]:.2f}" if key in row else "" for key in ("peak_ratio", "time_ratio"))
    return [
        *(sizes, row["way"]),
        f"{harness.to_mib(row['peak_bytes']):,.0f} MiB{peak_ratio}",
        f"{1000 * median(row['seconds']):,.3g} ms{time_ratio}",
        *(f"{row[key]:.1e}" for key in ("loss_error", "gradient_error")),
    ]


def parse_flags(args: Sequence[str] | None, device: torch.device) -> argparse.Namespace:
    """The flags, with defaults that suit the device."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("ROWS", "WIDTH", "VOCABULARY"))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=3 if device.type == "cpu" else 20)
    return harness.read_flags(parser, args)


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns what the JSON file holds."""
    device = harness.this_device()
    flags = parse_flags(args, device)
    shapes = QUICK_SHAPES if flags.quick else SHAPES_ON_CPU if device.type == "cpu" else SHAPES_ON_ACCELERATOR
    works = product(flags.shape or shapes, flags.precisions)
    rows = [row for work in works for row in measure(Bench(*work, device), flags.rounds)]
    machine = harness.describe_machine(device, *PACKAGES)
    title = f"Loss of a linear head, {machine['device']}, {machine['num_threads']} threads, torch {torch.__version__}"
    table = [cells(row) for row in rows]
    harness.show(HEADINGS, table, title=title)
    results = {"benchmark": "linear_cross_entropy", "machine": machine, "rounds": flags.rounds, "rows": rows}
    page = f"{title}\n\n{harness.markdown_table(HEADINGS, table)}"
    harness.write_results(flags.output_dir, f"linear_cross_entropy-{device.type}", results, page)
    return results


if __name__ == "__main__":
    main()
