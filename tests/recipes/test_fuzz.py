"""Command lines and presets of every kind: each does what was asked for, or ends in one line and costs nothing."""

import itertools
import shutil
from collections import Counter

import pytest
from fuzzing.commands import memsave_line
from fuzzing.files import DONE_RUN, SMALL_MODEL, write_files
from fuzzing.lines import recipe_line, single_lines
from fuzzing.programs import NAMES, end_of_program
from fuzzing.property import end_of
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

FEW = (0, 6)  # a seed and how many lines
MANY = pytest.param(1, 100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.fixture(scope="module")
def files(run_program, tmp_path_factory):
    """What the lines may name, with a run that is done and a small model."""
    folder = tmp_path_factory.mktemp("fuzz") / "f"
    write_files(folder)
    for program, words, made in (
        ("image_classification", DONE_RUN, "done"),
        ("language_modeling", SMALL_MODEL, "run_of_small"),
    ):
        end = end_of_program(run_program, program, [*words, "--output_dir", made], folder)
        assert end.code == 0, end.err
    shutil.move(folder / "run_of_small" / "final", folder / "small")
    return folder


@pytest.mark.parametrize(("first", "num_lines"), [FEW, MANY])
@pytest.mark.parametrize("program", [*NAMES, "memsave"])
def test_every_line_runs_or_ends_in_one_line(run_program, files, tmp_path, program, first, num_lines):
    codes, numbers = Counter(), itertools.count()

    @seed(first)
    @settings(
        max_examples=num_lines,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # the first failure is small enough to be read, and another try takes a second
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True), st.text(st.characters(exclude_characters="\0", codec="utf-8")))
    def check(random, text):
        line = memsave_line(random, text) if program == "memsave" else recipe_line(program, random, text)
        folder = tmp_path / str(next(numbers))
        codes[end_of(line, run_program, folder, files).code] += 1
        shutil.rmtree(folder)

    check()
    assert codes.total() == num_lines
    assert codes[0] >= num_lines / 8, codes
    assert codes[2] >= num_lines / 8, codes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", NAMES)
def test_every_value_by_itself(run_program, files, tmp_path, program):
    for number, line in enumerate(single_lines(program)):
        folder = tmp_path / str(number)
        end_of(line, run_program, folder, files)
        shutil.rmtree(folder)
