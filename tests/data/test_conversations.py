"""Conversations in the three usual formats become the same messages, and malformed ones are named by file and row."""

import csv
import json

import datasets
import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text import conversations
from memsave_recipes.data.text.conversations import load_conversations, names_conversations
from memsave_recipes.data.text.documents import TextArguments

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
            case ".csv":
                with open(path, "w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(map(as_texts, rows))
        return str(path)

    return write


def as_texts(row):
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}


def load(path, validation=None):
    return load_conversations(TextArguments(train_file=[path], validation_file=[validation or path]))


def messages_of(split):
    return [json.loads(row)["messages"] for row in split["conversation"]]


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


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "array.json", "chats.parquet", "chats.csv"])
@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_formats_are_found_and_give_the_same_messages(write, row, name):
    path = write([row, row], name)
    assert names_conversations(TextArguments(train_file=[path]))
    chats = load(path)
    assert messages_of(chats.train) == messages_of(chats.validation) == [[SYSTEM, USER, REPLY]] * 2
    assert chats.train["place"][1].endswith(f"{name} row 2")


def test_texts_as_prompt_and_completion_are_two_turns(write):
    assert messages_of(load(write([{"prompt": "Who?", "completion": "Nobody."}])).train)[0] == [USER, REPLY]


def test_other_keys_do_not_matter_and_messages_come_before_a_prompt(write):
    path = write([{"prompt": "Who?", "messages": [{**USER, "name": None}, REPLY], "score": 1}])
    assert messages_of(load(path).train)[0] == [USER, REPLY]


def test_messages_come_before_a_text_that_no_flag_names(write):
    path = write([{"text": "once", "messages": [USER, REPLY]}])
    assert names_conversations(TextArguments(train_file=[path]))
    assert load(path).notice == "column text is not used"
    assert not names_conversations(TextArguments(train_file=[write([{"text": "once"}])]))
    assert not names_conversations(TextArguments())


def test_a_twentieth_is_held_out_by_hash_and_copies_stay_on_one_side(write):
    rows = [{"prompt": f"{number % 40}?", "completion": "Nobody."} for number in range(80)]
    flags = TextArguments(train_file=[write(rows)])
    first, again = load_conversations(flags), load_conversations(flags)
    assert messages_of(again.validation) == messages_of(first.validation)
    train, held_out = ({messages[0]["content"] for messages in messages_of(part)} for part in first[:2])
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
    "no conversation": ({"question": "a"}, "row 2 is not a conversation"),
    "no object": ("words", "row 2 is not a conversation"),
    "no messages": (turns(), "row 2 has no messages"),
    "a preference pair": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "row 2 is a preference .*MemsaveCallback",
    ),
    "empty content": (turns(USER, {"role": "assistant", "content": " \n"}), "row 2 message 2 is empty"),
    "null as content": (turns(USER, {"role": "assistant", "content": None}), "message 2 has no text as its content"),
    "an image": (
        turns({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}, REPLY),
        "row 2 message 1 has a part of type 'image_url': only texts are trained on; remove the row",
    ),
    "a part without a type": (
        turns(USER, {"role": "assistant", "content": ["x"]}),
        "message 2 has a part of type None",
    ),
    "a part without a text": (turns(USER, {**REPLY, "content": [{"type": "text"}]}), "message 2 has no text"),
    "images beside messages": ({**turns(USER, REPLY), "images": ["a.png"]}, "row 2 has images, and only texts"),
    "a call without a name": (
        turns(USER, {"role": "assistant", "tool_calls": [{}]}),
        "message 2 has tool_calls without",
    ),
    "a call of a user": (turns({**USER, "tool_calls": [{"name": "x"}]}, REPLY), "message 1 has tool_calls, which only"),
    "reasoning of a user": (turns({**USER, "thinking": "hm"}, REPLY), "message 1 has reasoning, which only"),
    "reasoning in parts": (turns(USER, {**REPLY, "thinking": ["hm"]}), "message 2 has no text as its reasoning"),
    "reasoning alone": (turns(USER, {"role": "assistant", "content": "", "thinking": "hm"}), "message 2 is empty"),
    "arguments that are no object": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}),
        "message 2: the arguments of f are no JSON object",
    ),
    "arguments that are no JSON": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}),
        "message 2: arguments of f is text and no JSON",
    ),
    "messages that are no JSON": ({"messages": "Who?"}, "row 2: messages is text and no JSON"),
    "the old way to call": (turns(USER, {**REPLY, "function_call": {"name": "x"}}), "message 2 has function_call"),
    "the only turn is not to be learned": (turns(USER, {**REPLY, "weight": 0}), "row 2 has no turn .* that counts"),
    "half a turn": (
        turns(USER, {**REPLY, "weight": 0.5}),
        "message 2 has weight 0.5, and a turn counts in the loss or",
    ),
    "a part of a turn": (turns(USER, {**REPLY, "train_detail": [{"end": 1}]}), "message 2 has train_detail, which is"),
    "a mark and its opposite": (turns(USER, {**REPLY, "loss": 1, "masked": True}), "message 2 counts by one"),
    "a mark of either kind": ({**turns(USER, REPLY), "mask": [0, 1]}, "row 2 has mask, which may mean either"),
    "too few marks": ({**turns(USER, REPLY, USER), "loss_mask": [1, 0]}, "2 values of loss_mask for 3 messages"),
    "a row that is not to be learned": ({**turns(USER, REPLY), "train": False}, "row 2 has no turn .* that counts"),
    "two system messages": ({**turns(SYSTEM, USER, REPLY), "system": "Else."}, "row 2 begins with another system"),
    "two system columns": (
        {**turns(USER, REPLY), "system": "a", "system_prompt": "b"},
        "has different texts as system",
    ),
    "a system message that is no text": ({**turns(USER, REPLY), "system": 1}, "row 2 system has no text as its text"),
    "template arguments": (
        {**turns(USER, REPLY), "chat_template_kwargs": [1]},
        "chat_template_kwargs is no JSON object",
    ),
    "two wishes": (
        {**turns(USER, REPLY), "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        "has another enable_thinking in",
    ),
    "NaN": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": float("nan")}}]}),
        "row 2 holds NaN or an infinite number",
    ),
    "NaN in a JSON text": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": [Infinity]}'}]}),
        "row 2 holds NaN or an infinite number",
    ),
    "a tool without a name": ({**turns(USER, REPLY), "tools": [{"description": "x"}]}, "row 2 has tools without"),
    "half a surrogate in a call": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}),
        "row 2 holds half of a surrogate pair",
    ),
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
    with pytest.raises(InputError, match=r"words.txt: conversations are read from .csv, .json, .jsonl, .parquet"):
        load(good, str(tmp_path / "words.txt"))
    with pytest.raises(InputError, match=r"no.jsonl is not a file"):
        load(good, "no.jsonl")


# Tools, calls and reasoning

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
CALLS = [
    {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
    {"type": "function", "id": "2", "function": {"name": "now", "arguments": {}}},
]
RESULTS = [
    {"role": "tool", "content": "21 °C", "name": "weather", "tool_call_id": "1"},
    {"role": "tool", "content": "", "name": "now", "tool_call_id": "2"},
]
ASKED = [
    SYSTEM,
    {"role": "developer", "content": "Call tools."},
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
    *RESULTS,
    REPLY,
]


def with_arguments(change):
    return [{**call, "function": {**call["function"], "arguments": change(call)}} for call in CALLS]


def asked(calls=CALLS, **of_the_call):
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls, **of_the_call}
    return [*ASKED[:3], message, *ASKED[4:]]


NEW_FORMATS = {
    "objects": {"messages": asked(), "tools": TOOLS},
    "an empty text": {"messages": asked(content=""), "tools": TOOLS},
    "texts in parts": {
        "messages": [
            *ASKED[:2],
            {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]},
            *ASKED[3:],
        ],
        "tools": TOOLS,
    },
    "JSON texts": {"messages": json.dumps(asked()), "tools": json.dumps(TOOLS)},
    "JSON texts inside": {
        "messages": asked(with_arguments(lambda call: json.dumps(call["function"]["arguments"]))),
        "tools": [json.dumps(tool) for tool in TOOLS],
    },
    "without covers": {
        "messages": asked([{"id": call["id"], "type": "function", "function": call["function"]} for call in CALLS]),
        "tools": [tool["function"] for tool in TOOLS],
    },
    "thinking": {"messages": asked(reasoning_content=None, thinking="hm"), "tools": TOOLS},
    "reasoning": {"messages": asked(reasoning_content="", reasoning="hm"), "tools": TOOLS},
    "a prompt and its completion": {"prompt": ASKED[:3], "completion": ASKED[3:], "tools": TOOLS},
}


FILES = ("chats.jsonl", "chats.parquet", "chats.csv")
CANNOT_HOLD = {("texts in parts", "chats.parquet")}  # a column of texts and of lists


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, file) for kind, row in NEW_FORMATS.items() for file in FILES if (kind, file) not in CANNOT_HOLD],
)
def test_calls_are_the_same_however_they_are_written(write, row, name):
    """A Parquet file gives each struct the keys of all: the other tool's parameters, the other call's arguments."""
    path = write([row, row], name)
    assert names_conversations(TextArguments(train_file=[path]))
    found = json.loads(load(path).train["conversation"][0])
    assert found == {"messages": ASKED, "tools": TOOLS}
    assert list(found["tools"][0]["function"]) == ["name", "description", "parameters"]  # as templates write them


def test_shared_gpt_has_calls_as_turns_of_their_own(write):
    call = json.dumps({"name": "weather", "arguments": {"city": "Köln"}})
    pairs = {"human": "Who?", "function_call": call, "observation": "21 °C", "gpt": "Nobody."}
    turns = [{"from": role, "value": value} for role, value in pairs.items()]
    found = json.loads(
        load(write([{"conversations": turns, "tools": json.dumps([TOOLS[0]["function"]])}])).train["conversation"][0]
    )
    (without_id,) = ({key: value for key, value in call.items() if key != "id"} for call in CALLS[:1])
    assert found["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [without_id]},
        {"role": "tool", "content": "21 °C"},
        REPLY,
    ]
    assert found["tools"] == TOOLS[:1]


@pytest.mark.parametrize(("name", "kept"), [("a.jsonl", True), ("a.json", True), ("a.csv", True), ("a.parquet", False)])
def test_null_is_padding_in_parquet_alone(write, name, kept):
    given = {"seat": None, "row": {"x": None, "y": [1]}}
    properties = {"city": {"type": "string", "default": None}}
    calls = [{"name": "f", "arguments": given}]
    row = {
        **turns(USER, {"role": "assistant", "content": "", "tool_calls": calls}, REPLY),
        "tools": [{"name": "f", "parameters": properties}],
    }
    chat = json.loads(load(write([row], name)).train["conversation"][0])
    expected = given if kept else {"row": {"y": [1]}}
    assert chat["messages"][1]["tool_calls"][0]["function"]["arguments"] == expected
    assert ("default" in chat["tools"][0]["function"]["parameters"]["city"]) == kept
    text = turns(USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": null}'}]})
    chat = json.loads(load(write([text], name)).train["conversation"][0])
    assert chat["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


AGAIN = {"role": "assistant", "content": "Somebody."}
TURNS = [USER, REPLY, USER, AGAIN]


def in_shared_gpt(messages):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[one.pop("role")], "value": one.pop("content"), **one} for one in map(dict, messages)]


MARKED = {
    "false": {"loss": False},
    "a zero": {"weight": 0},
    "a fraction of zero": {"weight": 0.0},
    "a text": {"train": "False"},
    "the opposite": {"masked": True},
    "two marks": {"trainable": False, "loss_mask": 0},
}


@pytest.mark.parametrize("mark", MARKED.values(), ids=MARKED)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.csv", "chats.parquet"])
def test_a_turn_that_is_not_to_count_is_kept_and_named(write, mark, name):
    marked = [USER, {**REPLY, **mark}, USER, AGAIN]
    rows = [{"messages": marked}, {"conversations": in_shared_gpt(marked)}]
    for row in rows:
        chat = json.loads(load(write([row, row], name)).train["conversation"][0])
        assert chat == {"messages": TURNS, "tools": None, "uncounted": [1]}


@pytest.mark.parametrize(
    ("columns", "uncounted"),
    [
        ({"loss_mask": [0, 0, 0, 1]}, [0, 1, 2]),
        ({"loss_mask": [0, 1]}, [1]),
        ({"masked": [True, True, True, False]}, [0, 1, 2]),
        ({"loss": 0.7, "weight": 2}, None),
        ({"train": True}, None),
    ],
)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.csv"])
def test_marks_may_stand_beside_the_messages(write, columns, uncounted, name):
    chats = load(write([{"messages": TURNS, **columns}], name))
    assert json.loads(chats.train["conversation"][0]).get("uncounted") == uncounted
    assert chats.notice == ("columns loss, weight are not used" if "weight" in columns else None)


@pytest.mark.parametrize("key", ["system", "system_prompt"])
@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.csv"])
def test_a_system_column_is_the_first_turn(write, row, key, name):
    bare = {format: turns[1:] if format != "completion" else turns for format, turns in row.items()}
    rows = [{**bare, key: "Be brief."}, {**row, key: "Be brief."}, {**row, key: ""}]
    chats = load(write(rows, name))
    assert messages_of(chats.train) == [[SYSTEM, USER, REPLY]] * 3
    assert chats.notice is None


def test_marks_move_with_a_system_message(write):
    row = {"messages": [USER, {**REPLY, "train": False}, USER, AGAIN], "system": "Be brief."}
    assert json.loads(load(write([row])).train["conversation"][0])["uncounted"] == [2]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.csv"])
def test_arguments_of_the_template_are_kept(write, name):
    rows = [
        {**turns(USER, REPLY), "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        {**turns(USER, REPLY), "chat_template_kwargs": {"enable_thinking": None}, "reasoning_effort": None},
    ]
    rows = rows[:1] if name == "chats.csv" else rows
    first, *others = (json.loads(one) for one in load(write(rows, name)).train["conversation"])
    assert first["options"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert all(other.get("options") in (None, {"enable_thinking": None}) for other in others)
    path = write([{**turns(USER, REPLY), "enable_thinking": False}], name)
    assert json.loads(load(path).train["conversation"][0])["options"] == {"enable_thinking": False}


def test_what_nobody_reads_is_named_once(write):
    message = {**USER, "name": "Ann", "content": [{"type": "text", "text": "Who?", "cache_control": {"type": "x"}}]}
    rows = [{**turns(message, {**REPLY, "refusal": None}), "id": at, "tags": [], "prompt": "p"} for at in range(3)]
    notice = load(write([*rows, {**turns(USER, REPLY), "source": "x"}])).notice
    expected = "columns id, prompt, source, key cache_control of parts, key name of messages are not used"
    assert notice == expected
    assert load(write([turns(USER, {**REPLY, "weight": 1})])).notice is None
    assert load(write([turns({**USER, "loss": True}, REPLY)])).notice.startswith("the mark to count turns that")


def test_lines_of_a_prompt_that_read_as_rows_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"Why,not\nHow,so\nSize 5",ok\nWho,me\n')
    notice = load(str(path)).notice
    assert f"rows of the table (--train_file {path} row 1 and 1 more): if a stray double quote opens one" in notice
    path.write_text('prompt,completion\n"Why, then?\nHow",so\nWho,me\n')
    assert load(str(path)).notice is None


def test_tools_make_another_conversation(write):
    plain, same, tools = ({"messages": [USER, REPLY], "tools": tools} for tools in (None, [], TOOLS))
    digests = load(write([plain, same, tools])).train["digest"]
    assert digests[0] == digests[1] != digests[2]


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
    both = [*messages_of(chats.train), *messages_of(chats.validation)]
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
