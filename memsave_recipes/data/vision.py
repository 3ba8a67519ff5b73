"""Labelled images as samples: decoded, resized, with what their augmentation drew; where they come from is elsewhere.

Images stay encoded in the data set and are decoded when a sample is asked for, so that a broken one can be named. They
are given as uint8; augmentation is only *drawn* here (``augmentation.py``) and applied to the batch on the device.
"""

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from memsave_recipes.data.augmentation import Augmentation
from memsave_recipes.data.checksums import LIST, check_against_list, fingerprint_of_images
from memsave_recipes.data.image_sources import check_labels, lost_links, read_images
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint

IGNORED_LABEL = -100  # what torch's cross-entropy leaves out by default


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset(torch.utils.data.Dataset):
    """One split, decoded sample by sample.

    A key is an ``int`` (a counted sample of epoch 0) or has ``index``, ``epoch`` and ``counted``. A sample is what
    torch's default collation takes: ``images`` uint8 (3, S, S), ``labels`` int64 () that is -100 where it is not
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

    The fingerprint tells a run that goes on whether they are the same.
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


def load_images(
    *,
    dataset: str | None,
    data_dir: str | None,
    image_size: int,
    augmentation: Augmentation | None,
    seed: int,
    skip_broken_images: bool = False,
) -> ImageSplits:
    """Load one source of labelled images; only the training images are augmented.

    Args:
        dataset: ``digits`` (scikit-learn's 1,797 scanned digits, offline), or what ``datasets.load_dataset`` takes; its
            first image column and its first class column are used.
        data_dir: a folder with ``train/CLASS/*`` and ``validation/CLASS/*`` (or the first there is of valid, val, dev,
            test). The class of an image is the name of the folder that it lies in. With a ``SHA256SUMS`` of
            ``sha256sum`` in the folder, every image must be what that says.
        image_size: side S that every image is resized to, in pixels, whatever its aspect ratio.
        augmentation: of the training images.
        seed: of the augmentation; how the digits are split does not depend on it.
        skip_broken_images: decode every image now and leave out those that fail (``datasets`` caches the answer), and
            links that lead nowhere.

    Raises:
        InputError: as ``read_images``; or an image that is not what its list says.
    """
    splits = read_images(dataset, data_dir, skip_broken_images=skip_broken_images)
    listed = check_against_list(splits, data_dir) if data_dir else {}
    num_lost = len(lost_links(data_dir)) if data_dir and skip_broken_images else 0
    num_found = sum(map(len, splits.values())) + num_lost
    if skip_broken_images:
        what = "checking images"
        splits = {name: rows.filter(_is_readable, input_columns="image", desc=what) for name, rows in splits.items()}
        check_labels(
            splits, f"{f'--dataset {dataset}' if dataset else f'--data_dir {data_dir}'} without its broken images"
        )
    train, validation = (
        ImageDataset(rows=splits[name], split=name, image_size=image_size, augmentation=applied, seed=seed)
        for name, applied in (("train", augmentation), ("validation", None))
    )
    return ImageSplits(
        train=train,
        validation=validation,
        label_names=tuple(splits["train"].features["label"].names),
        num_listed=len(listed),
        num_broken=num_found - len(train) - len(validation),
        fingerprint=fingerprint_of_images(splits, data_dir, listed),
    )


def _is_readable(stored: dict[str, Any]) -> bool:
    try:
        _decode(stored)
    except Exception:
        return False
    return True


def _decode(stored: dict[str, Any]) -> Image.Image:
    """Upright and RGB. Pillow's plugins raise nearly any exception, so all of them mean a broken image."""
    image = datasets.Image().decode_example(stored)
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
    return (str(error).splitlines() or [type(error).__name__])[0]
