"""Numbers beside the weights that a measured forward changes are put back."""

from collections import defaultdict, deque

import torch
from torch import nn

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs.preserve_state import MAX_ELEMENTS, preserve_attributes


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.name, self.seen = 3, "a", {1}
        self.metrics = {"train": defaultdict(list, loss=[1.0]), "last": deque([1, 2], maxlen=2)}
        self.matrix, self.losses = torch.zeros(3, 3), []
        self.kept = self.metrics["train"]


def change(owner):
    owner.count += 1
    owner.name, owner.added = "b", True
    owner.seen.add(2)
    owner.metrics["train"]["loss"].append(2.0)
    owner.metrics["train"]["accuracy"].append(0.5)
    owner.metrics["last"].append(3)
    owner.metrics["new"] = {}
    owner.losses.append(torch.ones(()))
    owner.matrix += 1


def test_attributes_are_put_back_in_place():
    owner = Owner()
    metrics, losses, seen = owner.metrics, owner.losses, owner.seen
    with preserve_attributes([owner]):
        change(owner)
    assert (owner.count, owner.name, owner.seen, owner.losses) == (3, "a", {1}, [])
    assert owner.metrics == {"train": {"loss": [1.0]}, "last": deque([1, 2])}
    assert not hasattr(owner, "added")
    assert torch.equal(owner.matrix, torch.zeros(3, 3))
    assert metrics is owner.metrics
    assert owner.kept is metrics["train"]
    assert losses is owner.losses
    assert seen is owner.seen


def test_data_is_left_alone():
    owner = Owner()
    owner.data = [0] * (MAX_ELEMENTS + 1)
    with preserve_attributes([owner]):
        owner.data.append(1)
    assert owner.data[-1] == 1


def test_an_attribute_is_replaced_for_a_while():
    owner = Owner()
    with replaced(owner, "forward", print), replaced(owner, "count", 4):
        assert owner.forward is print
        assert owner.count == 4
    assert "forward" not in vars(owner)
    assert owner.count == 3
