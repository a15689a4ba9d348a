"""``vcvt``: conversions between element types, with their rounding, saturation and part of a register."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.registers import Array, Operation, spread, zeroed

_PARTS = {"EVEN": 0, "ODD": 1, "P0": 0, "P1": 1, "P2": 2, "P3": 3}
_HALF_EVEN, _HALF_AWAY = lax.RoundingMethod.TO_NEAREST_EVEN, lax.RoundingMethod.AWAY_FROM_ZERO


@dataclasses.dataclass(frozen=True)
class _Format:
    """A float format: bits of its fraction, exponent of its smallest normal number, its largest number, and what a
    number beyond that becomes without saturation."""

    fraction: int
    least: int
    largest: float
    beyond: float


_FORMATS = {
    "float16": _Format(10, -14, 65504.0, np.inf),
    "float8_e4m3fn": _Format(3, -6, 448.0, np.nan),
    "float8_e5m2": _Format(2, -14, 57344.0, np.inf),
    "float4_e2m1fn": _Format(1, 0, 6.0, 6.0),
}


def convert(operation: Operation, source: str, target: str) -> Array:
    """The lanes of ``vcvt`` from element type ``source`` to ``target``, 0 where nothing is written."""
    x, mask = operation.operands
    part = _PARTS[operation.mode("PART_", "P0")]
    mode, saturate = operation.mode("ROUND_", "R"), {"ENABLE": True, "DISABLE": False}.get(operation.mode("RS_", ""))
    if source.startswith("float4"):
        return zeroed(_from_fp4(x[..., part::4]), mask.at(2)).astype(operation.dtype)
    if target.startswith("float4"):
        return spread(_to_fp4(x, mask.at(2), mode), 4, part)
    wide, narrow = max(x.dtype.itemsize, operation.dtype.itemsize), min(x.dtype.itemsize, operation.dtype.itemsize)
    ratio = wide // narrow
    if x.dtype.itemsize < operation.dtype.itemsize:
        x = x[..., part::ratio]
    result = zeroed(_element(jnp.asarray(x), operation.dtype, mode, saturate), mask.at(wide))
    return spread(result, ratio, part) if operation.dtype.itemsize < wide else result


def written(operation: Operation) -> Array:
    """The lanes of the result that ``vcvt`` writes."""
    x, mask = operation.operands
    size, wide = operation.dtype.itemsize, max(x.dtype.itemsize, operation.dtype.itemsize)
    return spread(mask.at(wide), wide // size, _PARTS[operation.mode("PART_", "P0")])


def _element(x: jax.Array, to: np.dtype, mode: str, saturate: bool | None) -> jax.Array:
    """``saturate`` is None where the instruction has no such choice: then only floats do that become integers."""
    from_float, to_float = (jnp.issubdtype(dtype, jnp.floating) for dtype in (x.dtype, to))
    if from_float and to_float:
        return _float_to_float(x, to, mode, bool(saturate))
    if from_float:
        return _float_to_integer(x, to, mode, saturate is not False)
    if to_float:
        return _integer_to_float(x, to, mode)
    if saturate:
        low, high = np.iinfo(to).min, np.iinfo(to).max
        limits = np.iinfo(x.dtype)
        x = jnp.clip(x, max(low, limits.min), min(high, limits.max))
    return x.astype(to)


# --- to floats ------------------------------------------------------------------------------------------------------


def _float_to_float(x: jax.Array, to: np.dtype, mode: str, saturate: bool) -> jax.Array:
    if to == np.float32:
        return x.astype(to)
    wide = x.astype(jnp.float32)
    if mode == "R" and to.itemsize == 2:
        result = wide.astype(to)  # XLA's own conversion, the fastest there is
    elif to == jnp.bfloat16:
        result = _bfloat16(wide, mode)
    else:
        return _rounded(wide, _FORMATS[to.name], mode, saturate).astype(to)
    if saturate:
        result = jnp.where(jnp.isinf(result), jnp.copysign(jnp.finfo(to).max, result), result)
    return result.astype(to)


def _rounded(x: jax.Array, form: _Format, mode: str, saturate: bool) -> jax.Array:
    """float32 numbers rounded to those of a format with a smaller range."""
    exponent = ((lax.bitcast_convert_type(x, np.int32) >> 23) & 0xFF) - 127
    step = lax.bitcast_convert_type(jnp.maximum(exponent, form.least) - form.fraction + 127 << 23, np.float32)
    rounded = _to_integer(x / step, mode) * step
    beyond = jnp.abs(rounded) > form.largest
    end = jnp.copysign(np.float32(form.largest if saturate else form.beyond), x)
    return jnp.where(jnp.isnan(x), x, jnp.where(beyond, end, rounded))


def _to_integer(x: jax.Array, mode: str) -> jax.Array:
    """Floats rounded to whole numbers."""
    if mode == "R":
        return lax.round(x, _HALF_EVEN)
    if mode == "A":
        return lax.round(x, _HALF_AWAY)
    if mode == "F":
        return jnp.floor(x)
    if mode == "C":
        return jnp.ceil(x)
    if mode == "Z":
        return jnp.trunc(x)
    if mode == "O":  # to the neighbour that is odd
        whole = jnp.trunc(x)
        even = lax.rem(whole, np.asarray(2, x.dtype)) == 0
        return jnp.where((x != whole) & even, whole + jnp.copysign(np.asarray(1, x.dtype), x), whole)
    raise UnsupportedError(f"the NPU model does not run the rounding mode ROUND_{mode} yet")


def _bfloat16(x: jax.Array, mode: str) -> jax.Array:
    """float32 rounded to bfloat16, whose exponents are the same, by its upper 16 bits; still float32."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    upper, lower = bits & np.uint32(0xFFFF0000), bits & np.uint32(0xFFFF)
    up = {
        "A": lower >= 0x8000,
        "F": (lower > 0) & (x < 0),
        "C": (lower > 0) & (x > 0),
        "Z": jnp.zeros_like(x, bool),
        "O": (lower > 0) & (upper & np.uint32(0x10000) == 0),
    }
    if mode not in up:
        raise UnsupportedError(f"the NPU model does not run the rounding mode ROUND_{mode} yet")
    rounded = lax.bitcast_convert_type(jnp.where(up[mode], upper + np.uint32(0x10000), upper), np.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _integer_to_float(x: jax.Array, to: np.dtype, mode: str) -> jax.Array:
    """Rounded once: through float32 where that holds the integers exactly, else by the bits that do not fit."""
    if x.dtype.itemsize < 4:
        return _float_to_float(x.astype(jnp.float32), to, mode, saturate=True)
    if mode == "R":
        return x.astype(to)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    magnitude = jnp.where(x < 0, -x, x).astype(unsigned)
    excess = jnp.maximum(8 * x.dtype.itemsize - 24 - lax.clz(magnitude).astype(np.int32), 0).astype(unsigned)
    unit = jnp.left_shift(jnp.ones_like(magnitude), excess)
    lower = magnitude & (unit - 1)
    upper = magnitude - lower
    # In units of the last place that fits: a whole number and the rest, an exact fraction if it has few bits.
    rest = jnp.where(lower == 0, 0.0, jnp.where(lower * 2 == unit, 0.5, jnp.where(lower * 2 > unit, 0.75, 0.25)))
    odd = (jnp.right_shift(upper, excess) & 1).astype(np.float32)
    sign = jnp.where(x < 0, -1.0, 1.0).astype(np.float32)
    step = jnp.abs(_to_integer((odd + rest.astype(np.float32)) * sign, mode)) - odd
    return (sign * (upper.astype(np.float32) + step * unit.astype(np.float32))).astype(to)


# --- to integers ----------------------------------------------------------------------------------------------------


def _float_to_integer(x: jax.Array, to: np.dtype, mode: str, saturate: bool) -> jax.Array:
    """NaN becomes 0. Without saturation the low bits of the whole number, of infinity 0."""
    whole = _to_integer(x.astype(jnp.float32), mode)
    if saturate:
        return numerics.convert(whole, to)
    if to.itemsize == 8:
        raise UnsupportedError("the NPU model does not run float to int64 without saturation yet")
    low = jnp.where(jnp.isfinite(whole), lax.rem(whole, np.float32(2.0**32)), 0)
    magnitude = jnp.abs(low).astype(np.uint32)
    return jnp.where(low < 0, -magnitude, magnitude).astype(to)


# --- 4-bit floats ---------------------------------------------------------------------------------------------------

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _to_fp4(x: jax.Array, active: Array, mode: str) -> jax.Array:
    """Neighbouring lanes as one byte, the first one low."""
    rounded = zeroed(_rounded(x.astype(jnp.float32), _FORMATS["float4_e2m1fn"], mode, saturate=True), active)
    code = jnp.sum(jnp.abs(rounded)[..., None] >= _FP4[1:], axis=-1, dtype=np.int32)
    code = (code | jnp.where(jnp.signbit(rounded), 8, 0)).astype(np.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4)


def _from_fp4(packed: jax.Array) -> jax.Array:
    """The two numbers of each byte, float32."""
    packed = jnp.asarray(packed)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = jnp.asarray(np.concatenate([_FP4, -_FP4]))
    return values[codes]


def register_conversion(expr: ir.Register, operation: Operation) -> Array:
    """``vcvt`` as ``expr`` asks for it."""
    return convert(operation, ir.register(expr.args[0].dtype)[0], ir.register(expr.dtype)[0])
