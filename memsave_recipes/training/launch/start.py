"""The ``Accelerator`` of a run, in the world that the launch asked for or not at all, and its environment.

``accelerate launch`` can start fewer processes than asked for, or processes that do not know of each other, and exit
with 0: a run on the wrong number of devices that looks like any other. ``Accelerator`` either is in the world that was
asked for or raises one line that says how to get it.

Notes: ``docs/design/training.md``.
"""

import atexit
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    gather_object,
    get_cpu_distributed_information,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined, unused-ignore]  # it does not name them
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from torch.nn.parallel import DistributedDataParallel
from transformers.utils.logging import disable_progress_bar

from memsave_recipes.core.activations.micro_batches import WrapperTensor
from memsave_recipes.core.activations.offload import HOST_MEMORY
from memsave_recipes.core.activations.streaming import resident_tensors, stream_of
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.masters import reduce_in_float32
from memsave_recipes.core.sharding import is_sharded
from memsave_recipes.models.what_trains import leaves_of
from memsave_recipes.training.arguments import BFLOAT16_MASTER, Dtype
from memsave_recipes.training.launch.float8 import FLOAT8, float8_recipe
from memsave_recipes.training.launch.processes import end_with_launcher, is_restarted, launch_arguments

LIMIT_S = 30 * 60.0
"""How long ranks wait for one another, and a stop by a signal for the end of the step."""
GROUP_TIMEOUT_MARGIN_S = 30 * 60.0
"""The process group gives up, without naming a rank, this long after the limit at which missing ranks are named."""
RESTARTED = "memsave-restarted"
SHARDING = {name: f"ACCELERATE_USE_{name.upper()}" for name in ("FSDP", "DeepSpeed", "Megatron_LM")}


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The world that the launch asked for; ``num_processes`` is over all machines, ``None`` if unknown."""

    num_processes: int | None = None
    num_machines: int = 1
    use_cpu: bool = False


def _stays_on_cpu(request: LaunchRequest) -> bool:
    return request.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def describe_no_gpu() -> str | None:
    """A line where the launch leaves the device open or asks for GPUs, and torch finds none."""
    asks_for_cpu = read_launch_request().use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    if asks_for_cpu or torch.accelerator.is_available():
        return None
    is_for_gpus = torch.version.cuda or torch.version.hip
    why = "is its driver installed?" if is_for_gpus else f"torch {torch.__version__} is a build for the CPU"
    return f"note: torch finds no GPU ({why}): this run trains on the CPU"


def chosen_dtype(asked: Dtype) -> Dtype:
    """Return what ``--dtype`` is on the device of the launch: NVIDIA's GPUs before Ampere only emulate bfloat16.

    Raises:
        InputError: bfloat16 on such a GPU, or float16 without the scaled loss of fp16.
    """
    if asked in ("float32", "float64"):
        return asked
    on_cpu = _stays_on_cpu(read_launch_request())
    emulates = not on_cpu and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    dtype: Dtype = asked if asked != "auto" else "float16" if emulates else "bfloat16"
    if dtype != "float16" and emulates:
        raise InputError(
            f"--dtype {dtype}: the {torch.cuda.get_device_name()} computes in float16 and not in bfloat16: take "
            "--dtype float16 with --lora or --offload_optimizer step, or --mixed_precision fp16 in place of --dtype"
        )
    if dtype == "float16" and on_cpu:
        raise InputError("--dtype float16 needs --mixed_precision fp16, which does not work on the CPU: take bfloat16")
    if dtype == "float16" and os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":
        raise InputError(f"--dtype {asked} is float16 here, which needs --mixed_precision fp16: take that for bf16")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if dtype == BFLOAT16_MASTER and precision in ("fp16", "fp8"):
        raise InputError(f"--dtype {asked} computes in bfloat16: launch without --mixed_precision {precision}")
    return dtype


def read_launch_request() -> LaunchRequest:
    """Read the request from the parent process; empty where that is no launcher of ours or cannot be read."""
    try:
        parent = psutil.Process().parent()
        arguments = launch_arguments(parent.cmdline()) if parent else None
        return parse_launch_request(arguments, parent.cwd()) if arguments and parent else LaunchRequest()
    except (psutil.Error, OSError, ValueError, SystemExit):  # SystemExit: argparse could not make sense of it
        return LaunchRequest()


def parse_launch_request(arguments: list[str], directory: str) -> LaunchRequest:
    """Parse the arguments of ``accelerate launch`` as it does: flags first, then the config file they name.

    Args:
        arguments: those after ``accelerate launch``.
        directory: where it was started; a relative ``--config_file`` counts from there.
    """
    flags: Namespace = launch_command_parser().parse_args(arguments)
    if flags.config_file is not None:
        config_file = str(Path(directory, flags.config_file))
    elif os.path.isfile(default_config_file) and not flags.cpu:
        config_file = default_config_file
    else:
        return LaunchRequest(num_processes=flags.num_processes, num_machines=flags.num_machines or 1, use_cpu=flags.cpu)
    config = load_config_from_file(config_file)
    return LaunchRequest(
        num_processes=config.num_processes if flags.num_processes is None else flags.num_processes,
        num_machines=flags.num_machines or config.num_machines,
        use_cpu=flags.cpu or config.use_cpu,
    )


def _check_whole_weights() -> None:
    """Rule 5 of NOTE [ silent launches ]."""
    for name, variable in SHARDING.items():
        if parse_flag_from_env(variable):
            raise InputError(
                f"{name} shards the weights in its own way: launch with "
                "`--config_file accelerate_configs/multi_gpu.yaml`, and pass a recipe --shard for FSDP2"
            )


def _check_not_compiled() -> None:
    """Rule 6 of NOTE [ silent launches ]."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        raise InputError(
            f"dynamo_backend {backend} compiles the whole model, which no plan is made for: launch with "
            "`--dynamo_backend no`, and compile its layers with --compile"
        )


def _check_all_started(request: LaunchRequest, started: int, on_cpu: bool) -> None:
    """Rules 1 and 3 of NOTE [ silent launches ]: refuse a world of another size than the one asked for."""
    asked, machines = request.num_processes, request.num_machines
    if asked is None or asked == started:
        return
    if asked < started:
        way_out = f"unset WORLD_SIZE={started}, which another launcher left in the environment"
    elif machines > 1 and asked % machines:
        way_out = f"--num_processes counts those of all {machines} machines, make it a multiple of {machines}"
    else:
        several = "cpu_ddp" if on_cpu else "multi_gpu"
        config = "multi_node" if machines > 1 else several
        way_out = (
            f"launch with `--config_file accelerate_configs/{config}.yaml --num_processes {asked}`, without `--cpu`"
        )
    raise InputError(f"num_processes is {asked} but the launcher started {started}: {way_out}")


def _check_enough_devices(started: int, started_here: int) -> None:
    """Rule 4 of NOTE [ silent launches ]: refuse to put two processes on one accelerator."""
    devices = torch.accelerator.device_count()
    if started_here > devices:
        fitting = devices * (started // started_here)
        raise InputError(
            f"{started_here} processes were started on this machine, which has {devices} accelerator(s): launch with "
            f"`--num_processes {fitting}`, or take the CPU with accelerate_configs/cpu_ddp.yaml"
        )


def _check_kind_of_device() -> None:
    """Refuse Apple's GPUs with a torch that counts no peaks there."""
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type == "mps" and torch.__version__ < "2.13":
        raise InputError(
            f"training on an Apple GPU (mps) needs torch 2.13 and this is {torch.__version__}: install it, or launch "
            "with `--config_file accelerate_configs/cpu.yaml`"
        )


def _asked_precision(kwargs: dict[str, Any]) -> str | None:
    return kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")


def _check_cpu_precision(kwargs: dict[str, Any]) -> None:
    """Refuse fp16, which Accelerate does not do on the CPU and says so in a traceback."""
    if _asked_precision(kwargs) == "fp16":
        raise InputError("--mixed_precision fp16 does not work on the CPU: take bf16 or no")


def _handlers(kwargs: dict[str, Any]) -> list[KwargsHandler]:
    timeout = timedelta(seconds=LIMIT_S + GROUP_TIMEOUT_MARGIN_S)
    return [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        AutocastKwargs(cache_enabled=False),
        InitProcessGroupKwargs(timeout=timeout, init_method=f"{RESTARTED}://" if is_restarted() else None),
        *([float8_recipe()] if _asked_precision(kwargs) == FLOAT8 else []),
    ]


def _meet_again(_: str, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    """Give restarted ranks of one machine keys of their own in the store of the launcher: rule 7."""
    for store, rank, num_ranks in rendezvous("env://", **kwargs):
        is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"  # other machines may count other restarts
        own = PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store) if is_alone else store
        yield own, rank, num_ranks


register_rendezvous_handler(RESTARTED, _meet_again)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]  # accelerate has no types
    """Accelerate's own, on the device and in the world that the launch asked for; it ends with its launcher.

    It stays on the CPU where there is no accelerator or where the launch says ``use_cpu: true`` or ``--cpu``. Autocast
    keeps no casts for later: its cache would hold a copy of all weights until the forward ends, also of those whose
    activations are recomputed, and is of use to weights that a forward uses twice alone.

    Args:
        **kwargs: for ``accelerate.Accelerator``; device, accumulation and ``kwargs_handlers`` are decided here.

    Raises:
        InputError: the number of processes is not the one asked for or exceeds this machine's accelerators, or the
            precision does not work on the CPU, or torch is too old for an Apple GPU, or the weights are to be cut up,
            or the model is to be compiled.
    """

    def __init__(self, **kwargs: Any) -> None:
        _check_whole_weights()
        _check_not_compiled()
        end_with_launcher()
        request = read_launch_request()
        world = get_cpu_distributed_information()  # the launcher's environment variables, with or without GPUs
        on_cpu = _stays_on_cpu(request)
        _check_all_started(request, world.world_size, on_cpu)
        if on_cpu:
            _check_cpu_precision(kwargs)
        else:
            _check_kind_of_device()
            _check_enough_devices(world.world_size, world.local_world_size)
        super().__init__(
            cpu=on_cpu,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=_handlers(kwargs),
            **kwargs,
        )
        if self.num_processes < world.world_size:
            raise InputError(
                f"the launcher started {world.world_size} processes but this one joined a world of "
                f"{self.num_processes}: make the Accelerator before anything else that sets up Accelerate, and launch "
                "with `accelerate launch`"
            )
        if on_cpu:
            atexit.register(drain_gloo)
        # Accelerate 1.15 gathers on GPUs under a name that torch 2.13 calls old, in a line from each rank.
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
        if not self.is_main_process or not sys.stderr.isatty():
            disable_progress_bar()  # of transformers, which would draw it into a log file, and once a rank

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare as Accelerate does, with these differences.

        1. Shards stay as they are, without DDP around them, and so do weights that are streamed from the host.
        2. DDP is left out where it would refuse: no weight that stays on the device trains; and on a single rank.
        3. DDP's buckets are fixed: ``fix_buckets``.
        """
        is_whole = not is_sharded(model)
        reduces = any(tensor.requires_grad for tensor in resident_tensors(model))
        if not is_whole or stream_of(model) is not None:
            kwargs["device_placement"] = False
        if not (is_whole and reduces) or self.num_processes == 1:
            kwargs["evaluation_mode"] = True
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        if isinstance(prepared, DistributedDataParallel):
            fix_buckets(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``loss.backward(**kwargs)``, of the scaled loss under fp16; nothing is divided by accumulation steps."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def end_training(self) -> None:
        """Drain gloo before the process group is destroyed."""
        drain_gloo()
        super().end_training()


def unused_weights(trained: nn.Module, forward: Callable[[], Tensor]) -> dict[str, nn.Parameter]:
    """The weights that train and have no part in the loss of ``forward`` on any rank, by name.

    A model that is built for several tasks has such weights. DDP would wait for their gradients, where a single rank
    never updates them. What the forward saves for backward is not kept. Micro-batches in lockstep, each of which has
    views of the weights, are not looked at.
    """
    with saved_tensors_hooks(lambda tensor: tensor.new_empty(0), lambda nothing: nothing):
        loss = forward()
    if isinstance(loss, WrapperTensor):
        return {}
    used = leaves_of(loss)
    trains = {name: weight for name, weight in trained.named_parameters() if weight.requires_grad}
    of_ranks: list[set[str]] = gather_object([{name for name, weight in trains.items() if weight not in used}])
    return {name: trains[name] for name in sorted(set.intersection(*of_ranks))}


def refuse_gradients(weights: Mapping[str, nn.Parameter]) -> None:
    """End the run where one of ``weights``, by name, gets a gradient, which DDP does not reduce."""

    def refuse(name: str, _: Tensor) -> None:
        raise InputError(
            f"{name} is used in this batch, but was not used in the first one, so the ranks do not reduce its "
            f"gradient: pass --shard full, which does"
        )

    for name, weight in weights.items():
        weight.register_post_accumulate_grad_hook(partial(refuse, name))


def check_gradients(model: nn.Module) -> None:
    """Refuse weights that the first backward gave no gradient: DDP waits for it in the next forward.

    Raises:
        InputError: names them.
    """
    if isinstance(model, DistributedDataParallel):
        weights = [(name, one) for name, one in model.module.named_parameters() if one.requires_grad]
        missing = [name for name, one in weights if one.grad is None and name not in model.parameters_to_ignore]
        if missing:
            raise InputError(
                f"{len(missing)} weights are not used in the loss of a rank ({missing[0]}, ...), and DDP waits for "
                "their gradients: pass --shard full, which does not, or --lora, which freezes them"
            )


def fix_buckets(model: DistributedDataParallel) -> None:
    """Make DDP sort its buckets now, and not after the first step.

    It does so once, by the order in which the first backward has the gradients ready. Over three ranks and more the
    place of a gradient in its bucket decides the order of its sum, so a run that goes on would begin with other last
    bits than the run that nothing stopped. Here a backward of all parameters, without the model, comes first: it has
    them ready in the reverse order of their registration. The next forward would sort them, in a collective, so that
    comes here as well.
    """
    reduce_in_float32(model)
    inner = model.module
    own = vars(inner).get("forward")
    reduced = (one for name, one in inner.named_parameters() if name not in model.parameters_to_ignore)
    parts = [parameter.sum() for parameter in reduced if parameter.requires_grad]
    inner.forward = lambda _: sum(parts)
    try:
        model(None).backward()  # an argument, since DDP with `device_ids` takes the first of those it has moved
        with model.no_sync():
            model(None)
    finally:
        if own is None:
            del inner.forward
        else:
            inner.forward = own
    model.require_forward_param_sync = True  # as before the first step: buffers are broadcast
    model.zero_grad()


def drain_gloo() -> None:
    """Give gloo's threads time to drop the last collective before its process group or the interpreter goes.

    Freeing a process group waits, with Python's lock held, for a thread that may want that lock to free the tensors of
    the last collective: a rank that comes to its end right after one hangs forever (torch 2.13: 2 of 3 launches of the
    image recipe on a busy machine).

    A process that ends right after a collective without ``Accelerator.end_training()``, which is every failure that
    ranks agree on, may otherwise abort with signal 6 instead of its exit code (torch 2.13: in 4 to 8 of 10 launches of
    4 ranks).
    Destroying the group here instead would wait for a collective that the other ranks never join.
    """
    if torch.distributed.is_initialized():
        time.sleep(0.2)


def synchronize_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` with its BatchNorm layers normalising over all ranks.

    Raises:
        InputError: on a CPU or an Apple GPU, for which torch has no such layer.
    """
    if device.type in HOST_MEMORY:
        raise InputError("--batchnorm sync works on CUDA devices only: leave it out")
    synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synchronized


INSTRUCTION_LIMITS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""The variables that keep the libraries of torch from an instruction set; torch's own shows in its capability."""
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "flash-attn-3", "memsave-recipes")


def installed_versions() -> dict[str, str]:
    """Of ``PACKAGES``."""
    return {name: _version(name) for name in PACKAGES}


def describe_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, commit and hardware, for ``config.json`` and the trackers."""
    return {
        "versions": {"python": platform.python_version(), **installed_versions()},
        "git_commit": _git_commit(),
        "device": device_name(accelerator.device),
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def deterministic_kernels(wanted: bool, *, later: bool = False) -> Iterator[None]:
    """Where ``wanted``, torch takes kernels that add in a fixed order; it warns of an operator that has none.

    Begin before the device is used: cuBLAS reads its variable once. See
    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html

    Args:
        later: they are not taken yet, but ``--verify`` will.
    """
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted or later:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if wanted:
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # of the flash-attn package, read by transformers
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def describe_float32(device: torch.device, dtypes: Collection[torch.dtype], mixed_precision: str) -> str | None:
    """A line where a card that has TF32 multiplies in float32 without it.

    Args:
        dtypes: of the weights.
    """
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    in_float32 = torch.float32 in dtypes and mixed_precision == "no"
    if not (has_tf32 and in_float32 and torch.get_float32_matmul_precision() == "highest"):
        return None
    ways_out = "launch with --mixed_precision bf16, or add --matmul_precision high"
    return f"note: float32 without TF32 uses little of this GPU: {ways_out}"


@contextmanager
def matmul_precision(wanted: str | None) -> Iterator[None]:
    """Products of float32 matrices in the precision that is ``wanted``; torch's own default where none is."""
    before = torch.get_float32_matmul_precision()
    if wanted is not None:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def use_expandable_segments() -> None:
    """Have CUDA's allocator extend its segments, unless the user has set it up; this avoids fragmentation.

    Begin before the device is used. See https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    is_set_up = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.version.cuda is not None and not is_set_up:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_name(device: torch.device) -> str:
    """The device's name: ``NVIDIA H100 80GB HBM3``, the processor's name, or just its type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type == "cpu" else device.type


def _processor_name() -> str:
    return _read_cpuinfo().get("model name") or platform.processor() or "cpu"


def _processor() -> str:
    """All that decides how a CPU rounds: which one it is, and the instructions that are used of it."""
    fields = _read_cpuinfo()
    about = [f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if name in os.environ]
    return ", ".join([_processor_name(), *about, torch.backends.cpu.get_cpu_capability(), *limits])


def _read_cpuinfo() -> dict[str, str]:
    """Of the first processor. Only Linux writes this down where anyone can read it."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    """That of the clone of this package; of the script that runs, where the package is installed without a clone."""
    if not shutil.which("git"):
        return "unknown"
    for folder in (Path(__file__).parent, Path(sys.argv[0]).resolve().parent):
        done = subprocess.run(
            ["git", "-C", folder, "rev-parse", "--verify", "--quiet", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip():
            return done.stdout.strip()
    return "unknown"
