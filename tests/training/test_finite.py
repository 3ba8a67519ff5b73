"""A loss that is not finite on one rank reaches no weight on any, and every rank says the same of it."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.step.update_rules import MuonWithAdamW, StochasticAdamW
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.optimizers import NonFiniteGuard, NotFinite, StepLosses

BAD_STEPS = (1, 3)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "muon": lambda parameters: muon_with_adamw(list(parameters)),
    "adamw_bf16": lambda parameters: StochasticAdamW(parameters, lr=0.1, weight_decay=0.0, seed=0),
}


def muon_with_adamw(parameters):
    matrices, others = ([p for p in parameters if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return MuonWithAdamW([{"params": matrices}], [{"params": others}], lr=0.1, weight_decay=0.0)


class Rows(torch.utils.data.Dataset):
    def __getitem__(self, key):
        random = torch.Generator().manual_seed(key.index)
        return {"x": torch.randn(4, generator=random), "labels": torch.tensor(key.index % 3 if key.counted else -100)}


def train(accelerator, *, optimizer, factor, skips):
    """Of every step whether it changed the model, its losses and what was said. The last rank has the bad ones."""
    torch.manual_seed(0)
    order = SampleOrder(num_samples=40, global_batch_size=8, seed=0)
    layout = BatchLayout.of(8, 2, accelerator.num_processes)
    batches = GlobalBatches(accelerator, Rows(), order=order, layout=layout, num_steps=5, seed=0)
    bare = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model, optimizer = accelerator.prepare(bare, OPTIMIZERS[optimizer](bare.parameters()))
    gate = NonFiniteGuard(accelerator, model, optimizer, skips=skips)
    losses = StepLosses(accelerator, order, skips=skips)
    is_spoilt = accelerator.process_index == accelerator.num_processes - 1
    changed, said = [], None
    for batch in batches:
        before = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
        for micro_batch in batch.forwards(model):
            loss = F.cross_entropy(model(micro_batch["x"]), micro_batch["labels"], reduction="sum", ignore_index=-100)
            loss_sum = loss * factor if is_spoilt and batch.step in BAD_STEPS else loss
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if gate.should_step(batch, norm):
            optimizer.step()
        optimizer.zero_grad()
        losses.add(batch, norm)
        changed.append(any(not torch.equal(before[name], tensor) for name, tensor in bare.state_dict().items()))
    try:
        state = losses.state_dict()
    except NotFinite as error:
        state, said = None, str(error)
    return changed, state, said


@pytest.mark.parametrize("count", [1, 3])
def test_one_tensor_of_a_step_waits_until_its_losses_are_read(count):
    """Of many micro-batches, too: a prediction counts one."""
    losses = StepLosses(SimpleNamespace(), SampleOrder(num_samples=40, global_batch_size=8, seed=0), skips=0)
    for step in range(2):
        parts = [torch.tensor(float(10 * step + number)) for number in range(count)]
        storages = [part.untyped_storage()._weak_ref() for part in parts]
        losses.add(SimpleNamespace(step=step, loss_parts=parts), None)
        del parts
        alive = [storage for storage in storages if not torch.UntypedStorage._expired(storage)]
        assert len(alive) == (1 if count == 1 else 0)
    assert losses.parts() == {(step, number): 10 * step + number for step in range(2) for number in range(count)}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_such_steps_change_nothing_on_any_rank(run_on_ranks, optimizer, factor, num_ranks):
    results = run_on_ranks(partial(train, optimizer=optimizer, factor=factor, skips=2), num_ranks)
    for changed, state, _ in results:
        assert changed == [step not in BAD_STEPS for step in range(5)]
        assert state["skipped_steps"] == 2
        assert len(state["losses"]) == 3
    assert len({str(state) for _, state, _ in results}) == 1


@pytest.mark.parametrize("skips", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whom_the_host_waits_for(optimizer, skips):
    """A norm without a value can be compared, but not read: what counts on the host has to know, if the run goes on."""
    stepped = OPTIMIZERS[optimizer]([nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))])
    guard = NonFiniteGuard(SimpleNamespace(scaler=None), nn.Linear(4, 4), stepped, skips=skips)
    waits = optimizer == "adafactor" or (optimizer == "adamw_bf16" and skips > 0)
    with pytest.raises(RuntimeError, match="meta") if waits else nullcontext():
        assert guard.should_step(None, torch.empty((), device="meta"))


def test_every_rank_stops_with_the_same_words(run_on_ranks):
    results = run_on_ranks(partial(train, optimizer="adamw", factor=float("nan"), skips=1), 2)
    said = {words for _, _, words in results}
    assert len(said) == 1
    assert said.pop().startswith("step 4 is not finite (loss nan, gradient norm nan), its samples are ")
