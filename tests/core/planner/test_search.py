"""Which candidate is chosen, what fills it, and what is said when none fits."""

import json
from dataclasses import replace

import pytest
import torch
from chains import block, option
from torch import nn

from memsave_recipes.core.activations.streaming import WeightStream, stream_weights
from memsave_recipes.core.costs.block_costs import Workload
from memsave_recipes.core.costs.targets import Host, find_target
from memsave_recipes.core.planner.budget import (
    Forecast,
    StaticMemory,
    overheads_of_target,
    static_memory_of,
    usable_bytes,
    usable_host_bytes,
    workspaces_of_device,
)
from memsave_recipes.core.planner.search import Candidate, Choice, open_layouts, search
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.core.plans.chain import CPU, CUDA, Chain
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.tools.fit.advice import HostUse
from memsave_recipes.tools.pages.choice import fits_text, overhead_lines, rival_lines, summarize
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from tests.decoders import CopiesAtOnce, causal_model

MODEL = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
WEIGHTS = sum(parameter.nbytes for parameter in MODEL.parameters())
STATE = 2 * WEIGHTS
BATCH = 400


def chain(size, seconds=1.0):
    """Two blocks whose activations grow with the micro-batch."""
    keep = option(saved=10_000 * size, forward=10, backward=20, saves="i")
    costs = {"seconds": seconds * size, "output": 100 * size, "gradient": WEIGHTS // 2}
    blocks = [block(name, keep, **costs) for name in ("0", "1")]
    return Chain(blocks=tuple(blocks), resident_bytes=WEIGHTS + STATE + BATCH)


def candidate(size=4, word="none", *, seconds=1.0, budget=10**9, static=None, overheads=None):
    return Candidate(
        layout=BatchLayout.of(16, size, 1),
        loss=None,
        forecast=Forecast(plan=plan_for(word, [["0", "1"]]), chain=chain(size, seconds)),
        weights_bytes=WEIGHTS,
        static=static or StaticMemory(state_bytes=STATE),
        overheads=overheads or {},
        budget_bytes=budget,
    )


@pytest.mark.parametrize("word", ["none", "full"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_parts_add_up_to_what_is_needed(word, accumulates):
    one = candidate(word=word, static=StaticMemory(state_bytes=STATE), overheads={"CUDA context": 77})
    one = replace(
        one, forecast=replace(one.forecast, chain=replace(one.forecast.chain, gradients_resident=accumulates))
    )
    assert sum(one.parts.values()) == one.needed_bytes
    assert one.parts["parameters"] == WEIGHTS
    assert one.parts["optimizer state"] == STATE
    assert one.parts["CUDA context"] == 77
    if accumulates:
        assert one.parts["gradients"] == WEIGHTS


def test_the_fastest_that_fits_is_chosen_and_among_equals_the_simplest():
    slow = candidate(size=4, seconds=2.0)
    recomputing = candidate(size=8, word="full", seconds=0.75)  # 0.75 * (3 + 1) is 1.0 * 3
    plain = candidate(size=4)
    assert Choice(candidates=(slow, recomputing, plain)).chosen is plain
    undivided = candidate(size=16)
    assert Choice(candidates=(plain, undivided)).chosen is undivided
    assert Choice(candidates=(slow, candidate(seconds=0.5, budget=1))).chosen is slow
    assert Choice(candidates=(candidate(budget=1),)).chosen is None


def test_a_step_adds_gradients_and_updates():
    """Four micro-batches of four: three times one more gradient."""
    static = StaticMemory(device_updated_bytes=40, adding_bytes=12)
    one, rate = candidate(size=4, static=static), {"memory_bytes_per_s": 4.0}
    assert replace(one, **rate).step_s == one.step_s + 10 + 3 * 3
    whole = candidate(size=16, static=static)
    assert replace(whole, **rate).step_s == whole.step_s + 10


def with_noise(one, part):
    """Recomputing takes its seconds, give or take this part of them."""
    blocks = tuple(replace(b, forward_noise_s=part * b.forward_s) for b in one.forecast.chain.blocks)
    return replace(one, forecast=replace(one.forecast, chain=replace(one.forecast.chain, blocks=blocks)))


def test_within_the_noise_the_plan_that_is_surely_no_slower_is_chosen():
    plain = candidate(size=4)  # 96 s
    recomputing = candidate(size=8, word="full", seconds=0.72)  # 92 s, 23 s of them in the second run
    quiet = Choice(candidates=(plain, with_noise(recomputing, 0.05)))
    assert quiet.chosen.strategy == "full"
    assert rival_lines(quiet) == quiet.rivals == []
    loud = Choice(candidates=(plain, with_noise(recomputing, 0.2)))
    assert loud.chosen is plain
    assert [(one.strategy, round(noise, 3)) for one, noise in loud.rivals] == [("full", 0.048)]
    (line,) = rival_lines(loud)
    assert line == "none at 4 x 4 is as fast as full at 8 x 2 within the noise of the measurement (±4.8 %)"
    assert Choice(candidates=(candidate(size=4), candidate(size=8))).rivals == []  # the same time, computed


def test_the_noise_is_printed_where_there_is_any():
    one = with_noise(candidate(word="full"), 0.1).forecast  # 24 s and 8 s, 0.8 s of noise
    assert "32000.0 ms ± 800.0 ms (baseline: 24000.0 ms, x1.33)" in summarize(one, 10**9)
    assert "±" not in summarize(candidate(word="full").forecast, 10**9)
    prediction = one.prediction
    assert json.loads(prediction.to_json())["noise_s"] == pytest.approx(0.8)
    assert "32000.0 ms ± 800.0 ms (baseline 24000.0 ms)" in str(prediction)


def offloading(host_budget=None, size=4):
    """Faster than plain, with two of its blocks' three on the device and 40,000 bytes a block to move."""
    one = candidate(size)
    blocks = tuple(
        replace(block, options=(*block.options, replace(block.options[0], action=Action.OFFLOAD, saved_bytes=0)))
        for block in one.forecast.chain.blocks
    )
    chain = replace(one.forecast.chain, blocks=blocks)
    plan = plan_for("offload", [["0", "1"]])
    return replace(one, forecast=Forecast(plan=plan, chain=chain), host=Host(host_budget))


def test_what_the_host_has_no_memory_for_does_not_fit():
    moved = 40_000 * 9 // 8  # of the first block; the second is the last
    assert offloading().host_bytes == moved
    assert offloading().fits  # of a host that is not known
    assert offloading(moved).fits
    assert not offloading(moved - 1).fits
    slow = candidate(seconds=2.0)
    assert Choice(candidates=(offloading(moved), slow)).chosen.strategy == "offload"
    assert Choice(candidates=(offloading(moved - 1), slow)).chosen is slow
    assert Choice(candidates=(offloading(moved - 1), slow)).smallest is slow


def test_a_host_that_is_too_small_is_named_by_the_error():
    line = HostUse.of(offloading(1024)).too_small.one_line
    assert "--activation_checkpointing offload: a rank would move 43.9 KiB to its host, which has 1 KiB" in line
    assert fits_text(offloading(1024)) == "no, host +42.9 KiB"
    told = "43.9 KiB of the host's memory for a rank, of 1 MiB that are available to it"
    assert HostUse.of(offloading(1024**2)).line.endswith(told)


def with_state_on_host(num_bytes, there=None):
    """A candidate whose optimizer waits for as many bytes as it pins."""
    one = candidate(static=StaticMemory(host_bytes=num_bytes, awaited_bytes=num_bytes))
    held = replace(one.forecast, chain=replace(one.forecast.chain, host_bytes=num_bytes))
    return replace(one, forecast=held, host=Host(there, bytes_per_s=1024.0))


def test_a_step_waits_for_state_from_the_host():
    assert with_state_on_host(2048).step_s == candidate().step_s + 2
    assert "optimizer state: the device waits 2 s of a step for 2 KiB of copies (estimated)" in overhead_lines(
        with_state_on_host(2048)
    )


def test_a_step_waits_for_the_update_on_the_host():
    there = replace(candidate(static=StaticMemory(updated_bytes=2048)), host=Host(memory_bytes_per_s=1024.0))
    assert there.step_s == candidate().step_s + 2
    assert "optimizer step: the host takes 2 s, of which the device waits 2 s (estimated)" in overhead_lines(there)


@pytest.mark.parametrize(("update_s", "waits_s"), [(8, 0), (20, 4)])
def test_the_backward_hides_an_update_beside_it(update_s, waits_s):
    static = StaticMemory(updated_bytes=update_s, updates_in_backward=True)
    beside = replace(candidate(static=static), host=Host(memory_bytes_per_s=1.0))
    assert sum(one.backward_s for one in beside.forecast.chain.blocks) == 16
    assert beside.awaited_s == waits_s


def test_gradients_that_leave_are_there_up_to_a_limit():
    option_of = replace(option(saved=0, forward=0, backward=200), accumulated_bytes=90)
    blocks = [replace(block(name, option_of, gradient=100), tied_gradient_bytes=30 * (name == "b")) for name in "abc"]
    static = StaticMemory(gradients_stay=False, leaving_bytes=150)
    found = static.added_to(Chain(blocks=tuple(blocks), resident_bytes=0)).blocks
    assert [one.gradient_bytes for one in found] == [0, 50 + 30, 100]  # of the last one all, one of b waits for a use
    assert [one.options[0].backward_transient_bytes for one in found] == [110, 110 + 50, 200]


def test_a_host_that_state_is_too_large_for_is_named_by_the_error():
    assert with_state_on_host(2048, 2048).fits
    assert not with_state_on_host(2048, 2047).fits
    line = HostUse.of(with_state_on_host(2048, 1024)).too_small.one_line
    assert "--offload_optimizer: a rank would move 2 KiB to its host, which has 1 KiB available for it" in line
    assert line.endswith("take --offload_optimizer none, or an optimizer with less state")


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    accelerator = torch.device("meta")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = usable_host_bytes(accelerator)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert usable_host_bytes(accelerator) < alone / 100
    assert usable_host_bytes(torch.device("cpu")) is None


def test_the_search_ends_with_the_first_size_that_nothing_of_fits():
    looked_at = []

    def candidates_of(layout, loss):
        looked_at.append((layout.micro_batch_size, loss))
        return [candidate(layout.micro_batch_size, budget=WEIGHTS * 4 + 60_000)]

    choice = search(BatchLayout.of(16, None, 1).halvings, ("full", "chunked"), candidates_of)
    assert looked_at == [(size, loss) for size in (1, 2, 4, 8) for loss in ("full", "chunked")]
    assert not choice.candidates[-1].fits
    assert choice.chosen.layout.micro_batch_size == 4


def test_micro_batches_are_halvings_of_a_ranks_share():
    assert [layout.micro_batch_size for layout in BatchLayout.of(48, None, 2).halvings] == [1, 2, 3, 6, 12, 24]
    assert [layout.accumulation_steps for layout in BatchLayout.of(48, None, 2).halvings] == [24, 12, 8, 4, 2, 1]
    assert [layout.micro_batch_size for layout in BatchLayout.of(5, None, 1).halvings] == [1, 2, 3, 5]


def flags(**changes):
    return RunArguments(output_dir="out", global_batch_size=8, memory_budget_gib=1.0, **changes)


def test_flags_leave_open_what_they_do_not_name():
    optim = OptimizerArguments()
    named = open_layouts(flags(micro_batch_size="4", activation_checkpointing="budget"), optim, 1)
    assert [layout.micro_batch_size for layout in named] == [4]
    free = open_layouts(flags(micro_batch_size="auto"), optim, 2)
    assert [layout.micro_batch_size for layout in free] == [1, 2, 4]
    in_backward = OptimizerArguments(optimizer_in_backward=True, max_grad_norm=0)
    undivided = open_layouts(flags(micro_batch_size="auto"), in_backward, 1)
    assert [layout.micro_batch_size for layout in undivided] == [8]


def test_what_the_allocator_holds_besides_known_tensors_are_workspaces(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda of: 1000 if of is device else 0)
    assert workspaces_of_device(device, known_bytes=900) == {"workspaces": 100}
    assert workspaces_of_device(device, known_bytes=1100) == {"workspaces": 0}
    assert workspaces_of_device(torch.device("cpu"), known_bytes=900) == {}


def test_on_paper_two_threads_multiply():
    target = find_target("a100")
    assert overheads_of_target(target)["workspaces"] == 2 * target.cublas_workspace_bytes > 0


@pytest.mark.parametrize(("layout_of", "of_a_step"), [(BatchLayout, 8), (IndexedLayout, 12), (LockstepLayout, 36)])
def test_losses_and_norms_count_until_they_are_logged(layout_of, of_a_step):
    """In blocks of 512 bytes; of 4 micro-batches, that a bitwise topology keeps apart and lockstep makes at once."""
    layout = layout_of.of(8, 2, 1)
    static = static_memory_of(OptimizerArguments(), nn.Linear(1, 1), layout, logging_steps=10, device=CUDA)
    assert static.losses_bytes == 512 * (of_a_step + 2 * 10)


@pytest.mark.parametrize(
    ("optimizer", "blocks"),
    # gradients and state of a (64, 65) and a (64,) in float32: 33 and 1 blocks each; then what steps them at most
    [("adamw", 2 * 34 + 2), ("sgd", 34), ("adafactor", 1 + 1 + 1), ("adamw_8bit", 2 * (9 + 1) + 2 * 1 + 4)],
)
def test_an_accelerator_counts_whole_blocks_of_512_bytes(optimizer, blocks):
    model, layout = nn.Linear(65, 64), BatchLayout.of(4, 2, 2)
    optim = OptimizerArguments(optimizer=optimizer)
    static = static_memory_of(optim, model, layout, device=CUDA)
    assert static.buckets_bytes == 34 * 512
    assert static.state_bytes == blocks * 512
    assert static_memory_of(optim, model, layout).buckets_bytes == 4 * (64 * 65 + 64)
    workload = Workload(
        model=model, forward=torch.rand, batch=[torch.rand(3)], device=torch.device("cuda"), stacks=[["0"]]
    )
    assert workload.weights_bytes == 34 * 512
    assert workload.resident_bytes == 35 * 512


def test_a_cpu_has_no_overheads():
    assert overheads_of_target(find_target("cpu")) == {}


def test_workspaces_are_allocated_and_the_context_is_not():
    one = candidate(overheads={"CUDA context": 77, "workspaces": 11})
    assert one.allocated_bytes == one.peak_bytes + 11


def test_without_a_budget_a_device_is_not_filled():
    assert usable_bytes(1000, CUDA) == 950
    assert usable_bytes(1000, CPU) == 1000


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_streamed_weights_are_in_no_bucket_and_their_average_is_on_the_host(num_micro_batches):
    model = causal_model("llama")
    stream_weights(model, WeightStream(torch.device("cpu"), CopiesAtOnce()), trained=True)
    resident = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    on_device = sum(-(-one.nbytes // 512) * 512 for one in resident)
    of_layers = [one for layer in model.model.layers for one in layer.parameters()]

    def static(num_ranks, **options):
        layout = BatchLayout.of(4 * num_ranks, 4 // num_micro_batches, num_ranks)
        optim = OptimizerArguments(offload_optimizer="step", **options)
        return static_memory_of(optim, model, layout, device=CUDA)

    alone, two, averaged = static(1), static(2), static(2, ema_decay=0.9)
    assert (alone.buckets_bytes, two.buckets_bytes) == (0, on_device)
    kept = 0 if num_micro_batches == 1 else on_device  # of earlier micro-batches, outside of the buckets
    assert two.sums_bytes - alone.sums_bytes == max(one.nbytes for one in of_layers) + kept
    assert averaged.state_bytes - two.state_bytes == on_device
    assert averaged.host_bytes - two.host_bytes == sum(one.nbytes for one in of_layers)
