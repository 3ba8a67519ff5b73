"""Labelled images as samples: the digits of scikit-learn, a folder of class folders, or a data set of the Hub.

Each source is read as splits with the columns ``image``, still encoded, and ``label``. An image is decoded when its
sample is asked for, so that a broken one can be named, and given as uint8. Augmentation is only *drawn* here
(``augmentation.py``) and applied to the batch on the device.
"""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from memsave_recipes.data.augmentation import AUGMENTATIONS, Augmentation
from memsave_recipes.data.checksums import LIST, check_against_list, fingerprint_of_images
from memsave_recipes.data.text import LOADING_ERRORS, Splits, progress_bars
from memsave_recipes.errors import InputError, is_text, packages_of, require
from memsave_recipes.fingerprint import Fingerprint
from memsave_recipes.hub import loading_by_name, reason
from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.text import first_line, join_names

with packages_of("vision", "images"):
    from PIL import Image, UnidentifiedImageError

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}


@dataclass(kw_only=True)
class ImageDataArguments:
    """Which images, at which size, how augmented."""

    dataset: str | None = field(default=None, metadata={"help": "digits (the default, built in) or a Hub id"})
    data_dir: str | None = field(
        default=None, metadata={"help": "folder with train/ and validation/, a folder a class"}
    )
    image_size: int = field(default=32, metadata={"help": "images are scaled to this many pixels a side"})
    augmentation: Literal["digits", "article", "none"] | None = field(
        default=None, metadata={"help": "of the training images; default: digits for digits, else article"}
    )
    skip_broken_images: bool = field(default=False, metadata={"help": "leave out and count unreadable images"})

    def __post_init__(self) -> None:
        require(self.image_size >= 1, "--image_size", self.image_size, "at least 1")
        self.dataset = self.dataset or (None if self.data_dir else "digits")
        self.augmentation = self.augmentation or ("digits" if self.dataset == "digits" else "article")


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """One split, decoded sample by sample.

    A key is an ``int`` (a counted sample of epoch 0) or has ``index``, ``epoch`` and ``counted``. A sample suits
    torch's default collation: ``images`` uint8 (3, S, S), ``labels`` int64 () that is -100 where it is not
    counted, ``index``, and with an augmentation ``affine`` float32 (2, 3).

    Raises:
        InputError: an image cannot be decoded; the message holds its path.
    """

    rows: datasets.Dataset
    split: str
    image_size: int
    augmentation: Augmentation | None
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        index, epoch, counted = (key, 0, True) if isinstance(key, int) else (key.index, key.epoch, key.counted)
        row = self.rows[index]
        label = torch.tensor(row["label"] if counted else IGNORED_LABEL)
        sample = {"images": self._pixels(row["image"], index), "labels": label, "index": index}
        if self.augmentation is not None:
            sample["affine"] = self.augmentation.draw(
                seed=self.seed, epoch=epoch, index=index, image_size=self.image_size
            )
        return sample

    def _pixels(self, stored: dict[str, Any], index: int) -> torch.Tensor:
        try:
            image = _decode(stored)
        except Exception as error:
            name = (stored or {}).get("path") or f"image {index} of the {self.split} split"
            way_out = "replace it, delete it, or pass --skip_broken_images"
            raise InputError(f"{name} is not a readable image ({_reason(error)}): {way_out}") from error
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # (3, S, S)


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """Two splits over the same classes, how many images agree with ``SHA256SUMS``, and how many broken are left out.

    By the fingerprint a resumed run checks that they are the same.
    """

    train: ImageDataset
    validation: ImageDataset
    label_names: tuple[str, ...]
    num_listed: int
    num_broken: int
    fingerprint: Fingerprint

    @property
    def notice(self) -> str | None:
        """How many images agree with their list and how many were left out, in one line, where any did or were."""
        listed = [f"{self.num_listed} images are what {LIST} says"] if self.num_listed else []
        broken = [f"{self.num_broken} broken images are left out"] if self.num_broken else []
        return f"note: {'; '.join(listed + broken)}" if listed or broken else None


def load_images(flags: ImageDataArguments, *, seed: int) -> ImageSplits:
    """Load the labelled images that the flags name; only the training images are augmented.

    A folder has ``train/CLASS/*`` and ``validation/CLASS/*`` (or the first there is of valid, val, dev, test). The
    class of an image is the name of the folder that it lies in. With a ``SHA256SUMS`` of ``sha256sum`` in the folder,
    every image must match it. Every image is resized to a square, whatever its aspect ratio.

    With ``--skip_broken_images`` every image is decoded now, and those that fail are left out (``datasets`` caches the
    answer), as are links that lead nowhere.

    Args:
        seed: of the augmentation; how the digits are split does not depend on it.

    Raises:
        InputError: as ``read_images``; or an image that differs from the list.
    """
    dataset, data_dir, skip_broken_images = flags.dataset, flags.data_dir, flags.skip_broken_images
    splits = read_images(dataset, data_dir, skip_broken_images=skip_broken_images)
    listed = check_against_list(splits, data_dir) if data_dir else {}
    num_lost = len(lost_links(data_dir)) if data_dir and skip_broken_images else 0
    num_found = sum(map(len, splits.values())) + num_lost
    if skip_broken_images:
        splits = {
            name: rows.filter(_is_readable, input_columns="image", desc="checking images")
            for name, rows in splits.items()
        }
        check_labels(
            splits, f"{f'--dataset {dataset}' if dataset else f'--data_dir {data_dir}'} without its broken images"
        )
    train, validation = (
        ImageDataset(rows=splits[name], split=name, image_size=flags.image_size, augmentation=applied, seed=seed)
        for name, applied in (("train", AUGMENTATIONS[str(flags.augmentation)]), ("validation", None))
    )
    return ImageSplits(
        train=train,
        validation=validation,
        label_names=tuple(splits["train"].features["label"].names),
        num_listed=len(listed),
        num_broken=num_found - len(train) - len(validation),
        fingerprint=fingerprint_of_images(splits, data_dir, listed),
    )


def read_images(dataset: str | None, data_dir: str | None, *, skip_broken_images: bool = False) -> Splits:
    """``train`` and ``validation`` of one source, checked.

    Args:
        dataset: ``digits``, or a name for ``datasets.load_dataset``.
        data_dir: a folder with ``train/CLASS/*`` and ``validation/CLASS/*``.
        skip_broken_images: leave out links that lead nowhere, which are counted by ``lost_links``.

    Raises:
        InputError: no source or two; a source, a split, a column or images missing; a link that leads nowhere; a file
            whose name cannot be read, or that names classes of its own; one class; unknown classes.
    """
    source = f"--dataset {dataset}" if dataset else f"--data_dir {data_dir}"
    if data_dir and not dataset and not skip_broken_images:
        _refuse_lost_links(data_dir)
    splits = {split: _image_and_label(rows, source) for split, rows in _read_source(dataset, data_dir).items()}
    check_labels(splits, source)
    return splits


def count_classes(dataset: str | None, data_dir: str | None) -> int | None:
    """The classes of a source, without reading an image; ``None`` where only reading would tell.

    Raises:
        InputError: ``data_dir`` is no folder, or has no training split.
    """
    if data_dir:
        folders = dict(_splits_of(_root(data_dir)))
        return len(_folders(Path(data_dir, folders["train"])))
    return 10 if dataset == "digits" else None


def check_labels(splits: Splits, source: str) -> None:
    """Raises ``InputError`` where ``splits`` are nothing to learn from: a class missing, one alone, or unknown."""
    names = splits["train"].features["label"].names
    known, asked = (set(splits[split]["label"][:]) for split in ("train", "validation"))
    if unlabelled := (known | asked) - set(range(len(names))):
        raise InputError(f"{source} has images without a class (label {join_names(unlabelled)}): leave them out")
    if len(known) < 2:
        raise InputError(f"{source} has training images of {len(known)} class(es): give at least 2 to tell apart")
    if not asked:
        raise InputError(f"{source} has no validation images: add some")
    if unknown := asked - known:
        listed = join_names(names[label] for label in unknown)
        raise InputError(
            f"{source} has validation images of classes that train has none of ({listed}): add or remove them"
        )


def lost_links(data_dir: str) -> list[str]:
    """The links to files or folders that are not there, by their paths below ``data_dir``."""
    root = _root(data_dir)
    return [
        os.path.relpath(path, root)
        for _, name in _splits_of(root)
        for path in _paths_below(root / name)
        if os.path.islink(path) and not os.path.exists(path)
    ]


def _refuse_lost_links(data_dir: str) -> None:
    if lost := lost_links(data_dir):
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(
            f"--data_dir {data_dir}: {min(lost)}{others} is a link that leads nowhere: mount its disk, delete it, "
            "or pass --skip_broken_images"
        )


def _read_source(dataset: str | None, data_dir: str | None) -> Splits:
    if dataset and not data_dir:
        return _read_digits() if dataset == "digits" else _read_hub(dataset)
    if data_dir and not dataset:
        return _read_folder(_root(data_dir))
    raise InputError("give the images by exactly one of --dataset digits, --dataset HUB_ID and --data_dir DIR")


@progress_bars(False)
def _read_digits() -> Splits:
    """The same stratified 80/20 split always."""
    with packages_of("vision", "the digits"):
        from sklearn.datasets import load_digits  # takes a second to import, and only this source needs it

    digits = load_digits()
    greys = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    classes = datasets.ClassLabel(names=[str(name) for name in digits.target_names])
    rows = datasets.Dataset.from_dict(
        {"image": list(greys), "label": digits.target.tolist()},
        features=datasets.Features({"image": datasets.Image(), "label": classes}),
    ).train_test_split(test_size=0.2, stratify_by_column="label", seed=0)
    return {"train": rows["train"], "validation": rows["test"]}


@progress_bars(False)
def _read_folder(root: Path) -> Splits:
    patterns = {}
    for split, name in _splits_of(root):
        _check_names(root, name)
        classes = _folders(root / name)
        if not any(file.suffix.lower() in ImageFolder.EXTENSIONS for path in classes for file in path.rglob("*")):
            raise InputError(f"--data_dir {root} has no images in {name}/CLASS/: make a folder per class and fill it")
        # One pattern per class, because ``**`` follows a link only where it starts.
        patterns[split] = [f"{glob.escape(str(path))}/**" for path in classes]
    try:
        splits: Splits = datasets.load_dataset("imagefolder", data_files=patterns, drop_labels=False)
    except LOADING_ERRORS as error:
        raise InputError(f"--data_dir {root} cannot be read: {reason(error)}") from error
    return splits


def _check_names(root: Path, split: str) -> None:
    """Refuse names that ``datasets`` cannot read, and files that it would read as a table of the images."""
    for path in _paths_below(root / split):
        name = os.path.relpath(path, root)
        if not is_text(name):
            raise InputError(f"--data_dir {root}: the name {name!r} is not UTF-8 text: rename it")
        if os.path.basename(name) in ImageFolder.METADATA_FILENAMES:
            raise InputError(
                f"--data_dir {root}: {name} describes images in a way of its own, and their class is the name of their "
                f"folder: move it out of {split}/"
            )


def _paths_below(split: Path) -> Iterator[str]:
    """Of all classes, and of all files, folders and links in them, but those that are hidden."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}; check folder and disk") from error

    for path in sorted(split.iterdir()):
        if path.name.startswith(".") or not (path.is_dir() or path.is_symlink()):
            continue
        yield str(path)
        for parent, folders, files in os.walk(path, onerror=refuse) if path.is_dir() else ():
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (os.path.join(parent, name) for name in (*folders, *files) if not name.startswith("."))


def _splits_of(root: Path) -> Iterator[tuple[str, str]]:
    return _choose_splits([path.name for path in _folders(root)], f"--data_dir {root}")


def _root(data_dir: str) -> Path:
    root = Path(data_dir)
    if not os.path.isdir(root):  # unlike pathlib, without an error for what can be no path
        raise InputError(f"--data_dir {root} is not a directory: name one that holds train/ and validation/")
    return root


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read_hub(dataset: str) -> Splits:
    with loading_by_name(dataset, f"--dataset {dataset}", "use --dataset digits or --data_dir DIR"):
        splits = datasets.load_dataset(dataset)
    return {split: splits[name] for split, name in _choose_splits(list(splits), f"--dataset {dataset}")}


def _choose_splits(available: list[str], source: str) -> Iterator[tuple[str, str]]:
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in available]
        if not present:
            found = f"(found: {join_names(available)})"
            raise InputError(f"{source} has no {split} split {found}: one must be named {' or '.join(names)}")
        yield split, present[0]


def _image_and_label(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Only the columns ``image``, still encoded, and ``label``."""
    columns = {}
    for name, kind in (("image", datasets.Image), ("label", datasets.ClassLabel)):
        found = [column for column, feature in rows.features.items() if isinstance(feature, kind)]
        if not found:
            raise InputError(
                f"{source} has no {kind.__name__} column, only {join_names(rows.features)}: use another one"
            )
        columns[found[0]] = name
    rows = rows.select_columns(list(columns)).rename_columns(columns)
    return rows.cast_column("image", datasets.Image(decode=False))


def _is_readable(stored: dict[str, Any]) -> bool:
    try:
        _decode(stored)
    except Exception:
        return False
    return True


def _decode(stored: dict[str, Any]) -> Image.Image:
    """Upright and RGB. Pillow's plugins raise nearly any exception, so all of them mean a broken image."""
    image: Image.Image = datasets.Image().decode_example(stored)
    if image.mode.startswith("I;16"):  # Pillow would turn every value above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no agreed range")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow warns
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no image format that Pillow knows"  # its own words hold a memory address
    return first_line(error)
