"""The grouped products on their tile kernels: tables of where groups are, and padding to what the hardware copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.lowering import groups
from glass_jax.lowering.tiled import common
from glass_jax.lowering.tiled.gemm import kernel_dtype
from glass_jax.lowering.tilelang.kernels import gemm
from glass_jax.lowering.tilelang.kernels import grouped_gemm as kernels
from glass_jax.lowering.xla import grouped_gemm as formula


def check_alignment(lhs, rhs, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes K and N of ``grouped_gemm`` without padding."""
    common.check_aligned("grouped_gemm", *_sizes(lhs, rhs, params))


def check_k_alignment(lhs, rhs, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes K and N of ``k_grouped_gemm`` without padding."""
    common.check_aligned("k_grouped_gemm", *_k_sizes(lhs, rhs, params))


def _sizes(lhs, rhs, params) -> tuple[dict[str, int], dict[str, int]]:
    """N and K, and what they must be multiples of. Rows are free: the kernel copies those that a group has."""
    multiples = gemm.alignment(
        kernel_dtype(lhs.dtype, rhs.dtype),
        str(jnp.dtype(params.out_dtype)),
        transpose_lhs=False,
        transpose_rhs=params.transpose_rhs,
    )
    n = rhs.shape[2 if params.transpose_rhs else 3]
    return {"n": n, "k": lhs.shape[2]}, {name: multiples[name] for name in "nk"}


def _k_sizes(lhs, rhs, params) -> tuple[dict[str, int], dict[str, int]]:
    """K and N, the columns of ``lhs`` and ``rhs``, and what they must be multiples of."""
    dtype = kernel_dtype(lhs.dtype, rhs.dtype)
    multiples = gemm.alignment(dtype, str(jnp.dtype(params.out_dtype)), transpose_lhs=True, transpose_rhs=False)
    return {"k": lhs.shape[2], "n": rhs.shape[2]}, {"k": multiples["m"], "n": multiples["n"]}


def _padded(name: str, sizes: dict[str, int], multiples: dict[str, int]) -> dict[str, int]:
    padded = {dim: common.next_multiple(size, multiples[dim]) for dim, size in sizes.items()}
    common.say_padding(name, sizes, padded)
    return padded


def grouped_gemm(lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, *, params) -> jax.Array:
    """Rows of groups times the groups' matrices by the kernel; operands as of the formula."""
    if not (lhs.size and rhs.size):  # nothing to multiply, so no kernel: the result is empty or zero
        return formula.grouped_gemm(
            lhs, rhs, starts, ends, transpose_rhs=params.transpose_rhs, out_dtype=params.out_dtype
        )
    m, g, batch = lhs.shape[1], rhs.shape[1], max(map(len, (lhs, rhs, starts, ends)))
    starts, ends = (jnp.broadcast_to(x, (batch, g)) for x in (starts, ends))
    sizes, multiples = _sizes(lhs, rhs, params)
    padded = _padded("grouped_gemm", sizes, multiples)
    dtype = kernel_dtype(lhs.dtype, rhs.dtype)
    kernel = kernels.GroupedGemmKernel(
        lists=batch,
        lhs_lists=len(lhs),
        rhs_lists=len(rhs),
        groups=g,
        m=m,
        **padded,
        operand_dtype=dtype,
        out_dtype=str(jnp.dtype(params.out_dtype)),
        transpose_rhs=params.transpose_rhs,
    )
    tiles = groups.tiles(starts, ends, m, kernel.plan(params.chip).tiles.block_m)
    out_row = tiles.batch * m + tiles.row
    lhs_row = out_row if len(lhs) > 1 else tiles.row
    matrix = tiles.batch * g + tiles.group if len(rhs) > 1 else tiles.group
    table = jnp.stack([lhs_row, matrix, out_row, tiles.rows], axis=1)

    rows = common.pad(lhs.astype(dtype).reshape(-1, sizes["k"]), (len(lhs) * m, padded["k"]))
    matrix_shape = (padded[dim] for dim in ("nk" if params.transpose_rhs else "kn"))
    matrices = common.pad(rhs.astype(dtype).reshape(-1, *rhs.shape[2:]), (len(rhs) * g, *matrix_shape))
    (out,) = common.run(
        kernel, rows, matrices, table, tiles.count[None], implementation=params.implementation, chip=params.chip
    )
    out = out[:, : sizes["n"]].reshape(batch, m, sizes["n"])
    return jnp.where(groups.belongs(starts, ends, m)[:, :, None], out, 0)


def k_grouped_gemm(lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, *, params) -> jax.Array:
    """Products over the rows of each group by the kernel; operands as of the formula."""
    if not (lhs.size and rhs.size and starts.size):
        return formula.k_grouped_gemm(lhs, rhs, starts, ends, sum_batch=params.sum_batch, out_dtype=params.out_dtype)
    m, g, batch = lhs.shape[1], starts.shape[1], max(map(len, (lhs, rhs, starts, ends)))
    starts, ends = (jnp.broadcast_to(x, (batch, g)) for x in (starts, ends))
    sizes, multiples = _k_sizes(lhs, rhs, params)
    padded = _padded("k_grouped_gemm", sizes, multiples)
    dtype = kernel_dtype(lhs.dtype, rhs.dtype)
    kernel = kernels.KGroupedGemmKernel(
        groups=g if params.sum_batch else batch * g,
        rows=batch * m,
        m=padded["k"],
        n=padded["n"],
        operand_dtype=dtype,
        out_dtype=str(jnp.dtype(params.out_dtype)),
    )

    block_k = kernel.plan(params.chip).tiles.block_k
    places = groups.regroup(starts, ends, m, block_k, join_lists=params.sum_batch)

    def moved(x, width):
        none = batch * m
        source = places.source if len(x) == batch else jnp.where(places.source < none, places.source % m, none)
        rows = x.astype(dtype).reshape(-1, x.shape[2]).at[source].get(mode="fill", fill_value=0)
        return common.pad(rows, (len(source), width))

    (out,) = common.run(
        kernel,
        moved(lhs, padded["k"]),
        moved(rhs, padded["n"]),
        jnp.stack([places.first, places.blocks], axis=1),
        implementation=params.implementation,
        chip=params.chip,
    )
    return out[:, : sizes["k"], : sizes["n"]].reshape(-1, g, sizes["k"], sizes["n"])
