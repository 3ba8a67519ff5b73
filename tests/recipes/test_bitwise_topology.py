"""``--bitwise_topology`` through the recipes: the same bits on any number of ranks, straight or resumed on another.

``benchmarks/bitwise_cells.py`` has the whole matrix of models, optimizers, precisions, micro-batches and ranks.
"""

import json
import shutil
from functools import partial

import pytest
from lives import FLAGS, OF_TEXT, TINY_VIT, assert_the_same_bits, assert_the_same_weights, share_of, with_context
from samples import sample

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.models.flags import rules_of
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.checkpoints.resume import check_same_flags, describe_change, with_previous_plan
from memsave_recipes.training.exact.batch_layouts import IndexedLayout

RECIPE = "image_classification"
DROPPING = "n_layer=2,n_head=2,n_embd=32,vocab_size=512,attn_pdrop=0.1,embd_pdrop=0.1,resid_pdrop=0.1"
BITS = ["--bitwise_topology", "--micro_batch_size"]


def test_two_ranks_and_then_three(train_on_ranks, tmp_path):
    """With 7 micro-batches of 4 steps, a run of 2 ranks and one that 3 ranks take over from its checkpoint."""
    run = partial(train_on_ranks, recipe="language_modeling")
    flags = [*FLAGS["language_modeling"], "--config_overrides", DROPPING, "--loss", "full", "--max_grad_norm", "0.5"]
    flags += ["--logging_steps", "1", "--global_batch_size", "14", *BITS, "2", "--max_steps", "4", "--save_every", "2"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    _, output = run(2, *flags, output="straight")
    assert "14 samples = 7 micro-batches of 2, on 2 ranks in 4 accumulation steps" in output
    assert "bitwise topology: at most 3 x " in output
    assert " besides DDP's, 1 x the bytes of an all-reduce between the ranks" in output
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-4")
    shutil.rmtree(resumed / "final")
    (resumed / "results.json").unlink()
    _, output = run(3, *flags, "--resume", output="resumed")
    assert "going on as 14 samples = 7 micro-batches of 2, on 3 ranks in 3 accumulation steps: bit-exact" in output
    assert "going on after 2 steps" in output
    assert_the_same_bits(resumed, straight, 4)


@pytest.mark.slow
def test_mixed_images_keep_the_bits_in_lockstep(train_on_ranks, tmp_path):
    flags = ["--model", "densenet_small", "--batchnorm", "global", "--augmentation", "flip", "mixup", "cutmix"]
    flags += ["--global_batch_size", "6", *BITS, "2", "--max_steps", "2", "--save_every", "2", "--logging_steps", "1"]
    for num_ranks in (1, 2):
        train_on_ranks(num_ranks, *flags, output=str(num_ranks))
    assert_the_same_bits(tmp_path / "2", tmp_path / "1", 2)


@pytest.mark.slow
def test_smoothing_and_weights_have_the_same_bits_on_two_ranks(train_on_ranks, tmp_path):
    flags = [*FLAGS["text_classification"], "--label_smoothing_factor", "0.1", "--class_weights", "balanced"]
    flags += ["--logging_steps", "1", "--global_batch_size", "14", *BITS, "2", "--max_steps", "4", "--save_every", "2"]
    for num_ranks in (1, 2):
        train_on_ranks(num_ranks, *flags, recipe="text_classification", output=str(num_ranks))
    assert_the_same_bits(tmp_path / "2", tmp_path / "1", 4)


BUDGET = ["--memory_budget_gib", "1"]
BITWISE_BUDGET = ["--activation_checkpointing", "budget:bitwise", *BUDGET]
SHORT = ["--model_type", "vit", "--config_overrides", TINY_VIT, "--global_batch_size", "14", "--max_steps", "3"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "--bitwise_topology needs the same micro-batches on any number of ranks: give --micro_batch_size"),
        ([*BITS[1:], "2", "--activation_checkpointing", "compiled"], "compiled compiles for the shapes"),
        (
            [*BITS[1:], "2", "--activation_checkpointing", "budget", *BUDGET],
            "take budget:bitwise",
        ),
        ([*BITS[1:], "2", "--batchnorm", "sync"], "--batchnorm sync normalises over the ranks"),
        ([*BITS[1:], "14", "--optimizer_in_backward", "--max_grad_norm", "0"], "--bitwise_topology adds up all"),
        (
            [*BITS[1:], "2", "--batchnorm", "global", "--activation_checkpointing", "budget", *BUDGET],
            "take budget:bitwise, or a plan that does not compile",
        ),
        (
            ["--micro_batch_size", "auto", "--batchnorm", "global", *BITWISE_BUDGET],
            "--batchnorm global needs a --micro_batch_size that is a number",
        ),
        ([*BITS[1:], "2", "--model", "densenet_small"], "are BatchNorm layers, whose running statistics follow"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(refuse, flags, line):
    own = SHORT[4:] if "--model" in flags else SHORT
    assert line in refuse(*own, "--bitwise_topology", *flags)


def test_a_plan_file_that_compiles_is_refused(refuse, train, tmp_path):
    train(*SHORT, *BITS, "2", output="plain")
    blocks = json.loads((tmp_path / "plain" / "plan.json").read_text())["blocks"]
    path = tmp_path / "compiled.json"
    path.write_text(plan_for("compiled", [blocks]).to_json())
    assert "take a plan that does not" in refuse(*SHORT, *BITS, "2", "--activation_checkpointing", str(path))


def test_plans_keep_the_bits_and_are_proved(train, tmp_path, capsys):
    train(*SHORT, *BITS, "3", output="plain")
    train(*SHORT, *BITS, "3", "--activation_checkpointing", "full", "--verify", output="full")
    assert "--verify: one global batch, without the plan and with it" in capsys.readouterr().out
    assert_the_same_weights(tmp_path / "full" / "final", tmp_path / "plain" / "final")


@pytest.mark.parametrize(("size", "num_sums"), [(2, 2), (7, 1)])
def test_the_memory_is_predicted(train, size, num_sums):
    """Of 7 and 2 micro-batches, with so many sums of gradients beside the gradient of the last one."""
    memory = train(*SHORT, *BITS, str(size), *BITWISE_BUDGET)["memory"]
    assert 0 <= memory["prediction_error_pct"] <= 3
    assert memory["breakdown"]["gradients_gib"] > num_sums * memory["breakdown"]["parameters_gib"]


BATCHES = [(2, 8), (2, 12), (3, 16), (3, 48)]  # of 3 ranks two subtrees each, and three


@pytest.mark.parametrize(("num_ranks", "global_batch_size"), sample([(2, 8)], BATCHES))
def test_the_memory_of_ranks_is_predicted(train_on_ranks, num_ranks, global_batch_size):
    """Of 2 to 8 micro-batches a rank: the sums, or the last bucket under way between them, decide.

    What a thread of gloo lets go last leaves no event, so a reading may be too high by as much as a small bucket.
    """
    sizes = ["--model_type", "gpt2", "--config_overrides", "n_layer=4,n_head=4,n_embd=192,vocab_size=512"]
    batch = ["--block_size", "32", "--global_batch_size", global_batch_size, "--max_steps", "2", "--loss", "full"]
    flags = [*sizes, *batch, *BITS, "2", *BITWISE_BUDGET, *OF_TEXT]
    memory = train_on_ranks(num_ranks, *flags, recipe="language_modeling")[0]["memory"]
    assert abs(memory["prediction_error_pct"]) <= 3


@pytest.mark.slow
def test_in_lockstep_a_plan_for_a_budget_fits_and_has_the_bits_of_plain(train, refuse, tmp_path, capsys):
    """Of 4 micro-batches, the last one of 2 samples, in one forward."""
    flags = ["--model", "vgg_small_bn", "--batchnorm", "global", "--global_batch_size", "14", *BITS, "4"]
    flags += ["--max_steps", "2", "--logging_steps", "1"]
    plain = train(*flags, "--activation_checkpointing", "none", output="plain")
    budget = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib"]
    small, fitting = (share_of(plain, share) for share in (0.3, 0.8))
    memory = train(*flags, *budget, str(with_context(fitting)), "--verify", output="planned")["memory"]
    printed = capsys.readouterr().out
    assert "the plan and with it: identical" in printed
    assert "14 samples = 3 micro-batches of 4 + 1 of 2, on 1 rank in lockstep" in printed
    assert memory["predicted_peak_gib"] <= fitting
    assert 0 <= memory["prediction_error_pct"] <= 2
    assert_the_same_weights(tmp_path / "planned" / "final", tmp_path / "plain" / "final")
    line = refuse(*flags, *budget, str(with_context(small)), output="small")
    assert "is too small for any plan: the smallest that works is" in line
    assert "micro_batch_size, or auto" not in line


RULES = rules_of(RecipeArguments)


def flags(**changed):
    given = {"output_dir": "run", "bitwise_topology": True, "micro_batch_size": 4, "report_to": ["none"]}
    return vars(RecipeArguments(**given | changed))


def test_resume_takes_no_other_micro_batch():
    saved = {**flags(), "geometry": {"micro_batch_size": 4, "num_processes": 2}}
    assert check_same_flags(saved, flags(), RULES) == []
    assert check_same_flags(saved, flags(micro_batch_size="auto", memory_budget_gib=1), RULES) == []
    with pytest.raises(InputError, match="--micro_batch_size was 4 and is 2, on which the bits"):
        check_same_flags(saved, flags(micro_batch_size=2), RULES)
    with pytest.raises(InputError, match="--bitwise_topology was True and is False"):
        check_same_flags(saved, flags(bitwise_topology=False), RULES)
    earlier_version = {key: value for key, value in saved.items() if key != "bitwise_topology"}
    with pytest.raises(InputError, match="--bitwise_topology was False and is True"):
        check_same_flags(earlier_version, flags(), RULES)


@pytest.mark.parametrize(
    ("strategy", "budget_gib", "kept"), [("none", 1, None), ("budget:bitwise", 1, 1), ("budget:bitwise", None, None)]
)
def test_a_size_that_was_found_is_kept_on_other_ranks(tmp_path, strategy, budget_gib, kept):
    """Without a budget a device's memory is it."""
    asked = {"activation_checkpointing": strategy, "memory_budget_gib": budget_gib}
    run = RecipeArguments(**flags(micro_batch_size="auto", **asked))
    earlier = {**vars(run), "geometry": {"micro_batch_size": 4, "num_processes": 2}}
    again = with_previous_plan(run, earlier, plan=tmp_path / "plan.json", num_processes=3)
    assert (again.micro_batch_size, again.activation_checkpointing, again.memory_budget_gib) == (4, strategy, kept)
    assert run.micro_batch_size == "auto"


def test_another_number_of_ranks_is_told():
    saved = {"geometry": {"global_batch_size": 14, "micro_batch_size": 2, "num_processes": 2}}
    assert "bit-exact" in describe_change(saved, IndexedLayout.of(14, 2, 3))
    assert "not bit-exact" in describe_change(saved, BatchLayout.of(14, 2, 3))
