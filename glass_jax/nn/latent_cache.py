"""The paged cache of latent attention: one row for each token, in pages that a table finds.

On a mesh, pages are split over the data and expert axes as sequences are: the n-th of these devices has the n-th part
of the pages, and the pages of its sequences have to be among them. Devices along the tensor axis have copies.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from glass_jax import errors
from glass_jax.nn.mesh import MeshAxes, Role

PAGES: tuple[Role, ...] = ("batch", None, None, None)
"""What splits a cache."""


def empty(pages: int, page_size: int, features: int, dtype: DTypeLike, axes: MeshAxes) -> jax.Array:
    """A cache that holds nothing, ``[pages, page_size, 1, features]``, as :func:`glass_jax.mla_decode` takes it.

    Raises:
      HardwareConstraintError: the pages do not split evenly over the mesh.
    """
    _check_split(pages, "pages", axes)
    return axes.constrain(jnp.zeros((pages, page_size, 1, features), dtype), *PAGES)


def write(cache: jax.Array, block_table: jax.Array, rows: jax.Array, positions: jax.Array, axes: MeshAxes) -> jax.Array:
    """``cache`` with the rows of new tokens.

    Args:
      cache: ``[pages, page_size, 1, D]``.
      block_table: int32 ``[B, n]``, the pages of each sequence in order.
      rows: ``[B, S, D]``.
      positions: int32 ``[B, S]``, where in its sequence each token is. The row of one that has no place, see
        :func:`places`, is not written.
      axes: mesh axes by role.
    """

    def local(cache, block_table, rows, positions):
        features = cache.shape[-1]
        slots = places(cache, block_table, positions).ravel()
        flat, rows = cache.reshape(-1, features), rows.reshape(-1, features).astype(cache.dtype)
        # A negative index would be counted from the end.
        return flat.at[jnp.where(slots < 0, len(flat), slots)].set(rows, mode="drop").reshape(cache.shape)

    operands = (rows, ("batch", None, None)), (positions, ("batch", None))
    return on_each_device(local, cache, block_table, *operands, result=PAGES, axes=axes)


def places(cache: jax.Array, block_table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of ``cache`` that the tokens at ``positions`` ``[B, S]`` of each sequence are in: int32 ``[B, S]``.

    -1 is the row of a token that has none: its position is negative or beyond the table, or its page, such as -1, is
    none of the cache.
    """
    pages, page_size = cache.shape[:2]
    column = positions // page_size
    page = jnp.take_along_axis(block_table, jnp.maximum(column, 0), axis=1, mode="clip")
    there = (positions >= 0) & (column < block_table.shape[1]) & (page >= 0) & (page < pages)
    return jnp.where(there, page * page_size + positions % page_size, -1)


def room(cache: jax.Array, block_table: jax.Array) -> jax.Array:
    """How many tokens of each sequence have a place, up to the first page that is none of ``cache``: int32 ``[B]``."""
    pages, page_size = cache.shape[:2]
    there = (block_table >= 0) & (block_table < pages)
    return jnp.sum(jnp.cumprod(there, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32) * page_size


def of_sequences(cache: jax.Array, block_table: jax.Array) -> jax.Array:
    """All rows that the pages of each sequence have room for, ``[B, n * page_size, D]``."""
    return cache.at[block_table].get(mode="clip").reshape(len(block_table), -1, cache.shape[-1])


def on_each_device(
    fn: Callable[..., jax.Array],
    cache: jax.Array,
    block_table: jax.Array,
    *operands: tuple[jax.Array, tuple[Role, ...]],
    result: tuple[Role, ...],
    axes: MeshAxes,
) -> jax.Array:
    """``fn(cache, block_table, *operands)`` of the sequences and pages, and heads, that each device has.

    Args:
      fn: the function; its table has the numbers of pages in the device's part of the cache.
      cache: ``[pages, page_size, 1, D]``.
      block_table: int32 ``[B, n]``.
      *operands: further arrays, each with the role that splits each dimension.
      result: the role that splits each dimension of the result.
      axes: mesh axes by role.

    Raises:
      HardwareConstraintError: the sequences do not split over the mesh as the pages do.
    """
    batch, tensor = axes.of("batch"), axes.of("tensor")
    arrays = [cache, block_table, *(array for array, _ in operands)]
    if not (batch or tensor):
        return fn(*arrays)
    _check_split(len(block_table), "sequences", axes)
    roles = [PAGES, ("batch", None), *(each for _, each in operands)]

    def local(cache, block_table, *rest):
        first_page = jax.lax.axis_index(batch) * len(cache) if batch else 0
        return fn(cache, block_table - first_page, *rest)

    return jax.shard_map(
        local,
        in_specs=tuple(axes.spec(*each) for each in roles),
        out_specs=axes.spec(*result),
        axis_names={*batch, *tensor},
    )(*(axes.constrain(array, *each) for array, each in zip(arrays, roles, strict=True)))


def _check_split(count: int, what: str, axes: MeshAxes) -> None:
    if count % (parts := axes.size("batch")):
        raise errors.HardwareConstraintError(
            f"{count} {what} do not split over the {parts} devices of the mesh axes {axes.of('batch')}: "
            f"use a multiple of {parts}; sequences that do not exist have length -1"
        )
