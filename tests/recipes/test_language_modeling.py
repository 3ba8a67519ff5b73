"""The recipe as people run it: one curve, less memory, adapters, models that load again, mistakes in one line."""

import json
import math
import os

import pytest
import torch
import torch.nn.functional as F
from lives import TINY_LLAMA, assert_the_same_weights, curve, launch, rows_of, scratch, write_rows
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memsave_recipes.data.text.documents import TextArguments, load_documents
from memsave_recipes.data.text.tokenizers import load_tokenizer

RECIPE = "language_modeling"
BITS_PER_BYTE = 2.5  # three seeds: 2.40, 2.40, 2.40
SHORT = [
    *("--block_size", "32", "--global_batch_size", "8", "--micro_batch_size", "3", "--max_steps", "4"),
    *("--logging_steps", "1", "--learning_rate", "0.01"),
]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(120)]
    write_rows(path, [{"text": text} for text in texts])
    return path


@pytest.fixture
def small(text_file):
    """The flags of a small run."""
    return [*SHORT, "--train_file", str(text_file), *scratch("llama")]


@pytest.fixture(scope="module")
def plain(run_once, text_file):
    """The folder of a small run without a plan, in float64."""
    return run_once(*SHORT, "--train_file", text_file, *scratch("llama"), "--dtype", "float64")


@pytest.mark.parametrize("strategy", ["full", "selective"])
def test_checkpointing_changes_memory_and_nothing_else(train, tmp_path, small, plain, strategy):
    planned = train(*small, "--dtype", "float64", "--activation_checkpointing", strategy)
    expected = json.loads((plain / "results.json").read_text())
    assert curve(tmp_path / "run") == curve(plain)
    assert planned["eval"] == expected["eval"]
    assert planned["memory"]["saved_for_backward_gib"] < expected["memory"]["saved_for_backward_gib"]
    assert_the_same_weights(tmp_path / "run" / "final", plain / "final")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_fused_operators_keep_the_losses_of_200_steps(run_once, text_file, model_type):
    flags = [*SHORT, "--train_file", text_file, *scratch(model_type), "--max_steps", "200", "--learning_rate", "0.001"]
    fused, written = (curve(run_once(*flags, "--fused_ops", fused_ops)) for fused_ops in ("auto", "none"))
    assert len(fused) == 200
    assert (fused != written) is (model_type == "gpt2")  # on a CPU a norm is the same operators
    assert fused == pytest.approx(written, abs=1e-4)


@pytest.mark.parametrize("flags", [["--micro_batch_size", "1"], ["--loss", "chunked"]])
def test_the_geometry_and_the_kind_of_loss_do_not_change_the_curve(train, tmp_path, small, plain, flags):
    train(*small, "--dtype", "float64", *flags)
    assert curve(tmp_path / "run") == pytest.approx(curve(plain), rel=1e-12)


@pytest.mark.slow
def test_two_ranks_have_the_curve_of_one(train_on_ranks, tmp_path, small, plain):
    two, _ = train_on_ranks(2, *small, "--dtype", "float64")
    one = json.loads((plain / "results.json").read_text())
    assert (two["num_processes"], two["tokens_seen"]) == (2, one["tokens_seen"])
    assert curve(tmp_path / "run") == pytest.approx(curve(plain), rel=1e-12)
    assert two["eval"] == pytest.approx(one["eval"], rel=1e-9)


@pytest.mark.skipif("STANDIN" in os.environ, reason="CPUs, by which it computes, have no histogram of integers")
def test_a_mixture_trains_on_its_balancing_loss(train, tmp_path, text_file):
    """Whose part is that of transformers; the same under a plan, and in no evaluation."""
    mixture = ["--model_type", "mixtral", "--train_file", text_file, *SHORT, "--micro_batch_size", "8"]
    shape = f"{TINY_LLAMA},num_local_experts=4,output_router_logits=True,router_aux_loss_coef="
    found = {}
    for coefficient in (0, 10):
        output = tmp_path / str(coefficient)
        train(*mixture, "--config_overrides", f"{shape}{coefficient}.0", "--loss", "chunked", output=output)
        found[coefficient] = [row for row in rows_of(output) if row["step"] == 1]
    ((without,), (balanced,)) = found.values()
    assert balanced["train/loss"] == pytest.approx(without["train/loss"] + 10 * balanced["train/aux_loss"], rel=1e-6)
    planned = ["--config_overrides", f"{shape}10.0", "--loss", "chunked", "--activation_checkpointing", "full"]
    train(*mixture, *planned, output=tmp_path / "full")
    assert_the_same_weights(tmp_path / "full/final", tmp_path / "10/final")


@pytest.mark.parametrize("shard", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_two_ranks_balance_experts_as_one_with_the_same_forwards(train, train_on_ranks, tmp_path, text_file, shard):
    shape = f"{TINY_LLAMA},num_local_experts=4,output_router_logits=True,router_aux_loss_coef=10.0"
    mixture = ["--model_type", "mixtral", "--config_overrides", shape, "--train_file", text_file, *SHORT]
    mixture += ["--micro_batch_size", "4", "--loss", "chunked"]
    train(*mixture, output="one")
    train_on_ranks(2, *mixture, "--shard", shard, "--activation_checkpointing", "full", output="two")
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_figures_of_the_evaluation(train, tmp_path, small, packing):
    results = train(*small, packing)
    evaluated = results["eval"]
    assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))
    assert 0.5 < evaluated["bits_per_byte"] < 8  # 8 would be to know nothing
    last = [row for row in rows_of(tmp_path / "run") if "progress/tokens_seen" in row][-1]
    assert last["progress/tokens_seen"] == results["tokens_seen"] > 0
    assert "tokens_per_sec" in results["perf"]
    assert results["perf"]["tokens_per_sec"] > results["perf"]["samples_per_sec"]


def test_a_pretrained_folder_fine_tunes_and_what_is_saved_generates(train, tmp_path, text_file):
    tokenizer = load_tokenizer(
        None, load_documents(TextArguments(train_file=[str(text_file)])).train["text"], vocab_size=300
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=2, n_head=2, n_embd=32, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "pretrained")
    tokenizer.save_pretrained(tmp_path / "pretrained")
    flags = ["--model_name_or_path", str(tmp_path / "pretrained"), "--train_file", str(text_file), *SHORT]
    results = train(*flags, "--activation_checkpointing", "full", "--eval_steps", "2")
    assert sum("eval/loss" in row for row in rows_of(tmp_path / "run")) == 2
    assert results["model"] == "pretrained"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    tokens = tokenizer("7 and 7 are", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=5, do_sample=False).shape[1] > tokens.input_ids.shape[1]
    trained = load_file(tmp_path / "run/final/model.safetensors")
    before = load_file(tmp_path / "pretrained/model.safetensors")
    assert any(not torch.equal(trained[name], before[name]) for name in trained)


def test_adapters_train_under_a_plan_and_are_saved_apart(train, tmp_path, small):
    results = train(*small, "--lora", "--lora_rank", "4", "--activation_checkpointing", "full")
    assert results["num_trained_parameters"] < results["num_parameters"] / 2
    losses = curve(tmp_path / "run")
    assert losses[-1] < losses[0]
    names = {path.name for path in (tmp_path / "run/final").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "muon"])
def test_optimizers_by_name(train, tmp_path, small, optimizer):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    train(*small, "--optimizer", optimizer, "--max_steps", "12")
    losses = curve(tmp_path / "run")
    assert losses[-1] < losses[0]


def test_stepping_in_the_backward_gives_the_same_curve(train, tmp_path, small):
    whole = [*small, "--micro_batch_size", "8", "--max_grad_norm", "0"]
    train(*whole, output="usual")
    train(*whole, "--optimizer_in_backward", output="in_backward")
    assert curve(tmp_path / "in_backward") == curve(tmp_path / "usual")
    assert not any("train/grad_norm" in row for row in rows_of(tmp_path / "in_backward"))


MISTAKES = {
    "rows longer than the positions": (["--block_size", "4096"], "longer than the model's 2048 positions"),
    "a file that is not there": (["--train_file", "no.txt"], "no.txt"),
    "4-bit without adapters": (["--load_in_4bit"], "--load_in_4bit"),
    "accumulation": (["--optimizer_in_backward", "--max_grad_norm", "0"], "--micro_batch_size as large"),
    "no attention of that name": (["--attn_implementation", "no_such"], "llama cannot be made"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(refuse, small, mistake):
    flags, expected = MISTAKES[mistake]
    assert expected in refuse(*small, *flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_4bit_without_cuda(refuse, small):
    assert "needs a CUDA device" in refuse(*small, "--lora", "--load_in_4bit")


def test_files_of_a_preset_train_and_a_file_alone_evaluates(train, tmp_path, text_file):
    held_out = tmp_path / "held_out.md"
    held_out.write_text("1 and 2 are 3.\n" * 40)
    preset = tmp_path / "mixture.yaml"
    preset.write_text(f"train_file: [{text_file}, {tmp_path}/*.md]\n")
    flags = ["--config", str(preset), "--validation_file", str(held_out), "--block_size", "32"]
    trained = train(*flags, *SHORT, *scratch("llama"))
    alone = ["--eval_only", "--validation_file", str(held_out)]
    model = ["--model_name_or_path", str(tmp_path / "run" / "final")]
    evaluated = train(*alone, *SHORT, *model, output="evaluated")
    assert evaluated["eval"]["loss"] == pytest.approx(trained["eval"]["loss"], rel=1e-5)


def test_evaluation_by_a_file_alone_trains_no_tokenizer(refuse, text_file):
    line = refuse("--eval_only", "--validation_file", str(text_file), *SHORT, *scratch("llama"))
    assert "--validation_file alone trains no tokenizer: give --model_name_or_path or --tokenizer_name" in line


def test_the_flag_of_a_folder_without_a_tokenizer_is_named(refuse, text_file):
    line = refuse(*SHORT, "--train_file", str(text_file), "--model_name_or_path", "no/where")
    assert line.rstrip().endswith("; check --model_name_or_path")


def test_a_model_that_does_not_keep_packed_documents_apart(refuse, text_file):
    shape = "hidden_size=32,n_layer=1,n_head=2"
    line = refuse(*SHORT, "--train_file", str(text_file), "--model_type", "bloom", "--config_overrides", shape)
    assert "--no_packing" in line


@pytest.mark.parametrize("packing", [[], ["--no_packing"]])
def test_what_sees_later_tokens_is_not_trained(refuse, text_file, packing):
    shape = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48"
    model = ["--model_type", "bert", "--config_overrides", shape]
    line = refuse(*SHORT, *packing, "--train_file", str(text_file), *model)
    assert "bert sees the tokens that it is to predict" in line
    assert "--config_overrides is_decoder=True" in line


def test_a_model_without_positions_trains_and_is_sampled(train, text_file, capsys):
    shape = "hidden_size=32,n_layer=1,n_head=2"
    train(*SHORT, "--no_packing", "--train_file", str(text_file), "--model_type", "bloom", "--config_overrides", shape)
    assert "sample: " in capsys.readouterr().out


def test_a_sample_that_cannot_be_drawn_does_not_end_a_finished_run(train, tmp_path, small, capsys, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda *args, **kwargs: 1 / 0)
    results = train(*small)
    assert "sample: none, because generate() fails on LlamaForCausalLM" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "results.json").read_text())["eval"] == results["eval"]


DOCUMENTED = [
    *("--model_type", "gpt2", "--config_overrides", "n_layer=4,n_head=4,n_embd=128", "--block_size", "256"),
    *("--global_batch_size", "16", "--micro_batch_size", "4", "--max_steps", "200"),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_documented_line_learns_the_standard_library_on_one_rank_and_on_two(tmp_path):
    for config in ("cpu", "cpu_ddp"):
        process = launch(RECIPE, config, common=DOCUMENTED, folder=tmp_path / config)
        output, _ = process.communicate(timeout=1700)
        assert process.returncode == 0, output
    one, two = (json.loads((tmp_path / config / "results.json").read_text()) for config in ("cpu", "cpu_ddp"))
    assert one["eval"]["bits_per_byte"] < BITS_PER_BYTE
    assert (two["num_processes"], two["tokens_seen"]) == (2, one["tokens_seen"])
    assert curve(tmp_path / "cpu_ddp") == pytest.approx(curve(tmp_path / "cpu"), rel=1e-5)


# Flash attention, by a stand-in that refuses what its kernels refuse


@pytest.fixture
def flash(monkeypatch, recipe):
    """The name of a stand-in for flash attention, and of each call what it was told of the documents."""
    told = []

    def attention(module, query, key, value, attention_mask, position_ids=None, **options):
        half = query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type)
        assert half, "FlashAttention only support fp16 and bf16 data type"
        told.append({name: options.get(name) for name in VARLEN})
        kv_groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(kv_groups, dim=1) for states in (key, value))
        mask = None
        if position_ids is not None:
            documents = (position_ids == 0).cumsum(-1)
            mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return attended.transpose(1, 2), None

    name = "half_precision_only"  # transformers would load kernels for a name with "flash" in it
    monkeypatch.setattr(recipe.LanguageModelArguments, "one_row", True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attention)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, lambda *args, **options: None)
    return name, told


VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def test_flash_attention_takes_float32_weights_under_autocast(train, small, flash, monkeypatch):
    """Also where the model runs outside of the prepared loss: the checks before training, the sample after it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    name, told = flash
    results = train(*small, "--attn_implementation", name)
    assert results["mixed_precision"] == "bf16"
    in_training = [call for call in told if call["max_length_q"] is not None]
    assert len(in_training) >= 2 * 4 * 3  # layers, steps, micro-batches
    for call in in_training:
        assert call["max_length_q"] == call["max_length_k"] <= 32
        assert call["cu_seq_lens_q"].dtype == call["cu_seq_lens_k"].dtype == torch.int32


@pytest.mark.parametrize("loss", ["auto", pytest.param("full", marks=pytest.mark.slow)])
def test_adapters_of_a_base_without_a_head_train_it_and_bring_it_back(train, tmp_path, text_file, loss):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, tie_word_embeddings=False, max_position_embeddings=64, **shape)
    LlamaModel(config).save_pretrained(tmp_path / "base")
    flags = ["--train_file", str(text_file), "--validation_file", str(text_file), *SHORT]
    train(
        *flags,
        "--model_type",
        "gpt2",
        "--config_overrides",
        "n_layer=1,n_head=2,n_embd=16,vocab_size=300",
        output="words",
    )
    flags += ["--tokenizer_name", str(tmp_path / "words/final")]
    lora = ["--model_name_or_path", str(tmp_path / "base"), "--lora", "--loss", loss, "--learning_rate", "0.02"]
    found = train(*flags, *lora, "--activation_checkpointing", "full", "--verify", output="adapters")["eval"]["loss"]
    final = ["--model_name_or_path", str(tmp_path / "adapters/final"), "--eval_only", "--seed", "7", "--loss", loss]
    assert train(*flags, *final, output="again")["eval"]["loss"] == pytest.approx(found, rel=1e-12)
