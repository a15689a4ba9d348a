"""The formulas of ``ln_gelu_linear`` and ``linear_ln_gelu``: both in plain JAX, fast on CPU and GPU.

The first ``batch`` dimensions of every operand are batch dimensions, equal or 1; the dimensions of ``x`` between them
and its last one are rows.
"""

from __future__ import annotations

import jax
from jax import lax

from glass_jax.lowering.xla import gemm as products
from glass_jax.lowering.xla import normalization


def layer_norm_gelu(x: jax.Array, gamma: jax.Array, beta: jax.Array, *, eps: float, approximate: bool) -> jax.Array:
    """``gelu((x - mean) / sqrt(variance + eps) * gamma + beta)`` over the last dimension, in float32 (or float64).

    Args:
      x: ``[..., D]``.
      gamma: the scale, of the accumulator's type, broadcast to ``x``.
      beta: the shift, likewise.
      eps: added to the variance, which is the mean of the squared differences from the mean.
      approximate: gelu in its tanh form, else with erf.

    Returns:
      ``[..., D]``, not yet rounded to the type of ``x``.
    """
    normal = normalization.layer_norm(x.astype(gamma.dtype), gamma, beta, eps=eps)
    return jax.nn.gelu(normal, approximate=approximate)


def ln_gelu_linear(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    *,
    batch: int,
    eps: float,
    approximate: bool,
) -> jax.Array:
    """``gelu(layer_norm(x)) @ w + b``.

    The activations are rounded to the type of ``x`` once, before the product, whose sums are rounded once at the end.

    Args:
      x: ``[*batch, *rows, K]``.
      gamma: ``[*batch, K]``, of the accumulator's type.
      beta: the same.
      w: ``[*batch, K, N]``, of the type of ``x``.
      b: ``[*batch, N]``, of the accumulator's type, or None.
      batch: number of batch dimensions.
      eps: see :func:`layer_norm_gelu`.
      approximate: the same.

    Returns:
      ``[*batch, *rows, N]``, of the type of ``x``.
    """
    gamma, beta = (over_rows(v, x.ndim, batch) for v in (gamma, beta))
    activations = layer_norm_gelu(x, gamma, beta, eps=eps, approximate=approximate).astype(x.dtype)
    return linear(activations, w, b, batch=batch).astype(x.dtype)


def linear_ln_gelu(
    x: jax.Array,
    w: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    b: jax.Array | None = None,
    *,
    batch: int,
    eps: float,
    approximate: bool,
) -> jax.Array:
    """``gelu(layer_norm(x @ w + b))``, rounded once, at the end.

    Args:
      x: ``[*batch, *rows, K]``.
      w: ``[*batch, K, N]``, of the type of ``x``.
      gamma: ``[*batch, N]``, of the accumulator's type.
      beta: the same.
      b: the same, or None.
      batch: number of batch dimensions.
      eps: see :func:`layer_norm_gelu`.
      approximate: the same.

    Returns:
      ``[*batch, *rows, N]``, of the type of ``x``.
    """
    y = linear(x, w, b, batch=batch)
    gamma, beta = (over_rows(v, y.ndim, batch) for v in (gamma, beta))
    return layer_norm_gelu(y, gamma, beta, eps=eps, approximate=approximate).astype(x.dtype)


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None, *, batch: int) -> jax.Array:
    """``x @ w + b`` with the sums as they are, not rounded; shapes as above."""
    matrix = x[..., None, :] if x.ndim == batch + 1 else x
    w = lax.expand_dims(w, range(batch, matrix.ndim - 2))
    b = None if b is None else lax.expand_dims(b, range(batch, matrix.ndim - 2))
    out = products.gemm(matrix, w, b, out_dtype=products.accumulator(x.dtype))
    return out[..., 0, :] if x.ndim == batch + 1 else out


def over_rows(vector: jax.Array, ndim: int, batch: int) -> jax.Array:
    """``[*batch, D]`` with a dimension of 1 for each one of rows."""
    return lax.expand_dims(vector, range(batch, ndim - 1))
