"""GeForce and workstation cards of NVIDIA by name, from RTX 20 on: rates, memory and the link to the host.

Cards with a table of their own in a white paper or data sheet stand in ``flops.py``.

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

from collections.abc import Mapping
from dataclasses import dataclass

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
