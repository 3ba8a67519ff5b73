"""Images one by one: whether one can be read, its digest, and its pixels, upright, in RGB and at the model's size.

Where both splits take at most 256 MiB, decoded and resized, an image is decoded once, but not in a data worker, each of
which would hold a copy. The largest value of a data set decides for all grey images of 16 bits, whose files do not say
how many bits they use: ``grey_bits`` of the saved image processor. PGM files state theirs, and Pillow scales by it.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.core.text import first_line, first_of
from memsave_recipes.data.fingerprint import Fingerprint, Samples, digest_of
from memsave_recipes.data.sources import LONG_BYTES, Splits, of_each, progress_bars
from memsave_recipes.data.vision.augmentation import (
    CROP,
    MIXES,
    Augmentation,
    generator_of,
    mixed,
    random_resized_crop,
    tensor_of,
    transformed,
)
from memsave_recipes.data.vision.image_folder import file_state
from memsave_recipes.models.labels import label_of

with packages_of("vision", "images"):
    from PIL import Image, UnidentifiedImageError

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # twice as many pixels are an error

Stored = dict[str, Any]  # an image as ``datasets`` stores it: ``bytes``, ``path``, or both
MAX_ASPECT = 16
MAX_KEPT_BYTES = 256 * 1024**2
MAX_NAMED = 10
GREY, MAX_GREY_BITS = "I;16", 16  # Pillow's modes of such images begin so
of_each_image = partial(of_each, column="image", dtype="string", threads=8)  # reading and hashing leave Python's lock


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """One split, decoded sample by sample; an image that cannot be raises ``InputError`` with its path.

    A key is an ``int`` (a counted sample of epoch 0) or has ``index``, ``epoch``, ``counted`` and ``partner``. A sample
    suits torch's collation: ``images`` uint8 (3, S, S), not to be changed in place, ``labels`` of ``LabelLoss``,
    ``index``, and with an augmentation ``affine`` float32 (2, 3). Where ``transforms`` mix it with its partner, by
    default itself, ``labels`` are shares of the classes, float32 (C,), NaN where it is not counted.
    """

    rows: datasets.Dataset
    split: str
    image_size: int
    augmentation: Augmentation | None
    seed: int
    keeps_pixels: bool
    grey_bits: int = MAX_GREY_BITS
    transforms: tuple[str, ...] = ()
    _kept: dict[int, tuple[Tensor, Any]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the samples of a batch, as torch's loader asks for them: each picture is loaded once."""
        first_epoch = {"epoch": 0, "counted": True, "partner": None}
        asked = [SimpleNamespace(index=key, **first_epoch) if isinstance(key, int) else key for key in keys]
        places = dict.fromkeys((index, key.epoch) for key in asked for index in self._parts(key))
        pictures = self._load(list(places))
        return [self._sample(key, *(pictures[index, key.epoch] for index in self._parts(key))) for key in asked]

    def _parts(self, key: Any) -> list[int]:
        """The sample, and the one that it is mixed with."""
        partner = key.index if key.partner is None else key.partner
        return [key.index, partner] if MIXES.keys() & self.transforms else [key.index]

    def _load(self, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[Tensor, Any]]:
        """Return the transformed pixels and the label by index and epoch: one query of Arrow's table for all."""
        new = [index for index, _ in places if index not in self._kept]
        rows = self.rows[new] if new else {"image": [], "label": []}
        stored = dict(zip(new, zip(rows["image"], rows["label"], strict=True), strict=True))
        loaded = {}
        for index, epoch in places:
            pixels, label = self._kept.get(index) or self._read(index, epoch, *stored[index])
            loaded[index, epoch] = transformed(pixels, self.transforms, self._draws(index, epoch, 2)), label
        return loaded

    def _draws(self, index: int, epoch: int, stream: int) -> np.random.Generator:
        return generator_of(seed=self.seed, epoch=epoch, index=index, stream=stream)

    def _sample(
        self, key: Any, picture: tuple[Tensor, Any], partner: tuple[Tensor, Any] | None = None
    ) -> dict[str, Any]:
        (pixels, label), num_classes = picture, len(class_names(self.rows))
        if partner is None:
            labels = torch.tensor(label_of(label, num_classes, counted=key.counted))
        else:
            pixels, share = mixed(pixels, partner[0], self.transforms, self._draws(key.index, key.epoch, 3))
            own, other = (
                torch.tensor(label_of(one if isinstance(one, list) else [one], num_classes, counted=key.counted))
                for one in (label, partner[1])
            )
            labels = (share * own.double() + (1 - share) * other.double()).float()
        sample = {"images": pixels, "labels": labels}
        if self.augmentation is not None:
            sample["affine"] = self.augmentation.draw(
                seed=self.seed, epoch=key.epoch, index=key.index, image_size=self.image_size
            )
        return sample | {"index": key.index}

    def _read(self, index: int, epoch: int, image: Stored, label: Any) -> tuple[Tensor, Any]:
        try:
            pixels = self._pixels(index, epoch, image)
        except Exception as error:
            name = _name_of(image, index, self.split)
            raise InputError(f"{name} is not a readable image ({reason_of(error)}): replace or delete it") from error
        if self.keeps_pixels and torch.utils.data.get_worker_info() is None:
            self._kept[index] = pixels, label
        return pixels, label

    def _pixels(self, index: int, epoch: int, image: Stored) -> Tensor:
        if CROP not in self.transforms:
            return pixels_of(image, self.image_size, self.grey_bits)
        return tensor_of(
            random_resized_crop(decode(image, self.grey_bits), self.image_size, self._draws(index, epoch, 1))
        )


def class_names(rows: datasets.Dataset) -> list[str]:
    """Return the classes of the column ``label``, of which an image has one, or a list."""
    feature = rows.features["label"]
    names: list[str] = getattr(feature, "feature", feature).names
    return names


def check_headers(splits: Splits, source: str, folder: str | None) -> list[datasets.Dataset]:
    """Read the header of every image of ``source``; return the images of 16 bits, by split.

    Raises ``InputError`` with the names (below ``folder``) of those that cannot be read, and why.
    """
    broken, grey = [], []
    for split, rows in splits.items():
        defects = np.array(of_each_image(rows, desc="checking images", function=defect_of_header))
        grey.append(rows.select(np.flatnonzero(defects == GREY)))
        for index in np.flatnonzero(~np.isin(defects, ["", GREY])).tolist():
            broken.append(f"{_name_of(rows[index]['image'], index, split, folder)} ({defects[index]})")
    if broken:
        raise InputError(
            f"{source}: {len(broken):,} of {sum(map(len, splits.values())):,} images cannot be read: "
            f"{first_of(broken, MAX_NAMED)}: replace or delete them"
        )
    return [rows for rows in grey if len(rows)]


def bits_of_grey(grey: Sequence[datasets.Dataset], source: str) -> int:
    """Count the bits, at least 8, of the largest value of images of 16 bits; raise ``InputError`` if one is broken."""
    largest = 0
    for rows in grey:
        values = list(map(int, of_each_image(rows, function=_largest_grey, desc="reading grey values")))
        if min(values) < 0:
            index = values.index(min(values))
            name = _name_of(rows[index]["image"], index, "grey")
            raise InputError(f"{source}: {name} cannot be decoded: replace or delete it")
        largest = max(largest, *values)
    return max(8, largest.bit_length())


def _largest_grey(stored: Stored) -> str:
    try:
        return str(int(np.asarray(datasets.Image().decode_example(stored)).max()))
    except Exception:  # of Pillow's plugins
        return "-1"


def pixels_of(stored: Stored, image_size: int, grey_bits: int = MAX_GREY_BITS) -> Tensor:
    """Return the pixels of an image, uint8 (3, image_size, image_size); raises as ``decode``."""
    return tensor_of(resized(decode(stored, grey_bits), image_size))


def decode(stored: Stored, grey_bits: int = MAX_GREY_BITS) -> Image.Image:
    """Decode an image upright and as RGB; Pillow's plugins raise nearly any exception where it is broken.

    Values in a grey image of 16 bits that are larger than ``grey_bits`` hold become white.
    """
    image: Image.Image = datasets.Image().decode_example(stored)
    _check_mode(image)
    if image.mode.startswith("I"):  # Pillow would turn every value above 255 white
        bits = grey_bits if image.mode.startswith(GREY) else MAX_GREY_BITS
        image = Image.fromarray(np.minimum(np.asarray(image) >> (bits - 8), 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow warns
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def resized(image: Image.Image, image_size: int) -> Image.Image:
    """Make a square of ``image_size`` pixels a side, bilinear with antialiasing.

    The shorter side is resized to ``image_size`` and the middle cut out, to the pixel as the image processors of
    transformers do with ``shortest_edge`` and ``do_center_crop``. Of an image longer than 16 squares only the middle
    ones are resized, since the rest is cut off in any case.
    """
    shorter = min(image.size)
    if max(image.size) > MAX_ASPECT * shorter:
        image = _middle(image, *(min(side, MAX_ASPECT * shorter) for side in image.size))
    width, height = (image_size * side // shorter for side in image.size)
    return _middle(image.resize((width, height), Image.Resampling.BILINEAR), image_size, image_size)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def defect_of_header(stored: Stored) -> str:
    """Say why an image cannot be read, as far as its first bytes tell; else ``GREY`` or nothing, by its kind."""
    try:
        with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
            _check_mode(image)
            return GREY if image.mode.startswith(GREY) else ""
    except Exception as error:
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """Say why an image is broken, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "no image format that Pillow knows"  # its own words hold a memory address
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # its own words hold the path once more
    return first_line(error)


def _check_mode(image: Image.Image) -> None:
    is_scaled = image.mode == "I" and image.format == "PPM"  # by the largest value, which the file states
    if image.mode in ("I", "F") and not is_scaled:
        raise ValueError("32-bit pixels have no agreed range")


def _name_of(image: Stored | None, index: int, split: str, folder: str | None = None) -> str:
    path = (image or {}).get("path")
    if not path:
        return f"image {index} of the {split} split"
    return os.path.relpath(path, folder) if folder else str(path)


SPLITS = {"train": "training images", "validation": "held-out images"}


def fingerprint_of_images(splits: dict[str, datasets.Dataset], data_dir: str | None) -> Fingerprint:
    """Make the images' fingerprint: rules 2 and 3 of NOTE [ the same data ].

    Args:
        splits: with the columns ``image``, still encoded, and ``label``.
        data_dir: the folder that they are files of; ``None`` for a data set.
    """
    found = Fingerprint(samples={}, label_names=tuple(class_names(splits["train"])))
    for split, rows in splits.items():
        name = SPLITS[split]
        if data_dir is None:
            found.samples[name] = _samples_of_dataset(rows, name)
            continue
        files = names_below(rows, data_dir)
        sizes = [file_state(image["path"]).st_size for image in rows["image"]]
        described = zip(files, sizes, rows["label"], strict=True)
        digests = [digest_of(f"{file} {size} {label}".encode()) for file, size, label in described]
        found.samples[name] = Samples(digests=np.array(digests, dtype=np.int64), name_of=files.__getitem__)
    return found


def _samples_of_dataset(rows: datasets.Dataset, split: str) -> Samples:
    columns = ["image", "label"]
    with progress_bars(rows.data.nbytes > LONG_BYTES):
        hashed = rows.map(
            _digests_of, batched=True, input_columns=columns, remove_columns=columns, desc="hashing images"
        )
    digests = hashed.with_format("numpy")["digest"][:]
    return Samples(digests=digests, name_of=lambda index: f"number {index + 1} of the {split}")


def _digests_of(images: list[dict[str, Any]], labels: list[Any]) -> dict[str, list[int]]:
    digests = []
    for image, label in zip(images, labels, strict=True):
        content = image["bytes"]
        if content is None:
            content = f"{os.path.basename(image['path'])} {file_state(image['path']).st_size}".encode()
        digests.append(digest_of(f"{label} ".encode() + content))
    return {"digest": digests}


def names_below(rows: datasets.Dataset, folder: str) -> list[str]:
    """Return the paths of the images below a folder."""
    root = os.path.abspath(folder)
    return [os.path.relpath(image["path"], root) for image in rows["image"]]
