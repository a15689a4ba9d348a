"""Elements of a buffer, loaded and stored by all lanes of a machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values import lanes, numerics
from glass_jax.hw.model.values.lanes import Access, Index
from glass_jax.hw.model.values.symbolic import Linear


def load(machine: Machine, buffer: str, indices: Sequence[Index]) -> jax.Array:
    """``buffer[indices]`` in every lane: rank 0, or the lanes' rank."""
    place = place_of(machine, buffer, indices)
    record(machine, buffer, False, place, machine.lanes[0])
    dtype = numerics.dtype(machine.memory.buffers[buffer].dtype)
    contents = machine.memory.view(buffer)
    return numerics.from_bits(lanes.take(contents, place, numerics.poison(dtype), machine.lanes, machine.facts), dtype)


def store(machine: Machine, buffer: str, indices: Sequence[Index], value: jax.Array) -> None:
    """``buffer[indices] = value`` in every lane of the mask."""
    place, mask, units = place_of(machine, buffer, indices), machine.mask, machine.lanes[0]
    if units > 1 and not machine.memory.lead(buffer) and not any(_differs_by_unit(index) for index in place):
        # Both units write one element: the second one's value stays.
        value, mask, units = _last(value), None if mask is None else _last(mask), 1
    record(machine, buffer, True, place, units)
    bits, contents = numerics.to_bits(value), machine.memory.view(buffer)
    last_wins = machine.log is None  # while accesses are recorded, lanes that meet run one after the other
    new = lanes.put(contents, place, bits, mask, machine.lanes, machine.facts, last_wins)
    machine.memory.put_view(buffer, new)


def place_of(machine: Machine, buffer: str, indices: Sequence[Index]) -> list[Index]:
    """Indices of ``buffer[indices]`` in a memory's array: along its leading axes, then along the buffer's own."""
    shape = machine.memory.buffers[buffer].shape
    if len(indices) != len(shape):
        raise HardwareConstraintError(f"{buffer!r} of shape {shape} is indexed with {len(indices)} indices")
    return [*lead_indices(machine, buffer), *indices]


def lead_indices(machine: Machine, buffer: str) -> list[Index]:
    """Indices along the leading axes of a memory's array: each lane's own part of it."""
    found: list[Index] = []
    for axis, extent in enumerate(machine.memory.lead(buffer)):
        numbers = np.array(machine.active) if axis == 0 else np.arange(extent)
        shape = [-1 if axis == other else 1 for other in range(len(machine.lanes))]
        found.append(Linear(numbers.reshape(shape) if len(numbers) > 1 else numbers[0]))
    return found


def record(
    machine: Machine, buffer: str, write: bool, place: Sequence[Index], units: int, kind: str | None = None
) -> None:
    """Adds an access to the machine's log, if it keeps one.

    ``kind`` is how an atomic joins its value; None for other accesses, and for an atomic whose old value is used: then
    the order of the lanes matters.
    """
    if machine.log is not None:
        lanes_taking_part = (units, *machine.lanes[1:])
        storage = machine.memory.storage(buffer)
        machine.log.append(Access(storage, buffer, write, tuple(place), lanes_taking_part, kind))


def _differs_by_unit(index: Index) -> bool:
    pattern = index.pattern if isinstance(index, Linear) else index
    return pattern.ndim > 0 and pattern.shape[0] > 1


def _last(value: jax.Array) -> jax.Array:
    """The value of the last vector unit."""
    return value[-1:] if np.ndim(value) else jnp.asarray(value)
