"""``push`` uploads a folder to the Hub, tries again where that may help, and says in one line what has become of it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_stand_in import Hub, hub_stand_in
from huggingface_hub import constants

from memsave_recipes.core.errors import InputError
from memsave_recipes.models import hub

TOKEN = "hf_" + "s" * 34
CARD = "---\nlibrary_name: transformers\n---\n# a model\n"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int | str], Hub]]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub, "PAUSES_S", (0, 0, 0))
    with hub_stand_in(monkeypatch, tmp_path / "caches") as be_the_hub:
        yield be_the_hub


@pytest.fixture
def final(tmp_path: Path) -> Path:
    folder = tmp_path / "a run" / "final"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


FILES = {"README.md": CARD.encode(), "model.safetensors": bytes(range(256))}


def is_private(served: Hub) -> bool:
    """Of the repository that was made; older clients have an entry of its own for it."""
    (created,) = served.created
    return created.get("visibility") == "private" or created.get("private") is True


@pytest.mark.parametrize("private", [True, False])
def test_a_folder_is_uploaded_whole_and_private_where_asked(serve, final, private):
    served = serve(404)
    assert hub.push("me/model", final, private=private) == f"the model is on the Hub: {served.url}/me/model"
    assert served.commits == [FILES]
    assert is_private(served) == private
    assert served.tokens == {f"Bearer {TOKEN}"}


def test_a_name_without_an_owner_is_one_of_the_user(serve, final):
    served = serve(404)
    assert hub.push("model", final, private=True).endswith(f"{served.url}/me/model")
    assert "POST /api/models/me/model/commit/main" in served.requests


def test_a_server_that_fails_is_asked_again(serve, final):
    served = serve(404)
    served.failures = [503, 429]  # of the new repository, which the library asks for once
    assert hub.push("me/model", final, private=True).startswith("the model is on the Hub: ")
    assert served.commits == [FILES]
    assert served.requests.count("POST /api/repos/create") == 3


def repeat(line: str, url: str) -> None:
    """Run the command of a line as it stands there."""
    command = shlex.split(re.search(r"upload it with: (.*)$", line)[1])
    program = str(Path(sys.executable).with_name(command[0]))
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    subprocess.run([program, *command[1:]], env=environment, check=True, capture_output=True, timeout=60)


def test_a_refusal_is_one_line_with_the_command_that_repeats_it(serve, final):
    served = serve(401)
    served.failures = [401, 401]
    assert hub.push("me/model", final, private=False).endswith("final' --no-private")
    line = hub.push("me/model", final, private=True)
    assert re.match("warning: --push_to_hub me/model: .*401 Unauthorized", line)
    assert "\n" not in line
    assert TOKEN not in line
    assert served.requests.count("POST /api/repos/create") == 2  # another try would not help
    repeat(line, served.url)
    assert served.commits == [FILES]
    assert is_private(served)


@pytest.mark.parametrize("answer", ["refuse", 503])
def test_a_hub_that_is_not_there_costs_a_line(serve, final, answer):
    served = serve(answer)
    served.failures = [503] * 3
    line = hub.push("me/model", final, private=True)
    assert line.startswith("warning: --push_to_hub me/model: ")
    assert line.endswith(f"upload it with: hf upload me/model '{final}' --private")
    assert len(served.requests) == (0 if answer == "refuse" else 3)


def test_the_hub_is_asked_although_it_was_silent_when_the_model_was_loaded(serve, final, monkeypatch):
    serve("refuse")
    hub.ask_hub_for("some/name")
    assert constants.is_offline_mode()
    served = serve(404)
    assert hub.push("me/model", final, private=True).startswith("the model is on the Hub: ")
    assert served.commits == [FILES]


def test_what_cannot_end_well_is_refused_before_training(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"^--push_to_hub me/model needs a token: log in by `hf auth login`"):
        hub.check_push("me/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.check_push("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^--push_to_hub me/model: HF_HUB_OFFLINE is set: unset it"):
        hub.check_push("me/model")
