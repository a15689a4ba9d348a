"""Operations on every lane by itself: arithmetic, bits and functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.registers import Array, Operation, Predicate, zeroed
from glass_jax.hw.model.values.storage import reinterpret

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).smallest_normal)
_SUBNORMAL_SCALE = -149  # a float32 subnormal is its bits times 2**-149

Function = Callable[..., Array]


def _lanewise(function: Function) -> Callable[[Operation], Array]:
    """An operation that computes ``function`` of its operands, all but the last, in the lanes of that predicate."""

    def run(operation: Operation) -> Array:
        *operands, mask = operation.operands
        operands = [numerics.convert(jnp.asarray(x), operation.dtype) for x in operands]
        result = numerics.apply(function, operands, operation.dtype)
        return zeroed(result, mask.at(operation.dtype.itemsize))

    return run


def _on_bits(function: Function) -> Function:
    """``function`` of integers, applied to the bits of floats."""

    def run(*operands: jax.Array) -> jax.Array:
        dtype = operands[0].dtype
        if jnp.issubdtype(dtype, jnp.integer):
            return function(*operands)
        bits = np.dtype(f"uint{8 * dtype.itemsize}")
        return reinterpret(function(*(reinterpret(x, bits) for x in operands)), dtype)

    return run


def _flushed(x: Array) -> Array:
    """float32 subnormals as zeros, as the hardware's functions take and give them."""
    zero = jnp.copysign(np.zeros((), x.dtype), x)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, zero, x) if x.dtype == np.float32 else x


def _subnormal(x: Array) -> tuple[Array, Array]:
    """Whether ``x`` is a positive float32 subnormal, and the integer of which it then is a multiple of 2**-149."""
    bits = lax.bitcast_convert_type(x, np.int32)
    return (bits > 0) & (bits < 1 << 23), bits.astype(np.float32)


def _exp(x: Array) -> Array:
    y = jnp.exp(x)  # never negative, which makes this cheaper than _flushed
    return jnp.where(y < _SMALLEST_NORMAL, np.zeros((), y.dtype), y) if y.dtype == np.float32 else y


def _exp_with_subnormals(x: Array) -> Array:
    # A subnormal is an integer times 2**-149, its bits: the square of a normal number, which XLA would flush.
    half = jnp.exp(x / 2)
    bits = jnp.round((half * np.float32(2.0**74)) * (half * np.float32(2.0**75))).astype(np.int32)
    small = lax.bitcast_convert_type(jnp.where(bits < 1 << 23, bits, 0), np.float32)
    return jnp.where(x < np.log(_SMALLEST_NORMAL), small, jnp.exp(x))


def _log_with_subnormals(x: Array) -> Array:
    small, multiple = _subnormal(x)
    return jnp.where(small, jnp.log(multiple) + np.float32(_SUBNORMAL_SCALE * np.log(2)), jnp.log(_flushed(x)))


def _sqrt_with_subnormals(x: Array) -> Array:
    small, multiple = _subnormal(x)
    return jnp.where(small, jnp.sqrt(2 * multiple) * np.float32(2.0**-75), jnp.sqrt(_flushed(x)))


# Functions whose kernel may ask for subnormals to be kept.
_PRECISE = {"vexp": _exp_with_subnormals, "vln": _log_with_subnormals, "vsqrt": _sqrt_with_subnormals}
_FAST = {"vexp": _exp, "vln": lambda x: jnp.log(_flushed(x)), "vsqrt": lambda x: jnp.sqrt(_flushed(x))}


def _special(operation: Operation) -> Array:
    keep = "FTZ_FALSE" in operation.modes and operation.dtype == np.float32
    return _lanewise((_PRECISE if keep else _FAST)[operation.name])(operation)


_BINARY: dict[str, Function] = {
    "vadd": jnp.add,
    "vsub": jnp.subtract,
    "vmul": jnp.multiply,
    "vdiv": numerics.BINARY["div"],
    "vmax": jnp.maximum,
    "vmin": jnp.minimum,
    "vshl": jnp.left_shift,
    "vshr": jnp.right_shift,
}

_FUNCTIONS: dict[str, Function] = _BINARY | {
    "vand": _on_bits(jnp.bitwise_and),
    "vor": _on_bits(jnp.bitwise_or),
    "vxor": _on_bits(jnp.bitwise_xor),
    "vnot": _on_bits(jnp.bitwise_not),
    "vabs": jnp.abs,
    "vneg": jnp.negative,
    "vrelu": lambda x: jnp.maximum(x, 0),
    "vlrelu": lambda x, slope: jnp.where(x >= 0, x, x * slope),
    "vprelu": lambda x, slope: jnp.where(x >= 0, x, x * slope),
    "vabsdif": lambda x, y: jnp.abs(x - y),
    "vexpdif": lambda x, y: _exp(x - y),
    # The first operand is the register that takes the result.
    "vmula": lambda old, x, y: old + x * y,
    "vmadd": lambda old, x, y: old * x + y,
    "vaxpy": lambda old, x, scalar: x * scalar + old,
}


# --- carries and wide products --------------------------------------------------------------------------------------


def _with_carry(subtract: bool) -> Callable[[Operation], tuple]:
    """32-bit sums or differences, with a carry: whether a sum leaves 32 bits, whether a difference does not."""

    def run(operation: Operation) -> tuple:
        x, y, *carried, mask = operation.operands
        x, y = (lax.bitcast_convert_type(jnp.asarray(operand), np.uint32) for operand in (x, y))
        carry = jnp.asarray(carried[0].at(4)) if carried else jnp.zeros((), bool)
        if subtract:
            result = x - y - carry.astype(np.uint32)
            out = (x > y) | ((x == y) & ~carry)
        else:
            result = x + y + carry.astype(np.uint32)
            out = (result < x) | ((result == x) & carry)
        active = mask.at(4)
        result = zeroed(lax.bitcast_convert_type(result, operation.dtype), active)
        return Predicate(out & active, 4), result

    return run


def _wide_product(operation: Operation) -> tuple[Array, Array]:
    """The low and the high 32 bits of products."""
    x, y, mask = operation.operands
    x, y = jnp.broadcast_arrays(x, y)
    active = mask.at(4)
    return zeroed(x * y, active), zeroed(lax.mulhi(x, y), active)


OPERATIONS: dict[str, Callable[[Operation], object]] = {
    **{name: _lanewise(function) for name, function in _FUNCTIONS.items()},
    **{f"{name}s": _lanewise(_BINARY[name]) for name in ("vadd", "vmul", "vmax", "vmin", "vshl", "vshr")},
    **dict.fromkeys(_FAST, _special),
    "vaddc": _with_carry(subtract=False),
    "vaddcs": _with_carry(subtract=False),
    "vsubc": _with_carry(subtract=True),
    "vsubcs": _with_carry(subtract=True),
    "vmull": _wide_product,
}
