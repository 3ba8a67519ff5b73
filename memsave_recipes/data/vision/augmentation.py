"""Random image augmentation as one affine map a sample: drawn with the data, applied to the batch on the device.

Rotation, flip, shift and random resized crop compose into one 2x3 matrix, so each pixel is interpolated once. The
matrix is a pure function of (seed, epoch, sample), so every topology trains on the same pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from memsave_recipes.errors import packages_of

with packages_of("vision", "images"):
    from kornia.geometry.transform import warp_affine


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The ranges that a sample's affine map is drawn from: uniformly, the aspect ratio uniformly in its logarithm.

    Applied in this order: rotate by ``degrees`` either way about the centre, shift by ``translate`` of the side either
    way, flip left to right, crop a ``scale`` of the area with a ``ratio`` of width to height, and resize to the whole
    image.
    """

    degrees: float
    flip_probability: float
    translate: float
    scale: tuple[float, float]
    ratio: tuple[float, float]

    def draw(self, *, seed: int, epoch: int, index: int, image_size: int) -> Tensor:
        """Draw a sample's affine map: float32 (2, 3), source to destination, in pixels with (0, 0) a pixel's centre.

        The three numbers, none negative, are the key and the counter of a Philox generator (Salmon et al., SC 2011).
        """
        key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, index], np.uint64)
        angle, flip, shift_x, shift_y, area, ratio, left, top = np.random.Generator(
            np.random.Philox(key=key, counter=counter)
        ).random(8)
        matrix = _rotation(math.radians(_between(-self.degrees, self.degrees, angle)), image_size)
        reach = self.translate * image_size
        matrix[0, 2] += _between(-reach, reach, shift_x)
        matrix[1, 2] += _between(-reach, reach, shift_y)
        if flip < self.flip_probability:
            matrix[0] = [0, 0, image_size - 1] - matrix[0]
        return torch.from_numpy((self._crop(area, ratio, left, top, image_size) @ matrix)[:2].astype(np.float32))

    def _crop(self, area: float, ratio: float, left: float, top: float, image_size: int) -> np.ndarray:
        """Return the map of a random window onto the whole image, from four numbers in [0, 1)."""
        root = math.sqrt(_between(*self.scale, area))
        stretch = math.exp(_between(math.log(self.ratio[0]), math.log(self.ratio[1]), ratio) / 2)
        width, height = min(1.0, root * stretch), min(1.0, root / stretch)  # fractions of the image's side
        # An image's edge lies half a pixel outside its outermost centres: hence the two halves.
        move_x = left * (1 - width) * image_size - 0.5
        move_y = top * (1 - height) * image_size - 0.5
        return np.array(
            [[1 / width, 0, -move_x / width - 0.5], [0, 1 / height, -move_y / height - 0.5], [0, 0, 1]], np.float64
        )


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "article": Augmentation(degrees=30.0, flip_probability=0.5, translate=0.0, scale=(0.96, 1.0), ratio=(0.95, 1.05)),
    # A mirrored or strongly turned digit is another digit or none. 1/16 of the side is half a pixel of the 8x8 scan.
    "digits": Augmentation(degrees=10.0, flip_probability=0.0, translate=1 / 16, scale=(1.0, 1.0), ratio=(1.0, 1.0)),
}


def normalize(images: Tensor, *, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return pixels 0 to 255, (B, 3, H, W), as ``(pixel / 255 - mean) / std`` per channel in ``dtype``."""
    pixels = images.to(_working_dtype(dtype))
    scaled_mean, scaled_std = (
        (255 * torch.tensor(values, dtype=pixels.dtype)).to(pixels.device)[:, None, None] for values in (mean, std)
    )
    # In place, because on a CPU a third tensor of this size costs more time than the arithmetic.
    return (pixels - scaled_mean).div_(scaled_std).to(dtype)  # (B, 3, H, W)


def warp(images: Tensor, affine: Tensor) -> Tensor:
    """Move each image, floating (B, 3, H, W), by its own map of ``draw``, (B, 2, 3); bilinear, zeros from outside."""
    # Under autocast kornia would multiply its matrices in bfloat16 and be pixels off (measured with kornia 0.9).
    with torch.autocast(images.device.type, enabled=False):
        return warp_affine(images, affine.to(images), dsize=(images.shape[-2], images.shape[-1]))


@wrap_torch_function(lambda images, *_, **__: (images,))  # of a wrapper tensor: the whole function for each inner one
def to_pixel_values(
    images: Tensor, affine: Tensor | None, *, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Make the model's input of uint8 (B, 3, H, W): warped by maps (B, 2, 3) if given, normalised, in ``dtype``."""
    if affine is not None:
        images = warp(images.to(_working_dtype(dtype)), affine)
    return normalize(images, mean=mean, std=std, dtype=dtype)  # (B, 3, H, W)


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: half precision cannot hold a pixel's coordinates."""
    return torch.promote_types(dtype, torch.float32)


def _between(low: float, high: float, fraction: float) -> float:
    return low + (high - low) * fraction


def _rotation(radians: float, image_size: int) -> np.ndarray:
    """Return a rotation counter-clockwise as displayed, about the centre of the image: float64 (3, 3)."""
    cos, sin, centre = math.cos(radians), math.sin(radians), (image_size - 1) / 2
    return np.array(
        [[cos, sin, centre * (1 - cos - sin)], [-sin, cos, centre * (1 - cos + sin)], [0, 0, 1]], np.float64
    )
