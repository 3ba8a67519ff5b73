"""The machine of a day: which devices it has, what it lacks, and the sizes of the runs on it."""

import importlib.util
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpu_day.claims import (
    BITSANDBYTES,
    CUDA,
    FLASH_3,
    FLOAT8,
    LIGER,
    NCCL,
    OWN_MEMORY,
    SHEET,
    TRITON,
    TRL,
    TWO_DEVICES,
    WAIT_WARNINGS,
    Command,
)
from gpu_day.waits import warns_of_waits
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.errors import InputError

GPU, STAND_IN, CPU = "gpu", "stand-in", "cpu"
TEXT, IMAGES = "recipes/language_modeling.py", "recipes/image_classification.py"
LAUNCHES = {True: ("cpu", "cpu_ddp", "cpu_fsdp2"), False: ("single_gpu", "multi_gpu", "fsdp2")}
LLAMA = "hidden_size={0},intermediate_size={1},num_hidden_layers={2},num_attention_heads={3},num_key_value_heads={3}"
LLAMA += ",vocab_size={4}"
GPT2 = "--model_type gpt2"
LLAMA_1B = (
    "--model_type llama --config_overrides hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=128256,tie_word_embeddings=true"
)
FEW_STEPS = "--max_steps 12 --logging_steps 4"
ROWS = "--block_size {} --global_batch_size {} --micro_batch_size {}"
PACKAGES = {
    TRITON: "triton",
    LIGER: "liger_kernel",
    BITSANDBYTES: "bitsandbytes",
    FLASH_3: "flash_attn_interface",
    FLOAT8: "torchao",
    TRL: "trl",
}
ON_GPUS_ALONE = {TRITON, LIGER, BITSANDBYTES, FLASH_3, FLOAT8}


def kind_of_machine(*, is_tiny: bool) -> str:
    """``GPU``, ``STAND_IN`` where ``STANDIN`` is set (``tests/standin``), or ``CPU``."""
    return CPU if is_tiny else STAND_IN if os.environ.get("STANDIN") else GPU


def abilities(kind: str) -> frozenset[str]:
    """What claims may need and this machine has."""
    found = {name for name, module in PACKAGES.items() if importlib.util.find_spec(module)}
    if kind != GPU:
        found -= ON_GPUS_ALONE
    there = {
        CUDA: kind != CPU,
        TWO_DEVICES: kind == CPU or torch.cuda.device_count() > 1,  # a CPU takes two processes
        NCCL: kind == GPU,
        OWN_MEMORY: kind == GPU,
        WAIT_WARNINGS: kind != CPU and warns_of_waits(),
        SHEET: kind == CPU or _has_sheet(),
    }
    return frozenset(found | {name for name, is_there in there.items() if is_there})


def _has_sheet() -> bool:
    with suppress(InputError):
        return bool(find_target("cuda"))
    return False


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of all runs, and how these are launched.

    Args:
        device: its type.
        launches: files of ``accelerate_configs/`` for one rank, for ranks with whole weights, and in shards.
        rows, digits: flags for the batches of texts and images.
        gpt2: the README's launch but for what is planned, which is ``launch_budget``. A user's is longer, and so it
            compiles, which ``--compile auto`` does not for ``FEW_STEPS``.
        gpt2_micro, gpt2_whole: its batch in several micro-batches, and in one.
        vocabularies: of a GPT-2, odd and padded.
        llama_1b: flags of a Llama of 1B.
        half: ``--mixed_precision`` where the loss is scaled; ``bf16`` everywhere else.
        too_large: flags of images that no device has memory for.
        length: flags for the steps of most runs.
        saves: the same for a run that is killed after its first checkpoint.
        proof: flags of ``ddp_equals_accumulation.py``.
        budgets: parts of plain's activations.
        cases, times: of the predictions, and how many times larger their micro-batches are than on a CPU.
    """

    device: str
    launches: tuple[str, str, str]
    llama: str
    rows: str
    gpt2: str
    launch_budget: str
    gpt2_micro: str
    gpt2_whole: str
    vocabularies: tuple[int, int]
    llama_1b: str
    convnet: str
    digits: str
    half: str
    too_large: str
    length: str
    saves: str
    proof: str
    strategies: tuple[str, ...]
    convnet_strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    budgets: tuple[float, ...]
    cases: int
    times: int
    is_small: bool

    @property
    def text_flags(self) -> str:
        """Of a Llama."""
        return f"--model_type llama --config_overrides {self.llama} {self.rows}"

    @property
    def image_flags(self) -> str:
        """Of a convolutional network."""
        return f"{self.convnet} {self.digits}"

    def text(self, name: str, flags: str, **others: Any) -> Command:
        """A run of the Llama; ``others`` are fields of the command."""
        return self.command(name, **{"words": f"{TEXT} {self.text_flags} {flags}", **others})

    def images(self, name: str, flags: str, **others: Any) -> Command:
        """The same of the convolutional network."""
        return self.command(name, **{"words": f"{IMAGES} {self.image_flags} {flags}", **others})

    def command(self, name: str, words: Any, **others: Any) -> Command:
        """A run of a recipe on one rank."""
        return Command(**{"name": name, "words": words, "launch": self.launches[0], "precision": "bf16", **others})


def size_of(kind: str) -> Size:
    """Small where there is no GPU."""
    launches = LAUNCHES[kind == CPU]
    if kind == GPU:
        return Size(
            device="cuda",
            launches=launches,
            llama=LLAMA.format(1024, 4096, 12, 16, 8192),
            rows=ROWS.format(1024, 32, 8),
            gpt2=f"{GPT2} --block_size 1024 --global_batch_size 64 {FEW_STEPS}",
            launch_budget=(
                "--micro_batch_size auto --activation_checkpointing budget --memory_budget_gib 22 --compile regions"
            ),
            gpt2_micro="--micro_batch_size 16",
            gpt2_whole="--micro_batch_size 64",
            vocabularies=(50_257, 50_304),
            llama_1b=f"{LLAMA_1B} --block_size 2048 --global_batch_size 32 --micro_batch_size 4 {FEW_STEPS}",
            convnet="--model densenet121 --image_size 128",
            digits="--global_batch_size 128",
            half="fp16",
            too_large="--model vgg16 --image_size 512 --global_batch_size 4096",
            length="--max_steps 24 --logging_steps 4",
            saves="--max_steps 40 --save_every 10",
            proof="",
            strategies=(
                *("full_tiled", "full", "segments:2", "selective"),
                *("offload", "full_offload", "full_tiled_offload", "compiled:0.5"),
            ),
            convnet_strategies=("full", "segments:2", "bottleneck"),
            offloads=("offload", "full_offload", "full_tiled"),
            budgets=(0.6, 0.4),
            cases=40,
            times=16,
            is_small=False,
        )
    small_rows = ROWS.format(128, 8, 4)
    return Size(
        device="cpu" if kind == CPU else "cuda",
        launches=launches,
        llama=LLAMA.format(64, 256, 4, 4, 512),
        rows=small_rows,
        gpt2=f"{GPT2} --config_overrides n_layer=2,n_head=2,n_embd=64,vocab_size=512 {small_rows} {FEW_STEPS}",
        launch_budget="--activation_checkpointing budget --memory_budget_gib 0.5"
        + (" --compile regions" if kind == CPU else ""),
        gpt2_micro="--micro_batch_size 4",
        gpt2_whole="--micro_batch_size 8",
        vocabularies=(517, 576),
        llama_1b=f"--model_type llama --config_overrides {LLAMA.format(64, 256, 2, 4, 512)} {small_rows} {FEW_STEPS}",
        convnet="--model densenet_small --image_size 16",
        digits="--global_batch_size 16",
        half="bf16" if kind == CPU else "fp16",
        too_large="--model vgg16 --image_size 320 --global_batch_size 384 --augmentation none",
        length="--max_steps 6 --logging_steps 2",
        saves="--max_steps 8 --save_every 2",
        proof="--max_steps 2 --micro_batch_size 6",
        strategies=("full_tiled", "full"),
        convnet_strategies=("bottleneck",),
        offloads=("full_offload",),
        budgets=(0.7,),
        cases=2,
        times=1,
        is_small=True,
    )
