"""The chunked loss against the ordinary path, and both against float64."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from workloads import full_cross_entropy

from memsave_recipes.core import losses
from memsave_recipes.core.losses import linear_cross_entropy, tied_gradient

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"logit_scale": 0.25},
    "scale and softcap": {"logit_scale": 3.0, "softcap": 5.0},
}
PRECISIONS = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "autocast": (torch.float32, torch.float32),
    "autocast of bfloat16 states": (torch.bfloat16, torch.float32),
}


@dataclass
class Work:
    """Hidden states, a head and labels, of which every seventh is ignored."""

    num_rows: int = 83
    width: int = 24
    vocab_size: int = 301
    bias: bool = False
    device: str = "cpu"
    hidden_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    tensors: list[Tensor] = field(init=False)
    labels: Tensor = field(init=False)

    def __post_init__(self):
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.num_rows, self.width, generator=random).to(self.hidden_dtype)
        weight = torch.randn(self.vocab_size, self.width, generator=random).to(self.weight_dtype)
        bias = torch.randn(self.vocab_size, generator=random).to(self.weight_dtype)
        tensors = [hidden, weight, bias] if self.bias else [hidden, weight]
        self.tensors = [tensor.to(self.device).requires_grad_() for tensor in tensors]
        labels = torch.randint(self.vocab_size, (self.num_rows,), generator=random)
        labels[::7] = -100
        self.labels = labels.to(self.device)

    def in_float64(self):
        """The same values."""
        exact = Work.__new__(Work)
        exact.labels = self.labels
        exact.tensors = [tensor.detach().double().requires_grad_() for tensor in self.tensors]
        return exact

    def loss(self, function, **options):
        hidden, weight, *bias = self.tensors
        return function(hidden, weight, self.labels, bias=bias[0] if bias else None, **options)

    def run(self, function, *, factor=1.0, **options):
        """The loss, then the gradients of ``factor`` times the loss."""
        loss = self.loss(function, **options)
        return [loss.detach(), *torch.autograd.grad(factor * loss, self.tensors)]


def chunked(hidden, weight, labels, **options):
    """Five rows at a time."""
    return linear_cross_entropy(hidden, weight, labels, chunk_bytes=5 * 4 * len(weight), **options)


BOTH = (chunked, full_cross_entropy)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(params=[False, True], ids=["eager", "fused"])
def compiles(request, monkeypatch):
    """Whether the maths are those that are compiled; they run as they are."""
    monkeypatch.setattr(losses, "_compiled", lambda: losses._fused)
    return request.param


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_as_near_to_float64_as_the_full_path(precision, options, bias, device, compiles):
    hidden_dtype, weight_dtype = PRECISIONS[precision]
    work = Work(bias=bias, device=device, hidden_dtype=hidden_dtype, weight_dtype=weight_dtype)
    exact = work.in_float64().run(full_cross_entropy, factor=0.3, **options)
    autocast = torch.autocast(device, torch.bfloat16) if "autocast" in precision else nullcontext()
    with autocast:
        full = work.run(full_cross_entropy, factor=0.3, **options)
        ours = work.run(chunked, factor=0.3, compiles=compiles, **options)

    assert ours[0].dtype == full[0].dtype == (torch.float64 if precision == "float64" else torch.float32)
    assert error(ours[0], exact[0]) <= error(full[0], exact[0]) + 2 * torch.finfo(ours[0].dtype).eps
    rounding = torch.finfo(torch.bfloat16 if "autocast" in precision else weight_dtype).eps / 2
    if precision == "float64":
        rounding *= 16  # the yardstick itself is no nearer
    for own, other, right in zip(ours[1:], full[1:], exact[1:], strict=True):
        assert own.dtype == other.dtype
        assert error(own, right) <= 1.6 * error(other, right) + rounding  # few rows are summed in another order


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_padded_words_have_no_part_in_it(options, bias, compiles, monkeypatch):
    """As on CUDA in half precision: 320 rows of the head, of which 301 are words."""
    monkeypatch.setattr(losses, "_pads", lambda head, dtype: True)
    work = Work(bias=bias, hidden_dtype=torch.float64, weight_dtype=torch.float64)
    expected = work.run(full_cross_entropy, factor=0.3, **options)
    ours = work.run(chunked, factor=0.3, compiles=compiles, **options)
    for own, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-12)
    of_head = ours[2]
    whole = of_head.new_empty(0).set_(of_head.untyped_storage(), 0, (320, work.width))
    assert not whole[301:].any()
    work.labels[0] = 301  # a row of the padding
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        work.loss(chunked, compiles=compiles, **options)


def test_gradcheck():
    work = Work(num_rows=7, width=4, vocab_size=11, bias=True, hidden_dtype=torch.float64, weight_dtype=torch.float64)

    def loss(hidden, weight, bias):
        return chunked(hidden, weight, work.labels, bias=bias, softcap=1.5, logit_scale=0.7)

    assert torch.autograd.gradcheck(loss, work.tensors)


def test_many_small_chunks_lose_nothing_of_a_large_sum():
    """One label for all: every row adds the same to one row of the head, which soon is too large to notice it."""
    work = Work(num_rows=2048, width=8, vocab_size=16, hidden_dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
    work.tensors[0].data.fill_(1.0)
    work.labels.fill_(3)
    exact = work.in_float64().run(full_cross_entropy)[2]
    full, ours = (work.run(function)[2] for function in (full_cross_entropy, chunked))
    assert error(ours, exact) <= error(full, exact) + torch.finfo(torch.bfloat16).eps / 2


class TiedModel(nn.Module):
    """The embedding is the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.Linear(16, 16)

    def forward(self, tokens):  # (B, T) to (B, T, D)
        return torch.tanh(self.layer(self.embedding(tokens)))


def test_tied_weights_get_both_gradients():
    torch.manual_seed(0)
    model = TiedModel().double()
    tokens = torch.randint(50, (3, 9))

    def gradients(function):
        hidden = model(tokens[:, :-1]).flatten(0, 1)
        return torch.autograd.grad(
            function(hidden, model.embedding.weight, tokens[:, 1:].flatten()), list(model.parameters())
        )

    for own, other in zip(gradients(chunked), gradients(full_cross_entropy), strict=True):
        torch.testing.assert_close(own, other)


def gradients_in_one(model, tokens, function=chunked, *, embed=None):
    """Of the parameters, with the lookup's rows added to the head's gradient."""
    with tied_gradient(model.embedding) as tied:
        hidden = (embed or model)(tokens[:, :-1]).flatten(0, 1)
    loss = function(hidden, model.embedding.weight, tokens[:, 1:].flatten(), tied=tied)
    return torch.autograd.grad(loss, list(model.parameters()))


def gradients_apart(model, tokens, *, embed=None):
    hidden = (embed or model)(tokens[:, :-1]).flatten(0, 1)
    loss = full_cross_entropy(hidden, model.embedding.weight, tokens[:, 1:].flatten())
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture
def tied_model():
    torch.manual_seed(0)
    return TiedModel().double()


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))


def assert_close(found, expected):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_both_gradients_of_tied_weights_are_one_sum(tied_model, tokens):
    expected = gradients_apart(tied_model, tokens)
    assert_close(gradients_in_one(tied_model, tokens), expected)
    assert "forward" not in vars(tied_model.embedding)
    assert_close(gradients_apart(tied_model, tokens), expected)


def test_padding_gets_nothing_of_the_lookup(tied_model, tokens):
    tied_model.embedding.padding_idx = 7
    tokens[0, :4] = 7
    assert_close(gradients_in_one(tied_model, tokens), gradients_apart(tied_model, tokens))


def test_states_that_do_not_depend_on_the_lookup(tied_model, tokens):
    """The lookup has no backward then, and the loss keeps the gradient of the head."""

    def embed(tokens):
        return torch.tanh(tied_model.layer(tied_model.embedding(tokens).detach()))

    expected = gradients_apart(tied_model, tokens, embed=embed)
    assert_close(gradients_in_one(tied_model, tokens, embed=embed), expected)


def test_tokens_that_are_looked_up_twice(tied_model, tokens):
    def embed(tokens):
        return torch.tanh(tied_model.layer(tied_model.embedding(tokens))) * tied_model.embedding(tokens.flip(1))

    expected = gradients_apart(tied_model, tokens, embed=embed)
    assert_close(gradients_in_one(tied_model, tokens, embed=embed), expected)


def test_tied_gradients_of_a_graph_that_is_retained(tied_model, tokens):
    with tied_gradient(tied_model.embedding) as tied:
        hidden = tied_model(tokens[:, :-1]).flatten(0, 1)
    loss = chunked(hidden, tied_model.embedding.weight, tokens[:, 1:].flatten(), tied=tied)
    expected = gradients_apart(tied_model, tokens)
    assert_close(torch.autograd.grad(loss, list(tied_model.parameters()), retain_graph=True), expected)
    (of_layer,) = torch.autograd.grad(loss, [tied_model.layer.weight], retain_graph=True)
    torch.testing.assert_close(of_layer, expected[1])
    assert_close(torch.autograd.grad(loss, list(tied_model.parameters())), expected)


def test_a_lookup_without_the_loss_has_its_own_gradient(tied_model, tokens):
    with tied_gradient(tied_model.embedding):
        hidden = tied_model(tokens)
    assert_close(
        torch.autograd.grad(hidden.sum(), list(tied_model.parameters())),
        torch.autograd.grad(tied_model(tokens).sum(), list(tied_model.parameters())),
    )


@pytest.mark.parametrize("setting", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_lookups_that_do_more_stay_as_they_are(setting):
    with tied_gradient(nn.Embedding(50, 16, **setting)) as tied:
        assert tied is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sum_is_as_near_to_float64_as_two(tied_model, tokens, dtype):
    exact = gradients_apart(tied_model, tokens)
    rounded = tied_model.to(dtype)
    ours, theirs = gradients_in_one(rounded, tokens), gradients_apart(rounded, tokens)
    for own, other, right in zip(ours, theirs, exact, strict=True):
        assert own.dtype == dtype
        assert error(own, right) <= 1.6 * error(other, right) + torch.finfo(dtype).eps / 2


def test_gradients_of_two_calls_add_up():
    work = Work(bias=True)
    for _ in range(2):
        (work.loss(chunked) / 5).backward()
    for tensor, gradient in zip(work.tensors, work.run(full_cross_entropy, factor=2 / 5)[1:], strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_retained_graph_gives_the_same_gradients_again(autocast):
    work = Work(bias=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = work.run(chunked, factor=2)[1:]
        loss = work.loss(chunked)
    once = torch.autograd.grad(2 * loss, work.tensors, retain_graph=True)
    again = torch.autograd.grad(2 * loss, work.tensors)
    for first, second, right in zip(once, again, expected, strict=True):
        assert torch.equal(first, right)
        assert torch.equal(second, right)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_loss_in_a_larger_expression():
    """Two losses on one head: the factors from above differ, and one depends on a loss."""
    work = Work(hidden_dtype=torch.float64, weight_dtype=torch.float64)

    def expression(function):
        return work.loss(function).square() / 100 + 7 * work.loss(function, softcap=2.0)

    for own, other in zip(*(torch.autograd.grad(expression(f), work.tensors) for f in BOTH), strict=True):
        torch.testing.assert_close(own, other)


def test_nothing_but_ignored_rows():
    work = Work(bias=True)
    work.labels.fill_(-100)
    assert [tensor.abs().sum().item() for tensor in work.run(chunked)] == [0, 0, 0, 0]


def test_no_rows():
    assert [tensor.abs().sum().item() for tensor in Work(num_rows=0).run(chunked)] == [0, 0, 0]


def test_an_ignored_row_gets_no_gradient():
    gradient = Work().run(chunked)[1]
    assert gradient[::7].count_nonzero() == 0
    assert gradient[1::7].count_nonzero(1).all()


@pytest.mark.parametrize("label", [301, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused(label):
    work = Work()
    work.labels[40] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        work.loss(chunked)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, labels = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="flatten both"):
        chunked(hidden, weight, labels)
    with pytest.raises(ValueError, match=r"\(6, 4\) and \(5,\)"):
        chunked(hidden.flatten(0, 1), weight, labels.flatten()[1:])


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(frozen):
    work = Work(bias=True)
    expected = work.run(full_cross_entropy)[1:]
    work.tensors[frozen].requires_grad_(False)
    work.loss(chunked).backward()
    for index, (tensor, gradient) in enumerate(zip(work.tensors, expected, strict=True)):
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, gradient)


def test_a_plan_on_paper_knows_the_sums_that_come_out(monkeypatch):
    """What CUDA's products do with rounded factors, of fake tensors; torch 2.11 does not know the shapes itself."""
    monkeypatch.setattr(losses, "_sums_come_out", lambda factor: True)
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, 8, dtype=torch.bfloat16, requires_grad=True) for rows in (20, 40))
        linear_cross_entropy(hidden, weight, torch.empty(20, dtype=torch.int64), chunk_bytes=640).backward()
    assert (weight.grad.shape, weight.grad.dtype) == ((40, 8), torch.bfloat16)
