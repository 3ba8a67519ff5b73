"""The documentation: its examples run, the commands of the README take their flags, its links lead somewhere."""

import importlib.util
import inspect
import re
import shlex
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import TrainingArguments

from memsave_recipes.core.errors import InputError
from memsave_recipes.tools import cli
from memsave_recipes.training.parsing import parse_arguments

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_README_LINES = 110
MAX_PAGES, MAX_LINES = 16, 3000
PAGES = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("design/*.md")]
OF_TEXT = {"recipes/language_modeling.py", "recipes/text_classification.py"}
NAMES_A_MODEL = {"--model_type", "--model_name_or_path", "--config"}
TRAINED = "checkpoints/step-4/model-0.safetensors"
TESTED_ELSEWHERE = ("trainers.md",)  # test_own_loop, integrations/test_page
EXAMPLES = [
    (page.name, code)
    for page in DOCS.glob("*.md")
    if page.name not in TESTED_ELSEWHERE
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
]


def commands_of(text):
    """Every command line of the ``bash`` blocks and table cells that runs a recipe or ``memsave``, as words."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ").splitlines()
    lines += re.findall(r"^\|.*`(recipes/\S+\.py .*?)`", text, re.M)
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and any(word.startswith(("recipes/", "memsave")) for word in line)]


def help_of(main, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def module_of(recipe):
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main_of(recipe):
    return module_of(recipe).main


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_run(page, code):
    names = {}
    exec(compile(code, page, "exec"), names)


def test_the_recipe_of_the_page_resumes_both_models_and_both_optimizers(tmp_path):
    names = {}
    exec(next(code for page, code in EXAMPLES if page == "recipes.md"), names)

    def train(folder, *flags):
        AcceleratorState._reset_state(reset_partial_state=True)
        flags = [*flags, "--save_every", "2", "--lr_scheduler_type", "constant", "--report_to", "none"]
        names["main"]([*flags, "--micro_batch_size", "24", "--output_dir", str(tmp_path / folder)])

    train("straight", "--max_steps", "4")
    train("again", "--max_steps", "2")
    train("again", "--max_steps", "4", "--resume")
    straight, again = (load_file(tmp_path / folder / TRAINED) for folder in ("straight", "again"))
    assert any("momentum_buffer" in name for name in straight)
    assert {name for name in straight if not straight[name].equal(again[name])} == set()


MIGRATING = (DOCS / "migrating.md").read_text(encoding="utf-8")
MODEL_OF_RECIPE = {
    "image_classification": ["--model", "vgg_small"],
    "image_text": ["--model_type", "llava"],
    "language_modeling": ["--model_type", "gpt2"],
    "text_classification": ["--model_type", "bert"],
}


def rows_below(heading):
    """The cells of each row below a heading of docs/migrating.md that begins with a flag of ours."""
    section = MIGRATING.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `--")]


@pytest.fixture(scope="module")
def arguments():
    return {name: module_of(ROOT / f"recipes/{name}.py").Arguments for name in MODEL_OF_RECIPE}


def is_taken(words, arguments):
    """Whether a recipe takes these flags, with a model if they name none."""
    for name, model in MODEL_OF_RECIPE.items():
        with suppress(InputError):
            named = [] if words[0].startswith("--model") else model
            return bool(parse_arguments(arguments[name], args=["--output_dir", "out", *named, *words]))
    return False


def test_flags_beside_other_programs_parse(arguments):
    known = {field.name for kind in arguments.values() for field in fields(kind)}
    cells = re.findall(r"^\| (`--.*?) \|", MIGRATING, re.M)
    spans = [span for cell in cells for span in re.findall(r"`(--.*?)`", cell)]
    assert len(spans) > 100
    assert {name for span in spans for name in re.findall(r"--(\w+)", span)} <= known
    with_values = [span for span in spans if " " in span]
    assert len(with_values) > 10
    assert [span for span in with_values if not is_taken(shlex.split(span), arguments)] == []


@pytest.mark.parametrize("page", ["recipes.md", "failures.md"])
def test_tables_of_flags_have_those_that_there_are(page, arguments):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {name for cell in re.findall(r"^\| (`--.*?) \|", text, re.M) for name in re.findall(r"--(\w+)", cell)}
    assert len(named) > 2
    assert named <= {field.name for kind in arguments.values() for field in fields(kind)}


@pytest.mark.parametrize("words", commands_of(MIGRATING), ids=" ".join)
def test_commands_for_those_who_change_parse(words, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CHATS.jsonl").write_text('{"messages": []}')
    (tmp_path / "lora.yaml").write_text("lora_alpha: 16")
    recipe = next(word for word in words if word.startswith("recipes/"))
    parse_arguments(arguments[Path(recipe).stem], args=words[words.index(recipe) + 1 :])


def test_defaults_beside_trainers_are_those(arguments):
    section = MIGRATING.partition("| flag | here |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--(\w+)` \| (\S+) \| (\S+)", section, re.M)
    trainer = {field.name: field.default for field in fields(TrainingArguments)}
    trainer["global_batch_size"] = trainer["per_device_train_batch_size"]
    recipe = {field.name: field.default for field in fields(arguments["language_modeling"])}
    assert len(rows) == 4
    assert [(float(ours), float(theirs)) for _, ours, theirs in rows] == [
        (recipe[name], trainer[name]) for name, *_ in rows
    ]
    for name in ("lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"):
        assert recipe[name] == trainer[name]
    assert (recipe["num_epochs"], trainer["num_train_epochs"]) == (3, 3)
    assert (recipe["save_every"], trainer["save_steps"]) == ("30min", 500)


def test_names_of_trainer_are_its_own():
    named = [name for row in rows_below("Trainer, TRL and timm") for name in re.findall(r"`([a-z]\w+)`", row[1])]
    assert len(named) > 30
    assert set(named) <= {field.name for field in fields(TrainingArguments)}


def test_names_of_trl_are_its_own():
    trl = pytest.importorskip("trl")
    known = {field.name for kind in (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments) for field in fields(kind)}
    rows = rows_below("Trainer, TRL and timm")
    named = [name for row in rows for name in re.findall(r"`([a-z]\w+)`", row[2])]
    named += [name for row in rows if row[2] == "the same" for name in re.findall(r"--(\w+)", row[0])]
    assert len(named) > 10
    assert set(named) <= known
    assert issubclass(trl.SFTConfig, TrainingArguments)  # "as Trainer"


def test_names_of_lightning_are_its_own():
    lightning = pytest.importorskip("lightning")
    callbacks = lightning.pytorch.callbacks
    takers = [lightning.Trainer, lightning.Trainer.fit, callbacks.ModelCheckpoint, callbacks.EarlyStopping]
    known = {name for taker in (*takers, callbacks.EMAWeightAveraging) for name in inspect.signature(taker).parameters}
    named = [name for row in rows_below("Lightning") for name in re.findall(r"`([a-z]\w+)`", row[1])]
    assert len(named) > 15
    assert set(named) <= known


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MAX_README_LINES


def test_the_pages_are_few_and_short():
    pages = [page.read_text(encoding="utf-8").splitlines() for page in DOCS.glob("*.md")]
    assert len(pages) <= MAX_PAGES
    assert sum(map(len, pages)) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_recipes_for_text_name_a_model(page):
    commands = [words for words in commands_of(page.read_text(encoding="utf-8")) if OF_TEXT & set(words)]
    assert [words for words in commands if not NAMES_A_MODEL & set(words)] == []


@pytest.mark.parametrize("words", commands_of(README), ids=" ".join)
def test_commands_of_the_readme_take_their_flags(words, capsys):
    for word in words:
        if word.startswith(("recipes/", "accelerate_configs/")):
            assert (ROOT / word).is_file()
    recipe = next((ROOT / word for word in words if word.startswith("recipes/") and word.endswith(".py")), None)
    known = help_of(cli.main, words[1:2], capsys) if words[0] == "memsave" else ""
    known += help_of(main_of(recipe), [], capsys) if recipe else ""
    flags = words[words.index(recipe.relative_to(ROOT).as_posix()) :] if recipe else words
    missing = {word for word in flags if word.startswith("--") and not re.search(rf"{word}\b", known)}
    if words[0] == "memsave":
        assert words[1] in known
    assert not missing


def test_the_help_has_a_line_for_each_command(capsys):
    lines = help_of(cli.main, [], capsys).splitlines()
    for group, commands in cli.COMMANDS.items():
        first = lines.index(f"{group}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(commands)]] == [name for name, _, _ in commands]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


PRIVATE_WORDS = (
    *(
        "on paper",
        "undisturbed",
        "sketch",
        "beside_the_step",
        "the house",
        "rehearsal",
        "SafetyArguments",
        "FiniteGate",
    ),
    *("told_in_one_line", "by_rank_0", "rank_0_first", "OBEY:", "PRICE:", "DECIDE:"),
)


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_the_fields_words_stand_for_private_ones(word):
    files = [*(ROOT / "memsave_recipes").rglob("*.py"), *(ROOT / "recipes").glob("*.py"), *DOCS.glob("*.md")]
    named = [path.name for path in (*files, ROOT / "README.md") if word in path.read_text(encoding="utf-8")]
    assert named == []
