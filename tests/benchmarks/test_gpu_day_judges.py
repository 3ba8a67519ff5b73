"""Each judge of the day on a GPU passes what holds, and fails on a result that is crafted to be just wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

MEMORY = {
    "peak_allocated_gib": 2.0,
    "peak_reserved_gib": 2.0625,
    "device_used_gib": 2.4375,
    "prediction_error_pct": 0.5,
}
RESULTS = {
    "memory": MEMORY,
    "perf": {"step_time_s": 0.1, "tokens_per_sec": 1234.5, "mfu_pct": 40.0},
    "plan": "none",
    "accumulation_steps": 2,
    "equivalence": {
        "verdict": "identical",
        "largest_difference_to_it": 1e-16,
        "largest_difference_exact": 1e-16,
        "largest_difference_bitwise": 0.0,
        "same_bits_as_it": {"3": True},
    },
}
SUMMARY = {"lowest_pct": 0.1, "lowest_without_constants_pct": -0.9}
LOOPS = {"losses": [2.0, 1.0], "plain_losses": [2.0, 1.0], "peak_bytes": 1, "plain_peak_bytes": 2}
PLAN = {
    "speed": {"bound_s": 0.09},
    "candidates": [{"step_s": 0.09, "peak_bytes": 2**31 - 64, "parts": {"workspaces": 64}}],
}
SAID = "full_offload: at most 1 GiB of the host's memory for a rank, of 9 GiB that are available to it"


@pytest.fixture
def judges(load):
    return load("gpu_day.judges")


@pytest.fixture
def outcome(load, tmp_path):
    """Makes a run that has ended; its keywords replace results, by the path to them with ``__`` between."""
    numbers = iter(range(100))

    def make(code=0, output="", files=(), losses=(3.0, 2.0), weights=None, **others):
        folder = tmp_path / str(next(numbers))
        (folder / "final").mkdir(parents=True)
        results = json.loads(json.dumps(RESULTS))
        for path, value in others.items():
            *parents, last = path.split("__")
            place = results
            for name in parents:
                place = place[name]
            place[last] = value
        written = {"results.json": results, "config.json": {"memory_budget_gib": 2.375}, **dict(files)}
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content))
        rows = [json.dumps({"train/loss": loss}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join([*rows, json.dumps({"eval/loss": 9.0})]))
        save_file(weights or {"a": torch.zeros(2)}, folder / "final" / "model.safetensors")
        return load("gpu_day.claims").Outcome(code, output, folder)

    return make


def test_a_program_that_ends_badly_fails(judges, outcome):
    assert judges.passes(outcome(output="2 passed\n\n")) == (True, "2 passed")
    assert judges.passes(outcome(code=1, output="1 failed")) == (False, "1 failed")


def test_results_of_a_run_that_failed_are_not_read(judges, outcome):
    run = outcome(code=2, output="many lines\nerror: --length 0: too short\n\n")
    with pytest.raises(RuntimeError, match="exit code 2: error: --length 0: too short"):
        judges.predicted(run)


@pytest.mark.parametrize(
    ("verdict", "may_round", "holds"),
    [
        ("identical", False, True),
        ("as exact as plain", True, True),
        ("as exact as plain", False, False),
        ("different", True, False),
    ],
)
def test_proofs(judges, outcome, verdict, may_round, holds):
    assert judges.proven(may_round=may_round)(outcome(equivalence__verdict=verdict)) == (holds, verdict)


@pytest.mark.parametrize(
    ("weights", "holds"),
    [
        ({"a": torch.zeros(2)}, True),
        ({"a": torch.tensor([0.0, 1e-7])}, False),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, False),
        ({"b": torch.zeros(2)}, False),
    ],
)
def test_weights_are_equal_to_the_bit_and_all_there(judges, outcome, weights, holds):
    assert judges.same_weights(outcome(weights=weights), outcome())[0] is holds


def test_losses_of_two_runs(judges, outcome):
    judge = judges.same_losses(1e-4)
    assert judge(outcome(losses=[3.0, 2.0001]), outcome()) == (True, "2 losses, at most 5.0e-05 apart")
    assert not judge(outcome(losses=[3.0, 2.001]), outcome())[0]
    assert not judge(outcome(losses=[3.0, float("nan")]), outcome())[0]
    assert not judge(outcome(losses=[]), outcome(losses=[]))[0]
    with pytest.raises(ValueError, match="longer"):
        judge(outcome(losses=[3.0]), outcome())


@pytest.mark.parametrize(
    "wrong",
    [
        {"equivalence__largest_difference_exact": 1e-9},
        {"equivalence__largest_difference_to_it": 1e-9},
        {"equivalence__largest_difference_bitwise": 1e-16},
        {"equivalence__same_bits_as_it": {"3": False}},
    ],
)
def test_ddp_equals_accumulation(judges, outcome, wrong):
    assert judges.equals_accumulation(outcome(), outcome())[0]
    assert not judges.equals_accumulation(outcome(**wrong), outcome())[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory__peak_allocated_gib": 2.01},  # with the 0.375 GiB outside torch more than the 2.375 of the budget
        {"memory__device_used_gib": 2.44},
        {"memory__prediction_error_pct": -0.01},
    ],
)
def test_a_budget_holds_with_what_is_outside_torch_and_is_not_kept_by_luck(judges, outcome, wrong):
    assert judges.budget_kept(outcome())[0]
    assert not judges.budget_kept(outcome(**wrong))[0]


@pytest.mark.parametrize(("error", "holds"), [(0.0, True), (15.0, True), (-0.01, False), (15.1, False)])
def test_a_prediction_is_neither_below_nor_far_above(judges, outcome, error, holds):
    assert judges.predicted(outcome(memory__prediction_error_pct=error))[0] is holds


@pytest.mark.parametrize(
    ("wrong", "holds"), [({}, True), ({"lowest_pct": -0.1}, False), ({"lowest_without_constants_pct": -1.1}, False)]
)
def test_cases_are_not_below_and_not_by_constants_alone(judges, outcome, wrong, holds):
    run = outcome(files={"prediction-cuda.json": {"summary": SUMMARY | wrong}})
    assert judges.cases_predicted("cuda")(run)[0] is holds


@pytest.mark.parametrize(("rss", "holds"), [(2.9, True), (3.07, False), (2.4, False)])
def test_the_hosts_memory_is_what_is_said(judges, outcome, rss, holds):
    plain = outcome(memory__host_peak_rss_gib=2.0)
    assert judges.host_memory_predicted(outcome(output=SAID, memory__host_peak_rss_gib=rss), plain)[0] is holds
    unsaid = judges.host_memory_predicted(outcome(memory__host_peak_rss_gib=rss), plain)
    assert unsaid == (False, "no line on the host's memory")


def test_much_that_is_reserved_fails(judges, outcome):
    assert judges.little_is_reserved(outcome())[0]
    assert not judges.little_is_reserved(outcome(memory__peak_reserved_gib=2.13))[0]


def test_a_full_device_needs_its_exit_code_and_a_way_out(judges, outcome):
    page = "with --activation_checkpointing full it fits"
    assert judges.ends_in_a_page(outcome(code=3, output=page))[0]
    assert not judges.ends_in_a_page(outcome(code=1, output=page))[0]
    assert not judges.ends_in_a_page(outcome(code=3, output="out of memory"))[0]


@pytest.mark.parametrize("losses", [[2.0, 2.0], [2.0, float("nan")], [2.0, float("inf"), 1.0]])
def test_a_loss_falls_and_is_finite(judges, outcome, losses):
    assert judges.loss_falls(outcome())[0]
    assert not judges.loss_falls(outcome(losses=losses))[0]


def test_waits_are_counted_a_micro_batch_and_named_by_line(judges, outcome):
    run = outcome(files={"waits.json": {"micro_batches": 8, "waits": {"loss.py:3 f": 8, "step.py:9 g": 1}}})
    assert judges.waits_at_most(1.2)(run)[0]
    holds, found = judges.waits_at_most(1.0)(run)
    assert not holds
    assert found == "1.12 in 8 micro-batches; 8 at loss.py:3 f; 1 at step.py:9 g"


def test_a_step_that_takes_too_long_fails(judges, outcome):
    slow = outcome(perf__step_time_s=0.12)
    assert judges.ratio(1.1)(outcome(), outcome()) == (True, "100.0 ms a step, x1.000, 40.0 % of the peak rate, 2 GiB")
    assert not judges.ratio(1.1)(slow, outcome())[0]
    assert judges.ratio()(slow, outcome())[0] is None


@pytest.mark.parametrize(("ms", "holds"), [("45.0", True), ("66.0", False), ("30.0", False)])
def test_measured_seconds_of_a_plan(judges, outcome, ms, holds):
    run = outcome(output=f"predicted peak 1 GiB; one forward and backward {ms} ms ± 1.0 ms (baseline: 9.0 ms)")
    assert judges.seconds_measured(0.25)(run)[0] is holds
    assert judges.seconds_measured(0.25)(outcome()) == (False, "no line on one forward and backward")


def test_seconds_and_peak_of_a_data_sheet(judges, outcome):
    plan = outcome(files={"plan.json": PLAN})
    assert judges.seconds_by_sheet(plan, outcome())[0]
    assert not judges.seconds_by_sheet(plan, outcome(perf__step_time_s=0.08))[0]
    assert judges.seconds_expected(0.11)(plan, outcome())[0]
    assert not judges.seconds_expected(0.09)(plan, outcome())[0]
    assert judges.peak_by_sheet(plan, outcome())[0]
    assert not judges.peak_by_sheet(plan, outcome(memory__peak_allocated_gib=2.0001))[0]


@pytest.mark.parametrize("wrong", [{"losses": [2.0, 1.0000001]}, {"peak_bytes": 2}])
def test_other_loops_train_alike_in_less_memory(judges, outcome, wrong):
    assert judges.trains_alike(outcome(files={"loops.json": LOOPS}))[0]
    assert not judges.trains_alike(outcome(files={"loops.json": LOOPS | wrong}))[0]


def test_the_methods_of_the_article_are_figures(judges, outcome):
    rows = [
        {"method": name, "memory": {"peak_allocated_bytes": 2**20}, "step_time_s": seconds}
        for name, seconds in (("plain", 1.0), ("full", 1.5))
    ]
    found = judges.article_rows("cpu")(outcome(files={"vgg16_article-cpu.json": {"rows": rows}}))
    assert found == (None, "plain 1 MiB, x1.000; full 1 MiB, x1.500")


def test_a_speed_is_a_figure_with_its_share_of_the_peak(judges, outcome):
    found = "1,234 tokens/s, 40.0 % of the peak rate, 100.0 ms a step under none, 2 GiB"
    assert judges.speed(outcome()) == (None, found)
