"""Prove on one global batch that an activation plan changes nothing: ``verify(model, handle, step)``."""

from memsave_recipes.core.proof.outcomes import Difference, Outcome, Verdict, compare_runs
from memsave_recipes.core.proof.proof import capture, use_deterministic_kernels, verify

__all__ = ["Difference", "Outcome", "Verdict", "capture", "compare_runs", "use_deterministic_kernels", "verify"]
