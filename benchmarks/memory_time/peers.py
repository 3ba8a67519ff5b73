"""Methods of others: segments and compiler of torch, every block, every n-th, selected operators, ckptplan."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from models import CNNS, Work
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint_sequential

from memory_time.methods import (
    CKPTPLAN,
    EVERY_BLOCK,
    EVERY_NTH,
    SEGMENTS,
    SELECTIVE,
    SEQUENTIAL,
    WHOLE,
    Extent,
    Forward,
    Method,
    planned,
)
from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.activations.blocks import begins_in_place

_numbers = count()


def peers(work: Work, extent: Extent) -> Iterator[Method]:
    """What others offer; a language model's loss is plain's."""
    if work.name in CNNS:
        num_modules = len(_sequence(work.model))
        for k in (k for k in extent.segments if k <= num_modules):
            build = partial(_sequential, work, k)
            yield Method(series=SEQUENTIAL, name=f"{SEQUENTIAL}, k = {k}", build=build, num_segments=k)
        yield Method(series=CKPTPLAN, name=CKPTPLAN, build=partial(_ckptplan, work))
    else:
        for k in (k for k in extent.segments if k <= _num_blocks(work)):
            yield segments(work, k)
    yield Method(series=EVERY_BLOCK, name=EVERY_BLOCK, build=partial(planned, work, "full", "full"))
    for n in (n for n in extent.intervals if n <= _num_blocks(work)):
        yield Method(series=EVERY_NTH, name=f"every {n} blocks", build=partial(_every_nth, work, n))
    yield Method(series=SELECTIVE, name=SELECTIVE, build=partial(planned, work, SELECTIVE, "full"))
    for ratio in extent.ratios if work.name in extent.whole else ():
        build = partial(_whole, work, ratio)
        yield Method(series=WHOLE, name=f"{WHOLE}, {ratio}", build=build, is_compiled=True)


def segments(work: Work, k: int) -> Method:
    """Our segments, which are those of ``checkpoint_sequential`` with boundaries that are safe."""
    build = partial(planned, work, f"segments:{k}", "full")
    return Method(series=SEGMENTS, name=f"segments:{k}", build=build, num_segments=k)


def chunked_peers(work: Work) -> Iterator[Method]:
    """What others offer with our loss, to tell what the loss does from what the plan does."""
    for name, strategy in ((EVERY_BLOCK, "full"), (SELECTIVE, SELECTIVE)) if work.is_language_model else ():
        build = partial(planned, work, strategy, "chunked")
        yield Method(series=name, name=f"{name}, chunked loss", build=build, loss="chunked")


def _num_blocks(work: Work) -> int:
    return sum(len(names) for names in block_names(find_stacks(work.model)))


def _every_nth(work: Work, n: int) -> Forward:
    """As transformers does it, where it does."""
    if not getattr(work.model, "supports_gradient_checkpointing", False):
        return planned(work, f"every:{n}", "full")
    model = work.copy()
    (model.model if work.is_language_model else model).activation_checkpointing_enable(every_n_layers=n)
    return partial(work.loss_of, model)


def _sequence(model: Any) -> list[nn.Module]:
    """The convolutional part of a CNN as modules that take what the one before gave."""
    if hasattr(model, "features"):
        return list(model.features)
    return [model.resnet.embedder, *(layer for stage in model.resnet.encoder.stages for layer in stage.layers)]


def _with_what_follows_in_place(modules: list[nn.Module]) -> list[nn.Module]:
    """Each module together with the ReLU that overwrites what it gives."""
    groups: list[list[nn.Module]] = []
    for module in modules:
        if groups and begins_in_place(module):
            groups[-1].append(module)
        else:
            groups.append([module])
    return [nn.Sequential(*group) for group in groups]


def _run_instead(model: Any, run: Callable[[Tensor], Tensor]) -> None:
    """Let ``run`` take the place of that part."""
    if hasattr(model, "features"):
        model.features.forward = run
    else:
        pooler = model.resnet.pooler
        model.resnet.forward = lambda images, **_: SimpleNamespace(
            pooler_output=pooler(run(images)), hidden_states=None
        )


def _sequential(work: Work, k: int) -> Forward:
    model = work.copy()
    _run_instead(model, partial(checkpoint_sequential, _sequence(model), k, use_reentrant=False))
    return partial(work.loss_of, model)


def _whole(work: Work, ratio: float) -> Forward:
    """Compiled with its loss as one graph. Its code is its own: no guard of torch's knows the ratio."""
    model = work.copy()

    def loss_of_whole() -> Tensor:
        return work.loss_of(model)

    loss_of_whole.__code__ = loss_of_whole.__code__.replace(co_name=f"loss_of_whole_{next(_numbers)}")
    compiled = torch.compile(loss_of_whole, fullgraph=True)

    def forward() -> Tensor:
        with functorch_config.patch(activation_memory_budget=ratio):
            return compiled()

    return forward


def _ckptplan(work: Work) -> Forward:
    """Half of the activations that it measured."""
    import ckptplan  # optional

    model, images = work.copy(), work.batch["images"]
    stages = nn.ModuleList(_with_what_follows_in_place(_sequence(model)))
    blocks = ckptplan.declare_blocks(stages, [(f"stage {index}", stage) for index, stage in enumerate(stages)])
    profiles = ckptplan.profile_blocks(blocks, (images,), device=work.device, dtype=images.dtype)
    measured = sum(profile.activation_bytes_estimate or 0 for profile in profiles)
    plan = ckptplan.plan_checkpoints(
        profiles, blocks, target_kind="activation_budget_bytes", target_value=measured // 2
    )
    _run_instead(model, ckptplan.apply_plan(blocks, plan, (images,)).__call__)
    return partial(work.loss_of, model)
