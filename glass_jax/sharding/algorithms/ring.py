"""Gathering level by level: the ring, the ring of rings, and recursive doubling are one family.

Ranks are the cells of a grid with extents ``levels``, outermost first. Gathering takes place along one dimension of the grid
after the other, around a ring in each: first along the outermost, where a rank has only its own chunk to send, last along the
innermost, which carries most. One level is the plain ring; levels that follow the machine are the hierarchical ring; levels of 2
are recursive doubling, whose ring of two is an exchange. (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication
Operations in MPICH, 2005.)

A rank's chunk lies where all that a rank has gathered is always side by side: at the number whose digits are the rank's
coordinates in opposite order. For levels of 2 that is the bit-reversed rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from glass_jax.sharding import schedule
from glass_jax.sharding.schedule import Phase, Transfer


def coordinates(levels: Sequence[int]) -> np.ndarray:
    """Each rank's coordinates in the grid of ``levels``: ``[len(levels), P]``."""
    return np.stack(np.unravel_index(np.arange(math.prod(levels)), tuple(levels)))


def positions(levels: Sequence[int]) -> np.ndarray:
    """Where each rank's chunk lies in the buffer: ``[P]``."""
    return np.ravel_multi_index(tuple(coordinates(levels)[::-1]), tuple(levels)[::-1])


def gather(levels: Sequence[int], *, direction: int = 1, base: int = 0) -> list[Phase]:
    """Gathers the chunks at ``base + positions(levels)`` on every rank.

    Args:
      levels: extents of the grid, outermost first.
      direction: 1 sends to the next rank of each ring, -1 to the one before.
      base: the first chunk of the buffer that is used.
    """
    coords, phases, width = coordinates(levels), [], 1
    for level, extent in enumerate(levels):
        if extent == 1:
            continue
        neighbour = coords.copy()
        neighbour[level] = (coords[level] + direction) % extent
        inner = coords[level + 1 :], tuple(levels[level + 1 :])
        below = np.ravel_multi_index(tuple(inner[0][::-1]), inner[1][::-1]) if inner[1] else np.zeros_like(coords[0])
        place = base + below * (width * extent)
        send = schedule.turning(coords[level], extent, step=-direction, base=place, width=width)
        recv = schedule.turning(coords[level] - direction, extent, step=-direction, base=place, width=width)
        phases.append(Phase((Transfer(np.ravel_multi_index(tuple(neighbour), tuple(levels)), send, recv),), extent - 1))
        width *= extent
    return phases


def gather_both_ways(ranks: int) -> list[Phase]:
    """Two rings at once: one half of each rank's data travels up, at chunk r, the other down, at chunk P + r."""
    up, down = gather((ranks,), direction=1), gather((ranks,), direction=-1, base=ranks)
    return [Phase(one.transfers + other.transfers, one.repeat) for one, other in zip(up, down, strict=True)]


def chain(ranks: int, root: int, pieces: int) -> list[Phase]:
    """Broadcast along the ring from ``root``, the pieces one behind the other: P - 2 + pieces steps."""
    distance = (np.arange(ranks) - root) % ranks
    dst = np.where(distance < ranks - 1, (np.arange(ranks) + 1) % ranks, -1)
    send = schedule.turning(-distance, pieces, step=1, wraps=False)
    recv = schedule.turning(1 - distance, pieces, step=1, wraps=False)
    return [Phase((Transfer(dst, send, recv),), ranks - 2 + pieces)] if ranks > 1 else []
