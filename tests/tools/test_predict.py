"""``memsave predict``: a table or a JSON object a line, and every mistake in one line with exit code 2."""

import io
import json
import os
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.models.saved import save_image_classifier
from memsave_recipes.tools import inference
from memsave_recipes.tools.cli import main

WORDS = ["[PAD]", "[UNK]", "user", "assistant", "one", "two", "three"]
CHAT = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A run's folder with a model of ours, and a folder of images."""
    torch.manual_seed(0)
    run, pictures = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("pictures")
    (run / "final").mkdir()
    save_file(MODELS["vgg_small"](num_classes=3).state_dict(), run / "final" / "model.safetensors")
    save_image_classifier(
        run / "final",
        architecture="vgg_small",
        label_names=("cat", "dog", "eel"),
        dtype=torch.float32,
        image_size=16,
        mean=[0.5] * 3,
        std=[0.5] * 3,
    )
    for index, name in enumerate(("a.png", "b.jpg", "ü.png")):
        (pictures / "more").mkdir(exist_ok=True)
        Image.new("RGB", (20, 30), (80 * index, 0, 0)).save(pictures / ("more" if index else ".") / name)
    (pictures / "notes.txt").write_text("no image")
    return run, pictures


def tokenizer(chat_template=None):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", chat_template=chat_template
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The folder of a text classifier."""
    torch.manual_seed(0)
    folder, shape = tmp_path_factory.mktemp("texts"), {"hidden_size": 16, "num_hidden_layers": 1}
    config = BertConfig(
        vocab_size=len(WORDS), num_attention_heads=2, intermediate_size=32, id2label={0: "no", 1: "yes"}, **shape
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[None, CHAT], ids=["text", "chat"])
def prompts(request, tmp_path_factory):
    """The folder of a language model, without a chat template or with one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("prompts")
    config = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer(request.param).save_pretrained(folder)
    return folder


def rows_of(capsys, *words):
    assert main(["predict", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refusal_of(capsys, *words):
    assert main(["predict", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_images_and_folders_of_them(images, capsys):
    run, pictures = images
    rows = rows_of(capsys, run, pictures)
    assert [row["input"] for row in rows] == [str(pictures / name) for name in ("a.png", "more/b.jpg", "more/ü.png")]
    for row in rows:
        assert {one["label"] for one in row["predictions"]} == {"cat", "dog", "eel"}
        shares = [one["probability"] for one in row["predictions"]]
        assert sum(shares) == pytest.approx(1, abs=1e-6)
        assert shares == sorted(shares, reverse=True)
    one_by_one = rows_of(capsys, run / "final", pictures / "a.png", pictures / "more", "--batch_size", "1")
    assert [[one["label"] for one in row["predictions"]] for row in one_by_one] == [
        [one["label"] for one in row["predictions"]] for row in rows
    ]


def test_a_table_has_the_most_probable_classes(images, capsys):
    run, pictures = images
    (row,) = rows_of(capsys, run, pictures / "a.png", "--top_k", "2")
    assert main(["predict", str(run), str(pictures / "a.png"), "--top_k", "2", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert len(row["predictions"]) == 2
    for one in row["predictions"]:
        assert one["label"] in table
        assert f"{one['probability']:.4f}" in table
    assert table.count("a.png") == 1


def test_texts_are_words_lines_and_rows(texts, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("one two\n\nthree\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    rows = rows_of(capsys, texts, "one three", tmp_path / "lines.txt")
    assert [row["input"] for row in rows] == ["one three", "one two", "three"]
    rows = rows_of(capsys, texts, tmp_path / "rows.jsonl", "--text_column", "body")
    assert [row["input"] for row in rows] == ["one", "two"]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\r"], ids=ascii)
def test_only_a_line_feed_ends_a_line(texts, tmp_path, capsys, inside):
    text = f"one {inside} two"
    (tmp_path / "lines.TXT").write_bytes(f"\ufeff{text}\r\nthree\n".encode())
    assert [row["input"] for row in rows_of(capsys, texts, tmp_path / "lines.TXT")] == [text, "three"]
    raw = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "rows.JSONL").write_bytes(f"\ufeff{raw}\r\n\r\n{raw}".encode())
    assert [row["input"] for row in rows_of(capsys, texts, tmp_path / "rows.JSONL")] == [text] * 2


def test_a_file_that_is_missing_is_no_text(texts, capsys):
    assert "none.TXT cannot be read (No such file or directory)" in refusal_of(capsys, texts, "none.TXT")


def test_images_that_are_passed_over_are_counted(images, tmp_path, capsys):
    shutil.copytree(images[1], tmp_path / "all")
    for name in ("a.HEIC", "b.heic", "photo"):
        (tmp_path / "all" / name).touch()
    assert main(["predict", str(images[0]), str(tmp_path / "all"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert f"note: {tmp_path}/all: 3 of 7 files read: 1 without an ending, 2 .heic, 1 .txt left out\n" in err


def test_what_is_not_finite_is_one_line_and_code_4(images, texts, prompts, tmp_path, capsys):
    sources = {images[0] / "final": images[1] / "a.png", texts: "one two", prompts: "one two"}
    for number, (source, word) in enumerate(sources.items()):
        folder = shutil.copytree(source, tmp_path / str(number))
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name: torch.full_like(one, float("nan")) for name, one in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        code = main(["predict", str(folder), str(word), "--json", "--max_new_tokens", "5"])
        out, err = capsys.readouterr()
        assert code == 4, err
        assert out == ""
        line = next(line for line in err.splitlines() if line.startswith("error: "))
        assert line.startswith(f"error: the model's outputs from '{word}' on are NaN or infinite: look at its weights")


def test_an_output_that_does_not_take_a_text_gets_its_escapes(texts, capsys, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="latin-1") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["predict", str(texts), "one 🙂 ü", "--json"]) == 0
        assert json.loads(stream.buffer.getvalue())["input"] == "one 🙂 ü"


def test_pairs_are_not_the_same_as_their_first_texts(texts, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"text": "one", "other": "two three"}\n')
    (pair,) = rows_of(capsys, texts, path, "--text_pair_column", "other")
    (alone,) = rows_of(capsys, texts, path)
    assert pair["input"] == "one | two three"
    assert pair["predictions"] != alone["predictions"]


def test_prompts_are_continued_or_answered(prompts, capsys):
    rows = rows_of(capsys, prompts, "one two", "three", "--max_new_tokens", "5")
    assert [row["input"] for row in rows] == ["one two", "three"]
    assert all(set(row["generated_text"].split()) <= set(WORDS) for row in rows)
    as_text = rows_of(capsys, prompts, "user one assistant", "--max_new_tokens", "5", "--no_chat")
    as_message = rows_of(capsys, prompts, "one", "--max_new_tokens", "5")
    has_template = (prompts / "chat_template.jinja").is_file()
    assert (as_text[0]["generated_text"] == as_message[0]["generated_text"]) == has_template


def test_conversations_need_a_chat_template(prompts, tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path.write_text(json.dumps({"messages": [*messages, {"role": "user", "content": "three"}]}) + "\n")
    if (prompts / "chat_template.jinja").is_file():
        (row,) = rows_of(capsys, prompts, path, "--max_new_tokens", "5")
        assert row["input"] == "three"
    else:
        assert "has no chat template" in refusal_of(capsys, prompts, path)


def test_conversations_come_in_the_formats_of_the_recipe(prompts, tmp_path, capsys):
    if not (prompts / "chat_template.jinja").is_file():
        pytest.skip("takes no conversations")
    asked, reply = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    rows = [
        {"messages": [asked]},
        {"messages": json.dumps([asked, reply])},  # what was trained on: the reply is predicted
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"prompt": [asked], "completion": [reply]},
        {"messages": [asked], "text": "three"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others = rows_of(capsys, prompts, path, "--max_new_tokens", "5")
    assert first["input"] == "one"
    assert others == [first] * 4
    path.write_text(json.dumps({"messages": [reply]}) + "\n")
    assert "row 1 has nothing to reply to" in refusal_of(capsys, prompts, path)
    path.write_text(json.dumps({"messages": [asked], "tools": [{"name": "f"}], "images": ["a.png"]}) + "\n")
    assert "row 1 has images, and only texts are trained on" in refusal_of(capsys, prompts, path)


def test_prompts_beyond_the_positions_of_the_model(prompts, capsys):
    line = refusal_of(capsys, prompts, "one " * 20, "--max_new_tokens", "20")
    assert "--max_new_tokens 20 after a prompt of" in line
    assert "more than the 32 that the model takes" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/folder", "x.jpg"], "/no/such/folder is not a folder"),
        (["{run}", "missing.jpg"], "missing.jpg is not a file, and the model classifies images"),
        (["{run}", "a text"], "a text is not a file, and the model classifies images"),
        (["{run}", "{pictures}/notes.txt"], "notes.txt is not a readable image (no image format that Pillow knows)"),
        (["{run}", "{pictures}", "--top_k", "0"], "--top_k 0: must be at least 1"),
        (["{run}", "{pictures}", "--device", "tpu9"], "--device tpu9 is not there"),
        (["{run}", "{pictures}", "--device", "meta"], "--device meta is not there"),
        (["{run}", "{pictures}", "--device", "hpu"], "--device hpu is not there"),
        (["{run}"], "the following arguments are required: INPUT"),
        (["{pictures}", "x.jpg"], "holds no model"),
    ],
)
def test_mistakes_with_images(images, capsys, words, message):
    run, pictures = images
    assert message in refusal_of(capsys, *(word.format(run=run, pictures=pictures) for word in words))


def test_an_accelerator_of_any_kind_is_taken(images, capsys, monkeypatch):
    """One that this torch has not, so it says which it looked for."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert "--device mps is not there" in refusal_of(capsys, images[0], images[1] / "a.png")


def test_an_image_that_is_cut_off_is_named_and_nothing_is_printed(images, tmp_path, capsys):
    run, pictures = images
    whole = (pictures / "more" / "b.jpg").read_bytes()
    (tmp_path / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    line = refusal_of(capsys, run, pictures / "a.png", tmp_path / "torn.jpg", "--batch_size", "1")
    assert "torn.jpg is not a readable image" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{pictures}/a.png"], "a.png is a .png, and the model takes text"),
        (["{pictures}"], "is a folder, and the model takes text"),
        (["missing.txt"], "missing.txt cannot be read (No such file or directory)"),
        (["{rows}"], "rows.jsonl row 2 has no text 'text'"),
        (["{torn}"], "torn.jsonl row 1 is not JSON"),
        (["{half}"], "half.jsonl row 1 is not JSON ('utf-8' codec can't encode character"),
        (["{pipe}"], "pipe.jsonl is not a file"),
        (["{numbers}"], "numbers.jsonl row 1 message 1 has the role None"),
        (["{nobody}"], "nobody.jsonl row 1 has no messages"),
    ],
)
def test_mistakes_with_texts(texts, images, tmp_path, capsys, words, message):
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800x"}\n')
    (tmp_path / "numbers.jsonl").write_text('{"messages": [1, 2]}\n')
    (tmp_path / "nobody.jsonl").write_text('{"messages": []}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": ')
    names = ("rows", "torn", "half", "pipe", "numbers", "nobody")
    places = {"pictures": images[1]} | {name: tmp_path / f"{name}.jsonl" for name in names}
    assert message in refusal_of(capsys, texts, *(word.format(**places) for word in words))


def changed(source, target, **files):
    """A copy of a model's folder with entries of its JSON files changed."""
    shutil.copytree(source, target)
    for stem, entries in files.items():
        path = target / f"{stem}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return target


def own_processor(kind, where):
    """Entries of a preprocessor's file that take its class from a module."""
    named = {"AutoImageProcessor": "image_processor_type", "AutoFeatureExtractor": "feature_extractor_type"}[kind]
    return {"preprocessor_config": {"image_processor_type": None, named: "Mine", "auto_map": {kind: where}}}


def own_tokenizer(where):
    return {"tokenizer_config": {"tokenizer_class": "Mine", "auto_map": where}}


BOTH = ["mine.Mine", "mine.Mine"]
CODE = {
    "a feature extractor": ("images", own_processor("AutoFeatureExtractor", "mine.Mine")),
    "a processor elsewhere": ("images", own_processor("AutoImageProcessor", "some/where--mine.Mine")),
    "two processors": ("images", own_processor("AutoImageProcessor", BOTH)),
    "a tokenizer": ("texts", own_tokenizer({"AutoTokenizer": BOTH})),
    "a tokenizer of former versions": ("texts", own_tokenizer(BOTH)),
}


@pytest.mark.parametrize("brings", CODE)
def test_whatever_code_a_whole_model_brings_is_not_run(request, images, tmp_path, capfd, monkeypatch, brings):
    kind, files = CODE[brings]
    source = images[0] / "final" if kind == "images" else request.getfixturevalue(kind)
    folder = changed(source, tmp_path / "model", **files)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    given = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", given)
    assert main(["predict", str(folder), str(images[1]) if kind == "images" else "one"]) in (0, 2)
    assert "Traceback" not in (shown := "".join(capfd.readouterr()))
    assert "[y/N]" not in shown
    assert not (tmp_path / "ran").exists()
    assert given.tell() == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"image_mean": [0.1]}, "cannot take the inputs from"),
        ({"image_std": [0.5, 0, 1]}, "its image_std is 0"),
        ({"size": None, "crop_size": None}, "cannot take the inputs from"),
        ({"size": {"height": 200_000, "width": 200_000}}, "sides of [200000, 200000"),
        ({"size": {"shortest_edge": -3}}, "sides of [-3"),
        ({"image_mean": "x"}, "cannot take the inputs from"),
        ({"resample": 99}, "cannot take the inputs from"),
        ({"rescale_factor": "x"}, "cannot take the inputs from"),
    ],
)
def test_image_processors_that_make_no_image(images, tmp_path, capsys, entries, message):
    run, pictures = images
    folder = changed(run / "final", tmp_path / "model", preprocessor_config=entries)
    assert message in refusal_of(capsys, folder, pictures)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('no \x1b[31m') }}", "no \\x1b[31m"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "takes longer than 0.2 s"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_chat_templates_with_a_mistake(prompts, tmp_path, capsys, monkeypatch, template, message):
    monkeypatch.setattr(inference, "TEMPLATE_S", 0.2)
    folder = tmp_path / "model"
    shutil.copytree(prompts, folder)
    (folder / "chat_template.jinja").write_text(template)
    line = refusal_of(capsys, folder, "one")
    assert message in line
    assert "\x1b" not in line
    assert line.endswith("): change it, or continue a text with --no_chat")


@pytest.mark.parametrize("named", ["../elsewhere.safetensors", "/etc/elsewhere.safetensors", "weights.bin", 3])
def test_files_of_weights_are_safetensors_in_the_folder(texts, tmp_path, capsys, named):
    folder = tmp_path / "model"
    shutil.copytree(texts, folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = dict.fromkeys(BertForSequenceClassification.from_pretrained(texts).state_dict(), named)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    line = refusal_of(capsys, folder, "one")
    assert f"model.safetensors.index.json names {named!r}, which is not a .safetensors file next to it" in line


def test_a_pipe_in_an_index_is_refused(texts, tmp_path, capsys):
    folder = shutil.copytree(texts, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe.safetensors")
    index = {"metadata": {}, "weight_map": {"classifier.bias": "pipe.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index.json names 'pipe.safetensors', which is not a file: take another" in refusal_of(capsys, folder, "one")


@pytest.mark.parametrize("num_bytes", [0, 5, 2000])
def test_weights_that_are_cut_off(texts, tmp_path, capsys, num_bytes):
    folder = tmp_path / "model"
    shutil.copytree(texts, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:num_bytes])
    assert "cannot be loaded" in refusal_of(capsys, folder, "one")


def test_weights_of_another_size(texts, tmp_path, capsys):
    folder = changed(texts, tmp_path / "model", config={"hidden_size": 32})
    assert "cannot be loaded" in refusal_of(capsys, folder, "one")


UNPRINTABLE = ["\x9b31m", "\x9d0;title\x9c", "\x85", "\u2028", "\u202e"]
"""Commands to a terminal, two ends of a line, and a mark that turns what follows round."""


@pytest.mark.parametrize("characters", UNPRINTABLE, ids=ascii)
def test_rows_of_json_hold_no_control_characters(texts, tmp_path, capsys, characters):
    """They come from the inputs, and from the names of the classes."""
    folder = changed(texts, tmp_path / "model", config={"id2label": {"0": f"no{characters}", "1": "yes"}})
    text = f"one {characters} two"
    assert main(["predict", str(folder), text, "--json"]) == 0
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed.isprintable()
    row = json.loads(printed)
    assert row["input"] == text
    assert {one["label"] for one in row["predictions"]} == {f"no{characters}", "yes"}


def test_labels_by_problem_type(tmp_path, capsys):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for problem, names in (("multi_label_classification", ["a", "b", "c"]), (None, ["LABEL_0"])):
        folder = tmp_path / str(problem)
        config = BertConfig(vocab_size=len(WORDS), id2label=dict(enumerate(names)), problem_type=problem, **shape)
        model = BertForSequenceClassification(config).eval()
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        logits = model(torch.tensor([[WORDS.index("one"), WORDS.index("two")]])).logits[0]
        (row,) = rows_of(capsys, folder, "one two")
        if problem is None:  # transformers trains one output as a number
            assert row["value"] == pytest.approx(logits.item(), abs=1e-6)
            assert main(["predict", str(folder), "one two"]) == 0
            assert f"{logits.item():.4f}" in capsys.readouterr().out
        else:
            found = {one["label"]: one["probability"] for one in row["predictions"]}
            assert found == pytest.approx(dict(zip(names, logits.sigmoid().tolist(), strict=True)), abs=1e-6)
