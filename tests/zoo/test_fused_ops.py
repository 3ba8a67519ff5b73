"""Every architecture of the zoo trains with fused operators as without, and under a plan bit for bit."""

from dataclasses import dataclass

import pytest
import torch
from samples import sample
from zoo.architectures import ARCHITECTURES, Architecture
from zoo.steps import IDENTICAL, plain_steps, verdict

from memsave_recipes.models.fused_ops import fuse_operators, not_fused_in

SAMPLE = {"gpt2", "gemma3: text alone", "t5", "resnet: BatchNorm"}


@dataclass(frozen=True)
class Fused(Architecture):
    """An architecture with fused operators."""

    def build(self):
        model = super().build()
        fuse_operators(model)
        return model


@pytest.mark.parametrize("name", sample(SAMPLE, ARCHITECTURES))
def test_results_are_those_of_the_models_own_operators(name):
    own = ARCHITECTURES[name]
    fused = Fused(**vars(own))
    assert not_fused_in(fused.build().to("meta")) is None
    steps = plain_steps(fused)
    for expected, found in zip(plain_steps(own), steps, strict=True):
        assert torch.equal(expected.results.pop("random state"), found.results["random state"])
        for key, tensor in expected.results.items():
            if tensor is None or not tensor.is_floating_point():
                continue
            tolerance = 1e-4 * max(1e-3, tensor.abs().max().item())
            torch.testing.assert_close(found.results[key], tensor, rtol=1e-3, atol=tolerance, msg=f"{name}: {key}")
    assert verdict(fused, "full", steps) == IDENTICAL
