"""BatchNorm over the global batch: blocks in micro-batches give the step of one undivided forward of the batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from host_copies import LateCopies, moving_everything
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan
from memsave_recipes.models.convnets import build_densenet, build_vgg
from memsave_recipes.training.exact.global_batchnorm import GlobalBatchNorm, global_batchnorm
from tests.convnets import build

in_micro_batches = GlobalBatchNorm.in_micro_batches

LEARNING_RATE = 1e-4  # small: a large one multiplies any rounding, that of the undivided forward too


def trained(model, num_steps, num_images=8):
    """All of its state after steps on random images."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for _ in range(num_steps):
        images = torch.randn(num_images, 3, 32, 32, generator=generator).double()
        labels = torch.randint(10, (num_images,), generator=generator)
        output = model(images)
        F.cross_entropy(getattr(output, "logits", output), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.double() for name, value in model.state_dict().items()}


def relative_error(one, other):
    """Of the tensor that differs most."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def in_blocks(model, strategy, micro_batch_size):
    global_batchnorm(model)
    return apply_plan(model, plan_blocks(model, strategy).in_micro_batches(micro_batch_size))


@pytest.mark.parametrize(
    ("name", "strategy", "micro_batch_size"),
    [
        ("vgg_small_bn", "full", 2),
        ("vgg_small_bn", "segments:3", 8),
        ("densenet_small", "every:2", 4),
        ("densenet_small", "bottleneck", 5),
        ("resnet_small", "full", 3),
    ],
)
def test_equal_to_one_undivided_forward(name, strategy, micro_batch_size):
    model = build(name)
    twin = copy.deepcopy(model)
    with in_blocks(twin, strategy, micro_batch_size):
        state = trained(twin, 3)
    assert relative_error(state, trained(model, 3)) < 1e-12


@pytest.mark.parametrize(
    ("name", "micro_batch_size"),
    [("vgg_small_bn", 2), ("resnet_small", 3), ("densenet_small", None)],
)
def test_inputs_on_the_host_change_nothing(name, micro_batch_size):
    model = build(name)
    twin, copies = copy.deepcopy(model), LateCopies()
    global_batchnorm(twin)
    plan = plan_blocks(twin, "full_offload")
    plan = plan if micro_batch_size is None else plan.in_micro_batches(micro_batch_size)
    with moving_everything(copies), apply_plan(twin, plan):
        state = trained(twin, 3)
    assert relative_error(state, trained(model, 3)) < 1e-12
    assert copies.bytes_out > 0
    assert not copies.pending


def test_of_blocks_in_micro_batches_the_inputs_of_all_samples_wait_on_the_host():
    """But for that of the first block, the batch, and that of the last one, which never leaves the device."""
    model, copies, inputs = build_vgg("vgg_small_bn", num_classes=10).train().features, LateCopies(), []
    model.activation_stacks = ("",)
    global_batchnorm(model)
    blocks = plan_blocks(model, "full_offload").blocks
    with torch.no_grad():
        x = images = torch.randn(6, 3, 32, 32)
        for number, module in enumerate(model):
            inputs += [x.nbytes] if f"{number}" in {name.partition("..")[0] for name in blocks} else []
            x = module(x)
    assert len(inputs) == len(blocks)
    with moving_everything(copies), apply_plan(model, plan_blocks(model, "full_offload").in_micro_batches(4)):
        output = model(images)
        statistics = copies.bytes_out - sum(inputs[1:-1])
        output.sum().backward()
    # Of each layer: var, and the joined moments, in whose storage the mean and the number of values are.
    assert statistics == sum(4 * (3 * m.num_features + 1) for m in model if isinstance(m, nn.BatchNorm2d))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["vgg16_bn", "densenet121", "resnet50"])
def test_twenty_steps_of_the_real_models(name, micro_batch_size):
    model = build(name)
    twin = copy.deepcopy(model)
    with in_blocks(twin, "full", micro_batch_size):
        state = trained(twin, 20)
    assert relative_error(state, trained(model, 20)) < 1e-12


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_the_negative_control(micro_batch_size):
    """Local statistics are those of the whole batch only where it is not cut up."""
    model = build("densenet_small")
    images = torch.randn(8, 3, 32, 32).double()
    whole = model(images)
    parts = torch.cat([model(part) for part in images.split(micro_batch_size)])
    assert torch.allclose(whole, parts, rtol=1e-9) is (micro_batch_size == 8)


class OddLayers(nn.Module):
    """BatchNorm of several kinds, one of them used twice and one in evaluation mode, and two parallel branches."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(4, affine=False)
        self.linear = nn.Linear(4, 4)
        self.cumulative = nn.BatchNorm1d(4, momentum=None)
        self.untracked = nn.BatchNorm1d(4, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.cumulative(self.linear(self.first(x)).tanh())
        left, right = self.untracked(x.sin()), self.frozen(self.linear(x))
        return self.cumulative(left * right).relu()


def test_every_kind_of_batchnorm_layer():
    torch.manual_seed(0)
    model = OddLayers().double().train()
    model.frozen.eval()
    twin = copy.deepcopy(model)
    global_batchnorm(twin)
    x = torch.randn(7, 4).double()
    results = []
    for one, run in (
        (model, model),
        (twin, lambda x: in_micro_batches(twin.__call__, x, modules=[twin], micro_batch_size=3)),
    ):
        given = x.clone().requires_grad_()
        for _ in range(2):
            output = run(given)
            output.square().sum().backward()
        results.append([output, given.grad, *(p.grad for p in one.parameters() if p.grad is not None), *one.buffers()])
    assert len(results[0]) == len(results[1])
    for plain, ours in zip(*results, strict=True):
        assert torch.allclose(plain.double(), ours.double(), rtol=1e-11, atol=1e-12)


def test_gradients_of_a_block_with_dropout():
    """By finite differences: every run of a micro-batch draws the same mask, and another one than its neighbours."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Sigmoid()]
    block = nn.Sequential(*layers).double().train()
    global_batchnorm(block)

    def run(x):
        torch.manual_seed(5)
        return in_micro_batches(block.__call__, x, modules=[block], micro_batch_size=2)

    assert torch.autograd.gradcheck(run, torch.randn(5, 3).double().requires_grad_())
    masks = in_micro_batches(nn.Dropout(0.5).train(), torch.ones(4, 64), modules=[nn.Identity()], micro_batch_size=2)
    assert not torch.equal(masks[:2], masks[2:])
    first = torch.rand(1)
    run(torch.randn(5, 3).double())
    assert not torch.equal(first, torch.rand(1))


def test_statistics_are_wide_under_autocast():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    twin = copy.deepcopy(block)
    global_batchnorm(twin)
    x, weights = torch.randn(6, 3, 12, 12), torch.randn(6, 8, 10, 10)
    outputs = []
    for one, run in (
        (block, block),
        (twin, lambda x: in_micro_batches(twin.__call__, x, modules=[twin], micro_batch_size=2)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(run(x))
        outputs[-1].float().mul(weights).sum().backward()
        assert one[1].running_var.dtype == torch.float32
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    assert torch.allclose(*outputs, rtol=0.02, atol=0.02)
    assert torch.allclose(block[1].running_var, twin[1].running_var, rtol=1e-4)
    assert float((block[0].weight.grad - twin[0].weight.grad).norm() / block[0].weight.grad.norm()) < 0.02


def saved_bytes(model, images, plan=None):
    """Of the storages that a forward saves, without parameters and buffers."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    handle = apply_plan(model, plan) if plan else None
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)
    resident = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), images)}
    del output
    if handle:
        handle.remove()
    return sum(size for pointer, size in found.items() if pointer not in resident)


def test_a_block_saves_its_input_and_the_statistics():
    model = build_vgg("vgg_small_bn", num_classes=10).train().features
    model.activation_stacks = ("",)
    global_batchnorm(model)
    plan = plan_blocks(model, "full").in_micro_batches(2)
    images = torch.randn(6, 3, 32, 32)
    widths = [m.num_features for m in model if isinstance(m, nn.BatchNorm2d)]
    statistics = sum(4 * (2 * width + 1) for width in widths)
    inputs, x = [], images
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Conv2d | nn.MaxPool2d):
                inputs.append(x)
            x = module(x)
    expected = sum(one.nbytes for one in inputs if one is not images)
    # Of each layer: mean, var and the number of values, which share the storage of the joined moments.
    found = saved_bytes(model, images, plan)
    assert expected < found <= expected + 3 * statistics


def test_gradients_where_hooks_of_saved_tensors_give_back_others():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double().train()
    images, weights = torch.randn(4, 3, 6, 6).double(), torch.randn(4, 4, 4, 4).double()
    block(images).mul(weights).sum().backward()
    expected = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    global_batchnorm(block)
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        output = in_micro_batches(block.__call__, images, modules=[block], micro_batch_size=3)
    output.mul(weights).sum().backward()
    for parameter, gradient in zip(block.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-12)


def test_off_again():
    model = build_densenet("densenet_small", num_classes=10).train()
    global_batchnorm(model)
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with apply_plan(model, plan_blocks(model, "full").in_micro_batches(2)) as handle:
        assert handle.plan.describe() == (
            "full: 17 of 17 blocks recomputed in micro-batches of 2 (equal to plain within rounding, not bitwise)"
        )
        model.eval()
        images = torch.randn(4, 3, 32, 32)
        planned = model(images)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == forwards
    assert torch.equal(planned, model(images))


def test_on_a_cpu_inputs_stay_where_they_are():
    model = build_vgg("vgg_small_bn", num_classes=10).train()
    global_batchnorm(model)
    plans = [plan_blocks(model, one).in_micro_batches(2) for one in ("full", "full_offload")]
    images, gradients = torch.randn(4, 3, 32, 32), []
    for plan in plans:
        with apply_plan(model, plan):
            torch.manual_seed(0)
            model(images).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    assert plans[1].describe() == (
        "full_offload: 15 of 15 blocks recomputed in micro-batches of 2, their inputs offloaded to the host (equal to "
        "plain within rounding, not bitwise)"
    )
    assert plans[1].offloads == (Action.IN_MICRO_BATCHES_OFFLOAD,)
    assert not plans[1].is_bitwise
    assert Plan.from_json(plans[1].to_json()) == plans[1]


def test_a_plan_in_micro_batches_is_read_as_it_was_written():
    plan = Plan.from_json(plan_blocks(build_vgg("vgg_small_bn"), "segments:2").in_micro_batches(4).to_json())
    assert plan.micro_batch_size == 4
    assert plan.blocks_under(Action.IN_MICRO_BATCHES)
    assert plan.in_micro_batches(4) == plan
    with pytest.raises(InputError, match="written with micro-batches of 4: take this size"):
        plan.in_micro_batches(2)
    with pytest.raises(InputError, match="micro_batch_size"):
        Plan.from_json(plan.to_json().replace('"micro_batch_size": 4', '"micro_batch_size": 0'))


class TwoInputs(nn.Module):
    def forward(self, x, mask):
        return x * mask


def test_what_cannot_be_done_is_refused_by_name():
    vgg = build_vgg("vgg_small_bn")
    plan = plan_blocks(vgg, "full").in_micro_batches(2)
    with pytest.raises(InputError, match=r"takes batchnorm global: call global_batchnorm\(model\) first"):
        apply_plan(vgg, plan)
    with pytest.raises(InputError, match="strategy none recomputes no block, so none can run in micro-batches"):
        plan_blocks(vgg, "none").in_micro_batches(2)
    with pytest.raises(InputError, match="batchnorm global: VGG has no BatchNorm layers"):
        global_batchnorm(build_vgg("vgg_small"))
    with pytest.raises(InputError, match="SyncBatchNorm joins the ranks already"):
        global_batchnorm(nn.SyncBatchNorm.convert_sync_batchnorm(vgg))
    with pytest.raises(InputError, match=r"Identity takes tensors of \[2, 4\] samples"):
        in_micro_batches(torch.add, torch.ones(4), torch.ones(2), modules=[nn.Identity()], micro_batch_size=2)
