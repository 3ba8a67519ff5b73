"""A saved view on W&B that compares the memory and throughput of a project's runs: ``memsave wandb-workspace``."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import psutil

from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.core.text import first_line

LOGIN_TIMEOUT_S = 5
MEMORY, SPEED = "result/memory/peak_allocated_gib", "result/perf/samples_per_sec"


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
    _log_in()
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


def _log_in() -> None:
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
            raise InputError("wandb-workspace needs a W&B key: `wandb login` stores one, or set WANDB_API_KEY")
    except (wandb.Error, OSError) as error:
        late = threading.Timer(LOGIN_TIMEOUT_S, _kill_service)
        late.daemon = True  # at exit the client may wait for ever for its service, which it has cut off (0.31)
        late.start()
        raise InputError(f"wandb-workspace: no login at W&B ({first_line(error)})") from error


def _kill_service() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-core"):
                child.kill()


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
