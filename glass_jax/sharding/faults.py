"""Faults of a simulated machine: what they do to messages, and who waits for whom when a rank is dead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from glass_jax import errors
from glass_jax.sharding import checks
from glass_jax.sharding.schedule import Schedule

_SHOWN = 6  # waiting ranks that a message lists


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """Messages from rank ``src`` to rank ``dst`` take ``factor`` times as long to transfer."""

    src: int
    dst: int
    factor: float

    def __post_init__(self):
        if not self.factor > 1:
            raise errors.CollectiveError(f"{self} slows nothing down: the factor must be above 1")


@dataclasses.dataclass(frozen=True)
class LossyLink:
    """Messages from rank ``src`` to ``dst`` are lost with probability ``loss``, and sent again until they arrive."""

    src: int
    dst: int
    loss: float

    def __post_init__(self):
        if not 0 < self.loss < 1:
            raise errors.CollectiveError(f"{self}: the loss must be above 0 and below 1; for 1 use DeadRank")


@dataclasses.dataclass(frozen=True)
class DeadRank:
    """Rank ``rank`` neither sends nor receives."""

    rank: int


Fault = SlowLink | LossyLink | DeadRank


class Faults:
    """The faults of a machine of ``ranks`` ranks.

    Attributes:
      dead: ranks that are dead, in order.
    """

    def __init__(self, faults: Sequence[Fault], ranks: int):
        for fault in faults:
            if not isinstance(fault, Fault):
                raise errors.CollectiveError(f"{fault!r} is no fault; there are SlowLink, LossyLink and DeadRank")
            named = [fault.rank] if isinstance(fault, DeadRank) else [fault.src, fault.dst]
            named = [checks.integer(rank, f"{fault}: a rank") for rank in named]
            if not all(0 <= rank < ranks for rank in named) or (len(named) == 2 and named[0] == named[1]):
                raise errors.CollectiveError(f"{fault}: there is no such link or rank; the ranks are 0 to {ranks - 1}")
        self._slow = [fault for fault in faults if isinstance(fault, SlowLink)]
        self._lossy = [fault for fault in faults if isinstance(fault, LossyLink)]
        self.dead = tuple(sorted({fault.rank for fault in faults if isinstance(fault, DeadRank)}))
        self._generator = np.random.default_rng(0)  # the same run loses the same messages

    def factors(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """How many times as long each message ``src[i] -> dst[i]`` transfers."""
        factors = np.ones(len(src))
        for fault in self._slow:
            factors[(src == fault.src) & (dst == fault.dst)] *= fault.factor
        return factors

    def retries(self, src: np.ndarray, dst: np.ndarray, times: int | np.ndarray) -> np.ndarray:
        """How often the ``times`` messages on each link ``src[i] -> dst[i]`` have to be sent again: int64."""
        retries, times = np.zeros(len(src), np.int64), np.broadcast_to(times, len(src))
        for fault in self._lossy:
            for i in np.flatnonzero((src == fault.src) & (dst == fault.dst) & (times > 0)):
                retries[i] += self._generator.negative_binomial(times[i], 1 - fault.loss)
        return retries


@dataclasses.dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
      rank: the one that waits.
      step: the step, from 0, in which it does.
      source: the rank whose message does not come.
      chunks: the chunks in it.
      dead: the dead rank because of which it does not come.
    """

    rank: int
    step: int
    source: int
    chunks: tuple[int, ...]
    dead: int

    def __str__(self) -> str:
        first, last = min(self.chunks), max(self.chunks)
        chunks = f"chunk {first}" if first == last else f"{len(self.chunks)} chunks from {first} to {last}"
        why = "which sends nothing" if self.source == self.dead else "which waits itself"
        return f"rank {self.rank} waits in step {self.step} for {chunks} from rank {self.source}, {why}"


def waits(schedule: Schedule, dead: Sequence[int]) -> list[Wait]:
    """Who waits for what, for ever, if the ``dead`` ranks send nothing.

    A rank that waits sends nothing from then on either, so the others come to wait for it in turn. Ranks that are not
    in the list finish.

    Args:
      schedule: of the collective.
      dead: ranks.

    Returns:
      One wait for each rank that does not finish, in the order in which they stop.
    """
    cause = np.full(schedule.ranks, -1)  # the dead rank because of which a rank has stopped
    cause[list(dead)] = list(dead)
    found: list[Wait] = []
    step = 0
    for phase in schedule.phases:
        for t in range(phase.repeat):
            before = cause.copy()  # what a step brings was sent before anybody stopped in it
            for transfer in phase.transfers:
                dst = transfer.destinations(t)
                stopped = np.flatnonzero((dst >= 0) & (before >= 0))
                stopped = stopped[cause[dst[stopped]] < 0]
                received = transfer.recv.indices(t)[dst[stopped]] if len(stopped) else ()
                for src, chunks in zip(stopped, received, strict=True):
                    cause[dst[src]] = before[src]
                    found.append(Wait(int(dst[src]), step, int(src), tuple(map(int, chunks)), int(before[src])))
            step += not phase.concurrent
            if (cause >= 0).all():
                return found
        step += phase.concurrent
    return found


def peer_failure(
    schedule: Schedule | None, dead: Sequence[int], ranks: Sequence[int]
) -> errors.PeerFailureError | None:
    """The error of a collective some of whose ranks are dead; None if the others finish all the same.

    Args:
      schedule: of the collective; None for one of JAX's own.
      dead: which of its ranks are dead.
      ranks: the numbers that its ranks go by outside.
    """
    names = [int(rank) for rank in ranks]
    found = [] if schedule is None else waits(schedule, dead)
    dead = [names[rank] for rank in dead]
    found = [
        dataclasses.replace(wait, rank=names[wait.rank], source=names[wait.source], dead=names[wait.dead])
        for wait in found
    ]
    who = f"rank {dead[0]} is dead" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} are dead"
    if schedule is None:
        return errors.PeerFailureError(
            f"{who}, so a collective of JAX among {len(names)} ranks cannot finish; which rank waits for which it "
            "does not tell, the algorithms of glass_jax.sharding do",
            dead=tuple(dead),
        )
    if not found:
        return None
    finished = schedule.ranks - len(dead) - len(found)
    rest = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return errors.PeerFailureError(
        f"{who}, so {schedule.collective} ({schedule.algorithm}, {schedule.ranks} ranks, {schedule.steps} steps) "
        f"cannot finish: {'; '.join(map(str, found[:_SHOWN]))}{rest}. {finished} ranks finish. Restart without the "
        "dead rank, or from a checkpoint",
        dead=tuple(dead),
        waits=tuple(found),
    )
