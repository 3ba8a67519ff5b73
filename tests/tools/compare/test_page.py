"""The page shows every run and its figures in a browser, asks for nothing, and logs no error."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from memsave_recipes.tools.compare import History, Run, compare
from memsave_recipes.tools.pages.page import to_html

Make = Callable[..., Run]
BREAKDOWN = {"parameters_gib": 0.2, "gradients_gib": 0.1, "optimizer_state_gib": 0.1, "activations_gib": 0.25}


@pytest.fixture
def runs(make_run: Make, checkpointed: Make) -> list[Run]:
    memory = {"peak_allocated_gib": 0.65, "saved_for_backward_gib": 0.1, "breakdown": BREAKDOWN}
    memory["source"] = "one instrumented step"
    return [
        make_run("plain", device="A100", config={"lr": 0.125}),
        checkpointed("segments", device="A100", memory=memory, config={"lr": 0.25}),
        make_run("dense", model="densenet121", losses=(3.0, float("nan"), 2.0)),
    ]


def opened(page: str, tmp_path: Path, browse: Callable[[str], Any]) -> Any:
    file = tmp_path / "compare.html"
    file.write_text(page, encoding="utf-8")
    return browse(file.as_uri())


def text_of(html: str) -> str:
    """What a reader sees, without the style and the script."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", body)


BEHIND_THE_EDGE = """<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".scroll")].map((one) => one.scrollWidth - one.clientWidth);
  document.body.insertAdjacentHTML("beforeend", `<output>${Math.max(...boxes)}</output>`);
})</script></body>"""


def test_a_phone_shows_every_figure_without_a_sideways_scroll(
    runs: list[Run], tmp_path: Path, browse: Callable[..., Any]
) -> None:
    page = to_html(compare(runs))
    file = tmp_path / "compare.html"
    file.write_text(page.replace("</body>", BEHIND_THE_EDGE), encoding="utf-8")
    assert "<output>0</output>" in browse(file.as_uri(), "--window-size=390,900").html
    headings = re.findall(r'<button type="button">(.*?)</button>', page.partition("</thead>")[0])
    assert re.findall(r'data-heading="(.*?)"', page.partition("</tr>")[2].partition("</tr>")[0]) == headings[1:]


def test_a_browser_shows_every_run_and_its_figures_and_logs_no_error(
    runs: list[Run], tmp_path: Path, browse: Callable[[str], Any]
) -> None:
    seen = opened(to_html(compare(runs)), tmp_path, browse)
    text = text_of(seen.html)
    for expected in ("3 runs compared", "plain", "segments", "dense", "vgg11", "densenet121", "segments:2"):
        assert expected in text
    for figure in ("1 GiB", "666 MiB", "-35 %", "102 MiB", "x0.80", "60.5 s", "0.9805", "16 x 2 ranks x 2"):
        assert figure in text
    for chart in (
        "vgg11: filled is Pareto-optimal",
        "peak memory by kind",
        "training loss",
        "activations",
        "Differences of the configurations",
    ):
        assert chart in text
    assert seen.html.count("<svg") == 5  # dense is alone, so there is no throughput to hold it against
    assert seen.console == []


def test_a_page_is_the_same_each_time_and_its_ink_is_that_of_the_text(runs: list[Run]) -> None:
    page = to_html(compare(runs))
    assert page == to_html(compare(runs))
    charts = page.partition("<svg")[2]
    assert "stroke: currentColor" in charts
    assert "#000000" not in charts


def test_keys_alone_sort_and_fold(runs: list[Run], tmp_path: Path, keyboard: Callable[[str], Any]) -> None:
    file = tmp_path / "compare.html"
    file.write_text(to_html(compare(runs)), encoding="utf-8")
    page = keyboard(file.as_uri())
    page.until("focus.getAttribute('aria-label') === 'Table: vgg11'")  # rows that are out of sight scroll by arrows
    page.until("focus.textContent === 'peak memory'")
    for key, way, first in (("Enter", "ascending", "segments"), ("Space", "descending", "plain")):
        page.press(key)
        assert page.see("focus.closest('th').ariaSort") == way
        assert first in page.see("focus.closest('table').tBodies[0].rows[0].cells[0].textContent")
    page.until("focus.tagName === 'SUMMARY'")
    page.press("Space")
    assert page.see("focus.parentNode.open") is False


def test_charts_have_a_text_for_a_screen_reader(runs: list[Run]) -> None:
    charts = re.findall(r'<svg role="img" aria-label="(.*?)"', to_html(compare(runs)))
    assert len(charts) == 5
    assert charts[0] == "vgg11: filled is Pareto-optimal; throughput, samples/s; peak memory, GiB"
    assert "; parameters: 0, 0.2; gradients: 0, 0.1; " in charts[1]


def test_the_console_is_watched(tmp_path: Path, browse: Callable[[str], Any]) -> None:
    assert opened("<script>undefined.name</script>", tmp_path, browse).console


def test_what_a_run_says_is_text_and_no_markup(make_run: Make, tmp_path: Path, browse: Callable[[str], Any]) -> None:
    evil = '"><img src=x onerror="console.error(1)"><b title=\''
    runs = [
        make_run(evil, plan=evil, model=evil, device=evil, mixed_precision=evil, config={evil: evil}),
        make_run("other", model=evil, device="cpu", mixed_precision=evil, eval={evil: 0.5}, config={evil: "o"}),
    ]
    page = to_html(compare(runs))
    assert "<img" not in page
    assert "title='" not in page
    seen = opened(page, tmp_path, browse)
    assert seen.console == []
    assert seen.html.count("&lt;img") >= 8


def test_the_page_names_no_other_file_or_server(runs: list[Run]) -> None:
    page = to_html(compare(runs))
    assert "default-src 'none'" in page
    assert not re.search(r'https?://|src=|href="(?!#)|url\((?!#)|@import', page)


def test_runs_that_are_not_comparable_are_warned_of(make_run: Make) -> None:
    page = to_html(compare([make_run("a", device="A100"), make_run("b", device="H200")]))
    assert '<p class="warning">not comparable: runs of vgg11 differ in device: A100 (a), H200 (b)</p>' in page


def test_only_what_differs_in_the_configurations_is_listed(make_run: Make) -> None:
    runs = [make_run(name, config={"lr": lr, "seed": 7}) for name, lr in (("a", 0.1), ("b", 0.2))]
    listed = to_html(compare(runs)).partition("Differences of the configurations")[2]
    assert "<dt>lr</dt>" in listed
    assert "seed" not in listed


def test_a_single_bare_run_makes_a_page() -> None:
    bare = Run(name="bare", path=Path("/runs/bare"), results={"model": "vgg11"}, config={}, history=History([]))
    page = to_html(compare([bare]))
    assert "1 run compared" in page
    assert "<figure" not in page


def test_forty_runs_are_numbered(make_run: Make) -> None:
    runs = [make_run(f"run{n}", memory={"peak_allocated_gib": 1 + n / 10}) for n in range(40)]
    page = to_html(compare(runs))
    assert page.count("<tr>") == 1 + 40
    assert ">40</b>" in page
