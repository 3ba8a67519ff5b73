"""Both towers of a model of images and text have blocks, also one without transformers' layers."""

import pytest
from zoo.image_text import IMAGE_TEXT, ImageText
from zoo.steps import differences, plain_steps, step

from memsave_recipes.core.planner import make_plan

TOWERS = {
    "mllama": ("vision_model", ["transformer.layers.0", "transformer.layers.3", "global_transformer.layers.1"]),
    "florence2": ("vision_tower", ["convs.0", "blocks.0.0", "convs.3", "blocks.3.0"]),
    "llava": ("vision_tower", ["encoder.layers.0", "encoder.layers.3"]),
}


@pytest.mark.parametrize("model_type", TOWERS)
def test_the_blocks_of_a_tower_are_in_the_plan_as_they_run_and_save_memory(model_type):
    case, (tower, blocks) = ImageText(IMAGE_TEXT, model_type), TOWERS[model_type]
    plan = make_plan(case.build(), case.batch(), strategy="full", loss_fn=lambda output: output.loss)
    order = [plan.blocks.index(f"model.{tower}.{block}") for block in blocks]
    assert order == sorted(order)
    assert order[-1] < next(index for index, name in enumerate(plan.blocks) if "language_model" in name)
    (plain,) = plain_steps(case)
    planned = step(case, *case.seeds, plan)
    assert not differences(plain, planned)
    assert planned.saved_bytes < 0.25 * plain.saved_bytes
