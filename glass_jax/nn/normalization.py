"""Normalization layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.primitives.normalization import rms_norm


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x**2) + eps) * scale`` over the last dimension, by :func:`glass_jax.rms_norm`.

    Args:
      features: size of the last dimension.
      eps: added to the mean square.
      param_dtype: type of the scale.

    Attributes:
      scale: ``[features]``, ones at first.
    """

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., features]`` to the same shape and dtype; the mean is of float32."""
        return rms_norm(x, self.scale[...], eps=self.eps)
