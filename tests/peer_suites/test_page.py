"""docs/results/peer_suites.md says what the JSON beside it says, of every case, and no verdict is a fault."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from peer_suites import page
from peer_suites.adapter import AS_TORCH, BETTER, DIFFERS, LOUD, RAISES, REFUSED, SAME, verdict_of

from memsave_recipes.core.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results():
    return json.loads((ROOT / page.RESULTS).read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_rows(results):
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == page.page(results)


@pytest.mark.parametrize("suite", page.SUITES)
def test_every_case_has_its_row(suite, results):
    cases = import_module(f"peer_suites.test_{suite}").suite.cases
    rows = {name.removesuffix(" on two ranks"): row for name, row in results["suites"][suite].items()}
    assert {name: set(row) - page.BESIDE for name, row in rows.items()} == {
        name: set(case.expected) for name, case in cases.items()
    }


def test_no_verdict_is_a_fault(results):
    rows = {(suite, case): row for suite, rows in results["suites"].items() for case, row in rows.items()}
    ours = {name: {row[way] for way in row if way not in page.BESIDE} for name, row in rows.items()}
    assert [name for name, verdicts in ours.items() if verdicts & {DIFFERS, RAISES}] == []


RIGHT, WRONG = {"loss": [1.0]}, {"loss": [2.0]}
ERROR = RuntimeError("no")


@pytest.mark.parametrize(
    ("plain", "torchs", "ours", "verdict"),
    [
        (RIGHT, RIGHT, RIGHT, SAME),
        (RIGHT, WRONG, RIGHT, BETTER),
        (RIGHT, ERROR, RIGHT, BETTER),
        (ERROR, ERROR, ERROR, SAME),
        (RIGHT, RIGHT, InputError("strategy: use none"), REFUSED),
        (RIGHT, RIGHT, InputError("two\nlines"), RAISES),
        (RIGHT, ERROR, ERROR, LOUD),
        (RIGHT, WRONG, ERROR, LOUD),
        (RIGHT, WRONG, KeyError("no"), RAISES),
        (RIGHT, WRONG, WRONG, AS_TORCH),
        (ERROR, RIGHT, RIGHT, AS_TORCH),
        (RIGHT, RIGHT, WRONG, DIFFERS),
        (RIGHT, ERROR, WRONG, DIFFERS),
        (RIGHT, RIGHT, ERROR, RAISES),
    ],
)
def test_a_verdict(plain, torchs, ours, verdict):
    assert verdict_of(plain, torchs, ours) == verdict
