"""A compiled chunk of the loss, by torch's real compiler: it reads the logits twice and writes their gradient once."""

import pytest
import torch
from triton_kernels.card import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

from torch._subclasses import FakeTensorMode  # noqa: E402
from triton_kernels.graphs import compiling_for  # noqa: E402
from triton_kernels.layers import LOWERED_FOR, autocast, machine_code  # noqa: E402

from memsave_recipes.core import losses  # noqa: E402

ROWS, WIDTH = 4096, 64
LOGIT = 2  # bytes in bfloat16


@pytest.mark.parametrize(("words", "softcap"), [(50304, None), (128256, None), (256000, 30.0)])
def test_logits_are_read_twice_and_written_once(words, softcap, monkeypatch):
    losses._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(losses, "_sums_come_out", lambda factor: factor.dtype == torch.bfloat16)  # as on CUDA
    monkeypatch.setattr(losses, "_add_gradients", lambda *_: None)  # products, of a library
    with FakeTensorMode(), autocast(torch.bfloat16), compiling_for(LOWERED_FOR) as graphs:
        hidden = torch.empty(ROWS, WIDTH, requires_grad=True)
        labels = torch.empty(ROWS, dtype=torch.int64)
        losses.linear_cross_entropy(
            hidden, torch.empty(words, WIDTH), labels, softcap=softcap, chunk_bytes=2**40, compiles=True
        )
    (graph,) = graphs
    read, written = (
        sum(kernel.calls * getattr(kernel.traffic, name) for kernel in graph.kernels) / (ROWS * words)
        for name in ("read_bytes", "written_bytes")
    )
    assert graph.library_calls == 0
    assert (read, written) == pytest.approx((2 * LOGIT, LOGIT), rel=0.01)
    assert all(code["spilled_bytes"] == 0 for code in machine_code(graphs).values())
