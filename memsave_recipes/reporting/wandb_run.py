"""A run on W&B: online if the server takes it in time, else in a folder that ``wandb sync`` uploads later.

What it may cost a run, and why, is said in NOTE [ never in the way ] of ``trackers.py``.
"""

import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from memsave_recipes.reporting.run_labels import Launch, RunLabels

LOGIN_TIMEOUT_S = 5
INIT_TIMEOUT_S = 8.0
FINISH_TIMEOUT_S = 15.0

logger = logging.getLogger(__name__)


def start(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
    """Online if the server takes the login and the run, else offline with a warning that says why."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit by 12 s
    run.output_dir.mkdir(parents=True, exist_ok=True)
    mode, problem = _choose_mode()
    if mode == "online":
        try:
            return launch(run.config, _init_kwargs(mode, run))
        except Exception as error:  # the server was lost, or refuses the run, after it took the login
            mode, problem = "offline", _first_line(error)
    if problem:
        logger.warning("wandb: %s, so the run is logged offline", problem)
    return launch(run.config, _init_kwargs(mode, run))


def write_results(tracker: GeneralTracker, figures: dict[str, int | float | str]) -> None:
    """Into the run's summary."""
    tracker.tracker.summary.update(figures)


def finish(tracker: GeneralTracker) -> str | None:
    """Close the run; returns the command that uploads what the server does not have, if there is anything."""
    run = tracker.tracker
    folder, log, offline = shlex.quote(run.sync_dir), Path(run.settings.log_internal), run.offline
    try:
        tracker.finish()
        problem = "the server refused it" if _was_refused(log) else None
    except Exception as error:  # the server, or wandb's own process, was lost on the way
        problem = _first_line(error)
    if offline:
        return f"wandb: the run is offline, upload it with: wandb sync {folder}"
    if problem:
        return f"wandb: not everything has arrived ({problem}), upload it with: wandb sync --include-online {folder}"
    return None


def _init_kwargs(mode: str, run: RunLabels) -> dict[str, Any]:
    """Silent offline, where the one line that counts is printed by ``finish_trackers``."""
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        silent=mode != "online",
    )
    labels: dict[str, Any] = {"group": run.group, "name": run.name, "tags": run.tags}
    if run.earlier and "wandb" in run.earlier:  # what it has of the steps that are done again is the same
        labels |= {"id": run.earlier["wandb"], "resume": "allow"}
    return {**labels, "mode": mode, "dir": str(run.output_dir), "settings": settings}


def _choose_mode() -> tuple[str, str | None]:
    """The mode for ``wandb.init`` and, where it is offline against the user's expectation, the reason."""
    import wandb

    # Who the user is would be asked for up to 5 s before and after the login, only to be greeted by name.
    settings = wandb.setup(wandb.Settings(x_disable_viewer=True)).settings
    if settings.mode in ("offline", "dryrun", "disabled"):
        return settings.mode, None
    try:
        with _login_timeout():
            has_key = wandb.login(prompt=False)
    except Exception as error:
        return "offline", f"no login at {settings.base_url} within {LOGIN_TIMEOUT_S} s ({_first_line(error)})"
    return ("online", None) if has_key else ("offline", "no API key (`wandb login` stores one)")


@contextmanager
def _login_timeout() -> Iterator[None]:
    """``wandb.login`` reads its time limit from the environment alone; one that the user has set there stays."""
    name = "WANDB_HTTP_TIMEOUT"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(LOGIN_TIMEOUT_S)
    try:
        yield
    finally:
        del os.environ[name]


def _was_refused(log: Path) -> bool:
    """Whether the client gave up on rows that the server refused, which only its log tells (0.31)."""
    return log.exists() and "filestream: fatal error" in log.read_text(encoding="utf-8", errors="replace")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
