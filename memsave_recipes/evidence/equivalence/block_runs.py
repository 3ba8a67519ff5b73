"""Count how often the blocks of a plan run: a block that the plan keeps runs once, whatever its gradients say."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from torch import nn

from memsave_recipes.activations import block_names, find_bottlenecks, find_stacks
from memsave_recipes.activations.stacks import Block
from memsave_recipes.plans import Plan


@contextmanager
def count_block_runs(model: nn.Module, plan: Plan | None) -> Iterator[Counter[str]]:
    """How often the modules at the bottom of each block are called, in first runs and in repeated ones."""
    runs: Counter[str] = Counter()
    leaves = _leaves_of_blocks(model, plan) if plan else {}
    handles = [leaf.register_forward_pre_hook(_Count(runs, name)) for leaf, name in leaves.items()]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


class _Count:
    def __init__(self, runs: Counter[str], name: str) -> None:
        self.runs = runs
        self.name = name

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self.runs[self.name] += 1


def _leaves_of_blocks(model: nn.Module, plan: Plan) -> dict[nn.Module, str]:
    """The block of every module without children; a module that several blocks share belongs to none."""
    owners: dict[nn.Module, set[str]] = {}
    for name, parts in _blocks_of(model, plan).items():
        for leaf in (module for part in parts for module in part.modules() if not any(module.children())):
            owners.setdefault(leaf, set()).add(name)
    return {leaf: names.pop() for leaf, names in owners.items() if len(names) == 1}


def _blocks_of(model: nn.Module, plan: Plan) -> dict[str, Iterable[nn.Module]]:
    """The modules of each block. The plan was made for the model, or for one that it wraps."""
    for module in model.modules():
        with suppress(AttributeError):  # most blocks bear the name of the one module that they are
            return {name: (module.get_submodule(name),) for name in plan.blocks}
        for stacks in (find_stacks(module), find_bottlenecks(module)):
            if tuple(name for names in block_names(stacks) for name in names) == plan.blocks:
                blocks = [block for stack in stacks for block in stack.blocks]
                return {b.name: b.modules if isinstance(b, Block) else (b.module,) for b in blocks}
    return {}
