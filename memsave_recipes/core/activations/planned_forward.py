"""What the forwards of a plan have in common: when the model's own forward runs in their place."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


class PlannedForward(ABC):
    """A forward in place of a module's own ``method``, which runs as if there were no plan

    * without gradients: evaluation, generation;
    * once the plan is removed, where somebody has wrapped this forward in the meantime, as Accelerate does;
    * under the transforms of ``torch.func``, forward-mode derivatives and ``torch.jit.trace``, whose gradients, if any,
      are not those of a backward.

    Under ``torch.compile`` around the whole model torch's own checkpoint takes the place of a plan's, as the compiler
    knows it.
    """

    method: Callable[..., Any]
    removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``method``."""
        if torch.compiler.is_compiling():
            follows_plan = torch.is_grad_enabled() and not self.removed
            return self.compiled(*args, **kwargs) if follows_plan else self.method(*args, **kwargs)
        if self.removed or not torch.is_grad_enabled() or _is_transformed():
            return self.method(*args, **kwargs)
        return self.planned(*args, **kwargs)

    @abstractmethod
    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The same under the plan."""

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The same for a compiler that reads this code."""
        return checkpoint(self.method, *args, use_reentrant=False, **kwargs)


def _is_transformed() -> bool:
    return (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )
