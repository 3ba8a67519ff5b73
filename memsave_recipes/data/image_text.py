"""Conversations with images as the rows of a model of images and text.

NOTE [ images in conversations ]
1. In a text ``MARK`` stands for an image, in the order of the row's images. Templates get it as a part of the message.
2. Images are of parts of messages (``{"type": "image", "image": ...}``) or of a column ``images``, for parts without
   one and for ``<image>`` in texts; where there are neither, they come before the first message of the user.
3. Their headers are read at the start, their pixels when a micro-batch is made. How many tokens one becomes is what the
   processor makes of a blank image of its size: it is asked once for each size.
4. A micro-batch is what the processor makes of its rows at once: the pixels of some models are patches of all of them.
5. The assistant's text counts in the loss, as of conversations without images (NOTE [ the assistant's tokens ]). Its
   place in the text is moved behind what the processor puts in place of images.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Features, List, Value
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.text import printable_lines
from memsave_recipes.data.fingerprint import Fingerprint, Samples
from memsave_recipes.data.image_rows import ROW, ImageTextArguments, read_splits
from memsave_recipes.data.processors import (
    counted_tokens,
    encoded,
    end_of_turn_of,
    measured_row,
    set_template,
    with_replacements,
)
from memsave_recipes.data.sources import (
    progress_bars,
)
from memsave_recipes.data.text.tokenizers import check_vocabulary, digest_of_tokenizer
from memsave_recipes.data.vision.decoding import decode, reason_of
from memsave_recipes.models.image_text import freeze_unused, largest_size
from memsave_recipes.models.language_model import stop_at

SHOWN = 10  # conversations of --show_labels
MEASURED = Features(
    {
        "text": Value("large_string"),
        "spans": List(List(Value("int64"))),  # of the turns that count
        "length": Value("int64"),  # in tokens
        "area": Value("int64"),  # of the tensor of pixels
        "num_counted": Value("int64"),
    }
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageTextRows(torch.utils.data.Dataset[dict[str, Any]]):
    """A split, whose rows ``collate`` makes a micro-batch of: rule 4 of NOTE [ images in conversations ].

    A key is an ``int`` (a row that counts) or has ``index`` and ``counted``. A row has its ``text`` as the template
    writes it, the ``spans`` in it that count, and its ``images``, decoded.

    Args:
        rows: with the columns of ``MEASURED``, ``images`` and ``place``.
        dtype: of the pixels.
    """

    rows: datasets.Dataset
    processor: Any
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        index, counted = (key, True) if isinstance(key, int) else (key.index, key.counted)
        row = self.rows[index]
        images = [_decoded(image, row["place"]) for image in row["images"]]
        return {"text": row["text"], "spans": row["spans"] if counted else [], "images": images}

    @property
    def is_mixed(self) -> bool:
        """Whether some of the rows have no image."""
        areas = self.rows.with_format("numpy")["area"][:]
        return not areas.all()

    @property
    def smallest(self) -> int:
        """The row with the fewest pixels, but some."""
        areas = self.rows.with_format("numpy")["area"][:]
        return int(np.argmin(np.where(areas > 0, areas, areas.max() + 1)))

    def longest(self, count: int) -> list[int]:
        """Find ``count`` rows: the one with most tokens, by which all are padded, then those with most pixels."""
        lengths, areas = (self.rows.with_format("numpy")[name][:] for name in ("length", "area"))
        first = int(np.argmax(lengths))
        others = np.lexsort((-lengths, -areas))
        return [first, *others[others != first].tolist()][:count]

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the processor's tensors of rows, padded on the right, and ``labels``, (B, T), -100 where none counts."""
        made = encoded(
            self.processor,
            [row["text"] for row in rows],
            [row["images"] for row in rows],
            padding=True,
            padding_side="right",
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        offsets = made.pop("offset_mapping")
        replaced = made.pop("text_replacement_offsets", None) or [[]] * len(rows)
        made.convert_to_tensors("pt")
        counts = [
            counted_tokens(own, with_replacements(row["text"], of_row), of_row, row["spans"])
            for own, of_row, row in zip(offsets, replaced, rows, strict=True)
        ]
        labels = torch.where(torch.from_numpy(np.stack(counts)), made["input_ids"], IGNORED_LABEL)
        tensors = {name: one for name, one in made.items() if isinstance(one, Tensor)}
        in_dtype = {name: one.to(self.dtype) for name, one in tensors.items() if one.is_floating_point()}
        return {**tensors, **in_dtype, "labels": labels}


def largest_micro_batch(
    processor: Any, size: int, flags: ImageTextArguments, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Make a micro-batch of rows that are as long as the flags allow, with blank images as large as those may be.

    Integers have values, as they say what a model runs; pixels, on ``meta``, have none.

    Raises:
        InputError: there is no room for the images in ``block_size`` tokens.
    """
    largest = largest_size(processor)
    images = [Image.new("RGB", largest)] * flags.images_per_row
    text = "\n".join([processor.image_token] * len(images))  # tokens without a gap are one image to some models
    made = encoded(processor, [text], [images], return_tensors="pt")
    num_tokens = made["input_ids"].shape[1]
    rest = flags.block_size - num_tokens
    if rest < 0:
        raise InputError(
            f"--block_size {flags.block_size}: {len(images)} images of {largest[0]} x {largest[1]} pixels are "
            f"{num_tokens:,} tokens: raise it, or lower --max_pixels or --images_per_row"
        )
    row = {name: one for name, one in made.items() if isinstance(one, Tensor)}
    behind = {"input_ids": int(processor.image_token_id == 0), "attention_mask": 1}  # any word but an image
    for name, one in row.items():
        if one.is_floating_point():
            row[name] = torch.empty(one.shape, dtype=dtype, device="meta")
        elif one.shape == (1, num_tokens):
            row[name] = torch.nn.functional.pad(one, (0, rest), value=behind.get(name, 0))
    row["labels"] = row["input_ids"]
    return {name: torch.cat([one] * size) for name, one in row.items()}


def _decoded(stored: dict[str, Any], place: str) -> Image.Image:
    try:
        return decode(stored)
    except Exception as error:  # of Pillow's plugins
        raise InputError(f"{place} has an image that is not readable ({reason_of(error)}): replace it") from error


@dataclass(frozen=True, kw_only=True)
class ImageTextSplits:
    """The rows of both splits, and the processor that makes tensors of them.

    Args:
        end_of_turn: the token at which replies end; ``None`` where the template has none.
    """

    train: ImageTextRows
    validation: ImageTextRows
    processor: Any
    end_of_turn: int | None
    notice: str

    @property
    def texts(self) -> list[str]:
        """Some of the training texts."""
        return list(self.train.rows[:16]["text"])

    @property
    def fingerprint(self) -> Fingerprint:
        """The digests of both splits and of the tokenizer."""
        splits = {"training conversations": self.train.rows, "held-out conversations": self.validation.rows}
        samples = {
            name: Samples(digests=rows.with_format("numpy")["digest"][:], name_of=partial(_place, rows))
            for name, rows in splits.items()
        }
        return Fingerprint(samples=samples, tokenizer=digest_of_tokenizer(self.processor.tokenizer))


def _shown_labels(rows: ImageTextRows) -> str:
    """Write the first conversations as the model reads them; what counts in the loss is in double brackets."""
    image, tokenizer = rows.processor.image_token, rows.processor.tokenizer
    shown = []
    for index in range(min(SHOWN, len(rows))):
        batch = rows.collate([rows[index]])
        (ids,), (labels,) = batch["input_ids"], batch["labels"]
        counted = (labels != IGNORED_LABEL).numpy()
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(counted)) + 1)
        texts = ((counted[run[0]], str(tokenizer.decode(ids[run].tolist()))) for run in runs)
        text = "".join(f"[[{one}]]" if counts else one for counts, one in texts)
        text = re.sub(rf"(?:{re.escape(image)}){{2,}}", lambda row: f"{image} x {len(row[0]) // len(image)} ", text)
        place = _place(rows.rows, index)
        shown.append(f"--show_labels: {counted.sum():,} of {len(ids):,} tokens of {place} count, in [[ ]]:\n{text}")
    return printable_lines("\n".join(shown))


def _place(rows: datasets.Dataset, index: int) -> str:
    return str(rows[index]["place"])


def _texts_of(rows: datasets.Dataset) -> Iterator[str]:
    for conversation in rows["conversation"]:
        yield from (message["content"] for message in json.loads(conversation)["messages"])


def training_texts(flags: ImageTextArguments) -> Iterator[str]:
    """Yield the texts of the conversations that the flags name, read when the first is asked for."""
    yield from _texts_of(read_splits(flags)[0]["train"])


def load_image_text(
    flags: ImageTextArguments, make_processor: Callable[[Iterable[str]], Any], *, dtype: torch.dtype
) -> ImageTextSplits:
    """Load the conversations that the flags name, check the headers of their images, and count their tokens.

    Args:
        make_processor: opens the processor, or makes one for these texts.
        dtype: of the pixels.

    Raises:
        InputError: with file and row (from 1), what is malformed or not supported there; an image that cannot be read;
            rows with too many images or tokens; too few rows to hold any out.
    """
    splits, notes = read_splits(flags)
    processor = make_processor(_texts_of(splits["train"]))
    set_template(processor, flags.chat_template)
    rows = {}
    for split, read in splits.items():
        with progress_bars(len(read) > 1000):
            measured = read.map(
                measured_row,
                input_columns=["conversation", "place", "images"],
                features=Features({**ROW, **MEASURED}),
                fn_kwargs={"processor": processor, "most_images": flags.images_per_row},
                desc="counting tokens",
            )
        kept, note = _short_enough(measured, flags, split)
        notes += note
        rows[split] = ImageTextRows(rows=kept, processor=processor, dtype=dtype)
    end = end_of_turn_of(processor)
    if end is None:
        notes.append("the chat template writes no mark behind a reply, so the model does not learn where to stop")
    train = rows.get("train", rows["validation"])
    return ImageTextSplits(
        train=train,
        validation=rows["validation"],
        processor=processor,
        end_of_turn=end,
        notice="\n".join([f"note: {'; '.join(notes)}", *([_shown_labels(train)] if flags.show_labels else [])]),
    )


def _short_enough(rows: datasets.Dataset, flags: ImageTextArguments, split: str) -> tuple[datasets.Dataset, list[str]]:
    """Return the rows that fit in ``--block_size``, and a line on the others."""
    lengths = rows.with_format("numpy")["length"][:]
    too_long = np.flatnonzero(lengths > flags.block_size)
    if not len(too_long):
        return rows, []
    if len(too_long) == len(rows):
        raise InputError(
            f"--block_size {flags.block_size} has no room for any of the {split} rows, which have {lengths.min():,} "
            "tokens or more: raise it, or lower --max_pixels"
        )
    first = rows[int(too_long[0])]["place"]
    note = (
        f"{len(too_long):,} of {len(rows):,} {split} rows are left out, {first} first: they have more tokens than "
        f"--block_size {flags.block_size}, up to {lengths.max():,}"
    )
    return rows.select(np.flatnonzero(lengths <= flags.block_size)), [note]


def check_model(model: PreTrainedModel, rows: ImageTextSplits, *, in_shards: bool) -> None:
    """Check a model on its device against the rows, and let it stop where replies end.

    Where some rows have no image, weights that no image passes are frozen, so that these have the same gradients.

    Raises:
        InputError: it has fewer words than the tokenizer; or shards, and rows with an image beside others without.
    """
    check_vocabulary(rows.processor.tokenizer, model.config.get_text_config().vocab_size)
    if in_shards and rows.train.is_mixed:
        raise InputError(
            "--shard: some rows have no image, so ranks would gather the weights of the vision tower at other times: "
            "train on rows with images, or without --shard"
        )
    if rows.train.is_mixed:
        batch = rows.train.collate([rows.train[rows.train.smallest]])
        del batch["labels"]
        freeze_unused(model, {name: one.to(model.device) for name, one in batch.items()})
    stop_at(model, rows.end_of_turn)
