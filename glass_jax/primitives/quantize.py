"""``quantize``: arrays in 8 or 4 bits with a scale for each block. Plain JAX, without a kernel."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering import sizes
from glass_jax.primitives import axes, checks

DTYPES = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn)))
SCALES = ("float32", "e8m0")
SMALLEST = 1e-4  # what the largest magnitude of a block counts as at least, so that no scale is zero

_MANTISSA = (1 << 23) - 1  # of a float32, in its bits


def quantize(
    x: jax.typing.ArrayLike,
    *,
    block: tuple[int, int] = (1, 128),
    dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
    scale: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """``x`` in 8 bits (or 4), and the scale of each block, by which the values are multiplied to get ``x`` back.

    Equivalent to, for one block::

        s = max(max(abs(x)), 1e-4) / jnp.finfo(dtype).max     # with "e8m0" rounded up to a power of two
        values = (x / s).astype(dtype)                        # to nearest, ties to even; nothing saturates

    A block with a NaN or an infinity has a scale, or values, that make all of it NaN when it is multiplied out.

    Works under ``jit``, ``vmap``, ``shard_map`` and on meshes with Auto or Explicit axes: whole blocks stay where they
    are. There is no derivative, since rounding has none: give the function that quantizes one of its own with
    ``jax.custom_vjp``, or put ``jax.lax.stop_gradient`` around ``x``.

    Args:
      x: ``[*batch, M, K]``, any float type; scales and quotients are float32.
      block: rows and columns that share a scale, of the last two dimensions: (1, 128) for activations, (128, 128) for
        weights, (1, 32) with ``scale="e8m0"`` for the MX formats (OCP Microscaling Formats v1.0). The last blocks of a
        dimension may be smaller.
      dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``float4_e2m1fn``.
      scale: ``"float32"``, or ``"e8m0"``: powers of two, in 8 bits, which is what the NPU multiplies with.

    Returns:
      values: ``[*batch, M, K]`` of ``dtype``.
      scales: ``[*batch, ceil(M / block[0]), ceil(K / block[1])]``, float32 or float8_e8m0fnu.

    Raises:
      HardwareConstraintError: (a ValueError) an ``x`` that is no float or has less than two dimensions, an unknown
        ``dtype`` or ``scale``, a ``block`` that is not two positive sizes.
      UnsupportedError: differentiation.
    """
    x, dtype = jnp.asarray(x), jnp.dtype(dtype)
    checks.dimensions("quantize", x=(x, "... M K"))
    checks.floats("quantize", x=x)
    if dtype not in DTYPES:
        raise errors.HardwareConstraintError(f"quantize: {dtype=!s}; use one of {', '.join(map(str, DTYPES))}")
    if scale not in SCALES:
        raise errors.HardwareConstraintError(f"quantize: {scale=}; use one of {', '.join(SCALES)}")
    block = tuple(map(operator.index, block))
    if len(block) != 2 or min(block) < 1:
        raise errors.HardwareConstraintError(
            f"quantize: {block=}; pass the rows and the columns that share a scale, for example (1, 128)"
        )
    return _quantize(x, block, dtype, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _quantize(x: jax.Array, block: tuple[int, int], dtype: jnp.dtype, scale: str) -> tuple[jax.Array, jax.Array]:
    row, column = x.ndim - 2, x.ndim - 1
    height, width = (max(sizes.at_most(per, size), 1) for per, size in zip(block, x.shape[row:], strict=True))
    blocks = axes.into_blocks(axes.into_blocks(x.astype(jnp.float32), column, width), row, height)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1), initial=SMALLEST)
    scales = amax * (1 / float(jnp.finfo(dtype).max))  # XLA makes a product of a quotient by a constant anyway
    if scale == "e8m0":
        scales = _power_of_two(scales)
    values = (blocks / scales.astype(jnp.float32)[..., :, None, :, None]).astype(dtype)
    values = axes.out_of_blocks(axes.out_of_blocks(values, row, x.shape[row]), column, x.shape[column])
    return values, scales


@_quantize.defjvp
def _quantize_jvp(block, dtype, scale, primals, tangents):
    raise errors.UnsupportedError(
        "quantize has no derivative: rounding has none. Put jax.lax.stop_gradient around its argument, or give the "
        "function that quantizes a derivative of its own with jax.custom_vjp"
    )


def _power_of_two(x: jax.Array) -> jax.Array:
    """Positive float32 numbers, no subnormal ones, rounded up to powers of two; an infinity is NaN."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    exponent = jnp.minimum((bits + _MANTISSA) >> 23, 255)  # e8m0 has the exponent's bits of a float32, and 255 for NaN
    return lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
