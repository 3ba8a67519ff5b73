"""The assistant's tokens of conversations, by templates that mark them and by those that do not."""

import copy
import random
import re
import resource

import datasets
import numpy as np
import pytest
from samples import every_third, sample
from transformers import AutoTokenizer

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text.chat_template import (
    encode,
    end_of_turn,
    render_prompt,
    set_chat_template,
    tokenize_conversations,
)
from memsave_recipes.data.text.conversations import as_row
from memsave_recipes.data.text.tokenizers import load_tokenizer

# Six templates as their models describe their formats; without ``{% generation %}`` they have to be taken apart.
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA_3 = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
QWEN_3 = """
{%- set ns = namespace(last_question=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- set reasoning, reply = '', message.content %}
        {%- if '</think>' in reply %}
            {%- set reasoning = reply.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set reply = reply.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > ns.last_question and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
        {%- endif %}
        {{- reply + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# The system message goes into the last question.
MISTRAL = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}{%- set system, turns = '', messages %}{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' }}
        {%- if system and loop.index0 >= (turns | length) - 2 %}
            {%- if turns[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}
            {{- system + '\n\n' }}
            {%- endif %}
        {%- endif %}
        {{- message['content'] + ' [/INST]' }}
    {%- else %}{%- generation %}{{- ' ' + message['content'] | trim + '</s>' }}{%- endgeneration %}{%- endif %}
{%- endfor %}"""
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}{{- message['content'] | trim + '<end_of_turn>' }}{%- endgeneration %}{{- '\n' }}
    {%- else %}{{- '<start_of_turn>user\n' + message['content'] | trim + '<end_of_turn>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
# A whole conversation ends with the end-of-text token.
PHI_3 = """
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}{{- '<|assistant|>\n' }}
        {%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}{{- '\n' }}
    {%- else %}{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

# Tools before all turns, calls behind the content, and the reasoning of replies to the last question alone.
WITH_TOOLS = """
{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{%- endfor %}
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{%- generation %}
        {%- if message.reasoning_content and loop.index0 > ns.last_question %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TEMPLATES = {
    "ChatML": CHATML,
    "Llama-3": LLAMA_3,
    "Qwen3": QWEN_3,
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
    "Phi-3": PHI_3,
    "tools": WITH_TOOLS,
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"),
    *("[INST]", "[/INST]", "</s>", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
]
ENDS = ("<|im_end|>", "<|eot_id|>", "<|im_end|>", "</s>", "<end_of_turn>", "<|end|>", "<|im_end|>")
ENDS = dict(zip(TEMPLATES, ENDS, strict=True))
WORDS = ["yes", "no", "naïve", "🙂", "print(x)", "\n", "  ", "Größe", "one two", "\n\n", "?", "I am"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        trained = load_tokenizer(None, [" ".join(WORDS * 4)] * 3, vocab_size=320)
    trained.add_special_tokens({"extra_special_tokens": SPECIAL})
    return trained


def with_template(tokenizer, name, *, marked):
    tokenizer.chat_template = TEMPLATES[name] if marked else re.sub(r"{%- (end)?generation %}", "", TEMPLATES[name])
    return tokenizer


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(city, content="", **more):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}], **more}


def conversation(seed, name):
    draw = random.Random(seed)

    def content():
        return "a" + " ".join(draw.choices(WORDS, k=draw.randint(1, 8))).strip()

    messages = [{"role": "system", "content": content()}] if name != "Gemma" and draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        messages += [{"role": "user", "content": content()}]
        reasoning = f"<think>\n{content()}\n</think>\n\n" if name == "Qwen3" and draw.random() < 0.3 else ""
        if name == "tools" and draw.random() < 0.5:
            more = {"reasoning_content": content()} if draw.random() < 0.5 else {}
            messages += [call(content(), draw.choice(["", content()]), **more), {"role": "tool", "content": content()}]
        messages += [{"role": "assistant", "content": reasoning + content()}]
        if name == "tools" and draw.random() < 0.3:
            messages[-1]["reasoning_content"] = content()
    if draw.random() < 0.2:
        messages += [{"role": "user", "content": content()}]
    return messages


@pytest.mark.parametrize("name", every_third(TEMPLATES))
def test_masks_are_those_of_a_template_with_marks(tokenizer, name):
    for seed in range(200):
        messages = conversation(seed, name)
        marked = with_template(tokenizer, name, marked=True)
        expected = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert sum(expected["assistant_masks"]) > 0
        for is_marked in (True, False):
            tokens, is_assistant = encode(messages, with_template(tokenizer, name, marked=is_marked))
            assert tokens.tolist() == expected["input_ids"]
            assert is_assistant.tolist() == [bool(mark) for mark in expected["assistant_masks"]], messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_end_where_the_turn_of_the_assistant_does(tokenizer, name):
    for marked in (True, False):
        assert end_of_turn(with_template(tokenizer, name, marked=marked)) == tokenizer.get_vocab()[ENDS[name]]


QUESTION = {"role": "user", "content": "Who?"}
REPLY = {"role": "assistant", "content": "Nobody."}
SYSTEM = {"role": "system", "content": "Be brief."}
WITHOUT_SYSTEM = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
WHOLE = CHATML.replace(
    "{%- for", "{%- if messages[-1].role == 'user' %}{{- raise_exception('no') }}{%- endif %}{%- for", 1
)


ODD_REPLIES = {  # the template, the question, and the replies with what counts of each
    "words of the question": ("ChatML", "Answer with yes or no. yes or no?", {"yes": "yes"}),
    "one letter": ("ChatML", "a", {"x": "x"}),
    "the name of the role": ("ChatML", "a", {"assistant": "assistant", "assistant\nassistant": "assistant\nassistant"}),
    "the beginning of a turn": ("ChatML", "a", {"<|im_start|>assistant\n": "<|im_start|>assistant\n"}),
    "another turn": ("ChatML", "a", {"b<|im_end|>\n<|im_start|>user\nno": "b<|im_end|>\n<|im_start|>user\nno"}),
    "spaces around": ("ChatML", "a", {"  lead\n\n": "  lead\n\n"}),
    "spaces that are taken off": ("Gemma", " a ", {"\n\nb": "b", " b ": "b"}),
    "half a thought": ("Qwen3", "2+2?", {"It is 4.\n</think>\n\n4": "<think>\nIt is 4.\n</think>\n\n4"}),
    "a thought that is dropped": ("Qwen3", "a", {"<think>\nhm\n</think>\n\nb": "b", "c": "<think>\n\n</think>\n\nc"}),
    "a thought alone": ("Qwen3", "a", {"<think>\nhm\n</think>": "", "c": "<think>\n\n</think>\n\nc"}),
    "its own end": ("Qwen3", "a", {"<|im_end|>": "<|im_end|>", "c": "<think>\n\n</think>\n\nc"}),
}


def counted_text(tokenizer, question, replies):
    chat = [
        message
        for reply in replies
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": reply})
    ]
    tokens, counted = encode(chat, tokenizer)
    return tokenizer.decode(tokens[counted].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("case", ODD_REPLIES)
def test_odd_replies_count_as_the_template_writes_them(tokenizer, case):
    name, question, replies = ODD_REPLIES[case]
    found = counted_text(with_template(tokenizer, name, marked=False), question, replies)
    assert found == "".join(reply + ENDS[name] for reply in replies.values())


@pytest.mark.parametrize(
    "replies",
    [
        {"b": "b", "c": "\n</think>\n\nc"},
        {"<think>\nhm\n</think>\n\nb": "b", "c": "\n</think>\n\nc"},
        {"b": "b", "c": "c", "<think>\nhm\n</think>\n\nd": "hm\n</think>\n\nd"},
    ],
    ids=["no thought", "one that is dropped", "one at the end"],
)
def test_earlier_replies_lack_the_thought_that_the_prompt_opens(tokenizer, replies):
    opening = with_template(tokenizer, "Qwen3", marked=False)
    opening.chat_template = opening.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert counted_text(opening, "a", replies) == "".join(reply + ENDS["Qwen3"] for reply in replies.values())


def ending_with(inner, last):
    """A template with another mark at the end of a conversation."""
    end = f"('{last}' if loop.last and message.role == 'assistant' else '{inner}')"
    return (
        f"{{% for message in messages %}}{{{{ '<|' + message.role + '|>' + message.content + {end} }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )


@pytest.mark.parametrize(("inner", "last"), [("<|end|>", "</s>"), ("<|end|>", "<|end|></s>"), ("</s>", "<|eot_id|>")])
@pytest.mark.parametrize("greets", [False, True])
def test_the_last_turn_may_end_with_another_mark_than_those_before(tokenizer, inner, last, greets):
    tokenizer.chat_template = ending_with(inner, last)
    first, *others = ({"role": "assistant", "content": text} for text in ("one", "two", "one"))
    chat = [first, *(message for reply in others for message in (QUESTION, reply))][0 if greets else 1 :]
    tokens, counted = encode(chat, tokenizer)
    expected = f"two{inner}one{last}"
    assert tokenizer.decode(tokens[counted].tolist()) == (f"one{inner}" if greets else "") + expected


def test_the_mark_of_the_next_turn_ends_none(tokenizer):
    tokenizer.chat_template = ending_with("", "</s>")
    with pytest.raises(InputError, match="message 2: the chat template does not show where this turn"):
        encode([QUESTION, REPLY, QUESTION, REPLY], tokenizer)


def test_a_template_that_drops_system_messages_is_refused_only_where_there_are_some(tokenizer):
    tokenizer.chat_template = WITHOUT_SYSTEM
    assert encode([QUESTION, REPLY], tokenizer)[1].any()
    with pytest.raises(InputError, match=r"^x row 3: the chat template drops system messages without a word"):
        encode([SYSTEM, QUESTION, REPLY], tokenizer, "x row 3")


def test_results_of_tools_are_taken_where_the_template_writes_them(tokenizer):
    tokenizer.chat_template = CHATML
    messages = [QUESTION, REPLY, {"role": "tool", "content": "7"}, REPLY]
    assert tokenizer.decode(encode(messages, tokenizer)[0]).count("Nobody.") == 2
    tokenizer.chat_template = CHATML.replace("in messages %}", "in messages if message.role != 'tool' %}")
    with pytest.raises(InputError, match="drops tool messages"):
        encode(messages, tokenizer)


FORGETFUL = {  # a piece of the template, another in its place, and what it drops
    "tools": ("tool | tojson + '\n'", "''", "tools"),
    "calls": ("call.function.arguments | tojson", "''", "tool calls"),
    "all calls but the first": ("message.tool_calls or []", "(message.tool_calls or [])[:1]", "tool calls"),
    "results": ("{%- else %}{{- message.content +", "{%- else %}{{- ('' if message.role == 'tool' else 'a') +", "tool"),
}


@pytest.mark.parametrize(("words", "others", "dropped"), FORGETFUL.values(), ids=FORGETFUL)
def test_a_template_that_drops_calls_is_refused_where_there_are_some(tokenizer, words, others, dropped):
    assert words in WITH_TOOLS
    tokenizer.chat_template = WITH_TOOLS.replace(words, others)
    assert encode([QUESTION, REPLY], tokenizer)[1].any()
    two_calls = call("Rome")
    two_calls["tool_calls"] = two_calls["tool_calls"] * 2
    with pytest.raises(InputError, match=f"^x: the chat template drops {dropped}.* without a word: take them out"):
        encode([QUESTION, two_calls, {"role": "tool", "content": "7"}, REPLY], tokenizer, "x", TOOLS)


def test_each_of_several_system_messages_has_to_be_written(tokenizer):
    messages = [SYSTEM, {"role": "system", "content": "In verse."}, QUESTION, REPLY]
    tokenizer.chat_template = CHATML
    assert "In verse." in tokenizer.decode(encode(messages, tokenizer)[0])
    tokenizer.chat_template = CHATML.replace("in messages %}", "in messages[:1] + messages[2:] %}")
    with pytest.raises(InputError, match="drops system messages"):
        encode(messages, tokenizer)


ASKED_TWICE = [
    QUESTION,
    call("Köln", reasoning_content="hm"),
    {"role": "tool", "content": "21"},
    {**REPLY, "reasoning_content": "old"},
    QUESTION,
    call("Rome", "Wait.", reasoning_content="so"),
    {"role": "tool", "content": "30"},
    REPLY,
]


@pytest.mark.parametrize("marked", [True, False])
def test_calls_and_the_reasoning_that_is_written_count(tokenizer, marked):
    with_template(tokenizer, "tools", marked=marked)
    tokens, counted = encode(ASKED_TWICE, tokenizer, tools=TOOLS)
    assert tokenizer.decode(tokens[counted].tolist()) == (
        '<tool_call>weather{"city": "Köln"}</tool_call><|im_end|>Nobody.<|im_end|>'
        '<think>so</think>Wait.<tool_call>weather{"city": "Rome"}</tool_call><|im_end|>Nobody.<|im_end|>'
    )
    assert tokenizer.decode(tokens.tolist()).startswith('{"type": "function", "function": {"name": "weather"')


def test_templates_get_reasoning_and_arguments_as_they_read_them(tokenizer):
    changed = WITH_TOOLS.replace("reasoning_content", "thinking").replace("arguments | tojson", "arguments")
    tokenizer.chat_template = changed
    found = encode(ASKED_TWICE, tokenizer, tools=TOOLS)
    with_template(tokenizer, "tools", marked=True)
    expected = encode(ASKED_TWICE, tokenizer, tools=TOOLS)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_a_prompt_has_the_tools(tokenizer):
    tokenizer.chat_template = WITH_TOOLS
    prompt = render_prompt({"messages": ASKED_TWICE[:3], "tools": TOOLS}, tokenizer)
    assert prompt.startswith('{"type": "function"')
    assert prompt.endswith("tool\n21<|im_end|>\n<|im_start|>assistant\n")


def test_the_words_of_a_template_that_refuses_a_conversation(tokenizer):
    with_template(tokenizer, "Gemma", marked=False)
    with pytest.raises(InputError, match=r"^x row 3 is refused by the chat template \(System role not supported\)"):
        encode([SYSTEM, QUESTION, REPLY], tokenizer, "x row 3")


def test_a_template_that_shows_no_beginning_of_a_turn_is_refused(tokenizer):
    tokenizer.chat_template = re.sub(r"{%- (end)?generation %}", "", WHOLE)
    with pytest.raises(InputError, match=r"^x row 3 message 2: .* does not show where .*{% generation %}"):
        encode([QUESTION, REPLY], tokenizer, "x row 3")
    tokenizer.chat_template = WHOLE  # the way out
    assert encode([QUESTION, REPLY], tokenizer)[1].any()
    tokenizer.chat_template = CHATML.replace("== 'assistant'", "== 'model'")
    with pytest.raises(InputError, match="marks no token as the assistant's"):
        encode([QUESTION, REPLY], tokenizer)


# Which template


@pytest.fixture
def untouched(tokenizer):
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = None
    return copied


def test_a_tokenizer_without_a_template_needs_one(untouched, tmp_path):
    with pytest.raises(InputError, match=r"no chat template: pass --chat_template chatml"):
        set_chat_template(untouched, None, is_new=False)
    with pytest.raises(InputError, match=r"--chat_template no.jinja is not a file"):
        set_chat_template(untouched, "no.jinja", is_new=False)
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"--chat_template .*mine.jinja cannot be read"):
        set_chat_template(untouched, str(tmp_path / "mine.jinja"), is_new=False)
    (tmp_path / "mine.jinja").write_text(CHATML)
    set_chat_template(untouched, str(tmp_path / "mine.jinja"), is_new=False)
    assert untouched.chat_template == CHATML


def test_chatml_is_that_of_the_reference(untouched, tokenizer):
    set_chat_template(untouched, "chatml", is_new=False)
    with_template(tokenizer, "ChatML", marked=False)
    for messages in ([SYSTEM, QUESTION, REPLY], [QUESTION]):
        for prompt in (True, False):
            options = {"tokenize": False, "add_generation_prompt": prompt}
            expected = tokenizer.apply_chat_template(messages, **options)
            assert untouched.apply_chat_template(messages, **options) == expected


def test_chatml_ends_turns_with_the_end_of_text_where_its_own_mark_is_no_token():
    plain = load_tokenizer(None, ["words"], vocab_size=260)
    set_chat_template(plain, "chatml", is_new=False)
    assert len(plain) <= 260  # no token is added to a tokenizer whose model has no embedding for it
    assert end_of_turn(plain) == plain.eos_token_id
    plain.eos_token = None
    with pytest.raises(InputError, match=r"neither <\|im_end\|> nor an eos_token"):
        set_chat_template(plain, "chatml", is_new=False)


def test_a_new_tokenizer_gets_chatml_with_tokens_of_its_own(tmp_path):
    new = load_tokenizer(None, ["words"], vocab_size=260)
    before = len(new)
    set_chat_template(new, None, is_new=True)
    assert len(new) == before + 2
    assert new.eos_token == "<|im_end|>"
    assert end_of_turn(new) == new.eos_token_id
    new.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert encode([QUESTION, REPLY], loaded)[0].tolist() == encode([QUESTION, REPLY], new)[0].tolist()


# A split


def test_tokens_of_a_split_are_cached_by_template_and_counted(tokenizer):
    chats = [[QUESTION, REPLY], [QUESTION]]
    rows = datasets.Dataset.from_list(
        [as_row({"messages": chat, "tools": None}, f"x row {number}") for number, chat in enumerate(chats, start=1)]
    )
    with pytest.raises(InputError, match="x row 2: the chat template marks no token"):
        tokenize_conversations(rows, with_template(tokenizer, "ChatML", marked=False))
    rows = rows.select([0])
    replies = tokenize_conversations(rows, tokenizer)
    assert replies.num_bytes == len("Nobody.")
    assert 0 < replies.num_tokens < replies.lengths.sum()
    assert replies.num_dropped == 0
    assert replies.samples("training chats").name_of(0) == "conversation 1 of the training chats"
    assert (
        tokenize_conversations(rows, with_template(tokenizer, "Phi-3", marked=False)).piece_digests[0]
        != replies.piece_digests[0]
    )


def test_reasoning_that_is_dropped_is_counted_and_not_learned(tokenizer):
    rows = datasets.Dataset.from_list([as_row({"messages": ASKED_TWICE, "tools": TOOLS})] * 2)
    tokens = tokenize_conversations(rows, with_template(tokenizer, "tools", marked=False))
    assert tokens.num_dropped == 2 * 2
    written = ["weather", '{"city": "Köln"}', "Nobody.", "so", "Wait.", "weather", '{"city": "Rome"}', "Nobody."]
    assert tokens.num_bytes == 2 * sum(len(text.encode()) for text in written)


# Turns that are not to count, and arguments of the template

TWICE = [QUESTION, REPLY, {"role": "user", "content": "Again?"}, {"role": "assistant", "content": "Somebody."}]


def tokenized(chat, tokenizer):
    """All that counts of a conversation, all of it, and its figures."""
    tokens = tokenize_conversations(datasets.Dataset.from_list([as_row({"tools": None, **chat})]), tokenizer)
    span = np.array([[0, tokens.lengths[0]]])
    ids = tokens.read(span)
    texts = (tokenizer.decode(some, clean_up_tokenization_spaces=False) for some in (ids[tokens.is_counted(span)], ids))
    return *texts, tokens


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_token_of_a_turn_that_is_not_to_count_does(tokenizer, name, marked):
    tokenizer = with_template(tokenizer, name, marked=marked)
    for uncounted, words in (([1], "Somebody."), ([3], "Nobody."), ([0, 1, 2], "Somebody.")):
        text, _, tokens = tokenized({"messages": TWICE, "uncounted": uncounted}, tokenizer)
        assert text.replace("<think>\n\n</think>\n\n", "").strip() == words + ENDS[name]
        assert tokens.num_bytes == len(words)


def test_marks_that_do_not_tell_turns_apart_are_refused(tokenizer):
    joined = with_template(tokenizer, "ChatML", marked=True)
    joined.chat_template = joined.chat_template.replace(
        "{%- if add", "{%- generation %}!{%- endgeneration %}{%- if add"
    )
    assert tokenized({"messages": TWICE}, joined)[0].endswith("!")
    with pytest.raises(InputError, match="a conversation: the chat template does not show which turn is not to count"):
        tokenized({"messages": TWICE, "uncounted": [1]}, joined)


@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"enable_thinking": True}, {}])
@pytest.mark.parametrize("marked", [True, False])
def test_a_row_tells_its_template_what_transformers_does(tokenizer, marked, options):
    thinks = with_template(tokenizer, "ChatML", marked=marked)
    block = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}"
    thinks.chat_template = thinks.chat_template.replace("{{- message.content", block + "{{- message.content", 1)
    expected = thinks.apply_chat_template(TWICE, tokenize=False, **options)
    assert ("<think>" in expected) == (options.get("enable_thinking") is False)
    counted, whole, _ = tokenized({"messages": TWICE, "options": options}, thinks)
    assert whole == expected
    assert counted.count("<think>") == expected.count("<think>")
    prompt = render_prompt({"messages": TWICE[:3], "tools": None, "options": options}, thinks)
    assert prompt == thinks.apply_chat_template(TWICE[:3], tokenize=False, add_generation_prompt=True, **options)
    with pytest.raises(InputError, match="chat_template_kwargs has tokenize, which is the run's: take it out"):
        tokenized({"messages": TWICE, "options": {"tokenize": True}}, thinks)


TOO_LONG = ["'x' * 10**10", "'x' * 10**9", "'x' * 10**8", "'x'.ljust(10**11)", "'%0100000000d' % 1"]


@pytest.mark.parametrize("words", sample([TOO_LONG[0], TOO_LONG[2]], TOO_LONG))
def test_a_template_that_makes_gigabytes_ends_in_one_line(tokenizer, words):
    tokenizer.chat_template = CHATML + "{{- " + words + " }}"
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InputError, match=r"is refused by the chat template \((MemoryError|it makes 1.*characters)\): "):
        encode(TWICE, tokenizer)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("role", ["user", "system"])
def test_marks_around_the_turns_of_others_are_refused(tokenizer, role, tmp_path):
    (tmp_path / "a.jinja").write_text(CHATML.replace("== 'assistant'", f"in ['assistant', '{role}']"))
    with pytest.raises(InputError, match=rf"the chat template has {{% generation %}} around {role} messages: pass"):
        set_chat_template(tokenizer, str(tmp_path / "a.jinja"), is_new=False)
    (tmp_path / "a.jinja").write_text(CHATML.replace("== 'assistant'", f"== '{role}'"))
    with pytest.raises(InputError, match=rf"around {role} messages"):
        set_chat_template(tokenizer, str(tmp_path / "a.jinja"), is_new=False)
    for name in TEMPLATES:
        (tmp_path / "a.jinja").write_text(TEMPLATES[name])
        set_chat_template(tokenizer, str(tmp_path / "a.jinja"), is_new=False)
