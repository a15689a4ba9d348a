"""Stores: of registers and predicates to the unified buffer, and to mutable registers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from glass_jax.errors import HardwareConstraintError, UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Handler, Machine
from glass_jax.hw.model.simd import addresses, convert, evaluate, loads, reduce
from glass_jax.hw.model.values.registers import BLOCK_BYTES, REGISTER_BYTES, Array, Predicate
from glass_jax.hw.model.values.storage import reinterpret

_BLOCKS = REGISTER_BYTES // BLOCK_BYTES

# Stores that keep the low part of each lane: bytes of a lane, bytes of its part.
_PACKED = {"PK_B16": (2, 1), "PK_B32": (4, 2), "PK4_B32": (4, 1)}


def _store(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """``vsts``: a register, its first element (whatever the mask), or the low parts of its lanes."""
    address, source, mask, how = op.args
    x, mask = evaluate.value(machine, source), evaluate.value(machine, mask)
    if how.startswith("ONEPT"):
        addresses.write(machine, address, np.arange(1), x[..., :1], None)
    elif how in _PACKED:
        lane, part = _PACKED[how]
        x = reinterpret(jnp.asarray(x), np.dtype(f"uint{8 * part}"))[..., :: lane // part]
        addresses.write(machine, address, np.arange(x.shape[-1]), x, mask.at(lane))
    elif how.startswith("NORM"):
        addresses.write(machine, address, np.arange(x.shape[-1]), x, mask.at(x.dtype.itemsize))
    else:
        # The device interleaves two registers; the kernel language passes one, which its templates do not compile.
        raise UnsupportedError(f"the NPU model does not run stores with the distribution {how}: it takes two registers")


def _store_blocks(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """``vsstb``: eight blocks of 32 bytes, as far apart as the upper half of the stride says, in blocks."""
    source, address, stride, mask = op.args
    x, mask = evaluate.value(machine, source), evaluate.value(machine, mask)
    size = x.dtype.itemsize
    block = BLOCK_BYTES // size
    apart = (expressions.constant(machine, stride, "a store of blocks with a stride") >> 16 & 0xFFFF) * block
    if not apart:
        raise HardwareConstraintError(
            "vsstb writes its eight blocks to one place: the upper half of its stride, their distance in blocks, is 0"
        )
    numbers = np.arange(_BLOCKS)[:, None] * apart + np.arange(block)
    parts = (value.reshape(*value.shape[:-1], _BLOCKS, block) for value in (x, mask.at(size)))
    addresses.write(machine, address, numbers, *parts)


def _scatter(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """``vscatter``: each element to the place that its lane's index counts; of bytes those at even places."""
    source, address, index, mask = op.args
    x, index, mask = (evaluate.value(machine, arg) for arg in (source, index, mask))
    index = jnp.asarray(index).astype(np.int32)
    count = index.shape[-1]
    index = index.reshape((1,) * (len(machine.lanes) + 1 - index.ndim) + index.shape)
    active = jnp.broadcast_to(mask.at(REGISTER_BYTES // count), index.shape)
    addresses.write(machine, address, index, x[..., :: x.shape[-1] // count], active)


def _store_predicate(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """``pst``: the bits as bytes, the first one lowest; with ``PK`` every second bit."""
    address, source, how = op.args
    bits = jnp.asarray(evaluate.value(machine, source).at(1))[..., :: 2 if how == "PK" else 1]
    octets = bits.reshape(*bits.shape[:-1], -1, 8).astype(np.uint8) << np.arange(8, dtype=np.uint8)
    octets = jnp.sum(octets, axis=-1, dtype=np.uint8)
    addresses.write(machine, address, np.arange(octets.shape[-1]), octets, None)


# --- registers ------------------------------------------------------------------------------------------------------


def store_register(machine: Machine, store: ir.Store) -> None:
    """Stores a register in an array of registers; with ``MODE_MERGING`` lanes that are not active stay."""
    slot, mask = loads.slot(ir.Address(store.buffer, store.indices)), None
    if isinstance(store.value, ir.Register) and "MODE_MERGING" in store.value.modes:
        mask = _merged(machine, store.value)
    x = evaluate.value(machine, store.value, merging=True)
    x = x.at(1) if isinstance(x, Predicate) else x
    addresses.write(machine, slot, np.arange(x.shape[-1]), x, mask)


def _merged(machine: Machine, expr: ir.Register) -> Array:
    """The lanes that a merging operation writes."""
    operation = evaluate.operation(machine, expr)
    if expr.name == "vcvt":
        return convert.written(operation)
    if expr.name in reduce.WRITTEN_LANES:
        return np.arange(operation.lanes) < reduce.WRITTEN_LANES[expr.name]
    return operation.operands[-1].at(operation.dtype.itemsize)


def _no_effect(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Operations run in the order written."""


OPERATIONS: dict[str, Handler] = {
    "vsts": _store,
    "vsstb": _store_blocks,
    "vscatter": _scatter,
    "pst": _store_predicate,
    "mem_bar": _no_effect,
}
