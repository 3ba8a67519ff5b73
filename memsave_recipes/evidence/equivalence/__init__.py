"""Prove on one global batch that an activation plan changes nothing: ``verify(model, handle, step)``."""

from memsave_recipes.evidence.equivalence.fixed_order import take_fixed_order
from memsave_recipes.evidence.equivalence.outcomes import Difference, Outcome, Verdict, compare_runs
from memsave_recipes.evidence.equivalence.proof import capture, verify

__all__ = ["Difference", "Outcome", "Verdict", "capture", "compare_runs", "take_fixed_order", "verify"]
