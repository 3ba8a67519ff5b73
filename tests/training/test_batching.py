"""The global batch is the only input: ranks, micro-batches and accumulation steps change nothing but rounding.

What they are held against is a plain torch loop that forwards the whole global batch at once.
"""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from samples import sample
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, default_collate
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, SampleKey, SampleOrder
from memsave_recipes.models.labels import MULTI, REGRESSION, LabelLoss, ProblemType, label_of
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.evaluation import evaluation_batches, gather_counted
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler

GLOBAL_BATCH_SIZE, SEED, WINDOW = 24, 3, 10
VOCABULARY, WIDTH, LONGEST_ROW, NUM_CLASSES, NUM_FEATURES = 32, 16, 24, 5, 12

# name: ranks, largest micro-batch
GEOMETRIES = {
    "1x24": (1, 24),
    "1x6x4": (1, 6),
    "1x5-uneven": (1, 5),
    "2x12": (2, 12),
    "2x3x4": (2, 3),
    "3x8": (3, 8),
    "4x2x3": (4, 2),
}


@dataclass(frozen=True)
class Points(Dataset):
    """Classification: every sample counts once."""

    unlabelled: frozenset[int]

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        random = torch.Generator().manual_seed(key.index)
        features = torch.randn(NUM_FEATURES, generator=random, dtype=torch.float64)
        label = torch.randint(NUM_CLASSES, (), generator=random)
        return _sample(key, features, label, self.unlabelled)


@dataclass(frozen=True)
class Rows(Dataset):
    """Language modelling: rows of 6 to 24 tokens, of which the last 30 to 100 % count."""

    unlabelled: frozenset[int]

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        random = torch.Generator().manual_seed(key.index)
        length = int(torch.randint(6, LONGEST_ROW + 1, (), generator=random))
        tokens = torch.randint(VOCABULARY, (length,), generator=random)
        num_masked = int(0.7 * length * torch.rand((), generator=random))
        labels = torch.where(torch.arange(length) < num_masked, IGNORED_LABEL, tokens)
        return _sample(key, tokens, labels, self.unlabelled)


@dataclass(frozen=True)
class Labelled(Dataset):
    """Points with labels of any problem type, as the data sets of the recipes make them."""

    problem_type: ProblemType
    unlabelled: frozenset[int] = frozenset()

    def label(self, index: int) -> Any:
        random = torch.Generator().manual_seed(1000 + index)
        if self.problem_type == REGRESSION:
            return float(torch.randn((), generator=random))
        drawn = torch.rand(NUM_CLASSES, generator=random)
        return (drawn > 0.6).nonzero().flatten().tolist() if self.problem_type == MULTI else int(drawn.argmax())

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        features = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(key.index), dtype=torch.float64)
        label = label_of(self.label(key.index), NUM_CLASSES, counted=key.counted)
        return {"inputs": features, "labels": torch.tensor(label), "index": key.index, "counted": key.counted}


def _sample(key: SampleKey, inputs: Tensor, labels: Tensor, unlabelled: frozenset[int]) -> dict[str, Any]:
    if not key.counted or key.index in unlabelled:
        labels = torch.full_like(labels, IGNORED_LABEL)
    return {"inputs": inputs, "labels": labels, "index": key.index, "counted": key.counted}


def _collate_rows(samples: list[dict[str, Any]]) -> Batch:
    """Pads to the longest row of the micro-batch, so that the shapes depend on the batch layout."""
    padding = {"inputs": 0, "labels": IGNORED_LABEL}
    padded = {
        name: pad_sequence([sample.pop(name) for sample in samples], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }
    return padded | default_collate(samples)


def _make_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, NUM_CLASSES))


def _make_language_model() -> nn.Module:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    shape = {"n_positions": LONGEST_ROW, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **dropouts, **ends))


def _classifier_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs = batch["inputs"].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), batch["labels"], reduction="sum")


def _language_model_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["inputs"], use_cache=False).logits[:, :-1]  # (B, T - 1, V)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def _count_labels(batch: Batch) -> Tensor:
    return (batch["labels"] != IGNORED_LABEL).sum()


def _count_shifted_labels(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


@dataclass(frozen=True)
class Work:
    """A data set and what is learned from it."""

    dataset: Callable[[frozenset[int]], Dataset]
    collate: Callable[[list[Any]], Batch]
    make_model: Callable[[], nn.Module]
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], Tensor]
    torchs_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    class_weights: tuple[float, ...] | None = None


def _labelled(loss: LabelLoss, torchs_mean: Callable[..., Tensor]) -> Work:
    return Work(
        partial(Labelled, loss.problem_type),
        default_collate,
        _make_regressor if loss.problem_type == REGRESSION else _make_classifier,
        lambda model, batch: loss.sum_of(model(batch["inputs"]), batch["labels"]),
        lambda batch: torch.tensor(len(batch["labels"])),
        torchs_mean,
        loss.class_weights,
    )


def _make_regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


CLASS_WEIGHTS = (0.5, 2.0, 1.0, 0.0, 3.3)
LABELLED = {
    "smoothed_and_weighted": _labelled(
        LabelLoss(label_smoothing=0.2, class_weights=CLASS_WEIGHTS),
        partial(F.cross_entropy, weight=torch.tensor(CLASS_WEIGHTS, dtype=torch.float64), label_smoothing=0.2),
    ),
    "several_labels": _labelled(
        LabelLoss(problem_type=MULTI),
        lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels.double()),
    ),
    "regression": _labelled(
        LabelLoss(problem_type=REGRESSION), lambda logits, labels: F.mse_loss(logits.squeeze(), labels.double())
    ),
}
WORKS = {
    **LABELLED,
    "classifier": Work(Points, default_collate, _make_classifier, _classifier_loss, _count_labels),
    "language_model": Work(Rows, _collate_rows, _make_language_model, _language_model_loss, _count_shifted_labels),
}
OPTIMIZERS = {
    "sgd": OptimizerArguments(optimizer="sgd", learning_rate=0.1, warmup_steps=5, max_grad_norm=0.3),
    "adamw": OptimizerArguments(
        optimizer="adamw", learning_rate=3e-3, weight_decay=0.1, warmup_steps=5, max_grad_norm=0.3
    ),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained; the batch layout is no part of it."""

    work: str = "language_model"
    optimizer: str = "sgd"
    num_samples: int = 480
    num_steps: int = 30
    dtype: torch.dtype = torch.float64
    unlabelled: frozenset[int] = frozenset()
    tells_what_counts: bool = True

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(num_samples=self.num_samples, global_batch_size=GLOBAL_BATCH_SIZE, seed=SEED)

    @property
    def dataset(self) -> Dataset:
        return WORKS[self.work].dataset(self.unlabelled)

    def make_model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return WORKS[self.work].make_model().to(self.dtype)


@dataclass
class Outcome:
    """What a run did on one rank: its first gradient and its final weights, by name, and figures for every step."""

    first_gradient: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    ids: list[list[int]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # the mean of every window
    num_all_reduces: int = 0


def train_plainly(accelerator: Accelerator, task: Task) -> Outcome:
    """The reference: the whole global batch in one forward, without anything of ours but the order of the samples."""
    work, optim, outcome = WORKS[task.work], OPTIMIZERS[task.optimizer], Outcome()
    model = task.make_model()
    optimizer = make_optimizer(optim, model)
    losses = []
    for step, (epoch, ids) in enumerate(task.order.steps(0, task.num_steps)):
        batch = work.collate([task.dataset[SampleKey(index, epoch)] for index in ids])
        if work.torchs_mean is not None:
            loss = work.torchs_mean(model(batch["inputs"]), batch["labels"])
        else:
            loss = work.loss_sum(model, batch) / work.count(batch).clamp(min=1)
        loss.backward()
        _note_gradient(outcome, model)
        # Linear warm-up, linear decay.
        warmup = optim.warmup_steps
        decay = (task.num_steps - step) / max(1, task.num_steps - warmup)
        learning_rate = optim.learning_rate * (step / warmup if step < warmup else decay)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        outcome.learning_rates.append(learning_rate)
        outcome.grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        outcome.ids.append(ids)
        losses.append(loss.item())
    windows = [losses[first : first + WINDOW] for first in range(0, task.num_steps, WINDOW)]
    outcome.losses = [sum(window) / len(window) for window in windows]
    outcome.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return outcome


def train(accelerator: Accelerator, task: Task, micro_batch_size: int, counts_all_reduces: bool = False) -> Outcome:
    """A recipe's loop over ``GlobalBatches``."""
    work, optim, outcome = WORKS[task.work], OPTIMIZERS[task.optimizer], Outcome()
    bare = task.make_model()
    optimizer = make_optimizer(optim, bare)
    scheduler = make_scheduler(optim, optimizer, task.num_steps)
    model, optimizer = accelerator.prepare(bare, optimizer)
    window = []
    with profile(activities=[ProfilerActivity.CPU]) if counts_all_reduces else nullcontext() as profiler:
        for batch in _global_batches(accelerator, task, micro_batch_size):
            for micro_batch in batch.forwards(model):
                loss_sum = work.loss_sum(model, micro_batch)
                batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
            _note_gradient(outcome, bare)
            outcome.learning_rates.append(scheduler.get_last_lr()[0])
            outcome.grad_norms.append(accelerator.clip_grad_norm_(model.parameters(), optim.max_grad_norm).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            outcome.ids.append(_counted_ids(batch))
            window.append(torch.as_tensor(batch.loss))
            if (batch.step + 1) % WINDOW == 0 or batch.step + 1 == task.num_steps:
                outcome.losses.append(accelerator.reduce(torch.stack(window).mean(), "sum").item())
                window = []
    if profiler is not None:
        outcome.num_all_reduces = sum(event.name == "c10d::allreduce_" for event in profiler.events())
    outcome.weights = {name: tensor.detach() for name, tensor in bare.state_dict().items()}
    return outcome


def _global_batches(accelerator: Accelerator, task: Task, micro_batch_size: int) -> GlobalBatches:
    work, dataset = WORKS[task.work], task.dataset
    weights = work.class_weights and [work.class_weights[dataset.label(index)] for index in range(task.num_samples)]
    return GlobalBatches(
        accelerator,
        dataset,
        order=task.order,
        layout=BatchLayout.of(GLOBAL_BATCH_SIZE, micro_batch_size, accelerator.num_processes),
        num_steps=task.num_steps,
        seed=SEED,
        count_valid=work.count if task.tells_what_counts else None,
        weights=weights,
        collate_fn=work.collate,
    )


def _note_gradient(outcome: Outcome, model: nn.Module) -> None:
    if not outcome.first_gradient:
        outcome.first_gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _counted_ids(batch: GlobalBatch) -> list[int]:
    both = (zip(part["index"].tolist(), part["counted"].tolist(), strict=True) for part in batch.micro_batches)
    return [index for index, counted in chain.from_iterable(both) if counted]


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def outcome_of(run_on_ranks: Callable[..., list[Any]]) -> Train:
    """``outcome_of(task)`` of the plain loop, ``outcome_of(task, "2x3x4", loop=train)`` of another, each run once."""

    @cache
    def run(task: Task, layout: str | None = None, loop: Train = train, **options: Any) -> Outcome:
        if layout is None:
            return run_on_ranks(partial(train_plainly, task=task), 1)[0]
        num_ranks, micro_batch_size = GEOMETRIES[layout]
        ranks = run_on_ranks(partial(loop, task=task, micro_batch_size=micro_batch_size, **options), num_ranks)
        assert all(largest_difference(rank.weights, ranks[0].weights) == 0 for rank in ranks)
        assert all(rank.losses == ranks[0].losses for rank in ranks)
        joined = [list(chain.from_iterable(step)) for step in zip(*(rank.ids for rank in ranks), strict=True)]
        return replace(ranks[0], ids=joined)

    return run


def largest_difference(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest element of each tensor, in the worst of them; NaN wins."""
    assert tensors.keys() == expected.keys()
    differences = [(tensors[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected]
    return torch.stack(differences).max().item()


def assert_same_run(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    assert outcome.ids == expected.ids
    assert outcome.learning_rates == expected.learning_rates
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert largest_difference(outcome.first_gradient, expected.first_gradient) <= tolerance
    assert largest_difference(outcome.weights, expected.weights) <= tolerance


OFTEN = [("classifier", "sgd", "2x12"), ("classifier", "adamw", "1x5-uneven"), ("classifier", "sgd", "1x24")]
OFTEN += [("language_model", "adamw", layout) for layout in ("1x6x4", "2x3x4", "3x8", "4x2x3")]


@pytest.mark.parametrize(("work", "optimizer", "layout"), sample(OFTEN, product(WORKS, OPTIMIZERS, GEOMETRIES)))
def test_any_batch_layout_trains_as_the_undivided_global_batch(
    outcome_of: Train, work: str, optimizer: str, layout: str
) -> None:
    task = Task(work=work, optimizer=optimizer)
    assert_same_run(outcome_of(task, layout), outcome_of(task), 1e-12)


@pytest.mark.parametrize(("num_samples", "layout"), [(101, "1x5-uneven"), (101, "2x3x4"), (7, "4x2x3")])
def test_three_epochs_train_every_sample_three_times(outcome_of: Train, num_samples: int, layout: str) -> None:
    steps_per_epoch = -(-num_samples // GLOBAL_BATCH_SIZE)
    task = Task(optimizer="adamw", num_samples=num_samples, num_steps=3 * steps_per_epoch)
    outcome = outcome_of(task, layout)
    assert Counter(chain.from_iterable(outcome.ids)) == dict.fromkeys(range(num_samples), 3)
    assert_same_run(outcome, outcome_of(task), 1e-12)


@pytest.mark.parametrize(("work", "layout"), [("classifier", "2x12"), ("language_model", "1x5-uneven")])
def test_labels_that_are_all_ignored(outcome_of: Train, work: str, layout: str) -> None:
    """Those of the first half of step 0, which is whole micro-batches and ranks, and of all of step 1."""
    permutation = Task(work=work).order.permutation(0)
    task = Task(
        work=work, optimizer="adamw", num_steps=5, unlabelled=frozenset([*permutation[:12], *permutation[24:48]])
    )
    outcome = outcome_of(task, layout)
    assert outcome.grad_norms[1] == 0
    assert all(tensor.isfinite().all() for tensor in outcome.weights.values())
    assert_same_run(outcome, outcome_of(task), 1e-12)


def test_without_a_count_every_sample_counts_once(outcome_of: Train) -> None:
    task = Task(work="classifier", num_samples=101, num_steps=5)
    assert_same_run(outcome_of(replace(task, tells_what_counts=False), "2x3x4"), outcome_of(task), 1e-12)


@pytest.mark.parametrize(
    ("work", "layout"),
    [
        ("smoothed_and_weighted", "1x5-uneven"),
        ("smoothed_and_weighted", "3x8"),
        ("several_labels", "3x8"),
        ("regression", "4x2x3"),
    ],
)
def test_losses_of_labels_are_torchs_own_mean_of_the_global_batch(outcome_of: Train, work: str, layout: str) -> None:
    """The last step of an epoch has 5 samples: uneven ranks, and padding."""
    task = Task(work=work, num_samples=101, num_steps=10, tells_what_counts=False)
    assert_same_run(outcome_of(task, layout), outcome_of(task), 1e-12)


@pytest.mark.parametrize("layout", ["2x12", "2x3x4"])
def test_gradients_are_reduced_once_a_step(outcome_of: Train, layout: str) -> None:
    task = Task(work="classifier", num_steps=WINDOW, tells_what_counts=False)
    outcome = outcome_of(task, layout, counts_all_reduces=True)
    # The gradients fill a single bucket of DDP; the one besides is that of the window's loss.
    assert outcome.num_all_reduces == task.num_steps + 1


def draw_in_every_forward(accelerator: Accelerator) -> list[float]:
    torch.manual_seed(os.getpid())  # what was drawn before must not matter
    batches = _global_batches(accelerator, Task(work="classifier", num_steps=3), 6)
    model = nn.Linear(1, 1)
    return [torch.rand(()).item() for batch in batches for _ in batch.forwards(model)]


def test_dropout_is_seeded_by_step_micro_batch_and_rank(run_on_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_on_ranks(draw_in_every_forward, 2)
    assert len({*first, *second}) == len(first) + len(second) == 2 * 3 * 2
    assert run_on_ranks(draw_in_every_forward, 2) == [first, second]


class ElevenPoints(Points):
    def __len__(self) -> int:
        return 11


def evaluate(accelerator: Accelerator) -> tuple[list[int], list[int]]:
    ids, labels = [], []
    for batch in evaluation_batches(accelerator, ElevenPoints(frozenset()), micro_batch_size=3):
        some_ids, some_labels = gather_counted(accelerator, batch["index"], batch["labels"])
        ids += some_ids.tolist()
        labels += some_labels.tolist()
    return ids, labels


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_evaluation_sees_every_sample_once(run_on_ranks: Callable[..., list[Any]], num_ranks: int) -> None:
    expected = {index: Points(frozenset())[SampleKey(index)]["labels"].item() for index in range(11)}
    for ids, labels in run_on_ranks(evaluate, num_ranks):
        assert len(ids) == 11
        assert dict(zip(ids, labels, strict=True)) == expected


@pytest.mark.parametrize(("layout", "parts"), [("1x6x4", 4), ("2x12", 2), ("2x3x4", 8)])
def test_batchnorm_says_what_is_not_the_same(layout: str, parts: int) -> None:
    assert notice_of(nn.BatchNorm1d(2), layout) == (
        f"note: 1 BatchNorm layers normalise each of {parts} micro-batches by itself, so other numbers of ranks or "
        "accumulation steps give another curve; --batchnorm global takes all of them together"
    )


def test_batchnorm_in_shards_is_not_advised_to_be_global() -> None:
    layer, layout = nn.BatchNorm1d(2), BatchLayout.of(GLOBAL_BATCH_SIZE, 12, 2)
    said = RunArguments(output_dir="", shard="full").notice(layer, layout)
    assert said is not None
    assert said.endswith("give another curve")


@pytest.mark.parametrize(
    ("layer", "layout"), [(nn.BatchNorm1d(2), "1x24"), (nn.SyncBatchNorm(2), "2x12"), (nn.LayerNorm(2), "2x3x4")]
)
def test_nothing_is_said_where_the_curve_is_the_same(layer: nn.Module, layout: str) -> None:
    assert notice_of(layer, layout) is None


def notice_of(layer: nn.Module, layout: str) -> str | None:
    num_ranks, micro_batch_size = GEOMETRIES[layout]
    cut = BatchLayout.of(GLOBAL_BATCH_SIZE, micro_batch_size, num_ranks)
    return RunArguments(output_dir="").notice(nn.Sequential(nn.Linear(2, 2), layer), cut)


@pytest.mark.parametrize(
    ("num_samples", "ranks", "micro_batch_size", "num_steps", "smallest"),
    [
        (48, 1, 8, 9, 8),
        (48, 1, 7, 9, 3),  # 24 = 7 + 7 + 7 + 3
        (49, 1, 8, 9, 1),  # one is left for the third step
        (49, 1, 8, 2, 8),  # which is never taken
        (50, 4, 6, 9, 1),  # 2 of 4 ranks have padding alone
        (5, 1, 24, 9, 5),  # there is only the last step
    ],
)
def test_the_smallest_micro_batch_is_that_of_the_run(num_samples, ranks, micro_batch_size, num_steps, smallest):
    order = SampleOrder(num_samples=num_samples, global_batch_size=GLOBAL_BATCH_SIZE, seed=SEED)
    layout = BatchLayout.of(GLOBAL_BATCH_SIZE, micro_batch_size, ranks)
    batches = GlobalBatches(None, None, order=order, layout=layout, num_steps=num_steps, seed=SEED)
    taken = [
        max(1, len(positions))
        for step in range(num_steps)
        for rank in layout.micro_batches(order.num_samples_in(step))
        for positions in rank
    ]
    assert batches.smallest_micro_batch == min(taken) == smallest
