"""Dashboards: runs in trackio's local one, which asks no other machine for anything, and a saved view of them on W&B.

Both are for looking: nothing here changes a run.
"""

import contextlib
import io
import os
import signal
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memsave_recipes.errors import InputError
from memsave_recipes.evidence.compare import ComparisonRow, ComparisonTable
from memsave_recipes.evidence.runs import history_row, step_of
from memsave_recipes.evidence.wandb_runs import first_line, log_in

LOOPBACK = "127.0.0.1"
IMPORTED = "memsave"  # the project of runs that are loaded from their folders
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
MEMORY, SPEED = "result/memory/peak_allocated_gib", "result/perf/samples_per_sec"


@contextlib.contextmanager
def imported(table: ComparisonTable) -> Iterator[Path]:
    """A temporary store in which trackio finds the runs of ``table``, whichever trackers had logged them."""
    with tempfile.TemporaryDirectory(prefix="memsave-") as folder:
        _use(Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            for row in table.rows:
                _import(row)
        yield Path(folder)


def serve(store: Path | None = None, *, port: int | None = None, open_browser: bool = True) -> None:
    """Shows the projects of a trackio store (its usual one without ``store``) on loopback, until Ctrl-C.

    Raises:
        InputError: the store holds no run, or the port is taken.
    """
    _use(store)
    import trackio
    from trackio.utils import TRACKIO_DIR

    projects = [path.stem for path in TRACKIO_DIR.glob("*.db")]
    if not projects:
        raise InputError(f"trackio has no run in {TRACKIO_DIR}: train with --report_to trackio, or name run folders")
    only = projects[0] if len(projects) == 1 else None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints offers the right to delete runs
            server, url, *_ = trackio.show(
                project=only, open_browser=False, block_thread=False, host=LOOPBACK, share=False, server_port=port
            )
    except OSError as error:
        raise InputError(f"--port {port} is taken: name another one, or none to have a free one found") from error
    try:
        _show(f"{url}?smoothing=0" + (f"&project={only}" if only else ""), open_browser)
    finally:
        server.close()


def save_workspace(project: str) -> str:
    """Saves the comparison view in ``entity/project`` on W&B; returns its address.

    Memory bars, memory against throughput, what differs between the runs, and losses, memory and speed over time.

    Raises:
        InputError: ``project`` is not of that form, the package is missing, or W&B does not let the user in.
    """
    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise InputError(f"{project} is no W&B project: write it as ENTITY/PROJECT")
    try:
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise InputError("wandb-workspace needs a package: pip install 'wandb-workspaces>=0.4'") from error
    log_in("wandb-workspace")
    view = workspaces.Workspace(
        entity=entity,
        project=name,
        name="Memory and throughput",
        sections=_sections(),
        runset_settings=workspaces.RunsetSettings(pinned_columns=[f"summary:{MEMORY}", f"summary:{SPEED}"]),
    )
    try:
        return view.save().url
    except Exception as error:  # whatever the server answers, the user can only try again or ask for access
        raise InputError(f"{project} does not take the view: {first_line(error)}") from error


def _use(store: Path | None) -> None:
    """Trackio reads its folder when it is imported; the Hub and other servers are none of a local dashboard's."""
    if store is not None:
        os.environ["TRACKIO_DIR"] = str(store)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in REMOTE:
        os.environ.pop(name, None)


def _import(row: ComparisonRow) -> None:
    """The history of a run, with its results in the configuration, where trackio's comparer shows them."""
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
    trackio.finish()


def _show(url: str, open_browser: bool) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):  # either way the temporary store is removed
        signal.signal(ending, signal.default_int_handler)
    print(f"dashboard: {url} (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if open_browser:
            webbrowser.open(url)
        threading.Event().wait()


def _sections() -> list[Any]:
    import wandb_workspaces.reports.v2 as panels
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
