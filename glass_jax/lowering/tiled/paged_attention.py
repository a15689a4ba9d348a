"""``paged_attention`` on its tile kernel: heads arranged in the cube's rows, odd pages and heads made whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import paged_attention as kernels

_PAGE = 64  # tokens of the pages that odd ones are copied into


def check_alignment(page: int, head_dim: int) -> None:
    """Raises HardwareConstraintError unless the hardware takes pages and heads of these sizes as they are."""
    multiples = dict.fromkeys(("page", "d"), kernels.ALIGNMENT)
    common.check_aligned("paged_attention", {"page": page, "d": head_dim}, multiples)


def paged_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, table: jax.Array, lengths: jax.Array, *, params
) -> jax.Array:
    """The operation by the kernel; operands and ``params`` as in ``primitives.paged_attention``."""
    if 0 in (*q.shape, *k_cache.shape, *table.shape):
        return jnp.zeros(q.shape, q.dtype)
    (batch, kv_heads, groups, dim), page = q.shape, k_cache.shape[1]
    lengths, table = jnp.clip(lengths, 0, table.shape[1] * page), jnp.clip(table, 0, k_cache.shape[0] - 1)
    width = common.next_multiple(dim, kernels.ALIGNMENT)
    whole = _PAGE if page % kernels.ALIGNMENT else page
    common.say_padding("paged_attention", {"page": page, "d": dim}, {"page": whole, "d": width})
    if whole != page:
        (k_cache, v_cache), table = _regroup((k_cache, v_cache), table)
    q, k_cache, v_cache = (common.pad(x, (*x.shape[:-1], width)) for x in (q, k_cache, v_cache))
    kernel = kernels.PagedAttentionKernel(
        batch=batch,
        groups=groups,
        kv_heads=kv_heads,
        head_dim=width,
        pages=k_cache.shape[0],
        page=whole,
        table_pages=table.shape[1],
        dtype=str(q.dtype),
        scale=params.scale,
    )
    tiles, live, half = kernel.rows
    halves = common.pad(q, (batch, kv_heads, 2 * tiles * live, width)).reshape(-1, 2 * tiles, live, width)
    rows = common.pad(halves, (*halves.shape[:2], half, width)).reshape(-1, 2 * tiles * half, width)
    (out,) = common.run(
        kernel, rows, k_cache, v_cache, table, lengths, implementation=params.implementation, chip=params.chip
    )
    out = out.reshape(*halves.shape[:2], half, width)[:, :, :live]
    return out.reshape(batch, kv_heads, -1, width)[:, :, :groups, :dim]


def _regroup(caches: tuple[jax.Array, ...], table: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The contexts' tokens in new pages of ``_PAGE``, and where they are.

    The kernel copies pages in the cube's blocks of 16 tokens. Larger pages would hold the same tokens in as many
    blocks: what is copied here is the contexts, not the caches.
    """
    batch, tokens = table.shape[0], table.shape[1] * caches[0].shape[1]
    pages = -(-tokens // _PAGE)
    copied = []
    for cache in caches:
        context = cache[table].reshape(batch, tokens, *cache.shape[2:])
        context = common.pad(context, (batch, pages * _PAGE, *cache.shape[2:]))
        copied.append(context.reshape(batch * pages, _PAGE, *cache.shape[2:]))
    return copied, jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
