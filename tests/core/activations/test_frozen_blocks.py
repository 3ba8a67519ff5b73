"""Blocks without a backward: K counts none of them, and no plan keeps anything for them."""

from itertools import product

import pytest
import torch
from samples import every_third
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from zoo.architectures import Architecture
from zoo.batches import image_and_text

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import make_plan
from memsave_recipes.core.plans import Action

LLAVA = Architecture("AutoModelForImageTextToText", "llava")


def all_but_adapters(model):
    """A stand-in for LoRA on the decoder: a weight in each of its layers trains."""
    model.requires_grad_(False)
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(True)


def last_layers(model):
    model.requires_grad_(False)
    model.model.language_model.layers[2:].requires_grad_(True)


FROZEN = {
    "tower": lambda model: model.model.vision_tower.requires_grad_(False),
    "all but adapters": all_but_adapters,
    "all but the last layers": last_layers,
    "layers of the tower, not what is before": lambda model: model.model.vision_tower.encoder.layers.requires_grad_(
        False
    ),
    "decoder, behind a projector that trains": lambda model: (
        model.requires_grad_(False) and model.model.multi_modal_projector.requires_grad_(True)
    ),
}


NUM_IDLE = {"all but the last layers": 6, "layers of the tower, not what is before": 0}


def saved_and_results(model, plan):
    """Of a step: the bytes that autograd saves beside weights, the loss and the gradients."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    torch.manual_seed(1)
    with apply_plan(model, plan) as handle, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**image_and_text()).loss
        loss.backward()
        handle.check_first_step(lambda line: pytest.fail(line))
    num_bytes = sum(one.untyped_storage().nbytes() for one in saved.values())
    return num_bytes, [loss.detach(), *(one.grad for one in model.parameters())]


@pytest.mark.parametrize(
    ("frozen", "strategy"), every_third(product(FROZEN, ["full", "segments:2", "nested:2", "every:2"]))
)
def test_a_plan_counts_blocks_with_a_backward_and_saves_memory(frozen, strategy):
    model = LLAVA.build()
    FROZEN[frozen](model)
    plan = make_plan(model, image_and_text(), strategy=strategy)
    idle = plan.blocks[: NUM_IDLE.get(frozen, 4)]
    assert len(plan.blocks) == 8
    if strategy != "full":
        assert set(idle) <= set(plan.blocks_under(Action.KEEP))
        others = len(plan.blocks) - len(plan.blocks_under(Action.KEEP))
        assert others == (8 - len(idle) if strategy == "nested:2" else (8 - len(idle)) // 2)
    plain_bytes, plain = saved_and_results(model, make_plan(model, strategy="none"))
    model.zero_grad()
    num_bytes, found = saved_and_results(model, plan)
    assert all(one is other or torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert num_bytes < 0.9 * plain_bytes


def test_blocks_that_the_user_names():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    model[:2].requires_grad_(False)
    plan = make_plan(model, torch.ones(2, 4), strategy="segments:2", blocks=[str(number) for number in range(4)])
    assert plan.recomputed == ("2",)


def test_where_nothing_has_a_backward_segments_are_refused():
    model = LLAVA.build().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(InputError, match="segments:2: no block of this model has a backward"):
        make_plan(model, image_and_text(), strategy="segments:2")


def test_the_forward_that_looks_for_backwards_saves_nothing():
    model = LLAVA.build()
    FROZEN["tower"](model)
    seen, alive = [], []
    for layer in model.model.language_model.layers:
        layer.mlp.act_fn.register_forward_hook(
            lambda module, args, out: seen.append(StorageWeakRef(out.untyped_storage()))
        )

    def loss_of(output):
        assert output.loss.requires_grad
        alive.extend(one for one in seen if not one.expired())
        return output.loss

    make_plan(model, image_and_text(), strategy="segments:2", loss_fn=loss_of)
    assert len(seen) == 4
    assert not alive
