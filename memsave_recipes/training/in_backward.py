"""Step each parameter as soon as its gradient is there, and free the gradient: never all gradients at once.

The idea is LOMO's (Lv et al. 2023, https://arxiv.org/abs/2306.09782), for any optimizer that treats each parameter by
itself. What it rules out: everything that has to know all gradients first (clipping by the global norm, accumulation,
the average over ranks, loss scaling).
"""

from torch import Tensor
from torch.optim import Optimizer

from memsave_recipes.errors import InputError
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.sample_order import Geometry


def check_in_backward(
    optim: OptimizerArguments, geometry: Geometry, mixed_precision: str, *, skip_nonfinite: int = 0
) -> None:
    """Refuse what needs all gradients at once.

    Raises:
        InputError: ``--optimizer_in_backward`` beside accumulation, several ranks, clipping, fp16 or steps left out.
    """
    if not optim.optimizer_in_backward:
        return
    reasons = {
        f"{geometry.accumulation_steps} accumulation steps add up a gradient before it is used: make "
        "--micro_batch_size as large as --global_batch_size": geometry.accumulation_steps > 1,
        f"{geometry.num_processes} ranks average their gradients first: launch one process": geometry.num_processes > 1,
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
            type(self._optimizer).step(self._optimizer)  # not what a schedule has wrapped to count its steps
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None
