"""``run.log`` of a recipe: what the terminal said, from the first life to the last error line."""

import pytest
from lives import IMAGES

from memsave_recipes.run.failures import run_recipe

RECIPE = "image_classification"


def log_of(folder):
    """The lines of each life of a run."""
    lives = (folder / "run.log").read_text().split("# 20")
    return [life.splitlines()[1:] for life in lives[1:]]


def shown(capsys):
    """The lines of the terminal, as the log keeps them."""
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_log_is_the_terminal_of_each_life(train, tmp_path, capsys):
    capsys.readouterr()
    train(*IMAGES, "--save_every", "1")
    first = shown(capsys)
    train(*IMAGES, "--save_every", "1", "--resume")
    assert log_of(tmp_path / "run") == [first, shown(capsys)]
    train(*IMAGES, "--overwrite")
    assert log_of(tmp_path / "run") == [shown(capsys)]


def test_the_last_line_is_the_error(train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_recipe(lambda: train(*IMAGES, "--learning_rate", "1e20"))
    (life,) = log_of(tmp_path / "run")
    assert life[-1] == capsys.readouterr().err.splitlines()[-1]
    assert "is not finite" in life[-1]


def test_a_run_that_is_refused_before_it_begins_adds_nothing(train, refuse, tmp_path):
    assert refuse("--model", "vgg_small", "--activation_checkpointing", "segments:99")
    assert not (tmp_path / "run" / "run.log").exists()
    train(*IMAGES, output="other")
    before = (tmp_path / "other" / "run.log").read_bytes()
    with pytest.raises(SystemExit):
        run_recipe(lambda: train(*IMAGES, output="other"))
    assert (tmp_path / "other" / "run.log").read_bytes() == before
