"""The PNG is drawn for any runs, whatever they lack and whatever they are called."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memsave_recipes.tools.compare import History, Run, compare

pytest.importorskip("matplotlib")

from memsave_recipes.tools.pages.charts import write_png

Make = Callable[..., Run]


def test_a_row_of_charts_for_each_model(make_run: Make, checkpointed: Make, tmp_path: Path) -> None:
    heights = []
    for runs in ([make_run("a"), checkpointed("_b$x$")], [make_run("a"), make_run("c", model="dense", losses=())]):
        write_png(compare(runs), tmp_path / "plot.png")
        png = (tmp_path / "plot.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        heights.append(int.from_bytes(png[20:24], "big"))
    assert heights[1] == 2 * heights[0]


def test_a_chart_that_would_be_empty_is_left_out(make_run: Make, checkpointed: Make, tmp_path: Path) -> None:
    widths = []
    for runs in ([make_run("a"), checkpointed()], [make_run("a")], [make_run("a", losses=(2.0,))]):
        write_png(compare(runs), tmp_path / "plot.png")
        widths.append(int.from_bytes((tmp_path / "plot.png").read_bytes()[16:20], "big"))
    three, two, one = widths
    assert three - two == two - one > 500


def test_a_bare_run_is_no_error(tmp_path: Path) -> None:
    bare = Run(name="bare", path=Path("/runs/bare"), results={"model": "vgg11"}, config={}, history=History([]))
    write_png(compare([bare]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
