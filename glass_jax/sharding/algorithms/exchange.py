"""All-to-all, and the direct algorithms of a full mesh, where every rank has a link to every other."""

from __future__ import annotations

import numpy as np

from glass_jax.sharding import schedule
from glass_jax.sharding.schedule import Phase, Transfer


def pairwise(ranks: int, *, concurrent: bool = False) -> list[Phase]:
    """Exchanges chunks, chunk q of rank r for chunk r of rank q, in P - 1 steps: in step t with ranks r + t and r - t.

    ``concurrent`` takes all steps at once.
    """
    rank = np.arange(ranks)
    send = schedule.turning(rank + 1, ranks, step=1)
    recv = schedule.turning(rank - 1, ranks, step=-1)
    transfer = Transfer((rank + 1) % ranks, send, recv, turn=1)
    return [Phase((transfer,), ranks - 1, reads_start=True, concurrent=concurrent)] if ranks > 1 else []


def direct_gather(ranks: int) -> list[Phase]:
    """Gathers P chunks, chunk r of rank r: every rank sends its own to every other, all at once."""
    rank = np.arange(ranks)
    recv = schedule.turning(rank - 1, ranks, step=-1)
    transfer = Transfer((rank + 1) % ranks, schedule.fixed(ranks, rank), recv, turn=1)
    return [Phase((transfer,), ranks - 1, reads_start=True, concurrent=True)] if ranks > 1 else []


def bruck(ranks: int) -> list[Phase]:
    """Exchanges chunks in ceil(log2 P) steps, each moving about half of all chunks.

    Chunk d + r of rank r, to be moved by d places, moves by one power of two after the other, those of which d is made. At
    the end the chunk of rank s for rank r lies at 2 r - s of rank r. (Bruck et al. 1997.)
    """
    rank, phases, distance = np.arange(ranks), [], 1
    while distance < ranks:
        moves = np.flatnonzero(np.arange(ranks) & distance)
        send = schedule.turning(rank, ranks, offsets=moves)
        phases.append(Phase((Transfer((rank + distance) % ranks, send, send),)))
        distance *= 2
    return phases
