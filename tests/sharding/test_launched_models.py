"""Recipes launched on ranks and machines in shards: the weights of one rank, and the same bits under every plan."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launches import ROOT, free_port, launch, write_text
from safetensors.torch import load_file
from small_runs import NOISE, all_equal, largest_difference
from transformers import ResNetConfig, ResNetForImageClassification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = ("--max_steps", "20", "--global_batch_size", "8", "--micro_batch_size", "2", "--dtype", "float64")
COMMON = (*STEPS, "--report_to", "none")
TINY = "hidden_size=16,num_hidden_layers=3,num_attention_heads=2,intermediate_size=40"
TEXT = ("--vocab_size", "300", "--block_size", "16", "--dropout", "0", "--max_eval_samples", "8")
LLAMA = ("--model_type", "llama", "--config_overrides", f"{TINY},num_key_value_heads=1", *TEXT)
GPT2 = ("--model_type", "gpt2", "--config_overrides", "n_layer=3,n_head=2,n_embd=16", *TEXT)
VIT = ("--model_type", "vit", "--config_overrides", f"{TINY},patch_size=8", "--dropout", "0")
WORKS = {
    "llama": ("language_modeling", LLAMA),
    "llama with the chunked loss": ("language_modeling", (*LLAMA, "--loss", "chunked")),
    "llama with adapters": ("language_modeling", (*LLAMA, "--lora", "--lora_dropout", "0")),
    "gpt2": ("language_modeling", GPT2),
    "vit": ("image_classification", VIT),
    "resnet": ("image_classification", ()),
}
PLANS = ("full", "every:2", "segments:2", "nested:2", "selective", "offload", "full_offload")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of micro-batches, so of a rank


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The recipe of a work, and its flags."""
    folder = tmp_path_factory.mktemp("data")
    text = ("--train_file", write_text(folder))
    torch.manual_seed(0)
    sizes = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=10)
    ResNetForImageClassification(sizes).save_pretrained(folder / "resnet")

    def of(work):
        recipe, flags = WORKS[work]
        data = text if recipe == "language_modeling" else ("--augmentation", "digits")
        own = ("--model_name_or_path", folder / "resnet") if work == "resnet" else ()
        return ROOT / "recipes" / f"{recipe}.py", (*flags, *own, *data, *COMMON)

    return of


def weights_of(done, folder):
    """Of ``final/``, without statistics."""
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    (file,) = (folder / "final").glob("*model.safetensors")
    return {name: weight for name, weight in load_file(file).items() if not name.endswith(STATISTICS)}


def on_machines(program, flags, num_processes):
    """The launchers of two machines, side by side."""
    port = ["--main_process_port", str(free_port()), "--main_process_ip", "127.0.0.1", "--num_machines", "2"]
    with ThreadPoolExecutor(2) as machines:
        launched = [
            machines.submit(
                launch,
                "cpu_fsdp2.yaml",
                *flags,
                program=program,
                num_processes=num_processes,
                of_launch=[*port, "--machine_rank", rank],
            )
            for rank in ("0", "1")
        ]
    return [machine.result() for machine in launched]


@pytest.mark.parametrize("work", WORKS)
def test_the_weights_of_one_rank(words, tmp_path, work):
    program, flags = words(work)

    def trained(name, start):
        return weights_of(start([*flags, "--output_dir", tmp_path / name]), tmp_path / name)

    def in_shards(num_ranks):
        return lambda all_flags: [launch("cpu_fsdp2.yaml", *all_flags, program=program, num_processes=num_ranks)]

    expected = trained("one", lambda all_flags: [launch("cpu.yaml", *all_flags, program=program)])
    for name, start in {
        "two": in_shards(2),
        "four": in_shards(4),
        "machines": lambda all_flags: on_machines(program, all_flags, 4),
    }.items():
        assert largest_difference(trained(name, start), expected) <= NOISE, name


@pytest.mark.parametrize("work", ["llama", "gpt2", "vit"])
def test_every_plan_has_the_bits_of_none(words, tmp_path, work):
    program, flags = words(work)
    flags = [*flags, "--max_steps", "4"]

    def trained(strategy):
        folder = tmp_path / strategy.replace(":", "-")
        own = ("--activation_checkpointing", strategy, "--output_dir", folder)
        return weights_of([launch("cpu_fsdp2.yaml", *flags, *own, program=program)], folder)

    expected = trained("none")
    for strategy in PLANS:
        assert all_equal(trained(strategy), expected), strategy
