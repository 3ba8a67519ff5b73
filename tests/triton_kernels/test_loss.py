"""A compiled chunk of the loss, by torch's real compiler: it reads the logits twice and writes their gradient once."""

import json

import pytest
import torch
from triton_kernels.card import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

from torch._subclasses import FakeTensorMode  # noqa: E402
from triton_kernels.graphs import compiling_for  # noqa: E402
from triton_kernels.layers import LOWERED_FOR, autocast, machine_code, of_graph  # noqa: E402
from triton_kernels.limits import check_code, check_kernels  # noqa: E402
from triton_kernels.page import LOSS, RESULTS, keep  # noqa: E402

from memsave_recipes.core import losses  # noqa: E402

ROWS, WIDTH = 4096, 64
LOGIT = 2  # bytes in bfloat16


@pytest.fixture
def as_on_cuda(monkeypatch):
    """A loss whose head is padded and whose gradient takes the logits' place; the products are a library's."""
    losses._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(losses, "_pads", lambda head, dtype: len(head) % losses.WORDS > 0)
    monkeypatch.setattr(losses, "_sums_come_out", lambda factor: factor.dtype == torch.bfloat16)
    monkeypatch.setattr(losses, "_add_gradients", lambda *_: None)


def row_of(words, softcap):
    with FakeTensorMode(), autocast(torch.bfloat16), compiling_for(LOWERED_FOR) as graphs:
        hidden = torch.empty(ROWS, WIDTH, requires_grad=True)
        labels = torch.empty(ROWS, dtype=torch.int64)
        losses.linear_cross_entropy(
            hidden, torch.empty(words, WIDTH), labels, softcap=softcap, chunk_bytes=2**40, compiles=True
        )
    (graph,) = graphs
    columns = words + -words % losses.WORDS
    found = of_graph(graph, graph.kernels, ROWS * columns)
    return {"words": words, "columns": columns, "softcap": softcap, **found, "machine_code": machine_code(graphs)}


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("words", "softcap"), [(50257, None), (50304, None), (128256, None), (256000, 30.0)])
def test_logits_are_read_twice_and_written_once(words, softcap):
    row = row_of(words, softcap)
    keep(f"{words:06}", row, LOSS)
    assert row["library_calls"] == 0
    assert (row["read"], row["written"]) == pytest.approx((2 * LOGIT, LOGIT), rel=0.01)
    assert all(code["spilled_bytes"] == 0 for classes in row["machine_code"].values() for code in classes.values())
    limits = {one["words"]: one for one in json.loads(RESULTS.read_text(encoding="utf-8"))[LOSS]}
    check_kernels(row, limits[words], "loss")
    check_code(row["machine_code"], limits[words]["machine_code"])
