"""The routed experts of a mixture: each token through the experts that it chose.

:func:`routed` runs for the tokens of one device. Rows, one for each choice, are grouped by expert and multiplied with
:func:`glass_jax.grouped_gemm`. Where experts are on several devices, :func:`glass_jax.sharding.moe_dispatch` makes the
groups; otherwise a sort does. Both sum a token's results in float32 in the order of its choices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.primitives.grouped_gemm import grouped_gemm
from glass_jax.primitives.swiglu import swiglu
from glass_jax.sharding.expert_parallel import moe_combine, moe_dispatch

Kernels = tuple[jax.Array, jax.Array, jax.Array]
"""``gate``, ``up`` ``[E, K, F]`` and ``down`` ``[E, F, K]`` of the experts that a device has."""


def routed(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
    *,
    num_experts: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """The sum over each token's choices of ``weight * down(silu(gate(x)) * up(x))`` of the chosen expert.

    Args:
      x: ``[T, K]``, tokens of this device.
      indices: int32 ``[T, k]``, their experts; -1: no choice.
      weights: float32 ``[T, k]``.
      kernels: of the experts of this device.
      num_experts: experts on all devices of ``axes`` together.
      axes: the Manual mesh axes, one or two, whose devices share the experts; none: ``kernels`` are all.

    Returns:
      ``[T, K]`` in the dtype of ``x``.
    """
    if not axes:
        return _on_one_device(x, indices, weights, kernels)
    rows, handle = moe_dispatch(x, indices, weights, axis_name=axes, num_experts=num_experts)
    return moe_combine(_feed_forward(rows, kernels, handle.group_sizes), handle)


def counts(indices: jax.Array, num_experts: int) -> jax.Array:
    """How many choices each expert got: int32 ``[num_experts]`` from ``indices`` ``[T, k]``, where -1 is no choice."""
    experts = jnp.arange(num_experts)
    return jnp.sum(indices.reshape(-1, 1) == experts, axis=0, dtype=jnp.int32)


def _on_one_device(x: jax.Array, indices: jax.Array, weights: jax.Array, kernels: Kernels) -> jax.Array:
    tokens, k = indices.shape
    num_experts = kernels[0].shape[0]
    experts = jnp.where(indices >= 0, indices, num_experts).ravel()  # rows of no choice go behind all groups
    order = jnp.argsort(experts, stable=True)
    place = jnp.argsort(order)  # of each choice's row
    y = _feed_forward(x[order // k], kernels, counts(indices, num_experts))
    chosen = y[place].reshape(tokens, k, -1).astype(jnp.float32)
    total = jnp.zeros_like(chosen[:, 0])
    for i in range(k):
        total += weights[:, i, None] * chosen[:, i]
    return total.astype(x.dtype)


def _feed_forward(rows: jax.Array, kernels: Kernels, group_sizes: jax.Array) -> jax.Array:
    """Each group of rows through its expert: ``[C, K]`` to ``[C, K]``."""
    gate, up, down = (kernel.astype(rows.dtype) for kernel in kernels)
    hidden = swiglu(grouped_gemm(rows, gate, group_sizes), grouped_gemm(rows, up, group_sizes))
    return grouped_gemm(hidden, down, group_sizes)
