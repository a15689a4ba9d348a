"""The algorithms, and the collectives that follow from them.

An algorithm says how chunks spread: from their owners to every rank (gather), or from a root. The collectives are then a
matter of composition: a reduction is the spreading run backwards, an all-reduce is both, one after the other.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from glass_jax import errors
from glass_jax.sharding import schedule
from glass_jax.sharding.algorithms import doubling, exchange, ring, trees
from glass_jax.sharding.schedule import Chunks, Phase, Schedule

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "two_way_ring", "hierarchical", "halving_doubling", "bruck", "tree", "double_tree", "mesh"),
    "reduce_scatter": ("ring", "two_way_ring", "hierarchical", "halving_doubling", "bruck", "mesh"),
    "all_gather": ("ring", "two_way_ring", "hierarchical", "halving_doubling", "bruck", "mesh"),
    "broadcast": ("ring", "tree", "double_tree"),
    "all_to_all": ("bruck", "pairwise", "mesh"),
    "send_recv": ("direct",),
}
PIECES = 8  # that a chain or a tree passes an array on in
NODE = 8  # ranks in a node, where nothing else is said


@functools.lru_cache(maxsize=256)
def build(
    collective: str, algorithm: str, ranks: int, *, root: int = 0, levels: tuple[int, ...] | None = None, pieces: int = PIECES
) -> Schedule:
    """The schedule of a collective.

    Args:
      collective: a key of ``ALGORITHMS`` except ``"send_recv"``, which has no schedule beyond its permutation; or
        ``"reduce"``, which a broadcast's algorithms do.
      algorithm: one of that collective's.
      ranks: P, at least 1.
      root: where a broadcast starts and a reduce ends.
      levels: extents of the machine, outermost first, of product P, for ``"hierarchical"``; by default nodes of 8 ranks, or as
        nearly square as P allows.
      pieces: pieces that ``"ring"`` broadcast and ``"double_tree"`` pass an array on in.

    Raises:
      CollectiveError: no such collective or algorithm, an argument out of range, or an algorithm that is not defined for P.
    """
    _check(collective, algorithm, ranks, root, levels, pieces)
    if collective == "all_to_all":
        return _all_to_all(algorithm, ranks)
    if algorithm == "hierarchical":
        levels = _levels(ranks, levels)
    elif levels is not None:
        raise errors.CollectiveError(f"{algorithm!r} does not use levels={levels}; 'hierarchical' does")
    if algorithm in ("tree", "double_tree") or collective in ("broadcast", "reduce"):
        return _rooted(collective, algorithm, ranks, root, pieces)
    return _gathering(collective, algorithm, ranks, levels)


def _check(
    collective: str, algorithm: str, ranks: int, root: int, levels: tuple[int, ...] | None, pieces: int
) -> None:
    known = ALGORITHMS | {"reduce": ALGORITHMS["broadcast"]}
    if collective not in known or collective == "send_recv":
        raise errors.CollectiveError(f"there are no schedules of {collective!r}, but of {', '.join(sorted(known))}")
    if algorithm not in known[collective]:
        raise errors.CollectiveError(f"{collective} has no algorithm {algorithm!r}; it has {', '.join(known[collective])}")
    if ranks < 1 or not 0 <= root < ranks or pieces < 1:
        raise errors.CollectiveError(f"{ranks=}, {root=}, {pieces=}: need ranks >= 1, 0 <= root < ranks, pieces >= 1")
    if not defined(collective, algorithm, ranks) and levels is None:
        remedy = {
            "halving_doubling": "only for powers of two; 'bruck' takes as few steps with any number of ranks",
            "hierarchical": "a prime number, which is no product of levels; use 'ring'",
        }
        raise errors.CollectiveError(
            f"{collective} by {algorithm!r} is not defined for {ranks} ranks, {remedy[algorithm]}"
        )


def defined(collective: str, algorithm: str, ranks: int) -> bool:
    """Whether an algorithm of a collective is defined for this number of ranks."""
    if algorithm == "halving_doubling" and collective != "all_reduce":  # all_reduce folds the other ranks
        return ranks & (ranks - 1) == 0
    return algorithm != "hierarchical" or ranks == 1 or _inner(ranks) > 1


def _inner(ranks: int) -> int:
    """Ranks in a node, if nothing is said: 8, or the largest divisor up to the square root."""
    if ranks % NODE == 0 and ranks > NODE:
        return NODE
    return max(d for d in range(1, math.isqrt(ranks) + 1) if ranks % d == 0)


def _levels(ranks: int, levels: tuple[int, ...] | None) -> tuple[int, ...]:
    """The levels of a hierarchical algorithm, checked."""
    levels = (ranks // _inner(ranks), _inner(ranks)) if levels is None else levels
    if min(levels, default=0) < 1 or math.prod(levels) != ranks:
        raise errors.CollectiveError(f"{levels=} have the product {math.prod(levels)} and must have {ranks}, the ranks")
    return levels


def _gathering(collective: str, algorithm: str, ranks: int, levels: tuple[int, ...] | None) -> Schedule:
    """All-gather, reduce-scatter and all-reduce of an algorithm that gathers."""
    own, order, nchunks = np.arange(ranks), np.arange(ranks), ranks
    back: list[Phase] | None = None
    match algorithm:
        case "ring":
            phases, back = ring.gather((ranks,)), ring.gather((ranks,), direction=-1)
        case "two_way_ring":
            phases, nchunks = ring.gather_both_ways(ranks), 2 * ranks
            order = np.stack([order, order + ranks], axis=1).ravel()
        case "hierarchical":
            phases, back = ring.gather(levels), ring.gather(levels, direction=-1)
            own = order = ring.positions(levels)
        case "halving_doubling" if collective == "all_reduce":
            phases, nchunks = doubling.folded(ranks), 1 << (ranks.bit_length() - 1)
        case "halving_doubling":
            levels = (2,) * (ranks.bit_length() - 1) or (1,)
            phases, own = ring.gather(levels), ring.positions(levels)
            order = own
        case "bruck":
            phases = doubling.bruck_gather(ranks)
        case "mesh":
            phases = exchange.direct_gather(ranks)
    backwards = schedule.reverse(phases if back is None else back)  # opposite direction: the same links both times
    if collective == "all_reduce":
        whole = schedule.fixed(ranks, width=nchunks)
        return Schedule(collective, algorithm, ranks, nchunks, backwards + tuple(phases), whole, whole)
    everything = _ordered(ranks, order)
    mine = schedule.turning(own, nchunks, offsets=np.arange(0, nchunks, ranks))
    if collective == "all_gather":
        return Schedule(collective, algorithm, ranks, nchunks, tuple(phases), placed=mine, result=everything)
    return Schedule(collective, algorithm, ranks, nchunks, backwards, placed=everything, result=mine)


def _ordered(ranks: int, order: np.ndarray) -> Chunks:
    """All chunks of the buffer, in the given order."""
    if np.array_equal(order, np.arange(len(order))):
        return schedule.fixed(ranks, width=len(order))
    return schedule.turning(np.zeros(ranks), len(order), offsets=order)


def _rooted(collective: str, algorithm: str, ranks: int, root: int, pieces: int) -> Schedule:
    """Broadcast, reduce and all-reduce of an algorithm that spreads from a root."""
    nchunks = 1
    match algorithm:
        case "tree":
            phases = trees.binomial(ranks, root)
        case "double_tree":
            phases, nchunks = trees.double_tree(ranks, root, pieces), 2 * pieces
        case "ring":
            phases, nchunks = ring.chain(ranks, root, pieces), pieces
    parts = {
        "broadcast": tuple(phases),
        "reduce": schedule.reverse(phases),
        "all_reduce": schedule.reverse(phases) + tuple(phases),
    }
    whole = schedule.fixed(ranks, width=nchunks)
    return Schedule(collective, algorithm, ranks, nchunks, parts[collective], whole, whole, root)


def _all_to_all(algorithm: str, ranks: int) -> Schedule:
    whole = schedule.fixed(ranks, width=ranks)
    match algorithm:
        case "bruck":
            result = schedule.turning(2 * np.arange(ranks), ranks, offsets=-np.arange(ranks))
            return Schedule("all_to_all", algorithm, ranks, ranks, tuple(exchange.bruck(ranks)), whole, result)
        case "pairwise" | "mesh":
            phases = exchange.pairwise(ranks, concurrent=algorithm == "mesh")
            return Schedule("all_to_all", algorithm, ranks, ranks, tuple(phases), whole, whole)
