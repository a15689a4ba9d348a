"""The formulas of ``rms_norm`` and ``layer_norm``: both in plain JAX, fast on CPU and GPU, and differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, gamma: jax.Array, *, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * gamma`` over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    Args:
      x: ``[..., D]``.
      gamma: of the type that everything is computed in, broadcast to ``x``.
      eps: added to the mean of squares.

    Returns:
      ``[..., D]`` of the type of ``x``, rounded once.
    """
    y = x.astype(gamma.dtype)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return (y * gamma).astype(x.dtype)


def layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array, *, eps: float) -> jax.Array:
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` over the last dimension (Ba et al., arXiv:1607.06450).

    The variance is the mean of the squared differences from the mean, which a large mean does not spoil.

    Args:
      x: ``[..., D]``.
      gamma: of the type that everything is computed in, broadcast to ``x``.
      beta: likewise.
      eps: added to the variance.

    Returns:
      ``[..., D]`` of the type of ``x``, rounded once.
    """
    y = x.astype(gamma.dtype)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return (y * gamma + beta).astype(x.dtype)
