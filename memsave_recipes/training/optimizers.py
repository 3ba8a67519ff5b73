"""The optimizer and the schedule that the flags name, and steps that must not change a weight: those not finite.

State for each 32-bit parameter: AdamW 8 bytes, Muon 4 for its matrices, 8-bit AdamW 2, Adafactor a row and a column of
each matrix, SGD 4 (0 without momentum).

``--optimizer_in_backward`` steps each parameter as soon as its gradient is there and frees the gradient, so that they
never exist all at once. The idea is LOMO's (Lv et al. 2023, https://arxiv.org/abs/2306.09782), here for any optimizer
that treats each parameter by itself. It rules out everything that needs all gradients first: clipping by the global
norm, accumulation, the average over ranks, loss scaling.

NOTE [ not finite ]
A step whose loss or gradient is not finite changes no weight, and stops the run or is counted.
1. A loss that is NaN or infinite makes the gradient NaN (``GlobalBatch.backward``), DDP's all-reduce carries that to
   all ranks, and the norm that clipping computes anyway is NaN on each of them. So one number says it all, and no rank
   has to ask another one.
2. The host does not look at the norm before the optimizer steps: it would have to wait for the device in each step, and
   could no longer queue the next one meanwhile. The fused optimizers take a ``found_inf`` on the device, as gradient
   scalers give it to them, and then change neither weights nor their own state. Those that take none (Adafactor, Muon,
   AdamW in 8 bits or with stochastic rounding) are waited for.
3. The host looks where it waits for the device in any case: at the end of a logging window, and before a checkpoint is
   saved. There ``StepLosses`` stops the run or counts the step, so the steps in between are computed in vain.
4. With fp16 the scaler leaves steps out whose gradient overflows, as a matter of course; then the loss alone is judged.
5. The running statistics of a BatchNorm are wrong as soon as the forward is, so they are put back where a run goes on.
6. ``--optimizer_in_backward`` has changed the weights before there is anything to look at, and a finite gradient makes
   them infinite where the rate is large. So the weights themselves are looked at before they are saved.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from itertools import pairwise
from math import ceil, isfinite
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.errors import InputError
from memsave_recipes.plans.chain import allocated_bytes
from memsave_recipes.sharding.tensors import is_sharded, local, whole
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batch_layout import BatchLayout, IndexedLayout, SampleOrder
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.tree_sum import exact_sum
from memsave_recipes.training.update_rules import (
    BITSANDBYTES_BLOCK,
    MIN_8BIT_NUMEL,
    MuonWithAdamW,
    StochasticAdamW,
    has_8bit_state,
    hidden_matrices,
    part_numel,
    slice_bytes,
)

BITSANDBYTES_CODES = 2 * 256 * 4  # the values of its two kinds of 8-bit state, which all parameters share
MUON_SCRATCH = 2**18  # of a thread of oneDNN, in the matrix products of an update
TRANSPOSING = 2 * 60**2  # of torch, which copies a transposed matrix of bfloat16 tile by tile
NUMBERS = 16  # in 32 bits, that an update or clipping makes, at most
NUMBER_BYTES = 4
BFLOAT16_STEP = 2**-9  # of a number: less is rounded away
LOOKED_AT_ONCE = 2**20  # numbers of a weight
NORM_CHUNK = 2**16
"""Numbers of a gradient to whose norm a block of CUDA's kernel adds a partial sum (``kChunkSize``, ForeachReduceOp.cu,
which makes as many sums for every gradient as the largest has)."""


def make_optimizer(optim: OptimizerArguments, model: nn.Module, *, seed: int = 0) -> Optimizer:
    """The named optimizer over all parameters that train.

    AdamW (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101), the same with its state in 8 bits (Dettmers et
    al. 2021, https://arxiv.org/abs/2110.02861; NOTE [ 8 bits in shards ] in ``eight_bit.py``), Muon (NOTE [ Muon ]),
    Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235) or SGD. AdamW and SGD run as one fused kernel a
    step, without the temporary copies of the unfused ones; of weights in shards SGD is not fused.
    ``bf16_stochastic_round``: NOTE [ stochastic rounding ], with ``seed``.

    Raises:
        InputError: ``adamw_8bit`` without bitsandbytes; or as ``parameters_by_optimizer``.
    """
    parameters = decay_groups(optim, model, _trained(model))
    lr, weight_decay = optim.learning_rate, optim.weight_decay
    optimizer: Optimizer
    match optim.update_rule:
        case "adamw_bf16":
            optimizer = StochasticAdamW(parameters, lr=lr, weight_decay=weight_decay, seed=seed)
        case "sgd":
            in_shards = is_sharded(model)  # for which torch has no fused SGD
            how: dict[str, Any] = {"foreach": in_shards or None, "fused": not in_shards}
            optimizer = SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=optim.momentum, **how)
            if not in_shards:
                optimizer.register_step_pre_hook(_begin_momentum)
        case "adafactor":
            optimizer = Adafactor(parameters, lr=lr, weight_decay=weight_decay, foreach=False)
        case "adamw_8bit":
            optimizer = _adamw_8bit(parameters, lr, weight_decay)
        case "muon":
            shares = parameters_by_optimizer("muon", model).values()
            matrices, others = (decay_groups(optim, model, share) for share in shares)
            optimizer = MuonWithAdamW(matrices, others, lr=lr, weight_decay=weight_decay)
        case _:
            optimizer = AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    if optim.optimizer_in_backward:
        step_in_backward(optimizer)
    return optimizer


def parameters_by_optimizer(optimizer: str, model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of ``model`` that train, by the name of what steps them: beside Muon that is AdamW.

    Raises:
        InputError: ``muon`` for a model that trains no matrix of a hidden layer.
    """
    trained = _trained(model)
    if optimizer != "muon":
        return {optimizer: trained}
    matrices = hidden_matrices(model)
    if not matrices:
        raise InputError(
            "--optimizer muon is for matrices of hidden linear layers, and this model trains none: take adamw"
        )
    known = set(matrices)
    return {"muon": matrices, "adamw": [parameter for parameter in trained if parameter not in known]}


def decay_groups(optim: OptimizerArguments, model: nn.Module, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """``parameters`` in groups for an optimizer: those that decay, then those that do not.

    Norms and biases do not decay, by the rule of transformers' ``Trainer``, and no vector does, as in nanoGPT. With
    ``--decay_all``, or without weight decay, there is one group.
    """
    if optim.decay_all or not optim.weight_decay:
        return [{"params": parameters}]
    from transformers import Trainer  # slow to import

    no_trainer: Any = None  # of which the rule uses nothing
    names = set(Trainer.get_decay_parameter_names(no_trainer, model))
    decayed = {one for name, one in model.named_parameters() if name in names and one.ndim > 1}
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one in decayed]},
        {"params": [one for one in parameters if one not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def in_order_of_steps(optim: OptimizerArguments, model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """``parameters_by_optimizer``, each list in the order in which its optimizer steps."""
    shares = parameters_by_optimizer(optim.update_rule, model)
    groups = {name: decay_groups(optim, model, share) for name, share in shares.items()}
    return {name: [one for group in of_one for one in group["params"]] for name, of_one in groups.items()}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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


def _adamw_8bit(parameters: list[dict[str, Any]], lr: float, weight_decay: float) -> Optimizer:
    if find_spec("bitsandbytes") is None:
        raise InputError("--optimizer adamw_8bit needs bitsandbytes: pip install 'memsave-recipes[bitsandbytes]'")
    from memsave_recipes.training.eight_bit import AdamW8bitInParts  # optional, and slow to import

    return AdamW8bitInParts(parameters, lr=lr, weight_decay=weight_decay)


def describe_state_in_shards(optim: OptimizerArguments, model: nn.Module) -> str | None:
    """A line on weights whose state ``adamw_8bit`` does not keep in 8 bits because of how they are cut up."""
    large = [parameter for parameter in _trained(model) if parameter.numel() >= MIN_8BIT_NUMEL]
    in_32_bits = [parameter for parameter in large if not has_8bit_state(parameter)]
    if optim.optimizer != "adamw_8bit" or not in_32_bits:
        return None
    return (
        f"8-bit AdamW: the state of {len(in_32_bits)} of {len(large)} large weights stays in 32 bits, since their "
        f"shards are not whole blocks of {BITSANDBYTES_BLOCK} numbers"
    )


def describe_lost_updates(optim: OptimizerArguments, model: nn.Module) -> str | None:
    """A line on weights in bfloat16 of which AdamW changes only a few: the others round each update away.

    An update of AdamW is about as large as the rate, and one below a 512th of a weight is lost: NOTE [ stochastic
    rounding ].
    """
    weights = [local(one).detach() for one in _trained(model) if one.dtype == torch.bfloat16]
    if optim.update_rule != "adamw" or not weights:
        return None
    parts = [part for weight in weights for part in weight.reshape(-1).split(LOOKED_AT_ONCE)]
    num_lost = sum(int((part.abs() > optim.learning_rate / BFLOAT16_STEP).sum()) for part in parts)
    share = num_lost / max(1, sum(weight.numel() for weight in weights))
    if share <= 0.5:
        return None
    return (
        f"note: {share:.0%} of the bfloat16 weights are too large to be changed at --learning_rate "
        f"{optim.learning_rate:g}: add --bf16_stochastic_round, or take --mixed_precision bf16 in place of --dtype"
    )


def make_scheduler(optim: OptimizerArguments, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Linear warm-up, then the named schedule over ``num_steps`` optimizer steps."""
    from transformers import get_scheduler  # slow to import, and of no use to --help

    length = max(num_steps, optim.warmup_steps + 1)  # transformers' polynomial divides by the steps after the warm-up
    scheduler: LRScheduler = get_scheduler(optim.lr_scheduler_type, optimizer, optim.warmup_steps, length)
    return scheduler


def clip_gradients(optim: OptimizerArguments, accelerator: Accelerator, model: nn.Module) -> Tensor | None:
    """The norm of the global batch's gradient, now clipped; ``None`` where the backward has used them up."""
    if optim.optimizer_in_backward:
        return None
    norm: Tensor = accelerator.clip_grad_norm_(model.parameters(), optim.max_grad_norm or float("inf"))
    return whole(norm)


def check_in_backward(
    optim: OptimizerArguments, layout: BatchLayout, mixed_precision: str, *, skip_nonfinite: int = 0
) -> None:
    """Refuse flags that need all gradients at once.

    Raises:
        InputError: ``--optimizer_in_backward`` beside accumulation, several ranks, clipping, fp16, steps left out or
            ``--bitwise_topology``.
    """
    if not optim.optimizer_in_backward:
        return
    reasons = {
        "--bitwise_topology adds up all gradients of the global batch first: leave one of them out": isinstance(
            layout, IndexedLayout
        ),
        f"{layout.accumulation_steps} accumulation steps add up a gradient before it is used: make "
        "--micro_batch_size as large as --global_batch_size": layout.accumulation_steps > 1,
        f"{layout.num_processes} ranks average their gradients first: launch one process": layout.num_processes > 1,
        "clipping needs the norm of all gradients first: pass --max_grad_norm 0": optim.max_grad_norm > 0,
        "fp16 scales the loss and has to look at all gradients for overflow: take bf16": mixed_precision == "fp16",
        "a gradient that is not finite has been used before it is known: drop --skip_nonfinite": skip_nonfinite > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"--optimizer_in_backward steps on each gradient as it is made, but {reason}")


def step_in_backward(optimizer: Optimizer) -> None:
    """Make every backward step ``optimizer``, parameter by parameter; a later ``optimizer.step()`` finds nothing to do.

    The optimizer looks at one parameter at a time, with the settings of its group as they are then, so schedules work.
    """
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(_StepOne(optimizer, index))


class _StepOne:
    def __init__(self, optimizer: Optimizer, index_of_group: int) -> None:
        self._optimizer = optimizer
        self._index = index_of_group  # the group itself is another one after load_state_dict, which Accelerate calls

    def __call__(self, parameter: Tensor) -> None:
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._index], "params": [parameter]}]
        try:
            type(self._optimizer).step(self._optimizer)  # not the instance's: a schedule counts its calls
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None


def state_bytes(
    optimizer: str,
    parameters: Iterable[Tensor],
    *,
    momentum: float = 0.0,
    num_ranks: int | None = None,
    on_cpu: bool = True,
) -> int:
    """Bytes of the state of ``parameters``, all of which ``optimizer`` steps; 0 for an unknown optimizer.

    Args:
        num_ranks: that are to hold whole ``parameters`` in shards; then it is the state of the first rank.
        on_cpu: else as an accelerator's allocator counts them.
    """
    if optimizer == "sgd" and not momentum:
        return 0
    sizes = (size for parameter in parameters for size in _state_of_one(optimizer, parameter, num_ranks))
    return allocated_bytes(sizes, on_cpu=on_cpu)


def _state_of_one(optimizer: str, parameter: Tensor, num_ranks: int | None) -> list[int]:
    """Of each tensor."""
    numel, size = parameter.numel() if num_ranks is None else part_numel(parameter, num_ranks), parameter.element_size()
    if optimizer == "adamw_8bit":
        in_8_bits = has_8bit_state(parameter, num_ranks)
        return 2 * [numel, 4 * ceil(numel / BITSANDBYTES_BLOCK)] if in_8_bits else 2 * [4 * numel]
    if optimizer == "adafactor" and parameter.ndim > 1:
        return [size * (numel // length) for length in parameter.shape[-2:]]
    return {"adamw": 2, "adamw_bf16": 2, "muon": 1, "adafactor": 1, "sgd": 1}.get(optimizer, 0) * [numel * size]


def counters_bytes(optimizer: str, num_parameters: int, *, on_cpu: bool) -> int:
    """Besides ``state_bytes``: counters of steps, and the values that 8-bit state stands for.

    The fused AdamW counts on the device, Adafactor always on the host.
    """
    if optimizer == "adamw_8bit":
        return BITSANDBYTES_CODES
    counted = ("adamw", "adafactor") if on_cpu else ("adamw",)
    return allocated_bytes([NUMBER_BYTES] * num_parameters, on_cpu=on_cpu) if optimizer in counted else 0


def update_bytes(optimizer: str, parameters: Iterable[Tensor], *, on_cpu: bool, num_ranks: int = 1) -> int:
    """The most bytes that the optimizer's update takes besides its state, on the first rank of ``num_ranks`` in shards.

    The fused AdamW and SGD take none but a counter. Adafactor makes the change of a parameter while that of the one
    before is still there. 8-bit AdamW takes five copies of a parameter on a CPU, and is one kernel on an accelerator.
    Muon goes by parameter, AdamW with stochastic rounding by slice.
    """
    trained, numbers_bytes = list(parameters), allocated_bytes([NUMBER_BYTES] * NUMBERS, on_cpu=on_cpu)
    if optimizer == "muon":
        sizes = (_muon_bytes(parameter, on_cpu=on_cpu, num_ranks=num_ranks) for parameter in trained)
        return numbers_bytes + max(sizes, default=0)
    if optimizer == "adamw_bf16":
        sizes = (slice_bytes(parameter, on_cpu=on_cpu, num_ranks=num_ranks) for parameter in trained)
        return numbers_bytes + max(sizes, default=0)
    if optimizer == "adamw_8bit" and on_cpu:
        return numbers_bytes + 5 * 4 * max((part_numel(parameter, num_ranks) for parameter in trained), default=0)
    if optimizer != "adafactor":
        return numbers_bytes
    changes = [0, *(parameter.nbytes for parameter in trained)]
    means = [_means_bytes(parameter) for parameter in trained]
    vectors = [parameter.nbytes for parameter in trained if parameter.ndim < 2]
    matrices = [before + change + mean for (before, change), mean in zip(pairwise(changes), means, strict=True)]
    return numbers_bytes + max(matrices, default=0) + max(vectors, default=0)


def _muon_bytes(matrix: Tensor, *, on_cpu: bool, num_ranks: int = 1) -> int:
    """The update, and in bfloat16 two iterates of its Newton-Schulz and two square matrices.

    On a CPU also what oneDNN takes where it multiplies bfloat16: at most a float32 copy of an iterate. torch itself
    does where there is neither AVX-512 nor its like, and takes ``TRANSPOSING``. Of shards the update is collected in
    bfloat16; before, that of the next matrix is made beside it, and cast twice.
    """
    if num_ranks > 1:
        collected = torch.empty(matrix.shape, dtype=torch.bfloat16, device="meta")
        numel = part_numel(matrix, num_ranks)
        cast = collected.nbytes + numel * (matrix.element_size() + 2 * collected.element_size())
        return max(cast, _muon_bytes(collected, on_cpu=on_cpu))
    iterate, square = 2 * matrix.numel(), 2 * min(matrix.shape) ** 2
    scratch = 0
    if on_cpu:
        of_onednn = 2 * iterate + MUON_SCRATCH * torch.get_num_threads()
        scratch = of_onednn if onednn_multiplies_bfloat16() else TRANSPOSING
    return matrix.nbytes + 2 * iterate + 2 * square + scratch


def onednn_multiplies_bfloat16() -> bool:
    """Whether torch leaves products of bfloat16 on this CPU to oneDNN; ``ONEDNN_MAX_CPU_ISA`` counts."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _means_bytes(parameter: Tensor) -> int:
    """Adafactor's means over rows, over columns and over both, of the matrices of a parameter."""
    if parameter.ndim < 2:
        return 0
    rows, columns = parameter.shape[-2:]
    numel = parameter.numel()
    return parameter.element_size() * (numel // rows + numel // columns + numel // (rows * columns))


def clipping_bytes(parameters: Iterable[Tensor], *, on_cpu: bool) -> int:
    """The norm of every gradient, and all of them once more in one tensor; on an accelerator also partial sums."""
    trained = list(parameters)
    norms = [parameter.element_size() for parameter in trained]
    sums = 0 if on_cpu else len(trained) * ceil(max((one.numel() for one in trained), default=0) / NORM_CHUNK)
    sizes = [*norms, sum(norms), NUMBER_BYTES * sums, *[NUMBER_BYTES] * NUMBERS]
    return allocated_bytes(sizes, on_cpu=on_cpu)


MAX_NAMED_SAMPLES = 32
WAY_OUT = (
    "no weight has changed since the step before: look at these samples and at --learning_rate, or go on with --resume "
    "--skip_nonfinite N"
)


class NotFinite(Exception):
    """More steps than allowed had a loss or a gradient that is not finite; all ranks know it. The message is a line."""


class NonFiniteGuard:
    """Lets the optimizer step on finite gradients only: rules 2, 4 and 5 of NOTE [ not finite ].

    Args:
        model, optimizer: as prepared, and as the first step finds them.
        skips: how many steps may be left out; with any, BatchNorm's statistics are put back after such a step.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, *, skips: int) -> None:
        self.has_scaler = accelerator.scaler is not None
        self.optimizer: Any = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands nothing on
        self.takes_found_inf = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self.statistics = [(buffer, buffer.clone()) for buffer in _statistics(model)] if skips else []

    def should_step(self, batch: GlobalBatch, grad_norm: Tensor | None) -> bool:
        """Whether to call ``optimizer.step()``; sets its ``found_inf``, and puts BatchNorm's statistics back.

        With ``found_inf`` set on the device the step that is called changes nothing.
        """
        if grad_norm is None:
            return True
        is_bad = ~torch.isfinite(torch.as_tensor(batch.loss) if self.has_scaler else grad_norm)
        for buffer, before in self.statistics:
            before.copy_(torch.where(is_bad, before, buffer))
            buffer.copy_(before)
        if self.has_scaler:
            return True
        if self.takes_found_inf:
            self.optimizer.found_inf = is_bad.to(torch.float32)
            return True
        return not is_bad.item()


def _statistics(model: nn.Module) -> list[Tensor]:
    return [buffer for module in model.modules() if isinstance(module, _BatchNorm) for buffer in module.buffers()]


class StepLosses:
    """The steps since the last logging window. All methods are for all ranks.

    Args:
        skips: so many steps may be not finite.
        exact: add the parts of a loss up without rounding, so that their order does not matter.
    """

    def __init__(self, accelerator: Accelerator, order: SampleOrder, *, skips: int, exact: bool = False) -> None:
        self.accelerator = accelerator
        self.order = order
        self.skips = skips
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        """Of the last step that has been read; ``None`` where no step had one."""
        self._sum: Callable[[list[float]], float] = exact_sum if exact else sum
        self._read: list[float] = []
        self._unread: dict[int, tuple[list[Tensor], Tensor | None]] = {}  # this rank's parts of the loss, gradient norm

    def add(self, batch: GlobalBatch, grad_norm: Tensor | None) -> None:
        """Take in a finished step. Reads nothing from the device."""
        self._unread[batch.step] = batch.loss_parts, grad_norm

    def parts(self) -> dict[tuple[int, int], float]:
        """This rank's parts of the losses that nobody has read yet, by step and number. Waits for the device."""
        parts = ((step, torch.stack(losses).tolist()) for step, (losses, _) in self._unread.items())
        return {(step, number): part for step, values in parts for number, part in enumerate(values)}

    def take_in(self, of_ranks: Mapping[tuple[int, int], list[float]]) -> None:
        """The ``parts`` of all ranks.

        Raises:
            NotFinite: more steps than allowed are not finite.
        """
        of_steps: dict[int, list[float]] = {}
        for (step, _), parts in of_ranks.items():
            of_steps.setdefault(step, []).extend(parts)
        for step, parts in of_steps.items():
            loss, (_, norm) = self._sum(parts), self._unread.pop(step)
            self.grad_norm = None if norm is None else norm.item()
            if is_finite(loss, self.grad_norm or 0.0, has_scaler=self.accelerator.scaler is not None):
                self._read.append(loss)
            else:
                self._leave_out(describe_not_finite(self.order, step, loss, self.grad_norm))

    def end_window(self) -> float:
        """The mean loss of its steps, NaN where none is finite."""
        steps, self._read = self._read, []
        return sum(steps) / len(steps) if steps else float("nan")

    def skipped(self) -> dict[str, int]:
        """How many steps have been left out, where that is allowed."""
        return {"skipped_steps": self.skipped_steps} if self.skips else {}

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window and the count of skipped steps, as plain values. Waits for the device.

        Raises:
            NotFinite: more steps than allowed are not finite.
        """
        self.take_in(gather_figures(self.accelerator, self.parts()))
        return {"losses": list(self._read), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self._read, self.skipped_steps = list(state["losses"]), state["skipped_steps"]

    def _leave_out(self, description: str) -> None:
        self.skipped_steps += 1
        if self.skipped_steps > self.skips:
            raise NotFinite(f"{description}; {WAY_OUT}")
        self.accelerator.print(f"note: {description}; skipped, {self.skipped_steps} of at most {self.skips}")


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


def gather_figures(accelerator: Accelerator, figures: Mapping[Any, float]) -> dict[Any, list[float]]:
    """Every figure of every rank, in one collective; all ranks must have the same. Whole numbers are exact to 2^53."""
    if not figures:
        return {}  # Accelerate cannot gather a tensor without elements on GPUs
    device = accelerator.device if accelerator.num_processes > 1 else "cpu"
    values = torch.tensor([list(figures.values())], dtype=torch.float64, device=device)
    return dict(zip(figures, accelerator.gather(values).T.tolist(), strict=True))
