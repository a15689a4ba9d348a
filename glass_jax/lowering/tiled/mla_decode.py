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
    common.say_padding("mla_decode", sizes, padded)
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
        queries=queries if params.causal else 1,
        heads=heads if params.causal else padded["rows"],
    )
    flat = common.pad(q.reshape(batch, rows, depth), (batch, padded["rows"], padded["d"]))
    cache = common.pad(kv_cache.reshape(pages, page, depth), (pages, page, padded["d"]))
    sinks = common.pad(jnp.tile(attn_sink, (1, queries)), (batch, padded["rows"]))
    out, lse = common.run(
        kernel, flat, cache, block_table, cache_seqlens, sinks, implementation=params.implementation, chip=params.chip
    )
    out = out[:, :rows, : params.head_dim_v].reshape(batch, queries, heads, params.head_dim_v)
    return out, jnp.swapaxes(lse[:, :rows].reshape(batch, queries, heads), 1, 2)


def check_alignment(q: jax.Array, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes D and the value's size without padding."""
    sizes = {"d": q.shape[-1], "head_dim_v": params.head_dim_v}
    common.check_aligned("mla_decode", sizes, dict.fromkeys(sizes, kernels.ALIGNMENT))
