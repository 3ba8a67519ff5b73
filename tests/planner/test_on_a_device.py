"""On an accelerator, whose allocator counts whole blocks: no prediction is below the peak of training, none far above."""

import gc

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from memsave_recipes.activations import apply_plan, block_names, find_stacks
from memsave_recipes.activations.streaming import place
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.planner.budget import Forecast, static_memory_of
from memsave_recipes.plans import plan_for
from memsave_recipes.profiling.block_costs import Workload, measure
from memsave_recipes.profiling.trace_events import DeviceInstruments
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.optimizers import clip_gradients, make_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
OPTIMIZERS = {
    "adamw": OptimizerArguments(),
    "sgd": OptimizerArguments(optimizer="sgd", momentum=0.9),
    "adafactor": OptimizerArguments(optimizer="adafactor"),
    "muon": OptimizerArguments(optimizer="muon"),
    "bf16": OptimizerArguments(bf16_stochastic_round=True),
}
WITHIN = 0.02


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, use_cache=False))


def adapted_llama():
    model = llama()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def loss_of(model, batch):
    if batch.ndim == 4:
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device=batch.device))
    labels = batch if isinstance(model, LlamaForCausalLM) else batch[:, 0] % 2
    return model(input_ids=batch, labels=labels).loss


CASES = {
    "llama": llama,
    "bert": lambda: BertForSequenceClassification(BertConfig(**SHAPE)),
    "densenet": lambda: MODELS["densenet_small"](10),
    "streamed": adapted_llama,
}


def predicted_and_peak(name, optim, word, accumulation_steps):
    """The bytes that training takes on the device, as they are predicted from a measured step, and as they are."""
    device = torch.device("cuda", 0)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if optim.bf16_stochastic_round else torch.float32
    model = CASES[name]().to(dtype).train()
    place(model, device, stream_frozen=name == "streamed")
    images, tokens = torch.zeros(4, 3, 32, 32, dtype=dtype), torch.zeros(4, 32, dtype=torch.long)
    batch = (images if name == "densenet" else tokens).to(device)
    workload = Workload(
        model=model,
        forward=lambda: loss_of(model, batch),
        batch=[batch],
        device=device,
        stacks=block_names(find_stacks(model)),
    )
    plan = plan_for(word, workload.stacks)
    instruments = DeviceInstruments(device, repetitions=1)
    keeping = plan_for("none", workload.stacks)
    chain = measure(workload, [keeping], instruments=instruments, most_s=0).chain()
    layout = BatchLayout.of(4 * accumulation_steps, 4, 1)
    static = static_memory_of(optim, model, layout, device_type="cuda")
    optimizer = make_optimizer(optim, model)
    accelerator = Accelerator()
    with apply_plan(model, plan):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(accumulation_steps):
                loss_of(model, batch).backward()
            clip_gradients(optim, accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
    peak_bytes = torch.cuda.max_memory_allocated(device) - before
    return Forecast(plan=plan, chain=static.added_to(chain)).peak.total_bytes, peak_bytes


@pytest.mark.parametrize("word", ["none", "full"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_predictions_are_never_below_and_within_two_percent(name, optimizer, accumulation_steps, word):
    predicted, peak = predicted_and_peak(name, OPTIMIZERS[optimizer], word, accumulation_steps)
    print(
        "FIG",
        name,
        optimizer,
        accumulation_steps,
        word,
        predicted,
        peak,
        f"{100 * (predicted / peak - 1):+.2f}",
        predicted - peak,
    )
    assert peak <= predicted <= (1 + WITHIN) * peak
