"""What travels for a row: its values as they are, in a smaller dtype, or in 8 bits with a scale for each 128."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.primitives import axes
from glass_jax.primitives.products import FLOAT8
from glass_jax.primitives.quantize import quantize

BLOCK = 128  # values that share a scale


def check(dtype: jnp.dtype, payload: jnp.dtype) -> None:
    """Raises CollectiveError unless values of ``dtype`` can travel as ``payload``."""
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(payload, jnp.floating)):
        raise errors.CollectiveError(
            f"moe_dispatch: values of {dtype} cannot travel as {payload}; payload_dtype takes floating-point types only"
        )
    if payload.itemsize == 1 and payload not in FLOAT8:
        raise errors.CollectiveError(
            f"moe_dispatch: values of {dtype} cannot travel as {payload}; use {' or '.join(map(str, FLOAT8))}"
        )


def encode(x: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    """``x`` ``[T, H]`` as it travels.

    In 8 bits, a row is the bytes of what :func:`glass_jax.quantize` makes of its values, followed by those of its
    float32 scales: uint8 ``[T, H + 4*ceil(H/128)]``.
    """
    if dtype is None or dtype.itemsize > 1:
        return x if dtype is None else x.astype(dtype)
    quantized, scales = quantize(x, block=(1, BLOCK), dtype=dtype)
    parts = [lax.bitcast_convert_type(each, jnp.uint8).reshape(len(x), -1) for each in (quantized, scales)]
    return jnp.concatenate(parts, axis=1)


def decode(rows: jax.Array, dtype: jnp.dtype | None, like: jax.Array) -> jax.Array:
    """The values of ``rows`` that :func:`encode` made from rows like those of ``like`` ``[T, H]``, in its dtype."""
    if dtype is None or dtype.itemsize > 1:
        return rows.astype(like.dtype)
    width = like.shape[1]
    values = lax.bitcast_convert_type(rows[:, :width], dtype).astype(jnp.float32)
    scales = lax.bitcast_convert_type(rows[:, width:].reshape(len(rows), -1, 4), jnp.float32)
    values = axes.into_blocks(values, 1, BLOCK) * scales[:, :, None]
    return axes.out_of_blocks(values, 1, width).astype(like.dtype)
