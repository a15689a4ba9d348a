"""Proof that a schedule computes its collective, by running it on symbols instead of numbers."""

from __future__ import annotations

import dataclasses

import numpy as np

from glass_jax import errors
from glass_jax.sharding.schedule import REDUCE, Phase, Schedule, Transfer

MAX_VALUES = 1 << 26  # ranks times chunks


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a proof found out besides that the schedule is right.

    Attributes:
      messages: number of messages that were followed.
      additions: the longest chain of additions that a contribution goes through: the error bound of a sum is this times
        the unit roundoff.
    """

    messages: int
    additions: int


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit integers that scatters them: splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """The symbol of chunk ``chunk`` of rank ``rank``'s input: a random 64-bit number."""
    return _mix(_mix(np.asarray(rank, np.uint64)) + np.asarray(chunk, np.uint64))


@dataclasses.dataclass
class _State:
    """Every chunk of every rank: which contributions it is the sum of, and added in which order.

    Attributes:
      total: ``[P, nchunks]`` uint64, the sum of the contributions' symbols, modulo 2**64. It is the expected one if
        every contribution is in it once and nothing else is; another multiset has the same sum with probability 2**-64.
      order: ``[P, nchunks]`` uint64, equal for two chunks only if their floating-point values are equal bit by bit: the
        hash of the tree of additions, in which a + b is b + a.
      depth: ``[P, nchunks]`` int32, additions on the longest path of that tree.
    """

    total: np.ndarray
    order: np.ndarray
    depth: np.ndarray

    def read(self, at: tuple) -> _State:
        return _State(self.total[at], self.order[at], self.depth[at])

    def write(self, at: tuple, message: _State, op: str) -> None:
        if op == REDUCE:
            low, high = np.minimum(self.order[at], message.order), np.maximum(self.order[at], message.order)
            message = _State(
                self.total[at] + message.total, _mix(_mix(low) + high), np.maximum(self.depth[at], message.depth) + 1
            )
        self.total[at], self.order[at], self.depth[at] = message.total, message.order, message.depth


def _initial(schedule: Schedule) -> _State:
    ranks = np.arange(schedule.ranks)[:, None]
    total = np.zeros((schedule.ranks, schedule.nchunks), np.uint64)
    placed = schedule.placed.indices(0)
    _check_chunks(schedule, placed, "the input")
    total[ranks, placed] = _weights(ranks, np.arange(placed.shape[1])[None, :])
    return _State(total, total.copy(), np.zeros(total.shape, np.int32))


def _expected(schedule: Schedule) -> np.ndarray:
    """The sum of symbols that each chunk of each rank's result must be: ``[P, result chunks]``."""
    ranks, count = schedule.ranks, schedule.result.count
    rank, chunk = np.arange(ranks)[:, None], np.arange(count)[None, :]
    per_rank = max(count // ranks, 1)
    everybody = np.arange(ranks)[:, None]
    match schedule.collective:
        case "all_reduce" | "reduce":
            return np.broadcast_to(_weights(everybody, chunk).sum(axis=0), (ranks, count))
        case "reduce_scatter":
            sums = _weights(everybody, np.arange(ranks * count)[None, :]).sum(axis=0)
            return sums.reshape(ranks, count)
        case "all_gather":
            return np.broadcast_to(_weights(chunk // per_rank, chunk % per_rank), (ranks, count))
        case "broadcast":
            return np.broadcast_to(_weights(np.full(1, schedule.root), chunk), (ranks, count))
        case "all_to_all":
            return _weights(chunk // per_rank, rank * per_rank + chunk % per_rank)
    raise errors.UnsupportedError(f"there is no proof of a {schedule.collective} schedule")


def _name(schedule: Schedule) -> str:
    return f"{schedule.collective} {schedule.algorithm} on {schedule.ranks} ranks"


def _check_chunks(schedule: Schedule, chunks: np.ndarray, what: str) -> None:
    if chunks.size and (chunks.min() < 0 or chunks.max() >= schedule.nchunks):
        raise errors.CollectiveError(
            f"{_name(schedule)}: {what} reaches from chunk {chunks.min()} to {chunks.max()}, "
            f"and there are {schedule.nchunks}"
        )


def _endpoints(schedule: Schedule, transfer: Transfer, t: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations of the messages of repeat ``t``, after the checks that a permutation needs."""
    dst = transfer.destinations(t)
    src = np.flatnonzero(dst >= 0)
    dst = dst[src]
    where = f"{_name(schedule)}, repeat {t}"
    if dst.size and dst.max() >= schedule.ranks:
        raise errors.CollectiveError(f"{where}: a message goes to rank {dst.max()}")
    twice = np.flatnonzero(np.bincount(dst, minlength=1) > 1)
    if twice.size:
        raise errors.CollectiveError(
            f"{where}: rank {twice[0]} is the destination of ranks {src[dst == twice[0]].tolist()}"
        )
    if transfer.send.count != transfer.recv.count:
        raise errors.CollectiveError(
            f"{where}: {transfer.send.count} chunks are sent and {transfer.recv.count} received"
        )
    if not transfer.recv.active(t)[dst].all():
        idle = dst[~transfer.recv.active(t)[dst]][0]
        raise errors.CollectiveError(f"{where}: rank {idle} is sent a message while it is idle")
    return src, dst


def _run_phase(schedule: Schedule, phase: Phase, state: _State) -> int:
    """Follows every message of a phase; returns how many there were."""
    start = _State(state.total.copy(), state.order.copy(), state.depth.copy()) if phase.reads_start else state
    followed = 0
    for t in range(phase.repeat):
        arrivals = []
        for transfer in phase.transfers:
            src, dst = _endpoints(schedule, transfer, t)
            sent, received = transfer.send.indices(t)[src], transfer.recv.indices(t)[dst]
            _check_chunks(schedule, sent, f"repeat {t}'s message")
            _check_chunks(schedule, received, f"repeat {t}'s message")
            message = start.read((src[:, None], sent))
            if (message.total == 0).any():
                rank, chunk = np.argwhere(message.total == 0)[0]
                raise errors.CollectiveError(
                    f"{_name(schedule)}, repeat {t}: rank {src[rank]} sends chunk {sent[rank, chunk]} before it has "
                    "arrived there"
                )
            arrivals.append(((dst[:, None], received), message, transfer.op))
            followed += len(src)
        for at, message, op in arrivals:
            state.write(at, message, op)
    return followed


def proof(schedule: Schedule) -> Proof:
    """Proves that a schedule computes its collective.

    Each rank's chunks are symbols, and every message is followed. At the end each rank's result must consist of exactly
    the contributions that the collective asks for, each once; where ranks must agree, they must have been added in the
    same order, so that the ranks end equal bit by bit. In between, no rank may be the destination of two ranks at once,
    and no chunk may be sent on before it has arrived.

    Args:
      schedule: of any collective but ``send_recv``, which has nothing to prove; up to 2**26 ranks x chunks.

    Returns:
      The number of messages, and the longest chain of additions.

    Raises:
      CollectiveError: the schedule is wrong; the message names the step and the ranks.
      UnsupportedError: the schedule is too large to follow.
    """
    if schedule.ranks * schedule.nchunks > MAX_VALUES:
        raise errors.UnsupportedError(
            f"{schedule.ranks} ranks x {schedule.nchunks} chunks are more than the {MAX_VALUES} values that a proof "
            "can follow: prove the same algorithm on fewer ranks"
        )
    state = _initial(schedule)
    followed = sum(_run_phase(schedule, phase, state) for phase in schedule.phases)
    result = state.read((np.arange(schedule.ranks)[:, None], schedule.result.indices(0)))
    wrong = result.total != _expected(schedule)
    if schedule.collective == "reduce":
        wrong[np.arange(schedule.ranks) != schedule.root] = False
    where = _name(schedule)
    if wrong.any():
        rank, chunk = np.argwhere(wrong)[0]
        raise errors.CollectiveError(
            f"{where}: chunk {chunk} of rank {rank}'s result does not have every contribution exactly once"
        )
    if schedule.collective == "all_reduce" and (result.order != result.order[0]).any():
        rank = np.argwhere(result.order != result.order[0])[0][0]
        raise errors.CollectiveError(f"{where}: ranks 0 and {rank} add in different orders, so their results differ")
    return Proof(followed, int(result.depth.max(initial=0)))
