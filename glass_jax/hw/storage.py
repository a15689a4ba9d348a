"""The memories of one block: arrays by allocation, views of them, and tiles read and written at clamped positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw import numerics
from glass_jax.hw import program as ir
from glass_jax.hw.program import Space
from glass_jax.hw.symbolic import Facts, Linear, clamp

# Memories that each vector unit has for itself: their arrays have a leading axis, one entry a unit.
PER_UNIT = frozenset({Space.UB, Space.FRAGMENT, Space.REDUCER})


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes inside ``shard_map`` over which ``x`` varies."""
    return jax.typeof(x).manual_axis_type.varying


class Memory:
    """The contents of every allocation at one point of a trace.

    An allocation without an entry holds poison: nobody has written it yet. Arrays are immutable, so a copy of ``arrays`` is
    a snapshot.

    Elements lie in the arrays as numerics.stored says.

    Attributes:
      arrays: contents by allocation. Memories of the vector units have a leading axis, one entry a unit.
      private: allocations that every lane of a parallel region has for itself, with the lanes' extents, which lead.
    """

    def __init__(self, buffers: Mapping[str, ir.Buffer], units: int, axes: frozenset[str]):
        """Memories of ``units`` vector units holding ``buffers``, whose shapes are ints; ``axes`` as in varying_axes."""
        self.buffers = buffers
        self.arrays: dict[str, jax.Array] = {}
        self.private: dict[str, tuple[int, ...]] = {}
        self._units = units
        self._axes = axes
        self._bases: dict[str, ir.Buffer] = {}
        for buffer in buffers.values():
            if buffer.layout is not None:
                raise UnsupportedError(
                    f"the NPU model does not run the layout {buffer.layout!r} of {buffer.name!r} yet"
                )
            base = self._bases.get(buffer.storage)
            if base is None or _nbytes(buffer) > _nbytes(base):
                self._bases[buffer.storage] = buffer

    def storage(self, buffer: str) -> str:
        """The allocation that ``buffer`` views."""
        return self.buffers[buffer].storage

    def space(self, storage: str) -> Space:
        """The memory that holds an allocation."""
        return self._bases[storage].space

    def lead(self, buffer: str) -> tuple[int, ...]:
        """Extents of the axes that stand before the buffer's own: lanes, vector units, or none."""
        storage = self.storage(buffer)
        if storage in self.private:
            return self.private[storage]
        return (self._units,) if self.buffers[buffer].space in PER_UNIT else ()

    def get(self, storage: str) -> jax.Array:
        """The contents of an allocation, shape of its largest view with the leading axes before it."""
        if storage not in self.arrays:
            base = self._bases[storage]
            of = numerics.dtype(base.dtype)
            self.arrays[storage] = self.vary(jnp.full(self.lead(base.name) + base.shape, numerics.poison(of)))
        return self.arrays[storage]

    def put(self, storage: str, contents: jax.Array) -> None:
        """Replaces the contents of an allocation."""
        self.arrays[storage] = self.vary(contents)

    def view(self, buffer: str) -> jax.Array:
        """The contents of ``buffer``, an allocation or a view of one, in its own shape, elements as stored."""
        target, base = self.buffers[buffer], self._bases[self.storage(buffer)]
        contents = self.get(target.storage)
        if target.shape == base.shape and target.dtype == base.dtype:
            return contents
        lead = self.lead(buffer)
        flat = _reinterpret(contents.reshape(*lead, -1), numerics.stored(numerics.dtype(target.dtype)))
        return flat[..., : math.prod(target.shape)].reshape(lead + target.shape)

    def put_view(self, buffer: str, contents: jax.Array) -> None:
        """Replaces the contents of ``buffer``, elements as stored; what its allocation holds beyond a smaller view stays."""
        target, base = self.buffers[buffer], self._bases[self.storage(buffer)]
        if target.shape != base.shape or target.dtype != base.dtype:
            lead = self.lead(buffer)
            flat = _reinterpret(contents.reshape(*lead, -1), numerics.stored(numerics.dtype(base.dtype)))
            size = math.prod(base.shape)
            if flat.shape[-1] < size:
                old = self.get(target.storage).reshape(*lead, size)
                flat = jnp.concatenate([flat, old[..., flat.shape[-1] :]], axis=-1)
            contents = flat.reshape(lead + base.shape)
        self.put(target.storage, contents)

    def vary(self, x: jax.Array) -> jax.Array:
        """``x`` varying over every mesh axis that the kernel's arguments vary over, as loop carries must agree on it."""
        missing = tuple(sorted(self._axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x


def _nbytes(buffer: ir.Buffer) -> int:
    return math.prod(buffer.shape) * numerics.dtype(buffer.dtype).itemsize


def _reinterpret(flat: jax.Array, to: np.dtype) -> jax.Array:
    """The bytes of the last axis read as another type."""
    if flat.dtype == to:
        return flat
    ratio = to.itemsize / flat.dtype.itemsize
    if ratio > 1:
        flat = flat.reshape(*flat.shape[:-1], -1, int(ratio))
    bits = lax.bitcast_convert_type(flat, to)
    return bits.reshape(*bits.shape[:-2], -1) if ratio < 1 else bits


# --- tiles ----------------------------------------------------------------------------------------------------------


def _inside(start: Linear, extent: int, size: int, facts: Facts) -> bool:
    """Whether ``start : start + extent`` certainly lies within an axis of ``size``."""
    low, high = start.bounds(facts)
    return low >= 0 and high + extent <= size


def slice_at(x: jax.Array, starts: Sequence[Linear], extents: Sequence[int]) -> jax.Array:
    """``x[start : start + extent, ...]`` where that certainly lies within ``x``."""
    if tuple(extents) == x.shape:
        return x
    if all(start.static is not None for start in starts):
        return lax.slice(x, [s.static for s in starts], [s.static + e for s, e in zip(starts, extents, strict=True)])
    return lax.dynamic_slice(x, [start.traced() for start in starts], extents)


def update_at(x: jax.Array, tile: jax.Array, starts: Sequence[Linear]) -> jax.Array:
    """``x`` with ``tile`` at ``starts``, where that certainly lies within ``x``."""
    if tile.shape == x.shape:
        return tile
    return lax.dynamic_update_slice(x, tile, [start.traced() for start in starts])


def valid(shape: Sequence[int], starts: Sequence[Linear], extents: Sequence[int], facts: Facts) -> jax.Array | None:
    """Which elements of a tile lie within an array of ``shape``; None if all do. Shape broadcasts to ``extents``."""
    mask = None
    for axis, (size, start, extent) in enumerate(zip(shape, starts, extents, strict=True)):
        if not _inside(start, extent, size, facts):
            position = lax.broadcasted_iota(jnp.int32, [extent if i == axis else 1 for i in range(len(shape))], axis)
            position = position + start.traced()
            within = (position >= 0) & (position < size)
            mask = within if mask is None else mask & within
    return mask


def read_tile(x: jax.Array, starts: Sequence[Linear], extents: Sequence[int], facts: Facts) -> jax.Array:
    """``x[start : start + extent, ...]``; elements beyond the end of an axis are 0. Starts are not negative."""
    clamped = [not _inside(s, e, size, facts) for s, e, size in zip(starts, extents, x.shape, strict=True)]
    if not any(clamped):
        return slice_at(x, starts, extents)
    # A slice that reaches beyond the end would be moved back by JAX: take the last whole one and shift it forward.
    sizes = [min(e, size) if c else e for c, e, size in zip(clamped, extents, x.shape, strict=True)]
    origins = [clamp(s, size - n) if c else s for c, s, n, size in zip(clamped, starts, sizes, x.shape, strict=True)]
    tile = slice_at(x, origins, sizes)
    shifts = [
        clamp(start - origin, n) if c else Linear(0)
        for c, start, origin, n in zip(clamped, starts, origins, sizes, strict=True)
    ]
    padding = [(0, extent if c else 0, 0) for c, extent in zip(clamped, extents, strict=True)]
    return slice_at(lax.pad(tile, np.asarray(0, tile.dtype), padding), shifts, extents)


def write_tile(x: jax.Array, tile: jax.Array, starts: Sequence[Linear], facts: Facts) -> jax.Array:
    """``x`` with ``tile`` at ``starts``; elements beyond the end of an axis are dropped. Starts are not negative."""
    clamped = [not _inside(s, e, size, facts) for s, e, size in zip(starts, tile.shape, x.shape, strict=True)]
    if not any(clamped):
        return update_at(x, tile, starts)
    extents = tile.shape
    sizes = [min(e, size) for e, size in zip(extents, x.shape, strict=True)]
    origins = [clamp(s, size - n) if c else s for c, s, n, size in zip(clamped, starts, sizes, x.shape, strict=True)]
    # Element i of the tile belongs at i + (start - origin) of the slice that certainly fits.
    padding = [(n if c else 0, 0, 0) for c, n in zip(clamped, sizes, strict=True)]
    shifts = [
        Linear(n) - clamp(start - origin, n) if c else Linear(0)
        for c, start, origin, n in zip(clamped, starts, origins, sizes, strict=True)
    ]
    moved = slice_at(lax.pad(tile, np.asarray(0, tile.dtype), padding), shifts, sizes)
    mask = None
    for axis, (c, start, origin, n) in enumerate(zip(clamped, starts, origins, sizes, strict=True)):
        if c:
            position = lax.broadcasted_iota(jnp.int32, [n if i == axis else 1 for i in range(len(sizes))], axis)
            new = position >= (start - origin).traced()
            mask = new if mask is None else mask & new
    old = slice_at(x, origins, sizes)
    return update_at(x, jnp.where(mask, moved, old), origins)
