"""The two loops of docs/trainers.md that no trainer runs, as scripts."""

import ast
import re
import runpy
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from samples import sample

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
CODE = dict(zip(("pytorch", "accelerate"), re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S), strict=False))


@pytest.mark.parametrize("loop", CODE)
def test_only_the_public_names_are_used(loop):
    nodes = list(ast.walk(ast.parse(CODE[loop])))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert "memsave_recipes" in imported
    others = [*imported, *(node.module for node in nodes if isinstance(node, ast.ImportFrom))]
    assert not [name for name in others if name.startswith("memsave_recipes.")]


@pytest.mark.parametrize("loop", sample(["pytorch"], CODE))
def test_the_loop_trains_under_its_plan(loop, tmp_path):
    script = tmp_path / f"{loop}.py"  # a file: blocks are looked for in the source of the model's forward
    script.write_text(CODE[loop], encoding="utf-8")
    AcceleratorState._reset_state(reset_partial_state=True)  # of another test, with another precision
    names = runpy.run_path(str(script))
    assert names["plan"].spans
    assert names["plan"].strategy == "budget"
    assert len(set(names["losses"])) == len(names["losses"]) > 1
    model = names["model"]
    assert not [module for module in model.modules() if "forward" in vars(module)]
    if loop == "pytorch":
        assert names["plan"].recomputed
        assert names["verdict"].status == "identical"
        assert names["losses"][-1] < names["losses"][0]
    else:
        assert names["chosen"].fits
