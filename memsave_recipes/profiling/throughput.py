"""Throughput of training: samples, tokens and steps a second, and model FLOPs with their share of a device's peak.

Windows end where the loop reads a loss from the device, which waits for the device anyway. So the clock makes no step
wait, and the time between two such reads is that of the work in it. CUDA events at the same two places would measure
the same time.

The formulas are those of ``torch.utils.flop_counter``: matrix products, convolutions and attention, two operations a
multiply-add; causal attention counts in full and everything else for nothing, as in the model FLOPs utilisation of PaLM
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). Recomputation is no work of the model: neither an
activation checkpoint's second forward nor the scores that a fused attention computes again in its backward count. So
the count is the same under every plan.

Of flash-attn's own operators those of version 2 count. There and in torch's own operator of that kind each document of
a packed row counts by itself, as it is computed; in an estimate, which knows no lengths, each token counts as one of
the longest document.
Known limits: other kernels from outside torch (Triton) and grouped products count nothing.

Peaks are the dense rates of the vendors: where a data sheet gives those for 2:4 sparse factors, their half. Products of
half precision have sums in float32, as torch computes them. A device or precision that is not in the table has no
figure: nothing is guessed from relatives (an A10G is slower than an A10, a MIG slice than its device). GeForce and
workstation cards follow from their cores and clocks, but for those with a table of their own in a white paper or data
sheet.

NOTE [ rates of a card ]
1. float32: two operations a CUDA core and cycle, at the boost clock that NVIDIA states on the card's product page.
2. Tensor cores, with sums in float32: a multiple of that, the same for all cards of a family; GeForce cards have half
   the rate of a workstation card with as many cores. So in tables 1 to 3 of NVIDIA's white papers as others give them:
   Turing (developer.nvidia.com, "NVIDIA Turing Architecture In-Depth": RTX 2080 Ti 13.4 and 53.8, Quadro RTX 6000 16.3
   and 130.5), GA102 (thegamesmachine.it, "GeForce RTX 3080": 29.8 and 59.5; RTX A6000: 154.8), Ada (RTX 4090: 82.6 and
   165.2; RTX 6000 Ada: 364) and RTX Blackwell (RTX 5090: 209.5; RTX PRO 6000: 503.8). Cores, clocks and memory of the
   other cards are not compared with a page; for RTX PRO 4500 others state 2,617 MHz as well.
3. float64: 1/32 on Turing, 1/64 since.
4. Memory as torch finds it is less than the box says; the driver keeps a part: ``KEPT_BY_DRIVER_GIB`` is an assumption.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.nn.attention.varlen  # registers torch_attn's operators
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

T = TypeVar("T")


@dataclass
class _Tally:
    steps: int = 0
    samples: int = 0
    tokens: Tensor | int = 0  # a sum on the device until a window ends
    seconds: float = 0.0
    waiting_seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        if not self.steps or not self.seconds:
            return {}
        tokens = {"tokens_per_sec": int(self.tokens) / self.seconds} if self.tokens else {}
        return {
            "samples_per_sec": self.samples / self.seconds,
            **tokens,
            "step_time_s": self.seconds / self.steps,
            "data_wait_pct": 100 * self.waiting_seconds / self.seconds,
        }


class StepClock:
    """Counts steps, samples and seconds since the warm-up, and since the last window.

    Args:
        warmup_steps: so many first steps are in no figure (compilation, caches, allocator growth).
        device: of the run; an accelerator still computes when a step has been queued.
    """

    def __init__(self, *, warmup_steps: int = 2, device: torch.device | str = "cpu") -> None:
        self._warmup_steps = warmup_steps
        self._device = torch.device(device)
        self._total = _Tally()
        self._window = _Tally()
        self._started = time.perf_counter()
        self._window_started = self._started
        self._paused_seconds = 0.0
        self._paused_since: float | None = None
        self._earlier_seconds = 0.0

    @property
    def train_time_s(self) -> float:
        """Seconds since the clock was made, and before a resume; with the warm-up, without the time ``paused``."""
        now = time.perf_counter() if self._paused_since is None else self._paused_since
        return self._earlier_seconds + now - self._started - self._paused_seconds

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run: the windows that have ended and the training time, as Python numbers."""
        return {**asdict(self._total), "train_time_s": self.train_time_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, after a warm-up of this process's own."""
        counted = dict(state)
        self._earlier_seconds = counted.pop("train_time_s")
        self._total = _Tally(**counted)

    def step(self, *, samples: int, tokens: Tensor | int = 0) -> None:
        """A step of ``samples`` samples and ``tokens`` valid tokens (over all ranks) has been queued."""
        if self._warmup_steps:
            self._warmup_steps -= 1
            if not self._warmup_steps:
                self.synchronize()  # warm-up must not run on into the window
            self._window_started = time.perf_counter()
            self._window.waiting_seconds = 0.0
            return
        self._window.steps += 1
        self._window.samples += samples
        self._window.tokens = self._window.tokens + tokens

    def end_window(self) -> dict[str, float]:
        """The figures since the last window ended (none during warm-up). Call it when the device is done."""
        now = time.perf_counter()
        self._window.seconds = now - self._window_started
        self._window.tokens = int(self._window.tokens)
        window, self._window, self._window_started = self._window, _Tally(), now
        if window.steps:
            self._total.steps += window.steps
            self._total.samples += window.samples
            self._total.tokens += window.tokens
            self._total.seconds += window.seconds
            self._total.waiting_seconds += window.waiting_seconds
        return window.figures()

    def figures(self) -> dict[str, float]:
        """The figures of all windows that have ended."""
        return self._total.figures()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches``, counting the time until each is there as waiting."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            batch = next(iterator, None)
            self._window.waiting_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def synchronize(self) -> None:
        """Wait for the steps that are queued. That is training time, also while the clock is paused."""
        if self._device.type == "cpu":
            return
        began = time.perf_counter()
        torch.accelerator.synchronize(self._device)
        if self._paused_since is not None:
            self._paused_since += time.perf_counter() - began

    @contextmanager
    def paused(self, *, synchronize: bool = False) -> Iterator[None]:
        """Inside, time does not count: evaluation, saving, an instrumented step.

        Args:
            synchronize: whether the code inside waits for the device, as an evaluation does, and so for earlier steps.
        """
        if synchronize:
            self.synchronize()
        self._paused_since = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - self._paused_since
            self._paused_since = None
            self._window_started += seconds
            self._paused_seconds += seconds


PCIE_3, PCIE_4, PCIE_5 = 15.75, 31.5, 63.0
"""GB/s of 16 lanes one way: 8, 16, 32 GT/s, 128 of 130 bits."""
KEPT_BY_DRIVER_GIB = 0.7

# Rates as multiples of float32's: rules 2 and 3 of NOTE [ rates of a card ].
GEFORCE_TURING = {"float64": 1 / 32, "float16": 4}
WORKSTATION_TURING = {"float64": 1 / 32, "float16": 8}
GEFORCE = {"float64": 1 / 64, "tf32": 1, "bfloat16": 2, "float16": 2}
WORKSTATION = {"float64": 1 / 64, "tf32": 2, "bfloat16": 4, "float16": 4}


@dataclass(frozen=True)
class Card:
    """A card, by the figures of its product page.

    Args:
        name: as ``torch.cuda.get_device_name`` calls it.
        multiples: rates as multiples of float32's, by precision.
        clock_mhz: boost clock.
        memory_gb_per_s: bandwidth of its memory.
        host_gb_per_s: of its link to the host, one way.
        memory_gb: on the box.
    """

    name: str
    multiples: Mapping[str, float]
    cores: int
    clock_mhz: int
    memory_gb_per_s: float
    host_gb_per_s: float
    memory_gb: int

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s by precision: NOTE [ rates of a card ]."""
        float32 = 2 * self.cores * self.clock_mhz / 1e6
        return {"float32": float32, **{name: float32 * multiple for name, multiple in self.multiples.items()}}

    @property
    def memory_gib(self) -> float:
        """As torch finds it."""
        return self.memory_gb - KEPT_BY_DRIVER_GIB


CARDS: dict[str, Card] = {
    "rtx2060": Card("NVIDIA GeForce RTX 2060", GEFORCE_TURING, 1920, 1680, 336, PCIE_3, 6),
    "rtx2060-12gb": Card("NVIDIA GeForce RTX 2060", GEFORCE_TURING, 2176, 1650, 336, PCIE_3, 12),
    "rtx2060super": Card("NVIDIA GeForce RTX 2060 SUPER", GEFORCE_TURING, 2176, 1650, 448, PCIE_3, 8),
    "rtx2070": Card("NVIDIA GeForce RTX 2070", GEFORCE_TURING, 2304, 1620, 448, PCIE_3, 8),
    "rtx2070super": Card("NVIDIA GeForce RTX 2070 SUPER", GEFORCE_TURING, 2560, 1770, 448, PCIE_3, 8),
    "rtx2080": Card("NVIDIA GeForce RTX 2080", GEFORCE_TURING, 2944, 1710, 448, PCIE_3, 8),
    "rtx2080super": Card("NVIDIA GeForce RTX 2080 SUPER", GEFORCE_TURING, 3072, 1815, 496, PCIE_3, 8),
    "rtx2080ti": Card("NVIDIA GeForce RTX 2080 Ti", GEFORCE_TURING, 4352, 1545, 616, PCIE_3, 11),
    "rtx3050": Card("NVIDIA GeForce RTX 3050", GEFORCE, 2560, 1777, 224, PCIE_4 / 2, 8),
    "rtx3060": Card("NVIDIA GeForce RTX 3060", GEFORCE, 3584, 1777, 360, PCIE_4, 12),
    "rtx3060-8gb": Card("NVIDIA GeForce RTX 3060", GEFORCE, 3584, 1777, 240, PCIE_4, 8),
    "rtx3060ti": Card("NVIDIA GeForce RTX 3060 Ti", GEFORCE, 4864, 1665, 448, PCIE_4, 8),
    "rtx3070": Card("NVIDIA GeForce RTX 3070", GEFORCE, 5888, 1725, 448, PCIE_4, 8),
    "rtx3070ti": Card("NVIDIA GeForce RTX 3070 Ti", GEFORCE, 6144, 1770, 608, PCIE_4, 8),
    "rtx3080": Card("NVIDIA GeForce RTX 3080", GEFORCE, 8704, 1710, 760, PCIE_4, 10),
    "rtx3080-12gb": Card("NVIDIA GeForce RTX 3080", GEFORCE, 8960, 1710, 912, PCIE_4, 12),
    "rtx3080ti": Card("NVIDIA GeForce RTX 3080 Ti", GEFORCE, 10240, 1665, 912, PCIE_4, 12),
    "rtx3090ti": Card("NVIDIA GeForce RTX 3090 Ti", GEFORCE, 10752, 1860, 1008, PCIE_4, 24),
    "rtx4060": Card("NVIDIA GeForce RTX 4060", GEFORCE, 3072, 2460, 272, PCIE_4 / 2, 8),
    "rtx4060ti": Card("NVIDIA GeForce RTX 4060 Ti", GEFORCE, 4352, 2535, 288, PCIE_4 / 2, 8),
    "rtx4060ti-16gb": Card("NVIDIA GeForce RTX 4060 Ti", GEFORCE, 4352, 2535, 288, PCIE_4 / 2, 16),
    "rtx4070": Card("NVIDIA GeForce RTX 4070", GEFORCE, 5888, 2475, 504, PCIE_4, 12),
    "rtx4070super": Card("NVIDIA GeForce RTX 4070 SUPER", GEFORCE, 7168, 2475, 504, PCIE_4, 12),
    "rtx4070ti": Card("NVIDIA GeForce RTX 4070 Ti", GEFORCE, 7680, 2610, 504, PCIE_4, 12),
    "rtx4070tisuper": Card("NVIDIA GeForce RTX 4070 Ti SUPER", GEFORCE, 8448, 2610, 672, PCIE_4, 16),
    "rtx4080": Card("NVIDIA GeForce RTX 4080", GEFORCE, 9728, 2505, 717, PCIE_4, 16),
    "rtx4080super": Card("NVIDIA GeForce RTX 4080 SUPER", GEFORCE, 10240, 2550, 736, PCIE_4, 16),
    "rtx5050": Card("NVIDIA GeForce RTX 5050", GEFORCE, 2560, 2572, 320, PCIE_5 / 2, 8),
    "rtx5060": Card("NVIDIA GeForce RTX 5060", GEFORCE, 3840, 2497, 448, PCIE_5 / 2, 8),
    "rtx5060ti": Card("NVIDIA GeForce RTX 5060 Ti", GEFORCE, 4608, 2572, 448, PCIE_5 / 2, 8),
    "rtx5060ti-16gb": Card("NVIDIA GeForce RTX 5060 Ti", GEFORCE, 4608, 2572, 448, PCIE_5 / 2, 16),
    "rtx5070": Card("NVIDIA GeForce RTX 5070", GEFORCE, 6144, 2512, 672, PCIE_5, 12),
    "rtx5070ti": Card("NVIDIA GeForce RTX 5070 Ti", GEFORCE, 8960, 2452, 896, PCIE_5, 16),
    "rtx5080": Card("NVIDIA GeForce RTX 5080", GEFORCE, 10752, 2617, 960, PCIE_5, 16),
    "titan-rtx": Card("TITAN RTX", WORKSTATION_TURING, 4608, 1770, 672, PCIE_3, 24),
    "quadro-rtx6000": Card("Quadro RTX 6000", WORKSTATION_TURING, 4608, 1770, 672, PCIE_3, 24),
    "quadro-rtx8000": Card("Quadro RTX 8000", WORKSTATION_TURING, 4608, 1770, 672, PCIE_3, 48),
    "rtx-a2000": Card("NVIDIA RTX A2000", WORKSTATION, 3328, 1200, 288, PCIE_4, 6),
    "rtx-a2000-12gb": Card("NVIDIA RTX A2000 12GB", WORKSTATION, 3328, 1200, 288, PCIE_4, 12),
    "rtx-a4000": Card("NVIDIA RTX A4000", WORKSTATION, 6144, 1560, 448, PCIE_4, 16),
    "rtx-a4500": Card("NVIDIA RTX A4500", WORKSTATION, 7168, 1650, 640, PCIE_4, 20),
    "rtx-a5000": Card("NVIDIA RTX A5000", WORKSTATION, 8192, 1695, 768, PCIE_4, 24),
    "rtx-a5500": Card("NVIDIA RTX A5500", WORKSTATION, 10240, 1665, 768, PCIE_4, 24),
    "rtx-a6000": Card("NVIDIA RTX A6000", WORKSTATION, 10752, 1800, 768, PCIE_4, 48),
    "rtx-2000-ada": Card("NVIDIA RTX 2000 Ada Generation", WORKSTATION, 2816, 2130, 256, PCIE_4 / 2, 16),
    "rtx-4000-ada": Card("NVIDIA RTX 4000 Ada Generation", WORKSTATION, 6144, 2175, 360, PCIE_4, 20),
    "rtx-4500-ada": Card("NVIDIA RTX 4500 Ada Generation", WORKSTATION, 7680, 2580, 432, PCIE_4, 24),
    "rtx-5000-ada": Card("NVIDIA RTX 5000 Ada Generation", WORKSTATION, 12800, 2550, 576, PCIE_4, 32),
    "rtx-6000-ada": Card("NVIDIA RTX 6000 Ada Generation", WORKSTATION, 18176, 2505, 960, PCIE_4, 48),
    "rtx-pro-4000": Card("NVIDIA RTX PRO 4000 Blackwell", WORKSTATION, 8960, 2055, 672, PCIE_5, 24),
    "rtx-pro-4500": Card("NVIDIA RTX PRO 4500 Blackwell", WORKSTATION, 10496, 2407, 896, PCIE_5, 32),
    "rtx-pro-5000": Card("NVIDIA RTX PRO 5000 Blackwell", WORKSTATION, 14080, 2377, 1344, PCIE_5, 48),
    "rtx-pro-6000": Card(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", WORKSTATION, 24064, 2617, 1792, PCIE_5, 96
    ),
}
"""By the word that ``--target`` takes; the larger memory of two variants is in the word, as ``rtx4060ti-16gb``."""


# Pattern of the whole device name: TFLOP/s by precision, with the vendor's page of it. Compared were, in place of these
# pages, documents that repeat their figures (2026-11):
# * P100 (SXM2), V100 (SXM2), T4, A30, A100, H100: xformers/profiler/device_limits.py;
# * V100, A10, A10G, A30, A40, L4, L40, L40S, H100 (PCIe): tensorrt_llm/auto_parallel/cluster_info.py (tensor cores);
# * H100, H200, B200, MI250X, MI300X: torchtitan/tools/utils.py (bfloat16); float32 of H100 (PCIe) and H200:
#   hmc-tech.com, "NVIDIA H100 vs NVIDIA H200 SXM vs NVIDIA GB200";
# * P100 (PCIe): tech4gamers.com, "Nvidia Tesla P100 will be available in two variants"; A2: hmc-tech.com, "NVIDIA A2 vs
#   NVIDIA A40"; A16: panchaea.com, "NVIDIA A16"; L40, L40S: mullet.se, their data sheet;
# * RTX 3090, 4090, 5090: what others quote of the white papers (NOTE [ rates of a card ], rule 2);
# * MI210: AnandTech, "AMD Releases Instinct MI210 Accelerator"; MI325X: awesomeagents.ai, "AMD Instinct MI325X";
#   RX 7900 XTX: Wikipedia, "RDNA 3", guru3d.com, "Radeon RX 7900 XT and XTX".
# Compared with nothing: float32 of A10G (others repeat A10's 31.2), H200 NVL, bfloat16 of RX 7900 XTX, and all but the
# tensor cores of H100 NVL, B200, MI250X and MI300X.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-SXM[23].*GB": {"float64": 7.8, "float32": 15.7, "float16": 125},
    "Tesla V100-PCIE.*GB": {"float64": 7, "float32": 14, "float16": 112},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    "Tesla T4": {"float32": 8.1, "float16": 65},
    # https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf
    "Tesla P100-SXM2-16GB": {"float64": 5.3, "float32": 10.6, "float16": 21.2},
    "Tesla P100-PCIE-16GB": {"float64": 4.7, "float32": 9.3, "float16": 18.7},
    # https://www.nvidia.com/content/dam/en-zz/solutions/data-center/a2/pdf/a2-datasheet.pdf
    "NVIDIA A2": {"float32": 4.5, "tf32": 9, "bfloat16": 18, "float16": 18},
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    "NVIDIA A10G": {"float32": 35, "tf32": 35, "bfloat16": 70, "float16": 70},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf
    "NVIDIA A10": {"float32": 31.2, "tf32": 62.5, "bfloat16": 125, "float16": 125},
    # https://images.nvidia.com/content/Solutions/data-center/vgpu/A16_Data_Sheet.pdf (one of its four GPUs)
    "NVIDIA A16": {"float32": 4.5, "tf32": 9, "bfloat16": 17.9, "float16": 17.9},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf
    "NVIDIA A30": {"float64": 10.3, "float32": 10.3, "tf32": 82, "bfloat16": 165, "float16": 165},
    # https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    "NVIDIA A40": {"float32": 37.4, "tf32": 74.8, "bfloat16": 149.7, "float16": 149.7},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe": {
        "float64": 19.5,
        "float32": 19.5,
        "tf32": 156,
        "bfloat16": 312,
        "float16": 312,
    },
    # https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf
    "NVIDIA GeForce RTX 3090": {"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71},
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": {"float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2},
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    "NVIDIA GeForce RTX 5090": {"float32": 104.8, "tf32": 104.8, "bfloat16": 209.5, "float16": 209.5},
    # https://www.nvidia.com/en-us/data-center/l4/ (tensor cores: sparse)
    "NVIDIA L4": {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/support-guide/NVIDIA-L40-Datasheet-January-2023.pdf
    "NVIDIA L40": {"float32": 90.5, "tf32": 90.5, "bfloat16": 181, "float16": 181},
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    "NVIDIA L40S": {"float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362},
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (tensor cores: sparse)
    "NVIDIA H100 80GB HBM3": {"float64": 67, "float32": 67, "tf32": 494.5, "bfloat16": 989.5, "float16": 989.5},
    "NVIDIA H100 PCIe": {"float64": 51, "float32": 51, "tf32": 378, "bfloat16": 756.5, "float16": 756.5},
    "NVIDIA H100 NVL": {"float64": 60, "float32": 60, "tf32": 417.5, "bfloat16": 835.5, "float16": 835.5},
    # https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    # (tensor cores: sparse)
    "NVIDIA H200": {"float64": 67, "float32": 67, "tf32": 494.5, "bfloat16": 989.5, "float16": 989.5},
    "NVIDIA H200 NVL": {"float64": 60, "float32": 60, "tf32": 417.5, "bfloat16": 835.5, "float16": 835.5},
    # https://resources.nvidia.com/en-us-blackwell-architecture/datasheet (one GPU of HGX B200; tensor cores: sparse)
    "NVIDIA B200": {"float64": 37, "float32": 75, "tf32": 1100, "bfloat16": 2250, "float16": 2250},
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi210.html
    "AMD Instinct MI210": {"float64": 45.3, "float32": 45.3, "bfloat16": 181, "float16": 181},
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html (torch sees its two dies as two devices)
    "AMD Instinct MI250X": {"float64": 47.9, "float32": 47.9, "bfloat16": 191.5, "float16": 191.5},
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "AMD Instinct MI300X": {"float64": 163.4, "float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4},
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html
    "AMD Instinct MI325X": {"float64": 163.4, "float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4},
    # https://www.amd.com/en/products/graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx.html
    "AMD Radeon RX 7900 XTX": {"float32": 61.4, "bfloat16": 122.8, "float16": 122.8},
}
for _card in CARDS.values():
    PEAK_TFLOPS.setdefault(re.escape(_card.name), _card.tflops)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s that the vendor states for a device, as ``torch.cuda.get_device_name`` calls it; ``None`` if unknown."""
    for pattern, rates in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, device_name):
            rate = rates.get(precision)
            return None if rate is None else rate * 1e12
    return None


def utilization_pct(flops_per_sec: Mapping[str, float], device_name: str) -> float | None:
    """The share of a device's peak that it reaches, in per cent; ``None`` where a peak is unknown.

    Args:
        flops_per_sec: of one device, by precision as ``ModelFlops.by_precision`` has them.
    """
    seconds = 0.0  # that a second's work takes at the peak
    for precision, flops in flops_per_sec.items():
        peak = peak_flops(device_name, precision)
        if peak is None:
            return None
        seconds += flops / peak
    return 100 * seconds if seconds else None


aten, torch_attn = torch.ops.aten, torch.ops.torch_attn
Formula = Callable[..., int]

FUSED_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",  # torch has no formula for this one and the next
    "fused_attention_overrideable",
)
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward}


def _without_scores(formula: Formula) -> Formula:
    """Four of the five products of a fused attention's backward; the other makes the scores of the forward again."""
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5


def _with_heads_of_query(formula: Formula, first: int) -> Formula:
    """The formula, told that keys and values have as many heads as the query; torch 2.11's fail where they share some.

    Args:
        first: the position of the query (B, H, T, D) among the arguments.
    """

    def counted(*args: Any, **kwargs: Any) -> int:
        query, *keys_and_values = args[first : first + 3]
        shapes = [torch.Size([*query.shape[:2], *states.shape[2:]]) for states in keys_and_values]
        return formula(*args[:first], query, *shapes, *args[first + 3 :], **kwargs)

    return counted


def _addmm(total: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """torch 2.13's own formula fails where the factors are rounded and their sum is not (``out_dtype``)."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; (B, T, H, D) all three."""
    batch, rows, heads = query.shape[:3]
    return _scores_and_values(batch * rows * key.shape[1], heads, query, value)


def _flash_attn_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    columns: Tensor,
    most_rows: int,
    most_columns: int,
    *_: Any,
    **__: Any,
) -> int:
    """The same for sequences that lie one after the other, (tokens, H, D), between the bounds ``rows``, ``columns``."""
    if isinstance(rows, FakeTensor):
        num_scores = len(query) * most_columns
    else:
        num_scores = int((rows.diff().long() * columns.diff().long()).sum())
    return _scores_and_values(num_scores, query.shape[1], query, value)


def _scores_and_values(num_scores: int, heads: int, query: Tensor, value: Tensor) -> int:
    return 2 * num_scores * heads * (query.shape[-1] + value.shape[-1])


def _formulas() -> dict[Any, Formula]:
    known: dict[Any, Formula] = dict(flop_registry) | {aten.addmm: _addmm}
    forward = _with_heads_of_query(known[aten._scaled_dot_product_flash_attention], first=0)
    backward = _with_heads_of_query(known[aten._scaled_dot_product_flash_attention_backward], first=1)
    for kernel in FUSED_ATTENTION:
        known[getattr(aten, f"_scaled_dot_product_{kernel}")] = forward
        known[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = backward
    known[torch_attn._varlen_attn] = _flash_attn_varlen
    known[torch_attn._varlen_attn_backward] = lambda *args, **_: 5 * _flash_attn_varlen(*args[1:4], *args[6:10]) // 2
    return known


FORMULAS_OF_ALL_THAT_RUNS = _formulas()
"""The scores that a fused attention computes a second time included."""

FORMULAS = {
    op: _without_scores(formula) if re.search("att(entio)?n.*backward", str(op)) else formula
    for op, formula in FORMULAS_OF_ALL_THAT_RUNS.items()
}

# flash-attn registers its operators when it is imported, which may be later than this. A backward takes, as that of
# torch's kernels, four products without the scores that it makes again; it is given ``dout, q, k, v, out, softmax_lse,
# dq, dk, dv`` and then the arguments of the forward after ``q, k, v``.
FORMULAS_BY_NAME: dict[str, Formula] = {
    "flash_attn._flash_attn_forward": _flash_attn,
    "flash_attn._flash_attn_varlen_forward": _flash_attn_varlen,
    "flash_attn._flash_attn_backward": lambda *args, **_: 2 * _flash_attn(*args[1:4]),
    "flash_attn._flash_attn_varlen_backward": lambda *args, **_: 2 * _flash_attn_varlen(*args[1:4], *args[9:13]),
}


def formula_of(operation: Any) -> Formula | None:
    """The formula of an operator, which takes the operator's arguments and its result as ``out_val``."""
    return FORMULAS.get(operation) or FORMULAS_BY_NAME.get(str(operation))


class ModelFlops(TorchDispatchMode):
    """``with ModelFlops() as counted: step()`` and then ``counted.by_precision``.

    ``by_precision`` holds the FLOPs by the precision of the factors: a dtype such as ``bfloat16``, or ``tf32`` where
    torch's settings let the device round float32 factors to that. Code runs slower in it, compiled code uncompiled.
    """

    supports_higher_order_operators = True  # flex attention

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.by_precision: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """FLOPs of all precisions."""
        return self.by_precision.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = getattr(func, "overloadpacket", func)
        formula = formula_of(operation)
        if formula is not None and not _recomputes():
            factor = args[1 if operation is aten.addmm else 0]
            self.by_precision[_precision(operation, factor)] += formula(*args, **kwargs, out_val=result)
        return result


def _precision(operation: Any, factor: Tensor) -> str:
    if factor.dtype == torch.float32 and factor.is_cuda and torch.version.hip is None:
        backends: Any = torch.backends
        settings = backends.cudnn.conv if operation in CONVOLUTIONS else backends.cuda.matmul
        if settings.fp32_precision == "tf32":
            return "tf32"
    return str(factor.dtype).removeprefix("torch.")


def _recomputes() -> bool:
    """Whether a checkpoint is running its function again: it does so while it unpacks a saved tensor."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(checkpoint):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
