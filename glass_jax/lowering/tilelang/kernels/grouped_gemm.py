"""The grouped products on the cube unit: rows of groups times matrices, and products over the rows of each group.

Both walk over tiles of the result, a grid of as many blocks as there are cores, and stream operand tiles through L1,
several versions of each. Where groups begin is known at run time only: the kernels read it as scalars from tables in
global memory that JAX computes before the launch.

``grouped_gemm`` takes the rows as they are. Its table lists tiles of rows, each of one group. What is stored ends with
the rows of a tile, so that groups may begin anywhere, and what else is in the tile does not matter. A group without
rows is not in the list, and its matrix is not read.

``k_grouped_gemm`` sums over rows, so that a tile may hold no row of another group. Its operands have the rows of each
group from a multiple of the tile's depth on, and zeros up to the next group.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math

from glass_jax.hw import chips
from glass_jax.lowering import artifact, groups, tiling
from glass_jax.lowering.tilelang.kernels import gemm
from glass_jax.lowering.tiling import GemmTiles

# Rows of a tile at most. With so many the cube takes as long as the copy of a matrix's tile, so that a tile with fewer
# rows wastes no time.
_MOST_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What both kernels have.

    Attributes:
      n: columns of the result.
      operand_dtype, out_dtype: as of :class:`glass_jax.lowering.tilelang.kernels.gemm.GemmKernel`.
      tiles: tile sizes, or None: chosen by shape and chip.
    """

    n: int
    operand_dtype: str
    out_dtype: str
    tiles: GemmTiles | None = None

    def _check(self, multiples: dict[str, int]) -> None:
        """Raises HardwareConstraintError unless types and extents are what the hardware takes."""
        artifact.check_choice(self.name, "operand_dtype", self.operand_dtype, gemm.OPERAND_DTYPES)
        artifact.check_choice(self.name, "out_dtype", self.out_dtype, gemm.OUT_DTYPES)
        artifact.check_extents(self.name, {field: getattr(self, field) for field in multiples}, multiples)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def accumulator(self) -> str:
        """Type of the sums."""
        return "int32" if self.operand_dtype == "int8" else "float32"

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        plan = self.plan(chip)
        tiles, count = plan.tiles, tiling.block_count(self._planned(plan.tiles), plan.tiles)
        return (
            f"tiles {tiles.block_m}x{tiles.block_n}x{tiles.block_k} ({tiles.stages} stages), at most {count} tiles on "
            f"{plan.cores} cores, {'double' if plan.accumulators == 2 else 'single'}-buffered accumulators"
        )

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, self.plan(chip), __file__)

    def plan(self, chip: str) -> tiling.GemmPlan:
        """The tiles and the versions of each buffer on ``chip``.

        Raises:
          OutOfOnChipMemoryError: the given tiles do not fit.
        """
        tiles = self.tiles or tiling.choose(self.problem, chip)
        return tiling.plan(self._planned(tiles), tiles, chips.get(chip))

    def _problem(self, **extents: object) -> tiling.GemmProblem:
        return tiling.GemmProblem(
            n=self.n,
            operand_bytes=tiling.itemsize(self.operand_dtype),
            out_bytes=tiling.itemsize(self.out_dtype),
            cube_dtype=self.operand_dtype,
            epilogue=False,
            **extents,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmKernel(_Kernel):
    """Rows of groups times the groups' matrices. Its parameters in global memory, in order:

    ==========  ==========================================================  ==================
    ``lhs``     ``[lhs_lists * m, k]``                                      ``operand_dtype``
    ``rhs``     ``[rhs_lists * groups, k, n]``, or ``[..., n, k]``          ``operand_dtype``
    ``table``   ``[row_tiles, 4]``: first row in lhs, matrix in rhs,        int32
                first row in out, number of rows
    ``count``   ``[1]``, how many tiles of rows there are                   int32
    ``out``     ``[lists * m, n]``; rows that are in no tile are not        ``out_dtype``
                written
    ==========  ==========================================================  ==================

    Attributes:
      lists: number of lists of groups.
      lhs_lists, rhs_lists: whether each list has rows and matrices of its own (``lists``), or 1 serves all.
      groups: groups of a list.
      m: rows of a list.
      k: columns of lhs.
      transpose_rhs: the matrices are transposed.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    lists: int
    lhs_lists: int
    rhs_lists: int
    groups: int
    m: int
    k: int
    transpose_rhs: bool = False

    def __post_init__(self) -> None:
        multiples = gemm.alignment(
            self.operand_dtype, self.out_dtype, transpose_lhs=False, transpose_rhs=self.transpose_rhs
        )
        self._check(multiples | dict.fromkeys(("lists", "lhs_lists", "rhs_lists", "groups"), 1))

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        parts = ["grouped_gemm", self.operand_dtype, self.out_dtype]
        parts += ["transpose_rhs"] if self.transpose_rhs else []
        return "_".join([*parts, f"{self.lists}x{self.groups}_{self.m}x{self.n}x{self.k}"])

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (4,)

    @property
    def problem(self) -> tiling.GemmProblem:
        """What decides the tiles: products of twice the rows that a group has in the mean, as groups are uneven."""
        present = min(self.groups, self.m)
        rows = min(2 * math.ceil(self.m / present), self.m, _MOST_ROWS)
        batch = max(self.lists * present, math.ceil(self.lists * self.m / rows))
        return self._problem(batch=batch, m=rows, k=self.k, rhs_row="k" if self.transpose_rhs else "n")

    def row_tiles(self, block_m: int) -> int:
        """Length of the table for tiles of ``block_m`` rows."""
        return self.lists * groups.most_tiles(self.groups, self.m, block_m)

    def _planned(self, tiles: GemmTiles) -> tiling.GemmProblem:
        return dataclasses.replace(self.problem, batch=self.row_tiles(tiles.block_m), m=tiles.block_m)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        plan = self.plan(chip)
        bm, bn, bk, stages = dataclasses.astuple(plan.tiles)
        n_tiles, k_steps = math.ceil(self.n / bn), math.ceil(self.k / bk)
        dtype, matrix = self.operand_dtype, (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        lhs_type = T.Tensor((self.lhs_lists * self.m, self.k), dtype)
        rhs_type = T.Tensor((self.rhs_lists * self.groups, *matrix), dtype)
        table_type, count_type = T.Tensor((self.row_tiles(bm), 4), "int32"), T.Tensor((1,), "int32")
        out_type = T.Tensor((self.lists * self.m, self.n), self.out_dtype)

        @T.prim_func
        def grouped_gemm(lhs: lhs_type, rhs: rhs_type, table: table_type, count: count_type, out: out_type):
            with T.Kernel(plan.cores) as core:
                a = T.alloc_l1((bm, bk), dtype)
                b = T.alloc_l1((bn, bk), dtype)
                c = T.alloc_l0c((bm, bn), self.accumulator)
                eligible = {"multi_buffer_eligible": [c]} if plan.accumulators == 2 else None
                T.annotate_buffer_versions({a: stages, b: stages, c: plan.accumulators})
                for tile in T.Persistent([count[0] * n_tiles], plan.cores, core, group_size=1, annotations=eligible):
                    row = table[tile // n_tiles, 0]
                    group = table[tile // n_tiles, 1]
                    out_row = table[tile // n_tiles, 2]
                    rows = table[tile // n_tiles, 3]
                    n = tile % n_tiles * bn
                    for step in T.Pipelined(k_steps, num_stages=stages):
                        k = step * bk
                        if self.k % bk:  # TileLang cuts no copy in both dimensions, one at run time
                            T.copy(lhs[row : row + bm, k : k + bk], a)
                        else:
                            T.copy(lhs[row : row + rows, k : k + bk], a[0:rows, :])
                        if self.transpose_rhs:
                            T.copy(rhs[group, n : n + bn, k : k + bk], b)
                        else:
                            T.copy(rhs[group, k : k + bk, n : n + bn], b, transpose=True)
                        T.gemm(a, b, c, transpose_B=True, clear_accum=step == 0)
                    # The source is the whole tile: of a part TileLang takes the rows for the distance between blocks of
                    # columns. It does not cut such a copy at the array's edge.
                    T.copy(c, out[out_row : out_row + rows, n : n + T.min(bn, self.n - n)])

        return grouped_gemm


@dataclasses.dataclass(frozen=True, kw_only=True)
class KGroupedGemmKernel(_Kernel):
    """For each group the product of its rows of lhs, transposed, and of rhs. Its parameters in global memory, in order:

    ==========  ==========================================================  ==================
    ``lhs``     ``[places, m]``                                             ``operand_dtype``
    ``rhs``     ``[places, n]``                                             ``operand_dtype``
    ``table``   ``[groups, 2]``: where a group begins, and over how many    int32
                tiles of ``block_k`` rows it goes, at least one
    ``out``     ``[groups, m, n]``                                          ``out_dtype``
    ==========  ==========================================================  ==================

    Attributes:
      groups: number of groups.
      rows: how many rows all groups have together at most; ``places`` has room for them in tiles of one group each.
      m: columns of lhs, the rows of a result.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    groups: int
    rows: int
    m: int

    def __post_init__(self) -> None:
        multiples = gemm.alignment(self.operand_dtype, self.out_dtype, transpose_lhs=True, transpose_rhs=False)
        self._check({"m": multiples["m"], "n": multiples["n"], "rows": 1, "groups": 1})

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"k_grouped_gemm_{self.operand_dtype}_{self.out_dtype}_{self.groups}_{self.m}x{self.n}x{self.rows}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (3,)

    @property
    def problem(self) -> tiling.GemmProblem:
        """What decides the tiles: products over half of the rows of a mean group, since zeros fill up its last tile."""
        rows = math.ceil(self.rows / self.groups / 2)
        return self._problem(batch=self.groups, m=self.m, k=rows, lhs_row="m")

    def places(self, block_k: int) -> int:
        """Rows of the operands for tiles of ``block_k`` rows."""
        return block_k * groups.most_blocks(self.groups, self.rows, block_k)

    def _planned(self, tiles: GemmTiles) -> tiling.GemmProblem:
        return self.problem

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        plan = self.plan(chip)
        bm, bn, bk, stages = dataclasses.astuple(plan.tiles)
        m_tiles, n_tiles = math.ceil(self.m / bm), math.ceil(self.n / bn)
        tiles, dtype = self.groups * m_tiles * n_tiles, self.operand_dtype
        lhs_type, rhs_type = (T.Tensor((self.places(bk), columns), dtype) for columns in (self.m, self.n))
        table_type = T.Tensor((self.groups, 2), "int32")
        out_type = T.Tensor((self.groups, self.m, self.n), self.out_dtype)

        @T.prim_func
        def k_grouped_gemm(lhs: lhs_type, rhs: rhs_type, table: table_type, out: out_type):
            with T.Kernel(plan.cores) as core:
                a = T.alloc_l1((bm, bk), dtype)
                b = T.alloc_l1((bn, bk), dtype)
                c = T.alloc_l0c((bm, bn), self.accumulator)
                eligible = {"multi_buffer_eligible": [c]} if plan.accumulators == 2 else None
                T.annotate_buffer_versions({a: stages, b: stages, c: plan.accumulators})
                for tile in T.Persistent([tiles], plan.cores, core, group_size=1, annotations=eligible):
                    group = tile // (m_tiles * n_tiles)
                    m = tile // n_tiles % m_tiles * bm
                    n = tile % n_tiles * bn
                    first = table[group, 0]
                    steps = table[group, 1]
                    for step in T.Pipelined(steps, num_stages=stages):
                        row = first + step * bk
                        T.copy(lhs[row : row + bk, m : m + bm], a, transpose=True)
                        T.copy(rhs[row : row + bk, n : n + bn], b, transpose=True)
                        T.gemm(a, b, c, transpose_B=True, clear_accum=step == 0)
                    T.copy(c, out[group, m : m + bm, n : n + bn])

        return k_grouped_gemm
