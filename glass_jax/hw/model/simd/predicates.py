"""Predicates: made from patterns and counts, compared, combined and permuted; and the selection by them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from glass_jax.errors import UnsupportedError
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.registers import REGISTER_BYTES, Array, Operation, Predicate, alike, spread

# Which of n elements a pattern selects, besides the first few ("VL8").
_PATTERNS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "ALL": lambda lane, n: lane >= 0,
    "ALLF": lambda lane, n: lane < 0,
    "M3": lambda lane, n: lane % 3 == 0,
    "M4": lambda lane, n: lane % 4 == 0,
    "H": lambda lane, n: lane < n // 2,
    "Q": lambda lane, n: lane < n // 4,
}


def _pattern(operation: Operation) -> Predicate:
    width = operation.number(0) // 8
    lane, name = np.arange(REGISTER_BYTES // width), operation.mode("PAT_", "ALL")
    if name.startswith("VL"):
        return Predicate(lane < int(name.removeprefix("VL")), width)
    if name not in _PATTERNS:
        raise UnsupportedError(f"the NPU model does not know the predicate pattern PAT_{name}")
    return Predicate(_PATTERNS[name](lane, len(lane)), width)


def _first(operation: Operation) -> Predicate:
    """The first ``value`` elements, ``value`` unsigned."""
    width = operation.number(1) // 8
    return Predicate(np.arange(REGISTER_BYTES // width) < operation.operands[0].astype(np.uint32), width)


def _combined(function: Callable[..., Array]) -> Callable[[Operation], Predicate]:
    """A bitwise operation of predicates; 0 where the last operand is."""

    def run(operation: Operation) -> Predicate:
        width = min(operand.width for operand in operation.operands)
        *operands, mask = (operand.at(width) for operand in operation.operands)
        return Predicate(function(*operands) & mask, width)

    return run


def _chosen(operation: Operation) -> Predicate:
    width = min(operand.width for operand in operation.operands)
    first, second, mask = (operand.at(width) for operand in operation.operands)
    return Predicate((first & mask) | (second & ~mask), width)


def _compare(operation: Operation) -> Predicate:
    x, y, mask = operation.operands
    y = numerics.convert(jnp.asarray(y), x.dtype)
    return Predicate(numerics.BINARY[operation.modes[0]](x, y) & mask.at(x.dtype.itemsize), x.dtype.itemsize)


def _select(operation: Operation) -> Array:
    x, y, mask = operation.operands
    return jnp.where(mask.at(operation.dtype.itemsize), x, y)


# --- permutations of bits -------------------------------------------------------------------------------------------

_HALF = REGISTER_BYTES // 2


def _halves(bits: Array, low: bool) -> Array:
    """``bits``, half a predicate, in its low or high half, 0 in the other."""
    zeros = np.zeros_like(bits) if isinstance(bits, np.ndarray) else jnp.zeros_like(bits)
    join = np.concatenate if isinstance(bits, np.ndarray) else jnp.concatenate
    return join([bits, zeros] if low else [zeros, bits], axis=-1)


def _pack(operation: Operation) -> Predicate:
    return Predicate(_halves(operation.operands[0].at(1)[..., ::2], operation.modes[0] == "LOWER"), 1)


def _unpack(operation: Operation) -> Predicate:
    bits = operation.operands[0].at(1)
    return Predicate(spread(bits[..., :_HALF] if operation.modes[0] == "LOWER" else bits[..., _HALF:], 2), 1)


def _interleave(operation: Operation) -> tuple[Predicate, Predicate]:
    group = operation.number(2) // 8
    x, y = alike(*(operand.at(1) for operand in operation.operands[:2]))
    lead = x.shape[:-1]
    pairs = jnp.stack([x.reshape(*lead, -1, group), y.reshape(*lead, -1, group)], axis=-2).reshape(*lead, -1)
    return Predicate(pairs[..., :REGISTER_BYTES], 1), Predicate(pairs[..., REGISTER_BYTES:], 1)


def _deinterleave(operation: Operation) -> tuple[Predicate, Predicate]:
    group = operation.number(2) // 8
    x, y = alike(*(operand.at(1) for operand in operation.operands[:2]))
    lead = x.shape[:-1]
    pairs = jnp.concatenate([x, y], axis=-1).reshape(*lead, -1, 2, group)
    return tuple(Predicate(pairs[..., number, :].reshape(*lead, -1), 1) for number in (0, 1))


OPERATIONS: dict[str, Callable[[Operation], object]] = {
    "pset": _pattern,
    "pge": _pattern,
    "update_mask": _first,
    "pand": _combined(lambda x, y: x & y),
    "por": _combined(lambda x, y: x | y),
    "pxor": _combined(lambda x, y: x ^ y),
    "pnot": _combined(lambda x: ~x),
    "psel": _chosen,
    "ppack": _pack,
    "punpack": _unpack,
    "pintlv": _interleave,
    "pdintlv": _deinterleave,
    "vcmp": _compare,
    "vcmps": _compare,
    "vsel": _select,
}
