"""The benchmark: every way trains the same model, and each plan runs its layers again."""

import pytest
import torch

pytestmark = pytest.mark.slow  # of layers that compile


def test_every_way_makes_the_same_gradients(load):
    benchmark = load("host_time")
    gradients = {}
    for way, call in benchmark.steps(6, torch.device("cpu")).items():
        call()
        gradients[way] = [parameter.grad for parameter in call.args[0].parameters()]
    plain, *compiled = map(gradients.pop, ("plain", benchmark.TORCH, benchmark.COMPILED))
    assert all(map(torch.equal, *compiled))
    assert all(map(torch.allclose, compiled[0], plain))
    assert set(gradients) == {benchmark.PEER, *benchmark.STRATEGIES}
    for found in gradients.values():
        assert all(map(torch.equal, found, plain))


def test_what_is_added_is_told_beside_the_peer(load):
    benchmark = load("host_time")
    rows = {row["way"]: row for row in benchmark.measure(6, 1, 2, torch.device("cpu"))}
    assert rows["plain"]["added_s"] == 0
    assert rows[benchmark.PEER]["ratio"] == 1
    added = (rows["full"]["step_s"] - rows["plain"]["step_s"]) / 6
    assert rows["full"]["added_s"] == added
