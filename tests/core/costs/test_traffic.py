"""What operators take on paper: nothing where nothing is computed, and of a large tensor what is touched of it."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from workloads import estimate_on_target, workload_of

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs import fake_step
from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.costs.fake_step import bytes_moved, extent_of
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.costs.throughput import FORMULAS_OF_ALL_THAT_RUNS

aten = torch.ops.aten
ROWS, WORDS, FLOAT32, INT64 = 8, 1000, 4, 8


@pytest.fixture
def priced(monkeypatch):
    """(operator, whether its kernel computes, seconds) of all that is priced, once for arguments of a form."""
    found = []
    price = fake_step._Operators._by_the_roofline

    def spy(self, func, args, kwargs, out):
        seconds = price(self, func, args, kwargs, out)
        found.append((str(func), computes(func, tree_leaves((args, kwargs)), out), seconds))
        return seconds

    monkeypatch.setattr(fake_step._Operators, "_by_the_roofline", spy)
    return found


def computes(func, leaves, out):
    """Whether it changes memory, or returns memory that is not that of its arguments."""
    given = {tensor.untyped_storage()._cdata for tensor in leaves if isinstance(tensor, Tensor)}
    new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    is_empty = "empty" in str(func)
    return func._schema.is_mutable or (not is_empty and any(t.untyped_storage()._cdata not in given for t in new))


@pytest.mark.parametrize("name", ["gpt2", "llama", "densenet_small"])
def test_what_computes_nothing_takes_no_time(make_case, priced, name):
    case = make_case(name)
    model = fake_model(lambda: make_case(name).model)
    batch = fake_batch(model, {"batch": case.batch})
    workload = workload_of(model, case.loss_of, batch["batch"])
    estimate_on_target(workload, [plan_blocks(model, "none")], find_target("a100"), autocast_dtype=torch.bfloat16)
    assert {name for name, computes, seconds in priced if seconds and not computes} == set()
    assert {name for name, computes, seconds in priced if computes and not seconds} == set()


def moved(func, *args, **kwargs):
    return bytes_moved(func, args, kwargs, func(*args, **kwargs))


def test_of_logits_what_is_picked_and_put_is_moved():
    logits, rows, labels = torch.zeros(ROWS, WORDS), torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int64)
    picked = ROWS * INT64 + 2 * ROWS * FLOAT32
    assert moved(aten.gather.default, logits, 1, labels[:, None]) == picked
    assert moved(aten.index.Tensor, logits, [rows, labels]) == picked + ROWS * INT64
    values = torch.ones(ROWS)
    assert moved(aten.index_put_.default, logits, [rows, labels], values) == 2 * ROWS * INT64 + 3 * ROWS * FLOAT32
    assert moved(aten.embedding.default, torch.zeros(WORDS, 16), labels) == ROWS * (INT64 + 2 * 16 * FLOAT32)


def test_what_is_overwritten_is_not_read():
    logits, half = torch.zeros(ROWS, WORDS), torch.zeros(ROWS, WORDS, dtype=torch.bfloat16)
    assert moved(aten.zero_.default, logits) == logits.nbytes
    assert moved(aten.zeros_like.default, logits) == logits.nbytes
    assert moved(aten.copy_.default, logits, half) == half.nbytes + logits.nbytes
    assert moved(aten.add_.Tensor, logits, half) == half.nbytes + 2 * logits.nbytes
    left, right = torch.zeros(ROWS, 4), torch.zeros(4, WORDS)
    product = left.nbytes + right.nbytes + 2 * logits.nbytes  # which is added to ``logits``
    assert moved(aten.addmm.out, logits, left, right, out=logits) == product


def test_an_expanded_tensor_is_read_once():
    row = torch.zeros(1, WORDS)
    assert moved(aten.exp.default, row.expand(ROWS, WORDS)) == row.nbytes + ROWS * row.nbytes
    one_of_many = torch.zeros(ROWS, 1, WORDS)[:1]
    assert moved(aten.exp.default, one_of_many.expand(1, ROWS, WORDS)) == row.nbytes + ROWS * row.nbytes


def test_windows_that_overlap_are_read_once_and_columns_by_themselves():
    row, table = torch.zeros(WORDS), torch.zeros(ROWS, WORDS)
    windows = row.unfold(0, 3, 1)
    assert moved(aten.exp.default, windows) == row.nbytes + windows.nbytes
    assert moved(aten.exp.default, table[:, 2]) == 2 * ROWS * FLOAT32
    assert moved(aten.exp.default, table[:0]) == 0


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_the_rate_of_a_product_depends_on_its_smallest_side():
    for operation, factors in (
        (aten.mm, [meta(4096, 96), meta(96, 512)]),
        (aten.bmm, [meta(7, 96, 4096), meta(7, 4096, 512)]),
        (aten.convolution, [meta(2, 24, 56, 56), meta(96, 24, 3, 3)]),
        (aten.convolution_backward, [meta(2, 96, 56, 56), meta(2, 24, 56, 56), meta(96, 24, 3, 3)]),
    ):
        assert extent_of(operation, factors, 1.0) == 96
    assert extent_of(aten.add, [meta(3)], 0) == 0


def test_the_rate_of_attention_depends_on_the_length_of_its_rows():
    heads = [meta(2, 8, 1024, 64)] * 3
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    flops = FORMULAS_OF_ALL_THAT_RUNS[forward](*heads, out_val=None)
    assert extent_of(forward, heads, flops) == 1024
    flops = FORMULAS_OF_ALL_THAT_RUNS[backward](*[heads[0], *heads], out_val=None)
    assert extent_of(backward, [heads[0], *heads], flops) == 1024
