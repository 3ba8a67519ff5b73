"""Real text that every installation has: docstrings, and the library that each comes from as its class.

The source files of the installed libraries are parsed, never imported. A model cannot just look for a library's name:
wherever any of the names stands, it is masked. Files are held out whole, so what one author wrote around one thing
stays on one side, and of all docstrings that open with the same words only the first is kept. Which docstrings there
are depends on the installed versions and on nothing else.
"""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

import datasets

from memsave_recipes.errors import InputError

# Each package with its distribution: the standard library, and requirements of setup.cfg with enough to read.
LIBRARIES = {
    "python": None,
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "sklearn": "scikit-learn",
    "kornia": "kornia",
}
NAMES = re.compile(r"(?i)pytorch|torch|numpy|\bnp\b|python|transformers|hugging ?face|scikit-learn|sklearn|kornia")
MASK = "LIB"
NOT_ITS_OWN = {"test", "tests", "testing", "site-packages", "dist-packages", "vendor", "_vendor", "externals"}
MOST_TRAIN, MOST_VALIDATION = 600, 150  # texts of a library
MOST_OF_A_FILE = 10  # otherwise a few long files would be half of numpy
FEWEST_WORDS = 10  # of a text; and that many make an opening
COLUMNS = {
    "text": datasets.Value("string"),
    "label": datasets.ClassLabel(names=list(LIBRARIES)),
    "held_out": datasets.Value("bool"),
}


def load_docstrings() -> dict[str, datasets.Dataset]:
    """The splits ``train`` and ``validation`` with the columns ``text`` and ``label``: some seconds, then cached.

    Raises:
        InputError: a library came without its source files.
    """
    for library in LIBRARIES:
        if not any(_folder(library).rglob("*.py")):
            raise InputError(f"--dataset docstrings finds no source files of {library}: pass --train_file or a Hub id")
    rows = datasets.Dataset.from_generator(
        _rows, features=datasets.Features(COLUMNS), gen_kwargs={"cache_key": _cache_key()}
    )
    train = rows.filter(lambda held_out: not held_out, input_columns="held_out")
    validation = rows.filter(lambda held_out: held_out, input_columns="held_out")
    return {"train": train.remove_columns("held_out"), "validation": validation.remove_columns("held_out")}


def _cache_key() -> str:
    """What the texts depend on: this file and the libraries' versions."""
    versions = [version(distribution) if distribution else python_version() for distribution in LIBRARIES.values()]
    return hashlib.sha256(Path(__file__).read_bytes() + repr(versions).encode()).hexdigest()


def _rows(cache_key: str) -> Iterator[dict]:
    """The texts library by library; ``datasets`` caches them by ``cache_key``."""
    openings: set[str] = set()
    for label, library in enumerate(LIBRARIES):
        wanted = {False: MOST_TRAIN, True: MOST_VALIDATION}
        for held_out, path in _files(library):
            if not wanted[held_out]:
                continue
            texts = _new_texts(path, openings)[: min(MOST_OF_A_FILE, wanted[held_out])]
            wanted[held_out] -= len(texts)
            yield from ({"text": text, "label": label, "held_out": held_out} for text in texts)


def _files(library: str) -> Iterator[tuple[bool, Path]]:
    """Whether it is held out (3 of 16 are), and the path, of each source file, in an order without meaning."""
    root = _folder(library)
    files = {}
    for path in root.rglob("*.py"):
        inside = path.relative_to(root)
        if not NOT_ITS_OWN & set(inside.parts):
            files[hashlib.sha256(f"{library}/{inside.as_posix()}".encode()).hexdigest()] = path
    for digest in sorted(files):
        yield digest[-1] in "012", files[digest]


def _folder(library: str) -> Path:
    """Where the library's source files lie; nothing is imported for it."""
    if LIBRARIES[library] is None:
        return Path(sysconfig.get_path("stdlib"))
    specification = find_spec(library)
    folders = (specification.submodule_search_locations if specification else None) or ["no such folder"]
    return Path(folders[0])


def _new_texts(path: Path, openings: set[str]) -> list[str]:
    """The docstrings of a file's functions and classes that open like none in ``openings``, which they join."""
    texts = []
    for node in ast.walk(_parse(path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = NAMES.sub(MASK, ast.get_docstring(node) or "")
        words = re.findall(r"\w+", text.lower())
        opening = " ".join(words[:FEWEST_WORDS])
        if len(words) >= FEWEST_WORDS and opening not in openings:
            openings.add(opening)
            texts.append(text)
    return texts


def _parse(path: Path) -> ast.Module:
    """Empty where this Python cannot read the file: templates, and code for other versions."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that a future Python refuses
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
