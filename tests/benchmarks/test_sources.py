"""Figures of the documentation name the JSON file that they come from."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
MEASURED = re.compile(r"\bx\d+\.\d\d\b|\b\d[\d,.]* (?:MiB|GiB|ms)\b")


def links_to_results(page: Path) -> list[Path]:
    """The files of docs/results that a page links to."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return [target for target in targets if RESULTS in target.parents]


def tables_of(page: Path) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_result_that_a_page_links_to_is_there_with_its_json(page: Path) -> None:
    for target in links_to_results(page):
        assert target.exists(), target
        if target.suffix == ".md" and target.name != "README.md":
            assert target.with_suffix(".json").is_file(), target


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_every_page_of_results_has_its_json(page: Path) -> None:
    assert (RESULTS / "rows").is_dir() if page.name == "README.md" else page.with_suffix(".json").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_with_a_table_of_measured_figures_links_to_results(page: Path) -> None:
    tables = [table for table in tables_of(page) if len(MEASURED.findall(table)) > 3]
    if tables and page.parent != RESULTS:
        assert links_to_results(page), f"{page.name} has a table of figures and no link to docs/results: {tables[0]}"
