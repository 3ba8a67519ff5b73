"""Notebooks run at a small size, where each of their claims is an assert, and show what full size printed."""

import json
import os
import re
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

DOCS = Path(__file__).parents[1] / "docs"
MAX_BYTES = 300_000
MACHINE = re.compile(r"/(?:home|opt|root|tmp|usr|var|work)/|file://|0x[0-9a-f]{8}|Warning")
PEAKS = re.compile(r"predicted ([\d.]+) MiB, measured ([\d.]+) MiB")
T4 = {"POISON": 1, "CAPABILITY": 7.5, "NAME": "Tesla T4", "GIB": 15}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def notebook_of(name):
    return nbformat.read(DOCS / f"{name}.ipynb", as_version=4)


@pytest.fixture
def run_small(monkeypatch):
    """``run_small("article", folder)``: the code cells of a notebook after a run at its small size in ``folder``.

    On sockets of the file system: no port is opened.
    """

    def run(name, place):
        monkeypatch.setenv(f"{name.upper()}_SMALL", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with tempfile.TemporaryDirectory() as folder:
            for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
                monkeypatch.setenv(variable, folder)
            kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
            notebook, resources = deepcopy(notebook_of(name)), {"metadata": {"path": str(place)}}
            NotebookClient(notebook, km=kernel, timeout=900, coalesce_streams=True, resources=resources).execute()
        return code_cells(notebook)

    return run


@pytest.mark.slow
def test_the_article_runs(run_small):
    shown = printed(code_cells(notebook_of("article"))[-1])
    assert printed(run_small("article", DOCS)[-1]) == shown, "predictions depend on no size: run the notebook again"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("device", "settings"), [("the CPU", None), ("1 x Tesla T4", T4)], ids=["CPU", "T4"])
def test_the_first_hour_runs(device, settings, run_small, on_devices, monkeypatch, tmp_path):
    """Its commands are those beside this Python."""
    of_devices = on_devices(1, **settings) if settings else {"PYTHONPATH": str(DOCS.parent)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in (of_devices | {"PATH": path}).items():
        monkeypatch.setenv(name, value)
    cells = run_small("first_hour", tmp_path)
    said = "\n".join(map(printed, cells))
    assert f"measured figures are those of {device}," in said
    launch = json.loads((tmp_path / "first_hour" / "chat_plan.json").read_text())["launch"]
    assert ("--dtype float16" in launch) == (settings is not None)
    assert "What is your name? My name is Memo.\n" in said
    peaks = [tuple(map(float, found)) for found in PEAKS.findall(said)]
    assert len(peaks) == 2  # of conversations and of images
    for predicted, measured in peaks:
        assert 0.6 * predicted <= measured <= 1.01 * predicted  # short conversations take less


def test_the_first_hour_keeps_no_outputs():
    """They are those of the reader's device."""
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook_of("first_hour")))


def test_outputs_are_of_one_run_from_top_to_bottom():
    numbers = [cell.execution_count for cell in code_cells(notebook_of("article"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_outputs_name_no_machine_and_warn_of_nothing():
    cells = code_cells(notebook_of("article"))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert not [text for cell in cells for text in MACHINE.findall(printed(cell))]


def test_it_is_small():
    assert (DOCS / "article.ipynb").stat().st_size < MAX_BYTES
