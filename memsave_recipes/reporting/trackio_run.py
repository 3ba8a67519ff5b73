"""A run in trackio: a local database and dashboard, which need no account and no network."""

import contextlib
import io
import os
import shlex
from collections.abc import Iterator

from accelerate.tracking import GeneralTracker

from memsave_recipes.reporting.run_labels import Launch, RunLabels


def start(launch: Launch, run: RunLabels) -> list[GeneralTracker]:
    """Trackio knows no tags, so they join the configuration; its threads that sample the machine stay off.

    It knows a run by its name. Rows of steps that are done again are there twice, since it takes none back (0.43).
    """
    labels = {"name": run.name, "group": run.group, "config": {**run.config, "tags": run.tags}}
    going_on = {"resume": "allow"} if run.earlier is not None else {}
    with _offline_hub(), contextlib.redirect_stdout(io.StringIO()):
        return launch(None, {**labels, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False, **going_on})


def finish(tracker: GeneralTracker) -> str:
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
