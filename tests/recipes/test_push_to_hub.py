"""A run with ``--push_to_hub`` uploads ``final/`` once, when it is done, on any ranks; a failure costs nothing."""

import json
from functools import partial

import pytest
from hub_stand_in import ask_at, hub_stand_in, use_caches_in
from huggingface_hub import constants
from lives import be_rank

from memsave_recipes.run.failures import run_recipe

RECIPE = "image_classification"
TOKEN = "hf_" + "s" * 34
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--image_size", "16", "--max_steps", "1"]
SHORT += ["--push_to_hub", "me/model"]


@pytest.fixture
def serve(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_stand_in(monkeypatch, tmp_path / "caches") as be_the_hub:
        yield be_the_hub


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def be_rank_at(accelerator, *, url, folder):
    """A rank of a run in ``folder``, with the server at ``url`` as its Hub; returns what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        use_caches_in(patch, folder / "caches")
        ask_at(patch, url)
        flags = [*SHORT, "--report_to", "none", "--output_dir", str(folder / "run")]
        return be_rank(accelerator, recipe=RECIPE, words=flags)[1]


def test_two_ranks_upload_the_model_once_and_the_token_is_nowhere(run_on_ranks, serve, tmp_path):
    served = serve(404)
    printed = "".join(run_on_ranks(partial(be_rank_at, url=served.url, folder=tmp_path), 2, timeout_s=150))
    (commit,) = served.commits
    assert commit == files_of(tmp_path / "run" / "final")
    assert commit.keys() >= {"model.safetensors", "config.json", "README.md", "preprocessor_config.json"}
    assert printed.endswith(f"the model is on the Hub: {served.url}/me/model\n")
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [content for content in (*written, printed.encode()) if TOKEN.encode() in content]


def test_an_upload_that_fails_costs_nothing_and_is_repeated(recipe, train, serve, tmp_path, capsys):
    served = serve(401)
    served.failures = [401]
    results = train(*SHORT)
    assert results["steps"] == 1
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning: --push_to_hub me/model: ")
    assert last.endswith(f"upload it with: hf upload me/model {tmp_path / 'run' / 'final'} --private")
    assert served.commits == []
    served.failures = []
    again = [*SHORT, "--resume", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    run_recipe(lambda: recipe.main(again))  # the same line, queued again
    assert served.commits == [files_of(tmp_path / "run" / "final")]
    assert f"the model is on the Hub: {served.url}/me/model" in capsys.readouterr().out


def test_a_long_message_of_the_hub_is_cut(train, serve, monkeypatch, capsys):
    serve(401)

    def fail(*args, **options):
        raise ValueError("no " * 10**6)

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    train(*SHORT)
    assert len(capsys.readouterr().out.splitlines()[-1]) < 1000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push_to_hub", "a/b/c"], "--push_to_hub a/b/c: not the name of a repository: "),
        (["--push_to_hub", "no--name"], "--push_to_hub no--name: not the name of a repository: "),
        (["--push_to_hub", "model", "--eval_only"], "--eval_only trains nothing, so --push_to_hub has nothing"),
        (["--push_to_hub", "me/model"], "--push_to_hub me/model needs a token: log in by `hf auth login`"),
        (["--hub_model_id", "me/model"], "--hub_model_id is not a flag of this recipe: --push_to_hub takes the name"),
    ],
)
def test_a_mistake_ends_before_training(refuse, monkeypatch, tmp_path, flags, words):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert refuse(*SHORT[:-2], *flags).startswith(f"error: {words}")
