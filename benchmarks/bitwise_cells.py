"""Does `--bitwise_topology` keep the last bit: in every model, optimizer, precision, micro-batch and number of ranks?

    OMP_NUM_THREADS=1 python benchmarks/bitwise_cells.py        # hours; goes on where it was stopped

A row of the table is 50 steps of 24 samples of one recipe. It is trained on one rank from start to end, and four times
more, on 1, 2, 3 and 4 ranks that are killed once half of the steps are saved, from where another number of ranks goes
on. A run has the same bits as the first one if its logged losses, gradient norms and evaluations, its weights and the
optimizer's state in its last checkpoint are equal, tensor by tensor. Writes docs/results/bitwise_cells-DEVICE.json and
.md.
"""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import psutil
import torch
from safetensors.torch import load_file
from tqdm import tqdm

WORDS, DROPOUT = "vocab_size=512", "attn_pdrop=0.1,embd_pdrop=0.1,resid_pdrop=0.1"
SMALL = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
TEXT = ("--block_size", "32", "--train_file", str(harness.ROOT / "CHANGELOG.md"))
GPT2 = ("--model_type", "gpt2", "--config_overrides", f"n_layer=2,n_head=2,n_embd=32,{DROPOUT},{WORDS}")
LLAMA = ("--model_type", "llama", "--config_overrides", f"{SMALL},num_key_value_heads=2,{WORDS}")
VIT = ("--model_type", "vit", "--config_overrides", f"{SMALL},patch_size=8")
CONVNET = ("--augmentation", "digits", "--image_size", "16", "--batchnorm", "global")
WORKS = {
    "GPT-2 with dropout": ("language_modeling", (*GPT2, *TEXT, "--loss", "full")),
    "Llama, chunked loss": ("language_modeling", (*LLAMA, *TEXT, "--loss", "chunked")),
    "ViT": ("image_classification", (*VIT, "--augmentation", "digits")),
    "VGG-BN": ("image_classification", ("--model", "vgg_small_bn", *CONVNET)),
    "DenseNet": ("image_classification", ("--model", "densenet_small", *CONVNET)),
}
OPTIMIZERS = {"AdamW": ("--learning_rate", "1e-3"), "SGD": ("--optimizer", "sgd", "--learning_rate", "0.05")}
PRECISIONS = {"float32": "no", "bf16": "bf16"}
SIZES = (1, 2, 3, 4, 5)
RANKS = ((1, 3), (2, 1), (3, 4), (4, 2))
"""Of runs: those that are killed, and those that go on."""
STEPS, QUICK_STEPS = 50, 10
RUN_TIMEOUT_S = 600
CHECKPOINT_POLL_S = 0.02
LOGGED_BY_THE_CLOCK = ("perf/", "memory/", "result/")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row of the table."""

    work: str
    optimizer: str
    precision: str
    micro_batch_size: int

    def words(self, folder: Path, num_steps: int) -> tuple[str, ...]:
        """The recipe's flags."""
        length = ("--max_steps", num_steps, "--eval_steps", num_steps // 2, "--save_every", num_steps // 2)
        batch = ("--global_batch_size", 24, "--bitwise_topology", "--micro_batch_size", self.micro_batch_size)
        others = ("--max_grad_norm", 0.5, "--logging_steps", 1, "--report_to", "none", "--output_dir", folder)
        return tuple(map(str, (*WORKS[self.work][1], *OPTIMIZERS[self.optimizer], *batch, *length, *others)))


def begin(cell: Cell, num_ranks: int, folder: Path, num_steps: int, *further: str) -> subprocess.Popen[bytes]:
    """Launch a run of a cell; what it says is in a file beside its folder."""
    command = harness.launch_command(
        *(WORKS[cell.work][0], *cell.words(folder, num_steps), *further),
        config="cpu" if num_ranks == 1 else "cpu_ddp",
        launch=["--mixed_precision", PRECISIONS[cell.precision], "--num_processes", num_ranks],
    )
    with _log(folder).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a run.

    Raises:
        RuntimeError: it failed.
    """
    if code := process.wait(RUN_TIMEOUT_S):
        raise RuntimeError(f"exit code {code}\n{_log(folder).read_text(errors='replace')}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Without a word of warning, the launcher and all its ranks."""
    for one in [process, *psutil.Process(process.pid).children(recursive=True)]:
        one.kill()
    process.wait()


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def differences(folder: Path, expected: Path) -> list[str]:
    """What of a run has other bits than that of ``expected``."""
    found = [] if _logged(folder) == _logged(expected) else ["what was logged"]
    last = max((expected / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    states = [last / "optimizer.json", *last.glob("*.safetensors"), expected / "final" / "model.safetensors"]
    return found + [path.name for path in states if not _same(folder / path.relative_to(expected), path)]


def _same(path: Path, expected: Path) -> bool:
    if path.suffix == ".json":
        return path.read_text() == expected.read_text()
    tensors, others = load_file(path), load_file(expected)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in others)


def _logged(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(LOGGED_BY_THE_CLOCK)} for row in rows]
    return [row for row in kept if row]


def row_of(cell: Cell, num_steps: int, ranks: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Train a cell on all numbers of ranks; by these, what has other bits than on one."""
    with TemporaryDirectory() as name:
        straight, found = Path(name) / "straight", {}
        end(begin(cell, 1, straight, num_steps), straight)
        for first, then in ranks:
            resumed = Path(name) / f"{first}, then {then}"
            process = begin(cell, first, resumed, num_steps)
            _wait_for_checkpoint(resumed, process)
            kill(process)
            end(begin(cell, then, resumed, num_steps, "--resume"), resumed)
            found[resumed.name] = differences(resumed, straight)
    return {**vars(cell), "differences": found}


def _wait_for_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not any((folder / "checkpoints").glob("step-*")):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"no checkpoint\n{_log(folder).read_text(errors='replace')}")
        time.sleep(CHECKPOINT_POLL_S)


def as_markdown(results: Mapping[str, Any]) -> str:
    """The table, with a verdict above it."""
    rows = results["rows"]
    runs = [of for row in rows for of in row["differences"].values()]
    columns = list(rows[0]["differences"])
    headings = ("model", "optimizer", "precision", "micro-batch", *columns)
    cells = [
        [
            *(row["work"], row["optimizer"], row["precision"], str(row["micro_batch_size"])),
            *("equal" if not of else ", ".join(of) for of in row["differences"].values()),
        ]
        for row in rows
    ]
    lines = [
        f"`python benchmarks/bitwise_cells.py` on {results['device']}, torch {results['versions']['torch']}, "
        f"{results['num_steps']} steps of 24 samples.",
        f"{sum(not of for of in runs)} of {len(runs)} runs have the bits of one rank. Columns are numbers of ranks: "
        "the first ones were killed in the middle, and the others went on from their checkpoint.",
        "",
    ]
    return "\n".join([*lines, harness.markdown_table(headings, cells)])


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train every cell that the file of results does not have; returns what it holds."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    device = torch.device("cpu")
    cells = [
        Cell(work=work, optimizer=optimizer, precision=precision, micro_batch_size=size)
        for precision, size, work, optimizer in product(PRECISIONS, SIZES, WORKS, OPTIMIZERS)
    ]
    ranks, num_steps = RANKS, STEPS
    if flags.quick:
        cells, ranks, num_steps = [cells[-1]], RANKS[1:2], QUICK_STEPS
    name = f"bitwise_cells-{device.type}"
    file = flags.output_dir / f"{name}.json"
    about = {"benchmark": "bitwise_cells", **harness.describe_machine(device), "num_steps": num_steps}
    known = json.loads(file.read_text()) if file.exists() else {}
    rows = known["rows"] if about.items() <= known.items() else []
    done = [{key: row[key] for key in vars(cells[0])} for row in rows]
    for cell in tqdm([cell for cell in cells if vars(cell) not in done], unit="cell"):
        rows.append(row_of(cell, num_steps, ranks))
        results = {**about, "rows": rows}
        harness.write_results(flags.output_dir, name, results, as_markdown(results))
    return {**about, "rows": rows}


if __name__ == "__main__":
    main()
