"""Model FLOPs are those of the formulas on paper, whatever runs a second time to save memory."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from packed_rows import varlen_on_cpu
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs import throughput
from memsave_recipes.core.costs.throughput import ModelFlops
from memsave_recipes.core.losses import linear_cross_entropy
from memsave_recipes.models.image_classifiers import MODELS

LAYERS, WIDTH, LENGTH, VOCABULARY, BATCH = 2, 256, 128, 1024, 2


def count(step):
    with ModelFlops() as counted:
        step()
    return counted


def gpt2(attention="sdpa"):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=4,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        attn_pdrop=0.0,  # with it, torch's fused attention is not taken on a CPU
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config).train()


def tokens():
    return torch.randint(VOCABULARY, (BATCH, LENGTH))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def by_hand(num_products=3):
    """Six square products of a layer's width and the two of its attention, and the head."""
    layer = 24 * WIDTH**2 * LENGTH + 4 * WIDTH * LENGTH**2
    return num_products * BATCH * (LAYERS * layer + 2 * LENGTH * WIDTH * VOCABULARY)


@pytest.mark.parametrize("keys_heads", [4, 2, 1])
def test_attention_with_shared_heads_costs_as_much_as_with_heads_of_its_own(keys_heads):
    query = torch.randn(1, 4, 32, 16, requires_grad=True)
    key, value = (torch.randn(1, keys_heads, 32, 16, requires_grad=True) for _ in range(2))
    with ModelFlops() as counted:
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    assert counted.total == 6 * 2 * 4 * 32 * 32 * 16


def test_vgg16_is_the_hand_formula():
    with torch.device("meta"):
        model = MODELS["vgg16"](num_classes=1000).train()
        images = torch.empty(BATCH, 3, 224, 224)
        counted = count(lambda: model(images).sum().backward())
    stages = [(224, [3, 64, 64]), (112, [64, 128, 128]), (56, [128, 256, 256, 256])]
    stages += [(28, [256, 512, 512, 512]), (14, [512, 512, 512, 512])]
    sizes = [(side, before, after) for side, c in stages for before, after in pairwise(c)]
    convolutions = [2 * side**2 * 9 * before * after for side, before, after in sizes]
    linear = 2 * (25088 * 4096 + 4096 * 4096 + 4096 * 1000)
    expected = BATCH * (3 * (sum(convolutions) + linear) - convolutions[0])  # the images need no gradient
    assert counted.by_precision == {"float32": expected}
    assert expected / BATCH == pytest.approx(3 * 30.96e9, rel=0.01)  # 15.5 G multiply-adds, as the literature has it


def test_gpt2_is_the_hand_formula():
    model = gpt2()
    counted = count(lambda: loss_of(model, tokens()).backward())
    assert counted.total == by_hand()
    num_weights = sum(parameter.numel() for parameter in model.parameters()) - LENGTH * WIDTH  # without the positions
    palm = 6 * num_weights + 12 * LAYERS * WIDTH * LENGTH
    assert counted.total / (BATCH * LENGTH) == pytest.approx(palm, rel=0.01)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("strategy", ["full", "segments:2"])
def test_neither_a_plan_nor_the_attention_kernel_changes_the_count(attention, strategy):
    model = gpt2(attention)
    with apply_plan(model, plan_blocks(model, strategy)):
        assert count(lambda: loss_of(model, tokens()).backward()).total == by_hand()


@pytest.mark.parametrize("strategy", ["full", "segments:3", "bottleneck"])
def test_recomputed_convolutions_do_not_count(make_case, strategy):
    plain, recomputing = make_case("densenet_small"), make_case("densenet_small")
    apply_plan(recomputing.model, plan_blocks(recomputing.model, strategy))
    expected, counted = (count(lambda c=c: c.loss_of(c.model, c.batch).backward()) for c in (plain, recomputing))
    assert counted.by_precision == expected.by_precision


def test_the_chunked_loss_counts_like_the_full_one():
    model = gpt2()

    def step():
        labels = tokens()
        hidden = model.transformer(labels, use_cache=False).last_hidden_state.flatten(0, 1)
        linear_cross_entropy(hidden, model.lm_head.weight, labels.flatten(), chunk_bytes=64 * 4 * VOCABULARY).backward()

    assert count(step).total == by_hand()


def test_without_gradients_only_the_forward_counts():
    model = gpt2()
    with torch.no_grad():
        assert count(lambda: loss_of(model, tokens())).total == by_hand(num_products=1)


def test_frozen_weights_have_no_gradient_to_compute():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[0].requires_grad_(True)
    product = 2 * 4 * 8 * 8
    assert count(lambda: model(torch.randn(4, 8)).sum().backward()).total == (3 + 1 + 2) * product


class Square(torch.autograd.Function):
    """A product in a forward of its own, where autograd's mode is off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ x.t() + x.t() @ grad


def test_a_custom_function_inside_a_checkpoint_counts_once():
    x = torch.randn(8, 8, requires_grad=True)
    counted = count(lambda: checkpoint(lambda x: Square.apply(x.sin()).sin(), x, use_reentrant=False).sum().backward())
    assert counted.total == 3 * 2 * 8**3


def test_flops_are_told_apart_by_precision():
    model = nn.Linear(8, 8)
    product = 2 * 4 * 8 * 8

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(torch.randn(4, 8))
        F.linear(hidden.float(), torch.randn(8, 8)).sum().backward()

    assert count(step).by_precision == {"bfloat16": 2 * product, "float32": 2 * product}


@pytest.fixture
def matmul_settings():
    before = torch.backends.cuda.matmul.fp32_precision
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(("setting", "expected"), [("ieee", "float32"), ("tf32", "tf32")])
def test_float32_factors_count_as_what_the_settings_let_a_gpu_make_of_them(matmul_settings, setting, expected):
    matmul_settings.fp32_precision = setting
    precision_of = partial(throughput._precision, on_cuda=True)
    assert precision_of(torch.ops.aten.mm, torch.float32) == expected
    assert precision_of(torch.ops.aten.convolution, torch.float32) == "tf32"  # torch's own setting
    assert precision_of(torch.ops.aten.mm, torch.float16) == "float16"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its meta device does not know the product")
def test_a_product_of_rounded_factors_whose_sum_is_not_rounded():
    """What the loss without logits does on CUDA; the meta device knows its shapes."""
    total = torch.zeros(5, 7, device="meta")
    left, right = (torch.zeros(*shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 3), (3, 7)))
    with ModelFlops() as counted:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    assert counted.by_precision == {"bfloat16": 2 * 5 * 3 * 7}


@pytest.fixture
def flash_attn():
    """Operators with the schemas of flash-attn 2, registered when it is imported: after ``measure.flops``."""
    settings = "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, "
    settings += "float softcap, Tensor? alibi_slopes"
    bounds = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    saved = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    saved += "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv, "
    library = torch.library.Library("flash_attn", "FRAGMENT")
    results = "(Tensor, Tensor, Tensor, Tensor)"
    for of_documents, given in (("", ""), ("varlen_", bounds)):
        forward, backward = f"_flash_attn_{of_documents}forward", f"_flash_attn_{of_documents}backward"
        library.define(f"{forward}(Tensor q, Tensor k, Tensor v, {given}{settings}, bool return_softmax) -> {results}")
        library.impl(forward, lambda q, *_: (torch.empty_like(q),) * 4, "CPU")
        library.define(f"{backward}({saved}{given}{settings}, bool deterministic, Tensor? rng_state) -> Tensor")
        library.impl(backward, lambda gradient, *_: torch.empty_like(gradient), "CPU")
    yield torch.ops.flash_attn
    library._destroy()


SETTINGS = (0.0, 1.0, True, -1, -1, 0.0, None)


def test_flash_attns_own_operators_count(flash_attn):
    batch, rows, columns, heads, size = 2, 16, 24, 4, 8
    query, key = torch.zeros(batch, rows, heads, size), torch.zeros(batch, columns, heads // 2, size)
    product = 2 * batch * heads * rows * columns * size
    counted = count(lambda: flash_attn._flash_attn_forward(query, key, key, *SETTINGS, False))
    assert counted.total == 2 * product
    saved = (query, query, key, key, query, query, query, key, key)
    counted = count(lambda: flash_attn._flash_attn_backward(*saved, *SETTINGS, False, None))
    assert counted.total == 4 * product


def test_documents_of_a_packed_row_attend_to_themselves(flash_attn):
    heads, size, lengths = 4, 8, (3, 5, 8)
    query, key = torch.zeros(sum(lengths), heads, size), torch.zeros(sum(lengths), heads // 2, size)
    bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    varlen = (bounds, bounds, max(lengths), max(lengths), *SETTINGS)
    product = 2 * heads * sum(length**2 for length in lengths) * size
    counted = count(lambda: flash_attn._flash_attn_varlen_forward(query, key, key, *varlen, False))
    assert counted.total == 2 * product
    saved = (query, query, key, key, query, query, query, key, key)
    counted = count(lambda: flash_attn._flash_attn_varlen_backward(*saved, *varlen, False, None))
    assert counted.total == 4 * product


def test_documents_in_one_call_count_like_those_of_flash_attn():
    heads, size, lengths = 4, 8, (3, 5, 8)
    product = 2 * heads * sum(length**2 for length in lengths) * size
    with varlen_on_cpu():
        query, key = torch.randn(16, heads, size), torch.randn(16, heads // 2, size)
        bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
        counted = count(lambda: called(query, key, bounds, max(lengths)).sum().backward())
    assert counted.total == (2 + 4) * product


def test_bounds_without_values_count_every_token_as_one_of_the_longest():
    heads, size, longest = 4, 8, 8
    with FakeTensorMode():
        query, key = torch.empty(16, heads, size), torch.empty(16, heads // 2, size)
        bounds = torch.empty(4, dtype=torch.int32)
        counted = count(lambda: called(query, key, bounds, longest).sum().backward())
    assert counted.total == (2 + 4) * 2 * heads * 16 * longest * size


def test_rows_without_bounds_have_one_length():
    heads, size, length = 4, 8, 16
    with FakeTensorMode():
        query, key = torch.empty(2, length, heads, size), torch.empty(2, length, heads // 2, size)
        counted = count(lambda: called(query, key, None, length).sum().backward())
    assert counted.total == (2 + 4) * 2 * heads * 2 * length**2 * size


def test_torchs_function_for_documents_counts_as_its_kernel():
    heads, size, longest = 4, 8, 8
    with FakeTensorMode():
        query, bounds = torch.empty(16, heads, size, requires_grad=True), torch.empty(4, dtype=torch.int32)
        counted = count(lambda: varlen_attn(*[query] * 3, bounds, bounds, longest, longest).sum().backward())
    assert counted.total == (2 + 4) * 2 * heads * 16 * longest * size


def called(query, key, bounds, longest):
    query.requires_grad_()
    key.requires_grad_()
    options = {"window_size_left": -1, "window_size_right": 0}
    arguments = (query, key, key, bounds, bounds, longest, longest, 0.0, True, False)
    return torch.ops.aten._flash_attention_forward(*arguments, **options)[0]
