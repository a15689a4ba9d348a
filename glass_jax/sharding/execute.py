"""Runs a schedule: from its tables to the ``lax.ppermute`` program of one rank.

The program is the same wherever it runs. On devices the ranks are the devices of the mesh axes; in a simulation they
are a vmapped axis, on which every permutation must be complete, so that idle ranks send something that nobody keeps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.sharding.schedule import REDUCE, Chunks, Phase, Schedule, Span, Transfer

AxisName = str | tuple[str, ...]
_UNROLLED = 32  # arrays that are added one by one


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that a program runs on.

    Attributes:
      axis_name: the mesh axes whose devices they are, in the order of the mesh; or the vmapped axis that simulates
        them.
      simulated: whether it is vmapped.
      numbers: ``[P]``, the number of each rank along those axes, if the collective takes the axes in another order.
    """

    axis_name: AxisName
    simulated: bool
    numbers: np.ndarray | None = None

    def index(self) -> jax.Array:
        """The number of the rank that runs this."""
        index = lax.axis_index(self.axis_name)
        return index if self.numbers is None else jnp.asarray(np.argsort(self.numbers))[index]

    def permute(self, x: jax.Array, dst: np.ndarray, turn: jax.Array | int = 0) -> jax.Array:
        """Sends ``x`` to rank ``dst[r]``, -1 being nobody; ranks that nobody sends to receive something arbitrary.

        With ``turn``, the rank is ``(dst[r] + turn) mod P``. On devices it is a number: XLA's permutations are
        constants.
        """
        if isinstance(turn, jax.Array):
            source = (self.index() - turn) % len(dst)
            return lax.all_gather(x, self.axis_name)[jnp.asarray(np.argsort(dst))[source]]  # all ranks' x is one array
        dst = np.where(dst < 0, dst, (dst + turn) % len(dst))
        pairs = [(source, int(target)) for source, target in enumerate(dst) if target >= 0]
        if self.simulated and len(pairs) < len(dst):  # vmap has no partial permutations
            idle = np.flatnonzero(dst < 0)
            pairs += zip(idle.tolist(), np.setdiff1d(np.arange(len(dst)), dst).tolist(), strict=True)
        if self.numbers is not None:
            pairs = [(int(self.numbers[source]), int(self.numbers[target])) for source, target in pairs]
        return lax.ppermute(x, self.axis_name, pairs)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """``[...] -> [P, ...]``."""
        gathered = lax.all_gather(x, self.axis_name)
        return gathered if self.numbers is None else gathered[self.numbers]

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """``[P, ...] -> [P, ...]``: element r goes to rank r, and element r of the result came from rank r."""
        x = x if self.numbers is None else x[np.argsort(self.numbers)]
        arrived = lax.all_to_all(x, self.axis_name, 0, 0, tiled=True)
        return arrived if self.numbers is None else arrived[self.numbers]


def _of_rank(table: np.ndarray, rank: jax.Array) -> jax.Array | int:
    """The entry of a table that has one for every rank; a plain integer where all are equal."""
    if (table == table[0]).all():
        return int(table[0])
    return lax.dynamic_index_in_dim(jnp.asarray(table), rank, keepdims=False)


def _along(span: Span, t: jax.Array | int, rank: jax.Array) -> tuple[jax.Array | int, int]:
    """Where a rank's places along a dimension begin, and how many there are, if they lie side by side."""
    if len(span.offsets) == 1:
        return (_of_rank(span.start, rank) + span.step * t + int(span.offsets[0])) % span.extent, 1
    return int(span.start[0] + span.offsets[0]), len(span.offsets)


def _turned(span: Span) -> bool:
    """Whether the span is all places of its dimension, but not from the first one on."""
    return len(span.offsets) == span.extent > 1 and (span.start.any() or bool((np.diff(span.offsets) < 0).any()))


def _scattered(span: Span) -> bool:
    """Whether the span is a pattern of places with gaps, the same on all ranks."""
    return bool((np.diff(span.offsets) != 1).any())


def _transposed(x: jax.Array, extents: Sequence[int], order: Sequence[int]) -> jax.Array:
    """Chunks ``[n, size]`` that form a grid of ``extents``, with its dimensions in another order."""
    grid = x.reshape(*extents, x.shape[1])
    return grid.transpose(*order, len(extents)).reshape(x.shape)


def _take(buffer: jax.Array, chunks: Chunks, t: jax.Array | int, rank: jax.Array) -> jax.Array:
    """A rank's chunks: ``[nchunks, size] -> [count, size]``."""
    first = chunks.spans[0]
    if _turned(first):
        buffer = buffer[::-1] if first.offsets[-1] < 0 else buffer
        start = _of_rank(first.start, rank)
        return jnp.roll(buffer, start + 1 if first.offsets[-1] < 0 else -start, axis=0)
    if chunks.count == len(buffer):
        extents = [span.extent for span in chunks.spans]
        return buffer if chunks.order is None else _transposed(buffer, extents, chunks.order)
    if _scattered(first):
        return buffer[first.offsets]
    grid = buffer.reshape(*(span.extent for span in chunks.spans), -1)
    starts, sizes = zip(*(_along(span, t, rank) for span in chunks.spans), (0, grid.shape[-1]), strict=True)
    return lax.dynamic_slice(grid, starts, sizes).reshape(chunks.count, -1)


def _put(buffer: jax.Array, chunks: Chunks, t: jax.Array | int, rank: jax.Array, value: jax.Array) -> jax.Array:
    """``buffer`` with a rank's chunks replaced."""
    first = chunks.spans[0]
    if _turned(first):
        value = value[::-1] if first.offsets[-1] < 0 else value
        return jnp.roll(value, _of_rank(first.start, rank) + (first.offsets[-1] < 0), axis=0)
    if chunks.count == len(buffer):
        if chunks.order is None:
            return value
        return _transposed(value, [chunks.spans[dim].extent for dim in chunks.order], np.argsort(chunks.order))
    if _scattered(first):
        return buffer.at[first.offsets].set(value, unique_indices=True)
    grid = buffer.reshape(*(span.extent for span in chunks.spans), -1)
    starts, sizes = zip(*(_along(span, t, rank) for span in chunks.spans), (0, grid.shape[-1]), strict=True)
    return lax.dynamic_update_slice(grid, value.reshape(sizes), starts).reshape(buffer.shape)


def _receives(transfer: Transfer, t: jax.Array | int, rank: jax.Array) -> jax.Array | bool:
    """Whether the rank receives a message in repeat ``t``."""
    receivers = transfer.receivers()
    receives = True if receivers.all() else _of_rank(receivers, rank)
    if (window := transfer.recv.window()) is None:
        return receives
    first, last = (_of_rank(table.astype(np.int32), rank) for table in window)
    return receives & (first <= t) & (t <= last)


def _turn(transfer: Transfer, t: jax.Array | int) -> jax.Array | int:
    """How far the destinations have moved in repeat ``t``."""
    return transfer.turn * t if transfer.turn else 0


class _Runner:
    """One rank's side of a schedule, with sums in the dtype ``accumulate``."""

    def __init__(self, ranks: Ranks, accumulate: jnp.dtype):
        self.ranks, self.accumulate = ranks, accumulate
        self.rank = ranks.index()

    def phase(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """What the rank holds after a phase, from what it held before: ``[chunks, size]``."""
        if phase.concurrent and phase.along is not None and not phase.reduces:
            return self.ranks.all_gather(buffer[0])
        if phase.concurrent:
            return self._all_to_all(buffer, phase.reduces)
        if phase.along is not None:
            return self._scatter(phase, buffer) if phase.reduces else self._gather(phase, buffer)
        count, transfers = _in_parts(phase)
        parts = tuple(buffer.reshape(count, -1, buffer.shape[1]))
        step = functools.partial(self._step, transfers, parts if phase.reads_start else None)
        changes = any(transfer.turn for transfer in phase.transfers)
        if phase.repeat == 1 or (changes and not self.ranks.simulated):  # see Ranks.permute
            for t in range(phase.repeat):
                parts = step(t, parts)
        else:
            parts = lax.fori_loop(0, phase.repeat, step, parts)
        return parts[0] if count == 1 else jnp.concatenate(parts)

    def _all_to_all(self, buffer: jax.Array, reduces: bool) -> jax.Array:
        """Chunk r goes to rank r, all at once; the rank's own are added up, or are chunks by source."""
        arrived = self.ranks.all_to_all(buffer)
        return ordered_sum(arrived.astype(self.accumulate))[None] if reduces else arrived

    def _gather(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """Along one span, from one place to all: passes on what it received last, and keeps it."""
        spans, parts = [transfer.recv.spans[phase.along] for transfer in phase.transfers], len(phase.transfers)
        own = buffer.reshape(1, -1, parts, buffer.shape[1])
        messages = [own[:, :, part : part + 1] for part in range(parts)]
        if spans[0].extent == 2:
            place, _ = _along(phase.transfers[0].send.spans[phase.along], 0, self.rank)
            other = jnp.concatenate(self._passed(phase, messages), axis=2)
            held = lax.cond(
                place == 0, lambda *ab: jnp.concatenate(ab), lambda *ab: jnp.concatenate(ab[::-1]), own, other
            )
            return held.reshape(-1, buffer.shape[1])

        def step(t, state):
            held, messages = state
            messages = self._passed(phase, messages)
            for part, (span, message) in enumerate(zip(spans, messages, strict=True)):
                held = lax.dynamic_update_slice(held, message, (_along(span, t, self.rank)[0], 0, part, 0))
            return held, messages

        held = jnp.broadcast_to(own, (spans[0].extent, *own.shape[1:]))  # everywhere, of which one place is its own
        held, _ = lax.fori_loop(0, phase.repeat, step, (held, messages))
        return held.reshape(-1, buffer.shape[1])

    def _scatter(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """Along one span, from all places to one: adds its own to what it received last, and passes it on."""
        spans, parts = [transfer.recv.spans[phase.along] for transfer in phase.transfers], len(phase.transfers)
        held = buffer.reshape(spans[0].extent, -1, parts, buffer.shape[1])

        def own(span: Span, t: jax.Array | int, part: int) -> jax.Array:
            return lax.dynamic_slice(
                held, (_along(span, t, self.rank)[0], 0, part, 0), (1, held.shape[1], 1, held.shape[3])
            )

        def step(t, messages):
            messages = self._passed(phase, messages)
            return [
                message + own(span, t, part) for part, (span, message) in enumerate(zip(spans, messages, strict=True))
            ]

        messages = [own(transfer.send.spans[phase.along], 0, part) for part, transfer in enumerate(phase.transfers)]
        messages = step(0, messages) if phase.repeat == 1 else lax.fori_loop(0, phase.repeat, step, messages)
        return jnp.concatenate(messages, axis=2).reshape(-1, buffer.shape[1])

    def _passed(self, phase: Phase, messages: list[jax.Array]) -> list[jax.Array]:
        return [
            self.ranks.permute(message, transfer.dst)
            for message, transfer in zip(messages, phase.transfers, strict=True)
        ]

    def _step(
        self, transfers: Sequence[tuple[int, Transfer]], sources: tuple | None, t: jax.Array | int, parts: tuple
    ) -> tuple[jax.Array, ...]:
        """One repeat of a phase that is none of these, of transfers each in its part of the buffer."""
        sources = parts if sources is None else sources
        arrivals = [
            self.ranks.permute(_take(sources[part], transfer.send, t, self.rank), transfer.dst, _turn(transfer, t))
            for part, transfer in transfers
        ]
        parts = list(parts)
        for (part, transfer), value in zip(transfers, arrivals, strict=True):
            receives = _receives(transfer, t, self.rank)
            if transfer.op == REDUCE or receives is not True:
                before = _take(parts[part], transfer.recv, t, self.rank)
                value = before + value if transfer.op == REDUCE else value
                value = value if receives is True else jnp.where(receives, value, before)
            parts[part] = _put(parts[part], transfer.recv, t, self.rank, value)
        return tuple(parts)


def _in_parts(phase: Phase) -> tuple[int, list[tuple[int, Transfer]]]:
    """How many parts of the buffer transfers stay in, and the part of each.

    Where each transfer keeps to one place along the first dimension of the grid, those are arrays of their own: XLA
    would otherwise copy the whole buffer in every repeat, not seeing that one transfer's chunks are never another's.
    """
    firsts = [transfer.send.spans[0] for transfer in phase.transfers]
    one_span = any(len(transfer.send.spans) == 1 for transfer in phase.transfers)
    if one_span or any(len(span.offsets) > 1 or span.step or (span.start != span.start[0]).any() for span in firsts):
        return 1, [(0, transfer) for transfer in phase.transfers]
    rest = [
        dataclasses.replace(transfer, send=Chunks(transfer.send.spans[1:]), recv=Chunks(transfer.recv.spans[1:]))
        for transfer in phase.transfers
    ]
    return firsts[0].extent, [(int(span.start[0]), transfer) for span, transfer in zip(firsts, rest, strict=True)]


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum over the first axis, by halves: in one order, so the same bits wherever and however it is compiled."""
    while len(x) > _UNROLLED:
        half = len(x) // 2
        x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    parts = list(x)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [low + high for low, high in zip(parts[:half], parts[half:], strict=False)] + parts[2 * half :]
    return parts[0]


def execute(schedule: Schedule, x: jax.Array, ranks: Ranks, *, accumulate: jnp.dtype) -> jax.Array:
    """One rank's result of a schedule.

    Args:
      schedule: for as many ranks as the axes have.
      x: ``[placed chunks, elements]``, the rank's input.
      ranks: that run it.
      accumulate: the dtype that sums are formed and travel in; between inputs and outputs of ``x``'s dtype.

    Returns:
      ``[result chunks, elements]``.
    """
    runner = _Runner(ranks, accumulate)
    phases = schedule.phases
    if phases and phases[0].along is not None and not phases[0].reduces:
        buffer = x  # it begins with the rank's own chunks only
    else:
        complete = schedule.placed.count == schedule.nchunks
        buffer = x if complete else jnp.zeros_like(x, shape=(schedule.nchunks, x.shape[1]))
        buffer = _put(buffer, schedule.placed, 0, runner.rank, x)
    for number, phase in enumerate(phases):
        if phase.reduces and not phase.concurrent:  # what travels at once is summed only on arrival
            buffer = buffer.astype(accumulate)
        buffer = runner.phase(phase, buffer)
        if not any(later.reduces for later in phases[number + 1 :]):
            buffer = buffer.astype(x.dtype)
    if phases and phases[-1].along is not None and phases[-1].reduces:
        return buffer  # it ends with the rank's own chunks only
    return _take(buffer, schedule.result, 0, runner.rank)
