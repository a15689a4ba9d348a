"""Parts of SIMD regions: operands of any float type as registers of 64 float32 elements; the GELU of a register."""

import math
from typing import Any

_TANH_SLOPE = -2 * math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715 * _TANH_SLOPE

# erfc(a) = (c1 t + c2 t^2 + ... + c5 t^5) exp(-a^2) with t = 1 / (1 + p a), for a >= 0; the error is at most 1.5e-7:
# Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 7.1.26.
_ERFC_P = 0.3275911
_ERFC_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def load(dtype: str) -> Any:
    """The macro ``load(buffer, row, column)``: 64 elements of ``dtype``, widened to float32."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def as_it_is(buffer, row, column):
        return S.vld(buffer[row, column])

    @T.macro
    def widened(buffer, row, column):
        return S.vcvt(S.vld(buffer[row, column], "UNPK_B16"), "float32")

    return as_it_is if dtype == "float32" else widened


def store(dtype: str) -> Any:
    """The macro ``store(buffer, row, column, value, mask)``: 64 float32 elements, rounded to ``dtype``."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def as_it_is(buffer, row, column, value, mask):
        S.vsts(buffer[row, column], value, mask)

    @T.macro
    def narrowed(buffer, row, column, value, mask):
        S.vsts(buffer[row, column], S.vcvt(value, dtype, mask, sat=False), mask, "PK_B32")

    return as_it_is if dtype == "float32" else narrowed


def gelu(approximate: bool) -> Any:
    """The macro ``gelu(z, mask)``: of a register of float32 elements, where ``mask`` says so.

    Args:
      approximate: ``z / 2 (1 + tanh u)`` with ``u = sqrt(2 / pi) (z + 0.044715 z^3)``, as ``z / (1 + exp(-2 u))``. Else
        ``z / 2 (1 + erf(z / sqrt 2))``, as ``max(z, 0) - |z| / 2 erfc(|z| / sqrt 2)``, in which nothing cancels for
        large negative ``z``.
    """
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def by_tanh(z, mask):
        square = S.vmul(z, z, mask)
        slope = S.vadds(S.vmuls(square, T.float32(_TANH_CUBE), mask), T.float32(_TANH_SLOPE), mask)
        return S.vdiv(z, S.vadds(S.vexp(S.vmul(z, slope, mask), mask), T.float32(1.0), mask), mask)

    @T.macro
    def by_erfc(z, mask):
        magnitude = S.vabs(z, mask)
        a = S.vmuls(magnitude, T.float32(math.sqrt(0.5)), mask)
        divisor = S.vadds(S.vmuls(a, T.float32(_ERFC_P), mask), T.float32(1.0), mask)
        t = S.vdiv(S.vdup(1.0, "float32", mask), divisor, mask)
        c1, c2, c3, c4, c5 = (T.float32(c / 2) for c in _ERFC_COEFFICIENTS)
        sum4 = S.vadds(S.vmuls(t, c5, mask), c4, mask)
        sum3 = S.vadds(S.vmul(sum4, t, mask), c3, mask)
        sum2 = S.vadds(S.vmul(sum3, t, mask), c2, mask)
        sum1 = S.vmul(S.vadds(S.vmul(sum2, t, mask), c1, mask), t, mask)
        half_erfc = S.vmul(sum1, S.vexp(S.vneg(S.vmul(a, a, mask), mask), mask), mask)
        return S.vsub(S.vrelu(z, mask), S.vmul(magnitude, half_erfc, mask), mask)

    return by_tanh if approximate else by_erfc


def inverse_deviation(columns: int, eps: float) -> Any:
    """The macro ``invert(squares, mask)``: ``1 / sqrt(squares / columns + eps)`` of 64 rows, in place."""
    import tilelang.ascend.language as T
    from tilelang.ascend.language import simd as S

    @T.macro
    def invert(squares, mask):
        variance = S.vmuls(S.vld(squares[0]), T.float32(1 / columns), mask)
        deviation = S.vsqrt(S.vadds(variance, T.float32(eps), mask), mask)
        S.vsts(squares[0], S.vdiv(S.vdup(1.0, "float32", mask), deviation, mask), mask)

    return invert
