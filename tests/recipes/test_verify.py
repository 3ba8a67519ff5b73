"""``--verify`` as people run it: the same weights as without, and no training on a difference."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from lives import assert_the_same_weights, loaded, write_rows
from samples import sample
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from memsave_recipes.core.activations import spans
from memsave_recipes.core.plans import Action
from memsave_recipes.run.failures import run_recipe

SHORT = ["--global_batch_size", "8", "--micro_batch_size", "3", "--max_steps", "2", "--report_to", "none"]
TINY = "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=48,vocab_size=300"
RECIPES = {
    "image_classification": ["--model", "densenet_small", *SHORT],
    "language_modeling": [
        *("--model_type", "llama", "--config_overrides", f"{TINY},num_key_value_heads=1", "--block_size", "32"),
        *("--train_file", "text.jsonl", *SHORT),
    ],
    "text_classification": [
        *("--model_type", "bert", "--config_overrides", TINY, "--max_length", "24"),
        *("--train_file", "labelled.jsonl", "--validation_file", "labelled.jsonl", *SHORT),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = [{"text": f"{n} and {n} are {2 * n}", "label": "even" if n % 2 else "odd"} for n in range(40)]
    for name in ("text", "labelled"):
        write_rows(folder / f"{name}.jsonl", texts)
    return folder


@pytest.fixture
def main(monkeypatch, folder, tmp_path):
    """``main(recipe, *flags, output=...)`` runs it beside its texts; returns its results."""
    monkeypatch.chdir(folder)

    def run(name, *flags, output="run"):
        AcceleratorState._reset_state(reset_partial_state=True)
        with loaded(name) as module:
            return module.main([*RECIPES[name], *flags, "--output_dir", str(tmp_path / output)])

    return run


@pytest.fixture
def fault(monkeypatch):
    """Statistics of BatchNorm move twice."""
    badly = lambda function, *inputs, modules: checkpoint(function, *inputs, use_reentrant=False)  # noqa: E731
    monkeypatch.setitem(spans.RUN, Action.RECOMPUTE, badly)


@pytest.mark.parametrize("name", sample(["image_classification"], RECIPES))
def test_a_verified_run_trains_bit_for_bit_the_same(main, tmp_path, capsys, name):
    plan = ["--activation_checkpointing", "full"]
    plain = main(name, *plan, output="plain")
    verified = main(name, *plan, "--verify", output="verified")
    assert "equivalence" not in plain
    equivalence = verified["equivalence"]
    assert equivalence["verdict"] == "identical"
    assert equivalence["num_compared"] > 10
    assert json.loads((tmp_path / "verified/results.json").read_text())["equivalence"] == equivalence
    assert json.loads((tmp_path / "verified/config.json").read_text())["verify"] == "stop"
    assert "--verify: one global batch, without the plan and with it: identical" in capsys.readouterr().out
    assert_the_same_weights(tmp_path / "verified" / "final", tmp_path / "plain" / "final")
    assert verified["train_loss"] == plain["train_loss"]
    assert verified["eval"] == plain["eval"]


def test_without_a_plan_there_is_nothing_to_verify(main, capsys):
    assert main("image_classification", "--verify")["equivalence"]["verdict"] == "nothing to verify"
    assert "nothing to verify; the plan keeps everything" in capsys.readouterr().out


def test_a_difference_ends_the_run_before_it_begins(main, fault, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.json").write_text("{}")
    flags = ["--activation_checkpointing", "full", "--verify", "--overwrite"]
    with pytest.raises(SystemExit) as end:
        run_recipe(partial(main, "image_classification", *flags))
    assert end.value.code == 5
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: --verify, plan full: the plan changes the training step (different; buffer ")
    assert "running_mean: " in lines[0]
    assert " ulp (" in lines[0]
    assert lines[0].endswith("--activation_checkpointing none or another plan, or go on with --verify warn")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["results.json"]
    assert (tmp_path / "run/results.json").read_text() == "{}"


def test_warn_goes_on(main, fault, capsys):
    results = main("image_classification", "--activation_checkpointing", "full", "--verify", "warn")
    assert results["equivalence"]["verdict"] == "different"
    assert results["equivalence"]["first_kind"] == "buffer"
    assert results["steps"] == 2
    assert "warning: --verify, plan full: the plan changes the training step" in capsys.readouterr().out


def test_no_memory_for_the_plain_run(main, monkeypatch, capsys):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 1 GiB\nand so on")

    monkeypatch.setattr("memsave_recipes.run.verification.verify", exhausted)
    with pytest.raises(SystemExit) as end:
        run_recipe(partial(main, "image_classification", "--activation_checkpointing", "full", "--verify"))
    assert end.value.code == 3
    assert "--verify, which also runs one global batch without the plan" in capsys.readouterr().err


@pytest.fixture
def kernels(monkeypatch):
    """Whether torch raised at operators without a deterministic kernel, in each call of an optimizer."""
    seen, step = [], torch.optim.AdamW.step
    warns = torch.is_deterministic_algorithms_warn_only_enabled

    def watched(self, *args, **kwargs):
        seen.append(torch.are_deterministic_algorithms_enabled() and not warns())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    return seen


@pytest.mark.parametrize("name", sample(["text_classification"], RECIPES))
def test_full_determinism_trains_with_kernels_that_only_errors_get(main, kernels, tmp_path, capsys, name):
    plain = main(name, output="plain")
    kernels.clear()
    fixed = main(name, "--full_determinism", output="fixed")
    assert kernels == [True] * fixed["steps"]
    assert fixed["train_loss"] == plain["train_loss"]
    assert "warning: --full_determinism" not in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()


def test_full_determinism_names_an_operator_without_such_a_kernel(main, kernels, monkeypatch, capsys):
    """A stand-in for one of CUDA's, at the end of each forward in training."""
    cross_entropy = F.cross_entropy

    def unordered(*args, **kwargs):
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        return cross_entropy(*args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", unordered)
    results = main("image_classification", "--full_determinism")
    assert results["steps"] == 2
    assert kernels == [False] * 2
    assert "warning: --full_determinism: put_ has no deterministic kernel" in capsys.readouterr().out


def test_full_determinism_lets_a_sample_be_drawn(main, monkeypatch):
    """Its operators need no deterministic kernel: ``top_p`` sums floating-point numbers up, for which CUDA has none."""
    generate = LlamaForCausalLM.generate

    def unordered(self, *args, **kwargs):
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", unordered)
    assert main("language_modeling", "--full_determinism")["steps"] == 2
