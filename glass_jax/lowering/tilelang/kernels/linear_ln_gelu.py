"""``linear_ln_gelu``: ``gelu(layer_norm(x @ w + b))`` in one kernel of cube and vector units.

A core takes a block of rows and goes over the columns tile by tile: the cube multiplies, the vector units add the bias
and keep the mean and the sum of squared differences of the columns so far, to which they add those of a tile (Chan,
Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Then it goes over
the columns again to normalize and activate them. Where whole rows of sums fit the unified buffers with enough rows a
block, they stay there; else they are multiplied a second time, which costs less than to read the weights so often.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax.hw import chips
from glass_jax.lowering import norm_tiling, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tilelang.kernels.fused_linear import FusedLinearKernel
from glass_jax.lowering.tiling import LANES


def alignment(dtype: str) -> dict[str, int]:
    """Multiples that K and N must have for operands of ``dtype``: rows of 32 bytes."""
    row = chips.C0_BYTES // tiling.itemsize(dtype)
    return {"k": row, "n": row}


@dataclasses.dataclass(frozen=True)
class LinearLnGeluKernel(FusedLinearKernel):
    """The kernel for one shape. Its parameters in global memory, in order:

    =========  ============  ==========
    ``x``      ``[m, k]``    ``dtype``
    ``w``      ``[k, n]``    ``dtype``
    ``b``      ``[1, n]``    float32, if there is a bias
    ``gamma``  ``[1, n]``    float32
    ``beta``   ``[1, n]``    float32
    ``out``    ``[m, n]``    ``dtype``
    =========  ============  ==========
    """

    operation = "linear_ln_gelu"

    def plan(self, chip: str) -> norm_tiling.AfterPlan:
        """The tiles on ``chip``."""
        return norm_tiling.after(self.problem, chip)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        plan = self.plan(chip)
        kept = "whole rows of sums stay on chip" if plan.resident else "sums are computed twice"
        return f"tiles {plan.block_m}x{plan.block_n}x{plan.block_k} ({plan.stages} stages), {kept}, {plan.cores} cores"

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        plan, dtype = self.plan(chip), self.dtype
        bm, bn, bk = plan.block_m, plan.block_n, plan.block_k
        rows, tiles = bm // 2, math.ceil(self.n / bn)
        start, measure = _moments(self, rows, bn)
        invert, finish = _activation(self, rows, bn)

        @T.macro
        def multiply(x, w, m, n, lhs, rhs, c):
            for step in T.Pipelined(math.ceil(self.k / bk), num_stages=plan.stages):
                k = step * bk
                T.copy(x[m : m + bm, k : k + bk], lhs)
                T.copy(w[k : k + bk, n : n + bn], rhs, transpose=True)
                T.gemm(lhs, rhs, c, transpose_B=True, clear_accum=step == 0)

        @T.macro
        def body(x, w, b, gamma, beta, out):
            with T.MixedKernel(plan.cores) as (core, _):
                lhs = T.alloc_l1((bm, bk), dtype)
                rhs = T.alloc_l1((bn, bk), dtype)
                c = T.alloc_l0c((bm, bn), "float32")
                sums = T.alloc_shared((rows, bn), "float32")
                bias = T.alloc_shared((1, bn), "float32") if b is not None else None
                scale = T.alloc_shared((1, bn), "float32")
                shift = T.alloc_shared((1, bn), "float32")
                result = T.alloc_shared((rows, bn), dtype)
                mean = T.alloc_shared((LANES,), "float32")
                squares = T.alloc_shared((LANES,), "float32")
                tile_mean = T.alloc_shared((LANES,), "float32")
                tile_squares = T.alloc_shared((LANES,), "float32")
                kept = T.alloc_shared((rows, tiles * bn), "float32") if plan.resident else None
                T.annotate_buffer_versions({lhs: plan.stages, rhs: plan.stages, c: 2, sums: 2, result: 2})
                T.annotate_buffer_versions({scale: 2, shift: 2} | ({bias: 2} if b is not None else {}))
                for block in T.Persistent([math.ceil(self.m / bm)], plan.cores, core, group_size=1):
                    m = block * bm
                    start(mean, squares)
                    for tile in T.Pipelined(tiles, num_stages=2, annotations={"multi_buffer_eligible": [c]}):
                        n = tile * bn
                        multiply(x, w, m, n, lhs, rhs, c)
                        T.dual_copy(c, sums)
                        if b is not None:
                            T.copy(b[0:1, n : n + bn], bias)
                        measure(sums, bias, kept, n, mean, squares, tile_mean, tile_squares)
                    invert(squares)
                    for tile in T.Pipelined(tiles, num_stages=2, annotations={"multi_buffer_eligible": [c]}):
                        n = tile * bn
                        if kept is None:
                            multiply(x, w, m, n, lhs, rhs, c)
                            T.dual_copy(c, sums)
                            if b is not None:
                                T.copy(b[0:1, n : n + bn], bias)
                        T.copy(gamma[0:1, n : n + bn], scale)
                        T.copy(beta[0:1, n : n + bn], shift)
                        finish(sums, bias, kept, n, mean, squares, scale, shift, result)
                        T.dual_copy(result, out[m : m + bm, n : n + bn])

        # One type for each parameter: those of one type object would be one array.
        x_type, w_type, out_type = (T.Tensor(s, dtype) for s in ((self.m, self.k), (self.k, self.n), (self.m, self.n)))
        b_type, gamma_type, beta_type = (T.Tensor((1, self.n), "float32") for _ in range(3))
        if self.bias:

            @T.prim_func
            def linear_ln_gelu(x: x_type, w: w_type, b: b_type, gamma: gamma_type, beta: beta_type, out: out_type):
                body(x, w, b, gamma, beta, out)

        else:

            @T.prim_func
            def linear_ln_gelu(x: x_type, w: w_type, gamma: gamma_type, beta: beta_type, out: out_type):
                body(x, w, None, gamma, beta, out)

        return linear_ln_gelu


def _moments(kernel: LinearLnGeluKernel, rows: int, block_n: int) -> tuple[Any, Any]:
    """The macros ``start``: no columns so far, and ``measure``: the bias and the moments of one more tile."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    columns, ragged, load = kernel.columns, kernel.columns % block_n > 0, _sum()

    @T.macro
    def start(mean, squares):
        with T.SimdVF():
            full = S.pset(32)
            zero = S.vdup(0.0, "float32", full)
            S.vsts(mean[0], zero, full)
            S.vsts(squares[0], zero, full)

    @T.macro
    def measure(sums, bias, kept, n, mean, squares, tile_mean, tile_squares):
        count = T.min(columns - n, block_n)
        with T.SimdVF():
            full = S.pset(32)
            zero = S.vdup(0.0, "float32", full)
            # Numbers of columns become floats in registers: regions do no scalar arithmetic but on integers.
            number = S.vcvt(S.vdup(count, "int32", full), "float32", full)
            before = S.vcvt(S.vdup(n, "int32", full), "float32", full)
            for row in range(rows):
                total = S.alloc_var("float32")
                total = zero
                for column in range(0, block_n, LANES):
                    y = load(sums, bias, row, column, full)
                    if kept is not None:
                        S.vsts(kept[row, n + column], y, full)
                    if ragged:
                        total = S.vadd(total, S.vsel(y, zero, S.update_mask(T.max(count - column, 0), 32)), full)
                    else:
                        total = S.vadd(total, y, full)
                S.vsts(tile_mean[row], S.vcadd(total, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            S.vsts(tile_mean[0], S.vdiv(S.vld(tile_mean[0]), number, full), full)
            S.mem_bar("VST_VLD")
            for row in range(rows):
                center = S.vld(tile_mean[row], "BRC_B32")
                total = S.alloc_var("float32")
                total = zero
                for column in range(0, block_n, LANES):
                    # Lanes beyond the columns are zero in the difference.
                    mask = S.update_mask(T.max(count - column, 0), 32) if ragged else full
                    difference = S.vsub(load(sums, bias, row, column, full), center, mask)
                    total = S.vadd(total, S.vmul(difference, difference, full), full)
                S.vsts(tile_squares[row], S.vcadd(total, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            distance = S.vsub(S.vld(tile_mean[0]), S.vld(mean[0]), full)
            share = S.vmul(distance, S.vdiv(number, S.vadd(before, number, full), full), full)
            between = S.vmul(S.vmul(distance, share, full), before, full)
            S.vsts(mean[0], S.vadd(S.vld(mean[0]), share, full), full)
            within = S.vadd(S.vld(squares[0]), S.vld(tile_squares[0]), full)
            S.vsts(squares[0], S.vadd(within, between, full), full)

    return start, measure


def _activation(kernel: LinearLnGeluKernel, rows: int, block_n: int) -> tuple[Any, Any]:
    """The macros ``invert``: 1 / deviation in place of the squares, and ``finish``: a tile of the result."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    load, store, gelu = _sum(), vectors.store(kernel.dtype), vectors.gelu(kernel.approximate)
    inverse_deviation = vectors.inverse_deviation(kernel.columns, kernel.eps)

    @T.macro
    def invert(squares):
        with T.SimdVF():
            full = S.pset(32)
            inverse_deviation(squares, full)

    @T.macro
    def finish(sums, bias, kept, n, mean, inverse, scale, shift, result):
        with T.SimdVF():
            full = S.pset(32)
            for row in range(rows):
                center = S.vld(mean[row], "BRC_B32")
                factor = S.vld(inverse[row], "BRC_B32")
                for column in range(0, block_n, LANES):
                    y = load(sums, bias, row, column, full) if kept is None else S.vld(kept[row, n + column])
                    normal = S.vmul(S.vsub(y, center, full), factor, full)
                    z = S.vadd(S.vmul(normal, S.vld(scale[0, column]), full), S.vld(shift[0, column]), full)
                    store(result, row, column, gelu(z, full), full)

    return invert, finish


def _sum() -> Any:
    """The macro ``load(sums, bias, row, column, mask)``: 64 sums of a tile, the bias added if there is one."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def load(sums, bias, row, column, mask):
        y = S.vld(sums[row, column])
        return y if bias is None else S.vadd(y, S.vld(bias[0, column]), mask)

    return load
