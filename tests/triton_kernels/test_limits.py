"""Each figure of the page is a limit: a layer with more of one fails."""

import json
from copy import deepcopy
from functools import reduce
from operator import getitem

import pytest
from triton_kernels import limits
from triton_kernels.limits import check_code, check_layers
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
def test_more_than_on_the_page_fails(figure, message, monkeypatch):
    monkeypatch.setattr(limits, "is_triton_of_page", lambda: True)
    rows = deepcopy(LIMITS)
    check_layers(rows, LIMITS)
    *where, name = figure
    reduce(getitem, where, rows[0])[name] += 8
    with pytest.raises(AssertionError, match=message):
        check_layers(rows, LIMITS)


def test_another_triton_may_take_more_registers_and_spill_no_more(monkeypatch):
    monkeypatch.setattr(limits, "is_triton_of_page", lambda: False)
    of_page, found = LIMITS[0]["machine_code"], deepcopy(LIMITS[0]["machine_code"])
    found["sm_80"]["pointwise"]["registers"] += 8
    check_code(found, of_page)
    found["sm_80"]["pointwise"]["spilled_bytes"] += 8
    with pytest.raises(AssertionError, match="spills"):
        check_code(found, of_page)
