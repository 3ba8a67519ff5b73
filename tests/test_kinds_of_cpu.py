"""The tests that compare bits or predict bytes, run again with the instructions of other processors and more threads.

The libraries of torch choose their kernels by the processor, so that what is equal on one may differ on another, and
kernels take other temporaries. The libraries' own variables leave out instruction sets, and with them take the kernels
of older or other processors. None adds an instruction that the processor lacks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OLDEST = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
KINDS = {
    "oldest": OLDEST,
    "sse4": {**OLDEST, "MKL_CBWR": "AUTO", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "mkl-avx512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "any-float-math": {"DNNL_DEFAULT_FPMATH_MODE": "ANY"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
}
MUON = "training/test_update_rules.py::test_its_memory_is_predicted"
RESUMED = [
    f"recipes/test_resume.py::test_{one}" for one in ("killed_and_resumed", "every_recipe[all-text_classification]")
]
BITS = [*RESUMED, "core/activations/test_equal_to_plain.py", "training/launch/test_ddp_with_plans.py"]
PREDICTIONS = ["core/costs/test_block_costs.py", MUON, "core/activations/test_nested.py"]


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tests", [BITS, PREDICTIONS], ids=["bits", "predictions"])
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind, tests):
    run_tests(tests, KINDS[kind])
