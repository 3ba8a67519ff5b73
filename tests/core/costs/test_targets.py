"""Targets: words for devices that need not be here, with the figures of their vendors."""

from types import SimpleNamespace

import pytest
import torch

from memsave_recipes.core.costs import targets
from memsave_recipes.core.costs.targets import find_target, host_memory_rate, known_targets, target_of
from memsave_recipes.core.costs.throughput import CARDS
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import GIB


@pytest.mark.parametrize("word", CARDS)
def test_every_card_is_a_device_whose_flops_are_known(word):
    target = find_target(word)
    assert target.device == torch.device("cuda")
    assert {"float32", "float16"} <= target.flops_per_s.keys()
    assert target.flops_per_s["float16"] >= target.flops_per_s["float32"] > target.bytes_per_s > target.host_bytes_per_s


def test_an_unknown_word_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match="target tpu") as refusal:
        find_target("tpu")
    assert all(word in str(refusal.value) for word in known_targets())


def test_short_words_in_any_case():
    assert find_target("A100").name == find_target("a100-80gb").name == "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("3060", "NVIDIA GeForce RTX 3060"),
        ("NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 3060 Ti"),
        ("rtx_4070_ti_super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("Tesla P100", "Tesla P100-PCIE-16GB"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
    ],
)
def test_names_as_people_write_them(word, name):
    assert find_target(word).name == name


def test_an_unknown_card_is_answered_with_the_nearest_spellings():
    with pytest.raises(InputError, match="did you mean rtx4070super"):
        find_target("rtx4070supr")


def test_figures_of_a_card_that_follow_from_its_cores_and_clock():
    """Sums in float32."""
    target = find_target("rtx3080")
    assert target.flops_per_s["float32"] == pytest.approx(29.8e12, rel=0.01)
    assert target.flops_per_s["tf32"] == pytest.approx(29.8e12, rel=0.01)
    assert target.flops_per_s["float16"] == pytest.approx(59.5e12, rel=0.01)
    assert target.bytes_per_s == 760e9
    assert find_target("rtx-a6000").flops_per_s["bfloat16"] == pytest.approx(154.8e12, rel=0.01)
    assert find_target("rtx2080").flops_per_s["float16"] == pytest.approx(40.3e12, rel=0.01)


# As core/costs/cards.json names them; TFLOP/s by precision, GB/s.
RATES = {
    "xformers/profiler/device_limits.py": {
        "p100-sxm2": ({"float64": 5.3, "float32": 10.6, "float16": 21.2}, 732),
        "a30": ({"float64": 10.3, "tf32": 82, "bfloat16": 165, "float16": 165}, 933),
    },
    "tensorrt_llm/auto_parallel/cluster_info.py": {
        "a10": ({"tf32": 62.5, "bfloat16": 125}, 600),
        "a10g": ({"tf32": 35, "bfloat16": 70, "float16": 70}, 600),
        "a40": ({"tf32": 75, "bfloat16": 150}, 696),
        "l4": ({"tf32": 60, "bfloat16": 120}, 300),
        "l40": ({"tf32": 90, "bfloat16": 181}, 864),
        "l40s": ({"tf32": 183, "bfloat16": 362}, 864),
        "h100": ({"tf32": 495, "bfloat16": 989}, 3350),
        "h100-pcie": ({"tf32": 378, "bfloat16": 756}, 2000),
    },
    "torchtitan/tools/utils.py": {
        "h100-nvl": ({"bfloat16": 835}, None),
        "h200": ({"bfloat16": 989}, None),
        "b200": ({"bfloat16": 2250}, None),
        "mi250x": ({"bfloat16": 191.5}, None),
        "mi300x": ({"bfloat16": 1300}, None),
    },
    "tech4gamers.com, Nvidia Tesla P100": {"p100": ({"float64": 4.7, "float32": 9.3, "float16": 18.7}, 720)},
    "hmc-tech.com, NVIDIA A2 vs NVIDIA A40": {"a2": ({"float32": 4.53, "tf32": 9.06, "bfloat16": 18.13}, None)},
    "panchaea.com, NVIDIA A16": {"a16": ({"float32": 4.5, "tf32": 9, "float16": 17.9}, 200)},
    "AnandTech, Instinct MI210": {"mi210": ({"float64": 45.3, "float32": 45.3, "float16": 181}, 1600)},
    "awesomeagents.ai, Instinct MI325X": {"mi325x": ({"float32": 163.4, "bfloat16": 1307.4}, 6000)},
    "Wikipedia, RDNA 3": {"rx7900xtx": ({"float32": 61.42, "float16": 122.8}, 960)},
    "NVIDIA Turing Architecture In-Depth": {
        "rtx2080ti": ({"float32": 13.4, "float16": 53.8}, 616),
        "quadro-rtx6000": ({"float32": 16.3, "float16": 130.5}, 672),
    },
    "NVIDIA's white papers, as others quote them": {
        "rtx3080": ({"float32": 29.8, "tf32": 29.8, "bfloat16": 59.5, "float16": 59.5}, 760),
        "rtx3090": ({"bfloat16": 71.2}, 936),
        "rtx-a6000": ({"bfloat16": 154.8}, None),
        "rtx4090": ({"float32": 82.6, "bfloat16": 165.2}, 1008),
        "rtx-6000-ada": ({"bfloat16": 364}, 960),
        "rtx5090": ({"bfloat16": 209.5}, 1792),
        "rtx-pro-6000": ({"bfloat16": 503.8}, 1792),
    },
}
GIB_FOUND = {
    "p100": 15.90,
    "v100-16gb": 15.75,
    "a10g": 22.06,
    "a30": 23.49,
    "l40": 44.40,
    "mi210": 65_520 / 1024,
    "mi300x": 191.98,
    "rx7900xtx": 24_560 / 1024,
}


@pytest.mark.parametrize(
    ("word", "tflops", "gb_per_s"),
    [
        pytest.param(word, *rates, id=f"{word}: {source}")
        for source, cards in RATES.items()
        for word, rates in cards.items()
    ],
)
def test_rates_are_those_of_a_document(word, tflops, gb_per_s):
    target = find_target(word)
    assert {name: target.flops_per_s[name] / 1e12 for name in tflops} == pytest.approx(tflops, rel=0.01)
    assert gb_per_s is None or target.bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.025)


@pytest.mark.parametrize(("word", "found"), GIB_FOUND.items())
def test_a_card_has_no_more_memory_than_was_found_on_one(word, found):
    assert found - 0.2 < find_target(word).memory_bytes / GIB <= found


def test_bfloat16_and_flash_attention_begin_with_ampere():
    old = {word for word in CARDS if not find_target(word).has_flash_attention}
    assert old == {word for word in CARDS if "bfloat16" not in find_target(word).flops_per_s}
    assert {"p100", "v100", "t4", "rtx2080ti", "quadro-rtx8000"} <= old
    assert not {"a2", "rtx3050", "rtx5090", "mi210"} & old


def test_a_size_in_place_of_a_name_or_beside_it():
    any_gpu = target_of(None, 12)
    assert (any_gpu.name, any_gpu.memory_bytes, any_gpu.device.type) == ("GPU with 12 GiB", 12 * GIB, "cuda")
    assert any_gpu.flops_per_s == find_target("a100").flops_per_s
    half = target_of("h100", 39.5)
    assert (half.name, half.memory_bytes) == (find_target("h100").name, int(39.5 * GIB))
    with pytest.raises(InputError, match="target_memory_gib 0: must be above 0"):
        target_of("h100", 0)


def test_cuda_without_a_device_is_a_named_one_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = find_target("cuda")
    assert target.name == "NVIDIA A100-SXM4-80GB"
    assert "no CUDA device is here" in target.remark


def put_device(monkeypatch, name, memory_gib):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    properties = SimpleNamespace(total_memory=int(memory_gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


def test_cuda_is_the_device_that_is_here_with_its_own_memory(monkeypatch):
    put_device(monkeypatch, "NVIDIA A100-SXM4-40GB", 39.4)
    target = find_target("cuda")
    assert (target.word, target.memory_bytes) == ("a100-40gb", int(39.4 * GIB))
    assert target.bytes_per_s == 1555e9


def test_a_device_without_figures_is_refused(monkeypatch):
    put_device(monkeypatch, "NVIDIA GeForce GTX 1080", 8)
    with pytest.raises(InputError, match="no figures of the NVIDIA GeForce GTX 1080 that is here"):
        find_target("cuda")


def test_the_cpu_is_measured():
    target = find_target("cpu")
    assert target.device == torch.device("cpu")
    assert target.flops_per_s["float32"] > 1e8
    assert target.bytes_per_s > 1e8


def test_rates_by_precision():
    a100, mm, convolution = find_target("a100"), torch.ops.aten.mm, torch.ops.aten.convolution
    assert a100.seconds(mm, torch.bfloat16, 312e12, 0) == 1
    assert a100.seconds(mm, torch.float32, 19.5e12, 0) == 1
    assert a100.seconds(convolution, torch.float32, 156e12, 0) == 1  # cuDNN rounds the factors to TF32
    assert a100.seconds(mm, torch.bfloat16, 0, int(2039e9)) == 1
    assert a100.seconds(mm, torch.bfloat16, 1, 1) == a100.kernel_s
    assert find_target("t4").seconds(mm, torch.bfloat16, 8.1e12, 0) == 1


def test_a_calibrated_card_reaches_a_share_of_its_data_sheet():
    h100, (mm, attention) = find_target("h100").calibrated, (torch.ops.aten.mm, torch.ops.aten._flash_attention_forward)
    for width, share in ((64, 0.6), (768, 0.6), (1408, 0.65), (2048, 0.7), (8192, 0.7)):
        assert h100.seconds(mm, torch.bfloat16, 989.5e12, 0, width) == pytest.approx(1 / share)
    assert h100.seconds(attention, torch.bfloat16, 989.5e12, 0, 1024) == pytest.approx(1 / 0.46)
    backward = torch.ops.aten._flash_attention_backward
    assert h100.seconds(backward, torch.bfloat16, 989.5e12, 0, 4096) == pytest.approx(1 / 0.42)
    assert h100.seconds(mm, torch.bfloat16, 0, int(3350e9)) == pytest.approx(1 / 0.76)


@pytest.mark.parametrize("word", CARDS)
def test_no_card_is_expected_to_beat_its_data_sheet(word):
    """A card that was not measured reaches the shares of the one that was."""
    card, mm = find_target(word), torch.ops.aten.mm
    for flops, num_bytes in ((1e15, 0), (0, 10**12), (0, 0)):
        bound_s = card.seconds(mm, torch.float16, flops, num_bytes, 1024)
        assert bound_s <= card.calibrated.seconds(mm, torch.float16, flops, num_bytes, 1024) <= 2.7 * bound_s
    assert card.calibrated.memory_bytes == card.memory_bytes


def test_rates_that_are_measured_stay_as_they_are():
    cpu = find_target("cpu")
    assert cpu.calibrated is cpu


def test_the_rate_of_this_hosts_memory_is_that_of_an_update(monkeypatch):
    monkeypatch.setattr(targets, "UPDATED_NUMBERS", 1000)
    stepped = []
    monkeypatch.setattr(targets, "_shortest_s", lambda run: stepped.append(run()) or 0.5)
    assert host_memory_rate() == 28 * 1000 / 0.5
    assert len(stepped) == 1
