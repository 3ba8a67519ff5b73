"""``memsave fit``: a model by one word, the ways to train it on a card, and lines that launch them."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import Launch
from memsave_recipes.tools.cli import main
from memsave_recipes.tools.fit import ladder
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.tools.fit.subject import IMAGES, LANGUAGE, TEXTS, find_subject

ROOT = Path(__file__).parents[3]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, **SIZES}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 512, **SIZES}


def folder_of(config: dict, path: Path) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder_of(LLAMA, tmp_path / "llama")


def fitted(words: list[str], file: Path) -> dict:
    assert main(["fit", *words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def flags_of(line: str) -> list[str]:
    """The recipe's flags of a launch line."""
    words = shlex.split(line)
    return words[next(at for at, word in enumerate(words) if word.endswith(".py")) + 1 :]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["fit", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


PAGE_KEYS = {"version", "model", "recipe", "flags", "target", "mixed_precision", "budget_bytes", "is_complete", "best"}
PAGE_KEYS |= {"rungs"}
RUNG_KEYS = {"name", "flags", "changes", "num_processes", "micro_batch_size", "accumulation_steps", "global_batch_size"}
RUNG_KEYS |= {"loss", "strategy", "peak_bytes", "peak_phase", "peak_block", "needed_bytes", "host_bytes", "parts"}
RUNG_KEYS |= {"fits", "step_s", "device_update_s", "awaited_s", "samples_per_s", "relative_time", "launch"}
RUNG_KEYS |= {"communication_s", "exposed_communication_s", "reduces_once"}

LENGTHS = ["--length", "128", "--global_batch_size", "4"]


def test_every_rung_that_fits_has_a_line_that_its_recipe_takes(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fitted([llama, *LENGTHS, "--memory", "1GiB"], tmp_path / "fit.json")
    assert (found["version"], found["recipe"], found["mixed_precision"]) == (1, LANGUAGE, "bf16")
    assert found["is_complete"]
    assert set(found) == PAGE_KEYS
    assert all(set(rung) == RUNG_KEYS for rung in found["rungs"])
    names = ["no checkpointing", "loss in chunks", "activation checkpointing", "optimizer in the backward"]
    names += ["8-bit AdamW", "LoRA"]
    assert [rung["name"] for rung in found["rungs"]][:6] == names
    for rung in found["rungs"]:
        assert sum(rung["parts"].values()) == rung["needed_bytes"]
        assert rung["fits"] == (rung["needed_bytes"] <= found["budget_bytes"])
        assert rung["relative_time"] == pytest.approx(rung["step_s"] / found["rungs"][0]["step_s"])
        flags = flags_of(rung["launch"])
        run = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", flags).run
        assert (run.micro_batch_size, run.activation_checkpointing) == (rung["micro_batch_size"], rung["strategy"])
        assert run.global_batch_size == 4
        assert set(rung["flags"]) <= set(flags)
    out = capsys.readouterr().out
    assert out.rstrip().endswith(found["rungs"][found["best"]]["launch"])
    columns = ("changes", "loss", "strategy", "micro_batch_size", "needed_bytes", "step_s")
    rows = [tuple(rung[key] for key in columns) for rung in found["rungs"]]
    for at, name in enumerate(names):  # of equal rows the first is printed
        assert (f" {name}  " in out) is (rows[at] not in rows[:at])
    assert f"{llama} has no weights" in out


def test_its_figures_are_those_of_memsave_plan(llama: str, tmp_path: Path) -> None:
    found = fitted([llama, *LENGTHS, "--memory", "0.75GiB", "--micro_batch_size", "2"], tmp_path / "fit.json")
    plain, chunked, *_ = found["rungs"]
    recipe = str(ROOT / "recipes" / f"{LANGUAGE}.py")
    for rung in (plain, chunked):
        words = ["plan", recipe, *flags_of(rung["launch"]), "--target_memory", "0.75GiB", "--mixed_precision", "bf16"]
        assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
        (candidate,) = json.loads((tmp_path / "plan.json").read_text())["candidates"]
        shared = ("peak_bytes", "needed_bytes", "parts", "step_s", "strategy", "micro_batch_size")
        assert {key: rung[key] for key in shared} == {key: candidate[key] for key in shared}


@pytest.mark.slow  # tests/benchmarks/test_fit_page.py has a figure of compiled layers in `make test`
@pytest.mark.compiles_ahead
def test_layers_that_compile_in_the_run_compile_in_its_figures(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "WAYS", ladder.WAYS[:1])  # the others would compile as long again
    memory = ["0.597GiB", "--micro_batch_size", "8"]
    found = fitted([llama, "--length", "512", "--global_batch_size", "8", "--memory", *memory], tmp_path / "fit.json")
    assert "layers that repeat compute compiled" in capsys.readouterr().out
    planned = next(rung for rung in found["rungs"] if rung["name"] == "activation checkpointing")
    assert planned["strategy"] == "budget"
    recipe = str(ROOT / "recipes" / f"{LANGUAGE}.py")
    words = ["plan", recipe, *flags_of(planned["launch"]), "--target_memory", "0.597GiB", "--mixed_precision", "bf16"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    candidates = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    solved = next(one for one in candidates if one["strategy"] == "budget")
    shared = ("peak_bytes", "needed_bytes", "parts")
    assert {key: planned[key] for key in shared} == {key: solved[key] for key in shared}
    assert planned["step_s"] == pytest.approx(solved["step_s"])


def test_more_cards_share_the_micro_batches(llama: str, tmp_path: Path) -> None:
    words = [llama, "--length", "2048", "--global_batch_size", "4", "--memory", "0.65GiB"]
    found = fitted(words, tmp_path / "fit.json")
    best = found["rungs"][found["best"]]
    wider = [rung for rung in found["rungs"] if rung["num_processes"] > 1]
    assert wider
    for rung in wider:
        assert rung["micro_batch_size"] == best["micro_batch_size"]
        assert rung["accumulation_steps"] * rung["num_processes"] == best["accumulation_steps"]
        assert rung["parts"]["communication"] > best["parts"]["communication"] == 0
        words = shlex.split(rung["launch"])
        assert words[words.index("--num_processes") + 1] == str(rung["num_processes"])


@pytest.mark.slow
def test_a_model_that_one_card_has_no_room_for_is_offered_in_shards(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    word = folder_of({**LLAMA, **sizes}, tmp_path / "wide")  # 25 million weights: 400 MB with gradients and state
    words = [word, "--length", "64", "--global_batch_size", "8", "--micro_batch_size", "1", "--memory", "0.72GiB"]
    found = fitted([*words, "--host_memory", "0.1GiB"], tmp_path / "fit.json")
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    in_shards = [rung for name, rung in rungs.items() if name.endswith("in shards")]
    assert not any(rung["fits"] for rung in found["rungs"] if rung["changes"] == "" and rung not in in_shards)
    assert [rung["fits"] for rung in in_shards][-1]
    assert not any(rung["fits"] for rung in in_shards[:-1])
    words = shlex.split(in_shards[-1]["launch"])
    assert words[words.index("--shard") + 1] == "full"
    assert words[words.index("--num_processes") + 1] == str(in_shards[-1]["num_processes"])
    run = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", flags_of(in_shards[-1]["launch"])).run
    assert run.in_shards


@pytest.mark.slow
def test_offloading_has_a_row_where_it_is_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    word = folder_of({**LLAMA, **sizes}, tmp_path / "deep")  # a slow card, so that copies hide behind products
    words = [word, "--card", "t4", "--mixed_precision", "no", "--optimizer", "sgd", "--global_batch_size", "4"]
    found = fitted([*words, "--micro_batch_size", "4"], tmp_path / "fit.json")
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    offloading, recomputing = rungs["offloading"], rungs["activation checkpointing"]
    assert found["rungs"][found["best"]] == offloading
    assert offloading["changes"] == ""
    assert offloading["step_s"] < 0.99 * recomputing["step_s"]
    assert offloading["host_bytes"] > 0 == recomputing["host_bytes"]
    run = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", flags_of(offloading["launch"])).run
    assert run.activation_checkpointing == offloading["strategy"]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" offloading "))
    assert row.endswith("GiB on the host")


@pytest.mark.parametrize(("flags", "least"), [((), 4 * 4), (ladder.STEP_ON_HOST, 4), (ladder.IN_BACKWARD, 3 * 4)])
def test_gradients_that_leave_need_no_room(flags: tuple[str, ...], least: int) -> None:
    """In bytes of each number: weight, gradient and moments, as far as they are on the card at the same time."""
    words = ["--model_type", "llama", "--block_size", "32", "--global_batch_size", "4"]
    words += ["--config_overrides", "hidden_size=512,intermediate_size=512,num_hidden_layers=1,vocab_size=512"]
    task = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", [*words, *flags])
    launch = Launch(target=find_target("a100"), num_processes=1, mixed_precision="bf16")
    setting = ladder.Setting(task=task, launch=launch, estimates=ladder.KnownEstimates(task, launch), budget_bytes=0)
    numbers = sum(parameter.numel() for parameter in setting.estimates.model.parameters())
    assert setting.least_bytes == pytest.approx(least * numbers, rel=0.01)  # and counters and buffers


@pytest.mark.parametrize(
    ("memory", "host", "name", "changes"),
    [
        ("0.72GiB", "1GiB", "step on host", ""),
        pytest.param("0.65GiB", "1GiB", "step, weights on host", "", marks=pytest.mark.slow),
        pytest.param("0.72GiB", "0.4GiB", "step on host, bfloat16", "rounded weights", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_the_host_fits_where_state_there_does_not_suffice(
    tmp_path: Path, memory: str, host: str, name: str, changes: str
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    word = folder_of({**LLAMA, **sizes}, tmp_path / "wide")
    words = [word, "--length", "64", "--global_batch_size", "8", "--micro_batch_size", "1"]
    found = fitted([*words, "--memory", memory, "--host_memory", host], tmp_path / "fit.json")
    best = found["rungs"][found["best"]]
    assert (best["name"], best["changes"]) == (name, changes)
    assert not any(rung["fits"] for rung in found["rungs"][: found["best"]])
    task = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", flags_of(best["launch"]))
    assert task.optim.offload_optimizer == "step"
    assert task.optim.streamed == ("all" if "weights" in name else "none")


@pytest.mark.slow
def test_optimizer_state_on_the_host_fits_where_it_does_not_on_the_card(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    word = folder_of({**LLAMA, **sizes}, tmp_path / "wide")
    words = [word, "--length", "64", "--global_batch_size", "8", "--micro_batch_size", "1", "--memory", "0.87GiB"]
    found = fitted(words, tmp_path / "fit.json")
    (rung,) = [rung for rung in found["rungs"] if rung["name"] == "optimizer state on host"]
    assert found["rungs"][found["best"]] == rung
    assert rung["host_bytes"] == 3 * 2**26  # 192 MB of two moments, in slabs
    assert not any(other["fits"] for other in found["rungs"][: found["best"]])
    run = read_task(ROOT / "recipes" / f"{LANGUAGE}.py", flags_of(rung["launch"]))
    assert run.optim.offload_optimizer == "state"
    refused = fitted([*words, "--host_memory", "191MiB"], tmp_path / "fit.json")
    (rung,) = [rung for rung in refused["rungs"] if rung["name"] == "optimizer state on host"]
    assert not rung["fits"]
    assert rung["needed_bytes"] <= refused["budget_bytes"]


@pytest.mark.slow
def test_where_no_other_plan_fits_mlps_run_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = folder_of({**LLAMA, "intermediate_size": 4096}, tmp_path / "wide")
    words = [wide, "--length", "16384", "--global_batch_size", "2", "--memory", "1.4GiB", "--host_memory", "0.01GiB"]
    fits = {rung["name"]: rung["fits"] for rung in fitted(words, tmp_path / "fit.json")["rungs"]}
    assert fits["activation checkpointing"]
    assert fits["2 cards"]
    monkeypatch.setattr(ladder, "with_tiles", lambda strategies: strategies)
    assert main(["fit", *words]) == 2


@pytest.mark.slow
def test_a_model_without_mlps_of_its_own_has_no_tiles(tmp_path: Path) -> None:
    bert = folder_of({**BERT, "hidden_size": 512, "intermediate_size": 1024}, tmp_path / "bert")
    words = [bert, "--length", "512", "--global_batch_size", "8", "--memory", "0.7GiB"]
    rungs = fitted(words, tmp_path / "fit.json")["rungs"]
    assert any(not rung["fits"] for rung in rungs if rung["name"] == "optimizer in the backward")


@pytest.mark.slow
def test_where_adapters_do_not_fit_frozen_weights_wait_on_the_host(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}
    words = [folder_of({**LLAMA, **sizes}, tmp_path / "wide"), "--length", "64", "--global_batch_size", "1"]
    found = fitted([*words, "--memory", "1.42GiB"], tmp_path / "fit.json")
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    streamed = rungs["LoRA, weights streamed"]
    assert found["rungs"][found["best"]] == streamed
    assert not rungs["LoRA"]["fits"]
    assert streamed["flags"][-2:] == ["--stream_weights", "host"]
    assert streamed["host_bytes"] > 0.5 * 2**30
    assert read_task(ROOT / "recipes" / "language_modeling.py", flags_of(streamed["launch"])).optim.streamed == "frozen"


def test_a_card_without_bfloat16_is_offered_adapters_in_float16(llama: str, tmp_path: Path) -> None:
    found = fitted([llama, *LENGTHS, "--card", "t4"], tmp_path / "fit.json")
    assert found["mixed_precision"] == "fp16"
    (adapted,) = (rung for rung in found["rungs"] if rung["name"] == "LoRA")
    assert adapted["flags"] == ["--lora", "--dtype", "float16"]
    assert "--mixed_precision fp16 " in adapted["launch"]
    assert not any("bfloat16" in flag for rung in found["rungs"] for flag in rung["flags"])
    assert Launch(target=find_target("t4")).half == "float32"  # without the scaled loss
    assert Launch(target=find_target("l4"), mixed_precision="bf16").half == "bfloat16"


VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8, **SIZES}
RESNET = {"hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 16, "layer_type": "basic"}
RESNET |= {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
MOBILENET = {
    "model_type": "mobilenet_v1",
    "architectures": ["MobileNetV1ForImageClassification"],
    "depth_multiplier": 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "takes_adapters"),
    [(VIT, True), (RESNET, True), (MOBILENET, False)],
    ids=["linear layers", "convolutions", "none that peft adapts"],
)
def test_image_models_are_offered_adapters(tmp_path: Path, config: dict, takes_adapters: bool) -> None:
    """With the parts of a run: in bfloat16 half of the weights, and gradients and state of what trains alone."""
    words = [
        folder_of(config, tmp_path / "model"),
        "--image_size",
        "32",
        "--global_batch_size",
        "4",
        "--memory",
        "2GiB",
    ]
    rungs = {rung["name"]: rung for rung in fitted(words, tmp_path / "fit.json")["rungs"]}
    assert ("LoRA" in rungs) == takes_adapters
    if takes_adapters:
        whole, adapted = rungs["no checkpointing"], rungs["LoRA"]
        assert adapted["parts"]["optimizer state"] < whole["parts"]["optimizer state"]
        task = read_task(ROOT / "recipes" / f"{IMAGES}.py", flags_of(adapted["launch"]))
        assert not task.takes_adapters
        trained = [one for one in task.planned_model().parameters() if one.requires_grad]
        assert adapted["parts"]["optimizer state"] >= 2 * sum(one.nbytes for one in trained)


@pytest.mark.slow
def test_what_does_not_fit_image_models_names_no_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([folder_of(VIT, tmp_path / "vit"), "--global_batch_size", "1", "--memory", "1MiB"], capsys)
    assert "does not fit" in line
    assert "--load_in_4bit" not in line


@pytest.mark.slow
def test_where_nothing_fits_the_need_is_told(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fit.json"
    line = refusal([llama, *LENGTHS, "--memory", "300MiB", "--json", str(file)], capsys)
    assert "does not fit 285 MiB" in line
    assert "the least memory is needed with" in line
    record = json.loads(file.read_text())
    assert record["best"] is None
    assert {rung["launch"] for rung in record["rungs"]} == {None}


def test_an_interrupt_keeps_the_rungs_that_are_known(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ladder.ladder

    def interrupted(*args, **options):
        rungs = known(*args, **options)
        yield next(rungs)
        yield next(rungs)
        raise KeyboardInterrupt

    monkeypatch.setattr("memsave_recipes.tools.cli.fit.ladder", interrupted)
    file = tmp_path / "fit.json"
    with pytest.raises(SystemExit) as end:
        main(["fit", llama, *LENGTHS, "--memory", "1GiB", "--json", str(file)])
    assert end.value.code == 130
    record = json.loads(file.read_text())
    assert not record["is_complete"]
    assert [rung["name"] for rung in record["rungs"]] == ["no checkpointing", "loss in chunks"]
    out = capsys.readouterr().out
    assert record["rungs"][record["best"]]["launch"] in out


def test_json_alone_is_printed_with_a_dash(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", llama, *LENGTHS, "--memory", "1GiB", "--micro_batch_size", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rungs"]


def test_a_model_is_found_by_one_word(tmp_path: Path, llama: str) -> None:
    assert find_subject("vgg16").flags == ("--model", "vgg16")
    assert find_subject(llama) == find_subject(f"{llama}/config.json")
    assert find_subject(llama).recipe == LANGUAGE
    assert find_subject(folder_of(BERT, tmp_path / "bert")).recipe == TEXTS
    by_type = {"gpt2": LANGUAGE, "llama": LANGUAGE, "vit": IMAGES, "convnext": IMAGES, "modernbert": TEXTS, "t5": TEXTS}
    for word, recipe in by_type.items():
        subject = find_subject(word)
        assert (subject.recipe, subject.is_pretrained) == (recipe, False)
        assert subject.flags[:2] == ("--model_type", word)
    assert find_subject("gpt2").length == 1024  # as many positions as it has
    assert find_subject(llama).length == 2048


def test_what_is_no_model_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no recipe trains"):
        find_subject("encodec")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert "has no config.json" in refusal([str(tmp_path / "empty"), "--memory", "8GiB"], capsys)
    assert "is a file" in refusal([str(tmp_path / "notes.txt"), "--memory", "8GiB"], capsys)
    assert "MODEL nobody/nothing cannot be read: it is not in the cache" in refusal(
        ["nobody/nothing", "--memory", "8GiB"], capsys
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is more than 2000"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers=100000 is more than 2000"),
        ({"hidden_size": -64}, "is less than 1"),
        ({"hidden_size": 10**12, "num_attention_heads": 1}, "cannot be made"),
        ({"vocab_size": -1}, "is less than 1"),
        ({"num_attention_heads": -2}, "is less than 1"),
        ({"head_dim": -8}, "cannot be made"),
        ({"intermediate_size": -1}, "is less than 1"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3 is less than 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is less than 1"),
        ({"vocab_size": 0}, "vocab_size=0 is less than 1"),
        ({"intermediate_size": 0}, "intermediate_size=0 is less than 1"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1 is less than 1"),
        ({"model_type": "bart", "decoder_layers": 10**9}, "decoder_layers=1000000000 is more than 2000"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantized (gptq)"),
        ({"architectures": 5}, "architectures"),
        ({"architectures": {"a": 1}}, "architectures"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "brings code of its own, which is not run"),
    ],
)
def test_configurations_that_make_no_model_are_one_line(tmp_path, capsys, monkeypatch, entries, message):
    folder = folder_of({**LLAMA, **entries}, tmp_path / "model")
    (tmp_path / "model/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert message in refusal([folder, "--card", "rtx4090", "--length", "32"], capsys)
    assert not (tmp_path / "ran").exists()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("kind", "name", "entries"),
    [
        ("mixtral", "Mixtral", {"num_local_experts": 4}),
        pytest.param("qwen3_moe", "Qwen3Moe", {**EXPERTS, "head_dim": 16}, marks=pytest.mark.slow),
        pytest.param("granitemoe", "GraniteMoe", {"num_local_experts": 4}, marks=pytest.mark.slow),
        ("gpt_oss", "GptOss", {"num_local_experts": 4, "head_dim": 16}),
    ],
)
def test_mixtures_of_experts_in_float32_are_estimated(tmp_path, kind, name, entries):
    config = {**LLAMA, "num_key_value_heads": 2, "model_type": kind, "architectures": [f"{name}ForCausalLM"], **entries}
    folder = folder_of(config, tmp_path / kind)
    found = fitted([folder, *LENGTHS, "--micro_batch_size", "4", "--card", "rtx4090"], tmp_path / "fit.json")
    assert all(rung["fits"] for rung in found["rungs"])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 4}, "k not in range"),
        ({"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"], "kv_channels": 16}, "the values of a tensor"),
        ({"num_key_value_heads": 3}, "query heads to be a multiple"),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "must match|to be a multiple"),
    ],
)
def test_a_forward_that_fails_is_one_line(tmp_path, capfd, config, why):
    folder = folder_of({**LLAMA, **config}, tmp_path / "model")
    assert main(["fit", folder, "--card", "rtx4090", "--length", "32"]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert "cannot be estimated (" in line
    assert re.search(why, line)


def test_a_configuration_that_is_nested_without_end(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "cannot be read" in refusal([str(folder), "--card", "rtx4090"], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vgg16", "--card", "rtx49"], "--card rtx49: no figures of such a device"),
        (["vgg16", "--card", "rtx4090", "--memory", "8GiB"], "not allowed with"),
        (["vgg16", "--memory", "much"], "write a size such as 12GiB"),
        (["vgg16", "--memory", "8GiB", "--length", "8"], "--length 8: vgg16 has no such size"),
        (["gpt2", "--memory", "8GiB", "--image_size", "8"], "--image_size 8: gpt2 has no such size"),
        (["gpt2", "--memory", "8GiB", "--max_pixels", "8"], "--max_pixels 8: it is for models of images and text"),
        (["vit", "--memory", "8GiB", "--max_pixels", "0"], "--max_pixels 0: must be at least 1"),
        (["qwen3_vl", "--memory", "8GiB"], "MODEL qwen3_vl: a type has no processor of images: name a folder"),
        (["gpt2", "--memory", "8GiB", "--global_batch_size", "0"], "--global_batch_size 0: must be at least 1"),
        (["gpt2", "--memory", "8GiB", "--host_memory", "0"], "--host_memory 0GiB: must be above 0"),
        (["gpt2", "--memory", "8GiB", "--host_memory", "much"], "--host_memory: much: write a size such as 12GiB"),
        (["gpt2", "--card", "cpu", "--host_memory", "8GiB"], "--host_memory 8GiB: nothing is offloaded from a CPU"),
        (["gpt2", "--memory", "8GiB", "--optimizer", "lion"], "--optimizer"),
        (["gpt2", "--card", "cpu", "--mixed_precision", "fp16"], "--mixed_precision fp16 does not work on the CPU"),
    ],
)
def test_bad_input_is_told_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(words, capsys)
