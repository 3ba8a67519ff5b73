"""Every launch file is accepted by Accelerate, short, explained key by key, and has no key without effect."""

import argparse
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

FOLDER = Path(__file__).parents[3] / "accelerate_configs"
SLURM = FOLDER / "slurm.sbatch"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def resolve(path: Path, *flags: str) -> argparse.Namespace:
    """What `accelerate launch` makes of a file and flags, before it starts anything."""
    flags_and_script = ["--config_file", str(path), *flags, "recipe.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags_and_script))
    return arguments


def keys_without_comment(text: str) -> list[str]:
    """Keys that have a comment neither on their line nor on the line above."""
    lines = text.splitlines()
    keys = {number: match[1] for number, line in enumerate(lines) if (match := re.match(r" *(\w+):", line))}
    return [key for number, key in keys.items() if "# " not in lines[number] and not lines[number - 1].startswith("# ")]


def test_the_files_are_those_of_the_design() -> None:
    of_whole_weights = {"cpu", "cpu_ddp", "single_gpu", "multi_gpu", "multi_node"}
    assert {path.stem for path in CONFIGS} >= of_whole_weights | {"cpu_fsdp2", "fsdp2", "fsdp2_hsdp"}


@each_config
def test_loads_through_accelerates_own_class(path: Path) -> None:
    several = DistributedType.FSDP if "fsdp2" in path.stem else DistributedType.MULTI_GPU
    expected = several if load_config_from_file(str(path)).num_processes > 1 else DistributedType.NO
    assert load_config_from_file(str(path)).distributed_type == expected


@each_config
def test_every_key_reaches_the_launch(path: Path) -> None:
    """Accelerate ignores some keys of a file without a word, `rdzv_backend` and `same_network` among them."""
    written = yaml.safe_load(path.read_text())
    assert written.pop("compute_environment") == "LOCAL_MACHINE"
    arguments = resolve(path)
    kind = written.pop("distributed_type")
    assert (arguments.multi_gpu, arguments.use_fsdp) == (kind == "MULTI_GPU", kind == "FSDP")
    sizes = written.pop("parallelism_config", {})
    assert arguments.use_parallelism_config == bool(sizes)
    written |= sizes | written.pop("fsdp_config", {})
    assert {key: getattr(arguments, key) for key in written} == written


def test_sizes_of_groups_reach_the_ranks() -> None:
    environment = prepare_multi_gpu_env(resolve(FOLDER / "fsdp2_hsdp.yaml", "--main_process_port", "0"))
    assert environment["ACCELERATE_USE_FSDP"] == environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"


@pytest.mark.parametrize("name", ["cpu_ddp", "multi_gpu", "multi_node", "cpu_fsdp2", "fsdp2"])
def test_num_processes_overrides_the_file(name: str) -> None:
    assert resolve(FOLDER / f"{name}.yaml", "--num_processes", "6").num_processes == 6


@each_config
def test_precision_is_the_same_in_all_files_and_one_flag_away(path: Path) -> None:
    assert resolve(path).mixed_precision == "no"
    assert resolve(path, "--mixed_precision", "bf16").mixed_precision == "bf16"


@each_config
def test_is_short_and_explains_every_key(path: Path) -> None:
    assert len(yaml.safe_load(path.read_text())) <= 15
    assert keys_without_comment(path.read_text()) == []


def test_a_key_without_comment_is_found() -> None:
    assert keys_without_comment("# for a\na: 1\nb: 2\nc: 3  # for c\n") == ["b"]


@each_config
def test_header_says_how_to_launch_and_what_to_change(path: Path) -> None:
    header = path.read_text().split("\n\n")[0]
    assert f"accelerate launch --config_file accelerate_configs/{path.name} " in header
    assert "# To change: " in header


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of programs in place of SLURM's, and of the launcher, which ends with CODE, or else by SIGUSR1."""
    wait = f"touch {tmp_path}/begun; for _ in $(seq 100); do sleep 0.1; done"
    programs = {
        "scontrol": f'if [ "$1" = show ]; then printf "one\\ntwo\\n"; else echo "$@" >> {tmp_path}/asked; fi',
        "srun": 'exec "$@"',
        "accelerate": f'printf "%s\\n" "$@" > {tmp_path}/words; [ "$CODE" ] && exit $CODE; trap "exit 1" USR1; {wait}',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("code", ["", "0", "1"])
def test_the_script_for_slurm_launches_and_asks_for_its_place_in_the_queue(stand_ins: Path, code: str) -> None:
    """Where the time is over; not where the run is done or has failed."""
    environment = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}", "CODE": code, "SCRATCH": "/scratch"}
    environment |= {"SLURM_JOB_ID": "70001", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "[one-two]"}
    with subprocess.Popen(["bash", SLURM], env=environment, stderr=subprocess.PIPE, text=True) as job:
        while not code and not (stand_ins / "begun").exists():
            time.sleep(0.02)
        if not code:
            job.send_signal(signal.SIGUSR1)
        assert job.communicate(timeout=30)[1] == ""
    assert not code or job.returncode == int(code)
    asked = stand_ins / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("" if code else "requeue 70001\n")
    command, *words = (stand_ins / "words").read_text().splitlines()
    flags = launch_command_parser().parse_args(words)
    assert (command, flags.num_machines, flags.num_processes, flags.max_restarts) == ("launch", 2, 16, 3)
    assert (flags.rdzv_backend, flags.main_process_ip, flags.main_process_port) == ("c10d", "one", 30001)
    assert (FOLDER.parent / flags.config_file).is_file()
    assert (FOLDER.parent / flags.training_script).is_file()
    assert flags.training_script_args[-3:] == ["--output_dir", "/scratch/my-run", "--resume"]


def test_the_script_for_slurm_has_all_that_a_requeued_job_needs() -> None:
    asked = set(re.findall(r"^#SBATCH (--[a-z-]+)", SLURM.read_text(), re.M))
    assert asked >= {"--signal", "--requeue", "--open-mode"}
