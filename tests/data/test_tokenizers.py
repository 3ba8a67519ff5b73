"""A trained tokenizer loses no text, is the same every time and is trained once; a given one is checked before use."""

import json
import random
import time

import datasets
import pytest
import transformers
from refusals import line_of
from transformers import AutoTokenizer, GPT2Config, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text import tokenizers as ours
from memsave_recipes.data.text.labelled_text import LabelledText
from memsave_recipes.data.text.tokenizers import check_vocabulary, load_text_tokenizer, load_tokenizer
from memsave_recipes.models.saved import save_tokenizer

TEXTS = [f"def square_{number}(x):\n    return x ** {number}  # naïve 🙂\n" for number in range(60)]


@pytest.fixture
def folder(tmp_path):
    load_tokenizer(None, TEXTS, vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def refusal(name, **options):
    return line_of(load_tokenizer, str(name), TEXTS, **options)


# Trained


@pytest.mark.parametrize("text", [*TEXTS[:2], "", " ", "\x00\r\n\t", "日本語 <|x|> \u2028 é", "    four\n\n\n"])
def test_every_text_can_be_written_and_read_back(text):
    tokenizer = load_tokenizer(None, TEXTS, vocab_size=300)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_has_the_size_asked_for_and_one_special_token():
    tokenizer = load_tokenizer(None, TEXTS, vocab_size=300)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == 300
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer("a<|endoftext|>")["input_ids"][1:] == [tokenizer.eos_token_id]
    assert len(tokenizer("    return x **")["input_ids"]) < 8
    assert len(load_tokenizer(None, ["abc"], vocab_size=5000)) == 259  # a, b, c; ab, abc


def test_the_same_text_gives_the_same_tokenizer(tmp_path, monkeypatch):
    first = load_tokenizer(None, TEXTS, vocab_size=300).backend_tokenizer.to_str()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "another cache")
    assert load_tokenizer(None, iter(TEXTS), vocab_size=300).backend_tokenizer.to_str() == first


def test_it_is_trained_once_for_each_text_and_size(monkeypatch):
    trained, trainer = [], ours.trainers.BpeTrainer
    monkeypatch.setattr(ours.trainers, "BpeTrainer", lambda **options: trained.append(1) or trainer(**options))
    for texts, vocab_size in ((TEXTS, 300), (TEXTS, 301), (TEXTS[1:], 300), (["".join(TEXTS[:2]), *TEXTS[2:]], 300)):
        load_tokenizer(None, texts, vocab_size=vocab_size)
    assert len(trained) == 4
    assert len(load_tokenizer(None, datasets.Dataset.from_dict({"text": TEXTS})["text"], vocab_size=300)) == 300
    assert len(trained) == 4


def test_long_text_is_sampled_from_the_front(monkeypatch):
    monkeypatch.setattr(ours, "TRAINING_BYTES", 250)
    texts = ["é" * 100, "b" * 100, "c", "d"]
    first, some = (load_tokenizer(None, iter(given), vocab_size=300).get_vocab() for given in (texts, texts[:2]))
    assert first == some
    monkeypatch.setattr(ours, "TRAINING_BYTES", 301)
    assert load_tokenizer(None, [*texts[:2], "c" * 100], vocab_size=300).get_vocab() != some


OF_ITS_OWN_CLASS = sorted(
    kind
    for kind in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    if TOKENIZER_MAPPING_NAMES[kind] != "TokenizersBackend"
)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "modernbert", *OF_ITS_OWN_CLASS])
@pytest.mark.parametrize("load", [load_tokenizer, load_text_tokenizer])
def test_auto_tokenizer_opens_it_beside_a_model_of_its_type(tmp_path, kind, load):
    texts = [*TEXTS, "in 1984, 1984 b's\n\n\n  (1984) cafe\u0301", "1984 1984"]
    rows = datasets.Dataset.from_dict({"text": texts})
    given = texts if load is load_tokenizer else LabelledText(train=rows, validation=rows, label_names=())
    tokenizer = load(None, given, vocab_size=340, model_type=kind)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for opened in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path), [])):
        assert opened(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        assert opened.decode(opened(texts[0])["input_ids"]) == tokenizer.decode(tokenizer(texts[0])["input_ids"])


# Given


def test_a_folder_gives_its_tokenizer_and_nothing_is_trained(folder, monkeypatch):
    monkeypatch.setattr(ours, "_trained", lambda *_: pytest.fail("trained"))
    tokenizer = load_tokenizer(str(folder), TEXTS, vocab_size=5)
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == "<|endoftext|>"


def test_tokenizers_that_cannot_be_loaded(folder, tmp_path):
    assert refusal(tmp_path / "no").startswith(f"the tokenizer of {tmp_path / 'no'} cannot be loaded: ")
    assert refusal("someone/something").endswith("; check --tokenizer_name")
    assert refusal(tmp_path / "no", flag="--model_name_or_path").endswith("; check --model_name_or_path")
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in refusal(tmp_path / "empty")
    (folder / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in refusal(folder)


def test_a_folder_that_holds_a_model_alone(tmp_path):
    GPT2Config().save_pretrained(tmp_path / "model")
    assert refusal(tmp_path / "model") == (
        f"the tokenizer of {tmp_path / 'model'} has no vocabulary: name a tokenizer with --tokenizer_name"
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5", "qwen4_exp", "llama"])
def test_beside_a_model_of_any_type_it_is_the_one_that_was_saved(folder, kind):
    """Transformers splits words otherwise for some types."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    alone = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in ("year 1984", "  a\n\nb's 12,345"):
        assert load_tokenizer(str(folder), TEXTS)(text)["input_ids"] == alone(text)["input_ids"]


@pytest.mark.parametrize("of_class", [PreTrainedTokenizerFast, GPT2Tokenizer, LlamaTokenizer])
@pytest.mark.parametrize("kind", [*OF_ITS_OWN_CLASS, "gpt2", "llama", "phi3"])
def test_of_another_class_than_the_models_it_is_opened_as_it_was_saved(folder, tmp_path, caplog, kind, of_class):
    """And a line says where others open it otherwise."""
    tokenizer, final = of_class.from_pretrained(folder), tmp_path / "final"
    GPT2Config().save_pretrained(final)
    (final / "config.json").write_text(json.dumps({"model_type": kind}))
    texts = [*TEXTS, "in 1984, 1984 b's\n\n\n  (1984) cafe\u0301"]
    expected = tokenizer(texts)["input_ids"]
    save_tokenizer(final, tokenizer=tokenizer, samples=[{"input_ids": ids} for ids in reversed(expected)])
    opened = load_tokenizer(str(final), [])
    assert opened(texts)["input_ids"] == expected
    assert opened.model_input_names == tokenizer.model_input_names
    is_told = "note: AutoTokenizer takes Qwen" in caplog.text
    assert is_told == (AutoTokenizer.from_pretrained(final)(texts)["input_ids"] != expected)
    assert is_told == (kind in OF_ITS_OWN_CLASS)


def test_code_is_not_run_unasked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Mine(PreTrainedTokenizerFast):\n    pass\n"
        f"open({str(ran)!r}, 'w')\n"
    )
    message = refusal(folder)
    assert message.startswith(f"the tokenizer of {folder} cannot be loaded: it brings code of its own")
    assert message.endswith("pass --trust_remote_code; check --tokenizer_name")
    assert not ran.exists()
    assert len(load_tokenizer(str(folder), TEXTS, trust_remote_code=True)) == 300
    assert ran.exists()


def test_a_vocabulary_larger_than_the_models():
    tokenizer = load_tokenizer(None, TEXTS, vocab_size=300)
    check_vocabulary(tokenizer, 300)
    with pytest.raises(InputError, match=r"token ids up to 299 but the model only 299 embeddings.*vocab_size=300"):
        check_vocabulary(tokenizer, 299)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    with pytest.raises(InputError, match="token ids up to 300"):
        check_vocabulary(tokenizer, 300)


def test_a_word_of_a_megabyte_takes_no_time_by_its_square():
    word = "".join(random.Random(0).choices("abcdefghij", k=400_000))
    began = time.process_time()
    trained = load_tokenizer(None, [f"one two {word} three"], vocab_size=2000)
    assert time.process_time() - began < 15
    assert "".join(trained.convert_ids_to_tokens(trained("one")["input_ids"])) == "one"
    plain = load_tokenizer(None, ["one two " * 40 + "a" * 999], vocab_size=300)
    assert "a" * 999 in plain.backend_tokenizer.decode(plain("a" * 999)["input_ids"])
