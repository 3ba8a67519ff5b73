"""The test of a case, and the rows of all of them in the file that ``PEERS`` names."""

import json
import os
from pathlib import Path

import pytest
from peer_suites.adapter import Case

ROW = "peers"


@pytest.fixture
def note_row(request: pytest.FixtureRequest):
    """Note a row: of a ``Case``, or with the same entries."""

    def run(row: dict) -> None:
        suite = request.path.stem.removeprefix("test_")
        name = request.node.name.partition("[")[2].removesuffix("]")
        request.node.user_properties.append((ROW, json.dumps({"suite": suite, "case": name, **row})))

    return run


@pytest.fixture
def judge(note_row):
    """Run a case, note its row, and fail where a verdict is worse than expected."""

    def run(case: Case) -> None:
        note_row(row := case.row())
        assert row["faults"] == []

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave two cases of three to ``make test-peers``, which runs every one."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for number, item in enumerate(ours):
        if number % 3:
            item.add_marker(pytest.mark.slow)


ROWS: list[dict] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        ROWS.extend(json.loads(row) for name, row in report.user_properties if name == ROW)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (path := os.environ.get("PEERS")) and not hasattr(session.config, "workerinput"):
        rows = sorted(ROWS, key=lambda row: (row["suite"], row["case"]))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
