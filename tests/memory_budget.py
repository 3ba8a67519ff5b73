"""A device that is full, for the time being."""

import weakref
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_WORDS = "CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has a total capacity of 39.38 GiB."


class Budget(TorchDispatchMode):
    """No more bytes than these may be alive at once of what is made inside."""

    def __init__(self, num_bytes):
        super().__init__()
        self.left = num_bytes
        self.watched = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        there = {storage.data_ptr() for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage.data_ptr() not in there:
                self.take(storage)
        return result

    def take(self, storage):
        address, size = storage.data_ptr(), storage.nbytes()
        if address and address not in self.watched:
            self.left -= size
            self.watched[address] = weakref.ref(storage, partial(self.give_back, address, size))
            if self.left < 0:
                raise torch.OutOfMemoryError(CUDA_WORDS)

    def give_back(self, address, size, _):
        self.left += size
        del self.watched[address]


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
