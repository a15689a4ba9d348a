"""``swiglu``: ``silu(gate) * up`` on the vector units.

No element depends on another, so that the operands are one long row each, of any length. A grid of as many blocks as
there are vector units walks over tiles of it. The result replaces a tile of ``gate`` where it lies and is stored from
there: while one is computed, the next is loaded and the one before is stored.
"""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses
import math

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.lowering import artifact, tiling
from glass_jax.lowering.tilelang.kernels import vectors
from glass_jax.lowering.tiling import DTYPES, LANES

_TILE_BYTES = 32 * 1024  # twice what a copy needs to run at full rate; a ring of three and one of two fit every chip
_RING = 3  # of gate: a tile that is loaded, one that is computed, one that is stored


@dataclasses.dataclass(frozen=True)
class SwigluKernel:
    """The kernel for one size. Its parameters in global memory: ``gate``, ``up`` and ``out``, each ``[elements]``.

    Arithmetic is float32; there is one rounding, to ``dtype``.

    Attributes:
      elements: of each operand, any positive number.
      dtype: one of ``tiling.DTYPES``.

    Raises:
      HardwareConstraintError: an extent or dtype is not one of those above.
    """

    elements: int
    dtype: str

    def __post_init__(self) -> None:
        artifact.check_choice("swiglu", "dtype", self.dtype, DTYPES)
        if self.elements < 1:
            raise errors.HardwareConstraintError(f"swiglu kernel: elements={self.elements} must be positive")

    @property
    def name(self) -> str:
        """A C identifier that says what is computed."""
        return f"swiglu_{self.dtype}_{self.elements}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The result is the last parameter."""
        return (2,)

    @property
    def pass_configs(self) -> tuple[()]:
        """TileLang's defaults."""
        return ()

    def plan(self, chip: str) -> tuple[int, int]:
        """Elements of a tile, whole registers, and the number of blocks to launch."""
        cores = chips.get(chip).vector_cores
        share = math.ceil(math.ceil(self.elements / cores) / LANES) * LANES
        tile = min(_TILE_BYTES // tiling.itemsize(self.dtype), share)
        return tile, min(cores, math.ceil(self.elements / tile))

    def describe(self, chip: str) -> str:
        """The tiling in one line."""
        tile, cores = self.plan(chip)
        tiles = math.ceil(self.elements / tile)
        return f"{tiles} tiles of {tile} elements on {cores} vector units in {math.ceil(tiles / cores)} waves"

    def fingerprint(self, chip: str) -> str:
        """This file and everything that decides what :meth:`build` makes."""
        return artifact.fingerprint(self, self.plan(chip), __file__, vectors.__file__)

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T
        from tilelang.ascend.language import simd as S

        (tile, cores), dtype = self.plan(chip), self.dtype
        tiles = math.ceil(self.elements / tile)
        waves = math.ceil(tiles / cores)
        load, store = vectors.load(dtype), vectors.store(dtype)
        # The last digits of an exact quotient are not worth their time in a result of 16 bits.
        quotient = "exact" if dtype == "float32" else "ftz_true"
        gate_type, up_type, out_type = (T.Tensor((self.elements,), dtype) for _ in range(3))

        @T.prim_func
        def swiglu(gate: gate_type, up: up_type, out: out_type):
            with T.Kernel(cores) as core:
                g = T.alloc_shared((1, tile), dtype)
                u = T.alloc_shared((1, tile), dtype)
                T.annotate_buffer_versions({g: min(_RING, waves), u: min(2, waves)})
                for number in T.Persistent([tiles], cores, core, group_size=1):
                    start = number * tile
                    T.copy(gate[start : start + tile], g[0, 0:tile])
                    T.copy(up[start : start + tile], u[0, 0:tile])
                    with T.SimdVF():
                        full = S.pset(32)
                        for column in range(0, tile, LANES):
                            x = load(g, 0, column)
                            divisor = S.vadds(S.vexp(S.vneg(x, full), full), T.float32(1.0), full)
                            silu = S.vdiv(x, divisor, full, precision=quotient)
                            store(g, 0, column, S.vmul(silu, load(u, 0, column), full), full)
                    T.copy(g[0, 0:tile], out[start : start + tile])

        return swiglu
