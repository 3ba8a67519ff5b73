"""The recipe as people run it: same result with less memory, and every mistake in one line with exit code 2."""

import json
import runpy
import sys

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from lives import ROOT, TINY_VIT, assert_the_same_weights, curve
from PIL import Image
from safetensors.torch import save_file
from samples import sample
from transformers import ViTConfig, ViTForImageClassification

from memsave_recipes.data.vision.augmentation import TRANSFORMS
from memsave_recipes.models import load
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.run.training_run import TrainingRun

RECIPE = "image_classification"
SHORT = ["--global_batch_size", "16", "--micro_batch_size", "6", "--max_steps", "3", "--logging_steps", "1"]


MODEL_FLAGS = {
    "densenet_small": ["--model", "densenet_small"],
    "vit": ["--model_type", "vit", "--config_overrides", TINY_VIT],
}


@pytest.mark.parametrize("model", sample(["densenet_small"], MODEL_FLAGS))
def test_checkpointing_changes_memory_and_nothing_else(train, tmp_path, model):
    flags = [*MODEL_FLAGS[model], *SHORT, "--full_determinism"]  # CUDA's convolutions round otherwise in each run
    plain = train(*flags, output="plain")
    planned = train(*flags, "--activation_checkpointing", "full", output="planned")
    assert len(curve(tmp_path / "plain")) == 3
    assert curve(tmp_path / "plain") == curve(tmp_path / "planned")
    assert planned["eval"] == plain["eval"]
    assert_the_same_weights(tmp_path / "planned" / "final", tmp_path / "plain" / "final")
    assert planned["memory"]["saved_for_backward_gib"] < plain["memory"]["saved_for_backward_gib"]
    assert planned["memory"]["peak_allocated_gib"] < plain["memory"]["peak_allocated_gib"]


def test_eval_only_evaluates_the_model_and_trains_nothing(train, tmp_path, capsys):
    trained = train("--model", "vgg_small", *SHORT, output="trained")
    weights = tmp_path / "trained" / "final" / "model.safetensors"
    evaluated = train("--model", "vgg_small", "--weights", str(weights), *SHORT, "--eval_only", output="evaluated")
    assert evaluated["eval"] == trained["eval"]
    assert evaluated["steps"] == 0
    folder = tmp_path / "evaluated"
    assert json.loads((folder / "results.json").read_text()) == evaluated
    assert not (folder / "final").exists()
    assert not (folder / "checkpoints").exists()
    figures = ", ".join(f"{name} {evaluated['eval'][name]:.4f}" for name in ("accuracy", "top5_accuracy", "loss"))
    assert figures in capsys.readouterr().out


def test_several_labels_an_image_whatever_the_cut(train, tmp_path):
    labels = datasets.List(datasets.ClassLabel(names=["red", "green", "blue"]))
    folder = tmp_path / "colours"
    folder.mkdir()
    for split, number in (("train", 20), ("validation", 5)):
        rows = {"image": [], "labels": []}
        for at in range(number):
            has = [at % 2, at // 2 % 2, at // 4 % 2]
            rows["image"].append(Image.new("RGB", (32, 32), tuple(255 * one for one in has)))
            rows["labels"].append([place for place, one in enumerate(has) if one])
        features = datasets.Features({"image": datasets.Image(), "labels": labels})
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
    exact = ["--dtype", "float64", "--augmentation", "none"]
    flags = [*MODEL_FLAGS["vit"], "--dataset", str(folder), "--image_size", "32", *SHORT, *exact]
    whole = train(*flags, "--micro_batch_size", "16", output="whole")
    cut = train(*flags, "--micro_batch_size", "5", output="cut")
    assert curve(tmp_path / "whole") == pytest.approx(curve(tmp_path / "cut"), rel=1e-9)
    assert cut["eval"] == pytest.approx(whole["eval"], rel=1e-6)
    assert whole["eval"].keys() == {"f1_micro", "f1_macro", "loss"}
    assert {name: of_one["support"] for name, of_one in whole["classes"].items()} == {"red": 2, "green": 2, "blue": 1}
    assert load(tmp_path / "whole").problem_type == "multi_label_classification"


def test_what_a_run_leaves_behind(train, tmp_path):
    results = train("--model", "vgg_small", *SHORT, "--activation_checkpointing", "segments:4")
    folder = tmp_path / "run"
    assert json.loads((folder / "results.json").read_text()) == results
    config = json.loads((folder / "config.json").read_text())
    assert config["model"] == "vgg_small"
    assert config["activation_checkpointing"] == "segments:4"
    assert torch.__version__.startswith(config["environment"]["versions"]["torch"])
    assert json.loads((folder / "plan.json").read_text())["strategy"] == "segments:4"
    assert results["accumulation_steps"] == 3
    assert results["samples_seen"] == 48
    assert results["num_parameters"] == sum(p.numel() for p in MODELS["vgg_small"](num_classes=10).parameters())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = {key for row in rows for key in row}
    assert {"train/loss", "train/lr", "train/grad_norm", "eval/accuracy", "memory/peak_allocated_gib"} <= keys
    assert {"perf/samples_per_sec", "perf/step_time_s", "progress/epoch", "progress/samples_seen"} <= keys


def test_channels_last_and_the_precision_of_products_are_those_of_training(recipe, train, tmp_path, monkeypatch):
    """Also of a run that goes on, whose optimizer's state lies as the weights do."""
    seen, clip = [], TrainingRun.clip_grad_norm_

    def watched(training, max_norm):
        for parameter in training.model.parameters():
            if parameter.ndim == 4:
                layout = parameter.is_contiguous(memory_format=torch.channels_last)
                seen.append((layout, torch.get_float32_matmul_precision()))
        return clip(training, max_norm)

    monkeypatch.setattr(TrainingRun, "clip_grad_norm_", watched)
    flags = ["--model", "vgg_small", *SHORT, "--channels_last", "--matmul_precision", "high"]
    flags += ["--lr_scheduler_type", "constant", "--save_every", "2"]
    straight = train(*flags, output="straight")
    assert set(seen) == {(True, "high")}
    usual = train("--model", "vgg_small", *SHORT, "--lr_scheduler_type", "constant", output="usual")
    assert straight["train_loss"] == pytest.approx(usual["train_loss"], rel=1e-3)
    train(*flags, "--max_steps", "2", output="resumed")
    train(*flags, "--resume", output="resumed")
    assert_the_same_weights(tmp_path / "resumed" / "final", tmp_path / "straight" / "final")


def test_weights_and_pretrained_folders_load(train, tmp_path):
    save_file(MODELS["vgg_small"](num_classes=10).state_dict(), tmp_path / "weights.safetensors")
    train("--model", "vgg_small", "--weights", str(tmp_path / "weights.safetensors"), *SHORT, output="a")
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    train("--model_name_or_path", str(tmp_path / "vit"), *SHORT, output="b")
    saved = ViTForImageClassification.from_pretrained(tmp_path / "b" / "final")
    assert saved.config.num_labels == 10


BAD_FLAGS = {
    "unknown model": (["--model", "vgg17"], "--model vgg17"),
    "no model": ([], "--model"),
    "two models": (["--model", "vgg16", "--model_type", "vit"], "--model_type"),
    "unknown strategy": (["--model", "vgg_small", "--activation_checkpointing", "segment:2"], "segment:2"),
    "bottleneck of a VGG": (["--model", "vgg_small", "--activation_checkpointing", "bottleneck"], "VGG has no blocks"),
    "sync_batchnorm on a CPU": (["--model", "vgg_small", "--batchnorm", "sync"], "--batchnorm sync"),
    "unknown model type": (["--model_type", "vitt"], "vitt"),
    "no such folder": (["--model", "vgg_small", "--data_dir", "absent"], "absent"),
    "size of 0": (["--model", "vgg_small", "--image_size", "0"], "--image_size 0"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_a_mistake_is_one_line_and_exit_code_2(refuse, case):
    flags, words = BAD_FLAGS[case]
    assert words in refuse(*flags)


def test_a_weight_file_of_another_shape(refuse, tmp_path):
    save_file(MODELS["vgg_small"](num_classes=7).state_dict(), tmp_path / "seven.safetensors")
    line = refuse("--model", "vgg_small", "--weights", str(tmp_path / "seven.safetensors"))
    assert "size mismatch for classifier.6.weight: copying a param with shape torch.Size([7, 128])" in line


def test_a_folder_that_holds_another_run_is_left_alone(train, refuse, tmp_path):
    train("--model", "vgg_small", *SHORT)
    before = (tmp_path / "run" / "results.json").read_text()
    AcceleratorState._reset_state(reset_partial_state=True)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "--overwrite" in refuse("--model", "vgg_small", *SHORT)
    # A mistake beside --overwrite costs the old run nothing either.
    refuse("--model", "vgg_small", "--overwrite", "--activation_checkpointing", "segments:99")
    assert (tmp_path / "run" / "results.json").read_text() == before
    train("--model", "vgg_small", *SHORT, "--overwrite", "--seed", "1")
    assert (tmp_path / "run" / "results.json").read_text() != before


@pytest.fixture
def image_folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", 12), ("validation", 4)):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(number):
                pixels = torch.randint(0, 256, (20, 24, 3), generator=generator, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{i}.png")
    return tmp_path / "images"


def test_an_image_folder_with_the_augmentation_of_the_article(train, image_folder):
    flags = ["--model", "vgg_small", "--data_dir", str(image_folder), "--image_size", "32", *SHORT]
    results = train(*flags, "--dataloader_num_workers", "2")
    assert results["eval"]["accuracy"] in {i / 8 for i in range(9)}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unreadable_image_stops_the_run(ending, image_folder, workers):
    path = image_folder / "train" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:-200])
    flags = ["--model", "vgg_small", "--data_dir", str(image_folder), "--image_size", "32", *SHORT]
    flags += ["--dataloader_num_workers", workers]
    code, line = ending(*flags, output="stopped")
    assert code == 2
    assert "cat/0.png is not a readable image (" in line


@pytest.fixture
def flat_folder(image_folder):
    return image_folder / "train"


def test_a_flat_folder_trains_with_one_line_and_goes_on_with_the_same_images(train, flat_folder, tmp_path, capsys):
    flags = ["--model", "vgg_small", "--data_dir", str(flat_folder), "--image_size", "32", *SHORT]
    flags += ["--lr_scheduler_type", "constant", "--save_every", "2", "--augmentation", *TRANSFORMS]
    straight = train(*flags, output="straight")
    lines = capsys.readouterr().out.splitlines()
    assert "22 training images, 2 held out; 2 classes: cat, dog" in lines
    assert ("note: without a validation split, a tenth of each class is held out by --seed 0") in lines
    train(*flags, "--max_steps", "2", output="resumed")
    assert train(*flags, "--resume", output="resumed")["eval"] == straight["eval"]
    assert_the_same_weights(tmp_path / "resumed" / "final", tmp_path / "straight" / "final")


SIZES_OF_PROCESSORS = {
    "both sides": {"size": {"height": 48, "width": 48}},
    "a shortest edge": {"size": {"shortest_edge": 48}},
    "a number": {"size": 48},
    "a crop": {"size": {"shortest_edge": 64}, "crop_size": {"height": 48, "width": 48}},
}


@pytest.fixture
def vit(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=48, patch_size=16)).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.mark.parametrize("processor", [None, *SIZES_OF_PROCESSORS])
def test_images_have_the_size_that_a_pretrained_model_was_made_for(recipe, vit, processor):
    if processor is not None:
        config = json.loads((vit / "config.json").read_text())
        (vit / "config.json").write_text(json.dumps(config | {"image_size": 96}))
        entries = {"image_processor_type": "ViTImageProcessor", **SIZES_OF_PROCESSORS[processor]}
        (vit / "preprocessor_config.json").write_text(json.dumps(entries))
    flags = ["--model_name_or_path", str(vit), "--output_dir", "x"]
    for data in ([], ["--data_dir", "photographs"]):
        assert arguments(recipe, *flags, *data).image_size == 48
    assert arguments(recipe, *flags, "--image_size", "64").image_size == 64


def test_a_pretrained_model_trains_at_its_own_size(recipe, train, vit, image_folder, tmp_path):
    flags = ["--model_name_or_path", str(vit), "--data_dir", str(image_folder)]
    train(*flags, *SHORT)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["image_size"] == 48
    planned = recipe.task([*flags, "--output_dir", "x"])
    assert planned.micro_batch(2)["images"].shape == (2, 3, 48, 48)
    assert planned.assumed == ()


def test_other_models_take_32_pixels_of_digits_and_224_of_photographs(recipe):
    for model in (["--model", "vgg16"], ["--model_type", "vit"]):
        flags = [*model, "--output_dir", "x"]
        assert arguments(recipe, *flags).image_size == 32
        assert arguments(recipe, *flags, "--data_dir", "photographs").image_size == 224
        assert arguments(recipe, *flags, "--dataset", "some/photographs").image_size == 224


def arguments(recipe, *flags):
    (parsed,) = recipe.parse_arguments(recipe.Arguments, args=flags)
    return parsed


def test_the_exit_code_of_the_program_itself(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["recipe", "--model", "vgg17", "--output_dir", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "recipes" / f"{RECIPE}.py"), run_name="__main__")
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.strip().splitlines()[-1].startswith("error: --model vgg17 is not known")
    assert "Traceback" not in told
