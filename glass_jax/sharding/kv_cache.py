"""Pages of a paged cache that ranks hold in parts, gathered on every rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.sharding import checks, exchange


def ring_gather_kv_cache(
    pages: jax.Array, axis_name: str, *, slots: jax.Array, cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Moves every rank's pages once around a ring; on each they land in ``cache`` where the page table expects them.

    With the page table of the cache, ``[B, pages]``, ``slots`` is the table's entry of each page that the rank holds.
    The P ranks make P - 1 steps. In each, a rank passes on what it received in the step before and writes it to its
    cache at the same time, so that it sends ``(P - 1) * pages.nbytes`` bytes and stores nothing twice.

    Call it inside ``jax.shard_map``, or under ``vmap`` with a named axis.

    Args:
      pages: ``[n, page, ...]`` of any dtype, the pages that a rank holds.
      axis_name: the mesh axis.
      slots: integers ``[n]``, where in ``cache`` each of these pages goes; -1: it holds nothing, and goes nowhere.
      cache: ``[N, page, ...]``, what the pages land in. Slots that no page goes to keep what they hold. Donated, it is
        written in place.

    Returns:
      cache: with all ranks' pages, bitwise the same on each rank in the slots that pages went to. If several pages name
        one slot, the last of the highest rank has it.
      lost: int32 ``[1]``, pages of this rank that named a slot and are not there: it is not in ``0 .. N - 1``, or
        another page has it.

    Raises:
      CollectiveError: shapes or dtypes do not fit together, or there is no such axis.
    """
    if pages.shape[1:] != cache.shape[1:] or pages.dtype != cache.dtype:
        raise errors.CollectiveError(
            f"ring_gather_kv_cache: pages {pages.dtype}{list(pages.shape)} and cache {cache.dtype}{list(cache.shape)} "
            "must agree in all but the number of pages"
        )
    if slots.shape != pages.shape[:1] or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise errors.CollectiveError(
            f"ring_gather_kv_cache: slots {slots.dtype}{list(slots.shape)} must be one integer for each of "
            f"{len(pages)} pages"
        )
    _, (ranks,) = checks.axes((axis_name,), "ring_gather_kv_cache")
    rank = lax.axis_index(axis_name)
    pages, slots, cache = (exchange.own(x, axis_name) for x in (pages, slots.astype(jnp.int32), cache))

    all_slots = lax.all_gather(slots, axis_name)
    valid = (all_slots >= 0) & (all_slots < len(cache))
    number = jnp.arange(all_slots.size, dtype=jnp.int32).reshape(all_slots.shape)
    # Slot N is nowhere: with mode="drop" XLA leaves out what is written there.
    nowhere = jnp.where(valid, all_slots, len(cache))
    last = jnp.full_like(slots, -1, shape=len(cache)).at[nowhere].max(number, mode="drop")
    lands = valid & (exchange.take(last, nowhere, fill=-1) == number)
    targets = jnp.where(lands, all_slots, len(cache))
    lost = jnp.sum((slots != -1) & ~lands[rank], dtype=jnp.int32)

    def land(step: jax.Array | int, block: jax.Array, cache: jax.Array) -> jax.Array:
        return cache.at[targets[(rank - step) % ranks]].set(block, mode="drop")

    def pass_on(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block, cache = state
        following = lax.ppermute(block, axis_name, [(r, (r + 1) % ranks) for r in range(ranks)])
        return following, land(step, block, cache)

    block, cache = lax.fori_loop(0, ranks - 1, pass_on, (pages, cache))
    return land(ranks - 1, block, cache), lost[None]
