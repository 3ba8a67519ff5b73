"""Conversations with images: what counts, what a micro-batch is, and what is refused in a line."""

import io
import json
import re

import datasets
import image_text_models
import numpy as np
import pytest
import torch
from image_text_models import picture, png
from lives import write_rows

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.image_rows import MARK, ImageTextArguments, take_images
from memsave_recipes.data.image_text import largest_micro_batch, load_image_text
from memsave_recipes.data.processors import made_of
from memsave_recipes.models.image_text import limit_pixels

QUESTION = {"type": "text", "text": "What is in the picture ?"}


def asked(*contents):
    roles = ("user", "assistant") * 9
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def load(files, model_type="llava", *, marks=False, **flags):
    processor = image_text_models.make_processor(model_type, marks=marks)
    named = files if isinstance(files, list) else [files]
    arguments = ImageTextArguments(train_file=named, **{"images_per_row": 3, **flags})
    return load_image_text(arguments, lambda texts: processor, dtype=torch.float32)


def all_rows(loaded):
    """Both splits, by their numbers in the file."""
    rows = [(one.rows[at]["place"], one, at) for one in (loaded.train, loaded.validation) for at in range(len(one))]
    return [(split, at) for _, split, at in sorted(rows, key=lambda row: int(row[0].split()[-1]))]


@pytest.fixture
def pictures(tmp_path):
    """Files of several sizes."""
    for number, size in enumerate([(24, 24), (40, 16), (16, 90), (130, 130)]):
        (tmp_path / f"{number}.png").write_bytes(png(*size, seed=number))
    return tmp_path


@pytest.fixture
def ten(pictures):
    """Ten conversations of every form: the file, and of each its messages for the processor and what counts."""
    image = {"type": "image"}
    at = [{**image, "path": f"{number}.png"} for number in range(4)]
    red, blue = "I see a red square .", "blue , and nothing else ."
    rows = [
        {"messages": asked([at[0], QUESTION], red)},
        {"messages": asked([QUESTION, at[1]], red, "and 2 ?", blue)},
        {"messages": asked([at[2], at[3], QUESTION], blue)},
        {"messages": asked([at[0], QUESTION], red, [at[1], QUESTION], blue)},
        {"messages": asked("What is 2 ?", "2 .")},
        {"messages": asked("What is <image> ?", "3 ."), "images": ["2.png"]},
        {"messages": asked("What is 4 ?", red), "images": ["0.png", "3.png"]},
        {"messages": [{"role": "system", "content": "I see ."}, *asked([at[3], QUESTION], red)]},
        {
            "messages": [
                *asked([at[1], QUESTION], red),
                {"role": "user", "content": "?"},
                {**asked("", blue)[1], "loss": False},
            ]
        },
        {
            "conversations": [{"from": "human", "value": "<image>What ?"}, {"from": "gpt", "value": blue}],
            "image": "1.png",
        },
    ]
    others = [
        {
            "conversations": [{"from": "human", "value": f"<image>What {n} ?"}, {"from": "gpt", "value": blue}],
            "image": "1.png",
        }
        for n in range(30)
    ]
    files = write_rows(pictures / "nine.jsonl", rows[:9]), write_rows(pictures / "tenth.jsonl", rows[9:] + others)
    counted = [[red], [red, blue], [blue], [red, blue], ["2 ."], ["3 ."], [red], [red], [red], [blue]]
    return files, rows, counted


def as_parts(row, folder):
    """The messages of a row with their pictures, as the processor takes them."""
    images = [{"type": "image", "path": path} for path in row.get("images", [])]
    messages = []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            before, mark, behind = content.partition("<image>")
            texts = [{"type": "text", "text": text} for text in (before, behind)]
            if message["role"] == "user":
                content, images = [texts[0], *images, texts[1]] if mark else [*images, *texts], []
            else:
                content = texts
        parts = [{**one, "path": str(folder / one["path"])} if "path" in one else one for one in content]
        messages.append({"role": message["role"], "content": [one for one in parts if one.get("text") != ""]})
    return messages


def images_of(row):
    """Those of the messages and of the column."""
    contents = [message["content"] for message in row["messages"] if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image"] + row.get("images", [])


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("model_type", image_text_models.TOKENS)
def test_a_micro_batch_is_the_processors_output_row_by_row(ten, pictures, model_type, marks):
    (nine, _), rows, counted = ten
    loaded = load(nine, model_type, marks=marks)
    found = all_rows(loaded)
    batch = loaded.train.collate([split[at] for split, at in found])
    processor, pixels = loaded.processor, batch["pixel_values"]
    first = num_images = 0
    for number, (row, answers) in enumerate(zip(rows, counted[:9], strict=False)):
        own = processor.apply_chat_template(
            as_parts(row, pictures), tokenize=True, return_dict=True, return_tensors="pt", padding_side="right"
        )
        length = own["input_ids"].shape[1]
        split, at = found[number]
        assert split.rows[at]["length"] == length
        assert torch.equal(batch["input_ids"][number, :length], own["input_ids"][0])
        assert batch["attention_mask"][number].sum() == length
        for name in {"token_type_ids", "mm_token_type_ids"} & batch.keys():
            assert torch.equal(batch[name][number, :length], own[name][0])
        if model_type in ("idefics3", "smolvlm"):  # all images of a row, filled up
            own_pixels = own.get("pixel_values", torch.zeros(1, 0, *pixels.shape[2:]))[0]
            assert torch.equal(pixels[number, : len(own_pixels)], own_pixels)
            assert not pixels[number, len(own_pixels) :].any()
        else:
            own_pixels = own.get("pixel_values", pixels[:0])
            own_part = tuple(slice(size) for size in own_pixels.shape[1:])  # Pixtral fills images up
            assert torch.equal(pixels[first : first + len(own_pixels)][:, *own_part], own_pixels)
            first += len(own_pixels)
        for name in {"image_grid_thw", "image_sizes"} & own.keys():
            assert torch.equal(batch[name][num_images : num_images + len(own[name])], own[name])
        num_images += len(images_of(row))
        is_label = batch["labels"][number] != -100
        assert split.rows[at]["num_counted"] == is_label.sum()
        runs = np.split(np.flatnonzero(is_label), np.flatnonzero(np.diff(np.flatnonzero(is_label)) > 1) + 1)
        texts = [processor.tokenizer.decode(batch["input_ids"][number, run]) for run in runs]
        assert [text.replace("<|im_end|>", "").strip() for text in texts] == answers
        assert all(text.rstrip().endswith("<|im_end|>") for text in texts)
    assert batch["labels"].shape == batch["input_ids"].shape


def test_other_formats_are_the_same_rows(ten, pictures):
    loaded = load(ten[0][1])
    row = loaded.train[0]
    assert row["text"].count("<image>") == 1
    batch = loaded.train.collate([row])
    counted = batch["input_ids"][batch["labels"] != -100]
    assert loaded.processor.tokenizer.decode(counted) == "blue , and nothing else .<|im_end|>"
    written = load(str(parquet(pictures)))
    assert torch.equal(
        loaded.train.collate([loaded.train[0]])["pixel_values"],
        written.train.collate([written.train[0]])["pixel_values"],
    )


def parquet(folder):
    """Rows with pictures as ``datasets`` stores them."""
    image = {"bytes": (folder / "1.png").read_bytes(), "path": None}
    rows = [{"messages": asked("What ?", f"{number} ."), "images": [image]} for number in range(30)]
    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "images": datasets.List(datasets.Image()),
        }
    )
    path = folder / "rows.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    return path


def test_what_does_not_count_has_no_label(ten):
    loaded = load(ten[0][0])
    row = loaded.train[0]
    key = type("Key", (), {"index": 0, "counted": False})
    assert (loaded.train.collate([loaded.train[key]])["labels"] == -100).all()
    assert (loaded.train.collate([row])["labels"] != -100).any()


def test_the_largest_micro_batch_has_the_longest_row_and_the_most_pixels(ten):
    loaded = load(ten[0][0], "idefics3")
    order = loaded.train.longest(len(loaded.train))
    lengths, areas = (np.array(loaded.train.rows[name][:]) for name in ("length", "area"))
    assert sorted(order) == list(range(len(loaded.train)))
    assert lengths[order[0]] == lengths.max()
    assert (np.diff(areas[order[1:]]) <= 0).all()


SIZES = [(24, 24), (130, 130), (300, 300), (400, 100), (90, 270), (131, 97), (500, 60), (80, 32)]
FEWER = {"smolvlm": 64 * 64, "idefics3": 64 * 64, "qwen2_5_vl": 3000, "qwen3_vl": 3000, "internvl": 10_000}
FEWER |= {"aya_vision": 10_000, "pixtral": 1000}


@pytest.mark.parametrize("model_type", image_text_models.TOKENS)
def test_no_image_is_more_than_the_largest(model_type):
    pixels = []
    for max_pixels in (None, FEWER.get(model_type)):
        processor = image_text_models.make_processor(model_type)
        limit_pixels(processor, max_pixels)
        flags = ImageTextArguments(block_size=300, images_per_row=2)
        largest = largest_micro_batch(processor, 3, flags, dtype=torch.float32)
        made = [made_of(processor, size) for size in SIZES]
        assert largest["input_ids"].shape == (3, 300)
        pixels.append(largest["pixel_values"].numel() // 6)
        assert pixels[-1] == max(area for _, area in made)
        count = processor.image_token_id
        assert (largest["input_ids"] == count).sum() == 6 * max(
            processor.tokenizer.convert_tokens_to_ids(processor.tokenizer.tokenize(text)).count(count)
            for text, _ in made
        )
    assert pixels[1] < pixels[0] or model_type not in FEWER


def row_of(**more):
    return {"messages": asked([{"type": "image", "path": "0.png"}, QUESTION], "red"), **more}


REFUSED = {
    "URL": ({"messages": asked([{"type": "image", "url": "https://a/b.png"}], "a")}, "at a URL or in base64"),
    "OpenAI": (
        {"messages": asked([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}], "a")},
        "at a URL or in base64",
    ),
    "base64": ({"messages": asked([{"type": "image", "base64": "data:AA"}], "a")}, "at a URL or in base64"),
    "film": ({"messages": asked([{"type": "video", "path": "a.mp4"}], "a")}, "a part of type 'video'"),
    "films": (row_of(videos=["a.mp4"]), "has videos, and only images and texts"),
    "missing": ({"messages": asked([{"type": "image", "path": "9.png"}], "a")}, "9.png cannot be read .No such file"),
    "no picture": ({"messages": asked([{"type": "image", "path": "rows.jsonl"}], "a")}, "no image format that Pillow"),
    "too few": (
        {"messages": asked("<image> <image>", "a"), "images": ["0.png"]},
        "1 images in its column and 2 places",
    ),
    "too many": (row_of(images=["0.png"]), "1 images in its column and 0 places"),
    "more": ({"messages": asked("What ?", "a"), "images": ["0.png"] * 4}, "4 images, more than --images_per_row 3"),
    "reply": ({"messages": asked("What ?", [{"type": "image", "path": "0.png"}])}, "an image in a reply"),
    "spelt out": (row_of(system="<image>"), "writes 2 <image> for 1 images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_with_their_number(pictures, name):
    row, message = REFUSED[name]
    good = [{"messages": asked(f"What is {number} ?", "2")} for number in range(30)]
    path = write_rows(pictures / "rows.jsonl", [*good, row])
    with pytest.raises(InputError, match=f"rows.jsonl row 31.*{message}"):
        load(path, block_size=100)


def test_long_rows_are_left_out_by_name(pictures):
    rows = [{"messages": asked(f"What is {number} ?", "2")} for number in range(30)]
    rows += [{"messages": asked("What ?", "red " * 200)}]
    path = write_rows(pictures / "rows.jsonl", rows)
    loaded = load(path, block_size=100)
    assert re.search(
        r"1 of \d+ \w+ rows are left out, .*rows.jsonl row 31 first: they have more tokens than", loaded.notice
    )
    assert len(loaded.train) + len(loaded.validation) == 30
    with pytest.raises(InputError, match="--block_size 3 has no room for any of the"):
        load(path, block_size=3)


@pytest.mark.parametrize("model_type", ["llava", "idefics3"])
def test_labels_are_shown_of_ten_conversations(ten, model_type):
    """In the order of the rows: what counts is in brackets, and tokens of an image in a row are one."""
    files, _, counted = ten
    loaded = load(list(files), model_type, show_labels=True)
    shown = loaded.notice.split("--show_labels: ")[1:]
    assert len(shown) == 10
    for at, text in enumerate(shown):
        labels = loaded.train.collate([loaded.train[at]])["labels"]
        place, number = loaded.train.rows[at]["place"].rsplit(" row ", 1)
        answers = counted[int(number) - 1] if place.endswith("nine.jsonl") else counted[9]
        line, conversation = text.split("\n", 1)
        assert line == f"{(labels >= 0).sum()} of {labels.numel()} tokens of {place} row {number} count, in [[ ]]:"
        marked = re.findall(r"\[\[(.*?)\]\]", conversation, re.DOTALL)
        assert [one.removesuffix("<|im_end|>").strip() for one in marked] == answers
        token = loaded.processor.image_token
        assert 2 * token not in text
        assert (f"{token} x " in text) == bool(loaded.train.rows[at]["area"])


def test_marks_are_no_text(pictures):
    with pytest.raises(InputError, match="U\\+FFFC"):
        take_images({"messages": asked(MARK, "a")}, "row 1", ("messages",), pictures)


def test_pixels_are_upright(tmp_path):
    """As a phone writes them: turned, with a note that says so."""
    image, file = picture(40, 16), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(file, "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(file.getvalue())
    rows = [{"messages": asked(f"What is {number} ?", "a"), "images": ["a.jpg"]} for number in range(30)]
    loaded = load(write_rows(tmp_path / "rows.jsonl", rows), "idefics3")
    assert loaded.train[0]["images"][0].size == (16, 40)
    row = loaded.train.rows[0]
    assert row["length"] == loaded.train.collate([loaded.train[0]])["input_ids"].shape[1]


def test_json_too(pictures):
    path = pictures / "rows.json"
    rows = [{"messages": asked(f"What {number} ?", "2")} for number in range(30)]
    path.write_text(json.dumps([row_of(system=str(number)) for number in range(30)] + rows))
    assert load(str(path)).train.is_mixed
