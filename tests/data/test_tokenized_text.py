"""Texts as tokens: cut once, padded by micro-batch, and never longer than what the model takes."""

from dataclasses import replace

import datasets
import pytest
import torch
from tokenizers.processors import Sequence
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
    XLNetConfig,
    XLNetModel,
)

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import SampleKey
from memsave_recipes.data.text.labelled_text import LabelledText
from memsave_recipes.data.text.tokenizers import (
    BOUNDARY,
    TokenizedText,
    check_inputs,
    check_length,
    load_text_tokenizer,
    tokenize,
)

TEXTS = ["one", "one two three", "one two three four five six seven eight nine ten", ""]


def labelled(pairs=False):
    columns = {"text": TEXTS, "label": [0, 1, 0, 1]} | ({"text_pair": TEXTS[::-1]} if pairs else {})
    rows = datasets.Dataset.from_dict(columns)
    return LabelledText(train=rows, validation=rows.select(range(2)), label_names=("a", "b"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_text_tokenizer(None, labelled(pairs=True), vocab_size=300)


def test_a_trained_tokenizer_marks_where_texts_begin_and_end(tokenizer, tmp_path):
    mark = tokenizer.cls_token_id
    assert {tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id} == {mark}
    assert tokenizer.pad_token_id not in (None, mark)
    assert len(tokenizer) <= 300
    tokenizer.save_pretrained(tmp_path)
    for either in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert either("one")["input_ids"] == [mark, *either("one", add_special_tokens=False)["input_ids"], mark]
        pair = either("one", "two", truncation=True, max_length=128)
        assert pair["input_ids"].count(mark) == 3
        assert pair.keys() == {"input_ids", "attention_mask"}
        assert either.decode(pair["input_ids"]) == f"{BOUNDARY}one{BOUNDARY}two{BOUNDARY}"


@pytest.mark.parametrize("pairs", [False, True])
def test_a_micro_batch_is_as_long_as_its_longest_text(tokenizer, pairs):
    tokens = tokenize(labelled(pairs), tokenizer, max_length=100)
    for indices in ([0, 1], [0, 2], [1], [3]):
        samples = [tokens.train[index] for index in indices]
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch = tokens.train.collate(samples)
        assert batch.keys() == {"input_ids", "attention_mask", "labels", "is_padded"}
        assert batch["is_padded"] is (len(lengths.unique()) > 1)
        assert batch["input_ids"].shape == (len(indices), lengths.max())
        assert torch.equal(batch["attention_mask"].sum(dim=1), lengths)
        assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()
        assert batch["labels"].tolist() == [index % 2 for index in indices]


def test_padding_samples_do_not_count(tokenizer):
    tokens = tokenize(labelled(), tokenizer, max_length=100)
    keys = [SampleKey(1), SampleKey(1, counted=False)]
    counted, padding = (tokens.train[key] for key in keys)
    assert (counted["label"], padding["label"]) == (1, -100)
    assert counted["input_ids"] == padding["input_ids"]
    assert tokens.train[1]["label"] == 1


def test_what_is_cut_off_is_told(tokenizer):
    whole, cut = (tokenize(labelled(), tokenizer, max_length=length) for length in (100, 8))
    assert whole.notice is None
    assert cut.notice == "note: 1 of 6 texts reach --max_length 8 and end there"
    assert len(cut.train[2]["input_ids"]) == 8
    assert cut.train[2]["input_ids"][-1] == tokenizer.sep_token_id
    assert cut.train[0] == whole.train[0]


def test_a_text_without_any_token_is_refused(saved):
    bare = AutoTokenizer.from_pretrained(saved)
    bare.backend_tokenizer.post_processor = Sequence([])
    with pytest.raises(InputError, match="the training text 4 has no tokens"):
        tokenize(labelled(), bare, max_length=100)


@pytest.fixture
def saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_without_padding_pads_with_its_end(saved):
    given = AutoTokenizer.from_pretrained(saved)
    given.pad_token = None
    given.save_pretrained(saved)
    loaded = load_text_tokenizer(str(saved), labelled(), vocab_size=300)
    assert loaded.pad_token_id == loaded.eos_token_id
    given.eos_token = None
    given.save_pretrained(saved)
    with pytest.raises(InputError, match="no token to pad with"):
        load_text_tokenizer(str(saved), labelled(), vocab_size=300)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_a_model_without_positions_takes_every_length(tokenizer):
    model = XLNetModel(XLNetConfig(vocab_size=300, d_model=16, n_layer=1, n_head=2, d_inner=16))
    check_length(1000, model.config, model, tokenizer)


def test_the_configuration_alone_refuses_a_length():
    config = BertConfig(**SMALL, vocab_size=300, max_position_embeddings=20)
    check_length(20, config)
    with pytest.raises(InputError, match="--max_length 21 is more than the 20 tokens"):
        check_length(21, config)


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        (BertModel(BertConfig(**SMALL, vocab_size=300, max_position_embeddings=20)), 20),
        (RobertaModel(RobertaConfig(**SMALL, vocab_size=300, max_position_embeddings=20, pad_token_id=1)), 18),
    ],
    ids=["bert", "roberta"],
)
def test_a_length_is_refused_exactly_when_the_model_cannot_take_it(tokenizer, model, longest):
    check_length(longest, model.config, model, tokenizer)
    model(torch.full((1, longest), 5))
    with pytest.raises(InputError, match=f"--max_length {longest + 1} is more than the {longest} tokens"):
        check_length(longest + 1, model.config, model, tokenizer)
    with pytest.raises(Exception, match=r"index|size"):
        model(torch.full((1, longest + 1), 5))


def test_a_tokenizer_may_know_better_than_the_model(saved):
    given = AutoTokenizer.from_pretrained(saved, model_max_length=12)
    model = BertModel(BertConfig(**SMALL, vocab_size=300, max_position_embeddings=20))
    with pytest.raises(InputError, match="more than the 12 tokens"):
        check_length(13, model.config, model, given)


def test_the_end_tokens_of_an_encoder_decoder_are_counted(saved):
    """A text may spell one out; a tokenizer may add none, or pad with it."""
    texts = labelled()
    spelt = [f"one {BOUNDARY} two", BOUNDARY, "three", "four"]
    rows = datasets.Dataset.from_dict({"text": spelt, "label": [0, 1, 0, 1]})
    texts = LabelledText(train=rows, validation=rows, label_names=("a", "b"))
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 300}
    plain, splits = (load_text_tokenizer(str(saved), texts, vocab_size=300, splits_special_tokens=on) for on in (0, 1))
    tokens = {name: getattr(plain, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    model = BartForSequenceClassification(BartConfig(**shape, **tokens, decoder_start_token_id=tokens["pad_token_id"]))
    made = tokenize(texts, splits, max_length=100)
    check_inputs(model, made.train, made.validation)
    batch = made.train.collate([made.train[index] for index in range(4)])
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.isfinite().all()
    splits.save_pretrained(saved / "again")
    again = AutoTokenizer.from_pretrained(saved / "again")
    assert again(spelt)["input_ids"] == splits(spelt)["input_ids"] != plain(spelt)["input_ids"]
    made = tokenize(texts, plain, max_length=100)
    with pytest.raises(InputError, match=r"the training text 3 has 2 end tokens .* the first one 3, and BartForSeq"):
        check_inputs(model, made.train)
    with pytest.raises(InputError, match="the held-out text 1 has 3 end tokens"):
        check_inputs(model, replace(made.train, rows=made.train.rows.select([2])), made.validation)
    check_inputs(BertModel(BertConfig(**SMALL, vocab_size=300)), made.train)
    plain.backend_tokenizer.post_processor = Sequence([])
    made = tokenize(
        LabelledText(train=rows.select([2, 3]), validation=rows, label_names=("a", "b")), plain, max_length=100
    )
    with pytest.raises(InputError, match="the training text 1 has 0 end tokens"):
        check_inputs(model, made.train)
    splits.pad_token = splits.eos_token
    made = tokenize(texts, splits, max_length=100)
    with pytest.raises(InputError, match="the tokenizer pads with the end token"):
        check_inputs(model, made.train)


def test_what_the_model_does_not_take_is_refused(saved):
    given = AutoTokenizer.from_pretrained(saved, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    texts = labelled()
    rows = texts.train.add_column("token_type_ids", [[0]] * len(texts.train)).remove_columns("text")
    made = TokenizedText(rows=rows.add_column("input_ids", [[5]] * len(rows)), tokenizer=given, num_labels=2)
    check_inputs(BertModel(BertConfig(**SMALL, vocab_size=300)), made)
    modern = ModernBertModel(ModernBertConfig(**SMALL, vocab_size=300, pad_token_id=0))
    with pytest.raises(InputError, match="makes token_type_ids, which ModernBertModel does not take"):
        check_inputs(modern, made)
