"""The complete examples of the documentation run as they stand."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = [
    (page.name, code)
    for page in DOCS.glob("*.md")
    if page.name != "own_loop.md"  # test_own_loop.py
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_run(page, code):
    exec(compile(code, page, "exec"), {})


def test_the_three_lines_recompute_something():
    names = {}
    exec(compile(dict(EXAMPLES)["activation_plans.md"], "activation_plans.md", "exec"), names)
    assert 0 < len(names["plan"].recomputed) < len(names["plan"].blocks)
    assert "forward" not in vars(names["model"])
