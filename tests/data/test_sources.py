"""Words name files, folders and patterns; each file is read once, in one order, and a bad word ends in one line."""

import os

import pytest
from refusals import line_of

from memsave_recipes.data.sources import find_files
from memsave_recipes.data.text.documents import ENDINGS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["b.txt", "a.md", "deep/er/c.JSONL", "deep/d.csv", "e.json", "f.parquet", "notes.rst"]
    for name in [*names, ".hidden.txt", ".git/g.txt", "deep/.h/i.txt", "[x].txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def listed(*words, endings=ENDINGS):
    return [str(path) for path in find_files("--train_file", words, endings).files]


def refusal(*words):
    return line_of(listed, *words)


def test_files_stay_in_the_order_of_the_words(folder):
    assert listed("e.json", "b.txt", "a.md") == ["e.json", "b.txt", "a.md"]


def test_a_folder_is_all_files_below_it_but_hidden_ones(folder):
    below = ["[x].txt", "a.md", "b.txt", "e.json", "f.parquet", "deep/d.csv", "deep/er/c.JSONL"]
    assert listed(".") == below
    assert listed(str(folder)) == [str(folder / name) for name in below]
    notes = find_files("--train_file", ["."], ENDINGS).notes("--train_file .")
    assert notes == ["files of --train_file .: 7 (1 with other endings skipped)"]


def test_a_pattern_matches_files_and_folders(folder):
    assert listed("*.txt") == ["[x].txt", "b.txt"]
    assert listed("d*") == ["deep/d.csv", "deep/er/c.JSONL"]
    assert listed("**/*.[cJ]S*") == ["deep/er/c.JSONL"]
    assert listed("[ab].*") == ["a.md", "b.txt"]


def test_a_name_that_looks_like_a_pattern_is_the_file(folder):
    assert listed("[x].txt") == ["[x].txt"]


def test_a_file_is_read_once_at_its_first_place(folder):
    (folder / "link.txt").symlink_to("b.txt")
    found = find_files("--train_file", ["b.txt", f"{folder}/b.txt", "link.txt", "*.md", "a.md"], ENDINGS)
    assert [str(path) for path in found.files] == ["b.txt", "a.md"]
    assert found.notes("F") == ["files of F: 2 (3 named twice and read once)"]
    assert find_files("--train_file", ["a.md"], ENDINGS).notes("F") == []


def test_other_endings_can_be_asked_for(folder):
    assert listed(".", endings=(".csv", ".rst")) == ["notes.rst", "deep/d.csv"]


def test_links_that_lead_in_circles(folder):
    (folder / "deep" / "up").symlink_to(folder)
    assert listed("deep") == ["deep/d.csv", "deep/er/c.JSONL"]


def test_words_that_name_nothing(folder):
    (folder / "empty").mkdir()
    (folder / "lost").symlink_to("nowhere")
    (folder / "lost.txt").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.txt")
    endings = "ends in none of .csv, .json, .jsonl, .md, .parquet, .txt: convert or rename it"
    assert refusal("no.txt") == "--train_file no.txt is not a file: check the path"
    assert refusal("b.txt", "notes.rst") == f"--train_file notes.rst {endings}"
    assert refusal("*.bin").startswith("--train_file *.bin matches no file: check the pattern")
    assert refusal("*.rst").startswith("--train_file *.rst matches no file that ends in one of .csv, ")
    assert refusal("empty").startswith("--train_file empty has no file below it that ends in one of .csv, ")
    assert refusal("lost.txt") == refusal(".") == "--train_file lost.txt is not a file: check the path"
    (folder / "lost.txt").unlink()
    assert refusal("*.txt") == "--train_file pipe.txt is not a file: check the path"


def test_a_name_that_is_not_utf_8(folder):
    (folder / os.fsdecode(b"\xff.txt")).write_text("x")
    assert refusal(".") == r"--train_file . names a file b'\xff.txt', which is not UTF-8: rename it"
