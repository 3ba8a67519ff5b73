"""On a device of 20 MiB, which only a stand-in has: what does not fit says so, and what is chosen for it fits.

STANDIN_GIB=0.02, set by ``make test-standin``.
"""

import pytest
import torch

from memsave_recipes.run.failures import OUT_OF_MEMORY, run_recipe

MIB = 2**20
TOTAL = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not 0 < TOTAL < 64 * MIB, reason="needs a device with less than 64 MiB")
RECIPE = "language_modeling"
LAYERS = "num_hidden_layers=8,num_attention_heads=2,num_key_value_heads=1,hidden_size=64,intermediate_size=256"
LAYERS += ",vocab_size=512"
LARGE = ["--model_type", "llama", "--config_overrides", LAYERS, "--block_size", "256"]
LARGE += ["--global_batch_size", "16", "--max_steps", "3", "--logging_steps", "1"]


def test_a_run_that_does_not_fit_ends_with_its_page(train, capsys):
    with pytest.raises(SystemExit, match=str(OUT_OF_MEMORY)):
        run_recipe(lambda: train(*LARGE, "--micro_batch_size", "16"))
    page = capsys.readouterr().err
    assert "out of memory in step 1 on rank 0 of 1" in page
    assert "what filled it, as far as it had come:" in page


def test_a_plan_for_the_device_fits(train):
    results = train(*LARGE, "--activation_checkpointing", "budget", "--micro_batch_size", "auto")
    memory = results["memory"]
    assert memory["prediction_error_pct"] >= 0
    assert memory["peak_allocated_gib"] * 2**30 <= TOTAL
