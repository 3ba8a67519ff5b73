"""Trackers: a run always writes its own ``metrics.jsonl``, and no dashboard can prompt, hang or stop it.

All of it goes through Accelerate's trackers, on the main process only.

NOTE [ never in the way ]

1. ``metrics.jsonl`` is the run's own record and needs no package, no account and no network.
2. Trackers start, log and finish one by one: one that fails is one warning, and the others and the run go on.
3. Accelerate drops a tracker whose package is missing without a word (1.15), so the packages are checked here first.
4. ``wandb.init`` prompts on a terminal, raises without one, and waits minutes for a server that is not there, and never
   falls back to offline by itself (0.31). So the mode is chosen before it: ``WANDB_MODE`` or ``wandb offline`` win,
   then online if the server answers within ``PROBE_S`` and takes the key (at most 10 s more), else offline, to be
   uploaded by ``wandb sync``.
"""

import contextlib
import difflib
import functools
import http.client
import io
import logging
import os
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, get_available_trackers

from memsave_recipes.errors import InputError
from memsave_recipes.training.launch import let_gloo_settle
from memsave_recipes.training.metrics_file import MetricsFile

TRACKERS = ("trackio", "wandb", "tensorboard", "none")
PACKAGES = {"trackio": "trackio", "wandb": "wandb>=0.30", "tensorboard": "tensorboard"}
PROBE_S = 3.0
WANDB_INIT_TIMEOUT_S = 20.0
WANDB_FINISH_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def resolve_trackers(report_to: list[str], output_dir: Path) -> list[str | GeneralTracker]:
    """What ``Accelerator(log_with=...)`` takes for ``--report_to``: the metrics file first, then what was asked for.

    Raises ``InputError`` for a tracker that is not known or not installed, and for ``none`` beside another one.
    """
    names = list(dict.fromkeys(report_to))
    for name in names:
        _check_name(name)
    if "none" in names and len(names) > 1:
        raise InputError(f"--report_to {' '.join(names)}: `none` stands alone, drop it or the others")
    asked = [name for name in names if name != "none"]
    for name in asked:
        _check_installed(name)
    return [MetricsFile(output_dir), *(_as_log_with(name, output_dir) for name in asked)]


def start_trackers(
    accelerator: Accelerator,
    *,
    project: str,
    group: str,
    name: str,
    tags: list[str],
    config: dict[str, Any],
    output_dir: Path,
) -> None:
    """Starts each tracker of the accelerator; one that cannot start is left out with a warning.

    ``group`` is the work, ``name`` the method, ``config`` what ``config.json`` holds.
    """
    if not accelerator.is_main_process:
        return
    labels = {"group": group, "name": name, "tags": tags}
    asked, started = accelerator.log_with, []
    for tracker in asked:
        launch = functools.partial(_launch, accelerator, tracker, project)
        with _never_in_the_way(_name_of(tracker), "start"):
            started += _STARTERS.get(_name_of(tracker), _start_plain)(launch, labels, config, Path(output_dir))
    accelerator.log_with, accelerator.trackers = asked, started


def log_metrics(accelerator: Accelerator, values: dict[str, Any], step: int) -> None:
    """Logs one row to every tracker, on the main process; a tracker that fails is one warning, never an exception.

    Call it outside the timed region: a row costs 0.01 to 3 ms.
    """
    for tracker in accelerator.trackers:
        with _never_in_the_way(tracker.name, "log"):
            tracker.log(values, step=step)


def finish_trackers(accelerator: Accelerator, results: dict[str, Any]) -> None:
    """Writes the numbers of ``results`` as flat ``result/*`` keys into every tracker and closes them, then ends the
    training on every process (Accelerate destroys the process group).

    They belong to the last step, ``results["steps"]``. W&B gets them in the run's summary. The terminal is told where
    the runs are to be seen.
    """
    figures = {f"result/{key}": value for key, value in _flat(results).items() if isinstance(value, int | float)}
    for tracker in accelerator.trackers:
        with _never_in_the_way(tracker.name, "write the results"):
            _log_results(tracker, figures, results.get("steps"))
        with _never_in_the_way(tracker.name, "finish"):
            _finish(tracker)
    accelerator.trackers = []
    let_gloo_settle()
    with _never_in_the_way("accelerate", "end the training"):
        accelerator.end_training()


_Launch = Callable[[dict[str, Any] | None, dict[str, Any]], list[GeneralTracker]]


def _launch(
    accelerator: Accelerator, tracker: Any, project: str, config: dict[str, Any] | None, init_kwargs: dict[str, Any]
) -> list[GeneralTracker]:
    """Starts one tracker through Accelerate, alone (rule 2)."""
    accelerator.log_with, accelerator.trackers = [tracker], []
    accelerator.init_trackers(project, config, {_name_of(tracker): init_kwargs})
    return accelerator.trackers


def _start_plain(launch: _Launch, labels: dict, config: dict, output_dir: Path) -> list[GeneralTracker]:
    """The metrics file, which keeps no configuration, and TensorBoard, which takes a flat one of numbers and text."""
    flat = _flat({**labels, **config})
    return launch({key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in flat.items()}, {})


def _start_trackio(launch: _Launch, labels: dict, config: dict, output_dir: Path) -> list[GeneralTracker]:
    """Trackio knows no tags, so they join the configuration; its threads that sample the machine stay off."""
    kwargs = {"name": labels["name"], "group": labels["group"], "config": {**config, "tags": labels["tags"]}}
    with _offline_hub(), contextlib.redirect_stdout(io.StringIO()):
        return launch(None, {**kwargs, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False})


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


def _start_wandb(launch: _Launch, labels: dict, config: dict, output_dir: Path) -> list[GeneralTracker]:
    """Rule 4, with a second chance offline if the server is lost between the check and ``init``."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit by 12 s
    output_dir.mkdir(parents=True, exist_ok=True)
    mode, why_offline = _wandb_mode()
    if mode == "online":
        try:
            return launch(config, _wandb_kwargs(mode, labels, output_dir))
        except Exception as error:
            mode, why_offline = "offline", _first_line(error)
    if why_offline:
        logger.warning("wandb: %s, so the run is logged offline", why_offline)
    return launch(config, _wandb_kwargs(mode, labels, output_dir))


def _wandb_kwargs(mode: str, labels: dict, output_dir: Path) -> dict[str, Any]:
    """Silent offline, where the one line that counts is printed by ``finish_trackers``."""
    import wandb

    settings = wandb.Settings(
        init_timeout=WANDB_INIT_TIMEOUT_S, finish_timeout=WANDB_FINISH_TIMEOUT_S, silent=mode != "online"
    )
    return {"mode": mode, "dir": str(output_dir), "settings": settings, **labels}


_STARTERS = {"trackio": _start_trackio, "wandb": _start_wandb}


def _wandb_mode() -> tuple[str, str | None]:
    """The mode for ``wandb.init`` and, where it is offline against the user's expectation, the reason."""
    import wandb

    settings = wandb.setup().settings
    if settings.mode in ("offline", "dryrun", "disabled"):
        return settings.mode, None
    if not _answers(settings.base_url):
        return "offline", f"no answer from {settings.base_url} within {PROBE_S:g} s"
    try:
        has_key = wandb.login(prompt=False)
    except Exception as error:
        return "offline", _first_line(error)
    return ("online", None) if has_key else ("offline", "no API key (`wandb login` stores one)")


def _answers(url: str) -> bool:
    """Whether anything speaks HTTP at ``url`` within ``PROBE_S``: in a thread, since name look-ups take no timeout."""
    answered = threading.Event()

    def probe() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            with contextlib.suppress(urllib.error.HTTPError):  # an error page is an answer too
                urllib.request.urlopen(url, timeout=PROBE_S).close()
            answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return answered.is_set()


def _log_results(tracker: GeneralTracker, figures: dict[str, int | float], step: int | None) -> None:
    if tracker.name == "wandb":
        tracker.tracker.summary.update(figures)
    else:
        tracker.log(figures, step=step)


def _finish(tracker: GeneralTracker) -> None:
    """Closes a tracker and tells where its run is to be seen."""
    where = _where_to_see(tracker)
    if tracker.name == "trackio":
        _finish_trackio()
    else:
        tracker.finish()
    if where:
        print(where, flush=True)


def _finish_trackio() -> None:
    """Trackio's own ``finish``, since it finishes, and reports, a second time at exit after the run's."""
    import trackio

    with contextlib.redirect_stdout(io.StringIO()):
        trackio.finish()


def _where_to_see(tracker: GeneralTracker) -> str | None:
    if tracker.name == "trackio":
        return f"trackio: trackio show --project {shlex.quote(tracker.run_name)}"
    if tracker.name == "tensorboard":
        return f"tensorboard: tensorboard --logdir {shlex.quote(str(tracker.logging_dir))}"
    if tracker.name == "wandb" and tracker.tracker.offline:
        return f"wandb: the run is offline, upload it with: wandb sync {shlex.quote(tracker.tracker.sync_dir)}"
    return None


@contextlib.contextmanager
def _never_in_the_way(tracker_name: str, action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it is, it is not worth the run
        _warn_once(f"{tracker_name} could not {action}, the run goes on without: {_first_line(error)}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_name(name: str) -> None:
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"--report_to {name}: unknown tracker{hint}, choose among {', '.join(TRACKERS)}")


def _check_installed(name: str) -> None:
    if name not in map(str, get_available_trackers()):
        raise InputError(f"--report_to {name}: not installed, `pip install '{PACKAGES[name]}'` or --report_to none")


def _as_log_with(name: str, output_dir: Path) -> str | GeneralTracker:
    """TensorBoard as an object, so that its files lie in the run's folder whatever Accelerate's project folder is."""
    return TensorBoardTracker("tensorboard", output_dir) if name == "tensorboard" else name


def _name_of(tracker: Any) -> str:
    return tracker.name if isinstance(tracker, GeneralTracker) else str(tracker)


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries, keyed ``outer/inner``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
