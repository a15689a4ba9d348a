"""The formula of ``sparse_mla_prefill`` and of its gradient: attention over chosen tokens in plain JAX.

A query's tokens are a sequence in pages of one token each, its indices their table: one query after the other is what
``mla_decode`` computes of it, and only the tokens of one step of one query are ever gathered.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla import bits, mla_decode, pages
from glass_jax.lowering.xla.branches import in_a_branch
from glass_jax.lowering.xla.gemm import accumulator


def sparse_mla_prefill(
    q: jax.Array, kv: jax.Array, indices: jax.Array, sink: jax.Array, *, head_dim_v: int, softmax_scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each query over its own tokens; a query is computed by itself, whatever the others are.

    Args:
      q: ``[Sq, H, D]``.
      kv: ``[Skv, 1, D]`` of the same type.
      indices: ``[Sq, 1, topk]`` int32, each less than Skv; what is below 0 counts for nothing.
      sink: ``[Sq, H]`` of the accumulator's type, -inf for none.
      head_dim_v: how many of a token's ``D`` numbers are its value.
      softmax_scale: what scores are multiplied by.

    Returns:
      ``out [Sq, H, head_dim_v]`` of the operands' type, the largest scores and ``lse``, both ``[Sq, H]`` of the
      accumulator's.
    """
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return nothing(q, head_dim_v)
    # As a rule all indices name a token: the largest steps divide these evenly.
    topk, ((most, _), *shorter) = indices.shape[2], mla_decode.STEPS
    size = -(-topk // -(-topk // most))
    statics = {"head_dim_v": head_dim_v, "softmax_scale": softmax_scale, "causal": False}
    row = partial(mla_decode.row, kv, **statics, steps=((size, size), *shorter))

    def of_query(query, chosen, sink):
        return row(query[None], *in_front(chosen[0]), sink)

    out, largest, lse = pages.of_each(of_query, q, indices, sink)
    return out[:, 0], largest[..., 0], lse[..., 0]


def nothing(q: jax.Array, head_dim_v: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of queries that see no token."""
    out, largest, lse = mla_decode.nothing(q[:, None], head_dim_v)
    return out[:, 0], largest[..., 0], lse[..., 0]


def in_front(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices ``[..., topk]`` that are not below 0, in their order, before the others, and how many those are."""
    left_out = indices < 0
    moved = lambda: lax.sort((left_out, indices), num_keys=1)[1]  # noqa: E731
    # As a rule they are in front already; only where they are not is there something to sort.
    scattered = (left_out[..., :-1] & ~left_out[..., 1:]).any()
    return lax.cond(scattered, moved, lambda: indices), jnp.sum(~left_out, -1, dtype=jnp.int32)


def sparse_mla_prefill_backward(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    sink: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    head_dim_v: int,
    softmax_scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of ``q``, ``kv`` and ``sink``, one query after the other.

    The sink is one more score, of a token with value 0. With p the probabilities of :func:`sparse_mla_prefill` and
    dp = d_out v', those of the scores have the gradient p (dp - delta) and the sink -p delta, where delta is the sum of
    d_out * out. Gradients of the largest scores are taken to be 0.

    Args:
      q: operand of :func:`sparse_mla_prefill`, like ``kv``, ``indices``, ``sink``, ``head_dim_v``, ``softmax_scale``.
      kv: see ``q``.
      indices: see ``q``.
      sink: see ``q``.
      out: its first result.
      lse: its last result.
      d_out: gradient of ``out``.
      d_lse: gradient of ``lse``.
      head_dim_v: see ``q``.
      softmax_scale: see ``q``.
    """
    dtype = accumulator(q.dtype)
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return jnp.zeros_like(q), jnp.zeros_like(kv), jnp.zeros_like(sink)
    tokens, depth = kv.shape[0], kv.shape[2]
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def gather(chosen):
        return bits.back(bits.of(kv[:, 0]).at[chosen].get(mode="clip"), kv.dtype)

    def of_query(d_kv, operands):
        query, out, d_out = (bits.back(x, q.dtype) for x in operands[:3])
        chosen, sink, lse, d_lse = operands[3:]
        chosen = chosen[0]
        seen = chosen >= 0
        keys = jnp.where(seen[:, None], in_a_branch(seen.any(), gather, chosen), 0)
        scores = product("hd,kd->hk", query, keys) * softmax_scale
        alone = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0)  # the probabilities if there were no sink
        blind = lse == jnp.inf
        sunk = jnp.where(blind, 0, jax.nn.sigmoid(sink - lse))
        kept = jnp.where(blind, 0, jax.nn.sigmoid(lse - sink))
        weights = alone * kept[:, None]
        delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), -1)
        d_values = jnp.pad(d_out, ((0, 0), (0, depth - head_dim_v)))  # the values are not cut out of the keys: a copy
        d_scores = weights * (product("hd,kd->hk", d_values, keys) - delta[:, None]) + alone * d_lse[:, None]
        d_scores = (d_scores * softmax_scale).astype(kv.dtype)
        d_keys = product("hk,hd->kd", d_scores, query) + product("hk,hd->kd", weights.astype(kv.dtype), d_values)
        # Beyond the last token nothing is added.
        d_kv = d_kv.at[jnp.where(seen, chosen, tokens)].add(d_keys, mode="drop")
        d_query = product("hk,kd->hd", d_scores, keys).astype(q.dtype)
        return d_kv, (bits.of(d_query), -sunk * delta)

    operands = (*map(bits.of, (q, out, d_out)), indices, sink, lse, d_lse)
    d_kv, (d_q, d_sink) = lax.scan(of_query, jnp.zeros((tokens, depth), dtype), operands)
    return bits.back(d_q, q.dtype), d_kv.astype(kv.dtype)[:, None], d_sink
