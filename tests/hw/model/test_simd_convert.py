"""``vcvt`` between all types, with each rounding, saturation and part, against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from tests.hw import programs
from tests.hw import simd_programs as simd
from tests.hw.simd_programs import active, predicate, register

# From, to, and what may be asked for: roundings, saturation, parts.
_ALL = ("R", "A", "F", "C", "Z")
CONVERSIONS = [
    ("float32", "int32", _ALL, True),
    ("float32", "int16", _ALL, True),
    ("float16", "int32", _ALL, False),
    ("float16", "int16", _ALL, True),
    ("float16", "int8", _ALL, True),
    ("float16", "uint8", _ALL, True),
    ("bfloat16", "int32", _ALL, True),
    ("float32", "float16", (*_ALL, "O"), True),
    ("float32", "bfloat16", _ALL, True),
    ("float32", "float8_e4m3fn", ("R",), True),
    ("float32", "float8_e5m2", ("R",), True),
    ("float16", "float8_e4m3fn", ("R",), True),
    ("float16", "float8_e5m2", ("R",), True),
    ("float16", "bfloat16", _ALL, False),
    ("float16", "float32", ("",), False),
    ("bfloat16", "float8_e4m3fn", ("R",), True),
    ("bfloat16", "float8_e5m2", ("R",), True),
    ("bfloat16", "float16", _ALL, True),
    ("bfloat16", "float32", ("",), False),
    ("float8_e4m3fn", "float32", ("",), False),
    ("float8_e5m2", "float32", ("",), False),
    ("int8", "float16", ("",), False),
    ("uint8", "float16", ("",), False),
    ("int16", "float16", _ALL, False),
    ("int16", "float32", ("",), False),
    ("int32", "float32", _ALL, False),
    ("int32", "int16", ("",), True),
    ("int32", "uint16", ("",), True),
    ("int32", "uint8", ("",), True),
    ("uint32", "int16", ("",), True),
    ("uint32", "uint16", ("",), True),
    ("uint32", "uint8", ("",), True),
    ("int16", "int32", ("",), False),
    ("int16", "uint32", ("",), False),
    ("int16", "uint8", ("",), True),
    ("uint16", "uint32", ("",), False),
    ("uint16", "uint8", ("",), True),
    ("int8", "int16", ("",), False),
    ("int8", "int32", ("",), False),
    ("uint8", "uint16", ("",), False),
    ("uint8", "uint32", ("",), False),
]
_PARTS = {1: [None], 2: ["EVEN", "ODD"], 4: ["P0", "P1", "P2", "P3"]}


def _source(dtype):
    """256 bytes of numbers of a type that are hard to convert: ties, ends of ranges, infinities and NaN."""
    rng = np.random.default_rng(1)
    of, n = jnp.dtype(dtype), 256 // jnp.dtype(dtype).itemsize
    if of.kind in "iu":
        limits = np.iinfo(of)
        x = rng.integers(limits.min, limits.max, n, endpoint=True, dtype=np.int64)
        x[:8] = limits.min, limits.max, 0, 1, limits.max // 2, 100, limits.max - 1, limits.min + 1
        return x.astype(of)
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 6, n)
    hard = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 447.0, 449.0, 464.0, 480.0, 65519.0, 65520.0, 1e5, -1e5, 1.0625, 1.1875]
    hard += [127.5, 255.5, 2.0**31, -(2.0**31), 3e9, np.inf, -np.inf, np.nan, -1.0, 2049.0, 0.00012, 3e-8, 1e-3, -6e-8]
    x[: len(hard)] = hard[: len(x)]
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(of)


@functools.cache
def _numbers(dtype):
    """Every finite number of a float type of at most 16 bits, in order, as float64."""
    bits = 8 * jnp.dtype(dtype).itemsize
    every = np.arange(2**bits, dtype=np.uint32).astype(f"uint{bits}").view(jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):
        every = every.astype(np.float64)
    return np.unique(every[np.isfinite(every)])


@np.errstate(invalid="ignore")
def _pick(x, low, high, mode, is_even):
    """Of the two neighbours of ``x`` the one that a rounding chooses; ``is_even`` is whether the lower one is."""
    up = {
        "R": (x - low > high - x) | ((x - low == high - x) & ~is_even),
        "A": (x - low > high - x) | ((x - low == high - x) & (x > 0)),
        "F": np.zeros_like(is_even),
        "C": np.ones_like(is_even),
        "Z": x < 0,
        "O": is_even,
    }[mode]
    return np.where(low == high, low, np.where(up, high, low))


def _to_float(x, dtype, mode, saturate):
    """``x``, float64, among the numbers of a type."""
    of = jnp.dtype(dtype)
    if of.itemsize == 4:
        return _to_float32(x, mode)
    numbers = _numbers(dtype)
    largest, e5 = numbers[-1], dtype != "float8_e4m3fn"
    inside = np.clip(np.nan_to_num(x, nan=0.0), -largest, largest)
    place = np.searchsorted(numbers, inside, side="right") - 1
    low = numbers[place]
    high = np.where(low == inside, low, numbers[np.minimum(place + 1, len(numbers) - 1)])
    unsigned = f"uint{8 * of.itemsize}"
    is_even = low.astype(of).view(unsigned) % 2 == 0
    result = _pick(inside, low, high, mode, is_even)
    # Beyond the largest number: what would round to the one after it does not fit.
    step = largest - numbers[-2]
    over = {"R": largest + step / 2, "A": largest + step / 2}.get(mode, largest + step)
    beyond = (abs(x) >= over) | np.isinf(x)
    if mode in ("F", "C", "Z", "O"):
        grows = {"F": x < 0, "C": x > 0}.get(mode, np.zeros_like(beyond))
        beyond = np.isinf(x) | (abs(x) >= largest + step) | ((abs(x) > largest) & grows)
    end = largest if saturate else (np.inf if e5 else np.nan)
    result = np.where(beyond, np.copysign(end, x), result)
    return np.where(np.isnan(x), np.nan, result).astype(of)


def _to_float32(x, mode):
    near = x.astype(np.float32)
    below = np.where(near.astype(np.float64) > x, np.nextafter(near, np.float32(-np.inf)), near)
    above = np.where(below.astype(np.float64) < x, np.nextafter(below, np.float32(np.inf)), below)
    even = below.view(np.uint32) % 2 == 0
    return _pick(x, below.astype(np.float64), above.astype(np.float64), mode or "R", even).astype(np.float32)


def _to_integer(x, dtype, mode, saturate):
    limits = np.iinfo(dtype)
    if mode:
        low = np.floor(np.nan_to_num(x, nan=0.0, posinf=1e300, neginf=-1e300))
        finite = np.nan_to_num(x, nan=0.0, posinf=1e300, neginf=-1e300)
        x = np.where(np.isnan(x), 0, _pick(finite, low, np.ceil(finite), mode, low % 2 == 0))
        if not saturate:
            x = np.where(abs(x) > 1e200, 0, x)
    whole = [int(value) for value in x]
    if saturate:
        return np.array([min(max(value, int(limits.min)), int(limits.max)) for value in whole]).astype(dtype)
    return np.array([value % 2**64 for value in whole], np.uint64).astype(dtype)


def _expected(x, target, mode, saturate, part, mask):
    """All lanes of the result."""
    of = jnp.dtype(target)
    wide, narrow = max(x.dtype.itemsize, of.itemsize), min(x.dtype.itemsize, of.itemsize)
    number = int(part[-1]) if part and part.startswith("P") else {"ODD": 1}.get(part, 0)
    if x.dtype.itemsize < of.itemsize:
        x = x[number :: wide // narrow]
    values = x.astype(np.float64) if x.dtype.kind not in "iu" else x
    if of.kind in "iu":
        result = _to_integer(values, target, mode, saturate)
    else:
        result = _to_float(values.astype(np.float64), target, mode or "R", saturate)
    result = np.where(mask, result, np.zeros_like(result))
    if of.itemsize == wide:
        return result
    full = np.zeros((len(result), wide // narrow), of)
    full[:, number] = result
    return full.ravel()


def _cases():
    for source, target, modes, saturating in CONVERSIONS:
        sizes = jnp.dtype(source).itemsize, jnp.dtype(target).itemsize
        parts = _PARTS[max(sizes) // min(sizes)]
        for number, mode in enumerate(modes):
            for saturate in (True, False) if saturating else (None,):
                # Every part of the first rounding, one of the others.
                for part in parts if number == 0 else parts[-1:]:
                    words = [f"ROUND_{mode}"] if mode else []
                    words += [] if saturate is None else ["RS_ENABLE" if saturate else "RS_DISABLE"]
                    words += [f"PART_{part}"] if part else []
                    yield source, target, mode, saturate, part, (*words, "MODE_ZEROING")


CASES = list(_cases())


def _run(exprs):
    """The bytes of conversions, whose operands are the registers of :func:`_source`."""
    sources = sorted({case[0] for case in CASES})
    arrays = {f"x_{dtype}": _source(dtype)[None] for dtype in sources} | {"bits": simd.operands()["bits"]}
    body = [
        simd.vsts("out_ub", n, 0, value=register("reinterpret", expr, dtype="uint8"), dist="NORM_B8")
        for n, expr in enumerate(exprs)
    ]
    (out,) = simd.run(body, arrays, {"out": np.zeros((len(exprs), 256), np.uint8)})
    return out


@functools.cache
def _results():
    return _run(
        [
            register("vcvt", simd.vld(f"x_{source}_ub", 0, 0, dtype=source), predicate(3), dtype=target, modes=modes)
            for source, target, _, _, _, modes in CASES
        ]
    )


@pytest.mark.parametrize(("source", "target"), [case[:2] for case in CONVERSIONS])
def test_conversions(source, target):
    of, x = jnp.dtype(target), _source(source)
    wider = source if x.dtype.itemsize >= of.itemsize else target
    mask = active(simd.operands()["bits"][3], wider)
    for case, row in zip(CASES, _results(), strict=True):
        if case[:2] == (source, target):
            _, _, mode, saturate, part, modes = case
            if saturate is None:  # no choice: only floats that become integers do
                saturate = of.kind in "iu" and x.dtype.kind not in "iu"
            want = _expected(x, target, mode, saturate, part, mask)
            got = row.view(of)
            if of.kind not in "iu":
                got, want = got.astype(np.float32), want.astype(np.float32)
            np.testing.assert_array_equal(got, want, err_msg=str(modes))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_to_and_from_four_bits():
    # Ties go to the even code, large numbers to the largest.
    x = np.resize(
        np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.75, -5.0, 0.2, 0.3, 2.4, 2.6, -9.0, 0.0]), 128
    )
    codes = np.resize(np.array([0, 2, 2, 4, 4, 6, 6, 7, 10, 14, 0, 1, 4, 5, 15, 0]), 128).astype(np.uint8)
    packed = codes[::2] | codes[1::2] << 4
    source = simd.vld("x_ub", 0, 0, dtype="bfloat16")
    body = []
    for part in range(4):
        modes = ("ROUND_R", f"PART_P{part}", "MODE_ZEROING")
        to = ir.Register("vcvt", (source, simd.pset(16)), modes, "float4_e2m1fnx512")
        body.append(simd.vsts("out_ub", part, 0, value=register("reinterpret", to, dtype="uint8"), dist="NORM_B8"))
        back = register("vcvt", to, simd.pset(16), dtype="bfloat16", modes=(f"PART_P{part}", "MODE_ZEROING"))
        body.append(simd.vsts("back_ub", part, 0, value=back, dist="NORM_B16"))
    outputs = {"out": np.zeros((4, 256), np.uint8), "back": np.zeros((4, 128), jnp.bfloat16)}
    out, back = simd.run(body, {"x": x[None].astype(jnp.bfloat16)}, outputs)
    for part in range(4):
        want = np.zeros((64, 4), np.uint8)
        want[:, part] = packed
        np.testing.assert_array_equal(out[part], want.ravel())
        numbers = np.where(codes < 8, 1, -1) * FP4[codes & 7]
        np.testing.assert_array_equal(back[part].astype(np.float32), numbers)


def test_merging_keeps_what_a_conversion_does_not_write():
    even, odd = (
        register("vcvt", simd.vld("x_ub", 0, 64 * n, dtype="float32"), simd.pset(32), dtype="float16", modes=modes)
        for n, modes in enumerate([("ROUND_R", "PART_EVEN", "MODE_ZEROING"), ("ROUND_R", "PART_ODD", "MODE_MERGING")])
    )
    body = [
        ir.Store("halves", (programs.ZERO,), even),
        ir.Store("halves", (programs.ZERO,), odd),
        simd.vsts("out_ub", 0, value=ir.Load("halves", (programs.ZERO,), "float16x128"), dist="NORM_B16"),
    ]
    x = np.arange(128, dtype=np.float32)[None]
    (out,) = simd.run(body, {"x": x}, {"out": np.zeros(128, np.float16)})
    np.testing.assert_array_equal(out, x.reshape(2, 64).T.ravel())


def test_to_and_from_64_bits():
    """Where JAX has 64-bit types; where it has not, the message says how to get them."""
    wide = register(
        "vcvt",
        simd.vld("x_ub", 0, 0, dtype="float32"),
        simd.pset(32),
        dtype="int64",
        modes=("ROUND_Z", "RS_ENABLE", "PART_ODD", "MODE_ZEROING"),
    )
    back = register("vcvt", wide, simd.pset(32), dtype="float32", modes=("ROUND_R", "PART_EVEN", "MODE_ZEROING"))
    narrow = register("vcvt", wide, simd.pset(32), dtype="int32", modes=("RS_ENABLE", "PART_ODD", "MODE_ZEROING"))
    body = [
        simd.vsts("out_ub", 0, value=back, dist="NORM_B32"),
        simd.vsts("narrow_ub", 0, value=narrow, dist="NORM_B32"),
    ]
    x = np.resize(np.array([1.5, 3e9, -2.75, -1e12, 0.5, 5.0]), (1, 64)).astype(np.float32)
    outputs = {"out": np.zeros(64, np.float32), "narrow": np.zeros(64, np.int32)}
    with pytest.raises(errors.UnsupportedError, match="JAX_ENABLE_X64"):
        simd.run(body, {"x": x}, outputs)
    with jax.enable_x64(True):
        out, narrow = simd.run(body, {"x": x}, outputs)
    numbers = np.trunc(x[0, 1::2].astype(np.float64))
    np.testing.assert_array_equal(out.reshape(-1, 2), np.stack([numbers, 0 * numbers], axis=1).astype(np.float32))
    clipped = np.clip(numbers, -(2**31), 2**31 - 1)
    np.testing.assert_array_equal(narrow.reshape(-1, 2), np.stack([0 * clipped, clipped], axis=1))
