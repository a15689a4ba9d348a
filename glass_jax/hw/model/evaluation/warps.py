"""Functions of the threads of a warp, 32 neighbours: reductions, shuffles and votes; and votes of all threads.

Threads that do not execute the statement take no part. A shuffle from a thread outside the segment gives the thread's
own value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import UnsupportedError
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values.joining import JOINS, Join

WARP = 32  # threads of a warp, as TileLang's code generator has it


def call(machine: Machine, name: str, args: list[jax.Array]) -> jax.Array:
    """The function ``name`` of :data:`NAMES`, in every lane.

    Raises:
      UnsupportedError: the lanes are not threads, or an argument that must be a constant is none.
    """
    if machine.threads is None or machine.lanes[1:] != tuple(machine.threads.extents.values()):
        raise UnsupportedError(f"the NPU model runs {name} only in code that names a thread, outside parallel loops")
    if name.startswith("warp_reduce_"):
        return _reduce(machine, args[0], JOINS[_KINDS[name.removeprefix("warp_reduce_")]])
    if name.startswith("shfl"):
        return _shuffle(machine, name, *args[1:])
    return _VOTES[name](machine, args)


_KINDS = {"sum": "add", "max": "max", "min": "min", "bitand": "bitand", "bitor": "bitor"}
_SHUFFLES = ("shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync")


def _warps(machine: Machine, x: jax.Array, outside: np.ndarray) -> jax.Array:
    """A value of the threads as [units, warps, 32], threads in their order, ``outside`` where there are none."""
    units, *extents = machine.lanes
    axes = (0, *range(len(extents), 0, -1))  # the first dimension of threads is the fastest
    flat = jnp.broadcast_to(x, machine.lanes).transpose(axes).reshape(units, -1)
    count = math.ceil(flat.shape[1] / WARP) * WARP
    padded = jnp.pad(flat, ((0, 0), (0, count - flat.shape[1])), constant_values=outside)
    return padded.reshape(units, -1, WARP)


def _threads(machine: Machine, warps: jax.Array) -> jax.Array:
    """The inverse of :func:`_warps`; an array [units, warps, 1] is the same for each thread of a warp."""
    units, *extents = machine.lanes
    flat = jnp.broadcast_to(warps, (*warps.shape[:2], WARP)).reshape(units, -1)[:, : math.prod(extents)]
    axes = (0, *range(len(extents), 0, -1))
    return flat.reshape(units, *extents[::-1]).transpose(axes)


def _active(machine: Machine) -> jax.Array:
    mask = True if machine.mask is None else machine.mask
    return _warps(machine, jnp.asarray(mask), np.asarray(False))


def _reduce(machine: Machine, x: jax.Array, kind: Join) -> jax.Array:
    identity = kind.identity(x.dtype)
    warps = jnp.where(_active(machine), _warps(machine, x, identity), identity)
    return _threads(machine, jnp.expand_dims(kind.along(warps, 2), 2))


def _shuffle(machine: Machine, name: str, x: jax.Array, by: jax.Array, width: jax.Array) -> jax.Array:
    if not isinstance(width, np.ndarray):
        raise UnsupportedError(f"the NPU model does not run {name} with a width that is known only at run time")
    width = int(width)
    warps = _warps(machine, x, np.zeros((), x.dtype))
    by = _warps(machine, jnp.asarray(by, jnp.int32), np.asarray(0, np.int32))
    lane = np.arange(WARP)
    segment = lane // width * width
    if name == "shfl_sync":
        source = segment + by % width
    elif name == "shfl_up_sync":
        source = jnp.where(lane - by >= segment, lane - by, lane)
    elif name == "shfl_down_sync":
        source = jnp.where(lane + by < segment + width, lane + by, lane)
    else:
        source = jnp.where((lane ^ by) < segment + width, lane ^ by, lane)
    return _threads(machine, jnp.take_along_axis(warps, jnp.broadcast_to(source, warps.shape), axis=2))


def _ballot(machine: Machine, holds: jax.Array) -> jax.Array:
    warps = _warps(machine, holds != 0, np.asarray(False)) & _active(machine)
    bits = jnp.where(warps, np.left_shift(np.uint32(1), np.arange(WARP, dtype=np.uint32)), np.uint32(0))
    return _threads(machine, jnp.sum(bits, axis=2, keepdims=True, dtype=jnp.uint32))


def _of_warp(vote: Callable[..., jax.Array]) -> Callable[[Machine, list[jax.Array]], jax.Array]:
    def function(machine: Machine, args: list[jax.Array]) -> jax.Array:
        takes_part = _active(machine)
        holds = _warps(machine, args[-1] != 0, np.asarray(False))
        chosen = jnp.where(takes_part, holds, vote is jnp.all)
        return _threads(machine, vote(chosen, axis=2, keepdims=True))

    return function


def _of_all(vote: Callable[..., jax.Array]) -> Callable[[Machine, list[jax.Array]], jax.Array]:
    def function(machine: Machine, args: list[jax.Array]) -> jax.Array:
        holds = jnp.broadcast_to(args[-1] != 0, machine.lanes)
        return vote(holds, axis=tuple(range(1, len(machine.lanes))), keepdims=True)

    return function


_VOTES: dict[str, Callable[[Machine, list[jax.Array]], jax.Array]] = {
    "ballot": lambda machine, args: _ballot(machine, args[0]),
    "ballot_sync": lambda machine, args: _ballot(machine, args[1]),
    "activemask": lambda machine, args: _ballot(machine, jnp.asarray(True)),
    "any_sync": _of_warp(jnp.any),
    "all_sync": _of_warp(jnp.all),
    "syncthreads_and": _of_all(jnp.all),
    "syncthreads_or": _of_all(jnp.any),
    "syncthreads_count": _of_all(jnp.sum),
}

NAMES = frozenset({f"warp_reduce_{kind}" for kind in _KINDS} | set(_SHUFFLES) | set(_VOTES))
