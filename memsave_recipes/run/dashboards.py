"""Runs on W&B and in trackio: their labels, how they start and how they finish.

W&B is online if the server takes the run in time, else offline in a folder that ``wandb sync`` uploads later; the time
limits are those of NOTE [ trackers never stop a run ] in ``trackers.py``. Trackio is a local database and dashboard
without account or network.
"""

import contextlib
import io
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """Runs of one ``group`` do the same work and are meant to be compared; the ``name`` is that of the method.

    A run that goes on has the ``earlier`` one's id in each tracker that gave it one, and its own first row at
    ``first_step``.
    """

    group: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    output_dir: Path
    earlier: dict[str, str] | None = None
    first_step: int = 1


# Starts one tracker through Accelerate, from a configuration to be stored (or none) and the tracker's own arguments.
Launch = Callable[[dict[str, Any] | None, dict[str, Any]], list[GeneralTracker]]


LOGIN_TIMEOUT_S = 5
INIT_TIMEOUT_S = 8.0
FINISH_TIMEOUT_S = 15.0

logger = logging.getLogger(__name__)


def start_wandb(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
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


def write_wandb_summary(tracker: GeneralTracker, figures: dict[str, int | float | str]) -> None:
    """Into the run's summary."""
    tracker.tracker.summary.update(figures)


def finish_wandb(tracker: GeneralTracker) -> str | None:
    """Close the run; returns the command that uploads the rows that the server lacks, if any."""
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
    if run.earlier and "wandb" in run.earlier:  # its rows of repeated steps are the same
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


def start_trackio(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
    """Trackio knows no tags, so they join the configuration; its threads that sample the machine stay off.

    It knows a run by its name. Rows of steps that are done again are there twice, since it takes none back (0.43).
    """
    labels = {"name": run.name, "group": run.group, "config": {**run.config, "tags": run.tags}}
    going_on = {"resume": "allow"} if run.earlier is not None else {}
    with _offline_hub(), contextlib.redirect_stdout(io.StringIO()):
        return launch(None, {**labels, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False, **going_on})


def finish_trackio(tracker: GeneralTracker) -> str:
    """Trackio's own ``finish``, since it finishes, and reports, a second time at exit after the run's."""
    import trackio

    with contextlib.redirect_stdout(io.StringIO()):
        trackio.finish()
    return f"trackio: trackio show --project {shlex.quote(tracker.run_name)}"


@contextlib.contextmanager
def _offline_hub() -> Iterator[None]:
    """Trackio asks the Hub for the name of whoever has a token there, without a time limit, even for a local store."""
    from huggingface_hub import constants

    offline, remote = constants.HF_HUB_OFFLINE, {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
    constants.HF_HUB_OFFLINE = offline or not remote
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
