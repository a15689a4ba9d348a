"""``rms_norm`` and ``layer_norm`` on the vector units, a few whole rows at a time.

Rows are independent, so a grid of as many blocks as there are vector units walks over tiles of rows. A tile is loaded,
normalized where it lies and stored, in a ring of buffers: while one is computed, the next is loaded and the one before
is stored. ``gamma`` and ``beta`` stay in the unified buffer.

The statistics of all rows of a tile come first and the results after them, so that the long way from a row's sum to its
factor (a reduction across lanes, a root, a division) is gone once for 64 rows and not once for each.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
from typing import Any

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tiling import DTYPES, LANES

_SUMS = 4  # of a row side by side, so that an addition need not wait for the one before
_STEP = _SUMS * LANES
_TILE_BYTES = 32 * 1024  # twice what a copy needs to run at full rate
_MAX_ROWS = LANES  # one register holds a number for each row of a tile
_RING = 3  # a tile that is loaded, one that is computed, one that is stored


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the rows are divided.

    Attributes:
      rows: rows of a tile.
      tiles: number of tiles.
      cores: number of blocks to launch.
      ring: buffers that tiles go through.
    """

    rows: int
    tiles: int
    cores: int
    ring: int


@dataclasses.dataclass(frozen=True)
class NormalizationKernel:
    """The kernel for one shape. Its parameters in global memory, in order:

    ========== ==================== ===========
    ``x``      ``[rows, columns]``  ``dtype``
    ``gamma``  ``[columns]``        float32
    ``beta``   ``[columns]``        float32, if ``centered``
    ``out``    ``[rows, columns]``  ``dtype``
    ========== ==================== ===========

    Statistics and arithmetic are float32; there is one rounding, to ``dtype``.

    Attributes:
      centered: ``layer_norm``, which subtracts the mean of a row; else ``rms_norm``.
      rows, columns: extents, any positive number.
      dtype: one of ``tiling.DTYPES``.
      eps: added to the mean of squares.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    centered: bool
    rows: int
    columns: int
    dtype: str
    eps: float

    def __post_init__(self) -> None:
        artifact.check_choice("normalization", "dtype", self.dtype, DTYPES)
        for field in ("rows", "columns"):
            if (size := getattr(self, field)) < 1:
                raise errors.HardwareConstraintError(f"normalization kernel: {field}={size} must be positive")

    @property
    def operation(self) -> str:
        """The operation that the kernel is of."""
        return "layer_norm" if self.centered else "rms_norm"

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"{self.operation}_{self.dtype}_{self.rows}x{self.columns}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (3 if self.centered else 2,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    @property
    def width(self) -> int:
        """Columns of a row in the unified buffer: whole steps of the sums."""
        return math.ceil(self.columns / _STEP) * _STEP

    def plan(self, chip: str) -> Plan:
        """The tiles for ``chip``: 32 KiB where there are rows enough for all its vector units, else fewer rows.

        Raises:
          OutOfOnChipMemoryError: one row does not fit.
        """
        target = chips.get(chip)
        row = self.width * tiling.itemsize(self.dtype)
        # gamma and the factors of rows, beta and their means.
        vectors_bytes = (1 + self.centered) * (self.width + LANES) * 4
        have, ring = target.capacity(Space.UB) - vectors_bytes, _RING
        while ring > 1 and ring * row > have:
            ring -= 1
        if row > have:
            raise errors.OutOfOnChipMemoryError(
                f"{self.operation}: a row of {self.columns} {self.dtype} elements takes {row} bytes of the unified "
                f"buffer beside {vectors_bytes} bytes of gamma{' and beta' * self.centered}, and {target.name} has "
                f"{target.capacity(Space.UB)} in all. Normalize shorter rows, or 16-bit ones"
            )
        rows = min(max(1, min(_TILE_BYTES, have // ring) // row), math.ceil(self.rows / target.vector_cores), _MAX_ROWS)
        tiles = math.ceil(self.rows / rows)
        cores = min(tiles, target.vector_cores)
        return Plan(rows, tiles, cores, min(ring, math.ceil(tiles / cores)))

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        plan = self.plan(chip)
        return (
            f"tiles of {plan.rows} rows, {plan.tiles} tiles on {plan.cores} vector units in "
            f"{math.ceil(plan.tiles / plan.cores)} waves, {plan.ring} buffers of "
            f"{plan.rows * self.width * tiling.itemsize(self.dtype)} bytes"
        )

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, self.plan(chip), __file__, vectors.__file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T

        plan, columns, width, dtype = self.plan(chip), self.columns, self.width, self.dtype
        rows = plan.rows
        # Rows that are no multiple of 32 bytes would move into their neighbours' places.
        fill = {"pad_value": 0} if columns * tiling.itemsize(dtype) % chips.C0_BYTES else {}
        moments, apply = _moments(self, rows), _apply(self, rows)

        @T.macro
        def normalize(x, gamma, beta, out):
            with T.Kernel(plan.cores) as core:
                tile = T.alloc_shared((rows, width), dtype)
                mean = T.alloc_shared((LANES,), "float32")
                factor = T.alloc_shared((LANES,), "float32")
                scale = T.alloc_shared((1, width), "float32")
                T.annotate_buffer_versions({tile: plan.ring})
                T.copy(gamma[0:columns], scale[0, 0:columns])
                if beta is not None:
                    shift = T.alloc_shared((1, width), "float32")
                    T.copy(beta[0:columns], shift[0, 0:columns])
                for number in T.Persistent([plan.tiles], plan.cores, core, group_size=1):
                    row = number * rows
                    T.copy(x[row : row + rows, 0:columns], tile[0:rows, 0:columns], **fill)
                    with T.SimdVF():
                        moments(tile, mean, factor)
                        apply(tile, mean, factor, scale, None if beta is None else shift)
                    T.copy(tile[0:rows, 0:columns], out[row : row + rows, 0:columns])

        x_type, out_type = (T.Tensor((self.rows, columns), dtype) for _ in range(2))
        gamma_type, beta_type = (T.Tensor((columns,), "float32") for _ in range(2))
        if self.centered:

            @T.prim_func
            def layer_norm(x: x_type, gamma: gamma_type, beta: beta_type, out: out_type):
                normalize(x, gamma, beta, out)

            return layer_norm

        @T.prim_func
        def rms_norm(x: x_type, gamma: gamma_type, out: out_type):
            normalize(x, gamma, None, out)

        return rms_norm


def _moments(kernel: NormalizationKernel, rows: int) -> Any:
    """The macro ``moments(tile, mean, factor)``: of each row the mean, if it is subtracted, and 1 / deviation."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    columns, width, centered = kernel.columns, kernel.width, kernel.centered
    load, ragged = vectors.load(kernel.dtype), columns < width
    invert = vectors.inverse_deviation(columns, kernel.eps)

    @T.macro
    def part(tile, row, column, center):
        """A register of a row less ``center``, 0 beyond the row's end."""
        full = S.pset(32)
        mask = S.update_mask(T.max(columns - column, 0), 32) if ragged else full
        if center is not None:
            return S.vsub(load(tile, row, column), center, mask)
        if ragged:
            return S.vsel(load(tile, row, column), S.vdup(0.0, "float32", full), mask)
        return load(tile, row, column)

    @T.macro
    def add_values(sums, i, tile, row, column, center):
        sums[i] = S.vadd(sums[i], part(tile, row, column, center))

    @T.macro
    def add_squares(sums, i, tile, row, column, center):
        x = part(tile, row, column, center)
        sums[i] = S.vadd(sums[i], S.vmul(x, x))

    def sums_of_rows(add):
        @T.macro
        def run(tile, mean, out):
            full = S.pset(32)
            for row in range(rows):
                center = None if mean is None else S.vld(mean[row], "BRC_B32")
                sums = S.alloc_local(_SUMS, "float32")
                for i in T.unroll(_SUMS, explicit=True):
                    sums[i] = S.vdup(0.0, "float32", full)
                for column in range(0, width, _STEP):
                    for i in T.unroll(_SUMS, explicit=True):
                        add(sums, i, tile, row, column + i * LANES, center)
                total = S.vadd(S.vadd(sums[0], sums[1], full), S.vadd(sums[2], sums[3], full), full)
                S.vsts(out[row], S.vcadd(total, full), full, "ONEPT_B32")
            S.mem_bar("VST_VLD")

        return run

    total, squares = sums_of_rows(add_values), sums_of_rows(add_squares)

    @T.macro
    def moments(tile, mean, factor):
        full = S.pset(32)
        if centered:
            total(tile, None, mean)
            S.vsts(mean[0], S.vmuls(S.vld(mean[0]), T.float32(1 / columns), full), full)
            S.mem_bar("VST_VLD")
        squares(tile, mean if centered else None, factor)
        invert(factor, full)
        S.mem_bar("VST_VLD")

    return moments


def _apply(kernel: NormalizationKernel, rows: int) -> Any:
    """The macro ``apply(tile, mean, factor, scale, shift)``: the result in the place of each row."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    load, store = vectors.load(kernel.dtype), vectors.store(kernel.dtype)
    columns, width, centered = kernel.columns, kernel.width, kernel.centered

    @T.macro
    def apply(tile, mean, factor, scale, shift):
        full = S.pset(32)
        for row in range(rows):
            by = S.vld(factor[row], "BRC_B32")
            center = S.vld(mean[row], "BRC_B32") if centered else None
            for column in range(0, width, LANES):
                mask = S.update_mask(T.max(columns - column, 0), 32) if columns < width else full
                x = load(tile, row, column)
                if centered:
                    normal = S.vmul(S.vmul(S.vsub(x, center, full), by, full), S.vld(scale[0, column]), full)
                    store(tile, row, column, S.vadd(normal, S.vld(shift[0, column]), full), mask)
                else:
                    store(tile, row, column, S.vmul(S.vmul(x, by, full), S.vld(scale[0, column]), full), mask)

    return apply
