"""``memsave plan`` and ``memsave frontier``: without data, weights or a GPU; and the line that they print runs."""

import json
import shlex
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest
import torch
from samples import sample
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import enable_progress_bar

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.budget import usable_bytes
from memsave_recipes.core.plans import read_plan
from memsave_recipes.core.plans.chain import CUDA
from memsave_recipes.tools.cli import main

ROOT = Path(__file__).parents[3]
IMAGES = str(ROOT / "recipes" / "image_classification.py")
SMALL = [IMAGES, "--model", "vgg_small", "--global_batch_size", "8"]
LANGUAGE = [
    str(ROOT / "recipes" / "language_modeling.py"),
    *("--model_type", "gpt2", "--config_overrides", "n_layer=2,n_embd=32,n_head=2,vocab_size=512"),
    *("--block_size", "64", "--global_batch_size", "4"),
]


def planned(words: list[str], tmp_path: Path) -> dict:
    file = tmp_path / "plan.json"
    assert main([*words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def flags_of(line: str) -> list[str]:
    return shlex.split(line)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_what_the_flags_leave_open_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(["plan", *SMALL, "--target", "a100", "--memory_budget_gib", "1"], tmp_path)
    assert found["version"] == 1
    assert found["budget_bytes"] == 2**30
    assert {one["micro_batch_size"] for one in found["candidates"]} == {1, 2, 4, 8}
    assert {"none", "full", "selective", "offload", "full_offload"} <= {one["strategy"] for one in found["candidates"]}
    for one in found["candidates"]:
        assert all(isinstance(one[key], int) for key in ("peak_bytes", "needed_bytes"))
        assert sum(one["parts"].values()) == one["needed_bytes"]
        assert one["global_batch_size"] == 8
    chosen = found["candidates"][found["chosen"]]
    out = capsys.readouterr().out
    assert out.count("predicted peak") == 1
    assert out.rstrip().endswith(found["launch"])
    words = flags_of(found["launch"])
    assert words[:4] == ["accelerate", "launch", "--config_file", "accelerate_configs/single_gpu.yaml"]
    assert value(words, "--micro_batch_size") == str(chosen["micro_batch_size"])
    assert value(words, "--activation_checkpointing") == chosen["strategy"] == "none"
    assert "--memory_budget_gib" not in words


def test_what_a_bitwise_topology_holds_and_sends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 24 micro-batches on 3 ranks one has three subtrees."""
    flags = ["--bitwise_topology", "--micro_batch_size", "1", "--global_batch_size", "24"]
    devices = ["--target", "a100", "--num_processes", "3", "--activation_checkpointing", "none"]
    page = tmp_path / "plan.html"
    assert main(["plan", *LANGUAGE, *flags, *devices, "--memory_budget_gib", "1", "--html", str(page)]) == 0
    line = "at most 4 x 292 KiB of gradients at once besides DDP's, 2 x the bytes of an all-reduce between the ranks"
    assert f"bitwise topology: {line}\n" in capsys.readouterr().out
    assert "2 x the bytes of an all-reduce between the ranks" in page.read_text()


def test_what_the_flags_say_is_kept(tmp_path: Path) -> None:
    words = ["plan", *SMALL, "--micro_batch_size=2", "--activation_checkpointing", "full", "--memory_budget_gib", "2"]
    found = planned([*words, "--target", "cpu", "--num_processes", "2", "--mixed_precision", "bf16"], tmp_path)
    (only,) = found["candidates"]
    assert (only["micro_batch_size"], only["accumulation_steps"], only["strategy"]) == (2, 2, "full")
    assert only["parts"]["communication"] > 0
    launched = flags_of(found["launch"])
    assert launched[2:8] == [
        *("--config_file", "accelerate_configs/cpu_ddp.yaml"),
        *("--num_processes", "2", "--mixed_precision", "bf16"),
    ]
    assert launched[8:-2] == ["recipes/image_classification.py", *words[2:-2]]


def test_a_preset_counts_as_named(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("micro_batch_size: 4\noutput_dir: out/preset\n")
    found = planned(["plan", *SMALL, "--config", str(preset), "--target", "a100"], tmp_path)
    assert {one["micro_batch_size"] for one in found["candidates"]} == {4}
    assert "--micro_batch_size" not in found["launch"]
    assert "--output_dir" not in found["launch"]
    assert found["budget_bytes"] == pytest.approx(usable_bytes(find_target("a100").memory_bytes, CUDA), abs=1)


@pytest.mark.parametrize(
    ("target", "dtype", "precision"), [("t4", "float16", "fp16"), ("l4", "bfloat16", "no"), ("cpu", "bfloat16", "no")]
)
def test_auto_is_the_dtype_of_16_bits_that_the_target_computes_in(
    tmp_path: Path, target: str, dtype: str, precision: str
) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("dtype: auto\nlora: true\ncompile: auto\nactivation_checkpointing: none\nmicro_batch_size: 2\n")
    found = planned(["plan", *LANGUAGE, "--config", str(preset), "--target", target], tmp_path)
    assert (found["mixed_precision"], value(flags_of(found["launch"]), "--dtype")) == (precision, dtype)
    assert "--compile" not in flags_of(found["launch"])  # the preset has it
    assert ("--mixed_precision fp16" in found["launch"]) == (precision == "fp16")


@pytest.mark.compiles_ahead
@pytest.mark.parametrize(("flags", "compiles"), [([], True), (["--compile", "none"], False)])
def test_layers_compile_where_the_run_compiles_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], compiles: bool
) -> None:
    small = [*LANGUAGE, "--micro_batch_size", "2", "--activation_checkpointing", "full", *flags]
    assert main(["plan", *small, "--target", "a100", "--plan", str(tmp_path / "plan.json")]) == 0
    assert read_plan(tmp_path / "plan.json").compiled is compiles
    assert ("layers that repeat compute compiled" in capsys.readouterr().out) is compiles


def test_a_budget_of_a_preset_cannot_be_taken_back_so_its_plan_stays_open(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("memory_budget_gib: 3\nmicro_batch_size: 8\n")
    found = planned(["plan", *SMALL, "--config", str(preset), "--target", "a100"], tmp_path)
    assert found["budget_bytes"] == 3 * 2**30
    assert value(flags_of(found["launch"]), "--activation_checkpointing") == "budget"


def test_a_plan_of_the_solver_is_launched_with_its_budget(tmp_path: Path) -> None:
    words = ["plan", *SMALL, "--micro_batch_size", "8", "--target", "cpu"]
    by_strategy = {
        one["strategy"]: one["needed_bytes"]
        for one in planned([*words, "--memory_budget_gib", "1"], tmp_path)["candidates"]
    }
    gib = (by_strategy["none"] - 1) / 2**30
    found = planned([*words, "--memory_budget_gib", repr(gib)], tmp_path)
    launched = flags_of(found["launch"])
    chosen = found["candidates"][found["chosen"]]
    assert chosen["strategy"] in ("budget", "full", "selective")
    assert value(launched, "--activation_checkpointing") == chosen["strategy"]
    if chosen["strategy"] == "budget":
        assert float(value(launched, "--memory_budget_gib")) == pytest.approx(gib)
    assert launched.count("--micro_batch_size") == 1


def test_a_plan_in_a_file_is_launched_as_it_is(tmp_path: Path) -> None:
    words = ["plan", *SMALL, "--micro_batch_size", "8", "--target", "cpu", "--memory_budget_gib", "0.0085"]
    file = tmp_path / "chosen.json"
    found = planned([*words, "--plan", str(file)], tmp_path)
    chosen = found["candidates"][found["chosen"]]
    assert chosen["strategy"] == "budget"
    assert json.loads(file.read_text()) == chosen["plan"]
    launched = flags_of(found["launch"])
    assert value(launched, "--activation_checkpointing") == str(file)
    assert "--memory_budget_gib" not in launched


def test_the_line_runs_and_commands_no_terminal_whatever_a_flag_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = "o \x1b[31m\u202e'\\\nü"
    words = ["plan", *SMALL, "--micro_batch_size", "8", "--target", "a100", "--activation_checkpointing", "full"]
    found = planned([*words, "--output_dir", folder], tmp_path)
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))
    shown = ["bash", "-c", f"printf '%s\\0' {found['launch']}"]
    launched = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.split("\0")
    assert value(launched, "--output_dir") == folder


def test_the_loss_is_decided_where_there_is_a_choice(tmp_path: Path) -> None:
    found = planned(["plan", *LANGUAGE, "--target", "h100", "--micro_batch_size", "4"], tmp_path)
    assert {one["loss"] for one in found["candidates"]} == {"full", "chunked:8192", "chunked:1024"}
    assert value(flags_of(found["launch"]), "--loss") == found["candidates"][found["chosen"]]["loss"]


SHARDS = ["plan", *LANGUAGE, "--target", "a100", "--num_processes", "4", "--loss", "full"]
NAMED = ["--micro_batch_size", "1", "--activation_checkpointing", "full"]


def weights_bytes(num_ranks: int) -> int:
    """Of the first of so many ranks, of each weight the rows of its shard in whole blocks of 512 bytes."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_layer=2, n_embd=32, n_head=2))
    shards = [ceil(len(weight) / num_ranks) * weight[0].nbytes for weight in model.parameters()]
    return 512 * sum(ceil(shard / 512) for shard in shards)


def test_a_rank_in_shards_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = planned([*SHARDS, *NAMED], tmp_path)["candidates"]
    capsys.readouterr()
    found = planned([*SHARDS, *NAMED, "--shard", "full", "--interconnect", "0.01"], tmp_path)
    out = capsys.readouterr().out
    (rank,) = found["candidates"]
    assert (found["shard"], found["interconnect_bytes_per_s"]) == ("full", 1e7)
    assert sum(rank["parts"].values()) == rank["needed_bytes"] < whole["needed_bytes"]
    for part, copies in (("parameters", 1), ("optimizer state", 2)):
        less = whole["parts"][part] - rank["parts"][part]
        assert less == copies * (weights_bytes(1) - weights_bytes(4)) > whole["parts"][part] / 2
    whole_s, rank_s = (one["step_s"] - one["device_update_s"] for one in (whole, rank))
    assert rank_s == pytest.approx(whole_s + rank["exposed_communication_s"])
    assert 0 < rank["device_update_s"] < whole["device_update_s"]
    assert 0 < rank["exposed_communication_s"] <= rank["communication_s"]
    assert "weights, gradients and optimizer state in shards over 4 ranks" in out
    assert "traffic is assumed to pass at 0.01 GB/s (--interconnect)" in out
    assert "traffic of a step" in out
    assert flags_of(found["launch"])[2:6] == [
        *("--config_file", "accelerate_configs/multi_gpu.yaml", "--num_processes", "4")
    ]
    assert value(flags_of(found["launch"]), "--shard") == "full"


def test_groups_of_ranks_that_replicate_one_another_hold_more(tmp_path: Path) -> None:
    full, halves = (planned([*SHARDS, *NAMED, "--shard", flag], tmp_path)["candidates"][0] for flag in ("full", "2"))
    assert halves["parts"]["parameters"] - full["parts"]["parameters"] == weights_bytes(2) - weights_bytes(4)


@pytest.mark.parametrize("flags", [["--optimizer", "muon"], ["--optimizer", "adamw_8bit"]], ids=" ".join)
def test_an_optimizer_with_a_smaller_state_needs_less_in_shards(tmp_path: Path, flags: list[str]) -> None:
    words = [*SHARDS, *NAMED, "--shard", "full"]
    adamw, other = (planned([*words, *more], tmp_path)["candidates"][0]["parts"] for more in ([], flags))
    assert 0 < other["optimizer state"] < 0.95 * adamw["optimizer state"]
    assert other["parameters"] == adamw["parameters"]


def test_a_budget_in_shards_names_the_simplest_plan_that_fits(tmp_path: Path) -> None:
    words = [*SHARDS, "--shard", "full", "--micro_batch_size", "1"]
    found = planned([*words, "--memory_budget_gib", "1"], tmp_path)
    needed = {one["strategy"]: one["needed_bytes"] for one in found["candidates"]}
    assert {"none", "full", "selective", "offload", "full_offload"} <= needed.keys()
    assert value(flags_of(found["launch"]), "--activation_checkpointing") == "none"
    assert "--memory_budget_gib" not in found["launch"]
    gib = (needed["none"] - 1) / 2**30
    found = planned([*words, "--memory_budget_gib", repr(gib)], tmp_path)
    chosen = found["candidates"][found["chosen"]]
    assert chosen["strategy"] != "none"
    assert chosen["needed_bytes"] <= found["budget_bytes"]


ACCUMULATING = [*SHARDS, "--shard", "full", "--micro_batch_size", "1", "--global_batch_size", "16"]


def test_gradients_are_reduced_once_a_step_where_that_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ACCUMULATING, "--interconnect", "0.1"]
    found = planned(words, tmp_path)
    out = capsys.readouterr().out
    each, once = (
        next(one for one in found["candidates"] if one["strategy"] == "none" and one["reduces_once"] == is_once)
        for is_once in (False, True)
    )
    assert once["accumulation_steps"] == 4
    assert once["step_s"] < each["step_s"]
    assert once["communication_s"] < each["communication_s"]
    assert once["needed_bytes"] > each["needed_bytes"]
    assert sum(once["parts"].values()) == once["needed_bytes"]
    assert once["parts"]["gradients"] > 2 * each["parts"]["gradients"]
    assert found["candidates"][found["chosen"]] == once
    launched = flags_of(found["launch"])  # a run without a budget reduces for every micro-batch
    assert value(launched, "--activation_checkpointing") == "budget"
    assert float(value(launched, "--memory_budget_gib")) == pytest.approx(found["budget_bytes"] / 2**30)
    assert "gradients are reduced once a step, and whole on each rank until then" in out
    assert {"each", "once"} <= {word for line in out.splitlines() for word in line.split()}
    between = repr((each["needed_bytes"] + once["needed_bytes"]) / 2 / 2**30)
    found = planned([*words, "--memory_budget_gib", between], tmp_path)
    chosen = found["candidates"][found["chosen"]]
    assert (chosen["strategy"], chosen["reduces_once"]) != ("none", True)
    assert chosen["fits"]


def test_a_plan_that_is_named_stays_with_a_search_where_gradients_are_reduced_once(tmp_path: Path) -> None:
    words = [*SHARDS, "--shard", "full", "--global_batch_size", "16", "--activation_checkpointing", "none"]
    found = planned([*words, "--interconnect", "0.1"], tmp_path)
    chosen = found["candidates"][found["chosen"]]
    launched = flags_of(found["launch"])
    assert value(launched, "--activation_checkpointing") == "none"
    assert (value(launched, "--micro_batch_size") == "auto") == chosen["reduces_once"]
    assert ("--memory_budget_gib" in launched) == chosen["reduces_once"]


def test_a_run_under_a_plan_in_a_file_reduces_gradients_for_every_micro_batch(tmp_path: Path) -> None:
    found = planned([*ACCUMULATING, "--interconnect", "0.1", "--plan", str(tmp_path / "plan.json")], tmp_path)
    assert not any(one["reduces_once"] for one in found["candidates"])


def test_where_nothing_accumulates_nothing_is_said_of_reductions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned([*SHARDS, "--shard", "full", "--interconnect", "0.1"], tmp_path)
    assert not any(one["reduces_once"] for one in found["candidates"])
    assert "once" not in capsys.readouterr().out.split()
    assert "--memory_budget_gib" not in found["launch"]


LONG_ROWS = ["--config_overrides", "n_layer=6,n_embd=128,n_head=2,n_positions=4096", "--block_size", "4096"]


@pytest.mark.parametrize(
    "strategy",
    sample(["full_tiled_offload:512"], ["offload", "full_offload", "full_tiled:512", "full_tiled_offload:512"]),
)
def test_plans_that_offload_and_tiles_are_predicted_in_shards(tmp_path: Path, strategy: str) -> None:
    words = [*SHARDS, *LONG_ROWS, "--micro_batch_size", "1", "--activation_checkpointing", strategy]
    whole, rank = (planned([*words, "--shard", flag], tmp_path)["candidates"][0] for flag in ("none", "full"))
    assert (rank["strategy"], rank["host_bytes"]) == (strategy, whole["host_bytes"])
    assert (rank["host_bytes"] > 0) == ("offload" in strategy)
    assert rank["needed_bytes"] < whole["needed_bytes"]


@pytest.mark.slow
def test_below_all_recomputation_a_rank_in_shards_offloads(tmp_path: Path) -> None:
    words = [*SHARDS, *LONG_ROWS, "--shard", "full", "--micro_batch_size", "1"]
    plain = {one["strategy"]: one["needed_bytes"] for one in planned(words, tmp_path)["candidates"]}
    assert plain["full_offload"] < plain["full"]
    gib = (plain["full_offload"] + plain["full"]) / 2 / 2**30
    found = planned([*words, "--memory_budget_gib", repr(gib)], tmp_path)
    chosen = found["candidates"][found["chosen"]]
    assert chosen["needed_bytes"] <= found["budget_bytes"]
    assert chosen["host_bytes"] > 0
    assert chosen["strategy"] in (value(flags_of(found["launch"]), "--activation_checkpointing"), "budget")


@pytest.mark.slow
def test_a_plan_of_the_solver_in_shards_is_launched_with_its_budget_or_from_a_file(tmp_path: Path) -> None:
    words = [*SHARDS, "--shard", "full", "--micro_batch_size", "1"]
    words += ["--config_overrides", "n_layer=6,n_embd=64,n_head=2", "--block_size", "1024"]
    plain = {one["strategy"]: one for one in planned(words, tmp_path)["candidates"]}
    file = tmp_path / "plan-of-layers.json"
    sizes = [plain[strategy]["needed_bytes"] for strategy in ("full", "selective", "none")]
    for budget in ((sizes[0] + sizes[1]) // 2, (sizes[1] + sizes[2]) // 2):
        found = planned([*words, "--memory_budget_gib", repr(budget / 2**30)], tmp_path)
        chosen, launched = found["candidates"][found["chosen"]], flags_of(found["launch"])
        assert chosen["needed_bytes"] <= found["budget_bytes"]
        assert chosen["step_s"] < plain["full"]["step_s"]
        assert value(launched, "--activation_checkpointing") == chosen["strategy"]
        assert ("--memory_budget_gib" in launched) is (chosen["strategy"] == "budget")
        (solved,) = (one for one in found["candidates"] if one["strategy"] == "budget")
        assert solved["needed_bytes"] <= found["budget_bytes"]
    found = planned([*words, "--memory_budget_gib", repr(budget / 2**30), "--plan", str(file)], tmp_path)
    assert value(flags_of(found["launch"]), "--activation_checkpointing") == str(file)


def test_json_to_the_terminal_is_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--micro_batch_size", "8", "--target", "a100", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


def test_a_page_asks_nothing_of_any_server(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *SMALL, "--micro_batch_size", "8", "--target", "a100", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<span>accelerate</span> <span>launch</span>" in text
    assert text.index('<tr class="chosen">') < text.index("<tr>", text.index("<tbody>"))
    assert "throughput, samples/s" in text
    assert "<em>chosen</em>" in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            [*SMALL, "--target", "a100", "--micro_batch_size", "8", "--memory_budget_gib", "0.2"],
            "0.2 is too small for any plan",
            marks=pytest.mark.slow,
        ),
        ([*SMALL, "--target", "abacus"], "--target abacus: no figures of such a device"),
        ([*SMALL, "--target_memory", "much"], "much: write a size such as 12GiB"),
        ([*SMALL, "--target_memory", "0GiB"], "--target_memory 0.0: must be above 0"),
        ([*SMALL, "--target", "a100", "--num_processes", "0"], "--num_processes 0: must be"),
        ([*SMALL, "--target", "a100", "--memory_budget_gib", "-1"], "--memory_budget_gib -1.0: must be"),
        ([*SMALL, "--target", "cpu", "--mixed_precision", "fp16"], "fp16 does not work on the CPU"),
        ([*SMALL, "--target", "a100", "--microbatch_size", "4"], "did you mean --micro_batch_size?"),
        ([*SMALL, "--target", "a100", "--micro_batch_size", "none"], "--micro_batch_size none: must be"),
        ([str(ROOT / "recipes" / "nothing.py"), "--target", "a100"], "is not a file"),
        ([str(ROOT / "recipes" / "ddp_equals_accumulation.py"), "--target", "a100"], "has no function task(args)"),
        ([*LANGUAGE, *NAMED, "--target", "a100", "--json", "nowhere/plan.json"], "nowhere/plan.json cannot be written"),
        ([*SHARDS[1:], "--shard", "3"], "--shard 3: 4 ranks cannot be divided into groups of 3"),
        ([*SHARDS[1:], "--shard", "full", "--num_processes", "1"], "--shard full: there is one rank"),
        ([*SHARDS[1:], "--shard", "full", "--mixed_precision", "fp16"], "--shard full: the scaler of fp16"),
        ([*SHARDS[1:], "--shard", "full", "--optimizer", "adafactor"], "--shard full: --optimizer adafactor has means"),
        ([*SHARDS[1:], "--shard", "full", "--memory_budget_gib", "0.01"], "is too small for any plan"),
        (
            [*SMALL, "--target", "a100", "--offload_optimizer", "state", "--host_memory", "1MiB"],
            "--offload_optimizer: a rank would move 64 MiB to its host, which has 1 MiB available for it",
        ),
        ([*SMALL, "--target", "cpu", "--host_memory", "8GiB"], "--host_memory 8GiB: nothing is offloaded from a CPU"),
        (
            [*SHARDS[1:], "--num_processes", "1", "--interconnect", "100"],
            "--interconnect 100: only shards are gathered",
        ),
        ([*SHARDS[1:], "--shard", "full", "--interconnect", "0"], "--interconnect 0.0: must be GB/s from above 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert expected in err[-1]
    assert sum(line.startswith("error: ") for line in err) == 1


def test_other_commands_take_no_flags_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--model", "vgg_small"]) == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.slow
def test_a_frontier_in_shards_has_what_a_rank_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["frontier", *LANGUAGE, "--config_overrides", "n_layer=6,n_embd=64,n_head=2", "--block_size", "1024"]
    words += ["--target", "a100", "--num_processes", "2", "--loss", "full", "--micro_batch_size", "1"]
    whole = {one["strategy"]: one["needed_bytes"] for one in planned(words, tmp_path)["candidates"]}
    found = planned([*words, "--shard", "full"], tmp_path)["candidates"]
    assert any(one["reduces_once"] for one in found)
    found = [one for one in found if not one["reduces_once"]]
    in_shards = {one["strategy"]: one["needed_bytes"] for one in found}
    assert {"none", "full", "selective", "every:2", "segments:4"} <= in_shards.keys()
    assert all(in_shards[name] < whole[name] for name in in_shards.keys() & whole.keys() - {"budget"})
    solved = [one["needed_bytes"] for one in found if one["strategy"] == "budget"]
    assert all(min(in_shards.values()) <= needed < in_shards["none"] for needed in solved)
    assert solved
    assert "weights, gradients and optimizer state in shards over 2 ranks" in capsys.readouterr().out


def test_a_frontier_has_every_strategy_at_every_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(["frontier", *SMALL, "--target", "a100"], tmp_path)
    points = found["candidates"]
    assert {one["micro_batch_size"] for one in points} == {1, 2, 4, 8}
    assert {"none", "full", "every:2", "segments:4"} <= {one["strategy"] for one in points}
    optimal = [one for one in points if one["is_pareto_optimal"]]
    assert f"{len(optimal)} Pareto-optimal of {len(points)} points" in capsys.readouterr().out
    fastest = max(points, key=lambda one: one["samples_per_s"])
    assert max(optimal, key=lambda one: one["needed_bytes"])["samples_per_s"] == fastest["samples_per_s"]


def test_a_frontier_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, page, data = (tmp_path / name for name in ("f.png", "f.html", "f.json"))
    words = [*SMALL, "--micro_batch_size", "8", "--target", "cpu"]
    files = ["--png", str(picture), "--html", str(page), "--json", str(data)]
    assert main(["frontier", *words, *files]) == 0
    assert "Pareto" not in capsys.readouterr().out  # the picture takes the place of the table
    assert picture.read_bytes().startswith(b"\x89PNG")
    page_text = page.read_text()
    assert all(one["strategy"] in page_text for one in json.loads(data.read_text())["candidates"])


def test_the_line_names_the_recipes_of_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "--copy", str(tmp_path)]) == 0
    monkeypatch.chdir(tmp_path)
    words = ["plan", "language_modeling", *LANGUAGE[1:], "--target", "a100", "--micro_batch_size", "4"]
    words += ["--activation_checkpointing", "full", "--loss", "full"]
    launched = flags_of(planned(words, tmp_path)["launch"])
    assert launched[3:5] == ["accelerate_configs/single_gpu.yaml", "recipes/language_modeling.py"]
    assert value(launched, "--train_file") == "FILE"
    assert "FILE stands for your texts" in capsys.readouterr().out
    with open("recipes/language_modeling.py", "a") as copy:
        copy.write("raise SystemExit")  # code of a folder runs where its path is typed
    named = planned([*words, "--dataset", "python-stdlib"], tmp_path)
    assert "from which recipes/language_modeling.py differs" in capsys.readouterr().out
    assert "--train_file" not in named["launch"]


@pytest.mark.slow
def test_sizes_that_leave_a_micro_batch_of_one_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 9 images 2 x 5 and 8 + 1 leave one, and BatchNorm trains no pixel alone."""
    dense = [IMAGES, "--model", "densenet_small", "--image_size", "16", "--global_batch_size", "9", "--target", "a100"]
    found = planned(["plan", *dense, "--activation_checkpointing", "none"], tmp_path)
    assert {one["micro_batch_size"] for one in found["candidates"]} == {3, 5, 9}
    assert main(["plan", *dense, "--micro_batch_size", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "in a last micro-batch of one" in line


@pytest.mark.slow
def test_the_line_runs_when_it_is_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "a run"  # which a shell has to see quoted
    words = ["recipes/image_classification.py", "--model", "vgg_small", "--global_batch_size", "4", "--max_steps", "2"]
    words += ["--report_to", "none", "--output_dir", str(folder), "--target", "cpu", "--memory_budget_gib", "1"]
    found = planned(["plan", *words], tmp_path)
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_folder}:{Path('/usr/bin')}:{Path('/bin')}")
    done = subprocess.run(["bash", "-c", found["launch"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())
    chosen = found["candidates"][found["chosen"]]
    assert results["micro_batch_size"] == chosen["micro_batch_size"]
    assert results["plan"] == chosen["strategy"]
    assert results["memory"]["peak_allocated_gib"] * 2**30 == pytest.approx(chosen["peak_bytes"], rel=0.05)


def test_the_recipe_of_the_documentation_is_planned(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    recipe = tmp_path / "mine.py"
    recipe.write_text(page.split("```python\n")[1].split("```")[0])
    found = planned(["frontier", str(recipe), "--micro_batch_size", "64", "--target", "cpu"], tmp_path)
    assert {"none", "full"} <= {one["strategy"] for one in found["candidates"]}
    found = planned(["plan", str(recipe), "--target", "l4"], tmp_path)
    assert f" {recipe} " in found["launch"]
    assert "accelerate_configs/single_gpu.yaml" in found["launch"]


LLAMA = [
    LANGUAGE[0],
    *("--model_type", "llama", "--loss", "chunked", "--block_size", "1024"),
    *(
        "--config_overrides",
        "num_hidden_layers=3,hidden_size=64,intermediate_size=128,num_attention_heads=4,vocab_size=512",
    ),
    *("--target_memory", "0.6GiB", "--activation_checkpointing", "full"),
]


def test_a_sequence_is_no_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    found = planned(["plan", *LLAMA, "--global_batch_size", "2", "--largest", "block_size"], tmp_path)
    assert found["largest"]["value"] == 2048


TWO_RANKS = ["plan", *LLAMA, "--global_batch_size", "4", "--num_processes", "2", "--block_size", "2048"]
SHARED = ["--sequence_parallel", "2"]


def test_what_ranks_that_share_a_row_exchange_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TWO_RANKS, *SHARED, "--micro_batch_size", "1", "--interconnect"]
    (slow,), (fast,) = (planned([*flags, rate], tmp_path)["candidates"] for rate in ("1", "2"))
    assert "2 ranks share each row (--sequence_parallel): what they exchange is assumed to pass at 2 GB/s" in (
        capsys.readouterr().out
    )
    sent_bytes = 1024 * 64 * 4 / 2  # of the queries of a slice
    exchanges = 4 * 3 * 4 * 3  # of queries, keys, values, outputs: forward, recomputation, backward; rows; layers
    assert slow["step_s"] - fast["step_s"] == pytest.approx(exchanges * sent_bytes * (1 / 1e9 - 1 / 2e9), rel=1e-6)


@pytest.mark.slow
def test_ranks_share_rows_where_nothing_fits_otherwise(tmp_path: Path) -> None:
    alone, shared = (planned([*TWO_RANKS, *more], tmp_path) for more in (["--sequence_parallel", "1"], SHARED))
    (more,), (less,) = ([one["needed_bytes"] for one in found["candidates"][:1]] for found in (alone, shared))
    budget = ["--memory_budget_gib", repr((more + less) / 2 / 2**30)]
    found = planned([*TWO_RANKS, *budget], tmp_path)
    assert (alone["sequence_parallel"], found["sequence_parallel"]) == (1, 2)
    assert value(flags_of(found["launch"]), "--sequence_parallel") == "2"
    assert main([*TWO_RANKS, *budget, "--sequence_parallel", "1"]) == 2


@pytest.mark.slow
def test_the_longest_row_is_shared_by_all_ranks_that_the_heads_allow(tmp_path: Path) -> None:
    flags = [*TWO_RANKS, "--largest", "block_size", "--memory_budget_gib", "0.52"]
    flags[flags.index("--num_processes") + 1] = "8"  # of 4 heads
    flags[flags.index("--config_overrides") + 1] += ",max_position_embeddings=1000000"
    longest = planned(flags, tmp_path)
    assert value(flags_of(longest["launch"]), "--sequence_parallel") == "4"
    by_two = planned([*flags, *SHARED], tmp_path)
    assert longest["largest"]["value"] > 1.8 * by_two["largest"]["value"]


@pytest.mark.slow
def test_the_longest_sequence_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*LLAMA, "--global_batch_size", "2"]
    flags[flags.index("--config_overrides") + 1] += ",max_position_embeddings=1000000"
    found = planned(["plan", *flags, "--largest", "block_size"], tmp_path)
    tokens = found["largest"]["value"]
    assert tokens > 1024
    assert found["largest"] == {"flag": "block_size", "value": tokens}
    assert tokens % 64 == 0
    assert value(flags_of(found["launch"]), "--block_size") == str(tokens)
    assert f"the largest --block_size that fits: {tokens:,}" in capsys.readouterr().out
    assert main(["plan", *flags, "--block_size", str(tokens + 64), "--micro_batch_size", "1"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro_batch_size", "global_batch_size"])
def test_the_largest_batch_that_fits(name: str, tmp_path: Path) -> None:
    flags = [*LLAMA, "--global_batch_size", "64"]
    found = planned(["plan", *flags, "--largest", name], tmp_path)
    size = found["largest"]["value"]
    words = flags_of(found["launch"])
    assert value(words, "--micro_batch_size") == str(size)
    assert value(words, "--global_batch_size") == (str(size) if name == "global_batch_size" else "64")
    assert main(["plan", *flags, "--global_batch_size", "64", "--micro_batch_size", str(size + 1)]) == 2


@pytest.mark.slow
def test_a_largest_value_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("block_size", *SMALL): "--largest block_size: image_classification has no such flag",
        ("global_batch_size", *SMALL, "--micro_batch_size", "1"): "--largest global_batch_size: with --micro",
        ("micro_batch_size", *LLAMA, "--target_memory", "510MiB"): "is too small for any plan",
    }
    for (name, *flags), message in cases.items():
        assert main(["plan", *flags, "--largest", name]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert message in lines[0]


def test_adapters_of_a_folder_are_planned_without_a_bar_for_its_weights(tmp_path, capfd):
    folder = str(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=300)).save_pretrained(folder)
    enable_progress_bar()
    capfd.readouterr()
    flags = ["--model_name_or_path", folder, "--lora", "--block_size", "16", "--global_batch_size", "2"]
    assert (
        main(
            [
                "plan",
                str(ROOT / "recipes" / "language_modeling.py"),
                *flags,
                "--target",
                "a100",
                "--memory_budget_gib",
                "20",
            ]
        )
        == 0
    )
    assert capfd.readouterr().err == ""
