"""What may be another on ``--resume``, what is announced, and what is refused in one line."""

import json
import shutil
from importlib.metadata import version

import pytest
from lives import IMAGES, assert_the_same_run, rows_of

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.flags import rules_of
from memsave_recipes.models.pretrained import TransformerArguments
from memsave_recipes.models.what_trains import TrainedPartArguments
from memsave_recipes.run import building
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.checkpoints.commit import write_manifest
from memsave_recipes.training.checkpoints.resume import check_same_flags, with_previous_choices

RECIPE = "image_classification"


@pytest.fixture
def refused(ending):
    """Go on with other flags; returns the one line that it ends with."""

    def resume(*flags):
        code, line = ending(*IMAGES, "--resume", *flags)
        assert code == 2
        return line

    return resume


@pytest.fixture(scope="module")
def ended_at_6(run_once, kill_after, tmp_path_factory):
    """Runs that have ended after six of their steps, each begun once."""
    folders = {}

    def begin(*flags):
        if flags not in folders:
            folders[flags] = tmp_path_factory.mktemp("ended") / "run"
            with kill_after(6):
                run_once(*IMAGES, "--save_every", "3", *flags, folder=folders[flags])
        return folders[flags]

    return begin


@pytest.fixture
def stopped_at_6(ended_at_6, tmp_path):
    """Puts into the test's own folder a run that has ended after six of its steps."""
    return lambda *flags: shutil.copytree(ended_at_6(*flags), tmp_path / "run")


CONSTANT = ("--lr_scheduler_type", "constant")


def test_the_run_may_become_longer_where_the_schedule_has_no_end(train, stopped_at_6, tmp_path):
    longer = [*CONSTANT, "--max_steps", "12"]
    train(*IMAGES, *longer, output="straight")
    stopped_at_6(*CONSTANT)
    train(*IMAGES, *longer, "--save_every", "3", "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_and_shorter_but_not_than_it_is(train, stopped_at_6, refused):
    stopped_at_6(*CONSTANT)
    assert "has 6 steps and this run ends after 5" in refused(*CONSTANT, "--max_steps", "5")
    results = train(*IMAGES, *CONSTANT, "--max_steps", "6", "--resume")
    assert results["steps"] == 6
    assert results["eval"]["loss"] > 0


OTHER_RUNS = {
    "learning rate": (["--learning_rate", "0.1"], "--learning_rate was 0.0003 and is 0.1"),
    "seed": (["--seed", "1"], "--seed was 0 and is 1"),
    "global batch": (["--global_batch_size", "8"], "--global_batch_size was 16 and is 8"),
    "length": (["--max_steps", "20"], "--max_steps was 10 and is 20, and a linear schedule depends on the end"),
    "overwrite": (["--overwrite"], "--overwrite deletes the run that --resume goes on with"),
}


def test_other_weights_in_the_file_of_class_weights_are_refused(train, stopped_at_6, refused, tmp_path):
    file, weights = tmp_path / "weights.json", {str(digit): 1 for digit in range(10)}
    file.write_text(json.dumps(weights))
    stopped_at_6("--class_weights", file)
    file.write_text(json.dumps(weights | {"3": 2}))
    assert refused("--class_weights", file) == (
        "error: --resume: the file of --class_weights has changed since the run was started: put it back, "
        "or name another --output_dir"
    )
    file.write_text(json.dumps(weights, indent=1))
    assert train(*IMAGES, "--class_weights", file, "--resume")["steps"] == 10


def test_other_entries_in_the_file_of_adapters_are_refused(train, stopped_at_6, refused, tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("lora_alpha: 8")
    stopped_at_6("--lora_config", file)
    file.write_text("lora_alpha: 4")
    assert "the file of --lora_config has changed since the run was started" in refused("--lora_config", file)
    file.write_text("{'lora_alpha': 8}")
    assert train(*IMAGES, "--lora_config", file, "--resume")["steps"] == 10


def test_flags_of_an_earlier_version_may_have_the_value_that_is_left():
    now = {"lr_scheduler_type": "linear", "text_column": ["body"]}
    earlier = now | {"text_column": "body", "too_long": "drop", "prompt": "a", "lora_target_modules": ["all-linear"]}
    assert check_same_flags(earlier, now, {}) == []
    with pytest.raises(InputError, match="was started with --too_long truncate, which this version does not have"):
        check_same_flags(earlier | {"too_long": "truncate"}, now, {})


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_is_refused(stopped_at_6, refused, tmp_path, case):
    flags, words = OTHER_RUNS[case]
    stopped_at_6()
    before = rows_of(tmp_path / "run")
    assert words in refused(*flags)
    assert rows_of(tmp_path / "run") == before


def test_another_geometry_is_announced(train, stopped_at_6, capsys):
    stopped_at_6()
    train(*IMAGES, "--micro_batch_size", "4", "--resume")
    assert "going on as 16 samples = 4 x 1 rank x 4 accumulation steps: data-exact" in capsys.readouterr().out


def test_another_environment_is_announced(train, stopped_at_6, capsys):
    config = stopped_at_6() / "config.json"
    written = json.loads(config.read_text())
    written["environment"]["versions"]["torch"] = "1.0"
    config.write_text(json.dumps(written))
    train(*IMAGES, "--resume")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "bit-exact no longer promised" in line]
    assert line.startswith(f"note: torch was 1.0 and is {version('torch')}: ")


@pytest.mark.parametrize(
    "content", ["[]", "{}", "[" * 100_000, '{"environment": {}}', "without environment", "without geometry"]
)
def test_a_config_that_is_not_whole_is_refused(stopped_at_6, refused, content):
    config = stopped_at_6() / "config.json"
    if content.startswith("without "):
        written = json.loads(config.read_text())
        del written[content.removeprefix("without ")]
        content = json.dumps(written)
    config.write_text(content)
    line = refused()
    assert f"--resume: {config} " in line
    assert line.endswith("put it back, or start again with --overwrite")


def test_rows_that_are_damaged_are_refused_and_missing_ones_are_said(train, stopped_at_6, refused, capsys):
    rows = stopped_at_6() / "metrics.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(b"caf\xe9\n" + whole)
    assert f"--resume: {rows} line 1 is no row of a run" in refused()
    rows.write_bytes(whole.partition(b"\n")[2])
    train(*IMAGES, "--resume")
    assert f"note: {rows} has 2 of its 3 rows up to step 6: the others are lost" in capsys.readouterr().out


def test_a_record_without_its_parts_is_refused(stopped_at_6, refused):
    folder = stopped_at_6() / "checkpoints" / "step-6"
    content = json.loads((folder / "record.json").read_text())
    (state,) = [value for key, value in content["tree"]["dict"] if key == "state"]
    state["dict"] = [entry for entry in state["dict"] if entry[0] != "samples_seen"]
    (folder / "record.json").write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    assert "the record of the checkpoint is not what a run saves" in refused()


def test_a_finished_run_without_checkpoints_is_left_alone(recipe, train, refused, tmp_path, capsys):
    """A job that is queued again succeeds; one that asks for more is refused."""
    train(*IMAGES)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    again = [*IMAGES, "--resume", "--report_to", "none", "--logging_steps", "3", "--output_dir", str(tmp_path / "run")]
    run_recipe(lambda: recipe.main(again))
    assert capsys.readouterr().out == f"--resume: the run in {tmp_path / 'run'} is done, so nothing is left to do\n"
    line = refused("--save_best", "accuracy")
    assert "kept no checkpoint, so --resume has nothing to continue with another --save_best" in line
    assert "--max_steps was" in refused("--max_steps", "12")
    assert "--seed was 0 and is 3" in refused("--seed", "3")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_what_was_searched_is_kept(recipe, train, stopped_at_6, monkeypatch, tmp_path):
    search = ["--micro_batch_size", "auto", "--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "1"]
    stopped_at_6(*search)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    plan_run = building.plan_run

    def plan_without_a_search(task, *args):
        assert not task.run.searches
        return plan_run(task, *args)

    monkeypatch.setattr(building, "plan_run", plan_without_a_search)
    results = train(*IMAGES, "--save_every", "3", *search, "--resume")
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan
    assert results["micro_batch_size"] == config["geometry"]["micro_batch_size"]
    again = json.loads((tmp_path / "run" / "config.json").read_text())
    assert again["memory_budget_gib"] == 1
    assert again["micro_batch_size"] == "auto"


def test_where_the_optimizer_steps_may_change_and_state_alone_is_nothing_to_tell():
    def told(was, now):
        saved, present = ({"lr_scheduler_type": "constant", "offload_optimizer": value} for value in (was, now))
        return check_same_flags(saved, present, rules_of(OptimizerArguments))

    assert told("none", "state") == told("state", "none") == []
    (line,) = told("state", "step")
    assert line == (
        "note: --offload_optimizer was state and is step: an update on the host rounds in another way than one on the "
        "device"
    )


def test_where_the_weights_wait_may_change():
    saved, present = ({"lr_scheduler_type": "constant", "stream_weights": value} for value in ("none", "host"))
    rules = rules_of(TrainedPartArguments)
    assert check_same_flags(saved, present, rules) == check_same_flags(present, saved, rules) == []


@pytest.mark.parametrize(
    ("earlier", "kept"), [({}, "none"), ({"fused_ops": "none"}, "none"), ({"fused_ops": "auto"}, "auto")]
)
def test_operators_stay_fused_or_not_as_the_run_began(earlier, kept):
    """A run of a version without fused operators goes on without them."""
    flags = TransformerArguments(model_type="gpt2")
    assert with_previous_choices(flags, earlier).fused_ops == kept
    saved, present = ({"lr_scheduler_type": "constant", "fused_ops": value} for value in ("auto", "none"))
    (line,) = check_same_flags(saved, present, rules_of(TransformerArguments))
    assert line.startswith("note: --fused_ops was auto and is none: a fused operator rounds in another way")
