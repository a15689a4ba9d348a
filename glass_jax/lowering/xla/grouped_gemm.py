"""The formulas of the grouped products: loops over tiles of rows of one group each.

``lax.ragged_dot`` multiplies all rows by the matrices of all groups on a CPU, and masks. Here a tile is multiplied by
its own group's matrix, and the matrix of a group without rows is not read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import groups, sizes
from glass_jax.lowering.xla.branches import in_a_branch
from glass_jax.lowering.xla.gemm import accumulator, operand

_BLOCKS = (8, 16, 32, 64)  # rows of a tile
_FEW_ROWS = 16  # with fewer rows a group in the mean, a product with every matrix does not pay


def grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Rows of a group times the group's matrix, summed in :func:`accumulator` of the operands and rounded once.

    Args:
      lhs: ``[B, M, K]``.
      rhs: ``[B, G, K, N]``, or ``[B, G, N, K]`` with ``transpose_rhs``.
      starts: int32 ``[B, G]``, first row of each group; see :mod:`glass_jax.lowering.groups`.
      ends: int32 ``[B, G]``, the row after its last. Any of the four may have 1 for B.
      transpose_rhs: the last two dimensions of ``rhs`` are exchanged.
      out_dtype: type of the result.

    Returns:
      ``[B, M, N]``, zero in rows that are of no group.
    """
    (_, m, _), (_, g, *matrix) = lhs.shape, rhs.shape
    n, block = matrix[0 if transpose_rhs else 1], _block(m, g)
    batch = max(x.shape[0] for x in (lhs, rhs, starts, ends))
    if not (lhs.size and rhs.size):
        return jnp.zeros((batch, m, n), out_dtype)
    contract_rhs, first = 1 if transpose_rhs else 0, None
    wide = lhs.dtype.itemsize >= 4  # of narrower matrices the copies cost less than products of rows that are not there
    if batch == 1 and wide and sizes.known(m, g) and _FEW_ROWS <= m / g <= block:
        first = _first_tiles(lhs[0], rhs[0], starts[0], ends[0], block, contract_rhs)
        starts, block = jnp.minimum(starts + block, ends), _BLOCKS[-1]  # what is left is of few groups
    rows, out = _with_room(lhs, block), jnp.zeros((batch, m + block, n), accumulator(lhs.dtype))
    out = out if first is None else out.at[0, :m].set(first)
    tiles = _tiles(starts, ends, batch, m, block)

    def product(i):
        matrix = _part(rhs, tiles.batch[i], tiles.group[i], 1)[0]
        return _dot(_part(rows, tiles.batch[i], tiles.row[i], block), matrix, 1, contract_rhs)

    def multiply(i, out):
        place = _place(tiles.batch[i], tiles.row[i], 0)
        y = in_a_branch(tiles.rows[i] > 0, product, i)
        # What reaches into the rows of the next group stays as it is.
        y = jnp.where((jnp.arange(block) < tiles.rows[i])[:, None], y, lax.dynamic_slice(out, place, (1, *y.shape))[0])
        return lax.dynamic_update_slice(out, y[None], place)

    return lax.fori_loop(0, tiles.count, multiply, out)[:, :m].astype(out_dtype)


def _first_tiles(
    rows: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, block: int, contract_rhs: int
) -> jax.Array:
    """The first ``block`` rows of every group times its matrix, ``[rows, N]``, zero in all other rows.

    One batched product, in which no matrix is copied: that is worth the multiplication of rows that are not there,
    where groups have about ``block`` rows.
    """
    x = rows[jnp.minimum(starts[:, None] + jnp.arange(block), len(rows) - 1)]
    dimensions = (([2], [1 + contract_rhs]), ([0], [0]))
    y = lax.dot_general(operand(x), operand(rhs), dimensions, preferred_element_type=accumulator(rows.dtype))
    # Back by a gather: the last group that begins at a row or before it is the row's, if it is not over by then. Of
    # empty groups that begin there too, it is the one after them.
    row = jnp.arange(rows.shape[0])
    group = jnp.clip(jnp.searchsorted(starts, row, side="right") - 1, 0)
    within = row - starts[group]
    exists = (within >= 0) & (within < block) & (row < ends[group])
    picked = y.reshape(-1, y.shape[2])[group * block + jnp.clip(within, 0, block - 1)]
    return jnp.where(exists[:, None], picked, 0)


def k_grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    sum_batch: bool,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """For each group the product of its rows of ``lhs``, transposed, and those of ``rhs``.

    Args:
      lhs: ``[B, M, K]``.
      rhs: ``[B, M, N]``.
      starts: int32 ``[B, G]``.
      ends: int32 ``[B, G]``. Any of the four may have 1 for B.
      sum_batch: add up the products of all lists of groups.
      out_dtype: type of the result.

    Returns:
      ``[B, G, K, N]``, or ``[1, G, K, N]`` with ``sum_batch``; zero for an empty group.
    """
    (_, m, k), n, g = lhs.shape, rhs.shape[2], starts.shape[1]
    batch, block = max(x.shape[0] for x in (lhs, rhs, starts, ends)), _block(m, g)
    shape = (1 if sum_batch else batch, g, k, n)
    if not (lhs.size and rhs.size and g):
        return jnp.zeros(shape, out_dtype)
    tiles = _tiles(starts, ends, batch, m, block)
    left, right = _with_room(lhs, block), _with_room(rhs, block)

    def product(i):
        exists = (jnp.arange(block) < tiles.rows[i])[:, None]
        a, b = (jnp.where(exists, _part(x, tiles.batch[i], tiles.row[i], block), 0) for x in (left, right))
        return _dot(a, b, 0, 0)

    def add(i, out):
        place = _place(0 if sum_batch else tiles.batch[i], tiles.group[i], 0, 0)
        total = lax.dynamic_slice(out, place, (1, 1, k, n)) + in_a_branch(tiles.rows[i] > 0, product, i)
        return lax.dynamic_update_slice(out, total, place)

    start = jnp.zeros(shape, accumulator(lhs.dtype))
    return lax.fori_loop(0, tiles.count, add, start).astype(out_dtype)


def _block(m: int, groups_: int) -> int:
    """Rows of a tile: about as many as a group has in the mean, since a slice of a matrix is copied for each product.

    With the largest of :data:`_BLOCKS` the copies cost little beside the products.
    """
    if not sizes.known(m, groups_):
        return _BLOCKS[-1]
    mean = m / max(min(groups_, m), 1)
    return next((block for block in _BLOCKS if block >= mean), _BLOCKS[-1])


def _tiles(starts: jax.Array, ends: jax.Array, batch: int, m: int, block: int) -> groups.Tiles:
    starts, ends = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (starts, ends))
    return groups.tiles(starts, ends, m, block)


def _with_room(x: jax.Array, block: int) -> jax.Array:
    """``x`` ``[B, M, ...]`` with rows enough for a tile that begins anywhere."""
    return jnp.pad(x, ((0, 0), (0, block), (0, 0)))


def _place(*indices: jax.Array | int) -> tuple[jax.Array, ...]:
    """Where a slice begins: indices of one type, whatever a Python integer is."""
    return tuple(jnp.int32(i) for i in indices)


def _part(x: jax.Array, batch: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """``size`` entries from ``index`` on of a list of ``x`` ``[B, ...]``, or of the one that stands for all."""
    place = _place(0 if x.shape[0] == 1 else batch, index, *(0,) * (x.ndim - 2))
    return lax.dynamic_slice(x, place, (1, size, *x.shape[2:]))[0]


def _dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    dimensions = (([contract_a], [contract_b]), ([], []))
    return lax.dot_general(operand(a), operand(b), dimensions, preferred_element_type=accumulator(a.dtype))
