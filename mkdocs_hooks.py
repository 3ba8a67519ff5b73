"""The site has the layout of this repository, so a relative link leads to the same file there as on GitHub.

mkdocs takes its pages from ``docs/`` alone and names them from there. ``on_files`` names them from the top, and adds
what pages link to beside ``docs/``. Sources among these become pages that show them.
"""

from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.utils import is_markdown_file

ROOT = Path(__file__).parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
SOURCES = ("LICENSE", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*.py")))
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
    return Files([*of_theme, *(RepositoryFile(path, config) for path in (*PAGES, *SOURCES, *files_of_docs()))])


def files_of_docs() -> list[str]:
    """Paths of all files below ``docs/``, without hidden ones."""
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.glob("docs/**/*")) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]


class RepositoryFile(File):
    """A file at its path in the repository; Markdown and sources become pages."""

    def __init__(self, path: str, config: MkDocsConfig) -> None:
        super().__init__(path, str(ROOT), config.site_dir, use_directory_urls=False, dest_uri=destination_of(path))

    def is_documentation_page(self) -> bool:
        """Whether it becomes a page; any other file is copied."""
        return is_page(self.src_uri)

    @property
    def content_string(self) -> str:
        """The Markdown of the page."""
        text = super().content_string
        if self.src_uri not in SOURCES:
            return text
        language = {".py": "python"}.get(PurePosixPath(self.src_uri).suffix, "text")
        return SHOWN.format(name=self.src_uri, language=language, text=text)


def is_page(path: str) -> bool:
    """Whether the file at ``path`` becomes a page."""
    return path in SOURCES or is_markdown_file(path)


def destination_of(path: str) -> str:
    """Where it is in the site. A README below the top is no index: one that is HTML may stand beside it."""
    if path == "README.md":
        return "index.html"
    if path in SOURCES:
        return f"{path}.html"
    return str(PurePosixPath(path).with_suffix(".html")) if is_page(path) else path
