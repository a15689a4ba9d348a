"""Copies between memories: clamped at the end of an array, transposed, converted, split between the vector units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError, UnsupportedError
from glass_jax.hw import expressions, numerics
from glass_jax.hw import program as ir
from glass_jax.hw.program import Space
from glass_jax.hw.storage import PER_UNIT, read_tile, valid, write_tile
from glass_jax.hw.symbolic import Linear

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine

# Attributes of a copy that say how to move it, not what arrives.
HINTS = frozenset({"coalesced_width", "l2_cache_ctrl", "unit_flag_ctrl"})
_UNDERSTOOD = HINTS | {"transpose", "dual", "double"}


def run_copy(machine: Machine, copy: ir.Copy, live: frozenset[str]) -> None:
    """Executes a copy.

    What lies beyond the end of a GM array is not transferred: a tile in L1 gets zeros there, as the generated code
    fills them in; a tile in another memory keeps what it held.
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
    tile = read_region(machine, copy.src)
    mask = None
    if src.space == Space.GM and dst.space != Space.L1:
        mask = valid(src.shape, src_start, extents(machine, copy.src), machine.facts)
    if mask is not None:
        mask = _arrange(machine, copy, jnp.broadcast_to(mask, tile.shape))
    tile = numerics.convert(_arrange(machine, copy, tile), numerics.dtype(dst.dtype))
    if mask is not None:
        tile = jnp.where(mask, tile, read_region(machine, copy.dst))
    write_region(machine, copy.dst, tile)


def extents(machine: Machine, region: ir.Region) -> tuple[int, ...]:
    """Extents of a region, which must be known when the program is traced."""
    return tuple(machine.constant(extent, f"a region of {region.buffer!r} with an extent") for extent in region.extents)


def read_region(machine: Machine, region: ir.Region) -> jax.Array:
    """The elements of a region, 0 beyond the end of the array; from memories of the vector units with a leading axis."""
    starts = _required_starts(machine, region)
    lead_starts, lead_extents = _lead(machine, region.buffer)
    contents = machine.memory.view(region.buffer)
    bits = read_tile(contents, [*lead_starts, *starts], [*lead_extents, *extents(machine, region)], machine.facts)
    return numerics.from_bits(bits, numerics.dtype(machine.memory.buffers[region.buffer].dtype))


def write_region(machine: Machine, region: ir.Region, tile: jax.Array) -> None:
    """Writes ``tile``, shaped as :func:`read_region` returns it, dropping what lies beyond the end of the array."""
    starts = _required_starts(machine, region)
    lead_starts, _ = _lead(machine, region.buffer)
    contents = machine.memory.view(region.buffer)
    bits = numerics.to_bits(tile)
    machine.memory.put_view(region.buffer, write_tile(contents, bits, [*lead_starts, *starts], machine.facts))


def _lead(machine: Machine, buffer: str) -> tuple[list[Linear], list[int]]:
    """Start and extent of the axis of the vector units, if the memory has one."""
    if machine.memory.buffers[buffer].space not in PER_UNIT:
        return [], []
    return [Linear(machine.active[0])], [len(machine.active)]


def _starts(machine: Machine, region: ir.Region) -> list[Linear] | None:
    """First element of a region; None if it differs between the vector units taking part."""
    shape = machine.memory.buffers[region.buffer].shape
    if len(region.starts) != len(shape):
        raise HardwareConstraintError(f"a region of rank {len(region.starts)} on {region.buffer!r} of shape {shape}")
    starts = [machine.scalar(start) for start in region.starts]
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
    from_units, to_units = (machine.memory.buffers[r.buffer].space in PER_UNIT for r in (copy.src, copy.dst))
    target = extents(machine, copy.dst)
    if copy.attrs.get("transpose"):
        tile = transpose(tile, int(from_units))
    dual = copy.attrs.get("dual")
    if dual is not None:
        tile = _dual(machine, copy, dual, tile)
    elif from_units and not to_units:
        # Every unit taking part writes the same place, one after the other.
        tile = tile[-1]
    elif to_units and not from_units:
        tile = _route(machine, copy, tile)
    lead = tile.shape[:1] if to_units else ()
    return _reshape(machine, copy, tile, lead, target)


def _route(machine: Machine, copy: ir.Copy, tile: jax.Array) -> jax.Array:
    """A tile that one source sends to the vector units: to all of them, from L0C to one of them."""
    if machine.memory.buffers[copy.src.buffer].space == Space.L0C and len(machine.active) > 1:
        raise UnsupportedError(
            "the NPU model does not run a copy from L0C to one of two vector units yet: use dual_copy"
        )
    return jnp.broadcast_to(tile, (len(machine.active), *tile.shape))


def _dual(machine: Machine, copy: ir.Copy, dual: str, tile: jax.Array) -> jax.Array:
    """Splits a tile into the vector units' halves (of its rows or its columns), or joins theirs."""
    if len(machine.active) != 2:
        raise HardwareConstraintError(
            f"dual_copy needs two vector units, {machine.program.name!r} uses {machine.program.units}"
        )
    axis = tile.ndim - (2 if dual == "rows" else 1)
    if machine.memory.buffers[copy.src.buffer].space in PER_UNIT:
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
    value = numerics.convert(jnp.asarray(expressions.value(machine, fill.value)), numerics.dtype(buffer.dtype))
    _, lead = _lead(machine, fill.dst.buffer)
    region = extents(machine, fill.dst)
    if value.size > 1 and not lead:
        raise machine.varying(f"a fill of {buffer.name!r} with a value that")
    value = value.reshape(-1, *[1] * len(region)) if lead else value.reshape(())
    write_region(machine, fill.dst, jnp.broadcast_to(value, (*lead, *region)))
