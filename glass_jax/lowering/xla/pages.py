"""Tokens of a paged cache, fetched a few at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla.branches import in_a_branch


def tokens(cache: jax.Array, table: jax.Array, first: jax.Array, count: int, length: jax.Array) -> jax.Array:
    """Tokens ``first`` to ``first + count`` of a sequence that lies in pages.

    Reads nothing but tokens of the sequence: beyond its end the last one is repeated, so that a caller who weighs those
    with 0 meets none of the numbers, NaN among them, that unused memory holds. For use in a loop over ``first``: no
    copy of the cache or of the sequence is made.

    Args:
      cache: ``[pages, page, ...]``, of 16, 32 or 64 bits.
      table: ``[n]`` int32, the pages of the sequence in order; entries past its end may hold anything.
      first: int32 scalar, less than ``length``.
      count: how many tokens.
      length: int32 scalar, tokens of the sequence: from 1 to ``n * page``.

    Returns:
      ``[count, ...]``.
    """
    page = cache.shape[1]
    bits = jnp.dtype(f"uint{8 * cache.dtype.itemsize}")

    def fetch(position):
        # XLA:CPU gathers 16-bit floats as float32, so they are gathered as integers.
        integers = lax.bitcast_convert_type(cache, bits)
        rows = integers.at[table[position // page], position % page].get(mode="clip")
        return lax.bitcast_convert_type(rows, cache.dtype)

    # Outside of a branch the integers would be a copy of the whole cache, made before the loop.
    position = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), length - 1)
    return in_a_branch(first < length, fetch, position)
