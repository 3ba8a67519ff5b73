"""The ways that the benchmark compares: packed ones are one step, and one document a row is another."""

import torch


def test_masks_and_documents_have_the_same_gradient(load):
    benchmark = load("packed_attention")
    found = {}
    for way, step in benchmark.ways_of(64, "full", 4, torch.device("cpu")).items():
        weight = step.args[0].model.layers[0].self_attn.q_proj.weight
        total = torch.zeros_like(weight)
        handle = weight.register_hook(lambda gradient, total=total: total.add_(gradient))
        step()
        handle.remove()
        found[way] = total
        assert weight.grad is None
    assert torch.allclose(found["masks"], found["by document"], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found["one document"], found["by document"], rtol=1e-4, atol=1e-6)
