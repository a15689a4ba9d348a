"""Registers and memory: the elements behind an address, read and written for all lanes of the machine at once.

Every access is one to the flat memory of an allocation, in the order of addresses. Where the indices are affine in the
lanes, the flat memory is reshaped so that the access is a box of it: a slice, not a gather.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import elements, expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import lanes, numerics, symbolic
from glass_jax.hw.model.values.lanes import Access, Index
from glass_jax.hw.model.values.registers import Array
from glass_jax.hw.model.values.storage import physical_shape
from glass_jax.hw.model.values.symbolic import Facts, Linear


def read(machine: Machine, address: ir.Address, dtype: np.dtype, pattern: np.ndarray | jax.Array) -> jax.Array:
    """The elements of type ``dtype`` at ``address`` plus ``pattern``, counted in elements.

    Args:
      machine: the machine.
      address: where element 0 is.
      dtype: type of the elements.
      pattern: their numbers, a NumPy array of the register's own axes, or numbers that differ by lane of the machine,
        with the machine's axes before them.

    Returns:
      elements, with the axes of the machine's lanes before those of the pattern; poison outside the allocation.
    """
    place, extents = _place(machine, address, dtype, pattern)
    _record(machine, address.buffer, dtype, False, place, extents)
    flat = machine.memory.flat(address.buffer, dtype)
    flat, place = _reshaped(flat, place, extents, machine.facts)
    bits = lanes.take(flat, place, numerics.poison(dtype), extents, machine.facts)
    return numerics.from_bits(bits.reshape(*bits.shape[: len(machine.lanes)], *pattern_axes(pattern, machine)), dtype)


def write(
    machine: Machine,
    address: ir.Address,
    pattern: np.ndarray | jax.Array,
    value: Array,
    mask: Array | None,
) -> None:
    """Writes ``value`` at ``address`` plus ``pattern`` where ``mask``, in the machine's active lanes.

    Arguments as for :func:`read`; ``value`` and ``mask`` broadcast to its result. What lies outside the allocation is
    dropped.
    """
    if isinstance(mask, np.ndarray) and isinstance(pattern, np.ndarray) and mask.ndim <= pattern.ndim:
        # A mask that is known, and the same for all lanes, leaves the first elements, as a rule: all that is written.
        mask = np.broadcast_to(mask, pattern.shape)
        count = int(mask.sum())
        if pattern.ndim == 1 and mask[:count].all():
            pattern, mask = pattern[:count], None
            value = value[..., :count] if value.shape[-1] > 1 else value
        if not count:
            return
        mask = None if mask is not None and mask.all() else mask
    rank = len(machine.lanes)
    place, extents = _place(machine, address, value.dtype, pattern)
    own = len(extents) - rank
    if machine.mask is not None:
        active = machine.mask.reshape(machine.mask.shape + (1,) * own)
        mask = active if mask is None else active & mask
    dtype, value = value.dtype, _ranked(numerics.to_bits(jnp.asarray(value)), len(extents))
    mask = None if mask is None else _ranked(mask, len(extents))
    _record(machine, address.buffer, dtype, True, place, extents)
    flat = machine.memory.flat(address.buffer, dtype)
    boxed, place = _reshaped(flat, place, extents, machine.facts)
    new = lanes.put(boxed, place, value, mask, extents, machine.facts)
    machine.memory.put_flat(address.buffer, new.reshape(flat.shape), dtype)


def pattern_axes(pattern: np.ndarray | jax.Array, machine: Machine) -> tuple[int, ...]:
    """The register's own axes of a pattern."""
    return pattern.shape if isinstance(pattern, np.ndarray) else pattern.shape[len(machine.lanes) :]


def _ranked(x: Array, rank: int) -> Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def _record(
    machine: Machine, buffer: str, dtype: np.dtype, write: bool, place: list[Index], extents: tuple[int, ...]
) -> None:
    """Adds an access to the machine's log, if it keeps one, all views as one buffer of their smallest elements."""
    if machine.log is None:
        return
    storage = machine.memory.storage(buffer)
    unit = machine.memory.smallest_element(storage)
    *lead, index = place
    if dtype.itemsize > unit and isinstance(index, Linear):
        parts = dtype.itemsize // unit
        lead = [Linear(_behind(x.pattern, 1)) if x.pattern.ndim else x for x in lead]
        pattern = _behind(index.pattern, 1) if index.pattern.ndim else index.pattern
        index = Linear(pattern, index.terms).scaled(parts) + Linear(np.arange(parts))
        extents = (*extents, parts)
    elif dtype.itemsize < unit and isinstance(index, Linear):
        index = symbolic.divide(index, unit // dtype.itemsize, machine.facts) or jnp.asarray(index.traced())
    machine.log.append(Access(storage, f"{storage} by address", write, (*lead, index), extents))


def _place(
    machine: Machine, address: ir.Address, dtype: np.dtype, pattern: np.ndarray | jax.Array
) -> tuple[list[Index], tuple[int, ...]]:
    """Indices of elements in the flat memory behind its leading axes, and the extents of all lanes."""
    own = pattern_axes(pattern, machine)
    extents = (*machine.lanes, *own)
    first = _first(machine, address, dtype.itemsize)
    if isinstance(first, Linear) and isinstance(pattern, np.ndarray):
        first = Linear(_behind(first.pattern, len(own)), first.terms) if first.pattern.ndim else first
        index = first + Linear(_ranked(pattern, len(extents)))
    else:
        traced = first.traced() if isinstance(first, Linear) else first
        index = jnp.asarray(_behind(traced, len(own)) if np.ndim(traced) else traced) + pattern
        index = _ranked(index, len(extents))
    lead = [
        Linear(_behind(x.pattern, len(own))) if x.pattern.ndim else x
        for x in elements.lead_indices(machine, address.buffer)
    ]
    return [*lead, index], extents


def _behind(x: Array, count: int) -> Array:
    return x.reshape(x.shape + (1,) * count)


# --- addresses ------------------------------------------------------------------------------------------------------


def _first(machine: Machine, address: ir.Address, width: int) -> Index:
    """The number of the element of ``width`` bytes at ``address``."""
    buffer = machine.memory.buffers[address.buffer]
    if len(address.indices) != len(buffer.shape):
        raise HardwareConstraintError(f"{buffer.name!r} of shape {buffer.shape} is indexed with {len(address.indices)}")
    scales = numerics.bits(numerics.dtype(buffer.dtype)), 8
    parts = [expressions.index(machine, x) for x in (_flat_index(buffer, address.indices), address.offset)]
    if not all(isinstance(x, Linear) for x in parts):
        traced = (x.traced() if isinstance(x, Linear) else x for x in parts)
        return sum(x * scale for x, scale in zip(traced, scales, strict=True)) // (8 * width)
    start, unit = parts[0].scaled(scales[0]) + parts[1].scaled(scales[1]), 8 * width  # in bits
    remainders = start.pattern % unit
    if remainders.any() and all(factor % unit == 0 for factor in start.terms.values()):
        place = f"{remainders.max() / 8:g} beyond a multiple of it" if start.terms else f"{start.pattern.max() / 8:g}"
        raise HardwareConstraintError(
            f"{buffer.name!r} is accessed in elements of {width} bytes at byte {place}: align the address"
        )
    found = symbolic.divide(start, unit, machine.facts)
    return start.traced() // unit if found is None else found


def _flat_index(buffer: ir.Buffer, indices: tuple[ir.Expr, ...]) -> ir.Expr:
    """The number of an element in the order of addresses."""
    if buffer.layout is not None:
        *lead, row, column = indices
        block = ir.Const(physical_shape(buffer)[-1], "int32")
        within = (ir.Binary(op, column, block, "int32") for op in ("floordiv", "floormod"))
        indices = (*lead, next(within), row, next(within))
    return _combined(indices, physical_shape(buffer))


def _combined(indices: tuple[ir.Expr, ...], shape: tuple[int, ...]) -> ir.Expr:
    flat: ir.Expr = ir.Const(0, "int32")
    for axis, index in enumerate(indices):
        stride = ir.Const(math.prod(shape[axis + 1 :]), "int32")
        flat = ir.Binary("add", flat, ir.Binary("mul", index, stride, "int32"), "int32")
    return flat


# --- boxes ----------------------------------------------------------------------------------------------------------


def _reshaped(
    flat: jax.Array, place: list[Index], extents: tuple[int, ...], facts: Facts
) -> tuple[jax.Array, list[Index]]:
    """Flat memory and an access to it, reshaped so that the access is a box if it can be."""
    *lead, index = place
    size = flat.shape[-1]
    split = _split(index, size, extents, facts) if isinstance(index, Linear) else None
    if split is None:
        return flat, place
    factors, indices = split
    return flat.reshape(*flat.shape[:-1], *factors), [*lead, *indices]


def _split(
    index: Linear, size: int, extents: tuple[int, ...], facts: Facts
) -> tuple[tuple[int, ...], list[Linear]] | None:
    """Factors of ``size`` and an index for each, which steps through it for one stride of ``index``.

    None if there are none that hold it.
    """
    affine = symbolic.strides(index.pattern)
    if affine is None:
        return None
    base, slopes = affine
    if base < 0 or any(slope < 1 for slope in slopes.values()):
        return None
    unit_of, unit = {}, size  # of each axis: what an index of its dimension counts
    for axis in sorted(slopes, key=lambda axis: -slopes[axis]):
        unit = math.gcd(slopes[axis], unit)
        unit_of[axis] = unit
    units = sorted({1, *unit_of.values()})
    if len(set(unit_of.values())) != len(unit_of):
        return None
    factors = [upper // lower for lower, upper in zip(units, [*units[1:], size], strict=True)]
    indices = []
    for unit, factor in zip(units, factors, strict=True):
        digit = base // unit if unit == units[-1] else base // unit % factor
        pattern = np.asarray(digit)
        for axis, slope in slopes.items():
            if unit_of[axis] == unit:
                shape = [extents[axis] if axis == other else 1 for other in range(len(extents))]
                pattern = pattern + slope // unit * np.arange(extents[axis]).reshape(shape)
        larger = [other for other in units if other > unit]
        terms = {
            symbol: number // unit
            for symbol, number in index.terms.items()
            if number % unit == 0 and not any(number % other == 0 for other in larger)
        }
        indices.append(Linear(pattern, terms))
        low, high = indices[-1].bounds(facts)
        if unit != units[-1] and (low < 0 or high >= factor):
            return None
    return tuple(reversed(factors)), list(reversed(indices))
