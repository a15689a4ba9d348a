"""Runs a schedule: from its tables to the ``lax.ppermute`` program of one rank.

The program is the same wherever it runs. On devices the ranks are the devices of the mesh axes; in a simulation they are a
vmapped axis, on which every permutation must be complete, so that idle ranks send something that nobody keeps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.sharding.schedule import COPY, REDUCE, Chunks, Phase, Schedule, Transfer

AxisName = str | tuple[str, ...]


def permute(x: jax.Array, dst: np.ndarray, axis_name: AxisName, *, simulated: bool) -> jax.Array:
    """Sends ``x`` to rank ``dst[r]``, where -1 is nobody; ranks that nobody sends to receive something arbitrary."""
    pairs = [(source, int(target)) for source, target in enumerate(dst) if target >= 0]
    if simulated and len(pairs) < len(dst):
        idle = np.flatnonzero(dst < 0)
        pairs += zip(idle.tolist(), np.setdiff1d(np.arange(len(dst)), dst).tolist(), strict=True)
    return lax.ppermute(x, axis_name, pairs)


def _of_rank(table: np.ndarray, rank: jax.Array) -> jax.Array | int:
    """The entry of a table that has one for every rank; a plain integer where all are equal."""
    if (table == table[0]).all():
        return int(table[0])
    return lax.dynamic_index_in_dim(jnp.asarray(table), rank, keepdims=False)


def _indices(chunks: Chunks, t: jax.Array | int, rank: jax.Array) -> jax.Array | int:
    """The first chunk if a rank's chunks lie side by side, else all of them, ``[count]``."""
    turn = _of_rank(chunks.start, rank) + chunks.step * t
    if len(chunks.offsets) == 1:
        return _of_rank(chunks.base, rank) + chunks.width * ((turn + int(chunks.offsets[0])) % chunks.period)
    first = _of_rank(chunks.base, rank) + chunks.width * ((turn + jnp.asarray(chunks.offsets)) % chunks.period)
    return (first[:, None] + jnp.arange(chunks.width)).ravel()


def _take(buffer: jax.Array, chunks: Chunks, t: jax.Array | int, rank: jax.Array) -> jax.Array:
    """A rank's chunks: ``[nchunks, size] -> [count, size]``."""
    if chunks.width == len(buffer):
        return buffer
    at = _indices(chunks, t, rank)
    if len(chunks.offsets) == 1:
        return lax.dynamic_slice_in_dim(buffer, at, chunks.width)
    return buffer.at[at].get(mode="promise_in_bounds")


def _put(buffer: jax.Array, chunks: Chunks, t: jax.Array | int, rank: jax.Array, value: jax.Array) -> jax.Array:
    """``buffer`` with a rank's chunks replaced."""
    if chunks.width == len(buffer):
        return value
    at = _indices(chunks, t, rank)
    if len(chunks.offsets) == 1:
        return lax.dynamic_update_slice_in_dim(buffer, value, at, 0)
    return buffer.at[at].set(value, mode="promise_in_bounds", unique_indices=True)


def _receives(transfer: Transfer, t: jax.Array | int, rank: jax.Array) -> jax.Array | bool:
    """Whether the rank receives a message in repeat ``t``."""
    receivers = transfer.receivers()
    receives = True if receivers.all() else _of_rank(receivers, rank)
    if transfer.recv.wraps:
        return receives
    turn = _of_rank(transfer.recv.start, rank) + transfer.recv.step * t
    return receives & (turn >= 0) & (turn < transfer.recv.period)


def _dst(transfer: Transfer, t: jax.Array | int) -> np.ndarray:
    """The permutation of repeat ``t``, a number if it changes; an idle rank's message is one that nobody keeps."""
    return transfer.destinations(t) if transfer.turn else transfer.dst


class _Runner:
    """One rank's side of a schedule.

    Args:
      axis_name: the mesh axes whose devices are the ranks, or the vmapped axis that simulates them.
      simulated: whether it is vmapped.
      accumulate: the dtype of sums.
    """

    def __init__(self, axis_name: AxisName, simulated: bool, accumulate: jnp.dtype):
        self.axis_name, self.simulated, self.accumulate = axis_name, simulated, accumulate
        self.rank = lax.axis_index(axis_name)

    def phase(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """The buffer after a phase."""
        if phase.concurrent:
            return self._at_once(phase, buffer)
        source = buffer if phase.reads_start else None
        if phase.repeat == 1 or any(transfer.turn for transfer in phase.transfers):  # a loop cannot change its permutation
            for t in range(phase.repeat):
                buffer = self._step(phase, t, buffer, source)
            return buffer
        return lax.fori_loop(0, phase.repeat, lambda t, now: self._step(phase, t, now, source), buffer)

    def _step(self, phase: Phase, t: jax.Array | int, buffer: jax.Array, source: jax.Array | None) -> jax.Array:
        source = buffer if source is None else source
        arrivals = [
            permute(_take(source, transfer.send, t, self.rank), _dst(transfer, t), self.axis_name, simulated=self.simulated)
            for transfer in phase.transfers
        ]
        for transfer, value in zip(phase.transfers, arrivals, strict=True):
            receives = _receives(transfer, t, self.rank)
            if transfer.op == REDUCE or receives is not True:
                before = _take(buffer, transfer.recv, t, self.rank)
                value = before + value if transfer.op == REDUCE else value
                value = value if receives is True else jnp.where(receives, value, before)
            buffer = _put(buffer, transfer.recv, t, self.rank, value)
        return buffer

    def _at_once(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """All ranks to all ranks at once, which are JAX's own collectives; chunk r is for, or of, rank r."""
        (transfer,) = phase.transfers
        if transfer.op == COPY and transfer.send.step == 0:
            return lax.all_gather(_take(buffer, transfer.send, 0, self.rank), self.axis_name, tiled=True)
        arrived = lax.all_to_all(buffer, self.axis_name, 0, 0, tiled=True)
        if transfer.op == COPY:
            return arrived
        own = ordered_sum(arrived.astype(self.accumulate))
        return jnp.broadcast_to(own, buffer.shape)  # only the rank's own chunk has a meaning now, and all are it


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum over the first axis, by halves: in one order, so the same bits wherever and however it is compiled."""
    while (n := len(x)) > 1:
        half = n // 2
        x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]]) if n % 2 else x[:half] + x[half:]
    return x[0]


def execute(
    schedule: Schedule, x: jax.Array, axis_name: AxisName, *, simulated: bool, accumulate: jnp.dtype
) -> jax.Array:
    """One rank's result of a schedule.

    Args:
      schedule: for as many ranks as the axes have.
      x: ``[placed chunks, elements]``, the rank's input.
      axis_name: the mesh axes whose devices are the ranks, or the vmapped axis that simulates them.
      simulated: whether it is vmapped.
      accumulate: the dtype that sums are formed and travel in; between inputs and outputs of ``x``'s dtype.

    Returns:
      ``[result chunks, elements]``.
    """
    runner = _Runner(axis_name, simulated, accumulate)
    buffer = _placed(schedule, x, runner.rank)
    reductions = sum(phase.transfers[0].op == REDUCE for phase in schedule.phases)  # which come first
    for number, phase in enumerate(schedule.phases):
        if number < reductions and not phase.concurrent:  # what travels at once is summed only on arrival
            buffer = buffer.astype(accumulate)
        buffer = runner.phase(phase, buffer)
        if number == reductions - 1:
            buffer = buffer.astype(x.dtype)
    return _take(buffer, schedule.result, 0, runner.rank)


def _placed(schedule: Schedule, x: jax.Array, rank: jax.Array) -> jax.Array:
    """The buffer at the start: ``[nchunks, elements]``."""
    placed = schedule.placed
    if placed.width == schedule.nchunks:
        return x
    if placed.count == schedule.nchunks:  # every chunk, in an order that is the same on all ranks
        return x[np.argsort(placed.indices(0)[0])]
    return _put(jnp.zeros_like(x, shape=(schedule.nchunks, x.shape[1])), placed, 0, rank, x)
