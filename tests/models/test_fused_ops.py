"""GELU and RMSNorm of transformers as one operator each: the same values, names and dtypes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, Olmo2Config
from transformers.activations import ACT2CLS, ACT2FN, NewGELUActivation, gelu_new
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.models.fused_ops import FusedRMSNorm, fuse_operators, fused_in, not_fused_in
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer

TANH = {"gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"}
ERF = {"gelu_python"}
WIDTH = 48
NORMS = {
    "llama": LlamaRMSNorm(WIDTH, 1e-5),
    "gemma3": Gemma3RMSNorm(WIDTH, 1e-6),
    "gemma4": Gemma4RMSNorm(WIDTH, 1e-6),
    "gemma4 without a weight": Gemma4RMSNorm(WIDTH, 1e-6, with_scale=False),
    "llama4": Llama4TextRMSNorm(WIDTH, 1e-5),
    "llama4 without a weight": Llama4TextL2Norm(1e-6),
    "olmo2": Olmo2RMSNorm(WIDTH, 1e-6),
    "qwen3 next": Qwen3NextRMSNorm(WIDTH, 1e-6),
    "t5": T5LayerNorm(WIDTH, 1e-6),
}
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
DECODERS = {
    "gpt2": GPT2Config(**SIZES, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0),
    "bloom": BloomConfig(n_layer=3, hidden_size=32, n_head=2, vocab_size=64),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1, intermediate_size=48),
    "olmo2": Olmo2Config(**SIZES, num_key_value_heads=1, intermediate_size=48),
    "gemma3": Gemma3TextConfig(**SIZES, num_key_value_heads=1, intermediate_size=48, head_dim=16, sliding_window=8),
}


class Operators(TorchDispatchMode):
    """Lists operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func._overloadpacket))
        return func(*args, **(kwargs or {}))


def in_a_model(module):
    return nn.Sequential(copy.deepcopy(module))


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", ACT2CLS)
def test_of_all_activations_gelus_in_python_are_replaced(name):
    model = in_a_model(ACT2FN[name])
    fuse_operators(model)
    form = "tanh" if name in TANH else "none"
    is_replaced = type(model[0]) is nn.GELU
    assert is_replaced == (name in TANH | ERF)
    if is_replaced:
        x = drawn(1000).mul(5).double()
        assert model[0].approximate == form
        torch.testing.assert_close(model(x), ACT2FN[name](x), rtol=1e-6, atol=1e-7)
        with Operators() as operators:
            model(x)
        assert operators.names == ["aten.gelu"]


def test_an_instance_that_transformers_shares_stays():
    model = nn.Sequential(gelu_new, nn.Linear(2, 2))
    assert fuse_operators(model) == "1 NewGELUActivation"
    assert type(gelu_new) is NewGELUActivation
    assert type(model[0]) is nn.GELU


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_values_and_the_dtype_of_the_models_own(name, of_weight, of_input, autocast):
    own = in_a_model(NORMS[name]).to(of_weight)
    for parameter in own.parameters():
        parameter.data.copy_(drawn(WIDTH))
    fused = copy.deepcopy(own)
    fuse_operators(fused)
    assert isinstance(fused[0], FusedRMSNorm) or (name == "t5" and of_weight == torch.bfloat16)
    x = drawn(5, WIDTH, dtype=of_input)
    x[3:] *= 1e-3
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = own(x), fused(x)
    assert found.dtype == expected.dtype
    half = torch.bfloat16 in (of_input, of_weight)
    torch.testing.assert_close(found, expected, **({"rtol": 0.02, "atol": 0.02} if half else {}))
    assert list(fused.state_dict()) == list(own.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_without_memory_runs_and_a_compiled_one_is_one_graph(dtype):
    norm = in_a_model(NORMS["llama"]).to(dtype)
    fuse_operators(norm)
    x = drawn(5, WIDTH, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = copy.deepcopy(norm).to("meta")(x.to("meta"))
        assert (found.dtype, found.shape) == (dtype, x.shape)
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), norm(x))


class ClippedNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-2, 2)


class DetachedNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        variance = hidden_states.detach().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


OTHERS = {
    "gated": MambaRMSNormGated(WIDTH, WIDTH),
    "gated too": Qwen3NextRMSNormGated(WIDTH),
    "clipped": ClippedNorm(WIDTH),
    "another gradient": DetachedNorm(WIDTH),
    "layer norm": nn.LayerNorm(WIDTH),
    "torch's": nn.RMSNorm(WIDTH),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_stays(name):
    model = in_a_model(OTHERS[name])
    assert fuse_operators(model) is not_fused_in(model) is fused_in(model) is None
    assert type(model[0]) is type(OTHERS[name])


@pytest.fixture(params=DECODERS)
def decoder(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DECODERS[request.param])


def loss_of(model):
    tokens = torch.arange(24).view(2, 12) % 50
    return model(tokens, labels=tokens, use_cache=False).loss


def test_a_model_says_what_could_be_and_what_was_fused(decoder):
    """On a CPU a fused norm gains nothing, so nothing is said of it there."""
    could = (not_fused_in(decoder), not_fused_in(copy.deepcopy(decoder).to("meta")))
    fused = fuse_operators(decoder)
    assert could[1].startswith(fused)
    assert could[0] == (could[1] if "Gelu" in fused or "GELU" in fused else None)
    assert fused in fused_in(decoder)
    assert not_fused_in(decoder) is None


def test_a_saved_model_is_the_one_of_transformers(decoder, tmp_path):
    plain = copy.deepcopy(decoder)
    fuse_operators(decoder)
    decoder.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "fused" / file.name).read_bytes() == file.read_bytes()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    torch.testing.assert_close(loss_of(opened), loss_of(decoder), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["full", "segments:2", "nested:2", "selective"])
def test_plans_keep_the_bits_of_fused_models(decoder, strategy):
    fuse_operators(decoder)
    gradients = []
    for name in ("none", strategy):
        decoder.zero_grad()
        with apply_plan(decoder, plan_blocks(decoder, name)):
            loss = loss_of(decoder)
            loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in decoder.parameters())])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("fused_ops", ["auto", "none"])
def test_the_flag_decides(fused_ops, tmp_path):
    """From scratch and from a folder, in both dtypes; without it no module is touched."""
    scratch = {"model_type": "gpt2", "config_overrides": "n_layer=2,n_head=2,n_embd=16"}
    AutoModelForCausalLM.from_config(DECODERS["llama"]).save_pretrained(tmp_path)
    for source, own in ((scratch, NewGELUActivation), ({"model_name_or_path": str(tmp_path)}, LlamaRMSNorm)):
        flags = TransformerArguments(**source, fused_ops=fused_ops)
        model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.bfloat16, vocab_size=64)
        assert any(type(module) is own for module in model.modules()) == (fused_ops == "none")
        assert (fused_in(model) is None) == (fused_ops == "none")
