"""Gathered weights and reduced gradients of a rank in shards, moment by moment, by hand."""

from dataclasses import replace

import pytest
from chains import block, option

from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.plan import Action, plan_for
from memsave_recipes.core.plans.shards import ShardedUnit, Shards, communication_s, peak_in_shards, timeline_in_shards
from memsave_recipes.core.plans.simulate import keep_all

KEEP = option(saved=100, forward=110, backward=50)
RESIDENT = 1000
UNITS = {"a": 40, "b": 60, "head": 20}


def part(name, stack=0):
    return block(name, KEEP, stack=stack, output=10, gradient=UNITS[name])


CHAIN = Chain(blocks=(part("a"), part("b"), part("head", None)), resident_bytes=RESIDENT)
PLAN = keep_all(CHAIN)


def unit(name, **changes):
    size = UNITS.get(name, 8)
    parts = frozenset({name} & UNITS.keys())
    return replace(ShardedUnit(parts=parts, gathered_bytes=size, reduced_bytes=size), **changes)


SHARDS = Shards(units=(unit("a"), unit("b"), unit("head", stays=True)), num_ranks=2)


def moments(shards=SHARDS, plan=PLAN):
    points = timeline_in_shards(CHAIN, plan, shards)
    return [(point.phase, point.block, point.gradients_bytes, point.traffic_bytes) for point in points]


def test_every_moment_of_a_step():
    assert moments() == [
        ("gathering", "a", 0, 80),
        ("forward", "a", 0, 80),  # the buffer, and its weights
        ("gathering", "b", 0, 40 + 120),  # the buffer of a is freed behind it
        ("forward", "b", 0, 120),
        ("gathering", "head", 0, 60 + 40),
        ("forward", "head", 0, 40),
        ("backward", "head", 0, 20 + 60),  # it has stayed, and b is ahead
        ("reduction", "head", 20, 60 + 20),
        ("gathering", "b", 10, 60 + 60 + 20),
        ("backward", "b", 10, 60 + 40 + 20),
        ("reduction", "b", 10 + 60, 40 + 60),
        ("gathering", "a", 10 + 30, 40 + 40 + 60),
        ("backward", "a", 10 + 30, 40 + 60),
        ("reduction", "a", 10 + 30 + 40, 40),  # its input needs no gradient, so at the end
        ("optimizer", "", 10 + 30 + 20, 0),
    ]


def test_the_buffer_before_may_be_freed_when_the_next_is_filled():
    units = tuple(replace(one, frees_last=True) for one in SHARDS.units)
    assert moments(replace(SHARDS, units=units))[:9] == [
        ("gathering", "a", 0, 40),
        ("gathering", "a", 0, 80),
        ("forward", "a", 0, 80),
        ("gathering", "b", 0, 40 + 60),  # the buffers of both
        ("gathering", "b", 0, 120),
        ("forward", "b", 0, 120),
        ("gathering", "head", 0, 60 + 20),
        ("gathering", "head", 0, 40),
        ("forward", "head", 0, 40),
    ]


def test_weights_have_memory_of_their_own_and_buffers_do_not():
    units = tuple(replace(one, rounding_bytes=1) for one in SHARDS.units)
    assert moments(replace(SHARDS, units=units))[:4] == [
        ("gathering", "a", 0, 81),
        ("forward", "a", 0, 81),
        ("gathering", "b", 0, 40 + 121),
        ("forward", "b", 0, 121),
    ]


def test_what_else_is_live_when_weights_and_gradients_travel():
    live = {
        (point.phase, point.block): point.total_bytes - RESIDENT - point.gradients_bytes - point.traffic_bytes
        for point in timeline_in_shards(CHAIN, PLAN, SHARDS)
    }
    assert live["gathering", "head"] == 200 + 10  # saved by a and b, and its input
    assert live["reduction", "head"] == 200 + 10  # with the gradient of its input
    assert live["reduction", "b"] == 100 + 10
    assert live["reduction", "a"] == 0


def test_the_root_stays_and_is_reduced_last():
    found = moments(replace(SHARDS, units=(unit("root"), *SHARDS.units)))
    assert found[0] == ("gathering", "a", 0, 16)
    assert found[1] == ("gathering", "a", 0, 2 * 8 + 80)
    assert ("backward", "b", 10, 60 + 40 + 20 + 8) in found
    assert found[-3:-1] == [("reduction", "the root", 40 + 40, 8 + 40), ("reduction", "a", 40 + 40 + 4, 40)]


def test_embeddings_beside_others_are_reduced_last():
    beside = replace(unit("b"), takes_gradient=False)
    found = moments(replace(SHARDS, units=(SHARDS.units[0], beside, SHARDS.units[2])))
    assert found[-5:] == [
        ("gathering", "a", 10 + 60, 60 + 40 + 40 + 20),
        ("backward", "a", 10 + 60, 60 + 40 + 20),
        ("reduction", "a", 10 + 60 + 40, 60 + 40),
        ("reduction", "b", 10 + 60 + 20, 60),
        ("optimizer", "", 10 + 30 + 20, 0),
    ]


def test_frozen_weights_are_gathered_and_not_reduced():
    frozen = replace(unit("b"), reduced_bytes=0)
    found = moments(replace(SHARDS, units=(SHARDS.units[0], frozen, SHARDS.units[2])))
    assert ("reduction", "b") not in {one[:2] for one in found}
    assert ("gathering", "a", 10 + 60, 40 + 40) in found  # the chain says that it has a gradient of 60


def test_a_copy_of_gradients_that_the_ranks_do_not_divide():
    uneven = replace(unit("b"), copied_bytes=64)
    found = moments(replace(SHARDS, units=(SHARDS.units[0], uneven, SHARDS.units[2])))
    assert ("reduction", "b", 10 + 60, 40 + 60 + 64) in found


def test_accumulated_shards_are_resident_but_for_those_of_replicas():
    assert moments(replace(SHARDS, accumulates=True))[-2:] == [("reduction", "a", 40, 40), ("optimizer", "", 0, 0)]
    of_groups = moments(replace(SHARDS, accumulates=True, num_replicas=2))
    assert of_groups[-2:] == [("reduction", "a", 10 + 30 + 40, 40), ("optimizer", "", 0, 0)]


@pytest.mark.parametrize(("leaving_bytes", "kept_bytes"), [(100, 10 + 30 + 20), (5, 5 + 30 + 20)])
def test_gradients_that_leave_are_those_of_two_units_and_a_few_more(leaving_bytes, kept_bytes):
    found = moments(replace(SHARDS, leaving_bytes=leaving_bytes))
    assert found[-2:] == [("reduction", "a", 10 + 30 + 40, 40), ("optimizer", "", kept_bytes, 0)]


WHOLE = 40 + 60 + 20  # all gradients
UNREDUCED = replace(SHARDS, num_unreduced=1)


def test_gradients_stay_whole_until_the_last_micro_batch_reduces_them():
    found = moments(UNREDUCED)
    assert found[:10] == [
        *moments()[:7],  # the forward, and the backward of the head
        ("gathering", "b", 20, 60 + 60),  # nothing has been reduced
        ("backward", "b", 20, 60 + 40),
        ("gathering", "a", 20 + 60, 40 + 40),
    ]
    assert found[10] == ("backward", "a", 20 + 60, 40)
    assert found[11:] == [
        *((phase, block, WHOLE, traffic) for phase, block, _, traffic in moments()[:7]),
        ("reduction", "head", WHOLE, 60 + 20),
        ("gathering", "b", 40 + 60 + 10, 60 + 60 + 20),
        ("backward", "b", 40 + 60 + 10, 60 + 40 + 20),
        ("reduction", "b", 40 + 60 + 10, 40 + 60),
        ("gathering", "a", 40 + 10 + 30, 40 + 40 + 60),
        ("backward", "a", 40 + 10 + 30, 40 + 60),
        ("reduction", "a", 40 + 10 + 30, 40),
        ("optimizer", "", 10 + 30 + 20, 0),
    ]


def test_micro_batches_between_the_first_and_the_last_add_to_whole_gradients():
    first, last = moments(UNREDUCED)[:11], moments(UNREDUCED)[11:]
    between = [(phase, block, WHOLE, traffic) for phase, block, _, traffic in first]
    assert moments(replace(SHARDS, num_unreduced=2)) == [*first, *between, *last]
    assert moments(replace(SHARDS, num_unreduced=7)) == [*first, *between, *last]


def test_a_new_gradient_is_gone_when_it_has_been_added():
    made = replace(KEEP, accumulated_bytes=30)
    chain = replace(CHAIN, blocks=tuple(replace(one, options=(made,)) for one in CHAIN.blocks))
    before, after = (
        [point for point in timeline_in_shards(one, PLAN, UNREDUCED) if point.phase == "backward"]
        for one in (CHAIN, chain)
    )
    assert [one.own_bytes - other.own_bytes for one, other in zip(before, after, strict=True)] == [0] * 3 + [30] * 3


def test_the_gradient_of_a_tied_weight_waits_for_its_other_use():
    head = replace(CHAIN.blocks[2], tied_gradient_bytes=20)
    points = list(timeline_in_shards(replace(CHAIN, blocks=(*CHAIN.blocks[:2], head)), PLAN, UNREDUCED))
    waiting = [one.gradients_bytes - two[2] for one, two in zip(points, moments(UNREDUCED), strict=True)]
    assert waiting == [0] * 18 + [20] * 6 + [0] * 2


def test_layers_that_recompute_together_are_gathered_once():
    plan = plan_for("segments:2", [["a", "b"]])
    both = ShardedUnit(parts=frozenset("ab"), gathered_bytes=100, reduced_bytes=100)
    joint = replace(plan, spans=(replace(plan.spans[0], stop=2, action=Action.RECOMPUTE),))
    found = moments(replace(SHARDS, units=(both, SHARDS.units[2])), joint)
    assert [one for one in found if one[0] in ("recomputation", "backward")][1:] == [
        ("recomputation", "a", 10, 100 + 20),
        ("recomputation", "b", 10, 100 + 20),
        ("backward", "b", 10, 100 + 20),
        ("backward", "a", 10 + 60, 100 + 20),
    ]
    assert ("gathering", "a", 10, 200 + 20) in found
    assert found[-2] == ("reduction", "a", 10 + 100, 100)


def test_the_peak_is_the_largest_moment():
    peak = peak_in_shards(CHAIN, PLAN, SHARDS)
    assert peak.total_bytes == max(point.total_bytes for point in timeline_in_shards(CHAIN, PLAN, SHARDS))
    assert (peak.phase, peak.block) == ("backward", "head")


def test_whole_gradients_are_not_resident():
    with pytest.raises(ValueError, match="never resident"):
        timeline_in_shards(replace(CHAIN, gradients_resident=True), PLAN, SHARDS)


def test_traffic_hides_behind_the_own_seconds_of_a_unit():
    sent, exposed = communication_s(CHAIN, SHARDS, 10.0)
    halves = {"a": 120 / 2, "b": 180 / 2, "head": 40 / 2}  # gathered twice and reduced; the head has stayed
    assert sent == pytest.approx(sum(halves.values()) / 10)
    assert exposed == pytest.approx(sum(max(0, size / 10 - 3) for size in halves.values()))
    with_replicas, _ = communication_s(CHAIN, replace(SHARDS, num_replicas=2), 10.0)
    assert with_replicas == pytest.approx(sent + 2 * (120 / 2) * (1 / 2) / 10)


def test_traffic_of_gradients_that_are_reduced_once_is_that_of_the_last_micro_batch():
    frozen = replace(SHARDS, units=tuple(replace(one, reduced_bytes=0) for one in SHARDS.units))
    each, gathers = communication_s(CHAIN, SHARDS, 10.0), communication_s(CHAIN, frozen, 10.0)
    once = communication_s(CHAIN, replace(SHARDS, num_unreduced=3), 10.0)
    assert once == pytest.approx([(one + 3 * other) / 4 for one, other in zip(each, gathers, strict=True)])
    assert once[0] < each[0]
    assert once[1] < each[1]
