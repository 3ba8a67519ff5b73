"""Trainers side by side: what is compared, and that those stay on the reference's curve which are said to."""

import json
import operator
from importlib.metadata import version

import pytest
import torch

ROUNDING = 1e-5
PACKAGES = ("torch", "transformers", "accelerate", "trl", "lightning", "memsave-recipes")


@pytest.fixture(scope="module")
def benchmark(load):
    return load("peers")


@pytest.fixture(scope="module")
def trained(load):
    """The module of what is trained."""
    return load("side_by_side.work")


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """The results of a whole small run, and the folder with its files."""
    folder = tmp_path_factory.mktemp("peers")
    return benchmark.main(["--quick", "--output_dir", str(folder)]), folder


@pytest.fixture(scope="module")
def rows(run):
    return {row["loop"]: row for row in run[0]["rows"]}


@pytest.mark.slow
def test_every_peer_has_a_row_and_every_package_a_version(benchmark, run, rows):
    assert list(rows) == [name for name in benchmark.PEERS if name not in benchmark.NOT_QUICK]
    results, folder = run
    assert {name: version(name) for name in PACKAGES} == results["versions"]
    assert json.loads((folder / "peers-cpu.json").read_text()) == results
    page = (folder / "peers-cpu.md").read_text()
    assert all(f"{name} {version(name)}" in page for name in PACKAGES)
    assert all(f"| {name} |" in page and f"* {name}: " in page for name in rows)
    assert all(f"* {name} has no row: {reason}." in page for name, reason in results["left_out"].items())


@pytest.mark.slow
def test_ours_stays_on_the_curve_of_whole_batches(benchmark, rows):
    for name in (benchmark.OURS, benchmark.LEAN, benchmark.BUDGET, benchmark.YARDSTICK):
        assert 0 < rows[name]["loss_distance"] < ROUNDING, name
    assert rows[benchmark.REFERENCE]["loss_distance"] == rows[benchmark.REFERENCE]["weights_distance"] == 0


@pytest.mark.slow
def test_means_of_uneven_micro_batches_leave_it(benchmark, rows):
    for name in (benchmark.EXAMPLE, benchmark.FABRIC):
        assert rows[name]["loss_distance"] > 100 * rows[benchmark.OURS]["loss_distance"], name


@pytest.mark.slow
def test_recomputing_moves_no_loss(benchmark, rows):
    plain, checkpointed = rows[benchmark.TRAINER], rows[f"{benchmark.TRAINER}, {benchmark.CHECKPOINTED}"]
    assert checkpointed["losses"] == plain["losses"]
    assert checkpointed["peak_bytes"] < plain["peak_bytes"]
    assert rows[benchmark.LEAN]["losses"] == rows[benchmark.BUDGET]["losses"]


@pytest.mark.slow
def test_the_budget_holds_and_is_between_none_and_full(benchmark, rows):
    peak, budget = rows[benchmark.BUDGET]["peak_bytes"], benchmark.QUICK.budget_gib * 2**30
    assert rows[benchmark.LEAN]["peak_bytes"] <= peak <= budget < rows[benchmark.OURS]["peak_bytes"]


@pytest.mark.slow
def test_the_peak_holds_the_state_and_micro_batches_are_smaller_than_whole_ones(benchmark, rows):
    weights = sum(parameter.nbytes for parameter in benchmark.QUICK.make_model().parameters())
    assert all(row["peak_bytes"] > 3 * weights for row in rows.values())
    assert rows["torch, whole batches"]["peak_bytes"] > rows[benchmark.YARDSTICK]["peak_bytes"]
    assert rows[benchmark.REFERENCE]["peak_bytes"] > rows["torch, whole batches"]["peak_bytes"]


@pytest.fixture
def published(benchmark):
    """The rows of docs/results by their names."""
    results = json.loads((benchmark.harness.RESULTS / "peers-cpu.json").read_text())
    return {row["loop"]: row for row in results["rows"]}


def test_published_results_are_of_every_peer(benchmark, published):
    assert list(published) == list(benchmark.PEERS)
    assert all(row["note"] == benchmark.PEERS[name].note for name, row in published.items())


def test_the_page_of_benchmarks_has_the_published_distances_and_noise(benchmark, published):
    page = " ".join((benchmark.harness.ROOT / "docs" / "benchmarks.md").read_text().split())
    exact = [name for name in published if name.startswith((benchmark.OURS, benchmark.TRAINER, benchmark.TRL))]
    exact.append("Accelerate, loop for several sizes")
    worst = max(published[name]["loss_distance"] for name in exact)
    off = max(published[name]["loss_distance"] for name in (benchmark.EXAMPLE, benchmark.FABRIC))
    assert f"stay within {worst:.1e} of the loss" in page
    assert f"are up to {off:.1e} off" in page
    low, high = published["the same again"]["cpu_time_ratio_quartiles"]
    assert f"of two equal loops had ratios of {low:.2f} to {high:.2f} (the middle half)" in page


def test_documents_are_uneven_and_padding_does_not_count(trained):
    work = trained.QUICK
    documents = trained.Documents(work)
    lengths = [len(row) for row in documents.rows]
    assert len(documents) == (work.total_steps + 1) * work.global_batch_size
    assert work.shortest <= min(lengths) < max(lengths) / 2 <= work.longest / 2
    assert [lengths[number] for number in documents.longest(3)] == sorted(lengths)[:-4:-1]
    batch = trained.padded([documents[0], documents[1]])
    assert trained.count_valid(batch) == lengths[0] + lengths[1] - 2
    assert batch["attention_mask"].sum() == lengths[0] + lengths[1]
    assert all(int(row.min()) > trained.PADDING for row in documents.rows)


def test_biases_of_keys_do_not_count_in_the_distance(benchmark):
    name = f"h.0.{benchmark.KEY_BIASES}"
    zero, moved = torch.zeros(6), torch.tensor([0.0, 3.0, 5.0, 5.0, 4.0, 0.0])
    assert benchmark.distance({name: moved}, {name: zero}) == 5
    assert benchmark.distance({"other": moved[1:3]}, {"other": zero[1:3]}) == pytest.approx(34**0.5)


def test_the_largest_distance_is_relative(benchmark):
    assert benchmark.largest_distance([2.0, 4.4], [2.0, 4.0]) == pytest.approx(0.1)


@pytest.mark.slow
def test_a_process_that_fails_says_so(load):
    forked = load("forked")
    assert forked.run_apart(operator.add, 2, 3) == 5
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        forked.run_apart(operator.truediv, 1, 0)
    runner = forked.Runner(operator.neg)
    with pytest.raises(RuntimeError, match="bad operand type for unary -"):
        runner.step()
