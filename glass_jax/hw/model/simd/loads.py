"""Loads from the unified buffer: their distributions, de-interleaving, predicates, and gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.simd import addresses
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.registers import (
    BLOCK_BYTES,
    REGISTER_BYTES,
    Array,
    Operation,
    Predicate,
    Value,
    spread,
    zeroed,
)
from glass_jax.hw.model.values.storage import reinterpret

_BLOCKS = REGISTER_BYTES // BLOCK_BYTES


@dataclasses.dataclass(frozen=True)
class _Distribution:
    """How a load fills a register of ``n`` elements: with how many from memory, and what becomes of them.

    ``block`` is the number of elements of 32 bytes.
    """

    count: Callable[[int, int], int]
    arrange: Callable[[Array, int, int], Array]


_DISTRIBUTIONS = {
    "NORM": _Distribution(lambda n, block: n, lambda x, n, block: x),
    "BRC": _Distribution(lambda n, block: 1, lambda x, n, block: jnp.repeat(x, n, axis=-1)),
    "US": _Distribution(lambda n, block: n // 2, lambda x, n, block: jnp.repeat(x, 2, axis=-1)),
    "DS": _Distribution(lambda n, block: 2 * n, lambda x, n, block: x[..., ::2]),
    "UNPK": _Distribution(lambda n, block: n // 2, lambda x, n, block: spread(x, 2)),
    "UNPK4": _Distribution(lambda n, block: n // 4, lambda x, n, block: spread(x, 4)),
    "BLK": _Distribution(lambda n, block: block, lambda x, n, block: jnp.tile(x, n // block)),
    "E2B": _Distribution(lambda n, block: _BLOCKS, lambda x, n, block: jnp.repeat(x, n // _BLOCKS, axis=-1)),
}


def _distribution(operation: Operation) -> _Distribution:
    name = operation.modes[0].split("_B")[0]
    if name not in _DISTRIBUTIONS:
        raise UnsupportedError(f"the NPU model does not know the load distribution {operation.modes[0]}")
    return _DISTRIBUTIONS[name]


def _load(machine: Machine, operation: Operation) -> Value:
    how, block = _distribution(operation), BLOCK_BYTES // operation.dtype.itemsize
    numbers = np.arange(how.count(operation.lanes, block))
    x = addresses.read(machine, operation.operands[0], operation.dtype, numbers)
    return how.arrange(x, operation.lanes, block)


def _load_two(machine: Machine, operation: Operation) -> tuple[Array, Array]:
    """``vld2``: the elements of even and of odd number among two registers of them."""
    if not operation.modes[0].startswith("DINTLV"):
        raise UnsupportedError(f"the NPU model does not know the load distribution {operation.modes[0]}")
    x = addresses.read(machine, operation.operands[0], operation.dtype, np.arange(2 * operation.lanes))
    return x[..., ::2], x[..., 1::2]


def _load_predicate(machine: Machine, operation: Operation) -> Predicate:
    how = {"NORM": (1, 1), "US": (1, 2), "DS": (2, 1)}[operation.modes[0]]
    step, repeat = how
    count = REGISTER_BYTES // 8 * step // repeat
    octets = addresses.read(machine, operation.operands[0], np.dtype(np.uint8), np.arange(count))
    bits = (octets[..., None] >> np.arange(8, dtype=np.uint8)) & 1 != 0
    bits = bits.reshape(*octets.shape[:-1], -1)[..., ::step]
    return Predicate(jnp.repeat(bits, repeat, axis=-1), 1)


# --- mutable registers ----------------------------------------------------------------------------------------------


def slot(address: ir.Address) -> ir.Address:
    """The first lane of a register in an array of registers."""
    return ir.Address(address.buffer, (*address.indices, ir.Const(0, "int32")))


def load_register(machine: Machine, load: ir.Load) -> Array | Predicate:
    """A register of an array of registers."""
    element, lanes = ir.register(load.dtype)
    dtype = np.dtype(bool) if element == "bool" else numerics.dtype(element)
    x = addresses.read(machine, slot(ir.Address(load.buffer, load.indices)), dtype, np.arange(lanes))
    return Predicate(x, 1) if element == "bool" else x


# --- gathers --------------------------------------------------------------------------------------------------------


def _numbers(machine: Machine, index: Array) -> Array:
    """A register of unsigned numbers, with all axes of the machine's lanes."""
    index = jnp.asarray(index).astype(np.int32)
    return index.reshape((1,) * (len(machine.lanes) + 1 - index.ndim) + index.shape)


def _gather(machine: Machine, operation: Operation) -> Array:
    """``vgather2``: the element that each lane's index counts.

    Where the index has wider lanes than the elements, elements stand at even places; bytes may be widened with zeros.
    """
    base, index, mask = operation.operands
    source = numerics.dtype(machine.memory.buffers[base.buffer].dtype)
    index = _numbers(machine, index)
    count = index.shape[-1]
    x = zeroed(addresses.read(machine, base, source, index), mask.at(REGISTER_BYTES // count))
    if source == operation.dtype:
        return spread(x, operation.lanes // count)
    return reinterpret(reinterpret(x, np.dtype(np.uint8)).astype(np.uint16), operation.dtype)


def _gather_blocks(machine: Machine, operation: Operation) -> Array:
    """``vgatherb``: eight blocks of 32 bytes, by the offsets in bytes in the first eight lanes of the index."""
    base, index, *masks = operation.operands
    size = operation.dtype.itemsize
    starts = _numbers(machine, index)[..., :_BLOCKS, None] // size
    x = addresses.read(machine, base, operation.dtype, starts + np.arange(BLOCK_BYTES // size, dtype=np.int32))
    if masks:
        x = zeroed(x, masks[0].at(4)[..., :_BLOCKS, None])
    return x.reshape(*x.shape[:-2], -1)


OPERATIONS: dict[str, Callable[[Machine, Operation], Value]] = {
    "vld": _load,
    "vld2": _load_two,
    "pld": _load_predicate,
    "vgather2": _gather,
    "vgatherb": _gather_blocks,
}
