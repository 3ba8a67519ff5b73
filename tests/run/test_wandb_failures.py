"""Whatever the W&B server does, a run starts, ends well and soon, asks nothing, and keeps what it has to tell."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import three_steps

from memsave_recipes.tools.pages.page import confusion_table

KEY = "k" * 40
STARTS_WITHIN_S, ENDS_WITHIN_S = 20, 30
SHORT = {"LOGIN_TIMEOUT_S": 1, "INIT_TIMEOUT_S": 2.0, "FINISH_TIMEOUT_S": 2.0}

# failure of the server and the first operation that it hits -> words on the terminal
LOST_BEFORE = {
    "dies at once": ("die", None, "no login at"),
    "hangs": ("hang", None, "no login at"),
    "answers 500": (500, None, "no login at"),
    "refuses the key": (403, None, "injected"),
    "hangs after the login": ("hang", "UpsertBucket", "Timed out initializing run"),
    "answers 500 after the login": (500, "UpsertBucket", "Timed out"),
    "refuses the run": (403, "UpsertBucket", "injected"),
}
LOST_WHILE_TRAINING = {
    "dies": ("die", "file_stream", "Timed out finishing run"),
    "stops answering": ("hang", "file_stream", "Timed out finishing run"),
    "answers 500": (500, "file_stream", "Timed out finishing run"),
    "refuses the rows": (403, "file_stream", "the server refused it"),
    "hangs in the uploads": ("hang", "upload", "Timed out finishing run"),
}
QUICK = ("dies",)


def cases(failures: dict[str, tuple]) -> pytest.MarkDecorator:
    """All of them with the real time limits, and a few with short ones."""
    slow = [pytest.param(*failures[name], {}, id=name, marks=pytest.mark.slow) for name in failures]
    quick = [pytest.param(*failures[name], SHORT, id=f"{name}, quick") for name in failures if name in QUICK]
    return pytest.mark.parametrize(("failure", "since", "words", "limits"), [*quick, *slow])


@pytest.fixture
def check(sync: Callable, tmp_path: Path) -> Callable[[Any], None]:
    """Checks that a run with a lost server ended well and soon, and that everything can be recovered."""

    def run(ended: Any) -> None:
        assert ended.exit_code == 0, ended.output
        assert ended.seconds_to_start < STARTS_WITHIN_S
        assert ended.seconds_to_end < ENDS_WITHIN_S
        assert "the run is done" in ended.output
        assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 4
        received = sync(ended.output)
        *rows, last = received.history
        drawn = received.files[last.pop("result/confusion_matrix")["path"]].decode()
        assert drawn == confusion_table(three_steps.CONFUSION)
        assert [*rows, last] == [{"_step": row["step"], "train/loss": row["train/loss"]} for row in three_steps.ROWS]
        assert three_steps.FLAT_RESULTS.items() <= received.summary.items()
        assert three_steps.CONFIG.items() <= received.config.items()
        labels = ("project", "group", "name", "tags")
        assert {label: getattr(received, label) for label in labels} == three_steps.LABELS
        assert received.exit_code == 0

    return run


@cases(LOST_BEFORE)
def test_a_server_lost_before_training(
    failure: Any, since: str, words: str, limits: dict, launch: Callable, check: Callable, wandb_server: Any
) -> None:
    wandb_server.fail(failure, since=since)
    ended = launch("wandb", limits=limits, WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    print(f"{ended.seconds_to_start:.1f} s to start, {ended.seconds_to_end:.1f} s to end")
    assert words in ended.output
    assert "so the run is logged offline" in ended.output
    assert "--include-online" not in ended.output
    check(ended)


@cases(LOST_WHILE_TRAINING)
def test_a_server_lost_while_training(
    failure: Any, since: str, words: str, limits: dict, launch: Callable, check: Callable, wandb_server: Any
) -> None:
    wandb_server.fail(failure, since=since)
    ended = launch("wandb", limits=limits, WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    print(f"{ended.seconds_to_start:.1f} s to start, {ended.seconds_to_end:.1f} s to end")
    assert f"not everything has arrived ({words})" in ended.output
    assert "wandb sync --include-online" in ended.output
    check(ended)


@pytest.mark.slow
def test_no_key(launch: Callable, check: Callable, wandb_server: Any) -> None:
    ended = launch("wandb", WANDB_BASE_URL=wandb_server.url)
    assert "no API key" in ended.output
    assert wandb_server.operations == []
    check(ended)


@pytest.mark.slow
def test_no_server(launch: Callable, check: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    ended = launch("wandb", limits=SHORT, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert f"no login at {url}" in ended.output
    check(ended)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_mode_that_the_user_chose(mode: str, launch: Callable, wandb_server: Any, tmp_path: Path) -> None:
    ended = launch("wandb", WANDB_MODE=mode, WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    assert ended.exit_code == 0
    assert wandb_server.operations == []
    assert "no login" not in ended.output
    assert ("upload it with" in ended.output) == (mode == "offline")
    assert len(list(tmp_path.glob("out/wandb/offline-run-*"))) == (mode == "offline")
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["result/steps"] == 3
