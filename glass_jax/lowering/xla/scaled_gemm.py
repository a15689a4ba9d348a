"""The formula of ``scaled_gemm``: products of operands multiplied out, the right one a part at a time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import sizes
from glass_jax.lowering.xla import gemm

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)

_BIAS = 127  # of a float32's exponent
_NO_EXPONENT = 255  # in its place in infinities and NaN
_LEAST = -149  # of the smallest subnormal number

# What is multiplied out of the right operand at a time: it stays in the cache of a CPU core. The whole, which is two or
# four times as large as in memory, costs more to write than to multiply with.
_PART_BYTES = 1 << 22
_FEWEST_COLUMNS = 128
_FEW_ROWS = 8  # below which bfloat16 is multiplied no faster than float32


def scaled_gemm(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """``(lhs * lhs_scale) @ (rhs * rhs_scale)``, summed in float32 and rounded once.

    Scales may be as large and as small as their type allows: a row of an operand is multiplied by its scales over the
    largest one's power of two, and the result by both operands' powers, so that only the result may leave float32's
    range. (A block whose scale is 2**-126 times its row's largest one counts as zeros.)

    K is cut into blocks of ``c`` elements that share a scale. A batch dimension is equal in all operands or 1 in some.

    Args:
      lhs: ``[*batch, M, K / c, c]``, fp8.
      lhs_scale: ``[*batch, M, K / c]``, float32 or float8_e8m0fnu.
      rhs: ``[*batch, N, K / c, c]``, or ``[*batch, K / c, c, N]`` without ``transpose_rhs``.
      rhs_scale: ``[*batch, N, K / c]``.
      transpose_rhs: ``rhs`` holds ``[N, K]``.
      out_dtype: type of the result.

    Returns:
      ``[*batch, M, N]``.
    """
    # Times a power of two an fp8 number is exact in bfloat16, which a CPU multiplies twice as fast; times others it
    # is not.
    exact = lhs_scale.dtype == E8M0 == rhs_scale.dtype
    dtype = jnp.bfloat16 if exact and lhs.shape[-3] >= _FEW_ROWS else jnp.float32
    (lhs_scale, lhs_power), (rhs_scale, rhs_power) = map(_apart, (lhs_scale, rhs_scale))
    # Once, not for each element that they scale.
    lhs_scale, rhs_scale = lax.optimization_barrier((lhs_scale.astype(dtype), rhs_scale.astype(dtype)))
    left = lhs.astype(dtype) * lhs_scale[..., None]
    left = lax.collapse(left, left.ndim - 2)
    bits = lax.bitcast_convert_type(rhs, jnp.uint8)  # floats XLA would convert all before the loop
    axis = rhs.ndim - (3 if transpose_rhs else 1)

    def columns(start: int | jax.Array, count: int) -> jax.Array:
        part = lax.bitcast_convert_type(lax.dynamic_slice_in_dim(bits, start, count, axis), rhs.dtype)
        scale = lax.dynamic_slice_in_dim(rhs_scale, start, count, rhs_scale.ndim - 2)
        scale = scale[..., None] if transpose_rhs else jnp.swapaxes(scale, -1, -2)[..., None, :]
        k = part.ndim - (2 if transpose_rhs else 3)
        right = lax.collapse(part.astype(dtype) * scale, k, k + 2)
        return gemm.gemm(left, right, transpose_rhs=transpose_rhs, out_dtype=jnp.float32)

    def rounded(out: jax.Array) -> jax.Array:
        power = lhs_power[..., :, None] + rhs_power[..., None, :]
        half = power >> 1  # the whole may be beyond what a float32 has
        return (out * _power_of_two(half) * _power_of_two(power - half)).astype(out_dtype)

    n = rhs.shape[axis]
    count = _columns_at_a_time(rhs, n, dtype)
    if count == n:
        return rounded(columns(0, n))

    def store(step: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(step * count, n - count)  # the last part begins before the end of the one before
        return lax.dynamic_update_slice_in_dim(out, columns(start, count), start, out.ndim - 1)

    shape = jax.eval_shape(lambda: columns(0, n)).shape
    return rounded(lax.fori_loop(0, -(-n // count), store, jnp.zeros(shape, jnp.float32)))


def _apart(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales ``[..., rows, blocks]`` as float32 numbers below 2 and, for each row, the exponent of 2 to multiply by."""
    scale = scale.astype(jnp.float32)
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    # A subnormal number, such as the smallest of e8m0, XLA takes for zero on a CPU: it is a multiple of 2**-149.
    is_small = (bits >> 23 & _NO_EXPONENT) == 0
    multiple = (bits & (1 << 23) - 1).astype(jnp.float32) * jnp.where(bits < 0, -1, 1)
    number = jnp.where(is_small, multiple, scale)
    bits = lax.bitcast_convert_type(number, jnp.int32)
    exponent = bits >> 23 & _NO_EXPONENT
    counts = (exponent != _NO_EXPONENT) & (number != 0)
    exponent = exponent - _BIAS + jnp.where(is_small, _LEAST, 0)
    largest = jnp.max(jnp.where(counts, exponent, _LEAST), axis=-1, initial=_LEAST)
    lowered = jnp.maximum(exponent - largest[..., None] + _BIAS, 0)
    below_two = lax.bitcast_convert_type(bits & ~(_NO_EXPONENT << 23) | lowered << 23, jnp.float32)
    return jnp.where(counts, jnp.where(lowered == 0, 0, below_two), number), largest


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """``2**exponent`` as float32; of one that a normal number does not have the nearest power."""
    return lax.bitcast_convert_type(jnp.clip(exponent + _BIAS, 1, _NO_EXPONENT - 1) << 23, jnp.float32)


def _columns_at_a_time(rhs: jax.Array, n: int, dtype: jax.typing.DTypeLike) -> int:
    """How many of the ``n`` columns of the result are computed at a time."""
    if not sizes.known(*rhs.shape):
        return n
    column_bytes = math.prod(rhs.shape) // max(n, 1) * jnp.dtype(dtype).itemsize
    count = max(_PART_BYTES // max(column_bytes, 1), _FEWEST_COLUMNS)
    return count if n >= 2 * count else n
