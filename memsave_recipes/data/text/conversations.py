"""Conversations, train and held out: files in the formats of docs/data.md, or a toy set made of docstrings.

A file whose first row has a text in ``--text_column`` is a file of documents, whatever other keys there are. What is
refused would not be trained on as meant. Copies of a conversation are all held out, or none.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Features, List, Value

from memsave_recipes.data.sources import (
    find_files,
    generated,
    hold_out,
    hold_out_smallest,
    parse_source,
    progress_bars,
    read_files,
    rows_of,
    source_files,
    source_folder,
)
from memsave_recipes.data.text.documents import DOCSTRING_CHATS, ENDINGS, TextArguments, TextSplits, check_sources
from memsave_recipes.errors import InputError, is_text
from memsave_recipes.fingerprint import digest_of
from memsave_recipes.text import join_names

LIBRARIES = ("python", "numpy")
MAX_WORDS = 40  # of an answer of the toy set
MIN_WORDS = 5

TABLES = (".jsonl", ".json", ".parquet")
PREFERENCES = ("chosen", "rejected")
FORMATS = (("messages",), ("conversations",), ("prompt", "completion"))
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# With any of these the text alone is not what the model should learn to write.
NOT_TAKEN = ("tool_calls", "function_call", "reasoning_content", "thinking", "weight")
CONVERSATION = Features(
    {
        "messages": List({"role": Value("string"), "content": Value("large_string")}),
        "place": Value("string"),  # for messages: the file and the row
        "digest": Value("int64"),
        "held_out": Value("bool"),  # of the toy set
    }
)

Message = dict[str, str]


def names_conversations(flags: TextArguments) -> bool:
    """Tell by the keys of the first row whether the data that the flags name are conversations."""
    if flags.dataset == DOCSTRING_CHATS:
        return True
    if flags.dataset is not None:
        return False
    split = "train" if flags.train_file else "validation"
    first = find_files(f"--{split}_file", getattr(flags, f"{split}_file"), ENDINGS).files[0]
    if first.suffix.lower() not in TABLES:
        return False
    try:
        _, row = next(rows_of(str(first), str(first)))
    except (InputError, OSError, StopIteration):  # left to those who read documents
        return False
    return not isinstance(_value(row, flags.text_column), str) and any(map(_holds(row), (*FORMATS, PREFERENCES)))


def load_conversations(
    flags: TextArguments, *, stream_bytes: int | None = None, only_validation: bool = False
) -> TextSplits:
    """Load the conversations that the flags name.

    Raises:
        InputError: with file and row (from 1), what is malformed or not supported there; too few to hold any out.
    """
    check_sources(flags, stream_bytes, only_validation)
    if flags.mix_weights is not None:
        raise InputError("--mix_weights is for plain text, and the data are conversations: leave it out")
    if flags.dataset == DOCSTRING_CHATS:
        return _docstring_chats()
    words = {"train": flags.train_file, "validation": flags.validation_file}
    splits = {split: _read_files(f"--{split}_file", named) for split, named in words.items() if named}
    if list(splits) == ["train"]:
        return _held_out(splits["train"], f"--train_file {join_names(flags.train_file or [])}")
    return TextSplits(splits.get("train", splits["validation"]), splits["validation"], None)


def _value(row: Any, key: str) -> Any:
    return row.get(key) if isinstance(row, dict) else None


def _holds(row: Any) -> Callable[[tuple[str, ...]], bool]:
    """Return a test whether ``row`` has a value for each of some keys; Parquet files have all keys in every row."""
    return lambda keys: all(_value(row, key) is not None for key in keys)


def _read_files(flag: str, words: list[str]) -> datasets.Dataset:
    found = find_files(flag, words, ENDINGS)
    for path in found.files:
        if path.suffix.lower() not in TABLES:
            raise InputError(f"{flag} {path}: conversations are read from {join_names(TABLES)}: convert the file")
    return read_files(found, _conversations_of, CONVERSATION, f"{flag} {join_names(found.files)}", flag=flag)


def _conversations_of(files: Iterable[tuple[str, int]], flag: str, version: str) -> Iterator[dict[str, Any]]:
    for path, _ in files:
        keys = None
        for number, row in rows_of(path, f"{flag} {path}"):
            place = f"{flag} {path} row {number}"
            keys = keys or _format_of(row, place)
            yield _conversation(_messages_of(row, keys, place), place)


def _conversation(messages: list[Message], place: str, held_out: bool = False) -> dict[str, Any]:
    digest = digest_of(json.dumps(messages).encode())
    return {"messages": messages, "place": place, "digest": digest, "held_out": held_out}


def _format_of(row: Any, place: str) -> tuple[str, ...]:
    if _holds(row)(PREFERENCES):
        raise InputError(
            f"{place} is a preference pair (chosen, rejected), on which nothing is fine-tuned here: use DPOTrainer of "
            "TRL with memsave_recipes.MemsaveCallback, or keep the chosen conversation as messages"
        )
    found = next(filter(_holds(row), FORMATS), None)
    if found is None:
        names = " or ".join(" and ".join(keys) for keys in FORMATS)
        raise InputError(f"{place} is no conversation: it has no {names}: correct it or remove the row")
    return found


def _messages_of(row: Any, keys: tuple[str, ...], place: str) -> list[Message]:
    """Check the messages of a row in the format ``keys``."""
    if not _holds(row)(keys):
        others = " and ".join(_format_of(row, place))
        raise InputError(
            f"{place} has {others} where the rows before it have {' and '.join(keys)}: give one file for each format"
        )
    if _value(row, "tools"):
        raise InputError(f"{place} has tools, which are not supported: remove the row")
    messages = _prompt_and_completion(row, place) if keys == ("prompt", "completion") else row[keys[0]]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place} has no messages: add some or remove the row")
    named = ("from", "value") if keys == ("conversations",) else ("role", "content")
    checked = [
        _message(message, *named, f"{place} message {number}") for number, message in enumerate(messages, start=1)
    ]
    _check_order([message["role"] for message in checked], place)
    return checked


def _prompt_and_completion(row: Any, place: str) -> list[Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    raise InputError(f"{place}: prompt and completion must both be texts, or both lists of messages: correct the row")


def _message(message: Any, role_key: str, content_key: str, place: str) -> Message:
    role, content = _value(message, role_key), _value(message, content_key)
    role = SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
    if role not in ROLES:
        known = join_names([*(SHAREGPT_ROLES if role_key == "from" else ()), *ROLES])
        raise InputError(f"{place} has the role {role!r}, none of {known}: rename it or remove the row")
    for key in NOT_TAKEN:
        if _value(message, key) not in (None, [], "", 1):
            raise InputError(f"{place} has {key}, which is not supported: remove it or the row")
    if not isinstance(content, str):
        raise InputError(f"{place} has no text as its {content_key}: only texts are trained on; correct or remove it")
    if not content.strip():
        raise InputError(f"{place} is empty: give it a text or remove it")
    if not is_text(content):
        raise InputError(f"{place} holds half of a surrogate pair: repair the row")
    return {"role": role, "content": content}


def _check_order(roles: list[str], place: str) -> None:
    if "system" in roles[1:]:
        number = roles.index("system", 1) + 1
        raise InputError(f"{place} message {number} is a system message, which may only be the first: move it there")
    if "assistant" not in roles:
        raise InputError(f"{place} has no turn of the assistant, so nothing to learn from: add one or remove the row")


def _held_out(rows: datasets.Dataset, source: str) -> TextSplits:
    splits = hold_out_smallest(rows, rows.with_format("numpy")["digest"][:])
    if not len(splits["train"]):
        raise InputError(f"{source} has too few different conversations to hold any out: give --validation_file")
    notice = f"{len(splits['validation']):,} of the {len(rows):,} conversations of {source} are held out"
    return TextSplits(**splits, notice=notice)


def _docstring_chats() -> TextSplits:
    versions = [sys.version, *(version(library) for library in LIBRARIES[1:])]
    source = f"--dataset {DOCSTRING_CHATS}"
    with progress_bars(False):
        rows = generated(_toy_conversations, CONVERSATION, source, version=" ".join(versions))
        splits = hold_out(rows, np.array(rows["held_out"][:]))
    sizes = {split: f"{len(chats):,}" for split, chats in splits.items()}
    notice = f"{source} is a toy: {sizes['train']} questions about Python with answers from docstrings"
    return TextSplits(**splits, notice=f"{notice}, {sizes['validation']} held out")


def _toy_conversations(version: str) -> Iterator[dict[str, Any]]:
    """Ask about the public functions and classes of modules, in an order without meaning; no two answers are alike."""
    answers: set[str] = set()
    for library in LIBRARIES:
        for held_out, path in source_files(library):
            module = _module_name(library, path)
            for node in parse_source(path).body:
                if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                    continue
                answer = _answer(node)
                if answer and answer not in answers:
                    answers.add(answer)
                    yield _conversation(_questions(f"{module}.{node.name}", node, answer), module, held_out)


def _module_name(library: str, path: Path) -> str:
    parts = path.relative_to(source_folder(library)).with_suffix("").parts
    return ".".join(([] if library == "python" else [library]) + [part for part in parts if part != "__init__"])


def _answer(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the first paragraph of the docstring, if it is neither short nor long."""
    words = (ast.get_docstring(node) or "").split("\n\n")[0].split()
    return " ".join(words) if MIN_WORDS <= len(words) <= MAX_WORDS else ""


def _questions(name: str, node: ast.FunctionDef | ast.ClassDef, answer: str) -> list[Message]:
    messages = [
        {"role": "user", "content": f"What does `{name}` do?"},
        {"role": "assistant", "content": answer},
    ]
    if isinstance(node, ast.FunctionDef) and (arguments := ast.unparse(node.args)):
        messages += [
            {"role": "user", "content": "Which arguments does it take?"},
            {"role": "assistant", "content": f"`{arguments}`"},
        ]
    return messages
