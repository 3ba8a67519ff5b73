"""Every source gives the same samples, every kind of image becomes RGB, every bad input is one line that names it."""

import json
import pickle
import subprocess
import sys
import warnings
from typing import NamedTuple

import datasets
import numpy as np
import pytest
import torch
from pictures import encoded, load, picture, refusal
from PIL import Image
from torch.utils.data import DataLoader
from transformers import BitImageProcessorPil

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import SampleKey
from memsave_recipes.data.vision import decoding, images
from memsave_recipes.data.vision.augmentation import AUGMENTATIONS
from memsave_recipes.data.vision.decoding import decode, resized

ARTICLE = AUGMENTATIONS["article"]


class Key(NamedTuple):
    index: int
    epoch: int
    counted: bool
    partner: int | None = None


# The digits


def test_digits_are_scikit_learns_split_in_the_same_way_whatever_the_seed(capfd):
    first, second = load(dataset="digits", image_size=8), load(dataset="digits", image_size=8, seed=7)
    assert (len(first.train), len(first.validation)) == (1437, 360)
    assert first.label_names == tuple("0123456789")
    for split in ("train", "validation"):
        rows, others = getattr(first, split).rows, getattr(second, split).rows
        assert rows["label"][:] == others["label"][:]
        assert rows["image"][:] == others["image"][:]
    counts = np.bincount(first.validation.rows["label"][:])
    assert counts.min() >= 34  # 174 to 183 images of each digit, a fifth of them
    assert counts.max() <= 37
    assert "".join(capfd.readouterr()) == ""


def test_digits_are_all_there_once_with_their_own_pixels():
    from sklearn.datasets import load_digits

    splits, digits = load(dataset="digits", image_size=8), load_digits()
    ours = sorted(
        (int(sample["labels"]), sample["images"].numpy().tobytes())
        for dataset in (splits.train, splits.validation)
        for sample in (dataset[index] for index in range(len(dataset)))
    )
    greys = np.rint(digits.images * 255 / 16).astype(np.uint8)
    expected = sorted(
        (int(label), np.stack([grey] * 3).tobytes()) for label, grey in zip(digits.target, greys, strict=True)
    )
    assert ours == expected


# Samples


def test_a_batch_is_what_the_default_collation_makes():
    splits = load(dataset="digits", augmentation="article")
    batch = next(iter(DataLoader(splits.train, batch_size=4)))
    assert (batch["images"].shape, batch["images"].dtype) == ((4, 3, 16, 16), torch.uint8)
    assert (batch["affine"].shape, batch["affine"].dtype) == ((4, 2, 3), torch.float32)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((4,), torch.int64)
    assert batch["index"].tolist() == [0, 1, 2, 3]


def test_validation_images_are_not_augmented():
    splits = load(dataset="digits", augmentation="article")
    assert "affine" in splits.train[0]
    assert "affine" not in splits.validation[0]
    assert "affine" not in load(dataset="digits").train[0]


def test_a_key_says_epoch_and_whether_the_sample_counts():
    train = load(dataset="digits", augmentation="article", seed=5).train
    sample = train[Key(index=3, epoch=2, counted=True)]
    assert torch.equal(sample["affine"], ARTICLE.draw(seed=5, epoch=2, index=3, image_size=16))
    assert torch.equal(sample["images"], train[3]["images"])
    assert sample["labels"] == train[3]["labels"] != -100
    assert train[Key(index=3, epoch=2, counted=False)]["labels"] == -100
    assert torch.equal(train[3]["affine"], train[Key(index=3, epoch=0, counted=True)]["affine"])


def test_workers_change_nothing(folder):
    train = load(data_dir=str(folder), augmentation="article").train
    keys = [[Key(index, 1, True) for index in group] for group in ((0, 4), (2, 5), (3,))]
    alone, shared = (
        list(DataLoader(train, batch_sampler=keys, num_workers=workers, multiprocessing_context=context))
        for workers, context in ((0, None), (2, "fork"))
    )
    for left, right in zip(alone, shared, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in ("images", "affine", "labels", "index"))


def test_a_dataset_can_be_pickled(folder):
    train = load(data_dir=str(folder), augmentation="article").train
    copy = pickle.loads(pickle.dumps(train))
    assert torch.equal(copy[5]["images"], train[5]["images"])
    assert torch.equal(copy[5]["affine"], train[5]["affine"])


# Data sets by name


def save_parquet(directory, columns, **splits):
    directory.mkdir()
    for name, rows in splits.items():
        datasets.Dataset.from_dict(rows, features=datasets.Features(columns)).to_parquet(directory / f"{name}.parquet")
    return str(directory)


COLUMNS = {
    "id": datasets.Value("int64"),
    "img": datasets.Image(),
    "fine": datasets.ClassLabel(names=["x", "y", "z"]),
    "coarse": datasets.ClassLabel(names=["all", "none"]),
}


def rows_of(labels):
    count = len(labels)
    return {"id": range(count), "img": [picture(n) for n in range(count)], "fine": labels, "coarse": [0] * count}


def test_columns_are_found_by_type_and_test_serves_as_validation(tmp_path):
    name = save_parquet(tmp_path / "set", COLUMNS, train=rows_of([2, 0, 1]), test=rows_of([1, 1]))
    splits = load(dataset=name)
    assert splits.label_names == ("x", "y", "z")
    assert [int(splits.train[index]["labels"]) for index in range(3)] == [2, 0, 1]
    assert len(splits.validation) == 2
    assert set(splits.train[0]) == {"images", "labels", "index"}


@pytest.mark.parametrize(("missing", "word"), [("img", "Image"), ("fine", "ClassLabel")])
def test_a_missing_column(tmp_path, missing, word):
    columns = {name: feature for name, feature in COLUMNS.items() if name not in (missing, "coarse")}
    rows = {name: values for name, values in rows_of([0, 1]).items() if name in columns}
    name = save_parquet(tmp_path / "set", columns, train=rows, test=rows)
    assert f"--dataset {name} has no {word} column" in refusal(dataset=name)


def test_lists_of_classes_are_several_labels(tmp_path):
    columns = {**COLUMNS, "coarse": datasets.Value("int64"), "fine": datasets.List(COLUMNS["fine"])}
    train, test = [[2, 0], [], [1]], [[1], [0, 1]]
    splits = load(dataset=save_parquet(tmp_path / "set", columns, train=rows_of(train), test=rows_of(test)))
    assert splits.problem_type == "multi_label_classification"
    assert splits.label_names == ("x", "y", "z")
    assert [splits.train[index]["labels"].tolist() for index in range(3)] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert splits.train[SampleKey(0, counted=False)]["labels"].isnan().all()
    assert "any number of them an image: multi_label_classification" in splits.notices[0]
    flags = images.ImageDataArguments(dataset=str(tmp_path / "set"), image_size=8)
    evaluated = images.load_images(flags, seed=0, model_labels=("z", "x", "y"))
    assert evaluated.validation[1]["labels"].tolist() == [0, 1, 1]


def test_one_class_is_preferred_to_lists(tmp_path):
    columns = {"labels": datasets.List(datasets.Value("string")), **COLUMNS}
    rows = {"labels": [["a"], ["b"]], **rows_of([0, 1])}
    assert load(dataset=save_parquet(tmp_path / "set", columns, train=rows, test=rows)).label_names == ("x", "y", "z")


def test_a_folder_with_metadata_has_lists_of_words(tmp_path):
    folder = tmp_path / "set"
    labels = {"train": [["sea", "sky"], ["sky"], ["sand"]], "validation": [["sand", "sea"]]}
    for split, lists in labels.items():
        (folder / split).mkdir(parents=True)
        rows = [{"file_name": f"{number}.png", "labels": words} for number, words in enumerate(lists)]
        for row in rows:
            picture().save(folder / split / row["file_name"])
        (folder / split / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = load(dataset=str(folder))
    assert splits.label_names == ("sand", "sea", "sky")
    assert splits.train[0]["labels"].tolist() == [0, 1, 1]
    assert splits.validation[0]["labels"].tolist() == [1, 1, 0]
    (folder / "validation" / "metadata.jsonl").write_text('{"file_name": "0.png", "labels": ["moon"]}')
    assert "has validation images of classes that train has none of (moon)" in refusal(dataset=str(folder))


def test_of_several_classes_a_part_is_held_out(tmp_path):
    columns = {**COLUMNS, "coarse": datasets.Value("int64"), "fine": datasets.List(COLUMNS["fine"])}
    splits = load(dataset=save_parquet(tmp_path / "set", columns, train=rows_of([[0, 1], [2], [], [1]] * 5)))
    assert (len(splits.train), len(splits.validation)) == (18, 2)


def test_a_missing_split(tmp_path):
    name = save_parquet(tmp_path / "set", COLUMNS, test=rows_of([0, 1]))
    assert f"--dataset {name} has no train split (found: test): one must be named train" in refusal(dataset=name)


def test_a_data_set_without_a_validation_split_holds_out_a_part(tmp_path):
    name = save_parquet(tmp_path / "set", COLUMNS, train=rows_of([0, 1] * 10))
    splits = load(dataset=name)
    assert (len(splits.train), len(splits.validation)) == (18, 2)
    assert sorted(splits.validation.rows["label"][:]) == [0, 1]
    assert splits.held_out_by == "--seed 0"
    held_out = [load(dataset=name, seed=seed).validation.rows["image"][:] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_other_bytes_or_labels_are_told_from_the_same(tmp_path):
    rows = {"a": rows_of([2, 0, 1]), "same": rows_of([2, 0, 1]), "labels": rows_of([2, 1, 1]), "b": rows_of([2, 0, 1])}
    rows["b"]["img"][1] = picture(99)
    prints = {
        name: load(dataset=save_parquet(tmp_path / name, COLUMNS, train=train, test=rows_of([1, 1]))).fingerprint
        for name, train in rows.items()
    }
    record = prints["a"].record()
    assert prints["same"].differences(record) == []
    for name in ("labels", "b"):
        assert prints[name].differences(record) == [
            "training images: the first that differs is number 2 of the training images"
        ]


def test_the_digits_are_told_from_nothing_but_themselves(folder):
    digits = load(dataset="digits").fingerprint
    assert digits.differences(load(dataset="digits").fingerprint.record()) == []
    assert len(digits.differences(load(data_dir=str(folder)).fingerprint.record())) == 3


def test_the_images_of_an_evaluated_model_have_its_classes(folder):
    flags = images.ImageDataArguments(data_dir=str(folder), image_size=8)
    splits = images.load_images(flags, seed=0, model_labels=("emu", "dog", "cat"))
    assert splits.label_names == ("emu", "dog", "cat")
    assert [int(splits.validation[index]["labels"]) for index in range(6)] == [2, 2, 2, 1, 1, 1]
    with pytest.raises(InputError, match=r"classes that the model does not know \(cat\), only dog, emu: "):
        images.load_images(flags, seed=0, model_labels=("dog", "emu"))


def test_rows_without_a_class(tmp_path):
    name = save_parquet(tmp_path / "set", COLUMNS, train=rows_of([0, 1]), test=rows_of([0, -1]))
    assert "images without a class (label -1)" in refusal(dataset=name)


def test_a_hub_id_while_offline():
    message = refusal(dataset="cifar10")
    assert message.startswith("--dataset cifar10 cannot be loaded: it is not in the cache, and HF_HUB_OFFLINE is set; ")
    assert message.endswith("use --dataset digits or --data_dir DIR")


# Bad input


def test_one_source_at_most(folder):
    message = refusal(dataset="digits", data_dir=str(folder))
    assert "exactly one of --dataset digits, --dataset HUB_ID and --data_dir DIR" in message


def test_a_folder_that_is_not_there(tmp_path):
    assert f"--data_dir {tmp_path / 'no'} is not a directory" in refusal(data_dir=str(tmp_path / "no"))


# Broken images


BROKEN = {
    "cut.png": encoded("png")[:4000],
    "cut.jpg": encoded("jpeg")[:1500],
    "header.png": encoded("png")[:20],
    "text.jpg": b"not an image",
    "empty.png": b"",
}


HEADER_IS_WHOLE = ("cut.png", "cut.jpg")


@pytest.mark.parametrize("name", HEADER_IS_WHOLE)
def test_a_truncated_image_is_named_when_it_is_reached(folder, name):
    path = folder / "train" / "dog" / name
    path.write_bytes(BROKEN[name])
    train = load(data_dir=str(folder)).train
    broken = [index for index in range(len(train)) if train.rows[index]["image"]["path"] == str(path)]
    with pytest.raises(InputError) as caught:
        train[broken[0]]
    message = str(caught.value)
    assert message.startswith(f"{path} is not a readable image (")
    assert message.endswith("): replace or delete it")
    assert "\n" not in message
    assert " at 0x" not in message


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - HEADER_IS_WHOLE))
def test_an_image_without_a_header_is_named_when_the_data_is_loaded(folder, name):
    (folder / "train" / "dog" / name).write_bytes(BROKEN[name])
    unknown = "no image format that Pillow knows"
    reason = "Truncated File Read" if name == "header.png" else unknown
    assert refusal(data_dir=str(folder)) in [
        f"--data_dir {folder}: 1 of 13 images cannot be read: train/dog/{name} ({why}): replace or delete them"
        for why in (reason, unknown)
    ]


def test_the_first_ten_broken_images_are_named(folder):
    for number in range(12):
        (folder / "train" / "dog" / f"broken {number:02}.jpg").write_bytes(b"no image")
    named = ", ".join(f"train/dog/broken {number:02}.jpg (no image format that Pillow knows)" for number in range(10))
    assert f"12 of 24 images cannot be read: {named} and 2 more: replace" in refusal(data_dir=str(folder))


def test_pixels_without_an_agreed_range_are_refused_by_the_header(folder):
    Image.new("F", (4, 3), 0.5).save(folder / "train" / "dog" / "a.tiff")
    assert "train/dog/a.tiff (32-bit pixels have no agreed range)" in refusal(data_dir=str(folder))


def test_the_check_is_remembered_until_a_file_changes(folder, monkeypatch):
    load(data_dir=str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("opened again"))
        load(data_dir=str(folder))
    (folder / "train" / "dog" / "0.png").write_bytes(b"no image")
    assert "1 of 12 images cannot be read: train/dog/0.png" in refusal(data_dir=str(folder))


def test_a_broken_grey_image_of_16_bits_is_named(folder):
    path = folder / "train" / "dog" / "grey.png"
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:-60])
    assert refusal(data_dir=str(folder)) == f"--data_dir {folder}: {path} cannot be decoded: replace or delete it"


def test_a_broken_image_without_a_path_is_named_by_its_place(tmp_path):
    images = [{"bytes": encoded("png"), "path": None}, {"bytes": BROKEN["cut.png"], "path": None}]
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    rows = {"image": images, "label": [0, 1]}
    name = save_parquet(tmp_path / "set", columns, train=rows, validation=rows)
    with pytest.raises(
        InputError, match=r"image 1 of the train split is not a readable image \(image file is truncated"
    ):
        load(dataset=name).train[1]


def test_a_broken_image_in_a_worker_is_an_input_error(folder):
    path = folder / "val" / "cat" / "cut.png"
    path.write_bytes(BROKEN["cut.png"])
    loader = DataLoader(load(data_dir=str(folder)).validation, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(InputError, match=r"cut\.png is not a readable image"):
        list(loader)


# Pixels that are kept


def count_decoding(monkeypatch):
    decoded, decode_once = [], decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda stored, *bits: decoded.append(stored["path"]) or decode_once(stored))
    return decoded


def test_a_second_epoch_decodes_nothing_and_has_the_same_bits(folder, monkeypatch):
    splits = load(data_dir=str(folder), augmentation="article")
    decoded = count_decoding(monkeypatch)
    first = [splits.train[Key(index, 0, True)] for index in range(6)]
    second = [splits.train[Key(index, 1, False)] for index in range(6)]
    assert len(decoded) == 6
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before["images"], after["images"])
        assert not torch.equal(before["affine"], after["affine"])
        assert (before["labels"] in (0, 1), after["labels"]) == (True, -100)


def test_more_than_the_limit_is_decoded_again(folder, monkeypatch):
    monkeypatch.setattr(images, "MAX_KEPT_BYTES", 12 * 3 * 16 * 16 - 1)
    splits = load(data_dir=str(folder))
    decoded = count_decoding(monkeypatch)
    assert torch.equal(splits.train[0]["images"], splits.train[0]["images"])
    assert len(decoded) == 2


def test_kept_pixels_are_not_sent_to_workers(folder):
    train = load(data_dir=str(folder)).train
    empty = len(pickle.dumps(train))
    for index in range(6):
        train[index]
    assert len(pickle.dumps(train)) == empty


# Sizes


def test_wide_tall_and_tiny_images_are_cropped_as_transformers_crops_them():
    processor = BitImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, resample=2, do_rescale=False
    )
    for size in ((40, 20), (20, 40), (33, 17), (17, 33), (1, 1), (5, 3), (3, 5), (16, 16), (100, 7), (640, 479)):
        expected = processor(picture(size=size), do_normalize=False)["pixel_values"][0].transpose(1, 2, 0)
        assert np.array_equal(np.asarray(resized(picture(size=size), 16)), expected), size


def test_the_middle_of_a_very_long_image_is_cropped():
    stripes = np.zeros((2, 200_000, 3), dtype=np.uint8)
    stripes[:, 99_990:100_010] = 255
    assert (np.asarray(resized(Image.fromarray(stripes), 32)) == 255).all()
    assert (np.asarray(resized(Image.fromarray(stripes.transpose(1, 0, 2)), 32)) == 255).all()


def test_the_size_is_that_of_the_kind_of_images(folder):
    assert load(image_size=None).train.image_size == 32
    assert load(data_dir=str(folder), image_size=None).train[0]["images"].shape == (3, 224, 224)


# Kinds of images


def with_orientation(image, orientation, path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)


def decoded(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return np.asarray(decode({"bytes": None, "path": str(path)}))


@pytest.mark.parametrize(
    ("mode", "name", "colour", "expected"),
    [
        ("L", "a.png", 90, (90, 90, 90)),
        ("1", "a.png", 1, (255, 255, 255)),
        ("LA", "a.png", (90, 10), (90, 90, 90)),
        ("RGBA", "a.png", (10, 20, 30, 200), (10, 20, 30)),
        ("CMYK", "a.tiff", (0, 255, 255, 0), (255, 0, 0)),
        ("I;16", "a.png", 90 * 256, (90, 90, 90)),
        ("I;16", "a.tiff", 90 * 256, (90, 90, 90)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, mode, name, colour, expected):
    Image.new(mode, (4, 3), colour).save(tmp_path / name)
    pixels = decoded(tmp_path / name)
    assert pixels.shape == (3, 4, 3)
    assert (pixels == expected).all()


def grey_images(folder, top, *, name="{}.png"):
    """Two classes that differ in brightness alone, with values up to ``top``."""
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("validation", 2)):
        for label, level in (("bright", 0.75), ("dark", 0.25)):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(count):
                values = random.uniform(level - 0.2, level + 0.2, (8, 8))
                values[0, 0] = level + 0.24
                Image.fromarray((values * top).astype(np.uint16)).save(place / name.format(number))
    return folder


@pytest.mark.parametrize("name", ["{}.png", "{}.tiff", "{}.jp2"])
@pytest.mark.parametrize(("top", "bits"), [(255, 8), (511, 9), (1023, 10), (4095, 12), (16383, 14), (65535, 16)])
def test_grey_values_of_fewer_bits_fill_the_range(tmp_path, top, bits, name):
    splits = load(data_dir=str(grey_images(tmp_path / "grey", top, name=name)), image_size=8)
    assert splits.grey_bits == bits
    assert any(f"{bits} bits, 0 to {top:,}" in line for line in splits.notices)
    for split in (splits.train, splits.validation):
        means = {"bright": [], "dark": []}
        for one in split:
            means[splits.label_names[one["labels"]]].append(one["images"].float().mean())
        assert sum(means["bright"]) / len(means["bright"]) == pytest.approx(0.75 * 255, rel=0.1)
        assert sum(means["dark"]) / len(means["dark"]) == pytest.approx(0.25 * 255, rel=0.2)


@pytest.mark.parametrize("brighter", ["train", "validation"])
def test_the_brightest_image_of_both_splits_says_how_many_bits(tmp_path, brighter):
    folder = grey_images(tmp_path / "dim", 1023)
    (folder / brighter).rename(tmp_path / "unused")
    (grey_images(tmp_path / "bright", 4095) / brighter).rename(folder / brighter)
    splits = load(data_dir=str(folder), image_size=8)
    assert splits.grey_bits == 12
    means = {
        split: sum(one["images"].float().mean() for one in rows) / len(rows)
        for split, rows in (("train", splits.train), ("validation", splits.validation))
    }
    assert means.pop(brighter) == pytest.approx(0.5 * 255, rel=0.1)
    assert means.popitem()[1] == pytest.approx(0.5 * 255 / 4, rel=0.1)


def test_a_model_keeps_the_bits_that_it_was_trained_with(tmp_path):
    """Brighter values become white."""
    flags = images.ImageDataArguments(
        data_dir=str(grey_images(tmp_path / "grey", 65535)), image_size=8, augmentation="none"
    )
    splits = images.load_images(flags, seed=0, grey_bits=12)
    assert splits.grey_bits == 12
    assert (splits.train[0]["images"] == 255).any()


def test_images_of_8_bits_have_no_such_line(folder):
    splits = load(data_dir=str(folder))
    assert splits.grey_bits is None
    assert not any("16-bit" in line for line in splits.notices)


@pytest.mark.parametrize("header", ["P5 2 2 {}\n", "P5 # of a scope\n2 2\n# the most\n{}\n", "P2 2 2 {}\n"])
@pytest.mark.parametrize("most", [1000, 4095, 65535])
def test_a_pgm_is_scaled_by_the_largest_value_that_it_states(tmp_path, most, header):
    values = np.array([[0, most // 2], [most, most // 4]], dtype=">u2")
    pixels = values.tobytes() if header.startswith("P5") else " ".join(map(str, values.ravel())).encode()
    (tmp_path / "a.pgm").write_bytes(header.format(most).encode() + pixels)
    assert np.abs(decoded(tmp_path / "a.pgm")[..., 0].astype(int) - np.array([[0, 127], [255, 63]])).max() <= 1


def test_palettes_with_and_without_transparency(tmp_path):
    palette = picture().quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    palette.save(tmp_path / "plain.png")
    palette.save(tmp_path / "clear.png", transparency=bytes([0, 128] + [255] * 14))
    assert np.array_equal(decoded(tmp_path / "plain.png"), expected)
    assert np.array_equal(decoded(tmp_path / "clear.png"), expected)


def test_a_turned_photograph_stands_upright(tmp_path):
    with_orientation(picture(size=(20, 14)), 6, tmp_path / "turned.png")
    upright = decoded(tmp_path / "turned.png")
    assert np.array_equal(upright, np.rot90(np.asarray(picture(size=(20, 14))), k=-1))


@pytest.mark.parametrize("side", [pytest.param(9_500, marks=pytest.mark.slow), 13_000])
def test_a_large_image_is_read_without_a_warning(tmp_path, side):
    Image.new("1", (side, side)).save(tmp_path / "large.png")
    program = "import sys; from memsave_recipes.data.vision.decoding import defect_of_header as look"
    program += "; print(look({'path': sys.argv[1], 'bytes': None}))"
    command = [sys.executable, "-c", program, str(tmp_path / "large.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("\n", "")
