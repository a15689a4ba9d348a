"""``gemm`` on its tile kernel: split over the mesh, batches folded, rows padded to what the hardware can copy."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import partition
from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import gemm as kernels
from glass_jax.lowering.xla import gemm as formula


def gemm(lhs: jax.Array, rhs: jax.Array, *bias: jax.Array, params, split: partition.Split) -> jax.Array:
    """``activation(lhs @ rhs + bias)`` by the kernel; operands and ``params`` as in ``primitives.gemm``."""
    if all(size > 0 for size in (*lhs.shape, *rhs.shape)):
        local, parts = partial(_local, params=params), partial(_parts, params=params)
        return partition.partitioned(local, _rule(lhs, rhs, bias, params), parts, split, lhs, rhs, *bias)
    # Nothing to multiply, so no kernel: the result is empty, or its K is 0 and it is activation(bias).
    return formula.gemm(lhs, rhs, *bias, **params.statics)


# --- over a mesh ---------------------------------------------------------------------------------------------------


def _rule(lhs, rhs, bias, params) -> str:
    """The dimensions in Shardy's notation."""
    batch = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])

    def names(tag, shape, last):
        return " ".join([*partition.broadcast("b", tag, shape, batch), *last])

    terms = [
        names("l", lhs.shape, "km" if params.transpose_lhs else "mk"),
        names("r", rhs.shape, "nk" if params.transpose_rhs else "kn"),
        *(names("c", x.shape, "n") for x in bias),
    ]
    return f"{', '.join(terms)} -> {names('b', batch, 'mn')}"


def _parts(lhs: partition.Sharded, rhs: partition.Sharded, *rest: partition.Sharded | jax.P, params) -> partition.Parts:
    """What one device computes: its block of the result, K summed over the axes that shard it."""
    *bias, out = rest
    m_dim, k_lhs = (-1, -2) if params.transpose_lhs else (-2, -1)
    n_dim, k_rhs = (-2, -1) if params.transpose_rhs else (-1, -2)
    k = lhs.spec[k_lhs] if lhs.spec[k_lhs] is not None else rhs.spec[k_rhs]
    used = set(partition.axes(k))

    def free(*candidates):
        """The first candidate whose axes nothing else uses: an axis can shard one dimension only."""
        for entry in candidates:
            if entry is not None and used.isdisjoint(partition.axes(entry)):
                used.update(partition.axes(entry))
                return entry
        return None

    batch = [free(*entries) for entries in zip(out[:-2], lhs.spec[:-2], rhs.spec[:-2], strict=True)]
    m, n = free(lhs.spec[m_dim], out[-2]), free(rhs.spec[n_dim], out[-1])

    def spec(x, *last):  # an operand that has 1 in a batch dimension is whole on every device
        lead = [entry if size > 1 else None for entry, size in zip(batch, x.shape, strict=False)]
        return jax.P(*lead, *last)

    operand_specs = (
        spec(lhs, *((k, m) if params.transpose_lhs else (m, k))),
        spec(rhs, *((n, k) if params.transpose_rhs else (k, n))),
        *(spec(x, n) for x in bias),
    )

    def local(left, right, *row):
        if k is None:
            return _local(left, right, *row, params=params)
        accumulator = formula.accumulator(left.dtype)
        part = _local(left, right, params=dataclasses.replace(params, activation=None, out_dtype=accumulator))
        total = lax.psum(part, partition.axes(k))
        total = total + jnp.expand_dims(row[0], -2) if row else total
        return formula.activate(total, params.activation).astype(params.out_dtype)

    return partition.Parts(local, jax.P(*batch, m, n), operand_specs)


# --- on one device -------------------------------------------------------------------------------------------------


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


def _local(lhs: jax.Array, rhs: jax.Array, *bias: jax.Array, params) -> jax.Array:
    """The kernel on the arrays of one device."""
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
