"""Weights in shards that are saved: the files of ``save_pretrained``, of which rank 0 holds one at a time."""

import json
import resource
import weakref
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from small_runs import VOCABULARY, WORLDS, all_equal, build_model
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding import ShardGroups, shard
from memsave_recipes.models.saved import layout_of
from memsave_recipes.run import folder as run_folder
from memsave_recipes.training.checkpoints.commit import verify_manifest

LIMIT = 10_000
"""Bytes of a file, so that small models have several."""


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_size=16,
            intermediate_size=24,
            num_local_experts=2,
        )
    ).train()


def build(kind):
    return mixtral() if kind == "mixtral" else build_model(kind, torch.float32)


def in_shards(model, flag, accelerator):
    groups = ShardGroups.of(flag, accelerator.num_processes)
    shard(model, model, plan_blocks(model, "none"), groups, accelerator.device, flag)
    return model


def save_whole_and_in_shards(folder, build_one, flag, limit, accelerator):
    """The same weights as ``save_pretrained`` writes them, in ``folder/whole``, and as ``folder/final``."""
    run_folder.MAX_FILE_BYTES = limit
    model = build_one()
    if accelerator.is_main_process:
        run_folder.save_model(accelerator, model, folder / "whole")
    run_folder.save_final(accelerator, folder, in_shards(model, flag, accelerator))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("gpt2", "2"),
        ("resnet", "2x2"),
        pytest.param("tied_llama", "3", marks=pytest.mark.slow),
        pytest.param("llama", "2x2", marks=pytest.mark.slow),
    ],
)
def test_files_are_byte_for_byte_those_of_save_pretrained(run_on_ranks, tmp_path, kind, world):
    """With tied weights, buffers, an index, and rows that the ranks do not divide."""
    num_ranks, flag = WORLDS[world]
    run_on_ranks(partial(save_whole_and_in_shards, tmp_path, partial(build, kind), flag, LIMIT), num_ranks)
    final = content(tmp_path / "final")
    assert final == content(tmp_path / "whole")
    verify_manifest(tmp_path / "final")
    sizes = [path.stat().st_size for path in (tmp_path / "final").glob("model-*-of-*.safetensors")]
    assert len(sizes) > 2
    index = json.loads(final["model.safetensors.index.json"])
    assert index["metadata"]["total_parameters"] == build(kind).num_parameters()
    with safe_open(tmp_path / "final" / f"model-00001-of-{len(sizes):05}.safetensors", "pt") as first:
        assert first.metadata() == {"format": "pt"}


def from_folder(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_model_of_a_folder_has_the_same_files_again(run_on_ranks, tmp_path):
    """Whose tensors ``save_pretrained`` sorts; one file where all fit."""
    model = build("llama")
    model.save_pretrained(tmp_path / "first")
    for limit, num_files in ((LIMIT, 6), (10**6, 1)):
        folder = tmp_path / str(limit)
        save = partial(save_whole_and_in_shards, folder, partial(from_folder, tmp_path / "first"), "full", limit)
        run_on_ranks(save, 2)
        assert content(folder / "final") == content(folder / "whole")
        assert len(list((folder / "final").glob("*.safetensors"))) == num_files
        loaded = from_folder(folder / "final")
        assert all_equal(loaded.state_dict(), model.state_dict())


def test_experts_that_are_split_as_they_are_saved_are_gathered_first(run_on_ranks, tmp_path):
    assert layout_of(mixtral(), LIMIT) is None
    assert layout_of(build("vgg"), LIMIT) is None
    run_on_ranks(partial(save_whole_and_in_shards, tmp_path, partial(build, "mixtral"), "full", LIMIT), 2)
    assert content(tmp_path / "final") == content(tmp_path / "whole")
    assert len(list((tmp_path / "final").glob("*.safetensors"))) > 2


def gathered_while_saving(folder, accelerator):
    """Bytes of the gathered tensors that are there after each time that some were gathered, and of all weights."""
    run_folder.MAX_FILE_BYTES = LIMIT
    model = in_shards(build("llama"), "full", accelerator)
    gather, tensors, alive = run_folder.gathered, [], []

    def gathered(*args, **options):
        found = gather(*args, **options)
        tensors.extend((weakref.ref(tensor), tensor.nbytes) for tensor in found.values())
        alive.append(sum(num_bytes for tensor, num_bytes in tensors if tensor() is not None))
        return found

    run_folder.gathered = gathered
    run_folder.save_final(accelerator, folder, model)
    return alive, sum(weight.nbytes for weight in model.parameters())


def test_rank_0_holds_the_tensors_of_one_file(run_on_ranks, tmp_path):
    (of_rank_0, num_bytes), (of_rank_1, _) = run_on_ranks(partial(gathered_while_saving, tmp_path), 2)
    assert len(of_rank_0) == len(list((tmp_path / "final").glob("*.safetensors"))) > 2
    assert max(of_rank_0) <= LIMIT < num_bytes / 3
    assert sum(of_rank_0) == num_bytes
    assert not any(of_rank_1)


def save_on_a_disk_that_fills_up(folder, accelerator):
    """In the second file of weights; the line that the rank ends with."""
    run_folder.MAX_FILE_BYTES = LIMIT
    model = in_shards(build("llama"), "full", accelerator)
    write = run_folder.save_file

    def save_file(tensors, path, metadata):
        if "00002" in path.name:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        write(tensors, path, metadata)

    run_folder.save_file = save_file
    with pytest.raises(InputError) as full:
        run_folder.save_final(accelerator, folder, model)
    return full.value.one_line


def test_a_disk_that_fills_up_in_the_second_file_ends_all_ranks(run_on_ranks, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "earlier").write_text("whole")
    first, second = run_on_ranks(partial(save_on_a_disk_that_fills_up, tmp_path), 2)
    assert first == second
    assert first.startswith(f"--output_dir {tmp_path}: final/ cannot be written or deleted, file too large")
    assert first.endswith("see to that, then go on with --resume")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert content(tmp_path / "final") == {"earlier": b"whole"}


def test_files_of_whole_weights_are_as_large(monkeypatch, tmp_path):
    accelerator, model = Accelerator(cpu=True), build("gpt2")
    run_folder.save_model(accelerator, model, tmp_path / "one")
    assert run_folder.MAX_FILE_BYTES == 5 * 10**9
    monkeypatch.setattr(run_folder, "MAX_FILE_BYTES", LIMIT)
    run_folder.save_final(accelerator, tmp_path, model)
    files = [list((tmp_path / name).glob("*.safetensors")) for name in ("one", "final")]
    assert [len(found) for found in files] == [1, len(layout_of(model, LIMIT).files)]
