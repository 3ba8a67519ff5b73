"""Models of images and text as people train them: any layout and life is the same run, and others open its end."""

import json
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import image_text_models
import pytest
import torch
import torch.nn.functional as F
from image_text_models import TOKENS, make_processor
from lives import assert_the_same_run, curve
from safetensors.torch import load_file
from samples import sample
from transformers import AutoModelForImageTextToText, AutoProcessor
from workloads import measured_peak_bytes, workload_of

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import estimate
from memsave_recipes.data.image_rows import ImageTextArguments
from memsave_recipes.data.image_text import load_image_text
from memsave_recipes.models.image_text import PROJECTORS
from memsave_recipes.tools.cli import main
from memsave_recipes.tools.inference import PredictArguments, load_on, predict, read_inputs

RECIPE = "image_text"
SHORT = [
    *("--block_size", "240", "--global_batch_size", "6", "--micro_batch_size", "2", "--max_steps", "6"),
    *("--logging_steps", "1", "--eval_steps", "3", "--images_per_row", "2", "--learning_rate", "1e-3"),
]
IN_FLOAT64 = ["--dtype", "float64", "--optimizer", "sgd", "--lr_scheduler_type", "constant"]
DECODERS = tuple(f"base_model.model.model.{part}.layers." for part in ("language_model", "text_model"))
TOLERANCES = {"gemma3": 1e-6, "aya_vision": 1e-6}
"""Beside 1e-12: their norms, and the sums of the gradients of these, are in float32, whatever the dtype."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return image_text_models.rows_with_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=sample(["llava"], TOKENS))
def model(request, tmp_path_factory):
    """The folder of a tiny model with its processor."""
    return image_text_models.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return image_text_models.save("llava", tmp_path_factory.mktemp("llava"))


def held_out(path):
    """The messages of the rows that a run holds out."""
    arguments = ImageTextArguments(train_file=[path], images_per_row=2)
    rows = load_image_text(arguments, lambda texts: make_processor("llava"), dtype=torch.float32).validation.rows
    lines = Path(path).read_text().splitlines()
    return [json.loads(lines[int(place.split()[-1]) - 1])["messages"] for place in rows["place"]]


def flags_of(model, data, *more):
    return ["--model_name_or_path", model, "--train_file", data, *SHORT, *more]


@pytest.mark.slow
def test_any_layout_trains_the_same(train, train_on_ranks, model, data, tmp_path):
    """Text-only micro-batches among them, in which no weight of the vision tower has a gradient."""
    flags = flags_of(model, data, *IN_FLOAT64, "--freeze", "none")
    train(*flags, "--micro_batch_size", "6", output="one")
    train_on_ranks(2, *flags, "--micro_batch_size", "1", output="two")
    near = TOLERANCES.get(json.loads((Path(model) / "config.json").read_text())["model_type"], 1e-12)
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=near)
    one, two = (load_file(tmp_path / run / "final/model.safetensors") for run in ("one", "two"))
    start = load_file(Path(model) / "model.safetensors")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=near, atol=near, msg=name)
    assert any("vis" in name and not torch.equal(weight, start[name]) for name, weight in one.items())


def test_killed_and_resumed(train, kill_after, model, data, tmp_path):
    flags = flags_of(model, data, "--activation_checkpointing", "full")
    train(*flags, output="straight")
    with kill_after(4):
        train(*flags, "--save_every", "3")
    train(*flags, "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_plan_changes_no_bit(train, model, data, tmp_path):
    for plan in ("none", "full", "selective"):
        train(*flags_of(model, data, "--freeze", "none", "--activation_checkpointing", plan), output=plan)
    assert curve(tmp_path / "full") == curve(tmp_path / "selective") == curve(tmp_path / "none")


def test_transformers_alone_opens_what_is_saved(train, model, data, tmp_path):
    """Its logits give the loss and the greedy answers of the last evaluation."""
    figures = train(*flags_of(model, data, "--dtype", "float64", "--max_steps", "30"))["eval"]
    final = tmp_path / "run/final"
    saved = AutoModelForImageTextToText.from_pretrained(final, dtype=torch.float64).eval()
    processor = AutoProcessor.from_pretrained(final)
    place = Path(data).parent
    total, count, right = torch.zeros((), dtype=torch.float64), 0, []
    for messages in held_out(data):
        for message in messages:
            parts = (
                [{"type": "text", "text": message["content"]}]
                if isinstance(message["content"], str)
                else message["content"]
            )
            message["content"] = [{**one, "path": str(place / one["path"])} if "path" in one else one for one in parts]
        whole = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        for turn in (1, 3):
            asked = processor.apply_chat_template(
                messages[:turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            start = asked["input_ids"].shape[1]
            text = messages[turn]["content"][0]["text"] + "<|im_end|>"
            answer = torch.tensor(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
            assert torch.equal(whole["input_ids"][0, start : start + len(answer)], answer)
            with torch.no_grad():
                logits = saved(**whole).logits[0, start - 1 : start - 1 + len(answer)]
                reply = saved.generate(**asked, max_new_tokens=len(answer), do_sample=False)[0, start:]
            total = total + F.cross_entropy(logits, answer, reduction="sum")
            count += len(answer)
            right.append(torch.equal(reply, answer))
    assert figures["loss"] == pytest.approx(float(total) / count, rel=1e-6)
    assert figures["exact_match"] == pytest.approx(sum(right) / len(right))


def test_a_frozen_tower_stays_and_its_projector_trains(train, model, data, tmp_path):
    train(*flags_of(model, data))
    start, end = load_file(Path(model) / "model.safetensors"), load_file(tmp_path / "run/final/model.safetensors")
    moved = {name for name in start if not torch.equal(start[name].float(), end[name].float())}
    of_projector = {name for name in moved if any(word in name for word in PROJECTORS)}
    assert of_projector
    of_text = moved - of_projector
    assert not [name for name in of_text if "vis" in name]
    assert [name for name in of_text if ".layers." in name]


def test_adapters_of_the_decoder_reply_about_a_picture(train, model, data, tmp_path):
    train(*flags_of(model, data, "--lora"))
    names = load_file(tmp_path / "run/final/adapter_model.safetensors")
    assert names
    assert all(name.startswith(DECODERS) for name in names)
    saved = load_on("cpu", str(tmp_path / "run"))
    picture = str(Path(data).parent / "0.png")
    flags = PredictArguments(max_new_tokens=3)
    rows = predict(saved, read_inputs([picture, "What is in 0 ?", picture, picture, "What ?"], saved, flags), flags)
    assert [row["input"].split(" | ")[-1] for row in rows] == ["What is in 0 ?", "What ?"]
    assert all("generated_text" in row for row in rows)


# Bad input


def test_rows_without_images_do_not_go_in_shards(train_on_ranks, llava, data):
    with pytest.raises(Exception, match="--shard: some rows have no image"):
        train_on_ranks(2, *flags_of(llava, data, "--shard", "full"))


REFUSED = {
    "a processor that takes videos": (["--processor_name", "VIDEO"], "install torchvision of torch's own build"),
    "images of one size": (["--max_pixels", "100"], "--max_pixels 100: CLIPImageProcessor"),
    "no processor": (["--model_type", "gemma3"], "give --processor_name"),
    "two sources": (["--dataset", "digit-grids"], "exactly one of --dataset digit-grids"),
    "too long": (["--block_size", "9"], "--block_size 9 has no room for any of the train rows"),
    "an encoder": (
        ["--model_type", "vision-encoder-decoder", "--processor_name", "MODEL"],
        "has no token for an image",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_line(refuse, llava, data, tmp_path, name):
    more, words = REFUSED[name]
    if "VIDEO" in more and find_spec("torchvision"):
        pytest.skip("torchvision is there")
    video = tmp_path / "video"
    video.mkdir()
    for file in Path(llava).iterdir():
        (video / file.name).write_bytes(file.read_bytes())
    entries = json.loads((video / "processor_config.json").read_text())
    entries |= {
        "processor_class": "Qwen2_5_VLProcessor",
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"},
    }
    (video / "processor_config.json").write_text(json.dumps(entries))
    more = [{"VIDEO": str(video), "MODEL": llava}.get(word, word) for word in more]
    base = flags_of(llava, data)[2:] if "--model_type" in more else flags_of(llava, data)
    assert words in refuse(*base, *more)


def test_memsave_plan_knows_the_memory_of_the_largest_rows(recipe, model):
    flags = ["--global_batch_size", "2", "--micro_batch_size", "2", "--activation_checkpointing", "full"]
    flags += ["--block_size", "240", "--images_per_row", "2"]
    task = recipe.task(["--model_name_or_path", model, "--output_dir", "out", *flags])
    (found,) = estimate(task, target="cpu").candidates
    made = task.micro_batch(2)
    batch = {name: torch.randn(one.shape) if one.is_meta else one for name, one in made.items()}
    bare = task.build_model(with_weights=True)
    task.adapt(bare)
    trained = task.trained(bare, None, torch.device("cpu"))
    workload = workload_of(bare, lambda _, batch: task.loss_of(trained, batch), batch)
    needed = measured_peak_bytes(workload, found.forecast.plan) + workload.resident_bytes
    assert 0.995 <= (found.peak_bytes - found.static.added_bytes) / needed <= 1.05


def test_memsave_fit_finds_the_ways_to_train_it(recipe, model, tmp_path):
    file = tmp_path / "fit.json"
    words = [model, "--memory", "2GiB", "--length", "240", "--global_batch_size", "2", "--json", str(file)]
    assert main(["fit", *words]) == 0
    found = json.loads(file.read_text())
    assert found["recipe"] == RECIPE
    assert {rung["name"] for rung in found["rungs"]} >= {"no checkpointing", "8-bit AdamW", "LoRA"}
    for rung in found["rungs"]:
        flags = shlex.split(rung["launch"].partition(f"{RECIPE}.py ")[2])
        run = recipe.task(flags).run
        assert (run.block_size, run.micro_batch_size, run.lora) == (
            240,
            rung["micro_batch_size"],
            rung["name"] == "LoRA",
        )


def test_images_that_leave_no_room_are_refused(recipe, model):
    with pytest.raises(InputError, match=r"--block_size 8: 1 images of .* are [\d,]+ tokens: raise it"):
        recipe.task(["--model_name_or_path", model, "--block_size", "8", "--output_dir", "out"]).micro_batch(1)


def test_a_processor_without_a_padding_token_is_planned(recipe, llava, tmp_path):
    folder = shutil.copytree(llava, tmp_path / "model")
    config = folder / "tokenizer_config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in entries.items() if name != "pad_token"}))
    assert AutoProcessor.from_pretrained(folder).tokenizer.pad_token is None
    flags = ["--model_name_or_path", str(folder), "--block_size", "64", "--output_dir", "out"]
    assert recipe.task(flags).micro_batch(2)["labels"].shape == (2, 64)
