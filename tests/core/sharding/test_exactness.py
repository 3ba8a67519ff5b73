"""Shards change no curve: 20 steps in float64 on several ranks give the weights of one rank."""

from functools import cache, partial

import pytest
import torch.distributed as dist
from samples import sample
from small_runs import Training, all_equal, build_model, largest_difference, trained_weights

from memsave_recipes.training.arguments import OptimizerArguments

TOLERANCE = 1e-12
"""Relative to the largest value of each tensor; the ranks add the same numbers in another order."""
GLOBAL_BATCH = {"resnet": 8}  # whose micro-batches, by which BatchNorm normalises, are the same on 1, 2 and 4 ranks
ALL = [(kind, *how) for kind in ("llama", "gpt2", "vit", "resnet") for how in ((2, "full"), (4, "full"), (4, "2"))]


def run(run_on_ranks, kind, num_ranks, flag, **options):
    options = {"global_batch_size": GLOBAL_BATCH.get(kind, 10), **options}
    return run_on_ranks(partial(trained_weights, kind, flag, **options), num_ranks, timeout_s=200)


@pytest.fixture(scope="module")
def on_one_rank(run_on_ranks):
    return cache(lambda kind: run(run_on_ranks, kind, 1, "none")[0])


@pytest.mark.parametrize(("kind", "num_ranks", "flag"), sample([("llama", 2, "full")], ALL))
def test_the_weights_of_one_rank(run_on_ranks, on_one_rank, kind, num_ranks, flag):
    weights, norms, _ = on_one_rank(kind)
    ranks = run(run_on_ranks, kind, num_ranks, flag)
    found, norms_found, _ = ranks[0]
    assert largest_difference(found, weights) < TOLERANCE
    assert norms_found == pytest.approx(norms, rel=TOLERANCE)
    assert min(norms) > 0
    assert all(all_equal(other, found) for other, _, _ in ranks)


MUON = OptimizerArguments(optimizer="muon", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
OF_MUON = [("gpt2", 2, "full"), ("gpt2", 3, "full"), *((kind, 4, "2") for kind in ("gpt2", "vit", "llama"))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks", "flag"), sample(OF_MUON[:1], OF_MUON))
def test_muon_orthogonalises_the_matrices_of_one_rank(run_on_ranks, on_one_rank, kind, num_ranks, flag):
    """In bfloat16: 20 steps agree to 1e-12 only if the ranks multiply whole matrices of the same bits."""
    weights, norms, _ = run(run_on_ranks, kind, 1, "none", optim=MUON)[0]
    ranks = run(run_on_ranks, kind, num_ranks, flag, optim=MUON)
    found, norms_found, _ = ranks[0]
    assert largest_difference(found, weights) < TOLERANCE
    assert norms_found == pytest.approx(norms, rel=TOLERANCE)
    assert all(all_equal(other, found) for other, _, _ in ranks)
    assert largest_difference(found, on_one_rank(kind)[0]) > 0.1  # of AdamW


MANY = [
    ("gpt2", 4, "2", {}),
    ("llama", 4, "2", {"loss": "chunked"}),
    ("llama", 2, "full", {"lora": True}),
    ("tied_llama", 2, "full", {"loss": "chunked"}),
    ("tied_llama", 4, "full", {}),
    ("vit", 4, "2", {}),
    ("resnet", 2, "full", {}),
]
CASES_OF_ONCE = [("llama", 2, "full", {}), *MANY]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks", "flag", "options"), CASES_OF_ONCE)
def test_gradients_that_are_reduced_once_a_step(run_on_ranks, kind, num_ranks, flag, options):
    """Shares of 5 and 5, or of 3, 3, 2 and 2 samples in micro-batches of 2: the last ones are padded."""
    weights, norms, _ = run(run_on_ranks, kind, 1, "none", **options)[0]
    ranks = run(run_on_ranks, kind, num_ranks, flag, reduces_once=True, **options)
    found, norms_found, _ = ranks[0]
    assert largest_difference(found, weights) < TOLERANCE
    assert norms_found == pytest.approx(norms, rel=TOLERANCE)
    assert min(norms) > 0
    assert all(all_equal(other, found) for other, _, _ in ranks)


REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def reductions(accelerator, **options):
    """How often gradients are reduced, and between replicas, in the micro-batches of a step."""
    training = Training(accelerator, "llama", "2", **options)
    counts = {REDUCE_SCATTER: [], "all_reduce": []}
    batch = next(iter(training.batches))
    for name, of_micro_batches in counts.items():
        setattr(dist, name, counted(getattr(dist, name), of_micro_batches))
    for micro_batch in batch.forwards(training.trained):
        for of_micro_batches in counts.values():
            of_micro_batches.append(0)
        loss_sum = training.loss_of(micro_batch)
        batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
    return counts


def counted(collective, of_micro_batches):
    def counting(*args, **kwargs):
        of_micro_batches[-1] += 1
        return collective(*args, **kwargs)

    return counting


def test_the_micro_batches_before_the_last_one_reduce_nothing(run_on_ranks):
    units = 6  # embeddings, four layers, the head
    for once, before in ((False, units), (True, 0)):
        for counts in run_on_ranks(partial(reductions, reduces_once=once), 4):
            assert counts == {name: [before, units] for name in (REDUCE_SCATTER, "all_reduce")}


def test_the_tolerance_is_far_below_what_the_steps_do(on_one_rank):
    weights, _, _ = on_one_rank("llama")
    before = {name: parameter.detach() for name, parameter in build_model("llama").named_parameters()}
    assert largest_difference(weights, before) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet"])
def test_statistics_of_batchnorm_are_those_of_rank_0_as_under_ddp(run_on_ranks, kind):
    """After a step that ended, each rank's next forward begins with rank 0's: they differ by its own micro-batches."""
    of_shards = run(run_on_ranks, kind, 2, "full", num_steps=4)
    of_ddp = run(run_on_ranks, kind, 2, "none", num_steps=4)
    assert not all_equal(of_ddp[0][2], of_ddp[1][2])
    for (_, _, ours), (_, _, theirs) in zip(of_shards, of_ddp, strict=True):
        assert largest_difference(as_floats(ours), as_floats(theirs)) < TOLERANCE


def as_floats(buffers):
    return {name: buffer.double() for name, buffer in buffers.items()}
