"""Every source gives the same documents always, none in both splits; every bad input is one line that names it."""

import json
import os
from math import ceil

import datasets
import huggingface_hub
import pytest
from refusals import line_of

from memsave_recipes.data import sources
from memsave_recipes.data.text.documents import TextArguments, load_documents


def refusal(*, stream_bytes=None, **options):
    return line_of(load_documents, TextArguments(**options), stream_bytes=stream_bytes)


def both(splits):
    return splits.train["text"][:], splits.validation["text"][:]


def joined(splits):
    train, validation = both(splits)
    return train + validation


def stories(count):
    return [f"Story {number}.\nIt ends with {number}." for number in range(count)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


# Python's own library


@pytest.fixture
def library(tmp_path, monkeypatch):
    """40 modules, and what is to be left out."""
    root = tmp_path / "python3"
    modules = [f"module{number}.py" for number in range(38)] + ["package/__init__.py", "package/code.py"]
    others = [
        "site-packages/torch/code.py",
        "test/test_code.py",
        "package/tests/code.py",
        "idlelib/idle_test/code.py",
        "encodings/cp500.py",
        "_sysconfigdata__linux_.py",
        "package/data.txt",
    ]
    for name in modules + others:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "empty.py").write_text("\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return sorted(f"# {name}\n" for name in modules), root


def test_the_library_is_its_modules_each_once(library):
    modules, _ = library
    splits = load_documents(TextArguments(dataset="python-stdlib"))
    assert sorted(splits.train["text"][:] + splits.validation["text"][:]) == modules
    assert splits.train.column_names == splits.validation.column_names == ["text"]
    assert splits.train["text"][:] == sorted(splits.train["text"][:])
    assert splits.notice == "note: 2 of the 40 documents of --dataset python-stdlib are held out"


def test_a_module_stays_held_out_when_its_text_changes(library, tmp_path, monkeypatch):
    _, root = library
    held_out = {text.split()[1] for text in load_documents(TextArguments(dataset="python-stdlib")).validation["text"]}
    for path in root.glob("module*.py"):
        path.write_bytes(path.read_bytes() + b"pass\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "another cache")
    changed = load_documents(TextArguments(dataset="python-stdlib")).validation["text"][:]
    assert any(text.endswith("pass\n") for text in changed)
    assert {text.split()[1] for text in changed} == held_out


def test_the_real_library():
    train, validation = both(load_documents(TextArguments(dataset="python-stdlib")))
    assert sum(map(len, train)) > 5e6
    assert 0.005 < sum(map(len, validation)) / sum(map(len, train)) < 0.25
    assert not set(train) & set(validation)
    assert any(text.startswith('"""Thread module emulating a subset') for text in train + validation)


# Files


def test_a_txt_is_one_document_and_its_end_is_held_out(tmp_path):
    path = tmp_path / "book.txt"
    written = "".join(f"Line {number} of the book.\n\n" for number in range(1000))
    path.write_text(written)
    splits = load_documents(TextArguments(train_file=[str(path)]))
    (train,), (validation,) = both(splits)
    path.rename(tmp_path / "book.md")
    assert both(load_documents(TextArguments(train_file=[str(tmp_path / "book.md")]))) == both(splits)
    assert train + validation == written.rstrip("\n")
    assert train.endswith("book.\n\n")
    assert 0.05 <= len(validation) / len(written) < 0.06
    assert splits.notice == f"note: the last 5% of its one document are held out of --train_file {path}"


def test_a_text_of_one_long_line_is_cut_between_words_or_else_anywhere(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100 + " " + "word " * 100)
    (train,), (validation,) = both(load_documents(TextArguments(train_file=[str(path)])))
    assert train.endswith("word ")
    assert validation.startswith("word")
    path.write_text("\n" + "x" * 100)
    (train,), (validation,) = both(load_documents(TextArguments(train_file=[str(path)])))
    assert (len(train), len(validation)) == (95, 5)


def test_end_of_text_stands_between_the_documents_of_a_txt(tmp_path):
    path = tmp_path / "stories.txt"
    end = "<|endoftext|>"
    path.write_bytes(f"\ufeffOne\r\n\r\ntwo\r\n{end}\r\nthree\r\n{end}four{end} {end}\r\n{end}".encode())
    other = tmp_path / "other.txt"
    other.write_text("x")
    splits = load_documents(TextArguments(train_file=[str(path)], validation_file=[str(other)]))
    assert both(splits) == (["One\r\n\r\ntwo", "three", "four"], ["x"])
    assert (
        splits.notice == f"note: rows of --train_file {path} left out because they have no text: 1"
    )  # the one of a space


def test_a_jsonl_holds_a_document_a_line(tmp_path):
    rows = [{"body": text, "id": 3} for text in ["Grüße\n", "naïve 🙂", "\u2028"[:0] + "end"]]
    path = write_jsonl(tmp_path / "a.JSONL", rows)
    with open(path, "a") as file:
        file.write("\n\n")
    splits = load_documents(TextArguments(train_file=[path], validation_file=[path]))
    assert both(splits) == (["Grüße\n", "naïve 🙂", "end"],) * 2
    assert splits.notice == "note: column id is not used"


def test_files_of_all_kinds_in_the_order_of_the_words(tmp_path):
    """With a folder among them, and rows without text in each kind of file that has rows."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "b.md").write_text("# b")
    (docs / "a.txt").write_text("a")
    (docs / "blank.txt").write_text("\n")
    (docs / "picture.png").write_text("")
    rows = [{"text": "one", "id": 1}, {"text": None, "id": 2}, {"text": " ", "id": 3}, {"text": "", "id": 4}]
    for name in ("lines.json", "lines.jsonl"):
        write_jsonl(tmp_path / name, [{"id": 0}, *rows])
    (tmp_path / "array.json").write_text(f"\ufeff\n {json.dumps([{'id': 0}, *rows])}")
    (tmp_path / "table.csv").write_text('id,text\n1,"one, ""two""\nthree"\n2\n3, \n4,\n')
    write_parquet(tmp_path / "[a] *.parquet", rows)
    names = ["table.csv", "lines.json", "array.json", "[a] *.parquet", "docs", "lines.jsonl"]
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "good"}, {}])
    splits = load_documents(TextArguments(train_file=[f"{tmp_path}/{name}" for name in names], validation_file=[good]))
    train = ['one, "two"\nthree', "one", "one", "one", "a", "# b", "one"]
    assert both(splits) == (train, ["good"])
    source = f"--train_file {tmp_path}/table.csv and 5 more"
    assert splits.notice == (
        f"note: files of {source}: 8 (1 with other endings skipped); column id is not used; rows of {source} left out "
        f"because they have no text: 19; rows of --validation_file {good} left out because they have no text: 1"
    )


def test_a_long_text_in_a_csv(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'word ' * 100_000}\n")
    (train,), _ = both(load_documents(TextArguments(train_file=[str(tmp_path / "a.csv")])))
    assert len(train) == 475_000


def test_a_folder_is_read_again_when_one_of_its_files_changes(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in stories(30)])
    (folder / "b.txt").write_text("old")
    assert "old" in joined(load_documents(TextArguments(train_file=[str(folder)])))
    (folder / "b.txt").write_text("new")
    os.utime(folder / "b.txt", ns=(1, 1))
    texts = joined(load_documents(TextArguments(train_file=[str(folder)])))
    assert sorted(texts) == sorted([*stories(30), "new"])


# Evaluation alone


def test_a_validation_file_alone_is_enough_for_evaluation(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}])
    splits = load_documents(TextArguments(validation_file=[path]), only_validation=True)
    assert both(splits) == (["a"], ["a"])
    assert refusal(validation_file=[path]).startswith("--validation_file needs --train_file or --eval")


# Held out


@pytest.mark.parametrize("count", [20, 21, 100])
def test_a_twentieth_of_the_documents_is_held_out_whatever_their_order(tmp_path, count):
    rows = [{"text": text} for text in stories(count)]
    train, validation = both(load_documents(TextArguments(train_file=[write_jsonl(tmp_path / "a.jsonl", rows)])))
    assert len(validation) == ceil(0.05 * count)
    assert sorted(train + validation) == sorted(stories(count))
    again = both(load_documents(TextArguments(train_file=[write_jsonl(tmp_path / "b.jsonl", rows[::-1])])))
    assert [sorted(split) for split in again] == [sorted(train), sorted(validation)]


def test_copies_are_on_one_side(tmp_path):
    rows = [{"text": text} for text in stories(10) * 20]
    train, validation = both(load_documents(TextArguments(train_file=[write_jsonl(tmp_path / "a.jsonl", rows)])))
    assert len(validation) == 20
    assert not set(train) & set(validation)


def test_the_ends_of_few_documents_are_held_out(tmp_path):
    rows = [{"text": text * 10} for text in stories(19)]
    splits = load_documents(TextArguments(train_file=[write_jsonl(tmp_path / "a.jsonl", rows)]))
    assert [head + tail for head, tail in zip(*both(splits), strict=True)] == [row["text"] for row in rows]
    assert "each of its 19 documents are held out" in splits.notice


# What nobody reads


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.parquet", "set", "stream"])
def test_columns_that_nobody_reads_are_named_once(tmp_path, name):
    rows = [{"text": text, "url": "u", "stars": 3, "empty": None} for text in stories(40)]
    path, flag, stream_bytes = tmp_path / name, "train_file", None
    if name.endswith(".csv"):
        datasets.Dataset.from_list(rows).to_csv(path)
    elif name.endswith(".parquet"):
        write_parquet(path, rows)
    elif name.startswith("a."):
        write_jsonl(path, rows)
    else:
        write_parquet(path / "train.parquet", rows)
        flag, stream_bytes = "dataset", 1000 if name == "stream" else None
    flags = TextArguments(**{flag: [str(path)] if flag == "train_file" else str(path)})
    notice = load_documents(flags, stream_bytes=stream_bytes).notice
    is_text = name in ("a.csv", "a.jsonl", "a.json")  # where a null is a column that is not given
    assert f"columns {'stars, url' if is_text else 'empty, stars, url'} are not used; " in notice
    many = [{"text": text, f"key {at}": 1} for at, text in enumerate(stories(40))]
    notice = load_documents(TextArguments(train_file=[write_jsonl(tmp_path / "many.jsonl", many)])).notice
    assert "columns key 0, key 1, key 10, " in notice
    assert " and 28 more are not used; " in notice


def test_lines_of_a_text_that_read_as_rows_are_named(tmp_path):
    """A stray quote opens the first text, and another one ends it three rows later."""
    rule = "if a stray double quote opens one, write it twice"
    (tmp_path / "a.csv").write_text('text,id\n"big,1\nred,2\nsize 5",3\nlast,4\n')
    splits = load_documents(TextArguments(train_file=[str(tmp_path / "a.csv")]))
    place = f"row 1 of --train_file {tmp_path}/a.csv"
    assert f"a text holds lines that read as rows of the table ({place}): {rule}; " in splits.notice
    (tmp_path / "b.csv").write_text('text,id\n"one,\ntwo three\n",1\n"say ""no"", or\ngo",2\n')
    assert rule not in load_documents(TextArguments(train_file=[str(tmp_path / "b.csv")])).notice


# Data sets by name


def test_a_data_set_brings_its_validation_split(tmp_path):
    root = tmp_path / "set"
    write_parquet(root / "train.parquet", [{"content": text, "stars": 3} for text in stories(3)])
    write_parquet(root / "test.parquet", [{"content": "t", "stars": 3}])
    assert both(load_documents(TextArguments(dataset=str(root)))) == (stories(3), ["t"])
    write_parquet(root / "validation.parquet", [{"content": "v", "stars": 3}])
    assert both(load_documents(TextArguments(dataset=str(root)))) == (stories(3), ["v"])


def test_a_data_set_without_one_is_held_out_from(tmp_path):
    write_parquet(tmp_path / "set" / "train.parquet", [{"text": text} for text in stories(40)])
    splits = load_documents(TextArguments(dataset=str(tmp_path / "set")))
    assert [len(split) for split in both(splits)] == [38, 2]
    assert splits.notice == f"note: 2 of the 40 documents of --dataset {tmp_path / 'set'} are held out"


@pytest.fixture
def streamed(tmp_path):
    """1,000 documents of 100 bytes to train on, and 100 to validate."""
    root = tmp_path / "set"
    write_parquet(root / "train.parquet", [{"text": f"{number:0100}"} for number in range(1000)])
    write_parquet(root / "validation.parquet", [{"text": f"v{number:099}"} for number in range(100)])
    return root


def test_streaming_reads_what_is_asked_for_from_the_front(streamed):
    train, validation = both(load_documents(TextArguments(dataset=str(streamed)), stream_bytes=30_050))
    assert [int(text) for text in train] == list(range(301))
    assert len(validation) == 16  # 5 % of 30,050 bytes are 1,502.5
    everything = load_documents(TextArguments(dataset=str(streamed)), stream_bytes=10**6)
    assert [len(split) for split in both(everything)] == [1000, 100]


def test_streamed_documents_are_on_disk_and_streamed_once(streamed, monkeypatch):
    assert load_documents(TextArguments(dataset=str(streamed)), stream_bytes=5000).train.cache_files
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("streamed again"))
        again = load_documents(TextArguments(dataset=str(streamed)), stream_bytes=5000)
    assert len(again.train) == 50
    write_parquet(streamed / "train.parquet", [{"text": text} for text in stories(7)])
    os.utime(streamed / "train.parquet", ns=(1, 1))
    assert load_documents(TextArguments(dataset=str(streamed)), stream_bytes=5000).train["text"][:] == stories(7)


def test_a_stream_is_held_out_from_as_well(streamed):
    (streamed / "validation.parquet").unlink()
    train, validation = both(load_documents(TextArguments(dataset=str(streamed)), stream_bytes=10_000))
    assert sorted(map(int, train + validation)) == list(range(100))
    assert len(validation) == 5


# Bad input


def test_one_source_at_most(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [])
    message = refusal(dataset="python-stdlib", train_file=[path])
    assert "exactly one of --dataset python-stdlib, --dataset HUB_ID and --train_file" in message
    assert refusal(dataset="python-stdlib", validation_file=[path]).startswith("--validation_file needs --train_file")


@pytest.mark.parametrize("source", [{"dataset": "python-stdlib"}, {"train_file": ["a.txt"]}])
def test_what_only_the_hub_has(source):
    assert refusal(**source, stream_bytes=1).startswith("--streaming needs --dataset HUB_ID")
    assert refusal(**source, dataset_config_name="x").startswith("--dataset_config_name needs --dataset HUB_ID")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_files_without_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert refusal(train_file=[str(tmp_path / name)]) == (
        f"--train_file {tmp_path / name} has no text: give documents that are not blank"
    )


def test_rows_of_blanks(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": " \n"}])
    assert "has no text" in refusal(train_file=[path])
    assert "has no text" in refusal(train_file=[write_parquet(tmp_path / "a.parquet", [{"text": " "}])])
    good = write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}])
    assert "leaves no text for the validation split" in refusal(train_file=[good], validation_file=[path])


def test_too_little_text_to_hold_some_out(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert "leaves no text for the train split" in refusal(train_file=[str(tmp_path / "a.txt")])
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "the same"}] * 50)
    assert "leaves no text for the train split" in refusal(train_file=[path])


NO_COLUMN = "has no column text, nor one alone that holds text"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '\n{"b": "x", "a": 2}\n{"c": "y"}', f"{{}} {NO_COLUMN} (columns: a, b, c): rename that to text"),
        ("a.json", '[{"b": 1}]', f"{{}} {NO_COLUMN} (columns: b): rename that to text"),
        ("a.csv", "a,b\n1,2", f"{{}} {NO_COLUMN} (columns: a, b): rename that to text"),
        ("a.csv", "text,b\n1,2\nc,3,4\n", "row 2 of {} has more values than there are columns: put double quotes"),
        ("a.csv", 'text\n"one"two\n', "{} is no CSV after line 1 ("),
        ("a.csv", 'text\n"one\n', "{} is no CSV after line 1 (unexpected end of data): check the quotes"),
        ("a.json", '[{"text": "a"}, 3]', "row 2 of {} is not a JSON object"),
        ("a.json", '[{"text": "a"}', "{} is not JSON (Expecting"),
        ("a.json", '{\n"text": "a"\n}', "row 1 of {} is not JSON (Expecting property name"),
        ("a.jsonl", '[{"text": "a"}]', "row 1 of {} is not a JSON object"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    source = f"--train_file {tmp_path / name}"
    assert refusal(train_file=[str(tmp_path / name)]).startswith(words.format(source))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.csv"])
def test_bytes_that_are_no_utf_8(tmp_path, name):
    (tmp_path / name).write_bytes(b"text\n\xff\n")
    assert refusal(train_file=[str(tmp_path / name)]).startswith(f"--train_file {tmp_path / name} is not UTF-8 text (")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not JSON (Expecting property name"),
        (b"\xff\xfe", "is not JSON ("),
        ("[1]", "is not a JSON object"),
        ('{"text": 3}', "has a number in its column 'text', not a text: correct or remove it"),
        ('{"text": ["a"]}', "has a list in its column 'text', not a text"),
        ('{"text": "\\ud83d"}', "holds half of a surrogate pair in 'text'"),
    ],
)
def test_a_bad_row_of_a_jsonl_is_named(tmp_path, row, words):
    path = tmp_path / "a.jsonl"
    row = row if isinstance(row, bytes) else row.encode()
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' + row + b'\n{"text": "three"}\n')
    assert refusal(train_file=[str(path)]).startswith(f"row 4 of --train_file {path} {words}")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "open", forbidden, raising=False)
    message = refusal(train_file=[path])
    assert message == f"--train_file {path} cannot be read: [Errno 13] Permission denied; check file and disk"


def test_the_only_column_of_strings_is_the_text(tmp_path):
    rows = [{"body": text, "id": at} for at, text in enumerate(stories(40))]
    expected = sorted(stories(40))
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "a.csv", columns=["body"])
    table.to_parquet(tmp_path / "a.parquet")
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "a.csv", tmp_path / "a.parquet"):
        assert sorted(joined(load_documents(TextArguments(train_file=[str(path)])))) == expected
    path = write_parquet(tmp_path / "b.parquet", [{"body": "a", "name": "b"}])
    assert refusal(train_file=[path]).startswith(f"--train_file {path} {NO_COLUMN} (columns: body, name)")


def test_a_parquet_that_is_none(tmp_path):
    (tmp_path / "a.parquet").write_text("text")
    message = refusal(train_file=[str(tmp_path / "a.parquet")])
    assert message.startswith(f"--train_file {tmp_path / 'a.parquet'} cannot be loaded: ")
    assert message.endswith("; check the file")


@pytest.mark.parametrize("stream_bytes", [None, 1000])
def test_data_sets_that_cannot_be_used(tmp_path, stream_bytes):
    message = refusal(dataset="someone/something", stream_bytes=stream_bytes)
    assert message.startswith(
        "--dataset someone/something cannot be loaded: it is not in the cache, and HF_HUB_OFFLINE"
    )
    assert message.endswith("; use python-stdlib or --train_file")
    root = tmp_path / "set"
    write_parquet(root / "test.parquet", [{"body": "a", "name": "b"}])
    assert f"--dataset {root} has no train split (found: test)" in refusal(dataset=str(root), stream_bytes=stream_bytes)
    (root / "test.parquet").rename(root / "train.parquet")
    message = refusal(dataset=str(root), stream_bytes=stream_bytes)
    assert message.startswith(f"--dataset {root} {NO_COLUMN} (columns: body, name)")


def test_a_stream_that_breaks_off(streamed, monkeypatch):
    def broken(*_, **__):
        yield {"text": "one"}
        raise ConnectionError("gone\nfor good")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert ": gone; use" in refusal(dataset=str(streamed), stream_bytes=1000)
