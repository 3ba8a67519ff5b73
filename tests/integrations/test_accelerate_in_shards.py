"""Trainer under Accelerate's FSDP2, and with rows that its context parallelism shares: plans change no bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lives import ROOT
from samples import sample

BITWISE = ("none", "full", "selective", "every:2", "segments:2", "nested:2", "offload", "full_offload")
OTHERS = ("full_tiled:8", "budget", "state")
SIZES = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 2, "cp_comm_strategy": "allgather"}
SHARED = {
    "shards": {},
    "shared rows": {"parallelism_config": {f"parallelism_config_{name}": size for name, size in SIZES.items()}},
}


@pytest.fixture(scope="module", params=sample([], SHARED))
def outcomes(request, on_devices, tmp_path_factory):
    """Of each plan, from one launch on two stand-ins for CUDA, where late copies and freed memory read as NaN."""
    folder = tmp_path_factory.mktemp("launch")
    shards = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    config = {"distributed_type": "FSDP", "fsdp_config": shards, "num_processes": 2, "main_process_port": 0}
    config |= SHARED[request.param]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    launcher = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", folder / "config.yaml"]
    script = ROOT / "tests" / "integrations" / "many_trainings.py"
    environment = on_devices(2, POISON=1)
    environment["PYTHONPATH"] += f":{ROOT / 'tests'}"
    done = subprocess.run(
        [str(word) for word in (*launcher, script, folder, "trainer", *BITWISE, *OTHERS)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return json.loads((folder / "outcomes.json").read_text())


def test_plans_have_the_bits_of_the_trainer_alone(outcomes):
    alone = outcomes["trainer"]
    assert len(set(alone["losses"])) == 3
    for plan in BITWISE:
        assert outcomes[plan]["weights"] == alone["weights"], plan
        assert outcomes[plan]["losses"] == alone["losses"], plan
    assert outcomes["full_tiled:8"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_plans_have_the_bits_of_a_loop_alone(outcomes):
    assert len(set(outcomes["loops"])) == 1


def test_plans_need_less_memory(outcomes):
    peaks = {plan: outcomes[plan]["peak_bytes"] for plan in BITWISE}
    assert peaks["full_offload"] < peaks["full"] < peaks["segments:2"] < peaks["selective"] < peaks["none"]
    assert peaks["offload"] < peaks["selective"]


def test_what_needs_a_whole_model_is_refused(outcomes):
    assert outcomes["budget"]["refused"].startswith("strategy budget: FSDP2 shards the model, ")
    assert outcomes["state"]["refused"].startswith("offload_optimizer 'state': under FSDP2 ")
