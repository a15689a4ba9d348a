"""The formula of ``gemm``: the operation in plain JAX, fast on CPU and GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def accumulator(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which products of ``dtype`` operands are summed: int32, float64 or float32."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    """``x`` through ``"relu"``, ``"gelu"`` (its tanh form, Hendrycks and Gimpel 2016), ``"silu"`` or nothing."""
    match activation:
        case None:
            return x
        case "relu":
            return jax.nn.relu(x)  # whose derivative at 0 is 0
        case "gelu":
            return jax.nn.gelu(x, approximate=True)
        case "silu":
            return jax.nn.silu(x)
    raise ValueError(f"{activation=} is not one of relu, gelu, silu or None")


def operand(x: jax.Array) -> jax.Array:
    """``x`` in the type that it is multiplied in."""
    # Both fp8 formats are exact in bfloat16, which a CPU multiplies twice as fast as its own fp8 path.
    return x.astype(jnp.bfloat16) if jnp.dtype(x.dtype).itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) else x


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str | None = None,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """``activation(lhs @ rhs + bias)``, summed in :func:`accumulator` of the operands and rounded once.

    Args:
      lhs: ``[*batch, M, K]``, or ``[*batch, K, M]`` with ``transpose_lhs``.
      rhs: ``[*batch, K, N]``, or ``[*batch, N, K]`` with ``transpose_rhs``. Both have the same rank; a batch dimension
        is equal in both or 1 in one, and the operand that has 1 there is not copied.
      bias: ``[*batch, N]`` of the accumulator's type, batch dimensions 1 or full.
      transpose_lhs: the last two dimensions of ``lhs`` are exchanged.
      transpose_rhs: the last two dimensions of ``rhs`` are exchanged.
      activation: see :func:`activate`.
      out_dtype: type of the result.

    Returns:
      ``[*batch, M, N]``.
    """
    ndim = lhs.ndim
    lhs_contract = ndim - 2 if transpose_lhs else ndim - 1
    rhs_contract = ndim - 1 if transpose_rhs else ndim - 2
    shared = [d for d in range(ndim - 2) if lhs.shape[d] == rhs.shape[d]]
    rhs_only = [d for d in range(ndim - 2) if d not in shared and lhs.shape[d] == 1]
    lhs_only = [d for d in range(ndim - 2) if d not in shared and d not in rhs_only]

    # lax.dot_general has no broadcasting: a batch dimension that one side lacks becomes a free dimension of the other.
    lhs_kept = [d for d in range(ndim) if d not in rhs_only]
    rhs_kept = [d for d in range(ndim) if d not in lhs_only]
    product_dims = shared + lhs_only + [ndim - 2] + rhs_only + [ndim - 1]
    # XLA:CPU converts 16-bit operands to float32 before a product with a 16-bit result: always ask for the accumulator.
    product = lax.dot_general(
        lax.squeeze(operand(lhs), rhs_only),
        lax.squeeze(operand(rhs), lhs_only),
        (
            ([lhs_kept.index(lhs_contract)], [rhs_kept.index(rhs_contract)]),
            ([lhs_kept.index(d) for d in shared], [rhs_kept.index(d) for d in shared]),
        ),
        preferred_element_type=accumulator(lhs.dtype),
    )
    product = lax.transpose(product, [product_dims.index(d) for d in range(ndim)])
    return finish(product, bias, activation=activation, out_dtype=out_dtype)


def finish(
    product: jax.Array, bias: jax.Array | None, *, activation: str | None, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """What :func:`gemm` makes of the sums of products, all of K being in them."""
    if bias is not None:
        product = product + jnp.expand_dims(bias, -2)
    return activate(product, activation).astype(out_dtype)
