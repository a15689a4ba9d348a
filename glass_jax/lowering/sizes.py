"""Sizes of dimensions that may be symbols: ``jax.export`` lowers a program once for arrays of any size.

A symbol is at least 1. What depends on how large it is, such as a block that need not be larger than the array, is
decided as for the largest of arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def known(*sizes: Any) -> bool:
    """Whether all of these are numbers."""
    return all(isinstance(size, int) for size in sizes)


def at_most(most: int, size: Any) -> int:
    """``most``, or ``size`` if that is known to be less."""
    return min(most, size) if known(size) else most


def within_int32(indices: jax.Array, size: Any) -> jax.Array:
    """``indices``, of any integer type, as int32 from 0 to ``size``: the nearer of the two for those outside.

    Of a symbol only what int32 can hold is kept in: the largest indices may be beyond the size.
    """
    # Before they become int32, in which a number beyond it would be another one.
    most = min(jnp.iinfo(kind).max for kind in (indices.dtype, jnp.int32))
    return jnp.clip(indices, 0, at_most(most, size)).astype(jnp.int32)
