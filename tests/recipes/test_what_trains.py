"""What trains, for each kind of model: resumed, averaged, in shards, and with the same bits on any number of ranks."""

import pytest
import torch
from lives import (
    IMAGES,
    LABELLED,
    LENGTH,
    TEXT,
    TINY_BERT,
    WORDS,
    assert_the_same_bits,
    assert_the_same_run,
    curve,
    loaded,
    weights_of,
)
from safetensors.torch import load_file
from samples import sample

from memsave_recipes.training.checkpoints import saver

RECIPE = "image_classification"
DENSENET = ["--model", "densenet_small", "--global_batch_size", "16", *LENGTH]
NO_DROPOUT = f"{TINY_BERT},{WORDS},hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
MODELS = {
    "vit": (RECIPE, IMAGES),
    "densenet": (RECIPE, DENSENET),
    "bert": ("text_classification", [*LABELLED, "--config_overrides", NO_DROPOUT]),
    "gpt2": ("language_modeling", [*TEXT, "--loss", "full"]),
}
PARTS = {
    "head": ["--freeze_backbone"],
    "lora": ["--lora", "--lora_rank", "2"],
}
LEFT_OUT = {("densenet", "lora"), ("gpt2", "head")}
CASES = [(model, part) for model in MODELS for part in PARTS if (model, part) not in LEFT_OUT]
FAST = ["--learning_rate", "0.01"]
AVERAGED = ["--ema_decay", "0.75", *FAST]


@pytest.fixture
def recipe(request):
    """The recipe of the model."""
    with loaded(MODELS[request.getfixturevalue("model")][0]) as module:
        yield module


def flags_of(model, part, *more):
    return [*MODELS[model][1], *PARTS[part], *more]


@pytest.mark.parametrize(("model", "part"), sample([("vit", "lora")], CASES))
def test_killed_and_resumed(train, kill_after, tmp_path, model, part):
    flags = flags_of(model, part, *AVERAGED, "--save_every", "3")
    train(*flags, output="straight")
    with kill_after(7):
        train(*flags)
    train(*flags, "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize(("model", "part"), sample([("vit", "lora")], CASES))
def test_final_is_the_average_of_what_trained(train, tmp_path, monkeypatch, model, part):
    monkeypatch.setattr(saver, "KEPT", 9)
    flags = flags_of(model, part, *FAST, "--max_steps", "4", "--lr_scheduler_type", "constant")
    train(*flags, "--save_every", "1", output="plain")
    trained = train(*flags, "--ema_decay", "0.75")["num_trained_parameters"]
    steps = [load_file(tmp_path / f"plain/checkpoints/step-{step}/model-0.safetensors") for step in range(1, 5)]
    average = {name: tensor.clone() for name, tensor in steps[0].items() if tensor.is_floating_point()}
    for weights in steps[1:]:
        for name, tensor in average.items():
            tensor.lerp_(weights[name], 0.25)
    final = [*weights_of(tmp_path / "run/final").values()]
    saved, live = (
        [name for name, tensor in one.items() if any(torch.equal(tensor, other) for other in final)]
        for one in (average, steps[-1])
    )
    assert saved == [*average]
    assert sum(average[name].numel() for name in {*saved} - {*live}) >= trained


@pytest.mark.slow
@pytest.mark.parametrize(("model", "part"), CASES)
def test_two_ranks_in_shards_train_and_save_what_one_does(train, train_on_ranks, tmp_path, model, part):
    flags = flags_of(model, part, *AVERAGED, "--dtype", "float64", "--max_steps", "4", "--logging_steps", "1")
    one = train(*flags, output="one")
    two, _ = train_on_ranks(2, *flags, "--shard", "full", output="two", recipe=MODELS[model][0])
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-9)
    assert two["eval"] == pytest.approx(one["eval"], rel=1e-6)
    final, expected = (weights_of(tmp_path / run / "final") for run in ("two", "one"))
    assert final.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(("model", "part"), sample([("vit", "lora")], CASES))
def test_one_rank_and_two_have_the_same_bits(train_on_ranks, tmp_path, model, part):
    flags = flags_of(model, part, *AVERAGED, "--global_batch_size", "14", "--max_steps", "4", "--save_every", "2")
    flags += ["--logging_steps", "1", "--bitwise_topology", "--micro_batch_size", "2"]
    for num_ranks in (1, 2):
        train_on_ranks(num_ranks, *flags, recipe=MODELS[model][0], output=str(num_ranks))
    assert_the_same_bits(tmp_path / "2", tmp_path / "1", 4)


@pytest.mark.parametrize("model", ["vit"])
def test_weights_that_train_on_the_device_are_not_streamed(refuse, model):
    assert "--stream_weights host: all weights train, on the device" in refuse(*IMAGES, "--stream_weights", "host")


@pytest.mark.parametrize("model", ["densenet"])
def test_batchnorm_that_trains_is_refused_by_name(refuse, model):
    line = refuse(*DENSENET, *("--bitwise_topology", "--micro_batch_size", "2"))
    assert "are BatchNorm layers, whose running statistics follow" in line
