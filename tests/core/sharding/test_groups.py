"""``--shard`` and launch files: the groups of ranks that they ask for, or one line on why not."""

import os

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding import ShardGroups
from memsave_recipes.training.launch.launched_shard import launched_shard

OF_A_LAUNCH = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
HSDP = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "WORLD_SIZE": "4",
}


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("flag", "num_ranks", "size", "num_replicas"), [("full", 4, 4, 1), ("2", 4, 2, 2), ("4", 4, 4, 1), ("3", 6, 3, 2)]
)
def test_the_groups_of_a_flag(flag, num_ranks, size, num_replicas):
    groups = ShardGroups.of(flag, num_ranks)
    assert (groups.size, groups.num_replicas) == (size, num_replicas)


@pytest.mark.parametrize("flag", [None, "none"])
def test_whole_weights_have_no_groups(flag):
    assert ShardGroups.of(flag, 4) is None


@pytest.mark.parametrize(
    ("flag", "num_ranks", "line"),
    [
        ("full", 1, "shard full: there is one rank, so no part of the weights could be elsewhere"),
        ("3", 4, "shard 3: 4 ranks cannot be divided into groups of 3: take a divisor of 4"),
        ("8", 4, "shard 8: 4 ranks cannot be divided into groups of 8"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(flag, num_ranks, line):
    with pytest.raises(InputError) as refused:
        ShardGroups.of(flag, num_ranks)
    assert str(refused.value).startswith(line)


def test_a_launch_without_fsdp_implies_nothing():
    with launched_shard() as implied:
        assert implied is None


@pytest.mark.parametrize(("more", "expected"), [({}, "full"), (HSDP, "2")])
def test_a_launch_file_implies_the_flag_and_accelerate_reads_none_of_it(monkeypatch, more, expected):
    set_all(monkeypatch, OF_A_LAUNCH | more)
    with launched_shard() as implied:
        assert implied == expected
        assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"} & os.environ.keys()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version 1: the recipes shard by torch's fully_shard"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params keeps weights on the host"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing would run beside the plan"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward false keeps all weights gathered"),
        ({**HSDP, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config: tp_size 2 cuts up single layers or rows"),
        ({**HSDP, "WORLD_SIZE": "8"}, "parallelism_config: dp_replicate_size 2 times dp_shard_size 2 are not the 8"),
    ],
)
def test_settings_that_compute_otherwise_are_refused(monkeypatch, variables, line):
    set_all(monkeypatch, OF_A_LAUNCH | variables)
    with pytest.raises(InputError) as refused, launched_shard():
        pass
    assert str(refused.value).startswith(line)
