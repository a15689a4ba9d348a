"""Runs a schedule: from its tables to the ``lax.ppermute`` program of one rank.

The program is the same wherever it runs. On devices the ranks are the devices of the mesh axes; in a simulation they are a
vmapped axis, on which every permutation must be complete, so that idle ranks send something that nobody keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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


class _Runner:
    """One rank's side of a schedule.

    Args:
      axis_name: the mesh axes whose devices are the ranks, or the vmapped axis that simulates them.
      simulated: whether it is vmapped.
    """

    def __init__(self, axis_name: AxisName, simulated: bool):
        self.axis_name, self.simulated = axis_name, simulated
        self.rank = lax.axis_index(axis_name)

    def phase(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """The buffer after a phase."""
        if phase.concurrent:
            return self._at_once(phase, buffer)
        source = buffer if phase.reads_start else None
        if any(transfer.turn for transfer in phase.transfers):  # a permutation is static, so these cannot be a loop
            for t in range(phase.repeat):
                buffer = self._step(phase, t, buffer, source)
            return buffer
        if phase.repeat == 1:
            return self._step(phase, 0, buffer, source)
        return lax.fori_loop(0, phase.repeat, lambda t, now: self._step(phase, t, now, source), buffer)

    def _step(self, phase: Phase, t: jax.Array | int, buffer: jax.Array, source: jax.Array | None) -> jax.Array:
        source = buffer if source is None else source
        arrivals = [
            permute(_take(source, transfer.send, t, self.rank), self._dst(transfer, t), self.axis_name, simulated=self.simulated)
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

    def _dst(self, transfer: Transfer, t: jax.Array | int) -> np.ndarray:
        return transfer.destinations(t) if transfer.turn else transfer.dst

    def _at_once(self, phase: Phase, buffer: jax.Array) -> jax.Array:
        """All ranks to all ranks at once, which are JAX's own collectives; chunk r is for, or of, rank r.

        After a reduction only the rank's own chunk has a meaning, so all of them may be it.
        """
        (transfer,) = phase.transfers
        if transfer.op == COPY and transfer.send.step == 0:
            return lax.all_gather(_take(buffer, transfer.send, 0, self.rank), self.axis_name, tiled=True)
        buffer = lax.all_to_all(buffer, self.axis_name, 0, 0, tiled=True)
        if transfer.op == COPY:
            return buffer
        return buffer  # summed by the caller


def pairwise_sum(x: jax.Array) -> jax.Array:
    """The sum over the first axis in one fixed order, by halves: the same bits wherever and however it is compiled."""
    parts = list(x)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=False)] + parts[2 * half :]
    return parts[0]
