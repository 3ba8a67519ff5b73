"""What a layer moves besides its products, counted on fake tensors with CUDA's kernels, and its limits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from memsave_recipes.core.costs import estimate, fake_step
from memsave_recipes.core.costs.estimate import fake_model
from memsave_recipes.core.costs.fake_step import bytes_moved
from memsave_recipes.core.costs.repeats import Repeats
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.task import Estimates, Launch, choose_for_target
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import GIB
from memsave_recipes.tools.fit.recipe_task import read_task

RECIPE = Path(__file__).parents[3] / "recipes/language_modeling.py"
H100 = Launch(target=find_target("h100"), mixed_precision="bf16")
README = ("--model_type", "gpt2", "--block_size", "1024", "--global_batch_size", "64")
OF_LLAMA_1B = "hidden_size=2048,intermediate_size=8192,num_attention_heads=32,num_key_value_heads=8,head_dim=64"
LAYERS = {
    "gpt2": (768, 1024, "n_layer={}", 200, 900),
    "llama": (2048, 2048, f"{OF_LLAMA_1B},num_hidden_layers={{}}", 490, 600),
}
"""Width, tokens of a row, entries of the configuration; bytes a token and width, at most with and at least without."""
PRODUCTS = ("mm", "attention")


@pytest.fixture
def moved(monkeypatch):
    """The bytes that each operator of a layer's activations moves, products and attention left out."""
    found = []
    count = fake_step._Operators._counted

    def spy(self, func, args, kwargs, key, out):
        shapes = [leaf.shape for leaf in fake_step._tensors((args, kwargs, out))]
        computes = func._overloadpacket not in fake_step.NO_KERNEL and max(map(len, shapes), default=0) > 1
        if computes and not any(name in str(func) for name in PRODUCTS):
            found.append(bytes_moved(func, args, kwargs, out))
        return count(self, func, args, kwargs, key, out)

    monkeypatch.setattr(fake_step._Operators, "_counted", spy)
    monkeypatch.setattr(estimate, "find_repeats", lambda *args, **kwargs: Repeats(()))
    return found


def bytes_of_a_step(moved, name, num_layers, *flags):
    _, tokens, entries, *_ = LAYERS[name]
    changed = ("--config_overrides", f"{entries.format(num_layers)},vocab_size=512", "--block_size", str(tokens))
    task = read_task(RECIPE, ["--model_type", name, *changed, "--global_batch_size", "32", *flags])
    moved.clear()
    estimates = Estimates(task, H100)
    estimates.of(BatchLayout.of(32, None, 1), "full", lambda workload: [plan_for("none", workload.stacks)])
    return sum(moved)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_moves_little_besides_its_products(moved, name):
    width, tokens, _, most, least_without = LAYERS[name]

    def of_a_layer(*flags):
        steps = [bytes_of_a_step(moved, name, num_layers, *flags) for num_layers in (2, 3)]
        return (steps[1] - steps[0]) / (32 * tokens * width)

    assert of_a_layer() <= most
    assert of_a_layer("--fused_ops", "none") >= least_without


def test_the_launch_of_the_readme_is_bound_by_95_ms_and_8_5_gib():
    def planned(*flags):
        task = read_task(RECIPE, [*README, "--micro_batch_size", "16", *flags])
        (candidate, *_) = choose_for_target(task, replace(H100, by_data_sheet=True), 80 * GIB).candidates
        return candidate

    assert planned().step_s <= 0.095
    assert planned().peak_bytes <= 8.5 * GIB
    assert planned("--fused_ops", "none").step_s > 0.22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_is_one_kernel_that_saves_its_input_and_a_number_a_row(dtype):
    model = fake_model(lambda: torch.nn.Linear(8, 32, bias=False, dtype=dtype))
    mode = model.weight.fake_mode
    saved, called = [], []

    def keep(tensor):
        saved.append(tensor.shape)
        return tensor

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func._overloadpacket))
            return func(*args, **(kwargs or {}))

    with mode, estimate.cuda_kernels(H100.target):
        x, scale = torch.empty(64, 32, dtype=dtype, requires_grad=True), torch.ones(32, dtype=dtype, requires_grad=True)
        with Operators(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = F.rms_norm(x, (32,), scale, 1e-6)
            y.backward(torch.empty_like(y))
    assert (y.dtype, y.shape, x.grad.shape, scale.grad.shape) == (dtype, x.shape, x.shape, scale.shape)
    assert sorted(saved) == sorted([x.shape, (64, 1), scale.shape])
    assert [name for name in called if "norm" in name] == ["aten._fused_rms_norm", "aten._fused_rms_norm_backward"]
    assert not [name for name in called if "pow" in name or "mul" in name]
