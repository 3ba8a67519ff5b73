"""Offloaded blocks, on a CPU, with copies that happen as late as they may: plain's gradients bit for bit."""

import gc
import random
import warnings
import weakref

import pytest
import torch
from bits import different, train_step
from host_copies import LateCopies
from torch import nn

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.offload import (
    SMALLEST_BYTES,
    OffloadEngine,
    _warn_once_on_cpu,
    offload,
    pinned_sizes,
)
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.plans import Action, Plan, Span

CPU = torch.device("cpu")
MODELS = ["vgg_small", "densenet_small", "vit", "gpt2", "llama"]
STRATEGIES = ["offload", "full_offload"]


@pytest.fixture
def engine(monkeypatch):
    """Moves everything, and takes the place of the one of ``offload``."""
    engine = OffloadEngine(CPU, LateCopies(), smallest_bytes=1)
    monkeypatch.setitem(RUN, Action.OFFLOAD, engine.run)
    return engine


def keep(function, *inputs, modules):
    return function(*inputs)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_micro_batches_give_plain_bit_for_bit(make_case, engine, name, bf16):
    expected = train_step(make_case(name), bf16=bf16, micro_batches=2)
    for strategy in STRATEGIES:
        case = make_case(name)
        with apply_plan(case.model, plan_blocks(case.model, strategy)):
            assert not different(train_step(case, bf16=bf16, micro_batches=2), expected)
        assert engine.copies.bytes_out > 0
        assert not engine.copies.pending


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_any_mixture_of_actions(make_case, engine, name, seed):
    expected, case = train_step(make_case(name)), make_case(name)
    blocks = plan_blocks(case.model, "none").blocks
    choices = [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_OFFLOAD]
    actions = random.Random(seed).choices(choices, k=len(blocks))
    spans = tuple(Span(start=i, stop=i + 1, action=action) for i, action in enumerate(actions))
    with apply_plan(case.model, Plan(strategy="mine", blocks=blocks, spans=spans)):
        assert not different(train_step(case), expected)
    assert not engine.copies.pending


def test_of_blocks_that_recompute_only_the_inputs_move(make_case, engine):
    """Of four layers the inputs of the first three, (2, 16, 32) floats, once there and once back."""
    case = make_case("llama")
    handle = apply_plan(case.model, plan_blocks(case.model, "full_offload"))
    loss = case.loss_of(case.model, case.batch)
    assert engine.copies.log == [("out", 2 * 16 * 32 * 4)] * 3
    loss.backward()
    assert handle.runs.again == set(handle.plan.blocks)
    moved = engine.copies.log
    assert moved.count(("back", 2 * 16 * 32 * 4)) == len(moved) - 3 == 2  # the third had not left the device yet


def test_in_sublayers_two_inputs_of_a_layer_move(make_case, engine):
    """Of four layers those of attention and of the MLP, but for the last one: seven, and six back."""
    plain, case = train_step(make_case("llama")), make_case("llama")
    with apply_plan(case.model, plan_blocks(case.model, "full_tiled_offload:8")) as handle:
        found = train_step(case)
        assert handle.runs.again == set(handle.plan.blocks)
    assert found.keys() == plain.keys()
    assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in plain.items())
    moved = [("out", 2 * 16 * 32 * 4)] * 7, [("back", 2 * 16 * 32 * 4)] * 6
    assert engine.copies.log == [*moved[0], *moved[1]]


def test_layers_of_other_parts_recompute_as_a_whole(make_case, engine):
    """GPT-2 with dropout behind its MLP: one input a layer, and the bits of tiles."""
    steps = []
    for strategy in ("full_tiled:8", "full_tiled_offload:8"):
        case = make_case("gpt2")
        with apply_plan(case.model, plan_blocks(case.model, strategy)):
            steps.append(train_step(case))
    assert not different(*steps)
    assert len({size for _, size in engine.copies.log}) == 1
    assert sum(way == "out" for way, _ in engine.copies.log) == len(case.model.transformer.h) - 1


def test_a_frozen_input_stays(make_case, engine):
    """As under LoRA: nothing before the first layer trains, so autograd did not make its input."""
    expected = train_frozen(make_case("llama"))
    case = make_case("llama")
    with apply_plan(case.model, plan_blocks(case.model, "full_offload")):
        assert not different(train_frozen(case), expected)
    assert engine.copies.log.count(("out", 2 * 16 * 32 * 4)) == 2


def train_frozen(case):
    case.model.get_input_embeddings().weight.requires_grad_(False)
    case.loss_of(case.model, case.batch).backward()
    return {name: one.grad.clone() for name, one in case.model.named_parameters() if one.grad is not None}


class Square(nn.Module):
    """Saves its own output (tanh) and the input of a product; ``num_floats`` floats each."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


SIZE = 16
BYTES = SIZE * SIZE * 4


def chain(run, num_blocks, seed=0):
    """Blocks, and what they give one after the other."""
    torch.manual_seed(seed)
    blocks = [Square(SIZE) for _ in range(num_blocks)]
    x = torch.randn(SIZE, SIZE)
    for block in blocks:
        x = run(block, x, modules=[block])
    return blocks, x


def chain_gradients(num_blocks, seed=0):
    blocks, output = chain(keep, num_blocks, seed)
    output.sum().backward()
    return [block.weight.grad for block in blocks]


def test_each_storage_moves_once_though_two_blocks_save_it(engine):
    """tanh saves what it gives, and the next product the same: one copy. The last block's output stays."""
    chain(engine.run, 4)
    assert engine.copies.log == [("out", BYTES)] * 2
    # The batch stays; blocks 1 and 2 return what blocks 2 and 3 take; what block 3 took has not left: 4 never began.


def test_the_backward_is_one_block_ahead(engine):
    """Of five outputs the first three left; the third was still on its way when the backward came for it."""
    blocks, output = chain(engine.run, 5)
    events = engine.copies.log = []
    for index, block in enumerate(blocks):
        block.weight.register_hook(lambda gradient, index=index: events.append(index))
    output.sum().backward()
    back = ("back", BYTES)
    assert events == [4, back, 3, back, 2, 1, 0]


def test_what_left_is_freed_and_at_most_two_blocks_are_on_the_device(engine):
    alive = []

    class Wide(nn.Module):
        def forward(self, x):
            wide = x * 2
            alive.append(weakref.ref(wide.untyped_storage()))
            return (wide.exp() * wide).sum(0, keepdim=True).expand(SIZE, SIZE) * 1.0

    block, x = Wide(), torch.randn(SIZE, SIZE, requires_grad=True) * 1.0
    for _ in range(6):
        x = engine.run(block, x, modules=[block])
    gc.collect()
    sent = [torch.UntypedStorage._expired(cdata) for cdata in engine.copies.sent]
    assert len(sent) >= 8
    assert sum(not gone for gone in sent) <= 3  # those of one block, still under way
    for cdata in engine.copies.sent:
        torch.UntypedStorage._free_weak_ref(cdata)


def test_after_the_backward_nothing_is_held(engine):
    blocks, output = chain(engine.run, 5)
    output.sum().backward()
    del output
    gc.collect()
    assert not engine.known
    assert engine.in_flight is None
    assert sum(map(len, engine.unused.values())) == len(engine.copies.held)  # for the copies of the next step
    assert engine.last() is None
    assert all(block.weight.grad is not None for block in blocks)


def test_a_program_ahead_of_its_device_pins_no_more_memory(engine):
    """Torch's cache would: it gives a piece away again when the device is done with its copy."""
    pinned_so_far = []
    for _ in range(3):
        chain(engine.run, 5)[1].sum().backward()
        pinned_so_far.append(len(engine.copies.host))
    assert pinned_so_far[0] == pinned_so_far[2] > 0


def test_parameters_buffers_and_the_batch_stay(engine):
    norm = nn.BatchNorm1d(8)
    linear, batch = nn.Linear(8, 8), torch.randn(4, 8)
    model = nn.Sequential(linear, norm)
    y = engine.run(model, batch, modules=[model])
    engine.run(nn.Identity(), y, modules=[])
    # What BatchNorm saves: its input (4, 8), mean and inverse deviation (8,), and nothing that lives anyway.
    assert engine.copies.bytes_out == 4 * (4 * 8 + 8 + 8)


def test_small_storages_stay():
    engine = OffloadEngine(CPU, LateCopies(), smallest_bytes=BYTES + 1)
    _, output = chain(engine.run, 4)
    output.sum().backward()
    assert not engine.copies.log


def test_what_a_block_returns_stays_if_the_next_is_not_offloaded(engine):
    first, second, third = (Square(SIZE) for _ in range(3))
    y = engine.run(first, torch.randn(SIZE, SIZE), modules=[first])
    z = second(y)  # keeps y on the device, whatever the first block does
    engine.run(third, z, modules=[third])
    assert not engine.copies.log
    z.sum().backward()


def test_views_keep_their_strides_and_share_their_storage(engine):
    def function(x):
        y = x * 2
        halves = y.t()[1:], y[:, ::2]
        return halves[0].exp().sum() + (halves[1] ** 3).sum() + (y.to(torch.float64) ** 2).sum()

    def chained(x):
        first = engine.run(function, x, modules=[])
        second = engine.run(lambda f: f * f, first, modules=[])
        return second

    x = torch.randn(SIZE, SIZE)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    chained(leaves[0]).backward()
    (function(leaves[1]) ** 2).backward()
    assert engine.copies.bytes_out > 0
    assert torch.equal(*(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("between", [0, 3], ids=["at once", "with a forward between"])
def test_a_second_backward_through_the_same_graph(engine, between):
    blocks, output = chain(engine.run, 4)
    output.sum().backward(retain_graph=True)
    chain(engine.run, between)
    output.sum().backward()
    doubled = [2 * gradient for gradient in chain_gradients(4)]
    assert all(torch.equal(block.weight.grad, gradient) for block, gradient in zip(blocks, doubled, strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_and_then_their_backwards(engine, order):
    chains = [chain(engine.run, 4, seed) for seed in range(2)]
    for seed in order:
        blocks, output = chains[seed]
        output.sum().backward()
        expected = chain_gradients(4, seed)
        assert all(torch.equal(block.weight.grad, gradient) for block, gradient in zip(blocks, expected, strict=True))


def test_a_skip_connection_moves_once(engine):
    """What an early block gave is saved again by a late one."""

    def run(through):
        torch.manual_seed(0)
        blocks = [Square(SIZE) for _ in range(4)]
        early = x = through(blocks[0], torch.randn(SIZE, SIZE), modules=[blocks[0]])
        for block in blocks[1:]:
            x = through(block, x, modules=[block])
        x = through(lambda x, early: x * early, x, early, modules=[])
        through(nn.Identity(), x, modules=[]).sum().backward()
        return [block.weight.grad for block in blocks]

    assert all(map(torch.equal, run(engine.run), run(keep)))
    assert engine.copies.bytes_out == 4 * BYTES  # what four blocks gave, each once


def test_a_backward_that_was_given_up_frees_nothing_that_is_still_written_to(engine):
    class Stop(RuntimeError):
        pass

    def stop(gradient):
        raise Stop

    blocks = [Square(SIZE) for _ in range(5)]
    x = torch.randn(SIZE, SIZE)
    for index, block in enumerate(blocks):
        x = engine.run(block, x, modules=[block])
        if index == 3:
            x.register_hook(stop)
    with pytest.raises(Stop):
        x.sum().backward()
    del x
    _, output = chain(engine.run, 4)  # waits for what was under way: LateCopies checks that both ends still live
    output.sum().backward()
    assert not engine.copies.pending


def test_tensors_that_are_more_than_their_storage_stay(engine):
    def function(x):
        y = torch.view_as_complex(x * 2).conj()
        return torch.view_as_real((y * y).resolve_conj()).sum()

    leaves = [torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    first = engine.run(function, leaves[0], modules=[])
    engine.run(lambda x: x * x, first, modules=[]).backward()
    (function(leaves[1]) ** 2).backward()
    assert torch.equal(*(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_cpu_nothing_moves_and_one_warning_says_so(make_case, strategy):
    _warn_once_on_cpu.cache_clear()
    expected, case = train_step(make_case("vgg_small")), make_case("vgg_small")
    with apply_plan(case.model, plan_blocks(case.model, strategy)):
        with pytest.warns(UserWarning, match="offload: the model runs on a CPU") as caught:
            assert not different(train_step(case), expected)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = case.loss_of(case.model, case.batch)
    loss.backward()


def test_without_gradients_the_plan_is_ignored(make_case, engine):
    case = make_case("vgg_small")
    case.model.eval()
    expected = case.model(case.batch)
    with apply_plan(case.model, plan_blocks(case.model, "offload")), torch.no_grad():
        assert torch.equal(case.model(case.batch), expected)
    assert not engine.copies.log


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("run", [offload, RUN[Action.RECOMPUTE_OFFLOAD]], ids=STRATEGIES)
def test_on_an_accelerator(run):
    device = torch.accelerator.current_accelerator()
    size = int((SMALLEST_BYTES / 4) ** 0.5) + 1

    def gradients(run):
        torch.manual_seed(0)
        blocks = [Square(size).to(device) for _ in range(5)]
        x = torch.randn(size, size, device=device)
        for block in blocks:
            x = run(block, x, modules=[block])
        kept_bytes = torch.accelerator.memory_allocated()
        x.sum().backward()
        return [block.weight.grad for block in blocks], kept_bytes

    gradients(keep)  # the workspaces of cuBLAS stay
    (plain, plain_bytes), (moved, moved_bytes) = gradients(keep), gradients(run)
    assert all(map(torch.equal, plain, moved))
    assert moved_bytes < plain_bytes + sum(gradient.nbytes for gradient in plain)


def pinned(num_bytes):
    """What torch pins for a request (``CachingHostAllocator.h``)."""
    return 1 << (num_bytes - 1).bit_length()


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 2**20, 2**20 + 1, 2**21 - 1, 3 * 2**20, 50_331_649, 10**9])
def test_pieces_on_the_host_waste_at_most_an_eighth(num_bytes):
    sizes = pinned_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert all(sizes)
    assert sum(map(pinned, sizes)) <= num_bytes * 9 / 8
    assert len(sizes) <= 4


def test_what_leaves_is_pinned_in_such_pieces(engine):
    x = torch.randn(1000, requires_grad=True)
    first, second = (engine.run(lambda x: (x * 2).sin(), x, modules=[]) for _ in range(2))
    assert [len(memory) for memory in engine.copies.held] == [pinned(size) for size in pinned_sizes(4000)]
    (first + second).sum().backward()
    assert torch.equal(x.grad, 4 * (x * 2).cos())
