"""What fills the weights of a model from scratch is recorded, and done again with the same bits; or it is refused."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from memsave_recipes.models.deferred_init import deferred_init
from memsave_recipes.models.slices import WholeOnly, let_go_of_stand_ins, slices_of

CPU = torch.device("cpu")


def drawn(make):
    """The parameters of a module from scratch, drawn later and as ever; what comes next, too."""
    found = []
    for later in (True, False):
        torch.manual_seed(3)
        module = deferred_init(make, torch.float32, CPU) if later else make()
        named, unread = dict(module.named_parameters()), slices_of(module).unread
        assert set(unread) == {p for name, p in named.items() if later and p.ndim > 1 and name != "zeros"}
        made = {name: unread[p](0, len(p)) if p in unread else p for name, p in named.items()}
        found.append(made | {"random numbers": torch.rand(3)})
    return found


class Filled(nn.Module):
    """A parameter that ``fill`` fills."""

    def __init__(self, fill):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 5))
        self.zeros = nn.Parameter(torch.zeros(6, 5))
        with torch.no_grad():
            fill(self.weight)


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Embedding, 10, 4, padding_idx=3),
        partial(nn.MultiheadAttention, 8, 2),
        partial(nn.Conv2d, 3, 4, 3),
        partial(nn.Bilinear, 3, 4, 5),
        partial(Filled, lambda weight: weight.uniform_(-1, 1).mul_(0.9).erfinv_().clamp_(-2, 2)),
        partial(Filled, lambda weight: weight.normal_().t()[:2].add_(1)),
        partial(Filled, lambda weight: (weight.copy_(value := torch.rand(6, 5)), value.zero_())),
        partial(Filled, lambda weight: weight.data.bernoulli_(0.3)),
    ],
)
def test_whatever_fills_a_weight_in_place_is_done_again(make):
    later, as_ever = drawn(make)
    assert later.keys() == as_ever.keys()
    assert all(torch.equal(later[name], as_ever[name]) for name in as_ever)


def test_stand_ins_do_not_outlive_their_use():
    module = deferred_init(partial(nn.Linear, 3, 4), torch.float32, CPU)
    stand_in = weakref.ref(module.weight)
    module.weight = None
    assert stand_in() is not None
    let_go_of_stand_ins(module)
    assert stand_in() is None


class Buffered(Filled):
    def __init__(self):
        super().__init__(nn.init.zeros_)
        self.register_buffer("scale", torch.empty(2, 2).fill_(1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(Filled, lambda weight: weight.normal_().max().item()), "calls aten._local_scalar_dense.default on a"),
        (partial(Filled, nn.init.orthogonal_), "computes with a weight"),
        (partial(Filled, lambda weight: weight.view(torch.int32).zero_()), "computes with a weight"),
        (partial(Filled, lambda weight: weight.copy_(torch.empty(6, 5).normal_())), "calls aten.copy_.default on"),
        (partial(Filled, lambda weight: torch.empty_like(weight).normal_()), "computes with a weight"),
        (partial(Filled, lambda weight: torch.rand_like(weight)), "calls aten.rand_like.default on a weight"),
        (partial(Filled, lambda weight: weight.normal_(generator=torch.Generator())), "calls aten.normal_.default on"),
        (partial(Filled, lambda weight: torch.ones(5, 6).copy_(weight.t())), "calls aten.copy_.default on a weight"),
        (partial(Filled, lambda weight: weight.normal_().t_()), "calls aten.t_.default on a weight"),
        (partial(Filled, lambda weight: None), "leaves a weight as it is"),
        (Buffered, "leaves a buffer to be drawn"),
    ],
)
def test_whatever_cannot_be_done_again_is_refused(make, reason):
    with pytest.raises(WholeOnly, match=reason):
        deferred_init(make, torch.float32, CPU)
