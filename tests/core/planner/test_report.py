"""The table of a choice: bars that add up, the chosen row marked, the best of each micro-batch."""

from dataclasses import replace

import pytest
from chains import block, option

from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.planner.budget import Forecast, StaticMemory
from memsave_recipes.core.planner.search import Candidate, Choice
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import MIB
from memsave_recipes.tools.fit.frontier import points_of
from memsave_recipes.tools.pages.choice import BAR_COLUMNS, bar, best_rows, grouped_parts, show_choice

BATCH = 32
WEIGHTS, STATE, CONTEXT = 3 * MIB, 6 * MIB, 5 * MIB


def candidate(size: int, strategy: str, budget_bytes: int, loss: str | None = None) -> Candidate:
    keep = option(saved=size * MIB, forward=2 * size * MIB, backward=size * MIB, saves="i")
    costs = {"seconds": 0.001 * size, "output": size * MIB // 4, "gradient": MIB}
    blocks = tuple(block(f"block{n}", keep, **costs) for n in range(3))
    chain = Chain(blocks=blocks, resident_bytes=WEIGHTS + STATE + size * MIB // 8, gradients_resident=size < BATCH)
    return Candidate(
        layout=BatchLayout.of(BATCH, size, 1),
        loss=loss,
        forecast=Forecast(plan=plan_for(strategy, [chain.decided_names]), chain=chain),
        weights_bytes=WEIGHTS,
        static=StaticMemory(state_bytes=STATE),
        overheads={"CUDA context": CONTEXT},
        budget_bytes=budget_bytes,
    )


def choice(budget_bytes: int, losses: tuple[str | None, ...] = (None,)) -> Choice:
    sizes = (1, 2, 4, 8, 16, 32)
    words = ("none", "full", "segments:2")
    return Choice(
        candidates=tuple(candidate(n, word, budget_bytes, loss) for n in sizes for loss in losses for word in words)
    )


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith(start)]


def test_the_parts_of_a_bar_are_all_that_is_needed() -> None:
    for one in choice(80 * MIB).candidates:
        parts = grouped_parts(one)
        assert sum(parts.values()) == one.needed_bytes
        assert parts["overheads"] == CONTEXT + one.forecast.reserve_bytes
        assert min(parts.values()) >= 0


@pytest.mark.parametrize("size", [1, 8, 32])
def test_a_bar_is_as_long_as_its_share_and_says_where_it_is_cut(size: int) -> None:
    one = candidate(size, "none", MIB)
    assert len(bar(one, one.needed_bytes).plain) == BAR_COLUMNS
    assert abs(len(bar(one, 2 * one.needed_bytes).plain) - BAR_COLUMNS / 2) <= 1
    cut = bar(one, one.needed_bytes // 2).plain
    assert len(cut) == BAR_COLUMNS + 1
    assert cut.endswith(">")


def test_letters_are_in_proportion() -> None:
    text = bar(candidate(1, "none", MIB), 24 * MIB).plain  # a letter a MiB
    assert (text.count("P"), text.count("S")) == (3, 6)


def test_one_row_is_marked_and_what_is_too_large_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    found = choice(80 * MIB)
    chosen = found.chosen
    assert chosen is not None
    show_choice(found)
    out = capsys.readouterr().out
    (marked,) = lines_of(out, "→")
    assert f"{chosen.layout.micro_batch_size} x {chosen.layout.accumulation_steps}" in marked
    assert chosen.strategy in marked
    assert "no, +" in out
    assert out.count("predicted peak") == 1
    assert lines_of(out, "+ CUDA context 5 MiB: assumed")
    assert lines_of(out, "+ reserve")
    assert max(map(len, out.splitlines()[:20])) <= 120


def test_of_each_micro_batch_the_fastest_that_fits_is_shown() -> None:
    found = choice(80 * MIB)
    rows = best_rows(found)
    assert len(rows) < len(found.candidates)
    assert {one.layout for one in rows} == {one.layout for one in found.candidates}
    assert any(one is found.chosen for one in rows)
    for layout in {one.layout for one in rows} - {found.chosen.layout if found.chosen else None}:
        (row,) = [one for one in rows if one.layout == layout]
        others = [one for one in found.candidates if one.layout == layout]
        if row.fits:
            assert row.step_s == min(one.step_s for one in others if one.fits)
        else:
            assert row.needed_bytes == min(one.needed_bytes for one in others)


def test_all_of_them_are_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    found = choice(80 * MIB)
    show_choice(found)
    assert "candidates" in capsys.readouterr().out
    show_choice(found, all_rows=True, remarks=["a remark"])
    out = capsys.readouterr().out
    assert sum(" x " in line and ("yes" in line or "no, +" in line) for line in out.splitlines()) == 18
    assert "of 18 candidates" not in out
    assert "a remark" in out.splitlines()


def test_the_loss_is_a_column_only_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    show_choice(choice(80 * MIB))
    assert "loss" not in capsys.readouterr().out.splitlines()[1]
    show_choice(choice(80 * MIB, losses=("full", "chunked")))
    out = capsys.readouterr().out
    assert "loss" in out.splitlines()[1]
    assert "chunked" in out


def test_the_host_is_a_column_and_a_line_where_something_is_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    show_choice(choice(80 * MIB))
    assert "host" not in capsys.readouterr().out
    plain = candidate(8, "none", 80 * MIB)
    chain = plain.forecast.chain
    moves = replace(chain.blocks[0].options[0], action=Action.OFFLOAD, saved_bytes=0, saves_input=False)
    blocks = tuple(replace(block, options=(*block.options, moves)) for block in chain.blocks)
    forecast = Forecast(plan=plan_for("offload", [chain.decided_names]), chain=replace(chain, blocks=blocks))
    show_choice(Choice(candidates=(replace(plain, forecast=forecast, host=Host(64 * MIB)), plain)))
    out = capsys.readouterr().out
    assert "host" in out.splitlines()[1]
    (row,) = [line for line in out.splitlines() if " x " in line and "offload" in line]
    assert "20.2 MiB" in row  # 8 MiB of each block but the last, the 2 MiB between them, and an eighth
    assert max(map(len, out.splitlines()[:8])) <= 120


def test_a_single_candidate_needs_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_choice(Choice(candidates=(candidate(4, "full", 200 * MIB),)))
    out = capsys.readouterr().out
    assert "micro x acc." not in out
    assert out.count("predicted peak") == 1


def test_pareto_optimal_is_what_nothing_beats_in_as_little_memory() -> None:
    points = points_of(choice(80 * MIB).candidates)
    optimal = [point.candidate for point in points if point.is_optimal]
    for one in (point.candidate for point in points):
        beaten = any(
            other.needed_bytes <= one.needed_bytes
            and other.samples_per_s >= one.samples_per_s
            and (other.needed_bytes, other.samples_per_s) != (one.needed_bytes, one.samples_per_s)
            for other in (point.candidate for point in points)
        )
        assert not (beaten and one in optimal)
        assert beaten or any(
            (other.needed_bytes, other.samples_per_s) == (one.needed_bytes, one.samples_per_s) for other in optimal
        )


def test_twins_are_one_pareto_optimal_point() -> None:
    one = candidate(4, "none", 80 * MIB)
    assert sum(point.is_optimal for point in points_of([one, replace(one)])) == 1


def test_a_plan_that_keeps_everything_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = candidate(8, "none", 80 * MIB)
    blocks = tuple(replace(one, name=f"b{n}", output_bytes=n) for n, one in enumerate(found.forecast.chain.blocks))
    chain = replace(found.forecast.chain, blocks=blocks)
    plan = plan_for("none", [chain.decided_names])
    show_choice(Choice(candidates=(replace(found, forecast=Forecast(plan=plan, chain=chain)),)))
    assert len(lines_of(capsys.readouterr().out, "b0 - b2 (3)")) == 1
