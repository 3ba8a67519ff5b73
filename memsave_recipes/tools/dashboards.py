"""Dashboards: runs read from W&B, a local trackio dashboard, and a saved view on W&B. Nothing here changes a run.

A W&B run has its numeric results in the flat ``result/*`` keys of its summary, and the texts in its configuration. The
trackio dashboard contacts no other machine.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.core.text import first_line, printable, read_json, sanitized
from memsave_recipes.tools.compare import ComparisonRow, ComparisonTable, History, Run, history_row, step_of

PREFIX = "result/"
LOGIN_TIMEOUT_S = 5
TIMEOUT_S = 20
MAX_ROWS = 10_000  # of an online history; of a longer one W&B sends a sample


def read_offline_run(log: Path) -> Run:
    """Read the ``*.wandb`` file of a run.

    Raises:
        InputError: it cannot be read, or no recipe has finished in it.
    """
    log = log.resolve()
    lines = _inspect(log)
    with _as_recipes_log(log):
        records = [read_json(line) for line in lines]
        started: dict[str, Any] = next((record["run"] for record in records if record["type"] == "run"), {})
        rows = [record["history"].get("item", {}) for record in records if record["type"] == "history"]
        return _run(
            name=started.get("display_name") or log.parent.name,
            path=log.parent,
            summary=_updated(records, "summary"),
            config=_updated(records, "config"),
            rows=rows,
        )


def read_online_runs(project: str) -> tuple[list[Run], list[str]]:
    """Read the finished runs of ``entity/project``, oldest first; return a line for each other run as well.

    Raises:
        InputError: W&B has no such project, cannot be reached or does not let the user in.
    """
    with packages_of("trackers", "runs of W&B"):
        import wandb

    log_in("--wandb")
    runs, problems = [], []
    try:
        for run in wandb.Api(timeout=TIMEOUT_S).runs(project, lazy=False):
            try:
                runs.append(_online_run(run))
            except InputError as error:
                problems.append(error.one_line)
    except (wandb.Error, ValueError) as error:
        raise InputError(f"--wandb {project} cannot be read: {first_line(error)}") from error
    return runs, problems


def log_in(asked_by: str) -> None:
    """Log in at W&B without a prompt, or fail within about ten seconds, where the client needs a minute (0.31).

    Raises:
        InputError: there is no key, the server refuses it, or does not answer.
    """
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(LOGIN_TIMEOUT_S))
    try:
        if not wandb.login(prompt=False, verify=True):
            raise InputError(f"{asked_by} needs a W&B key: `wandb login` stores one, or set WANDB_API_KEY")
    except (wandb.Error, OSError) as error:
        late = threading.Timer(LOGIN_TIMEOUT_S, _kill_service)
        late.daemon = True  # at exit the client may wait for ever for its service, which it has cut off (0.31)
        late.start()
        raise InputError(f"{asked_by}: no login at W&B ({first_line(error)})") from error


def _kill_service() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-core"):
                child.kill()


def _online_run(run: Any) -> Run:
    rows = run.history(samples=MAX_ROWS, pandas=False)
    path = Path(*run.path)
    with _as_recipes_log(path):
        return _run(name=run.name, path=path, summary=run.summary_metrics, config=run.config, rows=rows)


@contextlib.contextmanager
def _as_recipes_log(path: Path) -> Iterator[None]:
    """Refuse inside what another program has logged."""
    try:
        yield
    except InputError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not from a recipe ({first_line(error)}): leave it out") from error


def _inspect(log: Path) -> list[str]:
    """Return a line of JSON for each record of ``log``."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise InputError(f"{log} cannot be read by wandb ({reason[0]}): leave it out")
    return done.stdout.split("\n")[:-1]


def _updated(records: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Merge the records of a kind, later ones over earlier ones."""
    updates = (record[kind].get("update", {}) for record in records if record["type"] == kind)
    return {key: value for update in updates for key, value in update.items()}


def _run(*, name: str, path: Path, summary: dict[str, Any], config: dict[str, Any], rows: Any) -> Run:
    """Make the run of a log: NOTE [ foreign runs ] in ``compare``."""
    summary, config = sanitized(summary), sanitized(config)
    results = _nested({key.removeprefix(PREFIX): summary[key] for key in summary if key.startswith(PREFIX)})
    if not results:
        raise InputError(f"{path} has no {PREFIX}* in its summary, so no recipe has finished in it: leave it out")
    texts = {
        "model": config.get("model") or config.get("model_type") or Path(config.get("model_name_or_path") or "").name,
        "plan": config.get("activation_checkpointing"),
    }
    history = History([history_row({"step": row.get("_step"), **row}) for row in rows])
    return Run(name=printable(name), path=path, results={**texts, **results}, config=config, history=history)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"perf/step_time_s": 1}`` as ``{"perf": {"step_time_s": 1}}``."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split("/")
        leaf = nested
        for parent in parents:
            leaf = leaf.setdefault(parent, {})
        leaf[last] = value
    return nested


LOOPBACK = "127.0.0.1"
IMPORTED = "memsave"  # the project of runs that are loaded from their folders
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
MEMORY, SPEED = "result/memory/peak_allocated_gib", "result/perf/samples_per_sec"


@contextlib.contextmanager
def imported(table: ComparisonTable) -> Iterator[Path]:
    """Make a temporary trackio store with the runs of ``table``, whichever trackers had logged them."""
    with tempfile.TemporaryDirectory(prefix="memsave-") as folder:
        _use(Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            for row in table.rows:
                _import(row)
        yield Path(folder)


def serve(store: Path | None = None, *, port: int | None = None, open_browser: bool = True) -> None:
    """Serve the projects of a trackio store (default: trackio's own) on loopback, until Ctrl-C.

    Raises:
        InputError: the store holds no run, or the port is taken.
    """
    _use(store)
    with packages_of("trackers", "dashboards"):
        import trackio
        from trackio.utils import TRACKIO_DIR

    projects = [path.stem for path in TRACKIO_DIR.glob("*.db")]
    if not projects:
        raise InputError(f"trackio has no run in {TRACKIO_DIR}: train with --report_to trackio, or name run folders")
    only = projects[0] if len(projects) == 1 else None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it would print a link with the right to delete runs
            server, url, *_ = trackio.show(
                project=only, open_browser=False, block_thread=False, host=LOOPBACK, share=False, server_port=port
            )
    except OSError as error:
        raise InputError(f"--port {port} is taken: name another one, or leave it out to get a free one") from error
    try:
        _show(f"{url}?smoothing=0" + (f"&project={only}" if only else ""), open_browser)
    finally:
        server.close()


def save_workspace(project: str) -> str:
    """Save the comparison view in ``entity/project`` on W&B; return its address.

    Raises:
        InputError: ``project`` is not of that form, the package is missing, or the login fails.
    """
    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise InputError(f"{project} is not a W&B project: write it as ENTITY/PROJECT")
    with packages_of("trackers", "views of W&B"):
        import wandb_workspaces.workspaces as workspaces
    log_in("wandb-workspace")
    view = workspaces.Workspace(
        entity=entity,
        project=name,
        name="Memory and throughput",
        sections=_sections(),
        runset_settings=workspaces.RunsetSettings(pinned_columns=[f"summary:{MEMORY}", f"summary:{SPEED}"]),
    )
    save: Callable[[], Any] = view.save
    try:
        return str(save().url)
    except Exception as error:  # whatever it is, the user can only try again or ask for access
        raise InputError(f"{project} does not take the view: {first_line(error)}") from error


def _use(store: Path | None) -> None:
    """Set the store, which trackio reads when it is imported, and keep it from contacting the Hub and servers."""
    if store is not None:
        os.environ["TRACKIO_DIR"] = str(store)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in REMOTE:
        os.environ.pop(name, None)


def _import(row: ComparisonRow) -> None:
    """Log the history of a run; its results join the configuration, as trackio's comparer shows that."""
    with packages_of("trackers", "dashboards"):
        import trackio

    known = {key: value for key, value in row.run.config.items() if not key.startswith("_")}  # those are trackio's own
    run = trackio.init(
        project=IMPORTED,
        name=row.name,
        group=row.model,
        config={**known, "results": row.run.results},
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    for logged in row.run.history.rows:
        run.log({key: value for key, value in history_row(logged).items() if key != "step"}, step=step_of(logged))
    finish: Callable[[], None] = trackio.finish
    finish()


def _show(url: str, open_browser: bool) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):  # either way the temporary store is removed
        signal.signal(ending, signal.default_int_handler)
    print(f"dashboard: {url} (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if open_browser:
            webbrowser.open(url)
        threading.Event().wait()


def _sections() -> list[Any]:
    import wandb_workspaces.reports.v2.interface as panels
    from wandb_workspaces.workspaces import Section

    memory, speed = panels.SummaryMetric(MEMORY), panels.SummaryMetric(SPEED)
    results = [
        panels.BarPlot(title="Peak memory, GiB", metrics=[MEMORY]),
        panels.ScatterPlot(title="Memory against throughput", x=memory, y=speed),
        panels.BarPlot(title="Throughput, samples/s", metrics=[SPEED]),
        panels.RunComparer(diff_only="split"),
    ]
    curves = [
        panels.LinePlot(title="Training loss by samples", x="progress/samples_seen", y=["train/loss"]),
        panels.LinePlot(title="Evaluation loss", y=["eval/loss"]),
        panels.LinePlot(title="Peak memory of each window, GiB", y=["memory/peak_allocated_gib"]),
        panels.LinePlot(title="Throughput, samples/s", y=["perf/samples_per_sec"]),
    ]
    sections: dict[str, list[Any]] = {"Results": results, "Over training": curves}
    for section in sections.values():
        for index, panel in enumerate(section):
            panel.layout = panels.Layout(x=8 * (index % 3), y=8 * (index // 3), w=24 if index == 3 else 8, h=8)
    return [Section(name=name, is_open=True, panels=section) for name, section in sections.items()]
