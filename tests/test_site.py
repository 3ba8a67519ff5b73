"""The site of `make site`: built strictly, it holds every page and public name, and loads nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import memsave_recipes as memsave

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")])


def build(root, folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


class Page(HTMLParser):
    """The links of a page, what it loads, and the anchors on it."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.navigation, self.loads, self.anchors = path, set(), set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        if tag == "a" and (target := values.get("href")):
            self.links.add(target)
            if "md-nav__link" in (values.get("class") or ""):
                self.navigation.add(self.target(target)[0])
        elif tag != "a":
            self.loads |= {value for name in ("src", "href") if (value := values.get(name))}

    def target(self, link):
        """The file and the anchor that a link of this page leads to."""
        parts = urlsplit(link)
        path = self.path.parent / unquote(parts.path) if parts.path else self.path
        return Path(os.path.normpath(path)), unquote(parts.fragment)


class Site:
    def __init__(self, folder):
        self.folder = folder

    @cached_property
    def pages(self):
        return {path: Page(path) for path in self.folder.rglob("*.html") if path.name != "404.html"}

    def path_of(self, source):
        return self.folder / source.relative_to(ROOT).with_suffix(".html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return Site(folder)


def test_every_page_is_in_the_navigation(site):
    """All in one test: in another process it would build the site again."""
    shown = site.pages[site.folder / "index.html"].navigation
    assert [source for source in PAGES if site.path_of(source) not in shown] == []


def test_links_and_anchors_lead_somewhere(site):
    broken = []
    for page in site.pages.values():
        for link in page.links | page.loads:
            if urlsplit(link).scheme:
                continue
            path, anchor = page.target(link)
            if not path.is_file() or (anchor and path in site.pages and anchor not in site.pages[path].anchors):
                broken.append((page.path.relative_to(site.folder).as_posix(), link))
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = {link for page in site.pages.values() for link in page.loads if not link.startswith("data:")}
    assert loaded
    assert {link for link in loaded if urlsplit(link).netloc} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.folder.rglob("*.css")]
    assert not [url for style in styles for url in re.findall(r"url\(\s*[\"']?(?:https?:)?//[^)]*\)", style)]


def test_every_public_name_is_in_the_reference(site):
    text = (site.folder / "docs" / "api.html").read_text(encoding="utf-8")
    shown = re.findall(r'doc-object doc-(?:function|class)">\s*<h3 id="memsave_recipes\.(?:\w+\.)*(\w+)"', text)
    assert set(memsave.__all__) <= set(shown)


def test_sources_are_shown_where_pages_link_to_them(site):
    text = (site.folder / "recipes" / "image_classification.py.html").read_text(encoding="utf-8")
    assert "def main" in re.sub("<[^>]*>", "", text)


def test_flags_in_tables_stay_in_one_piece(site):
    text = (site.folder / "docs" / "planner.html").read_text(encoding="utf-8")
    assert '<code><span class="flag">--memory_budget_gib</span> F</code>' in text


def test_the_search_needs_no_server(site, browse):
    seen = browse(f"{(site.folder / 'index.html').as_uri()}?q=bitwise_topology")
    results = re.search(r"md-search-result__list.*?</ol>", seen.html, re.S)[0]
    assert "recipes.html" in results
    assert seen.console == []


def test_lost_pages_and_broken_links_fail(tmp_path):
    shutil.copy(ROOT / "mkdocs_hooks.py", tmp_path)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path / "whole.yml")
    pages = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "Dockerfile", "docs/found.md"]
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: whole.yml\nnav: {pages}\n")
    (tmp_path / "docs").mkdir()
    for page in pages:
        (tmp_path / page).write_text("# Found\n")
    (tmp_path / "docs" / "lost.md").write_text("[a](nowhere.md) [b](found.md#nowhere) [c](../tests/nowhere.py)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for complaint in ("docs/lost.md", "'nowhere.md'", "'found.md#nowhere'", "'../tests/nowhere.py'"):
        assert complaint in done.stderr
    assert "Aborted with 4 warnings in strict mode!" in done.stdout + done.stderr
