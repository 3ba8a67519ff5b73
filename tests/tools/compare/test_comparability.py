"""What is not the same between runs is named, and nothing else is."""

from collections.abc import Callable

import pytest

from memsave_recipes.tools.compare import Run, compare, config_differences, differing_traits, trait_differences
from memsave_recipes.tools.pages.comparison import warnings

Make = Callable[..., Run]


@pytest.mark.parametrize(
    ("trait", "results", "config"),
    [
        ("model", {}, {"config_overrides": "n_layer=2"}),
        ("data", {}, {"train_file": "other.txt"}),
        ("data", {}, {"augmentation": "none"}),
        ("input size", {}, {"image_size": 224}),
        ("global batch", {"global_batch_size": 128}, {}),
        ("dtype", {}, {"dtype": "bfloat16"}),
        ("mixed precision", {}, {"environment": {"mixed_precision": "bf16"}}),
        ("device", {"device": "NVIDIA H200"}, {}),
        ("device", {}, {"environment": {"device": "NVIDIA H200"}}),
        ("torch", {}, {"environment": {"versions": {"torch": "2.14"}}}),
        ("steps", {"steps": 20}, {}),
        ("seed", {}, {"seed": 1}),
    ],
)
def test_whatever_changes_the_figures_by_itself_is_named(
    trait: str, results: dict, config: dict, make_run: Make
) -> None:
    usual = {
        "config_overrides": "n_layer=4",
        "train_file": "some.txt",
        "augmentation": "article",
        "image_size": 32,
        "dtype": "float32",
        "seed": 0,
        "environment": {"mixed_precision": "no", "device": "AMD EPYC", "versions": {"torch": "2.13"}},
    }
    plain = make_run("plain", steps=10, config=usual)
    other = make_run("other", **{"steps": 10, **results}, config={**usual, **config})
    assert differing_traits(other, plain) == (trait,)
    assert [difference.name for difference in trait_differences([plain, other])] == [trait]


def test_plan_and_geometry_are_the_method_not_a_difference(make_run: Make, checkpointed: Make) -> None:
    config = {"activation_checkpointing": "full", "output_dir": "b", "learning_rate": 0.1}
    other = checkpointed(num_processes=4, micro_batch_size=1, accumulation_steps=16, config=config)
    assert differing_traits(other, make_run("plain")) == ()


def test_what_one_run_did_not_record_is_no_difference(make_run: Make) -> None:
    assert differing_traits(make_run("new", device="H200", config={"seed": 0}), make_run("old")) == ()


def test_a_warning_names_the_trait_its_values_and_the_runs(make_run: Make) -> None:
    runs = [make_run(f"run{n}", device="A100" if n < 6 else "H200") for n in range(7)]
    (line,) = warnings(compare(runs).rows)
    assert (
        line == "not comparable: runs of vgg11 differ in device: A100 (run0, run1, run2, run3 and 2 more), H200 (run6)"
    )


def test_config_differences_are_those_that_differ_and_were_chosen(make_run: Make) -> None:
    first = {"seed": 0, "output_dir": "a", "report_to": ["wandb"], "lr": 0.1, "environment": {"git_commit": "x"}}
    second = {**first, "output_dir": "b", "lr": 0.2, "environment": {"git_commit": "y"}}
    found = config_differences([make_run(name, config=c) for name, c in (("a", first), ("b", second), ("c", second))])
    assert {difference.name: difference.values for difference in found} == {
        "lr": {"0.1": (0,), "0.2": (1, 2)},
        "environment.git_commit": {"x": (0,), "y": (1, 2)},
    }


def test_the_plan_itself_is_no_flag(make_run: Make) -> None:
    configs = ({"plan": {"strategy": "none"}, "geometry": {"micro_batch_size": 1}}, {"plan": {"strategy": "full"}})
    assert config_differences([make_run(name, config=c) for name, c in zip("ab", configs, strict=True)]) == ()
