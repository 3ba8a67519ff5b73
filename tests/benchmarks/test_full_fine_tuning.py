"""The benchmark: its commands plan, and the pages have the rows that it writes."""

import json
from pathlib import Path

import pytest

from memsave_recipes.tools.cli import _parser
from memsave_recipes.tools.cli.request import read_request

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.slow
def test_state_on_the_host_frees_the_card(load, tmp_path):
    found = load("full_fine_tuning").main(["--quick", "--output_dir", str(tmp_path)])["models"]["small"]
    plain, waiting, stepped = (found[way] for way in ("AdamW", "state on the host", "step on the host"))
    assert plain["needed_bytes"] > max(waiting["needed_bytes"], stepped["needed_bytes"])
    assert plain["host_bytes"] == 0
    assert 0 < waiting["host_bytes"] < stepped["host_bytes"]


def test_the_page_has_its_rows(load):
    benchmark, page = load("full_fine_tuning"), (RESULTS / "full_fine_tuning.md").read_text(encoding="utf-8")
    found = json.loads((RESULTS / "full_fine_tuning.json").read_text(encoding="utf-8"))["models"]
    rows = [row for model, ways in found.items() for row in benchmark.rows_of(model, ways)]
    assert benchmark.harness.markdown_table(benchmark.HEADINGS, rows).strip() == page.strip()


def test_the_page_of_techniques_has_the_flags_of_each_way(load):
    benchmark, page = load("full_fine_tuning"), (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
    for way, words in (benchmark.WAYS | benchmark.LORA_WAYS).items():
        assert f"| {way} | `{' '.join(words)}` |" in page


def test_each_row_is_a_command():
    found = json.loads((RESULTS / "full_fine_tuning.json").read_text(encoding="utf-8"))["models"]
    for figures in [figures for ways in found.values() for figures in ways.values()]:
        _, *words = figures["command"].split()
        arguments, flags = _parser().parse_known_args(words)
        arguments.flags = flags
        assert read_request(arguments).task.run.block_size == 2048


def test_a_row_has_the_fastest_lora_that_its_card_holds(load):
    benchmark = load("full_fine_tuning")
    gib = {"step": 10, "large": 30, "none": 100, "LoRA": 20, "LoRA, weights on the host": 5}
    seconds = {"LoRA": 2.048, "LoRA, weights on the host": 4.096}
    ways = {
        way: {"needed_bytes": size * 2**30, "host_bytes": 0, "step_s": seconds.get(way, 8.192)}
        for way, size in gib.items()
    }
    rows = {way: (card, *times) for _, way, _, card, _, _, *times in benchmark.rows_of("8B", ways)}
    assert rows["step"] == ("12 GiB", "4.00 ms", "2.00 ms")
    assert rows["large"] == ("48 GiB", "4.00 ms", "1.00 ms")
    assert rows["none"] == ("-", "4.00 ms", "-")


def test_the_smallest_that_holds_it(load):
    smallest = load("full_fine_tuning").smallest
    assert [smallest((8, 12), gib * 2**30) for gib in (8, 8.1, 13)] == ["8 GiB", "12 GiB", "-"]
