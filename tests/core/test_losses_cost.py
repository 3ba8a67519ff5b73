"""What the chunked loss costs: bytes at the peak and FLOPs, counted; the sizes that it needs are known beforehand."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from workloads import CPU, full_cross_entropy, peak_bytes

from memsave_recipes.core.costs.estimate import cuda_kernels, fake_batch, fake_model
from memsave_recipes.core.costs.fake_step import NO_KERNEL, bytes_moved, is_view
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.losses import default_chunk_bytes, linear_cross_entropy, num_chunks, tied_gradient
from memsave_recipes.core.text import MIB
from memsave_recipes.models.causal_lm import CausalLMLoss

ROWS, WIDTH, VOCAB = 8, 512, 2000
MATMUL_FLOPS = 2 * ROWS * WIDTH * VOCAB


def make_tensors(num_rows=ROWS, width=WIDTH, vocab_size=VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, width).requires_grad_() for size in (num_rows, vocab_size))
    return hidden, weight, torch.randint(vocab_size, (num_rows,))


def chunked(hidden, weight, labels):
    """Two rows at a time."""
    return linear_cross_entropy(hidden, weight, labels, chunk_bytes=2 * 4 * len(weight))


def bytes_of(*tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def flops_of(step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("function", [chunked, full_cross_entropy])
def test_nothing_is_computed_twice(function):
    tensors = make_tensors()
    assert flops_of(lambda: function(*tensors).backward()) == 3 * MATMUL_FLOPS


def test_a_frozen_head_costs_neither_memory_nor_work():
    hidden, weight, labels = make_tensors()
    weight.requires_grad_(False)
    assert flops_of(lambda: chunked(hidden, weight, labels).backward()) == 2 * MATMUL_FLOPS
    assert peak_bytes(lambda: chunked(hidden, weight, labels).backward()) < bytes_of(weight) / 10


def test_gradients_are_scaled_and_handed_over_without_a_copy():
    tensors = make_tensors()
    gradient_bytes = bytes_of(*tensors[:2])
    assert peak_bytes(lambda: (chunked(*tensors) / 3).backward()) < 1.1 * gradient_bytes


def test_tied_weights_have_one_gradient_at_the_peak():
    embedding = nn.Embedding(VOCAB, WIDTH)
    tokens = torch.arange(2 * ROWS)

    def step(is_joined: bool) -> None:
        embedding.zero_grad()
        with tied_gradient(embedding) if is_joined else nullcontext() as tied:
            hidden = torch.tanh(embedding(tokens))
        loss = linear_cross_entropy(hidden, embedding.weight, tokens, chunk_bytes=2 * 4 * VOCAB, tied=tied)
        (loss / 3).backward()

    one, two = (peak_bytes(lambda is_joined=is_joined: step(is_joined)) for is_joined in (True, False))
    assert one < 1.1 * bytes_of(embedding.weight)
    assert two > 2 * bytes_of(embedding.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_loss_is_computed(mode):
    tensors = make_tensors()
    with mode():
        torch.testing.assert_close(chunked(*tensors), full_cross_entropy(*tensors))
        assert flops_of(lambda: chunked(*tensors)) == MATMUL_FLOPS
        assert peak_bytes(lambda: chunked(*tensors)) < bytes_of(tensors[1]) / 10


def test_sizes_are_known_without_values():
    """So fake tensors can predict memory, and nothing waits for a device."""
    with FakeTensorMode():
        tensors = make_tensors()
        chunked(*tensors).backward()
    assert [tensor.grad.shape for tensor in tensors[:2]] == [(ROWS, WIDTH), (VOCAB, WIDTH)]


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1024, 32_768), pytest.param(512, 131_072, marks=pytest.mark.slow)]
)
def test_the_peak_falls_by_eighty_percent(num_rows, vocab_size):
    *leaves, labels = make_tensors(num_rows, 16, vocab_size)

    def results_of(function, leaves) -> list[Tensor]:
        loss = function(*leaves, labels)
        return [loss, *torch.autograd.grad(loss, leaves)]

    def peak_beyond_gradients(function) -> int:
        return peak_bytes(lambda: results_of(function, leaves)) - bytes_of(*leaves)

    def error(found: Tensor, exact: Tensor) -> float:
        return ((found - exact).norm() / exact.norm()).item()

    ways = linear_cross_entropy, full_cross_entropy
    ours, full = (peak_beyond_gradients(function) for function in ways)
    assert ours <= 0.2 * full
    assert ours < 1.1 * default_chunk_bytes(CPU)

    # test_losses.py holds the chunked loss in float64 against the full one
    exact = results_of(linear_cross_entropy, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for own, other, right in zip(*(results_of(function, leaves) for function in ways), exact, strict=True):
        assert error(own, right) <= error(other, right) + torch.finfo(torch.float32).eps / 2


def test_chunks_are_as_few_as_fit():
    assert num_chunks(1024, 32_768, 128 * MIB) == 1
    assert num_chunks(1025, 32_768, 128 * MIB) == 2
    assert num_chunks(1024, 32_768, 32 * MIB) == 4
    assert num_chunks(6, 1_000_000, 1) == 6  # a row at least
    assert num_chunks(0, 1000, MIB) == 0


class Kernels(TorchDispatchMode):
    """Counts operators that compute, the bytes that they read and write, and the shapes of large products."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.num_bytes = 0, 0
        self.products: Counter[tuple[int, int, int]] = Counter()  # rows, columns, summed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not is_view(func) and func.overloadpacket not in NO_KERNEL:
            self.number += 1
            self.num_bytes += bytes_moved(func, args, kwargs or {}, out)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.products[left.shape[0], right.shape[1], left.shape[1]] += 1
        return out


def kernels_of_gpt2(vocab_size, *, num_rows=16, loss="chunked", **sizes) -> Kernels:
    """One forward and backward of rows of 1,024 tokens on an H100, in bf16: counted, not run."""
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = GPT2Config(vocab_size=vocab_size, activation_function="gelu_pytorch_tanh", **no_dropout, **sizes)  # fused
    model = fake_model(lambda: GPT2LMHeadModel(config))
    tokens = torch.empty((num_rows, 1024), dtype=torch.int64, device="meta")
    batch = fake_batch(model, {"input_ids": tokens, "labels": tokens})
    module = CausalLMLoss(model, loss, chunk_bytes=512 * MIB)
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with model.lm_head.weight.fake_mode, cuda_kernels(find_target("h100")), autocast, Kernels() as kernels:
        module(**batch).backward()
    return kernels


def test_an_odd_vocabulary_costs_no_more_than_the_next_multiple_of_64():
    odd, even = kernels_of_gpt2(50_257), kernels_of_gpt2(50_304)
    assert odd.number <= 1.01 * even.number
    assert odd.num_bytes <= 1.01 * even.num_bytes
    assert odd.products == even.products
    of_head = {shape: number for shape, number in odd.products.items() if 50_304 in shape}
    assert of_head == {  # six chunks, and a last one
        **dict.fromkeys([(2341, 50_304, 768), (2341, 768, 50_304), (50_304, 768, 2341)], 6),
        **dict.fromkeys([(2338, 50_304, 768), (2338, 768, 50_304), (50_304, 768, 2338)], 1),
    }


def test_an_odd_vocabulary_is_padded_where_all_logits_are_one_chunk():
    """So few that ``auto`` would take all logits at once."""
    few = kernels_of_gpt2(50_257, num_rows=1, loss="auto", n_layer=1)
    assert {columns for _, columns, _ in few.products if columns > 50_000} == {50_304}
