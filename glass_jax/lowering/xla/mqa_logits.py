"""The formula of ``mqa_logits``: blocks of queries, all their heads together, over blocks of the keys that they see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import sizes
from glass_jax.lowering.xla import bits, gemm
from glass_jax.lowering.xla.gemm import accumulator

# Products of queries and keys at a time: they stay in the cache of a CPU core. The heads of a query are rows.
_BLOCK = 1 << 18
_ROWS = 2048

RANKS = (3, 2, 1, 2, 1, 1, 1)  # of the operands, without batch dimensions


def mqa_logits(
    q: jax.Array,
    kv: jax.Array,
    kv_scale: jax.Array,
    weights: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """``kv_scale * sum over heads of weights * relu(q kv')``, minus infinity outside of a query's range.

    Args:
      q: ``[*batch, Sq, H, D]``. A batch dimension is equal in all operands or 1 in some.
      kv: ``[*batch, Skv, D]`` of the same type.
      kv_scale: ``[*batch, Skv]``, of the result's type.
      weights: ``[*batch, Sq, H]``, of the result's type.
      starts: ``[*batch, Sq]``, int32: the first key of each query.
      ends: ``[*batch, Sq]``, int32: the first key after those.
      columns: ``[*1, Skv]``, int32: numbers of the keys, one after the other.

    Returns:
      ``[*batch, Sq, Skv]``, :func:`accumulator` of ``q``'s type.
    """
    operands = (q, kv, kv_scale, weights, starts, ends, columns)
    if not (q.size and kv.size):
        return differentiable(*operands)
    batch = batch_shape(*operands)
    folded = fold(*operands)
    if folded[0].shape[0] == 1:
        out = _sequence(*(x[0] for x in folded))
    else:
        out = lax.map(lambda sequence: _sequence(*sequence), folded)
    return out.reshape(*batch, q.shape[-3], kv.shape[-2])


def batch_shape(*operands: jax.Array) -> tuple[int, ...]:
    """The batch dimensions of the operands together."""
    return jnp.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in zip(operands, RANKS, strict=True)))


def fold(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands with one batch dimension, ranges relative to the first key: no columns are needed then.

    Queries of a batch that shares its keys become the queries of one sequence.
    """
    q, kv, kv_scale, weights, starts, ends, columns = operands
    first = columns[(0,) * columns.ndim]
    batch = batch_shape(*operands)
    shared = kv[..., 0, 0].size == kv_scale[..., 0].size == 1

    def whole(x: jax.Array, rank: int) -> jax.Array:
        return jnp.broadcast_to(x, (*batch, *x.shape[-rank:])).reshape(-1, *x.shape[-rank:])

    rows = [whole(x, rank) for x, rank in ((q, 3), (weights, 2), (starts - first, 1), (ends - first, 1))]
    if shared:
        q, weights, starts, ends = (x.reshape(1, -1, *x.shape[2:]) for x in rows)
        return q, kv.reshape(1, *kv.shape[-2:]), kv_scale.reshape(1, -1), weights, starts, ends
    q, weights, starts, ends = rows
    return q, whole(kv, 2), whole(kv_scale, 1), weights, starts, ends


def _sequence(
    q: jax.Array, kv: jax.Array, kv_scale: jax.Array, weights: jax.Array, starts: jax.Array, ends: jax.Array
) -> jax.Array:
    """The logits ``[Sq, Skv]`` of operands without batch dimensions."""
    (length, heads, _), keys = q.shape, kv.shape[0]
    queries = sizes.at_most(max(_ROWS // heads, 1), length)
    block = sizes.at_most(_BLOCK // (queries * heads), keys)
    if not sizes.known(length, keys):  # perhaps less than a block: whole ones, then, of which some see nothing
        of_queries, of_keys = (-(-size // part) * part - size for size, part in ((length, queries), (keys, block)))
        q, weights, starts, ends = (_extended(x, of_queries) for x in (q, weights, starts, ends))
        kv, kv_scale = _extended(kv, of_keys), _extended(kv_scale, of_keys)
    return _in_blocks(q, kv, kv_scale, weights, starts, ends, queries, block)[:length, :keys]


def _extended(x: jax.Array, count: int) -> jax.Array:
    """``x`` and ``count`` elements of 0 after those of its first dimension."""
    return jnp.pad(x, [(0, count), *((0, 0) for _ in x.shape[1:])])


def _in_blocks(
    q: jax.Array,
    kv: jax.Array,
    kv_scale: jax.Array,
    weights: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    queries: int,
    block: int,
) -> jax.Array:
    """:func:`_sequence` in blocks of as many queries and keys."""
    (length, heads, depth), keys = q.shape, kv.shape[0]
    sees = starts < ends
    q_bits, kv_bits = bits.of(q), bits.of(kv)

    def of_queries(step: jax.Array | int, out: jax.Array) -> jax.Array:
        # The last block begins before the end of the one before, here and below.
        row = jnp.minimum(step * queries, length - queries).astype(jnp.int32)  # as the numbers of keys are

        def mine(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, row, queries)

        # As it is multiplied, once for all keys.
        q_block = gemm.operand(bits.back(mine(q_bits), q.dtype)).reshape(-1, depth)
        first, end = mine(starts), mine(ends)

        def of_keys(step: jax.Array, out: jax.Array) -> jax.Array:
            key = jnp.minimum(step * block, keys - block)
            kv_block = bits.back(lax.dynamic_slice_in_dim(kv_bits, key, block), kv.dtype)
            s = gemm.gemm(q_block, kv_block, transpose_rhs=True, activation="relu", out_dtype=accumulator(q.dtype))
            # Over the heads: as a product it is spread over the threads, as a sum of few rows it is not.
            total = lax.dot_general(mine(weights), s.reshape(queries, heads, -1), (((1,), (1,)), ((0,), (0,))))
            total = total * lax.dynamic_slice_in_dim(kv_scale, key, block)
            column = key + jnp.arange(block, dtype=jnp.int32)
            seen = (first[:, None] <= column) & (column < end[:, None])
            return lax.dynamic_update_slice(out, jnp.where(seen, total, -jnp.inf), (row, key))

        lowest = jnp.min(jnp.where(mine(sees), first, keys)) // block
        highest = (jnp.max(jnp.where(mine(sees), end, 0)) + block - 1) // block
        return lax.fori_loop(jnp.maximum(lowest, 0), jnp.minimum(highest, -(-keys // block)), of_keys, out)

    nothing = jnp.full((length, keys), -jnp.inf, kv_scale.dtype)
    return lax.fori_loop(0, -(-length // queries), of_queries, nothing)


def differentiable(
    q: jax.Array,
    kv: jax.Array,
    kv_scale: jax.Array,
    weights: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """:func:`mqa_logits` in JAX that has derivatives of every order, one head at a time, which none is kept of."""
    dtype = accumulator(q.dtype)
    wide = kv.astype(dtype)  # in which its gradient is summed over the heads

    @jax.checkpoint
    def add(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q_head, weight = head
        s = jnp.einsum("...sd,...nd->...sn", q_head, wide.astype(kv.dtype), preferred_element_type=dtype)
        return total + jax.nn.relu(s) * weight[..., None], None  # relu, whose derivative at 0 is 0

    # Zeros that are sharded and vary as the sums will.
    of_query = q.astype(dtype).sum((-2, -1)) + weights.sum(-1)
    of_key = wide.sum(-1) + kv_scale
    zeros = jnp.zeros_like(of_query[..., :, None] + of_key[..., None, :])
    total, _ = lax.scan(add, zeros, (jnp.moveaxis(q, -2, 0), jnp.moveaxis(weights, -1, 0)))
    column = columns[..., None, :]
    seen = (starts[..., None] <= column) & (column < ends[..., None])
    return jnp.where(seen, total * kv_scale[..., None, :], -jnp.inf)
