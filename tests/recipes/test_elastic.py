"""``memsave launch`` of a recipe whose ranks are killed or stopped: the run that nothing stopped, without a person.

In a network namespace with the loopback interface alone; nothing can listen or connect elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from lives import ROOT, assert_the_same_run
from samples import sample

pytestmark = pytest.mark.slow

TINY = "n_layer=2,n_head=2,n_embd=16"
FLAGS = (
    *("--model_type", "gpt2", "--config_overrides", TINY, "--vocab_size", "300", "--block_size", "16"),
    *("--global_batch_size", "4", "--micro_batch_size", "2", "--max_steps", "12", "--max_eval_samples", "8"),
    *("--logging_steps", "1", "--dtype", "float64", "--report_to", "none", "--save_every", "1"),
)
LISTENING = "listening"
# After step 3 of the first life. Ranks ask one another for signals once a second, so steps under a lost launcher take
# their time, and a machine that is alone waits for the other one.
LOSING = """
import os, signal, sys, time
from pathlib import Path
import psutil
sys.path.insert(0, {recipes!r})
import language_modeling
from memsave_recipes.training.checkpoints import Checkpoints
from memsave_recipes.run.recipe import run_recipe

after_step = Checkpoints.after_step
noted = Path({folder!r}, {listening!r})
rank, launcher = os.getpid(), os.getppid()
ends = {{"rank_0": (0, rank, signal.SIGKILL), "rank_1": (1, rank, signal.SIGKILL),
        "stopped": (1, rank, signal.SIGSTOP), "launcher": ({whole} - 1, launcher, signal.SIGKILL),
        "first": (0, launcher, signal.SIGKILL), "": (None, None, None)}}
of_rank, lost, by = ends[{lost!r}]

def and_then_lose_one(self, step, state):
    after_step(self, step, state)
    if step == 3 and os.environ.get("RANK") == str(of_rank) and not noted.exists():
        found = psutil.net_connections("tcp")
        noted.write_text(" ".join({{one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}}))
        os.kill(lost, by)
    if lost == launcher and os.environ["WORLD_SIZE"] == "{whole}":
        time.sleep(0.3)
    while step == 3 and os.environ.get("WORLD_SIZE") == str({whole} // 2) and not self.signals.received:
        time.sleep(0.05)

Checkpoints.after_step = and_then_lose_one
run_recipe(language_modeling.main)
"""


@pytest.fixture(scope="module")
def namespace():
    """The words before a command that runs it there."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = "ip link set lo up && echo up && exec sleep infinity"
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    words = ["unshare", *as_root, "--net", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as keeper:
        is_up = keeper.stdout.readline() == "up\n"
        if is_up:
            user = ["--user", "--preserve-credentials"] if as_root else []
            yield ["nsenter", "--target", str(keeper.pid), "--net", *user]
        keeper.kill()
    if not is_up:
        pytest.skip("no network namespace can be made here")


class Launch:
    """``memsave launch`` in the namespace; ``whole`` are the ranks of all machines."""

    def __init__(self, namespace, folder, config, *of_launch, lost="", whole=2, flags=()):
        self.folder = folder
        script = folder.with_name(f"{folder.name}-{lost}.py")
        places = {"recipes": str(ROOT / "recipes"), "folder": str(folder.parent)}
        script.write_text(LOSING.format(**places, listening=f"{folder.name}-{LISTENING}", lost=lost, whole=whole))
        words = [*namespace, sys.executable, "-m", "memsave_recipes.tools.cli", "launch"]
        words += ["--config_file", ROOT / "accelerate_configs" / config, *of_launch, script, *FLAGS, *flags]
        self.process = subprocess.Popen(
            [str(word) for word in [*words, "--output_dir", folder]],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def listening(self):
        return set(self.folder.with_name(f"{self.folder.name}-{LISTENING}").read_text().split())

    def wait_for_port(self, number):
        """Until somebody listens on it in the namespace."""
        listening = re.compile(rf":{number:04X} \S+ 0A ")
        tables = [Path(f"/proc/{self.process.pid}/net/{name}") for name in ("tcp", "tcp6")]
        deadline = time.monotonic() + 60
        while not any(listening.search(table.read_text()) for table in tables):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait(self):
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output

    def end(self):
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with suppress(psutil.Error):
                    process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def launch(namespace, tmp_path_factory):
    """A launch into a folder of its own, or the one given; all flags are those of ``Launch``."""
    launches = []
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("\n\n".join(f"Line {number} of a text, whose square is {number**2}." for number in range(200)))

    def start(folder, config, *of_launch, flags=(), **how):
        flags = ["--train_file", text, *flags]
        launches.append(Launch(namespace, folder, config, *of_launch, flags=flags, **how))
        return launches[-1]

    yield start
    for launched in launches:
        launched.end()


@pytest.fixture(scope="module")
def straight(launch, tmp_path_factory):
    """The folder of a run on two ranks that nothing stops, by its launch file."""
    folders = {}

    def run(config):
        if config not in folders:
            folders[config] = tmp_path_factory.mktemp("straight") / "run"
            code, output = launch(folders[config], config).wait()
            assert code == 0, output
        return folders[config]

    return run


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.mark.parametrize(("config", "rank"), [("cpu_fsdp2.yaml", 1), ("cpu_ddp.yaml", 0)])
def test_a_rank_is_killed_and_the_bits_are_those_of_the_straight_run(launch, straight, tmp_path, config, rank):
    """Rank 0 holds ``run.lock``."""
    launched = launch(tmp_path / "run", config, "--max_restarts", 2, lost=f"rank_{rank}")
    code, output = launched.wait()
    assert code == 0, output
    assert f"memsave launch: rank {rank} was ended by signal 9: restart 1 of 2, from the newest checkpoint" in output
    assert output.count("going on after 3 steps") == 1
    assert output.count("memsave launch: ") == 1
    assert "ChildFailedError" not in output
    assert launched.listening == {"127.0.0.1"}
    assert_the_same_run(tmp_path / "run", straight(config))


def test_a_rank_is_stopped(launch, straight, tmp_path):
    """The others name it and end; torch's agent gives it half a minute before it is killed."""
    flags = ["--collective_timeout_minutes", "0.15"]
    launched = launch(tmp_path / "run", "cpu_ddp.yaml", "--max_restarts", 2, lost="stopped", flags=flags)
    code, output = launched.wait()
    assert code == 0, output
    assert re.search(r"for more than 0\.15 minutes .* rank 1 of 2 (does not answer|has not come)", output), output
    assert "memsave launch: rank 0 ended with code 6: restart 1 of 2, from the newest checkpoint" in output
    assert_the_same_run(tmp_path / "run", straight("cpu_ddp.yaml"))


SEVERAL = ("--nnodes", "1:2", "--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", 29500)
SEVERAL += ("--max_restarts", 2, "--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1")


@pytest.mark.parametrize("config", sample(["cpu_fsdp2.yaml"], ["cpu_fsdp2.yaml", "cpu_ddp.yaml"]))
def test_a_machine_is_lost_and_the_other_goes_on_with_the_same_samples(launch, straight, tmp_path, config):
    """Two launchers stand for two machines; one is killed, and its rank asks the other to stop as it ends."""
    straight_losses = losses(straight(config))
    first = launch(tmp_path / "run", config, *SEVERAL, lost="launcher")
    first.wait_for_port(29500)  # it keeps the store of the rendezvous, and with the lower process id it has rank 0
    launch(tmp_path / "run", config, *SEVERAL, lost="launcher")
    code, output = first.wait()
    assert code == 0, output
    assert "memsave launch: rank 0 ended with code 143: restart 1 of 2, from the newest checkpoint" in output
    assert re.search(r"saved as .+, going on as .+: data-exact", output), output
    assert (tmp_path / "run" / "results.json").exists()
    assert losses(tmp_path / "run") == pytest.approx(straight_losses, rel=1e-9)


SHARED = ["--sequence_parallel", "2"]


def test_a_machine_is_lost_and_the_other_goes_on_with_rows_that_its_ranks_share(launch, straight, tmp_path):
    """Two of four ranks, which are a group."""
    options = {"lost": "launcher", "whole": 4, "flags": SHARED}
    first = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, "--num_processes", 4, **options)
    first.wait_for_port(29500)
    launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, "--num_processes", 4, **options)
    code, output = first.wait()
    assert code == 0, output
    assert re.search(
        r"memsave launch: rank [01] ended with code 143: restart 1 of 2, from the newest checkpoint", output
    )
    groups = "2 groups of 2 ranks x 1 accumulation step, going on as 4 samples = 2 x 1 group of 2 ranks x 2"
    assert re.search(rf"saved as 4 samples = 2 x {groups} accumulation steps: data-exact", output), output
    assert losses(tmp_path / "run") == pytest.approx(losses(straight("cpu_ddp.yaml")), rel=1e-12)


def test_ranks_that_are_left_and_make_no_group_end_in_one_line(launch, tmp_path):
    first = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, lost="launcher", flags=SHARED)
    first.wait_for_port(29500)
    launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, lost="launcher", flags=SHARED)
    code, output = first.wait()
    assert code == 2, output
    assert [line for line in output.splitlines() if line.startswith("error: ")] == [
        "error: --sequence_parallel 2: 1 rank cannot be divided into groups of 2: launch a multiple of 2, or leave it "
        "out"
    ]
    assert "Traceback" not in output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_the_first_machine_is_lost_and_the_other_ends_in_one_line(launch, tmp_path):
    first = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, lost="first")
    first.wait_for_port(29500)
    code, output = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL, lost="first").wait()
    assert code == 6, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the machines do not meet at 127.0.0.1:29500 (")
    assert line.endswith("): launch them again, with --resume where the run has begun")
    assert "Traceback" not in output


def test_a_machine_comes_and_the_ranks_go_on_together(launch, straight, tmp_path):
    """Nobody has told the second one of the run that it finds."""
    first = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "step-3").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = launch(tmp_path / "run", "cpu_ddp.yaml", *SEVERAL)
    (code, output), (code_of_second, output_of_second) = first.wait(), second.wait()
    assert (code, code_of_second) == (0, 0), output + output_of_second
    assert "memsave launch: another machine comes, and the ranks start again" in output
    assert "going on after 4 steps" in output + output_of_second
    assert losses(tmp_path / "run") == pytest.approx(losses(straight("cpu_ddp.yaml")), rel=1e-9)


def test_a_mistake_is_told_in_one_line_and_never_tried_again(launch, tmp_path):
    launched = launch(tmp_path / "run", "cpu_ddp.yaml", "--max_restarts", 3, flags=["--micro_batch_size", "0"])
    code, output = launched.wait()
    assert code == 2
    assert [line[:26] for line in output.splitlines() if line.startswith("error: ")] == ["error: --micro_batch_size "]
    assert "Traceback" not in output
    assert "memsave launch: " not in output


@pytest.mark.parametrize("config", ["cpu.yaml", "cpu_ddp.yaml"])
def test_a_signal_to_the_launcher_has_the_ranks_save_and_end(launch, tmp_path, config):
    flags = ["--max_steps", "5000"]
    launched = launch(tmp_path / "run", config, "--max_restarts", 3, flags=flags)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run").glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    launched.process.terminate()
    code, output = launched.wait()
    assert code == 143, output
    assert re.search(r"SIGTERM: stopped after \d+ steps, all of them saved", output)
    assert "memsave launch: " not in output
