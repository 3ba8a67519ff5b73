"""``memsave launch`` starts a script again where a rank is lost, and never where another start would end alike."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from memsave_recipes.core.errors import InputError
from memsave_recipes.tools.cli import main
from memsave_recipes.training.launch import elastic
from memsave_recipes.training.launch.elastic import launch
from memsave_recipes.training.launch.processes import EXIT_CODES, LOST

# Of each start, rank 1 ends as its word says: a code, or minus the number of a signal to itself. Rank 0 waits.
SCRIPT = """
import os, sys, time
from pathlib import Path
folder, *ends = sys.argv[1:]
rank = os.environ.get("RANK", "1")
number = len(list(Path(folder).glob(f"start-*-{rank}")))
seen = ("MEMSAVE_RESTARTED" in os.environ, os.environ.get("MASTER_PORT"), os.environ.get("GLOO_SOCKET_IFNAME"))
Path(folder, f"start-{number}-{rank}").write_text(repr(seen))
end = int(ends[number])
while "RANK" in os.environ and not Path(folder, f"start-{number}-0").exists():
    time.sleep(0.01)
if rank == "0" and end:
    time.sleep(60)
if end < 0:
    os.kill(os.getpid(), -end)
sys.exit(end)
"""


def launched(folder, flags, ends, num_processes=2):
    """The exit code, what is printed, and what the ranks of each start have seen."""
    script, printed = folder / "script.py", folder / "printed"
    script.write_text(SCRIPT)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    kind = ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    words = [*kind, "--num_processes", num_processes, "--num_machines", 1, "--num_cpu_threads_per_process", 1]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", *flags]
    code = launch([str(word) for word in [*words, script, folder, *ends]])
    sys.stdout.flush()
    starts = {path.name: eval(path.read_text()) for path in folder.glob("start-*")}
    return code, printed.read_text().splitlines(), starts


@pytest.mark.parametrize("code", [2, 3, 4, 5, *sorted(set(EXIT_CODES.values()))])
def test_an_end_that_would_come_again_is_the_end_of_the_launch(run_trial, tmp_path, code):
    """Without a word of its own: the rank has spoken."""
    found, printed, starts = run_trial(launched, tmp_path, ["--max_restarts", 3], [code, 0])
    assert (found, printed) == (code, [])
    assert sorted(starts) == ["start-0-0", "start-0-1"]


@pytest.mark.parametrize(
    ("end", "how"), [(-signal.SIGKILL, "was ended by signal 9"), (1, "ended with code 1"), (LOST, "ended with code 6")]
)
def test_a_lost_rank_starts_all_of_them_again(run_trial, tmp_path, end, how):
    code, printed, starts = run_trial(launched, tmp_path, ["--max_restarts", 3], [end, end, 0])
    assert code == 0
    assert printed == [
        f"memsave launch: rank 1 {how}: restart {number} of 3, from the newest checkpoint" for number in (1, 2)
    ]
    assert len(starts) == 6
    restarted, ports, interfaces = zip(*(starts[f"start-{number}-0"] for number in range(3)), strict=True)
    assert restarted == (False, True, True)
    assert len(set(ports)) == 3  # a store each
    assert {name[:2] for name in interfaces} == {"lo"}


@pytest.mark.parametrize(("end", "code"), [(-signal.SIGKILL, LOST), (1, 1)])
def test_no_restart_is_left(run_trial, tmp_path, end, code):
    """A rank that was killed could not speak; one that ended with 1 has left its traceback."""
    found, printed, _ = run_trial(launched, tmp_path, ["--max_restarts", 1], [end, end])
    assert found == code
    told = ["error: rank 1 was ended by signal 9, and no restart is left of --max_restarts 1: go on with --resume"]
    assert printed[1:] == (told if end < 0 else [])


def test_a_single_process_too(run_trial, tmp_path):
    code, printed, starts = run_trial(launched, tmp_path, ["--max_restarts", 2], [-signal.SIGKILL, 1, 2], 1)
    assert code == 2
    assert [line.partition(": restart ")[0] for line in printed] == [
        "memsave launch: the process was ended by signal 9",
        "memsave launch: the process ended with code 1",
    ]
    assert [starts[f"start-{number}-1"] for number in range(3)] == [
        (False, None, None),
        (True, None, None),
        (True, None, None),
    ]


STOPPED = """
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
while not (folder / "pid-1").exists():
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
    time.sleep(1)
    os.kill(os.getppid(), number)
time.sleep(60)
"""


def ranks_of_a_launcher_that_is_told_three_times(folder):
    """The exit code of the launch, its ranks, and how many of them do not end."""
    script = folder / "stopped.py"
    script.write_text(STOPPED)
    words = [*SEVERAL, "2", "--num_machines", "1", "--num_cpu_threads_per_process", "1", str(script), str(folder)]
    code = launch(words)
    left = psutil.wait_procs(psutil.Process().children(), timeout=10)[1]
    return code, sorted(path.name for path in folder.glob("pid-*")), len(left)


def test_a_rank_that_is_stopped_ends_with_its_launcher(run_trial, tmp_path):
    """One that heeds no signal, too."""
    assert run_trial(ranks_of_a_launcher_that_is_told_three_times, tmp_path) == (130, ["pid-0", "pid-1"], 0)


def listening_and_answer():
    """The addresses where this process listens, and what a client finds in the store."""
    info = elastic._OneMachine().next_rendezvous()
    info.store.set("key", "value")
    place = info.bootstrap_store_info
    client = TCPStore(place.master_addr, place.master_port, is_master=False)
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {one.laddr.ip for one in listening if one.pid == os.getpid()}, client.get("key")


def test_the_store_of_one_machine_listens_on_loopback_alone(run_trial):
    assert run_trial(listening_and_answer) == ({"127.0.0.1"}, b"value")


RANKS = ["--config_file", str(Path(__file__).parents[3] / "accelerate_configs/cpu_ddp.yaml"), "--num_processes"]
SEVERAL = ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "the following arguments are required: training_script"),
        (["--wat", "script.py"], "unrecognized arguments: --wat"),
        (["--config_file", "nowhere.yaml", "script.py"], "nowhere.yaml"),
        ([*SEVERAL, "2", "--max_restarts", "-1", "script.py"], "--max_restarts -1: must be at least 0"),
        ([*SEVERAL, "2", "--nnodes", "2:1", "script.py"], "--nnodes 2:1: must be a number of machines, or a range"),
        ([*SEVERAL, "2", "--nnodes", "all", "script.py"], "--nnodes all: must be a number of machines, or a range"),
        ([*SEVERAL, "3", "--nnodes", "1:2", "script.py"], "--num_processes 3 counts all 2 machines"),
        ([*SEVERAL, "2", "--nnodes", "1:2", "script.py"], "--main_process_ip and --main_process_port None:None"),
        ([*RANKS, "0", "script.py"], "--num_processes 0: must be a whole number, at least 1"),
        ([*RANKS, "-2", "script.py"], "--num_processes -2: must be a whole number, at least 1"),
        ([*SEVERAL, "2", "--main_process_port", "99999", "script.py"], "--main_process_port 99999: must be in [0, 65"),
        ([*SEVERAL, "2", "--tee", "9", "script.py"], "the arguments before the script: 9 does not match"),
        ([*SEVERAL, "2", "--log_dir", "/proc/none", "script.py"], "No such file or directory: '/proc/none'"),
        (["--config_file", "list.yaml", "script.py"], "--config_file list.yaml does not hold lines such as"),
        (["--config_file", "empty.yaml", "script.py"], "--config_file empty.yaml does not hold lines such as"),
        (["--config_file", "no_use_cpu.yaml", "script.py"], "no_use_cpu.yaml has no value for use_cpu"),
        (["--config_file", "no_number.yaml", "script.py"], "--config_file no_number.yaml"),
        (["--config_file", "no_machines.yaml", "script.py"], "no_machines.yaml has no value for num_machines"),
        (["--config_file", "words.yaml", "script.py"], "--num_processes many: must be a whole number, at least 1"),
        (["--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "script.py"], "no DeepSpeed"),
    ],
    ids=" ".join,
)
def test_words_that_make_no_launch_are_one_line_and_exit_code_2(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "empty.yaml").write_text("")
    whole = {"distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": 2, "use_cpu": "true"}
    for name, key in {"use_cpu": "use_cpu", "number": "num_processes", "machines": "num_machines"}.items():
        lines = (f"{one}: {'' if one == key else value}\n" for one, value in whole.items())
        (tmp_path / f"no_{name}.yaml").write_text("".join(lines))
    (tmp_path / "words.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: many\n")
    assert main(["launch", *words]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert line in errors[0]


def test_without_a_launch_file_a_process_runs_also_where_there_is_no_gpu():
    assert elastic._parse(["script.py"]).num_processes >= 1


def test_the_way_to_the_meeting_place_decides_the_address():
    assert elastic._address_towards("127.0.0.1", 29500) == "127.0.0.1"
    with pytest.raises(InputError, match=r"--main_process_ip nowhere\.invalid cannot be reached"):
        elastic._address_towards("nowhere.invalid", 29500)


def test_help_is_that_of_accelerate_with_the_range_of_machines(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    assert ended.value.code == 0
    found = capsys.readouterr().out
    assert all(flag in found for flag in ("--config_file", "--max_restarts", "--nnodes MIN:MAX"))
