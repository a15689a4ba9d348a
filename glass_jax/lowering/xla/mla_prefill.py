"""The formula of ``mla_prefill`` and of its gradient: attention in blocks, one head at a time.

A block of queries goes over the keys a block at a time, with the running sums of :mod:`online_softmax`. Blocks of keys
that no query of the block sees are left out, there are never more scores than those of one block, and a block fits a
core's cache: on a CPU that is several times as fast as all heads at once. The gradient computes the probabilities again
(Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import sizes
from glass_jax.lowering.xla import bits, online_softmax
from glass_jax.lowering.xla.gemm import accumulator

QUERIES, KEYS = 128, 256  # of a block


def mla_prefill(
    q: jax.Array, k: jax.Array, v: jax.Array, *segment_ids: jax.Array, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of what each query's probabilities were divided by.

    Args:
      q: ``[B, Sq, H, D]``.
      k: ``[B, Skv, H, D]``.
      v: ``[B, Skv, H, Dv]``.
      *segment_ids: none, or one array ``[B, Sq]``, where Sq and Skv are equal: queries see keys of their own id only.
      scale: what the products of queries and keys are multiplied by.
      causal: query i sees the keys up to i + Skv - Sq only.

    Returns:
      ``[B, Sq, H, Dv]`` in the type of ``q``, and ``[B, H, Sq]`` in :func:`accumulator` of it. A query that sees no key
      has 0 in the first and +inf in the second.
    """
    (batch, q_length, heads, _), dv = q.shape, v.shape[-1]
    dtype = accumulator(q.dtype)
    if not (q.size and k.size):
        return jnp.zeros((batch, q_length, heads, dv), q.dtype), jnp.full((batch, heads, q_length), jnp.inf, dtype)
    blocks = _Blocks(q_length, k.shape[1], causal)

    def head(operands):
        (q_head, k_head, v_head), ids = operands[:3], operands[3:]

        def of_queries(block):
            q_block = _read(q_head, block, q.dtype)

            def of_keys(step, sums):
                s = blocks.scores(q_block, _read(k_head, step, k.dtype), scale, block, step, ids)
                v_block = _read(v_head, step, v.dtype)
                return online_softmax.add(sums, s, lambda p: _dot(p.astype(v.dtype), v_block, (1, 0)))

            start = online_softmax.nothing((blocks.queries,), dv, dtype)
            m, total, o = lax.fori_loop(0, blocks.key_blocks(block), of_keys, start)
            blind = total == 0
            return jnp.where(blind[:, None], 0, o / total[:, None]), jnp.where(blind, jnp.inf, m + jnp.log(total))

        return lax.map(of_queries, jnp.arange(blocks.query_count))

    operands = (blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v), *blocks.of_ids(segment_ids, heads))
    out, lse = lax.map(head, operands)
    return _whole(out, batch, q_length, q.dtype), lse.reshape(batch, heads, -1)[..., :q_length]


def mla_prefill_tangent(
    d_q: jax.Array,
    d_k: jax.Array,
    d_v: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *segment_ids: jax.Array,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Tangents of ``out`` and ``lse``.

    With p the probabilities and ds those of the scores, the tangent of lse is the sum of p ds over a query's keys, and
    that of out (p ds) v + p dv, less out times the tangent of lse.

    Args:
      d_q: tangent of ``q``.
      d_k: tangent of ``k``.
      d_v: tangent of ``v``.
      q: operand of :func:`mla_prefill`, like ``k``, ``v``, ``segment_ids``, ``scale`` and ``causal``.
      k: see ``q``.
      v: see ``q``.
      out: its first result.
      lse: its second result.
      *segment_ids: see ``q``.
      scale: see ``q``.
      causal: see ``q``.
    """
    (batch, q_length, heads, _), dv = q.shape, v.shape[-1]
    dtype = accumulator(q.dtype)
    if not (q.size and k.size):
        return jnp.zeros_like(out), jnp.zeros_like(lse)
    blocks = _Blocks(q_length, k.shape[1], causal)

    def head(operands):
        q_head, d_q_head, lse_head, k_head, d_k_head, v_head, d_v_head, *ids = operands

        def of_queries(block):
            q_block, d_q_block = _read(q_head, block, q.dtype), _read(d_q_head, block, q.dtype)

            def of_keys(step, sums):
                total, values = sums
                k_block, d_k_block = _read(k_head, step, k.dtype), _read(d_k_head, step, k.dtype)
                p = jnp.exp(blocks.scores(q_block, k_block, scale, block, step, ids) - lse_head[block][:, None])
                ds = p * (_dot(d_q_block, k_block, (1, 1)) + _dot(q_block, d_k_block, (1, 1))) * scale
                values += _dot(ds.astype(v.dtype), _read(v_head, step, v.dtype), (1, 0))
                values += _dot(p.astype(v.dtype), _read(d_v_head, step, v.dtype), (1, 0))
                return total + ds.sum(-1), values

            start = jnp.zeros(blocks.queries, dtype), jnp.zeros((blocks.queries, dv), dtype)
            return lax.fori_loop(0, blocks.key_blocks(block), of_keys, start)

        return lax.map(of_queries, jnp.arange(blocks.query_count))

    operands = (
        blocks.of_queries(q),
        blocks.of_queries(d_q),
        blocks.rows(lse, jnp.inf),
        *map(blocks.of_keys, (k, d_k, v, d_v)),
        *blocks.of_ids(segment_ids, heads),
    )
    d_lse, values = lax.map(head, operands)
    d_lse = d_lse.reshape(batch, heads, -1)[..., :q_length]
    d_out = _whole(values, batch, q_length, dtype) - out * jnp.swapaxes(d_lse, 1, 2)[..., None]
    return d_out.astype(out.dtype), d_lse


def mla_prefill_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *segment_ids: jax.Array,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of ``q``, ``k`` and ``v``.

    With p the probabilities and dp = d_out v', those of the scores are p (dp - delta), where delta, the same for all
    keys of a query, is the sum of d_out * out less d_lse.

    Args:
      q: operand of :func:`mla_prefill`, like ``k``, ``v``, ``segment_ids``, ``scale`` and ``causal``.
      k: see ``q``.
      v: see ``q``.
      out: its first result.
      lse: its second result.
      d_out: gradient of ``out``.
      d_lse: gradient of ``lse``.
      *segment_ids: see ``q``.
      scale: see ``q``.
      causal: see ``q``.
    """
    (batch, q_length, heads, d), (_, k_length, _, dv) = q.shape, v.shape
    dtype = accumulator(q.dtype)
    if not (q.size and k.size):
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    blocks = _Blocks(q_length, k_length, causal)

    def head(operands):
        q_head, d_out_head, lse_head, delta_head, k_head, v_head, *ids = operands

        def of_keys(dq, step):
            k_block, v_block = _read(k_head, step, k.dtype), _read(v_head, step, v.dtype)

            def of_queries(block, state):
                dq, dk, dv = state
                q_block, d_out_block = _read(q_head, block, q.dtype), _read(d_out_head, block, q.dtype)
                s = blocks.scores(q_block, k_block, scale, block, step, ids)
                p = jnp.exp(s - lse_head[block][:, None])
                ds = p * (_dot(d_out_block, v_block, (1, 1)) - delta_head[block][:, None]) * scale
                ds = ds.astype(q.dtype)
                dv += _dot(p.astype(q.dtype), d_out_block, (0, 0))
                dk += _dot(ds, q_block, (0, 0))
                return dq.at[block].add(_dot(ds, k_block, (1, 0))), dk, dv

            state = (dq, jnp.zeros((blocks.keys, d), dtype), jnp.zeros((blocks.keys, dv), dtype))
            dq, *of_step = lax.fori_loop(blocks.first_query_block(step), blocks.query_count, of_queries, state)
            return dq, of_step

        nothing = jnp.zeros((blocks.query_count, blocks.queries, d), dtype)
        return lax.scan(of_keys, nothing, jnp.arange(blocks.key_count))

    delta = delta_of(out, d_out, d_lse)
    operands = (
        blocks.of_queries(q),
        blocks.of_queries(d_out),
        blocks.rows(lse, jnp.inf),
        blocks.rows(delta),
        blocks.of_keys(k),
        blocks.of_keys(v),
        *blocks.of_ids(segment_ids, heads),
    )
    d_q, (d_k, d_v) = lax.map(head, operands)
    return (
        _whole(d_q, batch, q_length, q.dtype),
        _whole(d_k, batch, k_length, k.dtype),
        _whole(d_v, batch, k_length, v.dtype),
    )


def delta_of(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """``[B, H, Sq]``: what gradients of a query's probabilities have in common, see :func:`mla_prefill_backward`."""
    sums = jnp.einsum("bshd,bshd->bhs", out, d_out, preferred_element_type=accumulator(out.dtype))
    return sums - d_lse


def quadratic(
    q: jax.Array, k: jax.Array, v: jax.Array, *segment_ids: jax.Array, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """:func:`mla_prefill` from all scores at once, in JAX that has derivatives of every order."""
    dtype = accumulator(q.dtype)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype) * dtype.type(scale)
    seen = jnp.ones(s.shape[-2:], bool)
    if causal:
        seen = jnp.tril(seen, s.shape[-1] - s.shape[-2])
    for ids in segment_ids:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    sees = seen.any(-1)  # where a query sees nothing, a score of 0 keeps infinities out of the derivatives
    s = jnp.where(seen, s, jnp.where(sees, -jnp.inf, 0)[..., None])
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(seen, jnp.exp(s - lse[..., None]), 0).astype(v.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", p, v, preferred_element_type=dtype).astype(q.dtype)
    return out, jnp.where(sees, lse, jnp.inf)


# --- blocks --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """How the queries and keys of a head are divided."""

    q_length: int
    k_length: int
    causal: bool

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return sizes.at_most(QUERIES, self.q_length)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return sizes.at_most(KEYS, self.k_length)

    @property
    def query_count(self) -> int:
        """Blocks of queries."""
        return -(-self.q_length // self.queries)

    @property
    def key_count(self) -> int:
        """Blocks of keys."""
        return -(-self.k_length // self.keys)

    @property
    def ahead(self) -> int:
        """Keys that the first query sees, less one: the last query sees all keys."""
        return self.k_length - self.q_length

    def key_blocks(self, block: jax.Array) -> jax.Array | int:
        """How many blocks of keys, from the first, the queries of ``block`` see."""
        if not self.causal:
            return self.key_count
        end = (block + 1) * self.queries + self.ahead
        return jnp.clip((end + self.keys - 1) // self.keys, 0, self.key_count)

    def first_query_block(self, step: jax.Array) -> jax.Array | int:
        """The first block of queries that sees any of the keys of ``step``; all after it do."""
        return jnp.clip((step * self.keys - self.ahead) // self.queries, 0) if self.causal else 0

    def scores(
        self, q: jax.Array, k: jax.Array, scale: float, block: jax.Array, step: jax.Array, ids: Sequence[jax.Array]
    ) -> jax.Array:
        """``[queries, keys]`` of a block of each, -inf where a query does not see the key."""
        s = _dot(q, k, (1, 1)) * scale
        row = block * self.queries + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        column = step * self.keys + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        seen = []
        if self.causal:
            seen.append(column <= row + self.ahead)
        if self.k_length % self.keys != 0:
            seen.append(column < self.k_length)
        if ids:
            seen.append(ids[0][block][:, None] == ids[1][step])
        return jnp.where(functools.reduce(jnp.logical_and, seen), s, -jnp.inf) if seen else s

    def of_queries(self, x: jax.Array) -> jax.Array:
        """``[B, Sq, H, D]`` as ``[B * H, blocks, queries, D]``."""
        return bits.of(self._divided(jnp.moveaxis(x, 2, 1), self.queries))

    def of_keys(self, x: jax.Array) -> jax.Array:
        """``[B, Skv, H, D]`` as ``[B * H, blocks, keys, D]``."""
        return bits.of(self._divided(jnp.moveaxis(x, 2, 1), self.keys))

    def rows(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """``[B, H, Sq]`` as ``[B * H, blocks, queries]``, ``fill`` in what is added."""
        return self._divided(x[..., None], self.queries, fill)[..., 0]

    def of_ids(self, segment_ids: Sequence[jax.Array], heads: int) -> list[jax.Array]:
        """Ids ``[B, S]`` of each head's queries and keys: ``[B * H, blocks, queries]``, ``[B * H, blocks, keys]``."""
        return [
            self._divided(jnp.repeat(ids, heads, 0)[:, None, :, None], size)[..., 0]
            for ids in segment_ids
            for size in (self.queries, self.keys)
        ]

    @staticmethod
    def _divided(x: jax.Array, size: int, fill: float = 0) -> jax.Array:
        batch, heads, length, width = x.shape
        count = -(-length // size)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * size - length), (0, 0)], constant_values=fill)
        return x.reshape(batch * heads, count, size, width)


def _whole(x: jax.Array, batch: int, length: int, dtype: jnp.dtype) -> jax.Array:
    """``[B * H, blocks, rows, D]`` as ``[B, length, H, D]``."""
    x = x.astype(dtype).reshape(batch, x.shape[0] // batch, -1, x.shape[-1])
    return jnp.moveaxis(x[:, :, :length], 1, 2)


def _read(x: jax.Array, block: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return bits.back(lax.dynamic_index_in_dim(x, block, keepdims=False), dtype)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    dims = (([contracted[0]], [contracted[1]]), ([], []))
    return lax.dot_general(a, b, dims, preferred_element_type=accumulator(a.dtype))
