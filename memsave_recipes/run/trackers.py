"""Trackers of a run: ``metrics.jsonl``, which every run writes, and dashboards; Accelerate's, on the main process.

NOTE [ trackers never stop a run ]
1. Trackers start, log and finish one by one: one that fails is one warning, and the others and the run go on.
2. Accelerate drops a tracker whose package is missing without a word (1.15), so the packages are checked here first.
3. ``wandb.init`` prompts on a terminal, raises without one, waits minutes for a server that is not there, and never
   falls back to offline by itself (0.31). So the mode is chosen before it: ``WANDB_MODE`` or ``wandb offline`` win;
   then online if there is a key, and the server takes it within 5 s and the run within another 8 s; else offline.
4. ``wandb.finish`` waits for a lost server without end, so it gets 15 s. What has not arrived is on the disk, and the
   terminal is told the ``wandb sync`` for it.
"""

import difflib
import functools
import io
import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.error import HTTPError
from urllib.request import urlopen

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, get_available_trackers
from accelerate.utils import patch_environment

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import first_line, flat
from memsave_recipes.tools.pages.page import confusion_table

METRICS = "metrics.jsonl"
TRACKERS = ("trackio", "wandb", "tensorboard", "none")
MOST_CLASSES = 50
LOGIN_TIMEOUT_S = 5
INIT_TIMEOUT_S = 8.0
FINISH_TIMEOUT_S = 15.0
ALERT_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """The labels of a run in dashboards.

    Args:
        group: the work; runs of one group are meant to be compared.
        name: the method.
        config: the content of ``config.json``.
        earlier: the ``tracker_ids`` of the run that goes on.
        first_step: the first that the run logs, from 1.
    """

    project: str
    group: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    output_dir: Path
    earlier: dict[str, str] | None = None
    first_step: int = 1


Start = Callable[[dict[str, Any] | None, dict[str, Any]], None]
"""Starts one tracker through Accelerate, from a configuration to be stored (or none) and the tracker's own arguments.
"""


def resolve_trackers(report_to: list[str], output_dir: Path) -> list[str | GeneralTracker]:
    """Return the trackers for ``Accelerator(log_with=...)``: the metrics file, then those of ``--report_to``.

    TensorBoard is an object, so that its files lie in the run's folder whatever Accelerate's project folder is.

    Raises:
        InputError: a tracker is not known or not installed, or ``none`` is one of several.
    """
    names = list(dict.fromkeys(report_to))
    for name in names:
        if name not in TRACKERS:
            near = "".join(f" (did you mean {one}?)" for one in difflib.get_close_matches(name, TRACKERS, n=1))
            raise InputError(f"--report_to {name}: unknown tracker{near}, choose among {', '.join(TRACKERS)}")
    if "none" in names and len(names) > 1:
        raise InputError(f"--report_to {' '.join(names)}: `none` stands alone, drop it or the others")
    asked = [name for name in names if name != "none"]
    for name in asked:
        if name not in map(str, get_available_trackers()):
            hint = "pip install 'memsave-recipes[trackers]', or --report_to none"
            raise InputError(f"--report_to {name} needs {name}, which is not installed: {hint}")
    board = TensorBoardTracker("tensorboard", output_dir)
    return [MetricsFile(output_dir), *(board if name == board.name else name for name in asked)]


def start_trackers(accelerator: Accelerator, run: RunLabels) -> None:
    """Start each tracker of the accelerator; leave one that cannot start out with a warning."""
    if not accelerator.is_main_process:
        return
    asked, started = accelerator.log_with, []
    for tracker in asked:
        name = tracker.name if isinstance(tracker, GeneralTracker) else str(tracker)
        start = functools.partial(_start, accelerator, tracker, run.project)
        if isinstance(tracker, TensorBoardTracker) and run.earlier is not None:
            tracker.init_kwargs["purge_step"] = run.first_step  # hides the rows that were logged from there on
        with _nonfatal(name, "start"):
            STARTS.get(name, _start_plain)(start, run)
            started += accelerator.trackers
    accelerator.log_with, accelerator.trackers = asked, [*map(_guard, started)]


def _start(
    accelerator: Accelerator, tracker: Any, project: str, config: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    accelerator.log_with, accelerator.trackers = [tracker], []
    accelerator.init_trackers(project, config, {str(tracker): options})


def _start_plain(start: Start, run: RunLabels) -> None:
    """Start the metrics file, which keeps no configuration, or TensorBoard, whose is flat, of numbers and text."""
    config = flat({"group": run.group, "name": run.name, "tags": run.tags, **run.config}, "/")
    start({key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in config.items()}, {})


def _start_trackio(start: Start, run: RunLabels) -> None:
    """Start trackio, with tags in the configuration, as it knows none, and without threads that sample the machine.

    It knows a run by its name, and takes no rows back (0.43). It asks the Hub without a time limit for the owner of a
    token, even for a local store.
    """
    from huggingface_hub import constants

    labels = {"name": run.name, "group": run.group, "config": {**run.config, "tags": run.tags}}
    options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    going_on = {"resume": "allow"} if run.earlier is not None else {}
    was_offline, remote = constants.HF_HUB_OFFLINE, {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
    constants.HF_HUB_OFFLINE = was_offline or not remote
    try:
        with redirect_stdout(io.StringIO()):
            start(None, {**labels, **options, **going_on})
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _start_wandb(start: Start, run: RunLabels) -> None:
    """Start W&B online if the server takes the login and the run, else offline with a warning that says why."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit by 12 s
    os.environ.pop("WANDB_SWEEP_PARAM_PATH", None)  # of a sweep; its values came as flags, and this would lock them
    run.output_dir.mkdir(parents=True, exist_ok=True)
    mode, problem = _wandb_mode()
    if mode == "online":
        try:
            return start(run.config, _wandb_options(mode, run))
        except Exception as error:  # the server was lost, or refuses the run, after it took the login
            mode, problem = "offline", first_line(error)
    if problem:
        logger.warning("wandb: %s, so the run is logged offline", problem)
    return start(run.config, _wandb_options(mode, run))


def _wandb_mode() -> tuple[str, str | None]:
    """Return the mode for ``wandb.init`` and, where it is offline against the user's expectation, the reason."""
    import wandb

    # Who the user is would be asked for up to 5 s before and after the login, only to be greeted by name.
    settings = wandb.setup(wandb.Settings(x_disable_viewer=True)).settings
    if settings.mode in ("offline", "dryrun", "disabled"):
        return settings.mode, None
    limit_s = os.environ.get("WANDB_HTTP_TIMEOUT", LOGIN_TIMEOUT_S)  # which `wandb.login` reads there alone
    try:
        with patch_environment(WANDB_HTTP_TIMEOUT=limit_s):
            has_key = wandb.login(prompt=False)
    except Exception as error:
        return "offline", f"no login at {settings.base_url} within {LOGIN_TIMEOUT_S} s ({first_line(error)})"
    return ("online", None) if has_key else ("offline", "no API key (`wandb login` stores one)")


def _wandb_options(mode: str, run: RunLabels) -> dict[str, Any]:
    """Return the arguments of ``wandb.init``; offline it is silent, as ``finish_trackers`` prints the line."""
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        silent=mode != "online",
    )
    tags = [*run.tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))]  # else ours would replace them
    labels: dict[str, Any] = {"group": run.group, "name": run.name, "tags": tags}
    if run.earlier and "wandb" in run.earlier:  # its rows of repeated steps are the same
        labels |= {"id": run.earlier["wandb"], "resume": "allow"}
    return {**labels, "mode": mode, "dir": str(run.output_dir), "settings": settings}


def tracker_ids(accelerator: Accelerator) -> dict[str, str]:
    """Return the ids by which running trackers find this run again."""
    return {tracker.name: tracker.tracker.id for tracker in accelerator.trackers if tracker.name == "wandb"}


def sync_rows(accelerator: Accelerator) -> int | None:
    """Sync ``metrics.jsonl``; return the number of its rows, or ``None`` where that fails."""
    for tracker in accelerator.trackers:
        if isinstance(tracker, MetricsFile):
            with _nonfatal(tracker.name, "reach the disk"):
                return tracker.sync()
    return None


def _guard(tracker: GeneralTracker) -> GeneralTracker:
    """Let a row that ``tracker`` cannot log be one warning. A row costs 0.01 to 3 ms."""
    log = tracker.log

    def guarded(values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        with _nonfatal(tracker.name, "log"):
            log(values, step=step, **options)

    tracker.log = guarded
    return tracker


def alert(accelerator: Accelerator, title: str, text: str) -> None:
    """Alert people by each tracker that can: W&B, which mails it or posts it to Slack, and trackio.

    Args:
        title: of at most 64 characters; W&B drops a second alert of the same title within a minute.
    """
    for tracker in accelerator.trackers:
        with _nonfatal(tracker.name, "alert"), redirect_stdout(io.StringIO()):
            if tracker.name == "wandb" and not tracker.tracker.offline:
                _check_that_it_answers(tracker.tracker.settings.base_url)
            if hasattr(tracker.tracker, "alert"):
                tracker.tracker.alert(title=title, text=text)


def _check_that_it_answers(url: str) -> None:
    """Raise where a server is lost: W&B's own process would try an alert for minutes before it lets the run end."""
    try:
        urlopen(url, timeout=ALERT_TIMEOUT_S).close()
    except HTTPError as error:
        if error.code >= 500:
            raise


def finish_trackers(accelerator: Accelerator, results: dict[str, Any]) -> None:
    """Write ``results`` as flat ``result/*`` keys into every tracker, close them, and end the process group.

    They belong to the last step, ``results["steps"]``; a run that stops before it has none. Figures of each class are
    left out where there are more than ``MOST_CLASSES``. The summary of W&B takes figures and words, the curves of the
    others figures alone. W&B and trackio show the confusion matrix. Print where the runs are to be seen.
    """
    shown = {key: value for key, value in results.items() if key != "classes" or len(value) <= MOST_CLASSES}
    named = {f"result/{key}": value for key, value in flat(shown, "/").items()}
    figures = {key: value for key, value in named.items() if isinstance(value, int | float)}
    for tracker in accelerator.trackers:
        with _nonfatal(tracker.name, "write the results"):
            if tracker.name == "wandb":
                tracker.tracker.summary.update(figures | {k: v for k, v in named.items() if isinstance(v, str)})
            elif figures:
                tracker.log(figures, step=results.get("steps"))
            if "confusion_matrix" in results and tracker.name in CONFUSIONS:
                confusion = dict(zip(results["classes"], results["confusion_matrix"], strict=True))
                shown = CONFUSIONS[tracker.name](confusion)
                tracker.log({"result/confusion_matrix": shown}, step=results["steps"])
        with _nonfatal(tracker.name, "finish"):
            if where := FINISHES.get(tracker.name, _finish_plain)(tracker):
                print(where, flush=True)
    accelerator.trackers = []
    with _nonfatal("accelerate", "end the training"):
        accelerator.end_training()


def _confusion_in_trackio(confusion: dict[str, list[int]]) -> Any:
    import trackio

    rows = [[name, *counts] for name, counts in confusion.items()]
    return trackio.Table(columns=["class / prediction", *confusion], data=rows)


def _confusion_in_wandb(confusion: dict[str, list[int]]) -> Any:
    """Return HTML, which is uploaded as a file: for a table W&B waits for an answer of the server (0.31)."""
    import wandb

    return wandb.Html(confusion_table(confusion), inject=False, data_is_not_path=True)


def _finish_plain(tracker: GeneralTracker) -> str | None:
    tracker.finish()
    folder = shlex.quote(str(getattr(tracker, "logging_dir", "")))
    return f"tensorboard: tensorboard --logdir {folder}" if tracker.name == "tensorboard" else None


def _finish_trackio(tracker: GeneralTracker) -> str:
    """Call trackio's own ``finish``: after the run's it would finish, and report, once more at exit."""
    import trackio

    with redirect_stdout(io.StringIO()):
        trackio.finish()
    return f"trackio: trackio show --project {shlex.quote(tracker.run_name)}"


def _finish_wandb(tracker: GeneralTracker) -> str | None:
    """Close the run; return the command that uploads the rows that the server lacks, if any."""
    run = tracker.tracker
    folder, log, offline = shlex.quote(run.sync_dir), Path(run.settings.log_internal), run.offline
    try:
        tracker.finish()
        problem = "the server refused it" if _was_refused(log) else None
    except Exception as error:  # the server, or wandb's own process, was lost on the way
        problem = first_line(error)
    if offline:
        return f"wandb: the run is offline, upload it with: wandb sync {folder}"
    if problem:
        return f"wandb: not everything has arrived ({problem}), upload it with: wandb sync --include-online {folder}"
    return None


def _was_refused(log: Path) -> bool:
    """Return whether the server refused rows, which only the client's log tells (0.31)."""
    return log.exists() and "filestream: fatal error" in log.read_text(encoding="utf-8", errors="replace")


STARTS = {"trackio": _start_trackio, "wandb": _start_wandb}
CONFUSIONS = {"trackio": _confusion_in_trackio, "wandb": _confusion_in_wandb}
FINISHES = {"trackio": _finish_trackio, "wandb": _finish_wandb}


@contextmanager
def _nonfatal(tracker_name: str, action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no error of a tracker is worth the run
        said = f"{type(error).__name__}: {first_line(error)}"
        _warn_once(f"{tracker_name} could not {action}, the run goes on without: {said}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class MetricsFile(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    """Appends a line ``{"step": n, **values}`` to ``metrics.jsonl`` for each row.

    Floats keep every digit; those that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """

    name = "metrics_file"
    requires_logging_directory = False

    def __init__(self, output_dir: Path):
        super().__init__()
        self.path = Path(output_dir) / METRICS
        self.num_rows = 0
        self._file: TextIO | None = None

    @property
    def tracker(self) -> Path:
        """The file, as ``accelerator.get_tracker("metrics_file", unwrap=True)`` returns it."""
        return self.path

    def start(self) -> None:
        """Open the file at its end, so that a resumed run continues it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        with self.path.open("rb") as written:
            self.num_rows = sum(1 for _ in written)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one row; values are ``int``, ``float``, ``str``, ``bool`` or ``None``."""
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open")
        row = {"step": step, **{key: _as_json(value) for key, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self.num_rows += 1
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self.path} has been deleted, its rows are lost and checkpoints may be as well")

    def sync(self) -> int:
        """Bring all rows to the disk; return how many they are, with those of earlier lives."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self.num_rows

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def cut_back(folder: Path, step: int, *, evaluated_at: int | None, num_rows: int | None) -> list[str]:
    """Remove the rows after ``step``, a half-written row of a killed run, and the final figures.

    A run that goes on from ``step`` writes them again, as it does with an evaluation after ``evaluated_at``, the last
    one that the checkpoint knows.

    Returns:
        A line where there are fewer rows left than the ``num_rows`` of the checkpoint, if it knows them.

    Raises:
        InputError: a row is none; nothing has been changed.
    """
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]  # without a row that a kill has cut off
    rows = [_read_row(line, f"{path} line {number}") for number, line in enumerate(whole, start=1)]
    kept = [line for line, row in zip(whole, rows, strict=True) if _is_kept(row, step, evaluated_at or 0)]
    if lines:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(path)
    if num_rows is not None and len(kept) < num_rows:
        return [f"note: {path} has {len(kept)} of its {num_rows} rows up to step {step}: the others are lost"]
    return []


def _read_row(line: bytes, place: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        row: dict[str, Any] = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step", ""), int | None):
            return row
    raise InputError(
        f"--resume: {place} is no row of a run: repair it, or delete the line, whose figures are then lost"
    )


def _is_kept(row: dict[str, Any], step: int, evaluated_at: int) -> bool:
    if row["step"] is None or any(key.startswith("result/") for key in row):
        return False
    last: int = evaluated_at if any(key.startswith("eval/") for key in row) else step
    return bool(row["step"] <= last)


def _as_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
