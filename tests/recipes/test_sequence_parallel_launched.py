"""Rows that ranks share, launched: twenty steps have the curve and the weights of one rank, and those of every plan.

Each launch trains many runs, one after the other (``many_runs.py``), as a start takes longer than a run.
"""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from lives import OF_TEXT, ROOT, assert_the_same_weights, curve, environment_of, results_of, weights_of
from shared_rows import SHAPES, SHARED, flags_of_data, of

from memsave_recipes.core.plans import Action, Plan, Span

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 20
SHARED_BY_FOUR = ("--sequence_parallel", "4")
IN_GROUPS = (*SHARED, "--shard", "2", "--activation_checkpointing", "full")
WORKS = {
    f"{model_type}, {rows}": (*of(model_type), *flags)
    for model_type in SHAPES
    for rows, flags in {"packed": (), "padded": ("--no_packing",)}.items()
}
OTHER_WORKS = {
    "clipped, averaged": (*of("gpt2"), "--ema_decay", "0.9", "--max_grad_norm", "0.1"),
    "adapters": (*of("gemma3_text"), "--lora"),
    "evaluated only": (*of("qwen3"), "--eval_only"),
}
DROPPING = of("gpt2", "attn_pdrop=0.1,embd_pdrop=0.1,resid_pdrop=0.1")
"""Draws others on other ranks, so it has no curve of one rank."""
FLOAT32 = "gemma3_text"
"""Which sums the gradients of its norms' weights over tokens in float32, where those train, in whatever precision."""
CUT_OTHERWISE = f"{FLOAT32}, packed, row by row"
DEEP = "mistral, packed"
BITWISE = ("full", "selective", "every:2", "segments:2", "nested:2", "offload", "full_offload", "plan.json")
TILED = ("full_tiled:8", "full_tiled_offload:8")
ONE = WORKS | OTHER_WORKS | {CUT_OTHERWISE: (*of(FLOAT32), "--micro_batch_size", "1")}
SHARES = {
    2: {
        **{f"{work}, on two": (work, SHARED) for work in WORKS},
        **{plan: (DEEP, (*SHARED, "--activation_checkpointing", plan)) for plan in (*BITWISE, *TILED)},
    },
    4: {
        **{f"{work}, on four": (work, SHARED_BY_FOUR) for work in WORKS},
        **{f"{work}, in groups": (work, IN_GROUPS) for work in WORKS},
        **{f"{work}, in pairs": (work, SHARED) for work in OTHER_WORKS},
        "in shards of four": ("llama, packed", (*SHARED, "--shard", "full", "--loss", "chunked")),
    },
}
"""By the number of ranks: a name, the work that one rank does, and the flags of those that share it."""
ALONE = {
    2: {
        "dropping": (*DROPPING, *SHARED),
        "dropping again": (*DROPPING, *SHARED),
        "dropping, recomputed": (*DROPPING, *SHARED, "--activation_checkpointing", "full"),
    },
    4: {},
}


def mixed_plan(folder):
    """What plans for a budget are made of: another action for each layer."""
    actions = (Action.RECOMPUTE, Action.SELECT_OPS, Action.OFFLOAD, Action.KEEP)
    blocks = tuple(f"model.layers.{number}" for number in range(len(actions)))
    spans = tuple(Span(start=number, stop=number + 1, action=action) for number, action in enumerate(actions))
    path = folder / "plan.json"
    path.write_text(Plan(strategy="budget", blocks=blocks, spans=spans).to_json())
    return str(path)


def launched(num_ranks, runs, folder, launcher=(), environment=None):
    """Train all ``runs`` on so many ranks; returns the folder that holds theirs, by name."""
    listed = folder / "runs.json"
    lives = [{"recipe": "language_modeling", "folder": str(folder / name), "lives": [runs[name]]} for name in runs]
    listed.write_text(json.dumps(lives))
    command = [sys.executable]
    if num_ranks > 1:
        command = [Path(sys.executable).with_name("accelerate"), "launch", *launcher, "--num_processes", num_ranks]
    done = subprocess.run(
        [str(word) for word in [*command, ROOT / "tests" / "recipes" / "many_runs.py", listed]],
        env=environment or environment_of(ACCELERATE_USE_CPU="true"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder of each launch on CPUs, by its number of ranks; each is done once."""
    data = tmp_path_factory.mktemp("data")
    common = [*flags_of_data(data), "--max_steps", str(NUM_STEPS), "--eval_steps", "10"]
    plan, folders = mixed_plan(data), {}
    launcher = ("--config_file", ROOT / "accelerate_configs" / "cpu_ddp.yaml")

    def of_launch(num_ranks):
        if num_ranks not in folders:
            runs = ONE
            if num_ranks > 1:
                shares = {name: (*ONE[work], *flags) for name, (work, flags) in SHARES[num_ranks].items()}
                runs = shares | ALONE[num_ranks]
            runs = {name: [*common, *(plan if word == "plan.json" else word for word in runs[name])] for name in runs}
            folders[num_ranks] = launched(num_ranks, runs, tmp_path_factory.mktemp("launch"), launcher)
        return folders[num_ranks]

    return of_launch


def largest_differences(folder, expected):
    """Of losses, the last evaluation's too, and of weights, relative to the largest of a tensor."""
    ours, theirs = ([*curve(one), results_of(one)["eval"]["loss"]] for one in (folder, expected))
    losses = [abs(our / their - 1) for our, their in zip(ours, theirs, strict=True)]
    ours, theirs = (weights_of(one / "final") for one in (folder, expected))
    assert ours.keys() == theirs.keys()
    weights = [float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs]
    return max(losses), max(weights, default=0.0)


def rounding(ranks, work):
    """The most by which losses and weights may differ; of one that sums in float32, as by other micro-batches."""
    if not work.startswith(FLOAT32):
        return 1e-12, 1e-12
    return [10 * one for one in largest_differences(ranks(1) / CUT_OTHERWISE, ranks(1) / f"{FLOAT32}, packed")]


@pytest.mark.parametrize(("num_ranks", "name"), [(number, name) for number in SHARES for name in SHARES[number]])
def test_twenty_steps_have_the_curve_and_the_weights_of_one_rank(ranks, record_property, num_ranks, name):
    work, _ = SHARES[num_ranks][name]
    folder, expected = ranks(num_ranks) / name, ranks(1) / work
    for seen in ("tokens_seen", "samples_seen"):
        assert results_of(folder)[seen] == results_of(expected)[seen]
    trained = 0 if "--eval_only" in ONE[work] else NUM_STEPS
    assert len(curve(folder)) == trained
    assert bool(weights_of(folder / "final")) == bool(trained)
    losses, weights = largest_differences(folder, expected)
    record_property("largest differences of losses and weights", (losses, weights))
    of_losses, of_weights = rounding(ranks, work)
    assert losses < of_losses
    assert weights < of_weights


def assert_the_same_bits(folder, expected):
    assert curve(folder) == curve(expected)
    assert results_of(folder)["eval"] == results_of(expected)["eval"]
    assert_the_same_weights(folder / "final", expected / "final")


@pytest.mark.parametrize("plan", BITWISE)
def test_twenty_steps_under_a_plan_have_the_bits_of_those_without(ranks, plan):
    assert_the_same_bits(ranks(2) / plan, ranks(2) / f"{DEEP}, on two")


def test_dropout_is_drawn_again_in_the_same_way(ranks):
    """By another start, and by a plan that computes twice."""
    dropping, again, recomputed, without = (
        ranks(2) / name for name in ("dropping", "dropping again", "dropping, recomputed", "gpt2, packed, on two")
    )
    assert_the_same_bits(again, dropping)
    assert_the_same_bits(recomputed, dropping)
    assert curve(dropping) != curve(without)


ON_DEVICES = [*of("mistral"), "--block_size", "47", "--global_batch_size", "5", "--micro_batch_size", "2"]
ON_DEVICES += ["--max_steps", "6", "--logging_steps", "100", "--eval_steps", "100", *OF_TEXT]
ON_TWO_DEVICES = ("none", "full", "selective", "every:2", "segments:2", "nested:2", "offload", "full_offload")
ON_FOUR_DEVICES = ("none", "selective", "full_offload")


@pytest.fixture(scope="module")
def devices(on_devices, tmp_path_factory):
    """The folder of each launch on stand-ins for CUDA devices, where late copies and freed memory read as NaN."""
    folders = {}
    launcher = ("--config_file", ROOT / "accelerate_configs" / "multi_gpu.yaml")

    def of_launch(num_devices):
        if num_devices not in folders:
            plans = ON_FOUR_DEVICES if num_devices == 4 else ON_TWO_DEVICES
            shares = SHARED if num_devices > 1 else ()
            runs = {plan: [*ON_DEVICES, *shares, "--activation_checkpointing", plan] for plan in plans}
            folder = tmp_path_factory.mktemp("devices")
            environment = on_devices(num_devices, POISON=1, WAITS=folder / "all")
            folders[num_devices] = launched(num_devices, runs, folder, launcher, environment)
        return folders[num_devices]

    return of_launch


@pytest.mark.parametrize(
    ("num_devices", "plan"), [*((2, plan) for plan in ON_TWO_DEVICES), *((4, plan) for plan in ON_FOUR_DEVICES)]
)
def test_on_devices_a_plan_has_the_bits_of_none_and_the_waits_of_one_device(devices, num_devices, plan):
    folder, plain, on_one = devices(num_devices) / plan, devices(num_devices) / "none", devices(1) / plan
    final = Path("final", "model.safetensors")
    assert sha256((folder / final).read_bytes()).digest() == sha256((plain / final).read_bytes()).digest()
    assert results_of(folder)["eval"] == results_of(plain)["eval"]
    waits = json.loads((on_one / "waits-0.json").read_text())
    assert [json.loads((folder / f"waits-{rank}.json").read_text()) for rank in range(num_devices)] == (
        [waits] * num_devices
    )
