"""The benchmark on tiny models: what it writes, that a wrong method cannot take part, and what its verdicts count."""

import json

import pytest
import torch

from memsave_recipes.core.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def benchmark(load):
    return load("frontier")


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """The results of a whole run, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("run") / "results"
    arguments = ["--quick", "--model", "vgg16", "gpt2", "--repetitions", "2", "--output_dir", str(folder)]
    return benchmark.main(arguments), folder


@pytest.fixture
def make_bench(benchmark):
    """The bench of a tiny model whose plain method is admitted."""

    def make(name):
        work = benchmark.build_work(name, benchmark.SIZES["tiny"][name], CPU)
        bench = benchmark.Bench(work)
        bench.admit(benchmark.plain(work))
        return bench

    return make


def rows_of(results, model):
    return next(entry["rows"] for entry in results["models"] if entry["model"] == model)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vgg16", "gpt2"])
def test_every_method_has_figures_or_a_reason(run, model):
    rows = rows_of(run[0], model)
    assert {"plain", "budget", "every block", "every n-th block", "selective"} <= {row["series"] for row in rows}
    assert rows[0]["method"] == "plain"
    assert rows[0]["share"] == rows[0]["time_ratio"] == 1
    for row in rows:
        if "reason" in row:
            assert row["series"] == "ckptplan"
            assert row["reason"]
        else:
            assert row["is_bitwise"]
            assert row["gradient_difference"] < (1e-5 if row["loss"] == "chunked" else 1e-30)
            assert row["peak_bytes"] > row["activation_bytes"] > 0
            assert len(row["seconds"]) == len(row["ratios"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vgg16", "gpt2"])
def test_ours_stays_below_its_budgets_and_reaches_from_the_smallest_to_plain(run, model):
    rows = rows_of(run[0], model)
    ours = [row for row in rows if row["series"] == "budget"]
    plain = next(row for row in rows if row["series"] == ("plain, chunked loss" if model == "gpt2" else "plain"))
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in ours)
    assert max(row["share"] for row in ours) == pytest.approx(plain["share"], rel=0.01)
    assert min(row["share"] for row in ours) <= min(row["share"] for row in rows if "share" in row) + 0.01


@pytest.mark.slow
def test_the_loss_without_logits_is_told_apart(run):
    rows = {row["method"]: row for row in rows_of(run[0], "gpt2")}
    assert rows["plain, chunked loss"]["share"] < 0.9
    assert {row["loss"] for row in rows.values() if row["series"] == "budget"} == {"chunked"}
    assert rows["every block"]["loss"] == "full"
    assert rows["every block, chunked loss"]["share"] < rows["every block"]["share"]


@pytest.mark.slow
def test_the_files_hold_the_run(run):
    results, folder = run
    assert json.loads((folder / "frontier-cpu.json").read_text()) == json.loads(json.dumps(results))
    assert {"device", "num_threads", "versions"} <= results["models"][0]["machine"].keys()
    pictures = [folder / "frontier-vgg16-cpu.png", folder / "frontier-gpt2-cpu.png", folder.parent / "frontier.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.slow
def test_the_page_has_a_row_for_each_method_and_a_verdict_for_each_model(run):
    results, folder = run
    page = (folder / "frontier-cpu.md").read_text()
    verdicts, *models = page.split("\n## ")
    assert [line.split(" | ")[0] for line in verdicts.splitlines() if line.startswith("| ")][2:] == [
        "| VGG16",
        "| GPT-2",
    ]
    for text, entry in zip(models, results["models"], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        assert len(lines) == 2 + sum("share" in row for row in entry["rows"])
        assert len({line.count(" | ") for line in lines}) == 1
        assert all(row["reason"] in text for row in entry["rows"] if "reason" in row)


def test_one_model_measured_again_leaves_the_others_in_the_files(benchmark, tmp_path):
    path = tmp_path / "frontier-cpu.json"
    earlier = {"models": [{"model": "vgg16", "rows": "old"}, {"model": "llama", "rows": "old"}]}
    path.write_text(json.dumps(earlier))
    models = benchmark.with_earlier([{"model": "vgg16", "rows": "new"}, {"model": "vit", "rows": "new"}], path)
    assert [(model["model"], model["rows"]) for model in models] == [("vgg16", "new"), ("vit", "new"), ("llama", "old")]


def test_copies_have_the_same_weights_and_modules_of_their_own(benchmark):
    work = benchmark.build_work("llama", benchmark.SIZES["tiny"]["llama"], CPU)
    copy = work.copy("chunked")
    assert [id(p) for p in copy.parameters()] == [id(p) for p in work.model.parameters()]
    assert not {id(module) for module in copy.modules()} & {id(module) for module in work.model.modules()}


@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "qwen3_vl"])
def test_models_of_images_and_text_see_their_images(benchmark, name):
    size = benchmark.SIZES["cpu"][name]
    text = size["text_config"] | {"vocab_size": 512, "num_hidden_layers": 1}
    layers = "depth" if "depth" in size["vision_config"] else "num_hidden_layers"
    vision = size["vision_config"] | {layers: 2, "deepstack_visual_indexes": [0]}
    work = benchmark.build_work(name, size | {"text_config": text, "vision_config": vision}, CPU)
    full, chunked = (work.loss_of(work.copy(kind)) for kind in ("full", "chunked"))
    torch.testing.assert_close(chunked, full)
    full.backward()
    trained = [weight.grad for part, weight in work.model.named_parameters() if "patch_embed" in part]
    assert trained
    assert all(gradient.abs().sum() > 0 for gradient in trained)
    work.batch["pixel_values"] = 2 * work.batch["pixel_values"]
    assert work.loss_of(work.copy("full")) != full


@pytest.mark.parametrize("fault", ["another factor", "not a number", "no gradient", "other bits"])
def test_a_method_with_wrong_gradients_does_not_take_part(benchmark, make_bench, fault):
    bench = make_bench("vgg16")

    def forward():
        model = bench.work.copy()
        if fault == "no gradient":
            model.classifier.requires_grad_(False)
        loss = bench.work.loss_of(model)
        return loss * {"another factor": 1.01, "not a number": torch.nan, "other bits": 1 + 1e-6}.get(fault, 1)

    method = benchmark.peers.Method(series="selective", name="wrong", build=lambda: forward)
    entry = bench.admit([method])[0]
    bench.work.model.requires_grad_(True)
    assert entry.reason.startswith("gradients are")
    assert entry.forward is None
    bench.take_turns(1)
    assert bench.rows()[-1] == {"series": "selective", "method": "wrong", "loss": "full", "reason": entry.reason}


def test_rounding_is_allowed_to_what_is_compiled(benchmark, make_bench):
    bench = make_bench("vgg16")
    model = bench.work.copy()
    build = lambda: lambda: bench.work.loss_of(model) * (1 + 1e-6)  # noqa: E731
    entry = bench.admit([benchmark.peers.Method(series="torch.compile", name="c", build=build, is_compiled=True)])[0]
    assert entry.forward
    assert 0 < entry.gradient_difference < 1e-5


def test_segments_of_torch_that_begin_in_place_raise_and_ours_do_not(benchmark, make_bench):
    bench = make_bench("vgg16")
    extent = benchmark.Extent(segments=(2, 9), intervals=(), ratios=())
    entries = bench.admit(m for m in benchmark.peers.peers(bench.work, extent) if m.num_segments)
    assert [bool(entry.reason) for entry in entries] == [False, True]
    assert bench.admit([benchmark.peers.segments(bench.work, 9)])[0].is_bitwise


@pytest.mark.slow
def test_batchnorm_that_counts_twice_is_noted(benchmark, make_bench):
    bench = make_bench("densenet121")
    extent = benchmark.Extent(segments=(2,), intervals=(), ratios=())
    notes = {entry.method.series: entry.note for entry in bench.admit(benchmark.peers.peers(bench.work, extent))}
    assert "twice" in notes["checkpoint_sequential"]
    assert notes["every block"] == notes["selective"] == ""


def test_what_compiles_for_minutes_does_so_once(benchmark, make_bench):
    bench = make_bench("vgg16")
    methods = [benchmark.peers.Method(series="torch.compile", name=f"{i}", build=lambda: 1 / 0) for i in range(2)]
    bench.admit(methods[:1])[0].first_s = 200.0
    assert "left out" in bench.admit(methods[1:])[0].reason


def test_times_are_compared_within_a_round(benchmark, make_bench, monkeypatch):
    bench = make_bench("gpt2")
    seconds = {"plain": iter([1.0, 10.0]), "plain, chunked loss": iter([1.5, 15.0])}
    monkeypatch.setattr(bench, "_seconds", lambda entry: next(seconds[entry.method.name]))
    bench.take_turns(2)
    assert bench.entries[1].ratios == [1.5, 1.5]
    assert bench.noise == 0.01


def row(series, share, *ratios):
    method = f"{series} at {share}"
    return {"series": series, "method": method, "share": share, "ratios": ratios, "time_ratio": sorted(ratios)[1]}


def judge(benchmark, rows, model="vgg16"):
    return benchmark.judge(model, [row("plain", 1.0, 1, 1, 1), *rows], noise=0.02)


@pytest.mark.parametrize(
    ("share", "ratio", "outcome"),
    [
        (0.5, 1.1, "faster"),
        (0.5, 1.19, "as fast"),
        (0.5, 1.25, "slower"),
        (0.504, 1.1, "faster"),  # within what counts as no more memory
        (0.51, 1.1, "not as small"),
        (0.1, 1.21, "as fast"),
    ],
)
def test_ours_meets_a_point_with_no_more_memory_than_it(benchmark, share, ratio, outcome):
    rows = [row("budget", share, ratio, ratio, ratio), row("every block", 0.5, 1.2, 1.2, 1.2)]
    assert judge(benchmark, rows)["duels"][0]["outcome"] == outcome


def test_the_fastest_of_ours_counts_by_its_median(benchmark):
    rows = [
        *(row("budget", 0.3, 1.3, 1.3, 1.3), row("budget:bitwise", 0.4, 1.1, 1.1, 9.0)),
        row("selective", 0.5, 1.2, 1.2, 9.9),
    ]
    duel = judge(benchmark, rows)["duels"][0]
    assert duel["ours_share"] == 0.4
    assert duel["against"] == pytest.approx(1.1 / 1.2)


def test_added_time_is_held_against_segments_where_memory_is_moderate_and_tight(benchmark):
    rows = [
        *(row("budget", 0.8, 1.1, 1.1, 1.1), row("budget", 0.4, 1.3, 1.3, 1.3)),
        *(row("checkpoint_sequential", 0.8, 1.4, 1.4, 1.4), row("checkpoint_sequential", 0.5, 1.4, 1.4, 1.4)),
        *(row("every block", 0.8, 1.1, 1.1, 1.1), row("checkpoint_sequential", 0.9, 1.01, 1.01, 1.01)),
    ]
    added = judge(benchmark, rows)["added_time"]
    assert added["moderate"]["points"] == added["tight"]["points"] == 1
    assert added["moderate"]["largest"] == pytest.approx(0.25)
    assert added["tight"]["largest"] == pytest.approx(0.75)


def test_language_models_are_held_to_a_third(benchmark):
    rows = [
        row("budget", 0.34, 0.8, 0.8, 0.8),
        row("budget", 0.33, 0.95, 0.95, 0.95),
        row("budget", 0.2, 1.1, 1.1, 1.1),
    ]
    assert judge(benchmark, rows, "gpt2")["in_a_third"]["time_ratio"] == 0.95
    assert judge(benchmark, rows[:1], "gpt2")["in_a_third"] is None


def test_what_compiles_does_not_hide_what_ours_is_without_it(benchmark):
    rows = [
        *(row("budget", 0.3, 0.9, 0.9, 0.9), row("budget:bitwise", 0.3, 1.1, 1.1, 1.1)),
        *(row("selective", 0.3, 1.0, 1.0, 1.0), row("torch.compile", 0.3, 0.8, 0.8, 0.8)),
    ]
    verdict = judge(benchmark, rows, "gpt2")
    assert [duel["outcome"] for duel in verdict["duels"]] == ["faster", "slower"]
    assert [duel["outcome"] for duel in verdict["duels_without_compiling"]] == ["slower"]
    lines = benchmark.pages.beaten([{"model": "gpt2", "verdict": verdict}])
    assert any("without compiling, selective" in line for line in lines)


def test_where_ours_is_beaten_the_page_says_so(benchmark):
    rows = [row("budget", 0.5, 1.3, 1.3, 1.3), row("every block", 0.5, 1.2, 1.2, 1.2), row("every block", 0.2, 2, 2, 2)]
    lines = benchmark.pages.beaten([{"model": "vgg16", "verdict": judge(benchmark, rows)}])
    assert len(lines) == 2
    assert "x1.200" in lines[0]
    assert "x1.300" in lines[0]
    assert "none of ours is as small" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repetitions", "0"], "--repetitions 0"),
        pytest.param(
            ["--device", "cuda"], "--device cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
        ),
    ],
)
def test_a_mistake_costs_no_run(benchmark, arguments, message):
    with pytest.raises(InputError, match=message):
        benchmark.main(arguments)
