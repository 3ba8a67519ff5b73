"""Through real `accelerate launch` on two stand-ins for CUDA devices: all recipes train, are killed and go on.

Accelerate, DDP and FSDP2 go other ways on CUDA devices than on the CPU; ``tests/standin/README.md`` says what shows.
"""

import json
import re
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from image_text_models import TOKENS, rows_with_images, save
from lives import FLAGS, LENGTH, ROOT, end_of, launch, loaded, rows_of, wait_for_checkpoint
from safetensors.torch import load_file

SIZES = "hidden_size=32,{0}.intermediate_size=64,{0}.num_hidden_layers=2,{0}.num_attention_heads=2"
TINY_LLAVA = ",".join(f"{part}.{SIZES.format(part)}" for part in ("text_config", "vision_config"))
TINY_LLAVA += ",text_config.num_key_value_heads=2,text_config.vocab_size=320,vision_feature_layer=2"
TINY_LLAVA += ",vision_config.image_size=16,vision_config.patch_size=8"
IMAGES_AND_TEXT = ["--model_type", "llava", "--config_overrides", TINY_LLAVA, "--block_size", "96"]
FLAGS = {**FLAGS, "image_text": [*IMAGES_AND_TEXT, "--global_batch_size", "8", *LENGTH]}
T4 = {"CAPABILITY": 7.5, "NAME": "Tesla T4", "GIB": 15}
NO_DROPOUT = {
    "image_classification": "",
    "image_text": "",
    "language_modeling": ",resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
    "text_classification": ",hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
}
OF_IMAGES = [
    *("--block_size", "240", "--global_batch_size", "8", "--micro_batch_size", "2", "--images_per_row", "2"),
    *("--freeze", "none", "--dtype", "float32", "--optimizer", "sgd", "--learning_rate", "0.001", *LENGTH),
]
OF_STRIDES = "Grad strides do not match bucket view strides"  # of DDP: a copy more, for InternVL's positions
TOLERANCE = 1e-5  # as between ranks and micro-batches in float32
SAVED = ["--save_every", "4", "--resume"]  # step 4 ends a logging window, too


def flags_of(recipe):
    flags = [*FLAGS[recipe], "--optimizer", "sgd", "--learning_rate", "0.05"]
    at = flags.index("--config_overrides") + 1
    flags[at] += NO_DROPOUT[recipe]
    return flags


def train_here(recipe, folder, *flags, common=None):
    """On one rank of the CPU, in this process; ``common`` in place of ``flags_of``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch, loaded(recipe) as module:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        module.main([*(common or flags_of(recipe)), *flags, "--report_to", "none", "--output_dir", str(folder)])
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_the_same_training(folder, expected):
    memory = json.loads((folder / "results.json").read_text())["memory"]
    assert 0 < memory["peak_allocated_gib"] <= memory["peak_reserved_gib"] < memory["device_used_gib"]
    for key in ("train/loss", "eval/loss"):
        losses, others = ([row[key] for row in rows_of(run) if key in row] for run in (folder, expected))
        assert losses == pytest.approx(others, rel=TOLERANCE)
    weights, others = (load_file(run / "final" / "model.safetensors") for run in (folder, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FLAGS)
def test_a_run_on_two_devices_that_is_killed_is_that_of_one_rank(recipe, on_devices, tmp_path):
    train_killed_on_two(recipe, flags_of(recipe), on_devices, tmp_path)
    assert_the_same_training(tmp_path / "two", tmp_path / "one")


def train_killed_on_two(recipe, flags, on_devices, tmp_path):
    """On two devices, killed and resumed, as ``two``; and on one rank of the CPU, as ``one``."""
    options = {"folder": tmp_path / "two", "common": flags, "environment": on_devices(2)}
    process = launch(recipe, "multi_gpu", *SAVED, **options)
    train_here(recipe, tmp_path / "one", common=flags)
    wait_for_checkpoint(process, tmp_path / "two")
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:  # ranks have sessions of their own
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()
    code, output = end_of(launch(recipe, "multi_gpu", *SAVED, **options))
    assert code == 0, output
    assert "going on after" in output
    warnings = [line for line in output.splitlines() if "Warning" in line and OF_STRIDES not in line]
    assert warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TOKENS))
def test_models_of_images_and_text_train_on_devices_as_on_one_rank(model_type, on_devices, tmp_path):
    """Two images in a row or none, so that in some micro-batches no weight of the tower has a gradient."""
    data = rows_with_images(tmp_path)
    flags = ["--model_name_or_path", save(model_type, tmp_path / "model"), "--train_file", data, *OF_IMAGES]
    train_killed_on_two("image_text", flags, on_devices, tmp_path)
    assert_the_same_training(tmp_path / "two", tmp_path / "one")
    one = launch("image_text", "single_gpu", folder=tmp_path / "alone", common=flags, environment=on_devices(1))
    code, output = end_of(one)
    assert code == 0, output
    assert_the_same_training(tmp_path / "alone", tmp_path / "one")


@pytest.mark.slow
def test_weights_in_shards_over_two_devices_train_as_on_one_rank(on_devices, tmp_path):
    recipe = "language_modeling"
    options = {"folder": tmp_path / "shards", "common": flags_of(recipe), "environment": on_devices(2)}
    process = launch(recipe, "fsdp2", "--save_every", "4", **options)
    train_here(recipe, tmp_path / "one")
    code, output = end_of(process)
    assert code == 0, output
    assert_the_same_training(tmp_path / "shards", tmp_path / "one")


@pytest.mark.slow
def test_rows_that_two_devices_share_train_as_on_one_rank(on_devices, tmp_path):
    recipe = "language_modeling"
    options = {"folder": tmp_path / "two", "common": flags_of(recipe)}
    flags = ["--sequence_parallel", "2", "--activation_checkpointing", "full", "--verify", "--save_every", "4"]
    environment = on_devices(2, POISON=1, WAITS=tmp_path / "waits")
    process = launch(recipe, "multi_gpu", *flags, environment=environment, **options)
    train_here(recipe, tmp_path / "one")
    code, output = end_of(process)
    assert code == 0, output
    assert_the_same_training(tmp_path / "two", tmp_path / "one")
    waits = "".join(path.read_text() for path in (tmp_path / "waits").iterdir())
    in_groups = set(re.findall(r"sequence_parallel.py:\d+ (\w+)", waits))
    assert in_groups == {"_why_not"}  # before the first step


@pytest.mark.slow
def test_ddp_equals_accumulation_bit_for_bit(on_devices, tmp_path):
    flags = ["--global_batch_size", "5", "--max_steps", "2"]
    recipe = "ddp_equals_accumulation"
    code, output = end_of(launch(recipe, "multi_gpu", folder=tmp_path, common=flags, environment=on_devices(2)))
    assert code == 0, output
    equivalence = json.loads((tmp_path / "results.json").read_text())["equivalence"]
    assert equivalence["largest_difference_exact"] <= 1e-15
    assert equivalence["largest_difference_bitwise"] == 0


# In a step of 4 micro-batches, with language modeling of 2. A line more is a step that became slower on every GPU.
ADDED = "synchronize event: host/step.py "  # by a thread, of each gradient of the second micro-batch
GRADIENTS = f"{ADDED}_check"  # before the norm, and before the step
WAITS = {
    "image_classification": {},
    "language_modeling": {},
    "text_classification": {},
    "rows that are not packed": {},
    "a classifier that is a decoder": {},
    "muon": {},
    "stochastic rounding": {},
    "adafactor": {
        "item: recipes/language_modeling.py train <- optim/_adafactor.py _single_tensor_adafactor": 2
        * 28,  # parameters
    },
    "state on the host": {},
    **{name: {GRADIENTS: 2, f"{ADDED}_add": 28} for name in ("step on the host", "weights on the host")},
}


@pytest.fixture(scope="module")
def on_one_device(on_devices, tmp_path_factory):
    """What a process printed that ran the recipes on one device, where late copies read as NaN; and its folder."""
    folder = tmp_path_factory.mktemp("one_device")
    return run_on_one_device(folder, on_devices), folder


def run_on_one_device(folder, on_devices, *which):
    """What it printed."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "recipes" / "on_one_device.py", folder, *which],
        env=on_devices(POISON=1, WAITS=folder / "all"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_late_copies_of_activations_are_waited_for(on_one_device):
    assert "--verify: one global batch, without the plan and with it: identical" in on_one_device[0]


@pytest.mark.slow
def test_what_the_host_waits_for_in_a_step(on_one_device):
    assert json.loads((on_one_device[1] / "waits.json").read_text()) == WAITS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_optimizer_of_ours_is_waited_for(on_devices, tmp_path):
    """Of others the lines are above; bitsandbytes has no kernels for the stand-in."""
    run_on_one_device(tmp_path, on_devices, "optimizers")
    found = json.loads((tmp_path / "waits.json").read_text())
    assert len(found) == 3 * (4 * 2 - 1)
    assert {name: waits for name, waits in found.items() if waits} == {}


@pytest.mark.slow
def test_a_launch_for_several_devices_runs_on_one(on_devices, tmp_path):
    flags = ["--save_every", "4", "--verify"]
    options = {"folder": tmp_path, "common": flags_of("language_modeling"), "environment": on_devices(1)}
    code, output = end_of(launch("language_modeling", "multi_gpu", *flags, of_launch=["--num_processes", 1], **options))
    assert code == 0, output
    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_adapters_of_a_t4_train_as_in_float32_on_a_cpu(on_devices, tmp_path):
    """Its frozen weights are float16, and its activations, whose numbers are off by up to a 2048th each."""
    recipe, folder, expected = "language_modeling", tmp_path / "t4", tmp_path / "cpu"
    options = {"common": flags_of(recipe), "environment": on_devices(1, POISON=1, **T4)}
    process = launch(recipe, "single_gpu", "--lora", "--dtype", "auto", folder=folder, **options)
    train_here(recipe, expected, "--lora")
    code, output = end_of(process)
    assert code == 0, output
    assert "--dtype auto: float16, with fp16" in output
    results, config = (json.loads((folder / name).read_text()) for name in ("results.json", "config.json"))
    assert (results["device"], results["mixed_precision"], config["dtype"]) == ("Tesla T4", "fp16", "float16")
    for key in ("train/loss", "eval/loss"):
        losses, others = ([row[key] for row in rows_of(run) if key in row] for run in (folder, expected))
        assert losses == pytest.approx(others, rel=2**-11)
    adapters, others = (load_file(run / "final" / "adapter_model.safetensors") for run in (folder, expected))
    assert adapters.keys() == others.keys()
    for name, weight in adapters.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, others[name], rtol=2**-9, atol=2**-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--dtype", "bfloat16", "--lora"],
            "the Tesla T4 computes in float16 and not in bfloat16: take --dtype float16",
        ),
        (["--dtype", "auto"], "--dtype float16 loses small updates of weights that train: add --lora"),
    ],
)
def test_a_t4_refuses_what_it_cannot_train(flags, words, on_devices, tmp_path):
    options = {"common": flags_of("language_modeling"), "environment": on_devices(1, **T4)}
    code, output = end_of(launch("language_modeling", "single_gpu", *flags, folder=tmp_path / "t4", **options))
    assert words in output
    assert "non-zero exit status 2" in output  # the launcher's own is 1
    assert code == 1
