"""The scripts of docs/trainers.md for trainers, as they stand there."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
NAMES = ("trainer", "fabric")
OF_TRAINERS = PAGE.read_text(encoding="utf-8").partition("\n## One line in a trainer\n")[2]
CODE = dict(zip(NAMES, re.findall(r"```python\n(.*?)```", OF_TRAINERS, re.S), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_script_trains_under_its_plan(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(CODE[name], encoding="utf-8")
    names = runpy.run_path(str(script))
    planned = names["handle" if name == "fabric" else "callback"]
    assert planned.plan.spans
    printed = capsys.readouterr().out
    assert f"memsave: {planned.plan}" in printed
    assert "memsave: peak of step 2: " in printed


@pytest.mark.parametrize("name", NAMES)
def test_one_line_names_the_plan(name):
    lines = [line for line in CODE[name].splitlines() if "memsave." in line]
    assert len(lines) == 1
