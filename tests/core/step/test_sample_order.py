"""The order and the cutting of samples: pure functions, every sample exactly once, the same in any batch layout."""

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import BatchLayout, MicroBatchSampler, SampleOrder, seed_for


def layout(global_batch_size, micro_batch_size, num_processes, sequence_parallel=1):
    return BatchLayout(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_processes=num_processes,
        sequence_parallel=sequence_parallel,
    )


def sizes(layout, num_samples=None):
    ranks = layout.micro_batches(num_samples or layout.global_batch_size)
    return [[len(micro_batch) for micro_batch in rank] for rank in ranks]


@pytest.mark.parametrize(
    ("shape", "expected", "words"),
    [
        ((256, 8, 4), [[8] * 8] * 4, "256 samples = 8 x 4 ranks x 8 accumulation steps"),
        ((24, 24, 1), [[24]], "24 samples = 24 x 1 rank x 1 accumulation step"),
        ((24, 5, 1), [[5, 5, 5, 5, 4]], "24 samples = (5+5+5+5+4) x 1 rank"),
        ((24, 5, 2), [[5, 5, 2]] * 2, "24 samples = (5+5+2) x 2 ranks"),
        ((25, 5, 2), [[5, 5, 2], [5, 5, 3]], "25 samples = (5+5+2) x 1 rank + (5+5+3) x 1 rank"),
        ((40, 2, 1), [[2] * 20], "40 samples = 2 x 1 rank x 20 accumulation steps"),
        ((41, 2, 1), [[2] * 20 + [1]], "41 samples = (20 of 2 + 1) x 1 rank"),
        ((5, 1, 4), [[1, 0], [1, 0], [1, 0], [1, 1]], "5 samples = (1+0) x 3 ranks + (1+1) x 1 rank"),
        ((8, 2, 4, 2), [[2, 2]] * 4, "8 samples = 2 x 2 groups of 2 ranks x 2 accumulation steps"),
        (
            (3, 1, 4, 2),
            [[1, 0]] * 2 + [[1, 1]] * 2,
            "3 samples = (1+0) x 1 group of 2 ranks + (1+1) x 1 group of 2 ranks",
        ),
        ((1, 1, 4, 4), [[1]] * 4, "1 sample = 1 x 1 group of 4 ranks x 1 accumulation step"),
    ],
)
def test_any_batch_layout(shape, expected, words):
    assert sizes(layout(*shape)) == expected
    assert layout(*shape).describe() == words
    assert layout(*shape).accumulation_steps == len(expected[0])


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 2, 5, 23, 24])
def test_a_step_holds_every_sample_once_and_all_ranks_make_equally_many_micro_batches(num_samples, num_processes):
    ranks = layout(24, 5, num_processes).micro_batches(num_samples)
    assert [i for rank in ranks for micro_batch in rank for i in micro_batch] == list(range(num_samples))
    assert len({len(rank) for rank in ranks}) == 1


def test_neighbours_that_share_rows_have_the_same_samples():
    of_ranks = layout(5, 2, 4, 2).micro_batches(5)
    assert of_ranks[0] == of_ranks[1] == [range(0, 2), range(2, 2)]
    assert of_ranks[2] == of_ranks[3] == [range(2, 4), range(4, 5)]


def test_a_huge_global_batch_is_not_listed():
    assert layout(2**31 - 1, 2, 1).describe() == "2147483647 samples = (1073741823 of 2 + 1) x 1 rank"


def test_the_micro_batch_defaults_to_the_share():
    assert BatchLayout.of(25, None, 2).micro_batch_size == 13
    assert BatchLayout.of(8, 100, 2).micro_batch_size == 4
    assert BatchLayout.of(8, None, 4, sequence_parallel=2).micro_batch_size == 4


@pytest.mark.parametrize(
    ("shape", "flag"),
    [
        ((0, 1, 1), "global_batch_size 0 is not"),
        ((4, 0, 1), "micro_batch_size 0 is not"),
        ((4, 1, 8), "8 ranks"),
        ((1, 1, 4, 2), "2 groups of 2 ranks"),
        ((4, 1, 4, 3), "sequence_parallel 3: 4 ranks cannot be divided into groups of 3"),
    ],
)
def test_impossible_geometries_are_refused(shape, flag):
    with pytest.raises(InputError, match=flag):
        layout(*shape)


def run_ids(num_samples, shape, num_steps, **order):
    order = SampleOrder(num_samples=num_samples, global_batch_size=shape[0], seed=3, **order)
    per_rank = [
        MicroBatchSampler(order=order, layout=layout(*shape), rank=rank, first_step=0, last_step=num_steps)
        for rank in range(shape[2])
    ]
    return [key for sampler in per_rank for micro_batch in sampler for key in micro_batch]


@pytest.mark.parametrize("num_samples", [101, 7, 24, 48])
@pytest.mark.parametrize("shape", [(24, 24, 1), (24, 5, 1), (24, 3, 2), (24, 2, 4), (24, 4, 3)])
def test_an_epoch_visits_every_sample_once(num_samples, shape):
    num_steps = 3 * -(-num_samples // 24)
    counted = [(key.epoch, key.index) for key in run_ids(num_samples, shape, num_steps) if key.counted]
    assert sorted(counted) == [(epoch, index) for epoch in range(3) for index in range(num_samples)]


def test_the_order_depends_on_seed_and_epoch_alone():
    order = SampleOrder(num_samples=50, global_batch_size=8, seed=1)
    assert order.permutation(2) == order.permutation(2)
    assert order.permutation(2) != order.permutation(3)
    assert order.permutation(2) != SampleOrder(num_samples=50, global_batch_size=8, seed=2).permutation(2)


@pytest.mark.parametrize("first", [1, 6, 7, 13])
def test_a_run_that_begins_later_goes_on_with_the_same_samples(first):
    order = SampleOrder(num_samples=50, global_batch_size=8, seed=1)
    assert list(order.steps(first, 20)) == list(order.steps(0, 20))[first:]


def test_the_size_of_each_step_is_known_beforehand():
    order = SampleOrder(num_samples=50, global_batch_size=8, seed=1)
    assert [order.num_samples_in(step) for step in range(20)] == [len(samples) for _, samples in order.steps(0, 20)]


def test_an_empty_data_set_is_refused():
    with pytest.raises(InputError, match="empty"):
        SampleOrder(num_samples=0, global_batch_size=8, seed=1)


def test_seeds_differ_by_position():
    seeds = {seed_for(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert seed_for(1, 2) == seed_for(1, 2) < 2**63
