"""``batchnorm global`` on real ranks, with and without micro-batches: the step of one process and one large batch."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from host_copies import LateCopies, moving_everything
from samples import every_third

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.proof import verify
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm
from tests.convnets import build

NUM_IMAGES = 7


def trained(model, bare, share, num_ranks, num_steps):
    """The state of ``bare`` after steps, of whose images this rank takes ``share``."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-4, momentum=0.9)
    for _ in range(num_steps):
        images = torch.randn(NUM_IMAGES, 3, 32, 32, generator=generator).double()
        labels = torch.randint(10, (NUM_IMAGES,), generator=generator)
        loss_of_share(model, images[share], labels[share]).mul(num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.double() for name, value in bare.state_dict().items()}


def loss_of_share(model, images, labels):
    """Its part of the mean loss of the global batch."""
    output = model(images)
    return F.cross_entropy(getattr(output, "logits", output), labels, reduction="sum") / NUM_IMAGES


def planned(bare, strategy, micro_batch_size):
    plan = plan_blocks(bare, strategy)
    return apply_plan(bare, plan if micro_batch_size is None else plan.in_micro_batches(micro_batch_size))


def errors_on_rank(name, ways, num_steps, accelerator):
    """The largest relative difference from one process, of each way; shares of 4 and 3 images."""
    bare = build(name)
    expected = trained(twin := copy.deepcopy(bare), twin, slice(None), 1, num_steps)
    share = [slice(0, 4), slice(4, 7)][accelerator.process_index]
    errors = []
    for strategy, micro_batch_size in ways:
        own = copy.deepcopy(bare)
        global_batchnorm(own)
        with moving_everything(copies := LateCopies()), planned(own, strategy, micro_batch_size):
            found = trained(accelerator.prepare(own), own, share, 2, num_steps)
        assert bool(copies.bytes_out) == (strategy == "full_offload")
        errors.append(max(float((found[key] - one).norm() / one.norm()) for key, one in expected.items()))
    return errors


@pytest.mark.parametrize(
    ("name", "ways"),
    every_third(
        [
            ("densenet_small", [("full", 2), ("bottleneck", 3)]),
            ("vgg_small_bn", [("selective", None), ("segments:2", 3), ("full_offload", None)]),
            ("resnet_small", [("none", None), ("every:2", 4), ("full_offload", 2)]),
        ]
    ),
)
def test_two_ranks_are_one_process(run_on_ranks, name, ways):
    """With 3 the first rank has two micro-batches and the second one."""
    for errors in run_on_ranks(partial(errors_on_rank, name, ways, 2), 2):
        assert max(errors) < 1e-12, dict(zip(ways, errors, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("micro_batch_size", [None, 2, 1])
@pytest.mark.parametrize("name", ["vgg16_bn", "densenet121", "resnet50"])
def test_twenty_steps_of_the_real_models(run_on_ranks, name, micro_batch_size):
    """Each share whole, in 2 micro-batches, and in 4 and 3."""
    train = partial(errors_on_rank, name, [("full", micro_batch_size)], 20)
    for (error,) in run_on_ranks(train, 2, timeout_s=1500):
        assert error < 1e-12


def verdict_on_rank(accelerator):
    bare = build("densenet_small").float()
    global_batchnorm(bare)
    share = [slice(0, 4), slice(4, 7)][accelerator.process_index]
    images = torch.randn(NUM_IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with planned(bare, "full", 2) as handle:
        model = accelerator.prepare(bare)

        def step():
            loss = loss_of_share(model, images[share], torch.arange(NUM_IMAGES)[share])
            (2 * loss).backward()
            return loss.detach()

        return verify(model, handle, step)


def test_the_proof_of_a_plan_in_micro_batches(run_on_ranks):
    """Against one undivided forward, which joins the ranks as well."""
    assert {verdict.status for verdict in run_on_ranks(verdict_on_rank, 2)} == {"as exact as plain"}
