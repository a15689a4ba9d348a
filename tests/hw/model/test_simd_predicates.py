"""Predicates and permutations of lanes, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.hw import programs
from tests.hw import simd_programs as simd
from tests.hw.simd_programs import (
    DTYPES,
    FLOATS,
    active,
    evaluate,
    item,
    lanes,
    operand,
    operands,
    predicate,
    pset,
    register,
)

ZEROING = ("MODE_ZEROING",)


def _bits(row):
    """The 256 bits of a predicate."""
    return np.unpackbits(row, bitorder="little").astype(bool)


def _spread(x, width):
    """Lanes of ``width`` bytes as bits."""
    bits = np.zeros(256, bool)
    bits[::width] = x
    return bits


PATTERNS = {
    "ALL": lambda n: np.ones(n, bool),
    "ALLF": lambda n: np.zeros(n, bool),
    **{f"VL{k}": lambda n, k=k: np.arange(n) < k for k in (1, 2, 3, 4, 8, 16, 32, 64, 128)},
    "M3": lambda n: np.arange(n) % 3 == 0,
    "M4": lambda n: np.arange(n) % 4 == 0,
    "H": lambda n: np.arange(n) < n / 2,
    "Q": lambda n: np.arange(n) < n / 4,
}


def test_patterns():
    cases = [(name, pattern, bits) for name in ("pset", "pge") for pattern in PATTERNS for bits in (8, 16, 32)]
    exprs = [
        register(name, programs.const(bits), dtype="bool", modes=(f"PAT_{pattern}",)) for name, pattern, bits in cases
    ]
    for (_, pattern, bits), row in zip(cases, evaluate(exprs), strict=True):
        np.testing.assert_array_equal(_bits(row), _spread(PATTERNS[pattern](2048 // bits), bits // 8), err_msg=pattern)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_masks_of_a_count(bits):
    counts = [0, 1, 13, 63, 64, 200, 1000]
    exprs = [register("update_mask", programs.const(n), programs.const(bits), dtype="bool") for n in counts]
    for count, row in zip(counts, evaluate(exprs), strict=True):
        np.testing.assert_array_equal(_bits(row), _spread(np.arange(2048 // bits) < count, bits // 8))


COMBINED = {
    "pand": lambda x, y, m: x & y & m,
    "por": lambda x, y, m: (x | y) & m,
    "pxor": lambda x, y, m: (x ^ y) & m,
    "psel": lambda x, y, m: np.where(m, x, y),
}


def test_bitwise():
    x, y, m = (_bits(row) for row in operands()["bits"][:3])
    words = _spread(np.ones(64, bool), 4)
    exprs = [register(name, predicate(0), predicate(1), predicate(2), dtype="bool") for name in COMBINED]
    # Of different widths: the patterns of 32-bit elements with random bits.
    exprs += [register(name, predicate(0), predicate(1), pset(32), dtype="bool") for name in COMBINED]
    exprs += [register("pnot", predicate(0), mask, dtype="bool") for mask in (predicate(2), pset(32))]
    expected = [f(x, y, m) for f in COMBINED.values()] + [f(x, y, words) for f in COMBINED.values()]
    expected += [~x & m, ~x & words]
    for want, row in zip(expected, evaluate(exprs), strict=True):
        np.testing.assert_array_equal(_bits(row), want)


def _halved(bits, low):
    packed = np.zeros(256, bool)
    packed[:128] = bits[::2]
    return packed if low else np.roll(packed, 128)


def test_packs_and_interleaves_of_bits():
    x, y = (_bits(row) for row in operands()["bits"][:2])
    exprs, expected = [], []
    for half in ("LOWER", "HIGHER"):
        exprs.append(register("ppack", predicate(0), dtype="bool", modes=(half,)))
        expected.append(_halved(x, half == "LOWER"))
        exprs.append(register("punpack", predicate(0), dtype="bool", modes=(half,)))
        expected.append(_spread(x[:128] if half == "LOWER" else x[128:], 2))
    for bits in (8, 16, 32):
        group = bits // 8
        left, right = x.reshape(-1, group), y.reshape(-1, group)
        both = np.stack([left, right], axis=1).reshape(2, 256)
        joined = np.concatenate([left, right])
        apart = [joined[::2].ravel(), joined[1::2].ravel()]
        for name, want in (("pintlv", both), ("pdintlv", apart)):
            pair = register(name, predicate(0), predicate(1), programs.const(bits), dtype="bool")
            exprs += [item(pair, n, "bool") for n in (0, 1)]
            expected += list(want)
    for want, row in zip(expected, evaluate(exprs), strict=True):
        np.testing.assert_array_equal(_bits(row), want)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def test_comparisons_and_selection():
    values, rows = operands(), operands()["bits"]
    exprs, expected = [], []
    for dtype in DTYPES:
        width = jnp.dtype(dtype).itemsize
        x, y = (values[dtype][row].astype(np.float64) for row in (0, 1))
        mask = active(rows[0], dtype)
        for name, function in COMPARISONS.items():
            exprs.append(register("vcmp", operand(dtype), operand(dtype, 1), predicate(0), dtype="bool", modes=(name,)))
            expected.append(_spread(function(x, y) & mask, width))
            exprs.append(
                register("vcmps", operand(dtype), programs.const(1, dtype), predicate(0), dtype="bool", modes=(name,))
            )
            expected.append(_spread(function(x, 1) & mask, width))
    for want, row in zip(expected, evaluate(exprs), strict=True):
        np.testing.assert_array_equal(_bits(row), want)
    selected = [register("vsel", operand(dtype), operand(dtype, 1), predicate(0), dtype=dtype) for dtype in DTYPES]
    for dtype, row in zip(DTYPES, evaluate(selected), strict=True):
        want = np.where(active(rows[0], dtype), *values[dtype][:2])
        np.testing.assert_array_equal(row.view(want.dtype), want)


# --- permutations of lanes ------------------------------------------------------------------------------------------

_PACKED = {"uint32": "uint16", "int32": "int16", "float32": "float16", "uint16": "uint8", "int16": "int8"}
_UNPACKED = {"uint8": "uint16", "int8": "int16", "uint16": "uint32", "int16": "int32"}


def _permutations():
    """Expressions and their lanes."""
    values, rows = operands(), operands()["bits"]
    for dtype in DTYPES:
        x, y, n = values[dtype][0], values[dtype][1], lanes(dtype)
        mask, of = active(rows[1], dtype), values[dtype].dtype
        zero = np.zeros_like(x)
        for name, both in (
            ("vintlv", np.stack([x, y], axis=1).reshape(2, n)),
            ("vdintlv", np.concatenate([x, y]).reshape(n, 2).T),
        ):
            pair = register(name, operand(dtype), operand(dtype, 1), dtype=dtype)
            yield from ((item(pair, part, dtype), both[part]) for part in (0, 1))
        yield (
            register("vdup", programs.const(3, dtype), predicate(1), dtype=dtype, modes=ZEROING),
            np.where(mask, np.asarray(3, of), zero),
        )
        for position, lane in (("LOWEST", 0), ("HIGHEST", -1)):
            modes = (f"POS_{position}", *ZEROING)
            yield (
                register("vdupv", operand(dtype), predicate(1), dtype=dtype, modes=modes),
                np.where(mask, x[lane], zero),
            )
        for order, step in (("INC_ORDER", 1), ("DEC_ORDER", -1)):
            ramp = (5 + step * np.arange(n)).astype(of)
            yield register("vci", programs.const(5, dtype), dtype=dtype, modes=(order,)), ramp
        squeezed = zero.copy()
        squeezed[: mask.sum()] = x[mask]
        yield register("vsqz", operand(dtype), predicate(1), dtype=dtype, modes=("MODE_STORED",)), squeezed
        index = f"uint{8 * of.itemsize}"
        yield (
            register("vselr", operand(dtype), operand(index, 2), dtype=dtype),
            x[values[index][2].astype(np.int64) % n],
        )
        other = f"int{8 * of.itemsize}"
        yield register("reinterpret", operand(dtype), dtype=other), x.view(other)
    for dtype in ("int8", "int16", "int32"):
        mask = active(rows[1], dtype)
        yield register("vusqz", predicate(1), dtype=dtype), (np.cumsum(mask) - mask).astype(dtype)
    for dtype, narrow in _PACKED.items():
        low = values[dtype][0].view(narrow)[::2]
        parts = [low, np.zeros_like(low)]
        for half in ("LOWER", "HIGHER"):
            yield (
                register("vpack", operand(dtype), dtype=narrow, modes=(half,)),
                np.concatenate(parts if half == "LOWER" else parts[::-1]),
            )
    for dtype, wide in _UNPACKED.items():
        x, half_count = values[dtype][0], lanes(dtype) // 2
        for half, part in (("LOWER", x[:half_count]), ("HIGHER", x[half_count:])):
            yield register("vunpack", operand(dtype), dtype=wide, modes=(half,)), part.astype(wide)


def test_permutations():
    cases = list(_permutations())
    for (expr, want), row in zip(cases, evaluate([expr for expr, _ in cases]), strict=True):
        got = row.view(want.dtype)
        message = f"{expr.name} {expr.dtype} {expr.modes}"
        if want.dtype.name in FLOATS:  # bytes, so that NaNs of other types compare
            got, want = got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8)
        np.testing.assert_array_equal(got, want, err_msg=message)


def test_a_scalar_that_differs_from_iteration_to_iteration():
    # A ramp and a broadcast that begin at the loop's index.
    ramp = register("vci", programs.var("i"), dtype="int32", modes=("INC_ORDER",))
    total = register("vadds", ramp, programs.var("i"), pset(32), dtype="int32", modes=ZEROING)
    body = [programs.loop("i", 4, simd.vsts("out_ub", "i", 0, value=total, dist="NORM_B32"))]
    (out,) = simd.run(body, {}, {"out": np.zeros((4, 64), np.int32)})
    np.testing.assert_array_equal(out, 2 * np.arange(4)[:, None] + np.arange(64))
