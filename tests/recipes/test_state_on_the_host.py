"""Recipes with ``--offload_optimizer``, on stand-ins for CUDA whose copies are late: the bits of runs without."""

import json
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from lives import OF_TEXT, ROOT, TINY_VIT, end_of, launch, rows_of, scratch, weights_of

STATE = ["--offload_optimizer", "state"]
STEP = ["--offload_optimizer", "step"]  # whose kernels are those of the stand-in, so that the bits are the same
STREAMED = [*STEP, "--stream_weights", "host"]
IN_BACKWARD = ["--optimizer_in_backward", "--max_grad_norm", "0"]
SHORT = ["--max_steps", "4", "--logging_steps", "2", "--eval_steps", "4", "--max_grad_norm", "0.5"]
LANGUAGE = ["--block_size", "32", *OF_TEXT, "--global_batch_size", "8", *SHORT]
GPT2 = [*scratch("gpt2"), *LANGUAGE]
LLAMA = [*scratch("llama"), *LANGUAGE]
VIT = ["--model_type", "vit", "--config_overrides", TINY_VIT, "--global_batch_size", "8", *SHORT]
DENSENET = ["--model", "densenet_small", "--image_size", "16", "--global_batch_size", "8", *SHORT]
RECOMPUTED = ["--activation_checkpointing", "full"]
ACCUMULATED = ["--micro_batch_size", "2"]
BFLOAT16 = ["--dtype", "bfloat16", "--optimizer", "adamw_bf16"]
SAVED = ["--save_every", "2"]


@dataclass(frozen=True)
class Case:
    """Two runs that have to end in the same bits.

    Args:
        flags: of both.
        lives: what the flags of each life of the second run have besides.
        reduces_once: whether both reduce gradients in shards once a step.
    """

    flags: list[str]
    recipe: str = "language_modeling"
    precision: str = "no"
    lives: tuple[list[str], ...] = (STATE,)
    reduces_once: bool = False

    def runs(self, folder: Path) -> list[dict[str, object]]:
        """Without and with, as ``many_runs.py`` takes them."""
        common = {"recipe": self.recipe, "precision": self.precision, "reduces_once": self.reduces_once}
        plain = {**common, "folder": str(folder / "without"), "lives": [self.flags]}
        saved = SAVED if len(self.lives) > 1 else []
        lives = [[*self.flags, *saved, *flags] for flags in self.lives]
        return [plain, {**common, "folder": str(folder / "with"), "lives": lives}]


IMAGES = "image_classification"
KILLED = (STATE, STATE)
ON_ONE_DEVICE = {
    "GPT-2, killed within a step": Case(GPT2, lives=KILLED),
    "Llama, accumulated, bf16": Case([*LLAMA, *ACCUMULATED], precision="bf16"),
    "DenseNet, SGD": Case([*DENSENET, "--optimizer", "sgd"], IMAGES),
    "Llama, accumulated, step": Case([*LLAMA, *ACCUMULATED], lives=(STEP, STEP)),
    "Llama, recomputed, weights": Case([*LLAMA, *RECOMPUTED], lives=(STREAMED, STREAMED)),
}
MORE_ON_ONE_DEVICE = {
    "GPT-2, accumulated, fp16": Case([*GPT2, *ACCUMULATED], precision="fp16", lives=KILLED),
    "Llama": Case(LLAMA),
    "ViT, fp16": Case(VIT, IMAGES, precision="fp16"),
    "ViT, accumulated, bf16": Case([*VIT, *ACCUMULATED], IMAGES, precision="bf16"),
    "DenseNet, accumulated": Case([*DENSENET, *ACCUMULATED], IMAGES, lives=KILLED),
    "Muon": Case([*LLAMA, "--optimizer", "muon"], lives=KILLED),
    "Adafactor": Case([*GPT2, "--optimizer", "adafactor"], lives=KILLED),
    "stochastic rounding": Case([*LLAMA, *BFLOAT16], lives=KILLED),
    "SGD, fp16": Case([*GPT2, "--optimizer", "sgd"], precision="fp16"),
    "in the backward": Case([*GPT2, *IN_BACKWARD], lives=KILLED),
    "an average": Case([*GPT2, "--ema_decay", "0.9"], lives=KILLED),
    "the same bits anywhere": Case([*GPT2, *ACCUMULATED, "--bitwise_topology"]),
    "streamed LoRA": Case([*LLAMA, "--lora", "--lora_rank", "8", "--stream_weights", "host"]),
    "step in the backward, bf16": Case([*GPT2, *IN_BACKWARD], precision="bf16", lives=(STEP, STEP)),
    "weights, step in the backward": Case([*LLAMA, *RECOMPUTED, *IN_BACKWARD], lives=(STREAMED, STREAMED)),
    "GPT-2, step, bf16": Case(GPT2, precision="bf16", lives=(STEP, STEP)),
    "ViT, accumulated, step": Case([*VIT, *ACCUMULATED], IMAGES, lives=(STEP, [])),
    "ViT, weights, bf16": Case([*VIT, *RECOMPUTED], IMAGES, precision="bf16", lives=(STREAMED, STREAMED)),
    "DenseNet, step, SGD": Case([*DENSENET, "--optimizer", "sgd"], IMAGES, lives=(STEP, STEP)),
    "ViT, accumulated, fp16, step": Case([*VIT, *ACCUMULATED], IMAGES, precision="fp16", lives=(STEP, STEP)),
    "float16, accumulated, killed": Case(
        [*LLAMA, "--dtype", "float16", *STEP, *ACCUMULATED], precision="fp16", lives=([], [])
    ),
    "LoRA in float16, killed": Case([*LLAMA, *ACCUMULATED, "--lora", "--dtype", "float16"], lives=([], [])),
    "an average, weights": Case(
        [*LLAMA, *RECOMPUTED, "--ema_decay", "0.9", "--eval_steps", "1"], lives=(STREAMED, STREAMED)
    ),
    "an average, step": Case([*GPT2, "--ema_decay", "0.9"], lives=(STEP, STEP)),
    "LoRA, weights": Case([*LLAMA, *RECOMPUTED, "--lora"], lives=(STREAMED, STREAMED)),
    "weights later": Case([*GPT2, *RECOMPUTED], lives=([], STREAMED)),
    "without first": Case(GPT2, lives=([], STATE)),
    "without later": Case([*GPT2, "--optimizer", "muon"], lives=(STATE, [])),
}
ON_TWO_DEVICES = {
    "ViT, bf16, step": Case(VIT, IMAGES, precision="bf16", lives=(STEP, STEP)),
    "Llama, weights": Case([*LLAMA, *RECOMPUTED], lives=(STREAMED, STREAMED)),
    "LoRA, weights": Case([*LLAMA, *RECOMPUTED, "--lora"], lives=(STREAMED, STREAMED)),
    "Llama, fp16, step": Case([*LLAMA, *ACCUMULATED], precision="fp16", lives=(STEP, STEP)),
    "Llama, accumulated, step": Case([*LLAMA, *ACCUMULATED], lives=(STEP, STEP)),
    "the same bits anywhere, step": Case([*GPT2, *ACCUMULATED, "--bitwise_topology"], lives=(STEP, STEP)),
    "GPT-2, accumulated": Case([*GPT2, *ACCUMULATED], lives=KILLED),
    "ViT, fp16": Case(VIT, IMAGES, precision="fp16"),
    "DenseNet": Case(DENSENET, IMAGES),
    "the same bits anywhere": Case([*LLAMA, *ACCUMULATED, "--bitwise_topology"], precision="bf16"),
}
IN_SHARDS = {
    "GPT-2, killed within a step": Case(GPT2, lives=KILLED),
    "Llama, accumulated, step": Case([*LLAMA, *ACCUMULATED], lives=(STEP, STEP)),
}
MORE_IN_SHARDS = {
    "without first": Case([*LLAMA, *ACCUMULATED], precision="bf16", lives=([], STATE)),
    "without later": Case([*GPT2, "--optimizer", "sgd"], lives=(STATE, [])),
    "Muon": Case([*LLAMA, "--optimizer", "muon"], lives=KILLED),
    "stochastic rounding": Case([*LLAMA, *BFLOAT16]),
    "ViT, bf16": Case(VIT, IMAGES, precision="bf16"),
    "ViT, bf16, step": Case(VIT, IMAGES, precision="bf16", lives=(STEP, STEP)),
    "Llama, 4 micro-batches, bf16, step": Case(
        [*LLAMA, "--micro_batch_size", "1"], precision="bf16", lives=(STEP, STEP)
    ),
    "reduced once, an average, step": Case(
        [*GPT2, *ACCUMULATED, "--ema_decay", "0.9"], lives=(STEP, STEP), reduces_once=True
    ),
    "SGD, step later": Case([*GPT2, "--optimizer", "sgd"], lives=([], STEP)),
    "step first": Case(LLAMA, lives=(STEP, [])),
    "bfloat16, killed": Case([*LLAMA, "--dtype", "bfloat16", *STEP], lives=([], [])),
    "stochastic rounding, killed": Case([*LLAMA, *BFLOAT16, *STEP], lives=([], [])),
}


MODELS = {
    "GPT-2": (GPT2, "language_modeling"),
    "Llama": (LLAMA, "language_modeling"),
    "ViT": (VIT, IMAGES),
    "DenseNet": (DENSENET, IMAGES),
}
LONG = ["--global_batch_size", "16", "--max_steps", "20", "--logging_steps", "10", "--eval_steps", "20"]


def matrix(model, num_ranks, precisions):
    """Runs of 20 steps of 1 and of 4 micro-batches, each ended in the middle of a step."""
    flags, recipe = MODELS[model]
    return {
        f"{model}, {precision}, {accumulation} x, {way[1]}": Case(
            [*flags, *LONG, "--micro_batch_size", str(16 // (num_ranks * accumulation))],
            recipe,
            precision,
            lives=(way, way),
        )
        for precision in precisions
        for accumulation in (1, 4)
        for way in (STATE, STEP)
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("config", [None, "multi_gpu", "fsdp2"])
def test_the_bits_of_twenty_steps_are_those_of_a_run_without(config, model, on_devices, tmp_path):
    precisions = ["bf16"] if config == "fsdp2" else ["fp16", "bf16"]  # shards do not take fp16
    cases = matrix(model, 1 if config is None else 2, precisions)
    test_the_bits_are_those_of_a_run_without(config, cases, on_devices, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "cases"),
    [
        pytest.param(None, ON_ONE_DEVICE, id="one device"),
        pytest.param("fsdp2", IN_SHARDS, id="in shards"),
        pytest.param(None, MORE_ON_ONE_DEVICE, id="more on one device", marks=pytest.mark.slow),
        pytest.param("multi_gpu", ON_TWO_DEVICES, id="two devices", marks=pytest.mark.slow),
        pytest.param("fsdp2", MORE_IN_SHARDS, id="more in shards", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_the_bits_are_those_of_a_run_without(config, cases, on_devices, tmp_path):
    """Where late copies, and memory that is freed, read as NaN."""
    folders = {name: tmp_path / str(number) for number, name in enumerate(cases)}
    listed = tmp_path / "runs.json"
    listed.write_text(json.dumps([run for name, case in cases.items() for run in case.runs(folders[name])]))
    launcher = [sys.executable]
    if config is not None:
        launcher = [Path(sys.executable).with_name("accelerate"), "launch"]
        launcher += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml"]
    done = subprocess.run(
        [*map(str, launcher), ROOT / "tests" / "recipes" / "many_runs.py", listed],
        env=on_devices(1 if config is None else 2, POISON=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, folder in folders.items():
        with_state, without = folder / "with", folder / "without"
        assert rows_of(with_state) == rows_of(without), name
        assert digests(with_state) == digests(without), name
        if cases[name].lives[-1]:
            assert_less_memory(with_state, without)
        if cases[name].lives[1:] and cases[name].lives[-1]:
            assert_no_state_was_on_the_device(with_state)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_in_shards_goes_on_with_whole_weights(on_devices, tmp_path):
    """Whose gradients round otherwise: the weights move 60 times as far in two steps."""
    flags = [*STEP, *SAVED, "--resume", "--dtype", "bfloat16", "--lr_scheduler_type", "constant"]
    for name, second in (("two", "fsdp2"), ("one", "single_gpu")):
        for config, steps in (("fsdp2", 2), (second, 4)):
            where = {"environment": on_devices(1 if config == "single_gpu" else 2, POISON=1)}
            options = {"common": LLAMA, "folder": tmp_path / name, **where}
            code, output = end_of(launch("language_modeling", config, *flags, "--max_steps", str(steps), **options))
            assert code == 0, output
    two, one = (weights_of(tmp_path / name / "final") for name in ("two", "one"))
    differences = torch.cat([(two[name].float() - weight.float()).abs().flatten() for name, weight in one.items()])
    assert differences.mean() < 1e-5


def assert_less_memory(run, than):
    """On the device, at the peak of a step; and none is told that is the host's."""
    found, expected = (json.loads((one / "results.json").read_text())["memory"] for one in (run, than))
    assert found["peak_allocated_gib"] < expected["peak_allocated_gib"]
    assert min(found["breakdown"].values()) >= 0
    assert found["breakdown"]["optimizer_state_gib"] < expected["breakdown"]["optimizer_state_gib"]


def assert_no_state_was_on_the_device(run):
    """When it was read: one large tensor at most, and up to four small ones a weight, in blocks of 512 bytes."""
    weights = weights_of(run / "final").values()
    for path in run.glob("read-*.json"):
        read = json.loads(path.read_text())
        assert read["grown"] <= max(weight.nbytes for weight in weights) + 4 * 512 * len(weights)
        assert read["twice"] == 0


def digests(run):
    files = [path for path in (run / "final").iterdir() if path.suffix != ".md"]
    assert files
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files}
