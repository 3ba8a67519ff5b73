"""The chat templates that TRL ships, on many conversations: replies and their marks count, or one line says why."""

import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from jinja2.exceptions import TemplateError, UndefinedError
from samples import sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text.chat_template import encode, end_of_turn, tokenize_conversations
from memsave_recipes.data.text.conversations import as_row

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
FEW, OF_MODELS = TEMPLATES[::3], [name for name in TEMPLATES if not name.endswith("_training")]
WITHOUT_END = {"glm4moe"}
"""Their replies end where the next turn begins."""
MARK = re.compile(r"<\|?[a-zA-Z_0-9▁|｜/]+\|?>|\[/?[A-Z_]+\]|<｜[^｜]+｜>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
ENDS += ("<｜end▁of▁sentence｜>", "<end_of_utterance>")


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


FIRST, LAST = reply("<think>\nttt1\n</think>\n\nrrr1"), reply("<think>\nttt2\n</think>\n\nrrr2")
CHATS = {
    "one": [user("uuu1"), reply("rrr1")],
    "two": [user("uuu1"), reply("rrr1"), user("uuu2"), reply("rrr2")],
    "system": [{"role": "system", "content": "sss"}, user("uuu1"), reply("rrr1"), user("uuu2"), reply("rrr2")],
    "thinks last": [user("uuu1"), reply("rrr1"), user("uuu2"), LAST],
    "thinks first": [user("uuu1"), FIRST, user("uuu2"), reply("rrr2")],
    "thinks always": [user("uuu1"), FIRST, user("uuu2"), LAST],
    "half a thought": [user("uuu1"), reply("ttt1\n</think>\n\nrrr1")],
    "greets": [reply("rrr0"), user("uuu1"), reply("rrr1")],
    "asked last": [user("uuu1"), reply("rrr1"), user("uuu2")],
    "blanks": [user("uuu1"), reply("\n rrr1 \n\n"), user("uuu2"), reply("  rrr2")],
    "replies twice": [user("uuu1"), reply("rrr1"), reply("rrr2")],
    "told again": [user("uuu1"), reply("rrr1"), {"role": "system", "content": "sss"}, user("uuu2"), reply("rrr2")],
    "the same again": [user("uuu1"), reply("rrr1"), user("uuu1"), reply("rrr1")],
    "greets with a thought": [FIRST, user("uuu1"), LAST],
    "lines of code": [user("uuu1\n\n```\nuuu\n```"), reply("rrr1\n\n```\nrrr\n```\n"), user("uuu2"), reply("rrr2")],
    "three turns": [user("uuu1"), reply("rrr1"), user("uuu2"), FIRST, user("uuu3"), reply("rrr3")],
    "a thought alone": [user("uuu1"), reply("<think>\nttt1\n</think>\n\n"), user("uuu2"), reply("rrr2")],
    "a role as reply": [user("uuu1"), reply("assistant rrr1"), user("uuu2"), reply("user rrr2")],
}


def call(text="", cities=("ccc1",), **more):
    """A turn of the assistant with a call for each city."""
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": "weather", "arguments": {"city": city}}}
        for number, city in enumerate(cities)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def thinks(text, reasoning):
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": "ooo"}
SECOND = RESULT | {"tool_call_id": "call00001"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "eee"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "ddd", "parameters": PARAMETERS}}]
CALLS = {
    "called": [user("uuu1"), call(), RESULT, reply("rrr1")],
    "calls last": [user("uuu1"), call()],
    "asked again": [user("uuu1"), call(), RESULT, reply("rrr1"), user("uuu2"), reply("rrr2")],
    "called twice": [user("uuu1"), call(), RESULT, reply("rrr1"), user("uuu2"), call(), RESULT, reply("rrr2")],
    "a text and a call": [user("uuu1"), call("rrr0"), RESULT, reply("rrr1"), user("uuu2"), reply("rrr2")],
    "two calls": [user("uuu1"), call(cities=("ccc1", "ccc2")), RESULT, SECOND, reply("rrr1")],
    "thinks": [user("uuu1"), call(reasoning_content="ttt1"), RESULT, thinks("rrr1", "ttt2")],
    "thinks in steps": [
        *(user("uuu1"), call(reasoning_content="ttt1"), RESULT, call(reasoning_content="ttt2"), RESULT, reply("rrr1")),
        *(user("uuu2"), thinks("rrr2", "ttt3")),
    ],
    "a system message": [{"role": "system", "content": "sss"}, user("uuu1"), call(), RESULT, reply("rrr1")],
}
WITHOUT_TOOLS = {"called, without tools": CALLS["asked again"]}
THOUGHTS = {
    "thinks always": [user("uuu1"), thinks("rrr1", "ttt1"), user("uuu2"), thinks("rrr2", "ttt2")],
    "thinks first": [user("uuu1"), thinks("rrr1", "ttt1"), user("uuu2"), reply("rrr2")],
    "thinks last": [user("uuu1"), reply("rrr1"), user("uuu2"), thinks("rrr2", "ttt2")],
}
IN_PARTS = ("idefics3", "smolvlm")  # which read no content that is a text
TAKES_CALLS = ("gemma4", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_v2", "llama3_1", "llama3_2", "muse", "nemotron")
IN_PARTS = ("idefics3", "smolvlm")  # which read no content that is a text
TAKES_CALLS += ("diffusion_gemma", "qwen2_5", "qwen3")
NOT_CALLS = {"qwen2_5_vl", "qwen2_5_vl_training"}


def tokenizer_for(template):
    """A token a byte, and one for each mark of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = next((mark for mark in ENDS if mark in template), "</s>")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token="<pad>", bos_token="<bos>")
    marks = sorted({mark for mark in MARK.findall(template) if len(mark) > 3} | {end, "<pad>", "<bos>"})
    made.add_special_tokens({"extra_special_tokens": marks})
    made.chat_template = template
    return made


def runs(tokenizer, tokens, counted):
    """The texts that count, and those that do not, in order."""
    found = {True: [], False: []}
    begin = 0
    for place in range(1, len(counted) + 1):
        if place == len(counted) or counted[place] != counted[begin]:
            found[bool(counted[begin])].append(tokenizer.decode(tokens[begin:place].tolist()))
            begin = place
    return found[True], found[False]


@pytest.mark.parametrize("name", sample(FEW, TEMPLATES))
def test_replies_count_with_their_marks_and_nothing_else_does(name):
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer, num_taken = tokenizer_for(template), 0
    for chat in CHATS.values():
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            tokens, is_counted = encode(chat, tokenizer)
        except (InputError, TemplateError, UndefinedError):
            continue
        num_taken += 1
        counted, others = runs(tokenizer, tokens, is_counted)
        assert not any(word in run for run in counted for word in ("uuu", "sss")), (chat, counted)
        assert not any(word in run for run in others for word in ("rrr", "ttt")), (chat, counted)
        assert all(run.count("</think>") <= 1 for run in counted), (chat, counted)
        assert text.count("</think>") == text.count("<think>") or "<think>" not in template, text
        if name.removesuffix("_training") not in WITHOUT_END:
            assert not any(run.rstrip().endswith(tuple("0123456789")) for run in counted), (chat, counted)
    assert num_taken or not _takes_texts(tokenizer)


@pytest.mark.parametrize("name", sample(FEW, TEMPLATES))
def test_calls_and_reasoning_count_and_what_tools_say_does_not(name):
    tokenizer = tokenizer_for((FOLDER / f"{name}.jinja").read_text())
    taken = set()
    for case, chat in (CALLS | THOUGHTS | WITHOUT_TOOLS).items():
        try:
            tokens, is_counted = encode(chat, tokenizer, tools=TOOLS if case in CALLS else None)
        except InputError:
            continue
        taken.add(case)
        counted, others = runs(tokenizer, tokens, is_counted)
        calls = [one for message in chat for one in message.get("tool_calls", ())]
        assert "".join(counted).count("ccc") == len(calls), (chat, counted)
        assert "rrr1" in "".join(counted) or case == "calls last", (chat, counted)
        assert not any(word in run for run in counted for word in ("uuu", "sss", "ooo", "ddd", "eee")), (chat, counted)
        assert not any(word in run for run in others for word in ("rrr", "ttt", "ccc")), (chat, others)
        if name.removesuffix("_training") not in WITHOUT_END:
            assert not counted[-1].rstrip().endswith((*"0123456789", "}")), (chat, counted)
    assert ("asked again" in taken) == (name.startswith(TAKES_CALLS) and name not in NOT_CALLS), taken
    if name.startswith("deepseekv3"):  # which writes the calls, and drops the tools
        assert taken == {*THOUGHTS, *WITHOUT_TOOLS}
    assert taken >= set(THOUGHTS) or name.startswith(IN_PARTS) or not _takes_texts(tokenizer), taken


def _takes_texts(tokenizer):
    try:
        tokenizer.apply_chat_template(CHATS["one"], tokenize=False)
    except (TemplateError, UndefinedError):
        return False
    return True


@pytest.mark.parametrize("name", sample(FEW, TEMPLATES))
def test_wherever_a_row_ends_a_long_conversation_ends_with_a_whole_reply(name):
    tokenizer = tokenizer_for((FOLDER / f"{name}.jinja").read_text())
    taken = [chat for chat in CHATS.values() if _is_taken(chat, tokenizer)]
    if not taken:
        pytest.skip("takes contents in parts")
    chats = datasets.Dataset.from_list([as_row({"messages": chat, "tools": None}) for chat in taken])
    tokens = tokenize_conversations(chats, tokenizer)
    num_cut = 0
    for block_size in range(int(tokens.lengths.min()), int(tokens.lengths.max()), 16):
        lengths = tokens.lengths_within(block_size, "training")
        for number in np.flatnonzero((lengths > 0) & (lengths < tokens.lengths)):
            piece, end = tokens.pieces[int(number)], int(lengths[number])
            assert end <= block_size
            assert piece["counted"][end - 1 : end + 1].tolist() == [True, False]
            text = tokenizer.decode(piece["input_ids"][:end])
            assert name.removesuffix("_training") in WITHOUT_END or not text.rstrip().endswith(tuple("0123456789"))
            num_cut += 1
    assert num_cut


def _is_taken(chat, tokenizer):
    try:
        encode(chat, tokenizer)
    except (InputError, TemplateError, UndefinedError):
        return False
    return True


@pytest.mark.parametrize("name", sample([name for name in FEW if name in OF_MODELS], OF_MODELS))
def test_generation_stops_where_a_reply_ends(name):
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = tokenizer_for(template)
    if not _takes_texts(tokenizer):
        pytest.skip("takes contents in parts")
    mark = end_of_turn(tokenizer)
    assert (mark is None) == (name in WITHOUT_END)
    assert mark is None or tokenizer.decode([mark]) in template + tokenizer.eos_token
