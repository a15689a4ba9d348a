"""Floats of 8 and 16 bits as the integers of their bits.

XLA:CPU slices, gathers and updates them as float32: it would convert a whole array of which each step of a loop reads
or writes a part, before the loop or in every step. Integers it moves as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def of(x: jax.Array) -> jax.Array:
    """``x`` as unsigned integers if it has 8 or 16 bits, else as it is."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if x.dtype.itemsize < 4 else x


def back(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What :func:`of` was of."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
