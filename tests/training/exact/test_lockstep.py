"""``--bitwise_topology`` with ``--batchnorm global``: the bits of one rank, and the numbers of one undivided batch."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from host_copies import LateCopies, moving_everything
from samples import sample
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import ResNetConfig, ResNetForImageClassification

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.planner.budget import static_memory_of
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.text import GIB
from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.models.convnets import build_densenet, build_vgg
from memsave_recipes.run.run_plan import RunPlan, plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm
from memsave_recipes.training.exact.lockstep import Lockstep, MicroBatched
from memsave_recipes.training.optimizers import StepLosses, clip_gradients, make_optimizer

GLOBAL_BATCH_SIZE, NUM_SAMPLES, NUM_STEPS = 11, 19, 3  # the second step has 8 samples
SIZE = 32
RANKS = (1, 2, 3, 4)
TIMEOUT_S = 150
UNSEEN = 0.005
"""Of a reading on several ranks: buffers of statistics that a thread of gloo has let go without an event."""


@dataclass(frozen=True)
class Images(torch.utils.data.Dataset):
    """Of noise, each moved by a map of its own."""

    def __getitem__(self, key: Any) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(key.index)
        image = torch.randint(256, (3, SIZE, SIZE), generator=random, dtype=torch.uint8)
        affine = torch.eye(2, 3) + 0.1 * torch.randn(2, 3, generator=random)
        return {"images": image, "affine": affine, "labels": torch.tensor(key.index % 10 if key.counted else -100)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained; the number of ranks is no part of it."""

    model: str
    micro_batch_size: int = 2
    global_batch_size: int = GLOBAL_BATCH_SIZE
    strategy: str = "none"
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    dtype: torch.dtype = torch.float32
    autocasts: bool = False
    has_dropout: bool = True
    has_whole_steps: bool = False
    is_bitwise: bool = True
    budget_bytes: int = 0


@dataclass
class Outcome:
    """All that must have the same bits, and what follows from the number of ranks.

    ``peak_bytes`` are those of the last step, which is a full one.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    optimizer: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    planned: RunPlan | None = None
    peak_bytes: int = 0


def make_model(run: Run) -> nn.Module:
    torch.manual_seed(0)
    if run.model == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1]}
        model: nn.Module = ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes))
    else:
        model = (build_vgg if run.model.startswith("vgg") else build_densenet)(run.model, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not run.has_dropout:
            module.p = 0.0
    return model.to(run.dtype).train()


def loss_of(model: nn.Module, run: Run, batch: dict[str, Tensor]) -> Tensor:
    pixels = to_pixel_values(batch["images"], batch["affine"], mean=[0.5] * 3, std=[0.5] * 3, dtype=run.dtype)
    with torch.autocast("cpu", torch.bfloat16) if run.autocasts else nullcontext():
        output = model(pixels)
    logits = getattr(output, "logits", output)
    logits = logits if run.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits, batch["labels"], reduction="sum", ignore_index=IGNORED_LABEL)


def planned(
    accelerator: Accelerator,
    bare: nn.Module,
    model: nn.Module,
    batches: GlobalBatches,
    run: Run,
    optim: OptimizerArguments,
) -> RunPlan:
    """As a recipe plans."""
    flags = RunArguments(
        output_dir="unused",
        report_to=["none"],
        global_batch_size=run.global_batch_size,
        micro_batch_size=run.micro_batch_size,
        bitwise_topology=True,
        batchnorm="global",
        activation_checkpointing=run.strategy,
        memory_budget_gib=run.budget_bytes / GIB if run.budget_bytes else None,
    )
    fails = partial(pytest.fail, "nothing fits")
    task = Task(run=flags, optim=optim, build_model=fails, loss_of=fails, micro_batch=fails)
    return plan_run(task, StepOnDevice(accelerator, bare, batches, model, partial(loss_of, model, run)))


def train(accelerator: Accelerator, run: Run) -> Outcome:
    """A recipe's loop."""
    optim = OptimizerArguments(optimizer=run.optimizer, learning_rate=run.learning_rate, max_grad_norm=0.5)
    bare = make_model(run)
    global_batchnorm(bare)
    optimizer = make_optimizer(optim, bare)
    model, optimizer = accelerator.prepare(bare, optimizer)
    num_samples = NUM_SAMPLES - NUM_SAMPLES % run.global_batch_size * run.has_whole_steps
    order = SampleOrder(num_samples=num_samples, global_batch_size=run.global_batch_size, seed=3)
    layout: BatchLayout = LockstepLayout.of(run.global_batch_size, run.micro_batch_size, accelerator.num_processes)
    if not run.is_bitwise:
        layout = BatchLayout.of(run.global_batch_size, None, accelerator.num_processes)
    batches = GlobalBatches(accelerator, Images(), order=order, layout=layout, num_steps=NUM_STEPS, seed=3)
    losses = StepLosses(accelerator, order, exact=run.is_bitwise)
    outcome = Outcome()
    if run.is_bitwise:
        outcome.planned = planned(accelerator, bare, model, batches, run, optim)
    plan, copies = outcome.planned.plan if outcome.planned else plan_blocks(bare, run.strategy), LateCopies()
    with moving_everything(copies), apply_plan(bare, plan):
        for batch in batches:
            with break_down_peak(model, optimizer.optimizer, accelerator.device) as peak:
                for micro_batch in batch.forwards(model):
                    loss_sum = loss_of(model, run, micro_batch)
                    batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
                norm = clip_gradients(optim, accelerator, model)
                optimizer.step()
                optimizer.zero_grad()
            losses.add(batch, norm)
            outcome.norms.append(norm.item())
    assert bool(copies.bytes_out) == bool(plan.offloads)
    outcome.peak_bytes = peak.breakdown.total_bytes if peak.breakdown else 0
    outcome.losses = losses.state_dict()["losses"]
    outcome.state = {name: tensor.detach().clone() for name, tensor in bare.state_dict().items()}
    outcome.optimizer = [leaf for leaf in tree_leaves(optimizer.state_dict()["state"]) if isinstance(leaf, Tensor)]
    return outcome


Train = Callable[[Run, int], Outcome]


@pytest.fixture(scope="module")
def trained(run_on_ranks: Callable[..., list[Any]]) -> Train:
    """The outcome on so many ranks, which all have the same; each run once."""

    @cache
    def on(run: Run, num_ranks: int) -> Outcome:
        ranks = run_on_ranks(partial(train, run=run), num_ranks, timeout_s=TIMEOUT_S)
        for other in ranks[1:]:
            assert differences(other, ranks[0]) == []
        return replace(ranks[0], peak_bytes=max(rank.peak_bytes for rank in ranks))

    return on


def differences(outcome: Outcome, expected: Outcome) -> list[str]:
    """What has other bits."""
    found = [name for name, tensor in expected.state.items() if not torch.equal(outcome.state[name], tensor)]
    pairs = zip(outcome.optimizer, expected.optimizer, strict=True)
    found += [f"state {number}" for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    return found + [name for name in ("losses", "norms") if getattr(outcome, name) != getattr(expected, name)]


RUNS = {
    "vgg": Run(model="vgg_small_bn"),
    "vgg full": Run(model="vgg_small_bn", strategy="full", micro_batch_size=1),
    "vgg selective": Run(model="vgg_small_bn", strategy="selective", optimizer="adamw"),
    "vgg autocast": Run(model="vgg_small_bn", strategy="segments:2", autocasts=True),
    "densenet": Run(model="densenet_small", optimizer="adamw"),
    "densenet bottleneck": Run(model="densenet_small", strategy="bottleneck"),
    "vgg offload": Run(model="vgg_small_bn", strategy="full_offload"),
    "resnet": Run(model="resnet", strategy="every:2", global_batch_size=10, has_whole_steps=True),
}


OFTEN = [("resnet", 3)]


@pytest.mark.parametrize(("name", "num_ranks"), sample(OFTEN, product(RUNS, RANKS[1:])))
def test_the_bits_of_one_rank(trained: Train, name: str, num_ranks: int) -> None:
    """In steps of 6, 4 and 6 micro-batches, the last of 1 sample; of 3 ranks each has one or two."""
    outcome, expected = trained(RUNS[name], num_ranks), trained(RUNS[name], 1)
    assert len(outcome.losses) == len(outcome.norms) == NUM_STEPS
    assert differences(outcome, expected) == []


PLAIN = {
    "vgg": Run(model="vgg_small_bn", optimizer="adamw"),
    "vgg uneven": Run(model="vgg_small_bn", optimizer="adamw", global_batch_size=14),  # 4 and 3 micro-batches
    "densenet": Run(model="densenet_small", optimizer="adamw"),
}


ON_PLAN = [*product(("vgg", "densenet"), (1, 2, 3)), ("vgg uneven", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), ON_PLAN)
def test_a_plan_for_a_budget_has_the_bits_of_one_rank_without_a_plan(trained: Train, name: str, num_ranks: int) -> None:
    """What ranks exchange, and sums that another rank than the first one has, count from the beginning of a step."""
    run, plain = PLAIN[name], trained(PLAIN[name], num_ranks)
    layout = LockstepLayout.of(run.global_batch_size, run.micro_batch_size, num_ranks)
    static = static_memory_of(OptimizerArguments(), make_model(run), layout)
    all_the_time_bytes = static.exchange_bytes + static.sums_bytes
    budget_bytes = int(0.9 * (plain.peak_bytes + all_the_time_bytes))
    outcome = trained(replace(run, strategy="budget:bitwise", budget_bytes=budget_bytes), num_ranks)
    assert differences(outcome, trained(run, 1)) == []
    assert outcome.planned is not None
    assert outcome.planned.predicted_peak_bytes is not None
    assert outcome.planned.plan.recomputed
    assert outcome.planned.predicted_peak_bytes <= budget_bytes
    above_bytes = outcome.planned.predicted_peak_bytes - outcome.peak_bytes
    assert -UNSEEN * outcome.peak_bytes <= above_bytes <= all_the_time_bytes + 0.02 * outcome.peak_bytes


@pytest.mark.parametrize("strategy", ["offload", "full_offload"])
def test_inputs_of_all_micro_batches_wait_on_the_host(strategy: str) -> None:
    """But for the batch, and what the last block takes, which never leaves the device; the bits are those of plain."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(4)))
    parts, copies = [torch.randn(size, 8) for size in (3, 3, 2)], LateCopies()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(MicroBatched.of(parts, Lockstep([[range(2), range(3, 4)]], 0, 5))).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    with moving_everything(copies), apply_plan(model, plan_blocks(model, strategy)):
        assert all(map(torch.equal, gradients(), plain))
    assert len(plain) == 4
    assert copies.bytes_out == 2 * sum(part.nbytes for part in parts)


EXACT = {
    "dtype": torch.float64,
    "has_dropout": False,
    "global_batch_size": 10,
    "learning_rate": 1e-3,
    "has_whole_steps": True,
}


@pytest.mark.parametrize(
    ("model", "strategy"), sample([("resnet", "none")], [("densenet_small", "full"), ("resnet", "none")])
)
def test_the_numbers_of_one_undivided_batch(trained: Train, model: str, strategy: str) -> None:
    outcome = trained(Run(model=model, strategy=strategy, **EXACT), 1)
    expected = trained(Run(model=model, is_bitwise=False, **EXACT), 1)
    for name, tensor in expected.state.items():
        assert (outcome.state[name] - tensor).double().norm() <= 1e-12 * tensor.double().norm(), name


def test_of_the_gradients_of_a_weight_few_are_there_at_once() -> None:
    """Of 16 micro-batches, each with one: four sums, the next gradient, and the sum that it becomes part of."""
    linear = nn.Linear(256, 256, bias=False)
    lockstep = Lockstep([[range(16)]], 0, 16)
    inputs = MicroBatched.of([torch.randn(1, 256) for _ in range(16)], lockstep)

    def step(meter: Meter) -> None:
        linear(inputs).sum().backward()
        meter.mark()

    (reading,) = DeviceInstruments(torch.device("cpu")).read_memory(step)
    assert reading.peak_bytes <= 6.5 * linear.weight.nbytes
    assert reading.live_bytes <= 1.5 * linear.weight.nbytes  # though ``lockstep`` is still there


def test_another_length_is_refused_where_a_model_reads_it() -> None:
    lockstep = Lockstep([[range(2)]], 0, 2)
    images = MicroBatched.of([torch.randn(2, 3), torch.randn(1, 3)], lockstep)
    assert images.flatten(1).tensors[1].shape == (1, 3)
    with pytest.raises(InputError, match="so they cannot run in lockstep: take a global batch"):
        images.size(0)


def test_tensors_made_of_parameters_alone_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    images = MicroBatched.of([torch.randn(2, 3)], Lockstep([[range(1)]], 0, 1))
    with pytest.raises(InputError, match="mul takes a tensor that the model computes from its parameters"):
        images * (2 * weight)


def test_a_step_with_a_rank_of_padding_alone_is_refused() -> None:
    order = SampleOrder(num_samples=15, global_batch_size=10, seed=3)
    flags = RunArguments(output_dir="", batchnorm="global")
    flags.check_order(order, IndexedLayout.of(10, 3, 2))
    with pytest.raises(InputError, match="has 5 samples in micro-batches of 3 for 3 ranks, and padding would count"):
        flags.check_order(order, IndexedLayout.of(10, 3, 3))
