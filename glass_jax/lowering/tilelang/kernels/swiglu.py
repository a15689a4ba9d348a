"""``swiglu``: ``silu(gate) * up`` on the vector units."""

# Annotations are evaluated here: TileLang reads those of a kernel's parameters, which name local variables.
import dataclasses

from glass_jax.lowering.tilelang.kernels.elementwise import ElementwiseKernel


@dataclasses.dataclass(frozen=True)
class SwigluKernel(ElementwiseKernel):
    """The kernel for one size."""

    operation = "swiglu"
    operands = 2

    def build(self, chip: str) -> object:
        """The TileLang PrimFunc for ``chip``."""
        import tilelang.ascend.language as T
        from tilelang.ascend.language import simd as S

        # The last digits of an exact quotient are not worth their time in a result of 16 bits.
        quotient = "exact" if self.dtype == "float32" else "ftz_true"

        @T.macro
        def formula(gate, up, mask):
            divisor = S.vadds(S.vexp(S.vneg(gate, mask), mask), T.float32(1.0), mask)
            return S.vmul(S.vdiv(gate, divisor, mask, precision=quotient), up, mask)

        tiles, array = self.tiles(chip, formula), self.array

        @T.prim_func
        def swiglu(gate: array, up: array, out: array):
            tiles(gate, up, out)

        return swiglu
