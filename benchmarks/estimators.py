"""Estimators of training memory side by side: the planner of this library, and four others.

    pip install torch-preflight torch-kitsune vram-check    # in an environment of their own, next to this library
    python benchmarks/estimators.py

A case is a published model at its published size, in float32, with AdamW or SGD, without and with full checkpointing.
The real peak is that of ``prediction.py``: the second step, optimizer state included, by torch's record of allocations.
Estimators that are not installed are named and left out. Writes docs/results/estimators-cpu.json and .md.

NOTE [ how others are asked ]
1. Each gets the same model, optimizer and shape through its public functions; ``Estimator.figure`` says what its answer
   consists of.
2. The real peak is of allocated bytes. So what others add for the CUDA context, fragmentation and safety is left out.
3. One that has no parameter for a case's optimizer or plan gives no answer to it.
"""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import mean
from typing import Any

import harness
import torch
from models import IMAGES, TEXT
from prediction import predict, run, task_of_case
from prediction_cases import LABELS, Case
from torch import Tensor, nn
from tqdm import tqdm

from memsave_recipes.training.optimizers import make_optimizer

IMAGES_224 = "--image_size 224 --augmentation none"
SMOLLM = (  # SmolLM2-135M
    "hidden_size=576,intermediate_size=1536,num_hidden_layers=30,num_attention_heads=9,num_key_value_heads=3,"
    "tie_word_embeddings=true,vocab_size=49152"
)
GPT2 = "vocab_size=50257,attn_pdrop=0.1,embd_pdrop=0.1,resid_pdrop=0.1"
MODELS = {  # recipe, flags, optimizer, micro-batch
    "GPT-2": (TEXT, f"--model_type gpt2 --block_size 256 --loss full --config_overrides {GPT2}", "adamw", 2),
    "Llama": (
        TEXT,
        f"--model_type llama --block_size 256 --loss full --config_overrides {SMOLLM}",
        "adamw",
        2,
    ),
    "BERT": (LABELS, "--model_type bert --config_overrides vocab_size=30522 --max_length 128", "adamw", 4),
    "ViT": (IMAGES, f"--model_type vit {IMAGES_224}", "adamw", 4),
    "ResNet-50": (IMAGES, f"--model_type resnet {IMAGES_224}", "momentum", 4),
    "VGG16": (IMAGES, f"--model vgg16 {IMAGES_224}", "momentum", 4),
    "DenseNet-121": (IMAGES, f"--model densenet121 {IMAGES_224}", "momentum", 4),
}
SMALL = {
    "Llama": (
        TEXT,
        "--model_type llama --block_size 64 --loss full --config_overrides vocab_size=512,"
        "hidden_size=64,intermediate_size=128,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=2",
        "adamw",
        2,
    ),
    "VGG": (IMAGES, "--model vgg_small --image_size 32 --augmentation none", "momentum", 2),
}
PLANS = ("none", "full")
OURS = "memsave_recipes"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A case as others take it: the model, its optimizer, and a micro-batch of images or tokens without values."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor

    @property
    def is_checkpointed(self) -> bool:
        """Whether every block recomputes."""
        return self.case.strategy == "full"

    @property
    def has_images(self) -> bool:
        """(B, C, H, W) in place of (B, T)."""
        return self.inputs.dim() == 4


@dataclass(frozen=True)
class Estimator:
    """One of the others.

    Args:
        package: on the package index.
        figure: the parts of its answer, for people.
        estimate: bytes; ``None`` for no answer.
    """

    package: str
    figure: str
    estimate: Callable[[Step], int | None]

    @property
    def version(self) -> str | None:
        """``None`` where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _torch_preflight(step: Step) -> int | None:
    from torch_preflight import VRAMGuard
    from torch_preflight.vram import estimate

    shape = {"image_size": step.inputs.shape[-1]} if step.has_images else {"seq_len": step.inputs.shape[-1]}
    guard = VRAMGuard(
        step.model,
        optimizer=step.optimizer,
        batch_size=len(step.inputs),
        gradient_checkpointing=step.is_checkpointed,
        **shape,
    )
    parts = estimate(guard.profile, guard.config).breakdown
    return parts.weights + parts.gradients + parts.optimizer_state + parts.activations


def _torch_kitsune(step: Step) -> int | None:
    from kitsune.predict.estimator import predict_memory

    if step.is_checkpointed:
        return None
    optimizer = "sgd_momentum" if step.case.optimizer == "momentum" else step.case.optimizer
    shape = tuple(step.inputs.shape[1:])
    predicted = predict_memory(step.model, shape, batch_size=len(step.inputs), optimizer=optimizer)
    return predicted.total_bytes - predicted.overhead_bytes


def _vram_check(step: Step) -> int | None:
    from vram_check import estimate

    if step.is_checkpointed:
        return None
    optimizer = "sgd" if step.case.optimizer == "momentum" else step.case.optimizer
    length = {} if step.has_images else {"seq_len": step.inputs.shape[-1]}
    weights = sum(parameter.numel() for parameter in step.model.parameters())
    parts = estimate(weights, batch_size=len(step.inputs), optimizer=optimizer, **length)
    return parts.parameters_bytes + parts.gradients_bytes + parts.optimizer_bytes + parts.activations_bytes


def _accelerate(step: Step) -> int | None:
    """As the command ``accelerate estimate-memory`` does for a model on the Hub."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if step.case.optimizer != "adamw":
        return None
    total_bytes, _ = calculate_maximum_sizes(step.model)
    return max(estimate_training_usage(total_bytes, "float32").values())


OTHERS = {
    "torch-preflight": Estimator(
        "torch-preflight",
        "VRAMGuard: parameters, gradients, optimizer state, tensors that the forward of one sample saves (on the meta "
        "device), times the micro-batch; checkpointing times 0.3",
        _torch_preflight,
    ),
    "torch-kitsune": Estimator(
        "torch-kitsune",
        "parameters, gradients, optimizer state, outputs of modules, or a formula for models that it cannot trace",
        _torch_kitsune,
    ),
    "vram-check": Estimator(
        "vram-check",
        "parameters, gradients, optimizer state, activations as twice the parameters a sample",
        _vram_check,
    ),
    "accelerate estimate-memory": Estimator(
        "accelerate", "parameters, gradients and Adam's state: four times the weights, no activations", _accelerate
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case with its real peak and the answer of each estimator in bytes, ``None`` where it has none."""

    case: Case
    real_bytes: int
    estimates: dict[str, int | None]

    def error_pct(self, name: str) -> float | None:
        """Of an estimator; above 0 where it is too high."""
        estimate = self.estimates[name]
        return None if estimate is None else 100 * (estimate / self.real_bytes - 1)


def cases_of(models: dict[str, tuple[str, str, str, int]]) -> list[Case]:
    """Every model under every plan."""
    return [
        Case(
            model=model,
            recipe=recipe,
            flags=flags,
            optimizer=optimizer,
            precision="no",
            strategy=plan,
            micro_batch_size=size,
        )
        for model, (recipe, flags, optimizer, size) in models.items()
        for plan in PLANS
    ]


def step_of(case: Case) -> Step:
    """Its model with random weights."""
    task = task_of_case(case)
    model = task.planned_model().train()
    batch = task.micro_batch(case.micro_batch_size)
    inputs = batch["images"] if "images" in batch else batch["input_ids"]
    return Step(case=case, model=model, optimizer=make_optimizer(task.optim, model), inputs=inputs)


def row_of(case: Case, others: dict[str, Estimator]) -> Row:
    """Ask all, then run the case."""
    plan, predicted, _ = predict(case, "cpu")
    step = step_of(case)
    estimates = {OURS: predicted, **{name: other.estimate(step) for name, other in others.items()}}
    del step
    gc.collect()
    return Row(case=case, real_bytes=run(case, plan), estimates=estimates)


def summary(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """How good an estimator's answers are."""
    errors = [error for row in rows if (error := row.error_pct(name)) is not None]
    return {
        "answers": len(errors),
        "mean_absolute_pct": mean(map(abs, errors)),
        "worst_pct": max(errors, key=abs),
        "too_low": sum(error < 0 for error in errors),
    }


def as_markdown(rows: Sequence[Row], results: dict[str, Any]) -> str:
    """A line a case, and three for all of them."""
    names = list(results["summary"])
    cells = []
    for row in rows:
        case, errors = row.case, [row.error_pct(name) for name in names]
        answers = ["-" if error is None else _percent(error) for error in errors]
        words = (case.model, case.optimizer, str(case.micro_batch_size), case.strategy)
        cells.append([*words, f"{harness.to_mib(row.real_bytes):,.0f}", *answers])
    found = results["summary"].values()
    cells += [
        ["mean absolute error", "", "", "", "", *(f"{own['mean_absolute_pct']:.2f}" for own in found)],
        ["worst", "", "", "", "", *(_percent(own["worst_pct"]) for own in found)],
        ["too low", "", "", "", "", *(f"{own['too_low']} of {own['answers']}" for own in found)],
    ]
    headings = ("model", "optimizer", "micro-batch", "checkpointing", "real MiB", *names)
    installed = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"`python benchmarks/estimators.py` on {results['device']}: {installed}.",
        *(f"Not installed and left out: {name}." for name in results["not_installed"]),
        "Error of the estimated peak of a training step in per cent, above 0 where it is too high; `-`: no answer.",
        "",
        harness.markdown_table(headings, cells),
        "",
        "What others estimate (what they add for the CUDA context, fragmentation and safety is left out):",
        "",
        *(f"* {name}: {OTHERS[name].figure}." for name in names if name != OURS),
    ]
    return "\n".join(lines)


def _percent(error: float) -> str:
    return f"{error:+.2f}" if abs(error) < 1 else f"{error:+.0f}"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Ask about and run every case; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    others = {name: other for name, other in OTHERS.items() if other.version}
    missing = [name for name in OTHERS if name not in others]
    for name in missing:
        print(f"{name} is not installed: left out")
    rows = [row_of(case, others) for case in tqdm(cases_of(SMALL if flags.quick else MODELS), unit="case")]
    results = {"benchmark": "estimators", **harness.describe_machine(torch.device("cpu"), "transformers")}
    results["versions"] |= {other.package: other.version for other in others.values()}
    results |= {"not_installed": missing, "summary": {name: summary(rows, name) for name in (OURS, *others)}}
    results["rows"] = [asdict(row) for row in rows]
    harness.write_results(flags.output_dir, "estimators-cpu", results, as_markdown(rows, results))
    print(json.dumps(results["summary"], indent=1))
    return results


if __name__ == "__main__":
    main()
