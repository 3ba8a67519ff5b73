"""Bytes on paper are those of the step that really runs, for every way of the benchmark."""

import pytest


@pytest.fixture(scope="module")
def benchmark(load):
    return load("long_context")


SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 4096},
}


def test_real_bytes_are_those_on_paper(benchmark):
    for row in benchmark.real_rows(SHAPE, [1536], rounds=2):
        assert row["paper_bytes"] == pytest.approx(row["real_bytes"], rel=0.005), row["way"]


def test_with_their_inputs_on_the_host_layers_hold_no_more_of_a_longer_row(benchmark):
    """Of the four inputs of a layer that tiles leave, (T, 32) floats, at most two are on the device at a time."""
    shape = {**SHAPE, "num_hidden_layers": 6}
    held, moved = (benchmark.Training.of(way, shape, fake=True) for way in ("full_tiled", "full_tiled_offload"))
    on_device, beside_host = (benchmark.fake_bytes(one, 16_384) for one in (held, moved))
    assert on_device - beside_host == pytest.approx(4 * 16_384 * 32 * 4, rel=0.1)


def test_the_longest_row_fits_and_a_longer_one_does_not(benchmark):
    training = benchmark.Training.of("full", SHAPE, fake=True)
    budget = 6 * 2**20
    tokens, bytes_a_token = benchmark.longest(training, budget)
    assert tokens % benchmark.STEP_TOKENS == 0
    assert benchmark.fake_bytes(training, tokens) <= budget < benchmark.fake_bytes(training, tokens + 512)
    assert bytes_a_token > 0
    assert benchmark.longest(training, training.resident_bytes)[0] == 0
