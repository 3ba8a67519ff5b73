"""The benchmark steps the same parameters twice, and ours ends in the same bits."""

import torch


def test_both_step_the_same_numbers(load):
    benchmark = load("host_step")
    row = benchmark.measure("AdamW, float32", benchmark.shapes(benchmark.QUICK_LAYER, 1e5), 4)
    assert row["own_s"] > 0
    assert row["ratio"] > 0


def test_updates_beside_a_backward_are_compared_with_those_after_it(load):
    benchmark = load("host_step")
    row = benchmark.measure_beside(benchmark.QUICK_LAYER, 1e-3, 4)
    assert row["own_s"] >= 1e-3
    assert row["ratio"] > 0


def test_layers_make_so_many_numbers(load):
    benchmark = load("host_step")
    of_layer = sum(torch.Size(shape).numel() for shape in benchmark.LAYER)
    assert benchmark.shapes(benchmark.LAYER, 2.5 * of_layer)[: len(benchmark.LAYER)] == benchmark.LAYER
    numbers = sum(torch.Size(shape).numel() for shape in benchmark.shapes(benchmark.LAYER, 2.5 * of_layer))
    assert 2 * of_layer < numbers <= 2.5 * of_layer


def test_weights_are_those_of_the_yardstick(load, monkeypatch):
    benchmark = load("host_step")
    made = []
    stepping = benchmark.stepping
    monkeypatch.setattr(
        benchmark, "stepping", lambda optim, parameters: made.append(parameters) or stepping(optim, parameters)
    )
    for call in benchmark.calls("AdamW, float32", benchmark.QUICK_LAYER).values():
        call()
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
