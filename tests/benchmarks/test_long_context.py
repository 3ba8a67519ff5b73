"""Bytes on paper are those of the step that really runs, for every way of the benchmark; a peer trains the same."""

import pytest
import torch
from samples import sample


@pytest.fixture(scope="module")
def benchmark(load):
    return load("long_context")


SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 4096},
}


@pytest.mark.parametrize("rows", sample(["long_rows"], ["real_rows", "long_rows"]))
def test_real_bytes_are_those_on_paper(benchmark, rows):
    options = {"rounds": 2} if rows == "real_rows" else {}
    for row in getattr(benchmark, rows)(SHAPE, [1536], **options):
        if row["real_bytes"] is not None and row["way"] != benchmark.PEER:
            assert row["paper_bytes"] == pytest.approx(row["real_bytes"], rel=0.005), row["way"]


def test_deepspeeds_tiling_trains_the_same(benchmark):
    pytest.importorskip("deepspeed")
    plain, peer = (benchmark.Training.of(way, SHAPE, fake=False) for way in ("plain", benchmark.PEER))
    for training in (plain, peer):
        training.loss_of(training.tokens(200)).backward()
    for expected, actual in zip(plain.model.parameters(), peer.model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "inputs"), [("full_tiled", 3), ("full_tiled_offload", 0)])
def test_with_their_inputs_on_the_host_more_layers_hold_no_more_of_a_row(benchmark, way, inputs):
    """Three layers more take their weights, gradients and AdamW's means; tiles alone also an input each, (T, 32)."""
    few, many = (
        benchmark.Training.of(way, {**SHAPE, "num_hidden_layers": num_layers}, fake=True) for num_layers in (2, 5)
    )
    weights = (many.resident_bytes - few.resident_bytes) * 4 // 3
    beyond = benchmark.fake_bytes(many, 16_384) - benchmark.fake_bytes(few, 16_384) - weights
    assert beyond == pytest.approx(inputs * 16_384 * 32 * 4, abs=200_000)


def test_the_longest_row_fits_and_a_longer_one_does_not(benchmark):
    training = benchmark.Training.of("full", SHAPE, fake=True)
    budget = 6 * 2**20
    tokens = benchmark.longest(training, budget)
    assert tokens % benchmark.STEP_TOKENS == 0
    assert benchmark.fake_bytes(training, tokens) <= budget < benchmark.fake_bytes(training, tokens + 512)
    assert benchmark.longest(training, training.resident_bytes) == 0


@pytest.mark.slow
def test_one_more_token_of_tiles_takes_less(benchmark):
    one_more = {
        way: benchmark.bytes_a_token(benchmark.Training.of(way, SHAPE, fake=True), 1536, 3072)
        for way in ("full", "full_tiled", "full_tiled_offload")
    }
    assert one_more["full"] > one_more["full_tiled"] > one_more["full_tiled_offload"] > 0
