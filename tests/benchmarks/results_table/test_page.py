"""The page and the Markdown show every row; a browser sorts and filters the page."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[3] / "docs/results"


@pytest.fixture
def page(load: Callable[[str], Any]) -> Any:
    return load("result_rows.page")


@pytest.fixture
def all_rows(rows: dict[str, Any], fast_vit: Any) -> list[Any]:
    return [*rows.values(), fast_vit]


def acted(page: str, act: str, tmp_path: Path, browse: Callable[[str], Any]) -> Any:
    """The page after a script has clicked on it."""
    file = tmp_path / "index.html"
    file.write_text(page.replace("</body>", f"<script>{act}</script></body>"), encoding="utf-8")
    return browse(file.as_uri())


def table_rows(html: str) -> list[tuple[bool, str]]:
    """Whether each row is hidden, and its text, from the top."""
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    found = re.findall(r"<tr([^>]*)>(.*?)</tr>", body, re.S)
    return [("hidden" in attributes, re.sub(r"<[^>]+>", " ", cells)) for attributes, cells in found]


def test_a_row_can_be_read(page: Any, all_rows: list[Any], tmp_path: Path, browse: Callable[[str], Any]) -> None:
    seen = acted(page.results_page(all_rows), "", tmp_path, browse)
    row = next(text for _, text in table_rows(seen.html) if "segments:2" in text)
    for expected in ("vgg11", "16 x 2 ranks x 2", "A100", "666 MiB", "102 MiB", "80", "x1.25", "0.9805", "355b78c38d"):
        assert expected in row
    assert "3 runs" in seen.html
    assert seen.html.count("<em>pareto</em>") == 2  # the other model has one run
    assert seen.console == []


def test_a_heading_sorts(page: Any, all_rows: list[Any], tmp_path: Path, browse: Callable[[str], Any]) -> None:
    click = """
      const heading = [...document.querySelectorAll("thead button")].find((b) => b.textContent === "samples/s");
      heading.click();"""
    html = page.results_page(all_rows)
    rising = [text for _, text in table_rows(acted(html, click, tmp_path, browse).html)]
    assert [speed in text for speed, text in zip((" 80 ", " 100 ", " 7,000 "), rising, strict=True)] == [True] * 3
    falling = acted(html, click + "heading.click();", tmp_path, browse)
    assert [text for _, text in table_rows(falling.html)] == rising[::-1]
    assert falling.console == []


@pytest.mark.parametrize(("name", "value", "shown"), [("device", "A100", 2), ("model", "vit", 1), ("device", "", 3)])
def test_a_filter_hides_the_others(
    page: Any, name: str, value: str, shown: int, all_rows: list[Any], tmp_path: Path, browse: Callable[[str], Any]
) -> None:
    choose = f"""
      const select = document.querySelector('select[data-filter="{name}"]');
      select.value = "{value}";
      select.dispatchEvent(new Event("change", {{bubbles: true}}));"""
    seen = acted(page.results_page(all_rows), choose, tmp_path, browse)
    kept = [text for is_hidden, text in table_rows(seen.html) if not is_hidden]
    assert len(kept) == shown
    assert all(value in text for text in kept)
    assert seen.console == []


def test_every_column_of_the_results_is_seen_and_no_name_is_broken(
    tmp_path: Path, browse: Callable[[str], Any]
) -> None:
    look = """
      const card = document.querySelector("table").parentElement;
      const lines = (text) => {
        const range = document.createRange();
        range.selectNode(text);
        return range.getClientRects().length;
      };
      const names = [...document.querySelectorAll("tbody th span")].map((name) => name.firstChild);
      const broken = names.filter((name) => lines(name) > 1);
      const hidden = card.scrollWidth - card.clientWidth;
      document.title = `${names.length} names, ${broken.length} broken, ${hidden} px hidden`;"""
    seen = acted((RESULTS / "index.html").read_text(encoding="utf-8"), look, tmp_path, browse)
    assert "<title>17 names, 0 broken, 0 px hidden</title>" in seen.html


def test_markdown_has_a_table_for_each_model_and_a_link_for_each_row(page: Any, all_rows: list[Any]) -> None:
    text = page.results_markdown(all_rows)
    assert text.index("## vgg11") < text.index("## vit")
    for row in all_rows:
        assert f"(rows/{row.name}.json)" in text
    (line,) = [line for line in text.splitlines() if "segments:2" in line]
    for expected in ("666 MiB (+0.00 %)", "x1.25", "0.9805 (accuracy)", "torch 2.13.0"):
        assert expected in line


def test_what_differs_within_a_model_is_told(page: Any, rows: dict[str, Any]) -> None:
    one = rows["none"]
    other = replace(one, settings={"optimizer": "adafactor"})
    text = page.results_markdown([one, other])
    assert "optimizer adamw" in text
    assert "optimizer adafactor" in text
    assert "optimizer" not in page.results_markdown([one])


def test_what_a_row_says_is_text_and_no_markup(page: Any, rows: dict[str, Any]) -> None:
    evil = '"><img src=x onerror="console.error(1)">'
    row = replace(rows["none"], model=evil, plan=evil, device=evil, versions={"torch": evil}, git_commit=evil)
    assert "<img" not in page.results_page([row])
    assert "\\<img" in page.results_markdown([row])


def test_the_pages_are_those_of_the_rows(main: Callable[[list[str]], int], tmp_path: Path) -> None:
    """`make results` was run after the last change of a row."""
    assert main(["page", str(RESULTS / "rows"), "--to", str(tmp_path)]) == 0
    for name in ("README.md", "index.html"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8")


def test_no_page_is_made_of_impossible_rows(
    main: Callable[[list[str]], int], rows: dict[str, Any], tmp_path: Path
) -> None:
    wrong = replace(rows["none"], samples_per_s=-1.0)
    (tmp_path / f"{wrong.name}.json").write_text(wrong.to_json())
    assert main(["page", str(tmp_path), "--to", str(tmp_path)]) == 2
    assert not (tmp_path / "index.html").exists()
