"""Block costs, measured: what they say of any plan is what a profiler then sees, to within a hundredth."""

import copy
import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from host_copies import HostCopies
from samples import sample
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from transformers import MegatronBertConfig, MegatronBertForMaskedLM, T5Config, T5ForConditionalGeneration
from workloads import CPU, measured_peak_bytes, peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.offload import OffloadEngine
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.costs.fake_step import FakeInstruments, Workspaces
from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Span, plan_for
from memsave_recipes.core.plans.simulate import host_bytes, simulate
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm

STRATEGIES = ["none", "full", "every:2", "segments:2", "segments:3", "selective"]


def t5():
    shape = {"d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 256}
    return T5ForConditionalGeneration(T5Config(vocab_size=256, decoder_start_token_id=0, use_cache=False, **shape)), (
        "input_ids",
        "labels",
    )


def megatron_bert():
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    return MegatronBertForMaskedLM(MegatronBertConfig(vocab_size=256, **shape)), ("input_ids", "labels")


LAYERS_THAT_RETURN_MORE = {"t5": t5, "megatron-bert": megatron_bert}


def errors(workload, strategies=STRATEGIES):
    """Predicted less measured peak above what is resident, as a part of it, for each strategy."""
    plans = [plan_for(word, workload.stacks) for word in ("none", "selective")]
    chain = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1)).chain()
    found = {}
    for strategy in strategies:
        plan = plan_for(strategy, workload.stacks)
        measured = measured_peak_bytes(workload, plan)
        found[strategy] = (simulate(chain, plan).peak_bytes - chain.resident_bytes) / measured - 1
    return found


def without_cache(model):
    if config := getattr(model, "config", None):
        config.use_cache = False
    return model


MODELS_BY_KIND = ["vgg_small", "densenet_small", "resnet50", "vit", "gpt2", "llama"]
FAST_PEAKS = [
    *(("float32", name) for name in ("vgg_small", "densenet_small", "llama")),
    *(("bf16", name) for name in ("vit", "gpt2")),
]


@pytest.mark.parametrize(("precision", "name"), sample(FAST_PEAKS, product(("float32", "bf16"), MODELS_BY_KIND)))
def test_predicted_peaks_are_those_that_are_measured(make_case, precision, name):
    case = make_case(name)

    def loss_of(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            return case.loss_of(model, batch)

    found = errors(workload_of(without_cache(case.model), loss_of, case.batch))
    assert max(found.values()) <= 0.05, found
    assert min(found.values()) >= 0, found


@pytest.mark.parametrize("name", ["vgg_small", "vit", "gpt2", "llama"])
def test_gradients_that_are_added_to_those_of_an_earlier_micro_batch(make_case, name):
    case = make_case(name)
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    plan = plan_for("full", workload.stacks)
    chain = measure(workload, [plan_for("none", workload.stacks)]).chain()
    chain = replace(chain, gradients_resident=True)
    accumulating = replace(chain, blocks=tuple(block.accumulating for block in chain.blocks))
    at_once, added = (simulate(one, plan).peak_bytes - chain.static_bytes for one in (chain, accumulating))

    with apply_plan(workload.model, plan):
        for _ in range(2):  # the first one leaves gradients
            measured = peak_bytes(lambda: workload.forward().backward())
    assert measured <= added <= 1.02 * measured
    assert added <= at_once


@pytest.mark.parametrize("name", ["vgg_small", "gpt2"])
def test_gradients_that_are_freed_count_as_if_they_stayed(make_case, monkeypatch, name):
    case = make_case(name)
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    live = []
    read_memory = DeviceInstruments.read_memory

    def noted(self, step):
        readings = list(read_memory(self, step))
        live.append(readings[-1].live_bytes)
        return readings

    monkeypatch.setattr(DeviceInstruments, "read_memory", noted)
    costs = []
    for gradients_stay in (True, False):
        measured = measure(
            replace(workload, gradients_stay=gradients_stay),
            [plan_for("none", workload.stacks)],
            instruments=DeviceInstruments(CPU, repetitions=1),
        )
        untimed = [replace(option, added_s=0, noise_s=0) for b in measured.chain().blocks for option in b.options]
        costs.append((untimed, [block.gradient_bytes for block in measured.chain().blocks]))
    assert costs[0] == costs[1]
    assert live[1] < live[0]


def test_of_new_gradients_one_at_a_time_is_beside_those_of_an_earlier_micro_batch():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x)).sum()

    workload = workload_of(Own(), lambda model, batch: model(batch), torch.randn(2, 64), [["first", "second"]])
    chain = measure(workload, [plan_for("none", workload.stacks)]).chain()
    (second,) = (block for block in chain.blocks if block.name == "second")
    of_one_layer = 4 * (64 * 64 + 64)
    keep = second.option(Action.KEEP)
    less = keep.backward_transient_bytes - second.accumulating.option(Action.KEEP).backward_transient_bytes
    assert less == keep.accumulated_bytes
    assert 2 * of_one_layer - keep.saved_bytes <= less <= 2 * of_one_layer  # the inputs of two layers are gone by then


@pytest.mark.parametrize("name", ["t5", "megatron-bert"])
def test_what_layers_return_beside_their_states_is_not_handed_on(name):
    """A position bias that all layers share gets its gradient last, attention weights that nobody takes get none."""
    torch.manual_seed(0)
    model, inputs = LAYERS_THAT_RETURN_MORE[name]()
    tokens = torch.randint(3, 256, (4, 64))
    workload = workload_of(model.train(), lambda model, batch: model(**dict.fromkeys(inputs, batch)).loss, tokens)
    found = errors(workload, ["none", "full", "selective"])
    assert max(found.values()) <= 0.05, found  # arguments count from the first forward to the last backward
    assert min(found.values()) >= 0, found


def test_garbage_that_is_collected_meanwhile_is_no_memory_of_the_step(make_case):
    """A whole test suite leaves tensors behind that Python releases when it comes to it, in a measured step too."""
    case = make_case("gpt2")
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    plan = plan_for("none", workload.stacks)
    garbage = []
    case.model.transformer.h[2].register_forward_pre_hook(lambda *_: garbage.clear())

    def peak_with(num_tensors):
        class Instruments(DeviceInstruments):
            def read_memory(self, step):
                garbage.extend(torch.empty(2**18) for _ in range(num_tensors))
                return super().read_memory(step)

        return simulate(measure(workload, [plan], instruments=Instruments(CPU, 1)).chain(), plan).peak_bytes

    assert peak_with(8) == peak_with(0)


class NormalizesImages(nn.Module):
    """Under autocast the first convolution saves a cast of the normalized images, which a variable holds."""

    def __init__(self):
        super().__init__()
        widths = [(3, 8), *[(8, 8)] * 4]
        self.features = nn.Sequential(*(nn.Sequential(nn.Conv2d(*width, 3, padding=1), nn.ReLU()) for width in widths))

    def forward(self, images):
        images = images * 2 - 1
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            features = self.features(images).mean()
        return features + 0 * images.shape[0]


def test_variables_of_the_model_are_there_through_the_forward_alone():
    torch.manual_seed(0)
    model, images = NormalizesImages(), torch.rand(2, 3, 64, 64)
    workload = workload_of(model, lambda model, batch: model(batch), images)
    plans = [plan_for(strategy, workload.stacks) for strategy in ("none", "selective")]
    chain = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1)).chain()
    kept, selective = (plan.spans for plan in plans)
    assert len(kept) == 5
    for number in range(6):
        plan = replace(plans[0], spans=(*kept[:number], *selective[number:]))
        peak_bytes = simulate(chain, plan).peak_bytes
        measured_bytes = measured_peak_bytes(workload, plan) + workload.resident_bytes
        assert 0 <= peak_bytes - measured_bytes <= images.nbytes, number
        assert number < 1 or peak_bytes - measured_bytes < images.nbytes / 2, number


class AddsInBfloat16(nn.Module):
    """In the backward the sum hands its gradient on in another dtype before a saved tensor is read.

    The mean makes the forward the peak.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        with torch.no_grad():
            scale = x.repeat(1, 16).exp().mean()
        return x + (scale * self.linear(x)).bfloat16()


def test_the_gradient_of_an_output_in_another_dtype_is_there_while_its_span_runs_again():
    model = nn.Sequential(*(AddsInBfloat16() for _ in range(4)))
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(256, 64))
    assert errors(workload, ["none", "full", "segments:2"]) == {"none": 0, "full": 0, "segments:2": 0}


def test_frozen_layers_have_no_backward(make_case):
    """As under LoRA, or where only a head trains."""
    case = make_case("llama")
    without_cache(case.model).requires_grad_(False)
    case.model.model.layers[2].requires_grad_(True)
    workload = workload_of(case.model, case.loss_of, case.batch)
    running = measure(workload, [plan_for("none", workload.stacks)]).running
    assert plan_blocks(case.model, "segments:2", running).recomputed == ("model.layers.2",)
    found = errors(workload, ["none", "full"])
    assert found["none"] == 0
    assert found["full"] == 0, found


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(mask @ x).tanh()


def test_what_frozen_layers_take_is_not_held():
    """As the mask of a frozen tower, which is gone when the decoder runs."""

    class TowerAndDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.ModuleList(Masked(64, 64) for _ in range(3)).requires_grad_(False)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3)))

        def encoded(self, x):
            mask = torch.ones(len(x), len(x))
            for layer in self.tower:
                x = layer(x, mask)
            return x

        def forward(self, x):
            return self.layers(self.encoded(x)).square().mean()

    stacks = [[f"{stack}.{number}" for number in range(3)] for stack in ("tower", "layers")]
    workload = workload_of(TowerAndDecoder(), lambda model, batch: model(batch), torch.randn(256, 64), stacks)
    found = errors(workload, ["none", "full"])
    assert found["none"] == 0
    assert 0 <= found["full"] <= 0.001, found


def test_the_gradient_of_a_tied_weight_is_born_with_the_head(make_case):
    case = make_case("gpt2")
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    chain = measure(workload, [plan_blocks(case.model, "none")]).chain()
    embedding = case.model.transformer.wte.weight
    assert chain.blocks[-1].gradient_bytes >= embedding.nbytes
    assert chain.blocks[0].gradient_bytes == case.model.transformer.wpe.weight.nbytes
    assert chain.all_gradients_bytes == sum(parameter.nbytes for parameter in case.model.parameters())


def test_blocks_of_ones_own_by_their_names():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(64, 1)

        def forward(self, x):
            x = self.second(self.first(x))
            return self.head(self.third(x)).mean()

    torch.manual_seed(0)
    batch = torch.randn(512, 64)
    names = ["first", "second", "third"]
    found = errors(
        workload_of(Own(), lambda model, batch: model(batch), batch, [names]), ["none", "full", "segments:2"]
    )
    assert max(map(abs, found.values())) <= 0.01, found


def test_a_model_that_runs_a_block_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.layers(self.layers(x)).sum()

    workload = workload_of(Twice(), lambda model, batch: model(batch), torch.randn(2, 4))
    with pytest.raises(InputError, match="does not run its 2 blocks once each"):
        measure(workload, [plan_for("none", workload.stacks)])


def test_a_model_that_differentiates_in_its_forward_is_planned():
    """As one with a gradient penalty; its blocks cannot select operators, which is no option then."""

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

        def forward(self, x):
            x = x.clone().requires_grad_()
            loss = self.layers(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.square().mean()

    workload = workload_of(Penalised(), lambda model, batch: model(batch), torch.randn(2048, 64))
    plans = [plan_for(word, workload.stacks) for word in ("none", "selective", "full")]
    assert [plan.strategy for plan, _ in measure(workload, plans).traces] == ["none", "full"]


@pytest.mark.parametrize("skipped_at", [3, 5])
def test_a_model_that_skips_a_block_by_chance_is_refused(skipped_at):
    """In the step that shows what selecting operators keeps, or in one that is only timed."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.num_forwards = 0

        def forward(self, x):
            self.num_forwards += 1
            for layer in self.layers[1:] if self.num_forwards == skipped_at + 1 else self.layers:
                x = layer(x)
            return x.sum()

    workload = workload_of(Drawn(), lambda model, batch: model(batch), torch.randn(2, 4))
    plans = [plan_for(word, workload.stacks) for word in ("none", "selective")]
    with pytest.raises(InputError, match="does not run its 2 blocks once each, in every step"):
        measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1))


@pytest.mark.parametrize("name", sample(["vgg_small", "vit", "llama"], ["vgg_small", "densenet_small", "vit", "llama"]))
def test_on_paper_the_peaks_are_those_of_the_device(make_case, name):
    case = make_case(name)
    real = workload_of(without_cache(case.model), case.loss_of, case.batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model, batch = copy.deepcopy(case.model), copy.deepcopy(case.batch)
    keep = plan_for("none", real.stacks)
    chain = measure(real, [keep]).chain()
    with mode:
        fake = workload_of(model, case.loss_of, batch)
        instruments = FakeInstruments(CPU, seconds_of=lambda *_: 0.0, workspace_of=Workspaces().of)
        on_paper = measure(fake, [keep], instruments=instruments).chain()
    assert on_paper.resident_bytes == chain.resident_bytes
    for strategy in ("none", "full", "segments:3"):
        plan = plan_for(strategy, real.stacks)
        device, paper = (simulate(c, plan).peak_bytes - c.resident_bytes for c in (chain, on_paper))
        assert 0.9 * device <= paper <= 1.1 * device


def test_on_paper_time_is_that_of_the_operators():
    mode = FakeTensorMode()
    with mode:
        model, batch = nn.Sequential(nn.Linear(256, 256, bias=False)), torch.randn(64, 256)
        workload = workload_of(model, lambda model, batch: model(batch).sum(), batch)
        instruments = FakeInstruments(
            torch.device("cuda"), seconds_of=lambda operation, dtype, flops, num_bytes, extent: flops / 1e6
        )
        chain = measure(workload, [plan_for("none", workload.stacks)], instruments=instruments).chain()
    block = next(block for block in chain.blocks if block.stack is not None)
    assert block.forward_s == pytest.approx(2 * 64 * 256 * 256 / 1e6)
    assert block.backward_s == pytest.approx(2 * 64 * 256 * 256 / 1e6)  # the batch needs no gradient


MOVES = {"offload": 2 * 1024 * 512 * 4, "full_offload": 1024 * 512 * 4}
"""The most that a block moves: its input, and with it what GELU saves."""


@pytest.mark.parametrize("strategy", MOVES)
def test_offloaded_blocks_need_no_more_than_was_predicted(monkeypatch, strategy):
    mover = OffloadEngine(CPU, HostCopies())
    monkeypatch.setitem(RUN, Action.OFFLOAD, mover.run)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)), nn.Linear(512, 1))
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(1024, 512))
    plans = [plan_for(word, workload.stacks) for word in ("none", strategy)]
    measured = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1))
    chain = measured.chain(offload=plans[1].offloads)
    assert chain.resident_bytes == workload.resident_bytes + 2 * MOVES[strategy]
    (action,) = plans[1].offloads
    plain = measured_peak_bytes(workload, plans[0])
    every_other = [Span(start=i, stop=i + 1, action=action if i % 2 else Action.KEEP) for i in range(9)]
    first_half = [Span(start=i, stop=i + 1, action=action if i < 4 else Action.KEEP) for i in range(9)]
    for spans in (plans[1].spans, every_other, first_half):
        plan = replace(plans[1], spans=tuple(spans))
        predicted = simulate(chain, plan).peak_bytes - workload.resident_bytes
        found = measured_peak_bytes(workload, plan)
        assert found <= predicted <= 1.5 * found
        assert found < 0.9 * plain


@pytest.mark.parametrize("name", sample([], ["vgg_small_bn", "densenet_small"]))
def test_no_peak_with_inputs_of_micro_batches_on_the_host_is_predicted_low(monkeypatch, name):
    monkeypatch.setitem(RUN, Action.OFFLOAD, OffloadEngine(CPU, HostCopies(), smallest_bytes=1).run)
    monkeypatch.setattr("memsave_recipes.core.costs.step_trace.SMALLEST_BYTES", 1)
    torch.manual_seed(0)
    model = MODELS[name](num_classes=10).train()
    global_batchnorm(model)
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(6, 3, 32, 32))
    in_micro_batches = [plan_for(word, workload.stacks).in_micro_batches(2) for word in ("full", "full_offload")]
    plans = [plan_for("none", workload.stacks), *in_micro_batches]
    measured = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1))
    chain = measured.chain(offload=(Action.IN_MICRO_BATCHES_OFFLOAD,))
    choices = [Action.KEEP, Action.RECOMPUTE, Action.IN_MICRO_BATCHES, Action.IN_MICRO_BATCHES_OFFLOAD]
    rng = random.Random(0)
    drawn = [tuple(rng.choices(choices, k=len(plans[0].blocks))) for _ in range(3)]
    for actions in ((Action.IN_MICRO_BATCHES_OFFLOAD,) * len(plans[0].blocks), *drawn):
        spans = tuple(Span(start=i, stop=i + 1, action=action) for i, action in enumerate(actions))
        plan = replace(plans[1], spans=spans)
        predicted = simulate(chain, plan).peak_bytes - workload.resident_bytes
        found = measured_peak_bytes(workload, plan)
        assert found <= predicted <= 1.5 * found, actions
        assert host_bytes(chain, plan) > 0


@pytest.mark.parametrize(
    "name", sample(["vgg_small", "llama"], ["vgg_small", "densenet_small", "vit", "gpt2", "llama"])
)
def test_no_peak_with_inputs_on_the_host_is_predicted_low(make_case, monkeypatch, name):
    monkeypatch.setitem(RUN, Action.OFFLOAD, OffloadEngine(CPU, HostCopies(), smallest_bytes=1).run)
    monkeypatch.setattr("memsave_recipes.core.costs.step_trace.SMALLEST_BYTES", 1)
    case = make_case(name)
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    tiled = ("full_tiled:8", "full_tiled_offload:8") if name in ("gpt2", "llama") else ()
    plans = [plan_for(word, workload.stacks) for word in ("none", "offload", "full_offload", *tiled)]
    measured = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1))
    rng = random.Random(0)
    bitwise = [Action.OFFLOAD, Action.RECOMPUTE_OFFLOAD]
    in_tiles = [Action.RECOMPUTE_TILED, Action.RECOMPUTE_TILED_OFFLOAD]
    for allowed in (bitwise[1:], bitwise, *([[*bitwise, *in_tiles]] if tiled else [])):
        offload = [action for action in allowed if action.kind.on_host]
        chain = measured.chain(offload=offload, tiles=in_tiles[0] in allowed)
        choices = [Action.KEEP, Action.RECOMPUTE, *allowed]
        drawn = [rng.choices(choices, k=len(plans[0].blocks)) for _ in range(3)]
        for actions in ([Action.RECOMPUTE_OFFLOAD] * len(plans[0].blocks), *drawn):
            spans = tuple(Span(start=i, stop=i + 1, action=action) for i, action in enumerate(actions))
            plan = replace(plans[0], spans=spans, mlp_tile_tokens=8 if {*in_tiles} & {*actions} else None)
            predicted = simulate(chain, plan).peak_bytes - workload.resident_bytes
            found = measured_peak_bytes(workload, plan)
            assert found <= predicted, actions


@pytest.mark.parametrize("name", sample(["vgg_small"], ["vgg_small", "densenet_small", "vit", "gpt2", "llama"]))
def test_small_storages_stay_on_the_device(make_case, monkeypatch, name):
    case = make_case(name)
    workload = workload_of(without_cache(case.model), case.loss_of, case.batch)
    keeping, offloading = (plan_for(word, workload.stacks) for word in ("none", "offload"))
    once = DeviceInstruments(CPU, repetitions=1)
    ((_, baseline),) = measure(workload, [keeping], instruments=once).traces
    sizes = sorted(size for part in baseline.parts if part.block for size in (part.saved | part.inputs).values())
    every_other = [
        Span(start=i, stop=i + 1, action=Action.OFFLOAD if i % 2 else Action.RECOMPUTE)
        for i in range(len(keeping.blocks))
    ]
    mixed = replace(offloading, spans=tuple(every_other))
    for smallest in (sizes[len(sizes) // 2] + 1, sizes[-1] + 1):
        monkeypatch.setitem(RUN, Action.OFFLOAD, OffloadEngine(CPU, HostCopies(), smallest_bytes=smallest).run)
        monkeypatch.setattr("memsave_recipes.core.costs.step_trace.SMALLEST_BYTES", smallest)
        chain = measure(workload, [keeping, offloading], instruments=once).chain(offload=[Action.OFFLOAD])
        for plan in (offloading, mixed):
            predicted = simulate(chain, plan).peak_bytes - workload.resident_bytes
            found = measured_peak_bytes(workload, plan)
            assert found <= predicted
            assert predicted <= 1.01 * found or smallest <= sizes[-1]  # where nothing moves


def test_an_action_that_the_model_refuses_is_no_option():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x += 1  # which a second run would begin with
            return self.linear(x.tanh())

    model = nn.Sequential(Biased(), Biased())
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(4, 8))
    plans = [plan_for(word, workload.stacks) for word in ("none", "selective")]
    chain = measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1)).chain()
    assert {option.action for block in chain.blocks for option in block.options} == {Action.KEEP}


@pytest.mark.filterwarnings("ignore:offload. the model runs on a CPU")
def test_offloading_is_not_tried_where_the_host_has_no_memory_for_it():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3)))
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(1024, 512))
    plans = [plan_blocks(model, word) for word in ("none", "offload", "full_offload")]
    inputs = 2 * 1024 * 512 * 4 * 9 // 8  # of two: the batch is the first one's
    saved = 5 * 1024 * 512 * 4 * 9 // 8  # and three products
    for host_budget_bytes, count in ((None, 3), (saved, 3), (saved - 1, 2), (inputs, 2), (inputs - 1, 1)):
        assert len(measure(workload, plans, host=Host(host_budget_bytes)).traces) == count
