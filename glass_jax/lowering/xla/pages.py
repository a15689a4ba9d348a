"""Sequences in a paged cache: one after the other, their tokens fetched a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla import bits
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

    def fetch(position):
        return bits.back(bits.of(cache).at[table[position // page], position % page].get(mode="clip"), cache.dtype)

    # Outside of a branch the integers would be a copy of the whole cache, made before the loop.
    position = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), length - 1)
    return in_a_branch(first < length, fetch, position)


def of_each(of_sequence: Callable, q: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of ``of_sequence`` for each element of the first dimension of the operands, one after the other.

    Args:
      of_sequence: returns a tuple of arrays, the first one of the type of ``q``, the others of 32 bits or more.
      q: ``[B, ...]``, what it takes first: read, as the first result is written, as integers.
      *operands: ``[B, ...]``, what it takes then.

    Returns:
      Its results, ``[B, ...]``.
    """

    def read(i):
        return bits.back(lax.dynamic_index_in_dim(bits.of(q), i, keepdims=False), q.dtype)

    def step(each):
        i, *rest = each
        first, *others = of_sequence(in_a_branch(i >= 0, read, i), *rest)
        return bits.of(first), *others

    first, *others = lax.map(step, (jnp.arange(q.shape[0]), *operands))
    return bits.back(first, q.dtype), *others
