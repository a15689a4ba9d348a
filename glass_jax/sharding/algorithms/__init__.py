"""The algorithms, and the collectives that follow from them.

An algorithm says how chunks spread: from their owners to every rank (gather), or from a root. The collectives then
follow: a reduction is the spreading run backwards, an all-reduce is both, one after the other.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from glass_jax import errors
from glass_jax.sharding import schedule
from glass_jax.sharding.algorithms import doubling, exchange, ring, trees
from glass_jax.sharding.schedule import Chunks, Schedule, at, everywhere

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
    collective: str,
    algorithm: str,
    ranks: int,
    *,
    root: int = 0,
    levels: tuple[int, ...] | None = None,
    pieces: int | None = None,
) -> Schedule:
    """The schedule of a collective.

    Args:
      collective: a key of ``ALGORITHMS`` except ``"send_recv"``, which has no schedule beyond its permutation; or
        ``"reduce"``, which a broadcast's algorithms do.
      algorithm: one of that collective's.
      ranks: P, at least 1.
      root: where a broadcast starts and a reduce ends.
      levels: extents of the machine, outermost first, of product P, for ``"hierarchical"``; by default nodes of 8
        ranks, or as nearly square as P allows.
      pieces: pieces that a ``"ring"`` broadcast and ``"double_tree"`` pass an array on in; by default 8.

    Raises:
      CollectiveError: no such collective or algorithm, an argument out of range or without effect, or an algorithm that
        is not defined for P.
    """
    rooted = algorithm in ("tree", "double_tree") or collective in ("broadcast", "reduce")
    unused = {
        "root": root != 0 and not rooted,
        "levels": levels is not None and algorithm != "hierarchical",
        "pieces": pieces is not None and algorithm != "double_tree" and not (rooted and algorithm == "ring"),
    }
    if any(unused.values()):
        names = ", ".join(name for name, value in unused.items() if value)
        raise errors.CollectiveError(f"{collective} by {algorithm!r} does not use {names}; leave it out")
    _check(collective, algorithm, ranks, root, levels)
    if collective == "all_to_all":
        return _all_to_all(algorithm, ranks)
    if rooted:
        return _rooted(collective, algorithm, ranks, root, PIECES if pieces is None else pieces)
    return _gathering(collective, algorithm, ranks, _levels(ranks, levels) if algorithm == "hierarchical" else None)


def _check(collective: str, algorithm: str, ranks: int, root: int, levels: tuple[int, ...] | None) -> None:
    known = ALGORITHMS | {"reduce": ALGORITHMS["broadcast"]}
    if collective not in known or collective == "send_recv":
        raise errors.CollectiveError(f"there are no schedules of {collective!r}, but of {', '.join(sorted(known))}")
    if algorithm not in known[collective]:
        raise errors.CollectiveError(
            f"{collective} has no algorithm {algorithm!r}; it has {', '.join(known[collective])}"
        )
    integers = isinstance(ranks, int | np.integer) and isinstance(root, int | np.integer)
    if not integers or ranks < 1 or not 0 <= root < ranks:
        raise errors.CollectiveError(f"{ranks=}, {root=}: need integers, ranks >= 1 and 0 <= root < ranks")
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
    nchunks, back = ranks, None
    match algorithm:
        case "ring":
            phases, back = ring.gather((ranks,)), ring.gather((ranks,), direction=-1)
        case "two_way_ring":
            phases, nchunks = ring.gather_both_ways(ranks), 2 * ranks
        case "hierarchical":
            phases, back = ring.gather(levels), ring.gather(levels, direction=-1)
        case "halving_doubling":
            phases, levels = doubling.folded(ranks), doubling.levels(ranks)
            nchunks = math.prod(levels)
        case "bruck":
            phases = doubling.bruck_gather(ranks)
        case "mesh":
            phases = exchange.direct_gather(ranks)
    backwards = schedule.reverse(phases if back is None else back)  # opposite direction: the same links both times
    own, everything = _held(algorithm, ranks, levels)
    if collective == "all_gather":
        return Schedule(collective, algorithm, ranks, nchunks, tuple(phases), own, everything)
    if collective == "reduce_scatter":
        return Schedule(collective, algorithm, ranks, nchunks, backwards, everything, own)
    if algorithm != "bruck":
        everything = Chunks((everywhere(nchunks, ranks),))  # whichever order, as long as it is the same on all ranks
    return Schedule(collective, algorithm, ranks, nchunks, backwards + tuple(phases), everything, everything)


def _held(algorithm: str, ranks: int, levels: tuple[int, ...] | None) -> tuple[Chunks, Chunks]:
    """A rank's own chunks, and every rank's in order, where a gathering algorithm has them."""
    rank = np.arange(ranks)
    match algorithm:
        case "hierarchical" | "halving_doubling":
            return Chunks((at(ranks, np.resize(ring.positions(levels), ranks)),)), ring.in_order(levels)
        case "two_way_ring":
            halves = everywhere(2, ranks)
            return Chunks((at(ranks, rank), halves)), Chunks((everywhere(ranks, ranks), halves))
        case "bruck":
            return Chunks((at(ranks, 0 * rank),)), Chunks((at(ranks, -rank, offsets=rank),))
    return Chunks((at(ranks, rank),)), Chunks((everywhere(ranks, ranks),))


def _rooted(collective: str, algorithm: str, ranks: int, root: int, pieces: int) -> Schedule:
    """Broadcast, reduce and all-reduce of an algorithm that spreads from a root."""
    if pieces < 1:
        raise errors.CollectiveError(f"{pieces=} must be at least 1")
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
    whole = Chunks((everywhere(nchunks, ranks),))
    return Schedule(collective, algorithm, ranks, nchunks, parts[collective], whole, whole, root)


def _all_to_all(algorithm: str, ranks: int) -> Schedule:
    if algorithm == "bruck":
        phases, rank, places = exchange.bruck(ranks), np.arange(ranks), np.arange(ranks)
        placed, result = Chunks((at(ranks, rank, offsets=-places),)), Chunks((at(ranks, -rank, offsets=places),))
    else:
        phases = exchange.pairwise(ranks, concurrent=algorithm == "mesh")
        placed = result = Chunks((everywhere(ranks, ranks),))
    return Schedule("all_to_all", algorithm, ranks, ranks, tuple(phases), placed, result)
