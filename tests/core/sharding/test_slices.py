"""Weights that each rank reads or draws in slices: the bits of weights that were there whole, in less memory."""

import os
import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hub_stand_in import NAME, ask_at, cache_as_downloaded, hub_stand_in, use_caches_in
from safetensors.torch import load_file, save_file
from small_runs import VOCABULARY, all_equal, build_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.activations.streaming import place
from memsave_recipes.core.costs.breakdown import record_allocations
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding import ShardGroups, local, shard
from memsave_recipes.core.sharding.units import units_of
from memsave_recipes.core.text import MIB
from memsave_recipes.data.text.packing import keeps_documents_apart
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss, check_causal, find_head
from memsave_recipes.models.image_classifiers import ImageModelArguments, build_image_classifier
from memsave_recipes.models.packed_attention import attend_by_document
from memsave_recipes.models.pretrained import TransformerArguments, build_text_classifier, build_transformer
from memsave_recipes.models.slices import INITIALIZED, slices_of
from memsave_recipes.run.memory_watch import rss_bytes

CPU = torch.device("cpu")
SMALL_FILES = {"max_shard_size": "20KB"}
TINY = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A folder, a name on the Hub or a model from scratch, and how it is cut up over the ranks."""

    folder: Path | str | None = None
    model_type: str | None = None
    overrides: str | None = None
    dtype: torch.dtype = torch.float32
    shard: str = "full"
    lora: bool = False


def build(loading, device):
    """The model; with a ``device`` in slices."""
    folder = None if loading.folder is None else str(loading.folder)
    flags = TransformerArguments(
        model_name_or_path=folder, model_type=loading.model_type, config_overrides=loading.overrides
    )
    of_tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return build_transformer(AutoModelForCausalLM, flags, dtype=loading.dtype, slices_on=device, **of_tokens)


def cut_up(loading, in_slices, accelerator):
    """As the recipe makes it; its model with the loss, in shards, and the units of these."""
    torch.manual_seed(1)  # of adapters
    model = build(loading, accelerator.device if in_slices else None)
    slices = slices_of(model)
    if loading.lora:
        add_lora(model, LoraArguments(lora=True, lora_rank=3), task_type="CAUSAL_LM")
    place(model, accelerator.device)
    trained = CausalLMLoss(model, "chunked", chunk_bytes=4 * VOCABULARY * 8)
    plan = plan_blocks(model, "none")
    units = [sum(p.nbytes for part in unit.modules for p in part.parameters()) for unit in units_of(model, plan, "")]
    groups = ShardGroups.of(loading.shard, accelerator.num_processes)
    shard(trained, model, plan, groups, accelerator.device, loading.shard, slices.unread)
    return trained, units


def a_step(loading, in_slices, accelerator):
    """What a rank has before a step and after its backward, and the random numbers that come next."""
    trained, _ = cut_up(loading, in_slices, accelerator)
    found = {name: local(p.detach()).clone() for name, p in trained.named_parameters(remove_duplicate=False)}
    found |= {name: buffer.clone() for name, buffer in trained.named_buffers()}
    found["random numbers"] = torch.rand(3)
    tokens = torch.arange(32).view(2, 16) % VOCABULARY
    loss = trained(input_ids=tokens, labels=tokens)
    loss.backward()
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    found |= {f"gradient of {name}": local(gradient).clone() for name, gradient in gradients.items()}
    return found | {"loss": loss.detach()}, slices_of(trained.model).line


def steps(loading, accelerator):
    return a_step(loading, True, accelerator), a_step(loading, False, accelerator)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "how", "of_files"),
    [
        ("llama", 2, {"dtype": torch.bfloat16, "lora": True}, SMALL_FILES),
        ("gpt2", 3, {}, {}),
        pytest.param("llama", 3, {"dtype": torch.float64}, {}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"shard": "2"}, {}, marks=pytest.mark.slow),
        pytest.param("tied_llama", 2, {}, SMALL_FILES, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, {"dtype": torch.bfloat16, "lora": True}, SMALL_FILES, marks=pytest.mark.slow),
    ],
)
def test_every_weight_is_the_one_that_is_loaded_whole(run_on_ranks, tmp_path, kind, num_ranks, how, of_files):
    """Also adapters, buffers, gradients and the random numbers after it."""
    build_model(kind, torch.float32).save_pretrained(tmp_path, **of_files)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not of_files
    loading = Loading(folder=tmp_path, **how)
    for (in_slices, line), (whole, _) in run_on_ranks(partial(steps, loading), num_ranks):
        assert line == f"weights: each rank reads its slices of {tmp_path}"
        assert any(name.startswith("gradient of ") for name in whole)
        assert all_equal(in_slices, whole)


def test_files_in_half_precision_train_in_another(run_on_ranks, tmp_path):
    build_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    loading = Loading(folder=tmp_path)
    for (in_slices, _), (whole, _) in run_on_ranks(partial(steps, loading), 2):
        assert all_equal(in_slices, whole)


# Names on the Hub


def steps_by_name(caches, accelerator):
    with pytest.MonkeyPatch.context() as patch:
        use_caches_in(patch, caches, offline=True)
        return steps(Loading(folder=NAME), accelerator)


@pytest.mark.parametrize("of_files", [SMALL_FILES, {}])
def test_a_name_on_the_hub_is_read_in_slices_from_the_cache(run_on_ranks, tmp_path, of_files):
    build_model("llama", torch.float32).save_pretrained(tmp_path / "files", **of_files)
    cache_as_downloaded(tmp_path / "files", tmp_path)
    for (in_slices, line), (whole, _) in run_on_ranks(partial(steps_by_name, tmp_path), 2):
        assert line == f"weights: each rank reads its slices of {NAME}"
        assert all_equal(in_slices, whole)


def rows_from_the_hub(caches, url, accelerator):
    with pytest.MonkeyPatch.context() as patch:
        use_caches_in(patch, caches)
        ask_at(patch, url)
        model = build(Loading(folder=NAME), CPU)
        unread = slices_of(model).unread
        return {name: unread[p](0, len(p)).clone() for name, p in model.named_parameters()}


def test_ranks_of_a_machine_download_a_name_once(run_on_ranks, monkeypatch, tmp_path):
    model = build_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "files", **SMALL_FILES)
    with hub_stand_in(monkeypatch, tmp_path) as be_the_hub:
        served = be_the_hub(tmp_path / "files")
        found = run_on_ranks(partial(rows_from_the_hub, tmp_path, served.url), 2)
    assert all(all_equal(rows, dict(model.named_parameters())) for rows in found)
    downloads = [request for request in served.requests if request.startswith("GET") and "/resolve/" in request]
    weights = [request for request in downloads if request.endswith(".safetensors")]
    assert len(weights) == len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    assert len(set(downloads)) == len(downloads)


def test_pickled_weights_are_not_taken_from_a_cache(monkeypatch, tmp_path):
    use_caches_in(monkeypatch, tmp_path, offline=True)
    model = build_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "files")
    (tmp_path / "files" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "files" / "pytorch_model.bin")
    cache_as_downloaded(tmp_path / "files", tmp_path)
    with pytest.raises(InputError, match="some/name cannot be made"):
        build(Loading(folder=NAME), CPU)


# Models from scratch

GPT2 = "n_layer=2,n_head=2,n_embd=16"
LLAMA = "hidden_size=16,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"


@pytest.mark.parametrize(
    ("model_type", "overrides", "num_ranks", "how"),
    [
        ("gpt2", GPT2, 2, {"lora": True}),
        ("llama", LLAMA, 4, {"shard": "2", "dtype": torch.bfloat16}),
        pytest.param("gpt2", GPT2, 4, {"shard": "2", "dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("llama", LLAMA, 2, {}, marks=pytest.mark.slow),
        pytest.param("llama", f"{LLAMA},tie_word_embeddings=true", 3, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", f"{LLAMA},num_local_experts=4", 2, {"shard": "full"}, marks=pytest.mark.slow),
    ],
)
def test_every_weight_is_the_one_that_is_drawn_whole(run_on_ranks, model_type, overrides, num_ranks, how):
    """Also adapters, buffers, gradients and the random numbers after it."""
    loading = Loading(model_type=model_type, overrides=overrides, **how)
    for (in_slices, line), (whole, _) in run_on_ranks(partial(steps, loading), num_ranks):
        assert line == "weights: each rank initialises its part"
        assert any(name.startswith("gradient of ") for name in whole)
        assert all_equal(in_slices, whole)


def test_stand_ins_of_experts_are_one_matrix_and_answer_as_weights_do():
    loading = Loading(model_type="mixtral", overrides=f"{LLAMA},num_local_experts=4", dtype=torch.bfloat16)
    model, whole = (build(loading, device) for device in (CPU, None))
    experts = [parameter for parameter in slices_of(model).unread if parameter.ndim == 3]
    assert len(experts) == 4
    assert len({parameter.untyped_storage().data_ptr() for parameter in experts}) == 1
    assert experts[0].untyped_storage().nbytes() == max(parameter[0].nbytes for parameter in experts)
    check_causal(model, "mixtral")
    assert find_head(model).scale == find_head(whole).scale == 1
    assert keeps_documents_apart(model)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        pytest.param(
            "modernbert-decoder",
            "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,pad_token_id=0",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="torch drew these distributions in place"),
        ),
        ("marian", "d_model=16,decoder_layers=2,decoder_attention_heads=2,pad_token_id=0"),
        ("rwkv", "hidden_size=16,attention_hidden_size=16,num_hidden_layers=2"),
    ],
)
def test_a_model_that_is_refused_is_made_whole_with_the_same_numbers(model_type, overrides):
    """A truncated normal distribution; positions, and decays, that are computed."""
    found = []
    for device in (CPU, None):
        torch.manual_seed(4)
        model = build(Loading(model_type=model_type, overrides=overrides), device)
        found.append(state_of(model) | {"random numbers": torch.rand(3)})
        assert not slices_of(model).unread
        line = slices_of(model).line or ""
        assert line.startswith("weights: every rank has all of them first, because its initialisation") == bool(device)
    assert all_equal(*found)


# What cannot be read in slices, and stand-ins


def state_of(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def all_rows(model):
    """Its state, with the weights that stand-ins stand for."""
    unread = slices_of(model).unread
    return {name: unread[one](0, len(one)) if one in unread else one for name, one in state_of(model).items()}


LABELS = ("a", "b", "c")


def text_classifier(device, **which):
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    return build_text_classifier(TransformerArguments(**which), LABELS, torch.float32, slices_on=device, **tokens)


def image_classifier(device, **which):
    flags = ImageModelArguments(**which)
    return build_image_classifier(flags, LABELS, 32, torch.float32, with_weights=True, slices_on=device)


def test_a_stand_in_takes_next_to_no_memory_and_answers_as_weights_do(tmp_path):
    build_model("llama", torch.float32).save_pretrained(tmp_path)
    stand_in, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    for parameter, same in zip(stand_in.parameters(), whole.parameters(), strict=True):
        assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (same.shape, same.dtype, True)
        assert parameter.untyped_storage().nbytes() <= 4 * sum(parameter.shape)
    check_causal(stand_in, "llama")
    assert find_head(stand_in).scale == find_head(whole).scale == 1
    assert keeps_documents_apart(stand_in)
    assert attend_by_document(stand_in) is attend_by_document(whole) is None


def test_buffers_are_those_of_a_loaded_model_and_a_model_that_sees_later_tokens_is_found(tmp_path):
    BertLMHeadModel(BertConfig(**TINY, intermediate_size=24)).save_pretrained(tmp_path)
    stand_in, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    assert slices_of(stand_in).unread
    assert all_equal(dict(stand_in.named_buffers()), dict(whole.named_buffers()))
    with pytest.raises(InputError, match="sees the tokens that it is to predict"):
        check_causal(stand_in, "bert")


def test_files_of_a_model_without_its_head_have_no_prefix(tmp_path):
    GPT2Model(GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=16)).save_pretrained(tmp_path)
    model, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    assert set(slices_of(model).unread) == set(model.parameters())
    assert all_equal(all_rows(model), state_of(whole))


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def lose_a_norm(tensors):
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")


def add_the_tied_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def test_what_is_in_no_file_is_initialised(tmp_path):
    build_model("llama", torch.float32).save_pretrained(tmp_path)
    change(tmp_path, lose_a_norm)
    model, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    assert model.model.norm.weight not in slices_of(model).unread
    assert all_equal(all_rows(model), state_of(whole))


def test_two_weights_for_one_are_loaded_whole(tmp_path):
    build_model("tied_llama", torch.float32).save_pretrained(tmp_path)
    change(tmp_path, add_the_tied_head)
    model, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    slices = slices_of(model)
    assert not slices.unread
    reason = "lm_head.weight and model.embed_tokens.weight are one weight, and both in its files"
    assert slices.line == f"weights: every rank has all of them first, because {reason}"
    assert all_equal(state_of(model), state_of(whole))


@pytest.mark.parametrize(
    ("make", "build_classifier", "new"),
    [
        (lambda: build_model("llama", torch.float32), text_classifier, {"score.weight"}),
        (
            lambda: BertForSequenceClassification(BertConfig(**TINY, intermediate_size=24, num_labels=5)),
            text_classifier,
            {"classifier.weight", "classifier.bias"},
        ),
        (
            lambda: BertModel(BertConfig(**TINY, intermediate_size=24), add_pooling_layer=False),
            text_classifier,
            {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"},
        ),
        (lambda: build_model("resnet", torch.float32), image_classifier, {"classifier.1.weight", "classifier.1.bias"}),
    ],
    ids=["llama", "bert", "bert without a pooler", "resnet"],
)
def test_a_new_head_is_initialised_as_without_slices(tmp_path, make, build_classifier, new):
    """Where the files have none, or one for another number of classes; so are the random numbers after it."""
    make().save_pretrained(tmp_path)
    found = []
    for device in (CPU, None):
        torch.manual_seed(4)
        model = build_classifier(device, model_name_or_path=str(tmp_path))
        found.append(all_rows(model) | {"random numbers": torch.rand(3)})
        is_there = {name for name, p in model.named_parameters() if p not in slices_of(model).unread}
        assert is_there == (new if device else set(dict(model.named_parameters())))
    assert all_equal(*found)


@pytest.mark.parametrize(
    ("build_classifier", "model_type", "overrides"),
    [
        (text_classifier, "bert", "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=24"),
        (image_classifier, "vit", "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,patch_size=8"),
        (image_classifier, "convnext", None),
    ],
)
def test_a_classifier_from_scratch_is_drawn_in_part(build_classifier, model_type, overrides):
    found = []
    for device in (CPU, None):
        torch.manual_seed(4)
        model = build_classifier(device, model_type=model_type, config_overrides=overrides)
        found.append(all_rows(model) | {"random numbers": torch.rand(3)})
        assert slices_of(model).line == ("weights: each rank initialises its part" if device else None)
    assert all_equal(*found)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_head_that_peft_copies_has_its_weights(tmp_path, is_saved):
    """Adapters train a copy of the head; from scratch, and from files for as many classes."""
    sizes = "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=24"
    which = {"model_type": "bert", "config_overrides": sizes}
    if is_saved:
        text_classifier(None, **which).save_pretrained(tmp_path)
        which = {"model_name_or_path": str(tmp_path)}
    found = []
    for device in (CPU, None):
        torch.manual_seed(4)
        model = text_classifier(device, **which)
        adapted = add_lora(model, LoraArguments(lora=True, lora_rank=3), task_type="SEQ_CLS")
        assert bool(slices_of(model).unread) == bool(device)
        assert all(parameter.is_contiguous() for parameter in adapted.parameters() if parameter.requires_grad)
        found.append(all_rows(model) | {"random numbers": torch.rand(3)})
    assert any("modules_to_save" in name for name in found[0])
    assert all_equal(*found)


def test_tensors_that_transformers_joins_are_loaded_whole(tmp_path):
    config = MixtralConfig(**TINY, intermediate_size=24, num_key_value_heads=1, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    model, whole = (build(Loading(folder=tmp_path), device) for device in (CPU, None))
    assert "MixtralForCausalLM has other names or shapes than its files" in slices_of(model).line
    assert all_equal(state_of(model), state_of(whole))


@pytest.mark.parametrize("source", ["/no/folder", NAME])
def test_what_is_missing_ends_as_without_slices(monkeypatch, tmp_path, source):
    use_caches_in(monkeypatch, tmp_path, offline=True)
    lines = []
    for device in (CPU, None):
        with pytest.raises(InputError) as refused:
            build(Loading(folder=source), device)
        lines.append(refused.value.one_line)
    assert lines[0] == lines[1]


def test_stand_ins_whose_slices_nobody_reads_are_refused(tmp_path):
    build_model("llama", torch.float32).save_pretrained(tmp_path)
    model = build(Loading(folder=tmp_path), CPU)
    groups = ShardGroups(size=2, num_ranks=2)
    with pytest.raises(InputError, match="not contiguous"):
        shard(model, model, plan_blocks(model, "none"), groups, CPU)


def test_the_private_names_of_transformers(tmp_path):
    build_model("llama", torch.float32).save_pretrained(tmp_path)
    model = build(Loading(folder=tmp_path), None)
    assert model._weight_conversions == []
    assert all(getattr(parameter, INITIALIZED) for parameter in model.parameters())


# Memory

ALLOWED = MIB
"""Beside the share of a rank and a unit: buffers, the few tokens on which the model is tried."""


def llama_8b(divisor, num_layers=32, vocab_size=128256):
    """The shape of Llama 3 8B, all widths divided."""
    return LlamaConfig(
        hidden_size=4096 // divisor,
        intermediate_size=14336 // divisor,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocab_size,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def share_of(trained):
    return sum(local(parameter).nbytes for parameter in trained.parameters())


def allocated_while_loading(loading, in_slices, accelerator):
    """The most that torch had allocated at once, without mapped files; a rank's share, and the largest unit; bytes."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # allocations of other threads are not recorded
    with record_allocations() as events:
        trained, units = cut_up(loading, in_slices, accelerator)
    files = {path.stat().st_size for path in Path(loading.folder or ".").glob("*.safetensors")}
    held = accumulate(event.num_bytes for event in events if abs(event.num_bytes) not in files)
    return max(held), share_of(trained), max(units)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torch_never_allocates_more_than_the_share_and_a_unit(run_on_ranks, tmp_path, num_ranks):
    """Of weights in another precision than that of their files, which are else pages of a file where they are whole."""
    LlamaForCausalLM(llama_8b(32, num_layers=16, vocab_size=2048)).save_pretrained(tmp_path)
    loading = Loading(folder=tmp_path, dtype=torch.float64)
    for peak, share, unit in run_on_ranks(partial(allocated_while_loading, loading, True), num_ranks):
        print(f"{num_ranks} ranks: at most {peak:,} bytes, share {share:,}, largest unit {unit:,}")
        assert share < peak <= share + unit + ALLOWED
    for peak, share, unit in run_on_ranks(partial(allocated_while_loading, loading, False), num_ranks):
        assert peak > share + unit + ALLOWED


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torch_never_allocates_more_than_the_share_and_a_weight_that_is_drawn(run_on_ranks, num_ranks):
    sizes = "hidden_size=128,intermediate_size=448,num_hidden_layers=16,num_attention_heads=4,num_key_value_heads=4"
    loading = Loading(model_type="llama", overrides=f"{sizes},max_position_embeddings=64")
    largest = 128 * 448 * 4
    for peak, share, _ in run_on_ranks(partial(allocated_while_loading, loading, True), num_ranks):
        print(f"{num_ranks} ranks: at most {peak:,} bytes, share {share:,}, largest weight {largest:,}")
        assert share < peak <= share + largest + ALLOWED
    for peak, share, _ in run_on_ranks(partial(allocated_while_loading, loading, False), num_ranks):
        assert peak > share + largest + ALLOWED


def resident_while_loading(loading, in_slices, accelerator):
    """As above, by what the system counts as resident, with pages of files; ``None`` where it does not let us begin."""
    cut_up(Loading(folder=loading.folder / "small"), in_slices, accelerator)  # for code that runs for the first time
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak falls to the present figure
    except OSError:
        return None
    before = rss_bytes()
    trained, units = cut_up(loading, in_slices, accelerator)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak[1]) * 1024 - before, share_of(trained), max(units)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_system_counts_no_more_than_the_share_and_a_unit(run_on_ranks, tmp_path, num_ranks):
    """Of a model shaped like Llama 3 8B, its widths a sixteenth, in 32 layers and with all tokens."""
    LlamaForCausalLM(llama_8b(16)).save_pretrained(tmp_path)
    LlamaForCausalLM(llama_8b(64, num_layers=2, vocab_size=64)).save_pretrained(tmp_path / "small")
    loading = Loading(folder=tmp_path)
    for in_slices in (True, False):
        found = run_on_ranks(partial(resident_while_loading, loading, in_slices), num_ranks, timeout_s=250)
        if None in found:
            pytest.skip("the peak of resident memory cannot be set back")
        for peak, share, unit in found:
            print(f"{num_ranks} ranks, slices {in_slices}: {peak:,} bytes, share {share:,}, largest unit {unit:,}")
            assert (peak <= share + unit) is in_slices
