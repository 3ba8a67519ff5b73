"""Models of transformers and adapters of peft: outputs, hidden states, attentions and gradients under every plan."""

import random
from contextlib import suppress
from inspect import signature

import peft
import pytest
import torch
from peer_suites.adapter import AS_TORCH, PLAIN, REFUSED, TORCH, Suite, total
from samples import sample
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from zoo.architectures import ARCHITECTURES, mean_loss

suite = Suite()
# What zoo/test_zoo.py has as well: one layer is no segments, and a state cannot run again.
ONE_LAYER = {"joint": REFUSED}
EXPECTED = {"albert: one layer for all": ONE_LAYER}


def own_checkpointing(model):
    """Put transformers' own on the model, in the place of torch's."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.gradient_checkpointing_disable


def all_outputs(put, value, *, training):
    architecture = ARCHITECTURES[value]
    model = architecture.build().train(training)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    with suppress(Exception):  # some have none that returns attentions
        model.set_attn_implementation("eager")
    put(model, found=True, torchs=own_checkpointing)
    torch.manual_seed(architecture.seeds[0])
    wanted = {"output_hidden_states": True, "output_attentions": True}
    known = signature(model.forward).parameters
    if not {"kwargs", *wanted} & set(known):
        wanted = {}
    outputs = model(**architecture.batch(), **{name: True for name in wanted if name in known or "kwargs" in known})
    mean_loss(outputs).backward()
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


for architecture in ARCHITECTURES:
    expected = {"strategies": ("full", "segments:2", "selective"), **EXPECTED.get(architecture, {})}

    @suite.each({architecture: architecture}, **expected)
    def training(put, value):
        return all_outputs(put, value, training=True)

    @suite.each({architecture: architecture}, **expected)
    def evaluation(put, value):
        return all_outputs(put, value, training=False)


# A small Llama.

A, B = torch.arange(3, 13).view(1, 10), torch.arange(20, 26).view(1, 6)
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}


def llama(**more):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, **more)).train()


def planned(put, **more):
    return put(llama(**more), found=True, torchs=own_checkpointing)


alone = {"strategies": ("full", "selective")}  # each layer by itself


@suite(**alone)
def llama_as_it_is(put):
    model = planned(put)
    outputs = model(input_ids=A, labels=A)
    outputs.loss.backward()
    return outputs.loss, outputs.logits


@suite(**alone)
def llama_that_generates_between_steps(put):
    model = planned(put)
    model(input_ids=A, labels=A).loss.backward()
    tokens = model.eval().generate(input_ids=A, max_new_tokens=4, do_sample=False)
    model.train()(input_ids=A, labels=A).loss.backward()
    return tokens


@suite.each({"training": True, "evaluation": False}, REFUSED, **alone)
def decoding_step_by_step_with_gradients(put, value):
    model = planned(put).train(value)
    outputs = model(input_ids=A, use_cache=True)
    cache, tokens = outputs.past_key_values, []
    for _ in range(3):
        tokens.append(outputs.logits[:, -1:].argmax(-1))
        outputs = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
    total(outputs.logits).backward()
    return tokens, outputs.logits


def own_cache(model):
    first = model(input_ids=A, use_cache=True)
    return first.past_key_values, total(first.logits)


def given_cache(model):
    first = model(input_ids=A, past_key_values=(cache := DynamicCache(config=model.config)), use_cache=True)
    return cache, total(first.logits)


def without_gradients(model):
    with torch.no_grad():
        return model(input_ids=A, use_cache=True).past_key_values, 0


@suite.each({one.__name__: one for one in (own_cache, given_cache, without_gradients)}, REFUSED, **alone)
def text_in_two_pieces(put, value):
    model = planned(put)
    cache, loss = value(model)
    second = model(input_ids=B, past_key_values=cache, use_cache=True)
    (total(second.logits) + loss).backward()
    return second.logits, cache.get_seq_length()


@suite.each({"hidden states": {"output_hidden_states": True}, "none": {}}, strategies=("none", "full", "selective"))
def outputs_after_a_plan_with_a_batch(put, value):
    """``make_plan`` runs the model once: its next forward returns what a first one does."""
    model = llama()
    if put.way not in (PLAIN, TORCH):
        put.plan(model, {"input_ids": A, "labels": A} | value, found=True)
    before = model.eval()(input_ids=A, output_hidden_states=True).hidden_states
    put(model.train(), found=True, torchs=own_checkpointing)
    outputs = model(input_ids=A, labels=A, output_hidden_states=True, output_attentions=True)
    outputs.loss.backward()
    return len(before), list(outputs.hidden_states)


@suite(AS_TORCH, **alone)
def attention_switched_between_forward_and_backward(put):
    model = planned(put)
    loss = model(input_ids=A, labels=A).loss
    model.set_attn_implementation("eager")
    loss.backward()
    return loss


# Adapters of peft.

TASK = {"task_type": "CAUSAL_LM"}
QV = {"target_modules": ["q_proj", "v_proj"]}
SPECIAL = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 10},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "POLY": {"n_tasks": 2},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [4, 5], "target_modules": None},
    "VBLORA": {"vector_length": 4},
    "WAVEFT": {"n_frequency": 10},
}
MIXED = {"CPT", "SHADOW", "XLORA"}  # another loss, another forward, or other adapters: no change of these layers
KINDS = {kind.value: config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind.value not in MIXED}
ROWS = torch.arange(8, 26).view(2, 9).clone()
ROWS[:, 4] = 7
LORAS = {
    "LoRA: DoRA": {"use_dora": True},
    "LoRA: rsLoRA": {"use_rslora": True},
    "LoRA: dropout": {"lora_dropout": 0.2},
    "LoRA: biases": {"bias": "all"},
    "LoRA: all linear": {"target_modules": "all-linear"},
    "LoRA: embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "LoRA: trainable tokens": {"trainable_token_indices": [4, 5]},
    "LoRA: head saved": {"modules_to_save": ["lm_head"]},
    "aLoRA": {"alora_invocation_tokens": [7], "init_lora_weights": False},
}


def adapted(put, config, **batch):
    model = peft.get_peft_model(llama(use_cache=False), config).train()
    put(model, found=True, torchs=own_checkpointing)
    (loss := model(input_ids=ROWS, labels=ROWS, **batch).loss).backward()
    random.seed(0)  # some draw when they are made
    return loss


def adapter_case(put, value):
    config = KINDS[value]
    known = signature(config).parameters
    words = TASK | {name: given for name, given in QV.items() if name in known}
    words |= {"num_virtual_tokens": 5} if "num_virtual_tokens" in known else {}
    words |= SPECIAL.get(value, {})
    batch = {"task_ids": torch.tensor([0, 1])} if value in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
    return adapted(put, config(**words), **batch)


adapter_case.__name__ = "peft"
suite.each({kind: kind for kind in KINDS if kind != "POLY"}, **alone)(adapter_case)
suite.each({"POLY": "POLY"}, REFUSED, **alone)(adapter_case)


@suite.each(LORAS, **alone)
def peft_lora(put, value):
    return adapted(put, peft.LoraConfig(**{**TASK, **QV, "r": 4, **value}))


@suite(AS_TORCH, **alone)
def peft_adapter_switched_between_forwards(put):
    model = peft.get_peft_model(llama(use_cache=False), peft.LoraConfig(**TASK, **QV, init_lora_weights=False))
    model.add_adapter("second", peft.LoraConfig(**TASK, **QV, init_lora_weights=False))
    put(model.train(), found=True, torchs=own_checkpointing)
    loss = model(input_ids=ROWS, labels=ROWS).loss
    model.set_adapter("second")
    loss = loss + model(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    return loss


@suite(AS_TORCH, **alone)
def peft_adapter_off_between_forward_and_backward(put):
    model = peft.get_peft_model(llama(use_cache=False), peft.LoraConfig(**TASK, **QV, init_lora_weights=False))
    put(model.train(), found=True, torchs=own_checkpointing)
    loss = model(input_ids=ROWS, labels=ROWS).loss
    with model.disable_adapter():
        loss.backward()
    return loss


FEW = ("training[gpt2]", "evaluation[resnet: BatchNorm]", "llama_as_it_is", "peft[LORA]", "peft[PREFIX_TUNING]")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sample(FEW, suite.cases))
def test_case(name, judge):
    judge(suite.cases[name])
