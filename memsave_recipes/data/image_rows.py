"""Conversations with images as they are read: from files, from the Hub, and of the toy. Notes: ``image_text.py``."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Features, List, Value
from PIL import Image

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import join_names
from memsave_recipes.data.fingerprint import digest_of
from memsave_recipes.data.sources import (
    choose_splits,
    find_files,
    generated,
    noted,
    of_rows,
    progress_bars,
    read_files,
    rows_of,
)
from memsave_recipes.data.text.chat_template import (
    ChatArguments,
)
from memsave_recipes.data.text.conversations import (
    CONVERSATION,
    LIST,
    Message,
    as_row,
    check_replies,
    format_of,
    held_out_of,
    parsed,
    read_conversation,
    without_nulls,
)
from memsave_recipes.data.vision.images import read_digits
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name

TABLES = (".jsonl", ".json", ".parquet")
MARK = "\ufffc"  # OBJECT REPLACEMENT CHARACTER
WRITTEN = "<image>"  # for an image, in texts beside a column of images
COLUMNS = ("images", "image")
NOT_IMAGES = ("video", "videos", "audio", "audios")
VALUES = ("image", "path", "url", "image_url", "base64")  # keys of a part that may hold an image
STORED = {"bytes": Value("binary"), "path": Value("string")}
ROW = Features({**CONVERSATION, "images": List(STORED)})
DIGIT_GRIDS = "digit-grids"
CELL, MOST_CELLS = 8, 2  # pixels of a scanned digit a side; digits of a grid a side
NUM_GRIDS = {"train": 8192, "validation": 256}


@dataclass(kw_only=True)
class ImageTextArguments(ChatArguments):
    """The conversations, their images and the processor of both."""

    dataset: str | None = option(None, "built in: digit-grids (default); or a Hub id")
    dataset_config_name: str | None = option(None, "configuration of a Hub data set")
    train_file: list[str] | None = option(
        None, 'files, folders, "patterns/*": .jsonl, .json, .parquet', shown="first", resume="place"
    )
    validation_file: list[str] | None = option(None, "the same; default: a twentieth of --train_file", resume="place")
    processor_name: str | None = option(None, "folder or Hub id; default: the model's own", resume="place")
    block_size: int = option(
        1024, "tokens of the longest row, those of images among them; longer ones are left out", least=2
    )
    max_pixels: int | None = option(None, "of an image; larger ones are made smaller", least=1)
    images_per_row: int = option(1, "images that a row may have", least=1)
    show_labels: bool = option(False, "print ten conversations, and mark what counts in the loss", resume="free")

    def __post_init__(self) -> None:
        if self.dataset and (self.train_file or self.validation_file):
            raise InputError("give the conversations by exactly one of --dataset digit-grids, HUB_ID and --train_file")
        if self.validation_file and not (self.train_file or vars(self).get("eval_only")):
            raise InputError("--validation_file needs --train_file or --eval_only: give both, or neither")
        if self.dataset_config_name and self.dataset in (None, DIGIT_GRIDS):
            raise InputError("--dataset_config_name needs --dataset HUB_ID: leave it out")
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else DIGIT_GRIDS)


def read_splits(flags: ImageTextArguments) -> tuple[dict[str, datasets.Dataset], list[str]]:
    """Read rows of ``ROW`` by their split, and lines on them."""
    if flags.dataset == DIGIT_GRIDS:
        source = f"--dataset {DIGIT_GRIDS}"
        with progress_bars(False):
            made = {split: generated(_grids, ROW, source, split=split) for split in ("train", "validation")}
        return made, [
            f"{source} is a toy: {len(made['train']):,} grids with questions, {len(made['validation'])} held out"
        ]
    source = f"--dataset {flags.dataset}"
    if flags.dataset is not None:
        with loading_by_name(flags.dataset, source, "check --dataset_config_name"):
            found = datasets.load_dataset(flags.dataset, flags.dataset_config_name)
        chosen = choose_splits(found, source)
        splits = {
            split: generated(_of_hub, ROW, source, rows=found[name], named=f"{source} split {name}")
            for split, name in chosen.items()
        }
    else:
        words = {"train": flags.train_file, "validation": flags.validation_file}
        splits = {split: _read_files(f"--{split}_file", named) for split, named in words.items() if named}
        source = f"--train_file {join_names(flags.train_file or [])}"
    notes = of_rows(splits.values())
    if "validation" not in splits:
        splits, note = held_out_of(splits["train"], source)
        notes = [note, *notes]
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    return splits, [f"{sizes} conversations", *notes]


def _read_files(flag: str, words: list[str]) -> datasets.Dataset:
    found = find_files(flag, words, TABLES)
    return read_files(found, _of_files, ROW, f"{flag} {join_names(found.files)}", flag=flag)


def _of_files(files: Iterable[str], flag: str, version: str) -> Iterator[dict[str, Any]]:
    for path in files:
        keys = None
        for number, row in rows_of(path, f"{flag} {path}"):
            place = f"{flag} {path} row {number}"
            keys = keys or format_of(row, place)
            yield _as_row(row, place, keys, Path(path).parent)


def _of_hub(rows: datasets.Dataset, named: str) -> Iterator[dict[str, Any]]:
    keys = None
    for number, row in enumerate(rows.to_iterable_dataset().decode(False), start=1):
        place = f"{named} row {number}"
        keys = keys or format_of(row, place)
        yield _as_row(row, place, keys, None)


def _grids(split: str) -> Iterator[dict[str, Any]]:
    for number, (messages, image) in enumerate(_digit_grids(split), start=1):
        row = {"messages": messages, "images": [{"bytes": image, "path": None}]}
        yield _as_row(row, f"{split} grid {number}", ("messages",), None)


def _digit_grids(split: str) -> Iterator[tuple[list[Message], bytes]]:
    """Yield conversations about scanned digits, with the PNG of the image that their first message begins with.

    A grid has one or two rows and columns, on a black canvas that is always of one size, and the conversation asks for
    each of its digits. A row is drawn from its number alone; the digits of the splits are different scans.
    """
    digits = read_digits()[split]
    scans, classes = [np.asarray(image.convert("L")) for image in digits["image"]], digits["label"][:]
    for number in range(NUM_GRIDS[split]):
        random = np.random.default_rng((number, len(digits)))
        shape = random.integers(1, MOST_CELLS, size=2, endpoint=True)
        chosen = random.integers(len(scans), size=shape)
        canvas = np.zeros((MOST_CELLS * CELL, MOST_CELLS * CELL), dtype=np.uint8)
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


def _as_row(row: dict[str, Any], place: str, keys: tuple[str, ...], folder: Path | None) -> dict[str, Any]:
    marked, images = take_images(row, place, keys, folder)
    chat = read_conversation(without_nulls(marked), place, keys)
    check_replies(chat, place)
    for message in chat["messages"]:
        if message["role"] == "assistant" and MARK in message["content"]:
            raise InputError(f"{place} has an image in a reply, which the model does not write: remove it or the row")
    made = as_row(chat, place)
    identity = [_name_of(one["path"], folder) if one["bytes"] is None else digest_of(one["bytes"]) for one in images]
    digest = digest_of(f"{made['digest']} {identity}".encode())
    return {**made, **noted(chat.get("unused", ())), "digest": digest, "images": images}


def take_images(
    row: dict[str, Any], place: str, keys: tuple[str, ...], folder: Path | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a row with ``MARK`` in place of its images, and these: rules 1 and 2 of the note.

    Args:
        keys: of the messages.
        folder: that paths of images begin in.
    """
    for key in NOT_IMAGES:
        if row.get(key):
            raise InputError(f"{place} has {key}, and only images and texts are trained on: remove the row")
    column = [_stored(one, place, folder) for key in COLUMNS for one in _listed(row.get(key))]
    found: list[dict[str, Any] | None] = []  # None: the next one of the column

    def marked(content: Any) -> Any:
        if isinstance(content, str):
            text = content.replace(WRITTEN, MARK) if column else content
            if MARK in content:
                raise InputError(f"{place} holds the character U+FFFC, which stands for an image here: remove it")
            found.extend([None] * text.count(MARK))
            return text
        return "".join(map(of_part, content)) if isinstance(content, list) else content

    def of_part(part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url"):
            values = [part[key] for key in VALUES if part.get(key) is not None]
            found.append(_stored(values[0], place, folder) if values else None)
            return MARK
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f"{place} has a part of type {kind!r}: only images and texts are trained on; remove the row"
            )
        return str(marked(part["text"]))

    taken = {key: value for key, value in row.items() if key not in COLUMNS}
    for key in keys:
        value = parsed(row[key], key, place) if LIST.match(str(row[key])) else row[key]
        taken[key] = [_changed(one, marked) for one in value] if isinstance(value, list) else marked(value)
    if column and not found:
        taken[keys[0]] = _in_front(taken[keys[0]], MARK * len(column), place)
        found = [None] * len(column)
    if found.count(None) != len(column):
        raise InputError(
            f"{place} has {len(column)} images in its column and {found.count(None)} places for them in its messages: "
            "correct the row"
        )
    rest = iter(column)
    return taken, [next(rest) if one is None else one for one in found]


def _changed(message: Any, marked: Callable[[Any], Any]) -> Any:
    key = next((key for key in ("content", "value") if isinstance(message, dict) and key in message), None)
    return message if key is None else {**message, key: marked(message[key])}


def _in_front(value: Any, marks: str, place: str) -> Any:
    """Put ``marks`` before the first message of the user, or before a prompt."""
    if isinstance(value, str):
        return marks + value
    for at, message in enumerate(value):
        if {"user", "human"} & {message.get("role"), message.get("from")}:
            return [*value[:at], _changed(message, lambda content: f"{marks}{content}"), *value[at + 1 :]]
    raise InputError(f"{place} has images and no message of a user: add one or remove the row")


def _name_of(path: str, folder: Path | None) -> str:
    """Return a path as rows have it, wherever their folder is."""
    return path if folder is None else os.path.relpath(path, folder)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _stored(value: Any, place: str, folder: Path | None) -> dict[str, Any]:
    """Return an image as ``datasets`` stores it."""
    if isinstance(value, bytes):
        return {"bytes": value, "path": None}
    if isinstance(value, dict) and value.get("bytes"):
        return {"bytes": value["bytes"], "path": None}
    path = next((value[key] for key in ("path", "url") if value.get(key)), None) if isinstance(value, dict) else value
    if not isinstance(path, str):
        raise InputError(f"{place} has an image that is neither a path nor bytes: correct the row")
    if path.startswith(("http:", "https:", "data:")):
        raise InputError(f"{place} has an image at a URL or in base64: save it as a file and give its path")
    return {"bytes": None, "path": str(path if folder is None else folder / path)}
