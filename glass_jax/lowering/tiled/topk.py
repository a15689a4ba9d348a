"""``topk`` on its kernel, which takes rows of any length and any number of them, as bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels.topk import MAX_K, TopkKernel
from glass_jax.lowering.xla import topk as formula


def topk(x: jax.Array, start: jax.Array, end: jax.Array, *, params) -> tuple[jax.Array, jax.Array]:
    """``topk`` with operands and ``params`` as in the primitive."""
    rows, columns, k = jnp.broadcast_shapes(x.shape[:-1], start.shape, end.shape), x.shape[-1], params.k
    if k > MAX_K:
        raise errors.UnsupportedError(
            f"topk: {k=} is more than {MAX_K}, which the kernel has room for; use implementation='xla'"
        )
    if 0 in (*rows, columns):
        return formula.topk(x, start, end, k=k, sorted_index=True)
    bits = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    flat = lax.bitcast_convert_type(jnp.broadcast_to(x, (*rows, columns)), bits).reshape(-1, columns)
    bounds = [jnp.broadcast_to(bound, rows).reshape(-1) for bound in (start, end)]
    kernel = TopkKernel(rows=flat.shape[0], columns=columns, k=k, dtype=str(x.dtype))
    values, indices = common.run(kernel, flat, *bounds, implementation=params.implementation, chip=params.chip)
    values = lax.bitcast_convert_type(values, x.dtype)
    if params.sorted:  # the kernel's order is that of the indices
        values, indices = formula.by_value(values, indices)
    return values.reshape(*rows, k), indices.reshape(*rows, k)
