"""Hugging Face Accelerate training recipes that save memory: name what you have, get the fastest run that fits.

``import memsave_recipes as memsave`` has the functions for your own training loop; docs/trainers.md shows them. Each
name is imported when it is first used (PEP 562): the import itself loads neither torch nor transformers.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsave_recipes.core.activations import PlanHandle as PlanHandle
    from memsave_recipes.core.activations import apply_plan as apply_plan
    from memsave_recipes.core.errors import InputError as InputError
    from memsave_recipes.core.host.state import keep_state_on_host as keep_state_on_host
    from memsave_recipes.core.host.step import step_on_host as step_on_host
    from memsave_recipes.core.losses import linear_cross_entropy as linear_cross_entropy
    from memsave_recipes.core.planner import StaticMemory as StaticMemory
    from memsave_recipes.core.planner import make_plan as make_plan
    from memsave_recipes.core.planner.search import Candidate as Candidate
    from memsave_recipes.core.planner.search import Choice as Choice
    from memsave_recipes.core.planner.task import Task as Task
    from memsave_recipes.core.planner.task import estimate as estimate
    from memsave_recipes.core.plans import Plan as Plan
    from memsave_recipes.core.proof import Verdict as Verdict
    from memsave_recipes.core.proof import verify as verify
    from memsave_recipes.integrations.lightning_callback import MemsaveLightningCallback as MemsaveLightningCallback
    from memsave_recipes.integrations.planned_training import PlannedTraining as PlannedTraining
    from memsave_recipes.integrations.planned_training import prepare as prepare
    from memsave_recipes.integrations.trainer_callback import MemsaveCallback as MemsaveCallback
    from memsave_recipes.models.fused_ops import fuse_operators as fuse_operators
    from memsave_recipes.training.arguments import OptimizerArguments as OptimizerArguments
    from memsave_recipes.training.arguments import RunArguments as RunArguments

__version__ = "0.3.0"

# transformers imports peft, which imports bitsandbytes, which warns on some CPUs of a kernel for 4-bit layers alone.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_MODULES = {
    "core.activations": ("PlanHandle", "apply_plan"),
    "core.errors": ("InputError",),
    "core.host.state": ("keep_state_on_host",),
    "core.host.step": ("step_on_host",),
    "core.losses": ("linear_cross_entropy",),
    "core.planner": ("StaticMemory", "make_plan"),
    "core.planner.search": ("Candidate", "Choice"),
    "core.planner.task": ("Task", "estimate"),
    "core.plans": ("Plan",),
    "core.proof": ("Verdict", "verify"),
    "integrations.lightning_callback": ("MemsaveLightningCallback",),
    "integrations.planned_training": ("PlannedTraining", "prepare"),
    "integrations.trainer_callback": ("MemsaveCallback",),
    "models.fused_ops": ("fuse_operators",),
    "training.arguments": ("OptimizerArguments", "RunArguments"),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def _import(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = _import


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
