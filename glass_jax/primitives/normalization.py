"""``rms_norm`` and ``layer_norm`` over the last dimension, as JAX primitives.

The primitives work on operands of one rank whose dimensions but the last are equal or 1, the weights broadcast to
``x``: an operand with a 1 stands for all positions of that dimension, which is how ``vmap`` treats operands it does not
map over.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import partition
from glass_jax.lowering.tiled import normalization as tiled
from glass_jax.lowering.xla import normalization as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation
from glass_jax.primitives.operation import Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of both primitives.

    Attributes:
      eps: added to the mean of squares, or to the variance.
    """

    eps: float


def rms_norm(
    x: jax.typing.ArrayLike, gamma: jax.typing.ArrayLike, *, eps: float = 1e-6, implementation: str | None = None
) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * gamma`` over the last dimension, with one rounding at the end.

    Equivalent to::

        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
        return (y * gamma).astype(x.dtype)

    Works under ``jit``, ``vmap``, ``grad`` (of any order), ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes
    with Auto or Explicit axes: rows stay sharded as they are, D is made whole.

    Args:
      x: ``[..., D]``; float32, float16 or bfloat16 (float64 on ``"xla"``, where it is also computed in float64).
      gamma: ``[D]``, a float: the scale.
      eps: added to the mean of squares.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[..., D]`` of the type of ``x``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, or a dtype that is no float.
      OutOfOnChipMemoryError: on the NPU, a D so large that a row and ``gamma`` do not fit the unified buffer.
      UnsupportedError: float64 on the NPU.
    """
    x, gamma = jnp.asarray(x), jnp.asarray(gamma)
    checks.dimensions("rms_norm", x=(x, "... D"), gamma=(gamma, "D"))
    checks.floats("rms_norm", x=x, gamma=gamma)
    return RMS_NORM.bind(x, _over_rows(gamma, x), params=Params.chosen(implementation, eps=float(eps)))


def layer_norm(
    x: jax.typing.ArrayLike,
    gamma: jax.typing.ArrayLike,
    beta: jax.typing.ArrayLike,
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array:
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` over the last dimension, with one rounding at the end.

    Equivalent to::

        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
        return (y * gamma + beta).astype(x.dtype)

    Works under the same transformations and meshes as :func:`rms_norm`.

    Args:
      x: ``[..., D]``; float32, float16 or bfloat16 (float64 on ``"xla"``, where it is also computed in float64).
      gamma: ``[D]``, a float: the scale.
      beta: ``[D]``, a float: the shift.
      eps: added to the variance.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[..., D]`` of the type of ``x``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, or a dtype that is no float.
      OutOfOnChipMemoryError: on the NPU, a D so large that a row, ``gamma`` and ``beta`` do not fit the unified buffer.
      UnsupportedError: float64 on the NPU.
    """
    x, gamma, beta = jnp.asarray(x), jnp.asarray(gamma), jnp.asarray(beta)
    checks.dimensions("layer_norm", x=(x, "... D"), gamma=(gamma, "D"), beta=(beta, "D"))
    checks.floats("layer_norm", x=x, gamma=gamma, beta=beta)
    params = Params.chosen(implementation, eps=float(eps))
    return LAYER_NORM.bind(x, _over_rows(gamma, x), _over_rows(beta, x), params=params)


def _over_rows(weight: jax.Array, x: jax.Array) -> jax.Array:
    """``weight`` in the type that everything is computed in, of the rank of ``x``."""
    return lax.expand_dims(weight.astype(accumulator(x.dtype)), range(x.ndim - 1))


def _abstract_eval(x, *weights, params: Params) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.broadcast_shapes(x.shape, *(w.shape for w in weights)), x.dtype)


def _dimensions(*avals, params: Params) -> partition.Dimensions:
    shape = jnp.broadcast_shapes(*(aval.shape for aval in avals))
    rows, *terms = (
        " ".join(partition.broadcast("r", tag, given, shape[:-1]))
        for tag, given in (("", shape), *zip("xgb", (aval.shape for aval in avals), strict=False))
    )
    return partition.Dimensions(f"{', '.join(f'{term} d' for term in terms)} -> {rows} d", parallel=rows)


def _rms_norm(x, gamma, *, params: Params) -> jax.Array:
    return formula.rms_norm(x, gamma, eps=params.eps)


def _layer_norm(x, gamma, beta, *, params: Params) -> jax.Array:
    return formula.layer_norm(x, gamma, beta, eps=params.eps)


RMS_NORM = Operation(
    "rms_norm",
    abstract_eval=_abstract_eval,
    formula=_rms_norm,
    tiled=tiled.normalize,
    batch=lambda operands, dims, *, params: (RMS_NORM.bind(*axes.lead(operands, dims), params=params), 0),
    dimensions=_dimensions,
    derivative=_rms_norm,
)

LAYER_NORM = Operation(
    "layer_norm",
    abstract_eval=_abstract_eval,
    formula=_layer_norm,
    tiled=tiled.normalize,
    batch=lambda operands, dims, *, params: (LAYER_NORM.bind(*axes.lead(operands, dims), params=params), 0),
    dimensions=_dimensions,
    derivative=_layer_norm,
)
