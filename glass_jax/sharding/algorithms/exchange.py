"""All-to-all, and the direct algorithms of a full mesh, where every rank has a link to every other."""

from __future__ import annotations

import numpy as np

from glass_jax.sharding.schedule import Chunks, Phase, Transfer, at


def pairwise(ranks: int, *, concurrent: bool = False) -> list[Phase]:
    """Exchanges chunks, chunk q of rank r for chunk r of rank q, in P - 1 steps: in step t with ranks r + t and r - t.

    ``concurrent`` takes all steps at once.
    """
    rank = np.arange(ranks)
    send, recv = Chunks((at(ranks, rank + 1, step=1),)), Chunks((at(ranks, rank - 1, step=-1),))
    transfer = Transfer((rank + 1) % ranks, send, recv, turn=1)
    return [Phase((transfer,), ranks - 1, reads_start=True, concurrent=concurrent)] if ranks > 1 else []


def direct_gather(ranks: int) -> list[Phase]:
    """Gathers P chunks, chunk r of rank r: every rank sends its own to every other, all at once."""
    rank = np.arange(ranks)
    send, recv = Chunks((at(ranks, rank),)), Chunks((at(ranks, rank - 1, step=-1),))
    transfer = Transfer((rank + 1) % ranks, send, recv, turn=1)
    return [Phase((transfer,), ranks - 1, reads_start=True, concurrent=True, along=0)] if ranks > 1 else []


def bruck(ranks: int) -> list[Phase]:
    """Exchanges chunks in ceil(log2 P) steps, each moving about half of all chunks.

    At place j of rank r lies the chunk for rank r - j, modulo P. It moves down by one power of two after the other,
    those of which j is made; at the end place j holds the chunk that rank r + j had for rank r. (Bruck et al. 1997.)
    """
    rank, phases, distance = np.arange(ranks), [], 1
    while distance < ranks:
        moved = Chunks((at(ranks, np.zeros(ranks), offsets=np.flatnonzero(np.arange(ranks) & distance)),))
        phases.append(Phase((Transfer((rank - distance) % ranks, moved, moved),)))
        distance *= 2
    return phases
