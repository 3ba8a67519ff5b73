"""Optimizers that round: on parts of weights they make the bits of one rank, and their state moves between ranks."""

from functools import cache, partial
from itertools import product

import pytest
import torch
from samples import sample
from small_runs import WORLDS, Training, all_equal, checkpoints_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memsave_recipes.core.sharding import ShardGroups, whole
from memsave_recipes.core.sharding.tensors import norms_over_ranks
from memsave_recipes.core.step.memory import has_8bit_state
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import describe_state_in_shards, make_optimizer

STEPS, SAVED = 5, 3
OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1}
EIGHT_BIT = OptimizerArguments(optimizer="adamw_8bit", **OPTIONS)
STOCHASTIC = OptimizerArguments(optimizer="adamw_bf16", **OPTIONS)
SHAPES = [(40, 256), (64, 96), (50, 100), (5000,), (7, 3), (2, 2500), (5, 2**17)]
"""With rows that ranks do not divide, fewer than there are ranks, and more numbers than a slice of an update has."""
CUTS = [(2, "full"), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((3, "full"), (4, "2")))]


def stepped(optim, dtype, flag, accelerator):
    """Whole weights and states after three updates by the same gradients, whether whole or cut up over the ranks."""
    groups = ShardGroups.of(flag, accelerator.num_processes)
    mesh = None if groups is None else groups.mesh(accelerator.device)
    random = torch.Generator().manual_seed(1)

    def numbers(shape):
        tensor = torch.randn(shape, generator=random).to(dtype)
        placements = [] if mesh is None else [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    model = nn.ParameterList([nn.Parameter(numbers(shape)) for shape in SHAPES])
    optimizer = make_optimizer(optim, model, seed=3)
    for _ in range(3):
        for parameter in model:
            parameter.grad = numbers(parameter.shape)
        optimizer.step()
    states = [
        {name: whole(value) for name, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        for parameter in model
    ]
    weights = [whole(parameter.detach()) for parameter in model]
    return weights, states, describe_state_in_shards(optim, model)


def norms(flag, accelerator):
    """Over all ranks: of two tensors of which each rank has a row, and of one that the first rank has."""
    mesh = ShardGroups.of(flag, accelerator.num_processes).mesh(accelerator.device)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    tensors = [torch.tensor(rows) for rows in ([[3.0], [4.0]], [[0.0, 5.0], [12.0, 0.0]], [[7.0]])]
    parts = [distribute_tensor(tensor, mesh, placements, src_data_rank=None) for tensor in tensors]
    of_parts = torch.stack([torch.linalg.vector_norm(part.to_local()) for part in parts])
    return norms_over_ranks(of_parts, parts[0]).tolist()


@pytest.mark.parametrize(("num_ranks", "flag"), [(2, "full"), (4, "2")])
def test_norms_are_those_of_whole_tensors(run_on_ranks, num_ranks, flag):
    assert run_on_ranks(partial(norms, flag), num_ranks) == num_ranks * [[5.0, 13.0, 7.0]]


@pytest.mark.parametrize(("num_ranks", "flag"), CUTS)
def test_stochastic_rounding_draws_the_bits_of_one_rank(run_on_ranks, num_ranks, flag):
    one, states, _ = run_on_ranks(partial(stepped, STOCHASTIC, torch.bfloat16, "none"), 1)[0]
    for weights, found, _ in run_on_ranks(partial(stepped, STOCHASTIC, torch.bfloat16, flag), num_ranks):
        assert all(map(torch.equal, weights, one))
        assert all(map(all_equal, found, states))


@pytest.mark.parametrize(("num_ranks", "flag"), CUTS)
def test_whole_blocks_have_the_8_bits_of_one_rank(run_on_ranks, num_ranks, flag):
    pytest.importorskip("bitsandbytes")
    size = ShardGroups.of(flag, num_ranks).size
    one, states, line = run_on_ranks(partial(stepped, EIGHT_BIT, torch.float32, "none"), 1)[0]
    assert line is None
    large = [torch.empty(shape, device="meta") for shape in SHAPES if torch.Size(shape).numel() >= 4096]
    in_blocks = [has_8bit_state(tensor, size) for tensor in large]
    assert any(in_blocks)
    assert not all(in_blocks)
    for weights, found, line in run_on_ranks(partial(stepped, EIGHT_BIT, torch.float32, flag), num_ranks):
        for shape, ours, theirs, state, of_one in zip(SHAPES, weights, one, found, states, strict=True):
            is_large = torch.Size(shape).numel() >= 4096
            if is_large and not has_8bit_state(theirs, size):
                assert state["state1"].dtype == torch.float32
                assert (ours - theirs).abs().max() < 3 * 0.2 * OPTIONS["learning_rate"]
            else:
                assert torch.equal(ours, theirs)
                assert all(torch.equal(state[name], of_one[name]) for name in ("state1", "state2"))
                scales = {name: value for name, value in of_one.items() if name.startswith("absmax")}
                assert bool(scales) is is_large
                assert all(torch.equal(state[name][: len(value)], value) for name, value in scales.items())
        assert f"the state of {in_blocks.count(False)} of {len(large)} large weights stays in 32 bits" in line


def moments(training):
    """Of 8-bit AdamW, whole and dequantised, by parameter and number; and which of them are in 8 bits."""
    state, found, in_8_bits = training.optimizer.state, {}, set()
    for place, parameter in enumerate(training.model.parameters()):
        for number in "12":
            entry = state[parameter]
            value = whole(entry[f"state{number}"])
            if value.dtype == torch.uint8:
                in_8_bits.add((place, number))
                scales = whole(entry[f"absmax{number}"]).repeat_interleave(256)[: value.numel()]
                value = entry[f"qmap{number}"][value.int()] * scales.view_as(value)
            found[place, number] = value.clone()
    return found, in_8_bits


def train(folder, world, accelerator, *, loads):
    """Of a run that saves after some steps, or goes on from there: weights and moments there, weights at the end."""
    flag = WORLDS[world][1]
    training = Training(accelerator, "wide_gpt2", flag, dtype=torch.float32, optim=EIGHT_BIT, num_steps=STEPS)
    checkpoints = checkpoints_of(training, folder)
    if loads:
        checkpoints.resume()
    else:
        training.train(SAVED)
        checkpoints.save(SAVED, {})
    there = training.weights(), *moments(training)
    training.batches.begin_after(SAVED)
    return *there, training.train().weights()


@pytest.fixture(scope="module")
def saved(run_on_ranks, tmp_path_factory):
    """The folder of a run on such a world, and its figures; each run once."""

    def saved_on(world):
        folder = tmp_path_factory.mktemp("saved")
        return folder, run_on_ranks(partial(train, folder, world, loads=False), WORLDS[world][0])[0]

    return cache(saved_on)


@pytest.mark.parametrize(("before", "after"), sample([("2", "3")], product(("1", "2", "3", "2x2"), repeat=2)))
def test_state_in_8_bits_moves(run_on_ranks, saved, before, after):
    """What is in 8 bits before is the same after, in however many bits; what becomes 8 bits is rounded once."""
    pytest.importorskip("bitsandbytes")
    folder, (weights, of_moments, were_in_8_bits, at_end) = saved(before)
    assert were_in_8_bits
    for found in run_on_ranks(partial(train, folder, after, loads=True), WORLDS[after][0]):
        weights_found, moments_found, in_8_bits, at_end_found = found
        assert all_equal(weights_found, weights)
        assert moments_found.keys() == of_moments.keys()
        for key, value in of_moments.items():
            if key in were_in_8_bits or key not in in_8_bits:
                assert torch.equal(moments_found[key], value)
            else:
                assert (moments_found[key] - value).abs().max() <= 0.01 * value.abs().max()
        if before == after:
            assert in_8_bits == were_in_8_bits
            assert all_equal(at_end_found, at_end)
        assert all((at_end_found[name] - at_end[name]).abs().max() < 0.5 * OPTIONS["learning_rate"] for name in at_end)
