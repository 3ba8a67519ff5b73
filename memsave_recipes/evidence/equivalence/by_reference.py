"""Two computations of the same in another order: is the one as near to the truth as the other?

NOTE [ as exact as plain ]
A plan that compiles rounds at other places, so it has to be as near as plain to what plain gives in float64, in the
root mean square of each tensor. Two computations of equal quality are nearer to it by turns (measured: up to 1.4 times;
a loss, which is one number, 21 times). Hence SLACK times plain's own error, plus, relative to the size of the tensor,
plain's error over all gradients or ROUNDING ulp. What is no floating-point number has to be equal.
"""

from dataclasses import replace
from math import isfinite, sqrt

import torch
from torch import Tensor

from memsave_recipes.evidence.equivalence.outcomes import (
    Difference,
    Key,
    Outcome,
    Verdict,
    dense,
    difference_of,
    keys_of,
    verdict_of,
)

SLACK = 2.0
ROUNDING = 4.0


def compare_by_reference(plain: Outcome, planned: Outcome, reference: Outcome) -> Verdict:
    """NOTE [ as exact as plain ]; ``reference`` is plain in float64."""
    differences: list[Difference] = []
    # Compiled code may draw from a generator of its own.
    keys = [key for key in keys_of(plain, planned) if key[0] != "RNG"]
    usual = _usual_error(plain, reference)
    for key in keys:
        one, other, exact = plain.tensors.get(key), planned.tensors.get(key), reference.tensors.get(key)
        if one is None or other is None or exact is None or not one.is_floating_point():
            differences += difference_of(key, one, other)
        else:
            differences += _excess(key, one, other, exact, usual)
    return verdict_of("as exact as plain", differences, len(keys), planned)


def _usual_error(plain: Outcome, reference: Outcome) -> float:
    """Of all gradients together, relative to their size; 0 where it is not finite."""
    keys = [key for key in reference.tensors if key[0] == "gradient" and key in plain.tensors]
    error = size = 0.0
    for key in keys:
        exact = _wide(reference.tensors[key])
        error += float((_wide(plain.tensors[key]) - exact).square().sum())
        size += float(exact.square().sum())
    return sqrt(error / size) if isfinite(error) and isfinite(size) and size else 0.0


def _excess(key: Key, plain: Tensor, planned: Tensor, reference: Tensor, usual: float) -> list[Difference]:
    exact = _wide(reference)
    ours, theirs = (_root_mean_square(_wide(x) - exact) for x in (planned, plain))
    rounding = max(usual, ROUNDING * torch.finfo(plain.dtype).eps) * _root_mean_square(exact)
    if ours <= SLACK * theirs + rounding:
        return []
    words = f"its error against float64 is {ours:.1e}, plain's {theirs:.1e}"
    return [replace(found, words=words) for found in difference_of(key, plain, planned)]


def _wide(tensor: Tensor) -> Tensor:
    return dense(tensor).cpu().double()


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
