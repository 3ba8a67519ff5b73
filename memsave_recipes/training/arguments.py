"""The flags that every recipe shares, each checked when it is read."""

import os
from dataclasses import MISSING, dataclass, field
from inspect import signature
from math import isfinite
from typing import Any, Final, Literal

import torch

from memsave_recipes.core.errors import PARAMETERS, InputError, require
from memsave_recipes.core.plans import BUDGET_WORDS
from memsave_recipes.core.plans.plan import TILED_STRATEGIES
from memsave_recipes.core.sharding.groups import FULL, NONE
from memsave_recipes.core.step.settings import AUTO, REGIONS, OptimizerSettings
from memsave_recipes.core.text import read_json
from memsave_recipes.models.flags import RULES, Rules, check_ranges, option
from memsave_recipes.training.exact.settings import ExactSettings

Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""Those of transformers that are functions of the step alone."""

GIVEN_TO_SCHEDULES = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
WITHOUT_ARGUMENTS = {"constant", "constant_with_warmup"}
"""Schedules to which transformers hands no further arguments."""
FLOORS = {"min_lr_rate": "share", "min_lr_ratio": "share", "min_lr": "rate", "lr_end": "rate"}
"""Arguments of schedules that are the lowest rate, or its share of ``--learning_rate``."""
BUDGET_FLAG = "--memory_budget_gib"
NAMED_ALIKE = (
    *("shard", "sequence_parallel", "global_batch_size", "micro_batch_size", "dtype"),
    *("offload_optimizer", "stream_weights", "optimizer", "max_grad_norm", "batchnorm", "target"),
)
PARAMETERS.update({name: f"--{name}" for name in NAMED_ALIKE})
PARAMETERS.update(strategy="--activation_checkpointing", target_memory_gib="--target_memory", budget_gib=BUDGET_FLAG)
MAX_INT = 2**31 - 1
"""The largest whole number that a flag takes; numpy's seeds and torch's sizes end not far above it."""
VERIFY_WORDS = {"true": "stop", "yes": "stop", "on": "stop", "false": "off", "no": "off"}
"""Other values of ``--verify``, which YAML users write for ``stop`` and ``off``."""
COMPILE_WORDS = dict.fromkeys(("true", "yes", "on"), REGIONS) | dict.fromkeys(("false", "no", "off"), NONE)
"""Other values of ``--compile``, as YAML users write them."""
BEST_WORDS = dict.fromkeys(("true", "yes", "on"), "loss") | dict.fromkeys(("false", "no", "off"))
"""Other values of ``--save_best``, as YAML users write them."""
STEPS_THAT_PAY = 100
"""Of a run, from which ``--compile auto`` compiles: to compile a kind of layer takes tens of seconds."""
EAGER_STRATEGIES = ("bottleneck", *TILED_STRATEGIES)
"""Those for layers that do not compile."""
POLYNOMIAL_END = 1e-7  # of transformers
RATES = "[0, 1e30]"
"""Of learning rate, weight decay and clipping norm; not far above it float32 overflows."""
IN_ANOTHER_ORDER = "ranks add gradients in another order"
MAX_NAME = 128
NOT_IN_A_PROJECT = set("/\\#?%:")
"""The characters that W&B refuses in the name of a project; the length is its own as well."""
BFLOAT16_MASTER: Final = "bfloat16_master"
Dtype = Literal["auto", "float32", "bfloat16", "bfloat16_master", "float16", "float64"]
DTYPES: dict[Dtype, torch.dtype] = {
    "auto": torch.bfloat16,  # until the device is known
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    BFLOAT16_MASTER: torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PRECISIONS = {"float16": "fp16", BFLOAT16_MASTER: "no"}
"""Mixed precision under values of ``--dtype``, in place of that of the launch."""


@dataclass(kw_only=True)
class TrackerArguments:
    """Trackers, and the names of the run in them.

    The defaults of the names are those of W&B's environment variables, for all trackers. A run that goes on keeps its
    names.
    """

    report_to: list[str] = option(
        lambda: ["trackio"], "trackers: trackio, wandb, tensorboard (one or several), or none", resume="free"
    )
    project: str | None = option(
        lambda: os.environ.get("WANDB_PROJECT") or None,
        "project of the run; default: WANDB_PROJECT, else memsave- and the name of the recipe",
        shown="seldom",
        resume="free",
    )
    run_name: str | None = option(
        lambda: os.environ.get("WANDB_NAME") or None,
        "name of the run; default: WANDB_NAME, else the plan, the batch layout and the devices",
        shown="seldom",
        resume="free",
    )

    def __post_init__(self) -> None:
        for flag, name in (("--project", self.project), ("--run_name", self.run_name)):
            is_label = name is None or (name.isprintable() and len(name) <= MAX_NAME)
            require(is_label, flag, name, f"one line of at most {MAX_NAME} characters")
        forbidden = sorted(NOT_IN_A_PROJECT.intersection(self.project or ""))
        require(not forbidden, "--project", self.project, f"without {' '.join(forbidden)}, which W&B does not take")


@dataclass(kw_only=True)
class RunArguments(TrackerArguments, ExactSettings):
    """The folder, global batch, memory plan and length of a run."""

    output_dir: str = option(MISSING, "folder for everything that the run writes", shown="first", resume="free")
    overwrite: bool = option(False, "delete the run that --output_dir holds", resume="free")
    global_batch_size: int = option(
        64, "samples of one optimizer step, over all ranks and accumulation steps", shown="first", least=1
    )
    micro_batch_size: int | str | None = option(
        None,
        "samples of one forward on one rank, or auto: the fastest size that fits --memory_budget_gib; "
        "default: the rank's whole share of the global batch",
        shown="first",
        resume="free",
    )
    bitwise_topology: bool = option(
        False,
        "the same weights and losses, bit for bit, on any number of ranks: micro-batches of one "
        "--micro_batch_size, whose gradients are added in a fixed order",
        before=False,
    )
    shard: str | None = option(
        None,
        "shard weights, gradients and optimizer state (FSDP2): full, over all ranks; or a number, over "
        "groups of N ranks, each with the whole model; default: what the launch file says, else none",
        rounds=IN_ANOTHER_ORDER,
        before=NONE,
    )
    reduces_once: bool | None = field(default=None, metadata={RULES: Rules(resume="free")})
    activation_checkpointing: str | None = option(
        None,
        "strategy: none (default; full with --batchnorm global and a --micro_batch_size), full, every:K, "
        "segments:K, nested:K, selective, offload, full_offload, full_tiled[:TOKENS], "
        "full_tiled_offload[:TOKENS], compiled[:RATIO], bottleneck, budget or budget:bitwise; or the path of a "
        "plan.json",
        shown="first",
        resume="free",
    )
    memory_budget_gib: float | None = option(
        None,
        "GiB of device memory that a step may take: limit of the search by budget and auto",
        shown="first",
        within="(0, 1e6]",
        resume="free",
    )
    compile: str = option(
        AUTO,
        "compile each repeated layer, under any plan (rounds otherwise): regions (also --compile alone), none, or "
        "auto, which is regions on a GPU with Triton, unless a flag asks for equal bits",
        resume="chosen",
        rounds="compiled layers round otherwise",
        before=NONE,
        nargs="?",
        const=REGIONS,
    )
    verify: str = option(
        "off",
        "before training, check on one global batch that the plan changes no result (takes two batches); "
        "stop (also --verify alone) or warn if it does",
        resume="free",
        nargs="?",
        const="stop",
    )
    num_epochs: float = option(3, "passes over the training set", shown="first", within="(0, 1e6]", resume="length")
    max_steps: int | None = option(None, "optimizer steps; overrides --num_epochs", least=1, resume="length")
    seed: int = option(0, "seed of weights, sample order, augmentation and dropout", least=0)
    full_determinism: bool = option(
        False,
        "use deterministic kernels if torch has them: the same bits in every run on a GPU",
        shown="seldom",
        resume="free",
    )
    dtype: Dtype = option(
        "float32",
        "dtype of the parameters; auto: bfloat16, or float16 on a GPU without it; bfloat16_master: bfloat16, updated "
        "in float32; mixed precision is set at launch, but is fp16 with float16 and none with bfloat16_master",
        resume="chosen",
    )
    matmul_precision: Literal["highest", "high", "medium"] | None = option(
        None,
        "precision of float32 matrix products: high is TF32 on a GPU, medium bfloat16; default: highest",
        shown="seldom",
    )
    batchnorm: Literal["local", "sync", "global"] = option(
        "local",
        "statistics of BatchNorm: local (over each micro-batch of a rank), sync (over those of all ranks, on GPUs) or "
        "global (over the whole global batch, across ranks and micro-batches)",
        shown="seldom",
        before="local",
    )
    dataloader_num_workers: int | None = option(
        None,
        "processes of each rank that load data; default: none on a CPU, up to 4 with a GPU on Linux",
        within="[0, 1024]",
        resume="free",
    )
    eval_only: bool = option(False, "only evaluate the model, without training")
    eval_steps: int | None = option(
        None, "optimizer steps between evaluations; default: one epoch", least=1, resume="free"
    )
    logging_steps: int = option(10, "optimizer steps between log rows", least=1, resume="free")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        self._check_micro_batch_size()
        is_full = self.joins_micro_batches and not self.eval_only
        self.activation_checkpointing = self.activation_checkpointing or ("full" if is_full else "none")
        self.verify = VERIFY_WORDS.get(self.verify.lower(), self.verify)
        require(self.verify in ("off", "stop", "warn"), "--verify", self.verify, "stop, warn or off")
        self._check_compile()
        if self.eval_only and (self.activation_checkpointing != "none" or self.verify != "off"):
            raise InputError("--eval_only trains nothing: leave out --activation_checkpointing and --verify")
        self._check_budget()
        self.check_flags()
        self._check_shards()

    @property
    def pays_to_compile(self) -> bool:
        """Whether ``--max_steps`` leaves enough; ``--num_epochs`` says nothing without the data."""
        return self.max_steps is None or self.max_steps >= STEPS_THAT_PAY

    def _check_micro_batch_size(self) -> None:
        size = self.micro_batch_size
        if size not in (None, AUTO):
            is_whole = str(size).isascii() and str(size).isdigit() and len(str(size)) <= len(str(MAX_INT))
            in_range = is_whole and int(str(size)) >= 1
            require(in_range, "--micro_batch_size", size, f"a whole number from 1 to {MAX_INT}, or auto")
            self.micro_batch_size = int(str(size))

    def _check_compile(self) -> None:
        """``auto`` is ``none`` where a flag asks for bits that compiled layers do not keep, or a strategy is eager."""
        word = str(COMPILE_WORDS.get(self.compile.lower(), self.compile))
        require(word in (NONE, REGIONS, AUTO), "--compile", self.compile, "regions, none or auto")
        strategy = str(self.activation_checkpointing)
        refusing = {
            "--bitwise_topology": self.bitwise_topology,
            "--batchnorm global": self.batchnorm == "global",
            "--eval_only": self.eval_only,
            f"--activation_checkpointing {strategy}": strategy.partition(":")[0] in EAGER_STRATEGIES,
        }
        is_compiled = strategy.partition(":")[0] == "compiled"
        if is_compiled and self.batchnorm == "global":
            raise InputError("--batchnorm global cannot be compiled: take full, or budget")
        if self.bitwise_topology and (is_compiled or strategy == "budget"):
            raise InputError(
                f"--bitwise_topology: --activation_checkpointing {strategy} compiles for the shapes that a rank has "
                "seen, in their order, and rounds accordingly: take budget:bitwise, or a plan that does not compile"
            )
        refused = next((flag for flag, holds in refusing.items() if holds), None)
        if word == REGIONS and refused is not None:
            raise InputError(f"--compile {REGIONS} does not go with {refused}: leave one of them out")
        loses_bits = refused is not None or self.full_determinism
        self.compile = NONE if word == AUTO and loses_bits else word

    def _check_budget(self) -> None:
        """``--memory_budget_gib`` goes with ``budget`` and ``auto``."""
        strategy, budget = self.activation_checkpointing, self.memory_budget_gib
        if budget is not None and not self.searches:
            raise InputError(
                f"--memory_budget_gib has no effect with --activation_checkpointing {strategy}: take budget, or "
                "--micro_batch_size auto, or drop it"
            )
        if budget is None and strategy in BUDGET_WORDS and self.micro_batch_size != AUTO:
            raise InputError(
                f"--activation_checkpointing {strategy} needs --memory_budget_gib: the GiB that a step may take"
            )

    def _check_shards(self) -> None:
        """``--shard`` goes without flags that need whole weights, or whole gradients, on a rank."""
        size = self.shard
        is_number = str(size).isascii() and str(size).isdigit()
        in_range = size in (None, NONE, FULL) or (is_number and int(str(size)) >= 2)
        require(in_range, "--shard", size, "none, full, or how many ranks share the weights, from 2")
        if not self.in_shards:
            return
        is_global = self.batchnorm == "global"
        reasons = {
            "--bitwise_topology adds up whole gradients in one order": self.bitwise_topology,
            "--batchnorm global joins the micro-batches of ranks that gather weights at other times": is_global,
            "--batchnorm sync has not been tried with it": self.batchnorm == "sync",
        }
        self._refuse_beside_shards(reasons)

    def _refuse_beside_shards(self, reasons: dict[str, bool]) -> None:
        for reason, holds in reasons.items():
            if holds:
                way_out = "" if ": " in reason else ": leave one of them out"
                raise InputError(f"--shard {self.shard}: {reason}{way_out}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """``--dtype`` as torch knows it."""
        return DTYPES[self.dtype]


@dataclass(kw_only=True)
class CheckpointArguments:
    """Checkpoints and resume."""

    resume: bool = option(
        False,
        "continue from the newest checkpoint in --output_dir; start if there is none",
        shown="first",
        resume="free",
    )
    save_every: str = option(
        "30min", "optimizer steps (500) or minutes (30min) between checkpoints; 0: only at the end", resume="free"
    )
    save_best: str | None = option(
        None,
        "save the weights with the best value of this evaluation metric (default: loss) as checkpoints/best-STEP, "
        "and write them as final/ at the end",
        nargs="?",
        const="loss",
        resume="free",
    )

    def __post_init__(self) -> None:
        _steps_and_minutes(self.save_every)
        word = str(self.save_best).lower()
        self.save_best = BEST_WORDS.get(word, self.save_best)
        if self.save_best is not None:
            self.save_best = self.save_best.removeprefix("eval_").removeprefix("eval/")

    @property
    def save_every_steps(self) -> int | None:
        """``--save_every``, where that is steps."""
        return _steps_and_minutes(self.save_every)[0]

    @property
    def save_every_minutes(self) -> float | None:
        """``--save_every``, where that is minutes."""
        return _steps_and_minutes(self.save_every)[1]


def _steps_and_minutes(every: str) -> tuple[int | None, float | None]:
    """Return one of both as ``--save_every`` gives it, neither for 0."""
    number = every.removesuffix("min")
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_INT))
    require(is_number, "--save_every", every, "steps such as 500, minutes such as 30min, or 0")
    found = int(number) or None
    return (None, found) if every.endswith("min") else (found, None)


@dataclass(kw_only=True)
class OptimizerArguments(OptimizerSettings):
    """The optimizer, its schedule and clipping."""

    momentum: float = field(default=0.9, init=False)
    optimizer: Literal["adamw", "adamw_bf16", "muon", "adafactor", "adamw_8bit", "sgd"] = option(
        "adamw",
        "optimizer; adamw_bf16 rounds its updates of --dtype bfloat16 up or down at random, so that small ones count; "
        "muon updates the matrices of hidden layers, AdamW the rest, at the same rate; muon, "
        "adafactor and adamw_8bit keep less state",
    )
    optimizer_in_backward: bool = option(
        False, "update each parameter during the backward and free its gradient; one rank, no accumulation"
    )
    offload_optimizer: Literal["none", "state", "step"] = option(
        "none",
        "state: keep the optimizer state on the host and copy it to the device for each update; step: "
        "move gradients to the host in the backward and update there",
        rounds="an update on the host rounds in another way than one on the device",
        before=NONE,
        same=(NONE, "state"),
    )
    learning_rate: float = option(3e-4, "learning rate at the end of the warm-up", shown="first", within=RATES)
    weight_decay: float = option(
        0.0, "weight decay of matrices, decoupled from the gradient; L2 penalty with sgd", within=RATES
    )
    adam_beta1: float = option(0.9, "decay of AdamW's mean of gradients", within="[0, 1)")
    adam_beta2: float = option(0.999, "decay of AdamW's mean of squared gradients", within="[0, 1)")
    lr_scheduler_type: Schedule = option("linear", "learning-rate schedule after the warm-up")
    lr_scheduler_kwargs: str = option(
        "{}", 'arguments of the schedule as transformers names them, in JSON: {"min_lr_rate": 0.1}'
    )
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", least=0)
    max_grad_norm: float = option(
        1.0, "norm to which the gradient of the global batch is clipped; 0: no clipping", within=RATES
    )
    ema_decay: float | None = option(
        None,
        "decay of an exponential moving average of the weights, such as 0.999; the average is evaluated "
        "and saved as final/",
        within="(0, 1)",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            raise InputError(
                f"--lr_scheduler_type polynomial ends at a rate of {POLYNOMIAL_END:g}, which --learning_rate "
                f"{self.learning_rate:g} is not above: raise it, or take linear"
            )
        if self.offload_optimizer == "step" and self.optimizer == "muon":
            raise InputError(
                "--offload_optimizer step: --optimizer muon multiplies matrices, which is slow on a host: take "
                "--offload_optimizer state"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """``--lr_scheduler_kwargs`` are arguments of the schedule; their values are for ``make_scheduler`` to try."""
        if self.lr_scheduler_kwargs == "{}":
            return
        flag, value, kind = "--lr_scheduler_kwargs", self.lr_scheduler_kwargs, self.lr_scheduler_type
        try:
            arguments = read_json(value)
        except ValueError:
            arguments = None
        require(isinstance(arguments, dict), flag, value, "an object in JSON")
        numbers = {name: number for name, number in arguments.items() if isinstance(number, int | float)}
        require(all(map(isfinite, numbers.values())), flag, value, "of finite numbers")
        from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION  # slow to import

        functions: dict[Any, Any] = TYPE_TO_SCHEDULER_FUNCTION
        takes = set(signature(functions[kind]).parameters) - GIVEN_TO_SCHEDULES
        takes = set() if kind in WITHOUT_ARGUMENTS else takes
        named = f"of {', '.join(sorted(takes))}" if takes else f"left out: --lr_scheduler_type {kind} takes none"
        require(arguments.keys() <= takes, flag, value, named)
        for name, unit in (FLOORS if self.learning_rate else {}).items():
            top = self.learning_rate if unit == "rate" else 1
            require(0 <= numbers.get(name, 0) <= top, flag, value, f"such that {name} is in [0, {top:g}]")


@dataclass(kw_only=True)
class RecipeArguments(CheckpointArguments, OptimizerArguments, RunArguments):
    """The flags that all recipes share; a recipe's own are mixed in: ``class Arguments(RecipeArguments, MyArguments)``.

    Every group of flags is checked by its own ``__post_init__``, those of the recipe first.
    """

    def __post_init__(self) -> None:
        own = [group for group in type(self).__bases__ if group is not RecipeArguments]
        for group in (*reversed(own), *reversed(RecipeArguments.__bases__)):
            group.__post_init__(self)  # type: ignore[attr-defined]
        if self.rounds_at_random and self.dtype != "bfloat16":
            raise InputError(
                f"--optimizer adamw_bf16 is for weights in bfloat16, and these are {self.dtype}: add --dtype bfloat16, "
                "or take adamw"
            )
        steps_there = self.has_masters and self.offload_optimizer == "step"
        if self.ema_decay is not None and (steps_there or self.dtype in ("auto", "bfloat16", "float16")):
            raise InputError(
                f"--ema_decay averages in the dtype of the weights, and --dtype {self.dtype} rounds its small changes "
                "away: take --mixed_precision bf16 or fp16 in place of --dtype"
            )
        all_train_here = self.offload_optimizer != "step" and not getattr(self, "freezes", False)
        if self.stream_weights != "none" and all_train_here:
            raise InputError(
                "--stream_weights host: all weights train, on the device: pass --offload_optimizer step or --lora, or "
                "leave it out"
            )
        if self.dtype == "float16" and all_train_here and not self.eval_only:  # adapters and masters are wide
            raise InputError(
                "--dtype float16 loses small updates of weights that train: add --lora, or --offload_optimizer step, "
                "which updates in float32, or take --mixed_precision fp16 in place of --dtype"
            )
        if self.has_masters and self.bitwise_topology:
            raise InputError(
                f"--dtype {BFLOAT16_MASTER} has not been tried with --bitwise_topology: leave one of them out"
            )
        if self.in_shards:
            self._check_parts_of_shards()
        if self.eval_only and self.resume:
            raise InputError("--eval_only trains nothing, so --resume has nothing to continue: leave it out")

    @property
    def has_masters(self) -> bool:
        """Whether ``--dtype`` asks for float32 masters."""
        return self.dtype == BFLOAT16_MASTER

    def _check_parts_of_shards(self) -> None:
        """``--shard`` goes without what a recipe or an optimizer does to whole weights."""
        flags = vars(self)
        entries = flags.get("lora_entries") or {}
        reasons = {
            "--optimizer adafactor has means over whole rows and columns: take adamw": not self.goes_in_shards,
            "--optimizer_in_backward steps on gradients before they are reduced": self.optimizer_in_backward,
            "--load_in_4bit packs whole weights": bool(flags.get("load_in_4bit")),
            "--stream_weights keeps whole weights on the host": self.stream_weights != "none",
            "use_dora of --lora_config measures the rows of whole weights": bool(entries.get("use_dora")),
        }
        self._refuse_beside_shards(reasons)
