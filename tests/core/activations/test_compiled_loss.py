"""The chunks of the loss where layers are compiled: two graphs, as exact as the eager ones, few bytes a logit."""

from functools import partial
from math import prod

import pytest
import torch
from packed_rows import by_document, causal_model, gradients_of, packed
from torch._inductor import config as inductor_config
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V
from workloads import peak_bytes

from memsave_recipes.core import losses
from memsave_recipes.core.activations import apply, apply_plan, plan_blocks
from memsave_recipes.core.activations.compiled import Region
from memsave_recipes.core.losses import linear_cross_entropy
from memsave_recipes.models.causal_lm import CausalLMLoss


def loss_and_gradients(dtype, *, compiles=False, rows=16):
    """Of 83 rows, so many at a time, every seventh of which is ignored."""
    random = torch.Generator().manual_seed(0)
    shapes = {"hidden": (83, 24), "weight": (301, 24), "bias": (301,)}
    values = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    labels = torch.randint(301, (83,), generator=random)
    labels[::7] = -100
    leaves = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
    options = {"chunk_bytes": rows * 4 * 301, "softcap": 5.0, "logit_scale": 3.0, "compiles": compiles}
    loss = linear_cross_entropy(leaves["hidden"], leaves["weight"], labels, bias=leaves["bias"], **options)
    loss.backward()
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="inductor of torch 2.11 fails on it, so it is not compiled")
@pytest.mark.usefixtures("kernels_can_be_compiled")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_chunks_share_graphs_and_are_as_exact_in_the_same_memory(dtype, graphs, assert_three_way):
    """The last one is smaller. The only proof that the maths are compiled."""
    ours = loss_and_gradients(dtype, compiles=True)
    assert 0 < graphs() <= 2
    assert_three_way(ours, loss_and_gradients(dtype), loss_and_gradients(torch.float64))
    eager, compiled = (peak_bytes(partial(loss_and_gradients, dtype, compiles=on)) for on in (False, True))
    assert compiled <= 1.05 * eager


@pytest.mark.skipif(torch.__version__ < "2.13", reason="inductor of torch 2.11 fails on it, so it is not compiled")
@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_a_single_chunk_with_padded_words_is_as_exact(graphs, assert_three_way, monkeypatch):
    exact, plain = (loss_and_gradients(dtype) for dtype in (torch.float64, torch.float32))
    monkeypatch.setattr(losses, "_pads", lambda head, dtype: True)
    ours = loss_and_gradients(torch.float32, compiles=True, rows=83)
    assert graphs() == 1
    assert_three_way(ours, plain, exact)


def chunk(rows, words, device="cpu"):
    """The arguments of ``_fused`` for a chunk in bfloat16, as ``_run_chunks`` makes them on CUDA."""
    logits = torch.zeros((rows, words + -words % losses.WORDS), dtype=torch.bfloat16, device=device)
    return logits, torch.zeros(rows, dtype=torch.int64, device=device), 1.0, None, words


@pytest.mark.skipif(torch.__version__ < "2.13", reason="inductor of torch 2.11 fails on it, so it is not compiled")
@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_a_compiled_chunk_moves_at_most_eight_bytes_a_logit(monkeypatch):
    """Each loop over the logits counts. Here there are three, and a kernel of Triton joins the first two."""
    moved = []

    def count(kernels):
        for loops in (kernel.get_nodes() for kernel in kernels):
            written = [dep for loop in loops for dep in loop.read_writes.writes]
            read = [dep for loop in loops for dep in loop.read_writes.reads if isinstance(dep, MemoryDep)]
            inside = {dep.name for dep in written} & {dep.name for dep in read}  # never in memory
            others = [dep for dep in (*read, *written) if dep.name not in inside]
            moved.extend(prod(dep.size) * V.graph.get_dtype(dep.name).itemsize for dep in others)
        return kernels

    monkeypatch.setattr(losses, "_sums_come_out", lambda factor: True)  # so the gradient is in the logits' dtype
    logits, *others = chunk(64, 1000)
    with inductor_config.patch(_post_fusion_custom_pass=count, force_disable_caches=True):
        torch.compile(lambda *args: losses._fused(*args), dynamic=False)(logits, *others)  # code that is not known yet
    of_rows = 100 * len(logits)  # labels, totals and losses
    assert 6 * logits.numel() <= sum(moved) <= 8 * logits.numel() + of_rows


@pytest.mark.parametrize("loss", ["chunked", "auto"])
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_on_cuda_the_loss_is_compiled_with_the_layers(device, loss, monkeypatch):
    """Where it is one chunk, too."""
    chunks = []
    monkeypatch.setattr(apply, "check_compiler", lambda model: None)
    monkeypatch.setattr(Region, "run", lambda self, method, *args, **options: method(*args, **options))
    monkeypatch.setattr(losses, "_compiled", lambda: lambda *args: chunks.append(1) or losses._fused(*args))
    module = CausalLMLoss(by_document(causal_model("llama")), loss).to(device)
    batch = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in packed().items()}
    plain = gradients_of(module, batch)
    assert not chunks
    ours = gradients_of(module, batch, "compiled")
    assert bool(chunks) is (device == "cuda")
    assert (ours - plain).abs().max() <= 1e-12 * plain.abs().max()
    chunks.clear()
    assert torch.equal(gradients_of(module, batch), plain)
    with apply_plan(module.model, plan_blocks(module.model, "compiled")), torch.no_grad():
        module(**batch)
    assert not chunks
