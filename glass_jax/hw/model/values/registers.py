"""Vector registers and predicates as arrays.

The lanes of a register are the last axis of its array. The lanes of the machine (units, iterations evaluated together)
stand before it, of size 1 where the register is the same; a register that is the same in all of them has one axis only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.values import numerics

REGISTER_BYTES = ir.REGISTER_BITS // 8
BLOCK_BYTES = 32  # of a data block, eight of which make a register

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A predicate register: one bit for every byte of a vector register.

    An element is governed by the bit of its first byte; the bits of its other bytes are 0.

    Attributes:
      lanes: the bits that govern elements of ``width`` bytes; a NumPy array if they are known now.
      width: bytes of an element.
    """

    lanes: Array
    width: int

    def at(self, width: int) -> Array:
        """The bits that govern elements of ``width`` bytes."""
        if width >= self.width:
            return self.lanes[..., :: width // self.width]
        return spread(self.lanes, self.width // width)


Value = Array | Predicate | tuple["Value", "Value"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation with its operands evaluated.

    Attributes:
      name: its name in the kernel language.
      dtype: element type of its result.
      lanes: number of elements of its result.
      operands: registers, predicates, pairs, and scalars as arrays whose last axis has size 1.
      modes: its words.
    """

    name: str
    dtype: np.dtype
    lanes: int
    operands: tuple[Any, ...]
    modes: tuple[str, ...]

    def mode(self, prefix: str, default: str) -> str:
        """What follows ``prefix`` in the word that begins with it."""
        return next((word.removeprefix(prefix) for word in self.modes if word.startswith(prefix)), default)

    def number(self, operand: int) -> int:
        """The value of a scalar operand that must be known when the program is traced."""
        value = self.operands[operand]
        if not isinstance(value, np.ndarray):
            raise UnsupportedError(f"the NPU model does not run {self.name} with a number known only at run time yet")
        return int(value.ravel()[0])


def layout(dtype: str) -> tuple[np.dtype, int]:
    """Element type and number of elements of a register's array; 4-bit floats are bytes of two, the first one low."""
    element, lanes = ir.register(dtype)
    return (np.dtype(np.uint8), REGISTER_BYTES) if element.startswith("float4") else (numerics.dtype(element), lanes)


def spread(x: Array, ratio: int, part: int = 0) -> Array:
    """``x[i]`` at place ``ratio * i + part`` of ``ratio`` times as many lanes, 0 elsewhere."""
    if isinstance(x, np.ndarray):
        wide = np.zeros((*x.shape, ratio), x.dtype)
        wide[..., part] = x
        return wide.reshape(*x.shape[:-1], -1)
    config = [(0, 0, 0)] * (x.ndim - 1) + [(part, ratio - 1 - part, ratio - 1)]
    bits = numerics.to_bits(x)  # XLA on a CPU would move bfloat16 by way of float32
    return numerics.from_bits(lax.pad(bits, np.asarray(0, bits.dtype), config), x.dtype)


def fill_up(x: Array, lanes: int) -> Array:
    """``x`` in the first lanes of ``lanes``, 0 in the others."""
    config = [(0, 0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1], 0)]
    return lax.pad(x, np.asarray(0, x.dtype), config)


def zeroed(x: Array, mask: Array) -> Array:
    """``x`` where ``mask``, 0 elsewhere."""
    if isinstance(mask, np.ndarray) and mask.all():
        return x
    return jnp.where(mask, x, np.asarray(0, x.dtype))


def alike(*registers: Array) -> list[Array]:
    """Registers in one shape, apart from the number of their lanes."""
    lead = np.broadcast_shapes(*(x.shape[:-1] for x in registers))
    return [jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in registers]


def aligned(value: Value, rank: int, active: tuple[int, ...]) -> Value:
    """``value`` for ``rank`` lane axes and the vector units ``active``; it was bound with fewer axes, or more units."""
    if isinstance(value, tuple):
        return tuple(aligned(part, rank, active) for part in value)
    if isinstance(value, Predicate):
        return Predicate(aligned(value.lanes, rank, active), value.width)
    if value.ndim == 1:
        return value
    if value.shape[0] > len(active):
        value = value[np.array(active)]
    return value.reshape(*value.shape[:-1], *(1,) * (rank + 1 - value.ndim), value.shape[-1])
