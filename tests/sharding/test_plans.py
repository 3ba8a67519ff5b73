"""Every plan that goes with shards has the gradients of no plan under them: bit for bit, or within rounding."""

from functools import partial

import pytest
import torch
from small_runs import Training, all_equal, largest_difference
from torch.distributed.fsdp import FSDPModule

LAYERS = ("full", "every:2", "segments:2", "segments:3", "nested:2", "selective")
SEQUENCES = ("full", "every:3", "segments:3", "nested:3", "selective")


def gradients_under(kind, flag, strategies, accelerator):
    """Of two accumulated micro-batches under each strategy, of this rank; and how many modules torch has cut up."""
    found = {}
    for strategy in strategies:
        training = Training(accelerator, kind, flag, strategy=strategy, dtype=torch.float32, global_batch_size=8)
        batch = next(iter(training.batches))
        training.forward_and_backward(batch)
        units = sum(isinstance(module, FSDPModule) for module in training.trained.modules())
        buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
        found[strategy] = training.gradients(), batch.loss.item(), buffers, units
    return found


@pytest.mark.parametrize(
    ("kind", "flag", "num_ranks", "strategies"),
    [
        ("llama", "full", 2, LAYERS),
        ("vgg", "full", 2, SEQUENCES),
        pytest.param("gpt2", "full", 2, LAYERS, marks=pytest.mark.slow),
        pytest.param("densenet", "full", 2, (*SEQUENCES, "bottleneck"), marks=pytest.mark.slow),
        pytest.param("vit", "full", 2, LAYERS[:3], marks=pytest.mark.slow),
        pytest.param("llama", "2", 4, LAYERS, marks=pytest.mark.slow),
    ],
)
def test_bitwise(run_on_ranks, kind, flag, num_ranks, strategies):
    ranks = run_on_ranks(partial(gradients_under, kind, flag, ("none", *strategies)), num_ranks, timeout_s=200)
    for of_rank in ranks:
        gradients, loss, buffers, units = of_rank["none"]
        assert units > 3
        assert any(gradient.any() for gradient in gradients.values())
        for strategy in strategies:
            assert all_equal(of_rank[strategy][0], gradients), strategy
            assert all_equal(of_rank[strategy][2], buffers), strategy
            assert of_rank[strategy][1] == loss


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_within_rounding(run_on_ranks):
    function = partial(gradients_under, "llama", "full", ("none", "compiled:0.3"))
    for of_rank in run_on_ranks(function, 2, timeout_s=800):
        assert largest_difference(of_rank["compiled:0.3"][0], of_rank["none"][0]) < 1e-5
