"""Groups of rows, as grouped products walk over them: where they are, and tiles of rows of one group each.

``starts`` and ``ends``, int32 ``[B, G]``, say where groups begin and end: B lists of G groups, each over ``m`` rows of
its own. In a list the groups are in order and disjoint; there may be rows of no group before, between and after them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glass_jax.lowering import sizes as symbols


class Tiles(NamedTuple):
    """Tiles of at most ``block`` rows of one group, in the order of the rows.

    Attributes:
      batch: int32 ``[T]``, which list of groups the tile is of.
      group: int32 ``[T]``, its group in that list.
      row: int32 ``[T]``, its first row, among the ``m`` of that list.
      rows: int32 ``[T]``, how many it has; 0 for the entries that are no tiles, which come last.
      count: int32 ``[]``, how many tiles there are.
    """

    batch: jax.Array
    group: jax.Array
    row: jax.Array
    rows: jax.Array
    count: jax.Array


def one_after_another(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """``starts`` and ``ends`` of groups of these ``sizes``, int ``[B, G]``, that fill ``m`` rows from the first one on.

    Rows beyond the last one do not exist, and a negative size is none.
    """
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes, 0, m).astype(jnp.int32), axis=1), m)
    return jnp.pad(ends[:, :-1], ((0, 0), (1, 0))), ends


def most_tiles(groups: int, m: int, block: int) -> int:
    """How many tiles ``groups`` groups of together ``m`` rows have at most."""
    present = min(groups, m) if symbols.known(groups, m) else groups
    return present + (m - present) // block


def tiles(starts: jax.Array, ends: jax.Array, m: int, block: int) -> Tiles:
    """The tiles of all groups; ``T`` is ``B * most_tiles(G, m, block)``."""
    batch, groups = starts.shape
    starts, ends = starts.ravel(), ends.ravel()
    counts = -(-(ends - starts) // block)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(batch * most_tiles(groups, m, block), dtype=jnp.int32)
    exists = index < last[-1]
    pair = jnp.where(exists, _first_after(index, last), 0)
    row = jnp.where(exists, starts[pair] + (index - (last - counts)[pair]) * block, 0)
    rows = jnp.where(exists, jnp.minimum(ends[pair] - row, block), 0)
    return Tiles(pair // groups, pair % groups, row, rows, last[-1])


def _first_after(index: jax.Array, last: jax.Array) -> jax.Array:
    """For each of ``index`` the place of the first element of ``last``, in rising order, that is larger."""
    if symbols.known(last.shape[0]):
        return jnp.searchsorted(last, index, side="right").astype(jnp.int32)
    return jnp.sum(last <= index[:, None], axis=1, dtype=jnp.int32)


def belongs(starts: jax.Array, ends: jax.Array, m: int) -> jax.Array:
    """Whether a row is of any group: bool ``[B, m]``."""
    row = jnp.arange(m, dtype=jnp.int32)
    return jnp.any((starts[:, :, None] <= row) & (row < ends[:, :, None]), axis=1)


class Regrouped(NamedTuple):
    """Places for rows in another order: the rows of one group end to end, in blocks of which each has one group only.

    Attributes:
      source: int32 ``[most_blocks * block]``, the row, of all ``B * m``, that goes to each place; ``B * m``: none.
      first: int32 ``[P]``, the first place of each group.
      blocks: int32 ``[P]``, how many blocks it has, at least one.
    """

    source: jax.Array
    first: jax.Array
    blocks: jax.Array


def most_blocks(groups: int, rows: int, block: int) -> int:
    """How many blocks ``groups`` groups of together ``rows`` rows have at most, if each has at least one."""
    return groups + max(rows - 1, 0) // block


def regroup(starts: jax.Array, ends: jax.Array, m: int, block: int, *, join_lists: bool) -> Regrouped:
    """Places for the rows of each group; with ``join_lists`` group g of all lists is one, so P is G, else ``B * G``."""
    batch, count = starts.shape
    sizes = ends - starts
    before = jnp.cumsum(sizes, axis=0) - sizes if join_lists else jnp.zeros_like(sizes)
    total = sizes.sum(0, dtype=jnp.int32) if join_lists else sizes.ravel()
    blocks = jnp.maximum(-(-total // block), 1)
    first = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * block

    row = jnp.arange(m, dtype=jnp.int32)
    group = jax.vmap(lambda x: jnp.searchsorted(x, row, side="right"))(ends)
    known = jnp.minimum(group, count - 1)
    starts, before, places = (
        jnp.take_along_axis(x, known, axis=1)
        for x in (starts, before, jnp.broadcast_to(first.reshape(-1, count), (batch, count)))
    )
    capacity = block * most_blocks(len(total), batch * m, block)
    place = jnp.where((group < count) & (starts <= row), places + before + row - starts, capacity)
    every = jnp.arange(batch * m, dtype=jnp.int32)
    source = jnp.full(capacity, batch * m, jnp.int32).at[place.ravel()].set(every, mode="drop")
    return Regrouped(source, first, blocks)
