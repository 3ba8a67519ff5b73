"""Ranks that start again from the newest checkpoint where one of them is lost: ``memsave launch``.

The launcher is torch's elastic agent, as in torchrun, in the environment that Accelerate prepares for it. Here is what
these two leave open.

NOTE [ elastic launches ], as of torch 2.13 and Accelerate 1.15

1. ``accelerate launch`` takes a fixed number of machines, ends with 1 whatever its ranks end with, and prints a
   traceback of its own below their line.
2. On one machine every world has a store of its own, which listens on the loopback interface alone: this process opens
   the port. A ``TCPStore`` that opens it listens on all interfaces, whichever address it is given
   (https://github.com/pytorch/pytorch/issues/173909).
3. Several machines meet at ``--main_process_ip`` by torch's ``c10d`` rendezvous, also where their number is fixed. It
   would give all worlds one store, in which new ranks find the addresses of lost ones
   (https://github.com/pytorch/pytorch/issues/135712), unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set: then rank 0
   keeps that of its world. The first machine keeps that of the rendezvous, and must live.
4. A world goes on with ``--resume`` where any of its launchers has started ranks before. They tell one another in the
   store of the rendezvous: torch's count of restarts is 0 for a machine that has just come.
5. An end that would come again in the same way ends the launch. When a rank is lost, others end with codes that follow
   from that, so of the codes that say nothing certain the first counts.
6. Ranks whose launcher is gone have all ranks save and stop (``end_with_launcher``). So between machines a stop that
   this launcher has not passed on is taken for a loss; on one machine somebody has asked the ranks for it.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from argparse import HelpFormatter, Namespace
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NoReturn

import psutil
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils import (
    _filter_args,
    check_cuda_p2p_ib_support,
    patch_environment,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]  # it does not name it
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.processes import STOPPING
from memsave_recipes.training.launch.processes import EXIT_CODES, LOST, RESTARTED
from memsave_recipes.training.launch.start import launch_parser

FINAL = frozenset({2, 3, 4, 5})
"""Exit codes of ``docs/failures.md``: bad input, no memory, numbers that are not finite, no proof of the plan."""
LOOPBACK = "127.0.0.1"
MAX_PORT = 2**16 - 1
STOP_S = 3600
"""Ranks end themselves some time after a signal; the launcher, which passes it on, has no need to end them earlier."""
HAS_RUN = "memsave_recipes/has_run"
ENDING = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT")
SIGNALS = ",".join(name for name in ENDING if hasattr(signal, name))  # Windows has the first two
QUIET = {"multiprocessing.api": logging.CRITICAL, "agent.server.api": logging.ERROR}
"""Loggers of torch's agent, which would announce each end of a rank in words of their own."""


def launch(words: Sequence[str]) -> int:
    """Run a script as ``accelerate launch`` would, and again where a rank is lost; returns the exit code.

    Args:
        words: the arguments of ``accelerate launch``, with ``--nnodes`` or without.

    Raises:
        InputError: they make no launch.
    """
    args = _parse(words)
    if args.cpu or not (args.multi_gpu or args.use_fsdp):
        return _launch_process(args)
    return _launch_ranks(args)


def _parse(words: Sequence[str]) -> Namespace:
    """The arguments, with what the config file says."""
    parser: Any = launch_parser()
    parser.prog, parser.formatter_class, parser.error = "memsave launch", HelpFormatter, _refuse
    args: Namespace = parser.parse_args(list(words))
    if args.nnodes is not None:
        args.num_machines = _machines(args.nnodes)[1]
    counts_gpus = args.num_processes is None and args.config_file is None
    try:
        args, _, _ = _validate_launch_command(args)
    except Exception as error:  # of many kinds
        if args.config_file and isinstance(error, AttributeError | TypeError):
            raise InputError(
                f"--config_file {args.config_file} does not hold lines such as `num_processes: 2`: take one of "
                "accelerate_configs/"
            ) from error
        raise InputError(f"the arguments before the script: {error}") from error
    needed = ["num_machines", "use_cpu", *(["num_processes"] if args.multi_gpu or args.use_fsdp else [])]
    if empty := [name for name in needed if getattr(args, name, "") is None]:
        raise InputError(f"--config_file {args.config_file} has no value for {', '.join(empty)}: write one")
    if args.use_deepspeed or args.use_megatron_lm or args.tpu:
        raise InputError("memsave launch starts the recipes, which take no DeepSpeed, Megatron-LM or TPU: leave it out")
    if counts_gpus and args.num_processes == 0:
        args.num_processes = 1  # on the CPU
    require(args.max_restarts >= 0, "--max_restarts", args.max_restarts, "at least 0")
    asked = args.num_processes
    is_number = isinstance(asked, int) and asked >= 1
    require(asked is None or is_number, "--num_processes", asked, "a whole number, at least 1")
    port = args.main_process_port or 0
    require(0 <= port <= MAX_PORT, "--main_process_port", port, f"in [0, {MAX_PORT}]")
    args.nnodes = args.nnodes or str(args.num_machines)
    return args


def _refuse(message: str) -> NoReturn:
    raise InputError(f"{message} (memsave launch --help lists the flags)")


def _machines(nnodes: str) -> tuple[int, int]:
    """The fewest and the most."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    require(0 < fewest <= most, "--nnodes", nnodes, "a number of machines, or a range such as 1:2")
    return fewest, most


def _launch_process(args: Namespace) -> int:
    """One process, in no world."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    for number in range(1, args.max_restarts + 1):
        code = _run(command, environment)
        if code == 0 or _is_final(code):
            return code
        _announce(f"the process {_how(code)}", number, args.max_restarts)
        environment[RESTARTED] = "1"
    return _end("the process", _run(command, environment), args.max_restarts)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a process, which gets the signals that this one is sent."""
    process = subprocess.Popen(command, env=environment)

    def pass_on(number: int, _: object) -> None:
        if number != signal.SIGINT or sys.platform != "win32":  # whose console sends it to that process too
            process.send_signal(number)

    for number in STOPPING:
        signal.signal(number, pass_on)
    return process.wait()


def _launch_ranks(args: Namespace) -> int:
    """The ranks of this machine, in a world of this one or of several."""
    _, most = _machines(args.nnodes)
    if args.num_processes % most:
        raise InputError(
            f"--num_processes {args.num_processes} counts all {most} machines: make it a multiple of {most}"
        )
    address = LOOPBACK
    if most > 1:
        address = _address_towards(args.main_process_ip, args.main_process_port)
        args.rdzv_backend, args.rdzv_endpoint = "c10d", f"{args.main_process_ip}:{args.main_process_port}"
    args.num_processes //= most
    args.num_machines, args.main_process_port = 1, 0  # to Accelerate; the world is torch's
    others = {*psutil.Process().children(recursive=True)}
    with patch_environment(**_environment(args, address)):
        script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
        try:
            config, command, words = config_from_args(_filter_args(args, get_args_parser(), script))
        except (ValueError, OSError) as error:
            raise InputError(f"the arguments before the script: {error}") from error
        try:
            return _run_ranks(config, command, words, address)
        except SignalException as stop:
            return EXIT_CODES.get(stop.sigval, 128 + stop.sigval)
        except KeyboardInterrupt:  # before there are ranks
            return EXIT_CODES[signal.SIGINT]
        except RendezvousClosedError:
            print("error: another machine has ended the launch; its output says why", file=sys.stderr)
        except RendezvousError as error:
            way_out = "launch them again, with --resume where the run has begun"
            print(f"error: the machines do not meet at {config.rdzv_endpoint} ({error}): {way_out}", file=sys.stderr)
        finally:
            for left in {*psutil.Process().children(recursive=True)} - others:
                left.kill()  # ranks that are stopped heed no other signal
        return LOST


def _run_ranks(config: LaunchConfig, command: Any, words: Sequence[str], address: str) -> int:
    """The exit code of the launch, when torch's agent has run it."""
    for name, level in QUIET.items():
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(level)
    handler = _OneMachine() if config.max_nodes == 1 else _meeting(config, address)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=command,
        args=tuple(words),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=address,
        numa_options=config.numa_options,
    )
    agent = _Agent(spec, config)
    agent.run()
    handler.shutdown()
    if agent.lost is None:
        return 0
    rank, code = agent.lost
    return _end(f"rank {rank}", code, config.max_restarts)


def _environment(args: Namespace, address: str) -> dict[str, str]:
    """The environment that Accelerate prepares, with what a launch needs beside it."""
    prepared: dict[str, str] = prepare_multi_gpu_env(args)
    unless_set = {} if check_cuda_p2p_ib_support() else {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    if sys.platform == "win32":
        unless_set["USE_LIBUV"] = "0"  # which torch is built without there
    elif ip_address(address).is_loopback:
        unless_set["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    always = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS}
    return unless_set | prepared | always


def _address_towards(host: str | None, port: int | None) -> str:
    """The address of this machine on its way to ``host``, where the machines meet.

    Raises:
        InputError: there is no way.
    """
    require(bool(host and port), "--main_process_ip and --main_process_port", f"{host}:{port}", "those of one machine")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise InputError(f"--main_process_ip {host} cannot be reached ({error.strerror}): check the address") from error


def _meeting(config: LaunchConfig, address: str) -> RendezvousHandler:
    """The rendezvous of several machines."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=address,
        **config.rdzv_configs,
    )
    return get_rendezvous_handler(parameters)


class _OneMachine(StaticTCPRendezvous):
    """The rendezvous of a machine with itself: rule 2 of NOTE [ elastic launches ]."""

    def __init__(self) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=str(os.getpid()), timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        how: dict[str, Any] = {"master_listen_fd": listener.detach(), "use_libuv": sys.platform != "win32"}
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, **how)
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(LOOPBACK, port))


class _Agent(LocalElasticAgent):
    """torch's agent, by rules 4 to 6 of NOTE [ elastic launches ].

    Attributes:
        lost: the rank whose end counts, with its exit code; ``None`` while all run, and where all are done.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig) -> None:
        assert config.logs_specs is not None
        super().__init__(spec, config.logs_specs, log_line_prefix_template=config.log_line_prefix_template)
        self._shutdown_timeout = STOP_S
        self._is_alone = config.max_nodes == 1
        self._has_run = False
        self.lost: tuple[int, int] | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        group: Any = worker_group
        store, rank, num_launchers = group.store, group.group_rank, group.group_world_size
        store.set(f"{HAS_RUN}/{rank}", str(int(self._has_run)))
        if b"1" in store.multi_get([f"{HAS_RUN}/{other}" for other in range(num_launchers)]):
            os.environ[RESTARTED] = "1"
        self._has_run = True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.lost = _decisive(result.failures)
        if self.lost is not None and _is_final(self.lost[1], is_alone=self._is_alone):
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.lost is None:
            print("memsave launch: another machine comes, and the ranks start again", file=sys.stderr, flush=True)
        else:
            rank, code = self.lost
            most = worker_group.spec.max_restarts
            _announce(f"rank {rank} {_how(code)}", most - self._remaining_restarts, most)
        super()._restart_workers(worker_group)


def _decisive(failures: Mapping[int, ProcessFailure]) -> tuple[int, int] | None:
    """The rank whose end counts by rule 5, and its exit code; ``None`` where none has failed."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}  # in the order in which they were seen
    certain = [(rank, code) for rank, code in codes.items() if code in FINAL]
    return next(iter(certain or codes.items()), None)


def _is_final(code: int, *, is_alone: bool = True) -> bool:
    """Whether it ends the launch: rules 5 and 6."""
    return code in FINAL or (is_alone and code in EXIT_CODES.values())


def _end(who: str, code: int, max_restarts: int) -> int:
    """The exit code of a launch that ends with ``code``; a process that was ended by a signal has not spoken."""
    if code >= 0:
        return code
    left = f"no restart is left of --max_restarts {max_restarts}"
    print(f"error: {who} {_how(code)}, and {left}: go on with --resume", file=sys.stderr)
    return LOST


def _announce(what: str, number: int, most: int) -> None:
    line = f"memsave launch: {what}: restart {number} of {most}, from the newest checkpoint"
    print(line, file=sys.stderr, flush=True)


def _how(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
