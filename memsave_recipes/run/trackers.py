"""Trackers of a run: ``metrics.jsonl``, which every run writes, and dashboards, which never prompt, hang or stop it.

All are Accelerate's trackers, on the main process only. W&B is online if the server takes the run in time, else offline
in a folder that ``wandb sync`` uploads later. Trackio is a local database and dashboard without account or network.

NOTE [ trackers never stop a run ]

1. ``metrics.jsonl`` is the run's own record and needs no package, no account and no network.
2. Trackers start, log and finish one by one: one that fails is one warning, and the others and the run go on.
3. Accelerate drops a tracker whose package is missing without a word (1.15), so the packages are checked here first.
4. ``wandb.init`` prompts on a terminal, raises without one, waits minutes for a server that is not there, and never
   falls back to offline by itself (0.31). So the mode is chosen before it: ``WANDB_MODE`` or ``wandb offline`` win;
   then online if there is a key, and the server takes it within 5 s and the run within another 8 s; else offline.
   Training starts 1 to 2 s later where all is well, 7 s where nobody answers, 11 s where the login is taken and the
   run is not (measured on 2 busy cores, imports included).
5. ``wandb.finish`` waits for a lost server without end, so it gets 15 s; the process then ends within 16 to 19 s of
   its last step (measured). What has not arrived is on the disk, and the terminal is told the ``wandb sync`` for it.
"""

import contextlib
import difflib
import functools
import io
import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, get_available_trackers, on_main_process

from memsave_recipes.errors import InputError
from memsave_recipes.text import first_line


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


def start_wandb(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
    """Online if the server takes the login and the run, else offline with a warning that says why."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit by 12 s
    run.output_dir.mkdir(parents=True, exist_ok=True)
    mode, problem = _choose_mode()
    if mode == "online":
        try:
            return launch(run.config, _init_kwargs(mode, run))
        except Exception as error:  # the server was lost, or refuses the run, after it took the login
            mode, problem = "offline", first_line(error)
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
        problem = first_line(error)
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
        return "offline", f"no login at {settings.base_url} within {LOGIN_TIMEOUT_S} s ({first_line(error)})"
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


NAME = "metrics.jsonl"


class MetricsFile(GeneralTracker):  # type: ignore[misc]  # accelerate has no types, its decorators neither
    """Appends one JSON object a line to ``metrics.jsonl``: ``{"step": n, **values}``, on disk as soon as it is logged.

    Floats keep every digit. JSON has no word for the ones that are not finite, so they are the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads back.
    """

    name = "metrics_file"
    requires_logging_directory = False

    def __init__(self, output_dir: Path):
        super().__init__()
        self.path = Path(output_dir) / NAME
        self.num_rows = 0
        self._file: TextIO | None = None

    @property
    def tracker(self) -> Path:
        """The file, as ``accelerator.get_tracker("metrics_file", unwrap=True)`` returns it."""
        return self.path

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Opens the file at its end, so that a resumed run continues it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        with self.path.open("rb") as written:
            self.num_rows = sum(1 for _ in written)

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes one row; values are ``int``, ``float``, ``str``, ``bool`` or ``None``."""
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open")
        row = {"step": step, **{key: _as_json(value) for key, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self.num_rows += 1
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self.path} has been deleted, its rows are lost and checkpoints may be as well")

    def sync(self) -> int:
        """Brings all rows to the disk; returns how many they are, with those of earlier lives."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self.num_rows

    @on_main_process  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def cut_back(folder: Path, step: int, *, evaluated_at: int | None, num_rows: int | None) -> list[str]:
    """Remove the rows after ``step``, a half-written row of a killed run, and the final figures.

    A run that goes on from ``step`` writes them again. So it does with the evaluation of ``step`` itself where the
    checkpoint does not know of it: the last one that it knows is ``evaluated_at``.

    Returns:
        A line where there are fewer rows left than the ``num_rows`` of the checkpoint, if it knows them.

    Raises:
        InputError: a row is none; nothing has been changed.
    """
    path = folder / NAME
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
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


TRACKERS = ("trackio", "wandb", "tensorboard", "none")

logger = logging.getLogger(__name__)


def resolve_trackers(report_to: list[str], output_dir: Path) -> list[str | GeneralTracker]:
    """The trackers for ``Accelerator(log_with=...)``: the metrics file, then those of ``--report_to``.

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
    earlier: dict[str, str] | None = None,
    first_step: int = 1,
) -> None:
    """Starts each tracker of the accelerator; one that cannot start is left out with a warning.

    ``group`` is the work, ``name`` the method, ``config`` the content of ``config.json``. A run that goes on has the
    ``tracker_ids`` of the ``earlier`` one and the ``first_step`` that it logs, from 1.
    """
    if not accelerator.is_main_process:
        return
    run = RunLabels(
        group=group,
        name=name,
        tags=tags,
        config=config,
        output_dir=Path(output_dir),
        earlier=earlier,
        first_step=first_step,
    )
    asked, started = accelerator.log_with, []
    for tracker in asked:
        if isinstance(tracker, TensorBoardTracker) and earlier is not None:
            tracker.init_kwargs["purge_step"] = first_step  # hides the rows that were logged from there on
        launch = functools.partial(_launch, accelerator, tracker, project)
        with _nonfatal(_name_of(tracker), "start"):
            started += _START.get(_name_of(tracker), _start_plain)(launch, run)
    accelerator.log_with, accelerator.trackers = asked, started


def tracker_ids(accelerator: Accelerator) -> dict[str, str]:
    """By which the trackers that are running find this run again."""
    return {tracker.name: tracker.tracker.id for tracker in accelerator.trackers if tracker.name == "wandb"}


def sync_rows(accelerator: Accelerator) -> int | None:
    """Brings the rows of ``metrics.jsonl`` to the disk; how many they are, or ``None`` where that fails."""
    for tracker in accelerator.trackers:
        if isinstance(tracker, MetricsFile):
            with _nonfatal(tracker.name, "reach the disk"):
                return tracker.sync()
    return None


def log_metrics(accelerator: Accelerator, values: dict[str, Any], step: int) -> None:
    """Logs one row to every tracker, on the main process; a tracker that fails is one warning, never an exception.

    Call it outside the timed region: a row costs 0.01 to 3 ms.
    """
    for tracker in accelerator.trackers:
        with _nonfatal(tracker.name, "log"):
            tracker.log(values, step=step)


def finish_trackers(accelerator: Accelerator, results: dict[str, Any]) -> None:
    """Writes the numbers of ``results`` as flat ``result/*`` keys into every tracker and closes them, then ends the
    training on every process (Accelerate destroys the process group).

    They belong to the last step, ``results["steps"]``; a run that stops before it has none. W&B gets them in the run's
    summary. The terminal is told where the runs are to be seen.
    """
    named = {f"result/{key}": value for key, value in _flat(results).items()}
    for tracker in accelerator.trackers:
        with _nonfatal(tracker.name, "write the results"):
            if named:
                _write_results(tracker, named, results.get("steps"))
        with _nonfatal(tracker.name, "finish"):
            if where := _FINISH.get(tracker.name, _finish_plain)(tracker):
                print(where, flush=True)
    accelerator.trackers = []
    with _nonfatal("accelerate", "end the training"):
        accelerator.end_training()


def _launch(
    accelerator: Accelerator, tracker: Any, project: str, config: dict[str, Any] | None, init_kwargs: dict[str, Any]
) -> list[GeneralTracker]:
    """Starts one tracker through Accelerate, alone (rule 2)."""
    accelerator.log_with, accelerator.trackers = [tracker], []
    accelerator.init_trackers(project, config, {_name_of(tracker): init_kwargs})
    started: list[GeneralTracker] = accelerator.trackers
    return started


def _start_plain(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
    """The metrics file, which keeps no configuration, and TensorBoard, which takes a flat one of numbers and text."""
    flat = _flat({"group": run.group, "name": run.name, "tags": run.tags, **run.config})
    return launch({key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in flat.items()}, {})


def _write_results(tracker: GeneralTracker, results: dict[str, Any], step: int | None) -> None:
    """Figures and words into the summary of W&B; a curve, which is all that the others have, takes figures alone."""
    if tracker.name == "wandb":
        write_wandb_summary(tracker, {k: v for k, v in results.items() if isinstance(v, int | float | str)})
    else:
        tracker.log({k: v for k, v in results.items() if isinstance(v, int | float)}, step=step)


def _finish_plain(tracker: GeneralTracker) -> str | None:
    tracker.finish()
    if tracker.name == "tensorboard":
        return f"tensorboard: tensorboard --logdir {shlex.quote(str(tracker.logging_dir))}"
    return None


_START = {"trackio": start_trackio, "wandb": start_wandb}
_FINISH = {"trackio": finish_trackio, "wandb": finish_wandb}


@contextlib.contextmanager
def _nonfatal(tracker_name: str, action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no error of a tracker is worth the run
        _warn_once(f"{tracker_name} could not {action}, the run goes on without: {_class_and_first_line(error)}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _class_and_first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_name(name: str) -> None:
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"--report_to {name}: unknown tracker{hint}, choose among {', '.join(TRACKERS)}")


def _check_installed(name: str) -> None:
    if name not in map(str, get_available_trackers()):
        way_out = "pip install 'memsave-recipes[trackers]', or --report_to none"
        raise InputError(f"--report_to {name} needs {name}, which is not installed: {way_out}")


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
