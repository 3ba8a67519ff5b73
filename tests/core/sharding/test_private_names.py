"""Names of torch and Accelerate that are no public interface, and on which shards rest."""

import inspect

import torch
import torch.distributed.checkpoint._hf_utils as of_torch
import torch.optim._muon as muon_of_torch
from accelerate.utils import launch

from memsave_recipes.training.checkpoints import shard_files
from memsave_recipes.training.launch import launched_shard


def test_the_header_and_the_names_of_files_are_those_of_torch():
    assert shard_files.OFFSETS == of_torch.CUSTOM_METADATA_KEY
    assert of_torch.SAVED_OFFSETS_KEY == "saved_offsets"
    assert of_torch._gen_file_name(1, 1, 3) == shard_files.NAME.format(3)


def test_muon_orthogonalises_by_these_functions():
    source = inspect.getsource(muon_of_torch._single_tensor_muon)
    assert "_zeropower_via_newtonschulz(update, ns_coefficients, ns_steps, eps)" in source
    assert "_adjust_lr(lr, adjust_lr_fn, param.shape)" in source
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    options = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
    ours, theirs = (
        muon_of_torch._zeropower_via_newtonschulz(one, **options) for one in (gradient.bfloat16(), gradient)
    )
    assert torch.equal(ours, theirs)  # it rounds first, so that nothing wider has to travel


def test_the_launcher_sets_the_variables_that_are_read():
    source = inspect.getsource(launch)
    for name in (
        launched_shard.USES_FSDP,
        launched_shard.USES_PARALLELISM,
        "FSDP_VERSION",
        "FSDP_RESHARD_AFTER_FORWARD",
    ):
        assert f'"{name}"' in source
    for name in launched_shard.REFUSED:
        assert f'"{name}"' in source
    for name in ("DP_REPLICATE", "DP_SHARD", *launched_shard.OTHER_PARALLELISM):
        assert f'prefix + "{name}_SIZE"' in source
