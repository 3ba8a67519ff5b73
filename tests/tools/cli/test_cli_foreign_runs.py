"""``memsave compare`` shows the runs that can be read, whatever lies beside them and whatever is written in them."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memsave_recipes.tools.cli import main

HOSTILE = "\x1b[31mred\x1b]52;c;aGk=\x07\r\x9b2J\u202egpj\u2066\u200b\nforged: all is well\ud800"
RESULTS = {
    "model": "vgg11",
    "plan": "none",
    "train_loss": 1.5,
    **{"global_batch_size": 64, "micro_batch_size": 16, "num_processes": 2, "accumulation_steps": 2, "steps": 2},
    "eval": {"loss": 0.5, "accuracy": 0.98},
    "memory": {"peak_allocated_gib": 1.0, "saved_for_backward_gib": 0.5, "source": "one step", "breakdown": {}},
    "perf": {"samples_per_sec": 100.0, "tokens_per_sec": 1.0, "mfu_pct": 40.0, "train_time_s": 50.0},
}
CONFIG = {"seed": 7, "dataset": "digits", "environment": {"device": "cpu", "versions": {"torch": "2.13"}}}
ROWS = [{"step": n, "train/loss": 2.0 / n, "eval/loss": 3.0, "progress/samples_seen": 64 * n} for n in (1, 2)]


def write_run(folder: Path, results: Any = RESULTS, config: Any = CONFIG, rows: Any = ROWS) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compared(folder: Path, *flags: str) -> tuple[str, str]:
    """What ``memsave compare`` prints and writes, and what it says of runs that it skips; it must succeed."""
    files = {flag: folder.parent / f"out.{flag}" for flag in ("markdown", *flags)}
    words = [word for flag, file in files.items() for word in (f"--{flag}", str(file))]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["compare", str(folder), *words]) == 0
    texts = [file.read_bytes().decode().replace("\r\n", "\n") for flag, file in files.items() if flag != "png"]
    return "\n".join([out.getvalue(), *texts]), err.getvalue()


def assert_harmless(text: str) -> None:
    assert [line for line in text.split("\n") if not line.isprintable()] == []
    assert "\nforged" not in text


def test_no_text_of_a_run_commands_the_terminal_or_forges_a_line(tmp_path: Path) -> None:
    results = RESULTS | {"model": HOSTILE, "plan": HOSTILE, "memory": RESULTS["memory"] | {"source": HOSTILE}}
    results["eval"] = {HOSTILE: 0.5}
    config = {HOSTILE: HOSTILE, "dataset": HOSTILE, "environment": {"device": HOSTILE}}
    name = HOSTILE.replace("\ud800", "").replace("/", "")
    write_run(tmp_path / "runs" / name, results, config)
    write_run(tmp_path / "runs" / "b" / name, results | {"plan": f"{HOSTILE}2"}, config | {"device": "x"})
    broken = write_run(tmp_path / "runs" / f"c{name}")
    (broken / "results.json").unlink()
    text, skipped = compared(tmp_path / "runs", "html")
    assert_harmless(text)
    assert_harmless(skipped)
    assert r"\x1b[31mred" in text.replace("\n", "")
    assert len(skipped.splitlines()) == 1


def too_large(folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps(RESULTS | {"train_loss": 10**400}))


def too_large_in_a_row(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 10**400}))


def too_deep(name: str, levels: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text('{"model":' * levels + "1" + "}" * levels)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        too_large,
        too_large_in_a_row,
        *(too_deep(name, levels) for name in ("results.json", "config.json") for levels in (100_000, 3_000, 500)),
        too_deep("metrics.jsonl", 100_000),  # from 3.14 on Python reads 3,000, and none of them is a figure
    ],
)
def test_a_broken_run_is_skipped_by_name_and_the_others_are_shown(damage: Callable, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "good")
    broken = write_run(tmp_path / "runs" / "spoilt")
    damage(broken)
    text, skipped = compared(tmp_path / "runs")
    assert skipped.startswith(f"skipped: {broken} has a damaged ")
    assert skipped.count("\n") == 1
    assert "good" in text
    assert "spoilt" not in text


NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 5e-324, 1e-300, 1e15, 1e99, 1e308, -1e308, 2**63, 10**100, 10**307, 10**400]),
)
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", HOSTILE, "NaN", "-Infinity", "[/]", "=1+1", "$x$", "vgg11"])
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


def changed(content: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """``content`` with anything in some places, also deep in it, and some places missing."""
    places = {
        key: st.one_of(st.just(value), ANYTHING, changed(value) if isinstance(value, dict) else NUMBERS)
        for key, value in content.items()
    }
    return st.fixed_dictionaries({}, optional=places)


FUZZED_RUN = st.tuples(
    st.one_of(changed(RESULTS), ANYTHING),
    st.one_of(changed(CONFIG), ANYTHING),
    st.lists(st.one_of(changed(ROWS[0]), changed(ROWS[1]), ANYTHING), max_size=4),
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def assert_shown_beside_a_good_one(fuzzed: list[tuple[Any, Any, Any]], *flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        write_run(runs / "good")
        for number, (results, config, rows) in enumerate(fuzzed):
            write_run(runs / f"fuzzed{number}", results, config, rows)
        text, skipped = compared(runs, *flags)
        assert "good" in text
        assert_harmless(text)
        for number in range(len(fuzzed)):
            assert (f"fuzzed{number}" in text) is not (f"fuzzed{number} " in skipped)
        shutil.rmtree(runs)


@settings(max_examples=60, derandomize=True, **QUIET)
@given(st.lists(FUZZED_RUN, min_size=1, max_size=2))
def test_any_json_is_shown_or_skipped(fuzzed: list) -> None:
    assert_shown_beside_a_good_one(fuzzed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, **QUIET)
@given(st.lists(FUZZED_RUN, min_size=1, max_size=3))
def test_more_json_is_shown_or_skipped(fuzzed: list) -> None:
    assert_shown_beside_a_good_one(fuzzed)


@settings(max_examples=5, derandomize=True, **QUIET)
@given(st.lists(FUZZED_RUN, min_size=1, max_size=2))
def test_any_json_makes_a_page_or_is_skipped(fuzzed: list) -> None:
    assert_shown_beside_a_good_one(fuzzed, "html")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100, **QUIET)
@given(st.lists(FUZZED_RUN, min_size=1, max_size=2))
def test_any_json_is_drawn_or_skipped(fuzzed: list) -> None:
    assert_shown_beside_a_good_one(fuzzed, "html", "png")
