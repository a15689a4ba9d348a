"""``rms_norm`` and ``layer_norm`` on their tile kernel, which takes rows of any length and any number of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels.normalization import NormalizationKernel


def normalize(x: jax.Array, *weights: jax.Array, params) -> jax.Array:
    """``layer_norm`` with two ``weights``, ``rms_norm`` with one; operands and ``params`` as in the primitives."""
    shape = jnp.broadcast_shapes(x.shape, *(w.shape for w in weights))
    columns = shape[-1]
    if 0 in shape:
        return jnp.zeros(shape, x.dtype)
    # Only a vmap over weights gives them dimensions: then each of them is one launch.
    depth = max((d + 1 for w in weights for d, size in enumerate(w.shape[:-1]) if size > 1), default=0)
    if depth == 0:
        return _rows(x.reshape(-1, columns), *(w.reshape(columns) for w in weights), params=params).reshape(shape)
    lead, count = shape[:depth], math.prod(shape[:depth])
    x = jnp.broadcast_to(x, (*lead, *x.shape[depth:])).reshape(count, -1, columns)
    weights = [jnp.broadcast_to(w.reshape(*w.shape[:depth], columns), (*lead, columns)) for w in weights]
    weights = [w.reshape(count, columns) for w in weights]
    return lax.map(lambda operands: _rows(*operands, params=params), (x, *weights)).reshape(shape)


def _rows(x: jax.Array, *weights: jax.Array, params) -> jax.Array:
    """The rows ``[R, D]``, all with the same weights ``[D]``, by the kernel."""
    kernel = NormalizationKernel(
        centered=len(weights) == 2, rows=x.shape[0], columns=x.shape[1], dtype=str(x.dtype), eps=params.eps
    )
    (out,) = common.run(kernel, x, *weights, implementation=params.implementation, chip=params.chip)
    return out
