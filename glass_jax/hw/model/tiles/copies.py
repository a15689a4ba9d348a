"""Copies between memories: clamped at the end of an array, transposed, converted, split between the vector units."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError, UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.dataflow import is_whole
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.joining import JOINS
from glass_jax.hw.model.values.storage import read_tile, valid, write_tile
from glass_jax.hw.model.values.symbolic import Linear

# Attributes of a copy that say how to move it, not what arrives.
HINTS = frozenset({"coalesced_width", "l2_cache_ctrl", "unit_flag_ctrl"})
_UNDERSTOOD = HINTS | {"transpose", "dual", "double", "unit", "pad", "atomic", "atomic_if"}


def run_copy(machine: Machine, copy: ir.Copy, live: frozenset[str]) -> None:
    """Executes a copy.

    What lies beyond the end of a GM array is not transferred: a tile in L1 gets zeros there, as the generated code
    fills them in; a tile in another memory keeps what it held. Beyond an extent that is known only when the kernel runs
    every tile does: the generated code copies that much and fills nothing.
    """
    if unknown := sorted(set(copy.attrs) - _UNDERSTOOD):
        raise UnsupportedError(f"the NPU model does not run copies with {', '.join(unknown)} yet")
    src_start, dst_start = (_starts(machine, region) for region in (copy.src, copy.dst))
    if (src_start is None or dst_start is None) and len(machine.active) > 1:
        # Each vector unit copies its own part.
        for unit in machine.active:
            with machine.unit(unit):
                run_copy(machine, copy, live)
        return
    src, dst = machine.memory.buffers[copy.src.buffer], machine.memory.buffers[copy.dst.buffer]
    if src.space == Space.L0C and "dual" not in copy.attrs:
        copy = _taken(copy)
    copy, limits = _bounded(machine, copy)
    if src.space == Space.L0C and dst.space == Space.UB and "dual" not in copy.attrs and len(machine.active) > 1:
        with machine.unit(copy.attrs.get("unit", 0)):  # the others keep what they have
            run_copy(machine, copy, live)
        return
    raw = src.layout is not None and dst.space == Space.GM
    tile = _as_it_lies(machine, copy.src) if raw else read_region(machine, copy.src)
    mask = None
    if src.space == Space.GM and dst.space != Space.L1:
        mask = valid(src.shape, src_start, extents(machine, copy.src), machine.facts)
    mask = _limited(mask, limits, extents(machine, copy.src))
    if mask is not None:
        mask = _arrange(machine, copy, jnp.broadcast_to(mask, tile.shape))
    tile = numerics.convert(_arrange(machine, copy, tile), numerics.dtype(dst.dtype))
    target = copy.dst
    if copy.attrs.get("pad") is not None:
        tile, mask, target = _padded(machine, copy, tile, mask)
    if mask is not None:
        tile = jnp.where(mask, tile, read_region(machine, target))
    if copy.attrs.get("atomic"):
        joined = JOINS[copy.attrs["atomic"]].pair(read_region(machine, target), tile)
        condition = expressions.value(machine, copy.attrs.get("atomic_if", ir.Const(True, "bool")))
        tile = jnp.where(condition, joined, tile)
    write_region(machine, target, tile)


def _taken(copy: ir.Copy) -> ir.Copy:
    """A copy out of L0C of as much of its tile, from the first row and column on, as the destination region says."""
    rank, target = len(copy.src.extents), (1, *copy.dst.extents)
    sizes = tuple(extent for extent in target if extent != 1)
    if len(sizes) != 2:
        sizes = target[-2:]
    src = dataclasses.replace(copy.src, extents=(*copy.src.extents[: rank - 2], *sizes))
    return dataclasses.replace(copy, src=src)


def _bounded(machine: Machine, copy: ir.Copy) -> tuple[ir.Copy, dict[int, Linear]]:
    """A copy with extents that are known now, and the extents that are not, by the dimension of the source.

    An extent that is known only when the kernel runs is replaced by the largest that it may have.
    """
    found = [[expressions.scalar(machine, extent) for extent in region.extents] for region in (copy.src, copy.dst)]
    if all(extent is not None and extent.static is not None for side in found for extent in side):
        return copy, {}
    sizes = [machine.memory.buffers[region.buffer].shape for region in (copy.src, copy.dst)]
    dims = [[d for d, extent in enumerate(side) if extent is None or extent.static != 1] for side in found]
    if copy.attrs.get("transpose"):
        dims[0] = dims[0][::-1]
    if len(dims[0]) != len(dims[1]) or "dual" in copy.attrs or None in (*found[0], *found[1]):
        raise UnsupportedError(
            "the NPU model does not run a copy with an extent that is known only at run time if it is split between "
            "the vector units, differs between them, or has other dimensions at its two ends"
        )
    bounds, limits = [[extent.static for extent in side] for side in found], {}
    for d, e in zip(*dims, strict=True):
        pair = found[0][d], found[1][e]
        if any(extent.static is None for extent in pair):
            largest = min(*(extent.bounds(machine.facts)[1] for extent in pair), sizes[0][d], sizes[1][e])
            bounds[0][d] = bounds[1][e] = max(int(largest), 0)
            limits[d] = pair[0] if pair[0].static is None else pair[1]
    regions = [
        ir.Region(region.buffer, region.starts, tuple(side))
        for region, side in zip((copy.src, copy.dst), bounds, strict=True)
    ]
    return dataclasses.replace(copy, src=regions[0], dst=regions[1]), limits


def _limited(mask: jax.Array | None, limits: dict[int, Linear], shape: tuple[int, ...]) -> jax.Array | None:
    """A mask of a tile of ``shape`` that also ends, in each dimension of ``limits``, there."""
    for dimension, limit in limits.items():
        position = np.arange(shape[dimension]).reshape([-1 if d == dimension else 1 for d in range(len(shape))])
        inside = position < limit.traced()
        mask = inside if mask is None else mask & inside
    return mask


def _padded(
    machine: Machine, copy: ir.Copy, tile: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, ir.Region]:
    """A tile whose rows are padded to 32 bytes, and where to write it.

    Of a row that reaches over the end of the array, as far as that is known when the program is traced, the part inside
    counts.
    """
    dst = machine.memory.buffers[copy.dst.buffer]
    length, inside = tile.shape[-1], _row_inside(machine, copy.src)
    length = length if inside is None or "dual" in copy.attrs else min(length, inside)
    block = 256 // numerics.bits(numerics.dtype(dst.dtype))
    count = -length % block
    value = numerics.convert(jnp.asarray(expressions.value(machine, copy.attrs["pad"])), tile.dtype).reshape(())
    edges = [(0, 0, 0)] * (tile.ndim - 1)
    tile = jax.lax.pad(tile[..., :length], value, [*edges, (0, count, 0)])
    if mask is not None:
        mask = jax.lax.pad(mask[..., :length], np.asarray(False), [*edges, (0, count, 0)])
        mask = mask.at[..., length:].set(mask[..., :1])
    extents = (*copy.dst.extents[:-1], length + count)
    start = expressions.scalar(machine, copy.dst.starts[-1])
    if start.static is not None and start.static + length + count > dst.shape[-1]:
        raise HardwareConstraintError(
            f"rows of {length} elements are padded to {length + count}, and {dst.name!r} has room for "
            f"{dst.shape[-1] - start.static}: make its rows a multiple of 32 bytes"
        )
    return tile, mask, ir.Region(copy.dst.buffer, copy.dst.starts, extents)


def _row_inside(machine: Machine, region: ir.Region) -> int | None:
    """How much of a row lies before the end of the array, if that is known now."""
    start = expressions.scalar(machine, region.starts[-1])
    size = machine.memory.buffers[region.buffer].shape[-1]
    return None if start is None or start.static is None else max(size - start.static, 0)


def extents(machine: Machine, region: ir.Region) -> tuple[int, ...]:
    """Extents of a region, which must be known when the program is traced."""
    return tuple(
        expressions.constant(machine, extent, f"a region of {region.buffer!r} with an extent")
        for extent in region.extents
    )


def read_region(machine: Machine, region: ir.Region) -> jax.Array:
    """The elements of a region, 0 beyond the end of the array; of vector units' memories with a leading axis."""
    starts = _required_starts(machine, region)
    lead_starts, lead_extents = _lead(machine, region.buffer)
    contents = machine.memory.view(region.buffer)
    bits = read_tile(contents, [*lead_starts, *starts], [*lead_extents, *extents(machine, region)], machine.facts)
    return numerics.from_bits(bits, numerics.dtype(machine.memory.buffers[region.buffer].dtype))


def _as_it_lies(machine: Machine, region: ir.Region) -> jax.Array:
    """The elements of a buffer with a layout in the order of addresses, in which they are copied to GM."""
    buffer = machine.memory.buffers[region.buffer]
    if not is_whole(region, buffer):
        raise UnsupportedError(
            f"the NPU model does not copy a part of {buffer.name!r} to GM: what is in layout {buffer.layout!r} goes "
            "there as it lies in memory, not in rows; copy the whole buffer, or use one without a layout"
        )
    dtype = numerics.dtype(buffer.dtype)
    flat = machine.memory.flat(region.buffer, dtype)[np.array(machine.active)]
    return numerics.from_bits(flat, dtype).reshape(len(machine.active), *buffer.shape)


def write_region(machine: Machine, region: ir.Region, tile: jax.Array) -> None:
    """Writes ``tile``, shaped as :func:`read_region` returns it, dropping what lies beyond the end of the array."""
    starts = _required_starts(machine, region)
    lead_starts, _ = _lead(machine, region.buffer)
    contents = machine.memory.view(region.buffer)
    bits = numerics.to_bits(tile)
    machine.memory.put_view(region.buffer, write_tile(contents, bits, [*lead_starts, *starts], machine.facts))


def _lead(machine: Machine, buffer: str) -> tuple[list[Linear], list[int]]:
    """Start and extent of the axis of the vector units, if the memory has one."""
    if not machine.memory.per_unit(buffer):
        return [], []
    return [Linear(machine.active[0])], [len(machine.active)]


def _starts(machine: Machine, region: ir.Region) -> list[Linear] | None:
    """First element of a region; None if it differs between the vector units taking part."""
    shape = machine.memory.buffers[region.buffer].shape
    if len(region.starts) != len(shape):
        raise HardwareConstraintError(f"a region of rank {len(region.starts)} on {region.buffer!r} of shape {shape}")
    starts = [expressions.scalar(machine, start) for start in region.starts]
    return None if None in starts else starts


def _required_starts(machine: Machine, region: ir.Region) -> list[Linear]:
    starts = _starts(machine, region)
    if starts is None:
        raise UnsupportedError(
            f"the NPU model does not run a region of {region.buffer!r} whose start varies by lane yet"
        )
    return starts


def _arrange(machine: Machine, copy: ir.Copy, tile: jax.Array) -> jax.Array:
    """A source tile in the shape of the destination region: transposed, split or joined between units, reshaped."""
    from_units, to_units = (machine.memory.per_unit(region.buffer) for region in (copy.src, copy.dst))
    target = extents(machine, copy.dst)
    if copy.attrs.get("transpose"):
        tile = transpose(tile, int(from_units))
    dual = copy.attrs.get("dual")
    if dual is not None:
        tile = _dual(machine, copy, dual, tile)
    elif from_units and not to_units:
        # Every unit taking part writes the same place, one after the other.
        kind = copy.attrs.get("atomic")
        tile = JOINS[kind].along(tile, 0) if kind else tile[-1]
    elif to_units and not from_units:
        tile = jnp.broadcast_to(tile, (len(machine.active), *tile.shape))
    lead = tile.shape[:1] if to_units else ()
    return _reshape(machine, copy, tile, lead, target)


def _dual(machine: Machine, copy: ir.Copy, dual: str, tile: jax.Array) -> jax.Array:
    """Splits a tile into the vector units' halves (of its rows or its columns), or joins theirs."""
    if len(machine.active) != 2:
        raise HardwareConstraintError(
            f"dual_copy needs two vector units, {machine.program.name!r} uses {machine.program.units}"
        )
    axis = tile.ndim - (2 if dual == "rows" else 1)
    if machine.memory.per_unit(copy.src.buffer):
        joined = jnp.moveaxis(tile, 0, axis - 1)
        shape = joined.shape
        return joined.reshape(*shape[: axis - 1], 2 * shape[axis], *shape[axis + 1 :])
    shape = tile.shape
    if shape[axis] % 2:
        raise HardwareConstraintError(f"dual_copy splits {shape[axis]} {dual} of {copy.src.buffer!r}: make them even")
    return jnp.moveaxis(tile.reshape(*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]), axis, 0)


def transpose(tile: jax.Array, lead: int) -> jax.Array:
    """A tile with two dimensions exchanged: the two that are not 1, else the last two; ``lead`` axes come before."""
    axes = [axis for axis in range(lead, tile.ndim) if tile.shape[axis] != 1]
    first, second = axes if len(axes) == 2 else (tile.ndim - 2, tile.ndim - 1)
    return jnp.swapaxes(tile, first, second)


def _reshape(
    machine: Machine, copy: ir.Copy, tile: jax.Array, lead: tuple[int, ...], target: tuple[int, ...]
) -> jax.Array:
    """A tile with the extents of the destination; one that does not fill its place in L1 is filled up with zeros."""
    shape = tile.shape[len(lead) :]
    if math.prod(shape) == math.prod(target):
        return tile.reshape(lead + target)
    small, large = [n for n in shape if n != 1], [n for n in target if n != 1]
    fits = len(small) == len(large) and all(n <= m for n, m in zip(small, large, strict=True))
    if fits and machine.memory.buffers[copy.dst.buffer].space == Space.L1:
        padding = [(0, m - n, 0) for n, m in zip(small, large, strict=True)]
        padded = jax.lax.pad(
            tile.reshape(lead + tuple(small)), np.asarray(0, tile.dtype), [(0, 0, 0)] * len(lead) + padding
        )
        return padded.reshape(lead + target)
    raise HardwareConstraintError(
        f"a copy from {copy.src.buffer!r} to {copy.dst.buffer!r} has {shape} at one end and {target} at the other"
    )


def run_fill(machine: Machine, fill: ir.Fill, live: frozenset[str]) -> None:
    """Every element of a region becomes one value."""
    buffer = machine.memory.buffers[fill.dst.buffer]
    if buffer.storage in machine.memory.private:
        _fill_own(machine, fill)
        return
    value = numerics.convert(jnp.asarray(expressions.value(machine, fill.value)), numerics.dtype(buffer.dtype))
    _, lead = _lead(machine, fill.dst.buffer)
    region = extents(machine, fill.dst)
    if value.size > 1 and not lead:
        raise machine.varying(f"a fill of {buffer.name!r} with a value that")
    value = value.reshape(-1, *[1] * len(region)) if lead else value.reshape(())
    write_region(machine, fill.dst, jnp.broadcast_to(value, (*lead, *region)))


def _fill_own(machine: Machine, fill: ir.Fill) -> None:
    """Fills an array that each lane has for itself."""
    buffer = machine.memory.buffers[fill.dst.buffer]
    if not is_whole(fill.dst, buffer):
        raise UnsupportedError(f"the NPU model does not fill a part of {buffer.name!r}, which each lane has for itself")
    value = numerics.convert(jnp.asarray(expressions.value(machine, fill.value)), numerics.dtype(buffer.dtype))
    behind = (1,) * len(buffer.shape)
    new = jnp.broadcast_to(value.reshape(value.shape + behind), machine.lanes + buffer.shape)
    if machine.mask is not None:
        old = numerics.from_bits(machine.memory.view(buffer.name), new.dtype)
        new = jnp.where(machine.mask.reshape(machine.mask.shape + behind), new, old)
    machine.memory.put_view(buffer.name, numerics.to_bits(new))
