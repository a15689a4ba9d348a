"""Operations that move lanes: broadcasts, ramps, interleaves, packs, gathers and squeezes within registers."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.registers import Array, Operation, Value, alike, zeroed
from glass_jax.hw.model.values.storage import reinterpret


def _broadcast(operation: Operation) -> Array:
    value, mask = operation.operands
    value = numerics.convert(jnp.asarray(value), operation.dtype)
    lead = value.shape[:-1] if value.ndim else ()
    return zeroed(jnp.broadcast_to(value, (*lead, operation.lanes)), mask.at(operation.dtype.itemsize))


def _broadcast_lane(operation: Operation) -> Array:
    x, mask = operation.operands
    lane = x[..., :1] if operation.mode("POS_", "LOWEST") == "LOWEST" else x[..., -1:]
    return zeroed(jnp.broadcast_to(lane, x.shape), mask.at(operation.dtype.itemsize))


def _ramp(operation: Operation) -> Array:
    step = -1 if "DEC_ORDER" in operation.modes else 1
    first = numerics.convert(jnp.asarray(operation.operands[0]), operation.dtype)
    return first + np.asarray(step * np.arange(operation.lanes), operation.dtype)


def _interleave(operation: Operation) -> tuple[Array, Array]:
    x, y = alike(*operation.operands)
    both = jnp.stack([x, y], axis=-1).reshape(*x.shape[:-1], -1)
    return both[..., : operation.lanes], both[..., operation.lanes :]


def _deinterleave(operation: Operation) -> tuple[Array, Array]:
    parts = [numerics.to_bits(x) for x in alike(*operation.operands)]
    every_second = (jnp.concatenate([x[..., number::2] for x in parts], axis=-1) for number in (0, 1))
    return tuple(numerics.from_bits(x, operation.operands[0].dtype) for x in every_second)


def _pack(operation: Operation) -> Array:
    """The low halves of the lanes, in the lower or the higher half of the result; 0 in the other."""
    low = reinterpret(operation.operands[0], operation.dtype)[..., ::2]
    parts = [low, jnp.zeros_like(low)]
    return jnp.concatenate(parts if operation.modes[0] == "LOWER" else parts[::-1], axis=-1)


def _unpack(operation: Operation) -> Array:
    x = operation.operands[0]
    return (x[..., : operation.lanes] if operation.modes[0] == "LOWER" else x[..., operation.lanes :]).astype(
        operation.dtype
    )


def _select_lanes(operation: Operation) -> Array:
    x, index = alike(*operation.operands)
    unsigned = reinterpret(index, np.dtype(f"uint{8 * index.dtype.itemsize}")).astype(np.uint32)
    return jnp.take_along_axis(x, (unsigned % np.uint32(operation.lanes)).astype(np.int32), axis=-1)


def _squeeze(operation: Operation) -> Array:
    """The active lanes, in their order from the lowest on; 0 after them."""
    x, mask = operation.operands
    x, active = alike(x, mask.at(operation.dtype.itemsize))
    order = jnp.argsort(~active, axis=-1, stable=True)
    count = active.sum(axis=-1, keepdims=True)
    return zeroed(jnp.take_along_axis(x, order, axis=-1), np.arange(operation.lanes) < count)


def _count_before(operation: Operation) -> Array:
    """For each lane, how many lanes before it are active."""
    active = jnp.asarray(operation.operands[0].at(operation.dtype.itemsize))
    return (jnp.cumsum(active, axis=-1, dtype=np.int32) - active).astype(operation.dtype)


def _other_type(operation: Operation) -> Array:
    return reinterpret(jnp.asarray(operation.operands[0]), operation.dtype)


def _of_pair(operation: Operation) -> Value:
    return operation.operands[0][operation.number(1)]


OPERATIONS: dict[str, Callable[[Operation], object]] = {
    "vdup": _broadcast,
    "vdupv": _broadcast_lane,
    "vci": _ramp,
    "vintlv": _interleave,
    "vdintlv": _deinterleave,
    "vpack": _pack,
    "vunpack": _unpack,
    "vselr": _select_lanes,
    "vsqz": _squeeze,
    "vusqz": _count_before,
    "reinterpret": _other_type,
    "pair_get": _of_pair,
}
