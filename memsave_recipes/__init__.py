"""Hugging Face Accelerate training recipes that save memory: name what you have, get the fastest run that fits.

``import memsave_recipes as memsave`` has the functions for your own training loop; docs/trainers.md shows them. Each
name is imported when it is first used (PEP 562): the import itself loads neither torch nor transformers.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsave_recipes.core.activations import PlanHandle, apply_plan
    from memsave_recipes.core.errors import InputError
    from memsave_recipes.core.host.state import keep_state_on_host
    from memsave_recipes.core.host.step import step_on_host
    from memsave_recipes.core.losses import linear_cross_entropy
    from memsave_recipes.core.planner import StaticMemory, make_plan
    from memsave_recipes.core.planner.search import Candidate, Choice
    from memsave_recipes.core.planner.task import Task, estimate
    from memsave_recipes.core.plans import Plan
    from memsave_recipes.core.proof import Verdict, verify
    from memsave_recipes.integrations.lightning_callback import MemsaveLightningCallback
    from memsave_recipes.integrations.planned_training import PlannedTraining, prepare
    from memsave_recipes.integrations.trainer_callback import MemsaveCallback
    from memsave_recipes.models.fused_ops import fuse_operators
    from memsave_recipes.training.arguments import OptimizerArguments, RunArguments

__version__ = "0.3.0"

# transformers imports peft, which imports bitsandbytes, which warns on some CPUs of a kernel for 4-bit layers alone.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__all__ = [
    "Candidate",
    "Choice",
    "InputError",
    "MemsaveCallback",
    "MemsaveLightningCallback",
    "OptimizerArguments",
    "Plan",
    "PlanHandle",
    "PlannedTraining",
    "RunArguments",
    "StaticMemory",
    "Task",
    "Verdict",
    "apply_plan",
    "estimate",
    "fuse_operators",
    "keep_state_on_host",
    "linear_cross_entropy",
    "make_plan",
    "prepare",
    "step_on_host",
    "verify",
]

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


def _import(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = _import


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
