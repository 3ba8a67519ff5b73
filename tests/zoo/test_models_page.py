"""docs/results/zoo.md says what the rows of the zoo say, and no row is a mistake; how rows are made."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import heads, matrix
from zoo.matrix import is_right, row_of, rows_of, write_results
from zoo.page import PAGE, page, word
from zoo.steps import IDENTICAL, NO_EFFECT, PARTS_KEPT, STRATEGIES

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / matrix.RESULTS).read_text(encoding="utf-8"))
ROWS = [row for rows in RESULTS["families"].values() for row in rows.values()]
HEADS = heads.rows_so_far(ROOT / heads.ROWS)
BUILT = [row for row in ROWS if not isinstance(row, str)]


def test_the_page_is_made_from_the_rows():
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(RESULTS, HEADS)


def test_no_plan_is_wrong():
    assert [row for row in ROWS if not is_right(row) and NO_EFFECT not in row] == []


def test_nothing_loses_what_it_trained():
    assert [(name, row) for name, row in HEADS.items() if row.startswith(heads.LOST)] == []


def test_hardly_any_plan_is_without_effect():
    assert sum(NO_EFFECT in row for row in BUILT) <= 0.01 * len(BUILT)


def test_nearly_all_architectures_have_a_plan_that_works():
    assert len(BUILT) > 400
    assert sum(IDENTICAL in row for row in BUILT) >= 0.95 * len(BUILT)


def test_every_strategy_has_its_column():
    assert RESULTS["strategies"] == list(STRATEGIES)
    assert {len(row) for row in BUILT} == {len(STRATEGIES)}


@dataclass(frozen=True)
class Small:
    """A model that ends in its own way."""

    end: str = "well"
    seeds: tuple[int, ...] = (7,)

    def build(self):
        torch.manual_seed(0)
        if self.end == "error":
            raise ValueError("no such size")
        while self.end == "never":
            pass
        if self.end == "crash":
            os._exit(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)))

    def batch(self):
        return {"input": torch.ones(64, 8)}


def test_a_row_has_a_verdict_for_each_strategy():
    assert row_of(Small()) == [IDENTICAL] * len(STRATEGIES)


def test_a_model_that_cannot_be_built_says_why():
    assert row_of(Small("error")) == "ValueError: no such size"


def test_a_crash_or_a_hang_costs_one_row(monkeypatch):
    monkeypatch.setattr(matrix, "CPU_SECONDS", 2)
    monkeypatch.setattr(matrix, "row_of", lambda model: [model.build() and IDENTICAL])
    models = {("family", end): Small(end) for end in ("crash", "well", "never")}
    rows = {kind: row for (_, kind), row in rows_of(models, num_processes=2)}
    assert rows["well"] == [IDENTICAL]
    assert all(rows[end].startswith("crash: ") for end in ("crash", "never"))
    assert not any(is_right(rows[end]) for end in ("crash", "never"))


def test_single_rows_replace_those_in_the_file(tmp_path):
    path = tmp_path / "zoo.json"
    write_results(path, {("a", "x"): [IDENTICAL], ("b", "y"): "why"}, replaces_all=True)
    write_results(path, {("a", "x"): [NO_EFFECT]}, replaces_all=False)
    assert json.loads(path.read_text())["families"] == {"a": {"x": [NO_EFFECT]}, "b": {"y": "why"}}


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (IDENTICAL, "yes"),
        (NO_EFFECT, NO_EFFECT),
        (f"{PARTS_KEPT}: segments:2: 4 of 8 blocks recomputed", PARTS_KEPT),
        ("wrong: 3 of 9, loss", "wrong"),
        ("traceback: KeyError: 1", "traceback"),
        ("refused: strategy: Layer cannot run under selective, because aten::add_ writes in place on", "in place"),
        ("refused: of a kind that was never seen", "other"),
    ],
)
def test_a_verdict_in_the_table(verdict, said):
    assert word(verdict) == said
