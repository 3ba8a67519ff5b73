"""Blocks measured group by group cost what they cost in one step."""

import pytest
from workloads import workload_of

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs.block_costs import measure, measure_in_groups
from memsave_recipes.core.plans.simulate import simulate


@pytest.mark.parametrize("name", ["gpt2", pytest.param("densenet_small", marks=pytest.mark.slow)])
def test_peaks_are_those_of_blocks_measured_together(make_case, name):
    case = make_case(name)
    if name == "gpt2":
        case.model.config.use_cache = False
    case.batch = case.batch.repeat(4, *[1] * (case.batch.ndim - 1))
    workload = workload_of(case.model, lambda model, batch: model(batch)[0].square().mean(), case.batch)
    plans = [plan_blocks(case.model, strategy) for strategy in ("none", "selective")]
    together = measure(workload, plans).chain()
    for num_groups in (2, len(together.decided)):
        alone = measure_in_groups(workload, plans, num_groups).chain()
        assert [block.name for block in alone.blocks] == [block.name for block in together.blocks]
        for strategy in ("none", "full", "segments:2", "selective"):
            plan = plan_blocks(case.model, strategy)
            expected = simulate(together, plan).peak_bytes - together.resident_bytes
            found = simulate(alone, plan).peak_bytes - alone.resident_bytes
            assert expected <= found <= 1.02 * expected, strategy
