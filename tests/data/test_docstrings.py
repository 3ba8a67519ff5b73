"""The built-in texts: balanced, without giveaways, with nothing of a held-out file in training."""

import re
import sys
from collections import Counter

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.text import labelled_text
from memsave_recipes.data.text.labelled_text import load_docstrings


@pytest.fixture(scope="module")
def splits():
    return load_docstrings()


def test_there_is_enough_of_every_library(splits):
    names = splits["train"].features["label"].names
    assert names == ["python", "numpy", "torch", "transformers", "sklearn", "kornia"]
    for split, fewest, most in (("train", 450, 600), ("validation", 90, 150)):
        counts = Counter(splits[split]["label"])
        assert set(counts) == set(range(len(names)))
        assert all(fewest <= count <= most for count in counts.values())


def test_no_text_names_its_library(splits):
    giveaway = re.compile(r"(?i)python|numpy|torch|transformers|sklearn|scikit-learn|kornia")
    for rows in splits.values():
        assert not [text for text in rows["text"] if giveaway.search(text)]


def test_no_text_opens_like_another_one(splits):
    openings = [" ".join(re.findall(r"\w+", text.lower())[:10]) for rows in splits.values() for text in rows["text"]]
    assert len(set(openings)) == len(openings)
    assert all(len(opening.split()) == 10 for opening in openings)


def function(i, text):
    return f'def function{i}():\n    """{text}"""\n'


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Two libraries of our own instead of the installed ones; importing them fails."""
    for library in ("alpha_made_up", "beta_made_up"):
        folder = tmp_path / library
        (folder / "tests").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise ImportError\n")
        (folder / "broken.py").write_text("def\n")
        (folder / "tests" / "test_it.py").write_text(function(0, "A test " + "of numbers " * 10))
        for number in range(40):
            texts = [
                f"{library} file {number} docstring {i}: see Numpy and np.array " + "for more " * 4 for i in range(12)
            ]
            copied = "The very same words stand in each and every one of the files."
            (folder / f"m{number}.py").write_text("".join(map(function, range(14), [*texts, copied, "Too short."])))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(labelled_text, "LIBRARIES", {"alpha_made_up": "pytest", "beta_made_up": "ruff"})
    return tmp_path


def files_of(rows):
    return Counter(re.match(r"\w+ file \d+", text).group() for text in rows["text"] if " file " in text)


def test_files_are_held_out_whole(made_up):
    splits = load_docstrings()
    train, validation = files_of(splits["train"]), files_of(splits["validation"])
    assert not train.keys() & validation.keys()
    assert len(train) + len(validation) == 80
    assert 6 <= len(validation) <= 25  # 3 of 16 on average
    assert set(train.values()) | set(validation.values()) <= {9, 10}  # of 12, and the copied one once
    texts = [*splits["train"]["text"], *splits["validation"]["text"]]
    assert sum(text.startswith("The very same words") for text in texts) <= 1
    assert all("see LIB and LIB.array" in text for text in texts if " file " in text)
    assert not [text for text in texts if text.startswith(("A test", "Too short"))]
    assert "alpha_made_up" not in sys.modules


def test_a_library_without_source_files(made_up):
    for path in (made_up / "beta_made_up").rglob("*.py"):
        path.unlink()
    with pytest.raises(InputError, match="finds no source files of beta_made_up"):
        load_docstrings()
