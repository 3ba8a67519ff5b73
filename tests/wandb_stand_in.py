"""A stand-in for the W&B server, on loopback: what the real client needs to log runs online, and failures on demand.

It speaks the part of the protocol that wandb 0.31 uses for a run: GraphQL for the account and the run's record, a
stream of JSON lines for history, summary and console, and PUT for files. What it was told is read from ``runs``.
Of sweeps it has grids: each agent gets the next values when it has no run.
"""

import gzip
import itertools
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

HANG, DIE = "hang", "die"


@dataclass
class Run:
    """What a run has told the server."""

    id: str
    name: str = ""
    group: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # by line of the history file
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    sweep: str | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged rows without what the client adds to each."""
        rows = (self.rows[line] for line in sorted(self.rows))
        return [{key: value for key, value in row.items() if key[0] != "_" or key == "_step"} for row in rows]


class Sweep:
    """The runs of a grid that no agent has yet: their ids, and the values of their parameters.

    Args:
        config: the YAML of the sweep.
    """

    def __init__(self, name: str, config: str) -> None:
        told = yaml.safe_load(config)
        named = {key: words.get("values") or [words["value"]] for key, words in told["parameters"].items()}
        grid = (dict(zip(named, values, strict=True)) for values in itertools.product(*named.values()))
        self.config, self.program = config, told["program"]
        self.given: dict[str, dict[str, Any]] = {}
        self._left = ((f"{name}{number}", values) for number, values in enumerate(grid))

    def command(self) -> dict[str, Any]:
        """Tell an agent without a run what is next."""
        if (run := next(self._left, None)) is None:
            return {"type": "exit"}
        self.given[run[0]] = run[1]
        args = {name: {"value": value} for name, value in run[1].items()}
        return {"type": "run", "run_id": run[0], "program": self.program, "args": args}


class WandbStandIn(ThreadingHTTPServer):
    """The server. What it is asked for are *operations*: GraphQL's by their name, ``file_stream`` and ``upload``."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, Run] = {}
        self.operations: list[str] = []
        self.alerts: list[dict[str, Any]] = []
        self.sweeps: dict[str, Sweep] = {}
        self.closing = threading.Event()
        self._failure: int | str | None = None
        self._first_to_fail: str | None = None
        self._lock = threading.RLock()
        self._connections: list[socket.socket] = []

    def fail(self, failure: int | str, *, since: str | None = None) -> None:
        """From the first operation ``since`` on: answer with a status code, never (``HANG``), or be gone (``DIE``)."""
        self._failure, self._first_to_fail = failure, since

    def failure_of(self, operation: str) -> int | str | None:
        """How this operation fails, if it does."""
        with self._lock:
            self.operations.append(operation)
            if self._first_to_fail in (None, operation):
                self._first_to_fail = None
                return self._failure
            return None

    def die(self) -> None:
        """Refuse connections and cut those that are open."""
        self.socket.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if operation == "Viewer":
                return {"viewer": _VIEWER}
            if operation == "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            if operation == "CreateRunFiles":
                return {"createRunFiles": self._file_urls(variables["run"], variables["files"])}
            if operation == "NotifyScriptableRunAlert":
                self.alerts.append({key: variables[key] for key in ("title", "text")})
                return {"notifyScriptableRunAlert": {"success": True}}
            return self._of_sweep(operation, variables)

    def take_lines(self, run_id: str, message: dict[str, Any]) -> None:
        """A piece of the stream: lines of files by their offset, and at the end the exit code."""
        with self._lock:
            run = self.runs[run_id]
            files = message.get("files") or {}
            if history := files.get("wandb-history.jsonl"):
                run.rows |= {history["offset"] + i: json.loads(line) for i, line in enumerate(history["content"])}
            for line in files.get("wandb-summary.json", {}).get("content", []):
                run.summary |= json.loads(line)
            if message.get("complete"):
                run.exit_code = message["exitcode"]

    def _upsert(self, told: dict[str, Any]) -> dict[str, Any]:
        is_new = told["name"] not in self.runs
        run = self.runs.setdefault(told["name"], Run(told["name"]))
        run.name = told.get("displayName") or run.name
        run.group = told.get("groupName") or run.group
        run.project = told.get("project") or run.project
        run.tags = told.get("tags") or run.tags
        run.sweep = told.get("sweep") or run.sweep
        if told.get("config"):
            run.config = {key: entry["value"] for key, entry in json.loads(told["config"]).items()}
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": _VIEWER["entity"]}}
        bucket = {"id": run.id, "name": run.id, "displayName": run.name, "config": "{}", "project": project}
        return {"bucket": bucket | {"description": None, "sweepName": None, "historyLineCount": 0}, "inserted": is_new}

    def _of_sweep(self, operation: str, told: dict[str, Any]) -> dict[str, Any]:
        if operation == "UpsertSweep":
            name = f"sweep{len(self.sweeps)}"
            self.sweeps[name] = Sweep(name, told["config"])
            project = {"id": "p", "name": told["projectName"], "entity": {"id": "e", "name": _VIEWER["entity"]}}
            sweep = {"name": name, "project": project}
            return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
        if operation == "SweepWithRuns":
            sweep = {"id": told["sweep"], "config": self.sweeps[told["sweep"]].config, "runs": {"edges": []}}
            return {"project": {"sweep": sweep}}
        if operation == "CreateAgent":
            return {"createAgent": {"agent": {"id": told["sweep"]}}}
        if operation == "Heartbeat":
            is_free = not json.loads(told["runState"])
            commands = [self.sweeps[told["id"]].command()] if is_free else []
            return {"agentHeartbeat": {"agent": {"id": told["id"]}, "commands": json.dumps(commands)}}
        return {}

    def _file_urls(self, run_id: str, names: list[str]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{run_id}/{name}"} for name in names]
        return {"runID": run_id, "uploadHeaders": [], "files": files}


_VIEWER = {"id": "u", "entity": "stand-in", "username": "stand-in", "email": "", "flags": "{}", "teams": {"edges": []}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbStandIn

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self._read()
        stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
        if self.path == "/graphql":
            message = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", message["query"])
            operation = named.group(1) if named else "?"
            if self._is_healthy(operation):
                self._answer({"data": self.server.graphql(operation, message.get("variables") or {})})
        elif stream:
            if self._is_healthy("file_stream"):
                self.server.take_lines(stream.group(1), json.loads(body))
                self._answer({"exitcode": None, "limits": {}})
        else:
            self._answer({}, 404)

    def do_PUT(self) -> None:
        body, (_, _, run_id, name) = self._read(), self.path.split("/", 3)
        if self._is_healthy("upload"):
            self.server.runs[run_id].files[name] = body
            self._answer({})

    def _is_healthy(self, operation: str) -> bool:
        failure = self.server.failure_of(operation)
        if failure == HANG:
            self.server.closing.wait()
        elif failure == DIE:
            self.server.die()
        elif failure is not None:
            self._answer({"errors": [{"message": "injected"}]}, failure)
        return failure is None

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def serving() -> Iterator[WandbStandIn]:
    """The server, until the end of the block."""
    server = WandbStandIn()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
