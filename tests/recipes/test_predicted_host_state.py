"""``--offload_optimizer state``: a run's peak and the host's memory are predicted, whole and in shards."""

import json

import pytest
import torch
from lives import IMAGES, LENGTH, TEXT, end_of, launch, loaded, scratch, with_context
from samples import sample

from memsave_recipes.estimation.targets import find_target
from memsave_recipes.planner.budget import WORKSPACES, overheads_of_target
from memsave_recipes.step import host_state
from memsave_recipes.step.host_step import STAGED_BYTES
from memsave_recipes.text import GIB

CARD = "a100"  # at whose rates an unknown device is planned for
ON_HOST = ["--offload_optimizer", "state", "--max_steps", "3"]
WIDE = ["--config_overrides", "n_layer=4,n_head=2,n_embd=128"]
MODELS = {
    "gpt2": ["language_modeling", *TEXT, *WIDE],
    "llama": ["language_modeling", *TEXT, *scratch("llama")],
    "vit": ["image_classification", *IMAGES],
    "densenet": ["image_classification", "--model", "densenet_small", "--global_batch_size", "16", *LENGTH],
    "vgg": ["image_classification", "--model", "vgg_small_bn", "--global_batch_size", "16", *LENGTH],
}
OPTIMIZERS = {
    "adamw": [],
    "sgd": ["--optimizer", "sgd", "--momentum", "0.9"],
    "muon": ["--optimizer", "muon"],
    "bf16": ["--dtype", "bfloat16", "--bf16_stochastic_round"],
    "adafactor": ["--optimizer", "adafactor"],
    "in the backward": ["--optimizer_in_backward", "--max_grad_norm", "0"],
}
LAYOUTS = {"whole": [], "accumulated": ["--micro_batch_size", "2"]}
CASES = [
    (model, optimizer, layout)
    for model in MODELS
    for optimizer in OPTIMIZERS
    for layout in LAYOUTS
    if (optimizer, layout) != ("in the backward", "accumulated")
    if not (model in ("densenet", "vgg") and optimizer in ("muon", "bf16"))
]
FEW = [("gpt2", "adamw", "accumulated"), ("vgg", "sgd", "whole")]


@pytest.fixture
def recipe(request):
    """The recipe of the model."""
    with loaded(MODELS[request.getfixturevalue("model")][0]) as module:
        yield module


@pytest.fixture
def pinned(monkeypatch):
    """Bytes that are pinned for optimizer state, in slabs of 128 KiB, for pieces of 32 KiB."""
    monkeypatch.setattr(host_state, "PIECE_BYTES", 2**15)
    monkeypatch.setattr(host_state, "SLAB_BYTES", 2**17)
    sizes = []

    class Counting(host_state.SideStream):
        def empty_on_host(self, num_bytes):
            sizes.append(num_bytes)
            return super().empty_on_host(num_bytes)

    monkeypatch.setattr(host_state, "SideStream", Counting)
    return sizes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("model", "optimizer", "layout"), sample(FEW, CASES))
def test_peak_and_pinned_memory_are_predicted(train, pinned, model, optimizer, layout):
    plan = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", str(with_context(0.5))]
    memory = train(*MODELS[model][1:], *OPTIMIZERS[optimizer], *LAYOUTS[layout], *plan, *ON_HOST)["memory"]
    assert 0 <= memory["prediction_error_pct"] < (10 if optimizer == "in the backward" else 2)
    assert memory.get("predicted_host_gib", 0) * GIB == sum(pinned)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "offload"), [("multi_gpu", "state"), ("fsdp2", "state"), ("fsdp2", "step")])
def test_on_two_devices(on_devices, tmp_path, config, offload):
    plan = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "4", "--micro_batch_size", "2"]
    options = {"folder": tmp_path / "run", "common": MODELS["gpt2"][1:], "environment": on_devices(2)}
    flags = [*plan, *ON_HOST, "--offload_optimizer", offload]
    code, output = end_of(launch("language_modeling", config, *flags, **options))
    assert code == 0, output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    memory, moments = results["memory"], 8 * results["num_parameters"] // 2  # of a rank
    kept = (
        0 if config == "multi_gpu" else overheads_of_target(find_target(CARD))[WORKSPACES]
    )  # a stand-in keeps nothing
    peak, predicted = (round(memory[name] * GIB) for name in ("peak_allocated_gib", "predicted_peak_gib"))
    assert peak <= predicted - kept <= 1.02 * peak
    stepped = STAGED_BYTES + moments if offload == "step" else 0
    assert memory["predicted_host_gib"] * GIB == host_state.SLAB_BYTES + stepped
