"""Every plan has the gradients of no plan under the same shards: bit for bit, or within rounding."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_ranks import CPU, fake_ranks
from host_copies import LateCopies, moving_everything
from small_runs import LENGTH, Training, all_equal, largest_difference
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.tiled_attention import KeysSoFar
from memsave_recipes.core.activations.tiles import find_mlps
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES
from memsave_recipes.core.sharding import ShardGroups

LAYERS = ("full", "every:2", "segments:2", "segments:3", "nested:2", "selective")
SEQUENCES = ("full", "every:3", "segments:3", "nested:3", "selective")
TILES = ("full_tiled:8", "full_tiled_offload:8")


def gradients_under(kind, flag, strategies, accelerator, *, dtype=torch.float32, **options):
    """Of two accumulated micro-batches under each strategy, of this rank; and how many modules torch has cut up."""
    found = {}
    for strategy in strategies:
        training = Training(accelerator, kind, flag, strategy=strategy, dtype=dtype, global_batch_size=8, **options)
        batch = next(iter(training.batches))
        training.forward_and_backward(batch)
        units = sum(isinstance(module, FSDPModule) for module in training.trained.modules())
        buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
        found[strategy] = training.gradients(), batch.loss.item(), buffers, units
    return found


@pytest.mark.parametrize(
    ("kind", "flag", "num_ranks", "strategies"),
    [
        ("llama", "full", 2, LAYERS),
        ("vgg", "full", 2, SEQUENCES),
        pytest.param("gpt2", "full", 2, LAYERS, marks=pytest.mark.slow),
        pytest.param("densenet", "full", 2, (*SEQUENCES, "bottleneck"), marks=pytest.mark.slow),
        pytest.param("vit", "full", 2, LAYERS[:3], marks=pytest.mark.slow),
        pytest.param("llama", "2", 4, LAYERS, marks=pytest.mark.slow),
    ],
)
def test_bitwise(run_on_ranks, kind, flag, num_ranks, strategies):
    ranks = run_on_ranks(partial(gradients_under, kind, flag, ("none", *strategies)), num_ranks, timeout_s=200)
    for of_rank in ranks:
        gradients, loss, buffers, units = of_rank["none"]
        assert units > 3
        assert any(gradient.any() for gradient in gradients.values())
        for strategy in strategies:
            assert all_equal(of_rank[strategy][0], gradients), strategy
            assert all_equal(of_rank[strategy][2], buffers), strategy
            assert of_rank[strategy][1] == loss


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_within_rounding(run_on_ranks):
    function = partial(gradients_under, "llama", "full", ("none", "compiled:0.3"))
    for of_rank in run_on_ranks(function, 2, timeout_s=800):
        assert largest_difference(of_rank["compiled:0.3"][0], of_rank["none"][0]) < 1e-5


def offloading_under(kind, flag, accelerator):
    """The gradients of no plan and of plans that offload, and what these moved: in shards, and with whole weights."""
    found = {"none": (gradients_under(kind, flag, ("none",), accelerator)["none"], None, None)}
    for strategy in OFFLOADING_STRATEGIES:
        in_shards, whole = LateCopies(), LateCopies()
        with moving_everything(in_shards):
            (record,) = gradients_under(kind, flag, (strategy,), accelerator).values()
        with moving_everything(whole):
            gradients_under(kind, "none", (strategy,), accelerator)
        assert not in_shards.pending
        found[strategy] = record, in_shards.log, whole.log
    return found


@pytest.mark.parametrize(
    ("kind", "flag", "num_ranks"),
    [
        ("llama", "full", 2),
        ("vgg", "full", 2),
        pytest.param("gpt2", "full", 2, marks=pytest.mark.slow),
        pytest.param("densenet", "full", 2, marks=pytest.mark.slow),
        pytest.param("vit", "full", 2, marks=pytest.mark.slow),
        pytest.param("llama", "2", 4, marks=pytest.mark.slow),
    ],
)
def test_offloading_moves_what_it_moves_with_whole_weights(run_on_ranks, kind, flag, num_ranks):
    for of_rank in run_on_ranks(partial(offloading_under, kind, flag), num_ranks, timeout_s=200):
        (gradients, loss, buffers, _), _, _ = of_rank["none"]
        for strategy in OFFLOADING_STRATEGIES:
            (found, its_loss, its_buffers, _), in_shards, whole = of_rank[strategy]
            assert all_equal(found, gradients), strategy
            assert all_equal(its_buffers, buffers), strategy
            assert its_loss == loss
            assert in_shards == whole
            assert sum(size for way, size in in_shards if way == "out") > 0


def tiles_under(kind, flag, accelerator, **options):
    """``gradients_under`` plans with tiles; how often keys and values of a tile of queries came, and what moved."""
    calls, attend, copies = [], KeysSoFar.attend, LateCopies()
    KeysSoFar.attend = lambda *args, **words: calls.append(1) or attend(*args, **words)
    with moving_everything(copies):
        found = gradients_under(kind, flag, ("none", *TILES), accelerator, dtype=torch.float64, **options)
    return found, len(calls), copies.log


@pytest.mark.parametrize(
    ("kind", "flag", "num_ranks", "options"),
    [
        ("llama", "full", 2, {}),
        pytest.param("gpt2", "full", 2, {}, marks=pytest.mark.slow),
        pytest.param("tied_llama", "full", 2, {"loss": "chunked"}, marks=pytest.mark.slow),
        pytest.param("llama", "full", 2, {"lora": True}, marks=pytest.mark.slow),
        pytest.param("llama", "2", 4, {}, marks=pytest.mark.slow),
    ],
)
def test_tiles_are_within_rounding(run_on_ranks, kind, flag, num_ranks, options):
    for found, calls, moved in run_on_ranks(partial(tiles_under, kind, flag, **options), num_ranks, timeout_s=200):
        gradients, loss, _, units = found["none"]
        assert units > 3
        assert calls == 0
        for strategy in TILES:
            assert found[strategy][0].keys() == gradients.keys()
            assert largest_difference(found[strategy][0], gradients) < 1e-12, strategy
            assert found[strategy][1] == pytest.approx(loss, rel=1e-14)
        assert not all_equal(found[TILES[0]][0], gradients)  # they did run in tiles
        states = 2 * LENGTH * 16 * 8
        assert {size for way, size in moved if way == "out"} == {states}


def test_attention_runs_in_tiles(run_on_ranks):
    function = partial(tiles_under, "llama", "full", by_document=True)
    for found, calls, _ in run_on_ranks(function, 2, timeout_s=200):
        assert calls == 2 * 4 * 3 * LENGTH // 8  # micro-batches, layers, runs of each tile
        for strategy in TILES:
            assert largest_difference(found[strategy][0], found["none"][0]) < 1e-12, strategy


class Layer(nn.Module):
    """With a module that has the structure of an MLP."""

    def __init__(self, *, mixes):
        super().__init__()
        self.mlp = Mixing() if mixes else nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8))


class Mixing(nn.Module):
    """Adds to each token the mean of all."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x + x.mean(1, keepdim=True))))


@pytest.mark.parametrize("mixes", [False, True])
def test_an_mlp_is_found_before_its_weights_are_gathered(mixes):
    layer = Layer(mixes=mixes)
    assert len(find_mlps(layer)) == (not mixes)
    with fake_ranks(2):
        fully_shard(layer, mesh=ShardGroups.of("full", 2).mesh(CPU))
        state = torch.get_rng_state()
        assert [mlp.module for mlp in find_mlps(layer)] == ([] if mixes else [layer.mlp])
        assert torch.equal(torch.get_rng_state(), state)


class Counting(nn.Linear):
    """Counts its calls in what it ``holds``: a list, which a plan can put back, or an object."""

    def __init__(self, holds):
        super().__init__(8, 8)
        self.calls = holds(values=[]) if holds is SimpleNamespace else holds()

    def forward(self, x):
        getattr(self.calls, "values", self.calls).append(1)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["full", "segments:2"])
@pytest.mark.parametrize("holds", [list, SimpleNamespace])
def test_what_a_block_changes_beside_torchs_own_objects_is_seen(holds, strategy):
    model = nn.Sequential(*(Counting(holds) for _ in range(4)))
    plan = apply_plan(model, plan_blocks(model, strategy))
    with fake_ranks(2), plan:
        for module in (*model, model):
            fully_shard(module, mesh=ShardGroups.of("full", 2).mesh(CPU))
        if holds is list:
            model(torch.randn(2, 8)).sum().backward()
            assert [len(layer.calls) for layer in model] == [1] * 4
        else:
            with pytest.raises(InputError, match="Counting changes its calls in every forward"):
                model(torch.randn(2, 8)).sum().backward()
