"""Compiled layers that cannot be: one line that names the layer, the machine or the model, and the way out."""

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.cpp_builder
from torch.nn.parallel import DistributedDataParallel

from memsave_recipes.core.activations import apply_plan, compiled, plan_blocks
from memsave_recipes.core.activations.compiled import Region, check_compiler
from memsave_recipes.core.errors import InputError


@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_too_many_graphs_are_an_error_and_not_the_plain_layer(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 1)
    monkeypatch.setattr(compiled, "MANY_GRAPHS", torch._dynamo.config.patch(recompile_limit=1))
    region = Region(0.31)
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(region.run(torch.nn.ReLU().forward, x), x.relu())
    with pytest.raises(InputError, match=r"ReLU cannot be compiled as one graph .* more than 1 forms"):
        region.run(torch.nn.ReLU().forward, x[:2])


class Powers(torch.nn.Module):
    """Takes one graph for each exponent."""

    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def forward(self, x):
        return torch.linalg.multi_dot([x] * self.exponent)


@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_there_may_be_more_graphs_than_torch_allows(graphs):
    region, x = Region(1.0), torch.randn(3, 3, requires_grad=True)
    exponents = range(2, 4 + torch._dynamo.config.recompile_limit)
    for exponent in exponents:
        torch.testing.assert_close(region.run(Powers(exponent).forward, x), torch.linalg.matrix_power(x, exponent))
    assert graphs() == len(exponents)


@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_the_graph_of_a_layer_is_not_cut_where_buckets_of_ddp_end(monkeypatch, graphs):
    around = SimpleNamespace(bucket_bytes_cap=1)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", around)
    layers = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    Region(1.0).run(layers.forward, torch.ones(3, 3)).sum().backward()
    assert graphs() == 1
    assert DistributedDataParallel._active_ddp_module is around


class Branches(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def test_what_does_not_fit_a_graph_is_refused_by_name():
    with pytest.raises(InputError, match="Branches cannot be compiled as one graph") as refusal:
        Region(0.3, required=True).run(Branches().forward, torch.ones(3, requires_grad=True))
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_what_does_not_fit_a_graph_stays_eager_where_compiling_is_the_default():
    region, x = Region(1.0), torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="Branches computes eager") as told:
        _ = [region.run(Branches().forward, sign * x) for sign in (1, -1, 1)]
    assert len(told) == 1
    assert torch.equal(region.run(torch.nn.ReLU().forward, x), x)  # other kinds compile


class Splits(torch.nn.Module):
    """Attention of a vision tower goes image by image in this way."""

    def forward(self, x, lengths):
        return torch.cat([part - part.mean() for part in torch.split(x, lengths.tolist())])


@torch._dynamo.config.patch(capture_scalar_outputs=True)  # as newer versions of torch do by themselves
def test_what_reads_values_stays_eager_where_torch_would_compile_it():
    region, x, lengths = Region(1.0), torch.randn(5, requires_grad=True), torch.tensor([2, 3])
    with pytest.warns(UserWarning, match="Splits computes eager: .*it reads the values of a tensor"):
        assert torch.equal(region.run(Splits().forward, x, lengths), Splits()(x, lengths))


class Scaled(torch.nn.Module):
    """Layers with a number each, as Swin's rates of dropped paths: torch hands the third in a tensor of its own."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x.relu()


@pytest.mark.usefixtures("kernels_can_be_compiled")
@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_with_other_numbers_compile_as_the_first():
    region, x = Region(1.0, required=True), torch.ones(3, requires_grad=True)
    for factor in (0.25, 0.5, 0.75, 2.0):
        assert torch.equal(region.run(Scaled(factor).forward, x), factor * x)


@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_a_layer_that_was_compiled_does_not_turn_eager():
    class Once(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] == 2 or x.sum().item() > 0 else x

    region = Region(1.0)
    region.run(Once().forward, torch.ones(2, requires_grad=True))
    with pytest.raises(InputError, match="Once cannot be compiled as one graph"):
        region.run(Once().forward, torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("name", ["vgg16", "densenet121"])
def test_models_without_a_layer_that_repeats_are_refused(make_case, name):
    model = make_case(name).model
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(InputError, match=r"strategy compiled: .* no layer that repeats"):
        apply_plan(model, plan_blocks(model, "compiled"))
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_machine_without_a_cpp_compiler(make_case, monkeypatch, tmp_path):
    torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    model = make_case("gpt2").model
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler") as refusal:
        apply_plan(model, plan_blocks(model, "compiled"))
    assert "\n" not in str(refusal.value)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_machine_without_pythons_headers(make_case, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_finds_cpp_compiler", lambda: True)
    monkeypatch.setattr(compiled, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=r"compiled needs Python.h \(of python3-dev .* use another strategy"):
        check_compiler(make_case("gpt2").model)


@pytest.mark.parametrize(("has_triton", "missing"), [(False, "triton"), (True, "a C compiler")])
def test_a_cuda_machine_without_triton_or_its_compiler(monkeypatch, tmp_path, has_triton, missing):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled, "find_spec", lambda name: has_triton or None)
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))])
    with pytest.raises(InputError, match=f"compiled needs {missing}"):
        check_compiler(model)
