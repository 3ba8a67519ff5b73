"""The loss module: that of transformers, with and without logits, whatever a model does after its head."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from memsave_recipes.core import losses
from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.models.causal_lm import CausalLMLoss, check_causal, find_head

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type, **changes):
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4} if model_type == "gpt2" else SHAPE
    config = AutoConfig.for_model(model_type, **{**shape, **changes})
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():  # larger logits than at the start of training, so that a forgotten cap or scale shows
        model.get_output_embeddings().weight.mul_(20)
    return model


def batch():
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 128, (3, 16), generator=random)
    labels = torch.where(torch.rand(3, 16, generator=random) < 0.3, -100, tokens)
    return {"input_ids": tokens, "labels": labels}


def loss_and_gradients(module, model):
    model.zero_grad()
    loss = module(**batch())
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


MODELS = {
    "gpt2": {},
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_without_logits_as_with_them(name, monkeypatch):
    monkeypatch.setattr(losses, "default_chunk_bytes", lambda device: 128 * 4 * 5)  # five rows of logits
    model = build(name.partition("-")[0], **MODELS[name])
    own = model(**batch(), num_items_in_batch=1).loss  # transformers: the sum, divided by 1
    expected, gradients = loss_and_gradients(CausalLMLoss(model, "full"), model)
    torch.testing.assert_close(expected, own.double(), rtol=1e-6, atol=0)  # transformers casts logits to float32
    loss, chunked = loss_and_gradients(CausalLMLoss(model, "chunked"), model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(chunked[parameter], gradient, rtol=1e-9, atol=1e-12)


def test_a_head_that_does_something_unknown_is_refused_by_name():
    model = build("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.sinh())
    assert find_head(model) is None
    with pytest.raises(InputError, match="--loss chunked: LlamaForCausalLM"):
        CausalLMLoss(model, "chunked")
    assert torch.isfinite(CausalLMLoss(model, "auto")(**batch()))  # falls back to the model's own logits


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama4_text", {"intermediate_size_mlp": 48, "num_local_experts": 2}),  # its decoder is the whole model
        ("modernbert-decoder", {}),  # its decoder is a part of the head
        ("electra", {"is_decoder": True, "embedding_size": 16}),  # its head stands behind another projection
    ],
)
def test_models_without_a_decoder_of_hidden_states_make_their_own_logits(model_type, changes):
    model = build(model_type, **changes)
    assert find_head(model) is None
    assert torch.isfinite(CausalLMLoss(model, "auto")(**batch()))


def test_the_soft_cap_of_recurrent_gemma_is_found():
    head = find_head(build("recurrent_gemma", lru_width=32, logits_soft_cap=5.0))
    assert head is not None
    assert head.softcap == 5.0


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlnet"])
def test_what_sees_later_tokens_is_refused_with_the_cure(model_type):
    shape = {"d_model": 32, "n_head": 4, "n_layer": 2} if model_type == "xlnet" else {}
    model = build(model_type, **shape).train()
    with pytest.raises(InputError, match=f"{model_type} sees the tokens that it is to predict") as refusal:
        check_causal(model, model_type)
    assert ("is_decoder=True" in str(refusal.value)) == (model_type != "xlnet")
    assert model.training


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "mamba", "falcon_h1", "bert"])
def test_what_sees_none_passes(model_type):
    changes = {
        "mixtral": {"num_local_experts": 4},
        "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        "bert": {"is_decoder": True},
    }
    check_causal(build(model_type, **changes.get(model_type, {})).float(), model_type)


def test_chunks_of_so_many_tokens(monkeypatch):
    rows, to_gradient = [], losses._to_gradient

    def note(logits, *settings, **wanted):
        rows.append(len(logits))
        return to_gradient(logits, *settings, **wanted)

    monkeypatch.setattr(losses, "_to_gradient", note)
    model = build("llama")
    expected = CausalLMLoss(model, "full")(**batch())
    torch.testing.assert_close(CausalLMLoss(model, "chunked:10")(**batch()), expected)
    assert max(rows) <= 10 < sum(rows) == batch()["labels"].numel()


@pytest.mark.parametrize("loss", ["chunked:0", "chunked:", "chunked:-1", "chunked:1e3", "chunked:²", "full:8", "x", ""])
def test_a_loss_that_there_is_not_is_refused_in_one_line(loss):
    with pytest.raises(
        InputError, match=f"--loss {loss}: must be one of auto, chunked, full, liger, or chunked:TOKENS"
    ):
        CausalLMLoss(build("llama"), loss)


def test_auto_makes_small_logits_at_once(monkeypatch):
    model = build("llama")
    calls = []
    monkeypatch.setattr(F, "cross_entropy", lambda *a, **k: calls.append(1) or torch.tensor(0.0))
    CausalLMLoss(model, "auto")(**batch())
    assert calls


def test_finding_the_head_leaves_the_model_as_it_was():
    model = build("gpt2").train()
    state = torch.get_rng_state()
    find_head(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_liger_without_cuda():
    with pytest.raises(InputError, match="--loss liger needs a CUDA device"):
        CausalLMLoss(build("llama"), "liger")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need CUDA")
def test_liger_gives_the_same_loss():
    pytest.importorskip("liger_kernel")
    model = build("llama").float().cuda()
    on_device = {name: tensor.cuda() for name, tensor in batch().items()}
    expected = CausalLMLoss(model, "full")(**on_device)
    torch.testing.assert_close(CausalLMLoss(model, "liger")(**on_device), expected, rtol=1e-5, atol=0)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8, "aux_loss_coef": 10.0},
}


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_balancing_loss_is_that_of_transformers(name, loss):
    """In training; and with its gradients under every kind of plan."""
    if name in ("granitemoe", "jetmoe") and transformers.__version__ < "5.18":
        pytest.skip("transformers' own balancing loss of this model fails")
    changes = {"output_router_logits": True, "router_aux_loss_coef": 10.0, **MIXTURES[name]}
    model = build(name, **changes).float().train()
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[0, 9:] = 0
    inputs = batch() | {"attention_mask": mask}
    counted = int((inputs["labels"][:, 1:] != -100).sum())
    module = CausalLMLoss(model, loss, chunk_bytes=128 * 4 * 5)

    def run(plan="none"):
        model.zero_grad()
        with apply_plan(model, plan_blocks(model, plan)):
            total = module(**inputs)
            total.backward()
        return total.detach() / counted, [parameter.grad for parameter in model.parameters()]

    own = model(**inputs)
    own.loss.backward()
    theirs = [parameter.grad for parameter in model.parameters()]
    mean, gradients = run()
    assert own.aux_loss > 0.5
    assert module.balancing_loss == own.aux_loss
    torch.testing.assert_close(mean, own.loss.detach(), rtol=1e-5, atol=0)
    for one, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one / counted, other, rtol=1e-3, atol=1e-5)
    for plan in ("full", "segments:1", "nested:1", "selective"):
        again, same = run(plan)
        assert again == mean, plan
        assert all(torch.equal(one, other) for one, other in zip(same, gradients, strict=True)), plan
    module.eval()
    cross_entropy = (module(**inputs) / counted).item()
    assert cross_entropy == pytest.approx((own.loss - 10 * own.aux_loss).item(), rel=1e-4)


def test_a_z_loss_is_refused():
    with pytest.raises(InputError, match="z_loss_coefficient"):
        CausalLMLoss(build("llama", z_loss_coefficient=0.1))
