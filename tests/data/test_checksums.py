"""A folder of images is what its ``SHA256SUMS`` says, or the file that is not is named before anything trains."""

import hashlib
import subprocess
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import line_of

from memsave_recipes.data.vision import decoding
from memsave_recipes.data.vision.images import ImageDataArguments, load_images

MAKE_LIST = "find -L train validation -type f -exec sha256sum {} + > SHA256SUMS"  # as in docs/failures.md


def load(folder, **options):
    return load_images(ImageDataArguments(data_dir=str(folder), image_size=8, augmentation="none", **options), seed=0)


def make_list(folder):
    subprocess.run(MAKE_LIST, shell=True, cwd=folder, check=True)


def refusal(folder, **options):
    return line_of(load, folder, **options)


@pytest.fixture
def folder(tmp_path):
    """{train,validation}/{cat,dog} of a PNG and a JPEG each, and their list."""
    root = tmp_path / "pets"
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for ending in ("png", "jpg"):
                Image.fromarray(pixels).save(root / split / name / f"0.{ending}")
    make_list(root)
    return root


def test_a_whole_folder_is_loaded_and_says_so(folder):
    splits = load(folder)
    assert splits.num_listed == 8
    assert splits.notices[1:] == ("note: 8 images are what SHA256SUMS says",)
    (folder / "SHA256SUMS").unlink()
    assert (load(folder).num_listed, load(folder).notices[1:]) == (0, ())


def flip_a_bit(content):
    middle = 3 * len(content) // 4
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def zero_the_tail(content):
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


DAMAGES = {"a flipped bit": flip_a_bit, "a zeroed tail": zero_the_tail, "half of it": lambda content: content[:99]}


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_whether_or_not_it_decodes(folder, ending, damage):
    path = folder / "train" / "dog" / f"0.{ending}"
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    if ending == "jpg" and damage != "half of it":
        other_pixels = np.asarray(Image.open(path)) != np.asarray(Image.open(BytesIO(whole)))
        assert other_pixels.any()  # without an error
    line = refusal(folder)
    assert line.startswith(f"--data_dir {folder}: other bytes than SHA256SUMS says: train/dog/0.{ending}; restore")
    assert refusal(folder, skip_broken_images=True) == line


def test_several_are_counted(folder):
    for path in (folder / "validation").rglob("0.*"):
        path.write_bytes(b"x")
    assert "SHA256SUMS says: validation/cat/0.jpg and 3 more; restore" in refusal(folder)


def test_a_file_that_is_lost_or_new(folder):
    (folder / "train" / "cat" / "0.png").rename(folder / "train" / "cat" / "1.png")
    assert ": not in SHA256SUMS: train/cat/1.png; delete, or add with sha256sum" in refusal(folder)
    (folder / "train" / "cat" / "1.png").unlink()
    assert ": in SHA256SUMS, but not there: train/cat/0.png; restore, or take out" in refusal(folder)


def test_a_flat_folder(folder):
    flat = folder / "train"
    subprocess.run("find -L . -mindepth 2 -type f -exec sha256sum {} + > SHA256SUMS", shell=True, cwd=flat, check=True)
    for name in ("cat", "dog"):
        (flat / name / "0.jpg").rename(flat / name / "1.jpg")
    assert ": not in SHA256SUMS: cat/1.jpg and 1 more; delete" in refusal(flat)
    for name in ("cat", "dog"):
        (flat / name / "1.jpg").rename(flat / name / "0.jpg")
    splits = load(flat)
    assert (splits.num_listed, len(splits.train), len(splits.validation)) == (4, 3, 1)
    (flat / "wolf").mkdir()
    with (flat / "SHA256SUMS").open("a") as listed:
        listed.write(f"{'0' * 64}  wolf/0.png\n")
    assert ": in SHA256SUMS, but not there: wolf/0.png; restore, or take out" in refusal(flat)


def test_what_is_listed_and_not_read_does_not_matter(folder):
    (folder / "train" / "cat" / "about.txt").write_text("cats")
    (folder / "test").mkdir()
    with (folder / "SHA256SUMS").open("a") as listed:
        listed.write(f"# both are no images\n\n{'0' * 64}  train/cat/about.txt\n{'1' * 64}  test/gone.png\n")
    assert load(folder).num_listed == 8


@pytest.mark.parametrize("start", ["", "./", "{folder}/"])
@pytest.mark.parametrize("between", ["  ", " *"])
def test_every_way_in_which_sha256sum_writes(folder, start, between):
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest().upper()}{between}"
        f"{start.format(folder=folder)}{path.relative_to(folder)}\n"
        for path in folder.rglob("0.*")
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    assert load(folder).num_listed == 8


@pytest.mark.parametrize("line", ["train/cat/0.png", f"{'a' * 63}  train/cat/0.png", "a\x00", "SHA256 (0.png) = 00"])
def test_a_list_that_is_none(folder, line):
    with (folder / "SHA256SUMS").open("a") as listed:
        listed.write(line)
    path = folder / "SHA256SUMS"
    assert refusal(folder) == f"{path} line 9 is no SHA-256 and a name: make the list with sha256sum"


def test_linked_folders_and_relative_names(folder, tmp_path, monkeypatch):
    (folder / "train" / "dog").rename(tmp_path / "elsewhere")
    (folder / "train" / "dog").symlink_to(tmp_path / "elsewhere")
    make_list(folder)
    monkeypatch.chdir(tmp_path)
    assert load(Path("pets")).num_listed == 8
    (tmp_path / "link").symlink_to(folder)
    assert load(tmp_path / "link").num_listed == 8


def test_the_digests_are_remembered_until_a_file_changes(folder, monkeypatch):
    load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "sha256_of_file", lambda *_: pytest.fail("hashed again"))
        assert load(folder).num_listed == 8
    path = folder / "train" / "cat" / "0.jpg"
    path.write_bytes(flip_a_bit(path.read_bytes()))
    assert "train/cat/0.jpg" in refusal(folder)
    make_list(folder)
    assert load(folder).num_listed == 8


def test_a_file_that_cannot_be_read(folder, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(decoding, "sha256_of_file", forbidden)
    assert refusal(folder).endswith("cannot be read: Permission denied; check file and disk")


def test_a_list_tells_other_pixels_of_the_same_name_and_size(folder):
    before = load(folder).fingerprint.record()
    path = folder / "train" / "dog" / "0.png"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    make_list(folder)
    words = "training images: the first that differs is train/dog/0.png"
    assert load(folder).fingerprint.differences(before) == [words]
    (folder / "SHA256SUMS").unlink()
    assert load(folder).fingerprint.differences(before) == []
    assert load(folder).fingerprint.other_times(before) == [words]
