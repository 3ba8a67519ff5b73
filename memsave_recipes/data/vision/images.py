"""Labelled images as samples: the digits of scikit-learn, a folder of class folders, or a data set of the Hub.

Each source is read as splits with the columns ``image``, still encoded, and ``label``, a class or a list of them;
``decoding.py`` makes samples of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from memsave_recipes.core.errors import InputError, packages_of, require
from memsave_recipes.core.text import first_of, join_names, printable
from memsave_recipes.data import in_classes_of_model
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.data.sources import (
    Splits,
    choose_held_out,
    choose_splits,
    hold_out,
    progress_bars,
)
from memsave_recipes.data.vision.augmentation import AUGMENTATIONS, CROP, MIXES, TRANSFORMS, Augmentation
from memsave_recipes.data.vision.decoding import (
    MAX_GREY_BITS,
    MAX_KEPT_BYTES,
    ImageDataset,
    bits_of_grey,
    check_headers,
    class_names,
    fingerprint_of_images,
    names_below,
)
from memsave_recipes.data.vision.image_folder import find_images, read_folder
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name
from memsave_recipes.models.labels import MULTI, SINGLE, ProblemType

DIGITS_SIZE, PHOTOGRAPH_SIZE = 32, 224
MAX_CLASSES_NAMED = 12
LISTS = ("label", "labels", "class", "classes", "category", "categories", "tags")
"""Names of a column of lists of words that are classes."""


@dataclass(kw_only=True)
class ImageDataArguments:
    """The images, their size and augmentation."""

    dataset: str | None = option(None, "digits (the default, built in) or a Hub id")
    data_dir: str | None = option(
        None,
        "folder with one folder per class, or train/ and validation/ with these",
        shown="first",
        resume="place",
    )
    image_size: int = option(
        None,
        "size of the images in pixels (square); default: the size of --model_name_or_path, else 32 for "
        "digits and 224 for others",
    )
    augmentation: str = option(
        None,
        f"of the training images: {join_names(AUGMENTATIONS)}, or some of {join_names(TRANSFORMS)}; "
        "default: digits for digits, else article",
        nargs="+",
    )

    def __post_init__(self) -> None:
        if self.dataset and self.data_dir:
            raise InputError("give the images by exactly one of --dataset digits, --dataset HUB_ID and --data_dir DIR")
        self.dataset = self.dataset or (None if self.data_dir else "digits")
        is_digits = self.dataset == "digits"
        self.has_default_size = self.image_size is None  # a pretrained network may have another
        if self.image_size is None:
            self.image_size = DIGITS_SIZE if is_digits else PHOTOGRAPH_SIZE
        require(self.image_size >= 1, "--image_size", self.image_size, "at least 1")
        given = self.augmentation or ("digits" if is_digits else "article")
        given = given if isinstance(given, str) else " ".join(given)  # the parser gives a list
        words = set(given.split())
        is_known = words <= set(TRANSFORMS) or (len(words) == 1 and words <= AUGMENTATIONS.keys())
        rule = f"one of {join_names(AUGMENTATIONS)}, or some of {join_names(TRANSFORMS)}"
        require(is_known, "--augmentation", given, rule)
        self.augmentation = " ".join(name for name in (*AUGMENTATIONS, *TRANSFORMS) if name in words)
        if self.mixes and vars(self).get("class_weights") is not None:
            raise InputError(
                f"--class_weights is for whole labels, and --augmentation {self.augmentation} mixes them: leave one out"
            )

    @property
    def affine(self) -> Augmentation | None:
        """The maps that images move by on the device."""
        return AUGMENTATIONS.get(self.augmentation)

    @property
    def transforms(self) -> tuple[str, ...]:
        """Names of ``TRANSFORMS``, in their order."""
        return tuple(name for name in self.augmentation.split() if name in TRANSFORMS)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that their labels are shares of the classes."""
        return not MIXES.keys().isdisjoint(self.transforms)

    @property
    def source(self) -> str:
        """The flag that names the images, and its value."""
        return f"--data_dir {self.data_dir}" if self.data_dir else f"--dataset {self.dataset}"


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """Two splits over the same classes.

    Args:
        grey_bits: of the values in grey images of 16 bits; ``None`` where there are none.
        held_out_by: the flag by which a part is held out; ``None`` where the source has a validation split.
        left_out: lines on files that are no images by their names.
    """

    train: ImageDataset
    validation: ImageDataset
    label_names: tuple[str, ...]
    grey_bits: int | None
    held_out_by: str | None
    left_out: Sequence[str]
    fingerprint: Fingerprint

    @property
    def problem_type(self) -> ProblemType:
        """What labels are: a class, or a list of them."""
        return MULTI if isinstance(self.train.rows.features["label"], datasets.List) else SINGLE

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines to print before training: the size of the splits, the classes, the images that are left out."""
        sizes = f"{len(self.train):,} training images, {len(self.validation):,} held out"
        classes = f"{len(self.label_names):,} classes: {first_of(self.label_names, MAX_CLASSES_NAMED)}"
        if self.problem_type == MULTI:
            classes += f"; any number of them an image: {MULTI}"
        lines = [f"{sizes}; {classes}"]
        if self.held_out_by:
            lines.append(f"note: without a validation split, a tenth of each class is held out by {self.held_out_by}")
        lines += [f"note: {line}" for line in self.left_out]
        if self.grey_bits is not None:
            most = 2**self.grey_bits - 1
            lines.append(f"note: the values of 16-bit grey images are taken for {self.grey_bits} bits, 0 to {most:,}")
        return tuple(map(printable, lines))


def load_images(
    flags: ImageDataArguments,
    *,
    seed: int,
    model_labels: Sequence[str] | None = None,
    grey_bits: int | None = None,
) -> ImageSplits:
    """Load the labelled images that the flags name; only the training images are augmented.

    Before anything trains, the header of every image is checked.

    Args:
        seed: of the augmentation, and of the images that are held out; the digits are always split alike.
        model_labels: the classes of the model that is evaluated, by which the images are labelled then.
        grey_bits: with which the model was trained; by default those of the largest value.

    Raises:
        InputError: as ``read_images``; an image is broken; there are too few to hold out.
    """
    splits, left_out = read_images(flags)
    if model_labels is not None:
        splits = {split: _labelled_as(rows, model_labels, flags.source) for split, rows in splits.items()}
    if flags.dataset != "digits" and (grey := check_headers(splits, flags.source, flags.data_dir)):
        grey_bits = grey_bits or bits_of_grey(grey, flags.source)
    held_out_by = None
    if "validation" not in splits:
        held_out_by = f"--seed {seed}"
        splits = _hold_out(splits["train"], flags, seed)
    num_bytes = sum(map(len, splits.values())) * 3 * flags.image_size**2
    train, validation = (
        ImageDataset(
            rows=splits[name],
            split=name,
            image_size=flags.image_size,
            augmentation=applied,
            seed=seed,
            transforms=transforms,
            keeps_pixels=num_bytes <= MAX_KEPT_BYTES and CROP not in transforms,
            grey_bits=grey_bits or MAX_GREY_BITS,
        )
        for name, applied, transforms in (
            ("train", flags.affine, flags.transforms),
            ("validation", None, ()),
        )
    )
    return ImageSplits(
        train=train,
        validation=validation,
        label_names=tuple(class_names(splits["train"])),
        grey_bits=grey_bits,
        held_out_by=held_out_by,
        left_out=left_out,
        fingerprint=fingerprint_of_images(splits, flags.data_dir),
    )


def read_images(flags: ImageDataArguments) -> tuple[Splits, list[str]]:
    """Read ``train`` and, where the source has one, ``validation``.

    Also returns lines on files that are left out.

    Raises:
        InputError: as ``find_images``; a source, a split, a column or images missing; one class; or unknown classes.
    """
    left_out: list[str] = []
    if flags.data_dir:
        files = find_images(flags.data_dir)
        splits, left_out = read_folder(files, flags.source), files.notes
    elif flags.dataset == "digits":
        splits = read_digits()
    else:
        splits = _read_hub(str(flags.dataset))
    splits = {split: _image_and_label(rows, flags.source) for split, rows in splits.items()}
    if isinstance(splits["train"].features["label"], datasets.List):
        splits = _with_classes_of_words(splits, flags.source)
    check_labels(splits, flags.source)
    return splits, left_out


def count_classes(flags: ImageDataArguments) -> int | None:
    """Count the classes of a source, without reading an image; ``None`` where only reading would tell."""
    if flags.data_dir:
        return len(find_images(flags.data_dir).label_names)
    return 10 if flags.dataset == "digits" else None


def check_labels(splits: Splits, source: str) -> None:
    """Raise ``InputError`` where ``splits`` are nothing to learn from: a class missing, one alone, or unknown."""
    names = class_names(splits["train"])
    known, *others = (set(_all_classes(rows)) for rows in splits.values())
    if unlabelled := known.union(*others) - set(range(len(names))):
        raise InputError(f"{source} has images without a class (label {join_names(unlabelled)}): leave them out")
    if len(known) < 2:
        raise InputError(f"{source} has training images of {len(known)} class(es): give at least 2 to tell apart")
    for asked in others:
        if not asked:
            raise InputError(f"{source} has no validation images: add some")
        _refuse_unknown([names[label] for label in asked - known], source)


def _all_classes(rows: datasets.Dataset) -> list[Any]:
    """List the classes of all images, one after another."""
    labels = rows["label"][:]
    if isinstance(rows.features["label"], datasets.List):
        return [label for of_one in labels for label in of_one]
    return list(labels)


def _labelled_as(rows: datasets.Dataset, model_labels: Sequence[str], source: str) -> datasets.Dataset:
    names, places = in_classes_of_model(class_names(rows), model_labels, source)
    return _relabelled(rows, names, dict(enumerate(places)))


def _with_classes_of_words(splits: Splits, source: str) -> Splits:
    """Make the words in lists of labels classes, those of the training images; classes stay as they are."""
    if isinstance(splits["train"].features["label"].feature, datasets.ClassLabel):
        return splits
    names = sorted(set(_all_classes(splits["train"])))
    for rows in splits.values():
        _refuse_unknown(set(_all_classes(rows)) - set(names), source)
    place_of = {name: place for place, name in enumerate(names)}
    return {split: _relabelled(rows, names, place_of) for split, rows in splits.items()}


def _refuse_unknown(names: Collection[str], source: str) -> None:
    if names:
        listed = join_names(names)
        raise InputError(
            f"{source} has validation images of classes that train has none of ({listed}): add or remove them"
        )


def _relabelled(rows: datasets.Dataset, names: list[str], place_of: dict[Any, int]) -> datasets.Dataset:
    """Return the rows with the places of their labels among ``names``."""
    labels = [
        [place_of[one] for one in label] if isinstance(label, list) else place_of[label] for label in rows["label"]
    ]
    one = datasets.ClassLabel(names=names)
    feature = datasets.List(one) if isinstance(rows.features["label"], datasets.List) else one
    return rows.remove_columns("label").add_column("label", labels, feature=feature)


def _hold_out(rows: datasets.Dataset, flags: ImageDataArguments, seed: int) -> Splits:
    # Of several classes the first counts; images without one are a class of their own.
    labels = np.array([(label or [-1])[0] if isinstance(label, list) else label for label in rows["label"]])
    labels = np.unique(labels, return_inverse=True)[1]
    names = names_below(rows, flags.data_dir) if flags.data_dir else list(map(str, range(len(rows))))
    held_out = choose_held_out(labels, names, seed)
    if not len(held_out):
        raise InputError(
            f"{flags.source} has no validation split, and one image a class, so none can be held out: add some"
        )
    return hold_out(rows, np.isin(np.arange(len(rows)), held_out))


@progress_bars(False)
def read_digits() -> Splits:
    """Read the digits, always in the same stratified 80/20 split."""
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


def _read_hub(dataset: str) -> Splits:
    with loading_by_name(dataset, f"--dataset {dataset}", "use --dataset digits or --data_dir DIR"):
        splits = datasets.load_dataset(dataset)
    return {split: splits[name] for split, name in choose_splits(splits, f"--dataset {dataset}").items()}


def _image_and_label(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Select the columns ``image``, still encoded, and ``label``."""
    features = rows.features.items()
    images = [name for name, feature in features if isinstance(feature, datasets.Image)]
    labels = [name for name, feature in features if isinstance(feature, datasets.ClassLabel)]
    labels += [name for name, feature in features if _is_list_of_classes(name, feature)]
    for kind, found in (("Image", images), ("ClassLabel", labels)):
        if not found:
            raise InputError(f"{source} has no {kind} column, only {join_names(rows.features)}: use another one")
    columns = {images[0]: "image", labels[0]: "label"}
    rows = rows.select_columns(list(columns)).rename_columns(columns)
    return rows.cast_column("image", datasets.Image(decode=False))


def _is_list_of_classes(name: str, feature: Any) -> bool:
    """Tell whether it is a list of classes, or one of words whose name says that they are classes."""
    if not isinstance(feature, datasets.List):
        return False
    of_words = name in LISTS and feature.feature == datasets.Value("string")
    return of_words or isinstance(feature.feature, datasets.ClassLabel)
