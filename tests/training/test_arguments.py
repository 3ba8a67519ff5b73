"""Flags and presets: what is wrong ends in one line that names the flag."""

import os
import re
from dataclasses import dataclass, field, replace

import pytest
import torch
import yaml

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.flags import Rules, rules_of
from memsave_recipes.training.arguments import CheckpointArguments, OptimizerArguments, RecipeArguments, RunArguments
from memsave_recipes.training.parsing import parse_arguments, underscored


def parse(*args):
    return parse_arguments(RunArguments, OptimizerArguments, CheckpointArguments, args=["--output_dir", "out", *args])


@pytest.mark.parametrize(
    "flags",
    [
        ["--global_batch_size", "0"],
        ["--global_batch_size", "many"],
        ["--micro_batch_size", "0"],
        ["--micro_batch_size", "-2"],
        ["--num_epochs", "0"],
        ["--num_epochs", "nan"],
        ["--max_steps", "0"],
        ["--seed", "-1"],
        ["--dtype", "float8"],
        ["--logging_steps", "0"],
        ["--dataloader_num_workers", "-1"],
        ["--learning_rate", "-1"],
        ["--learning_rate", "inf"],
        ["--weight_decay", "nan"],
        ["--warmup_steps", "-1"],
        ["--max_grad_norm", "nan"],
        ["--optimizer", "adam"],
        ["--lr_scheduler_type", "lin"],
        ["--gradient_checkpointing"],
        ["--verify", "waarn"],
        ["--eval_only", "--verify"],
        ["--eval_only", "--activation_checkpointing", "full"],
        ["--compile", "model"],
        ["--compile", "--eval_only"],
        ["--compile", "--bitwise_topology", "--micro_batch_size", "2"],
        ["--compile", "--batchnorm", "global"],
        ["--compile", "--activation_checkpointing", "full_tiled"],
        ["--torch_compile"],
        ["--save_every", "-1"],
        ["--save_every", "1.5min"],
        ["--save_every", "soon"],
        ["--max_step", "3"],
        ["--max_steps", "2147483648"],
        ["--micro_batch_size", "9" * 5000],
        ["--num_epochs", "1e300"],
        ["--learning_rate", "1e308"],
        ["--lr_scheduler_type", "polynomial", "--learning_rate", "1e-7"],
        ["--dataloader_num_workers", "100000"],
        ["--memory_budget_gib", "1e300", "--activation_checkpointing", "budget"],
        ["--output_dir", ""],
        ["--output_dir="],
        ["--seed=--"],
        ["--config", "absent.yaml"],
        ["word"],
    ],
)
def test_bad_flags(flags):
    with pytest.raises(InputError) as refusal:
        parse(*flags)
    assert flags[0].rstrip("=-") in str(refusal.value)
    assert "\n" not in refusal.value.one_line


def test_defaults():
    assert parse()[0].activation_checkpointing == "none"


@pytest.mark.parametrize(
    ("flags", "compile"),
    [
        ([], "regions"),
        (["yes", "--activation_checkpointing", "full"], "regions"),
        (["regions", "--activation_checkpointing", "segments:2"], "regions"),
        (["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "1"], "regions"),
        (["no", "--activation_checkpointing", "full"], "none"),
    ],
)
def test_any_strategy_may_compile(flags, compile):
    run, *_ = parse("--compile", *flags)
    assert run.compile == compile
    assert replace(run) == run


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ([], "auto"),
        (["--activation_checkpointing", "every:2"], "auto"),
        (["--activation_checkpointing", "budget", "--memory_budget_gib", "1"], "auto"),
        (["--verify"], "auto"),
        (["--activation_checkpointing", "full_tiled"], "none"),
        (["--bitwise_topology", "--micro_batch_size", "2"], "none"),
        (["--full_determinism"], "none"),
        (["--eval_only"], "none"),
    ],
)
def test_compile_auto_waits_for_the_model_unless_bits_are_promised(flags, left):
    assert parse(*flags)[0].compile == left


def help_of(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(RecipeArguments, args=["--help"])
    return capsys.readouterr().out


def test_the_help_begins_with_what_most_need_and_has_a_group_for_each_dataclass(capsys):
    rules = rules_of(RecipeArguments)
    _, _, first, trackers, run, optimizer, checkpoints, seldom = help_of(capsys).split("\n\n")
    assert first.startswith("What to set first:\n  --output_dir ")
    assert re.findall(r"^  --(\w+)", first, re.MULTILINE) == [
        name for name, rule in rules.items() if rule.shown == "first"
    ]
    assert trackers.startswith("Trackers, and the names of the run in them:\n  --report_to ")
    assert run.startswith("The folder, global batch, memory plan and length of a run:\n  --overwrite ")
    assert optimizer.startswith("The optimizer, its schedule and clipping:\n  --optimizer ")
    assert "--save_every SAVE_EVERY" in checkpoints
    assert seldom.startswith("Seldom used:\n  --project ")
    assert {rules[name].shown for name in re.findall(r"^  --(\w+)", seldom, re.MULTILINE)} == {"seldom"}


def test_the_help_shows_each_flag_once_and_both_spellings_are_taken(capsys):
    text = help_of(capsys)
    assert "  --output_dir " in text
    assert "--output-dir" not in text
    assert parse("--max-steps", "7")[0].max_steps == 7


@pytest.mark.parametrize(
    ("rules", "taken", "refused"),
    [
        (Rules(), [-1, 1e300], []),
        (Rules(least=1), [1, 2], [0, float("nan")]),
        (Rules(within="[0, 1)"), [0, 0.5], [1, -0.1, float("nan")]),
        (Rules(within="(0, 1e6]"), [1e6, 1e-9], [0, 1e7, float("inf")]),
    ],
)
def test_the_numbers_that_rules_take(rules, taken, refused):
    assert all(map(rules.takes, taken))
    assert not any(map(rules.takes, refused))


@dataclass
class Switch:
    """A switch that is on."""

    packing: bool = field(default=True, metadata={"help": "pack rows"})
    words: list[str] = field(default_factory=lambda: ["a", "b"], metadata={"help": "some words"})


@dataclass
class OtherDefault(Switch):
    """The same with another default."""

    words: list[str] = field(default_factory=lambda: ["c"], metadata={"help": "other words"})


def test_the_help_of_a_switch_its_opposite_and_a_list(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(OtherDefault, args=["--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-5:] == [
        "A switch that is on:",
        "--packing [yes|no] pack rows (default: True)",
        "--no_packing switch --packing off",
        "--words WORDS [WORDS ...]",
        "other words (default: c)",
    ]


def preset(tmp_path, text):
    path = tmp_path / "preset.yaml"
    path.write_text(text)
    return str(path)


def test_flags_override_the_preset(tmp_path):
    path = preset(tmp_path, "global_batch_size: 8\nlearning_rate: 1e-2\nreport_to: [wandb, trackio]\noverwrite: true\n")
    run, optim, _ = parse("--config", path, "--global_batch_size", "16")
    assert (run.global_batch_size, run.report_to, run.overwrite) == (16, ["wandb", "trackio"], True)
    assert optim.learning_rate == 0.01


def test_an_unknown_key_of_a_preset_gets_the_nearest_flag(tmp_path):
    with pytest.raises(InputError, match="learning_rat is not a flag of this recipe; did you mean --learning_rate"):
        parse("--config", preset(tmp_path, "learning_rat: 1"))


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", "just words"])
def test_a_preset_that_is_no_list_of_flags(tmp_path, text):
    with pytest.raises(InputError, match=r"preset\.yaml"):
        parse("--config", preset(tmp_path, text))


def test_a_mistyped_flag_gets_the_nearest():
    with pytest.raises(InputError, match="did you mean --learning_rate"):
        parse("--learning_rte", "1")


@pytest.mark.parametrize(
    ("words", "mode"),
    [([], "off"), (["--verify"], "stop"), (["--verify", "warn"], "warn"), (["--verify", "off"], "off")],
)
def test_verify_has_an_optional_value(words, mode):
    assert parse(*words)[0].verify == mode
    assert parse(*words, "--seed", "3")[0].verify == mode


@pytest.mark.parametrize(
    ("words", "steps", "minutes"),
    [([], None, 30), (["500"], 500, None), (["5min"], None, 5), (["0"], None, None), (["0min"], None, None)],
)
def test_checkpoints_are_saved_after_steps_or_minutes(words, steps, minutes):
    *_, saving = parse(*(["--save_every", *words] if words else []))
    assert (saving.save_every_steps, saving.save_every_minutes) == (steps, minutes)


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ([], None),
        (["--save_best"], "loss"),
        (["--save_best", "yes"], "loss"),
        (["--save_best", "no"], None),
        (["--save_best", "eval_accuracy"], "accuracy"),
    ],
)
def test_the_best_is_by_the_loss_or_another_metric(words, metric):
    assert parse(*words)[-1].save_best == metric


@pytest.mark.parametrize(("text", "mode"), [("true", "stop"), ("warn", "warn"), ("off", "off"), ("stop", "stop")])
def test_verify_in_a_preset(tmp_path, text, mode):
    path = preset(tmp_path, f"verify: {text}\nseed: 3\n")
    assert parse("--config", path)[0].verify == mode
    assert parse("--config", path, "--verify", "warn")[0].verify == "warn"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_steps:", "max_steps has no value"),
        ("output_dir: null", "output_dir has no value"),
        ("overwrite: []", "overwrite has no value"),
        ("seed: [1, 2]", "seed does not take this list"),
        ("report_to: [none, --overwrite]", "report_to does not take this list"),
        ("report_to: {a: 1}", "report_to must be a word"),
        ("seed: !!python/object/apply:os.getpid []", "seed must be a word"),
        ('output_dir: "a\\0b"', "output_dir must be a word"),
        ("seed: 1\nseed: 2", "seed is there twice"),
        ("max-steps: 1\nmax_steps: 2", "max_steps is there twice"),
        ("verify: --overwrite", "--verify --overwrite: must be"),
        ("seed: ''", "--seed has an empty value"),
        ("[" * 5000, "cannot be read"),
    ],
)
def test_a_preset_whose_values_would_be_misread(tmp_path, text, complaint):
    with pytest.raises(InputError, match=complaint):
        parse("--config", preset(tmp_path, text))


@pytest.mark.parametrize("text", ["[" * 50_000, "{" * 50_000, "- " * 50_000, "seed: 1\n" * 50_000])
def test_a_preset_that_would_be_read_for_long_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(yaml, "compose", lambda *_, **__: pytest.fail("it was composed"))
    with pytest.raises(InputError, match=r"cannot be read: it (is nested deeper|has more) than"):
        parse("--config", preset(tmp_path, text))


def test_a_preset_that_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (str(tmp_path / "pipe.yaml"), "/dev/zero", str(tmp_path)):
        with pytest.raises(InputError, match=f"--config {path} is not a file"):
            parse("--config", path)


@pytest.mark.parametrize("word", ["no", "1:30", "2020-01-01", "1_000", "0x10", "--overwrite"])
def test_a_word_of_a_preset_is_read_as_it_stands_there(tmp_path, word):
    run, *_ = parse_arguments(RunArguments, args=["--config", preset(tmp_path, f"output_dir: {word}")])
    assert run.output_dir == word
    assert not run.overwrite


def test_one_preset_a_run(tmp_path):
    path = preset(tmp_path, "seed: 1")
    with pytest.raises(InputError, match="--config is given 2 times"):
        parse("--config", path, f"--config={path}")


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(InputError, match="is not UTF-8 text"):
        parse("--output_dir", "\udcff")


def test_flags_with_dashes_are_known_to_the_planner_too():
    words = underscored(["--micro-batch-size=2", "--max-steps", "a-b", "x-y"])
    assert words == ("--micro_batch_size=2", "--max_steps", "a-b", "x-y")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--dtype float16 loses small updates .*--lora, or --offload_optimizer step, .*--mixed_precision fp16"),
        ({"offload_optimizer": "state"}, "add --lora, or --offload_optimizer step"),
        ({"offload_optimizer": "step", "ema_decay": 0.9}, "--ema_decay averages .*--dtype float16 rounds"),
        ({"offload_optimizer": "step", "optimizer": "adamw_bf16"}, "these are float16: add --dtype bfloat16"),
    ],
)
def test_weights_that_train_in_float16_need_wide_masters(flags, words):
    with pytest.raises(InputError, match=words):
        RecipeArguments(output_dir="run", dtype="float16", **flags)


def test_float16_is_for_weights_that_do_not_train_or_have_masters_or_are_evaluated():
    for flags in ({"offload_optimizer": "step"}, {"eval_only": True}):
        assert RecipeArguments(output_dir="run", dtype="float16", **flags).torch_dtype == torch.float16
