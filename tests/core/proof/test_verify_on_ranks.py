"""The proof on real ranks: each compares its own, all know the verdict, and the reducer that trains sees nothing."""

import hashlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memsave_recipes.core.activations import apply_plan, plan_blocks, spans
from memsave_recipes.core.plans import Action
from memsave_recipes.core.proof import verify
from memsave_recipes.models.convnets import build_vgg


def case_of(make_case, name):
    case = make_case("vgg_small" if name == "vgg_bn" else name)
    if name == "vgg_bn":
        case.model = build_vgg("vgg_small_bn", num_classes=10).train()
    return case


def step_of(case, model, rank):
    """Two micro-batches of this rank, the gradients synchronised once."""

    def step():
        total = torch.tensor(0.0)
        for index in range(2):
            torch.manual_seed(10 * rank + index)
            with model.no_sync() if index == 0 else nullcontext():
                loss = case.loss_of(model, torch.roll(case.batch, 3 * rank + index, dims=-1))
                loss.backward()
            total = total + loss.detach()
        return total

    return step


def verdict_on_rank(make_case, name, strategy, fault, accelerator):
    case = case_of(make_case, name)
    rank = accelerator.process_index
    with apply_plan(case.model, plan_blocks(case.model, strategy)) as handle:
        model = accelerator.prepare(case.model)
        fault(case.model, model, rank)
        return verify(model, handle, step_of(case, model, rank))


def healthy(bare, model, rank):
    pass


@pytest.mark.parametrize(
    ("name", "strategy", "num_ranks"),
    [("vgg_bn", "full", 2), ("densenet_small", "bottleneck", 3), ("vit", "every:2", 3), ("gpt2", "segments:2", 2)],
)
def test_healthy_plans_are_identical(run_on_ranks, make_case, name, strategy, num_ranks):
    verdicts = run_on_ranks(partial(verdict_on_rank, make_case, name, strategy, healthy), num_ranks)
    assert [(verdict.status, verdict.first) for verdict in verdicts] == [("identical", None)] * num_ranks


def forget_dropout_on_rank_1(bare, model, rank):
    def run(function, *inputs, modules):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=rank != 1)

    spans.RUN[Action.RECOMPUTE] = run


def test_a_difference_on_one_rank_is_known_to_all(run_on_ranks, make_case):
    verdicts = run_on_ranks(partial(verdict_on_rank, make_case, "gpt2", "full", forget_dropout_on_rank_1), 2)
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].status == "different"
    assert verdicts[0].first.kind == "gradient"
    assert "on rank 0" in verdicts[0].describe()  # the gradients are synchronised: wrong on all of them


def no_broadcast(bare, model, rank):
    model.forward_sync_buffers = False


def test_unsynced_buffers(run_on_ranks, make_case):
    """Statistics of BatchNorm that DDP does not broadcast go apart on every rank, and rank 0 saves its own."""
    verdicts = run_on_ranks(partial(verdict_on_rank, make_case, "vgg_bn", "full", no_broadcast), 2)
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].status == "not synchronised"
    assert (verdicts[0].first.kind, verdicts[0].first.name) == ("buffer over ranks", "features.1.running_mean")
    assert verdicts[0].first.absolute > 0


def another_weight_on_rank_1(bare, model, rank):
    with torch.no_grad():
        bare.classifier.weight[2, 3] += rank * 2**-10


def test_parameters_that_differ_from_the_start(run_on_ranks, make_case):
    verdicts = run_on_ranks(partial(verdict_on_rank, make_case, "vit", "full", another_weight_on_rank_1), 2)
    assert verdicts[0] == verdicts[1]
    assert (verdicts[0].first.kind, verdicts[0].first.name) == ("parameter over ranks", "classifier.weight")
    assert verdicts[0].first.words == "rank 0 and rank 1: 1 of 320 values differ"


def ignored_parameter(make_case, accelerator):
    case = make_case("vit")
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        model = accelerator.prepare(case.model)
        before = (model.reducer, model.logger)
        step = step_of(case, model, accelerator.process_index)
        healthy_verdict = verify(model, handle, step)
        assert (model.reducer, model.logger) == before
        model.parameters_to_ignore.add("classifier.weight")
        ignored = verify(model, handle, step)
    return healthy_verdict, ignored


def test_unsynced_gradients(run_on_ranks, make_case):
    for healthy_verdict, ignored in run_on_ranks(partial(ignored_parameter, make_case), 2):
        assert healthy_verdict.status == "identical"
        assert (ignored.status, ignored.first.kind) == ("not synchronised", "gradient over ranks")
        assert ignored.first.name == "classifier.weight"


def trained(make_case, is_verified, accelerator):
    """Digests of the weights after three steps."""
    case = case_of(make_case, "vgg_bn")
    rank = accelerator.process_index
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        model = accelerator.prepare(case.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = step_of(case, model, rank)
        if is_verified:
            assert verify(model, handle, step).status == "identical"
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()
    return {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in case.model.state_dict().items()}


def test_a_verified_run_trains_bit_for_bit_the_same(run_on_ranks, make_case):
    plain, verified = (run_on_ranks(partial(trained, make_case, is_verified), 2) for is_verified in (False, True))
    assert verified == plain
