"""LoRA by peft: what trains, what is saved, what is refused."""

import json

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.adapters import (
    LoraArguments,
    add_lora,
    load_adapters,
    without_adapters,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **shape)).eval()


def with_trained_adapters(model, **entries):
    adapted = add_lora(model, LoraArguments(lora=True, lora_rank=2, lora_entries=entries), task_type="CAUSAL_LM")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted


TOKENS = torch.arange(10)[None]


def test_only_adapters_of_all_linear_layers_but_the_head_train(model):
    with_trained_adapters(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * 7  # A and B, two layers, seven projections
    assert not any("lm_head" in name for name in trained)


def test_the_model_goes_on_to_work_as_it_is_named(model):
    names = [name for name, _ in model.named_modules() if name.endswith("layers.1")]
    adapted = with_trained_adapters(model)
    assert [name for name, _ in model.named_modules() if name.endswith("layers.1")] == names
    assert torch.equal(model(TOKENS).logits, adapted(TOKENS).logits)


def test_adapters_are_saved_in_the_layout_of_peft(model, tmp_path):
    model.save_pretrained(tmp_path / "base")
    adapted = with_trained_adapters(model, target_modules=["q_proj", "v_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(TOKENS).logits, adapted(TOKENS).logits)
    assert {path.name for path in (tmp_path / "adapter").glob("adapter_*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def in_names(old, new):
    return lambda weights: {name.replace(old, new): weight.clone() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        (lambda weights: {name: one for name, one in weights.items() if "layers.0" in name}, "Found missing adapter"),
        (in_names("layers", "blocks"), "Found missing adapter keys"),
        (lambda weights: weights | in_names("layers.1", "layers.9")(weights), "more adapters than .*layers.9"),
    ],
)
def test_adapters_that_the_model_takes_in_part_are_refused(model, tmp_path, edited, words):
    with_trained_adapters(model).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_file(edited(weights), tmp_path / "adapter_model.safetensors")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "absent"}))
    bare = LlamaForCausalLM(model.config)
    with pytest.raises(InputError, match=f"here: its adapters do not fit LlamaForCausalLM .*{words}") as error:
        load_adapters(bare, tmp_path, task_type="CAUSAL_LM", source="here")
    assert "\n" not in str(error.value)


def test_adapters_that_peft_would_not_read_again_are_refused_before_training(model, monkeypatch):
    read = peft.set_peft_model_state_dict

    def read_renamed(model, weights):
        return read(model, {name.replace("layers.1", "layers.9"): tensor for name, tensor in weights.items()})

    monkeypatch.setattr(peft, "set_peft_model_state_dict", read_renamed)
    with pytest.raises(InputError, match=r"^--lora: peft writes adapters of model\.layers\.1\.\S+ that .*target_mod"):
        add_lora(model, LoraArguments(lora=True), task_type="CAUSAL_LM")


def test_without_the_flag_nothing_changes(model):
    assert add_lora(model, LoraArguments(), task_type="CAUSAL_LM") is model
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_target_modules_that_are_not_there(model):
    flags = LoraArguments(lora=True, lora_entries={"target_modules": ["c_attn"]})
    with pytest.raises(InputError, match=r"--lora: no such layers .*q_proj, k_proj"):
        add_lora(model, flags, task_type="CAUSAL_LM")


def test_a_file_has_the_other_entries_of_peft_and_asks_for_adapters(model, tmp_path):
    path = tmp_path / "lora.yaml"
    path.write_text("use_rslora: true\nlora_alpha: 8\ntarget_modules: [q_proj, v_proj]\n")
    flags = LoraArguments(lora_config=str(path), lora_rank=4)
    config = add_lora(model, flags, task_type="CAUSAL_LM").peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 8, True)
    assert config.target_modules == {"q_proj", "v_proj"}
    path.write_text('{"lora_dropout": 0.5}')
    assert LoraArguments(lora_config=str(path)).lora_entries == {"lora_dropout": 0.5}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lora_alhpa: 8", "lora_alhpa is no entry of peft's LoraConfig: correct it, or take it out"),
        ("r: 8", "r is not for this file .give --lora_rank.: take it out"),
        ("init_lora_weights: pissa", "it may change the weights below"),
        ("[1, 2]", "must hold lines like `lora_alpha: 16`"),
        ("{", "cannot be read: "),
        ("[" * 10_000, "cannot be read: "),
        ("lora_alpha: [a]", "change the file"),
    ],
)
def test_what_a_file_cannot_hold_is_a_line(model, tmp_path, content, words):
    (tmp_path / "lora.yaml").write_text(content)
    with pytest.raises(InputError, match=f"^--lora_config {tmp_path}/lora.yaml.*{words}") as error:
        add_lora(model, LoraArguments(lora_config=str(tmp_path / "lora.yaml")), task_type="CAUSAL_LM")
    assert "\n" not in str(error.value)


def test_a_rank_of_0_is_refused():
    with pytest.raises(InputError, match="--lora_rank 0"):
        LoraArguments(lora_rank=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_4bit_without_cuda():
    with pytest.raises(InputError, match="--load_in_4bit needs a CUDA device"):
        LoraArguments(lora=True, load_in_4bit=True)


def test_4bit_without_adapters():
    with pytest.raises(InputError, match="nothing is left to train: pass --lora"):
        LoraArguments(load_in_4bit=True)


MOE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [
        ("mixtral", None),
        ("qwen3_moe", None),
        ("llama", None),
        ("gpt_oss", "GptOssExperts.gate_up_proj, GptOssExperts.down_proj"),
        ("granitemoe", "GraniteMoeExperts.gate_up_proj, GraniteMoeExperts.down_proj"),
        ("phimoe", "PhimoeExperts.gate_up_proj, PhimoeExperts.down_proj"),
    ],
)
def test_experts_without_adapters_are_named_with_their_share(model_type, experts):
    sizes = {"num_key_value_heads": 2, "num_local_experts": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MOE, **sizes))
    weights = dict(model.named_parameters())
    of_experts = sum(
        one.numel() for name, one in weights.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    )
    share = of_experts / sum(one.numel() for one in weights.values())
    assert without_adapters(model) is None
    add_lora(model, LoraArguments(lora=True, lora_rank=1), task_type="CAUSAL_LM")
    line = without_adapters(model)
    if experts is None:  # older versions of peft leave all experts out
        has_experts = any(".experts" in name for name in weights)
        finds_them = any(".lora_" in name and ".experts" in name for name, _ in model.named_parameters())
        assert (line is None) == (finds_them or not has_experts)
    else:
        assert line.endswith(f"which stay frozen: {experts}")
        assert abs(float(line.split("%")[0].removeprefix("note: ")) / 100 - share) < 0.06  # adapters are weights, too
