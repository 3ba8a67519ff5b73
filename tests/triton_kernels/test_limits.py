"""Each figure of the page is a limit: a layer with more of one fails."""

import json
from copy import deepcopy
from functools import reduce
from operator import getitem

import pytest
from triton_kernels.limits import check_layers
from triton_kernels.page import RESULTS

LIMITS = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]["GPT-2"]


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (("forward", "read"), "forward of GPT2Block: .* bytes an element"),
        (("backward", "classes", "reduction", "kernels"), "kernels are reduction"),
        (("backward", "library_calls"), "calls of libraries"),
        (("graphs", "forward"), "graphs"),
        (("saved",), "saved"),
        (("machine_code", "sm_90", "persistent_reduction", "registers"), "persistent_reduction on sm_90"),
        (("machine_code", "sm_80", "pointwise", "spilled_bytes"), "pointwise spills on sm_80"),
    ],
)
def test_more_than_on_the_page_fails(figure, message):
    rows = deepcopy(LIMITS)
    check_layers(rows, LIMITS)
    *where, name = figure
    reduce(getitem, where, rows[0])[name] += 8
    with pytest.raises(AssertionError, match=message):
        check_layers(rows, LIMITS)
