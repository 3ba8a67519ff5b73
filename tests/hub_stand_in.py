"""A server in the place of the Hub, which is silent in every way that a network knows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from memsave_recipes import hub


@dataclass
class Hub:
    """What a server does with a request, and the requests that it had.

    Its answer is ``hang``, ``hang up`` or a status: 404 for all but its front page, 503 for everything.
    """

    answer: int | str
    url: str = ""
    requests: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


def handler_of(served: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            served.requests.append(f"{self.command} {self.path}")
            if served.answer == "hang":
                served.done.wait(60)
            elif served.answer == "hang up":
                self.close_connection = True
            else:
                self.send_response(200 if self.path == "/" and served.answer == 404 else served.answer)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None:
            """Nothing: the requests are kept."""

    return Handler


@contextmanager
def hub_stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[int | str], Hub]]:
    """``serve(answer)`` is the Hub from then on, for this process, whose caches are in ``folder``."""
    started: list[tuple[ThreadingHTTPServer, Hub]] = []
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr(hub, "_why_silent", {})

    def be_the_hub(answer: int | str) -> Hub:
        served = Hub(answer)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
        served.url = f"http://127.0.0.1:{server.server_port}"
        if answer == "refuse":
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            started.append((server, served))
        for module, name in ((constants, "ENDPOINT"), (datasets.config, "HF_ENDPOINT")):
            monkeypatch.setattr(module, name, served.url)
        monkeypatch.setattr(datasets.config, "S3_DATASETS_BUCKET_PREFIX", f"{served.url}/counts")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        return served

    try:
        yield be_the_hub
    finally:
        for server, served in started:
            served.done.set()
            server.shutdown()
            server.server_close()
