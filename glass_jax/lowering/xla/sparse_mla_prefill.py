"""The formula of ``sparse_mla_prefill`` and of its gradient: attention over chosen tokens in plain JAX.

A query's tokens are a sequence in pages of one token each, its indices their table: one query after the other is what
``mla_decode`` computes of it, and only the tokens of one step of one query are ever gathered.
"""

from __future__ import annotations

import math
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
      q: ``[*batch, Sq, H, D]``. A batch dimension is equal in all operands or 1 in some.
      kv: ``[*batch, Skv, 1, D]`` of the same type.
      indices: ``[*batch, Sq, 1, topk]`` int32, each less than Skv; what is below 0 counts for nothing.
      sink: ``[*batch, Sq, H]`` of the accumulator's type, -inf for none.
      head_dim_v: how many of a token's ``D`` numbers are its value.
      softmax_scale: what scores are multiplied by.

    Returns:
      ``out [*batch, Sq, H, head_dim_v]`` of the operands' type, the largest scores and ``lse``, both
      ``[*batch, Sq, H]`` of the accumulator's.
    """
    batch = batch_shape(q, kv, indices, sink)
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return nothing((*batch, *q.shape[-3:]), q.dtype, head_dim_v)
    # As a rule all indices name a token: the largest steps divide these evenly.
    topk, ((most, _), *shorter) = indices.shape[-1], mla_decode.STEPS
    size = -(-topk // -(-topk // most))
    statics = {"head_dim_v": head_dim_v, "softmax_scale": softmax_scale, "causal": False}
    row = partial(mla_decode.row, of_tokens(kv, batch), **statics, steps=((size, size), *shorter))

    def of_query(query, chosen, sink):
        return row(query[None], *in_front(chosen[0]), sink)

    arrays = of_queries(q, batch), of_indices(indices, kv, batch), of_queries(sink, batch)
    out, largest, lse = pages.of_each(of_query, *arrays)
    return tuple(x.reshape(*batch, -1, *x.shape[1:]) for x in (out[:, 0], largest[..., 0], lse[..., 0]))


# --- batches -------------------------------------------------------------------------------------------------------


def batch_shape(q: jax.Array, *operands: jax.Array) -> tuple[int, ...]:
    """The batch dimensions of the operands together, of which ``q`` has as many as the others."""
    return jnp.broadcast_shapes(*(x.shape[: q.ndim - 3] for x in (q, *operands)))


def of_queries(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """``[*batch, Sq, ...]``, some of the batch perhaps 1, with the queries of all sequences one after the other."""
    tail = x.shape[len(batch) :]
    return jnp.broadcast_to(x, (*batch, *tail)).reshape(-1, *tail[1:])


def of_tokens(kv: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """``[*batch, Skv, 1, D]`` with the tokens of all sequences one after the other; once if all have the same."""
    return kv.reshape(-1, *kv.shape[-2:]) if _is_shared(kv, batch) else of_queries(kv, batch)


def of_indices(indices: jax.Array, kv: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Indices ``[*batch, Sq, 1, topk]`` of each sequence's tokens as those of :func:`of_tokens`, -1 for none."""
    flat, count = of_queries(indices, batch), kv.shape[-3]
    if _is_shared(kv, batch):
        return flat
    first = jnp.arange(math.prod(batch), dtype=jnp.int32) * count
    return jnp.where(flat >= 0, flat + jnp.repeat(first, indices.shape[-3])[:, None, None], -1)


def _is_shared(kv: jax.Array, batch: tuple[int, ...]) -> bool:
    return all(size == 1 for size in kv.shape[: len(batch)])


# --- queries -------------------------------------------------------------------------------------------------------


def nothing(shape: tuple[int, ...], dtype: jnp.dtype, head_dim_v: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of queries ``[*batch, Sq, H, D]`` that see no token."""
    lse = jnp.full(shape[:-1], jnp.inf, accumulator(dtype))
    return jnp.zeros((*shape[:-1], head_dim_v), dtype), -lse, lse


def in_front(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices ``[..., topk]`` that are not below 0, in their order, before the others, and how many those are."""
    left_out = indices < 0
    moved = lambda: lax.sort((left_out, indices), num_keys=1)[1]  # noqa: E731
    # As a rule they are in front already; only where they are not is there something to sort.
    scattered = (left_out[..., :-1] & ~left_out[..., 1:]).any()
    return lax.cond(scattered, moved, lambda: indices), jnp.sum(~left_out, -1, dtype=jnp.int32)


# --- derivatives ---------------------------------------------------------------------------------------------------
#
# The sink is one more score, of a token with value 0. With p the probabilities and ds the tangents of the scores, the
# tangent of lse is the sum of p ds as if there were no sink, and that of out the sum of (p ds) v + p dv, less out times
# what the logarithm of p's divisor gains. With dp = d_out v', the gradients of the scores are p (dp - delta) and the
# sink's is -p delta, where delta is the sum of d_out * out.


def sparse_mla_prefill_tangent(
    d_q: jax.Array,
    d_kv: jax.Array,
    d_sink: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    sink: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *,
    head_dim_v: int,
    softmax_scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Tangents of ``out`` and ``lse``, one query after the other.

    Args:
      d_q: tangent of ``q``.
      d_kv: tangent of ``kv``.
      d_sink: tangent of ``sink``.
      q: operand of :func:`sparse_mla_prefill`, like ``kv``, ``indices``, ``sink``, ``head_dim_v``, ``softmax_scale``.
      kv: see ``q``.
      indices: see ``q``.
      sink: see ``q``.
      out: its first result.
      lse: its last result.
      head_dim_v: see ``q``.
      softmax_scale: see ``q``.
    """
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return jnp.zeros_like(out), jnp.zeros_like(lse)
    batch, dtype = batch_shape(q, kv, indices, sink), accumulator(q.dtype)
    tokens, d_tokens = of_tokens(kv, batch), of_tokens(d_kv, batch)
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def of_query(operands):
        query, d_query, out = (bits.back(x, q.dtype) for x in operands[:3])
        chosen, sink, d_sink, lse = operands[3:]
        keys, alone, (sunk, kept) = _chosen(query, tokens, chosen[0], sink, lse, softmax_scale)
        d_keys = _gathered(d_tokens, chosen[0])
        d_scores = (product("hd,kd->hk", d_query, keys) + product("hd,kd->hk", query, d_keys)) * softmax_scale
        d_lse = jnp.sum(alone * d_scores, -1)
        weighted = [(alone * kept[:, None] * by).astype(kv.dtype) for by in (d_scores, 1)]
        # All of D is summed: to cut the values out of the tokens first would copy them.
        d_out = product("hk,kd->hd", weighted[0], keys) + product("hk,kd->hd", weighted[1], d_keys)
        d_out = d_out[:, :head_dim_v] - out * (kept * d_lse + sunk * d_sink)[:, None]
        return bits.of(d_out.astype(q.dtype)), d_lse

    operands = [bits.of(of_queries(x, batch)) for x in (q, d_q, out)]
    operands += [of_indices(indices, kv, batch), *(of_queries(x, batch) for x in (sink, d_sink, lse))]
    d_out, d_lse = lax.map(of_query, tuple(operands))
    return bits.back(d_out, q.dtype).reshape(out.shape), d_lse.reshape(lse.shape)


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
    """Gradients of ``q``, ``kv`` and ``sink``, one query after the other; that of ``kv`` in the accumulator's type.

    Gradients of the largest scores are taken to be 0.

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
    batch, dtype = batch_shape(q, kv, indices, sink), accumulator(q.dtype)
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return jnp.zeros_like(q), jnp.zeros_like(kv, dtype), jnp.zeros_like(sink)
    tokens, depth = of_tokens(kv, batch), kv.shape[-1]
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def of_query(d_kv, operands):
        query, out, d_out = (bits.back(x, q.dtype) for x in operands[:3])
        chosen, sink, lse, d_lse = operands[3:]
        keys, alone, (sunk, kept) = _chosen(query, tokens, chosen[0], sink, lse, softmax_scale)
        weights = alone * kept[:, None]
        delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), -1)
        d_values = jnp.pad(d_out, ((0, 0), (0, depth - head_dim_v)))  # the values are not cut out of the keys: a copy
        d_scores = weights * (product("hd,kd->hk", d_values, keys) - delta[:, None]) + alone * d_lse[:, None]
        d_scores = (d_scores * softmax_scale).astype(kv.dtype)
        d_keys = product("hk,hd->kd", d_scores, query) + product("hk,hd->kd", weights.astype(kv.dtype), d_values)
        # Beyond the last token nothing is added.
        d_kv = d_kv.at[jnp.where(chosen[0] >= 0, chosen[0], tokens.shape[0])].add(d_keys, mode="drop")
        d_query = product("hk,kd->hd", d_scores, keys).astype(q.dtype)
        return d_kv, (bits.of(d_query), -sunk * delta)

    operands = [bits.of(of_queries(x, batch)) for x in (q, out, d_out)]
    operands += [of_indices(indices, kv, batch), *(of_queries(x, batch) for x in (sink, lse, d_lse))]
    d_kv, (d_q, d_sink) = lax.scan(of_query, jnp.zeros((tokens.shape[0], depth), dtype), tuple(operands))
    return (
        _sum_to(bits.back(d_q, q.dtype), q.shape, batch),
        _sum_to(d_kv, kv.shape, batch),
        _sum_to(d_sink, sink.shape, batch),
    )


def _chosen(
    query: jax.Array, tokens: jax.Array, chosen: jax.Array, sink: jax.Array, lse: jax.Array, softmax_scale: float
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """What one query attends to: its tokens ``[topk, D]``, 0 where an index names none, and its probabilities.

    Returns:
      The tokens, the probabilities ``[H, topk]`` that they would have without a sink, and for each head what part of
      all probability is the sink's, and the rest of it.
    """
    keys = _gathered(tokens, chosen)
    scores = jnp.einsum("hd,kd->hk", query, keys, preferred_element_type=accumulator(query.dtype)) * softmax_scale
    alone = jnp.where(chosen >= 0, jnp.exp(scores - lse[:, None]), 0)
    blind = lse == jnp.inf
    shares = (jax.nn.sigmoid(x) for x in (sink - lse, lse - sink))
    return keys, alone, tuple(jnp.where(blind, 0, share) for share in shares)


def _gathered(tokens: jax.Array, chosen: jax.Array) -> jax.Array:
    """``[topk, D]``, 0 where an index names no token."""

    def gather(chosen):
        return bits.back(bits.of(tokens[:, 0]).at[chosen].get(mode="clip"), tokens.dtype)

    seen = chosen >= 0
    return jnp.where(seen[:, None], in_a_branch(seen.any(), gather, chosen), 0)


def _sum_to(gradient: jax.Array, shape: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array:
    """The gradient of all sequences' queries, or tokens, as one of an operand, summed where that serves several."""
    tail = shape[len(batch) :]
    whole = gradient.reshape(*(batch if gradient.size > math.prod(tail) else (1,) * len(batch)), *tail)
    axes = [d for d, size in enumerate(shape) if size != whole.shape[d]]
    return jnp.sum(whole, axes, keepdims=True, dtype=accumulator(whole.dtype)).astype(whole.dtype) if axes else whole
