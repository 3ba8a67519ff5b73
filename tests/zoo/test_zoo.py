"""Under every plan, every architecture of the zoo trains as without one; those of the table are refused by name."""

import pytest
from samples import sample
from zoo.architectures import ARCHITECTURES
from zoo.steps import IDENTICAL, STRATEGIES, plain_steps, verdict

ONE_BLOCK = "a whole number from 1 to 1"
NOT_IN_ORDER = "does not run its"
REFUSED = {  # under full, segments:2, selective and budget:bitwise; a refusal by what it says
    "hrm_text: layers in cycles": (IDENTICAL, IDENTICAL, IDENTICAL, NOT_IN_ORDER),
    "albert: one layer for all": (IDENTICAL, ONE_BLOCK, IDENTICAL, NOT_IN_ORDER),
}
SAMPLE = {
    *("mixtral: mixture of experts", "albert: one layer for all", "t5"),
    *("resnet: BatchNorm", "poolformer: lists of lists"),
}


@pytest.mark.parametrize("name", sample(SAMPLE, ARCHITECTURES))
def test_plain_or_refused_by_name(name):
    architecture = ARCHITECTURES[name]
    plain = plain_steps(architecture)
    verdicts = [verdict(architecture, strategy, plain) for strategy in STRATEGIES]
    assert list(map(shorten, verdicts)) == list(REFUSED.get(name, [IDENTICAL] * len(STRATEGIES)))


def shorten(said: str) -> str:
    """A refusal as the table has it."""
    refusals = (ONE_BLOCK, NOT_IN_ORDER) if said.startswith("refused: ") else ()
    return next((words for words in refusals if words in said), said)
