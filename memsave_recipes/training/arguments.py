"""The flags that every recipe shares, and how a command line becomes checked dataclasses.

``--config FILE.yaml`` is read first, as if its entries stood at the front of the command line; flags override it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import yaml
from transformers import HfArgumentParser

from memsave_recipes.errors import InputError
from memsave_recipes.plans import BUDGET_WORDS

# Schedules that need no argument beyond the number of steps.
Schedule = Literal["linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(kw_only=True)
class RunArguments:
    """What a run is: its folder, its global batch, its memory plan, its length."""

    output_dir: str = field(metadata={"help": "everything the run writes goes here"})
    overwrite: bool = field(default=False, metadata={"help": "delete the run that --output_dir holds"})
    global_batch_size: int = field(
        default=64, metadata={"help": "samples of one optimizer step, over all ranks and all accumulation steps"}
    )
    micro_batch_size: int | None = field(
        default=None, metadata={"help": "samples that one rank forwards at once; default: its share, undivided"}
    )
    drop_last: bool = field(default=False, metadata={"help": "leave out an epoch's last short step"})
    activation_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "none (default), full, every:K, segments:K, selective, offload, compiled[:RATIO], bottleneck, "
            "budget, budget:bitwise, or a plan.json"
        },
    )
    memory_budget_gib: float | None = field(
        default=None,
        metadata={"help": "device memory of a step, for budget: the fastest plan that stays below it is found"},
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "the same as --activation_checkpointing full"}
    )
    verify: str = field(
        default="off",
        metadata={
            "nargs": "?",
            "const": "stop",
            "help": "before training, prove on one global batch that the plan changes nothing, at the cost of two: "
            "stop (what --verify alone means) or warn on a difference",
        },
    )
    num_epochs: float = field(default=3, metadata={"help": "passes over the training set"})
    max_steps: int | None = field(default=None, metadata={"help": "optimizer steps; overrides --num_epochs"})
    seed: int = field(default=0, metadata={"help": "of weights, sample order, augmentation and dropout"})
    dtype: Literal["float32", "bfloat16", "float64"] = field(
        default="float32", metadata={"help": "of the parameters; mixed precision is set at launch"}
    )
    sync_batchnorm: bool = field(default=False, metadata={"help": "BatchNorm statistics over all ranks (GPUs)"})
    dataloader_num_workers: int = field(default=0, metadata={"help": "processes that load data, for each rank"})
    eval_steps: int | None = field(
        default=None, metadata={"help": "evaluate every so many optimizer steps; default: after each epoch"}
    )
    logging_steps: int = field(default=10, metadata={"help": "log every so many optimizer steps"})
    memory_snapshot: int | None = field(
        default=None, metadata={"help": "record the CUDA allocator over the first so many steps"}
    )
    report_to: list[str] = field(
        default_factory=lambda: ["trackio"],
        metadata={"help": "trackio, wandb, tensorboard (several may be named), none"},
    )

    def __post_init__(self) -> None:
        if self.gradient_checkpointing and self.activation_checkpointing not in (None, "full"):
            raise InputError(
                "--gradient_checkpointing means --activation_checkpointing full, "
                f"which contradicts --activation_checkpointing {self.activation_checkpointing}: give one of them"
            )
        self.activation_checkpointing = (
            "full" if self.gradient_checkpointing else self.activation_checkpointing or "none"
        )
        self.verify = {"True": "stop", "False": "off"}.get(self.verify, self.verify)  # what YAML reads in yes and no
        require(self.verify in ("off", "stop", "warn"), "--verify", self.verify, "stop, warn or off")
        self._check_budget()
        require(self.global_batch_size >= 1, "--global_batch_size", self.global_batch_size, "at least 1")
        micro_batch_size = self.micro_batch_size
        require(micro_batch_size is None or micro_batch_size >= 1, "--micro_batch_size", micro_batch_size, "at least 1")
        require(isfinite(self.num_epochs) and self.num_epochs > 0, "--num_epochs", self.num_epochs, "more than 0")
        require(self.max_steps is None or self.max_steps >= 1, "--max_steps", self.max_steps, "at least 1")
        require(self.seed >= 0, "--seed", self.seed, "0 or more")
        require(self.dataloader_num_workers >= 0, "--dataloader_num_workers", self.dataloader_num_workers, "0 or more")
        require(self.eval_steps is None or self.eval_steps >= 1, "--eval_steps", self.eval_steps, "at least 1")
        snapshot = self.memory_snapshot
        require(snapshot is None or snapshot >= 1, "--memory_snapshot", snapshot, "at least 1")
        require(self.logging_steps >= 1, "--logging_steps", self.logging_steps, "at least 1")

    def _check_budget(self) -> None:
        """``budget`` and ``--memory_budget_gib`` go together."""
        strategy, budget = self.activation_checkpointing, self.memory_budget_gib
        if strategy in BUDGET_WORDS:
            if budget is None:
                raise InputError(
                    f"--activation_checkpointing {strategy} needs --memory_budget_gib: the GiB that a step may take"
                )
            require(isfinite(budget) and budget > 0, "--memory_budget_gib", budget, "a finite number, more than 0")
        elif budget is not None:
            raise InputError(
                f"--memory_budget_gib says nothing to --activation_checkpointing {strategy}: take budget or drop it"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """``--dtype`` as torch knows it."""
        return DTYPES[self.dtype]


@dataclass(kw_only=True)
class OptimizerArguments:
    """How the weights move."""

    optimizer: Literal["adamw", "adafactor", "adamw_8bit", "sgd"] = field(
        default="adamw", metadata={"help": "adafactor and adamw_8bit keep a smaller state; sgd has --momentum"}
    )
    optimizer_in_backward: bool = field(
        default=False, metadata={"help": "step on each gradient as it is made and free it; no accumulation, one rank"}
    )
    learning_rate: float = field(default=3e-4, metadata={"help": "at the end of the warm-up"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled from the gradient; L2 in SGD"})
    momentum: float = field(default=0.9, metadata={"help": "of SGD"})
    lr_scheduler_type: Schedule = field(default="linear", metadata={"help": "after the warm-up"})
    warmup_steps: int = field(default=0, metadata={"help": "optimizer steps of linear warm-up"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "clip the global batch's gradient; 0 does not clip"})

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            require(isfinite(value) and value >= 0, f"--{name}", value, "a finite number, 0 or more")
        require(0 <= self.momentum < 1, "--momentum", self.momentum, "at least 0 and below 1")
        require(self.warmup_steps >= 0, "--warmup_steps", self.warmup_steps, "0 or more")


def require(holds: bool, flag: str, value: Any, rule: str) -> None:
    """Refuse a flag's value.

    Raises:
        InputError: ``holds`` is false.
    """
    if not holds:
        raise InputError(f"{flag} {value} cannot be: it must be {rule}")


def parse_arguments(*dataclasses: type, args: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass from the command line (``args``, by default that of the process).

    Raises:
        InputError: an unknown flag or preset key, a value of the wrong type, or one that a dataclass refuses.
    """
    parser = _RecipeParser(list(dataclasses), allow_abbrev=False)  # type: ignore[arg-type]
    parser.add_argument("--config", help="a YAML file of flags, read before those of the command line")
    command_line = list(sys.argv[1:] if args is None else args)
    preset, _ = _preset_parser().parse_known_args(command_line)
    flags = [*_read_preset(preset.config, parser), *command_line] if preset.config else command_line
    *parsed, _config, unknown = parser.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise InputError(
            f"{unknown[0]} is no flag of this recipe{parser.suggestion(unknown[0])} (--help lists the flags)"
        )
    return tuple(parsed)


class _RecipeParser(HfArgumentParser):
    """An argument parser whose complaints are one line, with the nearest known flag."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the flags)")

    def suggestion(self, flag: str) -> str:
        """``; did you mean --seed?``, or nothing."""
        near = get_close_matches(flag.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def _preset_parser() -> _RecipeParser:
    parser = _RecipeParser([], add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser


def _read_preset(path: str, parser: _RecipeParser) -> list[str]:
    """The entries of a YAML preset as command-line words."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise InputError(f"--config {path} must hold lines like `global_batch_size: 64`")
    words: list[str] = []
    for key, value in entries.items():
        flag = f"--{key}"
        if flag not in parser._option_string_actions or flag == "--config":
            raise InputError(f"--config {path}: {key} is no flag of this recipe{parser.suggestion(flag)}")
        values = value if isinstance(value, list) else [value]
        words += [flag, *(str(item) for item in values)]
    return words
