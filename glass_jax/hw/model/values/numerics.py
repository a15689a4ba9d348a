"""How numbers behave on the model: types, poison, conversions and arithmetic. The rules are in docs/numerics.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError

_ALIASES = {"float8_e4m3": "float8_e4m3fn"}


def dtype(name: str) -> np.dtype:
    """The element type called ``name``.

    Raises:
      UnsupportedError: JAX has no such type, or has it only with ``jax_enable_x64``.
    """
    try:
        found = jnp.dtype(_ALIASES.get(name, name))
    except TypeError:
        raise UnsupportedError(f"the NPU model has no elements of type {name!r}") from None
    if found.itemsize == 8 and not jax.config.jax_enable_x64:
        raise UnsupportedError(
            f"a buffer of {name} needs 64-bit types: set JAX_ENABLE_X64=1, or use a 32-bit type in the kernel"
        )
    return found


def scalar_dtype(name: str) -> np.dtype:
    """The type in which an expression of type ``name`` is evaluated: 32 bits for 64-bit integers if JAX has none."""
    return dtype({"int64": "int32", "uint64": "uint32"}.get(name, name) if not jax.config.jax_enable_x64 else name)


def stored(of: np.dtype) -> np.dtype:
    """The type in which elements lie in the model's memories.

    XLA on a CPU turns every update of a bfloat16 or 8-bit float array into one of a float32 copy of it: they are kept
    as the unsigned integers of their bits.
    """
    if jnp.issubdtype(of, jnp.floating) and of not in (np.float16, np.float32, np.float64):
        return np.dtype(f"uint{8 * of.itemsize}")
    return of


def bits(of: np.dtype) -> int:
    """Bits of an element in the hardware's memory: 4 for float4, which the model keeps one in a byte."""
    if jnp.issubdtype(of, jnp.floating):
        return jnp.finfo(of).bits
    return 8 * of.itemsize


def to_bits(x: jax.Array) -> jax.Array:
    """``x`` as it lies in memory."""
    if bits(x.dtype) == 4:
        return lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    lying = stored(x.dtype)
    return x if lying == x.dtype else lax.bitcast_convert_type(x, lying)


def from_bits(x: jax.Array, of: np.dtype) -> jax.Array:
    """Elements of type ``of`` that lie in memory as ``x``."""
    if bits(of) == 4:
        return lax.bitcast_convert_type(x.astype(jnp.uint4), of)
    return x if x.dtype == of else lax.bitcast_convert_type(x, of)


def poison(of: np.dtype) -> np.ndarray:
    """What memory of elements ``of`` holds that nobody has written, as stored.

    NaN, or for integers a large number, so that a read of it shows.
    """
    if bits(of) == 4:
        return np.asarray(7, np.uint8)  # 6, the largest: there is no NaN
    if jnp.issubdtype(of, jnp.floating):
        return np.asarray(np.nan, of).view(stored(of))
    if of == np.bool_:
        return np.asarray(True)
    # Three quarters of the range: far from any index or count, and a sum of few of them does not come back to 0.
    return np.asarray(np.iinfo(of).max // 4 * 3, of)


def convert(x: jax.Array, to: np.dtype) -> jax.Array:
    """``x`` converted to ``to`` as the vector unit and the copy pipes convert.

    To a float: to nearest, ties to even; beyond its range infinity, but the largest finite value in 8-bit floats.
    Float to integer: toward zero, saturating, NaN to 0. Integer to integer: the low bits. To bool: whether not 0.
    """
    if x.dtype == to:
        return x
    if to == np.bool_:
        return x != 0
    from_float, to_float = jnp.issubdtype(x.dtype, jnp.floating), jnp.issubdtype(to, jnp.floating)
    if to_float and to.itemsize == 1:
        largest = float(jnp.finfo(to).max)
        wide = x.astype(jnp.float32)
        return jnp.where(jnp.isnan(wide), wide, jnp.clip(wide, -largest, largest)).astype(to)
    if from_float and not to_float:
        wide = jnp.trunc(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x)
        limits = np.iinfo(to)
        # In float32 the bound 2**31 - 1 is 2**31, which no int32 holds: the ends are chosen by comparison.
        exact = wide.astype(to)
        exact = jnp.where(wide >= limits.max, np.asarray(limits.max, to), exact)
        exact = jnp.where(wide <= limits.min, np.asarray(limits.min, to), exact)
        return jnp.where(jnp.isnan(wide), np.asarray(0, to), exact)
    return x.astype(to)


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """The quotient; of integers, rounded toward zero."""
    return x / y if jnp.issubdtype(x.dtype, jnp.floating) else lax.div(*jnp.broadcast_arrays(x, y))


def apply(function: Callable[..., jax.Array], operands: Sequence[jax.Array], to: np.dtype) -> jax.Array:
    """``function(*operands)`` as type ``to``; on floats of less than 32 bits computed in float32 and rounded once.

    XLA would compute a chain of 16-bit operations in float32 and round at its end only.
    """
    wide = [
        x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x for x in operands
    ]
    return function(*wide).astype(to)


# Operands have one dtype and broadcast against each other. Comparisons give bool.
BINARY: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": _divide,
    "truncdiv": _divide,
    "truncmod": jnp.fmod,
    "floordiv": jnp.floor_divide,
    "floormod": jnp.remainder,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "bitand": jnp.bitwise_and,
    "bitor": jnp.bitwise_or,
    "bitxor": jnp.bitwise_xor,
    "shl": jnp.left_shift,
    "shr": jnp.right_shift,
    "pow": jnp.power,
}

CALLS: dict[str, Callable[..., jax.Array]] = {
    "abs": jnp.abs,
    "not": jnp.logical_not,
    "bitnot": jnp.bitwise_not,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "exp10": lambda x: jnp.power(np.asarray(10, x.dtype), x),
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "erf": jax.scipy.special.erf,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "nearbyint": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "trunc": jnp.trunc,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "fmod": jnp.fmod,
    "clamp": jnp.clip,
    "ldexp": jnp.ldexp,
    "copysign": jnp.copysign,
    "hypot": jnp.hypot,
    "clz": lax.clz,
    "popcount": lax.population_count,
}
