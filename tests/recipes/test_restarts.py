"""A recipe whose ranks or launcher are killed: torchrun, the engine of ``accelerate launch``, starts ranks again."""

import re
import socket

import psutil
import pytest
from lives import assert_the_same_run, end_of, environment_of, launch, wait_for, wait_for_checkpoint

RECIPE = "image_classification"
SAVES = ("--save_every", "1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run on two ranks that nothing stops."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    code, output = end_of(launch(RECIPE, "cpu_ddp", folder=folder))
    assert code == 0, output
    return folder


def ranks_of(launcher):
    """Its processes, by rank."""
    ranks = {process.environ().get("LOCAL_RANK"): process for process in psutil.Process(launcher.pid).children()}
    return [ranks["0"], ranks["1"]]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_and_the_bits_are_those_of_the_straight_run(straight, tmp_path, rank):
    """Rank 0 holds ``run.lock``. The command line does not say ``--resume``."""
    folder = tmp_path / "run"
    launcher = launch(RECIPE, "cpu_ddp", *SAVES, folder=folder, of_launch=["--max_restarts", 2])
    wait_for_checkpoint(launcher, folder)
    ranks_of(launcher)[rank].kill()
    code, output = end_of(launcher)
    assert code == 0, output
    assert output.count("going on after") == 1
    assert_the_same_run(folder, straight)


@pytest.mark.slow
def test_the_launcher_is_killed_and_the_same_line_goes_on(straight, tmp_path):
    """Its ranks save and end, though nothing passes a signal on to them."""
    folder = tmp_path / "run"
    words = (RECIPE, "cpu_ddp", *SAVES, "--resume")
    launcher = launch(*words, folder=folder, of_launch=["--max_restarts", 2])
    wait_for_checkpoint(launcher, folder)
    ranks = ranks_of(launcher)
    launcher.kill()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    _, output = end_of(launcher)
    assert re.search(r"SIGUSR1: stopped after \d+ steps, all of them saved", output), output
    code, output = end_of(launch(*words, folder=folder, of_launch=["--max_restarts", 2]))
    assert code == 0, output
    assert "going on after" in output
    assert_the_same_run(folder, straight)


@pytest.mark.slow
def test_a_mistake_is_told_each_time_and_no_more_often_than_there_are_restarts(tmp_path):
    mistake = ("--micro_batch_size", "0")
    launcher = launch(RECIPE, "cpu_ddp", *mistake, folder=tmp_path / "run", of_launch=["--max_restarts", 1])
    code, output = end_of(launcher)
    assert code == 1
    assert output.count("error: --micro_batch_size ") == 2, output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_launchers_stand_for_two_machines(straight, tmp_path):
    """A rank of one is killed: both start their ranks again, in a store of their own."""
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    several = ["--num_machines", 2, "--num_cpu_threads_per_process", 1, "--rdzv_backend", "c10d", "--max_restarts", 2]
    several += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    environment = environment_of(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def launch_on(machine):
        flags = {"folder": folder, "of_launch": [*several, "--machine_rank", machine], "environment": environment}
        return launch(RECIPE, "cpu_ddp", *SAVES, "--resume", **flags)

    def is_taken():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    first = launch_on(0)
    wait_for(first, is_taken)  # or the second may take it, as both are one machine, and Accelerate ends the first
    second = launch_on(1)
    wait_for_checkpoint(first, folder)
    psutil.Process(second.pid).children()[0].kill()
    (code, output), (code_of_second, output_of_second) = end_of(first), end_of(second)
    assert (code, code_of_second) == (0, 0), output + output_of_second
    assert "going on after" in output + output_of_second
    assert_the_same_run(folder, straight)
