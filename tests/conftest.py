"""Small models of every kind that the recipes train, with a batch and a loss for each; forked runs: ``nursery.py``;
finished runs as the comparison reads them, and a browser: ``finished_runs.py``."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ["COLUMNS"] = "120"  # of every table, whatever the terminal
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or to ask for a GPU would start CUDA, which no fork survives

from collections.abc import Callable
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # by which torch's cache of compiled kernels tells none apart
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{getuser()}_{capability}")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from memsave_recipes.core import progress
from memsave_recipes.core.costs import block_costs
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.models.image_classifiers import MODELS

sys.path.append(str(Path(__file__).parent))
pytest_plugins = ["nursery", "finished_runs", "cuda_devices"]


@dataclass(frozen=True)
class TimedOnce(DeviceInstruments):
    """Read seconds once: most tests look at bytes, and on a busy machine times are read until they agree."""

    repetitions: int = 1


progress.BAR_AFTER_S = 600  # a line that tells of slow work is not of a test on a busy machine
os.getloadavg = lambda: (0.0, 0.0, 0.0)  # nor is one that says how busy it is
TIMING = {name: getattr(block_costs, name) for name in ("DeviceInstruments", "AGREE")}
block_costs.DeviceInstruments, block_costs.AGREE = TimedOnce, float("inf")


@pytest.fixture(scope="session")
def kernels_can_be_compiled():
    """``torch.compile`` writes kernels with AVX2 or more, which torch hides where ATen is told to do without them."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("ATen runs without vector instructions: torch.compile's kernels are not built then")


@pytest.fixture
def timed_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read seconds as often as a run does."""
    for name, value in TIMING.items():
        monkeypatch.setattr(block_costs, name, value)


@dataclass
class Case:
    """A model in training mode, a batch, and the loss of one on the other."""

    model: nn.Module
    batch: Tensor
    loss_of: Callable[[nn.Module, Tensor], Tensor]


def _image_case(model: nn.Module, size: int) -> Case:
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 0, 3])

    def loss_of(model: nn.Module, images: Tensor) -> Tensor:
        output = model(images)
        return F.cross_entropy(getattr(output, "logits", output), labels)

    return Case(model.train(), images, loss_of)


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            num_labels=10,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def _resnet() -> nn.Module:
    """ResNet-50's blocks, at a quarter of their widths."""
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3], num_labels=10)
    )


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def _mixtral() -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=256, num_hidden_layers=4, use_cache=False, **shape))


def _language_case(model: nn.Module, length: int) -> Case:
    tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(1))
    return Case(model.train(), tokens, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)


def _build(name: str) -> Case:
    torch.manual_seed(0)
    if name == "vit":
        return _image_case(_vit(), 32)
    if name == "gpt2":
        return _language_case(GPT2LMHeadModel(GPT2Config(vocab_size=256, n_layer=4, n_head=4, n_embd=32)), 16)
    if name == "gpt2_124m":
        return _language_case(GPT2LMHeadModel(GPT2Config()), 32)
    if name == "llama":
        return _language_case(_llama(), 16)
    if name == "mixtral":
        return _language_case(_mixtral(), 16)
    if name == "resnet50":
        return _image_case(_resnet(), 32)
    return _image_case(MODELS[name](num_classes=10), 32)


@pytest.fixture(scope="session")
def build_case() -> Callable[[str], Case]:
    """As ``make_case``, for fixtures that outlive a test."""
    return _build


@pytest.fixture
def make_case() -> Callable[[str], Case]:
    """Builds the case of a model by its name, always with the same weights and batch."""
    return _build


@pytest.fixture(autouse=True)
def plans_ahead_for_eager_layers(request, monkeypatch):
    """Estimates for GPUs compile by default, which takes seconds each: only tests marked ``compiles_ahead`` do."""
    if request.node.get_closest_marker("compiles_ahead") is None:
        monkeypatch.setattr("memsave_recipes.core.planner.task.has_layers_to_compile", lambda model: False)
