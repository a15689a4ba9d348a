"""``swiglu``: the gate of a gated linear unit, as a JAX primitive."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax import errors
from glass_jax.lowering.tilelang.kernels.swiglu import SwigluKernel
from glass_jax.lowering.xla import swiglu as formula
from glass_jax.primitives import checks, elementwise
from glass_jax.primitives.operation import Params


def swiglu(gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike, *, implementation: str | None = None) -> jax.Array:
    """``silu(gate) * up`` (Shazeer, arXiv:2002.05202), with one rounding at the end.

    Equivalent to ``(jax.nn.silu(gate.astype(jnp.float32)) * up).astype(gate.dtype)``.

    Works under ``jit``, ``vmap``, ``grad`` (of any order), ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes
    with Auto or Explicit axes: every dimension stays sharded as it is.

    Args:
      gate: ``[..., F]``; float32, float16 or bfloat16 (float64 on ``"xla"``, where it is also computed in float64).
      up: the same shape and type.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[..., F]`` of the type of the operands.

    Raises:
      HardwareConstraintError: (a ValueError) operands of different shapes or types, or a dtype that is no float.
      UnsupportedError: float64 on the NPU.
    """
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    checks.floats("swiglu", gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise errors.HardwareConstraintError(
            f"swiglu: gate is {gate.dtype} of shape {gate.shape} and up is {up.dtype} of shape {up.shape}; "
            "pass two arrays of one shape and type"
        )
    return SWIGLU.bind(gate, up, params=Params.chosen(implementation))


SWIGLU = elementwise.operation(formula.swiglu, SwigluKernel)
