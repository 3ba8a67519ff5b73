"""The benchmark: its commands plan, and the page has the rows that it writes."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def test_state_on_the_host_frees_the_card(load, tmp_path):
    found = load("full_fine_tuning").main(["--quick", "--output_dir", str(tmp_path)])["models"]["small"]
    plain, waiting, stepped = (found[way] for way in ("AdamW", "state on the host", "step on the host"))
    assert plain["needed_bytes"] > max(waiting["needed_bytes"], stepped["needed_bytes"])
    assert plain["host_bytes"] == plain["awaited_s"] == 0
    assert 0 < waiting["host_bytes"] < stepped["host_bytes"]


def test_the_page_has_its_rows(load):
    benchmark, page = load("full_fine_tuning"), (ROOT / "docs" / "full_fine_tuning.md").read_text(encoding="utf-8")
    found = json.loads((RESULTS / "full_fine_tuning.json").read_text(encoding="utf-8"))["models"]
    rows = [benchmark.row_of(model, way, figures) for model, ways in found.items() for way, figures in ways.items()]
    assert benchmark.harness.markdown_table(benchmark.HEADINGS, rows).strip() in page
    for way, words in benchmark.WAYS.items():
        assert f"| {way} | `{' '.join(words)}` |" in page


def test_the_smallest_that_holds_it(load):
    smallest = load("full_fine_tuning").smallest
    assert [smallest((8, 12), gib * 2**30) for gib in (8, 8.1, 13)] == ["8 GiB", "12 GiB", "-"]
