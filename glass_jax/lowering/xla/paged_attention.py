"""The formula of ``paged_attention``: one query token a sequence over paged keys and values, in plain JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla import online_softmax, pages
from glass_jax.lowering.xla.gemm import accumulator

_TOKENS = 256  # of a step: its keys, 1 MB of float32 with 8 heads of 128, stay in the cache of a CPU core


def paged_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, table: jax.Array, lengths: jax.Array, *, scale: float
) -> jax.Array:
    """Attention of each sequence's query heads over its own tokens.

    A sequence is computed by itself, in steps of a fixed number of tokens: the same operations on arrays of the same
    shapes, whatever stands in the other rows and however many there are, so that its result is the same bit for bit.

    Args:
      q: ``[B, Hk, G, D]``, the query heads of each key-value head.
      k_cache: ``[pages, page, Hk, D]`` of the same type.
      v_cache: the same.
      table: ``[B, n]`` int32.
      lengths: ``[B]`` int32; what is outside 0 to ``n * page`` counts as the nearer of these.
      scale: what scores are multiplied by.

    Returns:
      ``[B, Hk, G, D]`` of the operands' type.
    """
    size = table.shape[1] * k_cache.shape[1]
    if 0 in (size, *k_cache.shape, *q.shape):
        return jnp.zeros(q.shape, q.dtype)
    (out,) = pages.of_each(partial(_row, k_cache, v_cache, scale), q, table, jnp.clip(lengths, 0, size))
    return out


def _row(
    k_cache: jax.Array, v_cache: jax.Array, scale: float, q: jax.Array, table: jax.Array, length: jax.Array
) -> tuple[jax.Array]:
    """One sequence: a loop over its tokens."""
    dtype = accumulator(q.dtype)
    scaled = q.astype(dtype) * scale

    def step(state):
        first, sums = state
        # Heads first, for the products, in the same pass that fetches and converts.
        k, v = (
            jnp.swapaxes(pages.tokens(cache, table, first, _TOKENS, length), 0, 1).astype(dtype)
            for cache in (k_cache, v_cache)
        )
        scores = jnp.einsum("hgd,htd->hgt", scaled, k, preferred_element_type=dtype)
        scores = jnp.where(first + jnp.arange(_TOKENS, dtype=jnp.int32) < length, scores, -jnp.inf)
        weigh = partial(jnp.einsum, "hgt,htd->hgd", preferred_element_type=dtype)
        return first + _TOKENS, online_softmax.add(sums, scores, lambda weights: weigh(weights, v))

    start = jnp.zeros((), jnp.int32), online_softmax.nothing(q.shape[:-1], q.shape[-1], dtype)
    _, (_, total, values) = lax.while_loop(lambda state: state[0] < length, step, start)
    # The largest score adds 1 to its sum: only an empty sequence has less.
    return ((values / jnp.maximum(total, 1)[..., None]).astype(q.dtype),)
