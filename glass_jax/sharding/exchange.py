"""Rows that travel between every two ranks of a mesh axis, where how many is known only on the device.

Shapes are static, so each pair of ranks has places for as many rows as it could ever need. Filling them all and sending
them would cost the worst case each time. A :class:`Channel` therefore sends its places a few at a time, and stops after
the last that any two ranks use: the cost follows the routing, the result never depends on it, and nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.primitives import axes
from glass_jax.sharding import simulated

SLACK = 1.25  # rows from rank to rank that one step takes, over the mean
ROWS = 512  # rows from one rank to all that a step takes at least: fewer are not worth a step
# On CPUs XLA cuts what an all-to-all sends in pieces, one a rank, and keeps the whole beside them. Up to so many ranks
# the pieces are made one by one: a third less memory. Beyond, the program would grow too long.
PIECES = 16


@dataclasses.dataclass(frozen=True)
class Channel:
    """What each rank of an axis can send to each.

    Attributes:
      axis: name of the mesh axis.
      ranks: its size, P.
      places: rows from one rank to another at most, a multiple of ``step``.
      step: places that are exchanged at a time.
    """

    axis: str
    ranks: int
    places: int
    step: int

    @classmethod
    def create(cls, axis: str, ranks: int, limit: int, mean: float) -> Channel:
        """A channel for up to ``limit`` rows between two ranks, where ``mean`` are expected."""
        limit = max(limit, 1)
        step = min(limit, max(math.ceil(SLACK * mean), ROWS // ranks, 1))
        return cls(axis, ranks, -(-limit // step) * step, step)

    @property
    def none(self) -> int:
        """The index of no place: one beyond the last."""
        return self.ranks * self.places

    def exchange(self, x: jax.Array) -> jax.Array:
        """Block r of ``x`` ``[P*n, ...]`` goes to rank r; block r of the result came from rank r."""
        return lax.all_to_all(x, self.axis, 0, 0, tiled=True)

    def spread(self, x: jax.Array, rows: jax.Array, longest: jax.Array) -> jax.Array:
        """Sends rows of ``x``, each where the other side finds it by its place.

        Args:
          x: ``[N, ...]``.
          rows: int32 ``[P*places]``, the row of ``x`` that goes to each place of each rank; N: none.
          longest: int32 ``[1]``, the most places in use between two ranks; the same on all ranks.

        Returns:
          ``[P*places, ...]``: what came, by rank and place; anything where nothing was sent.
        """
        if self.places == self.step:
            return self._step(x, rows, 0)

        def land(i: jax.Array, out: jax.Array) -> jax.Array:
            came = self._step(x, rows, i).reshape(self.ranks, self.step, *x.shape[1:])
            return lax.dynamic_update_slice_in_dim(out, came, i * self.step, axis=1)

        out = _zeros(x, self.ranks, self.places, *x.shape[1:])
        return lax.fori_loop(0, self._steps(longest), land, out).reshape(self.none, *x.shape[1:])

    def collect(self, y: jax.Array, rows: jax.Array, places: jax.Array, longest: jax.Array) -> jax.Array:
        """Sends rows of ``y`` and keeps those at some places of what comes.

        Args:
          y: ``[N, ...]``.
          rows: int32 ``[P*places]``, the row of ``y`` that goes to each place of each rank; N: none.
          places: int32 ``[M]``, the places of what comes that are wanted; ``none``: no place.
          longest: as in :meth:`spread`.

        Returns:
          ``[M, ...]``: what came to ``places``; zero for no place.
        """
        if self.places == self.step:  # without the arithmetic below, which XLA would repeat for each feature of a row
            return take(self._step(y, rows, 0), places)
        rank, place = jnp.divmod(places, self.places)
        base = rank * self.step + place

        def keep(i: jax.Array, kept: jax.Array) -> jax.Array:
            now = (place >= i * self.step) & (place < (i + 1) * self.step) & (rank < self.ranks)
            came = self._step(y, rows, i).at[base - i * self.step].get(mode="clip")
            return jnp.where(now.reshape(-1, *[1] * (y.ndim - 1)), came, kept)

        return lax.fori_loop(0, self._steps(longest), keep, _zeros(y, len(places), *y.shape[1:]))

    def _step(self, x: jax.Array, rows: jax.Array, i: jax.Array | int) -> jax.Array:
        """What comes in step ``i``, ``[P*step, ...]``. Places without a row carry any row: nobody reads them."""
        if not len(x):
            x = jnp.pad(x, ((0, 1), *[(0, 0)] * (x.ndim - 1)))  # there has to be a row that nobody reads
        index = lax.dynamic_slice_in_dim(rows.reshape(self.ranks, self.places), i * self.step, self.step, axis=1)
        if self.ranks > PIECES:
            return self.exchange(x.at[index.ravel()].get(mode="clip"))
        return self.exchange(jnp.concatenate([x.at[index[rank]].get(mode="clip") for rank in range(self.ranks)]))

    def _steps(self, longest: jax.Array) -> jax.Array:
        return -(-jnp.minimum(longest[0], self.places) // self.step)


def _zeros(like: jax.Array, *shape: int) -> jax.Array:
    """Zeros of ``shape``, which vary over the mesh axes that ``like`` varies over, as the carry of a loop must."""
    return axes.vary_alike(like, jnp.zeros_like(like, shape=shape))[1]


def take(x: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    """Rows ``index`` of ``x`` ``[N, ...]``, and ``fill`` for index N.

    The filling is one more row of ``x``, not ``mode="fill"``: XLA selects in a pass of its own over the result.
    """
    more = jnp.full_like(x, fill, shape=(1, *x.shape[1:]))
    return jnp.concatenate([x, more]).at[index].get(mode="clip")


def inverse(index: jax.Array, size: int) -> jax.Array:
    """Where in ``index`` ``[N]``, whose entries below ``size`` differ, each number is: int32 ``[size]``, N: nowhere."""
    there = jnp.arange(index.size, dtype=jnp.int32)
    return jnp.full_like(index, index.size, shape=(size,)).at[index].set(there, mode="drop")


def positions(keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Numbers the entries of ``keys`` ``[N]`` (int32 in ``0 .. count``; ``count``: none) that are equal, in order.

    Returns:
      int32 ``[N]``, how many equal entries come before each; int32 ``[count]``, how many of each there are.

    Raises:
      UnsupportedError: ``(count + 1) * N`` is 2**32 or more: key and place no longer fit one 32-bit number.
    """
    size = keys.size
    if (count + 1) * size >= 2**32:
        raise errors.UnsupportedError(
            f"{size} choices among {count} experts cannot be sorted as 32-bit numbers; dispatch fewer tokens at a time"
        )
    counts = jnp.zeros_like(keys, shape=(count + 1,)).at[keys].add(1)
    # One sort of one number is three times as fast on a CPU as a stable sort of keys with their places.
    packed = jnp.sort(keys.astype(jnp.uint32) * size + jnp.arange(size, dtype=jnp.uint32))
    key, place = (part.astype(jnp.int32) for part in jnp.divmod(packed, jnp.uint32(max(size, 1))))
    before = jnp.arange(size, dtype=jnp.int32) - before_each(counts)[key]
    return jnp.zeros_like(keys).at[place].set(before, unique_indices=True), counts[:count]


def before_each(counts: jax.Array, axis: int = 0) -> jax.Array:
    """The sum of the entries before each one along ``axis``."""
    return jnp.cumsum(counts, axis=axis) - counts


def own(x: jax.Array, *names: str) -> jax.Array:
    """``x`` as each rank's own value, also where it is the same on all ranks of the axes ``names``.

    Under ``vmap`` JAX exchanges only what depends on the mapped axis; in ``shard_map``, the cast makes the gradient of
    what is the same everywhere the sum over the ranks.
    """
    mesh = simulated.current()
    devices = set(jax.sharding.get_abstract_mesh().manual_axes).difference(mesh.shape if mesh else ())
    cast = tuple(name for name in names if name in devices and name not in axes.varying(x))
    if cast:
        x = lax.pcast(x, cast, to="varying")
    for name in names:
        if name not in devices:
            x = jnp.where(lax.axis_index(name) >= 0, x, jnp.zeros_like(x))
    return x
