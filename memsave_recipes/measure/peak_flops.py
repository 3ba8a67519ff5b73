"""The rates that vendors state for their devices, in TFLOP/s, and how much of them a run uses.

Dense rates: where a data sheet gives those for 2:4 sparse factors, their half. Products of half precision with sums in
float32, as torch computes them. A device or precision that is not here has no figure: nothing is guessed from relatives
(an A10G is slower than an A10, a MIG slice than its device).
"""

import re
from collections.abc import Mapping

# Pattern of the whole device name: TFLOP/s by precision.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-SXM[23].*GB": {"float64": 7.8, "float32": 15.7, "float16": 125},
    "Tesla V100-PCIE.*GB": {"float64": 7, "float32": 14, "float16": 112},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    "Tesla T4": {"float32": 8.1, "float16": 65},
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf
    "NVIDIA A10": {"float32": 31.2, "tf32": 62.5, "bfloat16": 125, "float16": 125},
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
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html (torch sees its two dies as two devices)
    "AMD Instinct MI250X": {"float64": 47.9, "float32": 47.9, "bfloat16": 191.5, "float16": 191.5},
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "AMD Instinct MI300X": {"float64": 163.4, "float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s that the vendor states for a device, as ``torch.cuda.get_device_name`` calls it; ``None`` if unknown."""
    for pattern, rates in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, device_name):
            rate = rates.get(precision)
            return None if rate is None else rate * 1e12
    return None


def utilization_pct(flops_per_sec: Mapping[str, float], device_name: str) -> float | None:
    """The share of its time that a device at its peak would need, in per cent; ``None`` where a peak is unknown.

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
