"""Rows that travel between every two ranks of a mesh axis, where how many is known only on the device.

Shapes are static, so each pair of ranks has places for as many rows as it could ever need. Filling them all and sending them
would cost the worst case each time. A :class:`Channel` therefore sends its places a few at a time, and stops after the last
one that any pair of ranks uses: the cost follows the routing, the result never depends on it, and nothing is dropped.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.primitives import axes

SLACK = 1.25  # places that go in one step, over the mean number of rows between two ranks


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
        step = max(1, min(limit, int(SLACK * mean) + 1))
        return cls(axis, ranks, -(-limit // step) * step, step)

    @property
    def none(self) -> int:
        """The index of no place: one beyond the last."""
        return self.ranks * self.places

    def steps(self, rows: jax.Array) -> jax.Array:
        """Steps that a longest message of ``rows`` rows takes."""
        return -(-rows // self.step)

    def exchange(self, x: jax.Array) -> jax.Array:
        """Block r of ``x`` ``[P*n, ...]`` goes to rank r; block r of the result came from rank r."""
        return lax.all_to_all(x, self.axis, 0, 0, tiled=True) if x.size else x

    def spread(self, x: jax.Array, rows: jax.Array, steps: jax.Array) -> jax.Array:
        """Sends rows of ``x``, each where the other side finds it by its place.

        Args:
          x: ``[N, ...]``.
          rows: int32 ``[P*places]``, the row of ``x`` that goes to each place of each rank; N: none.
          steps: int32 ``[]``, steps until the last place in use on any rank; the same on all ranks.

        Returns:
          ``[P*places, ...]``: what came, by rank and place; zero where nothing did.
        """
        rows = rows.reshape(self.ranks, self.places)

        def received(i: jax.Array | int) -> jax.Array:
            index = lax.dynamic_slice_in_dim(rows, i * self.step, self.step, axis=1).ravel()
            return self.exchange(take(x, index)).reshape(self.ranks, self.step, *x.shape[1:])

        def land(i: jax.Array, out: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(out, received(i), i * self.step, axis=1)

        out = received(0)
        if self.places > self.step:
            rest = jnp.zeros_like(out, shape=(self.ranks, self.places - self.step, *x.shape[1:]))
            out = lax.fori_loop(1, steps, land, jnp.concatenate([out, rest], axis=1))
        return out.reshape(self.none, *x.shape[1:])

    def collect(self, y: jax.Array, rows: jax.Array, places: jax.Array, steps: jax.Array) -> jax.Array:
        """Sends rows of ``y`` and keeps those at some places of what comes.

        Args:
          y: ``[N, ...]``.
          rows: int32 ``[P*places]``, the row of ``y`` that goes to each place of each rank; N: none.
          places: int32 ``[M]``, the places of what comes that are wanted; ``none``: no place.
          steps: as in :meth:`spread`.

        Returns:
          ``[M, ...]``: what came to ``places``; zero for no place.
        """
        rows = rows.reshape(self.ranks, self.places)
        rank, place = jnp.divmod(places, self.places)

        def keep(i: jax.Array | int, kept: jax.Array | None) -> jax.Array:
            index = lax.dynamic_slice_in_dim(rows, i * self.step, self.step, axis=1).ravel()
            came = self.exchange(take(y, index))
            offset = place - i * self.step
            now = (rank < self.ranks) & (offset >= 0) & (offset < self.step)
            found = take(came, jnp.where(now, rank * self.step + offset, self.ranks * self.step))
            return found if kept is None else jnp.where(now.reshape(-1, *[1] * (y.ndim - 1)), found, kept)

        kept = keep(0, None)
        return lax.fori_loop(1, steps, keep, kept) if self.places > self.step else kept


def take(x: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    """Rows ``index`` of ``x`` ``[N, ...]``, and ``fill`` for an index of N or more; no index is negative."""
    if not x.shape[0]:
        return jnp.full_like(x, fill, shape=(*index.shape, *x.shape[1:]))
    return x.at[index].get(mode="fill", fill_value=fill)


def inverse(index: jax.Array, size: int) -> jax.Array:
    """Where in ``index`` ``[N]``, whose entries below ``size`` differ, each number is: int32 ``[size]``, N: nowhere."""
    there = jnp.arange(index.size, dtype=jnp.int32)
    return jnp.full_like(index, index.size, shape=(size,)).at[index].set(there, mode="drop", unique_indices=False)


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

    Under ``vmap`` JAX exchanges only what depends on the mapped axis; in ``shard_map``, the cast makes the gradient of what is
    the same everywhere the sum over the ranks.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    cast = tuple(name for name in names if name in manual and name not in axes.varying(x))
    if cast:
        x = lax.pcast(x, cast, to="varying")
    for name in names:
        if name not in manual:
            x = jnp.where(lax.axis_index(name) >= 0, x, jnp.zeros_like(x))
    return x
