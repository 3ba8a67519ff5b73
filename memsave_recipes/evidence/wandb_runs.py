"""W&B runs: what the recipes logged to W&B, read back as if from a run's folder.

Numbers of the results are the flat ``result/*`` keys of a run's summary; what is text there is text in its
configuration. An offline run (``*.wandb``) is read by ``wandb leet inspect``, half a second each; an online project by
``wandb.Api``.
"""

import http.client
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsave_recipes.errors import InputError
from memsave_recipes.evidence.runs import History, Run, history_row
from memsave_recipes.foreign import plain, printable, read_json

PREFIX = "result/"
KNOCK_TIMEOUT_S = 5
TIMEOUT_S = 20
MAX_ROWS = 10_000  # of an online history; of a longer one W&B sends a sample


def read_offline_run(log: Path) -> Run:
    """Reads the ``*.wandb`` file of a run.

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
    """The finished runs of ``entity/project``, oldest first, and a line for each run that is none.

    Raises:
        InputError: W&B has no such project, cannot be reached or does not let the user in.
    """
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
    """Makes sure that W&B lets the user in, without a prompt and, wherever that ends, in about ten seconds.

    The server is tried first: a client that cannot reach it has been seen to need a minute to give up and exit (0.31).

    Raises:
        InputError: there is no key, the server refuses it, or does not answer.
    """
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reporting an outage would delay the exit
    try:
        if not wandb.login(prompt=False, verify=False):
            raise InputError(f"{asked_by} needs a W&B key: `wandb login` stores one, or set WANDB_API_KEY")
        _knock(wandb.setup().settings.base_url)
        wandb.login(prompt=False, verify=True)
    except (wandb.Error, OSError) as error:
        raise InputError(f"{asked_by}: no login at W&B ({first_line(error)})") from error


def _knock(url: str) -> None:
    """Raises ``OSError`` if nothing speaks HTTP at ``url``; an error page is an answer."""
    try:
        urllib.request.urlopen(url, timeout=KNOCK_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"no answer from {url}: {getattr(error, 'reason', error)}") from error


def first_line(error: Exception) -> str:
    """What an error says first."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _online_run(run: Any) -> Run:
    rows = run.history(samples=MAX_ROWS, pandas=False)
    path = Path(*run.path)
    with _as_recipes_log(path):
        return _run(name=run.name, path=path, summary=run.summary_metrics, config=run.config, rows=rows)


@contextmanager
def _as_recipes_log(path: Path) -> Iterator[None]:
    """Inside, a run is taken apart that anything may have logged."""
    try:
        yield
    except InputError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds what no recipe logs ({first_line(error)}): leave it out") from error


def _inspect(log: Path) -> list[str]:
    """A line of JSON for each record of ``log``."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise InputError(f"{log} cannot be read by wandb ({reason[0]}): leave it out")
    return done.stdout.split("\n")[:-1]


def _updated(records: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """What the records of a kind amount to, each one updating those before."""
    updates = (record[kind].get("update", {}) for record in records if record["type"] == kind)
    return {key: value for update in updates for key, value in update.items()}


def _run(*, name: str, path: Path, summary: dict[str, Any], config: dict[str, Any], rows: Any) -> Run:
    """NOTE [ foreign runs ] in ``runs``."""
    summary, config = plain(summary), plain(config)
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
    """``{"perf/step_time_s": 1}`` as ``{"perf": {"step_time_s": 1}}``."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested
