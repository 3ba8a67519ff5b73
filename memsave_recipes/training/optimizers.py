"""The optimizer and the schedule that the flags name, and steps that end a run: those not finite.

``--optimizer_in_backward`` steps each parameter as soon as its gradient is there and frees the gradient, so that they
never exist all at once. The idea is LOMO's (Lv et al. 2023, https://arxiv.org/abs/2306.09782), here for any optimizer
that treats each parameter by itself. It rules out everything that needs all gradients first: clipping by the global
norm, accumulation, the average over ranks, loss scaling.

NOTE [ not finite ]
A step whose loss or gradient is not finite stops the run, and nothing that it has changed is saved.
1. A loss that is NaN or infinite makes the gradient NaN (``GlobalBatch.share_of``), DDP's all-reduce carries that to
   all ranks, and the norm that clipping computes anyway is NaN on each of them. So one number says it all, and no rank
   has to ask another one.
2. The host does not look at the norm before the optimizer steps: it would have to wait for the device in each step, and
   could no longer queue the next one meanwhile.
3. It looks where it waits for the device in any case: at the end of a logging window, before an evaluation, and before
   a checkpoint is saved. There ``StepLosses`` stops the run, so the steps in between are computed in vain.
4. With fp16 the scaler leaves steps out whose gradient overflows, as a matter of course; then the loss alone is judged.
5. A finite gradient makes weights infinite where the rate is large. So the weights themselves are looked at before they
   are saved.
"""

import json
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from math import isfinite, sqrt
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from memsave_recipes.core.activations.streaming import ALL, stream_of, streamed_parameters
from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.host.masters import Masters, attach_masters
from memsave_recipes.core.host.state import keep_state_on_host, may_leave
from memsave_recipes.core.host.step import HostMasters, masters_of, masters_on_host, step_masters
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.sharding.tensors import is_sharded, local, whole
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.step.memory import (
    BITSANDBYTES_BLOCK,
    MIN_8BIT_NUMEL,
    decay_groups,
    has_8bit_state,
    parameters_by_optimizer,
    trained_parameters,
)
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batching import GlobalBatch, exact_sum
from memsave_recipes.training.update_rules import MuonWithAdamW, StochasticAdamW

BFLOAT16_STEP = 2**-9  # of a number: less is rounded away
LOOKED_AT_ONCE = 2**20  # numbers of a weight


def make_optimizer(
    optim: OptimizerArguments, model: nn.Module, layout: BatchLayout | None = None, *, seed: int = 0
) -> Optimizer:
    """The named optimizer over all parameters that train.

    AdamW (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101), the same with its state in 8 bits (Dettmers et
    al. 2021, https://arxiv.org/abs/2110.02861; NOTE [ 8 bits in shards ]), Muon (NOTE [ Muon ]), Adafactor (Shazeer &
    Stern 2018, https://arxiv.org/abs/1804.04235) or SGD. AdamW and SGD run as one fused kernel a step, without the
    temporary copies of the unfused ones; of weights in shards SGD is not fused.
    ``adamw_bf16``: NOTE [ stochastic rounding ], with ``seed``. ``offload_optimizer``: NOTE [ state on the host ] and
    NOTE [ steps on the host ].

    Args:
        layout: of the global batch; by default the only micro-batch of a single rank.

    Raises:
        InputError: ``adamw_8bit`` without bitsandbytes; or as ``parameters_by_optimizer``.
    """
    trained = trained_parameters(model)
    offloads = optim.offload_optimizer != NONE and may_leave(_device_of(model))
    masters = _masters(optim, model, trained, on_host=offloads and optim.offload_optimizer == "step")

    def groups(share: list[nn.Parameter]) -> list[dict[str, Any]]:
        of = {} if masters is None else masters.of
        found = decay_groups(optim, model, share)
        return [{**group, "params": [of.get(one, one) for one in group["params"]]} for group in found]

    parameters = groups(trained)
    rates: dict[str, Any] = {"lr": optim.learning_rate, "weight_decay": optim.weight_decay}
    of_adamw: dict[str, Any] = {**rates, "betas": (optim.adam_beta1, optim.adam_beta2)}
    optimizer: Optimizer
    match optim.optimizer:
        case "adamw_bf16":
            optimizer = StochasticAdamW(parameters, seed=seed, **of_adamw)
        case "sgd":
            in_shards = is_sharded(model)  # for which torch has no fused SGD
            how: dict[str, Any] = {"foreach": in_shards or None, "fused": not in_shards}
            optimizer = SGD(parameters, momentum=optim.momentum, **rates, **how)
            if not in_shards:
                optimizer.register_step_pre_hook(_begin_momentum)
        case "adafactor":
            optimizer = Adafactor(parameters, foreach=False, **rates)
        case "adamw_8bit":
            optimizer = _adamw_8bit(parameters, **of_adamw)
        case "muon":
            shares = parameters_by_optimizer("muon", model).values()
            matrices, others = map(groups, shares)
            optimizer = MuonWithAdamW(matrices, others, **of_adamw)
        case _:
            optimizer = AdamW(parameters, fused=True, **of_adamw)
    if isinstance(masters, HostMasters):
        # Whether a gradient is that of the step, or a part of its sum, as soon as it is there.
        leaves = layout is None or (
            (layout.num_processes == 1 or is_sharded(model)) and layout.needs_all_gradients is None
        )
        ways = {"leave_in_backward": leaves, "in_backward": optim.optimizer_in_backward}
        step_masters(optimizer, masters, **ways, stream=stream_of(model))
        return optimizer
    if offloads:
        keep_state_on_host(optimizer)
    if masters is not None:
        attach_masters(optimizer, masters, in_backward=optim.optimizer_in_backward)
    elif optim.optimizer_in_backward:
        step_in_backward(optimizer)
    return optimizer


def _masters(
    optim: OptimizerArguments, model: nn.Module, trained: list[nn.Parameter], *, on_host: bool
) -> Masters | None:
    """Return those that the flags ask for."""
    if not on_host:
        return Masters(trained) if optim.has_masters and not is_sharded(model) else None  # whose shards are masters
    dtype = None if optim.rounds_at_random else torch.float32
    return masters_on_host(trained, _device_of(model), dtype, streamed_parameters(model))


def _device_of(model: nn.Module) -> torch.device:
    """Where it computes, also where all that trains waits on the host."""
    stream = stream_of(model)
    return local(next(model.parameters())).device if stream is None else stream.device


def _begin_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give every gradient that has no momentum yet one of -0.0, to which the step adds the gradient bit for bit.

    The fused SGD (torch 2.11 to 2.13) makes it of uninitialised memory, for its first step to write on. But a step that
    ``found_inf`` leaves out writes on nothing, and the next one is no longer the first. With fp16 it is the rule that
    the first step is left out.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.grad, -0.0)


def _adamw_8bit(parameters: list[dict[str, Any]], **of_adamw: Any) -> Optimizer:
    if find_spec("bitsandbytes") is None:
        raise InputError("--optimizer adamw_8bit needs bitsandbytes: pip install 'memsave-recipes[bitsandbytes]'")
    from memsave_recipes.training.eight_bit import AdamW8bitInParts  # optional, and slow to import

    return AdamW8bitInParts(parameters, **of_adamw)


def describe_state_in_shards(optim: OptimizerArguments, model: nn.Module) -> str | None:
    """A line on weights whose state ``adamw_8bit`` does not keep in 8 bits because of how they are cut up."""
    large = [parameter for parameter in trained_parameters(model) if parameter.numel() >= MIN_8BIT_NUMEL]
    in_32_bits = [parameter for parameter in large if not has_8bit_state(parameter)]
    if optim.optimizer != "adamw_8bit" or not in_32_bits:
        return None
    return (
        f"8-bit AdamW: the state of {len(in_32_bits)} of {len(large)} large weights stays in 32 bits, since their "
        f"shards are not whole blocks of {BITSANDBYTES_BLOCK} numbers"
    )


def describe_lost_updates(optim: OptimizerArguments, model: nn.Module) -> str | None:
    """A line on weights in bfloat16 of which an optimizer changes only a few: the others round each update away.

    An update below a 512th of a weight is lost: NOTE [ stochastic rounding ]. Nothing is known of SGD before there are
    gradients.
    """
    shares = parameters_by_optimizer(optim.optimizer, model).items()
    found = [(rule, local(one).detach()) for rule, share in shares for one in share if one.dtype == torch.bfloat16]
    has_masters = optim.has_masters or optim.offload_optimizer == "step"
    if optim.optimizer in ("sgd", "adamw_bf16") or has_masters or not found:
        return None
    num_lost = 0
    for rule, weight in found:
        limit = _update_size(rule, weight, optim.learning_rate) / BFLOAT16_STEP
        num_lost += sum(int((part.abs() > limit).sum()) for part in weight.reshape(-1).split(LOOKED_AT_ONCE))
    share = num_lost / max(1, sum(weight.numel() for _, weight in found))
    if share <= 0.5:
        return None
    return (
        f"note: {share:.0%} of the bfloat16 weights are too large to be changed at --learning_rate "
        f"{optim.learning_rate:g}: take --optimizer adamw_bf16, or --mixed_precision bf16 in place of --dtype"
    )


def describe_warm_up(optim: OptimizerArguments, num_steps: int) -> str | None:
    """A line on a warm-up that is longer than the run, as that of a preset in a run of two steps."""
    if optim.lr_scheduler_type == "constant" or not 0 < num_steps < optim.warmup_steps:
        return None
    share = (num_steps - 1) / optim.warmup_steps
    return (
        f"note: --warmup_steps {optim.warmup_steps} is longer than the run of {num_steps} steps, so the rate ends at "
        f"{share:.0%} of --learning_rate"
    )


def _update_size(rule: str, weight: Tensor, learning_rate: float) -> float:
    """About how much an update changes each number of ``weight``, by torch's defaults for this ``rule``."""
    if rule == "adafactor":
        norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
        return learning_rate * max(1e-3, float(norm) / sqrt(max(1, weight.numel())))
    return learning_rate * (0.2 if rule == "muon" else 1.0)


def make_scheduler(optim: OptimizerArguments, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Linear warm-up, then the named schedule of transformers over ``num_steps`` optimizer steps; 0: none will be.

    Raises:
        InputError: the phases of the schedule do not fit the run, or it cannot compute with ``--lr_scheduler_kwargs``.
    """
    length = max(num_steps, optim.warmup_steps + 1)  # transformers' polynomial divides by the steps after the warm-up
    if optim.lr_scheduler_type == "linear":
        return LambdaLR(optimizer, partial(_linear_factor, warmup_steps=optim.warmup_steps, num_steps=length))
    from transformers import get_scheduler  # imports peft, bitsandbytes and inductor where they are installed

    arguments = json.loads(optim.lr_scheduler_kwargs)
    if num_steps and optim.lr_scheduler_type == "warmup_stable_decay":
        arguments |= _phases(optim, arguments, num_steps)
    try:
        scheduler: LambdaLR = get_scheduler(optim.lr_scheduler_type, optimizer, optim.warmup_steps, length, arguments)
        factors = [float(factor(step)) for factor in scheduler.lr_lambdas for step in (0, length // 2, length - 1)]
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--lr_scheduler_kwargs {optim.lr_scheduler_kwargs}: --lr_scheduler_type {optim.lr_scheduler_type} does "
            f"not take them ({reason}): look at its arguments in transformers"
        ) from error
    in_range, rule = all(0 <= factor <= 1 + 1e-9 for factor in factors), "no rate is below 0 or above --learning_rate"
    require(in_range, "--lr_scheduler_kwargs", optim.lr_scheduler_kwargs, f"such that {rule}")
    return scheduler


def _phases(optim: OptimizerArguments, arguments: dict[str, Any], num_steps: int) -> dict[str, int]:
    """Return the steps of the stable phase and of the decay, which may be given as a share of the run.

    Raises:
        InputError: one is no number of steps, or with the warm-up they are not as long as the run.
    """
    flag, value = "--lr_scheduler_kwargs", optim.lr_scheduler_kwargs
    phases = {}
    for name in {"num_stable_steps", "num_decay_steps"} & arguments.keys():
        given = arguments[name]
        is_share = name == "num_decay_steps" and isinstance(given, float) and 0 < given < 1
        is_whole = isinstance(given, int) and not isinstance(given, bool) and given >= 0
        rule = "a number of steps" + (" or a share of the run" if name == "num_decay_steps" else "")
        require(is_share or is_whole, flag, value, f"such that {name} is {rule}")
        phases[name] = max(1, round(given * num_steps)) if is_share else given
    total = optim.warmup_steps + sum(phases.values())
    falls_short = "num_stable_steps" in phases and total < num_steps and not arguments.get("min_lr_ratio")
    if total > num_steps or falls_short:
        given = ", ".join(f"{name} {steps}" for name, steps in sorted(phases.items()))
        raise InputError(
            f"{flag} {value}: --warmup_steps {optim.warmup_steps} and {given} do not fit the {num_steps} steps of the "
            'run: give the decay alone, as a share of the run, such as {"num_decay_steps": 0.1}'
        )
    return phases


def _linear_factor(step: int, *, warmup_steps: int, num_steps: int) -> float:
    """Return the factor of the rate that ``linear`` of transformers has, without what importing it loads."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (num_steps - step) / (num_steps - warmup_steps))


def clip_gradients(
    optim: OptimizerArguments,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
) -> Tensor | None:
    """The norm of the global batch's gradient, now clipped; ``None`` where the backward has used them up."""
    if optim.optimizer_in_backward:
        return None
    max_norm = (optim.max_grad_norm if max_norm is None else max_norm) or float("inf")
    masters = masters_of(optimizer)
    if masters is not None:
        return masters.clip(max_norm, accelerator.unscale_gradients)
    norm: Tensor = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    return whole(norm)


def check_in_backward(optim: OptimizerArguments, layout: BatchLayout, mixed_precision: str) -> None:
    """Refuse flags that need all gradients at once.

    Raises:
        InputError: ``--optimizer_in_backward`` beside accumulation, several ranks, clipping, fp16 or a
            layout that adds up all gradients first.
    """
    if not optim.optimizer_in_backward:
        return
    reasons = {
        f"{layout.needs_all_gradients}: leave one of them out": layout.needs_all_gradients is not None,
        f"{layout.accumulation_steps} accumulation steps add up a gradient before it is used: make "
        "--micro_batch_size as large as --global_batch_size": layout.accumulation_steps > 1,
        f"{layout.num_processes} ranks average their gradients first: launch one process": layout.num_processes > 1,
        "clipping needs the norm of all gradients first: pass --max_grad_norm 0": optim.max_grad_norm > 0,
        "fp16 scales the loss and has to look at all gradients for overflow: take bf16": mixed_precision == "fp16",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"--optimizer_in_backward steps on each gradient as it is made, but {reason}")


def check_offload(optim: OptimizerArguments, layout: BatchLayout) -> None:
    """Refuse what needs gradients, or the weights that are streamed, on the device.

    Raises:
        InputError: ``--offload_optimizer step`` with ``--stream_weights`` beside a layout that adds up all gradients
            first.
    """
    if optim.streamed == ALL and layout.needs_all_gradients is not None:
        raise InputError(
            f"--stream_weights host with --offload_optimizer step: {layout.needs_all_gradients}: leave one of them out"
        )


def step_in_backward(optimizer: Optimizer) -> None:
    """Make every backward step ``optimizer``, parameter by parameter; a later ``optimizer.step()`` finds nothing to do.

    The optimizer looks at one parameter at a time, with the settings of its group as they are then, so schedules work.
    Nothing steps once it is gone: the parameters do not hold it.
    """
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(_StepOne(optimizer, index))


class _StepOne:
    def __init__(self, optimizer: Optimizer, index_of_group: int) -> None:
        self._optimizer = weakref.ref(optimizer)  # a cycle through a hook of a parameter is never freed
        self._index = index_of_group  # the group itself is another one after load_state_dict, which Accelerate calls

    def __call__(self, parameter: Tensor) -> None:
        if (optimizer := self._optimizer()) is None:
            return
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[self._index], "params": [parameter]}]
        try:
            type(optimizer).step(optimizer)  # not the instance's: a schedule counts its calls
        finally:
            optimizer.param_groups = groups
        parameter.grad = None


MAX_NAMED_SAMPLES = 32
WAY_OUT = "nothing is saved since the step before: look at these samples, and at --learning_rate"


class NotFinite(Exception):
    """A step had a loss or a gradient that is not finite; all ranks know it. The message is a line."""


class StepLosses:
    """The steps since the last logging window. All methods are for all ranks.

    Args:
        exact: add the parts of a loss up without rounding, so that their order does not matter.
    """

    def __init__(self, accelerator: Accelerator, order: SampleOrder, *, exact: bool = False) -> None:
        self.accelerator = accelerator
        self.order = order
        self.grad_norm: float | None = None
        """Of the last step that has been read; ``None`` where no step had one."""
        self._sum: Callable[[list[float]], float] = exact_sum if exact else sum
        self._read: list[float] = []
        self._unread: dict[int, tuple[Tensor, Tensor | None]] = {}  # this rank's parts of the loss, gradient norm

    def add(self, batch: GlobalBatch, grad_norm: Tensor | None) -> None:
        """Take in a finished step, and keep one tensor of its losses. Reads nothing from the device."""
        parts = batch.loss_parts
        self._unread[batch.step] = torch.stack(parts) if len(parts) > 1 else parts[0].reshape(1), grad_norm

    def parts(self) -> dict[tuple[int, int], float]:
        """This rank's parts of the losses that nobody has read yet, by step and number. Waits for the device, once."""
        losses = {step: parts for step, (parts, _) in self._unread.items()}
        numbers = [(step, number) for step, parts in losses.items() for number in range(len(parts))]
        return dict(zip(numbers, torch.cat([*losses.values()]).tolist(), strict=True)) if losses else {}

    def take_in(self, of_ranks: Mapping[tuple[int, int], list[float]]) -> None:
        """The ``parts`` of all ranks.

        Raises:
            NotFinite: a step is not finite.
        """
        of_steps: dict[int, list[float]] = {}
        for (step, _), parts in of_ranks.items():
            of_steps.setdefault(step, []).extend(parts)
        for step, parts in of_steps.items():
            loss, (_, norm) = self._sum(parts), self._unread.pop(step)
            self.grad_norm = None if norm is None else norm.item()
            if not is_finite(loss, self.grad_norm or 0.0, has_scaler=self.accelerator.scaler is not None):
                raise NotFinite(f"{describe_not_finite(self.order, step, loss, self.grad_norm)}; {WAY_OUT}")
            self._read.append(loss)

    def read(self) -> None:
        """Take in the steps that nobody has read yet. Waits for the device.

        Raises:
            NotFinite: a step is not finite.
        """
        self.take_in(gather_figures(self.accelerator, self.parts()))

    def end_window(self) -> float:
        """The mean loss of its steps."""
        steps, self._read = self._read, []
        return sum(steps) / len(steps)

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window, as plain values. Waits for the device.

        Raises:
            NotFinite: a step is not finite.
        """
        self.read()
        return {"losses": list(self._read)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self._read = list(state["losses"])


def is_finite(loss: float, grad_norm: float, *, has_scaler: bool) -> bool:
    """Whether a step counts: rule 4 of NOTE [ not finite ]."""
    return isfinite(loss) and (has_scaler or isfinite(grad_norm))


def describe_not_finite(order: SampleOrder, step: int, loss: float, grad_norm: float | None) -> str:
    """A line on ``step``, numbered from 0: its loss, gradient norm and samples, by their places in the data set."""
    _, samples = next(order.steps(step, step + 1))
    more = f" and {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
    named = ", ".join(map(str, samples[:MAX_NAMED_SAMPLES]))
    norm = "" if grad_norm is None else f", gradient norm {grad_norm:g}"
    return f"step {step + 1} is not finite (loss {loss:g}{norm}), its samples are {named}{more}"


def place_of_figures(accelerator: Accelerator) -> torch.device:
    """Where the ranks exchange numbers in float64; without a group, which a lone rank may have too, on the host."""
    return torch.device("cpu") if accelerator.distributed_type == DistributedType.NO else accelerator.device


def gather_figures(accelerator: Accelerator, figures: Mapping[Any, float]) -> dict[Any, list[float]]:
    """Every figure of every rank, in one collective; all ranks must have the same. Whole numbers are exact to 2^53."""
    if not figures:
        return {}  # Accelerate cannot gather a tensor without elements on GPUs
    values = torch.tensor([list(figures.values())], dtype=torch.float64, device=place_of_figures(accelerator))
    return dict(zip(figures, accelerator.gather(values).T.tolist(), strict=True))
