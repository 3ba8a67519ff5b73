"""The site has the layout of this repository, so a relative link leads to the same file there as on GitHub.

mkdocs takes its pages from ``docs/`` alone and names them from there. ``on_files`` names them from the top, and adds
what pages link to beside ``docs/``. Sources among these become pages that show them. Notebooks become pages by
nbconvert, with the pictures in their outputs beside them.
"""

import re
from functools import cache
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.utils import is_markdown_file
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
SOURCES = ("Dockerfile", "LICENSE", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*.py")))
NOTEBOOK = ".ipynb"
SHOWN = """---
search:
  exclude: true
---
# `{name}`

````{language}
{text}````
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every file at its path in the repository, beside those of the theme."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    of_repository = [RepositoryFile(path, config) for path in (*PAGES, *SOURCES, *files_of_docs())]
    return Files([*of_theme, *of_repository, *pictures_of_notebooks(config)])


def on_page_content(html: str, **_: object) -> str:
    """Mark the flags in cells of tables, which assets/site.css keeps in one piece."""

    def marked(found: re.Match[str]) -> str:
        return re.sub(r"--\w+", r'<span class="flag">\g<0></span>', found[0])

    return re.sub(r"<td.*?</td>", lambda cell: re.sub(r"<code>[^<]*</code>", marked, cell[0]), html, flags=re.S)


def files_of_docs() -> list[str]:
    """Paths of all files below ``docs/``, without hidden ones."""
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.glob("docs/**/*")) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]


def pictures_of_notebooks(config: MkDocsConfig) -> list[File]:
    """Files that the pages of notebooks show."""
    of_notebooks = {path: notebook_page(path)[1] for path in files_of_docs() if path.endswith(NOTEBOOK)}
    return [
        File.generated(config, str(PurePosixPath(path).with_name(name)), content=content)
        for path, pictures in of_notebooks.items()
        for name, content in pictures.items()
    ]


@cache
def notebook_page(path: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures in its outputs by name, beside the page."""
    resources = {"unique_key": PurePosixPath(path).stem, "output_files_dir": ""}
    page, written = MarkdownExporter().from_filename(str(ROOT / path), resources=resources)
    return page, written["outputs"]


class RepositoryFile(File):
    """A file at its path in the repository; Markdown, notebooks and sources become pages."""

    def __init__(self, path: str, config: MkDocsConfig) -> None:
        super().__init__(path, str(ROOT), config.site_dir, use_directory_urls=False, dest_uri=destination_of(path))

    def is_documentation_page(self) -> bool:
        """Whether it becomes a page; any other file is copied."""
        return is_page(self.src_uri)

    @property
    def content_string(self) -> str:
        """The Markdown of the page."""
        if self.src_uri.endswith(NOTEBOOK):
            return notebook_page(self.src_uri)[0]
        text = super().content_string
        if self.src_uri not in SOURCES:
            return text
        language = {".py": "python"}.get(PurePosixPath(self.src_uri).suffix, "text")
        return SHOWN.format(name=self.src_uri, language=language, text=text)


def is_page(path: str) -> bool:
    """Whether the file at ``path`` becomes a page."""
    return path in SOURCES or path.endswith(NOTEBOOK) or is_markdown_file(path)


def destination_of(path: str) -> str:
    """Where it is in the site. A README below the top is no index: one that is HTML may stand beside it."""
    if path == "README.md":
        return "index.html"
    if path in SOURCES:
        return f"{path}.html"
    return str(PurePosixPath(path).with_suffix(".html")) if is_page(path) else path
