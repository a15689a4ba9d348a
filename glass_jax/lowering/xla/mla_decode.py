"""The formula of ``mla_decode``: attention over a paged latent cache in plain JAX, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla import online_softmax, pages
from glass_jax.lowering.xla.gemm import accumulator

# Tokens of a step, and how many must be left for one: what it fetches, 1.2 MB with D 576 in 16 bits, stays in the cache
# of a CPU core; the end of a sequence, or a short one, goes in smaller steps.
STEPS = ((1024, 1024), (512, 512), (128, 1))


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    attn_sink: jax.Array,
    *,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its own tokens; arguments as in ``primitives.mla_decode``.

    A row is computed by itself, in steps that depend on its length only: the same operations on arrays of the same
    shapes, whatever stands in the other rows and however many there are, so that its result is the same bit for bit.

    Args:
      q: ``[B, Sq, H, D]``.
      kv_cache: ``[pages, page, 1, D]`` of the same type.
      block_table: ``[B, n]`` int32.
      cache_seqlens: ``[B]`` int32; what is outside 0 to ``n * page`` counts as the nearer of these.
      attn_sink: ``[B, H]`` of the accumulator's type, -inf for none.
      head_dim_v: how many of a token's ``D`` numbers are its value.
      softmax_scale: what scores are multiplied by.
      causal: query i does not see the last ``Sq - 1 - i`` tokens.

    Returns:
      ``out [B, Sq, H, head_dim_v]`` of the operands' type and ``lse [B, H, Sq]`` of the accumulator's.
    """
    if 0 in (*q.shape, *kv_cache.shape, *block_table.shape):
        out, _, lse = nothing(q, head_dim_v)
        return out, lse
    of_row = partial(row, kv_cache, head_dim_v=head_dim_v, softmax_scale=softmax_scale, causal=causal)
    lengths = jnp.clip(cache_seqlens, 0, block_table.shape[1] * kv_cache.shape[1])
    out, _, lse = pages.of_each(of_row, q, block_table, lengths, attn_sink)
    return out, lse


def nothing(q: jax.Array, head_dim_v: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``out``, the largest scores and ``lse`` of queries that see no token."""
    batch, queries, heads, _ = q.shape
    out = jnp.zeros((batch, queries, heads, head_dim_v), q.dtype)
    lse = jnp.full((batch, heads, queries), jnp.inf, accumulator(q.dtype))
    return out, -lse, lse


def row(
    kv_cache: jax.Array,
    q: jax.Array,
    table: jax.Array,
    length: jax.Array,
    sink: jax.Array,
    *,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    steps: Sequence[tuple[int, int]] = STEPS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One row: a loop over its tokens.

    Args:
      kv_cache: ``[pages, page, 1, D]`` or ``[pages, page, D]``.
      q: ``[Sq, H, D]``.
      table: ``[n]`` int32.
      length: int32 scalar, 0 to ``n * page``.
      sink: ``[H]``.
      head_dim_v: see :func:`mla_decode`, like ``softmax_scale`` and ``causal``.
      softmax_scale: see ``head_dim_v``.
      causal: see ``head_dim_v``.
      steps: sizes of the loop's steps, in turn: of how many tokens, as long as how many are left.

    Returns:
      ``out [Sq, H, head_dim_v]``, the largest score ``[H, Sq]``, -inf of a query that sees no token, and
      ``lse [H, Sq]``.
    """
    queries, heads, depth = q.shape
    dtype = accumulator(q.dtype)
    product = partial(lax.dot_general, preferred_element_type=dtype)
    flat = q.reshape(queries * heads, depth)
    hidden = jnp.repeat(jnp.arange(queries - 1, -1, -1, dtype=jnp.int32), heads) if causal else 0
    end = jnp.broadcast_to(length - hidden, (queries * heads,))

    def more(state, least):
        return length - state[0] >= least

    def step(state, count):
        first, sums = state
        kv = pages.tokens(kv_cache, table, first, count, length).reshape(count, depth)
        scores = product(flat, kv, (((1,), (1,)), ((), ()))) * softmax_scale
        position = first + jnp.arange(count, dtype=jnp.int32)
        scores = jnp.where(position < end[:, None], scores, -jnp.inf)
        # All of D is summed: to cut the values out of the tokens first would copy them.
        weigh = lambda weights: product(weights.astype(kv.dtype), kv, (((1,), (0,)), ((), ())))  # noqa: E731
        return first + count, online_softmax.add(sums, scores, weigh)

    state = (jnp.zeros((), jnp.int32), online_softmax.nothing((queries * heads,), depth, dtype))
    for count, least in steps:
        state = lax.while_loop(partial(more, least=least), partial(step, count=count), state)
    _, (largest, total, values) = state
    empty = total == 0
    divisor = jnp.where(empty, 1, total + jnp.exp(jnp.tile(sink, queries) - jnp.where(empty, 0, largest)))
    out = values[:, :head_dim_v] / divisor[:, None]
    lse = jnp.where(empty, jnp.inf, largest + jnp.log(total))
    largest, lse = (x.reshape(queries, heads).T for x in (jnp.where(empty, -jnp.inf, largest), lse))
    return out.astype(q.dtype).reshape(queries, heads, head_dim_v), largest, lse
