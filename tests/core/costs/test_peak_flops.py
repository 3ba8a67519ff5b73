"""Utilisation against the vendors' rates; no figure where there is none."""

import pytest

from memsave_recipes.core.costs.throughput import PEAK_TFLOPS, peak_flops, utilization_pct

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        (H100, "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_known_rates(name, precision, tflops):
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A10M", "bfloat16"),
        ("NVIDIA GeForce RTX 2080 Ti", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("AMD EPYC 9654 96-Core Processor", "float32"),
    ],
)
def test_what_is_not_known_is_not_guessed(name, precision):
    assert peak_flops(name, precision) is None
    assert utilization_pct({precision: 1e12}, name) is None


def test_utilization():
    assert utilization_pct({"bfloat16": 0.4 * 989.5e12}, H100) == pytest.approx(40)


def test_a_mixture_needs_the_time_of_its_parts():
    halves = {"bfloat16": 0.25 * 989.5e12, "tf32": 0.25 * 494.5e12}
    assert utilization_pct(halves, H100) == pytest.approx(50)
    assert utilization_pct({**halves, "float8_e4m3fn": 1.0}, H100) is None


def test_nothing_counted_is_no_utilization():
    assert utilization_pct({}, H100) is None


@pytest.mark.parametrize("rates", PEAK_TFLOPS.values(), ids=list(PEAK_TFLOPS))
def test_narrower_factors_are_never_slower(rates):
    ordered = [rates[precision] for precision in ("float64", "float32", "tf32", "float16") if precision in rates]
    assert ordered == sorted(ordered)
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
