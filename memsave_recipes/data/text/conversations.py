"""Conversations, train and held out: files in the formats of docs/data.md, or a toy set made of docstrings.

What is refused would not be trained on as meant; keys that nobody reads are named. Copies of a conversation are all
held out, or none.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import datasets
import numpy as np
from datasets import Features, Value

from memsave_recipes.core.errors import InputError, is_text
from memsave_recipes.core.text import join_names, read_json
from memsave_recipes.data.fingerprint import digest_of
from memsave_recipes.data.sources import (
    NOTED,
    Splits,
    find_files,
    generated,
    given_keys,
    hold_out,
    hold_out_smallest,
    holds_rows,
    noted,
    of_rows,
    parse_source,
    progress_bars,
    read_files,
    rows_of,
    source_files,
    source_folder,
)
from memsave_recipes.data.text.documents import (
    DOCSTRING_CHATS,
    ENDINGS,
    TEXT_COLUMN,
    TextArguments,
    TextSplits,
    check_sources,
)

LIBRARIES = ("python", "numpy")
MAX_WORDS = 40  # of an answer of the toy set
MIN_WORDS = 5

TABLES = (".jsonl", ".json", ".csv", ".parquet")
PREFERENCES = ("chosen", "rejected")
FORMATS = (("messages",), ("conversations",), ("prompt", "completion"))
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# With any of these the text alone is not what the model should learn to write.
NOT_TAKEN = ("function_call", "train_detail", "mask")
SYSTEM = ("system", "system_prompt", "system_message")  # columns beside the turns
# What others call a mark of the turns that count in the loss (also a list of them, beside the turns), and its opposite.
COUNTS = ("loss", "loss_mask", "loss_weight", "loss_scale", "weight", "train", "training", "trainable", "learn")
COUNTS_NOT = ("masked", "ignore", "no_loss")
WORDS = {"true": True, "false": False}
MARKS = WORDS | {"1": True, "1.0": True, "0": False, "0.0": False}
KWARGS = "chat_template_kwargs"
OPTIONS = ("enable_thinking", "reasoning_effort")  # of templates, as columns
LIST = re.compile(r'\[\s*\{\s*"(role|content)"\s*:')  # the beginning of messages as JSON text
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # columns beside messages
CONVERSATION = Features(
    {
        "conversation": Value("large_string"),  # JSON, since structs of Arrow give each message the keys of all
        "place": Value("string"),  # for messages: the file and the row
        "digest": Value("int64"),
        "held_out": Value("bool"),  # of the toy set
        **NOTED,
    }
)

Message = dict[str, Any]


class Conversation(TypedDict):
    """Messages with ``role`` and ``content``, which is empty beside mere ``tool_calls``, and what they may call.

    A message may have ``reasoning_content`` and ``tool_calls`` too, the result of a tool its ``name`` and
    ``tool_call_id``. Tools and calls are those of transformers' chat templates, with arguments as objects.

    Args:
        options: more arguments of the template.
        uncounted: places of the messages that are not to count in the loss.
        unused: keys that are not read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    options: NotRequired[dict[str, Any]]
    uncounted: NotRequired[list[int]]
    unused: NotRequired[list[str]]


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
    return is_conversation(row) or (not isinstance(_value(row, TEXT_COLUMN), str) and _holds(row)(PREFERENCES))


def is_conversation(row: Any) -> bool:
    """Tell by its keys whether a row is a conversation."""
    return any(map(_holds(row), FORMATS))


def load_conversations(
    flags: TextArguments, *, stream_bytes: int | None = None, only_validation: bool = False
) -> TextSplits:
    """Load the conversations that the flags name.

    Raises:
        InputError: with file and row (from 1), what is malformed or not supported there; too few to hold any out.
    """
    check_sources(flags, stream_bytes, only_validation)
    if flags.dataset == DOCSTRING_CHATS:
        return _docstring_chats()
    words = {"train": flags.train_file, "validation": flags.validation_file}
    splits = {split: _read_files(f"--{split}_file", named) for split, named in words.items() if named}
    notes = of_rows(splits.values())
    if list(splits) == ["train"]:
        parts, note = held_out_of(splits["train"], f"--train_file {join_names(flags.train_file or [])}")
        return TextSplits(**parts, notice="; ".join([note, *notes]))
    return TextSplits(splits.get("train", splits["validation"]), splits["validation"], "; ".join(notes) or None)


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


def _conversations_of(files: Iterable[str], flag: str, version: str) -> Iterator[dict[str, Any]]:
    for path in files:
        keys = None
        for number, row in rows_of(path, f"{flag} {path}"):
            place = f"{flag} {path} row {number}"
            held = place if holds_rows(path, row) else ""
            row = without_nulls(row) if path.lower().endswith(".parquet") else row
            keys = keys or format_of(row, place)
            chat = read_conversation(row, place, keys)
            check_replies(chat, place)
            yield {**as_row(chat, place), **noted(chat.get("unused", ()), held)}


def check_replies(chat: Conversation, place: str) -> None:
    """Raise ``InputError`` where no turn of the assistant counts."""
    learned = [at for at, message in enumerate(chat["messages"]) if message["role"] == "assistant"]
    if not set(learned) - set(chat.get("uncounted", ())):
        what = "turn of the assistant that counts" if learned else "turn of the assistant"
        raise InputError(f"{place} has no {what}, so nothing to learn from: add one or remove the row")


def as_row(chat: Conversation, place: str = "a conversation", held_out: bool = False) -> dict[str, Any]:
    """Return the row of ``CONVERSATION``; ``place`` names it in messages."""
    parts: list[Any] = [value for key, value in chat.items() if value and key not in ("messages", "unused")]
    digest = digest_of(json.dumps([chat["messages"], *parts] if parts else chat["messages"]).encode())
    text = json.dumps({key: value for key, value in chat.items() if key != "unused"}, ensure_ascii=False)
    return {"conversation": text, "place": place, "digest": digest, "held_out": held_out, **noted()}


def texts_of(message: Message) -> Iterator[str]:
    """Yield what somebody wrote: reasoning, content, names and arguments of calls."""
    yield from filter(None, (message.get("reasoning_content"), message["content"]))
    for call in message.get("tool_calls", ()):
        yield from (call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))


def format_of(row: Any, place: str) -> tuple[str, ...]:
    """Return the keys of ``FORMATS`` that a row has; raise ``InputError`` where it has none."""
    if _holds(row)(PREFERENCES):
        raise InputError(
            f"{place} is a preference pair (chosen, rejected), which these recipes do not train on: use DPOTrainer of "
            "TRL with memsave_recipes.MemsaveCallback, or keep the chosen conversation as messages"
        )
    found = next(filter(_holds(row), FORMATS), None)
    if found is None:
        names = " or ".join(" and ".join(keys) for keys in FORMATS)
        raise InputError(f"{place} is not a conversation: it has no {names}: correct it or remove the row")
    return found


def read_conversation(row: Any, place: str, keys: tuple[str, ...] | None = None) -> Conversation:
    """Read a row, in the format ``keys`` where that is known; raise ``InputError`` for what is malformed in it."""
    keys = keys or format_of(row, place)
    if not _holds(row)(keys):
        others = " and ".join(format_of(row, place))
        raise InputError(
            f"{place} has {others} where the rows before it have {' and '.join(keys)}: give one file for each format"
        )
    for key in filter(row.get, NOT_TEXT):
        raise InputError(f"{place} has {key}, and only texts are trained on: remove the row")
    if _is_mark_of_row(row.get("mask")):
        raise InputError(f"{place} has mask, which may mean either: name it loss_mask (1 counts), or remove it")
    is_pair = keys == ("prompt", "completion")
    messages = _prompt_and_completion(row, place) if is_pair else parsed(row[keys[0]], keys[0], place)
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place} has no messages: add some or remove the row")
    named = ("from", "value") if keys == ("conversations",) else ("role", "content")
    checked = [
        _message(message, *named, f"{place} message {number}") for number, message in enumerate(messages, start=1)
    ]
    assistants = [at for at, message in enumerate(checked) if message["role"] == "assistant"]
    marks = _marks_of(row, messages, assistants, place)
    uncounted = [at for at, mark in enumerate(marks) if mark is False]
    unused = _unused_of(row, keys) | {key for message in messages for key in _unused_of_message(message, *named)}
    if any(mark and at not in assistants for at, mark in enumerate(marks)):
        unused.add("the mark to count turns that are not the assistant's")
    if system := _system_of(row, place):
        if checked[0]["role"] != "system":
            checked, uncounted = [{"role": "system", "content": system}, *checked], [at + 1 for at in uncounted]
        elif checked[0]["content"] != system:
            raise InputError(f"{place} begins with another system message than its system column: keep one of them")
    found = {"options": _options_of(row, place), "uncounted": uncounted, "unused": sorted(unused)}
    chat: Conversation = {
        "messages": checked,
        "tools": _functions(row.get("tools"), "tools", place) or None,
        **{key: value for key, value in found.items() if value},  # type: ignore[typeddict-item]
    }
    try:
        whole = json.dumps(chat, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InputError(f"{place} holds NaN or an infinite number, which JSON has not: correct the row") from error
    if not is_text(whole):
        raise InputError(f"{place} holds half of a surrogate pair: repair the row")
    return chat


def _system_of(row: dict[str, Any], place: str) -> str:
    """Return the system message in a column beside the turns, if there is one."""
    found = {key: row[key] for key in SYSTEM if key in given_keys(row)}
    texts = {_text_of(value, "text", f"{place} {key}") for key, value in found.items()} - {""}
    if len(texts) > 1:
        raise InputError(f"{place} has different texts as {' and '.join(found)}: keep one of them")
    return "".join(filter(str.strip, texts))


def _options_of(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Return what a row tells its template, as transformers' ``apply_chat_template`` takes it."""
    given = parsed(row.get(KWARGS) or {}, KWARGS, place)
    if not isinstance(given, dict):
        raise InputError(f"{place}: {KWARGS} is no JSON object: correct the row")
    columns = {key: WORDS.get(str(row[key]).lower(), row[key]) for key in OPTIONS if key in given_keys(row)}
    for key in columns.keys() & given:
        if given[key] != columns[key]:
            raise InputError(f"{place} has another {key} in {KWARGS} than in its column: keep one of them")
    return given | columns


def _marks_of(row: dict[str, Any], messages: list[Any], assistants: list[int], place: str) -> list[bool | None]:
    """Tell of each message whether it is to count in the loss, as its own keys and lists beside the messages say."""
    marks = [
        [(key, message[key]) for key in (*COUNTS, *COUNTS_NOT) if key in given_keys(message)] for message in messages
    ]
    for key in (key for key in (*COUNTS, *COUNTS_NOT) if _is_mark_of_row(row.get(key))):
        given = parsed(row[key], key, place)
        given = given if isinstance(given, list) else [given] * len(assistants)
        if len(given) not in (len(messages), len(assistants)):
            raise InputError(f"{place} has {len(given)} values of {key} for {len(messages)} messages: correct the row")
        for at, value in zip(assistants if len(given) == len(assistants) else range(len(messages)), given, strict=True):
            marks[at].append((key, value))
    for number, (key, value) in ((at, mark) for at, found in enumerate(marks, start=1) for mark in found):
        if str(value).lower() not in MARKS:
            rule = "a turn counts in the loss or does not (true or false, 1 or 0)"
            raise InputError(f"{place} message {number} has {key} {str(value)[:80]}, and {rule}: correct the row")
    counts = [{MARKS[str(value).lower()] == (key in COUNTS) for key, value in found} for found in marks]
    for number in (at for at, found in enumerate(counts, start=1) if len(found) > 1):
        raise InputError(f"{place} message {number} counts by one of its marks and not by another: keep one")
    return [found.pop() if found else None for found in counts]


def _is_mark_of_row(value: Any) -> bool:
    """Tell a list of marks, and the mark of a whole row, from figures such as a loss."""
    return value != [] and (isinstance(value, list) or str(value).lower() in MARKS or str(value).startswith("["))


def _unused_of(row: dict[str, Any], keys: tuple[str, ...]) -> set[str]:
    known = {*keys, "tools", *SYSTEM, KWARGS, *OPTIONS}
    known |= {key for key in (*COUNTS, *COUNTS_NOT) if _is_mark_of_row(row.get(key))}
    return {f"column {key}" for key in given_keys(row) - known}


def _unused_of_message(message: dict[str, Any], role_key: str, content_key: str) -> Iterator[str]:
    known = {role_key, content_key, "tool_calls", *REASONING_KEYS, *COUNTS, *COUNTS_NOT}
    known |= {"name", "tool_call_id"} if message.get(role_key) in ("tool", "observation") else set()
    yield from (f"key {key} of messages" for key in given_keys(message) - known)
    parts = message.get(content_key)
    for part in parts if isinstance(parts, list) else ():
        yield from (f"key {key} of parts" for key in given_keys(part) - {"type", "text"})


def _prompt_and_completion(row: Any, place: str) -> list[Any]:
    pair = (row["prompt"], row["completion"])
    prompt, completion = (parsed(one, "a prompt", place) if LIST.match(str(one)) else one for one in pair)
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    raise InputError(f"{place}: prompt and completion must both be texts, or both lists of messages: correct the row")


def _message(message: Any, role_key: str, content_key: str, place: str) -> Message:
    role, content = _value(message, role_key), _value(message, content_key)
    if role_key == "from" and role == "function_call":
        message, content = {"tool_calls": content}, None
    role = SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
    if role not in ROLES:
        known = join_names([*(SHAREGPT_ROLES if role_key == "from" else ()), *ROLES])
        raise InputError(f"{place} has the role {role!r}, none of {known}: rename it or remove the row")
    for key in NOT_TAKEN:
        if _value(message, key) not in (None, [], ""):
            raise InputError(f"{place} has {key}, which is not supported: remove it or the row")
    more = _more_of(message, role, place)
    text = "" if content is None and "tool_calls" in more else _text_of(content, content_key, place)
    if not text.strip() and role != "tool" and "tool_calls" not in more:
        raise InputError(f"{place} is empty: give it a text or remove it")
    return {"role": role, "content": text, **more}


def _text_of(content: Any, key: str, place: str) -> str:
    """Return a text, also that of a list of parts which are all texts."""
    parts = content if isinstance(content, list) else []
    for kind in (_value(part, "type") for part in parts if _value(part, "type") != "text"):
        raise InputError(f"{place} has a part of type {kind!r}: only texts are trained on; remove the row")
    texts = [_value(part, "text") for part in parts] or [content]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{place} has no text as its {key}: only texts are trained on; correct or remove it")
    return "".join(texts)


def _more_of(message: Any, role: str, place: str) -> Message:
    """Return what a message has beside its role and content."""
    reasoning = next(filter(None, (_value(message, key) for key in REASONING_KEYS)), None)
    calls = _functions(_value(message, "tool_calls"), "tool_calls", place)
    if role != "assistant" and (reasoning or calls):
        found = "tool_calls" if calls else "reasoning"
        raise InputError(f"{place} has {found}, which only the assistant writes: correct its role or remove it")
    if not isinstance(reasoning, str | None):
        raise InputError(f"{place} has no text as its reasoning: correct or remove it")
    names = {key: _value(message, key) for key in ("name", "tool_call_id")} if role == "tool" else {}
    more = {"reasoning_content": reasoning, "tool_calls": calls, **names}
    return {key: value for key, value in more.items() if value}


def _functions(value: Any, key: str, place: str) -> list[dict[str, Any]]:
    """Return tools or calls, each ``{"type": "function", "function": ...}`` with what it has beside these."""
    found = parsed(value, key, place) or []
    functions = []
    for item in found if isinstance(found, list) else [found]:
        named = parsed(item, key, place)
        named = named if _value(named, "function") else {"function": named}
        function = parsed(named["function"], key, place)
        if not isinstance(_value(function, "name"), str):
            raise InputError(f"{place} has {key} without the name of a function: correct or remove them")
        if key == "tool_calls":
            arguments = parsed(function.get("arguments") or {}, f"arguments of {function['name']}", place)
            if not isinstance(arguments, dict):
                raise InputError(f"{place}: the arguments of {function['name']} are no JSON object: correct the row")
            function = {**function, "arguments": arguments}
        kind = {} if "type" in named else {"type": "function"}
        functions.append({**kind, **named, "function": function})
    return functions


def parsed(value: Any, key: str, place: str) -> Any:
    """Return a value that a file may have as JSON text, as CSV and Parquet files do."""
    try:
        return read_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise InputError(f"{place}: {key} is text and no JSON ({error}): correct the row") from error


def without_nulls(value: Any) -> Any:
    """Return a row without nulls, as structs of Arrow give each the keys of all; a date, say, becomes a text."""
    known = json.dumps(value, default=str)
    return json.loads(known, object_hook=lambda found: {key: item for key, item in found.items() if item is not None})


def held_out_of(rows: datasets.Dataset, source: str) -> tuple[Splits, str]:
    """Split conversations by their digests; return the splits, and a line on them."""
    splits = hold_out_smallest(rows, rows.with_format("numpy")["digest"][:])
    if not len(splits["train"]):
        raise InputError(f"{source} has too few different conversations to hold any out: give --validation_file")
    return splits, f"{len(splits['validation']):,} of the {len(rows):,} conversations of {source} are held out"


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
                    messages = _questions(f"{module}.{node.name}", node, answer)
                    yield as_row({"messages": messages, "tools": None}, module, held_out)


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
