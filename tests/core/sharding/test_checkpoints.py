"""Checkpoints in shards: saved on so many ranks, loaded on any other number, in any shards or whole, bit for bit."""

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from samples import sample
from small_runs import WORLDS, Training, all_equal, checkpoints_of, largest_difference

from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.checkpoints import saver as saver_module
from memsave_recipes.training.checkpoints import state as state_module
from memsave_recipes.training.checkpoints.commit import verify_manifest
from memsave_recipes.training.checkpoints.resume import find_newest

STEPS, SAVED = 5, 3
RECORD = {"tokens": 12, "best": 0.5, "digests": torch.tensor([7, 2**40])}


def values(record):
    """With numbers for the tensor."""
    return {**record, "digests": record["digests"].tolist()}


def everything(training):
    return training.weights(), training.state(), training.scheduler.state_dict()


def save(folder, kind, flag, accelerator, **options):
    """Three of five steps, saved; then the state there, and the weights at the end."""
    training = Training(accelerator, kind, flag, num_steps=STEPS, **options).train(SAVED)
    checkpoints_of(training, folder).save(SAVED, RECORD)
    there = everything(training)
    training.batches.begin_after(SAVED)
    return there, training.train().weights()


def load(folder, kind, flag, accelerator, **options):
    """The state after ``resume()``, and the weights at the end."""
    training = Training(accelerator, kind, flag, num_steps=STEPS, **options)
    resumed = checkpoints_of(training, folder).resume()
    assert (resumed.step, values(resumed.state)) == (SAVED, values(RECORD))
    there = everything(training)
    training.batches.begin_after(SAVED)
    return there, training.train().weights()


def assert_the_same(ours, theirs):
    (weights, state, schedule), (weights_saved, state_saved, schedule_saved) = ours, theirs
    assert all_equal(weights, weights_saved)
    assert state_saved
    assert all_equal(state, state_saved)
    assert schedule == schedule_saved


@pytest.fixture(scope="module")
def saved(run_on_ranks, tmp_path_factory):
    """The folder of a run on such a world, its state when it was saved and its weights at the end; each run once."""
    known = {}

    def saved_on(world, kind="gpt2", **options):
        key = world, kind, *options
        if key not in known:
            folder, (num_ranks, flag) = tmp_path_factory.mktemp("saved"), WORLDS[world]
            known[key] = folder, *run_on_ranks(partial(save, folder, kind, flag, **options), num_ranks)[0]
        return known[key]

    return saved_on


@pytest.mark.parametrize(("before", "after"), sample([("2", "3")], product(WORLDS, WORLDS)))
def test_loaded_on_another_world(run_on_ranks, saved, before, after):
    """Of GPT-2, which computes in float64 alone: Llama's norms are float32, and round otherwise times 3 ranks."""
    folder, there, weights_at_end = saved(before, "gpt2")
    num_ranks, flag = WORLDS[after]
    for found, weights in run_on_ranks(partial(load, folder, "gpt2", flag), num_ranks):
        assert_the_same(found, there)
        if before == after:
            assert all_equal(weights, weights_at_end)
        assert largest_difference(weights, weights_at_end) < 1e-12


MUON = OptimizerArguments(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("2", "3"), ("1", "2x2"), ("2x2", "1")])
def test_the_momentum_of_muon_moves(run_on_ranks, saved, before, after):
    folder, there, weights_at_end = saved(before, "gpt2", optim=MUON)
    num_ranks, flag = WORLDS[after]
    for found, weights in run_on_ranks(partial(load, folder, "gpt2", flag, optim=MUON), num_ranks):
        assert_the_same(found, there)
        assert largest_difference(weights, weights_at_end) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("resnet", {"global_batch_size": 8})])
def test_own_heads_and_buffers(run_on_ranks, saved, kind, options):
    folder, there, _ = saved("2", kind, **options)
    found, _ = run_on_ranks(partial(load, folder, kind, "none", **options), 1)[0]
    assert_the_same(found, there)


@pytest.mark.slow
def test_adapters_leave_frozen_weights_out(run_on_ranks, saved):
    folder, there, _ = saved("2", "llama", lora=True)
    loaded = run_on_ranks(partial(load, folder, "llama", "full", lora=True), 4)  # one more than an adapter has rows
    assert_the_same(loaded[0][0], there)
    sizes = [path.stat().st_size for path in (folder / "step-3").glob("*.safetensors")]
    whole, _, _ = saved("2", "llama")
    assert sum(sizes) < sum(path.stat().st_size for path in (whole / "step-3").glob("*.safetensors")) / 2


def test_every_rank_writes_its_part_once(saved):
    folder, _, _ = saved("2x2")
    assert {path.suffix for path in (folder / "step-3").iterdir()} == {".json", ".safetensors"}
    files = sorted(path.name for path in (folder / "step-3").glob("*.safetensors"))
    assert files == ["record-0.safetensors", *(f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))]
    manifest = json.loads((folder / "step-3" / "manifest.json").read_text())
    assert set(files) < {entry["path"] for entry in manifest["files"]}
    verify_manifest(folder / "step-3")


def save_where_a_rank_fails(folder, phase, accelerator):
    """A second checkpoint, in which one rank finds a full disk; what each rank raised."""
    training = Training(accelerator, "llama", "full", num_steps=STEPS).train(SAVED)
    checkpoints = checkpoints_of(training, folder)
    checkpoints.save(SAVED, RECORD)

    def fail(*_):
        raise OSError(28, "No space left on device")

    if phase == "part" and accelerator.process_index == 1:
        state_module.RankState.write = fail
    if phase == "rest":
        saver_module.finish = fail
    try:
        checkpoints.save(SAVED + 1, RECORD)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("phase", ["part", pytest.param("rest", marks=pytest.mark.slow)])
def test_a_full_disk_on_one_rank_ends_all_and_keeps_the_one_before(run_on_ranks, tmp_path, phase):
    save_there = partial(save_where_a_rank_fails, tmp_path / "checkpoints", phase)
    raised = run_on_ranks(save_there, 2)
    assert {kind for kind, _ in raised} == {"InputError"}
    assert all("step-4 cannot be written or deleted, no space left on device" in message for _, message in raised)
    assert [path.name for path in Path(tmp_path, "checkpoints").iterdir()] == ["step-3"]
    assert find_newest(tmp_path / "checkpoints").step == SAVED


def save_weights_that_are_not_finite(folder, accelerator):
    training = Training(accelerator, "llama", "full", num_steps=STEPS).train(1)
    if accelerator.process_index == 1:
        with torch.no_grad():
            next(training.trained.parameters()).to_local()[0] = float("nan")
    try:
        checkpoints_of(training, folder).save(1, RECORD)
    except Exception as error:
        return type(error).__name__
    return None


@pytest.mark.slow
def test_weights_that_one_rank_has_not_finite_are_not_saved(run_on_ranks, tmp_path):
    assert run_on_ranks(partial(save_weights_that_are_not_finite, tmp_path / "none"), 2) == ["NotFinite"] * 2
    assert not (tmp_path / "none").exists()
