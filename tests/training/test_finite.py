"""Every rank says the same of a loss that is not finite on one."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.optimizers import NotFinite, StepLosses

BAD_STEPS = (1, 3)


class Rows(torch.utils.data.Dataset):
    def __getitem__(self, key):
        random = torch.Generator().manual_seed(key.index)
        return {"x": torch.randn(4, generator=random), "labels": torch.tensor(key.index % 3 if key.counted else -100)}


def train(accelerator, *, factor):
    """What is said of the steps, of which the last rank has bad ones."""
    torch.manual_seed(0)
    order = SampleOrder(num_samples=40, global_batch_size=8, seed=0)
    layout = BatchLayout.of(8, 2, accelerator.num_processes)
    batches = GlobalBatches(accelerator, Rows(), order=order, layout=layout, num_steps=5, seed=0)
    bare = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1, fused=True))
    losses = StepLosses(accelerator, order)
    is_spoilt = accelerator.process_index == accelerator.num_processes - 1
    for batch in batches:
        for micro_batch in batch.forwards(model):
            loss = F.cross_entropy(model(micro_batch["x"]), micro_batch["labels"], reduction="sum", ignore_index=-100)
            loss_sum = loss * factor if is_spoilt and batch.step in BAD_STEPS else loss
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.add(batch, norm)
    with pytest.raises(NotFinite) as said:
        losses.state_dict()
    return str(said.value)


@pytest.mark.parametrize("count", [1, 3])
def test_one_tensor_of_a_step_waits_until_its_losses_are_read(count):
    """Of many micro-batches, too: a prediction counts one."""
    losses = StepLosses(SimpleNamespace(), SampleOrder(num_samples=40, global_batch_size=8, seed=0))
    for step in range(2):
        parts = [torch.tensor(float(10 * step + number)) for number in range(count)]
        storages = [part.untyped_storage()._weak_ref() for part in parts]
        losses.add(SimpleNamespace(step=step, loss_parts=parts), None)
        del parts
        alive = [storage for storage in storages if not torch.UntypedStorage._expired(storage)]
        assert len(alive) == (1 if count == 1 else 0)
    assert losses.parts() == {(step, number): 10 * step + number for step in range(2) for number in range(count)}


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_every_rank_stops_with_the_same_words(run_on_ranks, factor):
    said = set(run_on_ranks(partial(train, factor=factor), 2))
    assert len(said) == 1
    assert said.pop().startswith(f"step 2 is not finite (loss {factor}, gradient norm nan), its samples are ")
