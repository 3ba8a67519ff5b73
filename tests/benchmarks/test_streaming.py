"""The benchmark: streamed weights are not on the device, and less is there at the peak."""

import pytest
import torch


def test_less_is_on_the_device(load):
    benchmark = load("streaming")
    rows = benchmark.measure(benchmark.QUICK_SHAPE, 64, 2, torch.device("cpu"))
    found = {row["way"]: row for row in rows}
    plain, streamed = found["full"], found["full, streamed"]
    assert found["LoRA"]["resident_bytes"] == plain["resident_bytes"] > streamed["resident_bytes"]
    assert found["LoRA"]["peak_bytes"] > plain["peak_bytes"] > streamed["peak_bytes"]
    assert plain["time_ratio"] == pytest.approx(1)
