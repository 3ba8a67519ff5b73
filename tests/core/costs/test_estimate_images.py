"""A step of images and text, estimated: grids, masks and ids keep their values, pixels have none."""

from functools import partial
from itertools import product

import pytest
import torch
from samples import sample
from torch import nn
from workloads import estimate_on_target, measured_peak_bytes, workload_of
from zoo.architectures import mean_loss
from zoo.image_text import IMAGE_TEXT, RULES, ImageText, in_patches

from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import StaticMemory
from memsave_recipes.core.planner.budget import forecast, least_memory
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.plans.plan import as_they_run
from memsave_recipes.core.plans.simulate import simulate

TYPES = (
    *("qwen2_5_vl", "smolvlm", "llava", "gemma3", "qwen3_vl", "internvl", "mistral3", "paligemma"),
    *("idefics3", "aya_vision", "glm4v", "got_ocr2"),
)
CASES = list(product(TYPES, ("all", "frozen tower"), ("images as large as ever", "smaller ones")))
FEW = [("qwen2_5_vl", "frozen tower", "smaller ones"), ("smolvlm", "all", "images as large as ever")]
NO_STATE = StaticMemory(state_bytes=0)


def step_of(model, batch):
    return workload_of(model, lambda model, batch: mean_loss(model(**batch)), batch)


def freeze_tower(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vis" not in name)


def with_smaller_images(model_type):
    """Of 4 x 12 patches each, not 8 x 8, where the batch says how many there are; else of 32 pixels, not 64."""
    case = ImageText(IMAGE_TEXT, model_type)
    batch = case.batch()
    if "image_grid_thw" not in batch:
        tower = RULES.changes.get(model_type, {}).get("vision_config", {})
        case = ImageText(IMAGE_TEXT, model_type, {"vision_config": {**tower, "image_size": 32}})
        return case, case.batch()
    grid = in_patches(case.build().config, height=4, width=12)
    ids = torch.cat([batch["input_ids"][:, :13], batch["input_ids"][:, 17:]], dim=1)  # 12 tokens an image, not 16
    texts = {name: torch.ones_like(ids) for name in ("attention_mask",) if name in batch}
    kinds = {"mm_token_type_ids": (ids == 95).long()} if "mm_token_type_ids" in batch else {}
    return case, {**batch, **grid, **texts, **kinds, "input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("model_type", "trained", "images"), sample(FEW, CASES))
def test_estimated_peaks_are_those_that_are_measured(model_type, trained, images):
    case = ImageText(IMAGE_TEXT, model_type)
    case, batch = with_smaller_images(model_type) if images == "smaller ones" else (case, case.batch())
    model, fake = case.build(), fake_model(case.build)
    for one in (model, fake) if trained == "frozen tower" else ():
        freeze_tower(one)
    measured, estimated = step_of(model, batch), step_of(fake, fake_batch(fake, batch, keep_integers=True))
    plans = [plan_for(strategy, estimated.stacks) for strategy in ("none", "selective")]
    found = estimate_on_target(estimated, plans, find_target("cpu"))
    chain, stacks = found.chain(), as_they_run(measured.stacks, found.running)
    least_bytes = least_memory(found, NO_STATE).peak.total_bytes
    budget = forecast(found, int(1.1 * least_bytes), NO_STATE).plan
    for plan in (plan_for("none", stacks), plan_for("full", stacks), budget):
        predicted = simulate(chain, plan).peak_bytes
        needed = measured_peak_bytes(measured, plan) + measured.resident_bytes
        assert 1 <= predicted / needed <= 1.02, (plan.strategy, predicted, needed)


class Pads(nn.Module):
    """Takes images that are not padding, parts by a grid, and states by a mask."""

    def __init__(self, reads_pixels=False):
        super().__init__()
        self.linear, self.reads_pixels = nn.Linear(4, 4), reads_pixels

    def forward(self, pixels, grid, ids):
        is_image = (pixels == 0).sum(dim=-1) != pixels.shape[-1]
        pixels = pixels[is_image]
        assert len(pixels) == 6
        if self.reads_pixels:
            assert pixels.sum() > 0
        lengths = grid.prod(dim=-1)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        within = torch.arange(len(starts)) - starts
        parts = self.linear(pixels[within + starts]).split(lengths.tolist())
        states = torch.cat([part.mean(0, keepdim=True) for part in parts])
        text = torch.zeros(*ids.shape, 4)
        text[ids == 7] = states
        return text.square().sum()


BATCH = {
    "pixels": torch.linspace(-1, 1, 24).view(6, 4),
    "grid": torch.tensor([[1, 2], [2, 2]]),
    "ids": torch.tensor([[1, 7], [7, 2]]),
}


def estimated(batch, **options):
    model = fake_model(partial(Pads, **options))
    batch = fake_batch(model, batch, keep_integers=True)
    workload = workload_of(model, lambda model, batch: model(**batch), batch, stacks=[["linear"]])
    return estimate_on_target(workload, [plan_for("none", workload.stacks)], find_target("cpu"))


def test_what_integers_say_is_run_as_it_is():
    model = Pads()
    workload = workload_of(model, lambda model, batch: model(**batch), BATCH, stacks=[["linear"]])
    plan = plan_for("none", workload.stacks)
    predicted = simulate(estimated(BATCH).chain(), plan).peak_bytes
    assert predicted == pytest.approx(measured_peak_bytes(workload, plan) + workload.resident_bytes, abs=64)


@pytest.mark.parametrize(
    ("batch", "options"),
    [(BATCH, {"reads_pixels": True}), ({name: one.to("meta") for name, one in BATCH.items()}, {})],
    ids=["values of pixels", "a grid without values"],
)
def test_what_has_no_values_is_refused_in_one_line(batch, options):
    with pytest.raises(InputError, match="a step of Pads cannot be estimated") as refused:
        estimated(batch, **options)
    assert "\n" not in str(refused.value)
