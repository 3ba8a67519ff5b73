"""Folders of images: splits, classes and held-out images are found whatever the layout, and what is odd is named."""

import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from pictures import load, picture, refusal
from PIL import Image

from memsave_recipes.data import sources
from memsave_recipes.data.vision.images import ImageDataArguments, choose_held_out, count_classes


@pytest.fixture
def flat(tmp_path):
    """20 images of cats and 10 of dogs, in a folder each."""
    root = tmp_path / "flat"
    for name, count in (("cat", 20), ("dog", 10)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(number).save(root / name / f"{number}.png")
    return root


@contextmanager
def backwards(folder, scandir=os.scandir):
    """``os.scandir`` of a file system that lists in another order."""
    with scandir(folder) as entries:
        yield sorted(entries, key=lambda entry: entry.name, reverse=True)


def names_of(split):
    return [os.path.join(*image["path"].split(os.sep)[-2:]) for image in split.rows["image"]]


# Folders


def test_a_folder_of_class_folders(folder, capfd):
    splits = load(data_dir=str(folder), image_size=10)
    assert (len(splits.train), len(splits.validation)) == (6, 6)
    assert splits.label_names == ("cat", "dog")
    assert [int(splits.train[index]["labels"]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    expected = np.asarray(picture(11).resize((14, 10), Image.Resampling.BILINEAR).crop((2, 0, 12, 10)))
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


def test_linked_folders_are_followed(folder, tmp_path):
    (folder / "train" / "dog").rename(tmp_path / "elsewhere")
    (folder / "train" / "dog").symlink_to(tmp_path / "elsewhere")
    splits = load(data_dir=str(folder))
    assert splits.label_names == ("cat", "dog")
    assert len(splits.train) == 6


def test_a_class_may_be_missing_in_validation(folder):
    shutil.rmtree(folder / "val" / "dog")
    assert len(load(data_dir=str(folder)).validation) == 3
    (folder / "val" / "dog").mkdir()
    assert len(load(data_dir=str(folder)).validation) == 3


def test_what_is_no_image_of_a_class_is_not_read(flat):
    for name in (".old/metadata.jsonl", ".old/0.png", "metadata.jsonl", "cat/.#0.png"):
        (flat / name).parent.mkdir(exist_ok=True)
        (flat / name).symlink_to("nowhere") if "#" in name else (flat / name).write_text("{}")
    os.mkfifo(flat / "cat" / "pipe.png")
    (flat / "cat" / "Thumbs.db").write_bytes(b"no image")
    for name in ("@eaDir", "cat/@eaDir", "__MACOSX/cat"):
        (flat / name).mkdir(parents=True)
        picture().save(flat / name / "0.png")
    picture().save(flat / "beside the classes.png")
    assert sum(map(len, (load(data_dir=str(flat)).train, load(data_dir=str(flat)).validation))) == 30


def test_files_that_are_no_images_by_their_names_are_counted_and_named(flat):
    names = ("a.HEIC", "b.heif", "c.heic", "photo", "p.jpg_large", "p.jpg!d", "q.jpeg.download", "x.dng")
    for name in names:
        (flat / "dog" / name).write_bytes(b"")
    (flat / "only phones").mkdir()
    (flat / "only phones" / "a.heic").touch()
    (flat / "cat" / ".hidden").touch()
    (flat / "beside.heic").touch()
    expected = "1 without an ending, 1 .dng, 1 .download, 3 .heic, 1 .heif, 1 .jpg!d, 1 .jpg_large"
    assert f"note: 30 of 39 files read: {expected} left out" in load(data_dir=str(flat)).notices
    picture(99).save(flat / "cat" / "a.PNG", format="png")
    assert any(line.startswith("note: 31 of 40 files read: ") for line in load(data_dir=str(flat)).notices)


@pytest.mark.skipif(".avif" not in Image.registered_extensions(), reason="this Pillow does not read AVIF")
def test_avif_is_read(flat):
    picture(99, size=(64, 64)).save(flat / "cat" / "a.avif", quality=100)
    splits = load(data_dir=str(flat))
    assert len(splits.train) + len(splits.validation) == 31


# Images held out


@pytest.mark.parametrize("layout", ["flat", "train alone"])
def test_without_a_validation_split_a_tenth_of_each_class_is_held_out(flat, layout):
    if layout == "train alone":
        (flat.parent / "pets").mkdir()
        flat = flat.rename(flat.parent / "pets" / "train").parent
    splits = load(data_dir=str(flat))
    assert (len(splits.train), len(splits.validation)) == (27, 3)
    assert sorted(splits.validation.rows["label"][:]) == [0, 0, 1]
    assert not set(names_of(splits.train)) & set(names_of(splits.validation))
    assert splits.notices == (
        "27 training images, 3 held out; 2 classes: cat, dog",
        "note: without a validation split, a tenth of each class is held out by --seed 0",
    )


def test_only_the_seed_and_the_names_say_which_images_are_held_out(flat, monkeypatch):
    first = load(data_dir=str(flat))
    names = names_of(first.validation)
    assert names_of(load(data_dir=str(flat), seed=1).validation) != names
    monkeypatch.setattr(os, "scandir", backwards)
    moved = flat.rename(flat.with_name("moved"))
    again = load(data_dir=str(moved))
    assert names_of(again.validation) == names
    assert again.fingerprint.differences(first.fingerprint.record()) == []


def test_another_part_held_out_is_other_data(flat):
    first = load(data_dir=str(flat)).fingerprint.record()
    differences = load(data_dir=str(flat), seed=1).fingerprint.differences(first)
    assert [difference.partition(":")[0] for difference in differences] == ["training images", "held-out images"]


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_every_class_keeps_an_image_and_one_is_held_out(fraction, monkeypatch):
    monkeypatch.setattr(sources, "VALIDATION_FRACTION", fraction)
    random = np.random.default_rng(0)
    for seed in range(20):
        sizes = random.integers(1, 40, size=random.integers(2, 12))
        sizes[0] = max(2, sizes[0])
        labels = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        names = [f"{index}.png" for index in range(len(labels))]
        held_out = choose_held_out(labels, names, seed)
        assert len(set(held_out)) == len(held_out) == min(max(1, round(fraction * len(labels))), sum(sizes - 1))
        of_class = np.bincount(labels[held_out], minlength=len(sizes))
        assert (of_class < sizes).all()
        shuffled = random.permutation(len(labels))
        again = choose_held_out(labels[shuffled], [names[index] for index in shuffled], seed)
        assert sorted(shuffled[again]) == list(held_out)
        if fraction <= 0.5 and sizes.min() > 2:
            assert (abs(of_class - fraction * sizes) <= 1).all()


def test_small_classes_take_turns_whatever_their_names():
    labels = np.repeat(np.arange(100), 4)
    held_out = choose_held_out(labels, list(map(str, range(400))), seed=0)
    classes = labels[held_out]
    assert len(set(classes)) == 40
    assert min(classes) < 10
    assert max(classes) >= 90


def test_one_image_a_class_cannot_be_held_out(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        picture().save(tmp_path / "pets" / name / "0.png")
    assert "has no validation split, and one image a class, so none can be held out" in refusal(
        data_dir=str(tmp_path / "pets")
    )


# Classes


def test_no_more_than_twelve_classes_are_named(tmp_path):
    for number in range(100):
        (tmp_path / "pets" / f"class {number:02}").mkdir(parents=True)
        picture().save(tmp_path / "pets" / f"class {number:02}" / "a.png")
        picture().save(tmp_path / "pets" / f"class {number:02}" / "b.png")
    first = load(data_dir=str(tmp_path / "pets")).notices[0]
    named = ", ".join(f"class {number:02}" for number in range(12))
    assert first == f"180 training images, 20 held out; 100 classes: {named} and 88 more"


def nest(root):
    (root / "dog" / "old" / "older").mkdir(parents=True)
    picture(1).save(root / "dog" / "old" / "a.png")
    picture(2).save(root / "dog" / "old" / "older" / "b.png")
    (root / "dog" / "old" / ".thumbnails").mkdir()
    picture(3).save(root / "dog" / "old" / ".thumbnails" / "b.png")


def test_a_folder_inside_a_class_folder_is_refused(flat):
    nest(flat)
    assert f"--data_dir {flat}: dog/old is a folder inside a class folder" in refusal(data_dir=str(flat))


@pytest.mark.parametrize("layout", ["flat", "train alone", "both"])
def test_a_plan_counts_the_classes_that_a_run_finds(flat, tmp_path, layout):
    root = flat if layout == "flat" else tmp_path / "pets"
    for split in {"flat": (), "train alone": ("train",), "both": ("train", "val")}[layout]:
        shutil.copytree(flat, root / split)
    top = root if layout == "flat" else root / "train"
    (top / "nothing in it").mkdir()
    (top / ".hidden").mkdir()
    flags = {"data_dir": str(root)}
    assert count_classes(ImageDataArguments(**flags)) == len(load(**flags).label_names) == 2


def test_a_plan_refuses_the_folder_that_a_run_refuses(flat):
    nest(flat)
    with pytest.raises(ValueError, match="dog/old is a folder inside a class folder"):
        count_classes(ImageDataArguments(data_dir=str(flat)))


# Bad input


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_a_folder_without_a_training_split(folder, name):
    shutil.rmtree(folder / "train")
    if name != "val":
        (folder / "val").rename(folder / name)
    assert refusal(data_dir=str(folder)) == (
        f"--data_dir {folder} has no train split (found: {name}): one must be named train, or name no folder as a split"
    )


def test_an_empty_folder(tmp_path):
    assert "has no images in CLASS/: make a folder per class and fill it" in refusal(data_dir=str(tmp_path))


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


def test_links_that_lead_nowhere_alone_are_no_images(folder, tmp_path):
    for file in (folder / "train").rglob("*.png"):
        file.unlink()
        file.symlink_to(tmp_path / "gone.png")
    assert "train/cat/0.png and 5 more is a link that leads nowhere" in refusal(data_dir=str(folder))


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
