"""docs/results/triton_kernels.md: ``PYTHONPATH=tests python -m triton_kernels.page [out/triton_kernels]``.

Given the rows of a run, it first keeps them in the JSON file beside the page, whose figures are limits of the tests.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

from triton_kernels.models import compiled_models

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "triton_kernels.json"
LAYERS, LOSS = "layers", "loss"
PASSES = ("forward", "backward")
CLASSES = ("pointwise", "reduction", "persistent_reduction")
_OF_CLASSES = [
    cell for kind in CLASSES for cell in (f"{kind.replace('_', ' ')}: kernels", "bytes", "registers: sm_80, sm_90")
]
HEADINGS = [
    *("model", "layer", "width", "saved", "forward: kernels", "read", "written"),
    *("backward: kernels", "read", "written", "casts of weights"),
]
HEADINGS_OF_CLASSES = ["model", "layer", "width", *_OF_CLASSES]
HEADINGS_OF_LOSS = ["vocabulary", "soft cap", "read", "written", *_OF_CLASSES]
COLUMNS = 120
INTRODUCTION = """
Counted by `make test-triton`: layers of models of the page of `memsave fit`, and the loss, by torch's compiler for
cards that are not there. No figure was measured on a card. Layers are under the plan `compiled:1` and bfloat16
autocast. Inductor writes the kernels for an H100. Triton and ptxas make machine code of them for an A100 (sm_80) and an
H100 (sm_90), of each in its first configuration. Versions: {versions}.

These {models} models are all of that page whose layers plans compile. VGG and DenseNet are not here: plans compile no
blocks in sequence. Neither are models of images and text: how they run depends on values of their inputs, and these
layers are traced without any.

No optimizer has a row, because inductor compiles none. AdamW and SGD are torch's fused ones: CUDA kernels of ATen,
compiled when torch was built. 8-bit AdamW is CUDA, too, of bitsandbytes. All others call ATen's operators one by one.

Triton's interpreter (`TRITON_INTERPRET=1`) cannot run such kernels instead of a card: it fails at `libdevice.rsqrt` and
`libdevice.tanh`, and cuts float32 to bfloat16 where a card rounds, as `tests/triton_kernels/test_interpreter.py` shows.
"""
OF_LAYERS = """
A model has a row for each form of its layers: weights of other sizes, or an input of another shape or dtype. *Saved*,
*read* and *written* are bytes for each element of the layer's input: what the forward leaves for the backward besides
its inputs, and what Triton's kernels move by inductor's own estimate. Kernels are Triton's and, after the +, calls of
libraries, such as products, convolutions and attention; what libraries move is not counted. Of layers that take several
graphs, as those of Swin with and without shifted windows, these are of the first one. *Casts of weights* are bytes for
each weight in a forward and a backward, with the last steps of sums over all tokens, which are most of them where
weights are few.
"""
OF_CLASSES = """
The same layers, by class of Triton's kernels: *pointwise* ones sum nothing, a *persistent reduction* holds all that it
sums in registers, any other *reduction* sums in a loop. Kernels are those of a forward and a backward, and bytes all
that they read and write but casts of weights. What a kernel reads in two loops counts once. *Registers* are the most of
a thread in any kernel of all graphs, with the bytes in brackets that did not fit into them. {spills}
"""
OF_LOSS = """
A chunk of the loss, compiled, by the size of the vocabulary: bytes for each logit, of the padded ones where the
vocabulary is no multiple of 64. The products with the head are calls of a library, between which this runs.
"""


def keep(name: str, rows: Any, kind: str = LAYERS) -> None:
    """Leave rows for the page, if the run names a folder for them."""
    if folder := os.environ.get("TRITON_ROWS"):
        path = Path(folder, kind, f"{name.replace('/', '-')}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows), encoding="utf-8")


def kept(folder: Path) -> dict:
    """The rows of a run, by model, and those of the loss."""
    layers = _read(folder / LAYERS)
    return {
        "versions": {name: version(name).partition("+")[0] for name in ("torch", "triton", "transformers")},
        "rows": {name: layers[name.replace("/", "-")] for name in compiled_models()},
        LOSS: list(_read(folder / LOSS).values()),
    }


def _read(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page_of(results: dict) -> str:
    """The page."""
    layers = [(name, layer) for name, rows in results["rows"].items() for layer in rows]
    introduction = INTRODUCTION.format(
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        models=len(results["rows"]),
    )
    parts = [
        *paragraphs(introduction),
        *("## Layers", *paragraphs(OF_LAYERS)),
        table(HEADINGS, [cells_of(*one) for one in layers]),
        *("## Classes of kernels", *paragraphs(OF_CLASSES.format(spills=spills_of(results)))),
        table(HEADINGS_OF_CLASSES, [cells_by_class(*one) for one in layers]),
        *("## The loss", *paragraphs(OF_LOSS)),
        table(HEADINGS_OF_LOSS, [cells_of_loss(row) for row in results[LOSS]]),
    ]
    return "\n\n".join(parts) + "\n"


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, in lines of a page."""
    return [fill(one, COLUMNS, break_long_words=False, break_on_hyphens=False) for one in text.strip().split("\n\n")]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *rows))


def spills_of(results: dict) -> str:
    """A sentence for each architecture: which rows have kernels that spill."""
    found: dict[str, list[str]] = {}
    for name, row in _named(results):
        for architecture, classes in row["machine_code"].items():
            spilled = sum(code["spilled_bytes"] for code in classes.values())
            found.setdefault(architecture, []).extend([f"{name} ({spilled} bytes)"] if spilled else [])
    return " ".join(
        f"On {architecture} kernels spill in {', '.join(places)}." if places else f"On {architecture} no kernel spills."
        for architecture, places in found.items()
    )


def _named(results: dict) -> Iterator[tuple[str, dict]]:
    for name, rows in results["rows"].items():
        for layer in rows:
            yield f"{name} of width {layer['width']}", layer
    for row in results[LOSS]:
        yield f"the loss of {row['words']:,} words", row


def cells_of(model: str, row: dict) -> list[str]:
    passes = [row[name] for name in PASSES]
    of_passes = [
        cell
        for one in passes
        for cell in (f"{one['kernels']} + {one['library_calls']}", f"{one['read']:g}", f"{one['written']:g}")
    ]
    of_weights = f"{sum(one['of_weights'] for one in passes):.3g}"
    return [model, row["layer"], str(row["width"]), f"{row['saved']:g}", *of_passes, of_weights]


def cells_by_class(model: str, row: dict) -> list[str]:
    of_classes = _cells_of_classes([row[name] for name in PASSES], row["machine_code"])
    return [model, row["layer"], str(row["width"]), *of_classes]


def cells_of_loss(row: dict) -> list[str]:
    softcap = "none" if row["softcap"] is None else f"{row['softcap']:g}"
    of_classes = _cells_of_classes([row], row["machine_code"])
    return [f"{row['words']:,}", softcap, f"{row['read']:g}", f"{row['written']:g}", *of_classes]


def _cells_of_classes(graphs: Sequence[dict], machine_code: dict) -> Iterator[str]:
    for kind in CLASSES:
        of_kind = [graph["classes"][kind] for graph in graphs if kind in graph["classes"]]
        codes = [classes[kind] for classes in machine_code.values() if kind in classes]
        yield str(sum(one["kernels"] for one in of_kind))
        yield f"{sum(one['bytes'] for one in of_kind):.4g}"
        yield ", ".join(map(_registers, codes)) or "-"


def _registers(code: dict) -> str:
    return f"{code['registers']} ({code['spilled_bytes']})" if code["spilled_bytes"] else str(code["registers"])


def main(*folder: str) -> None:
    """Keep the rows of a run, if there is one, and write the page."""
    if folder:
        RESULTS.write_text(json.dumps(kept(Path(*folder)), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    RESULTS.with_suffix(".md").write_text(page_of(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
