"""Register operations that compute each lane by itself, carries and reductions, against NumPy."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax.hw.ir import program as ir
from tests.hw import programs
from tests.hw import simd_programs as simd
from tests.hw.simd_programs import (
    DTYPES,
    FLOATS,
    INTEGERS,
    SIGNED,
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
COUNT = 5  # by how many bits the scalar forms shift


def _shifts(x):
    """Amounts that a shift of that type may have."""
    return (x.astype(np.int64) & 7).astype(x.dtype)


def _truncated(x, y):
    """The quotient toward zero, exactly."""
    quotients = [
        abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1) for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    return np.array(quotients).astype(x.dtype)


# Name, types, function of float64 or integer lanes, operands, and whether it may be off in the last place or so.
LANEWISE = [
    ("vadd", DTYPES, np.add, 2, False),
    ("vsub", DTYPES, np.subtract, 2, False),
    ("vmul", DTYPES, np.multiply, 2, False),
    ("vdiv", FLOATS, np.divide, 2, False),
    ("vdiv", ("int32", "int16", "uint16"), _truncated, 2, False),
    ("vmax", DTYPES, np.maximum, 2, False),
    ("vmin", DTYPES, np.minimum, 2, False),
    ("vabsdif", ("float32", "float16"), lambda x, y: abs(x - y), 2, False),
    ("vand", INTEGERS, np.bitwise_and, 2, False),
    ("vor", INTEGERS, np.bitwise_or, 2, False),
    ("vxor", INTEGERS, np.bitwise_xor, 2, False),
    ("vnot", INTEGERS, np.bitwise_not, 1, False),
    ("vabs", FLOATS + SIGNED, np.abs, 1, False),
    ("vneg", FLOATS + SIGNED, np.negative, 1, False),
    ("vrelu", (*FLOATS, "int32"), lambda x: np.maximum(x, 0), 1, False),
    ("vexp", FLOATS[:2], np.exp, 1, True),
    ("vln", FLOATS[:2], lambda x: np.log(abs(x)), 1, True),
    ("vsqrt", FLOATS[:2], lambda x: np.sqrt(abs(x)), 1, True),
    ("vexpdif", ("float32",), lambda x, y: np.exp(np.float64(np.float32(x - y))), 2, True),
    ("vprelu", FLOATS[:2], lambda x, y: np.where(x >= 0, x, x * y), 2, False),
    ("vmula", FLOATS, lambda x, y, z: x + y * z, 3, True),
    ("vmadd", FLOATS, lambda x, y, z: x * y + z, 3, True),
    ("vshl", INTEGERS, np.left_shift, 2, False),
    ("vshr", INTEGERS, np.right_shift, 2, False),
]
# Forms with a scalar; its value.
SCALAR = [
    ("vadds", DTYPES, np.add, 3),
    ("vmuls", DTYPES, np.multiply, 3),
    ("vmaxs", DTYPES, np.maximum, 2),
    ("vmins", DTYPES, np.minimum, 2),
    ("vshls", INTEGERS, np.left_shift, COUNT),
    ("vshrs", INTEGERS, np.right_shift, COUNT),
    ("vlrelu", FLOATS[:2], lambda x, y: np.where(x >= 0, x, x * y), 0.5),
]
POSITIVE = {"vln", "vsqrt"}  # of the absolute value, so that the operand is positive


def _wide(x):
    return x.astype(np.float64) if x.dtype.kind not in "iu" else x


def _lanewise_cases():
    values = operands()
    for name, dtypes, function, count, close in LANEWISE:
        for dtype in dtypes:
            rows = [values[dtype][row] for row in range(count)]
            args = [operand(dtype, row) for row in range(count)]
            if name in POSITIVE:
                args = [register("vabs", args[0], pset(8), dtype=dtype, modes=ZEROING)]
            if name in ("vshl", "vshr"):
                rows[1] = _shifts(rows[1])
                seven = register("vdup", programs.const(7, dtype), pset(8), dtype=dtype, modes=ZEROING)
                args[1] = register("vand", args[1], seven, pset(8), dtype=dtype, modes=ZEROING)
            with np.errstate(all="ignore"):
                expected = function(*map(_wide, rows))
            yield name, dtype, args, expected, close
    for name, dtypes, function, scalar in SCALAR:
        for dtype in dtypes:
            args = [operand(dtype), programs.const(scalar, dtype)]
            yield name, dtype, args, function(_wide(values[dtype][0]), np.asarray(scalar, values[dtype].dtype)), False
    for dtype in FLOATS[:2]:
        x, y = (values[dtype][row].astype(np.float64) for row in (0, 1))
        yield "vaxpy", dtype, [operand(dtype), operand(dtype, 1), programs.const(0.25, dtype)], y * 0.25 + x, True


CASES = list(_lanewise_cases())


@functools.cache
def _results():
    """Every case with a predicate known only when it runs; those of float32 also with one that is known before."""
    masks = [(predicate(0), pset(32)) if case[1] == "float32" else (predicate(0),) for case in CASES]
    exprs = [
        register(name, *args, mask, dtype=dtype, modes=ZEROING)
        for (name, dtype, args, _, _), chosen in zip(CASES, masks, strict=True)
        for mask in chosen
    ]
    results = iter(evaluate(exprs))
    return [[next(results) for _ in chosen] for chosen in masks]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_each_lane_by_itself(number):
    name, dtype, _, expected, close = CASES[number]
    kind = jnp.dtype(dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(expected).astype(kind).astype(np.float64 if dtype in FLOATS else np.int64)
    dynamic = active(operands()["bits"][0], dtype)
    for row, mask in zip(_results()[number], (dynamic, True), strict=False):
        got, want = row.view(kind).astype(expected.dtype), np.where(mask, expected, 0)
        if close:
            tolerance = 4 * float(jnp.finfo(kind).eps)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=0 if name == "vexp" else tolerance)
        else:
            np.testing.assert_array_equal(got, want)


# --- subnormals -----------------------------------------------------------------------------------------------------


def test_subnormals_are_flushed_unless_the_kernel_asks_for_them():
    tiny = [programs.const(value, "float32") for value in (1e-40, -95.0)]
    small, exponent = (register("vdup", value, pset(32), dtype="float32", modes=ZEROING) for value in tiny)
    cases = [
        register(name, x, pset(32), dtype="float32", modes=(*ZEROING, *words))
        for words in ((), ("FTZ_FALSE",))
        for name, x in (("vexp", exponent), ("vln", small), ("vsqrt", small))
    ]
    results = [row.view(np.float32)[0] for row in evaluate(cases)]
    np.testing.assert_array_equal(results[:3], np.array([0.0, -np.inf, 0.0], np.float32))
    # The first result is itself a subnormal, which NumPy compares as it is.
    exact = np.array([np.exp(-95.0), np.log(np.float64(np.float32(1e-40))), np.sqrt(np.float64(np.float32(1e-40)))])
    np.testing.assert_allclose(np.array(results[3:], np.float64), exact, rtol=1e-5)


# --- carries --------------------------------------------------------------------------------------------------------


def test_sums_and_differences_with_carries():
    values, bits = operands()["uint32"].astype(np.int64), operands()["bits"]
    x, y = values[0], values[1]
    carry, mask = active(bits[1], "uint32"), active(bits[0], "uint32")
    expected = {
        "vaddc": (x + y, x + y >= 2**32),
        "vsubc": (x - y, x >= y),
        "vaddcs": (x + y + carry, x + y + carry >= 2**32),
        "vsubcs": (x - y - carry, x >= y + carry),
    }
    pairs = {
        name: register(
            name,
            operand("uint32"),
            operand("uint32", 1),
            *([predicate(1)] if name.endswith("cs") else []),
            predicate(0),
            dtype="uint32",
        )
        for name in expected
    }
    results = evaluate([item(pair, n, dtype) for pair in pairs.values() for n, dtype in ((0, "bool"), (1, "uint32"))])
    for number, (result, out) in enumerate(expected.values()):
        got = results[2 * number + 1].view(np.uint32)
        np.testing.assert_array_equal(got, np.where(mask, result % 2**32, 0))
        np.testing.assert_array_equal(active(results[2 * number], "uint32"), out & mask)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_wide_products(dtype):
    x, y = (operands()[dtype][row].astype(object) for row in (0, 1))
    pair = register("vmull", operand(dtype), operand(dtype, 1), pset(32), dtype=dtype)
    low, high = (row.view(np.uint32) for row in evaluate([item(pair, n, dtype) for n in (0, 1)]))
    product = np.array([int(p) % 2**64 for p in x * y], np.uint64)
    np.testing.assert_array_equal(low, product.astype(np.uint32))
    np.testing.assert_array_equal(high, (product >> np.uint64(32)).astype(np.uint32))


# --- reductions -----------------------------------------------------------------------------------------------------

REDUCED = ("float32", "float16", "int32", "uint32", "int16", "uint16")
WIDENED = {"int16": "int32", "uint16": "uint32"}


def _blocks(x, otherwise, mask):
    return np.where(mask, x, otherwise).reshape(8, -1)


def _reductions(dtype):
    """For each reduction of a register of type ``dtype`` the first lanes of its result; the others are 0."""
    values, bits = operands()[dtype][0], operands()["bits"][2]
    mask = active(bits, dtype)
    x = values.astype(np.float64 if dtype in FLOATS else np.int64)
    low, high = (-np.inf, np.inf) if dtype in FLOATS else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bits_of = np.dtype(f"uint{8 * values.dtype.itemsize}")

    def found(best, place):
        return [best, np.array([place], bits_of).view(values.dtype)[0]]

    down, up = np.where(mask, x, low), np.where(mask, x, high)
    result = {
        "vcadd": [np.where(mask, x, 0).sum()],
        "vcmax": found(down.max(), down.argmax()),
        "vcmin": found(up.min(), up.argmin()),
        "vcgadd": list(_blocks(x, 0, mask).sum(1)),
        "vcgmax": list(_blocks(x, low, mask).max(1)),
        "vcgmin": list(_blocks(x, high, mask).min(1)),
    }
    if dtype in FLOATS:
        result["vcpadd"] = list(np.where(mask, x, 0).reshape(-1, 2).sum(1))
    return result


def _reduced(name, dtype):
    return WIDENED.get(dtype, dtype) if name == "vcadd" else dtype


@pytest.mark.parametrize("dtype", REDUCED)
def test_reductions(dtype):
    expected = _reductions(dtype)
    exprs = [
        register(name, operand(dtype), predicate(2), dtype=_reduced(name, dtype), modes=ZEROING) for name in expected
    ]
    for (name, first), row in zip(expected.items(), evaluate(exprs), strict=True):
        of = jnp.dtype(_reduced(name, dtype))
        want = np.zeros(lanes(of.name), of)
        with np.errstate(all="ignore"):
            want[: len(first)] = np.asarray(first).astype(of)
        if name.endswith("add"):
            np.testing.assert_allclose(row.view(of), want, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-2)
        else:
            np.testing.assert_array_equal(row.view(of), want)


def test_a_reduction_of_no_lane():
    nothing = pset(32, "ALLF")
    best, least = evaluate([register(n, operand("float32"), nothing, dtype="float32") for n in ("vcmax", "vcmin")])
    np.testing.assert_array_equal(best.view(np.float32)[:2], np.array([-np.inf, 0], np.float32))
    np.testing.assert_array_equal(least.view(np.float32)[:2], np.array([np.inf, 0], np.float32))


def test_the_largest_of_a_register_with_nan_is_the_first_nan():
    nan = register("vdup", programs.const(float("nan"), "float32"), pset(32, "VL4"), dtype="float32", modes=ZEROING)
    start = register("vintlv", operand("float32"), nan, dtype="float32")
    (row,) = evaluate([register("vcmax", item(start, 0, "float32"), pset(32), dtype="float32")])
    assert np.isnan(row.view(np.float32)[0])
    assert row.view(np.uint32)[1] == 1


@pytest.mark.parametrize("cumulative", [False, True])
def test_histograms(cumulative):
    x, mask = operands()["uint8"][0], active(operands()["bits"][0], "uint8")
    start = np.arange(128, dtype=np.uint16)
    counts = np.bincount(x[mask], minlength=256)
    counts = np.cumsum(counts) if cumulative else counts
    ramp = register("vci", programs.const(0, "uint16"), dtype="uint16", modes=("INC_ORDER",))
    name = "chistv2" if cumulative else "dhistv2"
    exprs = [
        register(name, ramp, operand("uint8"), predicate(0), dtype="uint16", modes=(f"BIN{upper}",)) for upper in (0, 1)
    ]
    for upper, row in enumerate(evaluate(exprs)):
        np.testing.assert_array_equal(row.view(np.uint16), start + counts[128 * upper : 128 * upper + 128])


def test_merging_keeps_lanes_that_are_not_active():
    first = ir.Store("acc", (programs.ZERO,), operand("float32", 1))
    merged = register(
        "vadds",
        operand("float32"),
        programs.const(1.0, "float32"),
        predicate(0),
        dtype="float32",
        modes=("MODE_MERGING",),
    )
    body = [
        first,
        ir.Store("acc", (programs.ZERO,), merged),
        simd.vsts("out_ub", 0, value=ir.Load("acc", (programs.ZERO,), "float32x64"), dist="NORM_B32"),
        ir.Store(
            "acc",
            (programs.ZERO,),
            register("vcmax", operand("float32"), pset(32), dtype="float32", modes=("MODE_MERGING",)),
        ),
        simd.vsts("out_ub", 64, value=ir.Load("acc", (programs.ZERO,), "float32x64"), dist="NORM_B32"),
    ]
    (out,) = simd.run(body, operands(), {"out": np.zeros(128, np.float32)})
    x, old = operands()["float32"][:2]
    expected = np.where(active(operands()["bits"][0], "float32"), x + 1, old)
    np.testing.assert_array_equal(out[:64], expected)
    np.testing.assert_array_equal(out[64:65], x.max())
    np.testing.assert_array_equal(out[66:], expected[2:])
