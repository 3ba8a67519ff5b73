"""Strategies: every K gives a plan that covers all blocks; anything else is refused in one line."""

import json
import os

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span, plan_for, read_plan
from memsave_recipes.core.plans.plan import offloads

STACKS = [["a", "b", "c", "d", "e"], ["f", "g", "h"]]


def spans(strategy, stacks=STACKS):
    return [(span.start, span.stop, span.action.value) for span in plan_for(strategy, stacks).spans]


@pytest.mark.parametrize(
    "strategy", ["none", "full", *(f"{n}:{k}" for n in ("every", "segments") for k in range(1, 9))]
)
def test_a_plan_covers_every_block_once_and_no_span_crosses_stacks(strategy):
    plan = plan_for(strategy, STACKS)
    assert plan.blocks == tuple("abcdefgh")
    assert [i for span in plan.spans for i in range(span.start, span.stop)] == list(range(8))
    assert not any(span.start < 5 < span.stop for span in plan.spans)


def test_full_recomputes_all_and_every_starts_with_the_first():
    assert plan_for("full", STACKS).recomputed == tuple("abcdefgh")
    assert plan_for("every:3", STACKS).recomputed == ("a", "d", "g")
    assert plan_for("none", STACKS).recomputed == ()


def test_segments_differ_by_at_most_one_block_and_the_last_is_kept():
    assert spans("segments:2") == [(0, 4, "recompute"), (4, 5, "keep"), (5, 8, "keep")]
    assert spans("segments:1", [list("abc")]) == [(0, 3, "keep")]
    assert spans("segments:3", [list("abcdefg")]) == [(0, 2, "recompute"), (2, 4, "recompute"), (4, 7, "keep")]
    assert plan_for("segments:8", STACKS).recomputed == tuple("abcdefg")


def test_segments_name_the_stacks_that_they_keep():
    towers = [[f"visual.blocks.{number}" for number in range(2)], ["text.layers.0"], ["text.layers.1"]]
    kept = "segments:2: 2 of 4 blocks recomputed, in 1 span; all of text.layers kept"
    assert plan_for("segments:2", towers).describe() == kept
    assert "kept" not in plan_for("segments:4", towers).describe()


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ("kkk", "mine: no activation checkpointing"),
        ("rrk", "mine: 2 of 3 blocks recomputed, in 2 spans"),
        (
            "rso",
            "mine: 1 of 3 blocks recomputed, in 1 span; 1 recompute their cheap operators; 1 offloaded to the host",
        ),
        ("oos", "mine: 1 of 3 blocks recompute their cheap operators; 2 offloaded to the host"),
        ("khh", "mine: 2 of 3 blocks recomputed, their inputs offloaded to the host"),
    ],
)
def test_a_plan_in_words(actions, words):
    kinds = {"k": Action.KEEP, "r": Action.RECOMPUTE, "s": Action.SELECT_OPS, "o": Action.OFFLOAD}
    kinds["h"] = Action.RECOMPUTE_OFFLOAD
    each = tuple(Span(start=i, stop=i + 1, action=kinds[letter]) for i, letter in enumerate(actions))
    assert Plan(strategy="mine", blocks=tuple("abc"), spans=each).describe() == words


def test_one_action_for_all_blocks():
    assert plan_for("selective", STACKS).blocks_under(Action.SELECT_OPS) == tuple("abcdefgh")
    assert plan_for("offload", STACKS).blocks_under(Action.OFFLOAD) == tuple("abcdefgh")
    compiled = [plan_for(words, STACKS) for words in ("compiled", "compiled:0", "compiled:0.75")]
    assert [plan.ratios for plan in compiled] == [(0.3,), (0,), (0.75,)]
    assert all(plan.compiled for plan in compiled)
    assert all(plan.blocks_under(Action.COMPILE) == tuple("abcdefgh") and not plan.is_bitwise for plan in compiled)
    inputs_on_host = plan_for("full_offload", STACKS)
    assert inputs_on_host.blocks_under(Action.RECOMPUTE_OFFLOAD) == tuple("abcdefgh")
    assert inputs_on_host.offloads == (Action.RECOMPUTE_OFFLOAD,)
    assert plan_for("full", STACKS).offloads == ()
    assert Plan.from_json(inputs_on_host.to_json()) == inputs_on_host
    assert inputs_on_host.is_bitwise
    assert plan_for("selective", STACKS).is_bitwise
    assert all(Plan.from_json(plan.to_json()) == plan for plan in compiled)


def test_tiles():
    plans = [plan_for(words, STACKS) for words in ("full_tiled", "full_tiled:64")]
    assert [plan.mlp_tile_tokens for plan in plans] == [1024, 64]
    for plan in plans:
        assert plan.blocks_under(Action.RECOMPUTE_TILED) == tuple("abcdefgh")
        assert not plan.is_bitwise
        assert Plan.from_json(plan.to_json()) == plan
    assert plans[1].describe() == (
        "full_tiled:64: 8 of 8 blocks recomputed, their MLPs in tiles of 64 tokens (equal to plain within rounding, "
        "not bitwise)"
    )
    assert "mlp_tile_tokens" not in plan_for("full", STACKS).to_json()
    on_host = plan_for("full_tiled_offload:64", STACKS)
    assert on_host.blocks_under(Action.RECOMPUTE_TILED_OFFLOAD) == tuple("abcdefgh")
    assert (on_host.offloads, on_host.is_bitwise) == ((Action.RECOMPUTE_TILED_OFFLOAD,), False)
    assert Plan.from_json(on_host.to_json()) == on_host
    words = ("full", "full_tiled:64", "offload", "full_offload", "full_tiled_offload", "full_tiled_offload:64")
    assert [offloads(word) for word in words] == [False, False, True, True, True, True]
    with pytest.raises(ValueError, match="mlp_tile_tokens is None"):
        Plan(strategy="mine", blocks=plans[0].blocks, spans=plans[0].spans)
    with pytest.raises(ValueError, match="mlp_tile_tokens is 0"):
        Plan(strategy="mine", blocks=plans[0].blocks, spans=plans[0].spans, mlp_tile_tokens=0)
    with pytest.raises(InputError, match="its sizes are"):
        Plan.from_json(plans[1].to_json().replace("64,", "64.5,").replace(": 64\n", ": 64.5\n"))


def test_a_ratio_and_compiled_blocks_go_together():
    for action, ratio in ((Action.COMPILE, None), (Action.KEEP, 0.5), (Action.COMPILE, 1.5)):
        with pytest.raises(ValueError, match=rf"the ratio of {action} cannot be {ratio}"):
            Span(start=0, stop=1, action=action, ratio=ratio)


def test_a_plan_of_an_earlier_version_compiles_what_it_compiled():
    spans = [{"start": 0, "stop": 1, "action": "compile"}, {"start": 1, "stop": 2, "action": "recompute"}]
    plan = {"version": 1, "strategy": "budget", "blocks": ["a", "b"], "spans": spans, "compiled_memory_ratio": 0.5}
    read = Plan.from_json(json.dumps(plan))
    assert (read.compiled, read.compiles, read.ratios) == (False, True, (0.5,))
    assert Plan.from_json(read.to_json()) == read


@pytest.mark.parametrize(
    "strategy", ["none", "full", "segments:3", "nested:2", "offload", "full_offload", "compiled:0.7"]
)
def test_a_plan_on_compiled_layers_does_the_same_with_them(strategy):
    plan = plan_for(strategy, STACKS)
    compiled = plan.on_compiled_layers()
    assert (compiled.spans, compiled.compiled) == (plan.spans, True)
    assert Plan.from_json(compiled.to_json()) == compiled
    assert compiled.describe().endswith("; all layers compiled")


def test_selective_plans_save_a_part_of_compiled_layers_and_tiles_are_refused():
    assert plan_for("selective", STACKS).on_compiled_layers().ratios == (0.3,)
    with pytest.raises(InputError, match=r"^strategy full_tiled: compiled layers cannot recompute, MLP in tiles"):
        plan_for("full_tiled", STACKS).on_compiled_layers()


@pytest.mark.parametrize(
    "strategy",
    [
        "compiled:2",
        "compiled:x",
        "compiled:",
        "compiled:nan",
        "selective:2",
        "full_tiled:0",
        "full_tiled:",
        "full_tiled:-8",
        "budget",
        "segments:0",
        "segments:9",
        "segments:x",
        "segments:",
        "segments",
        "every:-1",
        "full:2",
        "",
        "ful",
        "every:²",
        "every:" + "9" * 5000,
    ],
)
def test_anything_else_is_one_line_that_names_the_argument(strategy):
    with pytest.raises(InputError) as refusal:
        plan_for(strategy, STACKS)
    assert str(refusal.value).startswith(f"strategy {strategy}: ")
    assert "\n" not in str(refusal.value)


def test_json_both_ways(tmp_path):
    plan = plan_for("segments:3", STACKS)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "change",
    [
        *({"version": 2}, {"blocks": 3}, {"blocks": [1, 2]}, {"strategy": 5}),
        *({"spans": [{"start": 0}]}, {"spans": [{"start": 0, "stop": 3, "action": "keep"}]}),
        *({"spans": [{"start": 0, "stop": stop, "action": "keep"}]} for stop in (10**12, 8.0, "8")),
        {"spans": [{"start": False, "stop": 8, "action": "keep"}]},
        {"blocks": ["a"], "spans": [{"start": 0, "stop": True, "action": "keep"}]},
        *({"strategy": word} for word in ("", "\x1b[31mfull", "full\n", "[bold]", "[/]", "x" * 1000)),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, change):
    content = json.loads(plan_for("full", STACKS).to_json()) | change
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"plan\.json"):
        read_plan(tmp_path / "plan.json")


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path):
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("text.json", "deep.json", "absent.json", "pipe.json"):
        with pytest.raises(InputError, match=name):
            read_plan(tmp_path / name)


def test_spans_must_cover_the_blocks():
    with pytest.raises(ValueError, match="once and in order"):
        Plan(strategy="gap", blocks=("a", "b"), spans=(Span(start=1, stop=2, action=Action.KEEP),))
    with pytest.raises(ValueError, match="start < stop"):
        Span(start=1, stop=1, action=Action.KEEP)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("segments:2", [(0, 1, "keep"), (1, 3, "recompute"), (3, 4, "keep"), (4, 5, "recompute")]),
        ("nested:1", [(0, 1, "keep"), (1, 3, "recompute_nested"), (3, 4, "keep"), (4, 5, "recompute_nested")]),
        ("every:6", [(0, 1, "keep"), (1, 2, "recompute"), (2, 3, "keep"), (3, 4, "keep"), (4, 5, "keep")]),
    ],
)
def test_blocks_without_a_backward_are_kept_and_not_counted(strategy, expected):
    found = plan_for(strategy, STACKS, idle=("a", "d"))
    assert found.blocks == tuple("abcdefgh")
    assert [(span.start, span.stop, span.action.value) for span in found.spans][: len(expected)] == expected


def test_where_nothing_has_a_backward_there_is_nothing_to_count():
    with pytest.raises(InputError, match="segments:1: no block of this model has a backward"):
        plan_for("segments:1", STACKS, idle="abcdefgh")
    assert plan_for("full", STACKS, idle="abcdefgh") == plan_for("full", STACKS)
