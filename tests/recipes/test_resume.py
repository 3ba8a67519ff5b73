"""A run that is ended and goes on is the run that was never ended: weights, rows and results, on 1 rank and on 2."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from filelock import FileLock
from safetensors.torch import load_file

from memsave_recipes.checkpoints import Checkpoints, StoppedBySignal
from memsave_recipes.reporting.failures import run_recipe

ROOT = Path(__file__).parents[2]
RECIPE = "image_classification"
TINY_VIT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,patch_size=8"
TINY_GPT2 = "n_layer=2,n_head=2,n_embd=32"
NUM_STEPS = 10
LENGTH = ["--max_steps", str(NUM_STEPS), "--logging_steps", "4", "--eval_steps", "3"]
IMAGES = ["--model_type", "vit", "--config_overrides", TINY_VIT, "--global_batch_size", "16", *LENGTH]
TEXT = ["--model_type", "gpt2", "--config_overrides", TINY_GPT2, "--block_size", "32", "--max_eval_samples", "16"]
TEXT += ["--global_batch_size", "8", "--vocab_size", "512", *LENGTH]
FLAGS = {"image_classification": IMAGES, "language_modeling": TEXT}
MEASURED = ("perf/", "memory/", "result/perf", "result/memory")  # by the clock, or by the life


class Killed(BaseException):
    """Nothing of ours catches it."""


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]


def results_of(folder):
    results = json.loads((folder / "results.json").read_text())
    return {key: value for key, value in results.items() if key not in ("perf", "memory")}


def assert_the_same_run(folder, straight):
    assert rows_of(folder) == rows_of(straight)
    assert results_of(folder) == results_of(straight)
    weights, expected = (load_file(one / "final" / "model.safetensors") for one in (folder, straight))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    """The folder of the run that nothing ends."""
    folder = tmp_path_factory.mktemp("straight")
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe.main([*IMAGES, "--report_to", "none", "--output_dir", str(folder / "run")])
    return folder / "run"


@pytest.fixture
def end_at(monkeypatch):
    """Ends the run after so many steps, when that step is done and everything it saves is saved."""

    def arm(step, end):
        after_step = Checkpoints.after_step

        def end_after(self, at, state):
            after_step(self, at, state)
            if at == step:
                monkeypatch.undo()
                end()

        monkeypatch.setattr(Checkpoints, "after_step", end_after)

    return arm


def kill():
    raise Killed


@pytest.mark.parametrize(("killed_at", "every"), [(7, 2), (3, 3), (9, 3), (10, 5)])
def test_killed_and_resumed(train, straight, end_at, tmp_path, capsys, killed_at, every):
    end_at(killed_at, kill)
    with pytest.raises(Killed):
        train(*IMAGES, "--save_every", str(every))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')  # what a kill leaves
    train(*IMAGES, "--save_every", str(every), "--resume")
    assert f"going on after {killed_at // every * every} steps" in capsys.readouterr().out
    assert_the_same_run(tmp_path / "run", straight)


def test_ended_twice(train, straight, end_at, tmp_path):
    for step in (4, 8):
        end_at(step, kill)
        with pytest.raises(Killed):
            train(*IMAGES, "--save_every", "1", "--resume")
    train(*IMAGES, "--save_every", "1", "--resume")
    assert_the_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_a_signal_saves_and_has_its_code(train, straight, monkeypatch, tmp_path, capsys, number, code):
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    after_step = Checkpoints.after_step

    def with_a_signal(self, step, state):
        if step == 5:
            os.kill(os.getpid(), number)
        after_step(self, step, state)

    monkeypatch.setattr(Checkpoints, "after_step", with_a_signal)
    with pytest.raises(SystemExit) as end:
        run_recipe(lambda: train(*IMAGES))
    monkeypatch.undo()
    assert end.value.code == code
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"{signal.Signals(number).name}: stopped after 5 steps, all of them saved in")
    assert handlers == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    train(*IMAGES, "--resume")
    assert_the_same_run(tmp_path / "run", straight)


def test_a_finished_run_goes_on_to_the_same_end(train, straight, tmp_path):
    train(*IMAGES, "--save_every", "5")
    train(*IMAGES, "--save_every", "5", "--resume")
    assert_the_same_run(tmp_path / "run", straight)


def test_a_folder_without_a_run_begins_one(train, straight, tmp_path, capsys):
    train(*IMAGES, "--resume")
    assert "note: --resume finds no checkpoint in" in capsys.readouterr().out
    assert_the_same_run(tmp_path / "run", straight)


def test_what_was_killed_before_its_first_save_begins_again(train, straight, end_at, tmp_path):
    end_at(5, kill)
    with pytest.raises(Killed):
        train(*IMAGES)
    train(*IMAGES, "--resume")
    assert_the_same_run(tmp_path / "run", straight)


def stopped_at_6(train, end_at, *flags):
    end_at(6, kill)
    with pytest.raises(Killed):
        train(*IMAGES, "--save_every", "3", *flags)


def test_the_run_may_become_longer_where_the_schedule_has_no_end(train, end_at, tmp_path):
    constant = ["--lr_scheduler_type", "constant"]
    longer = [*constant, "--max_steps", "12"]
    train(*IMAGES, *longer, output="straight")
    stopped_at_6(train, end_at, *constant)
    train(*IMAGES, *longer, "--save_every", "3", "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_and_shorter_but_not_than_it_is(train, end_at, recipe, tmp_path, capsys):
    constant = ["--lr_scheduler_type", "constant"]
    stopped_at_6(train, end_at, *constant)
    assert "has 6 steps and this run ends after 5" in line_of_refusal(
        recipe, tmp_path, capsys, *constant, "--max_steps", "5"
    )
    results = train(*IMAGES, *constant, "--max_steps", "6", "--resume")
    assert results["steps"] == 6
    assert results["eval"]["loss"] > 0


def line_of_refusal(recipe, tmp_path, capsys, *flags):
    AcceleratorState._reset_state(reset_partial_state=True)
    words = [*IMAGES, "--report_to", "none", "--output_dir", str(tmp_path / "run"), "--resume", *flags]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_recipe(lambda: recipe.main(words))
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


OTHER_RUNS = {
    "learning rate": (["--learning_rate", "0.1"], "--learning_rate was 0.0003 and is 0.1"),
    "seed": (["--seed", "1"], "--seed was 0 and is 1"),
    "global batch": (["--global_batch_size", "8"], "--global_batch_size was 16 and is 8"),
    "length": (["--max_steps", "20"], "--max_steps was 10 and is 20, and a linear schedule depends on the end"),
    "overwrite": (["--overwrite"], "--overwrite deletes the run that --resume goes on with"),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_is_refused(recipe, train, end_at, tmp_path, capsys, case):
    flags, words = OTHER_RUNS[case]
    stopped_at_6(train, end_at)
    before = rows_of(tmp_path / "run")
    assert words in line_of_refusal(recipe, tmp_path, capsys, *flags)
    assert rows_of(tmp_path / "run") == before


def test_another_geometry_is_announced(train, end_at, capsys):
    stopped_at_6(train, end_at)
    train(*IMAGES, "--micro_batch_size", "4", "--resume")
    assert "going on as 16 samples = 4 x 1 rank x 4 accumulation steps: data-exact" in capsys.readouterr().out


def test_a_finished_run_without_checkpoints_is_left_alone(recipe, train, tmp_path, capsys):
    train(*IMAGES)
    before = (tmp_path / "run" / "results.json").read_text()
    assert "kept no checkpoint" in line_of_refusal(recipe, tmp_path, capsys)
    assert (tmp_path / "run" / "results.json").read_text() == before


def test_what_was_searched_is_kept(recipe, train, end_at, monkeypatch, tmp_path):
    search = ["--micro_batch_size", "auto", "--activation_checkpointing", "budget", "--memory_budget_gib", "1"]
    stopped_at_6(train, end_at, *search)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    plan_run = recipe.plan_run

    def plan_without_a_search(run, *args, **options):
        assert not run.searches
        return plan_run(run, *args, **options)

    monkeypatch.setattr(recipe, "plan_run", plan_without_a_search)
    results = train(*IMAGES, "--save_every", "3", *search, "--resume")
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan
    assert results["micro_batch_size"] == config["geometry"]["micro_batch_size"]
    again = json.loads((tmp_path / "run" / "config.json").read_text())
    assert again["memory_budget_gib"] == 1
    assert again["micro_batch_size"] == "auto"


def test_the_best_weights_are_kept(train, tmp_path):
    train(*IMAGES, "--save_best", "--learning_rate", "0.01")
    rows = [row for row in rows_of(tmp_path / "run") if "eval/loss" in row]
    best = min(rows, key=lambda row: row["eval/loss"])["step"]
    (folder,) = (tmp_path / "run" / "checkpoints").glob("best-*")
    assert folder.name == f"best-{best}"
    assert (folder / "model.safetensors").exists()


def test_a_folder_in_use_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / "run.lock"):
        assert "belongs to a run that has not ended" in line_of_refusal(recipe, tmp_path, capsys)


def test_a_stop_is_a_system_exit():
    assert StoppedBySignal(signal.SIGTERM, 3, Path("x")).code == 143


def launch(recipe, num_processes, *flags, folder):
    """``accelerate launch`` as people type it, with a process group of its own."""
    config = ROOT / "accelerate_configs" / ("cpu.yaml" if num_processes == 1 else "cpu_ddp.yaml")
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", config]
    words = [*FLAGS[recipe], "--report_to", "none", "--output_dir", folder, "--dataloader_num_workers", "2", *flags]
    return subprocess.Popen(
        [str(word) for word in [*command, ROOT / "recipes" / f"{recipe}.py", *words]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_of(process):
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def wait_for_checkpoint(process, folder):
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("name", FLAGS)
def test_launched_killed_and_launched_again(tmp_path, name, num_processes):
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert end_of(launch(name, num_processes, folder=straight))[0] == 0
    process = launch(name, num_processes, "--save_every", "1", folder=folder)
    wait_for_checkpoint(process, folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, output = end_of(launch(name, num_processes, "--save_every", "1", "--resume", folder=folder))
    assert code == 0, output
    assert "going on after" in output
    assert_the_same_run(folder, straight)


@pytest.mark.slow
def test_launched_and_told_to_stop(tmp_path):
    """The launcher passes the signal on to its ranks, which save; it ends with 1 whatever they end with."""
    folder = tmp_path / "run"
    process = launch("image_classification", 2, "--save_every", "1", "--max_steps", "2000", folder=folder)
    wait_for_checkpoint(process, folder)
    process.send_signal(signal.SIGTERM)
    code, output = end_of(process)
    assert code == 1
    assert "steps, all of them saved in" in output
    assert "Traceback (most recent call last)" not in output.partition("SIGTERM: stopped")[0]
    step = max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    end = ["--max_steps", "2000", "--save_every", "1", "--resume"]
    process = launch("image_classification", 1, *end, folder=folder)  # and on another number of ranks
    while f"going on after {step} steps" not in (line := process.stdout.readline()):
        assert line, "it ended before it went on"
        announced = line if "data-exact" in line else ""
    assert announced
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


KILLED_AT_7 = """
import os, signal, sys
from memsave_recipes.checkpoints import Checkpoints
sys.path.insert(0, {recipes!r})
import image_classification

after_step = Checkpoints.after_step
def and_then_kill(self, step, state):
    after_step(self, step, state)
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
Checkpoints.after_step = and_then_kill
image_classification.main()
"""


@pytest.mark.slow
def test_trackers_go_on_with_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed, whole = tmp_path / "killed.py", ROOT / "recipes" / "image_classification.py"
    killed.write_text(KILLED_AT_7.format(recipes=str(ROOT / "recipes")))
    flags = [*IMAGES, "--logging_steps", "1", "--save_every", "2", "--report_to", "wandb", "tensorboard", "trackio"]
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "TRACKIO_DIR": str(store)}
    for program, more in ((killed, []), (whole, ["--resume"])):
        words = [sys.executable, program, *flags, "--output_dir", tmp_path / "run", *more]
        subprocess.run([str(word) for word in words], env=environment, timeout=200, check=False, capture_output=True)
    assert results_of(tmp_path / "run")["steps"] == NUM_STEPS
    ids = [path.name.rpartition("-")[2] for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, NUM_STEPS + 1))
    (database,) = [path for path in store.glob("*.db") if "image" in path.name]
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(DISTINCT run_name) FROM metrics").fetchone() == (1,)
        steps = {step for (step,) in connection.execute("SELECT step FROM metrics")}
    assert steps >= {7, 8, 9, 10}  # of the others what it had written before the kill
