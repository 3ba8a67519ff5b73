"""Folders of images; every test has a cache of its own and no Hub."""

import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import ``pictures`` and ``refusals``
from pictures import picture


@pytest.fixture(autouse=True)
def offline_with_an_own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """train/{cat,dog} and val/{cat,dog} of three PNGs each."""
    root = tmp_path / "pets"
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(3):
                picture(10 * label + number).save(root / split / name / f"{number}.png")
    return root
