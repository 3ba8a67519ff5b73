"""An edited checkpoint with a fitting manifest is refused or skipped in one line, and never waits or crashes."""

import json
import os

import pytest
from test_saver import make

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.checkpoints.commit import Damaged, _text, verify_manifest, write_manifest


@pytest.fixture
def checkpoint(tmp_path):
    make(tmp_path).save(4, {"samples": 1})
    return tmp_path / "step-4"


def edit(path, change):
    """Let ``change`` edit the pytree of a JSON file as nested dicts, and write a fitting manifest."""
    content = json.loads(path.read_text())
    content["tree"] = packed(change(plain(content["tree"])))
    path.write_text(json.dumps(content))
    (path.parent / "manifest.json").unlink()
    write_manifest(path.parent)


def plain(tree):
    match tree:
        case {"dict": entries}:
            return {key: plain(value) for key, value in entries}
        case {"list": items}:
            return [plain(item) for item in items]
    return tree


def packed(tree):
    match tree:
        case {"tuple": _} | {"tensor": _}:
            return tree
        case dict():
            return {"dict": [[key, packed(value)] for key, value in tree.items()]}
        case list():
            return {"list": [packed(item) for item in tree]}
    return tree


def without_layout(record):
    del record["run"]["geometry"]
    return record


def with_bad_layout(record):
    record["run"]["geometry"] = {"global_batch_size": "4"}
    return record


def with_a_word_for_the_order(record):
    record["run"]["order"] = "shuffled"
    return record


def with_a_word_for_lr(optimizer):
    optimizer["param_groups"][0]["lr"] = "high"
    return optimizer


def without_last_epoch(scheduler):
    return {**scheduler, "last_epoch": None}


EDITS = {
    "without batch layout": ("record", without_layout),
    "bad batch layout": ("record", with_bad_layout),
    "no order": ("record", with_a_word_for_the_order),
    "a word for lr": ("optimizer", with_a_word_for_lr),
    "last_epoch null": ("scheduler", without_last_epoch),
}


@pytest.mark.parametrize("case", EDITS)
def test_what_does_not_fit_is_refused(checkpoint, case):
    stem, change = EDITS[case]
    edit(checkpoint / f"{stem}.json", change)
    with pytest.raises(InputError, match="step-4 does not fit this run") as error:
        make(checkpoint.parent).resume()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "entries", [[{}], [1], ["x"], [{"path": 1, "size": 1, "sha256": ""}], [{"path": "record.json"}]]
)
def test_entries_of_another_kind(checkpoint, entries):
    (checkpoint / "manifest.json").write_text(_text(entries))
    with pytest.raises(Damaged, match=r"manifest\.json is not what was written"):
        verify_manifest(checkpoint)


def test_a_pipe_is_not_waited_for(checkpoint):
    (checkpoint / "record.json").unlink()
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "record.json").touch()
    write_manifest(checkpoint)
    (checkpoint / "record.json").unlink()
    os.mkfifo(checkpoint / "record.json")
    with pytest.raises(Damaged, match=r"record\.json is no file"):
        verify_manifest(checkpoint)
