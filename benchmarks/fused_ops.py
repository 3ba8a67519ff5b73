"""What layers move besides products and attention, with and without fused operators, counted for sixty models.

    python benchmarks/fused_ops.py --quick     # four models: shows that it runs
    python benchmarks/fused_ops.py             # sixty models: minutes on one core

A forward and a backward of each model of `known_models.py` run on fake tensors with the kernels of an H100 under
bfloat16, with `--fused_ops auto` and `none`. Counted are the bytes that operators read and write, but for products,
attention and what is done to weights and their gradients alone. A layer is what a model of three layers has more than
one of two. Networks without equal layers are counted whole. The last column names the modules that move most of the
rest in the forward. Nothing is measured.

Writes docs/results/fused_ops.json and .md.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import known_models
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs import estimate, fake_step
from memsave_recipes.core.costs.fake_step import bytes_moved
from memsave_recipes.core.costs.repeats import Repeats
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.task import Estimates, Launch
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.models.fused_ops import FusedOps, fused_in
from memsave_recipes.tools.cli.flags import recipe_path
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.tools.fit.subject import find_subject

QUICK = ("GPT-2", "Llama 3.2 1B", "Gemma 3 1B", "ResNet-50")
COUNTS = ("num_hidden_layers", "n_layer")
NUM_SAMPLES, MOST_TOKENS = 8, 500  # together a number that is no side of a weight
PRODUCTS = ("mm", "attention", "convolution")
HEADINGS = ("model", "fused in a layer", "none", "auto", "auto / none", "most of the rest, forward")
NUM_NAMED = 3
MODELS = tuple(model for model in known_models.MODELS if model.make_processor is None)
REST = """

What is left in Python: in the attention of Llama and its kin the rotary embedding, in their MLPs SiLU and a product, in
Gemma 2's attention soft caps; sums of residuals are in the decoder layers. Masks are made once for all layers. Liger
Kernel has rotary embeddings and SwiGLU fused, for the models that it knows. Eager layers leave them as they are: on a
GPU layers compile by default, which fuses all of them in any model ([kernels](triton_kernels.md))."""


@dataclass
class Traffic:
    """Bytes besides products: of all operators, and of those in forwards by the class of the module that runs."""

    num_bytes: int = 0
    by_module: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.num_bytes - other.num_bytes, self.by_module - other.by_module, self.fused - other.fused)


@contextmanager
def counting(model: nn.Module, traffic: Traffic) -> Iterator[None]:
    """Inside, every operator of a step on fake tensors is counted, and no layer is left out because it is like one."""
    of_weights = {form for one in model.parameters() for form in (one.shape, one.shape[::-1])}
    running: list[nn.Module] = []
    count = fake_step._Operators._counted

    def counted(self: Any, func: Any, args: Any, kwargs: Any, key: Any, out: Any) -> Any:
        shapes = [leaf.shape for leaf in fake_step._tensors((args, kwargs, out))]
        computes = func._overloadpacket not in fake_step.NO_KERNEL and not of_weights.issuperset(shapes)
        if computes and not any(name in str(func) for name in PRODUCTS):
            num_bytes = bytes_moved(func, args, kwargs, out)
            traffic.num_bytes += num_bytes
            if running:
                traffic.by_module[type(running[-1]).__name__] += num_bytes
        return count(self, func, args, kwargs, key, out)

    begins = register_module_forward_pre_hook(lambda module, _: running.append(module))
    ends = register_module_forward_hook(lambda module, *_: (running.pop(), None)[1])
    try:
        with (
            replaced(fake_step._Operators, "_counted", counted),
            replaced(estimate, "find_repeats", lambda *_: Repeats(())),
        ):
            yield
    finally:
        begins.remove()
        ends.remove()


def traffic_of(model: known_models.KnownModel, fused_ops: FusedOps) -> tuple[Traffic, int]:
    """The traffic of a forward and backward, and the tokens of a micro-batch; samples where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        subject = find_subject(model.write(Path(folder)))
        length = min(subject.length or 1, MOST_TOKENS)
        sizes = [f"--{subject.length_flag}", str(length)] if subject.length else []
        words = [*subject.flags, *sizes, "--global_batch_size", str(NUM_SAMPLES), "--fused_ops", fused_ops]
        task = read_task(recipe_path(subject.recipe), words)
        estimates = Estimates(task, Launch(target=find_target("h100"), mixed_precision="bf16"))
    traffic, layout = Traffic(), BatchLayout.of(NUM_SAMPLES, None, 1)
    with counting(estimates.model, traffic):
        estimates.of(layout, task.losses[0], lambda workload: [plan_for("none", workload.stacks)])
    for part in (fused_in(estimates.model) or "").partition(": ")[2].partition(" are ")[0].split(", "):
        number, _, name = part.partition(" ")
        traffic.fused[name] += int(number or 0)
    return traffic, NUM_SAMPLES * length


def of_a_layer(model: known_models.KnownModel, fused_ops: FusedOps) -> dict[str, Any]:
    """Bytes a token of a layer, or a sample of a network without equal layers, and what moves most of them."""
    count = next((name for name in COUNTS if name in model.config), None)
    if count is None:
        traffic, tokens = traffic_of(model, fused_ops)
    else:
        few, more = (replace(model, config=model.config | {count: number}) for number in (2, 3))
        (of_few, tokens), (of_more, _) = traffic_of(few, fused_ops), traffic_of(more, fused_ops)
        traffic = of_more - of_few
    return {
        "of": "network" if count is None else "layer",
        "bytes": round(traffic.num_bytes / tokens),
        "fused": {name: number for name, number in traffic.fused.items() if number},
        "forward": {name: round(moved / tokens) for name, moved in traffic.by_module.most_common(NUM_NAMED)},
    }


def row_of(name: str, found: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """A row of the table."""
    none, auto = found["none"], found["auto"]
    fused = ", ".join(f"{number} {kind}" for kind, number in auto["fused"].items()) or "-"
    rest = ", ".join(f"{kind} {moved / 1000:,.0f}" for kind, moved in auto["forward"].items())
    sizes = [f"{one['bytes'] / 1000:,.0f}" for one in (none, auto)]
    return name, fused, *sizes, f"{auto['bytes'] / none['bytes']:.2f}", rest


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Count all models; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    models = [one for one in MODELS if not flags.quick or one.name in QUICK]
    counted = {one.name: {mode: of_a_layer(one, mode) for mode in ("none", "auto")} for one in models}
    rows = [row_of(name, found) for name, found in counted.items()]
    harness.show(HEADINGS, rows)
    notes = "kB a token that a layer reads and writes besides products, attention and weights, forward and "
    notes += "backward; for networks without equal layers, and images, kB a sample. Counted, not measured."
    notes += REST
    results = {"benchmark": "fused_ops", "target": "h100", "mixed_precision": "bf16", "models": counted}
    harness.write_results(
        flags.output_dir, "fused_ops", results, f"{notes}\n\n{harness.markdown_table(HEADINGS, rows)}"
    )
    print(json.dumps({"models": len(rows)}))
    return results


if __name__ == "__main__":
    main()
