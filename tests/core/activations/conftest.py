"""What the tests of compiled layers share."""

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def graphs():
    """How many graphs have been compiled since the last question."""
    seen = [counters["stats"]["unique_graphs"]]

    def new():
        seen.append(counters["stats"]["unique_graphs"])
        return seen[-1] - seen[-2]

    return new


def _assert_three_way(ours, plain, exact, *, ulps=16):
    """For every tensor: our largest error against float64 is at most plain's own, plus rounding.

    Rounding is ``ulps`` units in the last place of the tensor's largest value; of a tensor that is zero but for
    rounding (the gradient of a key's bias), in that of a ten-thousandth of the model's largest.
    """
    assert ours.keys() == plain.keys() == exact.keys()
    largest = max(tensor.abs().max().item() for tensor in exact.values())
    for name, truth in exact.items():
        scale = max(truth.abs().max().item(), 1e-4 * largest)
        rounding = ulps * torch.finfo(plain[name].dtype).eps * scale
        error, allowed = ((t[name].double() - truth).abs().max().item() for t in (ours, plain))
        assert error <= allowed + rounding, (name, error, allowed, rounding)


@pytest.fixture
def assert_three_way() -> Callable[..., None]:
    """``assert_three_way(ours, plain, exact, ulps=16)`` on records of tensors by name."""
    return _assert_three_way
