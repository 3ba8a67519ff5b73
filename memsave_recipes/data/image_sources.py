"""Where labelled images come from: the digits of scikit-learn, a folder of class folders, or a data set of the Hub.

Each is read as splits with the columns ``image``, still encoded, and ``label``.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import numpy as np
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from memsave_recipes.data.text_sources import LOADING_ERRORS, progress_bars
from memsave_recipes.errors import InputError, is_text
from memsave_recipes.hub import loading_by_name, reason

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}

Splits = dict[str, datasets.Dataset]


def read_images(dataset: str | None, data_dir: str | None, *, skip_broken_images: bool = False) -> Splits:
    """``train`` and ``validation`` of one source, checked.

    Args:
        dataset: ``digits``, or what ``datasets.load_dataset`` takes.
        data_dir: a folder with ``train/CLASS/*`` and ``validation/CLASS/*``.
        skip_broken_images: leave out links that lead nowhere, which are counted by ``lost_links``.

    Raises:
        InputError: no source or two; a source, a split, a column or images missing; a link that leads nowhere; a file
            whose name cannot be read, or that names classes of its own; one class; unknown classes.
    """
    source = f"--dataset {dataset}" if dataset else f"--data_dir {data_dir}"
    if data_dir and not dataset and not skip_broken_images:
        _refuse_lost_links(data_dir)
    splits = {split: _image_and_label(rows, source) for split, rows in _read(dataset, data_dir).items()}
    check_labels(splits, source)
    return splits


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
        raise InputError(f"{source} has images without a class (label {_listed(unlabelled)}): leave them out")
    if len(known) < 2:
        raise InputError(f"{source} has training images of {len(known)} class(es): give at least 2 to tell apart")
    if not asked:
        raise InputError(f"{source} has no validation images: add some")
    if unknown := asked - known:
        listed = _listed(names[label] for label in unknown)
        raise InputError(
            f"{source} has validation images of classes that train has none of ({listed}): add or remove them"
        )


def _read(dataset: str | None, data_dir: str | None) -> Splits:
    if dataset and not data_dir:
        return _read_digits() if dataset == "digits" else _read_hub(dataset)
    if data_dir and not dataset:
        return _read_folder(_root(data_dir))
    raise InputError("give the images by exactly one of --dataset digits, --dataset HUB_ID and --data_dir DIR")


@progress_bars(False)
def _read_digits() -> Splits:
    """The same stratified 80/20 split always."""
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
        return datasets.load_dataset("imagefolder", data_files=patterns, drop_labels=False)
    except LOADING_ERRORS as error:
        raise InputError(f"--data_dir {root} cannot be read: {reason(error)}") from error


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
            found = f"(found: {_listed(available) or 'none'})"
            raise InputError(f"{source} has no {split} split {found}: one must be named {' or '.join(names)}")
        yield split, present[0]


def _image_and_label(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Only the columns ``image``, still encoded, and ``label``."""
    columns = {}
    for name, kind in (("image", datasets.Image), ("label", datasets.ClassLabel)):
        found = [column for column, feature in rows.features.items() if isinstance(feature, kind)]
        if not found:
            raise InputError(f"{source} has no {kind.__name__} column, only {_listed(rows.features)}: use another one")
        columns[found[0]] = name
    rows = rows.select_columns(list(columns)).rename_columns(columns)
    return rows.cast_column("image", datasets.Image(decode=False))


def _listed(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))
