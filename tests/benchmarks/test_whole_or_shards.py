"""The benchmark: cases come in pairs, and a rank needs less of the model in shards."""

import pytest


@pytest.mark.slow
def test_a_rank_needs_less_in_shards(load):
    benchmark = load("whole_or_shards")
    rows = [benchmark.predict("1B", 8, shard, "full") for shard in benchmark.SHARDS]
    whole, shards = rows
    assert all(sum(row["parts"].values()) == row["needed_bytes"] for row in rows)
    assert shards["needed_bytes"] < whole["needed_bytes"] / 2
    assert shards["exposed_communication_s"] > whole["exposed_communication_s"] == 0
    assert len(list(benchmark.cells(rows))) == 1
