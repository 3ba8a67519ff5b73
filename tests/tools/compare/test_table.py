"""The table as text: every figure whole in a narrow terminal, and as Markdown."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from memsave_recipes.tools.compare import ComparisonTable, History, Run, compare
from memsave_recipes.tools.pages.comparison import render, show, to_markdown

Make = Callable[..., Run]


def printed(table: ComparisonTable, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(table))
    return capture.get()


def language_run(make_run: Make, name: str, speed: float) -> Run:
    evaluation = {"loss": 3.21, "perplexity": 24.8, "bits_per_byte": 1.07}
    rates = {"samples_per_sec": speed, "tokens_per_sec": 1024 * speed, "mfu_pct": 41.5, "train_time_s": 3700.0}
    return make_run(name, model="gpt2", eval=evaluation, perf=rates, train_loss=3.3)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_the_terminal_with_every_figure_whole(width: int, make_run: Make, checkpointed: Make) -> None:
    text = printed(compare([make_run("plain"), checkpointed(losses=(2.0, 1.0 + 2.1e-7))]), width)
    assert max(map(len, text.splitlines())) <= width
    figures = ("vgg11", "segments:2", "666 MiB", "-35 %", "102 MiB", "-80 %", "x0.80", "60.5 s", "x1.21", "0.9805")
    for figure in (*figures, "same", "2.1e-07", "baseline", "one instrumented step", "pareto"):
        assert figure in text


def test_no_line_ends_with_blanks(make_run: Make, checkpointed: Make, capsys: pytest.CaptureFixture) -> None:
    show(compare([make_run("plain"), checkpointed()]))
    lines = capsys.readouterr().out.splitlines()
    assert any("segments:2" in line for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_terms_of_the_table_are_explained_below_it(make_run: Make, checkpointed: Make) -> None:
    alone, two = printed(compare([make_run("plain")]), 120), printed(compare([make_run("plain"), checkpointed()]), 120)
    assert "saved for backward: activations that the forward keeps" in alone
    assert "pareto: no run" in two
    assert "pareto" not in alone


def test_a_language_run_shows_tokens_and_bits_per_byte(make_run: Make) -> None:
    text = printed(compare([language_run(make_run, "plain", 100.0), language_run(make_run, "full", 50.0)]), 100)
    for figure in ("tokens", "102,400", "51,200", "x0.50", "1.0700", "1:01:40"):
        assert figure in text
    assert "perplexity" not in text


def test_without_an_evaluation_the_training_loss_counts(make_run: Make) -> None:
    assert "0.1234" in printed(compare([make_run("run", eval={}, train_loss=0.1234)]), 100)


def test_a_column_that_nobody_filled_is_left_out() -> None:
    bare = Run(name="bare", path=Path("/runs/bare"), results={"model": "vgg11"}, config={}, history=History([]))
    line = next(line for line in printed(compare([bare]), 100).splitlines() if line.startswith(" bare"))
    assert line.split() == ["bare", "-"]


def test_a_figure_that_one_run_lacks_is_a_dash(make_run: Make) -> None:
    lines = printed(compare([make_run("plain"), make_run("short", perf={})]), 100).splitlines()
    assert next(line for line in lines if line.startswith(" short")).split()[-4:] == ["-", "-", "0.9805", "0"]


def test_equal_curves_print_as_0(make_run: Make, checkpointed: Make) -> None:
    lines = printed(compare([make_run("plain"), checkpointed()]), 100).splitlines()
    assert next(line for line in lines if "checkpointed" in line).split()[-1] == "0"


def test_a_bracket_in_a_name_is_no_markup(make_run: Make) -> None:
    text = printed(compare([make_run("[bold]", device="[red]"), make_run("b", device="cpu")]), 100)
    assert "[bold]" in text
    assert "[red]" in text


def test_the_table_itself_warns_of_runs_that_are_not_comparable(make_run: Make, checkpointed: Make) -> None:
    text = printed(compare([make_run("plain", device="A100"), checkpointed(device="H200")]), 120)
    assert "! other device" in text
    assert "! not comparable: runs of vgg11 differ in device: A100 (plain), H200 (checkpointed)" in text


def test_models_are_said_to_be_apart(make_run: Make) -> None:
    table = compare([make_run("a"), make_run("b", model="densenet121")])
    assert "each model is compared within itself alone" in printed(table, 120)
    assert "not comparable" not in printed(table, 120)


def test_markdown_holds_every_figure_and_escapes_names(make_run: Make, checkpointed: Make) -> None:
    text = to_markdown(compare([make_run("pl|ain*"), checkpointed()]))
    lines = text.splitlines()
    assert lines[0].startswith("| run | plan | batch layout | peak memory | saved for backward | samples/s |")
    assert {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")} == {lines[0].count("|")}
    assert "pl\\|ain\\*" in text
    assert "666 MiB (-35 %)" in text
    assert "* pareto: no run" in text


def test_markdown_escapes_the_titles_of_columns_too(make_run: Make) -> None:
    run = make_run("plain", model="<b>&amp;", eval={"<img src=x onerror=alert(1)>": 0.5, "a|b": 0.5})
    text = to_markdown(compare([run, make_run("other")]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert r"\<img src=x onerror=alert(1)\>" in lines[0]
    assert "<" not in text.replace(r"\<", "")
    assert r"\&amp;" in text


def test_a_run_alone_is_held_against_none(make_run: Make, checkpointed: Make) -> None:
    alone, two = compare([make_run("plain")]), compare([make_run("plain"), checkpointed()])
    for layout in (lambda table: printed(table, 120), to_markdown):
        assert "difference" not in layout(alone)
        assert "baseline" not in layout(alone)
        assert "difference" in layout(two)
