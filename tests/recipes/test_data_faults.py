"""Bad data and a silent Hub end every recipe in one line and code 2, before a step, and cost no earlier run."""

import json

import numpy as np
import pytest
from hub_stand_in import hub_stand_in
from lives import write_rows
from PIL import Image

IMAGES, TEXT, LABELLED = "image_classification", "language_modeling", "text_classification"
TINY_GPT2 = ("--model_type", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=8,vocab_size=300")
FLAGS = {
    IMAGES: ["--model", "vgg_small", "--global_batch_size", "4", "--max_steps", "2"],
    TEXT: [
        *(*TINY_GPT2, "--block_size", "32", "--global_batch_size", "4", "--max_steps", "2"),
    ],
    LABELLED: [
        *(*TINY_GPT2, "--max_length", "16", "--global_batch_size", "4", "--max_steps", "2"),
    ],
}
EARLIER = {"config.json": "{}", "metrics.jsonl": '{"step": 1}\n', "checkpoints/step-1/manifest.json": "{}"}


def image_folder(folder):
    """Three images of two classes a split, PNG and JPEG."""
    root, random = folder / "pets", np.random.default_rng(0)
    for name in ("train/cat/a.png", "train/cat/b.jpg", "train/dog/c.png", "val/cat/d.png", "val/dog/e.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(root / name)
    return root


def broken_image(folder):
    (image_folder(folder) / "val/dog/e.jpg").write_bytes(b"no image")
    return ["--data_dir", str(folder / "pets")]


def documents(number, *flags):
    def make(folder):
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} words"}) + "\n" for n in range(number)))
        return ["--train_file", str(folder / "text.jsonl"), *flags]

    return make


def labelled(number, *flags, asked="yes"):
    def make(folder):
        rows = {"train": [{"text": f"{n} words", "label": ("yes", "no")[n % 2]} for n in range(number)]}
        rows["validation"] = [{"text": "words", "label": asked}]
        for split, of_split in rows.items():
            write_rows(folder / f"{split}.jsonl", of_split)
        return [*(word for split in rows for word in (f"--{split}_file", str(folder / f"{split}.jsonl"))), *flags]

    return make


FAULTS = {
    "a broken image": (IMAGES, broken_image, "1 of 5 images cannot be read: val/dog/e.jpg ("),
    "no documents": (TEXT, documents(0), "text.jsonl has no text"),
    "a label that is none of the classes": (LABELLED, labelled(9, asked="perhaps"), "row 1 has the label perhaps"),
}


def by_name(*names):
    return pytest.mark.parametrize(
        ("recipe", "fault"), [(FAULTS[name][0], name) for name in names], indirect=["recipe"]
    )


@pytest.fixture
def line_of(recipe, ending, monkeypatch):
    """Run it, which may come to its first step and no further; the line that it ends with."""
    monkeypatch.setattr("memsave_recipes.run.run.TrainingRun", lambda *args, **options: pytest.fail("the run began"))

    def end(*flags, output="new"):
        code, line = ending(*FLAGS[recipe.__name__], *flags, output=output)
        assert code == 2
        return line

    return end


@by_name(*FAULTS)
def test_bad_data_ends_in_one_line_before_a_step(line_of, fault, tmp_path):
    _, make, words = FAULTS[fault]
    assert words in line_of(*make(tmp_path))
    assert not (tmp_path / "new").exists()


@by_name("a broken image", "no documents", "a label that is none of the classes")
def test_bad_data_costs_no_earlier_run(line_of, fault, tmp_path):
    folder = tmp_path / "run"
    for name, content in EARLIER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    line_of(*FAULTS[fault][1](tmp_path), "--overwrite", output="run")
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")} == EARLIER


@pytest.mark.parametrize(
    ("recipe", "named"),
    [(IMAGES, ["--dataset", "some/name"]), (TEXT, ["--tokenizer_name", "some/name"])],
    indirect=["recipe"],
)
def test_a_hub_out_of_reach_is_asked_once(line_of, named, monkeypatch, tmp_path):
    """Also for what tests/models/test_hub.py loads besides."""
    with hub_stand_in(monkeypatch, tmp_path) as serve:
        hub = serve(503)
        line = line_of(*named)
    assert_asked_once(hub, "answers with error 503", line, tmp_path)


@pytest.mark.parametrize("recipe", [TEXT], indirect=True)
def test_a_model_out_of_reach_is_asked_for_once(recipe, line_of, monkeypatch, tmp_path):
    monkeypatch.setitem(FLAGS, recipe.__name__, ["--model_name_or_path", "some/name", "--global_batch_size", "4"])
    flags = documents(99)(tmp_path)
    with hub_stand_in(monkeypatch, tmp_path) as serve:
        hub = serve("hang up")
        line = line_of(*flags)
    assert_asked_once(hub, "does not answer", line, tmp_path)


def assert_asked_once(hub, problem, line, folder):
    assert "some/name" in line
    assert f"it is not in the cache, and {hub.url} {problem}" in line
    assert hub.requests == ["HEAD /"]
    assert not (folder / "new").exists()
