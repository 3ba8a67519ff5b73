"""Rows hold every token once and keep documents apart: in the labels, in the positions, and in what models compute."""

import itertools
import pickle
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text import tokenizers
from memsave_recipes.data.text.chat_template import TokenizedConversations
from memsave_recipes.data.text.packing import (
    best_fit_decreasing,
    check_positions,
    count_valid,
    keeps_documents_apart,
    rows_of_conversations,
    rows_of_documents,
)
from memsave_recipes.data.text.rows import RowArguments
from memsave_recipes.data.text.tokenizers import load_tokenizer, tokenize_documents

pack, pad = rows_of_documents, partial(rows_of_documents, packing=False)
TEXTS = ["one two three\n", "four", "five six seven eight nine ten eleven twelve\n" * 4, "naïve 🙂", "a", "b c"]


class Key(NamedTuple):
    index: int
    epoch: int
    counted: bool


@pytest.fixture
def tokenizer():
    return load_tokenizer(None, TEXTS, vocab_size=280)


@pytest.fixture
def documents():
    return datasets.Dataset.from_dict({"text": TEXTS})


@pytest.fixture
def on_disk():
    return datasets.Dataset.from_generator(_rows)


def _rows():
    yield from ({"text": text} for text in TEXTS)


def expected_line(tokenizer):
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]


def whole(line):
    return line.read(np.array([[0, line.num_tokens]]))


def rows_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


# The line of tokens


@pytest.mark.parametrize("piece_tokens", [1, 7, 4096])
def test_every_span_of_the_line(documents, tokenizer, monkeypatch, piece_tokens):
    monkeypatch.setattr(tokenizers, "PIECE_TOKENS", piece_tokens)
    line = tokenize_documents(documents, tokenizer)
    expected = list(itertools.chain(*expected_line(tokenizer)))
    assert line.num_tokens == len(expected)
    assert line.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert line.document_starts.tolist() == [
        0,
        *itertools.accumulate(len(document) for document in expected_line(tokenizer)),
    ]
    for start, stop in itertools.combinations(range(len(expected) + 1), 2):
        assert line.read(np.array([[start, stop]])).tolist() == expected[start:stop]
    several = line.read(np.array([[0, 2], [2, 5], [7, 9], [1, 3]])).tolist()
    assert several == expected[0:5] + expected[7:9] + expected[1:3]


def test_a_long_document_is_tokenized_in_parts_without_loss(documents, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "CHUNK_CHARACTERS", 20)
    monkeypatch.setattr(tokenizers, "CHUNKS_AT_ONCE", 2)
    line = tokenize_documents(documents, tokenizer)
    assert tokenizer.decode(whole(line)) == "".join(f"{text}<|endoftext|>" for text in TEXTS)
    assert len(line.document_starts) == len(TEXTS) + 1


def test_tokens_are_made_once_for_each_tokenizer_and_text(on_disk, tokenizer, monkeypatch):
    pack(on_disk, tokenizer, 8)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "_token_ids", lambda *_: pytest.fail("tokenized again"))
        tokenizer(["some", "other texts"], padding=True, truncation=True, max_length=3)
        pack(on_disk, tokenizer, 8)
        pad(on_disk, load_tokenizer(None, TEXTS, vocab_size=280), 16)  # the length of rows plays no part
    other = load_tokenizer(None, TEXTS, vocab_size=270)
    assert pack(on_disk, other, 8).tokens.num_tokens > pack(on_disk, tokenizer, 8).tokens.num_tokens


def test_tokens_are_small_on_disk(on_disk, tokenizer):
    line = tokenize_documents(on_disk, tokenizer)
    assert line.pieces.cache_files
    assert line.pieces.features["input_ids"].feature.dtype == "int32"


def test_a_tokenizer_that_marks_the_beginning(documents, tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|endoftext|>",
        special_tokens=[("<|begin|>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)],
    )
    line = tokenize_documents(documents, tokenizer)
    text = tokenizer.decode(whole(line))
    assert text == "".join(f"<|begin|>{text}<|endoftext|>" for text in TEXTS)


def test_a_tokenizer_without_an_end(documents, tokenizer):
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match=r"no end-of-text token \(eos_token\)"):
        pack(documents, endless, 8)


# Packed rows


@pytest.mark.parametrize("block_size", [2, 3, 7, 16, 500])
def test_packed_rows_hold_every_token_once(documents, tokenizer, block_size):
    packed = pack(documents, tokenizer, block_size)
    rows = rows_of(packed)
    line = list(itertools.chain(*expected_line(tokenizer)))
    together = torch.cat([row["input_ids"] for row in rows]).tolist()
    assert together[: len(line)] == line
    assert 0 <= len(together) - len(line) < block_size
    assert all(values.shape == (block_size,) and values.dtype == torch.int64 for row in rows for values in row.values())
    assert (packed.tokens.num_tokens, packed.tokens.num_bytes) == (len(line), sum(len(text.encode()) for text in TEXTS))


@pytest.mark.parametrize("block_size", [2, 3, 7, 16, 500])
def test_positions_and_labels_begin_with_every_document_and_row(documents, tokenizer, block_size):
    rows = rows_of(pack(documents, tokenizer, block_size))
    starts = {0, *itertools.accumulate(len(document) for document in expected_line(tokenizer))}
    num_tokens = max(starts)
    position = 0
    for place in range(len(rows) * block_size):
        row, column = rows[place // block_size], place % block_size
        position = 0 if place in starts or column == 0 else position + 1
        assert row["position_ids"][column] == position
        is_predicted = position > 0 and place < num_tokens
        assert row["labels"][column] == (row["input_ids"][column] if is_predicted else -100)


def test_a_padding_row_counts_nothing(documents, tokenizer):
    packed = pack(documents, tokenizer, 16)
    row, padding = packed[Key(1, 0, True)], packed[Key(1, 3, False)]
    assert (row["labels"] != -100).any()
    assert (padding["labels"] == -100).all()
    assert torch.equal(row["input_ids"], padding["input_ids"])
    assert torch.equal(row["input_ids"], packed[1]["input_ids"])


def test_rows_end_where_the_data_set_ends(documents, tokenizer):
    packed = pack(documents, tokenizer, 16)
    assert len(list(packed)) == len(packed)
    with pytest.raises(IndexError):
        packed[len(packed)]


@pytest.mark.parametrize("make", [pack, pad])
def test_batches_are_the_same_from_workers_and_after_pickling(on_disk, tokenizer, make):
    dataset = make(on_disk, tokenizer, 8)
    copy = pickle.loads(pickle.dumps(dataset))
    loaders = (
        DataLoader(dataset, batch_size=3, collate_fn=dataset.collate),
        DataLoader(
            copy, batch_size=3, collate_fn=copy.collate, num_workers=2, multiprocessing_context="fork", timeout=60
        ),
    )
    for left, right in zip(*loaders, strict=True):
        assert left.keys() == right.keys()
        for name in ("document_lengths", "is_padded"):
            assert left.pop(name, None) == right.pop(name, None)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_valid_positions_are_counted_after_the_shift(documents, tokenizer):
    packed = pack(documents, tokenizer, 500)
    batch = packed.collate(rows_of(packed))
    assert count_valid(batch) == packed.tokens.num_tokens - len(TEXTS)
    assert count_valid({"labels": torch.tensor([[5, 6, -100, 7], [-100, -100, -100, -100]])}) == 2


def test_one_row_gives_the_same_loss(documents, tokenizer):
    model = causal_model("llama", attention="sdpa")
    losses, counts = [], []
    for one_row in (False, True):
        packed = pack(documents, tokenizer, 16, one_row=one_row)
        batch = packed.collate(rows_of(packed)[:3])
        assert batch["input_ids"].shape == ((1, 48) if one_row else (3, 16))
        logits = logits_of(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"))
        counts.append(count_valid(batch))
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


def test_a_batch_says_how_long_the_documents_of_each_row_are(documents, tokenizer):
    packed = pack(documents, tokenizer, 24)
    batch = packed.collate(rows_of(packed))
    for positions, lengths in zip(batch["position_ids"], batch["document_lengths"], strict=True):
        assert positions.tolist() == [place for length in lengths for place in range(length)]
        assert all(type(length) is int for length in lengths)


def test_the_largest_rows_have_the_longest_documents(documents, tokenizer):
    packed = pack(documents, tokenizer, 24)
    lengths = packed.collate(rows_of(packed))["document_lengths"]
    pairs = [sum(length**2 for length in row) for row in lengths]
    assert len(set(pairs)) > 2
    assert [pairs[row] for row in packed.longest(len(packed))] == sorted(pairs, reverse=True)
    assert packed.longest(2) == packed.longest(len(packed))[:2]


def test_the_ends_of_documents_are_those_that_transformers_would_look_for(documents, tokenizer):
    """In every layer, on the device; here the batch brings them from the host."""
    packed = pack(documents, tokenizer, 16, one_row=True)
    batch = packed.collate(rows_of(packed)[:3])
    (ends, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    for side in "qk":
        assert torch.equal(batch[f"cu_seq_lens_{side}"], ends)
        assert batch[f"cu_seq_lens_{side}"].dtype == ends.dtype
        assert batch[f"max_length_{side}"] == int(longest)
        assert type(batch[f"max_length_{side}"]) is int


# Padded samples


@pytest.mark.parametrize("block_size", [2, 3, 7, 16, 500])
def test_padded_samples_hold_every_token_of_one_document(documents, tokenizer, block_size):
    samples = [row["input_ids"].tolist() for row in rows_of(pad(documents, tokenizer, block_size))]
    assert samples == [
        document[start : start + block_size]
        for document in expected_line(tokenizer)
        for start in range(0, len(document), block_size)
    ]


def test_samples_are_filled_up_on_the_right(documents, tokenizer):
    padded = pad(documents, tokenizer, 500)
    short, long, uncounted = padded[1], padded[2], padded[Key(0, 0, False)]
    assert padded.collate([long])["is_padded"] is False
    batch = padded.collate([short, long, uncounted])
    assert batch.pop("is_padded") is True
    length, longest = len(short["input_ids"]), len(long["input_ids"])
    assert {values.shape for values in batch.values()} == {(3, longest)}
    assert batch["attention_mask"][0].tolist() == [1] * length + [0] * (longest - length)
    assert (batch["input_ids"][0, length:] == tokenizer.pad_token_id).all()
    assert batch["labels"][0].tolist() == [-100, *short["input_ids"][1:].tolist(), *[-100] * (longest - length)]
    assert torch.equal(batch["input_ids"][1, 1:], batch["labels"][1, 1:])
    assert (batch["labels"][2] == -100).all()
    assert batch["attention_mask"][2].sum() == len(uncounted["input_ids"]) > 0
    assert count_valid(batch) == length - 1 + longest - 1


def test_padding_takes_the_end_where_no_token_pads(documents, tokenizer):
    tokenizer.pad_token = None
    assert pack(documents, tokenizer, 500)[0]["input_ids"][-1] == tokenizer.eos_token_id
    padded = pad(documents, tokenizer, 500)
    assert padded.collate([padded[0], padded[2]])["input_ids"][0, -1] == tokenizer.eos_token_id


# What models compute

SHAPES = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32},
    "llama": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


def causal_model(model_type, attention="sdpa"):
    torch.manual_seed(0)
    shape = SHAPES[model_type] if model_type == "gpt2" else {**SHAPE, **SHAPES[model_type]}
    config = AutoConfig.for_model(model_type, vocab_size=280, bos_token_id=0, eos_token_id=0, **shape)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def logits_of(model, **inputs):
    return model(**{"use_cache": False, **inputs}).logits


def packed_and_alone(model, documents, tokenizer, **changes):
    """The largest difference between the logits of a document in a batch of packed rows and alone."""
    packed = pack(documents, tokenizer, 24)
    batch = packed.collate(rows_of(packed))
    del batch["labels"], batch["document_lengths"]
    together = logits_of(model, **{**batch, **changes})
    differences = []
    for row, (tokens, positions) in enumerate(zip(batch["input_ids"], batch["position_ids"], strict=True)):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in itertools.pairwise(starts):
            alone = logits_of(model, input_ids=tokens[None, start:stop])[0]
            differences.append((together[row, start:stop] - alone).abs().max().item())
    assert len(differences) > len(TEXTS)
    return max(differences)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_logits_of_a_document_are_the_same_packed_and_alone(documents, tokenizer, model_type, attention):
    model = causal_model(model_type, attention)
    assert packed_and_alone(model, documents, tokenizer) < 1e-5
    # and these are the ways to lose that
    assert packed_and_alone(model, documents, tokenizer, position_ids=None) > 1e-2
    assert packed_and_alone(model, documents, tokenizer, use_cache=True) > 1e-2
    everything = torch.ones(len(pack(documents, tokenizer, 24)), 24, dtype=torch.int64)
    assert packed_and_alone(model, documents, tokenizer, attention_mask=everything) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize("one_row", [False, True])
def test_models_that_keep_documents_apart_are_found(model_type, attention, one_row):
    model = causal_model(model_type, attention).train()
    assert keeps_documents_apart(model, one_row=one_row)
    assert keeps_documents_apart(model.to(torch.bfloat16), one_row=one_row)
    assert model.training


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
        OPTConfig(vocab_size=64, ffn_dim=64, word_embed_proj_dim=32, **{**SHAPE, "intermediate_size": None}),
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_do_not_are_found_too(config):
    torch.manual_seed(0)
    assert not keeps_documents_apart(AutoModelForCausalLM.from_config(config))


def test_a_model_is_as_it_was_after_the_check():
    model = causal_model("gpt2").eval()
    state = torch.get_rng_state()
    keeps_documents_apart(model)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


# Conversations

LENGTHS = [9, 3, 30, 12, 24, 5, 2, 7]
COUNTED_FROM = [4, 1, 25, 12, 10, 2, 1, 3]  # the fourth has no token that counts
REPLY_ENDS = [[9], [3], [27, 30], [], [14, 24], [5], [2], [7]]


@pytest.fixture
def chats():
    tokens = [np.arange(length) + 10 * number for number, length in enumerate(LENGTHS)]
    counted = [np.arange(length) >= start for length, start in zip(LENGTHS, COUNTED_FROM, strict=True)]
    pieces = {
        "input_ids": [ids.tolist() for ids in tokens],
        "counted": [mask.tolist() for mask in counted],
        "reply_ends": REPLY_ENDS,
    }
    return TokenizedConversations(
        pieces=datasets.Dataset.from_dict(pieces).with_format("numpy"),
        piece_starts=np.cumsum([0, *LENGTHS]),
        document_starts=np.cumsum([0, *LENGTHS]),
        piece_digests=np.arange(len(LENGTHS)),
        first_counted=np.array(COUNTED_FROM),
        num_tokens=sum(int(mask.sum()) for mask in counted),
        num_bytes=100,
    )


def rows_of_chats(chats, tokenizer, block_size, **options):
    lengths = chats.lengths_within(block_size, "training")
    return rows_of_conversations(chats, lengths, tokenizer, block_size, **options)


def documents_in(row):
    """The tokens and the labels of each document of a packed row."""
    starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
    spans = itertools.pairwise(starts)
    return [(row["input_ids"][first:last].tolist(), row["labels"][first:last].tolist()) for first, last in spans]


def within(chats, block_size):
    """The tokens that are kept of each conversation with a reply that fits."""
    return {number: int(length) for number, length in enumerate(chats.lengths_within(block_size, "training")) if length}


def conversation_of(chats, number, length):
    tokens = chats.pieces[number]["input_ids"][:length].tolist()
    counted = chats.pieces[number]["counted"][:length].tolist()
    labels = [token if counts else -100 for token, counts in zip(tokens, counted, strict=True)]
    return tokens, [-100, *labels[1:]]


@pytest.mark.parametrize("block_size", [24, 26, 30, 100])
def test_packed_rows_hold_whole_conversations_once(chats, tokenizer, block_size):
    packed = rows_of_chats(chats, tokenizer, block_size)
    rows = rows_of(packed)
    assert all(values.shape == (block_size,) and values.dtype == torch.int64 for row in rows for values in row.values())
    documents = [document for row in rows for document in documents_in(row)]
    whole = [document for document in documents if set(document[1]) != {-100}]
    kept = within(chats, block_size)
    assert sorted(whole) == sorted(conversation_of(chats, number, length) for number, length in kept.items())
    assert len(packed.spans) == len(kept)


@pytest.mark.parametrize("block_size", [24, 100])
def test_padded_samples_are_conversations(chats, tokenizer, block_size):
    padded = rows_of_chats(chats, tokenizer, block_size, packing=False)
    kept = within(chats, block_size)
    for (number, length), sample in zip(kept.items(), rows_of(padded), strict=True):
        assert (sample["input_ids"].tolist(), sample["labels"].tolist()) == conversation_of(chats, number, length)
    assert [*kept][padded.longest(1)[0]] == (4 if block_size == 24 else 2)
    batch = padded.collate(rows_of(padded))
    assert batch["attention_mask"].sum() == sum(kept.values())


@pytest.mark.parametrize(
    ("block_size", "lengths"), [(30, {}), (28, {2: 27}), (26, {2: 0}), (20, {2: 0, 4: 14}), (13, {2: 0, 4: 0})]
)
def test_what_is_too_long_ends_with_a_whole_reply_or_is_left_out(chats, tokenizer, block_size, lengths):
    expected = [lengths.get(number, min(length, block_size)) for number, length in enumerate(LENGTHS)]
    expected[3] = 0  # nothing of it counts
    assert chats.lengths_within(block_size, "training").tolist() == expected
    padded = rows_of_chats(chats, tokenizer, block_size, packing=False)
    assert [len(sample["input_ids"]) for sample in rows_of(padded)] == [length for length in expected if length]
    packed = rows_of_chats(chats, tokenizer, block_size)
    assert np.diff(packed.spans).sum() == sum(expected)


def test_no_room_for_any_reply_is_an_error(chats):
    nothing = replace(chats, first_counted=chats.lengths)
    with pytest.raises(InputError, match="24 has no room for a reply of any of the 8 held-out conversations: raise it"):
        nothing.lengths_within(24, "held-out")


def test_best_fit_decreasing():
    lengths = np.array([5, 9, 2, 7, 3, 1, 10])
    assert best_fit_decreasing(np.arange(7), lengths, 10) == [[6], [1, 5], [3, 4], [0, 2]]
    assert best_fit_decreasing(np.array([2, 0]), lengths, 10) == [[0, 2]]
    random = np.random.default_rng(0)
    lengths = random.integers(1, 65, 3000)
    rows = best_fit_decreasing(np.arange(3000), lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(3000))
    assert max(lengths[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.03 * lengths.sum() / 64


# Bad input


def test_rows_longer_than_the_model():
    check_positions(1024, 1024)
    check_positions(10**9, None)
    check_positions(10**9, -1)  # XLNet's word for no limit
    with pytest.raises(InputError, match="--block_size 1025 is longer than the model's 1024 positions"):
        check_positions(1025, 1024)
    with pytest.raises(InputError, match="--block_size 1: must be at least 2"):  # or nothing would be predicted
        RowArguments(block_size=1)
