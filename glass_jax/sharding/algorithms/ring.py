"""Gathering level by level: the ring, the ring of rings, and recursive doubling are one family.

Ranks are the cells of a grid with extents ``levels``, outermost first. Gathering takes place along one dimension of the
grid after the other, around a ring in each: first along the outermost, where a rank has only its own chunk to send,
last along the innermost, which carries most. One level is the plain ring; levels that follow the machine are the
hierarchical ring; levels of 2 are recursive doubling, whose ring of two is an exchange. (Thakur, Rabenseifner, Gropp:
Optimization of Collective Communication Operations in MPICH, 2005.)

A rank's chunk lies where all that a rank has gathered is always side by side: at the number whose digits are the rank's
coordinates in opposite order, which for levels of 2 is the bit-reversed rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from glass_jax.sharding.schedule import Chunks, Phase, Span, Transfer, at, everywhere


def positions(levels: Sequence[int]) -> np.ndarray:
    """Where the chunk of each rank lies: ``[P]``."""
    return np.arange(math.prod(levels)).reshape(tuple(levels)[::-1]).transpose().ravel()


def in_order(levels: Sequence[int]) -> Chunks:
    """All chunks, in the order of ranks."""
    spans = tuple(everywhere(extent, math.prod(levels)) for extent in reversed(levels))
    return Chunks(spans, tuple(range(len(levels)))[::-1])


def gather(levels: Sequence[int], *, direction: int = 1, part: tuple[Span, ...] = ()) -> list[Phase]:
    """Gathers the chunk at ``positions(levels)[r]`` of every rank r on every rank.

    Args:
      levels: extents of the grid of ranks, outermost first.
      direction: 1 sends to the next rank of each ring, -1 to the one before.
      part: if a chunk is cut further, into the grid of these spans, the parts of it that are meant.
    """
    ranks = math.prod(levels)
    rank, phases, outer, inner = np.arange(ranks), [], 1, ranks
    for number, extent in enumerate(levels):
        inner //= extent
        place = rank // inner % extent
        dst = rank + ((place + direction) % extent - place) * inner
        below = at(inner, positions(levels[number + 1 :])[rank % inner])
        ends = (
            Chunks((below, at(extent, start, step=-direction), everywhere(outer, ranks), *part))
            for start in (place, place - direction)
        )
        if extent > 1:
            phases.append(Phase((Transfer(dst, *ends),), extent - 1, along=1))
        outer *= extent
    return phases


def gather_both_ways(ranks: int) -> list[Phase]:
    """Two rings at once: each chunk is cut into two halves, of which one travels up and the other down."""
    halves = [(at(2, np.full(ranks, half)),) for half in (0, 1)]
    up, down = (gather((ranks,), direction=way, part=half) for way, half in zip((1, -1), halves, strict=True))
    return [
        dataclasses.replace(one, transfers=one.transfers + other.transfers) for one, other in zip(up, down, strict=True)
    ]


def chain(ranks: int, root: int, pieces: int) -> list[Phase]:
    """Broadcast along the ring from ``root``, the pieces one behind the other: P - 2 + pieces steps."""
    distance = (np.arange(ranks) - root) % ranks
    dst = np.where(distance < ranks - 1, (np.arange(ranks) + 1) % ranks, -1)
    send, recv = (Chunks((at(pieces, start, step=1, wraps=False),)) for start in (-distance, 1 - distance))
    return [Phase((Transfer(dst, send, recv),), ranks - 2 + pieces)] if ranks > 1 else []
