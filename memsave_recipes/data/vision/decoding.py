"""Images one by one: whether one can be read, and its pixels, upright, in RGB and at the size of the model.

An image is decoded when its sample is asked for, so that a broken one can be named, and given as uint8.

NOTE [ images kept in memory ]
1. Where both splits, decoded and resized, take at most 256 MiB, an image is decoded once and its pixels are kept, so
   that a later epoch costs no decoding. The bits are the same.
2. A data worker keeps none: each would hold a copy, and workers decode while the device computes. So this is for runs
   without workers, the default on a CPU.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal

import datasets
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from memsave_recipes.data.text.documents import Splits, progress_bars
from memsave_recipes.data.vision.augmentation import Augmentation
from memsave_recipes.data.vision.image_folder import first_of
from memsave_recipes.errors import InputError, packages_of
from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.text import first_line

with packages_of("vision", "images"):
    from PIL import Image, UnidentifiedImageError

Stored = dict[str, Any]
"""An image as ``datasets`` stores it: ``bytes``, ``path``, or both."""
ResizeMode = Literal["crop", "squash"]
MAX_ASPECT = 16
MAX_KEPT_BYTES = 256 * 1024**2
MAX_NAMED = 10
READING_THREADS = 8  # reading and hashing leave Python's lock
IMAGES_AT_ONCE = 256
BAR_AFTER_S = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """One split, decoded sample by sample.

    A key is an ``int`` (a counted sample of epoch 0) or has ``index``, ``epoch`` and ``counted``. A sample suits
    torch's default collation: ``images`` uint8 (3, S, S), not to be changed in place, ``labels`` int64 () that is -100
    where it is not counted, ``index``, and with an augmentation ``affine`` float32 (2, 3).

    Args:
        keeps_pixels: by NOTE [ images kept in memory ].

    Raises:
        InputError: an image cannot be decoded; the message holds its path.
    """

    rows: datasets.Dataset
    split: str
    image_size: int
    resize_mode: ResizeMode
    augmentation: Augmentation | None
    seed: int
    keeps_pixels: bool
    _kept: dict[int, tuple[Tensor, int]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[dict[str, Any]]:
        """The samples of a batch, as torch's loader asks for them: one query of Arrow's table for all."""
        indices = [key if isinstance(key, int) else key.index for key in keys]
        new = [index for index in indices if index not in self._kept]
        rows = self.rows[new] if new else {"image": [], "label": []}
        read = {row[0]: self._read(*row) for row in zip(new, rows["image"], rows["label"], strict=True)}
        return [
            self._sample(key, *(self._kept.get(index) or read[index])) for key, index in zip(keys, indices, strict=True)
        ]

    def _sample(self, key: Any, pixels: Tensor, label: int) -> dict[str, Any]:
        index, epoch, counted = (key, 0, True) if isinstance(key, int) else (key.index, key.epoch, key.counted)
        sample = {"images": pixels, "labels": torch.tensor(label if counted else IGNORED_LABEL), "index": index}
        if self.augmentation is not None:
            sample["affine"] = self.augmentation.draw(
                seed=self.seed, epoch=epoch, index=index, image_size=self.image_size
            )
        return sample

    def _read(self, index: int, image: Stored, label: int) -> tuple[Tensor, int]:
        try:
            pixels = pixels_of(image, self.image_size, self.resize_mode)
        except Exception as error:
            name = _name_of(image, index, self.split)
            way_out = "replace it, delete it, or pass --skip_broken_images"
            raise InputError(f"{name} is not a readable image ({reason_of(error)}): {way_out}") from error
        if self.keeps_pixels and torch.utils.data.get_worker_info() is None:
            self._kept[index] = pixels, label
        return pixels, label


def without_broken(splits: Splits, source: str, folder: str | None, *, skip: bool) -> tuple[Splits, list[str]]:
    """The splits without their broken images, and the names of these, each with the reason.

    Args:
        source: the flag that names the images, and its value.
        folder: paths are given below it.
        skip: decode every image and leave out the broken ones; else only their headers are read.

    Raises:
        InputError: there are broken ones, and ``skip`` is false.
    """
    whole, broken = {}, []
    for split, rows in splits.items():
        defects = of_each_image(rows, defect_of_pixels if skip else defect_of_header, "checking images")
        whole[split] = rows.select([index for index, defect in enumerate(defects) if not defect])
        for index in (index for index, defect in enumerate(defects) if defect):
            broken.append(f"{_name_of(rows[index]['image'], index, split, folder)} ({defects[index]})")
    if broken and not skip:
        raise InputError(
            f"{source}: {len(broken):,} of {sum(map(len, splits.values())):,} images cannot be read: "
            f"{first_of(broken, MAX_NAMED)}: replace them, delete them, or pass --skip_broken_images"
        )
    return (whole, broken) if broken else (splits, [])


def pixels_of(stored: Stored, image_size: int, resize_mode: ResizeMode) -> Tensor:
    """The pixels of an image: uint8 (3, image_size, image_size), in memory that numpy has allocated.

    Raises:
        Exception: of nearly any kind, where the image is broken; ``reason_of`` puts it into words.
    """
    image = resized(decode(stored), image_size, resize_mode)
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def decode(stored: Stored) -> Image.Image:
    """Upright and RGB. Pillow's plugins raise nearly any exception, so all of them mean a broken image."""
    image: Image.Image = datasets.Image().decode_example(stored)
    _check_mode(image)
    if image.mode.startswith("I;16"):  # Pillow would turn every value above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow warns
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def resized(image: Image.Image, image_size: int, resize_mode: ResizeMode) -> Image.Image:
    """A square of ``image_size`` pixels a side, bilinear with antialiasing.

    ``crop`` resizes the shorter side to ``image_size`` and cuts the middle out of the longer one, to the pixel as the
    image processors of transformers do with ``shortest_edge`` and ``do_center_crop``. ``squash`` resizes both sides.
    Of an image longer than 16 squares only the middle ones are resized, since the rest is cut off in any case.
    """
    if resize_mode == "squash":
        return image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    shorter = min(image.size)
    if max(image.size) > MAX_ASPECT * shorter:
        image = _middle(image, *(min(side, MAX_ASPECT * shorter) for side in image.size))
    width, height = (image_size * side // shorter for side in image.size)
    return _middle(image.resize((width, height), Image.Resampling.BILINEAR), image_size, image_size)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def defect_of_header(stored: Stored) -> str:
    """Why an image cannot be read, as far as its first bytes tell; empty where they tell nothing."""
    try:
        with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
            _check_mode(image)
    except Exception as error:
        return reason_of(error)
    return ""


def defect_of_pixels(stored: Stored) -> str:
    """Why an image cannot be decoded; empty where it can."""
    try:
        decode(stored)
    except Exception as error:
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """Why an image is broken, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "no image format that Pillow knows"  # its own words hold a memory address
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # its own words hold the path once more
    return first_line(error)


def _check_mode(image: Image.Image) -> None:
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no agreed range")


def _name_of(image: Stored | None, index: int, split: str, folder: str | None = None) -> str:
    path = (image or {}).get("path")
    if not path:
        return f"image {index} of the {split} split"
    return os.path.relpath(path, folder) if folder else str(path)


def of_each_image(rows: datasets.Dataset, function: Callable[[Stored], str], desc: str) -> list[str]:
    """``function`` of the column ``image`` of every row, in threads, with a progress bar on a terminal.

    ``datasets`` keeps the answers in its cache until a file changes its time, also for the other ranks.
    """
    with progress_bars(False), tqdm(total=len(rows), desc=desc, unit="image", delay=BAR_AFTER_S, disable=None) as bar:
        answered = rows.map(
            _OfEach(function, bar),
            batched=True,
            batch_size=IMAGES_AT_ONCE,
            input_columns="image",
            remove_columns=rows.column_names,
            features=datasets.Features(answer=datasets.Value("string")),
        )
    answers: list[str] = answered["answer"][:]
    return answers


class _OfEach:
    """For ``datasets``, which hashes it to find its answers again: the bar is no part of that."""

    def __init__(self, function: Callable[[Stored], str], bar: tqdm) -> None:
        self.function = function
        self.bar = bar

    def __getstate__(self) -> Callable[[Stored], str]:
        return self.function

    def __call__(self, images: list[Stored]) -> dict[str, list[str]]:
        with ThreadPoolExecutor(READING_THREADS) as threads:
            answers = list(threads.map(self.function, images))
        self.bar.update(len(images))
        return {"answer": answers}
