"""Pictures of noise, and images loaded or refused."""

from io import BytesIO

import numpy as np
from PIL import Image
from refusals import line_of

from memsave_recipes.data.vision.images import ImageDataArguments, load_images


def picture(seed=0, size=(20, 14)):
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(extension):
    buffer = BytesIO()
    picture(size=(64, 64)).save(buffer, extension)
    return buffer.getvalue()


def load(**changes):
    options = {"image_size": 16, "augmentation": "none", **changes}
    seed = options.pop("seed", 0)
    return load_images(ImageDataArguments(**options), seed=seed)


def refusal(**options):
    return line_of(load, **options)
