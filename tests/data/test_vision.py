"""Every source gives the same samples, every kind of image becomes RGB, every bad input is one line that names it."""

import os
import pickle
import shutil
import warnings
from io import BytesIO
from typing import NamedTuple

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from PIL import Image
from torch.utils.data import DataLoader

from memsave_recipes.data import images as images_module
from memsave_recipes.data.augmentation import AUGMENTATIONS
from memsave_recipes.data.images import ImageDataArguments, load_images
from memsave_recipes.errors import InputError

ARTICLE = AUGMENTATIONS["article"]


class Key(NamedTuple):
    index: int
    epoch: int
    counted: bool


@pytest.fixture(autouse=True)
def offline_with_an_own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def load(**changes):
    options = {"image_size": 16, "augmentation": "none", **changes}
    seed = options.pop("seed", 0)
    return load_images(ImageDataArguments(**options), seed=seed)


def picture(seed=0, size=(20, 14)):
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """train/{cat,dog} and val/{cat,dog} of three PNGs each."""
    root = tmp_path / "pets"
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(3):
                picture(10 * label + number).save(root / split / name / f"{number}.png")
    return root


def refusal(**options):
    with pytest.raises(InputError) as caught:
        load(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The digits


def test_digits_are_scikit_learns_split_in_the_same_way_whatever_the_seed(capfd):
    first, second = load(dataset="digits", image_size=8), load(dataset="digits", image_size=8, seed=7)
    assert (len(first.train), len(first.validation), first.num_broken) == (1437, 360, 0)
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


# Folders


def test_a_folder_of_class_folders(folder, capfd):
    splits = load(data_dir=str(folder), image_size=10)
    assert (len(splits.train), len(splits.validation)) == (6, 6)
    assert splits.label_names == ("cat", "dog")
    assert [int(splits.train[index]["labels"]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    expected = np.asarray(picture(11).resize((10, 10), Image.Resampling.BILINEAR))
    assert np.array_equal(splits.train[4]["images"].permute(1, 2, 0).numpy(), expected)
    assert "".join(capfd.readouterr()) == ""


def test_the_first_of_the_validation_names_is_taken(folder):
    shutil.copytree(folder / "val", folder / "test")
    (folder / "val" / "cat" / "0.png").unlink()
    assert len(load(data_dir=str(folder)).validation) == 5
    shutil.rmtree(folder / "val")
    assert len(load(data_dir=str(folder)).validation) == 6


def test_names_that_mean_something_to_a_glob_or_to_datasets(folder, tmp_path):
    root = tmp_path / "[a] test*"
    folder.rename(root)
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "test")
    splits = load(data_dir=str(root))
    assert splits.label_names == ("dog", "test")
    assert (len(splits.train), len(splits.validation)) == (6, 6)


def test_linked_folders_are_followed_and_hidden_ones_are_not(folder, tmp_path):
    (folder / "train" / "dog").rename(tmp_path / "elsewhere")
    (folder / "train" / "dog").symlink_to(tmp_path / "elsewhere")
    (folder / "train" / ".thumbnails").mkdir()
    picture().save(folder / "train" / ".thumbnails" / "0.png")
    splits = load(data_dir=str(folder))
    assert splits.label_names == ("cat", "dog")
    assert len(splits.train) == 6


def test_a_class_may_be_missing_in_validation(folder):
    shutil.rmtree(folder / "val" / "dog")
    assert len(load(data_dir=str(folder)).validation) == 3
    (folder / "val" / "dog").mkdir()
    assert len(load(data_dir=str(folder)).validation) == 3


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


def test_a_missing_split(tmp_path):
    name = save_parquet(tmp_path / "a", COLUMNS, train=rows_of([0, 1]))
    assert "has no validation split (found: train)" in refusal(dataset=name)
    name = save_parquet(tmp_path / "b", COLUMNS, test=rows_of([0, 1]))
    assert "has no train split (found: test)" in refusal(dataset=name)


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


def test_rows_without_a_class(tmp_path):
    name = save_parquet(tmp_path / "set", COLUMNS, train=rows_of([0, 1]), test=rows_of([0, -1]))
    assert "images without a class (label -1)" in refusal(dataset=name)


def test_a_hub_id_while_offline():
    message = refusal(dataset="cifar10")
    assert message.startswith("--dataset cifar10 cannot be loaded: it is not in the cache, and HF_HUB_OFFLINE is set; ")
    assert message.endswith("use --dataset digits or --data_dir DIR")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the Hub\nat all"),
        DatasetNotFoundError("doesn't exist on the Hub or cannot be accessed"),
        huggingface_hub.errors.OfflineModeIsEnabled("offline"),
        ValueError("Config name is missing.\nPlease pick one"),
        RuntimeError("Dataset scripts are no longer supported"),
        FileNotFoundError(),
    ],
)
def test_whatever_loading_raises_is_one_line(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert "--dataset a/b cannot be loaded" in refusal(dataset="a/b")


# Bad input


def test_one_source_at_most(folder):
    message = refusal(dataset="digits", data_dir=str(folder))
    assert "exactly one of --dataset digits, --dataset HUB_ID and --data_dir DIR" in message


def test_a_folder_that_is_not_there(tmp_path):
    assert f"--data_dir {tmp_path / 'no'} is not a directory" in refusal(data_dir=str(tmp_path / "no"))


@pytest.mark.parametrize(("removed", "split"), [("train", "train"), ("val", "validation")])
def test_a_folder_without_a_split(folder, removed, split):
    shutil.rmtree(folder / removed)
    assert f"--data_dir {folder} has no {split} split" in refusal(data_dir=str(folder))


def test_an_empty_folder(tmp_path):
    assert "has no train split (found: none)" in refusal(data_dir=str(tmp_path))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_folder_without_images(folder, split):
    for file in (folder / split).rglob("*.png"):
        file.rename(file.with_suffix(".txt"))
    assert f"--data_dir {folder} has no images in {split}/CLASS/" in refusal(data_dir=str(folder))


def test_a_folder_with_images_beside_the_class_folders_only(folder):
    shutil.rmtree(folder / "train")
    (folder / "train").mkdir()
    picture().save(folder / "train" / "0.png")
    assert "has no images in train/CLASS/" in refusal(data_dir=str(folder))


def test_one_class(folder):
    shutil.rmtree(folder / "train" / "dog")
    shutil.rmtree(folder / "val" / "dog")
    assert f"--data_dir {folder} has training images of 1 class(es): give at least 2" in refusal(data_dir=str(folder))


def test_a_class_that_training_lacks(folder):
    (folder / "val" / "dog").rename(folder / "val" / "wolf")
    assert "classes that train has none of (wolf)" in refusal(data_dir=str(folder))


@pytest.mark.parametrize("name", ["train/dog/9.png", "train/dog/more", "train/wolf", "val/cat/9.png"])
def test_a_link_that_leads_nowhere(folder, tmp_path, name):
    (folder / name).symlink_to(tmp_path / "a disk that is not mounted" / "9.png")
    assert f"--data_dir {folder}: {name} is a link that leads nowhere" in refusal(data_dir=str(folder))
    splits = load(data_dir=str(folder), skip_broken_images=True)
    assert splits.num_broken == 1
    assert len(splits.train) == 6


@pytest.mark.parametrize("name", [b"train/dog/caf\xe9.png", b"train/caf\xe9/0.png", b"val/cat/\xff.png"])
def test_a_name_that_is_no_text(folder, name):
    path = os.path.join(os.fsencode(folder), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        picture().save(file, "png")
    assert "is not UTF-8 text: rename it" in refusal(data_dir=str(folder))


def test_a_table_in_a_class_folder(folder):
    (folder / "train" / "dog" / "metadata.jsonl").write_text('{"file_name": "0.png", "label": 7}\n')
    assert "train/dog/metadata.jsonl describes images in a way of its own" in refusal(data_dir=str(folder))


def test_what_is_hidden_or_beside_the_classes_is_not_read(folder):
    (folder / "train" / ".old").mkdir()
    for name in (".old/metadata.jsonl", "metadata.jsonl", "dog/.#0.png"):
        (folder / "train" / name).symlink_to("nowhere") if "#" in name else (folder / "train" / name).write_text("{}")
    assert len(load(data_dir=str(folder)).train) == 6


# Broken images


def encoded(extension):
    buffer = BytesIO()
    picture(size=(64, 64)).save(buffer, extension)
    return buffer.getvalue()


BROKEN = {
    "cut.png": encoded("png")[:4000],
    "cut.jpg": encoded("jpeg")[:1500],
    "header.png": encoded("png")[:20],
    "text.jpg": b"not an image",
    "empty.png": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_when_it_is_reached(folder, name):
    path = folder / "train" / "dog" / name
    path.write_bytes(BROKEN[name])
    train = load(data_dir=str(folder)).train
    broken = [index for index in range(len(train)) if train.rows[index]["image"]["path"] == str(path)]
    with pytest.raises(InputError) as caught:
        train[broken[0]]
    message = str(caught.value)
    assert message.startswith(f"{path} is not a readable image (")
    assert message.endswith("): replace it, delete it, or pass --skip_broken_images")
    assert "\n" not in message
    assert " at 0x" not in message


def test_broken_images_are_left_out_and_counted(folder):
    for number, (name, content) in enumerate(BROKEN.items()):
        (folder / ("train", "val")[number % 2] / "dog" / name).write_bytes(content)
    splits = load(data_dir=str(folder), skip_broken_images=True)
    assert splits.num_broken == len(BROKEN)
    assert (len(splits.train), len(splits.validation)) == (6, 6)
    assert [splits.train[index]["index"] for index in range(6)] == list(range(6))


def test_the_check_is_remembered_until_a_file_changes(folder, monkeypatch):
    path = folder / "train" / "dog" / "cut.png"
    path.write_bytes(BROKEN["cut.png"])
    assert load(data_dir=str(folder), skip_broken_images=True).num_broken == 1
    with monkeypatch.context() as patch:
        patch.setattr(datasets.Image, "decode_example", lambda self, stored: pytest.fail("decoded again"))
        assert load(data_dir=str(folder), skip_broken_images=True).num_broken == 1
    picture().save(path)
    assert load(data_dir=str(folder), skip_broken_images=True).num_broken == 0


def test_a_class_whose_images_are_all_broken(folder):
    for file in (folder / "train" / "dog").iterdir():
        file.write_bytes(b"")
    assert "without its broken images has training images of 1 class(es)" in refusal(
        data_dir=str(folder), skip_broken_images=True
    )


def test_a_broken_image_without_a_path_is_named_by_its_place(tmp_path):
    images = [{"bytes": encoded("png"), "path": None}, {"bytes": b"broken", "path": None}]
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    rows = {"image": images, "label": [0, 1]}
    name = save_parquet(tmp_path / "set", columns, train=rows, validation=rows)
    with pytest.raises(InputError, match=r"image 1 of the train split is not a readable image \(no image format"):
        load(dataset=name).train[1]


def test_a_broken_image_in_a_worker_is_an_input_error(folder):
    path = folder / "val" / "cat" / "cut.png"
    path.write_bytes(BROKEN["cut.png"])
    loader = DataLoader(load(data_dir=str(folder)).validation, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(InputError, match=r"cut\.png is not a readable image"):
        list(loader)


# Kinds of images


def with_orientation(image, orientation, path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)


def decoded(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return np.asarray(images_module._decode({"bytes": None, "path": str(path)}))


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


def test_pixels_without_an_agreed_range_are_refused(tmp_path):
    Image.new("F", (4, 3), 0.5).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="32-bit pixels"):
        decoded(tmp_path / "a.tiff")
