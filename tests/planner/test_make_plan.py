"""A plan for a script's model: as it will train, whatever mode it was left in."""

import pytest
import torch
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.activations import apply_plan
from memsave_recipes.costs import DeviceInstruments
from memsave_recipes.planner import make_plan
from memsave_recipes.units import GIB

BUDGET_GIB = 0.06  # below plain's peak, above the smallest that works


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_layer=6, n_head=4, n_embd=128, use_cache=False)
    return GPT2LMHeadModel(config)


def step_bytes(model, batch):
    """What lives at the peak of the second step of AdamW, the model and the batch included."""
    optimizer = AdamW(model.parameters(), fused=True)

    def step(meter=None):
        model(**batch).loss.backward()
        if meter:
            meter.note()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rise = DeviceInstruments(torch.device("cpu")).read_memory(step)[-1].peak_bytes
    state = [tensor for one in optimizer.state.values() for tensor in one.values()]
    return rise + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *batch.values(), *state))


def test_a_model_in_evaluation_mode_is_planned_as_it_will_train(gpt2):
    tokens = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = make_plan(gpt2.eval(), batch, strategy="budget:bitwise", budget_gib=BUDGET_GIB)
    assert not any(module.training for module in gpt2.modules())
    with apply_plan(gpt2.train(), plan):
        assert step_bytes(gpt2, batch) <= BUDGET_GIB * GIB


def test_what_is_frozen_on_purpose_stays_so(gpt2):
    frozen = gpt2.transformer.h[0].eval()
    seen = []
    frozen.register_forward_pre_hook(lambda module, _: seen.append((module.training, gpt2.training)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    make_plan(gpt2, {"input_ids": tokens, "labels": tokens}, strategy="budget:bitwise", budget_gib=1)
    assert set(seen) == {(False, True)}
    assert not frozen.training
    assert gpt2.transformer.h[1].training
