"""docs/results/triton_kernels.md: ``PYTHONPATH=tests python -m triton_kernels.page [out/triton_kernels]``.

Given the rows of a run, it first keeps them in the JSON file beside the page, whose figures are limits of the tests.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from triton_kernels.models import model_of_types

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "triton_kernels.json"
HEADINGS = (
    *("model", "layer", "width", "saved", "forward: kernels", "read", "written"),
    *("backward: kernels", "read", "written", "casts of weights", "registers (spilled), sm_80", "sm_90"),
)
INTRODUCTION = """Counted by `make test-triton`: layers of models of the page of `memsave fit`, one of a type,
under the plan `compiled:1` and bfloat16 autocast, by torch's compiler for cards that are not there. No figure was
measured on a card. Inductor writes the kernels for an H100. Triton and ptxas make machine code of them for an A100
(sm_80) and an H100 (sm_90), of each in its first configuration. VGG and DenseNet are not here: plans compile no blocks
in sequence.

A model has a row for each form of its layers: weights of other sizes, or an input of another shape or dtype. *Saved*,
*read* and *written* are bytes for each element of the layer's input: what the forward leaves for the backward besides
its inputs, and what Triton's kernels move by inductor's own estimate. Kernels are Triton's and, after the +, calls of
libraries, such as products, convolutions and attention; what libraries move is not counted. Of layers that take several
graphs, as those of Swin with and without shifted windows, these are of the first one. *Casts of weights* are bytes for
each weight in a forward and a backward, with the last steps of sums over all tokens, which are most of them where
weights are few. Registers are the most of a thread in any kernel, *spilled* the bytes of all kernels that did not fit:
on an A100, of two layers of Swin and one of ResNet.

Triton's interpreter (`TRITON_INTERPRET=1`) ran a cast and a sum of GPT-2's on CPU tensors, without inductor's parts;
it fails at `libdevice.rsqrt` and `libdevice.tanh`, and cuts float32 to bfloat16 where a card rounds.
Versions: {versions}.
"""


def kept(folder: Path, names: dict[str, str]) -> dict:
    """The rows of a run, by type."""
    rows = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {
        "versions": {name: version(name).partition("+")[0] for name in ("torch", "triton", "transformers")},
        "rows": {kind: {"model": names[kind], "layers": layers} for kind, layers in rows.items()},
    }


def page_of(results: dict) -> str:
    """The page."""
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    for row in results["rows"].values():
        lines += [cells_of(row["model"], layer) for layer in row["layers"]]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{INTRODUCTION.format(versions=versions)}\n{table}\n"


def cells_of(model: str, row: dict) -> list[str]:
    passes = [row[name] for name in ("forward", "backward")]
    of_passes = [
        cell
        for one in passes
        for cell in (f"{one['kernels']} + {one['library_calls']}", f"{one['read']:g}", f"{one['written']:g}")
    ]
    registers = [f"{code['registers']} ({code['spilled_bytes']})" for code in row["machine_code"].values()]
    of_weights = f"{sum(one['of_weights'] for one in passes):.3g}"
    return [model, row["layer"], str(row["width"]), f"{row['saved']:g}", *of_passes, of_weights, *registers]


def main(*folder: str) -> None:
    """Keep the rows of a run, if there is one, and write the page."""
    if folder:
        names = {kind: model.name for kind, model in model_of_types().items()}
        RESULTS.write_text(json.dumps(kept(Path(*folder), names), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    RESULTS.with_suffix(".md").write_text(page_of(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
