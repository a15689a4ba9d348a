"""The cube unit: matrix products with float32 or int32 accumulation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.tiles import copies
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.products import Axes


def run_gemm(machine: Machine, gemm: ir.Gemm, live: frozenset[str]) -> None:
    """Executes ``c = a @ b``, or ``c += a @ b``, on operands in L1 or L0."""
    a, b = (_matrix(copies.read_region(machine, region)) for region in (gemm.a, gemm.b))
    if "hf32" in gemm.attrs and a.dtype == np.float32:
        a, b = (_to_hf32(x, gemm.attrs["hf32"]) for x in (a, b))
    accumulate = numerics.dtype(machine.memory.buffers[gemm.c.buffer].dtype)
    axes = (0 if gemm.transpose_a else 1,), (1 if gemm.transpose_b else 0,)
    if "scales" in gemm.attrs:
        along = axes[0] + axes[1]
        pairs = (_scaled(machine, *pair) for pair in zip((a, b), gemm.attrs["scales"], along, strict=True))
        (a, rows), (b, columns) = pairs
        product = _times_power_of_two(matmul(a, b, axes, accumulate), rows[:, None] + columns)
    else:
        product = matmul(a, b, axes, accumulate)
    accumulate_product(machine, gemm, product)


def _to_hf32(x: jax.Array, rounding: str) -> jax.Array:
    """float32 rounded to HF32, whose mantissa has 11 bits: to nearest, ties to even or away from zero."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    dropped = np.uint32(12)
    half = np.uint32(1 << 11) - (np.uint32(1) - ((bits >> dropped) & np.uint32(1)) if rounding == "nearest_even" else 0)
    rounded = (bits + half) >> dropped << dropped
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(rounded, jnp.float32), x)


SCALE_BLOCK = 32  # elements that one e8m0 scale of an MX format covers
SCALE_BIAS = 127  # a byte is the exponent of a power of two, this much larger
SCALE_NAN = 255


def _scaled(machine: Machine, x: jax.Array, region: ir.Region, axis: int) -> tuple[jax.Array, jax.Array]:
    """An operand in an MX format times its scales, in float32, over the largest scale of each row or column.

    What is divided by, a power of two, is the second result, as its exponent: so nothing leaves the range of a float32
    on its way, however large or small the scales are.

    Args:
      machine: the machine.
      x: the operand.
      region: its scales, a row for each row or column of the result and a byte for 32 elements along ``axis`` of the
        operand; in 16-bit elements two, the low byte first.
      axis: the axis of ``x`` that is summed over.
    """
    scales = _matrix(copies.read_region(machine, region))
    if scales.dtype.itemsize == 2:
        scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)
    blocks = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    rows, length = x.shape[1 - axis], x.shape[axis]
    if blocks.shape[0] < rows or blocks.shape[1] * SCALE_BLOCK < length:
        raise HardwareConstraintError(
            f"scales {list(blocks.shape)} in {region.buffer!r} are too few for {rows} rows of {length} elements, "
            f"{SCALE_BLOCK} to a scale"
        )
    spread = jnp.repeat(blocks[:rows], SCALE_BLOCK, axis=1)[:, :length]
    is_nan = spread == SCALE_NAN
    largest = jnp.max(jnp.where(is_nan, 0, spread), axis=1)
    factors = _times_power_of_two(jnp.where(is_nan, jnp.nan, jnp.float32(1)), spread - largest[:, None])
    return x.astype(jnp.float32) * (factors if axis == 1 else factors.T), largest - SCALE_BIAS


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2**exponent``, of exponents as large and as small as two scales have together."""
    half = exponent >> 1  # the whole may be beyond what a float32 has

    def power(exponent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(jnp.clip(exponent + 127, 1, 254) << 23, jnp.float32)

    return x * power(half) * power(exponent - half)


def _matrix(tile: jax.Array) -> jax.Array:
    """The last two dimensions of a tile whose other dimensions are 1."""
    if any(n != 1 for n in tile.shape[:-2]):
        raise HardwareConstraintError(
            f"an operand of a matrix product has shape {tile.shape}: only two dimensions may exceed 1"
        )
    return tile.reshape(tile.shape[-2:])


def accumulate_product(machine: Machine, gemm: ir.Gemm, product: jax.Array) -> None:
    """Adds a product to its accumulator, or replaces it where the kernel says so."""
    buffer = machine.memory.buffers[gemm.c.buffer]
    shape = copies.extents(machine, gemm.c)
    if product.size != math.prod(shape):
        raise HardwareConstraintError(
            f"a product of shape {product.shape} does not fit the region {shape} of {buffer.name!r}"
        )
    product = product.reshape(shape)
    clear = expressions.value(machine, gemm.clear)
    known = expressions.decided(clear)
    if known is not True:
        old = copies.read_region(machine, gemm.c)
        kept = old if known is False else jnp.where(clear, jnp.zeros_like(old), old)
        product = kept + product
    copies.write_region(machine, gemm.c, product)


def matmul(a: jax.Array, b: jax.Array, contracted: Axes, accumulate: np.dtype, batch: Axes = ((), ())) -> jax.Array:
    """The product of ``a`` and ``b``: batch axes, then the axes left of ``a``, then those left of ``b``.

    Args:
      a: float32, a 16-bit or an 8-bit float, or int8.
      b: the same.
      contracted: axes of ``a`` and of ``b`` to sum over.
      accumulate: type of the sum and of the result, float32 or int32. (A 16-bit result would cost XLA on a CPU twice
        the time: it would convert both operands first.)
      batch: axes of ``a`` and of ``b`` that go together.
    """
    if a.dtype.itemsize == 1 and jnp.issubdtype(a.dtype, jnp.floating):
        # Every 8-bit float is a bfloat16, for which XLA has fast products.
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    # XLA may shorten float32 operands unless told not to; products of 16-bit ones are exact in float32 as they are.
    precision = lax.Precision.HIGHEST if a.dtype == np.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (contracted, batch), precision=precision, preferred_element_type=accumulate)
