"""Compiled layers that nobody compiles to the end: what torch's compiler saves, takes and moves in a run."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.vit.modeling_vit import ViTLayer
from workloads import CPU, workload_of

from memsave_recipes.core.activations.compiled import Region
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.costs.compiled_layers import CompilerOfTarget
from memsave_recipes.core.costs.estimate import Estimator, cuda_kernels, cuda_workspace, fake_batch, fake_model
from memsave_recipes.core.costs.fake_step import FakeInstruments, SimulatedClock
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.plans import plan_for
from memsave_recipes.models.packed_attention import BY_DOCUMENT, Documents

WIDTH, LENGTH, BATCH = 64, 64, 6
RATIOS = (1, 0.7, 0.5, 0.3)
BF16 = torch.bfloat16
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
LAYERS = {
    "GPT-2": (GPT2Block, GPT2Config(n_embd=WIDTH, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "llama": (LlamaDecoderLayer, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "bert": (BertLayer, BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "vit": (ViTLayer, ViTConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "wide": (BertLayer, BertConfig(hidden_size=128, num_attention_heads=2, intermediate_size=256)),
}
SHAPES = {"wide": (2, 32, 128)}
"""In half precision weights of these layers are as large as what is computed from their input."""


class Layers(nn.Module):
    """Layers of a model of transformers, one after the other."""

    def __init__(self, name):
        super().__init__()
        kind, config = LAYERS[name]
        config._attn_implementation = "sdpa"
        more = {} if name in ("bert", "vit", "wide") else {"layer_idx": 0}
        self.layers = nn.ModuleList(kind(config, **more) for _ in range(2))
        if name == "llama":
            self.register_buffer("angles", torch.zeros(BATCH, LENGTH, WIDTH // 4))

    def forward(self, hidden):
        more = {"position_embeddings": (self.angles.cos(), self.angles.sin())} if hasattr(self, "angles") else {}
        for layer in self.layers:
            out = layer(hidden, **more)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


def loss_of(model, hidden):
    return model(hidden * 2).float().square().sum()


def traces_of(name, ratios, dtype):
    """The traces of a step, by ratio: as it runs, and as it is read on fake tensors."""
    torch.manual_seed(0)
    model, fake = Layers(name).train(), fake_model(partial(Layers, name)).train()
    hidden = torch.randn(SHAPES.get(name, (BATCH, LENGTH, WIDTH)))
    workload = workload_of(model, loss_of, hidden)
    plans = [plan_for(one, workload.stacks) for one in ("none", *(f"compiled:{ratio}" for ratio in ratios))]

    def forward():
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            return workload.forward()

    real = measure(replace(workload, forward=forward), plans, instruments=DeviceInstruments(CPU, repetitions=1))
    of_fake = workload_of(fake, loss_of, fake_batch(fake, {"hidden": hidden})["hidden"])
    read = Estimator(fake, find_target("cpu"), dtype).estimate(of_fake, plans)
    return [[(plan.ratios[0], trace) for plan, trace in one.traces if plan.ratios] for one in (real, read)]


def saved_bytes(trace):
    return sum({storage: size for part in trace.parts if part.block for storage, size in part.saved.items()}.values())


def peaks_bytes(trace):
    """The peak between each two boundaries, above what was there at the first one."""
    return [reading.peak_bytes - trace.memory[0].live_bytes for reading in trace.memory[1:]]


ROUNDING = 64
"""Bytes of numbers that autograd keeps."""
OF_OTHER_REUSE = 0.02 if torch.__version__ < "2.13" else 0.0
"""Of the peak: inductor lets freed buffers wait otherwise in torch 2.11."""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no kernels are built without AVX2")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "dtype", "ratios"),
    [
        ("vit", BF16, (0.5,)),
        *(pytest.param(name, dtype, RATIOS, marks=pytest.mark.slow) for name in LAYERS for dtype in (None, BF16)),
    ],
)
def test_bytes_are_those_of_a_run(name, dtype, ratios):
    real, read = traces_of(name, ratios, dtype)
    assert [ratio for ratio, _ in real] == [ratio for ratio, _ in read] == list(ratios)
    for (ratio, ran), (_, predicted) in zip(real, read, strict=True):
        assert saved_bytes(predicted) == saved_bytes(ran), ratio
        for found, peak in zip(peaks_bytes(predicted), peaks_bytes(ran), strict=True):
            assert abs(found - peak) <= max(ROUNDING, OF_OTHER_REUSE * peak), ratio


class GroupedLayer(nn.Module):
    """Attention with a mask, in which two heads of the query share a value, as Gemma 3 with images has it."""

    def __init__(self):
        super().__init__()
        self.project, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.register_buffer("mask", torch.zeros(LENGTH, LENGTH))

    def forward(self, hidden):
        query = self.project(hidden).view(1, LENGTH, 4, -1).transpose(1, 2)
        value = self.value(hidden).view(1, LENGTH, 2, -1).transpose(1, 2)
        value = value[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape)
        heads = F.scaled_dot_product_attention(query, query, value, attn_mask=self.mask)
        return hidden + heads.transpose(1, 2).reshape(hidden.shape)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GroupedLayer() for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_a_saved_view_has_its_own_form_in_the_backward():
    fake = fake_model(Grouped).train()
    hidden = fake_batch(fake, {"hidden": torch.zeros(1, LENGTH, WIDTH)})["hidden"]  # strides of a side of 1 are free
    workload = workload_of(fake, loss_of, hidden)
    plans = [plan_for("compiled:1", workload.stacks)]
    ((_, trace),) = Estimator(fake, find_target("a100"), BF16).estimate(workload, plans).traces
    assert saved_bytes(trace) > 0


class OfBytes(Target):
    """A card whose time is the bytes that fused kernels move."""

    def seconds(self, operation, dtype, flops, num_bytes, extent=0.0):
        return float(num_bytes) if operation is None else 0.0


CARD = OfBytes(**vars(find_target("h100")))
REAL = json.loads(Path("docs/results/triton_kernels.json").read_text(encoding="utf-8"))["rows"]
OF_THE_PAGE = {
    "GPT-2": (GPT2Block, GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "Llama 3.2 1B": (
        LlamaDecoderLayer,
        LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64
        ),
    ),
}


@pytest.mark.parametrize(("name", "most"), [("GPT-2", 175), ("Llama 3.2 1B", 205)])
def test_fused_kernels_move_the_bytes_that_the_real_compiler_counts(name, most):
    """Of a layer under bfloat16 autocast, forward and backward, with attention by document: 16 rows for an H100."""
    kind, config = OF_THE_PAGE[name]
    config._attn_implementation = BY_DOCUMENT
    rows, length = (16, 1024) if name == "GPT-2" else (8, 1024)
    layer = fake_model(lambda: kind(config, layer_idx=0)).train()
    clock, compiler = SimulatedClock(), CompilerOfTarget(CARD, partial(cuda_kernels, CARD))
    instruments = FakeInstruments(CARD.device, seconds_of=CARD.seconds, workspace_of=cuda_workspace, clock=clock)
    given = {"document_lengths": Documents(((length // 2, length // 2),) * rows)}

    def step(meter):
        meter.mark()
        out = Region(1.0).run(layer.forward, hidden, **given)
        meter.mark()
        out.sum().backward()
        meter.mark()

    with next(layer.parameters()).fake_mode:
        hidden = torch.empty(rows, length, config.hidden_size, requires_grad=True)
        if kind is LlamaDecoderLayer:
            given["position_embeddings"] = tuple(torch.empty(1, length, config.head_dim) for _ in range(2))
        with compiler.compiling(clock), cuda_kernels(CARD), torch.autocast("cpu", BF16, cache_enabled=False):
            _, *readings = instruments.read_memory(step)
    (real,) = REAL[name]
    weights = real["weights"] / hidden.numel()
    for reading, run in zip(readings, ("forward", "backward"), strict=True):
        counted = real[run]["read"] + real[run]["written"] + real[run]["of_weights"] * weights
        assert reading.seconds / hidden.numel() == pytest.approx(counted, rel=0.01)
    assert sum(reading.seconds for reading in readings) / hidden.numel() <= most
