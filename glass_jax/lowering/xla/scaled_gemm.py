"""The formula of ``scaled_gemm``: products of operands multiplied out, the right one a part at a time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.xla import gemm

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)

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
    lhs_scale, rhs_scale = lhs_scale.astype(dtype), rhs_scale.astype(dtype)  # once, not for each element they scale
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

    n = rhs.shape[axis]
    count = _columns_at_a_time(rhs, n, dtype)
    if count == n:
        return columns(0, n).astype(out_dtype)

    def store(step: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(step * count, n - count)  # the last part begins before the end of the one before
        return lax.dynamic_update_slice_in_dim(out, columns(start, count), start, out.ndim - 1)

    shape = jax.eval_shape(lambda: columns(0, n)).shape
    return lax.fori_loop(0, -(-n // count), store, jnp.zeros(shape, jnp.float32)).astype(out_dtype)


def _columns_at_a_time(rhs: jax.Array, n: int, dtype: jax.typing.DTypeLike) -> int:
    """How many of the ``n`` columns of the result are computed at a time."""
    column_bytes = math.prod(rhs.shape) // max(n, 1) * jnp.dtype(dtype).itemsize
    count = max(_PART_BYTES // max(column_bytes, 1), _FEWEST_COLUMNS)
    return count if n >= 2 * count else n
