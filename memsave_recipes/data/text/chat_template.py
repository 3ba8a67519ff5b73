"""Conversations as tokens by the tokenizer's chat template, with the mask of those that the assistant writes.

NOTE [ the assistant's tokens ]
1. A template with ``{% generation %}`` marks them itself, and transformers returns the mask.
2. In others the text of a turn is the difference between two renderings: the messages up to and including it, and those
   before it with the generation prompt. The mark that ends the turn counts, or the model would not learn to stop; white
   space behind it does not. Where a turn in the middle has another mark than the last one (gpt-oss), each counts.
3. Some templates change earlier turns when later ones follow: Qwen3 drops their reasoning, some of Mistral's move the
   system message into the last question. There the conversation is rendered once more with another content, other
   reasoning and other arguments of calls in the turn: what stays the same is none of these. The turn begins behind the
   generation prompt, or behind as much of that as is there: some open a ``<think>`` that a reply may lack.
4. What neither finds is refused, and so is reasoning that a content writes itself and the template once more, and a
   template that drops a system message, tools, a call or its result without a word. It may drop separate reasoning,
   as many do in earlier turns, and the text beside a call; these are counted.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from memsave_recipes.core.errors import InputError, check_file
from memsave_recipes.core.text import join_names
from memsave_recipes.data.fingerprint import digest_of
from memsave_recipes.data.sources import LONG_BYTES, progress_bars
from memsave_recipes.data.text.conversations import Conversation, Message, texts_of
from memsave_recipes.data.text.tokenizers import TokenLine
from memsave_recipes.models.flags import option

CHATML = "chatml"
CHATML_TOKENS = CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + END + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_BYTES, MAX_CHARACTERS = 2 * 1024**3, 2**20  # of a rendering, and of what a template adds to a conversation
OTHER_CONTENT = "qzxjkvqzxjkv"
REASONING, CALLS = "reasoning_content", "tool_calls"
THINK = ("<think>", "</think>")
DROPPED = (REASONING, "assistant messages")
OWN_TEMPLATE = "pass --chat_template FILE.jinja, a template with {% generation %} around the assistant's text"
NOT_OPTIONS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
TOKENS = Features(
    {
        "input_ids": List(Value("int32")),
        "counted": List(Value("bool")),
        "length": Value("int64"),
        "num_counted": Value("int64"),
        "first_counted": Value("int64"),
        "reply_ends": List(Value("int32")),
        "num_bytes": Value("int64"),
        "num_dropped": Value("int64"),
        "digest": Value("int64"),
    }
)


@dataclass(kw_only=True)
class ChatArguments:
    """The format of conversations."""

    chat_template: str | None = option(None, "template: chatml or a .jinja file; default: the tokenizer's own")


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedConversations(TokenLine):
    """The conversations of a split as a line of tokens, in their order; a piece holds a whole one.

    Args:
        first_counted: of each conversation the first token behind its beginning that counts, or its length; int64 (N,).
        num_dropped: turns whose reasoning, or text beside a call, the template leaves out.
    """

    first_counted: np.ndarray
    num_dropped: int = 0
    noun: ClassVar[str] = "conversation"

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each conversation, int64 (N,)."""
        return np.diff(self.document_starts)

    def is_counted(self, spans: np.ndarray) -> np.ndarray:
        """Read which of the tokens of ``spans`` count in the loss, bool (sum of their lengths,)."""
        return self.read(spans, "counted")

    def lengths_within(self, block_size: int, split: str) -> np.ndarray:
        """Count the tokens of each conversation that a row takes; 0 where none of them is trained on. int64 (N,).

        A longer one ends with the last reply that fits whole. Raises ``InputError`` where none has a reply that does.
        """
        lengths: np.ndarray = np.minimum(self.lengths, block_size)
        for number in np.flatnonzero(self.lengths > block_size):
            ends = np.asarray(self.pieces[int(number)]["reply_ends"])
            lengths[number] = ends[ends <= block_size].max(initial=0)
        lengths[self.first_counted >= lengths] = 0
        if not lengths.any():
            raise InputError(
                f"--block_size {block_size} has no room for a reply of any of the {len(lengths):,} {split} "
                "conversations: raise it"
            )
        return lengths


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, *, is_new: bool) -> None:
    """Give ``tokenizer`` the template that ``--chat_template`` names.

    ChatML ends a turn with ``<|im_end|>`` where the tokenizer has that token, otherwise with its end-of-text token. Its
    other marks are ordinary text to a tokenizer that has no such tokens. A new tokenizer gets ChatML with both tokens.

    Raises:
        InputError: no template, no readable file, or a tokenizer that cannot tell where its tokens lie in the text.
    """
    if not tokenizer.is_fast:
        raise InputError("conversations need a fast tokenizer, and this one is not: name another by --tokenizer_name")
    if is_new:
        tokenizer.add_special_tokens({"eos_token": CHATML_END, "extra_special_tokens": [CHATML_START]})
    if chat_template == CHATML or (chat_template is None and is_new):
        tokenizer.chat_template = CHATML_TEMPLATE.replace("END", _chatml_end(tokenizer))
    elif chat_template is not None:
        check_file("--chat_template", chat_template)
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat_template {chat_template} cannot be read ({error}): check the file") from error
    elif tokenizer.chat_template is None:
        raise InputError(
            "the tokenizer has no chat template: pass --chat_template chatml, or that of its model as a .jinja file"
        )
    _check_marks(tokenizer)


def _check_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``InputError`` where ``{% generation %}`` stands around what others than the assistant write."""
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    for at, turn in enumerate(turns[:2]) if GENERATION.search(str(tokenizer.get_chat_template())) else ():
        marked: Any = ""
        with suppress(InputError):  # of a template that takes no system message, say
            tokens, is_assistant = encode([turn | {"content": OTHER_CONTENT}, *turns[at + 1 :]], tokenizer)
            marked = tokenizer.decode(tokens[is_assistant].tolist())
        if OTHER_CONTENT in marked:
            raise InputError(f"the chat template has {{% generation %}} around {turn['role']} messages: {OWN_TEMPLATE}")


def _chatml_end(tokenizer: PreTrainedTokenizerBase) -> str:
    if CHATML_END in tokenizer.get_vocab():
        return repr(CHATML_END)
    if tokenizer.eos_token is None:
        raise InputError(f"--chat_template chatml: the tokenizer has neither {CHATML_END} nor an eos_token: add one")
    return "eos_token"


def tokenize_conversations(
    conversations: datasets.Dataset, tokenizer: PreTrainedTokenizerBase
) -> TokenizedConversations:
    """Tokenize rows of ``CONVERSATION``; raises as ``encode``; cached by ``datasets``."""
    share = len(conversations) / conversations.data.num_rows  # the table may hold those of another split as well
    with progress_bars(share * conversations.data.nbytes > LONG_BYTES):
        rows = conversations.map(
            _row,
            input_columns=["conversation", "place"],
            remove_columns=conversations.column_names,
            features=TOKENS,
            fn_kwargs={"tokenizer": tokenizer},
            desc="tokenizing",
        ).with_format("numpy")
    starts = np.concatenate([[0], np.cumsum(rows["length"][:], dtype=np.int64)])
    return TokenizedConversations(
        pieces=rows.select_columns(["input_ids", "counted", "reply_ends"]),
        piece_starts=starts,
        document_starts=starts,
        piece_digests=rows["digest"][:],
        first_counted=rows["first_counted"][:],
        num_dropped=int(rows["num_dropped"][:].sum()),
        num_tokens=int(rows["num_counted"][:].sum()),
        num_bytes=int(rows["num_bytes"][:].sum()),
    )


def _row(conversation: str, place: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    chat: Conversation = json.loads(conversation)
    template = ChatTemplate(tokenizer, place, chat["tools"], chat.get("options", {}))
    messages, uncounted = template.written(chat["messages"]), chat.get("uncounted", [])
    tokens, turns = template.encode(messages)
    is_assistant = turns >= 0
    if uncounted and len(messages) in turns:
        raise InputError(f"{place}: the chat template does not show which turn is not to count: {OWN_TEMPLATE}")
    counted = is_assistant & ~np.isin(turns, uncounted)
    learned = (one for at, one in enumerate(messages) if one["role"] == "assistant" and at not in uncounted)
    texts = [text for message in learned for text in texts_of(message)]
    return {
        "input_ids": tokens,
        "counted": counted,
        "length": len(tokens),
        "num_counted": int(counted.sum()),
        "first_counted": int(np.flatnonzero(np.append(counted[1:], True))[0]) + 1,
        "reply_ends": np.flatnonzero(is_assistant & ~np.append(is_assistant[1:], False)) + 1,
        "num_bytes": sum(len(text.encode()) for text in texts),
        "num_dropped": sum(given != message for given, message in zip(chat["messages"], messages, strict=True)),
        "digest": digest_of(tokens.tobytes() + counted.tobytes()),
    }


def encode(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    place: str = "a conversation",
    tools: list[dict[str, Any]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a conversation, int32 (T,), and which are the assistant's, bool (T,).

    Raises:
        InputError: the template does not take it, drops a part of it, or leaves the assistant's tokens unknown.
    """
    template = ChatTemplate(tokenizer, place, tools)
    tokens, turns = template.encode(template.written(messages))
    return tokens, turns >= 0


def render_prompt(chat: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the next reply follows, for ``memsave predict``; raise ``InputError`` where it is refused."""
    way_out = "change it, or continue a text with --no_chat"
    template = ChatTemplate(tokenizer, "a conversation", chat["tools"], chat.get("options", {}), way_out)
    return template.render(chat["messages"], add_generation_prompt=True)


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Raise ``MemoryError`` where what is inside takes more memory; only on Linux, which counts addresses."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (*before, used + num_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def in_spans(offsets: list[tuple[int, int]], text: str, spans: Iterator[tuple[int, int, int]]) -> np.ndarray:
    """Return the turn in whose span each token lies, or -1; one that reaches over the beginning does, not the end."""
    first, last = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    turns = np.full(len(first), -1)
    for turn, start, stop in spans:
        stop = last[last <= stop].max(initial=start)  # no part of a token
        end_of_text = start + len(text[start:stop].rstrip())
        turns[(last > start) & (first < end_of_text) & (last <= stop)] = turn
    return turns


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """The chat template of a tokenizer; ``place`` names the conversation in messages, ``way_out`` ends a refusal."""

    tokenizer: PreTrainedTokenizerBase
    place: str
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    way_out: str = "change the row, or pass another --chat_template"

    def __post_init__(self) -> None:
        if taken := NOT_OPTIONS & self.options.keys():
            raise InputError(
                f"{self.place}: chat_template_kwargs has {join_names(taken)}, which is the run's: take it out"
            )

    def encode(self, messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int32 (T,), and of each the turn of the assistant that it is of, or -1, int64 (T,)."""
        text = self.render(messages)
        self.check_reasoning(messages, text)
        if GENERATION.search(str(self.tokenizer.get_chat_template())):
            encoded: Any = self.apply(
                messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
            turns = self._turns_of_runs(np.asarray(encoded["assistant_masks"], dtype=bool), messages)
        else:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            turns = in_spans(encoded["offset_mapping"], text, self.assistant_spans(messages, text))
        if (turns < 0).all():
            raise InputError(f"{self.place}: the chat template marks no token as the assistant's: {OWN_TEMPLATE}")
        return np.asarray(encoded["input_ids"], dtype=np.int32), turns

    def _turns_of_runs(self, is_assistant: np.ndarray, messages: list[Message]) -> np.ndarray:
        """Return the turn of each token that the template marks, or -1: each run of them is a turn.

        Where there are more or fewer runs, ``len(messages)`` stands for a turn that is not known.
        """
        runs = np.cumsum(is_assistant & ~np.append(False, is_assistant[:-1])) - 1
        assistants = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        num_runs = int(runs.max(initial=-1)) + 1
        turns = np.array(assistants if num_runs == len(assistants) else [len(messages)] * max(1, num_runs))
        return np.where(is_assistant, turns[np.maximum(runs, 0)], -1)

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """Apply the template to messages as it reads them."""
        options = {"tools": self.tools, **self.options, **options}
        return self.tokenizer.apply_chat_template(list(map(self._as_read, messages)), **options)

    def _as_read(self, message: Message) -> Message:
        """Return a message with what templates disagree on: the key of reasoning, and the arguments of calls."""
        read = message | ({"thinking": message[REASONING]} if REASONING in message else {})
        if CALLS in message and self._joins_texts:
            calls = ((call, call["function"]["arguments"]) for call in message[CALLS])
            read[CALLS] = [_changed(call, arguments=json.dumps(given, ensure_ascii=False)) for call, given in calls]
        return read

    @cached_property
    def _joins_texts(self) -> bool:
        """Whether the arguments of calls have to be JSON texts, as DeepSeek's template joins them to others."""
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        asked: list[Any] = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "", CALLS: [call]}]
        try:
            self.tokenizer.apply_chat_template(asked, tokenize=False)
        except Exception as error:  # a template may also refuse it for other reasons
            return isinstance(error, TypeError)
        return False

    def render(self, messages: list[Message], **options: Any) -> str:
        """Return the text of messages; raise ``InputError`` where the template refuses them."""
        try:
            with _memory_limit(MAX_BYTES):
                text = str(self.apply(messages, tokenize=False, **options))
            if len(text) > MAX_CHARACTERS + 8 * len(json.dumps([messages, self.tools])):
                raise ValueError(f"it makes {len(text):,} characters")
        except Exception as error:  # raise_exception() of templates, and whatever else goes wrong in one
            words = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{self.place} is refused by the chat template ({words}): {self.way_out}") from error
        return text

    def render_turns(self, messages: list[Message]) -> str:
        """Render without what follows at the end: the generation prompt, or the end of a conversation (Phi-3)."""
        both = [self.render(messages), self.render(messages, add_generation_prompt=True)]
        return os.path.commonprefix(both)  # noqa: RUF071  # of texts, not of paths

    def written(self, messages: list[Message]) -> list[Message]:
        """Return the messages without what the template may drop and does; check that it drops no more: rule 4."""
        words: dict[str, str] = {}

        def word(what: str) -> str:
            words[new := f"{OTHER_CONTENT}{len(words)}x"] = what
            return new

        marked = [
            _with_words(one, word) if len(one) > 2 or one["role"] not in ("user", "assistant") else one
            for one in messages
        ]
        tools = [_changed(tool, name=word("tools")) for tool in self.tools or ()] or None
        shown = self.render(marked, tools=tools) if words else ""
        lost = {new: what for new, what in words.items() if new not in shown}
        for what in lost.values():
            if what not in DROPPED:
                raise InputError(
                    f"{self.place}: the chat template drops {what} without a word: take them out of the data, or pass "
                    "a --chat_template that writes them"
                )
        kept = [
            {"content": "", **{key: value for key, value in message.items() if str(other[key]) not in lost}}
            for message, other in zip(messages, marked, strict=True)
        ]
        return kept if lost and self.render(kept) == self.render(messages) else messages

    def check_reasoning(self, messages: list[Message], text: str) -> None:
        """Check that a block that a content opens and closes is there once, and that every block is whole: rule 4."""
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        if not any(mark in reply for reply in replies for mark in THINK):
            return
        others = [message["content"] for message in messages if message["role"] != "assistant"]
        opened, closed = (text.count(mark) - sum(other.count(mark) for other in others) for mark in THINK)
        if opened != closed or closed > sum(max(1, reply.count(THINK[1])) for reply in replies):
            raise InputError(
                f"{self.place}: the chat template makes {opened} <think> and {closed} </think> of the reasoning in its "
                "replies: take the reasoning out, or pass a --chat_template that writes it as it is"
            )

    def assistant_spans(self, messages: list[Message], text: str) -> Iterator[tuple[int, int, int]]:
        """Yield the place of each turn of the assistant, and where it begins and ends in ``text``: rules 2 and 3."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                span = self._span(messages, index, text)
            except InputError:  # a template that takes whole conversations only
                span = None
            if span is None or span[0] >= span[1]:
                raise InputError(
                    f"{self.place} message {index + 1}: the chat template does not show where this turn of the "
                    f"assistant begins and ends: {OWN_TEMPLATE}"
                )
            yield index, *span

    def _span(self, messages: list[Message], index: int, text: str) -> tuple[int, int] | None:
        prompt = self._prompt(messages[:index])
        so_far = self.render_turns(messages[: index + 1])
        stop = self._end_of_turn(messages, text, so_far, text)
        is_plain = not messages[index].get(REASONING)  # gpt-oss writes it only without a generation prompt
        if not prompt or stop is None or stop < len(prompt) or not (is_plain and text.startswith(prompt)):
            return self._span_of_rewritten(messages, index, text, prompt)
        at_end = self.render(messages[: index + 1])
        return len(prompt), self._with_mark(text, len(prompt), stop, at_end[stop:])

    def _end_of_turn(self, messages: list[Message], text: str, at_end: str, turn: str) -> int | None:
        """Find up to where ``turn`` is as ``at_end`` of a conversation; ``None`` where more than a mark differs.

        Nor is it known where the mark behind it may be the one that opens the next turn: there is such a one in
        ``text`` before all contents.
        """
        shared = os.path.commonprefix([at_end, turn])  # noqa: RUF071  # of texts, not of paths
        if shared == at_end:
            return len(shared)
        base = len(shared) - self._begun(shared)
        here = self._mark_at(turn[base:])
        before = text.partition(messages[0]["content"])[0] if messages[0]["content"] else text
        may_open = here in before and not shared[:base].rstrip().endswith(self.marks)
        return None if (here and may_open) or at_end[base:].strip() not in self.marks else len(shared)

    def _prompt(self, messages: list[Message]) -> str:
        """Render what a reply follows; empty before the first message, where templates look for one."""
        try:
            return self.render(messages, add_generation_prompt=True)
        except InputError:
            if messages:
                raise
            return ""

    def _span_of_rewritten(self, messages: list[Message], index: int, text: str, prompt: str) -> tuple[int, int] | None:
        """Find a turn that the template writes otherwise than at the end of a conversation: rule 3."""
        so_far = [*messages[:index], _with_words(messages[index], lambda _: OTHER_CONTENT)]
        head_at_end, *tails = *_around(self.render(so_far)), _around(self.render(so_far, add_generation_prompt=True))[1]
        tail_at_end = os.path.commonprefix(tails)  # noqa: RUF071  # of texts, not of paths
        head, tail = _around(self.render([*so_far, *messages[index + 1 :]]))
        size = self._end_of_turn(messages, text, tail_at_end, tail)
        if size is None or not text.endswith(tail[size:]):
            return None
        start = self._start_of_rewritten(messages[:index], text, prompt, head, head_at_end)
        if start is None or not text.startswith(head[:start]):
            return None
        stop = len(text) - len(tail) + size
        return start, self._with_mark(text, start, stop, tails[0][size:])

    def _start_of_rewritten(
        self, before: list[Message], text: str, prompt: str, head: str, head_at_end: str
    ) -> int | None:
        """Find the end of the generation prompt by the text before the content, ``head``: rule 3."""
        if not prompt:
            return len(head)
        if text.startswith(prompt):
            return len(prompt)
        opening = head_at_end.removeprefix(prompt)  # between the generation prompt and the content
        if opening != head_at_end and head.endswith(opening):
            return len(head) - len(opening)
        asked = prompt[len(self.render_turns(before)) :]
        header = asked.partition(THINK[0])[0]
        begin = head.rfind(header)
        if not header or begin < 0:
            return None
        behind = [head[begin:], asked]
        return begin + len(os.path.commonprefix(behind))  # noqa: RUF071  # of texts, not of paths

    def _with_mark(self, text: str, start: int, stop: int, at_end: str) -> int:
        """Find where a turn ends with its mark, which may be another one at the end of a conversation: rule 2.

        Args:
            stop: up to where the turn is the same in both places; there it may be in the middle of a mark.
            at_end: what follows there at the end of a conversation.
        """
        turn = text[start:stop]
        begun = self._begun(turn)
        base = stop - begun
        here = self._mark_at(text[base:])
        if text[start:base].rstrip().endswith(self.marks) or not self._mark_at(turn[len(turn) - begun :] + at_end):
            return stop
        return base + len(here)

    def _begun(self, words: str) -> int:
        """Return how many characters at the end of ``words`` may be those of a mark that goes on."""
        longest = min(len(words), max(map(len, self.marks), default=0))
        return next((size for size in range(longest, 0, -1) if self._opens_mark(words[-size:])), 0)

    def _opens_mark(self, words: str) -> bool:
        return any(mark.startswith(words) and mark != words for mark in self.marks)

    def _mark_at(self, words: str) -> str:
        return max((mark for mark in self.marks if words.startswith(mark)), key=len, default="")

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The special tokens, which may end a turn."""
        return tuple({str(token) for token in self.tokenizer.added_tokens_decoder.values()} - {""})


def _changed(function: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a tool or a call with other ``values`` of its function."""
    return {**function, "function": {**function["function"], **values}}


def _with_words(message: Message, word: Callable[[str], str]) -> Message:
    """Return a message with ``word(what)`` for its content, for its reasoning and as the arguments of its calls."""
    other = dict(message)
    if message["content"] or CALLS not in message:
        other["content"] = word(f"{message['role']} messages")
    if REASONING in message:
        other[REASONING] = word(REASONING)
    if CALLS in message:
        other[CALLS] = [_changed(call, arguments={word("tool calls"): ""}) for call in message[CALLS]]
    return other


def _around(text: str) -> tuple[str, str]:
    """Return what is before the first and behind the last of the other contents."""
    head, mark, _ = text.partition(OTHER_CONTENT)
    return head, text.rpartition(OTHER_CONTENT)[2] if mark else ""


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the assistant ends a turn; ``None`` where the template writes none."""
    tokens, is_assistant = encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)
    written = (int(token) for token in reversed(tokens[is_assistant]))
    last = next((token for token in written if str(tokenizer.decode([token])).strip()), None)  # a line end may follow
    return last if last in tokenizer.added_tokens_decoder else None
