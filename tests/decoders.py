"""Small decoders of several architectures, and what a forward and backward of one gives under a plan."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.activations.offload import OffloadEngine

TOKENS = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
SHAPE = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
SHARED_KEYS = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "llama": SHARED_KEYS,
    "qwen3": SHARED_KEYS,
    "mistral": SHARED_KEYS,
    "gemma": SHARED_KEYS,
    "gemma2": SHARED_KEYS,  # has a norm behind its MLP
    "gpt_neox": SHAPE,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},  # has dropout behind it
}


def causal_model(model_type, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    words = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False}
    config = AutoConfig.for_model(model_type, **MODELS[model_type], **words, **changes)
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def layers_of(model):
    *_, names = block_names(find_stacks(model))  # GPT-NeoX has a stem
    return [model.get_submodule(name) for name in names]


def record(model, plan="none", batch=None, *, autocast=False):
    """The loss, the gradients and the state of the generator after a forward and backward."""
    model.zero_grad()
    with apply_plan(model, plan_blocks(model, plan)):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**(batch or {"input_ids": TOKENS, "labels": TOKENS})).loss
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach()}, torch.get_rng_state()


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class CopiesAtOnce:
    """To and from the host of a CPU."""

    def empty_on_host(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, pairs):
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event):
        pass


def offloading_engine():
    """Moves everything, at once."""
    return OffloadEngine(torch.device("cpu"), CopiesAtOnce(), smallest_bytes=1)


def assert_float64_rounding(model_type, found, expected):
    """Sums in another order; Gemma's norms compute in float32 whatever the model's precision."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        rounding = 1e-6 if "norm" in name and model_type.startswith("gemma") else 1e-12
        assert (found[name] - gradient).abs().max() <= rounding * gradient.abs().max().clamp(min=1e-6), name
