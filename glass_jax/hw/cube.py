"""The cube unit: matrix products with float32 or int32 accumulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import HardwareConstraintError
from glass_jax.hw import copies, expressions, numerics
from glass_jax.hw import program as ir

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine


def run_gemm(machine: Machine, gemm: ir.Gemm, live: frozenset[str]) -> None:
    """Executes ``c = a @ b``, or ``c += a @ b``, on operands in L1 or L0."""
    a, b = (_matrix(copies.read_region(machine, region)) for region in (gemm.a, gemm.b))
    accumulate = numerics.dtype(machine.memory.buffers[gemm.c.buffer].dtype)
    axes = (0 if gemm.transpose_a else 1,), (1 if gemm.transpose_b else 0,)
    accumulate_product(machine, gemm, matmul(a, b, axes, accumulate))


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


Axes = tuple[tuple[int, ...], tuple[int, ...]]


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
    return lax.dot_general(
        a, b, (contracted, batch), precision=lax.Precision.HIGHEST, preferred_element_type=accumulate
    )
