"""The run's own record goes on where a checkpoint is: no row twice, none lost without a word, none that is no row."""

import json
import os

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.run import trackers
from memsave_recipes.run.trackers import MetricsFile, cut_back

ROWS = [{"step": 2, "train/loss": 1.0}, {"step": 2, "eval/loss": 1.5}, {"step": 4, "train/loss": 0.5}]


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def go_on(path, step=4, **known):
    return cut_back(path.parent, step, **{"evaluated_at": 2, "num_rows": 3, **known})


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 6}\n', b'{"step": 6, "train/lo', bytes(4096), b'{"step": 4, "eval/a": 1}\n']
)
def test_what_came_after_the_checkpoint_is_cut_off(rows_file, tail):
    before = rows_file.read_bytes()
    rows_file.write_bytes(before + tail)
    assert go_on(rows_file) == []
    assert rows_file.read_bytes() == before


@pytest.mark.parametrize(
    "line", [b"{", b"\0\0\0", b'{"step": 3, "caf\xe9": 1}', b"[1]", b'{"loss": 1}', b'{"step": "3"}', b"[" * 100_000]
)
def test_a_line_that_is_no_row_is_named_and_left(rows_file, line):
    lines = rows_file.read_bytes().splitlines(keepends=True)
    rows_file.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]))
    before = rows_file.read_bytes()
    with pytest.raises(InputError, match=r"metrics.jsonl line 3 is no row of a run: repair it, or delete"):
        go_on(rows_file)
    assert rows_file.read_bytes() == before


def test_rows_that_are_missing_are_said(rows_file):
    lines = rows_file.read_bytes().splitlines(keepends=True)
    rows_file.write_bytes(b"".join(lines[::2]))
    assert go_on(rows_file) == [f"note: {rows_file} has 2 of its 3 rows up to step 4: the others are lost"]
    rows_file.unlink()
    assert go_on(rows_file) == [f"note: {rows_file} has 0 of its 3 rows up to step 4: the others are lost"]
    assert go_on(rows_file, num_rows=None) == []  # a checkpoint of an earlier version


def test_rows_are_counted_over_lives_and_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(trackers.os, "fsync", synced.append)
    for life in (1, 2):
        file = MetricsFile(tmp_path)
        file.start()
        file.log({"train/loss": 1.0}, step=life)
        assert file.sync() == life
        assert len(synced) == life
        file.finish()


def test_a_file_that_was_deleted_is_said_at_the_next_row(tmp_path):
    file = MetricsFile(tmp_path)
    file.start()
    os.unlink(tmp_path / "metrics.jsonl")
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl has been deleted"):
        file.log({"train/loss": 1.0}, step=1)
    file.finish()
