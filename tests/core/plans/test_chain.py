"""Chains: what the simulator says of small ones computed by hand, and which plans are refused."""

from dataclasses import replace

import pytest
from chains import block, option

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.plan import Action, Plan, Span
from memsave_recipes.core.plans.simulate import host_bytes, simulate
from memsave_recipes.core.plans.solver import solve

KEEP, RECOMPUTE, SELECT_OPS, OFFLOAD = Action.KEEP, Action.RECOMPUTE, Action.SELECT_OPS, Action.OFFLOAD
RECOMPUTE_OFFLOAD = Action.RECOMPUTE_OFFLOAD


def plan_of(chain, *spans, mlp_tile_tokens=None):
    return Plan(
        strategy="test",
        blocks=chain.decided_names,
        spans=tuple(Span(start=start, stop=stop, action=action) for start, stop, action in spans),
        mlp_tile_tokens=mlp_tile_tokens,
    )


@pytest.fixture
def three():
    """Three blocks, each saving its input and 100 bytes besides; gradients of 7; a loss that keeps 5 bytes."""
    layer = option(saved=100, forward=130, backward=40, saves="i")
    return Chain(
        blocks=(
            *(block(name, layer, output=20, gradient=7) for name in "abc"),
            block("loss", option(saved=5, forward=6, backward=20, saves="i"), stack=None, seconds=0.5),
        ),
        resident_bytes=1000,
    )


def test_plain_peaks_where_the_backward_begins_with_everything_held(three):
    plain = simulate(three, plan_of(three, (0, 3, KEEP)))
    # a: 100 (its input is the batch), b: 100 + 20, c: 100 + 20; loss: its input 20, 5 inside, 20 in its backward
    assert plain.peak.phase == "backward"
    assert plain.peak.block == "c"
    # c: held by a and b 100 + 120; own 120; gradient of its output 20; rise 40
    assert (plain.peak.held_bytes, plain.peak.own_bytes) == (220, 180)
    assert plain.peak_bytes == 1000 + 220 + 180
    assert plain.added_s == 0


def test_a_span_holds_its_input_then_all_that_it_rebuilds(three):
    result = simulate(three, plan_of(three, (0, 2, RECOMPUTE), (2, 3, KEEP)))
    # Recomputing b: a's 100, b's input 20, gradient of b's output 20, rise 130: 270, and c's parameters' gradient.
    # The backward of b: a's 100, b's 120, gradient 20, rise 40: 280 and 7, against c's backward: 20 + 120 + 20 + 40.
    assert (result.peak.phase, result.peak.block) == ("backward", "b")
    assert (result.peak.gradients_bytes, result.peak.own_bytes, result.peak.held_bytes) == (7, 280, 0)
    assert result.added_s == 2


def test_every_span_holds_the_state_of_the_random_numbers(three):
    chain = Chain(blocks=three.blocks, resident_bytes=1000, span_bytes=3)
    for plan, spans_alive in (((0, 2, RECOMPUTE), (2, 3, KEEP)), 1), (((0, 1, RECOMPUTE), (1, 3, RECOMPUTE)), 2):
        added = simulate(chain, plan_of(chain, *plan)).peak_bytes - simulate(three, plan_of(three, *plan)).peak_bytes
        assert added == 3 * spans_alive


def test_the_recomputation_itself_can_be_the_peak():
    chain = Chain(blocks=(block("a", option(forward=90, backward=10), output=5),), resident_bytes=0)
    result = simulate(chain, plan_of(chain, (0, 1, RECOMPUTE)))
    assert (result.peak.phase, result.peak_bytes) == ("recomputation", 90 + 5)


def test_a_second_run_begins_beside_the_generators_state_and_other_gradients():
    costs = block("a", option(forward=90, backward=10), output=5)
    chain = Chain(blocks=(replace(costs, untracked_bytes=8),), resident_bytes=0, span_bytes=50)
    result = simulate(chain, plan_of(chain, (0, 1, RECOMPUTE)))
    assert (result.peak.phase, result.peak_bytes) == ("recomputation", 50 + 90 + 5 + 8 + 50)


def test_arguments_besides_the_state_are_held_where_a_block_runs_again():
    keep, select = option(forward=90, backward=100), option(SELECT_OPS, added_s=1.0, forward=90, backward=100)
    layers = [replace(block(name, keep, select, output=5), extra_args_bytes=30) for name in "ab"]
    chain = Chain(blocks=tuple(layers), resident_bytes=0, extra_args_bytes=30)
    peaks = {action: simulate(chain, plan_of(chain, (0, 2, action))).peak for action in (KEEP, RECOMPUTE, SELECT_OPS)}
    assert (peaks[KEEP].phase, peaks[KEEP].total_bytes) == ("forward", 90 + 30 + 5)
    assert peaks[SELECT_OPS].total_bytes == 100 + 30 + 5
    assert peaks[RECOMPUTE].total_bytes == 100 + 30 + 5
    assert not simulate(chain, solve(chain, peaks[KEEP].total_bytes)).added_s
    with pytest.raises(InputError, match="too small for any plan"):
        solve(chain, peaks[KEEP].total_bytes - 1)


def test_gradients_are_there_from_the_start_when_they_are_resident(three):
    accumulating = Chain(blocks=three.blocks, resident_bytes=1000, gradients_resident=True)
    plan = plan_of(three, (0, 3, KEEP))
    assert simulate(accumulating, plan).peak_bytes == simulate(three, plan).peak_bytes + 3 * 7
    assert simulate(accumulating, plan).peak.resident_bytes == 1021


def test_the_last_gradient_can_be_born_before_the_peak():
    head = block("head", option(backward=900), stack=None, gradient=800)
    chain = Chain(blocks=(block("a", option(saved=200, forward=200, backward=150)), head), resident_bytes=0)
    peak = simulate(chain, plan_of(chain, (0, 1, KEEP))).peak
    assert (peak.block, peak.gradients_bytes, peak.total_bytes) == ("a", 800, 800 + 200 + 150)


def test_the_optimizer_has_the_last_word(three):
    large = Chain(blocks=three.blocks, resident_bytes=1000, optimizer_bytes=5000)
    peak = simulate(large, plan_of(three, (0, 3, KEEP))).peak
    assert (peak.phase, peak.total_bytes) == ("optimizer", 1000 + 21 + 5000)


def test_a_map_that_two_blocks_save_counts_once():
    first = block("relu", option(saves="o", forward=50), output=50)
    second = block("conv", option(saves="i", forward=30, backward=60), output=30)
    chain = Chain(blocks=(first, second), resident_bytes=0)
    peak = simulate(chain, plan_of(chain, (0, 2, KEEP))).peak
    # In conv's backward: the map of 50 once, held by relu, the gradient of conv's output 30, and 60.
    assert (peak.block, peak.held_bytes, peak.own_bytes) == ("conv", 50, 90)


def test_the_solver_finds_a_plan_in_the_peak_that_is_simulated():
    """A second run ends with the last tensor that is saved, before the most that its forward takes."""
    first, loss = block("a", option(saved=4, forward=28), output=2), block("loss", option(), stack=None)
    chain = Chain(blocks=(replace(first, until_saved_bytes=10), loss), resident_bytes=0)
    peak_bytes = simulate(chain, plan_of(chain, (0, 1, RECOMPUTE))).peak_bytes
    assert peak_bytes == 10 + 2
    assert solve(chain, peak_bytes).recomputed == ("a",)


def test_what_nothing_reads_is_there_until_the_forward_ends():
    """As the last layer of LLaVA's tower. It never runs again, so a plan that recomputes it is as fast."""
    unread = replace(block("b", option(saved=100, forward=110), output=5), has_backward=False)
    layers = [block(name, option(saved=50, forward=60, backward=20), output=5) for name in "acd"]
    chain = Chain(blocks=(layers[0], unread, *layers[1:]), resident_bytes=0)
    kept, full = (simulate(chain, plan_of(chain, (0, 1, KEEP), (1, 2, way), (2, 4, KEEP))) for way in (KEEP, RECOMPUTE))
    assert (kept.peak.phase, kept.peak_bytes) == ("forward", 50 + 100 + 50 + 5 + 60)
    assert (full.peak.phase, full.peak_bytes) == ("backward", 50 + 50 + 50 + 5 + 20)
    assert full.added_s == kept.added_s == 0
    assert solve(chain, full.peak_bytes + 5).recomputed == ("b",)  # as if its input were there to the end


def offloading(chain):
    return host_bytes(chain, plan_of(chain, (0, len(chain.decided), OFFLOAD)))


def test_what_is_offloaded_fills_the_host_but_for_the_last_block():
    options = option(saved=300, saves="i"), option(OFFLOAD, saved=60)
    chain = Chain(blocks=tuple(block(name, *options, output=80) for name in "abcd"), resident_bytes=0)
    moved = 3 * (300 - 60) + 2 * 80  # the input of the first is the batch, and the last never moves
    assert offloading(chain) == moved * 9 // 8
    assert host_bytes(chain, plan_of(chain, (0, 3, KEEP), (3, 4, OFFLOAD))) == 0
    assert host_bytes(chain, plan_of(chain, (0, 1, KEEP), (1, 2, OFFLOAD), (2, 3, RECOMPUTE), (3, 4, OFFLOAD))) == 360
    assert simulate(chain, plan_of(chain, (0, 4, OFFLOAD))).host_bytes == offloading(chain)


def test_of_blocks_that_recompute_the_inputs_fill_the_host():
    tiled = option(Action.RECOMPUTE_TILED_OFFLOAD)
    options = option(saved=300), option(RECOMPUTE_OFFLOAD), tiled, option(OFFLOAD)  # not all among what plain saves
    chain = Chain(blocks=tuple(block(name, *options, output=80) for name in "abcd"), resident_bytes=0)
    assert host_bytes(chain, plan_of(chain, (0, 4, RECOMPUTE_OFFLOAD))) == 2 * 80 * 9 // 8
    in_tiles = plan_of(chain, (0, 4, Action.RECOMPUTE_TILED_OFFLOAD), mlp_tile_tokens=8)
    assert host_bytes(chain, in_tiles) == 6 * 80 * 9 // 8  # also inputs of MLPs; of the last block that alone stays
    last = (3, 4, RECOMPUTE_OFFLOAD)
    assert host_bytes(chain, plan_of(chain, (0, 1, KEEP), (1, 2, RECOMPUTE_OFFLOAD), (2, 3, KEEP), last)) == 90
    mixed = plan_of(chain, (0, 1, RECOMPUTE), (1, 2, RECOMPUTE_OFFLOAD), (2, 4, OFFLOAD))
    assert host_bytes(chain, mixed) == (80 + 300) * 9 // 8
    assert host_bytes(chain, plan_of(chain, (0, 3, KEEP), last)) == 0


def test_a_map_that_many_blocks_take_is_on_the_host_once():
    options = option(saves="i"), option(OFFLOAD)
    layers = [block(name, *options, output=80, passes=True) for name in "abcd"]
    assert offloading(Chain(blocks=tuple(layers), resident_bytes=0)) == (80 + 80) * 9 // 8


def test_where_nothing_moves_the_host_has_nothing():
    options = option(saved=300, saves="i"), option(OFFLOAD, saved=310, saves="i")  # as on a CPU
    assert offloading(Chain(blocks=tuple(block(n, *options, output=80) for n in "abc"), resident_bytes=0)) == 0


def test_dense_layers_hand_on_what_they_got():
    layers = [block(name, option(forward=10, backward=5), output=10, passes=True) for name in "abc"]
    chain = Chain(blocks=tuple(layers), resident_bytes=0)
    peak = simulate(chain, plan_of(chain, (0, 1, KEEP), (1, 2, RECOMPUTE), (2, 3, RECOMPUTE))).peak
    # Spans b and c hold 10 and 20 bytes, of which 10 are the same; the gradient of all three maps is 30.
    assert (peak.phase, peak.block) == ("recomputation", "c")
    assert (peak.held_bytes, peak.own_bytes) == (10, 10 + 30 + 10)


def test_options_have_their_own_costs(three):
    cheap = option(SELECT_OPS, added_s=0.25, saved=10, forward=130, backward=140, saves="i")
    away = option(OFFLOAD, added_s=0.75, forward=130, backward=150)
    first, *others = three.blocks
    first = block("a", *first.options, cheap, away, output=20, gradient=7)
    chain = Chain(blocks=(first, *others), resident_bytes=1000)
    plain = simulate(chain, plan_of(chain, (0, 3, KEEP)))
    selected = simulate(chain, plan_of(chain, (0, 1, SELECT_OPS), (1, 3, KEEP)))
    offloaded = simulate(chain, plan_of(chain, (0, 1, OFFLOAD), (1, 3, KEEP)))
    assert (plain.peak_bytes - selected.peak_bytes, selected.added_s) == (90, 0.25)
    assert (plain.peak_bytes - offloaded.peak_bytes, offloaded.added_s) == (100, 0.75)


def test_plans_that_the_chain_cannot_follow_are_refused(three):
    two_stacks = Chain(blocks=(block("a", option()), block("b", option(), stack=1)), resident_bytes=0)
    with pytest.raises(ValueError, match="leaves its stack"):
        simulate(two_stacks, plan_of(two_stacks, (0, 2, RECOMPUTE)))
    with pytest.raises(ValueError, match="no costs of offload for b"):
        simulate(three, plan_of(three, (0, 1, KEEP), (1, 3, OFFLOAD)))
    with pytest.raises(ValueError, match="other blocks"):
        simulate(three, plan_of(two_stacks, (0, 2, KEEP)))
