"""The experiment this project grew from, on your device: VGG16 trained plain and checkpointed, side by side.

    python benchmarks/vgg16_article.py

On a GPU: 224 px, batch 64, SGD with learning rate 0.001 and momentum 0.9, two classes, float32. The device has to hold
plain training: if it cannot, add `--batch_size 32` or `--bf16`. On a CPU it runs by itself at a reduced size, with the
same columns; there weights, gradients and momentum are most of the memory, so look at the bytes saved for backward.
Prints one table; writes it (.md) and every raw figure (.json) to docs/results/.

The article's rows are from the article on checkpoint_sequential with VGG16, dogs-vs-cats, that this project grew from:
device memory as NVML tells it, minutes an epoch, validation accuracy. NVML counts all that is taken from the device:
context, other processes, blocks that torch's allocator keeps after their tensors are gone, workspaces that cuDNN chose.
`memsave plan` predicts live tensors, the context and workspaces of cuBLAS: about half of 14,222 MB for plain. How the
other half divides is not known until a GPU has run this.

Expect plain's loss and gradients in every row. Segments save little of what tensors need, since VGG16's first stages
must stand in memory whole while their own backward runs. The same batch in smaller micro-batches goes below that floor,
and as VGG16 has no BatchNorm, the result differs by rounding alone. It costs one more gradient, since a layer's sum so
far stands beside what is added to it: 392 MiB for the largest layer, at the CPU's size more than the images save.

NOTE [ how it is measured ]
1. Methods take turns, plain first, round after round, so that a slow minute of the machine meets them all. The first
   steps of a turn are left out. The time ratio is the median over rounds of the ratio to plain in the same round.
2. One model lives at a time. A turn begins with an emptied cache and the same weights, and trains on the same images:
   random ones, made on the device outside the timed part, so no decoding and no copying is in any figure.
3. Peaks begin after the warm-up, when the optimizer's state is there. "Device used" is what the driver says at the end
   of a turn: CUDA context and other processes included. A CPU's peak is that of one instrumented step.
4. Losses are compared at every step, gradients at the first, where the weights are still the same. Plain's row compares
   its rounds with its first one, so it shows the noise of the device. Dropout is off: masks for 16 images are not those
   for 64. VGG16 has it in no block that is recomputed, and its memory would be less than a thousandth.
"""

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from statistics import median
from typing import Any

import harness
import torch
import torch.nn.functional as F
from models import without_dropout
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils import collect_env
from tqdm import tqdm

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.memory import SavedTensors, resident_bytes
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Plan
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.memory_watch import read_device_memory

ON_ACCELERATOR = {"image_size": 224, "batch_size": 64, "rounds": 5, "warmup_steps": 3, "steps": 10}
QUICK: dict[str, Any] = {"model": "vgg_small", "image_size": 32, "batch_size": 4, "rounds": 1, "steps": 1}
ON_CPU = {"image_size": 64, "batch_size": 8, "rounds": 3, "warmup_steps": 1, "steps": 2}
STRATEGIES = ("segments:2", "segments:4", "every:2", "full")
ACCUMULATED_STRATEGIES, ACCUMULATION_STEPS = ("none", "segments:2"), 4
MODELS_WITHOUT_BATCHNORM = ("vgg_small", "vgg11", "vgg13", "vgg16", "vgg19")

HEADINGS = ("method", "peak\nallocated", "peak\nreserved", "device\nused", "saved for\nbackward", "a step", "result")
MEMORY_COLUMNS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "saved_for_backward_bytes")
ARTICLE = (
    ("article: plain", "-", "-", "14,222 MB", "-", "5:00 min\nan epoch", "79 %\naccuracy"),
    ("article: 2 segments", "-", "-", "10,550 MB\nx0.74", "-", "6:45 min\nan epoch\nx1.35", "79 %\naccuracy"),
)
Step = Callable[[Tensor, Tensor], Tensor]  # images and labels to the loss of an optimizer step on them


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: a plan, and the micro-batches that it sees."""

    name: str
    plan: Plan
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a method showed in one round; ``memory`` without what the device cannot tell."""

    method: str
    seconds: list[float]
    losses: list[float]
    gradient_difference: float
    memory: dict[str, int]


@dataclass(kw_only=True)
class Bench:
    """The work, the same for every method. The first turn leaves the gradients that all turns are held against."""

    model: str
    image_size: int
    batch_size: int
    warmup_steps: int
    steps: int
    bf16: bool
    device: torch.device
    expected_gradients: list[Tensor] = field(default_factory=list)  # on the host: in nobody's device memory

    def take_turn(self, method: Method) -> Turn:
        """Warm-up and timed steps, then one step more for all that would disturb the clock."""
        memory = {} if self.on_cpu else {"allocated_before_bytes": torch.accelerator.memory_allocated(self.device)}
        model = self.build_model()
        optimizer = SGD(model.parameters(), lr=0.001, momentum=0.9)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = self.backward(model, images, labels, method.micro_batch_size)
            optimizer.step()
            return loss

        timed = []
        with apply_plan(model, method.plan):
            for index in range(self.warmup_steps + self.steps):
                if index == self.warmup_steps and not self.on_cpu:
                    torch.accelerator.reset_peak_memory_stats(self.device)
                timed.append(timed_step(step, *self.batch(index)))
                if index == 0:
                    gradient_difference = self.gradient_difference(model)
                optimizer.zero_grad()
            memory |= self.peaks(step, model, optimizer)
            memory |= {"state_bytes": resident_bytes(model, optimizer)}
            memory |= {"saved_for_backward_bytes": self.saved_for_backward_bytes(model, method.micro_batch_size)}
        return Turn(
            method=method.name,
            seconds=[seconds for seconds, _ in timed[self.warmup_steps :]],
            losses=[loss for _, loss in timed],
            gradient_difference=gradient_difference,
            memory=memory,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether there are no allocator statistics."""
        return self.device.type == "cpu"

    def build_model(self) -> nn.Module:
        """The same weights at each call."""
        torch.manual_seed(0)
        with self.device:
            return without_dropout(MODELS[self.model](num_classes=2))

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) and labels (B,) of a step, the same at each call."""
        generator = torch.Generator(self.device).manual_seed(index)
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator, device=self.device)
        return images, torch.randint(2, (self.batch_size,), generator=generator, device=self.device)

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits (B, 2) in float32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return model(images).float()

    def backward(self, model: nn.Module, images: Tensor, labels: Tensor, micro_batch_size: int) -> Tensor:
        """The mean loss of the whole batch; adds its gradients, one micro-batch after the other."""
        mean_loss = torch.zeros((), device=self.device)
        for some, theirs in zip(images.split(micro_batch_size), labels.split(micro_batch_size), strict=True):
            loss = F.cross_entropy(self.forward(model, some), theirs, reduction="sum") / len(labels)
            loss.backward()
            mean_loss += loss.detach()
        return mean_loss

    def peaks(self, step: Step, model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
        """The peaks since the warm-up, after one more step, which leaves its gradients."""
        batch = self.batch(self.warmup_steps + self.steps)
        if self.on_cpu:
            resident = resident_bytes(model, optimizer) + sum(tensor.nbytes for tensor in batch)
            return {"peak_allocated_bytes": resident + harness.peak_bytes(lambda: step(*batch), self.device)}
        step(*batch)
        harness.wait_for_device()
        return read_device_memory(self.device)

    def saved_for_backward_bytes(self, model: nn.Module, micro_batch_size: int) -> int:
        """What the forward of one micro-batch keeps."""
        images = self.batch(0)[0][:micro_batch_size].clone()  # a mere view would count as the whole batch
        with SavedTensors(model) as saved:
            logits = self.forward(model, images)
        logits.sum().backward()  # what was saved through hooks is let go by the backward alone
        return saved.num_bytes

    def gradient_difference(self, model: nn.Module) -> float:
        """The largest ``|g - expected| / |expected|`` of a parameter."""
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        self.expected_gradients = self.expected_gradients or gradients
        pairs = zip(gradients, self.expected_gradients, strict=True)
        return max(((own - expected).norm() / expected.norm()).item() for own, expected in pairs)


def timed_step(step: Step, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Seconds and loss of an optimizer step, from a device at rest to a device at rest."""
    losses: list[Tensor] = []
    seconds = harness.seconds_of(lambda: losses.append(step(images, labels)))
    return seconds, losses[0].item()


def take_turns(bench: Bench, methods: Sequence[Method], rounds: int) -> list[Turn]:
    """Every method once a round."""
    turns = []
    progress = tqdm(harness.turns(methods, rounds, shuffled=False), total=rounds * len(methods), unit="turn")
    for method in progress:
        progress.set_postfix_str(method.name)
        harness.empty_device()
        turns.append(bench.take_turn(method))
    return turns


def summarize(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row for every method, plain's first. Ratios are to plain."""
    names = dict.fromkeys(turn.method for turn in turns)
    by_method = [[turn for turn in turns if turn.method == name] for name in names]
    return [summarize_method(own, plain=by_method[0]) for own in by_method]


def summarize_method(turns: list[Turn], plain: list[Turn]) -> dict[str, Any]:
    """One method's turns against plain's turns of the same rounds."""
    memory, plain_memory = largest_memory(turns), largest_memory(plain)
    times = [median(turn.seconds) for turn in turns]
    time_ratios = harness.ratios(times, [median(turn.seconds) for turn in plain])
    expected = plain[0].losses
    return {
        "method": turns[0].method,
        "memory": memory,
        "memory_ratios": {key: memory[key] / plain_memory[key] for key in MEMORY_COLUMNS if key in memory},
        "step_time_s": median(seconds for turn in turns for seconds in turn.seconds),
        "spread_s": [min(times), max(times)],  # of the rounds' medians
        "time_ratio": median(time_ratios),
        "loss_difference": max(abs(a - b) for turn in turns for a, b in zip(turn.losses, expected, strict=True)),
        "gradient_difference": max(turn.gradient_difference for turn in turns),
    }


def largest_memory(turns: list[Turn]) -> dict[str, int]:
    """Each figure's largest value over the rounds."""
    return {key: max(turn.memory[key] for turn in turns) for key in turns[0].memory}


def cells(row: dict[str, Any]) -> list[str]:
    """The row as text, under each figure its ratio to plain's."""
    memory, ratios, (low, high) = row["memory"], row["memory_ratios"], row["spread_s"]
    return [
        row["method"].replace(", ", "\n"),
        *(
            f"{harness.to_mib(memory[key]):,.0f} MiB\nx{ratios[key]:.2f}" if key in memory else "-"
            for key in MEMORY_COLUMNS
        ),
        f"{row['step_time_s']:.3g} s\n{low:.3g} to {high:.3g}\nx{row['time_ratio']:.2f}",
        f"loss ±{row['loss_difference']:.1g}\ngradient ±{row['gradient_difference']:.1g}",
    ]


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """What the table shows, in one sentence."""
    parts = [
        f"{row['method']} takes x{row['memory_ratios']['peak_allocated_bytes']:.2f} of plain's peak memory, "
        f"keeps x{row['memory_ratios']['saved_for_backward_bytes']:.2f} for the backward, "
        f"in x{row['time_ratio']:.2f} of the time"
        for row in rows
        if row["method"].startswith("segments:2")
    ]
    loss, gradient = (max(row[f"{of}_difference"] for row in rows) for of in ("loss", "gradient"))
    state = f"{harness.to_mib(rows[0]['memory']['state_bytes']):,.0f} MiB"
    return (
        f"{'; '.join(parts)}; weights, gradients and momentum alone are {state}, whatever the method; in all "
        f"rows every loss is plain's within {loss:.1g} "
        f"and every parameter's first gradient within {gradient:.1g} of its norm."
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware, versions, and the switches of torch that change memory or time."""
    machine = harness.describe_machine(device) | {
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type != "cuda":
        return machine
    return machine | {
        "device_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
    }


def parse_flags(args: Sequence[str] | None, device: torch.device) -> argparse.Namespace:
    """The flags, with defaults that suit the device."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--model", default="vgg16", choices=MODELS_WITHOUT_BATCHNORM)
    sizes = ON_CPU if device.type == "cpu" else ON_ACCELERATOR
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default here: {default}")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help=f"default: {' '.join(STRATEGIES)}")
    parser.add_argument("--bf16", action="store_true", help="forward under bfloat16 autocast")
    flags = harness.read_flags(parser, args)
    if flags.quick:
        vars(flags).update(QUICK)
    for name, least in {**dict.fromkeys(sizes, 1), "image_size": 32}.items():
        if getattr(flags, name) < least:
            raise InputError(f"--{name} {getattr(flags, name)} is too small: give at least {least}")
    return flags


def make_methods(model_name: str, batch_size: int, strategies: Sequence[str]) -> list[Method]:
    """Plain first, the strategies on the whole batch, then what accumulates over micro-batches."""
    with torch.device("meta"):
        model = MODELS[model_name](num_classes=2)
    micro = ceil(batch_size / ACCUMULATION_STEPS)
    rows = [(strategy, "", batch_size) for strategy in dict.fromkeys(["none", *strategies])]
    rows += [(strategy, f", {micro} at a time", micro) for strategy in ACCUMULATED_STRATEGIES]
    return [
        Method(
            name=strategy.replace("none", "plain") + suffix, plan=plan_blocks(model, strategy), micro_batch_size=size
        )
        for strategy, suffix, size in rows
    ]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns what the JSON file holds."""
    device = harness.this_device()
    flags = parse_flags(args, device)
    methods = make_methods(flags.model, flags.batch_size, flags.strategies)
    work = {
        name: getattr(flags, name) for name in ("model", "image_size", "batch_size", "warmup_steps", "steps", "bf16")
    }
    turns = take_turns(Bench(**work, device=device), methods, flags.rounds)

    rows, machine = summarize(turns), describe_machine(device)
    dtype = "bfloat16 autocast" if flags.bf16 else "float32"
    title = (
        f"{flags.model}, {flags.image_size} px, batch {flags.batch_size}, SGD, {dtype}, random images, "
        f"{machine['device']}, torch {machine['torch']}"
    )
    table, sentence = [*map(cells, rows), *ARTICLE], describe(rows)
    harness.show(HEADINGS, table, sentence, title=title)
    results = {
        "benchmark": "vgg16_article",
        "machine": machine,
        "flags": {name: value for name, value in vars(flags).items() if name not in ("output_dir", "quick")},
        "plans": {method.name: method.plan.describe() for method in methods},
        "rows": rows,
        "turns": [asdict(turn) for turn in turns],
    }
    page = f"{title}\n\n{harness.markdown_table(HEADINGS, table)}\n\n{sentence}"
    harness.write_results(flags.output_dir, f"vgg16_article-{device.type}", results, page)
    return results


if __name__ == "__main__":
    run_recipe(main)
