"""``ln_gelu_linear``: ``gelu(layer_norm(x)) @ w + b`` in one kernel of cube and vector units.

A core takes a block of rows. Its vector units normalize and activate them, some whole rows at a time, and leave the
activations in the blocks of 32 bytes that the cube reads; from there they go to L1, where they stay while the weights
stream past them. Where two versions fit, the rows of the next block are normalized while the cube multiplies. Without a
bias the sums are stored from L0C; with one they pass the vector units.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax.hw import chips
from glass_jax.lowering import norm_tiling, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tilelang.kernels.fused_linear import FusedLinearKernel
from glass_jax.lowering.tiling import LANES, REGISTER_BYTES


def alignment(dtype: str) -> dict[str, int]:
    """Multiples that K and N must have for operands of ``dtype``: registers of x, rows of 32 bytes of the result."""
    size = tiling.itemsize(dtype)
    return {"k": REGISTER_BYTES // size, "n": chips.C0_BYTES // size}


@dataclasses.dataclass(frozen=True)
class LnGeluLinearKernel(FusedLinearKernel):
    """The kernel for one shape. Its parameters in global memory, in order:

    =========  ============  ==========
    ``x``      ``[m, k]``    ``dtype``
    ``gamma``  ``[1, k]``    float32
    ``beta``   ``[1, k]``    float32
    ``w``      ``[k, n]``    ``dtype``
    ``b``      ``[1, n]``    float32, if there is a bias
    ``out``    ``[m, n]``    ``dtype``
    =========  ============  ==========
    """

    operation = "ln_gelu_linear"

    def plan(self, chip: str) -> norm_tiling.BeforePlan:
        """The tiles on ``chip``.

        Raises:
          OutOfOnChipMemoryError: K is too large.
        """
        return norm_tiling.before(self.problem, chip)

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        plan = self.plan(chip)
        return (
            f"tiles {plan.block_m}x{plan.block_n}x{plan.block_k} ({plan.stages} stages), {plan.activations} x "
            f"{plan.block_m} rows of activations in L1, normalized {2 * plan.rows} at a time, columns in {plan.splits} "
            f"parts, {plan.cores} cores"
        )

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T
        from tilelang.layout import make_ascend_compact_nz_layout

        plan, k, dtype = self.plan(chip), self.k, self.dtype
        bm, bn, bk, rows = plan.block_m, plan.block_n, plan.block_k, plan.rows
        tiles, steps = math.ceil(math.ceil(self.n / bn) / plan.splits), k // bk
        items = math.ceil(self.m / bm) * plan.splits
        moments, activate = _normalization(self, rows, bk)
        add_bias = _bias(dtype, bm // 2, bn)

        @T.macro
        def body(x, gamma, beta, w, b, out):
            with T.MixedKernel(plan.cores) as (core, _):
                act = T.alloc_l1((steps, bm, bk), dtype)
                weights = T.alloc_l1((bn, bk), dtype)
                c = T.alloc_l0c((bm, bn), "float32")
                scale = T.alloc_shared((1, k), "float32")
                shift = T.alloc_shared((1, k), "float32")
                inputs = T.alloc_shared((rows, k), dtype)
                packed = T.alloc_shared((steps, rows + 1, bk), dtype)  # a row more: see _normalization
                mean = T.alloc_shared((LANES,), "float32")
                inverse = T.alloc_shared((LANES,), "float32")
                T.annotate_layout({packed: make_ascend_compact_nz_layout(packed)})
                T.annotate_buffer_versions({act: plan.activations, weights: plan.stages, c: 2, inputs: plan.inputs})
                if b is not None:
                    sums = T.alloc_shared((bm // 2, bn), "float32")
                    result = T.alloc_shared((bm // 2, bn), dtype)
                    row = T.alloc_shared((1, bn), "float32")
                    T.annotate_buffer_versions({sums: plan.results, result: plan.results, row: plan.results})
                T.copy(gamma, scale)
                T.copy(beta, shift)
                # Stages: the rows of the next item are normalized before the products of this one, so that the cube
                # finds them ready. The scheduler does not see by itself that an item needs nothing of the one before.
                overlap = {"multi_buffer_eligible": [act], "enable_offset": True} if plan.activations == 2 else None
                for item in T.Persistent([items], plan.cores, core, group_size=1, annotations=overlap):
                    m = item // plan.splits * bm
                    with T.Stage(0):
                        for chunk in T.Pipelined(plan.chunks, num_stages=plan.inputs):
                            first = chunk * 2 * rows
                            T.dual_copy(x[m + first : m + first + 2 * rows, 0:k], inputs)
                            moments(inputs, mean, inverse)
                            activate(inputs, mean, inverse, scale, shift, packed)
                            for step in range(steps):
                                T.dual_copy(packed[step, 0:rows, 0:bk], act[step, first : first + 2 * rows, 0:bk])
                    with T.Stage(1 if plan.activations == 2 else 0):
                        for tile in T.Pipelined(tiles, num_stages=2, annotations={"multi_buffer_eligible": [c]}):
                            n = (item % plan.splits * tiles + tile) * bn
                            for step in T.Pipelined(steps, num_stages=plan.stages):
                                depth = step * bk
                                T.copy(w[depth : depth + bk, n : n + bn], weights, transpose=True)
                                T.gemm(act[step, 0:bm, 0:bk], weights, c, transpose_B=True, clear_accum=step == 0)
                            if b is not None:
                                T.dual_copy(c, sums)
                                T.copy(b[0:1, n : n + bn], row)
                                add_bias(sums, row, result)
                                T.dual_copy(result, out[m : m + bm, n : n + bn])
                            else:
                                T.copy(c, out[m : m + bm, n : n + bn])

        # One type for each parameter: those of one type object would be one array.
        x_type, w_type, out_type = (T.Tensor(s, dtype) for s in ((self.m, k), (k, self.n), (self.m, self.n)))
        gamma_type, beta_type, b_type = (T.Tensor((1, size), "float32") for size in (k, k, self.n))
        if self.bias:

            @T.prim_func
            def ln_gelu_linear(x: x_type, gamma: gamma_type, beta: beta_type, w: w_type, b: b_type, out: out_type):
                body(x, gamma, beta, w, b, out)

        else:

            @T.prim_func
            def ln_gelu_linear(x: x_type, gamma: gamma_type, beta: beta_type, w: w_type, out: out_type):
                body(x, gamma, beta, w, None, out)

        return ln_gelu_linear


def _normalization(kernel: LnGeluLinearKernel, rows: int, depth: int) -> tuple[Any, Any]:
    """The macros ``moments`` and ``activate`` on ``rows`` rows: mean and 1 / deviation; activations, packed.

    Those of ``depth`` columns are a matrix of their own, one behind the other.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    k, columns, dtype = kernel.k, kernel.columns, kernel.dtype
    lanes = REGISTER_BYTES // tiling.itemsize(dtype)
    load, gelu = vectors.load(dtype), vectors.gelu(kernel.approximate)
    invert = vectors.inverse_deviation(columns, kernel.eps)
    # From one block of 32 bytes to the next of the same row there is a row more than there are, as TileLang's copy of
    # packed tiles wants it: the eight blocks of a register lie in eight banks of the memory.
    apart = (rows + 1) << 16

    @T.macro
    def moments(x, mean, inverse):
        with T.SimdVF():
            full = S.pset(32)
            for row in range(rows):
                total = S.alloc_var("float32")
                total = S.vdup(0.0, "float32", full)
                for column in range(0, k, LANES):
                    total = S.vadd(total, load(x, row, column), full)
                S.vsts(mean[row], S.vcadd(total, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            S.vsts(mean[0], S.vmuls(S.vld(mean[0]), T.float32(1 / columns), full), full)
            S.mem_bar("VST_VLD")
            for row in range(rows):
                center = S.vld(mean[row], "BRC_B32")
                squares = S.alloc_var("float32")
                squares = S.vdup(0.0, "float32", full)
                for column in range(0, k, LANES):
                    # Lanes that are not of the row are zero in the difference, not in the row.
                    mask = S.update_mask(T.max(columns - column, 0), 32) if columns < k else full
                    difference = S.vsub(load(x, row, column), center, mask)
                    squares = S.vadd(squares, S.vmul(difference, difference, full), full)
                S.vsts(inverse[row], S.vcadd(squares, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")
            invert(inverse, full)

    @T.macro
    def activations(x, row, column, center, factor, scale, shift, full):
        normal = S.vmul(S.vsub(load(x, row, column), center, full), factor, full)
        return gelu(S.vadd(S.vmul(normal, S.vld(scale[0, column]), full), S.vld(shift[0, column]), full), full)

    @T.macro
    def activate(x, mean, inverse, scale, shift, packed):
        with T.SimdVF():
            full, full16 = S.pset(32), S.pset(16)
            for row in range(rows):
                center, factor = S.vld(mean[row], "BRC_B32"), S.vld(inverse[row], "BRC_B32")
                for column in range(0, k, lanes):
                    left = activations(x, row, column, center, factor, scale, shift, full)
                    if dtype == "float32":
                        S.vsstb(left, packed[column // depth, row, column % depth], T.int32(apart), full)
                    else:
                        right = activations(x, row, column + LANES, center, factor, scale, shift, full)
                        narrow, _ = S.vdintlv(
                            S.vcvt(left, dtype, full, sat=False), S.vcvt(right, dtype, full, sat=False)
                        )
                        S.vsstb(narrow, packed[column // depth, row, column % depth], T.int32(apart), full16)

    return moments, activate


def _bias(dtype: str, rows: int, columns: int) -> Any:
    """The macro ``add_bias(sums, row, result)``."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    store = vectors.store(dtype)

    @T.macro
    def add_bias(sums, bias, result):
        with T.SimdVF():
            full = S.pset(32)
            for row in range(rows):
                for column in range(0, columns, LANES):
                    store(result, row, column, S.vadd(S.vld(sums[row, column]), S.vld(bias[0, column]), full), full)

    return add_bias
