"""Spans of layers that the model calls itself, in models that do more than hand each layer what the one before gave."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForDepthEstimation,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def tokens(vocab_size=64):
    return torch.randint(3, vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


def loss_of_hidden_states(model):
    """As distillation from layer to layer does it."""
    output = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
    return output.loss + sum(hidden.square().mean() for hidden in output.hidden_states)


def loss_of_two_pieces(model):
    """The second one reads the keys and values that layers have written for the first."""
    first = model(input_ids=tokens()[:, :6], use_cache=True)
    second = model(input_ids=tokens()[:, 6:], labels=tokens()[:, 6:], past_key_values=first.past_key_values)
    assert first.past_key_values.get_seq_length() == 12
    return second.loss + first.logits.square().mean()


def llava():
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=60,
    )
    model = AutoModelForImageTextToText.from_config(config)
    prompt = torch.cat([torch.full((2, 16), 60), tokens(60)], dim=1)
    return model, lambda model: model(input_ids=prompt, labels=prompt, pixel_values=images()).loss


def of(auto, model_type, loss_of, **config):
    return auto.from_config(AutoConfig.for_model(model_type, **config)), loss_of


CASES = {
    "llama, hidden states": lambda: of(AutoModelForCausalLM, "llama", loss_of_hidden_states, **TEXT),
    "llama, a text in two pieces": lambda: of(AutoModelForCausalLM, "llama", loss_of_two_pieces, **TEXT),
    "llava": llava,
    "dpt": lambda: of(
        AutoModelForDepthEstimation,
        "dpt",
        lambda model: model(pixel_values=images()).predicted_depth.square().mean(),
        **VISION,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=8,
        is_hybrid=False,
        readout_type="ignore",
    ),
    "opt": lambda: of(
        AutoModelForCausalLM,
        "opt",
        lambda model: model(input_ids=tokens(), labels=tokens()).loss,
        **{**TEXT, "word_embed_proj_dim": 32, "ffn_dim": 48, "layerdrop": 0.4},
    ),
    "pegasus_x": lambda: of(
        AutoModelForSeq2SeqLM,
        "pegasus_x",
        lambda model: model(input_ids=tokens(), labels=tokens()).loss,
        **SEQ2SEQ,
        num_global_tokens=2,
        block_size=4,
    ),
    "yolos": lambda: of(
        AutoModel,
        "yolos",
        lambda model: model(images()).last_hidden_state.square().mean(),
        **{**VISION, "image_size": [32, 32]},
    ),
    "mpnet": lambda: of(
        AutoModelForMaskedLM, "mpnet", lambda model: model(input_ids=tokens(), labels=tokens()).loss, **TEXT
    ),
    "squeezebert": lambda: of(
        AutoModelForMaskedLM,
        "squeezebert",
        lambda model: model(input_ids=tokens(), labels=tokens()).loss,
        **TEXT,
        embedding_size=32,
    ),
    "minimax, a cache of states": lambda: of(
        AutoModelForSequenceClassification,
        "minimax",
        lambda model: model(input_ids=tokens(), labels=torch.tensor([0, 1])).loss,
        **{**TEXT, "head_dim": 8, "num_local_experts": 2, "pad_token_id": 0, "block_size": 4},
    ),
    "gpt2, hidden states": lambda: of(
        AutoModelForCausalLM,
        "gpt2",
        loss_of_hidden_states,
        vocab_size=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=32,
    ),
}


def build(name):
    torch.manual_seed(0)
    model, loss_of = CASES[name]()
    return model.train(), loss_of


def train_step(model, loss_of, seed):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = loss_of(model)
    loss.backward()
    record = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {
        name: tensor.clone() for name, tensor in {**record, "loss": loss.detach(), "rng": torch.get_rng_state()}.items()
    }


def one_span_a_stack(model):
    stacks = block_names(find_stacks(model))
    spans, start = [], 0
    for names in stacks:
        spans.append(Span(start=start, stop=start + len(names), action=Action.RECOMPUTE))
        start += len(names)
    return Plan(strategy="mine", blocks=tuple(name for names in stacks for name in names), spans=tuple(spans))


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_plain(name):
    model, loss_of = build(name)
    plans = [*(plan_blocks(model, strategy) for strategy in ("full", "segments:2")), one_span_a_stack(model)]
    for seed in range(8 if name == "opt" else 1):  # with LayerDrop
        expected = train_step(model, loss_of, seed)
        for plan in plans:
            with apply_plan(model, plan):
                record = train_step(model, loss_of, seed)
            assert record.keys() == expected.keys()
            different = [key for key in expected if not torch.equal(record[key], expected[key])]
            assert not different, (seed, plan.strategy, different)


def test_a_copy_of_a_cache_runs_no_operators_on_its_states():
    model, loss_of = build("minimax, a cache of states")
    expected = train_step(model, loss_of, 0)
    with apply_plan(model, plan_blocks(model, "selective")):
        record = train_step(model, loss_of, 0)
    assert all(torch.equal(record[key], expected[key]) for key in expected)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x, scale):
        return x + self.dropout(self.linear(self.norm(x)).tanh()) * scale


def handed_on(x, number):
    return x


def changed_in_place(x, number):
    return x.add_(number)


def changed(x, number):
    return x * (1 + number)


def a_number_is_drawn(x, number):
    torch.rand([])
    return x


def shown_to_a_hook(x, number):
    x.register_hook(lambda gradient: gradient * 2)
    return x


class OwnLoop(nn.Module):
    """Layers in a Sequential that the model loops over: they recompute together, whatever stands between them."""

    def __init__(self, between):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.between = between

    def forward(self, x):
        scale = torch.full((8,), 0.5)
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x, scale), number)
        return x.square().sum()


@pytest.mark.parametrize("between", [handed_on, changed_in_place, changed, a_number_is_drawn, shown_to_a_hook])
def test_what_stands_between_two_layers(between):
    torch.manual_seed(0)
    model = OwnLoop(between)
    plan = one_span_a_stack(model)
    assert [(span.start, span.stop) for span in plan.spans] == [(0, 4)]
    inputs = torch.randn(5, 8)
    expected = train_step(model, lambda model: model(inputs), 7)
    with apply_plan(model, plan):
        record = train_step(model, lambda model: model(inputs), 7)
    assert record.keys() == expected.keys()
    assert not [key for key in expected if not torch.equal(record[key], expected[key])]


def test_two_forwards_before_a_backward_and_a_copy_in_between():
    torch.manual_seed(0)
    model, inputs = OwnLoop(handed_on), torch.randn(5, 8)

    def two_losses(model):
        first = model(inputs)
        clone = copy.deepcopy(model)
        return first + model(inputs + 1) + 0 * clone(inputs)

    expected = train_step(model, two_losses, 7)
    with apply_plan(model, one_span_a_stack(model)):
        record = train_step(model, two_losses, 7)
    assert not [key for key in expected if not torch.equal(record[key], expected[key])]


@pytest.mark.parametrize("trains", [True, False])
def test_a_span_keeps_nothing_once_its_graph_is_gone(trains):
    model, inputs = OwnLoop(handed_on), torch.randn(5, 8).requires_grad_().clone()
    noted = weakref.ref(inputs)
    gc.disable()
    try:
        with apply_plan(model, one_span_a_stack(model)):
            loss = model(inputs)
            if trains:
                loss.backward()
            del loss, inputs
            assert noted() is None
    finally:
        gc.enable()


WITH_STATES = {
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
}


@pytest.mark.parametrize("model_type", WITH_STATES)
def test_a_cache_of_states_is_refused_by_name(model_type):
    config = AutoConfig.for_model(model_type, **TEXT, **WITH_STATES[model_type])
    model = AutoModelForCausalLM.from_config(config).train()
    if not any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=config).layers):
        pytest.skip("this transformers has no such cache for it: the layers keep their states, and only with use_cache")
    with apply_plan(model, plan_blocks(model, "full")):
        with pytest.raises(InputError, match="use_cache=False"):
            model(input_ids=tokens(), labels=tokens())
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
