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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Features, List, Value
from PIL import ExifTags, Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedModel
from transformers.utils.chat_template_utils import render_jinja_template

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.text import join_names
from memsave_recipes.data.digit_grids import DIGIT_GRIDS, digit_grids
from memsave_recipes.data.fingerprint import Fingerprint, Samples, digest_of
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
    CHATML,
    CHATML_END,
    CHATML_START,
    CHATML_TOKENS,
    GENERATION,
    OWN_TEMPLATE,
    ChatArguments,
    ChatTemplate,
    in_spans,
    set_chat_template,
)
from memsave_recipes.data.text.conversations import (
    CONVERSATION,
    LIST,
    ROLES,
    Conversation,
    Message,
    as_row,
    check_replies,
    format_of,
    held_out_of,
    parsed,
    read_conversation,
    without_nulls,
)
from memsave_recipes.data.text.tokenizers import check_vocabulary, digest_of_tokenizer, load_tokenizer
from memsave_recipes.data.vision.decoding import GREY, decode, defect_of_header, reason_of
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name
from memsave_recipes.models.image_text import freeze_unused, limit_pixels, open_processor
from memsave_recipes.models.language_model import stop_at
from memsave_recipes.models.pretrained import configuration_of

TABLES = (".jsonl", ".json", ".parquet")
MARK = "\ufffc"  # OBJECT REPLACEMENT CHARACTER
WRITTEN = "<image>"  # for an image, in texts beside a column of images
COLUMNS = ("images", "image")
NOT_IMAGES = ("video", "videos", "audio", "audios")
PIXELS = "pixel_values"
VALUES = ("image", "path", "url", "image_url", "base64")  # keys of a part that may hold an image
STORED = {"bytes": Value("binary"), "path": Value("string")}
ROW = Features({**CONVERSATION, "images": List(STORED)})
MEASURED = Features(
    {
        "text": Value("large_string"),
        "spans": List(List(Value("int64"))),  # of the turns that count
        "length": Value("int64"),  # in tokens
        "area": Value("int64"),  # of the tensor of pixels
        "num_counted": Value("int64"),
    }
)


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
    block_size: int = option(1024, "tokens that a row may have, those of its images among them", least=2)
    drop_long: bool = option(False, "leave rows out that have more; else they are refused")
    max_pixels: int | None = option(None, "of an image; larger ones are made smaller", least=1)
    images_per_row: int = option(1, "images that a row may have", least=1)

    def __post_init__(self) -> None:
        if self.dataset and (self.train_file or self.validation_file):
            raise InputError("give the conversations by exactly one of --dataset digit-grids, HUB_ID and --train_file")
        if self.validation_file and not (self.train_file or vars(self).get("eval_only")):
            raise InputError("--validation_file needs --train_file or --eval_only: give both, or neither")
        if self.dataset_config_name and self.dataset in (None, DIGIT_GRIDS):
            raise InputError("--dataset_config_name needs --dataset HUB_ID: leave it out")
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else DIGIT_GRIDS)


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
            padding_side="right",
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        offsets = made.pop("offset_mapping")
        replaced = made.pop("text_replacement_offsets", None) or [[]] * len(rows)
        made.convert_to_tensors("pt")
        counts = [
            _counts(own, _written(row["text"], of_row), of_row, row["spans"])
            for own, of_row, row in zip(offsets, replaced, rows, strict=True)
        ]
        labels = torch.where(torch.from_numpy(np.stack(counts)), made["input_ids"], IGNORED_LABEL)
        tensors = {name: one for name, one in made.items() if isinstance(one, Tensor)}
        in_dtype = {name: one.to(self.dtype) for name, one in tensors.items() if one.is_floating_point()}
        return {**tensors, **in_dtype, "labels": labels}


def encoded(processor: Any, texts: list[str], images: list[list[Image.Image]], **options: Any) -> Any:
    """Return what the processor makes of rows at once: texts as the template writes them, and the images of each."""
    of_images = {"images": images} if any(images) else {}
    return processor(text=list(texts), padding=True, **of_images, **_special(processor, texts[0]), **options)


def _written(text: str, replaced: Sequence[dict[str, Any]]) -> str:
    for one in reversed(replaced):
        start, stop = one["span"]
        text = text[:start] + one["replacement"] + text[stop:]
    return text


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


def _place(rows: datasets.Dataset, index: int) -> str:
    return str(rows[index]["place"])


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
    splits, notes = _read_splits(flags)
    chats = (json.loads(one) for one in splits["train"]["conversation"])
    processor = make_processor(message["content"] for chat in chats for message in chat["messages"])
    set_template(processor, flags.chat_template)
    rows = {}
    for split, read in splits.items():
        with progress_bars(len(read) > 1000):
            measured = read.map(
                _measured,
                input_columns=["conversation", "place", "images"],
                features=Features({**ROW, **MEASURED}),
                fn_kwargs={"processor": processor, "most_images": flags.images_per_row},
                desc="counting tokens",
            )
        kept = _short_enough(measured, flags, split)
        if len(kept) < len(measured):
            notes.append(f"{len(measured) - len(kept):,} of {len(measured):,} {split} rows are too long and left out")
        rows[split] = ImageTextRows(rows=kept, processor=processor, dtype=dtype)
    end = _end_of_turn(processor)
    if end is None:
        notes.append("the chat template writes no mark behind a reply, so the model does not learn where to stop")
    return ImageTextSplits(
        train=rows.get("train", rows["validation"]),
        validation=rows["validation"],
        processor=processor,
        end_of_turn=end,
        notice=f"note: {'; '.join(notes)}",
    )


def _short_enough(rows: datasets.Dataset, flags: ImageTextArguments, split: str) -> datasets.Dataset:
    lengths = rows.with_format("numpy")["length"][:]
    too_long = np.flatnonzero(lengths > flags.block_size)
    if len(too_long) and not flags.drop_long:
        place, most = rows[int(too_long[0])]["place"], int(lengths[too_long].max())
        raise InputError(
            f"{place} has {lengths[too_long[0]]:,} tokens, more than --block_size {flags.block_size}, as have "
            f"{len(too_long):,} {split} rows, up to {most:,}: raise it, lower --max_pixels, or leave them out by "
            "--drop_long"
        )
    if len(too_long) == len(rows):
        raise InputError(f"--block_size {flags.block_size} has no room for any of the {split} rows: raise it")
    return rows.select(np.flatnonzero(lengths <= flags.block_size))


# Rows of files and of the Hub


def _read_splits(flags: ImageTextArguments) -> tuple[dict[str, datasets.Dataset], list[str]]:
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
    for number, (messages, image) in enumerate(digit_grids(split), start=1):
        row = {"messages": messages, "images": [{"bytes": image, "path": None}]}
        yield _as_row(row, f"{split} grid {number}", ("messages",), None)


def _as_row(row: dict[str, Any], place: str, keys: tuple[str, ...], folder: Path | None) -> dict[str, Any]:
    marked, images = take_images(row, place, keys, folder)
    chat = read_conversation(without_nulls(marked), place, keys)
    check_replies(chat, place)
    for message in chat["messages"]:
        if message["role"] == "assistant" and MARK in message["content"]:
            raise InputError(f"{place} has an image in a reply, which the model does not write: remove it or the row")
    made = as_row(chat, place)
    identity = [one["path"] if one["bytes"] is None else digest_of(one["bytes"]) for one in images]
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


# Tokens


class _Template:
    """The template of a processor as ``ChatTemplate`` uses a tokenizer's: for messages with ``MARK`` in their texts."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.added_tokens_decoder = processor.tokenizer.added_tokens_decoder

    def get_chat_template(self) -> str:
        return str(self.processor.chat_template)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> Any:
        return self.processor.apply_chat_template(list(map(_with_parts, messages)), **options)

    def marked_spans(self, messages: list[Message], **options: Any) -> list[tuple[int, int]]:
        """Return the places in the text that ``{% generation %}`` stands around."""
        spans: Any = render_jinja_template(
            conversations=[list(map(_with_parts, messages))],
            chat_template=self.get_chat_template(),
            return_assistant_tokens_mask=True,
            **{**self.processor.tokenizer.special_tokens_map, **options},
        )
        return [(int(start), int(stop)) for start, stop in spans[1][0]]


def _with_parts(message: Message) -> Message:
    texts = message["content"].split(MARK)
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _measured(
    conversation: str, place: str, images: list[dict[str, Any]], processor: Any, most_images: int
) -> dict[str, Any]:
    if len(images) > most_images:
        raise InputError(f"{place} has {len(images)} images, more than --images_per_row {most_images}: raise it")
    chat: Conversation = json.loads(conversation)
    template = ChatTemplate(_Template(processor), place, chat["tools"], chat.get("options", {}))  # type: ignore[arg-type]
    messages, uncounted = template.written(chat["messages"]), chat.get("uncounted", [])
    text, turns = _turns(template, messages)
    spans = [(start, stop) for turn, start, stop in turns if turn not in uncounted]
    token = processor.image_token
    if text.count(token) != len(images):
        raise InputError(
            f"{place}: the chat template writes {text.count(token)} {token} for {len(images)} images: take a text that "
            "spells it out of the row, or pass another --chat_template"
        )
    made = [made_of(processor, _size_of(image, place)) for image in images]
    (written,), replaced = processor.get_text_with_replacements([text], [replacement for replacement, _ in made])
    tokens = processor.tokenizer(written, return_offsets_mapping=True, verbose=False, **_special(processor, text))
    return {
        "text": text,
        "spans": spans,
        "length": len(tokens["input_ids"]),
        "area": sum(area for _, area in made),
        "num_counted": int(_counts(tokens["offset_mapping"], written, [*replaced, []][0], spans).sum()),
    }


def _turns(template: ChatTemplate, messages: list[Message]) -> tuple[str, list[tuple[int, int, int]]]:
    """Return the text of a conversation, and of each turn of the assistant its number and where it is in the text."""
    text = template.render(messages)
    template.check_reasoning(messages, text)
    own: Any = template.tokenizer
    if not GENERATION.search(own.get_chat_template()):
        return text, list(template.assistant_spans(messages, text))
    spans = own.marked_spans(messages, tools=template.tools, **template.options)
    assistants = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) != len(assistants):
        raise InputError(
            f"{template.place}: the chat template marks {len(spans)} turns of the assistant, and there are "
            f"{len(assistants)}: {OWN_TEMPLATE}"
        )
    return text, [(at, *span) for at, span in zip(assistants, spans, strict=True)]


def _special(processor: Any, text: str) -> dict[str, bool]:
    """Say whether special tokens are added, as ``apply_chat_template`` of processors does: not behind the first one."""
    first = processor.tokenizer.bos_token
    return {"add_special_tokens": first is None or not text.startswith(first)}


def _counts(
    offsets: Any, written: str, replaced: Sequence[dict[str, Any]], spans: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return which tokens of a text are in ``spans`` of what it was before images were ``replaced``, bool (T,)."""
    ends = [0, *(one["span"][1] for one in replaced)]
    gained = [0, *(one["new_span"][1] - one["span"][1] for one in replaced)]
    moved = ((0, *(place + gained[bisect_right(ends, place) - 1] for place in span)) for span in spans)
    is_counted: np.ndarray = in_spans(offsets, written, moved) >= 0
    return is_counted


@cache
def made_of(processor: Any, size: tuple[int, int]) -> tuple[str, int]:
    """Return the text that ``processor`` puts in place of an image of (width, height), and how many pixel values."""
    made = processor(
        text=[processor.image_token], images=[[Image.new("RGB", size)]], return_text_replacement_offsets=True
    )
    replaced = made.get("text_replacement_offsets") or [[]]
    if len(replaced[0]) != 1:
        raise InputError(
            f"{type(processor).__name__} does not say what it puts in place of images, so it is not known which tokens "
            "count: take another model"
        )
    return str(replaced[0][0]["replacement"]), sum(np.size(one) for one in made[PIXELS])


def _size_of(stored: dict[str, Any], place: str) -> tuple[int, int]:
    """Read the width and height, upright, from the header."""
    defect = defect_of_header(stored)
    if defect not in ("", GREY):
        name = stored["path"] or "its image"
        raise InputError(f"{place}: {name} cannot be read ({defect}): replace it, or remove the row")
    with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return image.size[::-1] if is_turned else image.size


def _end_of_turn(processor: Any) -> int | None:
    """Return the special token with which the assistant ends a turn; ``None`` where the template writes none."""
    asked = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    text, turns = _turns(ChatTemplate(_Template(processor), "a conversation"), asked)  # type: ignore[arg-type]
    tokens = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = in_spans(tokens["offset_mapping"], text, iter(turns)) >= 0
    written = (int(token) for token in reversed(np.array(tokens["input_ids"])[counts]))
    last = next((token for token in written if str(processor.tokenizer.decode([token])).strip()), None)
    return last if last in processor.tokenizer.added_tokens_decoder else None


def render_question(processor: Any, question: str, num_images: int) -> str:
    """Return the text that the reply to a question with images follows; raise ``InputError`` where it is refused."""
    template = ChatTemplate(_Template(processor), "the question", way_out="change it")  # type: ignore[arg-type]
    return template.render([{"role": "user", "content": MARK * num_images + question}], add_generation_prompt=True)


# Processors


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ END + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, of messages in parts."""


def open_or_make_processor(args: Any, texts: Iterable[str]) -> Any:
    """Open the processor that the flags name, or make that of a LLaVA from scratch; with ``--max_pixels``.

    Raises:
        InputError: as ``open_processor`` and ``limit_pixels``; another type from scratch has no processor.
    """
    flag = "--processor_name" if args.processor_name else "--model_name_or_path"
    name = args.processor_name or args.tokenizer_name_or_path
    if name is not None:
        processor = open_processor(name, flag=flag, trust_remote_code=args.trust_remote_code)
    elif args.model_type == "llava":
        processor = _make_llava_processor(texts, configuration_of(args), args.vocab_size)
    else:
        raise InputError(
            f"--model_type {args.model_type} has no processor, and one is made for llava alone: give --processor_name"
        )
    limit_pixels(processor, args.max_pixels)
    return processor


def _make_llava_processor(texts: Iterable[str], config: Any, vocab_size: int) -> Any:
    """Make a tokenizer that is trained on ``texts``, and an image processor that makes all images of one size."""
    tokenizer = load_tokenizer(None, chain(texts, ROLES), vocab_size=vocab_size - len(CHATML_TOKENS) - 1)
    tokenizer.add_special_tokens({"eos_token": CHATML_END, "extra_special_tokens": [CHATML_START, WRITTEN]})
    side = config.vision_config.image_size
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=WRITTEN,
    )
    set_template(processor, CHATML)
    return processor


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


def set_template(processor: Any, chat_template: str | None) -> None:
    """Give ``processor`` the template that ``--chat_template`` names, or else its own or its tokenizer's.

    Raises:
        InputError: there is none, no readable file, or no token for an image.
    """
    if getattr(processor, "image_token", None) is None:
        raise InputError(f"{type(processor).__name__} has no token for an image: take another model")
    tokenizer = processor.tokenizer
    own = processor.chat_template or tokenizer.chat_template
    processor.chat_template = tokenizer.chat_template = own.get("default") if isinstance(own, dict) else own
    if chat_template is not None or not processor.chat_template:
        set_chat_template(tokenizer, chat_template, is_new=False)
        processor.chat_template = tokenizer.chat_template
    if chat_template == CHATML:
        end = repr(CHATML_END) if CHATML_END in tokenizer.get_vocab() else "eos_token"
        processor.chat_template = TEMPLATE.replace("END", end).replace("IMAGE", repr(processor.image_token))
    tokenizer.chat_template = None  # else both are saved, in one file
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
