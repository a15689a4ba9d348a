"""``ln_gelu_linear`` and ``linear_ln_gelu`` on their tile kernels: batches folded, operands padded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import linear_ln_gelu as after
from glass_jax.lowering.tilelang.kernels import ln_gelu_linear as before
from glass_jax.lowering.tilelang.kernels.fused_linear import FusedLinearKernel
from glass_jax.lowering.xla import fused_linear as formula

_KERNELS = {
    "ln_gelu_linear": (before.LnGeluLinearKernel, before.alignment),
    "linear_ln_gelu": (after.LinearLnGeluKernel, after.alignment),
}


def check_alignment(name: str, x, w) -> None:
    """Raises HardwareConstraintError unless the hardware takes K and N of the operation ``name`` without padding."""
    sizes = {"k": w.shape[-2], "n": w.shape[-1]}
    common.check_aligned(name, sizes, _KERNELS[name][1](str(x.dtype)))


def ln_gelu_linear(*operands: jax.Array, params) -> jax.Array:
    """``gelu(layer_norm(x)) @ w + b`` by the kernel; operands and ``params`` as in ``primitives.fused_linear``."""
    if all(size > 0 for operand in operands for size in operand.shape):
        return _over_batch(partial(_before, params=params), *operands, batch=params.batch)
    return formula.ln_gelu_linear(*operands, **params.statics)  # nothing to multiply


def linear_ln_gelu(*operands: jax.Array, params) -> jax.Array:
    """``gelu(layer_norm(x @ w + b))`` by the kernel; operands and ``params`` as in ``primitives.fused_linear``."""
    if all(size > 0 for operand in operands for size in operand.shape):
        return _over_batch(partial(_after, params=params), *operands, batch=params.batch)
    return formula.linear_ln_gelu(*operands, **params.statics)


def _over_batch(call: Callable[..., jax.Array], x: jax.Array, *others: jax.Array, batch: int) -> jax.Array:
    """``call`` on ``[M, K]`` rows and operands without batch dimensions, one position of the batch after the other."""
    lead = np.broadcast_shapes(*(a.shape[:batch] for a in (x, *others)))
    rows = x.shape[batch:-1]
    if all(size == 1 for a in others for size in a.shape[:batch]):  # the batch is more rows
        out = call(x.reshape(-1, x.shape[-1]), *(a.reshape(a.shape[batch:]) for a in others))
        return out.reshape(*lead, *rows, out.shape[-1])

    arrays = [x.reshape(*x.shape[:batch], -1, x.shape[-1]), *others]
    mapped = [any(size != 1 for size in a.shape[:batch]) for a in arrays]
    for i, a in enumerate(arrays):
        tail = a.shape[batch:]
        arrays[i] = jnp.broadcast_to(a, (*lead, *tail)).reshape(-1, *tail) if mapped[i] else a.reshape(tail)

    def at_position(values):
        one = iter(values)
        return call(*(next(one) if moves else a for a, moves in zip(arrays, mapped, strict=True)))

    out = lax.map(at_position, [a for a, moves in zip(arrays, mapped, strict=True) if moves])
    return out.reshape(*lead, *rows, out.shape[-1])


def _kernel(name: str, x, w, b, columns: int, params) -> FusedLinearKernel:
    """The kernel for these operands, K and N padded; ``columns`` is the normalized extent."""
    kernel, alignment = _KERNELS[name]
    sizes, multiples = {"k": w.shape[0], "n": w.shape[1]}, alignment(str(x.dtype))
    if params.alignment == "strict":
        common.check_aligned(name, sizes, multiples)
    padded = {dim: common.next_multiple(size, multiples[dim]) for dim, size in sizes.items()}
    common.say_padding(name, sizes, padded)
    return kernel(
        m=x.shape[0],
        columns=columns,
        dtype=str(x.dtype),
        bias=bool(b),
        eps=params.eps,
        approximate=params.approximate,
        **padded,
    )


def _before(x: jax.Array, gamma: jax.Array, beta: jax.Array, w: jax.Array, *b: jax.Array, params) -> jax.Array:
    kernel = _kernel("ln_gelu_linear", x, w, b, x.shape[1], params)
    operands = [
        common.pad(x, (kernel.m, kernel.k)),
        *(common.pad(vector[None], (1, kernel.k)) for vector in (gamma, beta)),
        common.pad(w, (kernel.k, kernel.n)),
        *(common.pad(vector[None], (1, kernel.n)) for vector in b),
    ]
    (out,) = common.run(kernel, *operands, implementation=params.implementation, chip=params.chip)
    return out[:, : w.shape[1]]


def _after(x: jax.Array, w: jax.Array, gamma: jax.Array, beta: jax.Array, *b: jax.Array, params) -> jax.Array:
    kernel = _kernel("linear_ln_gelu", x, w, b, w.shape[1], params)
    operands = [
        common.pad(x, (kernel.m, kernel.k)),
        common.pad(w, (kernel.k, kernel.n)),
        *(common.pad(vector[None], (1, kernel.n)) for vector in (*b, gamma, beta)),
    ]
    (out,) = common.run(kernel, *operands, implementation=params.implementation, chip=params.chip)
    return out[:, : w.shape[1]]
