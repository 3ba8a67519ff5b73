"""The tests that compare bits, run again with the instructions of other processors and on more threads.

The libraries of torch choose their kernels by the processor, so that what is equal on one may differ on another. Their
own variables leave out instruction sets, and with them take the kernels of older or other processors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KINDS = {
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "mkl-avx512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
}
OLDEST = {**KINDS["mkl-compatible"], **KINDS["aten-default"], **KINDS["onednn-sse41"]}
RESUME = "recipes/test_resume.py"
SAMPLE = [f"{RESUME}::test_every_recipe[none-{recipe}_classification]" for recipe in ("image", "text")]
BITS = [RESUME, "recipes/test_observers.py", "activations/test_equal_to_plain.py", "activations/test_selective.py"]
BITS += ["training/test_batching.py", "training/test_ddp_with_plans.py", "recipes/test_topologies.py"]
BITS += ["training/test_tree_sum.py", "recipes/test_bitwise_topology.py"]


def run_tests(tests, environment):
    """In a process of their own: the libraries read their variables when they are loaded."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900", "-m", "not slow"]
    done = subprocess.run(
        [*command, *(str(TESTS / test) for test in tests)],
        cwd=TESTS.parent,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("kind", [OLDEST, KINDS["two-threads"]], ids=["oldest", "two-threads"])
def test_a_sample(kind):
    run_tests(SAMPLE, kind)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind):
    run_tests(BITS, KINDS[kind])
