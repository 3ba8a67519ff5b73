"""Flags and presets: what is wrong ends in one line that names the flag."""

import pytest

from memsave_recipes.errors import InputError
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments, SafetyArguments
from memsave_recipes.training.parsing import parse_arguments


def parse(*args):
    return parse_arguments(RunArguments, OptimizerArguments, SafetyArguments, args=["--output_dir", "out", *args])


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
        ["--dtype", "float16"],
        ["--logging_steps", "0"],
        ["--dataloader_num_workers", "-1"],
        ["--learning_rate", "-1"],
        ["--learning_rate", "inf"],
        ["--weight_decay", "nan"],
        ["--momentum", "1"],
        ["--warmup_steps", "-1"],
        ["--max_grad_norm", "nan"],
        ["--optimizer", "adam"],
        ["--lr_scheduler_type", "lin"],
        ["--gradient_checkpointing", "--activation_checkpointing", "segments:2"],
        ["--verify", "waarn"],
        ["--save_every", "0"],
        ["--save_every_minutes", "-1"],
        ["--save_every_minutes", "inf"],
        ["--keep_checkpoints", "0"],
        ["--skip_nonfinite", "-1"],
        ["--max_step", "3"],
        ["--config", "absent.yaml"],
        ["word"],
    ],
)
def test_bad_flags(flags):
    with pytest.raises(InputError) as refusal:
        parse(*flags)
    assert flags[0] in str(refusal.value) or "gradient_checkpointing" in str(refusal.value)
    assert "\n" not in refusal.value.one_line


def test_defaults_and_the_alias():
    run, *_ = parse()
    assert run.activation_checkpointing == "none"
    assert parse("--gradient_checkpointing")[0].activation_checkpointing == "full"


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
    with pytest.raises(InputError, match="learning_rat is no flag of this recipe; did you mean --learning_rate"):
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


@pytest.mark.parametrize(("text", "mode"), [("true", "stop"), ("warn", "warn"), ("off", "off"), ("stop", "stop")])
def test_verify_in_a_preset(tmp_path, text, mode):
    path = preset(tmp_path, f"verify: {text}\nseed: 3\n")
    assert parse("--config", path)[0].verify == mode
    assert parse("--config", path, "--verify", "warn")[0].verify == "warn"
