"""Transfers written as the instruction that does them: pieces of memory, at distances in bytes, by address."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import numerics, symbolic
from glass_jax.hw.model.values.symbolic import Linear


def run_move(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Copies ``count`` pieces of ``nbytes`` each, from the source's address to the target's and so many bytes on."""
    target, source, to_distance, from_distance = op.args
    places = [_address(machine, region) for region in (target, source)]
    distances = [expressions.scalar(machine, distance) for distance in (to_distance, from_distance)]
    if None in (*places, *distances) and len(machine.active) > 1:
        for unit in machine.active:
            with machine.unit(unit):
                run_move(machine, op, live)
        return
    sizes = [numerics.dtype(machine.memory.buffers[region.buffer].dtype).itemsize for region in (target, source)]
    if len({numerics.stored(numerics.dtype(machine.memory.buffers[r.buffer].dtype)) for r in (target, source)}) > 1:
        raise HardwareConstraintError(
            f"a move from {source.buffer!r} to {target.buffer!r}, whose elements differ, would mix up their bytes"
        )
    length = op.attrs["nbytes"] // sizes[0]
    for piece in range(op.attrs["count"]):
        to, of = (
            (place + _elements(machine, distance, size).scaled(piece)).traced()
            for place, distance, size in zip(places, distances, sizes, strict=True)
        )
        for unit in machine.active:
            with machine.unit(unit):
                new = lax.dynamic_slice_in_dim(_flat(machine, source), of, length)
                _write(machine, target, lax.dynamic_update_slice_in_dim(_flat(machine, target), new, to, 0))


def _address(machine: Machine, region: ir.Region) -> Linear | None:
    """The number of an element in the order of a row-major buffer; None if it differs between the vector units."""
    shape = machine.memory.buffers[region.buffer].shape
    place = Linear(0)
    for axis, start in enumerate(region.starts):
        found = expressions.scalar(machine, start)
        if found is None:
            return None
        place = place + found.scaled(int(np.prod(shape[axis + 1 :], dtype=np.int64)))
    return place


def _elements(machine: Machine, distance: Linear, size: int) -> Linear:
    found = symbolic.divide(distance, size, machine.facts)
    return Linear.of(symbolic.fresh(distance.traced() // size)) if found is None else found


def _flat(machine: Machine, region: ir.Region) -> jax.Array:
    """The memory of one vector unit, or of all, in the order of addresses."""
    contents = machine.memory.view(region.buffer)
    if machine.memory.per_unit(region.buffer):
        contents = contents[machine.active[0]]
    return contents.reshape(-1)


def _write(machine: Machine, region: ir.Region, flat: jax.Array) -> None:
    contents = machine.memory.view(region.buffer)
    shape = machine.memory.buffers[region.buffer].shape
    if machine.memory.per_unit(region.buffer):
        new = contents.at[machine.active[0]].set(flat.reshape(shape))
    else:
        new = flat.reshape(shape)
    machine.memory.put_view(region.buffer, new)
