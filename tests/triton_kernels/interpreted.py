"""Kernels by Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1 python interpreted.py`` prints what they give.

Of a kernel that the interpreter refuses it prints ``null``.
"""

import json

import torch
import triton
import triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice
from triton.runtime.errors import InterpreterError

NUMBERS = (0.25, 1.0, 1.999, 4.0)
"""1.999 lies between two of bfloat16: 1.9921875 and 2, which is nearer."""


@triton.jit
def root(numbers, results, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(results + places, tl.rsqrt(tl.load(numbers + places)))


@triton.jit
def root_by_libdevice(numbers, results, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(results + places, libdevice.rsqrt(tl.load(numbers + places)))


@triton.jit
def tanh_by_libdevice(numbers, results, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(results + places, libdevice.tanh(tl.load(numbers + places)))


@triton.jit
def to_bfloat16(numbers, results, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(results + places, tl.load(numbers + places).to(tl.bfloat16))


def results_of(kernel) -> list[float] | None:
    numbers = torch.tensor(NUMBERS)
    results = torch.empty_like(numbers, dtype=torch.bfloat16 if kernel is to_bfloat16 else None)
    try:
        kernel[(1,)](numbers, results, size=len(NUMBERS))
    except InterpreterError:
        return None
    return results.tolist()


if __name__ == "__main__":
    kernels = (root, root_by_libdevice, tanh_by_libdevice, to_bfloat16)
    print(json.dumps({kernel.fn.__name__: results_of(kernel) for kernel in kernels}))
