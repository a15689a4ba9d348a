"""Formula of ``topk``: exact, and on the CPU much faster than ``lax.top_k`` of 16-bit types.

XLA's CPU backend has a fast selection for float32 only and sorts all others whole. So 16-bit elements become float32
numbers in the same order, finite ones, whose maxima say as well whether there was a NaN.

In rows that are long for ``k``, the k largest elements lie in the k chunks of the row with the largest maxima: each of
those maxima is at least as large as anything in another chunk. So a row is read once for its chunks' maxima, and the
search for the largest goes over these and over the k chunks. Chunks are contiguous and are searched in the order in
which they lie, so that among equals the first are taken, as ``lax.top_k`` does. Of float32 no maxima are taken: they
would cost as much as the search, and on the CPU they pass over NaN and take subnormal numbers for zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import sizes

NO_INDEX = 2**31 - 1  # stands where a row has no further element

_LONG = 256  # v / k from which the search in chunks is the faster one (measured on the CPU)


def topk(x: jax.Array, start: jax.Array, end: jax.Array, *, k: int, sorted_index: bool) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of the elements ``start`` to ``end`` of each row, largest first.

    Args:
      x: ``[..., v]``, a float type.
      start: ``[...]`` int32 from 0 to v, broadcasts with the rows of ``x``.
      end: ``[...]`` int32 from 0 to v, broadcasts with them.
      k: how many.
      sorted_index: orders them by their index instead.

    Returns:
      Values and indices ``[..., k]``. Where a row has no more elements ``-inf`` and :data:`NO_INDEX`; where a NaN is
      among them all values of the row are NaN and all indices :data:`NO_INDEX`.
    """
    rows, v = jnp.broadcast_shapes(x.shape[:-1], start.shape, end.shape), x.shape[-1]
    shape = (*rows, k)
    if 0 in shape or v == 0:
        return jnp.full(shape, -jnp.inf, x.dtype), jnp.full(shape, NO_INDEX, jnp.int32)
    x = jnp.broadcast_to(x, (*rows, v)).reshape(-1, v)
    start, end = (jnp.broadcast_to(bound, rows).reshape(-1, 1) for bound in (start, end))
    column = jnp.arange(v, dtype=jnp.int32)
    inside = (start <= column) & (column < end)
    keys = jnp.where(inside, _keys(x), -jnp.inf)
    if not sizes.known(v):  # perhaps less than k
        keys = jnp.pad(keys, ((0, 0), (0, k)), constant_values=-jnp.inf)
    in_chunks = _is_short(x) and sizes.known(v) and v >= _LONG * k
    largest, indices = (_in_chunks if in_chunks else lax.top_k)(keys, sizes.at_most(k, v))
    # Not just the first: where a part is cut out of what top_k returns, XLA does not see that it is top_k.
    poisoned = (jnp.isposinf if _is_short(x) else jnp.isnan)(largest).any(-1, keepdims=True)
    if not _is_short(x):  # of others no key is -inf
        indices = _with_infinities(indices, keys, start, end)
    indices = jnp.where((start <= indices) & (indices < end) & ~poisoned, indices, NO_INDEX)
    if sorted_index:
        indices = jnp.sort(indices, axis=-1)
    indices = jnp.pad(indices, ((0, 0), (0, k - indices.shape[-1])), constant_values=NO_INDEX)
    values = jnp.take_along_axis(x, indices, axis=-1, mode="fill", fill_value=-jnp.inf)
    values = jnp.where(poisoned, jnp.nan, values)
    return values.reshape(shape), indices.reshape(shape)


def _with_infinities(indices: jax.Array, keys: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """Indices of the largest ``keys`` in which elements of -inf stand, and none before ``start``, which has that key.

    Args:
      indices: ``[rows, k]``, those of the largest first.
      keys: ``[rows, v]``.
      start: ``[rows, 1]``.
      end: ``[rows, 1]``.
    """
    slot = jnp.arange(indices.shape[-1], dtype=jnp.int32)
    wanted = jnp.minimum(jnp.maximum(end - start, 0), len(slot))

    def of_infinities() -> jax.Array:
        column = jnp.arange(keys.shape[-1], dtype=jnp.int32)
        infinite = (start <= column) & (column < end) & jnp.isneginf(keys)
        larger = jnp.sum(~jnp.isneginf(keys), axis=-1, keepdims=True, dtype=jnp.int32)
        count = jnp.cumsum(infinite, axis=-1, dtype=jnp.int32)  # so that the n-th is where it becomes n
        nth = _first_reaching(jnp.maximum(slot - larger + 1, 0), count)
        return jnp.where(slot < larger, indices, jnp.where(slot < wanted, nth, NO_INDEX))

    some_before = (indices < start) & (slot < wanted)  # as a rule none: rows have that many elements above -inf
    return lax.cond(some_before.any(), of_infinities, lambda: indices)


def _first_reaching(wanted: jax.Array, count: jax.Array) -> jax.Array:
    """For each of ``wanted`` ``[rows, k]`` the place of the first that is as large in ``count`` ``[rows, v]``."""
    if sizes.known(count.shape[-1]):
        return jax.vmap(jnp.searchsorted)(count, wanted).astype(jnp.int32)
    return jnp.sum(count[:, None] < wanted[..., None], axis=-1, dtype=jnp.int32)


def by_value(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values and indices ``[..., k]`` with the largest value first; equal ones stay in their order."""
    place = lax.top_k(_keys(values), values.shape[-1])[1]
    return jnp.take_along_axis(values, place, axis=-1), jnp.take_along_axis(indices, place, axis=-1)


def _is_short(x: jax.Array) -> bool:
    return x.dtype.itemsize == 2


def _keys(x: jax.Array) -> jax.Array:
    """What ``lax.top_k`` is fast for, in the order of ``x`` with NaN first: of 16-bit types as +inf, else as +NaN."""
    if not _is_short(x):
        return jnp.where(jnp.isnan(x), jnp.nan, x)
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    infinity = lax.bitcast_convert_type(jnp.array(jnp.inf, x.dtype), jnp.int16).astype(jnp.int32)
    magnitude = bits & 0x7FFF
    number = jnp.where(bits < 0, ~magnitude, magnitude).astype(jnp.float32)
    return jnp.where(magnitude > infinity, jnp.inf, number)


def _in_chunks(keys: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` of rows ``[rows, v]``."""
    rows, v = keys.shape
    # Twice sqrt(v / k), about, and a power of two, of which row lengths mostly are multiples: then nothing is padded.
    size = 2 << ((v // k).bit_length() // 2)
    chunks = -(-v // size)
    keys = jnp.pad(keys, ((0, 0), (0, chunks * size - v)), constant_values=-jnp.inf).reshape(rows, chunks, size)
    chosen = jnp.sort(lax.top_k(keys.max(-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(keys, chosen[..., None], axis=1).reshape(rows, k * size)
    largest, place = lax.top_k(candidates, k)
    return largest, jnp.take_along_axis(chosen, place // size, axis=1) * size + place % size
