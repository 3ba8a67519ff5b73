"""Linear layers that multiply in float8, by torchao, where a run measures that this is faster.

Each product scales its factors as a whole to float8 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). The
casts to it take time, which not every layer gains back. So a run times a layer of each shape before training, in float8
and in bfloat16. ``config.json`` keeps the ratios, by which a resumed run takes the same layers.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from memsave_recipes.core.activations.compiled import ALL, Region
from memsave_recipes.core.costs.preserve_state import hooked
from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch.distributed import on_main_process

FLOAT8 = "fp8"
MIN_WIDTH, MULTIPLE = 2048, 16  # of both sides of a layer's weight
MIN_TIMED_S = 0.2

Ratios = Mapping[str, float]
"""The time that layers take in float8 over that in bfloat16, by ``_shape``."""


def float8_recipe() -> AORecipeKwargs:
    """Have Accelerate's ``prepare`` put torchao's layers in the place of all wide ones; ``settle_float8`` drops some.

    A device without products in float8 computes what they would give.

    Raises:
        InputError: the launch names another backend, or torchao is not installed.
    """
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "AO").upper()
    if backend != "AO" or find_spec("torchao") is None:
        raise InputError(
            f"--mixed_precision fp8 with the backend {backend}: plans go around torchao's layers alone: pip install "
            "'memsave-recipes[fp8]', and launch with `--fp8_backend ao`"
        )
    from torchao.float8 import Float8LinearConfig  # optional

    has_products = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return AORecipeKwargs(config=Float8LinearConfig(emulate=not has_products), module_filter_func=is_wide)


def is_wide(layer: nn.Module, _: str = "") -> bool:
    """Return whether a linear layer is wide enough to be timed in float8, and has sizes that its products take."""
    sizes = layer.weight.shape if type(layer) is nn.Linear else (0,)
    return min(sizes) >= MIN_WIDTH and not any(size % MULTIPLE for size in sizes)


def settle_float8(accelerator: Accelerator, model: nn.Module, ratios: Ratios | None, *, compiles: bool) -> str:
    """Have ``accelerator.prepare`` take the wide layers that are faster in float8; return a line on them.

    Args:
        ratios: ``None``, where nothing was measured, takes all of them.
        compiles: whether the layers compute compiled.
    """

    def is_taken(layer: nn.Module, _: str = "") -> bool:
        return is_wide(layer) and (ratios is None or ratios.get(_shape(layer), inf) < 1)

    accelerator.ao_recipe_handler.module_filter_func = is_taken
    num_wide, num_taken = (sum(map(is_one, model.modules())) for is_one in (is_wide, is_taken))
    if not num_wide:
        return f"fp8: no linear layer has {MIN_WIDTH:,} inputs and outputs, so all multiply in bfloat16"
    times = [f"x{ratio:.2f} for {shape}" for shape, ratio in (ratios or {}).items()]
    measured = f"; time in float8 beside bfloat16: {', '.join(times)}" if times else ""
    hint = "" if num_taken or compiles else "; compiled layers may gain (--compile)"
    return f"fp8: {num_taken} of {num_wide} wide linear layers multiply in float8{measured}{hint}"


def measured_ratios(
    accelerator: Accelerator, model: nn.Module, forward: Callable[[], Tensor], *, compiles: bool
) -> dict[str, float]:
    """Time a layer of each shape on the first rank; return the same ratios on all ranks. It draws random numbers.

    Args:
        forward: of the largest micro-batch; it tells how many tokens the layers are given.
        compiles: whether the layers compute compiled.
    """
    layers = _wide_layers(model, forward)
    return on_main_process(
        accelerator, lambda: {shape: _ratio(accelerator, *layer, compiles) for shape, layer in layers.items()}
    )


def _shape(layer: Any) -> str:
    return f"{layer.in_features}x{layer.out_features}"


def _wide_layers(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, tuple[Any, int]]:
    """Return the first layer of each shape that runs, with the number of its tokens."""
    found: dict[str, tuple[Any, int]] = {}

    def note(layer: nn.Module, _: Any, outputs: Tensor) -> None:
        found.setdefault(_shape(layer), (layer, outputs.numel() // outputs.shape[-1]))

    wide = filter(is_wide, model.modules())
    with torch.no_grad(), hooked(layer.register_forward_hook(note) for layer in wide):
        forward()
    return found


def _ratio(accelerator: Accelerator, layer: Any, num_tokens: int, compiles: bool) -> float:
    """Time a new layer like ``layer`` in both ways."""
    from torchao.float8 import convert_to_float8_training  # optional

    in_16_bits = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, accelerator.device)
    in_16_bits.to(layer.weight.dtype).requires_grad_(layer.weight.requires_grad)
    in_8_bits = convert_to_float8_training(in_16_bits, config=accelerator.ao_recipe_handler.config)
    inputs = torch.randn(num_tokens, layer.in_features, device=accelerator.device, dtype=torch.bfloat16)
    steps = [_step(accelerator, one, inputs.requires_grad_(), compiles) for one in (in_8_bits, in_16_bits)]
    seconds = [seconds_of(step) for step in steps]
    return seconds[0] / seconds[1]


def _step(accelerator: Accelerator, layer: nn.Module, inputs: Tensor, compiles: bool) -> Callable[[], object]:
    run = partial(Region(ALL).run, layer.forward) if compiles else layer
    trained = [inputs, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]

    def step() -> object:
        with accelerator.autocast():
            outputs = run(inputs)
        return torch.autograd.grad(outputs, trained, torch.ones_like(outputs))

    return step


def seconds_of(step: Callable[[], object]) -> float:
    """Return the median after a first call, which may compile."""
    step()
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MIN_TIMED_S).median)
