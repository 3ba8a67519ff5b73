"""A toy set of images and text without a network: scanned digits in grids, and questions with one short answer each."""

from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image

from memsave_recipes.data.text.conversations import Message
from memsave_recipes.data.vision.images import read_digits

DIGIT_GRIDS = "digit-grids"
CELL = 8  # pixels of a scanned digit a side
MOST = 2  # rows, and columns
NUM_ROWS = {"train": 8192, "validation": 256}


def digit_grids(split: str) -> Iterator[tuple[list[Message], bytes]]:
    """Yield conversations with the PNG of the image that their first message begins with.

    A grid has one or two rows and columns, on a black canvas that is always of one size, and the conversation asks for
    each of its digits. A row is drawn from its number alone; the digits of the splits are different scans.
    """
    digits = read_digits()[split]
    scans, classes = [np.asarray(image.convert("L")) for image in digits["image"]], digits["label"][:]
    for number in range(NUM_ROWS[split]):
        random = np.random.default_rng((number, len(digits)))
        shape = random.integers(1, MOST, size=2, endpoint=True)
        chosen = random.integers(len(scans), size=shape)
        canvas = np.zeros((MOST * CELL, MOST * CELL), dtype=np.uint8)
        messages: list[Message] = []
        for place in random.permutation(chosen.size):
            row, column = divmod(int(place), int(shape[1]))
            canvas[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = scans[chosen[row, column]]
            question = f"Which digit is in row {row + 1}, column {column + 1}?"
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": str(classes[chosen[row, column]])},
            ]
        file = BytesIO()
        Image.fromarray(canvas).save(file, "PNG")
        yield messages, file.getvalue()
