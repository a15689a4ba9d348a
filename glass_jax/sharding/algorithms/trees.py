"""Trees: few steps, for small arrays; in pieces and two at a time, also for large ones."""

from __future__ import annotations

import numpy as np

from glass_jax.sharding.schedule import Chunks, Phase, Transfer, at, everywhere


def binomial(ranks: int, root: int = 0) -> list[Phase]:
    """Broadcasts the whole buffer, one chunk, from ``root``: ceil(log2 P) steps, each doubling the ranks that have it.

    The first message goes furthest, so that the last and most numerous ones go to neighbours.
    """
    relative = (np.arange(ranks) - root) % ranks
    whole = Chunks((everywhere(1, ranks),))
    phases, distance = [], 1 << max(ranks - 1, 0).bit_length()
    while (distance := distance // 2) >= 1:
        sends = (relative % (2 * distance) == 0) & (relative + distance < ranks)
        dst = np.where(sends, (np.arange(ranks) + distance) % ranks, -1)
        phases.append(Phase((Transfer(dst, whole, whole),)))
    return phases


def _parents(ranks: int) -> np.ndarray:
    """The parent of each node of a binary tree over 0 .. P - 1 with 0 at the top (parent -1) and the odd numbers as
    leaves.

    A node's height is its number of trailing zeros; node 0 hangs above the topmost of the others. (Sanders, Speck,
    Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.)
    """
    parents = np.full(ranks, -1, np.int64)
    for node in range(1, ranks):
        low = node & -node
        parent = (node & ~low) | (low << 1)  # the node in the middle of the next larger interval
        parents[node] = parent if parent < ranks else node & ~low
    return parents


def _depths(parents: np.ndarray) -> np.ndarray:
    depths = np.full(len(parents), -1)
    depths[0] = 0
    while (depths < 0).any():
        known = depths >= 0
        reached = ~known & known[parents]
        depths[reached] = depths[parents[reached]] + 1
    return depths


def _children(parents: np.ndarray) -> list[np.ndarray]:
    """The edges of a binary tree as two partial permutations: each node's first child, and its second; -1: none."""
    first, second = (np.full(len(parents), -1) for _ in range(2))
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if first[parent] < 0:
            first[parent] = node
        else:
            second[parent] = node
    return [first, second]


def double_tree(ranks: int, root: int, pieces: int) -> list[Phase]:
    """Broadcasts from ``root`` down two binary trees at once, half of the buffer down each, in ``pieces`` pieces a
    half.

    The second tree is the first with its ranks shifted by one, so that a rank that passes on in one tree is a leaf of
    the other and every link is busy in both directions. A rank passes a piece on to both children in one step.
    """
    parents = _parents(ranks)
    depths = _depths(parents)
    transfers = []
    for tree in range(2):
        shift = _shift(ranks, root, tree)
        half = at(2, np.full(ranks, tree))
        for child in _children(parents):
            dst = np.full(ranks, -1)
            dst[shift] = np.where(child >= 0, shift[child], -1)
            depth = np.empty(ranks, np.int64)
            depth[shift] = depths
            send, recv = (Chunks((half, at(pieces, start, step=1, wraps=False))) for start in (-depth, 1 - depth))
            transfers.append(Transfer(dst, send, recv))
    transfers = tuple(transfer for transfer in transfers if (transfer.dst >= 0).any())
    return [Phase(transfers, int(depths.max()) - 1 + pieces)] if transfers else []


def _shift(ranks: int, root: int, tree: int) -> np.ndarray:
    """The rank at each node of a tree: node 0 is the root in both; in the second the others move up by one place."""
    others = np.roll(np.arange(1, ranks), -tree)
    return (np.concatenate([[0], others]) + root) % ranks
