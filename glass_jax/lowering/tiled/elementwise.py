"""Elementwise operations on their tile kernels, which take any number of elements."""

from __future__ import annotations

import jax

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels.elementwise import ElementwiseKernel


def run(kernel: type[ElementwiseKernel], *operands: jax.Array, params) -> jax.Array:
    """The result by ``kernel`` of operands of one shape and type; ``params`` as in the primitive."""
    first, *_ = operands
    if first.size == 0:
        return first
    made = kernel(elements=first.size, dtype=str(first.dtype))
    flat = (x.reshape(-1) for x in operands)
    (out,) = common.run(made, *flat, implementation=params.implementation, chip=params.chip)
    return out.reshape(first.shape)
