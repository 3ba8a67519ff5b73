"""The day on a GPU runs on a CPU at a small size, so that it does not fail there on its own mistakes."""

import json
import os
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from memsave_recipes.training.parsing import parse_arguments

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = "import sys; print('trained'); sys.exit({code})"
LAUNCHER = """
import subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
if (folder / "checkpoints").exists():
    sys.exit()
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
(folder / "rank").write_text(str(rank.pid))
(folder / "checkpoints" / "step-1").mkdir(parents=True)
time.sleep(60)
"""


@pytest.fixture
def benchmark(load, monkeypatch):
    module = load("gpu_day.__main__")
    monkeypatch.setattr(module, "results_table", lambda words: 0)
    return module


@pytest.fixture
def step(load):
    """Makes a step of claims that hold, fail, or have a judge of their own."""
    claims = load("gpu_day.claims")

    def make(name, **judges):
        found = [claims.Claim(text=text.replace("_", " "), runs=(), judge=judge) for text, judge in judges.items()]
        return lambda size: claims.Step(name, found)

    return make


def breaks_off():
    raise RuntimeError("exit code 3: no memory")


def run_day(benchmark, monkeypatch, folder, *flags, **steps):
    monkeypatch.setattr(benchmark, "STEPS", steps)
    words = ["--tiny", "--output_dir", str(folder), "--runs_dir", str(folder / "runs"), *flags]
    return benchmark.main([*words, "--only", *steps])


def verdicts(folder, name="gpu_day-tiny"):
    found = json.loads((folder / f"{name}.json").read_text())["verdicts"]
    return [(one["claim"], one["verdict"], one["found"]) for one in found]


def test_every_claim_gets_a_verdict(benchmark, monkeypatch, tmp_path, step, capsys):
    good = step("good", it_holds=lambda: (True, "1 of 1"), a_speed=lambda: (None, "3 | 4 samples/s"))
    assert run_day(benchmark, monkeypatch, tmp_path, good=good) == 0
    assert verdicts(tmp_path) == [("it holds", "holds", "1 of 1"), ("a speed", "figure", "3 | 4 samples/s")]
    page = (tmp_path / "gpu_day-tiny.md").read_text()
    assert "1 holds, 0 fails, 1 figure, 0 skipped" in page
    assert "There is no GPU in this" in page
    assert "| good | a speed | figure | 3 \\| 4 samples/s |" in page
    assert "  holds  good: it holds: 1 of 1\n" in capsys.readouterr().out


def test_a_claim_that_breaks_off_fails_and_the_others_go_on(benchmark, monkeypatch, tmp_path, step):
    bad = step("bad", broken=breaks_off, wrong=lambda: (False, "0 of 1"), right=lambda: (True, "1"))
    assert run_day(benchmark, monkeypatch, tmp_path, bad=bad) == 1
    broken = ("broken", "fails", "RuntimeError: exit code 3: no memory")
    assert verdicts(tmp_path) == [broken, ("wrong", "fails", "0 of 1"), ("right", "holds", "1")]


def test_it_goes_on_where_it_was_stopped(benchmark, monkeypatch, tmp_path, step):
    run_day(benchmark, monkeypatch, tmp_path, one=step("one", first=lambda: (True, "")))
    one = step("one", first=breaks_off, cut_off=lambda: (True, ""))
    steps = {"one": one, "two": step("two", second=lambda: (True, ""))}
    assert run_day(benchmark, monkeypatch, tmp_path, **steps) == 0
    assert [claim for claim, _, _ in verdicts(tmp_path)] == ["first", "cut off", "second"]


def test_only_the_claims_with_these_words(benchmark, monkeypatch, tmp_path, step):
    both = step("both", this_one=lambda: (True, ""), another=breaks_off)
    assert run_day(benchmark, monkeypatch, tmp_path, "--claims", "this", both=both) == 0
    assert [claim for claim, _, _ in verdicts(tmp_path)] == ["this one"]


def test_rows_are_written_after_each_step_of_the_runs_with_a_speed(benchmark, monkeypatch, tmp_path, step):
    calls = []
    monkeypatch.setattr(benchmark, "results_table", calls.append)

    def trained():
        for name, perf in (("fast", {"samples_per_sec": 3.0}), ("short", {})):
            (tmp_path / "runs" / name).mkdir()
            (tmp_path / "runs" / name / "results.json").write_text(json.dumps({"perf": perf}))
        return True, ""

    steps = {"one": step("one", trained=trained), "two": step("two", cut=lambda: 1 / 0)}
    with pytest.raises(ZeroDivisionError):
        run_day(benchmark, monkeypatch, tmp_path, **steps)
    assert calls == [["add", str(tmp_path / "runs" / "fast"), "--to", str(tmp_path / "rows")]]


def test_a_stand_in_is_told_everywhere_and_kept_out_of_the_results(benchmark, monkeypatch, tmp_path, step, capsys):
    monkeypatch.setenv("STANDIN", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark.harness, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(benchmark, "abilities", lambda kind: frozenset())
    monkeypatch.setattr(benchmark, "STEPS", {"one": step("one", it=lambda: (True, ""))})
    for inside in (benchmark.harness.RESULTS, benchmark.harness.RESULTS / "rows"):
        with pytest.raises(SystemExit, match="2"):
            benchmark.main(["--output_dir", str(inside)])
        assert "Name a folder outside of docs/results" in capsys.readouterr().err
    monkeypatch.setattr(benchmark.harness, "QUICK_RESULTS", tmp_path)
    assert benchmark.main(["--runs_dir", str(tmp_path / "runs")]) == 0
    results = json.loads((tmp_path / "gpu_day-stand-in.json").read_text())
    assert results["kind"] == "stand-in"
    for told in (results["warning"], (tmp_path / "gpu_day-stand-in.md").read_text(), capsys.readouterr().out):
        assert "a stand-in for CUDA" in told
        assert "no figure here is a GPU's" in told


def test_the_list_has_every_claim_with_what_it_needs(benchmark, capsys):
    assert benchmark.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert (
        listed.index("first_minutes: ")
        < listed.index("ranks: ")
        < listed.index("kernels: ")
        < listed.index("article: ")
    )
    assert "    --bitwise_topology: the weights of one rank (needs two devices)\n" in listed
    assert "    Llama, compiled:0.5: the step of plain (needs Triton)\n" in listed
    for profiled in ("none: milliseconds by class", "build-nanogpt's model, compiled: beside compiled"):
        assert f"    {profiled} (needs Triton, a data sheet of its device)\n" in listed


@pytest.mark.parametrize("kind", ["gpu", "stand-in", "cpu"])
def test_a_name_stands_for_one_command(load, kind):
    """The outcome of a command is remembered by its name."""
    size, commands = load("gpu_day.machine").size_of(kind), {}
    for make in load("gpu_day.__main__").STEPS.values():
        for claim in make(size).claims:
            for run in claim.runs:
                for command in filter(None, (run, run.after)):
                    known = commands.setdefault(command.name, command)
                    assert callable(command.words) or known == command, command.name


def test_the_first_minutes_end_in_time(load):
    module = load("gpu_day.first_minutes")
    step = module.first_minutes(load("gpu_day.machine").size_of("gpu"))
    limits = {run.name: run.limit_s for claim in step.claims for run in claim.runs}
    assert next(iter(load("gpu_day.__main__").STEPS)) == step.name == "first_minutes"
    assert sum(limits.values()) <= 60 * module.MINUTES


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_launch_compiles_as_one_of_more_steps_does(load, kind):
    step = load("gpu_day.first_minutes").first_minutes(load("gpu_day.machine").size_of(kind))
    (launch,) = next(claim.runs for claim in step.claims if claim.text == "README's launch, as it is")
    recipe, *flags = shlex.split(launch.words)
    flags_of_recipe = runpy.run_path(str(BENCHMARKS.parent / recipe))["Arguments"]

    def compiles(*others):
        (args,) = parse_arguments(flags_of_recipe, args=[*flags, *others, "--output_dir", "out"])
        return args.compiles_on(torch.device("cuda"))

    assert compiles()
    assert not compiles("--compile", "auto")
    assert compiles("--compile", "auto", "--max_steps", "1000")


def test_a_speed_says_whether_layers_are_compiled(load, tmp_path):
    perf, memory = {"step_time_s": 0.1, "tokens_per_sec": 1000}, {"peak_allocated_gib": 2.0}
    (tmp_path / "results.json").write_text(json.dumps({"perf": perf, "memory": memory, "plan": "none"}))
    run = load("gpu_day.claims").Outcome(0, "", tmp_path)
    for compiled, words in (("regions", ", layers compiled"), ("none", "")):
        (tmp_path / "config.json").write_text(json.dumps({"compile": compiled}))
        found = f"1,000 tokens/s, 100.0 ms a step under none{words}, 2 GiB"
        assert load("gpu_day.judges").speed(run) == (None, found)


def test_the_profile_is_of_one_model(load, monkeypatch, tmp_path):
    mfu, calls = load("mfu"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mfu, "measure", lambda works, folder: calls.append(([work.model for work in works], folder)))
    step = load("gpu_day.first_minutes").first_minutes(load("gpu_day.machine").size_of("gpu"))
    profile = next(claim.runs[0] for claim in step.claims if claim.text == "compiled: milliseconds by class")
    script, *flags = shlex.split(profile.words.format(folder=tmp_path))
    assert BENCHMARKS.parent / script == Path(mfu.__file__)
    mfu.main(flags)
    assert calls == [(["GPT-2"], tmp_path)]


def test_a_profile_counts_as_far_as_it_went(load, tmp_path):
    kernels = {"products": 20.5, "attention": 5.5, "casts": 0.0, "others": 12.25}
    measured = {"step_s": 0.5, "peak_bytes": 2**30, "graphs": 0, "kernels_ms": kernels}
    row = {"units": 1000, "peak_s": 0.2, "measured": measured}
    rows = [
        {**row, "plan": "none"},
        {**row, "plan": "compiled", "measured": {**measured, "step_s": 0.25}},
        {"plan": "half", "refused": "no memory"},
    ]
    (tmp_path / "mfu-h100.json").write_text(json.dumps({"rows": rows}))
    judges, run = load("gpu_day.judges"), load("gpu_day.claims").Outcome(-9, "took longer", tmp_path)
    by_class = "a micro-batch: products 20.5 ms, attention 5.5 ms, casts 0.0 ms, others 12.2 ms"
    none = f"2,000 tokens/s, 40.0 % of the peak rate, 500.0 ms a step, 1 GiB; {by_class}"
    assert judges.profiled("none")(run) == (None, none)
    assert "500.0 ms a step, x2.000 of compiled, 1 GiB" in judges.profiled("none", "compiled")(run)[1]
    for plan, reason in (("half", "no memory"), ("a peer", "exit code -9: took longer")):
        with pytest.raises(RuntimeError, match=f"{plan}: {reason}"):
            judges.profiled(plan)(run)


def test_what_runs_read_is_prepared_without_a_device(load, monkeypatch):
    module, asked = load("gpu_day.first_minutes"), []
    monkeypatch.setattr(module, "load_rows", lambda args, **named: asked.append((named["vocab_size"], args.block_size)))
    day, size = load("gpu_day.__main__"), load("gpu_day.machine").size_of("cpu")
    module.prepare([make(size) for make in day.STEPS.values()])
    assert (512, 128) in asked


@pytest.fixture
def day(load, tmp_path):
    (tmp_path / "runs").mkdir()
    return load("gpu_day.day").Day(frozenset({"Triton"}), False, tmp_path / "runs", tmp_path / "results")


def test_what_a_machine_lacks_is_skipped_and_named(load, day):
    claims = load("gpu_day.claims")
    claim = claims.Claim(text="it", runs=(), judge=breaks_off, needs=frozenset({"Triton", "NCCL", "a card"}))
    assert [*day.verdicts_of(claims.Step("s", [claim]))] == [
        claims.Verdict("s", "it", "skipped", "needs NCCL and a card")
    ]


def test_speed_is_not_judged_where_there_is_no_clock(load, day):
    claims = load("gpu_day.claims")
    claim = claims.Claim(text="it", runs=(), judge=lambda: (False, "x9"), is_of_speed=True)
    (verdict,) = day.verdicts_of(claims.Step("s", [claim]))
    assert (verdict.verdict, verdict.found) == ("figure", "x9 (not judged: these times are not a GPU's)")
    day.has_clock = True
    assert [one.verdict for one in day.verdicts_of(claims.Step("s", [claim]))] == ["fails"]


def test_a_command_runs_once_after_the_one_it_follows(load, day):
    first = load("gpu_day.claims").Command(name="first", words=f'-c "{PROGRAM.format(code=3)}" {{folder}}')
    second = load("gpu_day.claims").Command(name="second", words=lambda run: f'-c "print({run.code} + 1)"', after=first)
    assert day.outcome(second).last_line == "4"
    assert (day.outcome(first).code, day.outcome(first).last_line) == (3, "trained")
    assert day.outcome(first) is day.outcome(first)
    assert day.outcome(first).folder == day.folder / "first"


def test_a_launch_is_killed_with_its_ranks_and_resumed(load, day, tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    words = f"{tmp_path / 'launcher.py'} {{folder}}"
    outcome = day.outcome(load("gpu_day.claims").Command(name="killed", words=words, is_killed=True))
    assert outcome.code == 0
    rank = int((outcome.folder / "rank").read_text())
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_ends_before_it_is_killed_says_so(load, day):
    command = load("gpu_day.claims").Command(name="short", words='-c "pass"', is_killed=True)
    with pytest.raises(RuntimeError, match="short could not be killed"):
        day.outcome(command)


def test_a_command_that_hangs_is_ended(load, day):
    words = '-c "import time; time.sleep(60)"'
    command = load("gpu_day.claims").Command(name="long", words=words, limit_s=0.2)
    outcome = day.outcome(command)
    with pytest.raises(RuntimeError, match=r"exit code -9: long took longer than 0\.2 s"):
        _ = outcome.results
    assert day.outcome(command) is outcome  # another claim on it does not wait again


def test_waits_are_counted_by_line_in_whole_steps_alone(load, monkeypatch):
    module = load("gpu_day.waits")
    modes, shown = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *others: shown.append(str(message)))
    waits = module.Waits()
    with warnings.catch_warnings():
        for step in range(1, 10):
            if step == module.LAST:
                warnings.warn("another", stacklevel=1)
            if module.FIRST < step <= module.LAST:  # others torch does not tell of
                warnings.warn(module.MESSAGE, stacklevel=1)
            waits.end_step("outer")
            waits.end_step("inner")
    (line,) = waits.lines
    assert line.startswith("test_gpu_day.py:")
    assert waits.lines[line] == module.LAST - module.FIRST
    assert (modes, shown, waits.num_steps) == (["warn", "default"], ["another"], 9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_day_at_a_small_size(tmp_path):
    words = ["--tiny", "--output_dir", str(tmp_path), "--runs_dir", str(tmp_path / "runs")]
    command, environment = ["bash", str(BENCHMARKS / "gpu_day.sh"), *words], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert {verdict for _, verdict, _ in verdicts(tmp_path)} == {"holds", "figure", "skipped"}
    assert [*(tmp_path / "rows").glob("*.json")]
