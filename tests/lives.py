"""A run in several lives: how it is launched, how it is told to end, and whether it is the run that nothing ended."""

import gc
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file

from memsave_recipes.core.planner.budget import overheads_of_device
from memsave_recipes.core.text import GIB

ROOT = Path(__file__).parents[1]
TINY_VIT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,patch_size=8"
TINY_BERT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
TINY_GPT2 = "n_layer=2,n_head=2,n_embd=32"
OF_TEXT = ["--train_file", str(ROOT / "CHANGELOG.md")]
"""A text that is evaluated in a moment."""
NUM_STEPS = 10
LENGTH = ["--max_steps", str(NUM_STEPS), "--logging_steps", "4", "--eval_steps", "3"]
IMAGES = ["--model_type", "vit", "--config_overrides", TINY_VIT, "--global_batch_size", "16", *LENGTH]
TEXT = ["--model_type", "gpt2", "--config_overrides", f"{TINY_GPT2},vocab_size=512", "--block_size", "32"]
TEXT += [*OF_TEXT, "--global_batch_size", "8", *LENGTH]
WORDS = "vocab_size=300"
TINY_LLAMA = "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,hidden_size=32,intermediate_size=48"
SHAPES = {
    "gpt2": f"{TINY_GPT2},{WORDS}",
    "llama": f"{TINY_LLAMA},{WORDS}",
    "mistral": f"{TINY_LLAMA},{WORDS},sliding_window=9",
}
LABELLED = ["--model_type", "bert", "--config_overrides", f"{TINY_BERT},{WORDS}", "--max_length", "24"]
LABELLED += ["--global_batch_size", "16", *LENGTH]
FLAGS = {"image_classification": IMAGES, "language_modeling": TEXT, "text_classification": LABELLED}
MEASURED = ("perf/", "memory/", "result/perf", "result/memory")  # by the clock, or by the life


@contextmanager
def loaded(recipe):
    """The module of a recipe, for as long."""
    specification = importlib.util.spec_from_file_location(recipe, ROOT / "recipes" / f"{recipe}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[recipe] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[recipe]


def scratch(model_type):
    """The flags of a small language model."""
    return ["--model_type", model_type, "--config_overrides", SHAPES[model_type]]


def write_rows(path, rows):
    """A file of JSON lines; its name, as a flag takes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def be_rank(accelerator, *, recipe, words):
    """The recipe on a rank that ``run_on_ranks`` forks: its results, and what it printed."""
    with redirect_stdout(io.StringIO()) as printed, loaded(recipe) as module:
        return module.main(words), printed.getvalue()


def environment_of(**variables):
    """The environment of a process that imports this checkout, before what is on its path already."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def launch(recipe, config, *flags, folder, precision="no", of_launch=(), common=None, environment=None):
    """``accelerate launch`` as people type it, with a process group of its own.

    Args:
        of_launch: more flags of the launcher.
        common: in place of ``FLAGS``.
    """
    command = [Path(sys.executable).with_name("accelerate"), "launch"]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--mixed_precision", precision]
    command += of_launch
    common = FLAGS[recipe] if common is None else common
    of_a_run = [] if recipe == "ddp_equals_accumulation" else ["--report_to", "none", "--dataloader_num_workers", "2"]
    words = [*common, *of_a_run, "--output_dir", folder, *flags]
    return subprocess.Popen(
        [str(word) for word in [*command, ROOT / "recipes" / f"{recipe}.py", *words]],
        cwd=ROOT,
        env=environment or environment_of(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_of(process):
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def wait_for_checkpoint(process, folder):
    wait_for(process, lambda: list((folder / "checkpoints").glob("step-*")))


def wait_for(process, is_so):
    """Until ``is_so()``; not for a process that has ended."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_context(gib):
    """A budget of ``gib`` beside what the device takes for itself; nothing on a CPU."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return gib + sum(overheads_of_device(device).values()) / GIB


def share_of(results, share):
    """So much of a run's peak in GiB, and all of what libraries keep on the device when nothing is alive."""
    gc.collect()
    kept = torch.accelerator.memory_allocated() / GIB if torch.accelerator.is_available() else 0
    return kept + share * (results["memory"]["peak_allocated_gib"] - kept)


class Killed(BaseException):
    """Nothing of ours catches it."""


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]


def curve(folder):
    """The logged losses of a run."""
    return [row["train/loss"] for row in rows_of(folder) if "train/loss" in row]


def results_of(folder):
    results = json.loads((folder / "results.json").read_text())
    return {key: value for key, value in results.items() if key not in ("perf", "memory")}


def assert_the_same_run(folder, straight):
    assert rows_of(folder) == rows_of(straight)
    assert results_of(folder) == results_of(straight)
    assert_the_same_weights(folder / "final", straight / "final")


def weights_of(folder):
    """The tensors of a saved model, or of its adapters and their base from scratch."""
    files = [*folder.glob("*.safetensors"), *folder.glob("base/*.safetensors")]
    return {name: one for path in files for name, one in load_file(path).items()}


def assert_the_same_weights(folder, straight):
    weights, expected = weights_of(folder), weights_of(straight)
    assert weights.keys() == expected.keys() != set()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def assert_the_same_bits(folder, expected, step):
    """Logged losses and norms, evaluations, weights, and the last checkpoint with the optimizer's state."""
    curve, expected_curve = ([row for row in rows_of(one) if "result/steps" not in row] for one in (folder, expected))
    assert curve == expected_curve
    assert_the_same_weights(folder / "final", expected / "final")
    ours, theirs = (one / "checkpoints" / f"step-{step}" for one in (folder, expected))
    for path in theirs.glob("*.safetensors"):
        tensors, others = load_file(ours / path.name), load_file(path)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in others), path.name
    assert (ours / "optimizer.json").read_text() == (theirs / "optimizer.json").read_text()
