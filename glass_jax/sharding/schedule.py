"""Collectives as data: per step, who sends which chunks to whom, and what the receiver does with them.

A rank's buffer is cut into ``nchunks`` equal chunks. A :class:`Schedule` is a sequence of phases, a :class:`Phase` a
step that is repeated, a :class:`Transfer` one message a rank in each repeat. Everything that knows about a collective
reads this description: the program that runs it, the proof that it is right, its cost, its picture. It is a few arrays
of one integer a rank, also for thousands of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from glass_jax import errors

COPY, REDUCE = "copy", "reduce"
Op = Literal["copy", "reduce"]


def _table(values: Sequence[int] | np.ndarray | int, ranks: int) -> np.ndarray:
    """One read-only int32 a rank."""
    table = np.broadcast_to(np.asarray(values, np.int32), (ranks,)).copy()
    table.flags.writeable = False
    return table


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Which places along one dimension of the grid of chunks each rank touches in repeat ``t`` of a phase.

    Rank ``r`` touches places ``(start[r] + step * t + offsets[j]) mod extent``, for each ``j`` in turn.

    Attributes:
      extent: of the dimension.
      start: ``[P]`` int32.
      step: how far ``start`` moves in a repeat.
      offsets: ``[n]`` int32, the same for all ranks.
      wraps: if False, a rank whose ``start + step * t`` lies outside of ``0 .. extent - 1`` is idle in repeat ``t``: a
        pipeline that fills or drains. Then ``step`` is 1 or -1 and ``offsets`` is ``[0]``.
    """

    extent: int
    start: np.ndarray
    step: int = 0
    offsets: np.ndarray = dataclasses.field(default_factory=lambda: _table(0, 1))
    wraps: bool = True


def at(extent: int, start: np.ndarray, *, step: int = 0, offsets: Sequence[int] = (0,), wraps: bool = True) -> Span:
    """One place along a dimension, or several in a fixed pattern, see :class:`Span`."""
    return Span(extent, _table(start, len(start)), step, _table(offsets, len(offsets)), wraps)


def everywhere(extent: int, ranks: int) -> Span:
    """All places along a dimension, in order."""
    return Span(extent, _table(0, ranks), 0, _table(np.arange(extent), extent))


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """Which chunks of its buffer each rank touches in repeat ``t`` of a phase: a box in a grid, or a pattern along a
    line.

    Attributes:
      spans: one for each dimension of the grid that the chunks are numbered in, the slowest to vary first.
      order: the order in which the dimensions of the box are read; None: as they are.
    """

    spans: tuple[Span, ...]
    order: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Chunks that a rank touches in one repeat."""
        return math.prod(len(span.offsets) for span in self.spans)

    def indices(self, t: int) -> np.ndarray:
        """The chunks that each rank touches in repeat ``t``, in order: int64 ``[P, count]``."""
        index = np.zeros((len(self.spans[0].start), 1), np.int64)
        for span in self.spans:
            places = (span.start[:, None] + span.step * t + span.offsets) % span.extent
            index = (index[:, :, None] * span.extent + places[:, None, :]).reshape(len(index), -1)
        if self.order is not None:
            box = index.reshape(-1, *(len(span.offsets) for span in self.spans))
            index = box.transpose(0, *(dim + 1 for dim in self.order)).reshape(len(index), -1)
        return index

    def window(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The first and the last repeat in which each rank takes part, int64 ``[P]``; None if all do in all repeats."""
        for span in self.spans:
            if not span.wraps:
                start = span.start.astype(np.int64)
                return (-start, span.extent - 1 - start) if span.step > 0 else (start - span.extent + 1, start)
        return None

    def active(self, t: int) -> np.ndarray:
        """Which ranks take part in repeat ``t``: bool ``[P]``."""
        window = self.window()
        return np.ones(len(self.spans[0].start), bool) if window is None else (window[0] <= t) & (t <= window[1])

    def active_repeats(self, repeat: int) -> np.ndarray:
        """In how many of ``repeat`` repeats each rank takes part: int64 ``[P]``."""
        if (window := self.window()) is None:
            return np.full(len(self.spans[0].start), repeat)
        return np.maximum(np.minimum(window[1], repeat - 1) - np.maximum(window[0], 0) + 1, 0)

    def backwards(self, repeat: int) -> Chunks:
        """The same chunks with the ``repeat`` repeats in the opposite order."""
        spans = (
            dataclasses.replace(
                span, start=_table(span.start + span.step * (repeat - 1), len(span.start)), step=-span.step
            )
            for span in self.spans
        )
        return Chunks(tuple(spans), self.order)


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """One message a rank in each repeat of a phase.

    Attributes:
      dst: ``[P]`` int32, the rank that each rank sends to; -1: it sends nothing.
      send: the chunks that a rank sends.
      recv: the chunks of a receiving rank that the message goes to; as many.
      op: ``"copy"`` replaces them, ``"reduce"`` adds to them.
      turn: in repeat ``t`` the destination is ``(dst[r] + turn * t) mod P``; 0 where some rank sends nothing.
    """

    dst: np.ndarray
    send: Chunks
    recv: Chunks
    op: Op = COPY
    turn: int = 0

    def __post_init__(self):
        object.__setattr__(self, "dst", _table(self.dst, len(self.dst)))

    @property
    def count(self) -> int:
        """Chunks in a message."""
        return self.send.count

    def destinations(self, t: int) -> np.ndarray:
        """Whom each rank sends to in repeat ``t``; -1: nobody."""
        dst = self.dst if not self.turn else (self.dst + self.turn * t) % len(self.dst)
        return np.where(self.send.active(t), dst, -1)

    def receivers(self) -> np.ndarray:
        """Which ranks receive, in the repeats in which their sender is active: bool ``[P]``."""
        receives = np.zeros(len(self.dst), bool)
        receives[self.dst[self.dst >= 0]] = True
        return receives

    def reversed(self, repeat: int) -> Transfer:
        """The transfer run backwards: each receiver returns what it got, to be added where it came from."""
        ranks = np.arange(len(self.dst), dtype=np.int32)
        sources = np.full(len(self.dst), -1, np.int32)
        sources[self.dst[self.dst >= 0]] = ranks[self.dst >= 0]
        if self.turn:  # destinations are r + c + turn * t, so sources are r - c - turn * t
            sources = (sources - self.turn * (repeat - 1)) % len(self.dst)
        return Transfer(sources, self.recv.backwards(repeat), self.send.backwards(repeat), REDUCE, self.turn)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """Messages that travel at the same time, ``repeat`` times.

    Attributes:
      transfers: the messages of one repeat. All are read before any of them is received.
      repeat: number of repeats.
      reads_start: every repeat sends from the buffer as it was when the phase began.
      concurrent: all repeats travel at the same time, which implies ``reads_start``.
      along: the number of the span along which the phase gathers, from holding one place along it to holding all; or
        scatters, if it reduces, from all to one. Each repeat then passes on what the last one brought. In the
        dimensions before it a rank holds one place throughout, in those after it all, except that each transfer may
        have its own part of a chunk, the last. None for other phases.
    """

    transfers: tuple[Transfer, ...]
    repeat: int = 1
    reads_start: bool = False
    concurrent: bool = False
    along: int | None = None

    @property
    def steps(self) -> int:
        """Steps that take place one after the other."""
        return 1 if self.concurrent else self.repeat

    @property
    def reduces(self) -> bool:
        """Whether the messages are added to what is there."""
        return self.transfers[0].op == REDUCE

    def reversed(self) -> Phase:
        """The phase run backwards, see :meth:`Transfer.reversed`."""
        transfers = tuple(transfer.reversed(self.repeat) for transfer in reversed(self.transfers))
        return dataclasses.replace(self, transfers=transfers)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A collective, step by step.

    Attributes:
      collective: ``"all_reduce"``, ``"broadcast"``, ``"reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
        ``"all_to_all"`` or ``"send_recv"``.
      algorithm: the name it is known by.
      ranks: P.
      nchunks: chunks in the buffer.
      phases: one after the other.
      placed: where in the buffer the chunks of a rank's input lie at the start.
      result: which chunks, in order, are the rank's output at the end.
      root: the rank that a broadcast starts from and a reduce ends at.
    """

    collective: str
    algorithm: str
    ranks: int
    nchunks: int
    phases: tuple[Phase, ...]
    placed: Chunks
    result: Chunks
    root: int = 0

    @property
    def steps(self) -> int:
        """Steps that take place one after the other."""
        return sum(phase.steps for phase in self.phases)

    def chunk_size(self, size: int) -> int:
        """Elements (or bytes) in a chunk, if a rank's input has ``size`` of them: rounded up, the rest is padding."""
        return -(-size // self.placed.count)


def reverse(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases of copies run backwards as reductions.

    A schedule that copies chunk c from its owner to every rank becomes the one that adds every rank's chunk c up at the
    owner, along the same links in the opposite direction: all-gather becomes reduce-scatter, broadcast becomes reduce.

    Raises:
      UnsupportedError: a phase reduces already.
    """
    if any(phase.reduces for phase in phases):
        raise errors.UnsupportedError("only a schedule of copies can be reversed into one of reductions")
    return tuple(phase.reversed() for phase in reversed(phases))


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """What a schedule moves.

    Attributes:
      steps: steps that take place one after the other.
      sent: ``[P]`` int64, messages that each rank sends.
      chunks: ``[P]`` int64, chunks in them.
      reduced: ``[P]`` int64, chunks that each rank adds to its own.
    """

    steps: int
    sent: np.ndarray
    chunks: np.ndarray
    reduced: np.ndarray


def messages(schedule: Schedule) -> Messages:
    """Steps, messages and chunks of a schedule, rank by rank; times ``schedule.chunk_size(nbytes)`` they are bytes."""
    sent, chunks, reduced = (np.zeros(schedule.ranks, np.int64) for _ in range(3))
    for phase in schedule.phases:
        for transfer in phase.transfers:
            times = np.where(transfer.dst >= 0, transfer.send.active_repeats(phase.repeat), 0)
            sent += times
            chunks += times * transfer.count
            if transfer.op == REDUCE:
                received = np.where(transfer.receivers(), transfer.recv.active_repeats(phase.repeat), 0)
                reduced += received * transfer.count
    return Messages(schedule.steps, sent, chunks, reduced)
