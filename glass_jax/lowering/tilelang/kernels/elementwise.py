"""Kernels whose results depend, element for element, on operands of one shape: what they have in common.

No element depends on another, so that the operands are one long row each, of any length. A grid of as many blocks as
there are vector units walks over tiles of it. The result replaces a tile of the first operand where it lies and is
stored from there: while one is computed, the next is loaded and the one before is stored.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math
import sys
from typing import Any, ClassVar

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tiling import DTYPES, LANES

_TILE_BYTES = 32 * 1024  # twice what a copy needs to run at full rate; a ring of three and one of two fit every chip
_RING = 3  # of the first operand: a tile that is loaded, one that is computed, one that is stored


@dataclasses.dataclass(frozen=True)
class ElementwiseKernel:
    """A kernel for one size. Its parameters in global memory: the operands and the result, each ``[elements]``.

    Arithmetic is float32; there is one rounding, to ``dtype``. A subclass names its ``operation``, says how many
    ``operands`` it has, 1 or 2, and writes ``build``: the formula of a register, and the parameters for :meth:`tiles`.

    Attributes:
      elements: of each operand, any positive number.
      dtype: one of ``tiling.DTYPES``.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    operation: ClassVar[str]
    operands: ClassVar[int]

    elements: int
    dtype: str

    def __post_init__(self) -> None:
        artifact.check_choice(self.operation, "dtype", self.dtype, DTYPES)
        if self.elements < 1:
            raise errors.HardwareConstraintError(f"{self.operation} kernel: elements={self.elements} must be positive")

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"{self.operation}_{self.dtype}_{self.elements}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (self.operands,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    def plan(self, chip: str) -> tuple[int, int]:
        """Elements of a tile, whole registers, and the number of blocks to launch."""
        cores = chips.get(chip).vector_cores
        share = math.ceil(self.elements / cores)
        tile = min(_TILE_BYTES // tiling.itemsize(self.dtype), math.ceil(share / LANES) * LANES)
        return tile, min(cores, math.ceil(self.elements / tile))

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        tile, cores = self.plan(chip)
        tiles = math.ceil(self.elements / tile)
        return f"{tiles} tiles of {tile} elements on {cores} vector units in {math.ceil(tiles / cores)} waves"

    def fingerprint(self, chip: str) -> str:
        """The kernel's file, this one and everything that decides what ``build`` makes."""
        own = sys.modules[type(self).__module__].__file__
        return artifact.fingerprint(self, self.plan(chip), own, __file__, vectors.__file__)

    def array(self) -> Any:
        """The type of each parameter."""
        import tilelang.ascend.language as T

        return T.Tensor((self.elements,), self.dtype)

    def tiles(self, chip: str, formula: Any) -> Any:
        """The macro ``tiles(x, y, out)``: the whole kernel; ``y`` is None if there is one operand.

        Args:
          chip: for which.
          formula: the macro ``formula(x, mask)``, or ``formula(x, y, mask)``: a register of float32 results from those
            of the operands.
        """
        import tilelang.ascend.language as T
        from tilelang.ascend.language import simd as S

        (tile, cores), dtype = self.plan(chip), self.dtype
        count = math.ceil(self.elements / tile)
        waves = math.ceil(count / cores)
        load, store = vectors.load(dtype), vectors.store(dtype)

        @T.macro
        def tiles(x, y, out):
            with T.Kernel(cores) as core:
                a = T.alloc_shared((1, tile), dtype)
                T.annotate_buffer_versions({a: min(_RING, waves)})
                if y is not None:
                    b = T.alloc_shared((1, tile), dtype)
                    T.annotate_buffer_versions({b: min(_RING - 1, waves)})
                for number in T.Persistent([count], cores, core, group_size=1):
                    start = number * tile
                    T.copy(x[start : start + tile], a[0, 0:tile])
                    if y is not None:
                        T.copy(y[start : start + tile], b[0, 0:tile])
                    with T.SimdVF():
                        full = S.pset(32)
                        for column in range(0, tile, LANES):
                            if y is None:
                                result = formula(load(a, 0, column), full)
                            else:
                                result = formula(load(a, 0, column), load(b, 0, column), full)
                            store(a, 0, column, result, full)
                    T.copy(a[0, 0:tile], out[start : start + tile])

        return tiles
