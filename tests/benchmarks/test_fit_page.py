"""docs/will_it_fit.html: its figures are those of ``memsave fit``, and a browser answers with them, alone."""

import html
import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.task import Launch
from memsave_recipes.models.image_classifiers import MODELS as NETWORKS
from memsave_recipes.tools.fit.ladder import KnownEstimates
from memsave_recipes.tools.fit.recipe_task import read_task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "will_it_fit.html"
TEXT = PAGE.read_text(encoding="utf-8")
FIGURES = json.loads(re.search(r'id="figures">(.*?)</script>', TEXT, re.S)[1])
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4},
}
FAST = ("GPT-2", "ViT-B/16", "Qwen3 0.6B")


@pytest.fixture(scope="module")
def page(load):
    return load("fit_page")


@pytest.fixture(scope="module")
def known(load):
    return {model.name: model for model in load("known_models").MODELS}


def test_models_cards_and_bytes_of_the_page(page, known):
    assert len(known) == len({model.word for model in known.values()}) == 63
    assert len(FIGURES["cards"]) == len(page.CARDS) == 12
    assert set(FIGURES["models"]) <= set(known)
    assert PAGE.stat().st_size < 10**6


def written(model, folder):
    """The folder of a model; a test of one whose processor needs what is not installed is skipped."""
    try:
        return model.write(folder)
    except ImportError as error:
        pytest.skip(str(error))


def number_of_parameters(model, tmp_path):
    with torch.device("meta"):
        if not model.config:
            return sum(one.numel() for one in NETWORKS[model.word](num_classes=1000).parameters())
        config = AutoConfig.from_pretrained(written(model, tmp_path))
        built = getattr(transformers, config.architectures[0])(config)
    return sum(one.numel() for one in built.parameters())


@pytest.mark.parametrize("name", FAST)
def test_a_model_has_its_known_size(known, name, tmp_path):
    assert number_of_parameters(known[name], tmp_path) / 1e6 == pytest.approx(known[name].parameters_m, rel=0.01)


@pytest.mark.slow
def test_each_model_has_its_known_size(known, tmp_path):
    found = {name: number_of_parameters(model, tmp_path) / 1e6 for name, model in known.items()}
    assert found == {name: pytest.approx(model.parameters_m, rel=0.01) for name, model in known.items()}


STRATEGIES = ("none", "selective", "offload", "full_offload")
STREAMED = ("--lora", "--dtype", "bfloat16", "--stream_weights", "host")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param((), id="whole"), pytest.param(STREAMED, id="streamed")])
@pytest.mark.timeout(900)
def test_estimates_that_cards_share_are_those_of_each(page, known, tmp_path, flags):
    word = replace(known["Llama 3.1 8B"], word="someone/small", config=LLAMA).write(tmp_path)
    words = ["--model_name_or_path", word, "--block_size", "64", "--global_batch_size", "4", *flags]
    task = read_task(ROOT / "recipes" / "language_modeling.py", words)
    targets = [find_target("rtx4090"), find_target("h100")]
    launches = [Launch(target=target, mixed_precision="bf16") for target in targets]
    alone = [KnownEstimates(task, launch).of_size(4, "chunked", STRATEGIES) for launch in launches]
    assert figures_of(alone[0]) != figures_of(alone[1])
    shared = KnownEstimates(task, replace(launches[0], target=page.Cards.of(targets)))
    with page.sharing_estimates():
        found = [page._OfOneCard(shared, launch).of_size(4, "chunked", STRATEGIES) for launch in launches]
    assert list(map(figures_of, found)) == list(map(figures_of, alone))


def figures_of(measured):
    memory = [[(one.live_bytes, one.peak_bytes) for one in trace.memory] for _, trace in measured.traces]
    return memory, [(plan, trace.seconds) for plan, trace in measured.traces]


def recomputed(page, model, size, card, host_gib, tmp_path):
    """The answer by ``memsave fit`` in its own way, and the page's, with texts in place of their places."""
    word = written(model, tmp_path)
    is_of_text = FIGURES["models"][model.name]["recipe"] != "image_classification"
    flags = [*page.of_host_memory(host_gib), *page.of_model(model, int(size) if is_of_text else None)]
    texts = page.Table()
    mine = page.compact(*page.answer(word, card, *flags), texts, word, model)
    of_hosts = FIGURES["models"][model.name]["sizes"][size][page.CARDS.index(card)]
    its = of_hosts[page.HOSTS_GIB.index(host_gib)] or of_hosts[0]
    return readable(mine, texts), readable(its, FIGURES["texts"])


def readable(answer, texts):
    best, said, rows = answer
    named = [[texts[at] if place in (0, 1, 5, 9) and at >= 0 else at for place, at in enumerate(row)] for row in rows]
    return best, said, named


def test_where_nothing_fits_the_page_says_what_is_needed():
    sizes = [by_card for model in FIGURES["models"].values() for by_card in model["sizes"].values()]
    answers = [answer for by_card in sizes for of_hosts in by_card for answer in of_hosts if answer is not None]
    assert all(said.startswith("with ") == (best < 0) for best, said, _ in answers)
    assert any(said for _, said, _ in answers)


OF_TODAY = [(name, size) for name, model in FIGURES["models"].items() for size in model["sizes"] if "versions" in model]
"""Models whose figures are not older than compiled layers, which the page says."""


@pytest.mark.compiles_ahead
@pytest.mark.parametrize(
    ("model", "card"),
    [("VGG16", "h100"), *(pytest.param("ViT-B/16", card, marks=pytest.mark.slow) for card in ("l4", "h100"))],
)
def test_a_figure_is_that_of_memsave_fit(page, known, model, card, tmp_path):
    mine, its = recomputed(page, known[model], "224", card, None, tmp_path)
    assert its == mine


@pytest.mark.slow
@pytest.mark.compiles_ahead
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(40))
def test_figures_are_those_of_memsave_fit(page, known, number, tmp_path):
    draw = random.Random(number)
    name, size = draw.choice(OF_TODAY)
    mine, its = recomputed(page, known[name], size, draw.choice(page.CARDS), draw.choice(page.HOSTS_GIB), tmp_path)
    assert its == mine


def rows_of(name):
    """The rows of a model's answers, each with the place of its card."""
    for by_card in FIGURES["models"][name]["sizes"].values():
        for place, of_hosts in enumerate(by_card):
            for answer in filter(None, of_hosts):
                yield from ((place, row) for row in answer[2])


@pytest.mark.parametrize("name", FIGURES["models"])
def test_rows_add_up_and_say_whether_they_fit(name):
    for place, row in rows_of(name):
        needed, line, parts = row[6], row[9], row[10:]
        assert 0 < sum(parts) <= needed + len(parts)  # each is rounded up
        if line >= 0:
            assert needed <= FIGURES["cards"][place]["budget_mib"] + 1


def line_of(page, row, place, word):
    values = {page.MODEL_WORD: word, page.MICRO: str(row[3]), page.BUDGET: FIGURES["cards"][place]["budget"]}
    return re.sub(r"\b(MODEL|MICRO|BUDGET)\b", lambda found: values[found[0]], FIGURES["texts"][row[9]])


def test_every_line_is_one_that_its_recipe_takes(page, known, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    first = {row[9]: (name, place, row) for name in FIGURES["models"] for place, row in rows_of(name) if row[9] >= 0}
    for name, place, row in first.values():
        try:
            folder = known[name].write(tmp_path)
        except ImportError:  # of what its processor needs
            continue
        words = shlex.split(line_of(page, row, place, folder))
        at = next(number for number, word in enumerate(words) if word.endswith(".py"))
        assert Path(words[words.index("--config_file") + 1]).is_file()
        run = read_task(Path(words[at]), words[at + 1 :]).run
        assert (run.micro_batch_size, run.activation_checkpointing) == (row[3], FIGURES["texts"][row[5]])


def test_the_page_asks_for_nothing():
    assert "default-src 'none'" in TEXT
    assert not re.search(r"https?://|\ssrc=|\shref=|url\(|@import|fetch\(|XMLHttpRequest|import\(", TEXT)


def test_its_colors_are_those_of_the_other_pages():
    other = (ROOT / "memsave_recipes/tools/pages/page.html").read_text(encoding="utf-8")
    colors = re.findall(r"--[\w-]+: #\w+", TEXT.partition("</style>")[0])
    assert len(colors) > 15
    assert set(colors) <= set(re.findall(r"--[\w-]+: #\w+", other))


ASK = """<script>
for (const [name, value] of %s) {
  const field = document.forms[0].elements[name];
  field.focus();
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
const page = document.documentElement;
const seen = { wide: page.scrollWidth, window: innerWidth, hash: location.hash };
document.body.append(element("output", JSON.stringify(seen)));
</script></body>"""


def asked(browse, tmp_path, chosen, *, width=1280, hash="", text=TEXT):
    """What the page shows after values were chosen, and the hash that it gives itself."""
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", ASK % json.dumps([*chosen.items()])), encoding="utf-8")
    seen = browse(f"{file.as_uri()}{hash}", f"--window-size={width},900")
    assert seen.console == []
    output = json.loads(re.search(r"<output>(.*?)</output>", seen.html)[1].replace("&amp;", "&"))
    assert output["wide"] <= output["window"]
    body = seen.html.partition("<main>")[2]
    shown = {name: re.search(rf'id="{name}"[^>]*>(.*?)</(?:p|pre|ul|tbody|div)>', body, re.S)[1] for name in SHOWN}
    texts = {name: html.unescape(re.sub(r"<[^>]+>", " ", shown[name])) for name in SHOWN}
    return {name: " ".join(said.split()) for name, said in texts.items()}, output["hash"]


SHOWN = ("verdict", "how", "legend", "line", "ways", "command", "notes")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_answers_with_the_figures_of_memsave_fit(page, browse, tmp_path, width):
    name, place = "ViT-B/16", page.CARDS.index("l4")
    shown, hash = asked(browse, tmp_path, {"model": name, "card": "l4", "cards": "1"}, width=width)
    (best, _, rows), *_ = FIGURES["models"][name]["sizes"]["224"][place]
    assert shown["verdict"].startswith(f"It fits: {rows[best][6] / 1024:.3g} GiB of ")
    assert f": {FIGURES['texts'][rows[best][0]]}, " in shown["how"]
    assert shown["line"] == line_of(page, rows[best], place, "google/vit-base-patch16-224")
    single = [row for row in rows if row[2] == 1]
    assert [FIGURES["texts"][row[0]] in shown["ways"] for row in single] == [True] * len(single)
    assert shown["command"] == "memsave fit google/vit-base-patch16-224 --card l4 --image_size 224"
    again, _ = asked(browse, tmp_path, {}, width=width, hash=hash)
    assert again == shown


def test_older_figures_are_named(browse, tmp_path):
    older = next(name for name, model in FIGURES["models"].items() if "versions" not in model)
    for name, words in (("ViT-B/16", "Layers that repeat compute compiled"), (older, "this model are older")):
        shown, _ = asked(browse, tmp_path, {"model": name, "card": "h100"})
        assert words in shown["notes"]


def test_a_number_of_gib_is_answered_by_the_next_smaller_card(browse, tmp_path):
    shown, hash = asked(browse, tmp_path, {"model": "ViT-B/16", "card": "other", "gib": "20"})
    assert "the largest card here with no more memory" in shown["how"]
    assert "--card rtx4060ti-16gb" in shown["command"]
    assert "gib=20" in hash
    too_small, _ = asked(browse, tmp_path, {"card": "other", "gib": "2"})
    assert too_small["verdict"].startswith("The smallest card here has 7")
    assert too_small["line"] == too_small["ways"] == ""


def test_where_nothing_fits_it_says_what_would(page, browse, tmp_path):
    name, place, said = "ViT-B/16", page.CARDS.index("l4"), "with LoRA, 90 GiB: take a card with 99 GiB"
    figures = json.loads(json.dumps(FIGURES))
    ((_, _, rows), *_) = figures["models"][name]["sizes"]["224"][place]
    figures["models"][name]["sizes"]["224"][place] = [
        [-1, said, [[*row[:6], 92160, *row[7:9], -1, *row[10:]] for row in rows]]
    ]
    text = page.FIGURES.sub(lambda _: json.dumps(figures), TEXT)
    shown, _ = asked(browse, tmp_path, {"model": name, "card": "l4", "train": "any", "cards": "1"}, text=text)
    assert shown["verdict"] == "It does not fit NVIDIA L4"
    assert shown["how"] == f"The least memory is needed {said}."
    assert shown["line"] == ""
    assert "too much" in shown["legend"]


def test_all_weights_and_adapters_are_told_apart(page, browse, tmp_path):
    choose = {"model": "ViT-B/16", "card": "l4", "cards": "1"}
    adapters, _ = asked(browse, tmp_path, {**choose, "train": "lora"})
    assert " --lora " in adapters["line"]
    assert "no checkpointing" not in adapters["ways"]
    everything, _ = asked(browse, tmp_path, {**choose, "train": "all"})
    assert "--lora" not in everything["line"]
    assert "LoRA" not in everything["ways"]


@pytest.mark.slow
def test_keys_alone_choose_and_select_the_line(keyboard):
    page = keyboard(PAGE.as_uri())
    page.until("focus.name === 'train'")
    page.press("ArrowDown", times=2)
    assert page.see("focus.value") == "lora"
    page.until("focus.id === 'line'")
    line = page.see("getSelection().toString()")
    assert line == page.see("focus.innerText")
    assert " --lora " in line
    page.until("focus.id === 'command'")
    assert page.see("getSelection().toString()").startswith("memsave fit ")
