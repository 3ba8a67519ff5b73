"""The notebook runs at a small size, where each of its claims is an assert, and shows what it printed at its own."""

import re
import tempfile
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "article.ipynb"
MAX_BYTES = 300_000
MACHINE = re.compile(r"/(?:home|opt|root|tmp|usr|var|work)/|file://|0x[0-9a-f]{8}|Warning")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
def test_it_runs(notebook, monkeypatch):
    """On sockets of the file system: no port is opened."""
    monkeypatch.setenv("ARTICLE_SMALL", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = printed(code_cells(notebook)[-1])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            monkeypatch.setenv(name, folder)
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        place = {"metadata": {"path": str(NOTEBOOK.parent)}}
        run = deepcopy(notebook)
        NotebookClient(run, km=kernel, timeout=240, coalesce_streams=True, resources=place).execute()
    assert printed(code_cells(run)[-1]) == shown, "predictions depend on no size: run the notebook again"


def test_its_outputs_are_of_one_run_from_top_to_bottom(notebook):
    numbers = [cell.execution_count for cell in code_cells(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_its_outputs_name_no_machine_and_warn_of_nothing(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert not [text for cell in code_cells(notebook) for text in MACHINE.findall(printed(cell))]


def test_it_is_small():
    assert NOTEBOOK.stat().st_size < MAX_BYTES
