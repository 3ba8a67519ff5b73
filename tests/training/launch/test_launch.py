"""A launch gives the world that was asked for, or one line that says how to get it."""

import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import accelerate
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs
from nursery import free_port
from samples import sample
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.torch_version import TorchVersion
from transformers.utils import logging

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch import start as launch
from memsave_recipes.training.launch.processes import launch_arguments
from memsave_recipes.training.launch.start import (
    RESTARTED,
    Accelerator,
    LaunchRequest,
    chosen_dtype,
    parse_launch_request,
    read_launch_request,
)

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "accelerate_configs"
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
LAUNCHER_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT_S = 120

# Ends right after a collective and without end_training(): the end at which gloo's threads may abort a process.
PROBE = """
import dataclasses, json, sys, torch
from pathlib import Path
from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch.start import read_launch_request, Accelerator
try:
    accelerator = Accelerator()
except InputError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
rank = accelerator.process_index
seen = dict(rank=rank, num_processes=accelerator.num_processes, device=accelerator.device.type,
            distributed_type=accelerator.distributed_type.value, asked=dataclasses.asdict(read_launch_request()),
            model=type(accelerator.prepare(torch.nn.Linear(1, 1))).__name__,
            sum=accelerator.reduce(torch.tensor(rank + 1.0), "sum").item())
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(seen))
accelerator.reduce(torch.ones(1), "sum")
sys.exit(int(sys.argv[2]))
"""


class Launcher:
    """Starts real `accelerate launch` runs of the probe, in a home without a default config file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        (folder / "probe.py").write_text(PROBE)

    def start(self, *arguments: str, exit_code: int = 0) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(self.folder), "HF_HUB_OFFLINE": "1"}
        script = [str(self.folder / "probe.py"), str(self.folder), str(exit_code)]
        process = subprocess.Popen(
            [str(ACCELERATE), "launch", *arguments, *script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str, exit_code: int = 0) -> tuple[int, str]:
        """The launch's exit code and all that it printed."""
        process = self.start(*arguments, exit_code=exit_code)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output

    def end_all(self) -> None:
        """End what a failed test left behind; torch gives each rank a session of its own, so find them as children."""
        for process in self._processes:
            if process.poll() is None:
                for rank in psutil.Process(process.pid).children(recursive=True):
                    rank.kill()
                process.kill()
                process.communicate()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end_all()


def ranks_seen(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def assert_gloo_world(folder: Path, num_processes: int) -> None:
    """Every rank is there once, on the CPU, and all of them summed the same numbers."""
    ranks = ranks_seen(folder)
    assert [rank["rank"] for rank in ranks] == list(range(num_processes))
    for rank in ranks:
        assert rank["num_processes"] == num_processes
        assert rank["distributed_type"] == "MULTI_CPU"
        assert rank["device"] == "cpu"
        assert rank["model"] == ("DistributedDataParallel" if num_processes > 1 else "Linear")
        assert rank["sum"] == num_processes * (num_processes + 1) / 2


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"nothing listens on port {port}")


class TestRealLaunches:
    def test_cpu_file_gives_one_process_whose_failure_is_told_quietly(self, launcher: Launcher) -> None:
        code, output = launcher.run("--quiet", "--config_file", str(CONFIGS / "cpu.yaml"), exit_code=2)
        assert code == 1
        assert "Traceback" not in output
        asked = {"num_processes": 1, "num_machines": 1, "use_cpu": True}
        expected = {"num_processes": 1, "device": "cpu", "distributed_type": "NO", "asked": asked, "model": "Linear"}
        assert ranks_seen(launcher.folder) == [expected | {"rank": 0, "sum": 1.0}]

    @pytest.mark.slow
    def test_one_process_of_the_cpu_ddp_file_trains_without_ddp(self, launcher: Launcher) -> None:
        code, output = launcher.run("--config_file", str(CONFIGS / "cpu_ddp.yaml"), "--num_processes", "1")
        assert code == 0, output
        assert_gloo_world(launcher.folder, 1)

    @pytest.mark.slow
    def test_num_processes_overrides_the_file_and_a_failure_keeps_its_exit_code(self, launcher: Launcher) -> None:
        arguments = ("--config_file", str(CONFIGS / "cpu_ddp.yaml"), "--num_processes", "3")
        code, output = launcher.run(*arguments, exit_code=3)
        assert_gloo_world(launcher.folder, 3)
        asked = {"num_processes": 3, "num_machines": 1, "use_cpu": True}  # what keeps them off the GPUs of a machine
        assert [rank["asked"] for rank in ranks_seen(launcher.folder)] == [asked] * 3
        assert "exitcode  : 3" in output
        assert "SIGABRT" not in output
        assert code == 1  # accelerate's own, whatever the ranks returned

    @pytest.mark.parametrize(
        ("rendezvous", "num_ranks"), sample([("static", 2)], [("static", 2), ("static", 4), ("c10d", 4)])
    )
    def test_multi_node_file_gives_its_ranks_on_loopback(
        self, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, rendezvous: str, num_ranks: int
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two "machines" cannot share the GPUs of this one
        port = free_port()
        arguments = ["--config_file", str(CONFIGS / "multi_node.yaml"), "--rdzv_backend", rendezvous]
        arguments += ["--num_processes", str(num_ranks), "--main_process_port", str(port), "--machine_rank"]
        first = launcher.start(*arguments, "0")
        if rendezvous == "c10d":  # machine 1 would open the port itself, and machine 0 then refuse it
            wait_until_listening(port)
        code, output = launcher.run(*arguments, "1")
        assert code == 0, output
        output, _ = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 0, output
        assert_gloo_world(launcher.folder, num_ranks)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/venv/bin/accelerate", "launch", "--cpu", "recipe.py"],
        ["python.exe", "accelerate.exe", "launch", "--cpu", "recipe.py"],
        ["python", "/venv/bin/accelerate-launch", "--cpu", "recipe.py"],
        ["python", "-m", "accelerate.commands.launch", "--cpu", "recipe.py"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "recipe.py"],
    ],
)
def test_finds_the_arguments_of_every_way_to_call_the_launcher(command: list[str]) -> None:
    assert launch_arguments(command) == ["--cpu", "recipe.py"]


@pytest.mark.parametrize(
    "command", [[], ["bash"], ["python", "recipe.py"], ["torchrun", "recipe.py"], ["accelerate", "env"]]
)
def test_other_parents_are_not_the_launcher(command: list[str]) -> None:
    assert launch_arguments(command) is None


@pytest.fixture
def default_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `accelerate config` would leave its answers; not there unless the test writes it."""
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr(launch, "default_config_file", str(path))
    return path


@pytest.mark.usefixtures("default_config")
class TestParseLaunchRequest:
    def test_reads_the_file_relative_to_where_the_launcher_was_started(self) -> None:
        request = parse_launch_request(["--config_file", "accelerate_configs/multi_node.yaml", "recipe.py"], str(ROOT))
        assert request == LaunchRequest(num_processes=4, num_machines=2, use_cpu=False)

    def test_flags_win_over_the_file(self) -> None:
        arguments = ["--config_file", "multi_node.yaml", "--num_processes=9", "--num_machines", "3", "recipe.py"]
        assert parse_launch_request(arguments, str(CONFIGS)) == LaunchRequest(num_processes=9, num_machines=3)

    def test_use_cpu_comes_from_the_file_or_the_flag(self) -> None:
        assert parse_launch_request(["--config_file", "cpu_ddp.yaml", "recipe.py"], str(CONFIGS)).use_cpu
        assert parse_launch_request(["--config_file", "multi_gpu.yaml", "--cpu", "recipe.py"], str(CONFIGS)).use_cpu

    def test_flags_of_the_recipe_are_not_the_launchers(self) -> None:
        arguments = ["--num_processes", "2", "recipe.py", "--num_processes", "7", "--cpu"]
        assert parse_launch_request(arguments, "/") == LaunchRequest(num_processes=2)

    def test_nothing_asked_for(self) -> None:
        assert parse_launch_request(["recipe.py"], "/") == LaunchRequest()

    def test_default_file_counts_unless_the_cpu_flag_is_given(self, default_config: Path) -> None:
        default_config.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
        assert parse_launch_request(["recipe.py"], "/") == LaunchRequest(num_processes=8)
        assert parse_launch_request(["--cpu", "recipe.py"], "/") == LaunchRequest(use_cpu=True)


def test_restarted_ranks_see_nothing_that_lost_ones_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("address", "of a lost rank")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 1}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 1, "GROUP_WORLD_SIZE": 1}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    own, rank, num_ranks = next(rendezvous(f"{RESTARTED}://"))
    assert (own.check(["address"]), rank, num_ranks) == (False, 0, 1)


class TestReadLaunchRequest:
    @pytest.fixture
    def parent(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        parent = SimpleNamespace(cmdline=lambda: ["python", "accelerate", "launch"], cwd=lambda: str(CONFIGS))
        monkeypatch.setattr(psutil.Process, "parent", lambda _: parent)
        return parent

    def test_reads_the_parents_command_line(self, parent: SimpleNamespace) -> None:
        parent.cmdline = lambda: ["python", "/bin/accelerate", "launch", "--config_file", "cpu_ddp.yaml", "recipe.py"]
        assert read_launch_request() == LaunchRequest(num_processes=2, use_cpu=True)

    def test_no_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil.Process, "parent", lambda _: None)
        assert read_launch_request() == LaunchRequest()

    @pytest.mark.parametrize("error", [psutil.AccessDenied(), psutil.NoSuchProcess(1), PermissionError()])
    def test_parent_that_cannot_be_read(self, parent: SimpleNamespace, error: Exception) -> None:
        def refuse() -> list[str]:
            raise error

        parent.cmdline = refuse
        assert read_launch_request() == LaunchRequest()

    @pytest.mark.parametrize("arguments", [["--config_file", "gone.yaml", "recipe.py"], ["--num_processes", "many"]])
    def test_arguments_that_cannot_be_parsed(self, parent: SimpleNamespace, arguments: list[str]) -> None:
        parent.cmdline = lambda: ["python", "accelerate", "launch", *arguments]
        assert read_launch_request() == LaunchRequest()


class Machine:
    """A pretended machine and launch; records what the Accelerator was built with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.built_with: dict | None = None
        self.at_exit: list[Callable[[], None]] = []
        for name in (*LAUNCHER_VARIABLES, "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(accelerate.Accelerator, "__init__", lambda _, **kwargs: self._build(**kwargs))
        monkeypatch.setattr(accelerate.Accelerator, "num_processes", property(lambda _: self.joined))
        monkeypatch.setattr(accelerate.Accelerator, "is_main_process", True)
        monkeypatch.setattr(launch.atexit, "register", self.at_exit.append)
        self.set(devices=0, joined=1)

    def _build(self, *, kwargs_handlers: list, gradient_accumulation_plugin: object, **kwargs: object) -> None:
        self.built_with = kwargs
        self.handlers = kwargs_handlers

    def set(self, devices: int, joined: int, asked: LaunchRequest | None = None, **environment: str) -> None:
        self.joined = joined
        self._monkeypatch.setattr(torch.accelerator, "is_available", lambda: devices > 0)
        self._monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
        self._monkeypatch.setattr(launch, "read_launch_request", lambda: asked or LaunchRequest())
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)

    def set_card(self, capability: int | None, **environment: str) -> None:
        """A GPU of this compute capability, which only emulates bfloat16 below 8; ``None`` for a CPU alone."""
        has_card = capability is not None
        self.set(devices=int(has_card), joined=1, **environment)
        self._monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
        self._monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        self._monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or capability >= 8
        )

    def refusal(self) -> str:
        """The one line with which this launch is refused; no Accelerator may have been built."""
        with pytest.raises(InputError) as refused:
            Accelerator()
        assert self.built_with is None
        assert "\n" not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class TestDevice:
    def test_cpu_where_there_is_no_accelerator(self, machine: Machine) -> None:
        Accelerator(log_with=[])
        assert machine.built_with == {"cpu": True, "log_with": []}

    def test_autocast_keeps_no_copy_of_the_weights(self, machine: Machine) -> None:
        Accelerator()
        assert [h.cache_enabled for h in machine.handlers if isinstance(h, AutocastKwargs)] == [False]

    def test_the_group_gives_up_after_the_ranks_have_been_named(self, machine: Machine) -> None:
        Accelerator()
        (timeout,) = [h.timeout for h in machine.handlers if isinstance(h, InitProcessGroupKwargs)]
        assert timeout.total_seconds() == launch.LIMIT_S + launch.GROUP_TIMEOUT_MARGIN_S

    def test_accelerator_where_there_is_one(self, machine: Machine) -> None:
        machine.set(devices=2, joined=2, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        Accelerator()
        assert machine.built_with == {"cpu": False}

    def test_one_process_started_plain_takes_one_of_several(self, machine: Machine) -> None:
        machine.set(devices=4, joined=1)
        assert Accelerator().num_processes == 1
        assert machine.built_with == {"cpu": False}

    def test_a_file_with_use_cpu_stays_off_the_accelerators(self, machine: Machine) -> None:
        asked = LaunchRequest(num_processes=2, use_cpu=True)
        machine.set(devices=1, joined=2, asked=asked, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        Accelerator()
        assert machine.built_with == {"cpu": True}

    def test_accelerates_own_variable_is_heard(self, machine: Machine) -> None:
        machine.set(devices=1, joined=1, ACCELERATE_USE_CPU="True")
        Accelerator()
        assert machine.built_with == {"cpu": True}

    def test_an_apple_gpu_needs_a_torch_that_counts_its_peaks(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
        machine.set(devices=1, joined=1)
        assert "Apple GPU (mps) needs torch 2.13 and this is 2.12.1" in machine.refusal()
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
        Accelerator()
        assert machine.built_with == {"cpu": False}

    def test_an_apple_gpu_is_left_alone_where_the_launch_says_so(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
        machine.set(devices=1, joined=1, ACCELERATE_USE_CPU="true")
        Accelerator()
        assert machine.built_with == {"cpu": True}

    @pytest.mark.parametrize(
        ("capability", "asked", "expected"),
        [
            *((7, "auto", "float16"), (7, "float16", "float16"), (7, "float32", "float32")),
            *((8, "auto", "bfloat16"), (8, "bfloat16", "bfloat16"), (8, "float16", "float16")),
            *((None, "auto", "bfloat16"), (None, "bfloat16", "bfloat16"), (None, "float64", "float64")),
        ],
    )
    def test_the_dtype_is_one_that_the_device_computes_in(
        self, machine: Machine, capability: int | None, asked: str, expected: str
    ) -> None:
        machine.set_card(capability)
        assert chosen_dtype(asked) == expected
        machine.set(devices=1, joined=1, ACCELERATE_USE_CPU="true")
        if asked == "auto":
            assert chosen_dtype(asked) == "bfloat16"

    @pytest.mark.parametrize(
        ("capability", "precision", "asked", "words"),
        [
            (7, "no", "bfloat16", "--dtype bfloat16: the Tesla T4 .*--dtype float16 with --lora or .*fp16 in place"),
            (None, "no", "float16", "--dtype float16 needs --mixed_precision fp16.*CPU: take bfloat16"),
            (8, "bf16", "float16", "--dtype float16 .* needs --mixed_precision fp16"),
            (7, "bf16", "auto", "--dtype auto is float16 here, which needs --mixed_precision fp16"),
        ],
    )
    def test_another_dtype_is_refused(
        self, machine: Machine, capability: int | None, precision: str, asked: str, words: str
    ) -> None:
        machine.set_card(capability, ACCELERATE_MIXED_PRECISION=precision)
        with pytest.raises(InputError, match=words):
            chosen_dtype(asked)

    def test_fp16_on_the_cpu_is_refused(self, machine: Machine) -> None:
        machine.set(devices=0, joined=1, ACCELERATE_MIXED_PRECISION="fp16")
        assert "--mixed_precision fp16" in machine.refusal()


class TestWorld:
    def test_more_ranks_than_accelerators_is_refused(self, machine: Machine) -> None:
        machine.set(devices=3, joined=4, WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
        line = machine.refusal()
        assert line.startswith("4 processes were started on this machine, which has 3 accelerator(s)")
        assert "`--num_processes 3`" in line

    def test_on_several_machines_the_way_out_counts_all_of_them(self, machine: Machine) -> None:
        machine.set(devices=1, joined=4, WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
        assert "`--num_processes 2`" in machine.refusal()

    @pytest.mark.parametrize(
        ("devices", "machines", "config"), [(0, 1, "cpu_ddp"), (4, 1, "multi_gpu"), (0, 2, "multi_node")]
    )
    def test_a_single_process_of_several_is_refused(
        self, machine: Machine, devices: int, machines: int, config: str
    ) -> None:
        machine.set(devices, joined=1, asked=LaunchRequest(num_processes=4, num_machines=machines))
        line = machine.refusal()
        assert line.startswith("num_processes is 4 but the launcher started 1: ")
        assert f"accelerate_configs/{config}.yaml --num_processes 4" in line

    def test_processes_that_machines_cannot_share_equally_are_refused(self, machine: Machine) -> None:
        asked = LaunchRequest(num_processes=5, num_machines=2)
        machine.set(devices=0, joined=4, asked=asked, WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
        assert machine.refusal() == (
            "num_processes is 5 but the launcher started 4: "
            "--num_processes counts those of all 2 machines, make it a multiple of 2"
        )

    def test_a_world_size_left_in_the_environment_is_refused(self, machine: Machine) -> None:
        machine.set(devices=0, joined=1, asked=LaunchRequest(num_processes=1), WORLD_SIZE="4")
        assert "unset WORLD_SIZE=4" in machine.refusal()

    def test_a_rank_that_finds_itself_alone_is_refused(self, machine: Machine) -> None:
        machine.set(devices=0, joined=1, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        with pytest.raises(InputError, match="started 2 processes but this one joined a world of 1"):
            Accelerator()

    def test_a_world_that_mpirun_started_is_accepted(self, machine: Machine) -> None:
        machine.set(devices=0, joined=2, asked=LaunchRequest(num_processes=2), OMPI_COMM_WORLD_SIZE="2")
        assert Accelerator().num_processes == 2


class TestWhatElseALaunchCanSay:
    @pytest.mark.parametrize("name", ["FSDP", "DeepSpeed", "Megatron_LM"])
    def test_weights_that_are_cut_up_are_refused(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
        assert machine.refusal().startswith(f"{name} shards the weights in its own way")

    def test_a_model_that_accelerate_would_compile_is_refused(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
        line = machine.refusal()
        assert line.startswith("dynamo_backend inductor compiles the whole model")
        assert "--dynamo_backend no" in line

    def test_the_bars_of_transformers_stay_out_of_log_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging, "_tqdm_active", True)
        AcceleratorState._reset_state(reset_partial_state=True)
        Accelerator()
        assert not logging.is_progress_bar_enabled()

    def test_accumulation_in_the_environment_divides_no_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
        AcceleratorState._reset_state(reset_partial_state=True)
        weight = torch.ones(1, requires_grad=True)
        Accelerator().backward(3 * weight.sum())
        assert weight.grad is not None
        assert weight.grad.item() == 3


class TestEnd:
    """Signal 6 at the end is a matter of timing that no launch shows each time, so the wait itself is checked."""

    @pytest.mark.parametrize("group_is_left", [True, False])
    def test_a_cpu_rank_waits_only_where_the_group_is_still_there(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, group_is_left: bool
    ) -> None:
        waits: list[float] = []
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group_is_left)
        monkeypatch.setattr(launch.time, "sleep", waits.append)
        Accelerator()
        for handler in machine.at_exit:
            handler()
        assert bool(waits) == group_is_left

    def test_a_gpu_rank_does_not_wait(self, machine: Machine) -> None:
        machine.set(devices=1, joined=1)
        Accelerator()
        assert machine.at_exit == []

    def test_end_training_waits_before_it_frees_the_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[str] = []
        monkeypatch.setattr(launch, "drain_gloo", lambda: order.append("wait"))
        monkeypatch.setattr(accelerate.Accelerator, "end_training", lambda self: order.append("free"))
        Accelerator().end_training()
        assert order == ["wait", "free"]


@pytest.mark.parametrize(
    ("use_cpu", "variable", "has_gpu", "is_said"),
    [(False, "no", False, True), (True, "no", False, False), (False, "yes", False, False), (False, "no", True, False)],
)
def test_a_launch_that_finds_no_gpu_says_so(monkeypatch, use_cpu, variable, has_gpu, is_said):
    monkeypatch.setattr(launch, "read_launch_request", lambda: LaunchRequest(use_cpu=use_cpu))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    line = launch.describe_no_gpu()
    assert (line is not None and line.endswith("this run trains on the CPU")) is is_said


def test_an_installed_package_names_the_commit_of_the_clone_whose_script_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])
    assert launch._git_commit() == "unknown"
    monkeypatch.setattr("sys.argv", [str(ROOT / "recipes" / "language_modeling.py")])
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert launch._git_commit() == (head.stdout.strip() or "unknown")
