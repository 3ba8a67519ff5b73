"""The tree in which the gradients of a global batch's micro-batches are added up, and its parts on the ranks.

NOTE [ the reduction tree ]
1. *Nodes.* A node is the range of the indices of its micro-batches. The root is ``range(count)``, the children of a
   node are its ``halves``. So the tree depends on the number of micro-batches alone.
2. *On ranks.* A rank has whole subtrees (``deal_subtrees``): the tree is cut into as many nodes as there are ranks, and
   the longest goes to the rank with the fewest micro-batches, or is halved if it is too long for it. All nodes of a
   level have equal lengths up to one. On 2^m ranks, each therefore has one subtree, a node of level m. On others a rank
   has at most ``MAX_SUBTREES``. Where even shares of micro-batches need more of them, the largest share is as much
   larger as it takes.
3. *Sums at once.* The subtrees of a rank are in order of falling length. A rank that adds up k micro-batches one by one
   in that order holds at most floor(log2(k)) + 1 sums, the latest gradient included.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import chain
from math import ceil
from typing import TypeVar

Subtrees = Sequence[Sequence[range]]
"""For every rank the nodes that it adds up by itself, in the order of its micro-batches."""
MAX_SUBTREES = 3
"""Of a rank. With s of them a step sends (s + 1) / 2 times the bytes of an all-reduce."""
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

    Rule 2 of NOTE [ the reduction tree ].
    """
    room = ceil(count / num_ranks)
    while (dealt := _deal_with_room(room, count, num_ranks)) is None:
        room += 1
    return dealt


def _deal_with_room(room: int, count: int, num_ranks: int) -> Subtrees | None:
    """With at most ``room`` leaves on a rank; ``None`` where that is too few."""
    dealt: list[list[range]] = [[] for _ in range(num_ranks)]
    ranks = [(0, rank) for rank in range(num_ranks)]  # a heap: those that may have more, fewest leaves first
    nodes = _cut(count, num_ranks)
    while nodes:
        node = nodes.pop(0)
        if ranks and ranks[0][0] + len(node) <= room:
            num_leaves, rank = heappop(ranks)
            dealt[rank].append(node)
            if len(dealt[rank]) < MAX_SUBTREES:
                heappush(ranks, (num_leaves + len(node), rank))
        elif len(node) > 1:
            _insert_halves(nodes, node)
        else:
            return None
    return dealt


def _cut(count: int, num_nodes: int) -> list[range]:
    """The tree of ``count`` leaves in ``num_nodes`` nodes, or in its leaves if these are fewer; longest first."""
    nodes = [range(count)] if count else []
    while len(nodes) < min(count, num_nodes):
        _insert_halves(nodes, nodes.pop(0))
    return nodes


def _insert_halves(nodes: list[range], node: range) -> None:
    """In the order of ``nodes``: longest first, then by index."""
    for half in halves(node):
        insort(nodes, half, key=lambda node: (-len(node), node.start))


def count_leaves(subtrees: Subtrees) -> int:
    """Of all ranks."""
    return sum(map(len, chain.from_iterable(subtrees)))


def largest_share(subtrees: Subtrees) -> int:
    """The leaves of the rank with most."""
    return max(sum(map(len, own)) for own in subtrees)


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
