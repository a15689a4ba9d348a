"""Independent judges of quantize and scaled_gemm: NumPy with ml_dtypes, exact but for sums, which are float64."""

import math

import ml_dtypes
import numpy as np

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def quantize(x, block, dtype="float8_e4m3fn", scale="float32"):
    """Values and scales of ``x`` ``[*batch, rows, columns]``, one block after the other; scales are float32 numbers."""
    x = np.asarray(x).astype(np.float32)
    counts = [math.ceil(size / per) for size, per in zip(x.shape[-2:], block, strict=True)]
    values, scales = np.zeros(x.shape, getattr(ml_dtypes, dtype)), np.zeros([*x.shape[:-2], *counts], np.float32)
    for place in np.ndindex(*scales.shape):
        rows, columns = (slice(i * per, (i + 1) * per) for i, per in zip(place[-2:], block, strict=True))
        part = (*place[:-2], rows, columns)
        s = np.float32(max(np.abs(x[part]).max(), np.float32(1e-4)) * np.float32(1 / LARGEST[dtype]))
        if scale == "e8m0":
            mantissa, exponent = np.frexp(s)  # s = mantissa * 2**exponent, and mantissa in [0.5, 1)
            s = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
        scales[place] = s
        values[part] = (x[part] / s).astype(values.dtype)
    return values, scales


def multiplied_out(values, scales, block) -> np.ndarray:
    """``[*batch, rows, columns]`` times the scales of its blocks, in float64."""
    values, scales = f64(values), f64(scales)
    spread = np.repeat(np.repeat(scales, block[0], -2), block[1], -1)
    with np.errstate(invalid="ignore"):  # of a scale that is infinite
        return values * spread[..., : values.shape[-2], : values.shape[-1]]


def scaled_gemm(lhs, lhs_scale, rhs, rhs_scale, lhs_block, rhs_block) -> np.ndarray:
    """The product of ``lhs`` ``[*batch, M, K]`` and ``rhs`` ``[*batch, N, K]``."""
    w = multiplied_out(rhs, rhs_scale, rhs_block)
    return multiplied_out(lhs, lhs_scale, lhs_block) @ np.swapaxes(w, -1, -2)


def calc_diff(x, y) -> float:
    """How far two arrays are apart, as DeepGEMM's tests measure it: 0 for equal ones, 2 for opposite ones."""
    x, y = f64(x), f64(y)
    return 1 - 2 * float((x * y).sum() / (x * x + y * y).sum())
