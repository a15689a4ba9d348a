"""The formula of ``swiglu``: plain JAX, one fused loop on a CPU, and differentiable."""

from __future__ import annotations

import jax

from glass_jax.lowering.xla.gemm import accumulator


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` of operands of one shape and type, in float32 (float64 for float64), rounded once."""
    dtype = accumulator(gate.dtype)
    return (jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)).astype(gate.dtype)
