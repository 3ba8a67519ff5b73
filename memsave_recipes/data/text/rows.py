"""The rows of tokens of a language model by the flags: text or conversations, tokenizer, packed or padded."""

import json
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memsave_recipes.core.errors import InputError, require
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.data.text.chat_template import (
    CHATML_TOKENS,
    ChatArguments,
    end_of_turn,
    set_chat_template,
    tokenize_conversations,
)
from memsave_recipes.data.text.conversations import Conversation, load_conversations, names_conversations, texts_of
from memsave_recipes.data.text.documents import BYTES_A_TOKEN, TextArguments, TextSplits, load_documents
from memsave_recipes.data.text.packing import (
    Rows,
    check_positions,
    keeps_documents_apart,
    rows_of_conversations,
    rows_of_documents,
)
from memsave_recipes.data.text.tokenizers import check_vocabulary, digest_of_tokenizer, load_tokenizer
from memsave_recipes.models.flags import option
from memsave_recipes.models.pretrained import VOCAB_SIZE

PROMPT_CHARACTERS = 100

Prompt = str | Conversation


@dataclass(kw_only=True)
class RowArguments(TextArguments, ChatArguments):
    """The text, its tokenizer and the length of rows."""

    tokenizer_name: str | None = option(None, "folder or Hub id; default: the model's own", resume="place")
    block_size: int = option(1024, "tokens of a row")
    packing: bool = option(True, "fill rows with several documents, kept apart; else pad")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block_size >= 2, "--block_size", self.block_size, "at least 2")

    @property
    def stream_bytes(self) -> int | None:
        """As much text as fills the rows of ``--max_steps``; ``None`` without ``--streaming``."""
        if not self.streaming:
            return None
        steps, global_batch_size = (vars(self)[name] for name in ("max_steps", "global_batch_size"))
        require(steps is not None, "--max_steps", steps, "given with --streaming, which reads for it")
        return BYTES_A_TOKEN * int(steps) * int(global_batch_size) * self.block_size


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The rows of both splits, and the tokenizer that made them.

    Args:
        prompt: for the trained model: text to continue, or a conversation that lacks a reply.
        end_of_turn: of conversations, the token at which replies end; ``None`` where the template has none.
    """

    train: Rows
    validation: Rows
    tokenizer: PreTrainedTokenizerBase
    prompt: Prompt
    end_of_turn: int | None = None
    notice: str | None

    @property
    def fingerprint(self) -> Fingerprint:
        """The digests of both splits and of the tokenizer; they do not depend on the length of the rows."""
        splits = {"training text": self.train, "held-out text": self.validation}
        return Fingerprint(
            samples={name: rows.tokens.samples(name) for name, rows in splits.items()},
            tokenizer=digest_of_tokenizer(self.tokenizer),
        )


def check_model(model: PreTrainedModel, rows: TokenRows, name: str, *, one_row: bool) -> None:
    """Refuse rows and tokens that the model cannot take.

    Raises:
        InputError: it has fewer words, or lets packed documents see one another.
    """
    check_vocabulary(rows.tokenizer, model.config.get_text_config().vocab_size)
    if rows.train.packing and not keeps_documents_apart(model, one_row=one_row):
        raise InputError(f"{name} lets the documents of a packed row see one another: pass --no_packing")


def load_rows(
    flags: RowArguments,
    *,
    tokenizer_name: str | None,
    model_type: str | None = None,
    vocab_size: int = VOCAB_SIZE,
    trust_remote_code: bool = False,
    stream_bytes: int | None = None,
    one_row: bool = False,
    max_positions: int | None = None,
    eval_only: bool = False,
) -> TokenRows:
    """Load the text or the conversations that the flags name, and the tokenizer, and cut them into rows.

    Args:
        tokenizer_name: where ``--tokenizer_name`` is not given; with neither, one is trained on the text.
        model_type, vocab_size: as ``load_tokenizer``.
        stream_bytes: as ``load_documents``.
        max_positions: of the model; ``None`` means no limit.
        eval_only: nothing is trained, so that ``--validation_file`` may be alone.

    Raises:
        InputError: as ``load_documents`` or ``load_conversations``, ``load_tokenizer`` and ``rows_of_documents``.
    """
    check_positions(flags.block_size, max_positions)
    source = flags.tokenizer_name or tokenizer_name
    if eval_only and flags.validation_file and not flags.train_file and not source:
        raise InputError("--validation_file alone trains no tokenizer: give --model_name_or_path or --tokenizer_name")
    is_new = source is None
    has_chats = names_conversations(flags)
    if has_chats:
        text = load_conversations(flags, stream_bytes=stream_bytes, only_validation=eval_only)
        read = map(json.loads, text.train["conversation"])
        texts = (words for chat in read for message in chat["messages"] for words in texts_of(message))
        vocab_size -= len(CHATML_TOKENS) if is_new else 0
    else:
        text = load_documents(flags, stream_bytes=stream_bytes, only_validation=eval_only)
        texts = iter(text.train["text"])
    tokenizer = load_tokenizer(
        source,
        texts,
        vocab_size=vocab_size,
        model_type=model_type,
        trust_remote_code=trust_remote_code,
        flag="--tokenizer_name" if flags.tokenizer_name else "--model_name_or_path",
    )
    if not has_chats:
        return _rows_of_documents(flags, text, tokenizer, one_row)
    set_chat_template(tokenizer, flags.chat_template, is_new=is_new)
    return _rows_of_conversations(flags, text, tokenizer, one_row)


def _rows_of_documents(
    flags: RowArguments, text: TextSplits, tokenizer: PreTrainedTokenizerBase, one_row: bool
) -> TokenRows:
    if flags.chat_template is not None:
        raise InputError("--chat_template is for conversations, and the data are plain text: leave it out")
    train, validation = (
        rows_of_documents(documents, tokenizer, flags.block_size, packing=flags.packing, one_row=one_row)
        for documents in (text.train, text.validation)
    )
    prompt = text.validation[0]["text"][:PROMPT_CHARACTERS]
    return TokenRows(train=train, validation=validation, tokenizer=tokenizer, prompt=prompt, notice=text.notice)


def _rows_of_conversations(
    flags: RowArguments, chats: TextSplits, tokenizer: PreTrainedTokenizerBase, one_row: bool
) -> TokenRows:
    notes, rows = [chats.notice], []
    for split, conversations in (("training", chats.train), ("held-out", chats.validation)):
        tokens = tokenize_conversations(conversations, tokenizer)
        lengths = tokens.lengths_within(flags.block_size, split)
        rows.append(
            rows_of_conversations(tokens, lengths, tokenizer, flags.block_size, packing=flags.packing, one_row=one_row)
        )
        notes += _notes(rows[-1], tokens.lengths, lengths, split)
        if tokens.num_dropped:
            lost = "reasoning, or text beside a call,"
            notes.append(f"the chat template leaves out {lost} in {tokens.num_dropped:,} {split} replies")
    mark = end_of_turn(tokenizer)
    held_out: Conversation = json.loads(chats.validation[0]["conversation"])
    messages = held_out["messages"]
    replies = (place for place, message in enumerate(messages) if place and message["role"] == "assistant")
    if mark is None:
        notes.append("the chat template writes no mark behind a reply, so the model does not learn where to stop")
    return TokenRows(
        train=rows[0],
        validation=rows[1],
        tokenizer=tokenizer,
        prompt={**held_out, "messages": messages[: next(replies, len(messages))]},
        end_of_turn=mark,
        notice=f"note: {'; '.join(filter(None, notes))}",
    )


def _notes(rows: Rows, lengths: np.ndarray, taken: np.ndarray, split: str) -> list[str]:
    """Say how full the rows are, and how many conversations, of int64 (N,) tokens, lose their end or all."""
    block_size = rows.block_size
    notes = [f"{len(rows):,} {split} rows, {taken.sum() / (len(rows) * block_size):.0%} full"] if rows.packing else []
    if num_cut := int(((lengths > block_size) & (taken > 0)).sum()):
        notes.append(
            f"{num_cut:,} of {len(lengths):,} {split} conversations end with the last reply within --block_size "
            f"{block_size}"
        )
    if num_left_out := int((taken == 0).sum()):
        notes.append(f"{num_left_out:,} {split} conversations are left out, as no reply fits into --block_size")
    return notes
