"""A Hub that does not answer costs one request: what is cached is used, everything else ends in one line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
import torch
from datasets.packaged_modules.parquet.parquet import Parquet
from hub_stand_in import COMMIT, NAME, Hub, hub_stand_in
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text.documents import TextArguments, load_documents
from memsave_recipes.data.text.labelled_text import LabelledTextArguments, load_labelled_text
from memsave_recipes.data.text.tokenizers import load_tokenizer
from memsave_recipes.data.vision.images import ImageDataArguments, read_images
from memsave_recipes.models import hub
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer, image_processor_config
from memsave_recipes.training.evaluation import classification_metric

TINY = {"vocab_size": 300, "n_layer": 1, "n_head": 2, "n_embd": 8, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int | str], Hub]]:
    with hub_stand_in(monkeypatch, tmp_path) as be_the_hub:
        yield be_the_hub


def build(name: str) -> torch.nn.Module:
    return build_transformer(AutoModelForCausalLM, TransformerArguments(model_name_or_path=name), dtype=torch.float32)


LOAD = {
    "images": lambda name: read_images(ImageDataArguments(dataset=name)),
    "text": lambda name: load_documents(TextArguments(dataset=name)),
    "streamed text": lambda name: load_documents(TextArguments(dataset=name), stream_bytes=100),
    "labelled text": lambda name: load_labelled_text(LabelledTextArguments(dataset=name)),
    "tokenizer": lambda name: load_tokenizer(name, []),
    "model": build,
}


def refusal(load: Callable[[str], object], name: str = NAME) -> str:
    with pytest.raises(InputError) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SILENT = dict.fromkeys(("refuse", "hang", "hang up"), "does not answer (") | {503: "answers with error 503"}


@pytest.mark.parametrize("what", LOAD)
@pytest.mark.parametrize("answer", SILENT)
def test_a_silent_hub_is_asked_once_and_what_is_not_cached_ends_in_one_line(serve, monkeypatch, answer, what):
    monkeypatch.setattr(hub, "ANSWERS_WITHIN_S", 0.2)
    silent = serve(answer)
    line = refusal(LOAD[what])
    assert NAME in line
    assert f"it is not in the cache, and {silent.url} {SILENT[answer]}" in line
    assert silent.requests == ([] if answer == "refuse" else ["HEAD /"])
    refusal(LOAD[what], "some/other")
    assert len(silent.requests) <= 1


@pytest.mark.parametrize("answer", ["refuse", 503])
def test_what_is_cached_is_used(serve, tmp_path, answer, caplog):
    cache_model(tmp_path / "hub" / "models--some--name")
    cache_texts(tmp_path)
    silent = serve(answer)
    assert load_documents(TextArguments(dataset=NAME)).train["text"][:] == TEXTS
    assert load_documents(TextArguments(dataset=NAME), stream_bytes=10**6).train["text"][:] == TEXTS
    assert load_labelled_text(LabelledTextArguments(dataset=NAME)).label_names == ("no", "yes")
    assert len(load_tokenizer(NAME, [])) == 257
    assert build(NAME).config.n_embd == TINY["n_embd"]
    assert image_processor_config(NAME) == {"image_mean": [0.1, 0.2, 0.3]}
    assert len(silent.requests) <= 1
    assert [text for text in caplog.messages if "names are looked up in the cache alone" in text] == [
        f"note: {silent.url} {text}, so names are looked up in the cache alone"
        for text in (
            ["answers with error 503"] if answer == 503 else ["does not answer ([Errno 111] Connection refused)"]
        )
    ]


def test_a_hub_that_answers_is_believed(serve):
    served = serve(404)
    assert "doesn't exist on the Hub" in refusal(LOAD["images"])
    assert not constants.is_offline_mode()
    assert "not a local folder" in refusal(LOAD["model"])
    assert served.requests.count("HEAD /") == 1


def test_whoever_is_offline_asks_nobody(serve, monkeypatch):
    served = serve(404)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in LOAD.values():
        assert "it is not in the cache, and HF_HUB_OFFLINE is set" in refusal(load)
    assert served.requests == []


def test_what_is_at_hand_asks_nobody(serve, tmp_path):
    cache_model(tmp_path / "hub" / "models--some--name")
    folder = str(tmp_path / "hub" / "models--some--name" / "snapshots" / COMMIT)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}", "label": n % 2}) + "\n" for n in range(30)))
    served = serve(503)
    load_tokenizer(folder, [])
    build(folder)
    image_processor_config(folder)
    load_documents(TextArguments(train_file=[str(path)]))
    load_labelled_text(LabelledTextArguments(dataset=None, train_file=[str(path)], validation_file=[str(path)]))
    classification_metric()
    assert served.requests == []


TEXTS = [f"text {number}" for number in range(30)]


def cache_model(folder: Path) -> None:
    """What a download of a model and its tokenizer leaves behind."""
    snapshot = folder / "snapshots" / COMMIT
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(snapshot)
    load_tokenizer(None, ["a"], vocab_size=257).save_pretrained(snapshot)
    (snapshot / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


def cache_texts(folder: Path) -> None:
    """What ``datasets`` keeps of a data set that it has loaded."""
    labels = datasets.ClassLabel(names=["no", "yes"])
    rows = {"text": TEXTS, "label": [number % 2 for number in range(len(TEXTS))]}
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    rows = datasets.Dataset.from_dict(rows, features=features)
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "validation")}
    for path in files.values():
        rows.to_parquet(path)
    cache = folder / "datasets"
    Parquet(dataset_name="name", cache_dir=str(cache), data_files=files, hash=COMMIT).download_and_prepare()
    (cache / "some___name").mkdir()
    next((cache / "name").glob("default-*")).rename(cache / "some___name" / "default")
