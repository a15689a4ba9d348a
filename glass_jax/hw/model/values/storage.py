"""The memories of one block: arrays by allocation, views of them, and tiles read and written at clamped positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.symbolic import Facts, Linear, clamp

_BLOCK_BYTES = 32  # of a data block, the C0 of fractal layouts

# Memories that each vector unit has for itself: their arrays have a leading axis, one entry a unit.
PER_UNIT = frozenset({Space.UB, Space.FRAGMENT, Space.REDUCER})


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes inside ``shard_map`` over which ``x`` varies."""
    return jax.typeof(x).manual_axis_type.varying


class Memory:
    """The contents of every allocation at one point of a trace.

    An allocation without an entry holds poison: nobody has written it yet. Arrays are immutable, so a copy of
    ``arrays`` is a snapshot.

    Elements lie in the arrays as numerics.stored says.

    Attributes:
      arrays: contents by allocation. Memories of the vector units have a leading axis, one entry a unit.
      private: allocations that every lane of a parallel region has for itself, with the lanes' extents, which lead.
    """

    def __init__(
        self, buffers: Mapping[str, ir.Buffer], units: int, axes: frozenset[str], split: Set[str] = frozenset()
    ):
        """Memories of ``units`` vector units for ``buffers``, whose shapes are ints.

        ``axes`` are the mesh axes over which the kernel's arguments vary; ``split`` are scalars of which each unit has
        its own.
        """
        self.buffers = buffers
        self.arrays: dict[str, jax.Array] = {}
        self.private: dict[str, tuple[int, ...]] = {}
        self._units = units
        self._split = split
        self._axes = axes
        self._bases: dict[str, ir.Buffer] = {}
        for buffer in buffers.values():
            base = self._bases.get(buffer.storage)
            if base is None or _bits(buffer) > _bits(base):
                self._bases[buffer.storage] = buffer

    def add_bank(self, storage: str, blocks: int) -> str:
        """Adds an allocation that holds the contents of ``storage`` of every block of the grid; returns its name."""
        base, name = self._bases[storage], f"{storage}@blocks"
        shape = (blocks, *self.lead(base.name), *physical_shape(base))
        bank = dataclasses.replace(base, name=name, storage=name, space=Space.GM, shape=shape, layout=None)
        self.buffers = {**self.buffers, name: bank}
        self._bases[name] = bank
        return name

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
        return (self._units,) if self.per_unit(buffer) else ()

    def per_unit(self, buffer: str) -> bool:
        """Whether each vector unit has ``buffer`` for itself."""
        return self.buffers[buffer].space in PER_UNIT or self.storage(buffer) in self._split

    def get(self, storage: str, lead: tuple[int, ...] | None = None) -> jax.Array:
        """The contents of an allocation, shape of its largest view with the leading axes, or ``lead``, before it."""
        if storage not in self.arrays:
            base = self._bases[storage]
            of = numerics.dtype(base.dtype)
            axes = self.lead(base.name) if lead is None else lead
            self.arrays[storage] = self.vary(jnp.full(axes + physical_shape(base), numerics.poison(of)))
        return self.arrays[storage]

    def put(self, storage: str, contents: jax.Array) -> None:
        """Replaces the contents of an allocation."""
        self.arrays[storage] = self.vary(contents)

    def view(self, buffer: str) -> jax.Array:
        """The contents of ``buffer``, an allocation or a view of one, in its own shape, elements as stored."""
        target, base = self.buffers[buffer], self._bases[self.storage(buffer)]
        contents = self.get(target.storage)
        if target.layout == "nz":
            return _rows_of_blocks(contents).reshape(self.lead(buffer) + target.shape)
        if target.shape == base.shape and target.dtype == base.dtype:
            return contents
        lead = self.lead(buffer)
        flat = _reread(contents.reshape(*lead, -1), numerics.dtype(base.dtype), numerics.dtype(target.dtype))
        return flat[..., : math.prod(target.shape)].reshape(lead + target.shape)

    def put_view(self, buffer: str, contents: jax.Array) -> None:
        """Replaces the contents of ``buffer``, elements as stored; what the allocation holds beyond a view stays."""
        target, base = self.buffers[buffer], self._bases[self.storage(buffer)]
        if target.layout == "nz":
            *_, columns, rows, block = physical_shape(target)
            contents = _rows_of_blocks(contents.reshape(*contents.shape[:-2], rows, columns, block))
        elif target.shape != base.shape or target.dtype != base.dtype:
            lead = self.lead(buffer)
            flat = _reread(contents.reshape(*lead, -1), numerics.dtype(target.dtype), numerics.dtype(base.dtype))
            size = math.prod(base.shape)
            if flat.shape[-1] < size:
                old = self.get(target.storage).reshape(*lead, size)
                flat = jnp.concatenate([flat, old[..., flat.shape[-1] :]], axis=-1)
            contents = flat.reshape(lead + base.shape)
        self.put(target.storage, contents)

    def smallest_element(self, storage: str) -> int:
        """Bytes of an element of the view of an allocation that has the smallest ones."""
        return min(numerics.dtype(b.dtype).itemsize for b in self.buffers.values() if b.storage == storage)

    def flat(self, buffer: str, of: np.dtype) -> jax.Array:
        """The allocation that ``buffer`` views, in the order of addresses, as elements of type ``of`` as stored."""
        base = self._bases[self.storage(buffer)]
        return _reread(self.get(base.storage).reshape(*self.lead(buffer), -1), numerics.dtype(base.dtype), of)

    def put_flat(self, buffer: str, contents: jax.Array, of: np.dtype) -> None:
        """Replaces the contents of an allocation by elements of type ``of``, as stored, in the order of addresses."""
        base = self._bases[self.storage(buffer)]
        flat = _reread(contents, of, numerics.dtype(base.dtype))
        self.put(base.storage, flat.reshape(self.lead(buffer) + physical_shape(base)))

    def vary(self, x: jax.Array) -> jax.Array:
        """``x`` varying over every mesh axis that the kernel's arguments vary over: loop carries must agree on it."""
        missing = tuple(sorted(self._axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x


def physical_shape(buffer: ir.Buffer) -> tuple[int, ...]:
    """The shape of a buffer whose row-major order is that of addresses.

    Compact NZ keeps a matrix as columns of blocks of 32 bytes: column by column, each from the first row down.
    """
    if buffer.layout is None:
        return buffer.shape
    *lead, rows, columns = buffer.shape
    block = _BLOCK_BYTES // numerics.dtype(buffer.dtype).itemsize
    if buffer.layout != "nz" or columns % block:
        raise UnsupportedError(
            f"the NPU model does not run the layout {buffer.layout!r} of {buffer.name!r} with shape {buffer.shape} yet"
        )
    return (*lead, columns // block, rows, block)


def _rows_of_blocks(x: jax.Array) -> jax.Array:
    """Blocks by column and row as blocks by row and column, and the other way round."""
    return jnp.swapaxes(x, -3, -2)


def _bits(buffer: ir.Buffer) -> int:
    return math.prod(buffer.shape) * numerics.bits(numerics.dtype(buffer.dtype))


def _reread(flat: jax.Array, of: np.dtype, to: np.dtype) -> jax.Array:
    """The bytes of elements of type ``of`` read as elements of type ``to``; of two 4-bit elements the first is low."""
    if numerics.bits(of) == numerics.bits(to) == 4:
        return flat
    if numerics.bits(of) == 4:
        flat = flat[..., ::2] | (flat[..., 1::2] << np.uint8(4))
    if numerics.bits(to) != 4:
        return reinterpret(flat, numerics.stored(to))
    flat = reinterpret(flat, np.dtype(np.uint8))
    return jnp.stack([flat & np.uint8(15), flat >> np.uint8(4)], axis=-1).reshape(*flat.shape[:-1], -1)


def reinterpret(flat: jax.Array, to: np.dtype) -> jax.Array:
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
