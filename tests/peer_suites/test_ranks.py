"""DDP, FSDP2 and tensor parallel layers on two ranks: every rank has the gradients that it has without a plan."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_suites.adapter import AS_TORCH, REFUSED, SAME, Suite, body, in_turn, stack, total, train, x
from samples import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as Ddp

suite = Suite()
FLAGS = {"": {}, "static": {"static_graph": True}, "find unused": {"find_unused_parameters": True}}
VIEWS = {"views of buckets": {"gradient_as_bucket_view": True}}


def mine():
    return x().roll(dist.get_rank(), 1)


@suite.each(FLAGS | VIEWS)
def ddp(put, value):
    return train(Ddp(put(stack()), **value), mine(), times=3)


@suite.each(FLAGS)
def ddp_of_two_forwards(put, value):
    model = Ddp(put(stack(through=lambda self, x: in_turn(self, x) + in_turn(self, x.flip(1)))), **value)
    return train(model, mine(), times=2)


def without_the_last(self, x, number=3):
    for block in self.blocks[:number]:
        x = block(x)
    return x


@suite.each({"": {}}, raises=RuntimeError)
@suite.each({"find unused": FLAGS["find unused"]})
def ddp_of_layers_that_are_not_used(put, value):
    return train(Ddp(put(stack(through=without_the_last)), **value), mine(), times=2)


@suite.each({"": {}}, raises=RuntimeError)
@suite.each({"find unused": FLAGS["find unused"]})
def ddp_of_layers_that_are_used_in_turns(put, value):
    model = Ddp(put(stack(through=without_the_last)), **value)
    return [train(model, mine(), number=number) for number in (3, 2, 4)]


@suite.each({"": {}, "static": {"static_graph": True}})
def ddp_of_shared_weights(put, value):
    model = stack()
    for block in model.blocks[1:]:
        block.l.weight = model.blocks[0].l.weight
    return train(Ddp(put(model), **value), mine(), times=2)


@suite()
def ddp_of_batchnorm_and_dropout(put):
    model = put(stack(lambda self, x: F.dropout(body(self, x), 0.2), parts=lambda: {"n": nn.BatchNorm1d(8)}))
    torch.manual_seed(dist.get_rank())
    losses = train(Ddp(model), mine(), times=2)
    torch.manual_seed(0)
    return losses


@suite.each({"static": FLAGS["static"]}, raises=RuntimeError)
@suite.each({"": {}})
def ddp_that_accumulates(put, value):
    model = Ddp(put(stack()), **value)
    losses = []
    for _ in range(2):
        with model.no_sync():
            losses += train(model, mine())
        losses += train(model, mine().flip(1))
    return losses


@suite()
def ddp_before_the_plan(put):
    model = stack()
    wrapped = Ddp(model)
    put(model)
    return train(wrapped, mine(), times=2)


@suite()
def ddp_with_a_hook_of_communication(put):
    model = Ddp(put(stack()))
    model.register_comm_hook(
        None,
        lambda state, bucket: (
            dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda future: future.value()[0])
        ),
    )
    return train(model, mine(), times=2)


def sharded(model, units, **how):
    for unit in units:
        fully_shard(unit, **how)
    fully_shard(model, **how)
    return model


def blocks(model):
    return list(model.blocks)


def pairs(model):
    return [list(model.blocks[:2]), list(model.blocks[2:])]


def inner(model):
    return [block.l for block in model.blocks]


UNITS = {"layers": blocks, "pairs": pairs, "root": lambda model: []}


@suite.each(UNITS)
def fsdp2_after_the_plan(put, value):
    model = put(stack())
    return train(sharded(model, value(model)), mine(), times=2)


@suite.each(UNITS)
def fsdp2_before_the_plan(put, value):
    model = stack()
    return train(put(sharded(model, value(model))), mine(), times=2)


@suite(SAME, selective=REFUSED)
def fsdp2_of_parts_of_layers(put):
    model = put(stack())
    return train(sharded(model, inner(model)), mine(), times=2)


@suite()
def fsdp2_that_keeps_weights_whole(put):
    model = put(stack())
    return train(sharded(model, blocks(model), reshard_after_forward=False), mine(), times=2)


@suite.each({"after the plan": True, "before the plan": False})
def fsdp2_in_bfloat16(put, value):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = put(stack()) if value else stack()
    model = sharded(model, blocks(model), mp_policy=policy)
    return train(model if value else put(model), mine(), times=2)


@suite()
def fsdp2_that_accumulates(put):
    model = put(stack())
    sharded(model, blocks(model))
    model.set_requires_gradient_sync(False)
    losses = train(model, mine())
    model.set_requires_gradient_sync(True)
    return losses + train(model, mine().flip(1))


@suite()
def tensor_parallel_layers(put):
    up_and_down = lambda self, x: x + self.o(torch.relu(self.l(self.n(x))))  # noqa: E731
    model = stack(up_and_down, parts=lambda: {"l": nn.Linear(8, 16), "o": nn.Linear(16, 8)})
    for block in model.blocks:
        parallelize_module(block, init_device_mesh("cpu", (2,)), {"l": ColwiseParallel(), "o": RowwiseParallel()})
    return train(put(model), x(), times=2)


@suite(AS_TORCH)
def collective_inside_a_layer(put):
    """Where only one rank runs it a second time, the other waits: each has to do the same."""

    def forward(self, x):
        y = body(self, x)
        dist.all_reduce(summed := y.detach().clone())
        return y + summed

    return train(put(stack(forward)), mine())


def row_on_rank(name, accelerator):
    return suite.cases[name].row()


FEW = ("ddp[find unused]", "fsdp2_after_the_plan[layers]")


@pytest.mark.parametrize("name", sample(FEW, suite.cases))
def test_case(name, run_on_ranks, note_row):
    rows = run_on_ranks(partial(row_on_rank, name), 2)
    note_row(rows[0])
    assert [row["faults"] for row in rows] == [[], []]


def test_sums_are_of_both_ranks(run_on_ranks):
    first, second = run_on_ranks(losses_and_gradients, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def losses_and_gradients(accelerator):
    model = stack()
    loss = train(Ddp(model), mine())
    return loss[0].item(), total(model.blocks[0].l.weight.grad.requires_grad_()).item()
