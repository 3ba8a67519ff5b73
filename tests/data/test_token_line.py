"""A long document has the tokens that it has in one piece, whichever kind of tokenizer makes them."""

import random

import datasets
import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from memsave_recipes.data.text.tokenizers import CHUNK_CHARACTERS, chunks_of, load_tokenizer, tokenize_documents

WORDS = ["the", "naïve", "🙂", "x1", "=", "don't", "3,141", "(see", "below).", "日本", "é", "def f(x):", "...", "A.B"]
GAPS = [" "] * 8 + ["  ", "\n", "\n\n", " \n", "\n    ", "\r\n", "\t", "\u00a0", ".\n", "\u2028"]
LLAMA_3 = "|".join(
    [
        *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)


def prose(num_characters, seed=0):
    """Words with gaps of every kind between them."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(num_characters // 4))[:num_characters]


@pytest.fixture(scope="module")
def text():
    return prose(2 * CHUNK_CHARACTERS + 1000)


def trained(model, trainer, text, **parts):
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([text[:20_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def gpt_2(text):
    return load_tokenizer(None, [text[:20_000]], vocab_size=400)


def llama_3(text):
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>", "<unk>"])
    return trained(models.BPE(), trainer, text, pre_tokenizer=words, decoder=decoders.ByteLevel())


def llama_2(text):
    """A space before every text by a normalizer, and no words: merges may reach anywhere."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", "<unk>"])
    fast = trained(models.BPE(), trainer, text, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"))
    backend = fast.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def word_piece(text):
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<eos>", "<unk>"])
    words = pre_tokenizers.BertPreTokenizer()
    model = models.WordPiece(unk_token="<unk>")
    return trained(model, trainer, text, pre_tokenizer=words, normalizer=normalizers.BertNormalizer())


def unigram(text, scheme="always"):
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<eos>", "<unk>"], unk_token="<unk>")
    words = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(models.Unigram(), trainer, text, pre_tokenizer=words, normalizer=normalizers.NFKC())


def unigram_first(text):
    return unigram(text, scheme="first")


@pytest.mark.parametrize("kind", [gpt_2, llama_3, llama_2, word_piece, unigram, unigram_first])
def test_the_tokens_of_a_long_document_are_those_of_the_whole(text, kind):
    tokenizer = kind(text)
    documents = datasets.Dataset.from_dict({"text": [text, "short"]})
    line = tokenize_documents(documents, tokenizer)
    whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert line.read(np.array([[0, len(whole)]])).tolist() == whole
    assert line.document_starts[1] == len(whole)
    assert len(list(chunks_of(text, CHUNK_CHARACTERS))) == 3


@pytest.mark.parametrize("kind", [gpt_2, llama_3, word_piece])
def test_lines_without_spaces_between_words(kind):
    text = prose(CHUNK_CHARACTERS + 1000).replace(" ", "\n")
    tokenizer = kind(text)
    first, second = chunks_of(text, CHUNK_CHARACTERS)
    assert (first + second).count(" ") == 0
    halves = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (first, second)]
    assert halves[0] + halves[1] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("aa bb cc dd", ["aa bb", " cc dd"]),
        ("aa bb  cc  dd", ["aa", " bb  cc", "  dd"]),
        ("aa bb \nccccc", ["aa", " bb \ncc", "ccc"]),
        ("aa\nbb\ncccccc", ["aa\nbb\n", "cccccc"]),
        ("aa\nbb\n\nccccc", ["aa\n", "bb\n\nccc", "cc"]),
        ("aaaaaaaaaa", ["aaaaaaa", "aaa"]),
    ],
)
def test_a_text_is_cut_between_words_or_else_lines_or_else_anywhere(text, parts):
    assert list(chunks_of(text, 7)) == parts


@pytest.mark.parametrize("alphabet", ["ab \n", "a  ", "a\n", "ab.\t\n  c", "a"])
def test_parts_make_up_the_text(alphabet):
    draw = random.Random(alphabet)
    for length in range(100):
        text = "".join(draw.choice(alphabet) for _ in range(length))
        parts = list(chunks_of(text, 8))
        assert "".join(parts) == text
        assert all(0 < len(part) <= 8 for part in parts) or not text


def test_a_tokenizer_is_trained_on_a_long_document_as_in_one_piece(text):
    ours = load_tokenizer(None, [text], vocab_size=350).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole = tokenizers.Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.train_from_iterator([text], trainer)
    assert ours.get_vocab() == whole.get_vocab()
