"""Labelled texts: what is found without being named, and every mistake in one line that leads to it."""

import json
import re
from functools import partial

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text.labelled_text import LabelledTextArguments, load_labelled_text
from memsave_recipes.models.labels import MULTI, REGRESSION

ROWS = [{"text": f"{name} number {i}", "label": name} for i in range(6) for name in ("cat", "dog")]


def write(path, rows):
    rows = datasets.Dataset.from_list(rows)
    {".csv": rows.to_csv, ".jsonl": rows.to_json, ".parquet": rows.to_parquet}[path.suffix](str(path))
    return str(path)


@pytest.fixture
def load(tmp_path):
    """Load lists of rows as the two files of a user."""

    def run(train, validation=None, suffix=".jsonl", model_labels=None, model_problem=None, **names):
        files = {"train_file": train, "validation_file": train if validation is None else validation}
        paths = {flag: [write(tmp_path / f"{flag}{suffix}", rows)] for flag, rows in files.items()}
        of_model = {"model_labels": model_labels, "model_problem": model_problem}
        return load_labelled_text(LabelledTextArguments(dataset=None, **paths, **names), **of_model)

    return run


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_files_of_every_format(load, suffix):
    texts = load(ROWS, ROWS[:3], suffix=suffix)
    assert texts.label_names == ("cat", "dog")
    assert texts.train[:]["text"] == [row["text"] for row in ROWS]
    assert texts.train[:]["label"] == [0, 1] * 6
    assert texts.validation[:]["label"] == [0, 1, 0]
    assert texts.baseline == {"majority_share": pytest.approx(2 / 3)}
    assert texts.notice == "12 training texts, 3 held out; 2 classes, the largest with 66.7% of those held out"


def test_several_files_of_any_format_are_one_split(tmp_path):
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "b.parquet", ROWS[2:5])
    first, last = write(tmp_path / "a.csv", ROWS[:2]), write(tmp_path / "z.jsonl", ROWS[5:])
    (tmp_path / "more" / "notes.docx").touch()
    files = {"train_file": [first, str(tmp_path / "more"), last], "validation_file": [str(tmp_path / "*.csv")]}
    texts = load_labelled_text(LabelledTextArguments(dataset=None, **files))
    assert texts.train[:]["text"] == [row["text"] for row in ROWS]
    assert texts.train[:]["label"] == [0, 1] * 6
    assert texts.notice.endswith("; files of --train_file: 3 (1 with other endings skipped)")


def test_a_row_is_named_by_its_file(tmp_path):
    files = [write(tmp_path / "a.csv", ROWS), write(tmp_path / "b.csv", [ROWS[0], {"text": "a", "label": "cow"}])]
    with pytest.raises(InputError, match=r"--validation_file \S+b.csv: row 2 has the label cow"):
        load_labelled_text(LabelledTextArguments(dataset=None, train_file=files[:1], validation_file=files))


def test_labels_of_words_and_of_whole_numbers_in_files_of_one_split(tmp_path):
    numbers = write(tmp_path / "a.jsonl", [{"text": "a", "label": 2}, {"text": "b", "label": 10}])
    words = write(tmp_path / "b.jsonl", [{"text": "c", "label": "2"}, {"text": "d", "label": "no"}])
    flags = LabelledTextArguments(dataset=None, train_file=[numbers, words], validation_file=[numbers])
    texts = load_labelled_text(flags)
    assert texts.label_names == ("10", "2", "no")
    assert texts.train[:]["label"] == [1, 0, 1, 2]


def test_the_classes_of_an_evaluated_model_are_those_of_the_texts(load):
    texts = load(ROWS, ROWS[:4], model_labels=("dog", "cow", "cat"))
    assert texts.label_names == ("dog", "cow", "cat")
    assert texts.validation[:]["label"] == [2, 0, 2, 0]
    assert load(ROWS, model_labels=("LABEL_0", "LABEL_1")).label_names == ("cat", "dog")
    with pytest.raises(InputError, match=r"classes that the model does not know \(cat\), only cow, dog: "):
        load(ROWS, model_labels=("cow", "dog"))
    with pytest.raises(InputError, match="has 2 classes, and the model tells 3 apart"):
        load(ROWS, model_labels=("LABEL_0", "LABEL_1", "LABEL_2"))


def test_an_evaluated_model_needs_held_out_texts_alone(tmp_path):
    flags = LabelledTextArguments(dataset=None, validation_file=[write(tmp_path / "a.csv", ROWS)])
    texts = load_labelled_text(flags, model_labels=("cat", "dog"))
    assert texts.train is texts.validation
    assert texts.notice == "12 held out; 2 classes, the largest with 50.0% of those held out"


GLUE = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}


@pytest.mark.parametrize("task", GLUE)
def test_the_columns_of_glue_are_found(monkeypatch, task):
    features = {column: datasets.Value("string") for column in GLUE[task]}
    features |= {"label": datasets.ClassLabel(names=["no", "yes"]), "idx": datasets.Value("int32")}
    rows = [{**{column: f"{column} {i}" for column in GLUE[task]}, "label": i % 2, "idx": i} for i in range(4)]
    split = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    asked = []

    def load_dataset(*names):
        asked.append(names)
        validation = "validation_matched" if task == "mnli" else "validation"
        return {"train": split, validation: split, "test": split}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    texts = load_labelled_text(LabelledTextArguments(dataset="glue", dataset_config_name=task))
    assert asked == [("nyu-mll/glue", task)]
    first, *second = (f"{column} 0" for column in GLUE[task])
    assert texts.train[0] == {"text": first, "label": 0} | ({"text_pair": second[0]} if second else {})
    assert texts.label_names == ("no", "yes")
    assert len(list(texts.documents())) == 4 * len(GLUE[task])


def test_one_column_cannot_be_both_text_and_label(load):
    with pytest.raises(InputError, match="must name different ones"):
        load([{"text": "a", "label": 0}, {"text": "b", "label": 1}], label_column="text")


def test_a_part_of_a_hub_data_set_goes_with_its_name():
    with pytest.raises(InputError, match="--dataset_config_name sst2 needs --dataset HUB_ID"):
        load_labelled_text(LabelledTextArguments(dataset="docstrings", dataset_config_name="sst2"))


def test_named_columns_win_over_found_ones(load):
    rows = [{"text": "a", "body": f"b{i}", "reply": f"c{i}", "label": 0, "stars": i % 3 + 8} for i in range(6)]
    texts = load(rows, text_column=["body", "reply"], label_column="stars")
    assert texts.train[4] == {"text": "b4", "text_pair": "c4", "label": 1}
    assert texts.label_names == ("8", "9", "10")


def test_a_text_may_be_the_word_that_others_read_as_nothing(load):
    rows = [{"text": word, "label": i % 2} for i, word in enumerate(("NA", "null", "None", "nan"))]
    assert load(rows, suffix=".csv").train[:]["text"] == ["NA", "null", "None", "nan"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_without_text_are_left_out_and_counted(load, suffix):
    blanks = [{"text": text, "label": "dog"} for text in (None, "", " \n")]
    texts = load([ROWS[0], *blanks, *ROWS[1:]], [*ROWS[:3], blanks[0]], suffix=suffix)
    assert texts.train[:]["text"] == [row["text"] for row in ROWS]
    assert texts.train[:]["label"] == [0, 1] * 6
    assert texts.notice.endswith("of those held out; rows left out because they have no text: 4")


def test_a_pair_needs_both_texts_and_words_in_one(load):
    pairs = [("a", "b"), ("a", None), (None, "b"), ("a", ""), (" ", "")]
    rows = [{"text": one, "text_pair": two, "label": i % 2} for i, (one, two) in enumerate(pairs)]
    assert load(rows).train[:]["text_pair"] == ["b", ""]


def test_rows_keep_their_numbers_where_others_are_left_out(load):
    with pytest.raises(InputError, match="row 3 has the label cow"):
        load(ROWS, [{"text": None, "label": "cat"}, ROWS[0], {"text": "a", "label": "cow"}])


AS_WRITTEN = {  # the labels of a file as they stand there, of both splits, and the classes or the refusal
    "ints with a hole": ("csv", ["0", "1", "3"], ["3", "0"], ("0", "1", "3")),
    "ints of several digits": ("csv", ["10", "9", "2"], ["10"], ("2", "9", "10")),
    "a leading zero": ("csv", ["01", "1", "2"], ["1", "01"], ("01", "1", "2")),
    "a decimal point": ("csv", ["1.0", "1", "0"], ["1"], ("0", "1", "1.0")),
    "a space": ("csv", [" 1", "1", "0"], ["1"], (" 1", "0", "1")),
    "a power of ten": ("csv", ["1e3", "1000", "2"], ["2"], ("1000", "1e3", "2")),
    "a plus sign": ("csv", ["+1", "1"], ["1"], ("+1", "1")),
    "an underscore": ("csv", ["1_0", "10"], ["10"], ("10", "1_0")),
    "no numbers": ("csv", ["inf", "nan", "-inf"], ["nan"], ("-inf", "inf", "nan")),
    "digits of another base": ("csv", ["0x10", "16"], ["16"], ("0x10", "16")),
    "dates": ("csv", ["2020-01-01", "2020-02-01"], ["2020-01-01"], ("2020-01-01", "2020-02-01")),
    "truth": ("csv", ["true", "false", "True"], ["true"], ("True", "false", "true")),
    "truth in capitals": ("csv", ["TRUE", "FALSE"], ["FALSE"], ("FALSE", "TRUE")),
    "zeros before": ("csv", ["01001", "1001"], ["01001"], ("01001", "1001")),
    "zeros behind": ("csv", ["1.50", "x", "1.5"], ["1.5"], ("1.5", "1.50", "x")),
    "a negative zero in a CSV": ("csv", ["-0", "0"], ["-0"], ("-0", "0")),
    "beyond what a float reaches": ("csv", ["1e400", "1e500"], ["1e400"], ("1e400", "1e500")),
    "another spelling of truth": ("csv", ["true", "false"], ["False"], "row 1 has the label False"),
    "words for nothing": ("csv", ["NA", "None", "null"], ["NA"], ("NA", "None", "null")),
    "yes and no": ("csv", ["yes", "no"], ["no"], ("no", "yes")),
    "beyond what a float holds": ("csv", ["9007199254740993", "9007199254740992"], ["9007199254740993"], 2),
    "beyond 64 bits": ("csv", ["99999999999999999999", "1"], ["1"], ("1", "99999999999999999999")),
    "a blank": ("csv", ["0", "", "1"], ["1"], "row 2 has no label"),
    "floats only in validation": ("csv", ["0", "1"], ["1.0"], "row 1 has the label 1.0"),
    "true beside 1": ("jsonl", ["true", "1", "0"], ["1"], "has true or false among other labels"),
    "0 beside false": ("jsonl", ["0", "1", "false"], ["1"], "has true or false among other labels"),
    "truth in JSON": ("jsonl", ["true", "false"], ["false"], ("False", "True")),
    "lists and words": ("jsonl", ["[0]", '"a"'], ["[1]"], "row 2 has the label a"),
    "an empty list": ("jsonl", ["[]", "[]"], ["[]"], "has texts of 0 class(es)"),
    "a class twice": ("jsonl", ["[0, 1, 0]", "[1]"], ["[1]"], "row 1 has the label [0, 1, 0]"),
    "a list of fractions": ("jsonl", ["[0.0, 1.0]", "[1.0, 0.0]"], ["[1.0]"], "row 1 has the label [0.0, 1.0]"),
    "an unknown class in a list": ("jsonl", ['["a"]', '["b"]'], ['["b", "c"]'], "row 1 has the label c"),
    "a list of lists": ("jsonl", ['[["a"]]', '[["b"]]'], ['[["a"]]'], "row 1 has the label [['a']]"),
    "a list of objects": ("jsonl", ['[{"a": 1}]', '[{"a": 2}]'], ['[{"a": 1}]'], "row 1 has the label [{'a': 1}]"),
    "a list behind words": ("jsonl", ['"a"', '"b"', '["a"]'], ['"a"'], "row 3 has the label ['a']"),
    "days in JSON": ("jsonl", ['"2020-01-01"', '"2020-01-02"'], ['"2020-01-01"'], ("2020-01-01", "2020-01-02")),
    "one time in two zones": (
        "jsonl",
        ['"2020-01-01T00:00:00+01:00"', '"2019-12-31T23:00:00Z"'],
        ['"2019-12-31T23:00:00Z"'],
        ("2019-12-31T23:00:00Z", "2020-01-01T00:00:00+01:00"),
    ),
    "days held out alone": ("jsonl", ['"2020-01-01"', '"then"'], ['"2020-01-01"'], ("2020-01-01", "then")),
    "a list beside a word": ("jsonl", ['["a"]', '"b"'], ['"b"'], "row 2 has the label b"),
    "no number": ("jsonl", ["NaN", "1"], ["1"], "row 1 has the label nan"),
    "an object": ("jsonl", ['{"a": 1}', '{"a": 2}'], ['{"a": 1}'], "row 1 has the label {'a': 1}"),
    "words and numbers": ("jsonl", ['"1"', "1", "0"], ["1"], ("0", "1")),
    "numbers, then words": ("jsonl", ["0", "1", "3"], ['"3"', '"0"'], ("0", "1", "3")),
    "numbers, then floats": ("jsonl", ["0", "1", "3"], ["3.0", "0.0"], "row 1 has the label 3.0"),
    "floats, then words": ("jsonl", ["1.0", "0.0"], ['"a"'], "row 1 has the label a"),
    "truth, then numbers": ("jsonl", ["true", "false"], ["1", "0"], "row 1 has the label 1"),
    "null": ("jsonl", ["0", "null", "1"], ["1"], "row 2 has no label"),
    "a class in validation alone": ("jsonl", ["0", "1"], ["2"], "row 1 has the label 2"),
    "a space in JSON": ("jsonl", ['" a"', '"a"'], ['"a"'], (" a", "a")),
    "two forms of one letter": ("jsonl", ['"caf\\u00e9"', '"cafe\\u0301"'], ['"caf\\u00e9"'], 2),
    "digits as words": ("jsonl", ['"10"', '"9"', '"2"'], ['"10"'], ("10", "2", "9")),
    "a negative number": ("jsonl", ["-1", "0", "1"], ["-1"], ("-1", "0", "1")),
    "an empty word": ("jsonl", ['""', '"a"'], ['"a"'], ("", "a")),
    "vectors of two classes": ("jsonl", ["[0, 1]", "[1, 0]"], ["[1, 0]"], "has vectors of 0 and 1 as labels"),
    "truth in vectors": ("jsonl", ["[true, false]", "[false, true]"], ["[]"], "has vectors of 0 and 1 as labels"),
    "vectors in a CSV": ("csv", ['"[0, 1]"', '"[1, 0]"'], ['"[1, 0]"'], "has vectors of 0 and 1 as labels"),
    "vectors of three classes": (
        "csv",
        ['"[0, 1, 0]"', '"[1, 0, 0]"'],
        ['"[1, 0, 0]"'],
        "row 1 has the label [0, 1, 0]",
    ),
    "a list of NumPy": (
        "csv",
        ["['a' 'b']", "['a']"],
        ["['a']"],
        "row 1 has the label ['a' 'b'], and labels are lists",
    ),
    "numbers of NumPy": ("csv", ["[0 1]", "[1]"], ["[1]"], "row 1 has the label [0 1], and labels are lists"),
    "a list in no form": ("csv", ["[a; b]", "[a]"], ["[a]"], "row 1 has the label [a; b], and labels are lists"),
    "a tuple": ("csv", ["\"('a', 'b')\"", "a"], ["a"], "row 1 has the label ('a', 'b'), and labels are lists"),
    "a set": ("csv", ["\"{'a', 'b', 'c'}\"", "a"], ["a"], ", and labels are lists"),
    "an object in a CSV": ("csv", ['"{""a"": 1}"', "a"], ["a"], 'row 1 has the label {"a": 1}, and labels are lists'),
    "words, then a list": ("csv", ["a", "['b']"], ["a"], "row 2 has the label ['b'], and labels are words"),
    "a list, then words": ("csv", ["['b']", "a"], ["['b']"], "row 2 has the label a, and labels are lists"),
    "parentheses around a word": ("csv", ["(none)", "a"], ["a"], ("(none)", "a")),
    "fractions without one": ("csv", ["1.5", "nan", "2.0"], ["1.5"], "row 2 has the label nan, and labels are finite"),
    "whole numbers without one": ("csv", ["1", "2", "-inf"], ["1"], "row 3 has the label -inf, and labels are finite"),
    "a missing fraction": ("csv", ["1.5", "NA", "2.0"], ["1.5"], "row 2 has the label NA, and labels are finite"),
    "a word among numbers": ("csv", ["1", "2", "none"], ["1"], ("1", "2", "none")),
    "a text among numbers": (
        "jsonl",
        ["1.5", '"1.5"', "2.5"],
        ["1.5"],
        "row 2 has the label 1.5, and labels are finite",
    ),
    "a whole text among numbers": (
        "jsonl",
        ["1.5", '"2"', "3"],
        ["1.5"],
        "row 2 has the label 2, and labels are finite",
    ),
}


@pytest.mark.parametrize("case", AS_WRITTEN)
def test_labels_are_what_the_file_says(tmp_path, case):
    suffix, *labels, expected = AS_WRITTEN[case]
    paths = [tmp_path / f"{split}.{suffix}" for split in ("train", "validation")]
    for path, written in zip(paths, labels, strict=True):
        is_csv = suffix == "csv"
        rows = [
            f"text {at},{one}" if is_csv else f'{{"text": "text {at}", "label": {one}}}'
            for at, one in enumerate(written)
        ]
        path.write_text("\n".join(["text,label", *rows] if is_csv else rows) + "\n")
    flags = LabelledTextArguments(train_file=[str(paths[0])], validation_file=[str(paths[1])])
    if isinstance(expected, str):
        with pytest.raises(InputError, match=re.escape(expected)):
            load_labelled_text(flags)
        return
    texts = load_labelled_text(flags)
    assert texts.label_names == expected or len(texts.label_names) == expected
    for split, written in zip((texts.train, texts.validation), labels, strict=True):
        assert [texts.label_names[index] for index in split["label"]] == [
            str(json.loads(one)) if suffix == "jsonl" else one for one in written
        ]


OF_PARQUET = {  # values of a column, their type, and the classes or the refusal
    "truth": ([True, False], pa.bool_(), ("False", "True")),
    "64 bits": ([2**64 - 1, 0], pa.uint64(), ("0", str(2**64 - 1))),
    "categories": ([0, 1], pa.dictionary(pa.int8(), pa.string()), ("a", "b")),
    "bytes": ([b"a", b"b"], pa.binary(), "row 1 has the label b'a'"),
    "days": ([0, 1], pa.date32(), "row 1 has the label 1970-01-01"),
    "objects": ([{"a": 1}, {"a": 2}], pa.struct({"a": pa.int8()}), "row 1 has the label {'a': 1}"),
    "nothing": ([None, None], pa.null(), "row 1 has no label"),
}


@pytest.mark.parametrize("case", OF_PARQUET)
def test_labels_are_what_the_types_of_parquet_say(tmp_path, case):
    values, kind, expected = OF_PARQUET[case]
    is_category = pa.types.is_dictionary(kind)
    labels = pa.DictionaryArray.from_arrays(values, ["a", "b"]) if is_category else pa.array(values, kind)
    pyarrow.parquet.write_table(pa.table({"text": ["one", "two"], "label": labels}), tmp_path / "a.parquet")
    files = [str(tmp_path / "a.parquet")]
    flags = LabelledTextArguments(train_file=files, validation_file=files)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=re.escape(expected)):
            load_labelled_text(flags)
    else:
        assert load_labelled_text(flags).label_names == expected


def test_a_csv_of_pandas_has_a_column_without_a_name(tmp_path):
    (tmp_path / "a.csv").write_text(",text,label\n0,one,a\n1,two,b\n")
    flags = LabelledTextArguments(train_file=[str(tmp_path / "a.csv")], validation_file=[str(tmp_path / "a.csv")])
    assert load_labelled_text(flags).label_names == ("a", "b")


def edited(index, **changes):
    rows = [dict(row) for row in ROWS]
    rows[index] |= changes
    return rows


MISTAKES = {
    "a label outside the classes": ({"validation": edited(3, label="cow")}, "row 4 has the label cow"),
    "a row without a label": ({"train": edited(2, label=None)}, "row 3 has no label"),
    "no text at all": (
        {"validation": [{"text": None, "label": "cat"}, {"text": " ", "label": "dog"}]},
        "has no text: ",
    ),
    "one class": ({"train": ROWS[::2]}, "texts of 1 class"),
    "no text column": ({"train": [{"txet": "a", "label": 0}]}, "--text_column"),
    "no label column": ({"train": [{"text": "a", "lable": 0}]}, "--label_column"),
    "no such column": ({"text_column": ["txet"]}, "no column txet, only label, text"),
    "no such pair column": (
        {"text_column": ["text", "reply"]},
        "no column reply, only label, text: name it by --text_column",
    ),
    "numbers as texts": ({"train": [{"text": 1.5, "label": 0}]}, "row 1 has no text in its column text"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(load, case):
    changes, words = MISTAKES[case]
    with pytest.raises(InputError) as error:
        load(**{"train": ROWS} | changes)
    assert words in str(error.value)
    assert "_file " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_jsonl_row_without_the_text_column_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + '\n{"label": "cat"}\n')
    files = {"train_file": [str(tmp_path / "a.jsonl")], "validation_file": [str(tmp_path / "a.jsonl")]}
    texts = load_labelled_text(LabelledTextArguments(dataset=None, **files))
    assert len(texts.train) == len(texts.validation) == len(ROWS)
    assert "rows left out because they have no text: 2" in texts.notice


BROKEN_FILES = {
    "empty.csv": ("", "is empty"),
    "empty.jsonl": ("", "is empty"),
    "blank.jsonl": ("\n\n", "; check that it is JSON"),
    "header.csv": ("text,label\n", "has no rows: name a file with labelled texts"),
    "more.csv": ("text,label\na,x\n\nb,y,\n", "row 2 of {} has more values than there are columns"),
    "shifted.csv": ("label,text,lang\nx,one,en,\ny,two,en,\n", "row 1 of {} has more values than there are columns"),
    "a comma.csv": ("text,label\none, two,x\n", "row 1 of {} has more values"),
    "header twice.csv": ("text,label\na,x\ntext,label\nb,y\n", "row 2 of {} is the header once more: remove it"),
    "name twice.csv": ("text,label,text\na,x,b\n", "has the column text twice in its header"),
    "open quote.csv": ('text,label\na,x\n"b,y\nc,x\n', "is no CSV after line"),
    "quote inside.csv": ('text,label\na,x\n"b" c,y\n', "is no CSV after line 2"),
    "swallows.csv": ('text,label\na,x\n"b,y\nc,x\nd",y\ne,y\n', "{}: row 2 has whole rows in its column text"),
    "swallows one.csv": ('text,label\na,x\n"b,x\nd",y\n', "{}: row 2 has whole rows in its column text"),
    "labels first.csv": ('label,text\nx,a\ny,"b\nx,c\ny,d"\n', "{}: row 2 has whole rows in its column text"),
    "labels swallowed.csv": ('text,label\na,x\nz,y\nb,"y\nc,x\nd,y"\n', "{}: row 3 has whole rows in its column label"),
    "half.jsonl": ('{"text": "a"', "; check that it is JSON"),
    "words.parquet": ("words", "; check that it is PARQUET"),
    "words.txt": ("words", "ends in none of .csv"),
    "absent.csv": (None, "is not a file"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_named(tmp_path, name):
    content, words = BROKEN_FILES[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    good = write(tmp_path / "good.jsonl", ROWS)
    for files in ((str(tmp_path / name), good), (good, str(tmp_path / name))):
        with pytest.raises(InputError) as error:
            load_labelled_text(LabelledTextArguments(dataset=None, train_file=[files[0]], validation_file=[files[1]]))
        assert words.partition("{}")[2] in str(error.value)
        assert words.partition("{}")[0] in str(error.value)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        {"dataset": None, "validation_file": ["a.csv"]},
        {"dataset": "docstrings", "train_file": ["a.csv"], "validation_file": ["b.csv"]},
    ],
)
def test_one_whole_source_is_needed(source):
    with pytest.raises(InputError, match="--train_file and --validation_file"):
        load_labelled_text(LabelledTextArguments(**source))


def test_a_hub_set_while_offline():
    with pytest.raises(InputError, match="--dataset nobody/nothing cannot be loaded"):
        load_labelled_text(LabelledTextArguments(dataset="nobody/nothing"))


def test_an_unlabelled_split_of_the_hub_is_refused(monkeypatch):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    test = datasets.Dataset.from_dict({"text": ["c", "d"], "label": [-1, -1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: {"train": train, "test": test})
    with pytest.raises(InputError, match="split test: row 1 has the label -1, which is none of the 2 classes"):
        load_labelled_text(LabelledTextArguments(dataset="some/set"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: {"test": test})
    with pytest.raises(InputError, match="no train split"):
        load_labelled_text(LabelledTextArguments(dataset="some/set"))


def test_lists_are_several_classes_of_a_text(load):
    rows = [{"text": f"text {at}", "label": label} for at, label in enumerate((["dog", "cat"], [], ["eel"]))]
    texts = load(rows, rows[:2])
    assert texts.problem_type == MULTI
    assert texts.label_names == ("cat", "dog", "eel")
    assert texts.train[:]["label"] == [[1, 0], [], [2]]
    assert texts.baseline == {}
    assert "3 classes, any number of them a text: multi_label_classification" in texts.notice
    evaluated = load(rows[:1], model_labels=("dog", "cow", "cat"), model_problem=MULTI)
    assert evaluated.validation[:]["label"] == [[0, 2]]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("written", [["['a', \"it's\"]", "[]", "['c']"], ['["a", "it\'s"]', "[]", ' ["c"] ']])
def test_lists_in_texts_are_several_classes(tmp_path, suffix, written):
    path = tmp_path / f"a.{suffix}"
    rows = datasets.Dataset.from_dict({"text": list("xyz"), "label": written})
    (rows.to_csv if suffix == "csv" else rows.to_json)(str(path))
    flags = {"train_file": [str(path)], "validation_file": [str(path)]}
    texts = load_labelled_text(LabelledTextArguments(**flags))
    assert (texts.problem_type, texts.label_names) == (MULTI, ("a", "c", "it's"))
    assert texts.train["label"][:] == [[0, 2], [], [1]]


def test_lists_of_numbers_in_texts_are_sorted_by_value(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\nx,"[10, 9]"\ny,[2]\n')
    flags = {"train_file": [str(tmp_path / "a.csv")], "validation_file": [str(tmp_path / "a.csv")]}
    assert load_labelled_text(LabelledTextArguments(**flags)).label_names == ("2", "9", "10")


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (["x", "x ", "y"], "classes that differ by blanks, case or a decimal alone: 'x', 'x '"),
        (["x\u00a0", "x", "y"], "classes that differ by blanks, case or a decimal alone: 'x', 'x\\xa0'"),
        (["Pos", "pos", "neg"], "classes that differ by blanks, case or a decimal alone: 'Pos', 'pos'"),
        (["1", "1.0", "0"], "classes that differ by blanks, case or a decimal alone: '1', '1.0'"),
        (["x|y", "x", "y|z"], "classes that read as several: 'x|y', 'y|z'; a list of classes is written [...]"),
        (["x, y", "y"], "classes that read as several: 'x, y'; a list of classes is written [...]"),
        (["a|b", "c|d", "e;", "0.50", "0.5"], None),
    ],
)
def test_classes_that_may_be_typed_otherwise_than_meant_are_named(tmp_path, labels, note):
    rows = "".join(f'text {at},"{label}"\n' for at, label in enumerate(labels))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    flags = {"train_file": [str(tmp_path / "a.csv")], "validation_file": [str(tmp_path / "a.csv")]}
    texts = load_labelled_text(LabelledTextArguments(**flags))
    assert texts.notice.partition("of those held out; ")[2] == (note or "")
    assert len(texts.label_names) == len(labels)


@pytest.mark.parametrize("labels", [["0,5", "1,25"], ["1", "0,5", "2.5"], ["-1,0", "2,0"]])
def test_decimal_commas_are_no_classes(tmp_path, labels):
    rows = "".join(f'text {at},"{label}"\n' for at, label in enumerate(labels))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    first = next(at for at, label in enumerate(labels, start=1) if "," in label)
    with pytest.raises(
        InputError, match=f"row {first} has the label {labels[first - 1]}, and labels are finite numbers"
    ):
        load_labelled_text(LabelledTextArguments(train_file=[str(tmp_path / "a.csv")]))


def test_several_lines_of_a_text_are_no_rows(tmp_path):
    lines = ["text,label", '"one,\ntwo, x\n\nthree",x', "a,y", '"b\nc",y', '"x,\n""y"",x\nb",x']
    (tmp_path / "a.csv").write_text("\n".join(lines))
    flags = {"train_file": [str(tmp_path / "a.csv")], "validation_file": [str(tmp_path / "a.csv")]}
    assert load_labelled_text(LabelledTextArguments(**flags)).train["text"][3] == 'x,\n"y",x\nb'


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_tables_as_programs_write_them(tmp_path, end):
    rows = ["\ufeff,text,label", '1,"a, b",x', "", '2,"c\x00",y']
    (tmp_path / "a.csv").write_bytes(end.join(rows).encode())
    flags = {"train_file": [str(tmp_path / "a.csv")], "validation_file": [str(tmp_path / "a.csv")]}
    texts = load_labelled_text(LabelledTextArguments(**flags))
    assert texts.train["text"][:] == ["a, b", "c\x00"]
    assert texts.notice.endswith("; column Unnamed: 0 is not used")


# Texts held out

MANY = [{"text": f"{name} {at}", "label": name} for name, count in (("cat", 20), ("dog", 10)) for at in range(count)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_table_alone_holds_a_part_of_each_class_out(tmp_path, suffix):
    path = write(tmp_path / f"a{suffix}", MANY)
    flags = LabelledTextArguments(train_file=[path])
    texts = load_labelled_text(flags, seed=3)
    assert (len(texts.train), len(texts.validation)) == (27, 3)
    assert sorted(texts.validation["label"]) == [0, 0, 1]
    assert not set(texts.train["text"]) & set(texts.validation["text"])
    note = "; without a validation split, a tenth of each class is held out by --seed 3"
    assert texts.notice.endswith(note)
    again = load_labelled_text(LabelledTextArguments(train_file=[write(tmp_path / f"b{suffix}", MANY[::-1])]), seed=3)
    assert (
        set(again.validation["text"])
        == set(texts.validation["text"])
        != set(load_labelled_text(flags).validation["text"])
    )


def test_copies_of_a_text_are_all_held_out_or_none(tmp_path):
    flags = LabelledTextArguments(train_file=[write(tmp_path / "a.jsonl", MANY * 3)])
    texts = load_labelled_text(flags)
    assert (len(texts.train), len(texts.validation)) == (81, 9)
    assert not set(texts.train["text"]) & set(texts.validation["text"])


@pytest.mark.parametrize("label", [lambda at: at / 2, lambda at: ["a", "b"][: at % 3]], ids=["numbers", "lists"])
def test_texts_of_every_kind_are_held_out(tmp_path, label):
    rows = [{"text": f"text {at}", "label": label(at)} for at in range(20)]
    texts = load_labelled_text(LabelledTextArguments(train_file=[write(tmp_path / "a.jsonl", rows)]))
    assert (len(texts.train), len(texts.validation)) == (18, 2)
    path = write(tmp_path / "b.jsonl", [{"text": "a", "label": "a"}, {"text": "b", "label": "b"}])
    with pytest.raises(InputError, match="has one text a class, so none can be held out: add some, or --validation"):
        load_labelled_text(LabelledTextArguments(train_file=[path]))


def test_fractions_are_regression(load):
    rows = [{"text": f"text {at}", "label": label} for at, label in enumerate((0.5, -2.0, 5.0))]
    for suffix in (".jsonl", ".csv"):
        texts = load(rows, rows[:1], suffix=suffix)
        assert texts.problem_type == REGRESSION
        assert texts.label_names == ("LABEL_0",)
        assert texts.train[:]["label"] == [0.5, -2.0, 5.0]
        assert "labels are numbers from -2 to 5: regression" in texts.notice
        assert texts.baseline == {}


def test_an_evaluated_model_says_what_labels_are(load):
    load = partial(load, model_labels=("LABEL_0",))
    rows = [{"text": f"text {at}", "label": at} for at in range(3)]
    assert load(rows, model_problem=REGRESSION).train[:]["label"] == [0.0, 1.0, 2.0]
    with pytest.raises(InputError, match="row 1 has the label 0, and labels are lists of words or whole numbers"):
        load(rows, model_problem=MULTI)
    with pytest.raises(InputError, match="row 2 has the label many, and labels are finite numbers"):
        load([{"text": "a", "label": "0"}, {"text": "b", "label": "many"}], model_problem=REGRESSION, suffix=".csv")
    with pytest.raises(InputError, match="row 1 has the label nan"):
        load([{"text": "a", "label": "nan"}], model_problem=REGRESSION)
