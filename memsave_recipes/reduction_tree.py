"""The tree in which the gradients of a global batch's micro-batches are added up, and its parts on the ranks.

NOTE [ the reduction tree ]
1. *Nodes.* A node is the range of the indices of its micro-batches. The root is ``range(count)``, the children of a
   node are its ``halves``. So the tree depends on the number of micro-batches alone.
2. *On ranks.* A rank has whole subtrees (``deal_subtrees``). All nodes of a level have equal lengths up to one. On 2^m
   ranks, each therefore has one subtree, a node of level m. On other numbers of ranks the longest nodes are dealt out
   first, and those that are too long for any rank are halved.
3. *Sums at once.* The subtrees of a rank are in order of falling length. A rank that adds up k micro-batches one by one
   in that order holds at most floor(log2(k)) + 1 sums, the latest gradient included.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

Subtrees = Sequence[Sequence[range]]
"""For every rank the nodes that it adds up by itself, in the order of its micro-batches."""
T = TypeVar("T")


def halves(node: range) -> tuple[range, range]:
    """The children of a node; the left one is longer by one if they differ."""
    middle = (node.start + node.stop + 1) // 2
    return range(node.start, middle), range(middle, node.stop)


@cache
def parent(node: range, count: int) -> range | None:
    """In the tree of ``count`` leaves; the root has none."""
    above = None
    below = range(count)
    while below != node:
        above = below
        left, right = halves(above)
        below = left if node.stop <= left.stop else right
    return above


@cache
def deal_subtrees(count: int, num_ranks: int) -> Subtrees:
    """The tree of ``count`` leaves in whole subtrees, of which no two on a rank have the same parent.

    The ranks' shares differ by at most one: rule 2 of NOTE [ the reduction tree ].
    """
    share, num_larger = divmod(count, num_ranks)
    missing = [share + (rank < num_larger) for rank in range(num_ranks)]
    dealt: list[list[range]] = [[] for _ in missing]
    level = [range(count)] if count else []
    while level:
        too_long = []
        for node in sorted(level, key=len, reverse=True):
            rank = max(range(num_ranks), key=lambda rank: (missing[rank] == len(node), missing[rank]))
            if missing[rank] < len(node):
                too_long.append(node)
            else:
                dealt[rank].append(node)
                missing[rank] -= len(node)
        level = [half for node in too_long for half in halves(node)]
    return dealt


def count_leaves(subtrees: Subtrees) -> int:
    """Of all ranks."""
    return sum(map(len, chain.from_iterable(subtrees)))


def join(sums: dict[range, T], node: range, value: T, count: int, add: Callable[[T, T], T]) -> None:
    """Take the sum over ``node`` into ``sums``, where both halves of a node become one.

    Args:
        count: leaves of the tree.
        add: a sum of ``sums`` and the one that joins it; it may change either.
    """
    while (above := parent(node, count)) is not None:
        left, right = halves(above)
        sibling = left if node == right else right
        if sibling not in sums:
            break
        node, value = above, add(sums.pop(sibling), value)
    sums[node] = value
