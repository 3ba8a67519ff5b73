"""The rows of tokens of a language model by the flags: text, tokenizer, packed or padded."""

from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from memsave_recipes.data.packing import PackedDataset, PaddedDataset, fingerprint_of, pack, pad
from memsave_recipes.data.text import TextArguments, load_documents
from memsave_recipes.data.tokenizers import load_tokenizer
from memsave_recipes.errors import InputError, require
from memsave_recipes.fingerprint import Fingerprint

PROMPT_CHARACTERS = 100


@dataclass(kw_only=True)
class RowArguments(TextArguments):
    """Which text, in which tokens, in rows of which length."""

    tokenizer_name: str | None = field(default=None, metadata={"help": "folder or Hub id; default: the model's own"})
    vocab_size: int = field(default=8192, metadata={"help": "of the tokenizer that is trained where none is given"})
    block_size: int = field(default=1024, metadata={"help": "tokens of a row"})
    packing: bool = field(default=True, metadata={"help": "fill rows with several documents, kept apart; else pad"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "evaluate on so many rows; default: all"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block_size >= 2, "--block_size", self.block_size, "at least 2")
        limit = self.max_eval_samples
        require(limit is None or limit >= 1, "--max_eval_samples", limit, "at least 1")
        require(self.vocab_size >= 260, "--vocab_size", self.vocab_size, "at least 260 (all bytes)")


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The rows of both splits, and the tokenizer that made them.

    Args:
        prompt: held-out text for the trained model to continue.
        notice: a line on the documents held or left out, where there is one.
    """

    train: PackedDataset | PaddedDataset
    validation: PackedDataset | PaddedDataset
    tokenizer: PreTrainedTokenizerBase
    prompt: str
    notice: str | None

    @property
    def fingerprint(self) -> Fingerprint:
        """Of both splits and the tokenizer; it does not depend on the length of the rows."""
        return fingerprint_of(self.train, self.validation, self.tokenizer)


def load_rows(
    flags: RowArguments,
    *,
    tokenizer_name: str | None,
    trust_remote_code: bool = False,
    stream_bytes: int | None = None,
    one_row: bool = False,
    seed: int = 0,
    eval_only: bool = False,
) -> TokenRows:
    """Load the text that the flags name, and its tokenizer, and cut it into rows.

    Args:
        tokenizer_name: where ``--tokenizer_name`` is not given; with neither, one is trained on the text.
        trust_remote_code: run the code that comes with the tokenizer.
        stream_bytes, seed: as ``load_documents``.
        eval_only: nothing is trained, so that ``--validation_file`` may stand alone.
        one_row: as ``pack``.

    Raises:
        InputError: as ``load_documents``, ``load_tokenizer`` and ``pack``.
    """
    source = flags.tokenizer_name or tokenizer_name
    if eval_only and flags.validation_file and not flags.train_file and not source:
        raise InputError("--validation_file alone trains no tokenizer: give --model_name_or_path or --tokenizer_name")
    text = load_documents(flags, stream_bytes=stream_bytes, seed=seed, only_validation=eval_only)
    tokenizer = load_tokenizer(
        source,
        text.train["text"],
        vocab_size=flags.vocab_size,
        trust_remote_code=trust_remote_code,
        flag="--tokenizer_name" if flags.tokenizer_name else "--model_name_or_path",
    )
    in_rows = partial(pack, one_row=one_row) if flags.packing else pad
    train, validation = (in_rows(part, tokenizer, flags.block_size) for part in (text.train, text.validation))
    prompt = text.validation[0]["text"][:PROMPT_CHARACTERS]
    return TokenRows(train=train, validation=validation, tokenizer=tokenizer, prompt=prompt, notice=text.notice)
