"""Halving and doubling for any number of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np

from glass_jax.sharding.algorithms import ring
from glass_jax.sharding.schedule import Chunks, Phase, Transfer, at, everywhere


def levels(ranks: int) -> tuple[int, ...]:
    """The levels of 2 in 2**floor(log2 P) ranks."""
    return (2,) * (ranks.bit_length() - 1) or (1,)


def folded(ranks: int) -> list[Phase]:
    """Gathers 2**floor(log2 P) chunks on every rank: doubling among as many ranks, each then passing all on to one
    other.

    With ``extra`` = P - 2**floor(log2 P), ranks 1, 3, .. 2 extra - 1 have no chunk and receive all from the rank
    before.
    """
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    members = np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, ranks)])
    phases = [_embedded(phase, members, ranks) for phase in ring.gather(levels(ranks))]
    if extra:
        dst = np.full(ranks, -1)
        dst[0 : 2 * extra : 2] = np.arange(1, 2 * extra, 2)
        whole = Chunks((everywhere(power, ranks),))
        phases.append(Phase((Transfer(dst, whole, whole),)))
    return phases


def _embedded(phase: Phase, members: np.ndarray, ranks: int) -> Phase:
    """The phase with member ``i`` played by rank ``members[i]`` of ``ranks``, the other ranks idle."""

    def spread(table: np.ndarray, rest: int) -> np.ndarray:
        wide = np.full(ranks, rest, np.int32)
        wide[members] = table
        return wide

    def chunks(of: Chunks) -> Chunks:
        return Chunks(tuple(dataclasses.replace(span, start=spread(span.start, 0)) for span in of.spans), of.order)

    transfers = tuple(
        Transfer(spread(members[transfer.dst], -1), chunks(transfer.send), chunks(transfer.recv))
        for transfer in phase.transfers
    )
    return dataclasses.replace(phase, transfers=transfers)


def bruck_gather(ranks: int) -> list[Phase]:
    """Gathers P chunks in ceil(log2 P) steps for any P; rank r has the chunk of rank r + j, modulo P, at place j.

    After a step a rank has twice as many chunks, its own and those that follow it around the circle. (Bruck et al.:
    Efficient algorithms for all-to-all communications in multiport message-passing systems, 1997.)
    """
    rank, phases, have = np.arange(ranks), [], 1
    while have < ranks:
        count = np.arange(min(have, ranks - have))
        send, recv = (Chunks((at(ranks, np.full(ranks, start), offsets=count),)) for start in (0, have))
        phases.append(Phase((Transfer((rank - have) % ranks, send, recv),)))
        have += len(count)
    return phases
