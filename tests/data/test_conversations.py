"""Conversations in the three usual formats become the same messages, and malformed ones are named by file and row."""

import json

import datasets
import pytest

from memsave_recipes.data.text import conversations
from memsave_recipes.data.text.conversations import load_conversations, names_conversations
from memsave_recipes.data.text.documents import TextArguments
from memsave_recipes.errors import InputError

USER, REPLY = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def write(tmp_path):
    def write(rows, name="chats.jsonl"):
        path = tmp_path / name
        match path.suffix:
            case ".jsonl" | ".json" if name != "array.json":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            case ".json":
                path.write_text(json.dumps(rows))
            case ".parquet":
                datasets.Dataset.from_list(rows).to_parquet(path)
        return str(path)

    return write


def load(path, validation=None):
    return load_conversations(TextArguments(train_file=[path], validation_file=[validation or path]))


FORMATS = {
    "messages": {"messages": [SYSTEM, USER, REPLY]},
    "lists of prompt and completion": {"prompt": [SYSTEM, USER], "completion": [REPLY]},
    "ShareGPT": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Who?"},
            {"from": "gpt", "value": "Nobody."},
        ]
    },
}


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "array.json", "chats.parquet"])
@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_formats_are_found_and_give_the_same_messages(write, row, name):
    path = write([row, row], name)
    assert names_conversations(TextArguments(train_file=[path]))
    chats = load(path)
    assert chats.train["messages"][:] == chats.validation["messages"][:] == [[SYSTEM, USER, REPLY]] * 2
    assert chats.train["place"][1].endswith(f"{name} row 2")


def test_texts_as_prompt_and_completion_are_two_turns(write):
    assert load(write([{"prompt": "Who?", "completion": "Nobody."}])).train["messages"][0] == [USER, REPLY]


def test_other_keys_do_not_matter_and_messages_come_before_a_prompt(write):
    path = write([{"prompt": "Who?", "messages": [{**USER, "name": None}, REPLY], "score": 1}])
    assert load(path).train["messages"][0] == [USER, REPLY]


def test_a_row_with_text_is_a_document(write):
    path = write([{"text": "once", "messages": [USER, REPLY]}])
    assert not names_conversations(TextArguments(train_file=[path]))
    assert names_conversations(TextArguments(train_file=[path], text_column="body"))
    assert not names_conversations(TextArguments(train_file=[write([{"text": "once"}])]))
    assert not names_conversations(TextArguments())


def test_a_twentieth_is_held_out_by_hash_and_copies_stay_on_one_side(write):
    rows = [{"prompt": f"{number % 40}?", "completion": "Nobody."} for number in range(80)]
    flags = TextArguments(train_file=[write(rows)])
    first, again = load_conversations(flags), load_conversations(flags)
    assert again.validation["messages"][:] == first.validation["messages"][:]
    train, held_out = ({messages[0]["content"] for messages in part["messages"]} for part in first[:2])
    assert len(first.train) + len(first.validation) == 80
    assert 4 <= len(first.validation) <= 6
    assert not train & held_out
    assert f"{len(first.validation)} of the 80 conversations" in first.notice


def test_a_changed_file_is_read_again(write):
    assert len(load(write([FORMATS["messages"]])).train) == 1
    assert len(load(write([FORMATS["messages"]] * 3)).train) == 3


def turns(*messages):
    return {"messages": list(messages)}


BAD = {
    "no assistant": (turns(USER), "row 2 has no turn of the assistant"),
    "an unknown role": (turns(USER, {"role": "bot", "content": "x"}), "row 2 message 2 has the role 'bot', none of"),
    "no role": (turns(USER, {"content": "x"}), "row 2 message 2 has the role None"),
    "no message": (turns(USER, "x"), "row 2 message 2 has the role None"),
    "another format": ({"prompt": "a", "completion": "b"}, "row 2 has prompt and completion where the rows before it"),
    "another format of messages": ({"conversations": []}, "row 2 has conversations where the rows before it"),
    "no conversation": ({"question": "a"}, "row 2 is no conversation"),
    "no object": ("words", "row 2 is no conversation"),
    "no messages": (turns(), "row 2 has no messages"),
    "a preference pair": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "row 2 is a preference .*MemsaveCallback",
    ),
    "empty content": (turns(USER, {"role": "assistant", "content": " \n"}), "row 2 message 2 is empty"),
    "content in parts": (turns(USER, {"role": "assistant", "content": [{"text": "x"}]}), "message 2 has no text"),
    "a late system message": (turns(USER, SYSTEM, REPLY), "row 2 message 2 is a system message"),
    "two system messages": (turns(SYSTEM, SYSTEM, REPLY), "row 2 message 2 is a system message"),
    "a tool call": (turns(USER, {"role": "assistant", "content": "", "tool_calls": [{}]}), "message 2 has tool_calls"),
    "separate reasoning": (turns(USER, {**REPLY, "reasoning_content": "hm"}), "message 2 has reasoning_content"),
    "a turn that is not to be learned": (turns(USER, {**REPLY, "weight": 0}), "message 2 has weight"),
    "tools": ({**turns(USER, REPLY), "tools": [{"name": "x"}]}, "row 2 has tools"),
    "half a surrogate": (turns(USER, {"role": "assistant", "content": "\ud800"}), "half of a surrogate pair"),
}


@pytest.mark.parametrize(("row", "expected"), BAD.values(), ids=BAD)
def test_a_malformed_row_is_named(write, row, expected):
    path = write([turns(USER, REPLY), row])
    with pytest.raises(InputError, match=rf"--train_file {path} .*{expected}"):
        load(path)


def test_rows_that_are_malformed_from_the_first_on(write, tmp_path):
    pair = write([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert names_conversations(TextArguments(train_file=[pair]))
    with pytest.raises(InputError, match="row 1 is a preference pair"):
        load(pair)
    with pytest.raises(InputError, match="must both be texts, or both lists"):
        load(write([{"prompt": "a", "completion": [REPLY]}]))
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(turns(USER, REPLY)) + "\n{oops\n")
    with pytest.raises(InputError, match=r"row 2 of .* is not JSON"):
        load(str(broken))
    with pytest.raises(InputError, match="too few different conversations to hold any out: give --validation_file"):
        load_conversations(TextArguments(train_file=[write([turns(USER, REPLY)] * 3)]))


def test_the_validation_file_is_named_too(write, tmp_path):
    good, bad = write([turns(USER, REPLY)]), write([turns(USER)], "bad.jsonl")
    with pytest.raises(InputError, match=r"--validation_file .*bad.jsonl row 1 has no turn of the assistant"):
        load(good, bad)
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(InputError, match=r"words.txt: conversations are read from .json, .jsonl, .parquet"):
        load(good, str(tmp_path / "words.txt"))
    with pytest.raises(InputError, match=r"no.jsonl is not a file"):
        load(good, "no.jsonl")


# The toy set


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    (folder / "package").mkdir(parents=True)
    for number in range(64):
        function = f'def f(a, *, b=1):\n    """Adds the number {number} to a.\n\n    More."""\n'
        (folder / f"package/m{number}.py").write_text(f'{function}def _g():\n    """This one is a hidden one."""\n')
    (folder / "package/__init__.py").write_text(
        'class C:\n    """One class of this package."""\n    def f(self):\n        """A method of the class C."""\n'
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))
    monkeypatch.setattr(conversations, "LIBRARIES", ("python",))


@pytest.mark.usefixtures("library")
def test_the_toy_set_asks_for_docstrings_and_holds_files_out():
    chats = load_conversations(TextArguments(dataset="docstring-chats"))
    assert "is a toy" in chats.notice
    both = [*chats.train["messages"], *chats.validation["messages"]]
    assert len(both) == 65
    assert 0 < len(chats.validation) < 32
    by_question = {messages[0]["content"]: messages for messages in both}
    assert [message["content"] for message in by_question["What does `package.m7.f` do?"]] == [
        "What does `package.m7.f` do?",
        "Adds the number 7 to a.",
        "Which arguments does it take?",
        "`a, *, b=1`",
    ]
    assert [message["content"] for message in by_question["What does `package.C` do?"][1:]] == [
        "One class of this package."
    ]
