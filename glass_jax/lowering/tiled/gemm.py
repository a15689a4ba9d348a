"""``gemm`` on its tile kernel: batches folded, rows padded to what the hardware can copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import gemm as kernels
from glass_jax.lowering.xla import gemm as formula


def gemm(lhs: jax.Array, rhs: jax.Array, *bias: jax.Array, params) -> jax.Array:
    """``activation(lhs @ rhs + bias)`` by the kernel; operands and ``params`` as in ``primitives.gemm``."""
    if 0 in (*lhs.shape, *rhs.shape):
        # Nothing to multiply, so no kernel: the result is empty, or its K is 0 and it is activation(bias).
        return formula.gemm(lhs, rhs, *bias, **params.statics)
    dtype = kernel_dtype(lhs.dtype, rhs.dtype)
    m, n = lhs.shape[-1 if params.transpose_lhs else -2], rhs.shape[-2 if params.transpose_rhs else -1]
    k = lhs.shape[-2 if params.transpose_lhs else -1]
    batch = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    if params.alignment == "strict":
        check_alignment(m, n, k, lhs.dtype, rhs.dtype, params)
    (lhs,), (rhs, *bias) = common.fold(
        batch, (lhs.astype(dtype),), (rhs.astype(dtype), *bias), fold_rows=not params.transpose_lhs
    )

    multiples = _alignment(lhs.dtype, rhs.dtype, params)
    rows = lhs.shape[-1 if params.transpose_lhs else -2]
    padded = {name: common.next_multiple(size, multiples[name]) for name, size in (("m", rows), ("n", n), ("k", k))}
    common.say_padding("gemm", {"m": rows, "n": n, "k": k}, padded)
    lhs = common.pad(lhs, (lhs.shape[0], *(padded[d] for d in ("km" if params.transpose_lhs else "mk"))))
    rhs = common.pad(rhs, (rhs.shape[0], *(padded[d] for d in ("nk" if params.transpose_rhs else "kn"))))
    bias = [common.pad(x, (x.shape[0], padded["n"])) for x in bias]
    kernel = kernels.GemmKernel(
        batch=max(lhs.shape[0], rhs.shape[0]),
        lhs_batched=lhs.shape[0] > 1,
        rhs_batched=rhs.shape[0] > 1,
        m=padded["m"],
        n=padded["n"],
        k=padded["k"],
        operand_dtype=dtype,
        out_dtype=_kernel_out_dtype(params.out_dtype),
        transpose_lhs=params.transpose_lhs,
        transpose_rhs=params.transpose_rhs,
        bias=bool(bias),
        bias_batched=bool(bias) and bias[0].shape[0] > 1,
        activation=params.activation,
    )
    (out,) = common.run(kernel, lhs, rhs, *bias, implementation=params.implementation, chip=params.chip)
    return out[:, :rows, :n].reshape(*batch, m, n)


def check_alignment(m: int, n: int, k: int, lhs_dtype, rhs_dtype, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes M, N and K without padding."""
    common.check_aligned("gemm", {"m": m, "n": n, "k": k}, _alignment(lhs_dtype, rhs_dtype, params))


def _alignment(lhs_dtype, rhs_dtype, params) -> dict[str, int]:
    return kernels.alignment(
        kernel_dtype(lhs_dtype, rhs_dtype),
        _kernel_out_dtype(params.out_dtype),
        transpose_lhs=params.transpose_lhs,
        transpose_rhs=params.transpose_rhs,
    )


def kernel_dtype(lhs_dtype, rhs_dtype) -> str:
    """The operand type of the kernel: e5m2 is not a type of the compiler's product, and is exact in float16."""
    e5m2 = jnp.dtype(jnp.float8_e5m2)
    return "float16" if e5m2 in (lhs_dtype, rhs_dtype) else str(jnp.dtype(lhs_dtype))


def _kernel_out_dtype(out_dtype) -> str:
    return str(jnp.dtype(out_dtype))
