"""``--bitwise_topology``: weights, optimizer state, losses and norms have the same bits on any number of ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, product
from math import ceil
from operator import add
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sample
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batching import GlobalBatches, exact_sum
from memsave_recipes.training.evaluation import evaluate_classifier, evaluation_batches
from memsave_recipes.training.exact.batch_layouts import IndexedLayout
from memsave_recipes.training.exact.reduction_tree import (
    MAX_SUBTREES,
    deal_subtrees,
    halves,
    join,
    largest_share,
    parent,
)
from memsave_recipes.training.exact.tree_sum import TreeSum
from memsave_recipes.training.optimizers import StepLosses, clip_gradients, make_optimizer

GLOBAL_BATCH_SIZE, NUM_STEPS = 24, 7
VOCABULARY, LENGTH = 32, 12
RANKS = (1, 2, 3, 4)

# The tree and who has which part of it


def tree(leaves: list[float]) -> float:
    """By its definition: of two halves, of which the left one may be longer by one."""
    if len(leaves) == 1:
        return leaves[0]
    middle = ceil(len(leaves) / 2)
    return tree(leaves[:middle]) + tree(leaves[middle:])


def nodes_of(node: range) -> list[range]:
    """With all below it."""
    return [node, *chain.from_iterable(map(nodes_of, halves(node)))] if len(node) > 1 else [node]


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_every_rank_has_whole_subtrees(num_ranks: int) -> None:
    for count in range(1, 65):
        dealt, nodes = deal_subtrees(count, num_ranks), nodes_of(range(count))
        assert sorted(chain.from_iterable(chain.from_iterable(dealt))) == list(range(count))
        assert count < num_ranks or all(dealt)
        for own in dealt:
            lengths = list(map(len, own))
            assert all(node in nodes for node in own)
            assert lengths == sorted(lengths, reverse=True)
            parents = [parent(node, count) for node in own if node != range(count)]
            assert len(set(parents)) == len(parents)


def test_a_short_step_leaves_ranks_without() -> None:
    assert deal_subtrees(0, 2) == [[], []]
    assert deal_subtrees(2, 3) == [[range(1)], [range(1, 2)], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 32])
def test_a_power_of_two_of_ranks_has_one_subtree_each(num_ranks: int) -> None:
    for count in range(num_ranks, 40 * num_ranks + 1):
        dealt = deal_subtrees(count, num_ranks)
        assert set(map(len, dealt)) == {1}
        assert largest_share(dealt) == ceil(count / num_ranks)


@pytest.mark.parametrize("num_ranks", range(1, 21))
def test_a_rank_has_at_most_three_subtrees_for_an_eighth_more_micro_batches(num_ranks: int) -> None:
    for count in range(1, 40 * num_ranks + 1):
        dealt, even = deal_subtrees(count, num_ranks), ceil(count / num_ranks)
        assert max(map(len, dealt)) <= MAX_SUBTREES == 3
        assert largest_share(dealt) <= even + even // 8
        assert largest_share(dealt) <= even + even // 32 or num_ranks > 8
        assert largest_share(dealt) == even or even > 10


def test_even_shares_are_exceeded_where_they_would_be_more_subtrees() -> None:
    shares = {num_ranks: largest_share(deal_subtrees(32 * num_ranks, num_ranks)) for num_ranks in (3, 7, 9)}
    assert shares == {3: 33, 7: 32, 9: 36}


def sums_on_ranks(leaves: list[float], num_ranks: int, *, from_the_last: bool = False) -> tuple[float, int]:
    """As ranks add them: each its own, then all together; and the most sums that a rank holds at once."""
    count, most, together = len(leaves), 0, {}
    for own in deal_subtrees(count, num_ranks):
        sums: dict[range, float] = {}
        indices = list(chain.from_iterable(own))
        for index in reversed(indices) if from_the_last else indices:
            most = max(most, len(sums) + 1)
            join(sums, range(index, index + 1), leaves[index], count, add)
        assert set(sums) == set(own)
        assert from_the_last or list(sums) == own
        for node, value in sums.items():
            join(together, node, value, count, add)
    (total,) = together.values()
    return total, most


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=40), st.integers(1, 9))
def test_any_number_of_ranks_adds_up_to_the_same_bits(leaves: list[float], num_ranks: int) -> None:
    total, most = sums_on_ranks(leaves, num_ranks)
    assert total == tree(leaves) == sums_on_ranks(leaves, num_ranks, from_the_last=True)[0]
    assert most <= largest_share(deal_subtrees(len(leaves), num_ranks)).bit_length()


def test_another_order_would_have_other_bits() -> None:
    leaves = [0.1 * one for one in range(1, 12)]
    assert sum(leaves) != tree(leaves) == sums_on_ranks(leaves, 3)[0]


@pytest.mark.parametrize(
    ("num_micro_batches", "num_ranks", "expected"),
    [
        *((4, 4, (0, True)), (4, 2, (1, True)), (4, 1, (2, True)), (3, 1, (1, False)), (6, 1, (2, False))),
        (5, 3, (1, True)),  # that of a rank with one waits for padding
        (11, 5, (1, False)),  # and here for two of it
        (5, 2, (1, False)),
        (10, 2, (2, True)),
    ],
)
def test_sums_that_wait_for_a_micro_batch(num_micro_batches: int, num_ranks: int, expected: tuple[int, bool]) -> None:
    assert IndexedLayout.of(num_micro_batches, 1, num_ranks).most_sums == expected


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7])
def test_micro_batches_are_the_same_on_any_number_of_ranks(size: int) -> None:
    for num_samples in range(1, GLOBAL_BATCH_SIZE + 1):
        expected = [range(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
        for num_ranks in RANKS[: ceil(GLOBAL_BATCH_SIZE / size)]:
            layout = IndexedLayout.of(GLOBAL_BATCH_SIZE, size, num_ranks)
            ranks = layout.micro_batches(num_samples)
            assert {len(rank) for rank in ranks} == {ceil(len(expected) / num_ranks)}
            taken = [positions for rank in ranks for positions in rank if positions]
            assert sorted(taken, key=lambda positions: positions.start) == expected
            assert layout.accumulation_steps == ceil(ceil(GLOBAL_BATCH_SIZE / size) / num_ranks)


def test_layouts_say_what_they_are() -> None:
    assert IndexedLayout.of(26, 4, 2).describe() == (
        "26 samples = 6 micro-batches of 4 + 1 of 2, on 2 ranks in 4 accumulation steps"
    )
    assert IndexedLayout.of(8, 8, 1).describe() == "8 samples = 1 micro-batch of 8, on 1 rank in 1 accumulation step"
    assert [layout.micro_batch_size for layout in IndexedLayout.of(9, None, 4).halvings] == [1, 2]
    with pytest.raises(InputError, match="makes 2 micro-batches of --global_batch_size 24, fewer than the 3 ranks"):
        IndexedLayout.of(24, 13, 3)


def test_a_sum_of_losses_is_rounded_once() -> None:
    values = [1e16, 1.0, -1e16, 1e-3]
    assert exact_sum(values) == exact_sum(reversed(values)) == 1.001
    assert exact_sum([1.0, float("inf")]) == float("inf")
    assert str(exact_sum([float("inf"), -float("inf")])) == "nan"


def test_a_parameter_without_a_gradient_counts_as_zeros() -> None:
    """That decides the sign of a zero: -0.0 + 0.0 is 0.0."""
    model, tree_sum = nn.ParameterList([torch.ones(1), torch.ones(1), torch.ones(1)]), TreeSum()
    tree_sum.begin(model, [[range(2)]])
    model[0].grad = torch.tensor([-0.0])
    tree_sum.take()
    model[1].grad = torch.tensor([-0.0])
    tree_sum.finish()
    gradients = [parameter.grad for parameter in model]
    assert [str(gradient.item()) for gradient in gradients[:2]] == ["0.0", "0.0"]
    assert gradients[2] is None


# Training


@dataclass(frozen=True)
class Rows(torch.utils.data.Dataset):
    """Rows of tokens, of which some do not count."""

    def __getitem__(self, key: Any) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(key.index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=random)
        num_masked = int(torch.randint(LENGTH - 2, (), generator=random)) if key.counted else LENGTH
        return {"inputs": tokens, "labels": torch.where(torch.arange(LENGTH) < num_masked, IGNORED_LABEL, tokens)}

    def __len__(self) -> int:
        return 11


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained; the number of ranks is no part of it."""

    optimizer: str = "adamw"
    micro_batch_size: int = 4
    num_samples: int = 4 * GLOBAL_BATCH_SIZE + 5
    dtype: torch.dtype = torch.float32
    autocasts: bool = False
    layout: type[BatchLayout] = IndexedLayout
    alone_in_ddp: bool = False


@dataclass
class Outcome:
    """All that must have the same bits."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[Any, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def make_model(run: Run) -> nn.Module:
    """GPT-2 with dropout."""
    torch.manual_seed(3)
    shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **shape)
    return GPT2LMHeadModel(config).to(run.dtype)


def loss_of(model: nn.Module, run: Run, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16) if run.autocasts else nullcontext():
        logits = model(batch["inputs"], use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def train(accelerator: Accelerator, run: Run) -> Outcome:
    """A recipe's loop."""
    optim = OptimizerArguments(optimizer=run.optimizer, learning_rate=0.01, max_grad_norm=0.5)
    bare = make_model(run)
    optimizer = make_optimizer(optim, bare)
    model, optimizer = accelerator.prepare(bare, optimizer)
    if run.alone_in_ddp:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(model)
    order = SampleOrder(num_samples=run.num_samples, global_batch_size=GLOBAL_BATCH_SIZE, seed=3)
    batches = GlobalBatches(
        accelerator,
        Rows(),
        order=order,
        layout=run.layout.of(GLOBAL_BATCH_SIZE, run.micro_batch_size, accelerator.num_processes),
        num_steps=NUM_STEPS,
        seed=3,
        count_valid=lambda batch: (batch["labels"][:, 1:] != IGNORED_LABEL).sum(),
    )
    losses = StepLosses(accelerator, order, exact=run.layout is IndexedLayout)
    outcome = Outcome()
    for batch in batches:
        for micro_batch in batch.forwards(model):
            loss = loss_of(model, run, micro_batch)
            batch.accelerator.backward(loss, gradient=batch.share_of(loss))
        norm = clip_gradients(optim, accelerator, model)
        optimizer.step()
        optimizer.zero_grad()
        losses.add(batch, norm)
        outcome.norms.append(norm.item())
    outcome.losses = losses.state_dict()["losses"]
    outcome.weights = {name: tensor.detach().clone() for name, tensor in bare.state_dict().items()}
    outcome.optimizer = optimizer.state_dict()["state"]
    return outcome


Train = Callable[[Run, int], Outcome]


@pytest.fixture(scope="module")
def trained(run_on_ranks: Callable[..., list[Any]]) -> Train:
    """The outcome on so many ranks, which all have the same; each run once."""

    @cache
    def on(run: Run, num_ranks: int) -> Outcome:
        ranks = run_on_ranks(partial(train, run=run), num_ranks)
        for other in ranks[1:]:
            assert differences(other, ranks[0]) == []
        return ranks[0]

    return on


def differences(outcome: Outcome, expected: Outcome) -> list[str]:
    """What has other bits."""
    named = zip(tensors_of(outcome).items(), tensors_of(expected).items(), strict=True)
    found = [name for (name, one), (_, other) in named if not torch.equal(one, other)]
    found += [name for name in ("losses", "norms") if str(getattr(outcome, name)) != str(getattr(expected, name))]
    return found


def tensors_of(outcome: Outcome) -> dict[str, Tensor]:
    states = [leaf for leaf in tree_leaves(outcome.optimizer) if isinstance(leaf, Tensor | int | float)]
    return outcome.weights | {f"state {number}": torch.as_tensor(state) for number, state in enumerate(states)}


RUNS = {
    "adamw": Run(),
    "sgd": Run(optimizer="sgd", micro_batch_size=5),
    "adamw_8bit": Run(optimizer="adamw_8bit"),
    "adafactor": Run(optimizer="adafactor", micro_batch_size=3),
    "muon": Run(optimizer="muon", micro_batch_size=3),
    "single samples": Run(micro_batch_size=1, num_samples=4 * GLOBAL_BATCH_SIZE + 16),  # 6, 6 and 4 on 3 ranks
    "autocast": Run(autocasts=True, micro_batch_size=3),
    "autocast sgd": Run(optimizer="sgd", autocasts=True),
    "bfloat16": Run(dtype=torch.bfloat16, micro_batch_size=5),
}


OFTEN = [("single samples", 3), ("bfloat16", 2)]


@pytest.mark.parametrize(("name", "num_ranks"), sample(OFTEN, product(RUNS, RANKS[1:])))
def test_the_bits_of_one_rank(trained: Train, name: str, num_ranks: int) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    outcome, expected = trained(RUNS[name], num_ranks), trained(RUNS[name], 1)
    assert len(outcome.losses) == len(outcome.norms) == NUM_STEPS
    assert outcome.optimizer
    assert differences(outcome, expected) == []


def test_ddp_on_one_rank_changes_no_bit(trained: Train) -> None:
    """Accelerate does not keep it from synchronising after every micro-batch."""
    assert differences(trained(Run(alone_in_ddp=True), 1), trained(Run(), 1)) == []


def test_without_the_flag_they_differ(trained: Train) -> None:
    usual = Run(layout=BatchLayout)
    assert "losses" in differences(trained(usual, 3), trained(usual, 1))


def evaluate(accelerator: Accelerator) -> dict[str, float]:
    model = make_model(Run())
    batches = evaluation_batches(accelerator, Rows(), 3, layout=IndexedLayout)
    last = [{"inputs": batch["inputs"], "labels": batch["labels"][:, -1]} for batch in batches]
    return evaluate_classifier(model, accelerator, last, logits_of=logits_of_last, with_f1=True, exact=True)


def logits_of_last(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["inputs"], use_cache=False).logits[:, -2]


def test_an_evaluation_has_the_same_figures(run_on_ranks: Callable[..., list[Any]]) -> None:
    expected = run_on_ranks(evaluate, 1)
    for num_ranks in RANKS[1:]:
        assert run_on_ranks(evaluate, num_ranks) == expected * num_ranks


def collectives_of_a_step(accelerator: Accelerator, micro_batch_size: int) -> list[str]:
    """Those that a step calls, without the count of labels."""
    run = Run(micro_batch_size=micro_batch_size)
    model = accelerator.prepare(make_model(run))
    layout = IndexedLayout.of(GLOBAL_BATCH_SIZE, micro_batch_size, accelerator.num_processes)
    order = SampleOrder(num_samples=run.num_samples, global_batch_size=GLOBAL_BATCH_SIZE, seed=3)
    batches = GlobalBatches(accelerator, Rows(), order=order, layout=layout, num_steps=1, seed=3)
    (batch,) = batches
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for micro_batch in batch.forwards(model):
            loss_sum = loss_of(model, run, micro_batch)
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
    names = (event.name for event in profiler.events())
    return [name.removeprefix("c10d::") for name in names if name.startswith("c10d::")]


@pytest.mark.parametrize(
    ("num_ranks", "micro_batch_size", "subtrees"), sample([(3, 4, 2)], [(2, 5, 1), (3, 4, 2), (3, 1, 3)])
)
def test_one_exchange_a_step(
    run_on_ranks: Callable[..., list[Any]], num_ranks: int, micro_batch_size: int, subtrees: int
) -> None:
    """There is one bucket; it goes once for every subtree of a rank, and the sum comes back."""
    step = partial(collectives_of_a_step, micro_batch_size=micro_batch_size)
    assert run_on_ranks(step, 1) == [[]]
    assert run_on_ranks(step, num_ranks) == [["alltoall_base_"] * (subtrees + 1)] * num_ranks
