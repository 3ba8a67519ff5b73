"""Every layer that a plan compiles, by torch's real compiler for cards that are not there: as few bytes as ever."""

import json

import pytest
import torch
from torch import nn
from triton_kernels.card import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

from triton_kernels.layers import calls_of, rows_of  # noqa: E402
from triton_kernels.limits import check_layers  # noqa: E402
from triton_kernels.models import compiled_models, flags_of  # noqa: E402
from triton_kernels.page import RESULTS, keep  # noqa: E402

MODELS = compiled_models()
SAMPLE = ("GPT-2", "Llama 3.2 1B")


def expected(name):
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"][name]


# Swin and the convolutional networks have many kernels, and come first: so all processes end together
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in reversed(MODELS)]
)
def test_layers_take_no_more_than_on_the_page(name, tmp_path):
    rows = rows_of(calls_of(*flags_of(MODELS[name], tmp_path), torch.bfloat16), torch.bfloat16)
    keep(name, rows)
    check_layers(rows, expected(name))


def test_a_smaller_ratio_saves_less_and_computes_more(tmp_path):
    """At 0 a layer saves its inputs alone."""
    calls = calls_of(*flags_of(MODELS["GPT-2"], tmp_path), torch.bfloat16)[:1]
    whole, half, none = (rows_of(calls, torch.bfloat16, ratio, with_code=False)[0] for ratio in (1.0, 0.5, 0.0))
    assert whole["saved"] > half["saved"] > none["saved"] == 0
    assert whole["backward"]["library_calls"] < half["backward"]["library_calls"] < none["backward"]["library_calls"]


# A layer that does not fuse


@torch.library.custom_op("memsave_tests::tanh", mutates_args=())
def _tanh(values: torch.Tensor) -> torch.Tensor:
    return values.tanh()


_tanh.register_fake(torch.empty_like)
_tanh.register_autograd(
    lambda ctx, gradient: gradient * (1 - ctx.saved_tensors[0].square()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class ApartFromOthers(nn.Module):
    """GPT-2's GELU, with a tanh that the compiler cannot look into."""

    def forward(self, values):
        return 0.5 * values * (1.0 + _tanh(0.7978845608028654 * (values + 0.044715 * values.pow(3))))


@pytest.mark.parametrize(("activation", "fits"), [(nn.GELU("tanh"), True), (ApartFromOthers(), False)])
def test_a_layer_that_does_not_fuse_fails(activation, fits, tmp_path):
    calls = calls_of(*flags_of(MODELS["GPT-2"], tmp_path), torch.bfloat16)[:1]
    calls[0].layer.mlp.act = activation
    rows = rows_of(calls, torch.bfloat16, with_code=False)
    if fits:
        check_layers(rows, expected("GPT-2"))
    else:
        with pytest.raises(AssertionError, match="bytes an element"):
            check_layers(rows, expected("GPT-2"))
