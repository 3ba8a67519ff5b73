"""Under every plan, every architecture of the zoo trains as without one, or is refused by name.

A row that is neither is a mistake of ours, so no row of the table may say so.
"""

import pytest
from samples import sample
from zoo.architectures import ARCHITECTURES
from zoo.steps import IDENTICAL, STRATEGIES, plain_steps, verdict

OK = IDENTICAL
ONE_BLOCK = "a whole number from 1 to 1"
NOT_IN_ORDER = "does not run its"
EXPECTED = {  # a refusal by what it says
    # name: (full, segments:2, selective, budget:bitwise)
    "gpt2": (OK, OK, OK, OK),
    "llama": (OK, OK, OK, OK),
    "bloom: ALiBi": (OK, OK, OK, OK),
    "falcon: attention beside the MLP": (OK, OK, OK, OK),
    "opt: LayerDrop": (OK, OK, OK, OK),
    "mixtral: mixture of experts": (OK, OK, OK, OK),
    "gpt_oss: experts, attention sinks": (OK, OK, OK, OK),
    "mamba: state space": (OK, OK, OK, OK),
    "rwkv: recurrent": (OK, OK, OK, OK),
    "falcon_h1: attention and state space": (OK, OK, OK, OK),
    "recurrent_gemma: hybrid": (OK, OK, OK, OK),
    "qwen3_next: linear attention, experts": (OK, OK, OK, OK),
    "zamba2: shared layers": (OK, OK, OK, OK),
    "hrm_text: layers in cycles": (OK, OK, OK, NOT_IN_ORDER),
    "inkling2_text: reads earlier states": (OK, OK, OK, OK),
    "gemma3: text alone": (OK, OK, OK, OK),
    "bert": (OK, OK, OK, OK),
    "modernbert": (OK, OK, OK, OK),
    "albert: one layer for all": (OK, ONE_BLOCK, OK, NOT_IN_ORDER),
    "deberta-v2: relative positions": (OK, OK, OK, OK),
    "mpnet: layers called by keyword": (OK, OK, OK, OK),
    "t5": (OK, OK, OK, OK),
    "bart: LayerDrop": (OK, OK, OK, OK),
    "m2m_100: LayerDrop": (OK, OK, OK, OK),
    "funnel: shortens the sequence": (OK, OK, OK, OK),
    "xlnet: two streams": (OK, OK, OK, OK),
    "vit": (OK, OK, OK, OK),
    "resnet: BatchNorm": (OK, OK, OK, OK),
    "mobilevit: BatchNorm": (OK, OK, OK, OK),
    "swin: windows": (OK, OK, OK, OK),
    "poolformer: lists of lists": (OK, OK, OK, OK),
    "pvt: lists of lists": (OK, OK, OK, OK),
    "beit: reads single layers": (OK, OK, OK, OK),
    "upernet: U-shaped": (OK, OK, OK, OK),
    "dpt: reads single layers": (OK, OK, OK, OK),
    "glpn: lists of lists": (OK, OK, OK, OK),
    "llava: an image and text": (OK, OK, OK, OK),
    "wav2vec2: LayerDrop": (OK, OK, OK, OK),
    "whisper": (OK, OK, OK, OK),
    "videomae: films": (OK, OK, OK, OK),
}
SAMPLE = {
    *("gpt2", "mixtral: mixture of experts", "gemma3: text alone", "albert: one layer for all", "t5"),
    *("resnet: BatchNorm", "swin: windows", "poolformer: lists of lists"),
}


def test_every_architecture_has_its_row():
    assert EXPECTED.keys() == ARCHITECTURES.keys()
    assert EXPECTED.keys() > SAMPLE


@pytest.mark.parametrize("name", sample(ARCHITECTURES, SAMPLE))
def test_plain_or_refused_by_name(name):
    architecture = ARCHITECTURES[name]
    plain = plain_steps(architecture)
    verdicts = [verdict(architecture, strategy, plain) for strategy in STRATEGIES]
    assert list(map(shorten, verdicts)) == list(EXPECTED[name])


def shorten(said: str) -> str:
    """A refusal as the table has it."""
    refusals = (ONE_BLOCK, NOT_IN_ORDER) if said.startswith("refused: ") else ()
    return next((words for words in refusals if words in said), said)
