"""One affine map a sample: a pure function of its key, equal to kornia's transforms, blind to the rest of its batch."""

import math
import random
from dataclasses import replace

import kornia.geometry.transform as kornia_transform
import numpy as np
import pytest
import torch
from PIL import Image

from memsave_recipes.data.vision.augmentation import Augmentation, normalize, to_pixel_values, warp

SIZE = 24
STILL = Augmentation(degrees=0.0, flip_probability=0.0, translate=0.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))
EVERYTHING = Augmentation(degrees=30.0, flip_probability=0.5, translate=0.1, scale=(0.4, 1.0), ratio=(0.7, 1.4))
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def draw(augmentation, count=16, *, seed=3, epoch=2):
    maps = [augmentation.draw(seed=seed, epoch=epoch, index=index, image_size=SIZE) for index in range(count)]
    return torch.stack(maps)


def images(count=16, dtype=torch.float64):
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def square(affine):
    return torch.cat([affine.double(), torch.tensor([[[0.0, 0.0, 1.0]]]).double().expand(len(affine), 1, 3)], dim=1)


def test_a_map_is_a_function_of_seed_epoch_and_index_alone():
    first = draw(EVERYTHING)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert first.shape == (16, 2, 3)
    assert first.dtype == torch.float32
    assert torch.equal(first, draw(EVERYTHING))


def test_drawing_moves_no_global_generator():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    draw(EVERYTHING)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_every_key_has_its_own_map():
    keys = [(seed, epoch, index) for seed in range(8) for epoch in range(8) for index in range(8)]
    maps = {
        tuple(EVERYTHING.draw(seed=seed, epoch=epoch, index=index, image_size=SIZE).flatten().tolist())
        for seed, epoch, index in keys
    }
    assert len(maps) == len(keys)


@pytest.mark.parametrize("along", ["epoch", "index"])
def test_neighbouring_keys_are_drawn_independently(along):
    key = {"seed": 0, "epoch": 0, "index": 0, "image_size": SIZE}
    turns = [replace(STILL, degrees=30.0).draw(**{**key, along: place})[0, 1].item() for place in range(2000)]
    angles = np.degrees(np.arcsin(turns))
    assert angles.min() > -30.001
    assert angles.max() < 30.001
    assert abs(angles.mean()) < 4 * 30 / math.sqrt(3 * 2000)  # four standard errors of a uniform draw
    assert angles.std() == pytest.approx(30 / math.sqrt(3), rel=0.05)
    assert abs(np.corrcoef(angles[:-1], angles[1:])[0, 1]) < 4 / math.sqrt(2000)


def test_no_range_is_no_change():
    assert torch.equal(draw(STILL), torch.eye(2, 3).expand(16, 2, 3))
    assert torch.allclose(warp(images(), draw(STILL)), images(), atol=1e-12)


def test_rotation_is_kornias():
    affine = draw(replace(STILL, degrees=30.0))
    degrees = torch.rad2deg(torch.atan2(affine[:, 0, 1], affine[:, 0, 0])).double()
    assert degrees.abs().max() > 20
    expected = kornia_transform.rotate(images(), degrees)
    assert torch.allclose(warp(images(), affine), expected, atol=1e-5)


def test_flip_is_kornias():
    flipped = warp(images(), draw(replace(STILL, flip_probability=1.0)))
    assert torch.allclose(flipped, kornia_transform.hflip(images()), atol=1e-12)


def test_flips_are_as_frequent_as_asked():
    flipped = draw(replace(STILL, flip_probability=0.25), count=2000)[:, 0, 0] < 0
    assert flipped.double().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 2000))


def test_shift_is_kornias_and_as_far_as_asked():
    affine = draw(replace(STILL, translate=0.25))
    assert 3 < affine[:, :, 2].abs().max() <= SIZE * 0.25
    expected = kornia_transform.translate(images(), affine[:, :, 2].double())
    assert torch.allclose(warp(images(), affine), expected, atol=1e-6)


def test_crop_is_pillows_resized_box():
    affine = draw(replace(STILL, scale=(0.3, 0.6), ratio=(0.75, 4 / 3)))
    warped = warp(images(), affine)
    for image, matrix, ours in zip(images(), affine.double(), warped, strict=True):
        left, top, right, bottom = box_of(matrix)
        pillow = Image.fromarray(image[0].numpy().astype(np.float32)).resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, right, bottom)
        )
        # At the image's border Pillow repeats the outermost pixel where the warp blends into black.
        assert np.allclose(np.asarray(pillow)[2:-2, 2:-2], ours[0, 2:-2, 2:-2].numpy(), atol=1e-4)


def box_of(matrix):
    """The window that a pure crop maps onto the whole image, in edge coordinates."""
    width, height = SIZE / matrix[0, 0].item(), SIZE / matrix[1, 1].item()
    left = 0.5 - (matrix[0, 2].item() + 0.5) / matrix[0, 0].item()
    top = 0.5 - (matrix[1, 2].item() + 0.5) / matrix[1, 1].item()
    return left, top, left + width, top + height


def test_crops_keep_the_asked_area_and_ratio_and_stay_inside():
    boxes = np.array([box_of(matrix) for matrix in draw(replace(STILL, scale=(0.3, 0.5), ratio=(0.8, 1.25)), 500)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, ratios = widths * heights / SIZE**2, widths / heights
    assert boxes.min() > -1e-4
    assert boxes.max() < SIZE + 1e-4
    assert [areas.min(), areas.max(), ratios.min(), ratios.max()] == pytest.approx([0.3, 0.5, 0.8, 1.25], rel=0.02)


def test_a_crop_is_never_larger_than_the_image():
    boxes = np.array([box_of(matrix) for matrix in draw(replace(STILL, ratio=(0.5, 2.0)), 100)])
    assert boxes.min() > -1e-4
    assert boxes.max() < SIZE + 1e-4


def test_the_whole_is_rotation_then_shift_then_flip_then_crop():
    rotation = square(draw(replace(STILL, degrees=30.0)))
    shift = square(draw(replace(STILL, translate=0.1)))
    flip = square(draw(replace(STILL, flip_probability=0.5)))
    crop = square(draw(replace(STILL, scale=(0.4, 1.0), ratio=(0.7, 1.4))))
    assert torch.allclose(square(draw(EVERYTHING)), crop @ flip @ shift @ rotation, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_does_not_depend_on_its_batch(dtype):
    batch, affine = images(dtype=dtype), draw(EVERYTHING)
    together = warp(batch, affine)
    alone = torch.cat([warp(batch[place : place + 1], affine[place : place + 1]) for place in range(16)])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(together, alone)
    assert torch.equal(together[order], warp(batch[order], affine[order]))


def test_autocast_does_not_blur_the_coordinates():
    plain = warp(images(dtype=torch.float32), draw(EVERYTHING))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain, warp(images(dtype=torch.float32), draw(EVERYTHING)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pixel_values_are_scaled_then_normalised(dtype):
    pixels = torch.randint(0, 256, (4, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(IMAGENET[name], dtype=torch.float64).view(1, 3, 1, 1) for name in ("mean", "std"))
    expected = (pixels.double() / 255 - mean) / std
    values = to_pixel_values(pixels, None, **IMAGENET, dtype=dtype)
    assert values.dtype == dtype
    assert torch.allclose(values.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    assert torch.equal(values, normalize(pixels, **IMAGENET, dtype=dtype))


def test_what_a_map_uncovers_is_black():
    white = torch.full((1, 3, SIZE, SIZE), 255, dtype=torch.uint8)
    away = torch.tensor([[[1.0, 0.0, SIZE / 2], [0.0, 1.0, 0.0]]])
    values = to_pixel_values(white, away, **IMAGENET, dtype=torch.float64)
    bounds = normalize(
        torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1), **IMAGENET, dtype=torch.float64
    )
    assert torch.allclose(values[0, :, :, : SIZE // 2], bounds[0].expand(3, SIZE, SIZE // 2))
    assert torch.allclose(values[0, :, :, SIZE // 2 :], bounds[1].expand(3, SIZE, SIZE // 2))


def test_half_precision_rounds_the_result_only():
    pixels = torch.randint(0, 256, (16, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exact = to_pixel_values(pixels, draw(EVERYTHING), **IMAGENET, dtype=torch.float32)
    assert torch.equal(exact.bfloat16(), to_pixel_values(pixels, draw(EVERYTHING), **IMAGENET, dtype=torch.bfloat16))
