"""A pytree of tensors and plain values comes back exactly, and a file that holds something else is refused."""

import pytest
import torch
from trials.run import digest

from memsave_recipes.training.checkpoints import state as state_module
from memsave_recipes.training.checkpoints.state import RankState, Unreadable, read_pytree


def test_what_has_no_place_in_a_checkpoint_is_named():
    with pytest.raises(TypeError, match=r"record\.when is a set"):
        RankState.of({"record": {"when": {1}}})
    with pytest.raises(TypeError, match="no key of a checkpoint"):
        RankState.of({"record": {(1, 2): 3}})


def test_a_pytree_comes_back_exactly_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "PART_BYTES", 50)
    shared = torch.arange(20.0)
    content = {
        "state": {0: {"step": torch.tensor(3.0), "average": shared}, 1: {"table": shared, "bytes": torch.zeros(0)}},
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-3 / 3, "fused": True, "foreach": None, "params": [0, 1]}],
        "strided": torch.arange(12).view(3, 4).t(),
    }
    RankState.of({"optimizer": content}).write(tmp_path)
    assert len(list(tmp_path.glob("optimizer-*.safetensors"))) == 4
    back = read_pytree(tmp_path, "optimizer")
    assert digest(back) == digest(content)
    assert back["groups"] == content["groups"]
    assert back["strided"].stride() == content["strided"].stride()
    assert list(back["state"]) == [0, 1]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"parts": 0}', '{"parts": 0, "tree": {"tensor": "x"}}', "[" * 100_000]
)
def test_files_that_hold_something_else_are_unreadable(tmp_path, content):
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(Unreadable, match=r"model\.json cannot be read"):
        read_pytree(tmp_path, "model")
