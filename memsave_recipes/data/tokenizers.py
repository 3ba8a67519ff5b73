"""Tokenizers: one that exists, or a byte-level BPE trained on the documents at hand and kept in the cache.

The trained one is GPT-2's kind (Sennrich et al. 2016, over bytes, so that every text can be written and read back): one
token for each byte, one for ``<|endoftext|>``, the rest merges. Training gives the same tokenizer for the same text.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

import datasets
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from memsave_recipes.data.text_sources import END_OF_TEXT
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import digest_of
from memsave_recipes.hub import ask_hub_for, reason

SMALLEST_VOCABULARY = 257
TRAINING_BYTES = 64 * 1024**2
"""Text after that much changes the merges little and makes the training long."""


def load_tokenizer(
    tokenizer_name: str | None,
    texts: Iterable[str],
    *,
    vocab_size: int = 8192,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer ``tokenizer_name``, or else one trained on ``texts``.

    Args:
        tokenizer_name: a folder or a Hub id.
        texts: such as ``documents["text"]``; the first 64 MiB are trained on.
        vocab_size: of a trained tokenizer; fewer where the text has no more pairs to merge.
        trust_remote_code: run the code that comes with ``tokenizer_name``.

    Raises:
        InputError: it cannot be loaded, has no vocabulary, wants to run code; a vocabulary below 257.
    """
    if tokenizer_name is not None:
        return _load(tokenizer_name, trust_remote_code)
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"--vocab_size {vocab_size} is too small: 256 bytes and the end of a text are 257 already")
    trained = _cached(_first(texts, TRAINING_BYTES), vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises ``InputError`` where a model with ``vocab_size`` embeddings cannot take every token of ``tokenizer``."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise InputError(
            f"the tokenizer has token ids up to {needed - 1} but the model only {vocab_size} embeddings: give the "
            f"model's own --tokenizer_name, or --config_overrides vocab_size={needed}"
        )


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of its vocabulary and special tokens; how it merges shows in the tokens that it makes."""
    tables = (tokenizer.get_vocab(), tokenizer.special_tokens_map)
    return f"{digest_of(repr([sorted(table.items()) for table in tables]).encode()):x}"


def _load(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    ask_hub_for(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the parsers of damaged files raise nearly anything
        if "trust_remote_code" in str(error):
            rule = "brings code of its own, which is not run unasked"
            raise InputError(f"the tokenizer of {name} {rule}: read it, then add --trust_remote_code") from error
        raise InputError(f"no tokenizer can be loaded from {name}: {reason(error)}; check --tokenizer_name") from error
    # transformers makes an empty GPT-2 tokenizer out of a folder that holds no more than a config.json.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise InputError(f"the tokenizer of {name} has no vocabulary: name a tokenizer with --tokenizer_name")
    return tokenizer


def _first(texts: Iterable[str], num_bytes: int) -> list[str]:
    """Whole texts until there are as many bytes."""
    taken: list[str] = []
    for text in texts:
        if num_bytes <= 0:
            break
        taken.append(text)
        num_bytes -= len(text.encode())
    return taken


def _cached(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    path = _cache_path(texts, vocab_size)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # what the Rust library raises for a missing or damaged file
        trained = _train(texts, vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(trained.to_str())
    os.replace(file.name, path)  # so that another run never reads half a file
    return trained


def _cache_path(texts: list[str], vocab_size: int) -> Path:
    """Named by what the tokenizer depends on: the texts, the size of the vocabulary and who trains it."""
    content = hashlib.blake2b(f"{tokenizers.__version__} {vocab_size}".encode(), digest_size=16)
    for text in texts:
        content.update(hashlib.blake2b(text.encode()).digest())
    return Path(datasets.config.HF_DATASETS_CACHE) / "memsave_recipes_tokenizers" / f"{content.hexdigest()}.json"


def _train(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
