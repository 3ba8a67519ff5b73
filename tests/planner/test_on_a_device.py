"""On an accelerator, which counts whole blocks, no prediction is below the peak of training, or far above."""

import gc

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from memsave_recipes.activations import apply_plan, block_names, find_stacks, offload
from memsave_recipes.activations.streaming import place
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.planner.budget import Forecast, static_memory_of
from memsave_recipes.plans import plan_for
from memsave_recipes.profiling.block_costs import Workload, measure
from memsave_recipes.profiling.trace_events import DeviceInstruments
from memsave_recipes.step.batch_layout import BatchLayout
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import clip_gradients, make_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
OPTIMIZERS = {
    "adamw": OptimizerArguments(),
    "sgd": OptimizerArguments(optimizer="sgd", momentum=0.9),
    "adafactor": OptimizerArguments(optimizer="adafactor"),
    "muon": OptimizerArguments(optimizer="muon"),
    "bf16": OptimizerArguments(bf16_stochastic_round=True),
}
WITHIN = 0.04  # of 1 to 4 MiB


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=300, num_key_value_heads=2, use_cache=False))


def adapted_llama():
    model = llama()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


MAKE = {
    "llama": llama,
    "streamed": adapted_llama,
    "bert": lambda: BertForSequenceClassification(BertConfig(**SHAPE, vocab_size=300)),
    "densenet": lambda: MODELS["densenet_small"](num_classes=10),
}


def loss_of(model, batch):
    if batch.ndim == 4:
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device=batch.device))
    return model(input_ids=batch, labels=batch if isinstance(model, LlamaForCausalLM) else batch[:, 0]).loss


def workload_of(name, dtype, device):
    torch.manual_seed(0)
    model = MAKE[name]().to(dtype).train()
    place(model, device, streamed="frozen" if name == "streamed" else "none")
    images, tokens = torch.zeros(4, 3, 32, 32, dtype=dtype), torch.zeros(4, 32, dtype=torch.long)
    batch = (images if name == "densenet" else tokens).to(device)
    stacks = block_names(find_stacks(model))
    return Workload(model=model, forward=lambda: loss_of(model, batch), batch=[batch], device=device, stacks=stacks)


@pytest.fixture(scope="module", autouse=True)
def workspaces():
    """What CUDA's libraries allocate at their first call and keep."""
    for name in MAKE:
        for dtype in (torch.float32, torch.bfloat16):
            workload_of(name, dtype, torch.device("cuda", 0)).forward().backward()


@pytest.mark.parametrize(("word", "accumulation_steps"), [("none", 1), ("full", 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MAKE)
def test_no_prediction_is_below_the_peak_of_training(name, optimizer, word, accumulation_steps):
    if (name, optimizer) == ("densenet", "muon"):
        pytest.skip("it has no matrix of a hidden layer")
    device, optim = torch.device("cuda", 0), OPTIMIZERS[optimizer]
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    workload = workload_of(name, torch.bfloat16 if optim.bf16_stochastic_round else torch.float32, device)
    keeping, plan = (plan_for(strategy, workload.stacks) for strategy in ("none", word))
    chain = measure(workload, [keeping], instruments=DeviceInstruments(device, repetitions=1), most_s=0).chain()
    layout = BatchLayout.of(4 * accumulation_steps, 4, 1)
    static = static_memory_of(optim, workload.model, layout, device_type=device.type)
    predicted = Forecast(plan=plan, chain=static.added_to(chain)).peak.total_bytes

    gc.collect()  # of what measured
    optimizer = make_optimizer(optim, workload.model)
    with apply_plan(workload.model, plan):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(accumulation_steps):
                workload.forward().backward()
            clip_gradients(optim, Accelerator(), workload.model)
            optimizer.step()
            optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peak <= predicted <= (1 + WITHIN) * peak


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda", 0)], ids=str)
def test_what_was_pinned_to_measure_is_given_back(device, monkeypatch):
    engine, pinned = offload._engine_for(torch.device("cuda", 0)), []
    empty = engine.copies.empty_on_host
    monkeypatch.setattr(engine, "smallest_bytes", 1)
    monkeypatch.setattr(engine.copies, "empty_on_host", lambda size: pinned.append(size) or empty(size))
    workload = workload_of("llama", torch.float32, device)
    plans = [plan_for(word, workload.stacks) for word in ("none", "offload")]
    measure(workload, plans, instruments=DeviceInstruments(device, repetitions=1), most_s=0)
    assert pinned
    assert not any(engine.unused.values())
