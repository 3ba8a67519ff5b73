"""Random image augmentation whose draws are pure functions of (seed, epoch, sample): the same pixels on every topology.

``article`` and ``digits`` are one affine map a sample, drawn with the data and applied to the batch on the device:
rotation, flip, shift and crop compose into one 2x3 matrix, so each pixel is interpolated once. ``TRANSFORMS`` run where
the data are loaded, on the picture of one sample. Their defaults are those of torchvision, where no other source is
named. Pillow does the work, because kornia's ``RandAugment`` and ``TrivialAugment`` draw from torch's global generator
and one operation for a whole batch; a picture at a time they took 9 and 4 ms, a warp by Pillow 1.3 ms (224 pixels).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from memsave_recipes.core.errors import packages_of

with packages_of("vision", "images"):
    from kornia.geometry.transform import warp_affine
    from PIL import Image, ImageEnhance, ImageOps

Operation = Callable[[Image.Image, float], Image.Image]
Transform = Callable[[Image.Image, np.random.Generator], Image.Image]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


def generator_of(*, seed: int, epoch: int, index: int, stream: int = 0) -> np.random.Generator:
    """Make the generator of a sample's draws of one kind, its ``stream``.

    The four numbers, none negative, are the key and the counter of a Philox generator (Salmon et al., SC 2011).
    """
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, stream, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


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
        """Draw a sample's affine map: float32 (2, 3), source to destination, in pixels with (0, 0) a pixel's centre."""
        angle, flip, shift_x, shift_y, area, ratio, left, top = generator_of(
            seed=seed, epoch=epoch, index=index
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


def random_resized_crop(image: Image.Image, image_size: int, draws: np.random.Generator) -> Image.Image:
    """Resize a random part, 8 to 100 % of the area, to a square of ``image_size`` pixels (Szegedy et al., 2015)."""
    box = _draw_box(image.size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), draws=draws)
    return image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)


def flip(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Flip left to right, every other time."""
    return ImageOps.mirror(image) if draws.random() < 0.5 else image


def color_jitter(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Multiply brightness, contrast and saturation by 0.6 to 1.4, in random order; 0.4 is timm's default."""
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for place in draws.permutation(len(kinds)):
        image = kinds[place](image).enhance(_between(0.6, 1.4, draws.random()))
    return image


def randaugment(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Apply two random operations at magnitude 9 of 30 (Cubuk et al., 2020)."""
    for _ in range(2):
        largest, _, operation = OPERATIONS[draws.integers(len(OPERATIONS))]
        image = operation(image, _either_way(9 / 30 * largest, draws))
    return image


def trivialaugment(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Apply one random operation at a random magnitude of the wide range (Mueller and Hutter, 2021)."""
    _, largest, operation = OPERATIONS[draws.integers(len(OPERATIONS))]
    return operation(image, _either_way(draws.integers(31) / 30 * largest, draws))


def erasing(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Put noise over 2 to 33 % of the area, every other time (Zhong et al., 2020)."""
    if draws.random() >= 0.5:
        return image
    left, top, right, bottom = _draw_box(image.size, scale=(0.02, 0.33), ratio=(0.3, 3.3), draws=draws)
    noise = draws.integers(256, size=(bottom - top, right - left, 3), dtype=np.uint8)
    erased = image.copy()
    erased.paste(Image.fromarray(noise), (left, top))
    return erased


def mixup(pixels: Tensor, partner: Tensor, draws: np.random.Generator) -> tuple[Tensor, float]:
    """Return the mean of two pictures, weighted by Beta(0.2, 0.2), and the share of the first (Zhang et al., 2018).

    Both are uint8 (3, S, S), and so is the mean.
    """
    share = draws.beta(0.2, 0.2)
    return torch.lerp(partner.float(), pixels.float(), share).round_().to(torch.uint8), share


def cutmix(pixels: Tensor, partner: Tensor, draws: np.random.Generator) -> tuple[Tensor, float]:
    """Return a picture with a part of ``partner`` in its place, and the share of the first (Yun et al., 2019).

    Both are uint8 (3, S, S). The area of the square, before the border cuts it off, is uniform: Beta(1, 1).
    """
    size = pixels.shape[-1]
    reach, x, y = math.sqrt(draws.random()) * size / 2, *(draws.random(2) * size)
    left, right, top, bottom = (round(min(max(at, 0), size)) for at in (x - reach, x + reach, y - reach, y + reach))
    mixed = pixels.clone()
    mixed[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
    return mixed, 1 - (right - left) * (bottom - top) / size**2


def _map(image: Image.Image, *matrix: float) -> Image.Image:
    """Move by a map from destination to source."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def _enhance(kind: Callable[[Image.Image], Any]) -> tuple[float, float, Operation]:
    return 0.9, 0.99, lambda image, by: kind(image).enhance(1 + by)


OPERATIONS: tuple[tuple[float, float, Operation], ...] = (
    (0, 0, lambda image, _: image),
    (0.3, 0.99, lambda image, by: _map(image, 1, by, 0, 0, 1, 0)),
    (0.3, 0.99, lambda image, by: _map(image, 1, 0, 0, by, 1, 0)),
    (150 / 331, 32 / 224, lambda image, by: _map(image, 1, 0, by * image.width, 0, 1, 0)),
    (150 / 331, 32 / 224, lambda image, by: _map(image, 1, 0, 0, 0, 1, by * image.height)),
    (30, 135, lambda image, degrees: image.rotate(degrees, Image.Resampling.BILINEAR)),
    *map(_enhance, (ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Sharpness)),
    (4, 6, lambda image, bits: ImageOps.posterize(image, 8 - round(abs(bits)))),
    (255, 255, lambda image, by: ImageOps.solarize(image, 255 - round(abs(by)))),
    (0, 0, lambda image, _: ImageOps.autocontrast(image)),
    (0, 0, lambda image, _: ImageOps.equalize(image)),
)
"""The largest magnitude in ``randaugment`` and in ``trivialaugment``, either way, and the operation.

They are torchvision's; its shift of ``TrivialAugmentWide`` is 32 pixels of any image, here of 224.
"""
CROP = "random_resized_crop"
PICTURES: dict[str, Transform] = {
    "flip": flip,
    "color_jitter": color_jitter,
    "randaugment": randaugment,
    "trivialaugment": trivialaugment,
    "erasing": erasing,
}
MIXES = {"mixup": mixup, "cutmix": cutmix}
TRANSFORMS = (CROP, *PICTURES, *MIXES)
"""In the order in which they are applied; of several ``MIXES`` one is drawn for each sample."""


def transformed(pixels: Tensor, names: Sequence[str], draws: np.random.Generator) -> Tensor:
    """Apply those of ``names`` that are in ``PICTURES`` to a picture, uint8 (3, S, S), in the order there."""
    chosen = [transform for name, transform in PICTURES.items() if name in names]
    if not chosen:
        return pixels
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    for transform in chosen:
        image = transform(image, draws)
    return tensor_of(image)


def mixed(pixels: Tensor, partner: Tensor, names: Sequence[str], draws: np.random.Generator) -> tuple[Tensor, float]:
    """Mix two pictures, uint8 (3, S, S), by one of ``names`` that is in ``MIXES``; also the share of the first."""
    chosen = [mix for name, mix in MIXES.items() if name in names]
    return chosen[draws.integers(len(chosen))](pixels, partner, draws)


def tensor_of(image: Image.Image) -> Tensor:
    """Return the pixels of an RGB image, uint8 (3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def _either_way(magnitude: float, draws: np.random.Generator) -> float:
    return magnitude if draws.random() < 0.5 else -magnitude


def _draw_box(
    size: tuple[int, int], *, scale: tuple[float, float], ratio: tuple[float, float], draws: np.random.Generator
) -> Box:
    """Draw a part of an image by its share of the area and its width to height; the tenth that does not fit shrinks."""
    for _ in range(10):
        root = math.sqrt(math.prod(size) * _between(*scale, draws.random()))
        stretch = math.exp(_between(math.log(ratio[0]), math.log(ratio[1]), draws.random()) / 2)
        shrink = min(1.0, size[0] / (root * stretch), size[1] * stretch / root)
        if shrink == 1:
            break
    width, height = (max(1, round(side * shrink)) for side in (root * stretch, root / stretch))
    left, top = (int(draws.random() * (room + 1)) for room in (size[0] - width, size[1] - height))
    return left, top, left + width, top + height


def normalize(images: Tensor, *, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return pixels 0 to 255, (B, 3, H, W), as ``(pixel / 255 - mean) / std`` per channel in ``dtype``."""
    pixels = images.to(_working_dtype(dtype))
    of_channels = _kept_of_channels if type(pixels) is Tensor else _of_channels
    scaled_mean, scaled_std = (of_channels(tuple(values), pixels.dtype, pixels.device) for values in (mean, std))
    # In place, because on a CPU a third tensor of this size costs more time than the arithmetic.
    return (pixels - scaled_mean).div_(scaled_std).to(dtype)  # (B, 3, H, W)


def _of_channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """255 times a number a channel, (3, 1, 1), made on the device: a copy from the host would wait for it."""
    scaled = 255 * np.asarray(values, np.float64 if dtype == torch.float64 else np.float32)
    with torch.inference_mode(False):  # which training could not save
        return torch.cat([torch.full((1, 1, 1), float(number), dtype=dtype, device=device) for number in scaled])


_kept_of_channels = cache(_of_channels)
"""Of real tensors: eight operators fewer a micro-batch."""


def warp(images: Tensor, affine: Tensor) -> Tensor:
    """Move each image, floating (B, 3, H, W), by its own map of ``draw``, (B, 2, 3); bilinear, zeros from outside."""
    # Under autocast kornia would multiply its matrices in bfloat16 and be pixels off (measured with kornia 0.9).
    with torch.autocast(images.device.type, enabled=False):
        return warp_affine(images, affine.to(images), dsize=(images.shape[-2], images.shape[-1]))


@wrap_torch_function(lambda images, *_, **__: (images,))  # of a wrapper tensor: the whole function for each inner one
def to_pixel_values(
    images: Tensor,
    affine: Tensor | None,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
    bgr: bool = False,
) -> Tensor:
    """Make the model's input of uint8 (B, 3, H, W): warped by maps (B, 2, 3) if given, normalised, in ``dtype``."""
    if affine is not None:
        images = warp(images.to(_working_dtype(dtype)), affine)
    pixels = normalize(images, mean=mean, std=std, dtype=dtype)  # (B, 3, H, W)
    return pixels.flip(1) if bgr else pixels


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
