"""A run goes on as the same one: what of its environment is announced, and what is refused."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.checkpoints.resume import check_same_environment
from memsave_recipes.training.launch.start import INSTRUCTION_LIMITS, Accelerator, describe_environment


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for variable in INSTRUCTION_LIMITS:  # this process may have been started with one
        monkeypatch.delenv(variable, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator()


@pytest.fixture
def saved(accelerator):
    """As ``config.json`` gives it back."""
    return json.loads(json.dumps(describe_environment(accelerator)))


def test_the_same_environment_says_nothing(accelerator, saved):
    saved["git_commit"], saved["versions"]["datasets"] = "another", "0"
    assert check_same_environment(saved, accelerator) == []


@pytest.mark.parametrize("name", ["torch", "accelerate", "transformers", "memsave-recipes"])
def test_another_version_is_announced(accelerator, saved, name):
    is_now = saved["versions"][name]
    saved["versions"][name] = "0.1"
    assert check_same_environment(saved, accelerator) == [
        f"note: {name} was 0.1 and is {is_now}: bit-exact no longer promised, because another version may compute in "
        "another way"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "NVIDIA H200"),
        ("processor", "Intel(R) Xeon(R), AVX512"),
        ("num_threads", 99),
        ("deterministic_algorithms", True),
    ],
)
def test_another_machine_is_announced(accelerator, saved, name, value):
    saved[name] = value
    (line,) = check_same_environment(saved, accelerator)
    assert line.startswith(f"note: {name} was {value} and is ")
    assert "bit-exact no longer promised, because" in line


@pytest.mark.parametrize("name", ["processor", "num_threads"])
def test_the_host_does_not_matter_to_another_device(accelerator, saved, monkeypatch, name):
    saved[name] = "another"
    monkeypatch.setattr(type(accelerator), "device", torch.device("meta"))
    assert not [line for line in check_same_environment(saved, accelerator) if name in line]


@pytest.mark.parametrize("limit", [("MKL_CBWR", "COMPATIBLE"), ("ONEDNN_MAX_CPU_ISA", "AVX2")])
def test_fewer_instructions_of_the_same_processor_are_announced(accelerator, saved, monkeypatch, limit):
    monkeypatch.setenv(*limit)
    (line,) = check_same_environment(saved, accelerator)
    assert line.startswith(f"note: processor was {saved['processor']} and is {saved['processor']}, {'='.join(limit)}: ")


def test_a_record_that_does_not_know_of_it_yet_says_nothing(accelerator, saved):
    del saved["deterministic_algorithms"]
    assert check_same_environment(saved, accelerator) == []


def test_another_precision_is_refused(accelerator, saved):
    saved["mixed_precision"] = "bf16"
    with pytest.raises(InputError, match=r"--mixed_precision was bf16 and is no: .*launch --mixed_precision bf16"):
        check_same_environment(saved, accelerator)
