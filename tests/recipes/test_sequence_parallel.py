"""``--sequence_parallel``: rows that ranks share train the curve of one rank, go on elsewhere, and are counted once."""

import json
import shutil
from functools import cache, partial

import pytest
from lives import assert_the_same_weights, be_rank, curve, write_rows
from samples import sample

RECIPE = "language_modeling"
WIDE = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
SHAPES = {
    "gpt2": "n_layer=2,n_head=4,n_embd=32",
    "llama": f"{WIDE},num_key_value_heads=1",
    "qwen3": f"{WIDE},num_key_value_heads=2,head_dim=8",
    "mistral": f"{WIDE},num_key_value_heads=2,sliding_window=9",
    "gemma3_text": f"{WIDE},num_key_value_heads=1,head_dim=8,sliding_window=9,num_hidden_layers=6",
}
SHARED = ("--sequence_parallel", "2")


def of(model_type):
    return "--model_type", model_type, "--config_overrides", SHAPES[model_type]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(60)]
    path = write_rows(tmp_path_factory.mktemp("data") / "text.jsonl", [{"text": text} for text in texts])
    return [
        *("--train_file", path, "--block_size", "47", "--global_batch_size", "5", "--micro_batch_size", "2"),
        *("--max_steps", "4", "--logging_steps", "1", "--eval_steps", "2", "--max_eval_samples", "5"),
        *("--vocab_size", "300", "--dtype", "float64", "--lr_scheduler_type", "constant", "--report_to", "none"),
        *("--save_every", "2", "--keep_checkpoints", "5"),
    ]


@pytest.fixture(scope="module")
def train(run_on_ranks, flags):
    """Train on so many forked ranks, into the folder; returns what was printed."""

    def run(folder, num_ranks, *more):
        words = [*flags, *more, "--output_dir", str(folder)]
        ranks = run_on_ranks(partial(be_rank, recipe=RECIPE, words=words), num_ranks, timeout_s=600)
        return "".join(printed for _, printed in ranks)

    return run


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """The folder of a run from the beginning, each done once."""

    @cache
    def once(num_ranks, *more):
        folder = tmp_path_factory.mktemp("run")
        train(folder, num_ranks, *more)
        return folder

    return once


def stopped_after_two(folder, target):
    """As if the run had been killed in its third step."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "checkpoints" / "step-4")
    shutil.rmtree(target / "final")
    (target / "results.json").unlink()
    return target


def assert_the_same_curve(folder, expected, rel=1e-12):
    assert curve(folder) == pytest.approx(curve(expected), rel=rel)
    assert len(curve(folder)) == 4
    ours, theirs = (json.loads((one / "results.json").read_text()) for one in (folder, expected))
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=rel)
    assert [ours[name] for name in ("tokens_seen", "samples_seen")] == [theirs["tokens_seen"], 20]
    flops = [one["perf"]["model_gflops_per_sample"] for one in (ours, theirs)]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)


def test_a_run_of_one_rank_goes_on_with_rows_on_two(train, run, tmp_path):
    one = run(1, *of("mistral"))
    two = stopped_after_two(one, tmp_path / "two")
    printed = train(two, 2, *of("mistral"), *SHARED, "--activation_checkpointing", "full", "--resume")
    assert "note: --sequence_parallel was 1 and is 2: ranks add gradients in another order" in printed
    assert "going on as 5 samples = (2+2+1) x 1 group of 2 ranks: data-exact" in printed
    assert "rows are shared by 2 ranks" in printed
    assert_the_same_curve(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(), ("--no_packing",)], ids=["packed", "padded"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_rows_on_two_ranks_have_the_curve_of_one(run, model_type, rows):
    one, two = (run(ranks, *of(model_type), *rows, *more) for ranks, more in ((1, ()), (2, SHARED)))
    assert_the_same_curve(two, one, rel=1e-8 if model_type == "gemma3_text" else 1e-12)  # whose norms are in float32


FOUR_RANKS = {
    "four": ("llama", (), ("--sequence_parallel", "4")),
    "two and two": ("gpt2", ("--ema_decay", "0.9", "--max_grad_norm", "0.1"), SHARED),
    "in shards": ("mistral", (), (*SHARED, "--shard", "full", "--activation_checkpointing", "full")),
    "in shards that replicate": ("qwen3", ("--no_packing",), (*SHARED, "--shard", "2")),
    "adapters": ("llama", ("--lora",), (*SHARED, "--loss", "chunked")),
}
"""A model, flags of the run on one rank, and more of that on four."""


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUR_RANKS)
def test_rows_on_two_of_four_ranks_have_the_curve_of_one(run, how):
    model_type, common, more = FOUR_RANKS[how]
    assert_the_same_curve(run(4, *of(model_type), *common, *more), run(1, *of(model_type), *common))


@pytest.mark.slow
def test_a_run_with_shared_rows_goes_on_without(train, run, tmp_path):
    four = run(4, *of("llama"), *SHARED)
    folder = stopped_after_two(four, tmp_path / "one")
    train(folder, 1, *of("llama"), "--resume")
    assert_the_same_curve(folder, four)


@pytest.mark.slow
def test_a_killed_run_has_the_bits_of_one_that_was_not(train, run, tmp_path):
    whole = run(2, *of("llama"), *SHARED)
    folder = stopped_after_two(whole, tmp_path / "killed")
    train(folder, 2, *of("llama"), *SHARED, "--resume")
    assert curve(folder) == curve(whole)
    assert_the_same_weights(folder / "final", whole / "final")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["full", "selective", "full_tiled:8", "full_tiled_offload:8"])
def test_verify_holds_for_shared_rows(train, tmp_path, plan):
    more = ("--activation_checkpointing", plan, "--verify", "--dropout", "0.1", "--dtype", "float32")
    assert "--verify: one global batch" in train(tmp_path / "run", 2, *of("gpt2"), *SHARED, *more)


@pytest.mark.parametrize("more", sample([()], [(), ("--shard", "full")]))
def test_a_budget_is_searched_by_estimates(train, run, tmp_path, more):
    budget = ("--activation_checkpointing", "budget", "--micro_batch_size", "auto", "--memory_budget_gib", "0.0025")
    printed = train(tmp_path / "run", 2, *of("mistral"), *SHARED, *budget, *more)
    flag = "--shard full" if more else "--sequence_parallel 2"
    assert f"{flag}: planning by estimates for this CPU" in printed
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["memory"]["predicted_peak_gib"] <= 0.0025
    assert found["plan"] != "none"
    assert found["accumulation_steps"] > 1
    assert_the_same_curve(tmp_path / "run", run(1, *of("mistral")))


@pytest.mark.slow
def test_compiled_layers_have_the_curve_of_one_rank(run):
    one, two = run(1, *of("llama")), run(2, *of("llama"), *SHARED, "--compile", "--activation_checkpointing", "full")
    assert json.loads((two / "results.json").read_text())["plan"] == "compiled:0"
    assert curve(two) == pytest.approx(curve(one), rel=1e-6)


REFUSED = {
    ("--bitwise_topology",): "adds up the gradients of whole rows: leave one of them out",
    ("--packed_attention", "mask"): "leave --packed_attention mask out",
    (): "1 rank cannot be divided into groups of 2: launch a multiple of 2, or leave it out",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_shared_rows_do_not_go_with_is_refused_in_a_line(refuse, flags, more):
    line = refuse(*flags, *of("llama"), *SHARED, *more)
    assert line.startswith("error: --sequence_parallel 2: ")
    assert REFUSED[more] in line


def test_fewer_than_one_rank_is_refused(refuse, flags):
    assert "--sequence_parallel 0: must be at least 1" in refuse(*flags, *of("llama"), "--sequence_parallel", "0")
