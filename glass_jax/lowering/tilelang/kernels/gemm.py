"""``gemm``: ``activation(lhs @ rhs + bias)`` on the cube unit, the epilogue on the vector units.

A grid of as many blocks as there are cores walks over the tiles of the result. For each tile the operand tiles stream
through L1, several versions of each, and are accumulated in L0C. A plain product is stored from there, converted on the
way. With a bias or an activation the accumulators go to the two vector units, half of the rows each, and from them to
global memory, while the cube is busy with the next tile. Tiles that reach over the edge of an operand are cut by the
copies.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tiling import GemmTiles

OPERAND_DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
OUT_DTYPES = ("float32", "float16", "bfloat16", "int32")
ACTIVATIONS = (None, "relu", "gelu", "silu")

_MAX_THREADS = 512


def alignment(operand_dtype: str, out_dtype: str, *, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    """Multiples that M, N and K of the kernel's operands must have.

    ``k``: the copies into L1 fill what they cut off with zeros in whole blocks of 32 bytes, so that a block that K ends
    in would keep what it held. ``n``: rows of the result and of a bias are stored and loaded in whole blocks of 32
    bytes. Any other dimension that is contiguous in global memory starts its rows at multiples of 32 bytes.

    Args:
      operand_dtype: one of :data:`OPERAND_DTYPES`.
      out_dtype: one of :data:`OUT_DTYPES`.
      transpose_lhs: lhs holds ``[K, M]``.
      transpose_rhs: rhs holds ``[N, K]``.

    Returns:
      ``{"m": ..., "n": ..., "k": ...}``.
    """
    row = chips.C0_BYTES // tiling.itemsize(operand_dtype)
    out_row = max(chips.C0_BYTES // tiling.itemsize(dtype) for dtype in (out_dtype, "float32"))
    return {
        "m": row if transpose_lhs else 1,
        "n": out_row if transpose_rhs else max(row, out_row),
        "k": row,
    }


@dataclasses.dataclass(frozen=True)
class GemmKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    ==========  ==================================================  ===========================================
    ``lhs``     ``[batch or 1, m, k]``, or ``[..., k, m]``          ``operand_dtype``
    ``rhs``     ``[batch or 1, k, n]``, or ``[..., n, k]``          ``operand_dtype``
    ``bias``    ``[batch or 1, n]``, if there is one                float32, int32 for int8 operands
    ``out``     ``[batch, m, n]``                                   ``out_dtype``
    ==========  ==================================================  ===========================================

    Sums are float32 (int32 for int8), and so are bias and activation; there is one rounding, to ``out_dtype``. ``gelu``
    is the tanh form, ``silu`` is ``z * sigmoid(z)``.

    Attributes:
      batch: number of products.
      lhs_batched, rhs_batched: whether the operand has ``batch`` matrices, or 1 that serves all.
      m, n, k: extents, multiples of what :func:`alignment` says.
      operand_dtype: one of :data:`OPERAND_DTYPES`.
      out_dtype: one of :data:`OUT_DTYPES`; int32 if and only if the operands are int8.
      transpose_lhs, transpose_rhs: the operand holds the transpose.
      bias, bias_batched: whether a bias is added, and whether it has ``batch`` rows.
      activation: one of :data:`ACTIVATIONS`; None or relu for int8.
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
    operand_dtype: str
    out_dtype: str
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    bias: bool = False
    bias_batched: bool = False
    activation: str | None = None
    tiles: GemmTiles | None = None

    def __post_init__(self) -> None:
        artifact.check_choice("gemm", "operand_dtype", self.operand_dtype, OPERAND_DTYPES)
        artifact.check_choice("gemm", "out_dtype", self.out_dtype, OUT_DTYPES)
        activations = ACTIVATIONS if self.operand_dtype != "int8" else (None, "relu")
        artifact.check_choice("gemm", "activation", self.activation, activations)
        if (self.operand_dtype == "int8") != (self.out_dtype == "int32"):
            raise errors.HardwareConstraintError(
                f"gemm kernel: {self.operand_dtype} operands, {self.out_dtype} result; int8 goes with int32 only"
            )
        multiples = alignment(
            self.operand_dtype, self.out_dtype, transpose_lhs=self.transpose_lhs, transpose_rhs=self.transpose_rhs
        )
        extents = {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}
        artifact.check_extents("gemm", extents, multiples)

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        parts = [f"gemm_{self.operand_dtype}"]
        if self.out_dtype != self.operand_dtype:
            parts.append(self.out_dtype)
        parts += [flag for flag in ("transpose_lhs", "transpose_rhs", "bias") if getattr(self, flag)]
        if self.activation:
            parts.append(self.activation)
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return "_".join([*parts, f"{batch}{self.m}x{self.n}x{self.k}"])

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (3 if self.bias else 2,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def accumulator(self) -> str:
        """Type of the sums."""
        return "int32" if self.operand_dtype == "int8" else "float32"

    @property
    def problem(self) -> tiling.GemmProblem:
        """What decides the tiles."""
        return tiling.GemmProblem(
            batch=self.batch,
            m=self.m,
            n=self.n,
            k=self.k,
            operand_bytes=tiling.itemsize(self.operand_dtype),
            out_bytes=tiling.itemsize(self.out_dtype),
            cube_dtype=self.operand_dtype,
            epilogue=self.bias or self.activation is not None,
            lhs_row="m" if self.transpose_lhs else "k",
            rhs_row="k" if self.transpose_rhs else "n",
        )

    def plan(self, chip: str) -> tiling.GemmPlan:
        """The tiles and the versions of each buffer on ``chip``.

        Raises:
          OutOfOnChipMemoryError: the given tiles do not fit.
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
        tiles, k_steps = tiling.block_count(problem, plan.tiles), math.ceil(self.k / bk)
        dtype, out_dtype, accumulator, activation = (
            self.operand_dtype,
            self.out_dtype,
            self.accumulator,
            self.activation,
        )
        threads = _threads(bm // 2 * bn)
        lhs_batch, rhs_batch, bias_batch = (int(x) for x in (self.lhs_batched, self.rhs_batched, self.bias_batched))

        @T.macro
        def product(lhs, rhs, bias, out):
            with T.Kernel(plan.cores) as core:
                a = T.alloc_l1((bm, bk), dtype)
                b = T.alloc_l1((bn, bk), dtype)
                c = T.alloc_l0c((bm, bn), accumulator)
                # The scheduler sees the sums read before they are written, because the step that clears them is decided
                # by k, and keeps one version unless it is told that a tile does not need the sums of the one before.
                eligible = {"multi_buffer_eligible": [c]} if plan.accumulators == 2 else None
                T.annotate_buffer_versions({a: stages, b: stages, c: plan.accumulators})
                if problem.epilogue:
                    sums = T.alloc_shared((bm // 2, bn), accumulator)
                    result = T.alloc_shared((bm // 2, bn), out_dtype)
                    T.annotate_buffer_versions({sums: plan.vectors, result: plan.vectors})
                if bias is not None:
                    row = T.alloc_shared((1, bn), accumulator)
                    T.annotate_buffer_versions({row: plan.vectors})
                for tile in T.Persistent([tiles], plan.cores, core, group_size=1, annotations=eligible):
                    g = tile // (m_tiles * n_tiles)
                    m = tile // n_tiles % m_tiles * bm
                    n = tile % n_tiles * bn
                    for step in T.Pipelined(k_steps, num_stages=stages):
                        k = step * bk
                        if self.transpose_lhs:
                            T.copy(lhs[g * lhs_batch, k : k + bk, m : m + bm], a, transpose=True)
                        else:
                            T.copy(lhs[g * lhs_batch, m : m + bm, k : k + bk], a)
                        if self.transpose_rhs:
                            T.copy(rhs[g * rhs_batch, n : n + bn, k : k + bk], b)
                        else:
                            T.copy(rhs[g * rhs_batch, k : k + bk, n : n + bn], b, transpose=True)
                        T.gemm(a, b, c, transpose_B=True, clear_accum=step == 0)
                    if problem.epilogue:
                        T.dual_copy(c, sums)
                        if bias is not None:
                            T.copy(bias[g * bias_batch : g * bias_batch + 1, n : n + bn], row)
                        with T.SimtVF(threads=threads):
                            for i, j in T.Parallel(bm // 2, bn):
                                z = sums[i, j] if bias is None else sums[i, j] + row[0, j]
                                result[i, j] = T.cast(_activate(T, z, activation), out_dtype)
                        T.dual_copy(result, out[g, m : m + bm, n : n + bn])
                    else:
                        T.copy(c, out[g, m : m + bm, n : n + bn])

        shapes = self._shapes()
        lhs_type, rhs_type, out_type = (
            T.Tensor(shapes[name], type_) for name, type_ in (("lhs", dtype), ("rhs", dtype), ("out", out_dtype))
        )
        if self.bias:

            @T.prim_func
            def gemm(lhs: lhs_type, rhs: rhs_type, bias: T.Tensor(shapes["bias"], accumulator), out: out_type):
                product(lhs, rhs, bias, out)

        else:

            @T.prim_func
            def gemm(lhs: lhs_type, rhs: rhs_type, out: out_type):
                product(lhs, rhs, None, out)

        return gemm

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        lhs, rhs = (self.m, self.k), (self.k, self.n)
        return {
            "lhs": (self.batch if self.lhs_batched else 1, *(lhs[::-1] if self.transpose_lhs else lhs)),
            "rhs": (self.batch if self.rhs_batched else 1, *(rhs[::-1] if self.transpose_rhs else rhs)),
            "bias": (self.batch if self.bias_batched else 1, self.n),
            "out": (self.batch, self.m, self.n),
        }


def _threads(elements: int) -> int:
    """Threads of the epilogue: each takes the same number of pairs, which is what its loads and stores move."""
    threads = _MAX_THREADS
    while elements % (2 * threads):
        threads //= 2
    return threads


def _activate(T, z, activation: str | None):
    """The activation of one accumulator."""
    if activation == "relu":
        return T.max(z, T.cast(0, z.dtype))
    if activation == "gelu":
        return 0.5 * z * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z * z * z)))
    if activation == "silu":
        return z / (1.0 + T.exp(-z))
    return z
