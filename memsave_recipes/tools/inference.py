"""Predictions of a saved model for images, texts and prompts, as ``memsave predict`` prints them.

Classifiers compute the probabilities of the recipe's evaluation: of one class, or with several labels a sample of each
class by itself. Regression gives the number. Language models continue a prompt greedily; where the
tokenizer has a chat template, the prompt is a user's message and the continuation its reply. So do models of images
and text, whose message begins with the images that are named before it.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.utils.logging import disable_progress_bar

from memsave_recipes.core.errors import InputError, packages_of, require
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.text import first_line, printable, read_json
from memsave_recipes.data.processors import encoded, render_question
from memsave_recipes.data.sources import of_left_out
from memsave_recipes.data.text.chat_template import render_prompt
from memsave_recipes.data.text.conversations import Conversation, is_conversation, read_conversation
from memsave_recipes.data.vision.decoding import MAX_GREY_BITS, decode, reason_of
from memsave_recipes.models.labels import MULTI, REGRESSION
from memsave_recipes.models.saved import IMAGE_TEXT, SavedModel, load

with packages_of("vision", "images"):
    from PIL import Image

TABLES = (".txt", ".jsonl")
TEMPLATE_S = 20  # for the prompts of a batch, since a template may have loops that never end


@dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """How inputs are read, and what is computed of them.

    Attributes:
        top_k: classes of each input, the most probable first.
        text_column: in a ``.jsonl``; by default ``text``, but a conversation comes before it, as in training.
        chat: whether a prompt is a message; by default where the tokenizer has a chat template.
    """

    batch_size: int = 8
    top_k: int = 5
    max_new_tokens: int = 60
    text_column: str | None = None
    text_pair_column: str | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "top_k", "max_new_tokens"):
            require(getattr(self, name) >= 1, f"--{name}", getattr(self, name), "at least 1")


def load_on(device: str | None, folder: str, *, trust_remote_code: bool = False) -> SavedModel:
    """Load a model on ``device``, by default a GPU where there is one; raise ``InputError`` without such a device."""
    word = device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.empty(1, device=word).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # whatever a torch that was built without it raises
        raise InputError(f"--device {word} is not there ({first_line(error):.200}): leave it out") from error
    disable_progress_bar()  # of transformers, for every file of weights
    saved = load(folder, trust_remote_code=trust_remote_code)
    saved.model.to(word)
    return saved


def read_inputs(words: Sequence[str], saved: SavedModel, flags: PredictArguments) -> list[Any]:
    """Read the inputs that ``words`` name: images and folders of them; or texts, and files with a text a line or row.

    Returns paths of images; or texts, pairs of texts and conversations. Raises ``InputError`` where a file is missing,
    unreadable, or not what the model takes.
    """
    if saved.task == IMAGE_TEXT:
        return list(_questions_of(words, flags))
    read: Callable[..., Iterator[Any]] = _images_of if saved.task == "image-classification" else _texts_of
    inputs = [found for word in words for found in read(word, flags)]
    if any(isinstance(found, dict) for found in inputs) and not _has_template(saved):
        raise InputError("the rows are conversations, and the model has no chat template: name a --text_column")
    return inputs


def _questions_of(words: Sequence[str], flags: PredictArguments) -> Iterator[tuple[list[Path], str]]:
    """Yield each word that is no image with the images before it, up to another such word."""
    images: list[Path] = []
    for word in words:
        if os.path.exists(word):
            images += _images_of(word, flags)
        else:
            yield images, word
            images = []
    if images:
        raise InputError(f"{images[-1]} is not followed by a question: give one behind the images")


def _images_of(word: str, flags: PredictArguments) -> Iterator[Path]:
    if os.path.isdir(word):
        endings = Image.registered_extensions()
        files = sorted(path for path in Path(word).rglob("*") if not path.name.startswith(".") and path.is_file())
        found = [path for path in files if path.suffix.lower() in endings]
        if not found:
            raise InputError(f"{word} has no images: name a folder of image files")
        others = Counter(path.suffix.lower() for path in files if path.suffix.lower() not in endings)
        for line in of_left_out(len(found), others):
            print(f"note: {printable(word)}: {line}", file=sys.stderr, flush=True)
    elif os.path.isfile(word):
        found = [Path(word)]
    else:
        raise InputError(f"{word} is not a file, and the model classifies images: name image files or folders of them")
    for path in found:
        try:
            with Image.open(path):  # reads the header
                pass
        except Exception as error:  # of Pillow's plugins
            raise _broken(path, error) from error
        yield path


def _broken(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is not a readable image ({reason_of(error)}): replace it, or leave it out")


def _texts_of(word: str, flags: PredictArguments) -> Iterator[Any]:
    path = Path(word)
    if (kind := path.suffix.lower()) not in TABLES:
        if os.path.exists(word):
            found = "a folder" if os.path.isdir(word) else f"a {path.suffix or 'file'}"
            raise InputError(f"{word} is {found}, and the model takes text: give texts, a .txt or a .jsonl")
        yield word
        return
    if path.exists() and not path.is_file():  # a pipe may never end
        raise InputError(f"{word} is not a file: check the path")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # no other character ends one, as in training
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InputError(f"{word} cannot be read ({why}): check the path") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield line.removesuffix("\r") if kind == ".txt" else _value_of(f"{word} row {number}", line, flags)


def _value_of(row: str, line: str, flags: PredictArguments) -> Any:
    """Return the text of a JSON object, the pair of its texts, or its conversation."""
    try:
        content = read_json(line)
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate is no text
    except ValueError as error:
        raise InputError(f"{row} is not JSON ({error}): a .jsonl has an object a line") from error
    found = content if isinstance(content, dict) else {}
    if flags.text_column not in found and is_conversation(found):
        return _without_reply(read_conversation(found, row), row)
    columns = [flags.text_column or "text", *([flags.text_pair_column] if flags.text_pair_column else [])]
    for column in columns:
        if not isinstance(found.get(column), str):
            raise InputError(f"{row} has no text {column!r}: name it with --text_column or --text_pair_column")
    texts = tuple(found[column] for column in columns)
    return texts if len(texts) > 1 else texts[0]


def _without_reply(chat: Conversation, row: str) -> Conversation:
    """Leave out what the model is to write: the last turns of the assistant, as of rows that were trained on."""
    messages = list(chat["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{row} has nothing to reply to: give a message that is not the assistant's")
    return {**chat, "messages": messages}


def _name_of(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["messages"][-1]["content"])
    if isinstance(value, tuple) and isinstance(value[0], list):
        return " | ".join(map(str, (*value[0], value[1])))
    return " | ".join(value) if isinstance(value, tuple) else str(value)


def predict(saved: SavedModel, inputs: Sequence[Any], flags: PredictArguments) -> list[dict[str, Any]]:
    """Make a row for each input, in order; a progress bar on a terminal.

    Returns:
        ``input`` with ``predictions``, each a ``label`` with its ``probability``; with ``value``, the number of a
        regression; or with ``generated_text``.

    Raises:
        InputError: an image cannot be decoded, a text is too long, or the model, its processor or its template fail.
        FloatingPointError: what the model makes is not finite.
    """
    generates = saved.task in ("text-generation", IMAGE_TEXT)
    answer: Callable[..., Iterator[Any]] = _generated if generates else _classified
    key = "generated_text" if generates else "predictions"
    key = "value" if saved.problem_type == REGRESSION else key
    rows: list[dict[str, Any]] = []
    with ProgressBar(total=len(inputs), unit="input") as bar:
        for start in range(0, len(inputs), flags.batch_size):
            batch = inputs[start : start + flags.batch_size]
            where = f"from {printable(_name_of(batch[0]))[:80]!r} on"
            try:
                answers = list(answer(saved, list(batch), flags))
            except InputError:
                raise
            except FloatingPointError as error:
                hint = "look at its weights, or take another --device"
                raise FloatingPointError(f"the model's outputs {where} are {error}: {hint}") from error
            except Exception as error:  # of a processor, a template or foreign weights
                raise InputError(
                    f"the model cannot take the inputs {where} ({first_line(error)}): look at its files"
                ) from error
            rows += [{"input": _name_of(one), key: given} for one, given in zip(batch, answers, strict=True)]
            bar.update(len(batch))
    return rows


def _classified(saved: SavedModel, values: list[Any], flags: PredictArguments) -> Iterator[Any]:
    is_image = saved.task == "image-classification"
    inputs = [_decoded(path, saved.grey_bits) for path in values] if is_image else values
    logits = saved.logits(inputs)
    _check_finite(logits)
    if saved.problem_type == REGRESSION:
        yield from logits.squeeze(-1).tolist()
        return
    probabilities = logits.sigmoid() if saved.problem_type == MULTI else logits.softmax(dim=-1)
    best = probabilities.topk(min(flags.top_k, len(saved.label_names)))
    for shares, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        yield [
            {"label": saved.label_names[index], "probability": share}
            for share, index in zip(shares, indices, strict=True)
        ]


def _check_finite(logits: Tensor) -> None:
    if not logits.isfinite().all():
        raise FloatingPointError("NaN or infinite")


class _Checked(LogitsProcessor):
    """Checks what ``generate`` chooses by."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        _check_finite(scores.masked_fill(scores == -torch.inf, 0))  # which forbids a token
        return scores


def _decoded(path: Path, grey_bits: int | None) -> Image.Image:
    try:
        return decode({"path": str(path), "bytes": None}, grey_bits or MAX_GREY_BITS)
    except Exception as error:
        raise _broken(path, error) from error


@torch.no_grad()
def _generated(saved: SavedModel, values: list[Any], flags: PredictArguments) -> Iterator[str]:
    model: Any = saved.model
    of_images = saved.task == IMAGE_TEXT
    tokenizer = saved.processor.tokenizer if of_images else saved.processor
    weight = next(model.parameters())
    tokens = _questions(saved.processor, values).to(weight.dtype) if of_images else _prompts(saved, values, flags)
    tokens = tokens.to(weight.device)
    length = tokens["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if 0 < limit < length + flags.max_new_tokens:
        raise InputError(
            f"--max_new_tokens {flags.max_new_tokens} after a prompt of {length} tokens is more than the {limit} that "
            "the model takes: lower it, or shorten the prompt"
        )
    continued: Tensor = model.generate(
        **tokens,
        max_new_tokens=flags.max_new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([_Checked()]),
        pad_token_id=tokenizer.pad_token_id,
        **dict.fromkeys(("temperature", "top_p", "top_k")),  # of sampling
    )
    yield from tokenizer.batch_decode(continued[:, length:], skip_special_tokens=True)


def _questions(processor: Any, values: list[tuple[list[Path], str]]) -> Any:
    """Make tokens that end alike, and pixels."""
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    with _time_limit(TEMPLATE_S, "the chat template"):
        texts = [render_question(processor, question, len(images)) for images, question in values]
    images = [[_decoded(path, None) for path in paths] for paths, _ in values]
    return encoded(processor, texts, images, padding=True, padding_side="left", return_tensors="pt")


def _prompts(saved: SavedModel, values: list[Any], flags: PredictArguments) -> Any:
    """Make tokens that end alike, so that all continuations begin at the same place."""
    tokenizer = saved.processor
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if any(isinstance(value, dict) for value in values) or (_has_template(saved) and flags.chat is not False):
        with _time_limit(TEMPLATE_S, "the chat template"):
            values = [render_prompt(value, tokenizer) for value in map(_as_chat, values)]
        return tokenizer(values, padding=True, return_tensors="pt", add_special_tokens=False)
    return tokenizer(values, padding=True, return_tensors="pt")


def _as_chat(value: str | Conversation) -> Conversation:
    asked: Conversation = {"messages": [{"role": "user", "content": value}], "tools": None}
    return asked if isinstance(value, str) else value


@contextmanager
def _time_limit(seconds: float, what: str) -> Iterator[None]:
    """End what is inside after so long with a TimeoutError; only the main thread can be."""
    if current_thread() is not main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"{what} takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _has_template(saved: SavedModel) -> bool:
    return bool(getattr(saved.processor, "chat_template", None))
