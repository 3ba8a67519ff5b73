"""The view on W&B holds the panels that compare runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb_stand_in

MEMSAVE = [sys.executable, "-m", "memsave_recipes.tools.cli"]


def save_workspace(project: str, home: Path, **environment: str) -> subprocess.CompletedProcess:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [*MEMSAVE, "wandb-workspace", project],
        env={**kept, "HOME": str(home), "NETRC": str(home / "netrc"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_view_on_wandb_holds_the_panels_that_compare_runs(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    told = {}
    with wandb_stand_in.serving() as server:
        answer = server.graphql

        def graphql(operation: str, variables: dict[str, Any]) -> dict[str, Any]:
            if operation != "UpsertView2":
                return answer(operation, variables)
            told.update(variables)
            return {"upsertView": {"view": {"id": "v", "name": variables["name"]}, "inserted": True}}

        server.graphql = graphql
        done = save_workspace("me/mine", tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"saved: {server.url}/me/mine?nw=")
    assert (told["entityName"], told["projectName"]) == ("me", "mine")
    sections = json.loads(told["spec"])["section"]["panelBankConfig"]["sections"]
    panels = [panel for section in sections for panel in section["panels"]]
    kinds = [panel["viewType"] for panel in panels]
    assert kinds == ["Bar Chart", "Scatter Plot", "Bar Chart", "Run Comparer", *["Run History Line Plot"] * 4]
    for key in ("result/memory/peak_allocated_gib", "result/perf/samples_per_sec", "train/loss", "eval/loss"):
        assert key in told["spec"]


@pytest.mark.parametrize(
    ("project", "environment", "expected"),
    [
        ("mine", {}, "mine is not a W&B project: write it as ENTITY/PROJECT"),
        ("me/mine", {}, "needs a W&B key"),
        ("me/mine", {"WANDB_API_KEY": "k" * 40}, "no login at W&B"),
    ],
)
def test_without_access_one_line_and_exit_code_2(
    project: str, environment: dict, expected: str, tmp_path: Path
) -> None:
    done = save_workspace(project, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", **environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_missing_package_is_named_with_its_command(tmp_path: Path) -> None:
    block = "import sys; sys.modules['wandb_workspaces'] = None; from memsave_recipes.tools.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", block + "sys.exit(main(['wandb-workspace', 'me/mine']))"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'memsave-recipes[trackers]'" in done.stderr
