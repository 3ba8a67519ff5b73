"""A run goes on with the data that it was trained on, or ends in one line that says what differs."""

import json
import shutil

import datasets
import numpy as np
import pytest
from lives import rows_of, write_rows
from PIL import Image

from memsave_recipes.training.checkpoints.commit import write_manifest

RECIPES = ["image_classification", "language_modeling", "text_classification"]
SHORT = ["--global_batch_size", "4", "--max_steps", "6", "--logging_steps", "2", "--eval_steps", "3"]
TINY_GPT2 = ["--model_type", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=8,vocab_size=300"]
MODEL = {
    "image_classification": ["--model", "vgg_small"],
    "language_modeling": [*TINY_GPT2, "--block_size", "16"],
    "text_classification": [*TINY_GPT2, "--max_length", "16"],
}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def make_data(folder):
    random = np.random.default_rng(0)
    for split, number in (("train", 8), ("validation", 2)):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 256, (random.integers(6, 12), 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.bmp")
    for split, number in (("train", 24), ("validation", 4)):
        rows = [{"text": f"the number {index} of many", "label": "ab"[index % 2]} for index in range(number)]
        write_rows(folder / f"{split}.jsonl", rows)


def data_flags(name, data):
    if name == "image_classification":
        return ["--data_dir", str(data), "--image_size", "32"]
    return ["--train_file", str(data / "train.jsonl"), "--validation_file", str(data / "validation.jsonl")]


def flags_of(name, data):
    return [*MODEL[name], *SHORT, "--save_every", "2", *data_flags(name, data)]


@pytest.fixture(scope="module")
def ended_at_4(recipe, run_once, kill_after, tmp_path_factory):
    """``data`` and a ``run`` that has ended after four of its six steps."""
    folder = tmp_path_factory.mktemp("ended")
    make_data(folder / "data")
    with kill_after(4):
        run_once(*flags_of(recipe.__name__, folder / "data"), folder=folder / "run")
    return folder


@pytest.fixture
def data(ended_at_4, tmp_path):
    """The data, to be changed, beside the run that is to go on."""
    shutil.copytree(ended_at_4 / "run", tmp_path / "run")
    return shutil.copytree(ended_at_4 / "data", tmp_path / "data")


@pytest.fixture
def resume(recipe, train, data):
    return lambda *flags: train(*flags_of(recipe.__name__, data), "--resume", *flags)


@pytest.fixture
def refused(recipe, ending, data, tmp_path):
    """The line that the run ends with instead of going on; it leaves everything as it was."""

    def end():
        before = rows_of(tmp_path / "run")
        code, line = ending(*flags_of(recipe.__name__, data), "--resume")
        assert code == 2
        assert rows_of(tmp_path / "run") == before
        return line

    return end


def rename_class(data):
    for split in ("train", "validation"):
        (data / split / "a").rename(data / split / "zebra")


def swap_classes(data):
    for split in ("train", "validation"):
        (data / split / "a").rename(data / split / "c")
        (data / split / "b").rename(data / split / "a")
        (data / split / "c").rename(data / split / "b")


def replace_file(data):
    (data / "train/b/3.bmp").rename(data / "train/b/9.bmp")


def move_file(data):
    (data / "train/a/7.bmp").rename(data / "train/b/8.bmp")


def resize_file(data):
    Image.new("RGB", (20, 20)).save(data / "train/b/3.bmp")


def change_held_out(data):
    (data / "validation/b/1.bmp").rename(data / "validation/b/2.bmp")


def remove_file(data):
    (data / "train/b/3.bmp").unlink()


def reverse(name):
    def change(data):
        lines = (data / name).read_text().splitlines(keepends=True)
        (data / name).write_text("".join(lines[::-1]))

    return change


def replace_word(data):
    text = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(text.replace("number 3 ", "figure 3 "))


def relabel(data):
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    lines[3] = lines[3].replace('"label": "b"', '"label": "a"')
    (data / "train.jsonl").write_text("".join(lines))


IMAGES, TEXT, LABELLED = RECIPES
FIRST = "the first that differs is"
CHANGES = {
    "a class renamed": (IMAGES, rename_class, "class names: a gone, zebra new; training images: "),
    "the classes swapped": (IMAGES, swap_classes, f"training images: {FIRST} train/a/1.bmp"),
    "a file replaced by another name": (IMAGES, replace_file, f"training images: {FIRST} train/b/4.bmp"),
    "a file of another class": (IMAGES, move_file, f"training images: {FIRST} train/b/0.bmp"),
    "a file of another size": (IMAGES, resize_file, f"training images: {FIRST} train/b/3.bmp"),
    "a file gone": (IMAGES, remove_file, f"training images: 16 were and 15 are, {FIRST} train/b/4.bmp"),
    "held-out images": (IMAGES, change_held_out, f"held-out images: {FIRST} validation/b/2.bmp"),
    "documents in another order": (TEXT, reverse("train.jsonl"), f"training text: {FIRST} document 1 of"),
    "held-out documents": (TEXT, reverse("validation.jsonl"), f"held-out text: {FIRST} document 1 of"),
    "a word in a document": (TEXT, replace_word, "the tokenizer is another one; training text: "),
    "texts in another order": (LABELLED, reverse("train.jsonl"), f"training texts: {FIRST} row 1 of"),
    "a word in a text": (LABELLED, replace_word, "the tokenizer is another one; training texts: "),
    "another label": (LABELLED, relabel, f"training texts: {FIRST} row 4 of"),
    "held-out texts": (LABELLED, reverse("validation.jsonl"), f"held-out texts: {FIRST} row 1 of"),
}
BY_RECIPE = [pytest.param(recipe, name, id=name) for name, (recipe, _, _) in CHANGES.items()]


@pytest.mark.parametrize(("recipe", "name"), BY_RECIPE, indirect=["recipe"])
def test_other_data_is_refused(data, refused, name):
    _, change, words = CHANGES[name]
    change(data)
    line = refused()
    assert line.startswith("error: --resume: the data is not what the run was trained on (")
    assert words in line
    assert line.endswith("put it back, or name another --output_dir")


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
def test_the_same_data_elsewhere_is_the_same(resume, capsys, tmp_path):
    resume()
    told = capsys.readouterr().out
    assert "taken to be the same" in told  # of the path
    assert "the data is not" not in told
    assert "no digest of its data" not in told
    assert len(rows_of(tmp_path / "run")) == 6


def forget_data(folder):
    """What a version of before has written."""
    for record in folder.glob("checkpoints/step-*/record.json"):
        content = json.loads(record.read_text())
        of_run = next(value for key, value in content["tree"]["dict"] if key == "run")
        of_run["dict"] = [entry for entry in of_run["dict"] if entry[0] != "data"]
        for part in record.parent.glob("record-*.safetensors"):
            part.unlink()
        record.write_text(json.dumps({**content, "parts": 0}))
        (record.parent / "manifest.json").unlink()
        write_manifest(record.parent)


@pytest.mark.parametrize("recipe", [TEXT], indirect=True)
def test_a_checkpoint_without_a_digest_goes_on_in_one_line(resume, data, tmp_path, capsys):
    forget_data(tmp_path / "run")
    resume()
    lines = [line for line in capsys.readouterr().out.splitlines() if "has no digest of its data" in line]
    assert len(lines) == 1
