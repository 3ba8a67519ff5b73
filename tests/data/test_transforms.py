"""Named transforms of one picture: values worked out by hand, the same on any layout, labels that follow the pixels."""

import random

import numpy as np
import pytest
import torch
from pictures import load, picture, refusal
from PIL import Image

from memsave_recipes.core.step.batch_layout import BatchLayout, MicroBatchSampler, SampleKey, SampleOrder
from memsave_recipes.data.vision.augmentation import (
    AUGMENTATIONS,
    CROP,
    MIXES,
    OPERATIONS,
    PICTURES,
    TRANSFORMS,
    generator_of,
    mixed,
    random_resized_crop,
    tensor_of,
    transformed,
)
from memsave_recipes.data.vision.images import ImageDataArguments

ALL = " ".join(TRANSFORMS)


class Scripted:
    """A generator that draws what the test says, first come first served."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def random(self, size=None):
        return self.draws.pop(0) if size is None else np.array([self.draws.pop(0) for _ in range(size)])

    def integers(self, high):
        draw = self.draws.pop(0)
        assert 0 <= draw < high
        return draw

    def beta(self, one, other):
        assert one == other == 0.2
        return self.draws.pop(0)

    def permutation(self, count):
        assert count == 3
        return self.draws.pop(0)


def plain(*channels, size=(8, 8)):
    return Image.new("RGB", size, channels)


def colour(image):
    """Of a picture that has only one."""
    ((_, found),) = image.getcolors()
    return found


# One picture


@pytest.mark.parametrize("name", PICTURES)
def test_a_transform_follows_from_its_key_alone(name):
    pixels = tensor_of(picture(size=(16, 16)))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def drawn(index):
        return transformed(pixels, [name], generator_of(seed=3, epoch=2, index=index, stream=2))

    assert all(torch.equal(drawn(index), drawn(index)) for index in range(8))
    assert any(not torch.equal(drawn(0), drawn(index)) for index in range(1, 8))
    assert torch.equal(pixels, tensor_of(picture(size=(16, 16))))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_streams_of_a_sample_are_not_the_same_draws():
    draws = [generator_of(seed=0, epoch=0, index=5, stream=stream).random(4) for stream in range(4)]
    assert len({tuple(one) for one in draws}) == 4


def test_a_flip_is_left_to_right():
    image = picture(size=(4, 4))
    mirrored = np.asarray(image)[:, ::-1]
    assert np.array_equal(np.asarray(PICTURES["flip"](image, Scripted(0.49))), mirrored)
    assert PICTURES["flip"](image, Scripted(0.5)) is image


def test_color_jitter_multiplies():
    """Brightness 0.6 + 0.8 x 0.75 = 1.2; a picture of one grey has no contrast and no saturation."""
    assert colour(PICTURES["color_jitter"](plain(100, 100, 100), Scripted([0, 1, 2], 0.75, 0, 1))) == (120, 120, 120)
    # Saturation 0.6: from red's luma, 0.299 x 200 = 60, 60 + 0.6 x (200 - 60) = 144 and 60 - 0.6 x 60 = 24.
    assert colour(PICTURES["color_jitter"](plain(200, 0, 0), Scripted([2, 1, 0], 0, 0.5, 0.5))) == (144, 24, 24)


STEPS = Image.fromarray(np.repeat(np.arange(0, 224, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(224, axis=0))
"""224 pixels a side; the value of a pixel is its column."""
(
    IDENTITY,
    SHEAR_X,
    SHEAR_Y,
    SHIFT_X,
    SHIFT_Y,
    TURN,
    BRIGHTNESS,
    COLOR,
    CONTRAST,
    SHARPNESS,
    BITS,
    SOLARIZE,
    AUTO,
    EQUAL,
) = range(14)


def strongest(operation, image, way=0.0):
    """As TrivialAugment applies it at bin 30 of 30; ``way`` below 0.5 is the positive one."""
    return np.asarray(PICTURES["trivialaugment"](image, Scripted(operation, 30, way)))[..., 0]


def test_trivialaugments_largest_magnitudes_by_hand():
    columns = np.arange(224)
    assert np.array_equal(strongest(IDENTITY, STEPS)[0], columns)
    assert np.array_equal(strongest(SHIFT_X, STEPS)[7], [*columns[32:], *[0] * 32])
    assert np.array_equal(strongest(SHIFT_X, STEPS, 0.5)[7], [*[0] * 32, *columns[:-32]])
    assert np.array_equal(strongest(SHIFT_Y, STEPS)[:, 9], [9] * 192 + [0] * 32)
    assert strongest(SHEAR_X, STEPS)[100, 20] == 20 + round(0.99 * 100.5)  # 0.5: the middle of row 100
    assert strongest(SHEAR_Y, STEPS)[0, 20] == 20
    assert strongest(SHEAR_Y, STEPS)[210, 20] == 0  # row 231 is outside
    assert np.array_equal(strongest(BITS, STEPS)[0], columns // 64 * 64)  # 2 bits
    assert np.array_equal(strongest(SOLARIZE, STEPS)[0], 255 - columns)
    assert strongest(BRIGHTNESS, plain(100, 100, 100)).max() == 199
    assert strongest(BRIGHTNESS, plain(100, 100, 100), 0.5).max() == 1
    assert strongest(COLOR, plain(100, 100, 100)).max() == 100
    assert strongest(AUTO, STEPS).max() == 255
    assert strongest(EQUAL, plain(100, 100, 100)).max() == 100
    turned = strongest(TURN, STEPS)  # by 135 degrees about the centre: the corners come from outside, the middle stays
    assert turned[0, 0] == turned[-1, -1] == 0
    assert abs(int(turned[112, 112]) - 112) <= 2


def test_randaugment_applies_two_operations_at_magnitude_9_of_30():
    """Brightness by 1 - 0.9 x 0.3 = 0.73, then solarize from 255 - 76 = 179 on; 4 bits x 0.3 = 1.2, so 7 bits."""
    drawn = Scripted(BRIGHTNESS, 0.5, SOLARIZE, 0.0)
    assert colour(PICTURES["randaugment"](plain(100, 200, 250), drawn)) == (73, 146, 255 - 182)
    assert colour(PICTURES["randaugment"](plain(101, 3, 0), Scripted(BITS, 0.5, IDENTITY, 0.5))) == (100, 2, 0)


@pytest.mark.parametrize("name", ["randaugment", "trivialaugment"])
def test_a_policy_draws_every_operation(name, monkeypatch):
    seen = []
    watched = [
        (*largest, lambda image, by, at=at: seen.append(at) or image) for at, (*largest, _) in enumerate(OPERATIONS)
    ]
    monkeypatch.setattr("memsave_recipes.data.vision.augmentation.OPERATIONS", watched)
    for index in range(200):
        PICTURES[name](plain(1, 2, 3), generator_of(seed=0, epoch=0, index=index))
    assert set(seen) == set(range(14))


def test_erasing_puts_noise_over_a_part_every_other_time():
    shares = []
    for index in range(300):
        erased = PICTURES["erasing"](plain(7, 7, 7, size=(50, 40)), generator_of(seed=0, epoch=0, index=index))
        changed = (np.asarray(erased) != 7).any(axis=2)
        shares.append(changed.mean())
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        if len(rows):
            assert changed.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    erased_shares = [share for share in shares if share]
    assert 0.4 < len(erased_shares) / 300 < 0.6
    assert 0.01 < min(erased_shares) < 0.04
    assert 0.28 < max(erased_shares) < 0.35


# Random resized crops


GRADIENT = Image.fromarray(
    np.stack([*np.meshgrid(np.arange(200), np.arange(100)), np.zeros((100, 200))], axis=2).astype(np.uint8)
)
"""Red is the column, green the row."""


def test_a_crop_is_the_resized_box_that_was_drawn():
    """A quarter of 20,000 pixels as a square: 71 x 71; of the room of 130 and 30 places, number 65 and number 29."""
    scale = (0.25 - 0.08) / 0.92
    found = random_resized_crop(GRADIENT, 32, Scripted(scale, 0.5, 0.5, 0.999))
    expected = GRADIENT.resize((32, 32), Image.Resampling.BILINEAR, box=(65, 29, 136, 100))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_crops_have_8_to_100_percent_and_reach_the_ends():
    areas, lefts, rights = [], [], []
    for index in range(400):
        found = random_resized_crop(GRADIENT, 50, generator_of(seed=0, epoch=0, index=index))
        pixels = np.asarray(found).astype(float)
        width = (pixels[25, 40, 0] - pixels[25, 10, 0]) / 30 * 50
        height = (pixels[40, 25, 1] - pixels[10, 25, 1]) / 30 * 50
        areas.append(width * height / 20_000)
        lefts.append(pixels[25, 0, 0])
        rights.append(pixels[25, -1, 0])
        assert 0.6 < width / height < 1.6  # 3/4 to 4/3, read off whole numbers
    assert 0.06 < min(areas) < 0.1
    assert max(areas) > 0.5
    assert min(lefts) <= 4
    assert max(rights) >= 195


def test_what_never_fits_is_shrunk():
    """The whole area at a ratio of 4/3 does not fit into 100 x 100: 100 x 75, at the top left."""
    square = GRADIENT.crop((0, 0, 100, 100))
    found = random_resized_crop(square, 25, Scripted(*[1.0] * 20, 0.0, 0.0))
    expected = square.resize((25, 25), Image.Resampling.BILINEAR, box=(0, 0, 100, 75))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


# Two pictures


def test_mixup_is_a_weighted_mean():
    one, other = torch.full((3, 2, 2), 200, dtype=torch.uint8), torch.full((3, 2, 2), 101, dtype=torch.uint8)
    pixels, share = mixed(one, other, ["mixup"], Scripted(0, 0.25))
    assert share == 0.25
    assert pixels.dtype == torch.uint8
    assert pixels.unique().tolist() == [126]  # 50 + 75.75


def test_cutmix_puts_a_square_in_and_counts_its_pixels():
    """A quarter of 8 x 8 about (1, 4): columns -1 to 3, of which 0 to 3 are there, and rows 2 to 6."""
    one, other = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 9, dtype=torch.uint8)
    pixels, share = mixed(one, other, ["cutmix"], Scripted(0, 0.25, 1 / 8, 4 / 8))
    assert share == 1 - 12 / 64
    expected = torch.zeros(3, 8, 8, dtype=torch.uint8)
    expected[:, 2:6, :3] = 9
    assert torch.equal(pixels, expected)
    assert one.max() == 0


def test_of_two_mixes_each_sample_takes_one():
    one, other = torch.full((3, 8, 8), 10, dtype=torch.uint8), torch.full((3, 8, 8), 110, dtype=torch.uint8)
    kinds = []
    for index in range(200):
        pixels, share = mixed(one, other, ALL.split(), generator_of(seed=0, epoch=0, index=index))
        kinds.append(len(pixels.unique()))
        assert pixels.float().mean().item() == pytest.approx(110 - 100 * share, abs=0.51)
    assert 60 < kinds.count(2) < 140  # cutmix shows both pictures


# The data set


def test_labels_are_the_shares_of_the_classes():
    flags = {"dataset": "digits", "seed": 5}
    train, bare = load(augmentation="mixup", **flags).train, load(**flags).train
    key = SampleKey(3, epoch=2, partner=7)
    pixels, share = mixed(
        bare[3]["images"], bare[7]["images"], ["mixup"], generator_of(seed=5, epoch=2, index=3, stream=3)
    )
    expected = torch.zeros(10)
    expected[bare[3]["labels"]] = share
    expected[bare[7]["labels"]] = 1 - share
    assert bare[3]["labels"] != bare[7]["labels"]
    assert 0 < share < 1
    assert torch.equal(train[key]["images"], pixels)
    assert torch.equal(train[key]["labels"], expected)
    alone = train[SampleKey(3, epoch=2)]
    assert torch.equal(alone["images"], bare[3]["images"])
    assert torch.equal(alone["labels"], torch.nn.functional.one_hot(bare[3]["labels"], 10).float())
    assert train[SampleKey(3, counted=False)]["labels"].isnan().all()


def test_the_partner_is_the_sample_before_in_the_global_batch():
    order = SampleOrder(num_samples=7, global_batch_size=3, seed=None)
    layout = BatchLayout.of(3, 1, 2)
    ranks = [
        list(MicroBatchSampler(order=order, layout=layout, rank=rank, first_step=0, last_step=3)) for rank in range(2)
    ]
    keys = [key for rank in ranks for micro_batch in rank for key in micro_batch if key.counted]
    assert {key.index: key.partner for key in keys} == {0: 2, 1: 0, 2: 1, 3: 5, 4: 3, 5: 4, 6: 6}


LAYOUTS = {"accumulation": (5, 1), "ranks": (2, 3), "one by one": (1, 2)}


def pictures_of(layout, first_step=5):
    """The samples of two steps by index, as a run gives them that goes on after ``first_step`` steps."""
    micro_batch_size, num_ranks = layout
    train = load(dataset="digits", augmentation=ALL, seed=3).train
    order = SampleOrder(num_samples=len(train), global_batch_size=12, seed=3)
    found = {}
    for rank in range(num_ranks):
        sampler = MicroBatchSampler(
            order=order,
            layout=BatchLayout.of(12, micro_batch_size, num_ranks),
            rank=rank,
            first_step=first_step,
            last_step=7,
        )
        for keys in sampler:
            found |= {key.index: sample for key, sample in zip(keys, train.__getitems__(keys), strict=True)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_a_resumed_run_have_the_same_pictures(layout):
    whole, cut, resumed = pictures_of((12, 1)), pictures_of(LAYOUTS[layout]), pictures_of(LAYOUTS[layout], 6)
    assert len(whole) == 24
    assert len(resumed) == 12
    for index, sample in (cut | resumed).items():
        assert torch.equal(sample["images"], whole[index]["images"])
        assert torch.equal(sample["labels"], whole[index]["labels"])


def test_crops_are_of_the_whole_image_and_drawn_anew_in_every_epoch(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for index in range(2):
            GRADIENT.save(tmp_path / label / f"{index}.png")
    splits = load(data_dir=str(tmp_path), augmentation=CROP)
    reds = [splits.train[SampleKey(0, epoch)]["images"][0] for epoch in range(40)]
    assert min(red.min() for red in reds) < 50  # the middle square, columns 50 to 150, is what the validation has
    assert max(red.max() for red in reds) > 150
    assert 50 <= splits.validation[0]["images"][0].min() <= 60
    assert len({tuple(red.flatten().tolist()) for red in reds}) == 40


def test_validation_images_keep_their_pixels_and_classes():
    validation, bare = (load(dataset="digits", **flags).validation for flags in ({"augmentation": ALL}, {}))
    assert torch.equal(validation[0]["images"], bare[0]["images"])
    assert torch.equal(validation[0]["labels"], bare[0]["labels"])


@pytest.mark.parametrize("words", ["mixup flip", ["mixup", "flip", "mixup"]])
def test_names_are_taken_in_any_order_as_text_or_as_a_list(words):
    flags = ImageDataArguments(augmentation=words)
    assert (flags.augmentation, flags.transforms) == ("flip mixup", ("flip", "mixup"))
    assert flags.mixes
    assert flags.affine is None


def test_the_warps_are_what_they_were():
    flags = ImageDataArguments(augmentation="article")
    assert (flags.transforms, flags.mixes, flags.affine) == ((), False, AUGMENTATIONS["article"])
    assert ImageDataArguments().augmentation == "digits"
    assert not ImageDataArguments(augmentation="flip").mixes


@pytest.mark.parametrize("words", ["flop", "none flip", ["article", "digits"], "flip flop"])
def test_other_names_are_refused_in_one_line(words):
    shown = words if isinstance(words, str) else " ".join(words)
    line = refusal(augmentation=words)
    assert line.startswith(f"--augmentation {shown}: must be one of article, digits, none, or some of color_jitter, ")
    assert all(name in line for name in (*PICTURES, *MIXES, CROP))
