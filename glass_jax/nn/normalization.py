"""Normalization layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from glass_jax.primitives.normalization import layer_norm, rms_norm


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


class LayerNorm(nnx.Module):
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` over the last dimension, by :func:`glass_jax.layer_norm`.

    Args:
      features: size of the last dimension.
      eps: added to the variance.
      param_dtype: type of the scale and the bias.

    Attributes:
      scale: ``[features]``, ones at first.
      bias: ``[features]``, zeros at first.
    """

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, param_dtype))
        self.bias = nnx.Param(jnp.zeros(features, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., features]`` to the same shape and dtype; mean and variance are of float32."""
        return layer_norm(x, self.scale[...], self.bias[...], eps=self.eps)
