"""Recomputed FLOPs are exactly those of the plan, and saved bytes fall by exactly what the plan gives up."""

import pytest
import torch
from samples import sample
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.core.plans import Action, Plan, Span


def step_flops(case, plan=None):
    handle = apply_plan(case.model, plan) if plan else None
    with FlopCounterMode(display=False) as counter:
        case.loss_of(case.model, case.batch).backward()
    if handle:
        handle.remove()
    return counter.get_total_flops()


def forward_flops(case):
    """Forward FLOPs of every module, by its name in the model."""
    with torch.no_grad(), FlopCounterMode(display=False, depth=99) as counter:
        case.loss_of(case.model, case.batch)
    root = type(case.model).__name__
    counts = {name.removeprefix(f"{root}."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return {name: counts.get(name, 0) for name, _ in case.model.named_modules()}


def blocks_of(case):
    return [block for stack in find_stacks(case.model) for block in stack.blocks]


def recomputed_flops(case, plan, *, tail):
    """What the plan says: the forward of every recomputed block, without the ``tail`` at the end of a span.

    torch stops a recomputation at the last tensor that the backward needs, and a convolution or linear layer needs no
    output of its own: one that ends a span does not run again.
    """
    flops = forward_flops(case)
    names = {module: name for name, module in case.model.named_modules()}
    total = 0
    for span in plan.spans:
        if span.action is not Action.RECOMPUTE:
            continue
        blocks = blocks_of(case)[span.start : span.stop]
        modules = [module for block in blocks for module in getattr(block, "modules", None) or [block.module]]
        total += sum(flops[names[module]] for module in modules) - tail(flops, names[modules[-1]])
    return total


def no_tail(flops, name):
    """The span ends with something that saves its output or a mask: ReLU, pooling, dropout."""
    return 0


def dense_tail(flops, name):
    """A dense layer ends with its second convolution."""
    return flops[f"{name}.conv2"] if "denselayer" in name else 0


def linear_tail(flops, name):
    """The head is a linear layer."""
    return flops[name] if name == "classifier.1" else 0


STRATEGIES = ["none", "full", "every:2", "every:3", "segments:1", "segments:2", "segments:3", "segments:4"]
MODELS = [
    *((name, no_tail) for name in ("vgg_small", "vit", "gpt2", "vgg16", "vgg16_bn")),
    *(("densenet_small", dense_tail), ("densenet121", dense_tail)),
    ("resnet50", linear_tail),
]
SLOW = ("vgg16", "vgg16_bn", "densenet121", "resnet50")


@pytest.mark.parametrize(("name", "tail"), sample([model for model in MODELS if model[0] not in SLOW], MODELS))
def test_recomputed_flops(make_case, name, tail):
    case = make_case(name)
    plain = step_flops(case)
    for strategy in STRATEGIES:
        plan = plan_blocks(case.model, strategy)
        expected = recomputed_flops(case, plan, tail=tail)
        assert step_flops(case, plan) - plain == expected, strategy
        assert (expected > 0) == bool(plan.recomputed), strategy


def test_recomputed_flops_by_hand(make_case):
    """Two segments of vgg_small: the first seven of its fifteen blocks are six convolutions and a pooling."""
    case = make_case("vgg_small")
    plan = plan_blocks(case.model, "segments:2")
    assert plan.blocks[6] == "features.11..12"
    batch, macs_at_32, macs_at_16 = 3, (3 * 16 + 3 * 16 * 16) * 9 * 32 * 32, (16 * 32 + 32 * 32) * 9 * 16 * 16
    assert step_flops(case, plan) - step_flops(case) == 2 * batch * (macs_at_32 + macs_at_16)


def test_the_bottleneck_of_densenet_recomputes_no_convolution(make_case):
    case = make_case("densenet_small")
    plan = plan_blocks(case.model, "bottleneck")
    assert len(plan.recomputed) == 12
    assert step_flops(case, plan) == step_flops(case)
    assert saved_bytes(case, plan) < saved_bytes(case)


def saved_bytes(case, plan=None):
    handle = apply_plan(case.model, plan) if plan else None
    with SavedTensors(case.model) as saved:
        loss = case.loss_of(case.model, case.batch)
    loss.backward()
    if handle:
        handle.remove()
    return saved.num_bytes


def storages_by_block(case):
    """For every block of a sequence, the storages that enter it and those that its plain forward saves."""
    (stack,) = find_stacks(case.model)
    state, rows, alive = (case.batch,), [], []
    for block in stack.blocks:
        entering = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state}
        with SavedTensors(case.model) as saved:
            state = block.run(*state)
        rows.append((entering, dict(saved.storages)))
        alive.append(state)
    with SavedTensors(case.model) as head:
        alive.append(case.model.classifier(_pool(case.model, state[0]).flatten(1)))
    return rows, dict(head.storages), alive


def _pool(model, maps):
    return model.avgpool(maps) if hasattr(model, "avgpool") else nn.functional.adaptive_avg_pool2d(maps.relu(), 1)


@pytest.mark.parametrize("name", sample(["vgg_small", "densenet_small"], ["vgg_small", "densenet_small", "vgg16"]))
def test_saved_bytes(make_case, name):
    case = make_case(name)
    plain = saved_bytes(case)
    rows, head, _alive = storages_by_block(case)
    kept = dict(head)
    for _, saved in rows:
        kept |= saved
    rest = plain - sum(kept.values())  # what the loss saves
    assert 0 <= rest < 2000
    for strategy in STRATEGIES:
        plan = plan_blocks(case.model, strategy)
        storages = dict(head)
        for span in plan.spans:
            if span.action is Action.RECOMPUTE:
                storages |= rows[span.start][0]
            else:
                for _, saved in rows[span.start : span.stop]:
                    storages |= saved
        assert saved_bytes(case, plan) == sum(storages.values()) + rest, strategy


def test_saved_bytes_of_transformer_layers(make_case):
    """With every layer recomputed, only what enters a layer is kept of it: one (B, T, D) float32 tensor."""
    case = make_case("gpt2")
    full, kept = saved_bytes(case, plan_blocks(case.model, "full")), saved_bytes(case)
    two = saved_bytes(case, plan_blocks(case.model, "every:2"))
    hidden_states = 2 * 16 * 32 * 4
    per_layer = (kept - two) / 2
    assert kept - full == 4 * per_layer
    assert per_layer > 5 * hidden_states
    segments = saved_bytes(case, plan_blocks(case.model, "segments:4"))
    assert segments == full + per_layer  # its last layer is kept
    one_span = Plan(
        strategy="one span",
        blocks=tuple(block_names(find_stacks(case.model))[0]),
        spans=(Span(start=0, stop=4, action=Action.RECOMPUTE),),
    )
    assert saved_bytes(case, one_span) == full - 3 * hidden_states
