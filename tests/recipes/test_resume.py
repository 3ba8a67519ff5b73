"""A run that is ended and goes on is the run that was never ended: weights, rows and results."""

import json
import os
import shutil
import signal

import pytest
from lives import FLAGS, IMAGES, assert_the_same_run, rows_of
from samples import sample

from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.checkpoints import Checkpoints, StoppedBySignal
from memsave_recipes.training.checkpoints.resume import find_newest
from memsave_recipes.training.launch.processes import EXIT_CODES

RECIPE = "image_classification"


@pytest.fixture(scope="module")
def straight(run_once):
    """The folder of the run that nothing ends."""
    return run_once(*IMAGES)


def test_killed_and_resumed(train, straight, kill_after, tmp_path, capsys):
    with kill_after(7):
        train(*IMAGES, "--save_every", "2")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')  # what a kill leaves
    train(*IMAGES, "--save_every", "2", "--resume")
    assert "going on after 6 steps" in capsys.readouterr().out
    assert_the_same_run(tmp_path / "run", straight)


FLOOR = ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}']
ALL = [*FLOOR, "--adam_beta2", "0.95", "--weight_decay", "0.1", "--ema_decay", "0.9"]
WEIGHTED = ["--label_smoothing_factor", "0.1", "--class_weights", "balanced", "--freeze_backbone"]
MIXED = ["--augmentation", "random_resized_crop", "flip", "randaugment", "mixup", "cutmix", "erasing"]
OPTIONS = {
    "all-text_classification": ("text_classification", [*ALL, *WEIGHTED]),
    "all-image_classification": (
        "image_classification",
        [*ALL, *MIXED, "--label_smoothing_factor", "0.1", "--freeze_backbone"],
    ),
    "all-language_modeling": ("language_modeling", ALL),
    "selective": ("language_modeling", ["--activation_checkpointing", "selective"]),
    "muon": ("language_modeling", ["--optimizer", "muon", "--weight_decay", "0.1"]),
    "stochastic rounding": ("image_classification", ["--dtype", "bfloat16", "--optimizer", "adamw_bf16"]),
}
OFTEN = [OPTIONS[name] for name in ("all-text_classification", "all-image_classification")]


@pytest.mark.parametrize(("recipe", "options"), sample(OFTEN, OPTIONS.values()), indirect=["recipe"], ids=OPTIONS)
def test_every_recipe(recipe, train, kill_after, tmp_path, options):
    flags = [*FLAGS[recipe.__name__], *options]
    train(*flags, output="straight")
    with kill_after(7):
        train(*flags, "--save_every", "3")
    train(*flags, "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_run_of_before_goes_on_unless_a_flag_that_is_gone_was_another(train, ending, kill_after, tmp_path):
    flags = [*IMAGES, "--save_every", "3"]
    with kill_after(4):
        train(*flags)
    path = tmp_path / "run/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "decay_all": True}))
    assert "--decay_all True, which this version does not have" in ending(*flags, "--resume")[1]
    path.write_text(json.dumps({**config, "decay_all": False, "debug": True}))
    train(*flags, "--resume")


def test_ranks_that_their_launcher_starts_again_resume(train, straight, kill_after, tmp_path, monkeypatch, capsys):
    """By the same command line, which may overwrite an earlier run."""
    flags = [*IMAGES, "--save_every", "3", "--overwrite"]
    with kill_after(2):
        train(*flags)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with kill_after(7):
        train(*flags)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(*flags)
    assert "going on after 6 steps" in capsys.readouterr().out
    assert_the_same_run(tmp_path / "run", straight)


@pytest.fixture
def signal_at_5(monkeypatch):
    """Sends this process a signal when the fifth step is done and not yet saved."""

    def arm(number):
        after_step = Checkpoints.after_step

        def with_a_signal(self, step, state):
            if step == 5:
                monkeypatch.undo()
                os.kill(os.getpid(), number)
            after_step(self, step, state)

        monkeypatch.setattr(Checkpoints, "after_step", with_a_signal)

    return arm


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_a_signal_saves_and_has_its_code(train, signal_at_5, tmp_path, capsys, number, code):
    handlers = [signal.getsignal(one) for one in EXIT_CODES]
    signal_at_5(number)
    with pytest.raises(SystemExit) as end:
        run_recipe(lambda: train(*IMAGES))
    assert end.value.code == code
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"{signal.Signals(number).name}: stopped after 5 steps, all of them saved in")
    assert handlers == [signal.getsignal(one) for one in EXIT_CODES]
    assert find_newest(tmp_path / "run" / "checkpoints").step == 5


def test_what_a_signal_stopped_goes_on(train, straight, signal_at_5, tmp_path):
    signal_at_5(signal.SIGTERM)
    with pytest.raises(StoppedBySignal):
        train(*IMAGES)
    train(*IMAGES, "--resume")
    assert_the_same_run(tmp_path / "run", straight)


def test_a_finished_run_goes_on_to_the_same_end(train, straight, tmp_path):
    train(*IMAGES, "--save_every", "5")
    train(*IMAGES, "--save_every", "5", "--resume")
    assert_the_same_run(tmp_path / "run", straight)


def test_what_was_killed_before_its_first_save_begins_again(train, straight, kill_after, tmp_path, capsys):
    with kill_after(5):
        train(*IMAGES)
    train(*IMAGES, "--resume")
    assert "note: --resume finds no checkpoint in" in capsys.readouterr().out
    assert_the_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize("damage", sample(["gone", "cut"], ["gone", "cut", "without weights", "without manifest"]))
def test_best_weights_that_are_gone_are_missed_and_begun_anew(train, kill_after, tmp_path, capsys, damage):
    flags = [*IMAGES, "--save_best", "--save_every", "2", "--eval_steps", "2"]
    with kill_after(6):
        train(*flags)
    (best,) = (tmp_path / "run/checkpoints").glob("best-*")
    if damage == "cut":
        weights = best / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "gone":
        shutil.rmtree(best)
    else:
        (best / {"without weights": "model.safetensors", "without manifest": "manifest.json"}[damage]).unlink()
    capsys.readouterr()
    train(*flags, "--resume")
    printed = capsys.readouterr().out
    assert "the weights of the best evaluation so far (loss " in printed
    assert "--save_best begins anew" in printed
    rows = [row for row in rows_of(tmp_path / "run") if "eval/loss" in row and row["step"] > 6]
    names = [path.name for path in (tmp_path / "run/checkpoints").glob("best-*")]
    assert names == [f"best-{min(rows, key=lambda row: row['eval/loss'])['step']}"]


def test_the_best_weights_are_kept(train, tmp_path):
    train(*IMAGES, "--save_best", "--learning_rate", "0.01")
    rows = [row for row in rows_of(tmp_path / "run") if "eval/loss" in row]
    best = min(rows, key=lambda row: row["eval/loss"])["step"]
    (folder,) = (tmp_path / "run" / "checkpoints").glob("best-*")
    assert folder.name == f"best-{best}"
    assert (folder / "model.safetensors").exists()
