"""A server in the place of the Hub, which is silent in every way that a network knows, has files, or takes them."""

import base64
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from memsave_recipes.models import hub

NAME = "some/name"
COMMIT = "0" * 40
SENDING_S = 0.2


@dataclass
class Hub:
    """What a server does with a request, and the requests that it had.

    Its answer is ``hang``, ``hang up`` or a status: 404 for all but its front page, 503 for everything. Or a folder,
    which it takes its time to send, as the only revision of every model.

    It takes uploads; its first answers to them are the statuses of ``failures``.
    """

    answer: int | str | Path
    url: str = ""
    requests: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failures: list[int] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    """Of the requests that write."""
    created: list[dict[str, object]] = field(default_factory=list)
    commits: list[dict[str, bytes]] = field(default_factory=list)
    """The files of each, by path."""


def handler_of(served: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            served.requests.append(f"{self.command} {self.path}")
            if served.answer == "hang":
                served.done.wait(60)
            elif served.answer == "hang up":
                self.close_connection = True
            elif isinstance(served.answer, Path):
                self.answer_of(served.answer)
            else:
                self.send_response(200 if self.path == "/" and served.answer == 404 else served.answer)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_GET = do_HEAD

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            served.requests.append(f"{self.command} {self.path}")
            served.tokens.add(self.headers["Authorization"])
            if served.failures:
                self.send(served.failures.pop(0), b'{"error": "no"}')
            else:
                self.send(200, json.dumps(self.written(body)).encode())

        def written(self, body: bytes) -> object:
            """What the Hub says to a new repository, a model card, files that are announced, and a commit."""
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                served.created.append(asked)
                return {"url": f"{served.url}/{asked['organization'] or 'me'}/{asked['name']}"}
            if "/preupload/" in self.path:
                files = [file["path"] for file in json.loads(body)["files"]]
                return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]}
            if "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                files = [line["value"] for line in lines if line["key"] == "file"]
                served.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
                return {"commitUrl": f"{served.url}/me/model/commit/{COMMIT}", "commitOid": COMMIT}
            return {"errors": [], "warnings": []}

        def answer_of(self, folder: Path) -> None:
            path = folder / Path(self.path).name
            if "/resolve/" not in self.path:
                self.send(200, json.dumps(self.about(folder)).encode())
            elif path.is_file():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                time.sleep(SENDING_S if self.command == "GET" else 0)
                self.send(200, path.read_bytes(), {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
            else:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        def about(self, folder: Path) -> object:
            """The files of the revision, or the model."""
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            if "/tree/" in self.path:
                return [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in sizes.items()]
            return {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in sizes]}

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for header, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing: the requests are kept."""

    return Handler


def cache_as_downloaded(files: Path, folder: Path) -> Path:
    """The snapshot that a download of ``files`` as ``NAME`` leaves in the caches in ``folder``: links to blobs."""
    repository = folder / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot, blobs, refs = (repository / name for name in (f"snapshots/{COMMIT}", "blobs", "refs"))
    for made in (snapshot, blobs, refs):
        made.mkdir(parents=True)
    for path in files.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / digest)
        (snapshot / path.name).symlink_to(Path("../../blobs", digest))
    (refs / "main").write_text(COMMIT)
    return snapshot


def use_caches_in(monkeypatch: pytest.MonkeyPatch, folder: Path, *, offline: bool = False) -> None:
    """Of this process."""
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr(hub, "_why_silent", {})


def ask_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let this process ask the server there."""
    for module, name in ((constants, "ENDPOINT"), (datasets.config, "HF_ENDPOINT")):
        monkeypatch.setattr(module, name, url)
    monkeypatch.setattr(datasets.config, "S3_DATASETS_BUCKET_PREFIX", f"{url}/counts")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def hub_stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[int | str | Path], Hub]]:
    """``serve(answer)`` is the Hub from then on, for this process, whose caches are in ``folder``."""
    started: list[tuple[ThreadingHTTPServer, Hub]] = []
    use_caches_in(monkeypatch, folder)

    def be_the_hub(answer: int | str | Path) -> Hub:
        served = Hub(answer)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
        served.url = f"http://127.0.0.1:{server.server_port}"
        if answer == "refuse":
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            started.append((server, served))
        ask_at(monkeypatch, served.url)
        return served

    try:
        yield be_the_hub
    finally:
        for server, served in started:
            served.done.set()
            server.shutdown()
            server.server_close()
