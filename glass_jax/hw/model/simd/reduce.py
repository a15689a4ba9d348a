"""Reductions across the lanes of a register, and histograms of its bytes."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from glass_jax.hw.model.values.registers import BLOCK_BYTES, REGISTER_BYTES, Array, Operation, fill_up, zeroed
from glass_jax.hw.model.values.storage import reinterpret

_BINS = 128  # of a histogram register


def _end(dtype: np.dtype, largest: bool) -> np.ndarray:
    """The smallest or the largest value of a type; of a float infinity."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf if largest else -np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.asarray(limits.max if largest else limits.min, dtype)


def _masked(operation: Operation, otherwise: np.ndarray) -> Array:
    """The operand, ``otherwise`` in lanes that do not take part."""
    x, mask = operation.operands
    active = mask.at(x.dtype.itemsize)
    if isinstance(active, np.ndarray) and active.all():
        return jnp.asarray(x)
    return jnp.where(active, x, otherwise)


def _sum(x: Array, dtype: np.dtype) -> Array:
    """The sum over the last axis; 16-bit floats are added in float32 and rounded once."""
    wide = np.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype
    return jnp.sum(x, axis=-1, dtype=wide).astype(dtype)


def _total(operation: Operation) -> Array:
    x = _masked(operation, np.asarray(0, operation.operands[0].dtype))
    return fill_up(_sum(x, operation.dtype)[..., None], operation.lanes)


def _extreme(largest: bool) -> Callable[[Operation], Array]:
    """The largest or smallest active element in lane 0, its first place in lane 1."""

    def run(operation: Operation) -> Array:
        x = _masked(operation, _end(operation.dtype, not largest))
        best = (jnp.max if largest else jnp.min)(x, axis=-1, keepdims=True)
        found = x == best
        if jnp.issubdtype(operation.dtype, jnp.floating):
            found |= jnp.isnan(x)  # the extreme of a register with NaN is NaN
        lane = np.arange(operation.lanes, dtype=f"uint{8 * operation.dtype.itemsize}")
        place = jnp.min(jnp.where(found, lane, lane[-1]), axis=-1, keepdims=True)
        return jnp.concatenate([best, reinterpret(place, operation.dtype), jnp.zeros_like(x[..., 2:])], axis=-1)

    return run


def _of_blocks(reduce: Callable[[Array, np.dtype], Array], otherwise: Callable) -> Callable[[Operation], Array]:
    """A reduction of each block of 32 bytes; the results stand in the first lanes."""

    def run(operation: Operation) -> Array:
        x = _masked(operation, otherwise(operation.dtype))
        blocks = x.reshape(*x.shape[:-1], REGISTER_BYTES // BLOCK_BYTES, -1)
        return fill_up(reduce(blocks, operation.dtype), operation.lanes)

    return run


def _of_pairs(operation: Operation) -> Array:
    x, mask = operation.operands
    x = zeroed(x, mask.at(operation.dtype.itemsize))
    return fill_up(_sum(x.reshape(*x.shape[:-1], -1, 2), operation.dtype), operation.lanes)


def _histogram(cumulative: bool) -> Callable[[Operation], Array]:
    """A register of 128 counts, to which is added how often each value occurs among the active bytes.

    The values are 0 to 127, or with ``BIN1`` 128 to 255. Cumulative counts include those of all smaller values.
    """

    def run(operation: Operation) -> Array:
        old, x, mask = operation.operands
        values = np.arange(_BINS, dtype=np.int32) + (_BINS if "BIN1" in operation.modes else 0)
        x = jnp.asarray(x)[..., None].astype(np.int32)
        counted = (x <= values if cumulative else x == values) & jnp.asarray(mask.at(1))[..., None]
        return old + jnp.sum(counted, axis=-2, dtype=np.int32).astype(old.dtype)

    return run


OPERATIONS: dict[str, Callable[[Operation], object]] = {
    "dhistv2": _histogram(cumulative=False),
    "chistv2": _histogram(cumulative=True),
    "vcadd": _total,
    "vcmax": _extreme(largest=True),
    "vcmin": _extreme(largest=False),
    "vcpadd": _of_pairs,
    "vcgadd": _of_blocks(_sum, lambda dtype: np.asarray(0, dtype)),
    "vcgmax": _of_blocks(lambda x, dtype: jnp.max(x, axis=-1), lambda dtype: _end(dtype, largest=False)),
    "vcgmin": _of_blocks(lambda x, dtype: jnp.min(x, axis=-1), lambda dtype: _end(dtype, largest=True)),
}

# Lanes that a reduction writes where it merges into a register.
WRITTEN_LANES = {"vcadd": 1, "vcmax": 2, "vcmin": 2}
