"""Update rules that are no single optimizer of torch: Muon with AdamW for the rest, AdamW on bfloat16 weights, each
for whole weights and for weights in shards.

Notes: ``docs/design/training.md``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.optimizer import ParamsT

from memsave_recipes.core.sharding.tensors import collected, first_row, handed_out, local, num_parts
from memsave_recipes.core.step.batch_layout import seed_for
from memsave_recipes.core.step.memory import num_rows, slice_rows


class MuonWithAdamW(Optimizer):
    """Muon for ``matrices`` and AdamW for ``others``, both in groups of parameters, as one optimizer.

    Args:
        of_adamw: ``betas`` and ``eps``.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: ParamsT, *, lr: float, weight_decay: float, **of_adamw: Any
    ) -> None:
        self._muon = MuonOfParts(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(others, lr=lr, weight_decay=weight_decay, fused=True, **of_adamw)
        groups = [
            *({**group, "use_muon": True} for group in self._muon.param_groups),
            *({**group, "use_muon": False} for group in self._adamw.param_groups),
        ]
        super().__init__(groups, {"lr": lr})  # which schedules of transformers read

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        parts: list[tuple[Optimizer, bool]] = [(self._muon, True), (self._adamw, False)]
        for optimizer, uses_muon in parts:
            optimizer.state = self.state  # both are others after load_state_dict, which Accelerate calls
            optimizer.param_groups = [group for group in self.param_groups if group["use_muon"] is uses_muon]
            optimizer.step()
        return loss


class MuonOfParts(Muon):
    """``torch.optim.Muon``, bit for bit, also for matrices in shards: rule 4 of NOTE [ Muon ].

    Of those, ``step`` is for all ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            matrices.sort(key=lambda matrix: matrix.numel(), reverse=True)
            num_ranks = num_parts(matrices[0]) if matrices else 1
            for begin in range(0, len(matrices), num_ranks):
                self._step_some(matrices[begin : begin + num_ranks], group)
        return loss

    def _step_some(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """At most as many as a group has ranks."""
        mine = self._orthogonalised(matrices, group)
        for rank, matrix in enumerate(matrices):
            update, weight = handed_out(mine, matrix, rank, torch.bfloat16), local(matrix)
            stepped = weight * (1 - group["lr"] * group["weight_decay"])
            stepped.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape))
            weight.copy_(stepped)

    def _orthogonalised(self, matrices: list[Tensor], group: dict[str, Any]) -> Tensor | None:
        """The update of one of the matrices, the one that is this rank's; the last ranks may have none."""
        found = [collected(self._direction(matrix, group), matrix, rank) for rank, matrix in enumerate(matrices)]
        mine = next((matrix for matrix in found if matrix is not None), None)
        if mine is None:
            return None
        return _zeropower_via_newtonschulz(mine, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _direction(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is orthogonalised: the gradient with the momentum that it has moved."""
        state, whole_or_shards = self.state[matrix], matrix.grad
        assert whole_or_shards is not None, "checked by step"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(whole_or_shards)
        gradient, momentum = local(whole_or_shards), local(state["momentum_buffer"])
        momentum.copy_(momentum.lerp(gradient, 1 - group["momentum"]))
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


class StochasticAdamW(Optimizer):
    """AdamW whose weights and moments are bfloat16: NOTE [ stochastic rounding ].

    Args:
        parameters: in groups, and in the same order on all ranks and in every life of a run.
        seed: of the rounding.
    """

    def __init__(
        self,
        parameters: ParamsT,
        *,
        lr: float,
        weight_decay: float,
        seed: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed = seed
        in_order = (parameter for group in self.param_groups for parameter in group["params"])
        self._numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(in_order)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        parts = [torch.atleast_1d(local(tensor)) for tensor in tensors]
        begin = first_row(parameter) if isinstance(parameter, DTensor) else 0
        end, rows = begin + len(parts[0]), slice_rows(parameter, parameter.device)
        for number in range(begin // rows, -(-end // rows)):
            at = number * rows
            first, last = max(begin, at), min(end, at + rows)
            seed = seed_for(self._seed, state["step"], self._numbers[parameter], number)
            random = torch.Generator(parameter.device).manual_seed(seed)
            shape = min(rows, num_rows(parameter) - at), *parameter.shape[1:]
            draw = partial(_random_bits, random, shape, slice(first - at, last - at))
            weight, of_weight, mean, square = (part[first - begin : last - begin] for part in parts)
            _adamw_(weight, of_weight.float(), mean, square, group, state["step"], draw)


def _random_bits(random: torch.Generator, shape: tuple[int, ...], rows: slice) -> Tensor:
    """16 for each number in some rows of a slice of this shape, for all of which they are drawn."""
    return torch.randint(2**16, shape, generator=random, dtype=torch.int32, device=random.device)[rows]


def _adamw_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    step: int,
    draw: Callable[[], Tensor],
) -> None:
    """The update of a slice, by the formula of ``torch.optim.AdamW`` in float32; ``draw`` makes random bits for it."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    new_mean = mean.float().lerp_(gradient, 1 - beta1)
    new_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = new_square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    new_weight = weight.float().mul_(1 - lr * group["weight_decay"])
    new_weight.addcdiv_(new_mean, root, value=-lr / (1 - beta1**step))
    for target, value in ((mean, new_mean), (square, new_square), (weight, new_weight)):
        if target.dtype == torch.bfloat16:
            round_stochastically_(value, draw())
        target.copy_(value)


def round_stochastically_(value: Tensor, bits: Tensor) -> None:
    """Make each number of ``value``, float32, one of the two of bfloat16 next to it. NaN does not become finite.

    Args:
        bits: 16 random ones for each number, in int32; they are changed.
    """
    bits.masked_fill_(value.isnan(), 0)
    value.view(torch.int32).add_(bits).bitwise_and_(-(2**16))
