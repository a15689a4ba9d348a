"""``mla_decode`` on its tile kernel: queries and heads folded into rows, rows padded to what the hardware takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import mla_decode as kernels
from glass_jax.lowering.xla import mla_decode as formula


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    attn_sink: jax.Array,
    *,
    params,
) -> tuple[jax.Array, jax.Array]:
    """Attention over a paged cache by the kernel; operands and ``params`` as in ``primitives.mla_decode``."""
    operands = q, kv_cache, block_table, cache_seqlens, attn_sink
    out, _, lse = attend("mla_decode", *operands, params=params, causal=params.causal)
    return out, lse


def attend(
    name: str,
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    attn_sink: jax.Array,
    *,
    params,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The operation ``name`` by the kernel: the results of :func:`mla_decode`, between them the largest scores.

    Args:
      name: of the operation, for what is said of padding.
      q: operand of :func:`mla_decode`, like ``kv_cache``, ``block_table``, ``cache_seqlens`` and ``attn_sink``.
      kv_cache: see ``q``.
      block_table: see ``q``.
      cache_seqlens: see ``q``.
      attn_sink: see ``q``.
      params: ``head_dim_v``, ``softmax_scale`` and those of every operation.
      causal: whether the queries are the last tokens of their sequence.

    Returns:
      ``out``, the largest score ``[B, H, Sq]``, -inf of a query that sees no token, and ``lse``.
    """
    batch, queries, heads, depth = q.shape
    pages, page, _, _ = kv_cache.shape
    if 0 in (*q.shape, *kv_cache.shape, *block_table.shape):
        return formula.nothing(q, params.head_dim_v)
    rows = queries * heads
    blocks, block = kernels.block_rows(rows)
    sizes = {"rows": rows, "d": depth, "head_dim_v": params.head_dim_v}
    padded = {
        "rows": blocks * block,
        "d": common.next_multiple(depth, kernels.ALIGNMENT),
        "head_dim_v": common.next_multiple(params.head_dim_v, kernels.ALIGNMENT),
    }
    common.say_padding(name, sizes, padded)
    kernel = kernels.MlaDecodeKernel(
        batch=batch,
        rows=padded["rows"],
        d=padded["d"],
        dv=padded["head_dim_v"],
        pages=pages,
        page=page,
        table_pages=block_table.shape[1],
        dtype=str(q.dtype),
        scale=params.softmax_scale,
        queries=queries if causal else 1,
        heads=heads if causal else padded["rows"],
    )
    flat = common.pad(q.reshape(batch, rows, depth), (batch, padded["rows"], padded["d"]))
    cache = common.pad(kv_cache.reshape(pages, page, depth), (pages, page, padded["d"]))
    sinks = common.pad(jnp.tile(attn_sink, (1, queries)), (batch, padded["rows"]))
    out, *rest = common.run(
        kernel, flat, cache, block_table, cache_seqlens, sinks, implementation=params.implementation, chip=params.chip
    )
    out = out[:, :rows, : params.head_dim_v].reshape(batch, queries, heads, params.head_dim_v)
    largest, lse = (jnp.swapaxes(x[:, :rows].reshape(batch, queries, heads), 1, 2) for x in rest)
    return out, largest, lse


def check_alignment(name: str, q: jax.Array, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes D and the value's size without padding."""
    sizes = {"d": q.shape[-1], "head_dim_v": params.head_dim_v}
    common.check_aligned(name, sizes, dict.fromkeys(sizes, kernels.ALIGNMENT))
