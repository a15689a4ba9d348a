"""Rotary position embedding (Su et al., arXiv:2104.09864) and its extension to long contexts, YaRN (arXiv:2309.00071).

The numbers are those of the public DeepSeek models: see the references in each function.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class YaRN:
    """How a context of ``original_length`` positions was extended ``factor`` times.

    Attributes:
      factor: the extension.
      original_length: positions that the model was trained with first.
      beta_fast: a pair of features that turns more often than this within the original length keeps its frequency.
      beta_slow: one that turns less often has it divided by ``factor``; between the two, a linear ramp.
      mscale: with ``mscale_all_dim``, part of what cosines and sines are multiplied by. Without one of them: as if
        ``mscale`` were 1 and ``mscale_all_dim`` 0.
      mscale_all_dim: part of what attention scores are multiplied by; None or 0: they are not.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def rotation_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by, beside the usual inverse square root."""
        return self._scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def frequencies(features: int, theta: float, yarn: YaRN | None = None) -> np.ndarray:
    """Radians a position that each of ``features / 2`` pairs turns by: ``theta ** (-2 i / features)``; float32.

    Args:
      features: rotated features of a head, an even number.
      theta: base of the geometric series.
      yarn: the extension of the context, or None.
    """
    exponents = np.arange(0, features, 2) / features
    plain = theta**-exponents
    if yarn is None:
        return plain.astype(np.float32)

    def pair_of(turns: float) -> float:
        """The pair, as a real number, that turns so often within the original length."""
        return features * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), features - 1)
    ramp = np.clip((np.arange(features // 2) - low) / (high - low or 1e-3), 0, 1)
    return (plain / yarn.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def embed(x: jax.Array, positions: jax.Array, *, theta: float, yarn: YaRN | None = None, interleave: bool) -> jax.Array:
    """``x`` ``[..., features]`` turned by its ``positions`` ``[...]``; see :func:`frequencies` and :func:`rotate`."""
    angles = positions[..., None] * frequencies(x.shape[-1], theta, yarn)
    return rotate(x, angles, interleave=interleave, scale=yarn.rotation_scale if yarn else 1.0)


def rotate(x: jax.Array, angles: jax.Array, *, interleave: bool, scale: float = 1.0) -> jax.Array:
    """Turns pairs of features.

    Args:
      x: ``[..., features]``.
      angles: radians, float32, ``[..., features / 2]``, of leading dimensions that broadcast to those of ``x``.
      interleave: features 2i and 2i + 1 are a pair; otherwise i and i + features / 2 are.
      scale: what the result is multiplied by.

    Returns:
      The first features of all pairs, then the second ones, ``[..., features]`` in the dtype of ``x``. Where pairs were
      interleaved the order is another, so queries and keys have to be rotated alike, as their products always do.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
