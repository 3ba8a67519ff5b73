"""Starting loads what the flags ask for: counted in imported modules, which no other work on the machine changes."""

import pytest

ASKED_FOR = {"bitsandbytes", "evaluate", "matplotlib", "networkx", "peft", "trackio", "triton", "wandb"}
OF_IMAGES = {"kornia", "sklearn"}
HEAVY = {"accelerate", "datasets", "numpy", "pandas", "rich", "scipy", "sympy", "torch", "transformers", "yaml"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "never"),
    [
        ("`import memsave_recipes`", 100, HEAVY | OF_IMAGES),
        ("`memsave --help`", 220, HEAVY | OF_IMAGES),
        ("`memsave plan --help`", 220, HEAVY | OF_IMAGES),
        ("language modeling, first step", 4000, OF_IMAGES),
        pytest.param("text classification, first step", 4000, OF_IMAGES, marks=pytest.mark.slow),
        pytest.param("image classification, first step", 4900, set(), marks=pytest.mark.slow),
        pytest.param("`recipes/language_modeling.py --help`", 3950, OF_IMAGES, marks=pytest.mark.slow),
    ],
)
def test_a_start_loads_what_its_flags_ask_for(load, name, most, never):
    starting = load("starting")
    loaded = starting.begin(starting.STARTS[name])["modules"]
    assert "torch._inductor.compile_fx" not in loaded
    assert not (ASKED_FOR | never) & {module.partition(".")[0] for module in loaded}
    assert len(loaded) <= most


@pytest.mark.slow
def test_what_a_flag_asks_for_is_counted(load):
    pytest.importorskip("peft")
    starting = load("starting")
    asks = starting.step_of("image_classification", "--model", "vgg_small", "--lr_scheduler_type", "cosine")
    assert "peft" in starting.begin(asks)["modules"]
