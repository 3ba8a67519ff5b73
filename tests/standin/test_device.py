"""The stand-in for CUDA does what its README says. Run on it by test_stand_in.py and ``make test-standin``."""

import os

import pytest
import torch
import torch.nn.functional as F

if not os.environ.get("STANDIN"):
    pytest.skip("runs on the stand-in: make test-standin", allow_module_level=True)

from cuda_standin.waits import waits

POISONS = bool(os.environ.get("STANDIN_POISON"))
GIB = float(os.environ.get("STANDIN_GIB", "8"))
needs_poison = pytest.mark.skipif(not POISONS, reason="needs STANDIN_POISON=1")
needs_waits = pytest.mark.skipif(not os.environ.get("STANDIN_WAITS"), reason="needs STANDIN_WAITS")


@pytest.fixture
def device():
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda")


def late_copy(source):
    """``source`` on the host, copied on a stream of its own, and that stream."""
    stream = torch.cuda.Stream()
    target = torch.empty(source.shape, pin_memory=True)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return target, stream


def test_it_is_what_torch_takes_for_cuda(device):
    tensor = torch.ones(3, device=device)
    assert tensor.is_cuda
    assert str(tensor.device) == "cuda:0"
    assert torch.accelerator.current_accelerator() == device
    assert torch.get_autocast_dtype("cuda") == torch.float16
    with torch.autocast("cuda", torch.bfloat16):
        assert (tensor[None] @ tensor[:, None]).dtype == torch.bfloat16


def test_memory_is_counted_in_blocks_of_512_bytes(device):
    before = torch.cuda.memory_allocated()
    tensors = [torch.empty(numel, device=device) for numel in (1, 128, 129)]  # 4, 512 and 516 bytes
    assert torch.cuda.memory_allocated() - before == 512 + 512 + 1024
    result = tensors[2] + 1  # made by a kernel of the CPU
    assert torch.cuda.memory_allocated() - before == 512 + 512 + 1024 + 1024
    del tensors, result
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 512 + 512 + 1024 + 1024


def test_a_view_takes_no_memory_and_keeps_it(device):
    before = torch.cuda.memory_allocated()
    view = torch.arange(512.0, device=device).view(2, 256)[1].unfold(0, 2, 2)
    assert torch.cuda.memory_allocated() - before == 2048
    assert view.sum().item() == sum(range(256, 512))


def test_a_device_that_is_full_says_so(device):
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(int(GIB * 2**30) + 1, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_stats()["num_ooms"] >= 1


def test_devices_do_not_mix(device):
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device=device) + torch.ones(2)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=device, generator=torch.Generator())
    torch.ones(2, device=device) + torch.tensor(1.0)  # a number may come from the host


def test_the_devices_generator_is_its_own(device):
    torch.manual_seed(1)
    drawn_on_host = torch.rand(4)
    torch.manual_seed(1)
    drawn = F.dropout(torch.ones(64, device=device))
    assert torch.equal(torch.rand(4), drawn_on_host)
    state = torch.cuda.get_rng_state()
    again = F.dropout(torch.ones(64, device=device))
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(64, device=device)), again)
    assert not torch.equal(drawn, again)


def test_what_writes_or_grows_its_argument_does(device):
    tensor = torch.zeros(2, device=device)
    assert tensor.add_(1) is tensor
    torch.ones(3, device=device, out=tensor.resize_(3))
    assert tensor.tolist() == [1, 1, 1]
    empty = torch.empty(0, device=device)
    assert torch.add(tensor, 1, out=empty) is empty
    assert empty.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "causal", "bias"])
def test_fused_attention_is_that_of_the_host(device, dtype, mask):
    torch.manual_seed(0)
    on_host = [torch.randn(2, 4, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    on_device = [tensor.detach().to(device).requires_grad_() for tensor in on_host]
    bias = torch.randn(8, 8, dtype=dtype) if mask == "bias" else None
    expected = F.scaled_dot_product_attention(*on_host, attn_mask=bias, is_causal=mask == "causal")
    found = F.scaled_dot_product_attention(
        *on_device, attn_mask=bias if bias is None else bias.to(device), is_causal=mask == "causal"
    )
    name = "Flash" if dtype == torch.bfloat16 and bias is None else "Efficient"
    assert name in type(found.grad_fn).__name__ or name in type(found.grad_fn.next_functions[0][0]).__name__
    expected.sum().backward()
    found.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(on_device, on_host, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", [None, "causal", "bias"])
def test_no_fused_attention_takes_float64(device, mask):
    states = [torch.randn(2, 4, 8, 16, dtype=torch.float64) for _ in range(3)]
    bias = torch.randn(8, 8, dtype=torch.float64) if mask == "bias" else None
    found, expected = (
        F.scaled_dot_product_attention(
            *(tensor.to(place) for tensor in states),
            attn_mask=bias if bias is None else bias.to(place),
            is_causal=mask == "causal",
        ).cpu()
        for place in (device, "cpu")
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("size", [(12,), (12, 12)])
def test_convolutions_of_every_channel_by_itself_are_those_of_the_host(device, size, with_bias):
    convolve = {1: F.conv1d, 2: F.conv2d}[len(size)]
    given = [torch.randn(2, 8, *size), torch.randn(8, 1, *(3 for _ in size)), *[torch.randn(8)] * with_bias]
    results = []
    for place in ("cpu", device):
        leaves = [tensor.detach().clone().to(place).requires_grad_() for tensor in given]
        convolve(*leaves, padding=1, groups=8).square().sum().backward()
        results.append([leaf.grad.cpu() for leaf in leaves])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@needs_poison
def test_new_memory_and_the_target_of_a_late_copy_are_nan(device):
    assert torch.empty(8, device=device).isnan().all().item()
    source = torch.ones(4, device=device)
    target, stream = late_copy(source)
    assert target.isnan().all()
    stream.synchronize()
    assert target.tolist() == [1, 1, 1, 1]


@needs_poison
def test_an_event_is_waited_for_and_no_later_work(device):
    source = torch.ones(4, device=device)
    first, stream = late_copy(source)
    event = stream.record_event()
    second = torch.empty(4, pin_memory=True)
    with torch.cuda.stream(stream):
        second.copy_(source, non_blocking=True)
    torch.cuda.current_stream().wait_event(event)
    assert first.tolist() == [1, 1, 1, 1]
    assert second.isnan().all()
    torch.cuda.synchronize()
    assert second.tolist() == [1, 1, 1, 1]


@needs_poison
@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_a_stream_uses_has_to_be_recorded_on_it(device, recorded):
    source = torch.ones(4, device=device)
    target, stream = late_copy(source)
    if recorded:
        source.record_stream(stream)
    del source
    stream.synchronize()
    assert target.tolist() == [1, 1, 1, 1] if recorded else target.isnan().all()


@needs_waits
@pytest.mark.parametrize(
    ("kind", "wait"),
    [
        ("item", lambda tensor: tensor.sum().item()),
        ("copy to pageable memory", lambda tensor: tensor.cpu()),
        ("copy from pageable memory", lambda tensor: torch.ones(4).to(tensor.device)),
        ("non_blocking copy from pageable memory", lambda tensor: torch.ones(4).to(tensor.device, non_blocking=True)),
        ("aten::nonzero", lambda tensor: tensor[tensor > 0]),
        ("index by a mask", lambda tensor: tensor.index_put_([tensor > 0], torch.ones((), device=tensor.device))),
        ("aten::nonzero", lambda tensor: tensor.nonzero()),
        ("synchronize device", lambda tensor: torch.cuda.synchronize()),
        (None, lambda tensor: torch.ones(4).pin_memory().to(tensor.device, non_blocking=True)),
        (None, lambda tensor: (tensor @ tensor).relu()),
    ],
)
def test_waits_are_counted_with_their_line(device, kind, wait):
    tensor = torch.ones(4, device=device)
    waits.clear()
    wait(tensor)
    assert [name for name, _ in waits][:1] == ([] if kind is None else [kind])
    assert all("test_device.py" in where for _, where in waits)


def test_torch_tells_of_waits_where_it_is_asked_to(device):
    ones = torch.ones(4, device=device)
    message = "called a synchronizing CUDA operation"
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match=message):
            ones[0].item()
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match=message):
            ones[0].item()
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
