"""``swiglu`` on its tile kernel, which takes any number of elements."""

from __future__ import annotations

import jax

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels.swiglu import SwigluKernel


def swiglu(gate: jax.Array, up: jax.Array, *, params) -> jax.Array:
    """``silu(gate) * up`` by the kernel; operands and ``params`` as in the primitive."""
    if gate.size == 0:
        return gate
    kernel = SwigluKernel(elements=gate.size, dtype=str(gate.dtype))
    operands = (gate.reshape(-1), up.reshape(-1))
    (out,) = common.run(kernel, *operands, implementation=params.implementation, chip=params.chip)
    return out.reshape(gate.shape)
