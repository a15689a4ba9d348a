"""``scaled_gemm``: product of matrices in an MX format, fp8 with a power of two for each 32 elements of K.

As the plain product (``gemm.py``): a grid of as many blocks as there are cores walks over the tiles of the result, the
operand tiles stream through L1, several versions of each, with the scales of each beside it, and the cube, which
multiplies with the scales as it goes, sums in L0C. From there a tile is stored, converted on the way.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tiling import SCALE_DEPTH, GemmTiles

OPERAND_DTYPE = "float8_e4m3fn"
OUT_DTYPES = ("float32", "float16", "bfloat16")

PAIR_DEPTH = 2 * SCALE_DEPTH  # elements of K that two scales, one 16-bit number in memory, are for
_ROWS = 16  # of scales: 32 bytes
_MAX_BLOCK_K = 1024


def alignment(out_dtype: str, *, transpose_rhs: bool) -> dict[str, int]:
    """Multiples that M, N and K of the kernel's operands must have.

    ``k``: a pair of scales. ``n``: rows of the result are stored in whole blocks of 32 bytes, and without
    ``transpose_rhs`` rows of rhs are loaded so.

    Args:
      out_dtype: one of :data:`OUT_DTYPES`.
      transpose_rhs: rhs holds ``[N, K]``.

    Returns:
      ``{"m": ..., "n": ..., "k": ...}``.
    """
    return {"m": 1, "n": chips.C0_BYTES // (tiling.itemsize(out_dtype) if transpose_rhs else 1), "k": PAIR_DEPTH}


@dataclasses.dataclass(frozen=True)
class ScaledGemmKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    =============  ==================================================  ===========================================
    ``lhs``        ``[batch or 1, m, k]``                              float8_e4m3fn
    ``lhs_scale``  ``[batch or 1, pairs, rows]``                       uint16: two bytes of e8m0, the first one low
    ``rhs``        ``[batch or 1, n, k]``, or ``[..., k, n]``          float8_e4m3fn
    ``rhs_scale``  as that of lhs                                      uint16
    ``out``        ``[batch, m, n]``                                   ``out_dtype``
    =============  ==================================================  ===========================================

    Scales go on beyond K, where they are any numbers, up to the end of the last tile (see :attr:`scale_shapes`): the
    copies fill operands with zeros there, but not scales. Sums are float32, rounded once.

    Attributes:
      batch: number of products.
      lhs_batched, rhs_batched: whether the operand has ``batch`` matrices, or 1 that serves all.
      m, n, k: extents, multiples of what :func:`alignment` says.
      out_dtype: one of :data:`OUT_DTYPES`.
      transpose_rhs: rhs holds ``[N, K]``.
      tiles: tile sizes, or None: chosen by shape and chip.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    batch: int
    lhs_batched: bool
    rhs_batched: bool
    m: int
    n: int
    k: int
    out_dtype: str
    transpose_rhs: bool = True
    tiles: GemmTiles | None = None

    def __post_init__(self) -> None:
        artifact.check_choice("scaled_gemm", "out_dtype", self.out_dtype, OUT_DTYPES)
        extents = {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}
        artifact.check_extents("scaled_gemm", extents, alignment(self.out_dtype, transpose_rhs=self.transpose_rhs))
        if self.tiles and self.tiles.block_k > _MAX_BLOCK_K:
            raise errors.HardwareConstraintError(
                f"scaled_gemm kernel: block_k={self.tiles.block_k}; use at most {_MAX_BLOCK_K}"
            )

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        layout = "_transpose_rhs" if self.transpose_rhs else ""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"scaled_gemm_{OPERAND_DTYPE}_{self.out_dtype}{layout}_{batch}{self.m}x{self.n}x{self.k}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (4,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def scale_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of the scales of lhs and of rhs: whole blocks of rows, and pairs for any tile that K ends in."""
        pairs = self.k // PAIR_DEPTH + _MAX_BLOCK_K // PAIR_DEPTH - 1
        return tuple(
            (self.batch if batched else 1, pairs, -(-rows // _ROWS) * _ROWS)
            for batched, rows in ((self.lhs_batched, self.m), (self.rhs_batched, self.n))
        )

    @property
    def problem(self) -> tiling.GemmProblem:
        """What decides the tiles."""
        return tiling.GemmProblem(
            batch=self.batch,
            m=self.m,
            n=self.n,
            k=self.k,
            operand_bytes=1,
            out_bytes=tiling.itemsize(self.out_dtype),
            cube_dtype=OPERAND_DTYPE,
            epilogue=False,
            rhs_row="k" if self.transpose_rhs else "n",
            scaled=True,
        )

    def plan(self, chip: str) -> tiling.GemmPlan:
        """The tiles and the versions of each buffer on ``chip``.

        Raises:
          OutOfOnChipMemoryError: the given tiles do not fit.
          UnsupportedError: no code is generated for the chip, so there are no tiles.
        """
        tiles = self.tiles or tiling.choose(self.problem, chip)
        return tiling.plan(self.problem, tiles, chips.get(chip))

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        return tiling.describe(self.problem, self.plan(chip), chips.get(chip))

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, self.plan(chip), __file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        problem, plan = self.problem, self.plan(chip)
        bm, bn, bk, stages = dataclasses.astuple(plan.tiles)
        m_tiles, n_tiles = math.ceil(self.m / bm), math.ceil(self.n / bn)
        tiles, k_steps, bp = tiling.block_count(problem, plan.tiles), math.ceil(self.k / bk), bk // PAIR_DEPTH
        lhs_batch, rhs_batch = int(self.lhs_batched), int(self.rhs_batched)
        rhs_shape = (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        lhs_type = T.Tensor((self.batch if self.lhs_batched else 1, self.m, self.k), OPERAND_DTYPE)
        rhs_type = T.Tensor((self.batch if self.rhs_batched else 1, *rhs_shape), OPERAND_DTYPE)
        lhs_scale_type, rhs_scale_type = (T.Tensor(shape, "uint16") for shape in self.scale_shapes)
        out_type = T.Tensor((self.batch, self.m, self.n), self.out_dtype)

        @T.prim_func
        def scaled_gemm(
            lhs: lhs_type, lhs_scale: lhs_scale_type, rhs: rhs_type, rhs_scale: rhs_scale_type, out: out_type
        ):
            with T.Kernel(plan.cores) as core:
                a = T.alloc_l1((bm, bk), OPERAND_DTYPE)
                b = T.alloc_l1((bn, bk), OPERAND_DTYPE)
                a_scale = T.alloc_l1((bm, bp), "uint16")
                b_scale = T.alloc_l1((bn, bp), "uint16")
                c = T.alloc_l0c((bm, bn), "float32")
                # As in gemm.py: a tile of the result does not need the sums of the one before.
                eligible = {"multi_buffer_eligible": [c]} if plan.accumulators == 2 else None
                T.annotate_buffer_versions(
                    {a: stages, b: stages, a_scale: stages, b_scale: stages, c: plan.accumulators}
                )
                for tile in T.Persistent([tiles], plan.cores, core, group_size=1, annotations=eligible):
                    g = tile // (m_tiles * n_tiles)
                    m = tile // n_tiles % m_tiles * bm
                    n = tile % n_tiles * bn
                    for step in T.Pipelined(k_steps, num_stages=stages):
                        k, p = step * bk, step * bp
                        T.copy(lhs[g * lhs_batch, m : m + bm, k : k + bk], a)
                        if self.transpose_rhs:
                            T.copy(rhs[g * rhs_batch, n : n + bn, k : k + bk], b)
                        else:
                            T.copy(rhs[g * rhs_batch, k : k + bk, n : n + bn], b, transpose=True)
                        T.copy(lhs_scale[g * lhs_batch, p : p + bp, m : m + bm], a_scale, transpose=True)
                        T.copy(rhs_scale[g * rhs_batch, p : p + bp, n : n + bn], b_scale, transpose=True)
                        T.gemm_blockscaled(a, b, c, a_scale, b_scale, transpose_B=True, clear_accum=step == 0)
                    T.copy(c, out[g, m : m + bm, n : n + bn])

        return scaled_gemm
