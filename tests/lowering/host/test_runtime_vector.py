"""Vector registers of the host runtime against NumPy: all values converted, masks, reductions, loads and stores."""

import shutil

import ml_dtypes
import numpy as np
import pytest
import snippets

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

F32 = np.float32
TYPES = {
    "half": np.dtype(np.float16),
    "bfloat16_t": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3_t": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2_t": np.dtype(ml_dtypes.float8_e5m2),
}
_RNG = np.random.default_rng(0)
# Floats of every size, and at the ends of the narrow types and between their smallest values.
_ENDS = [448, 456, 464, 480, 65504, 65519.9, 65520, 57344, 61440, 3.3e38, 3.4e38, 1e-40, np.inf, np.nan, 0.0]
_ENDS += [2.0**-k * x for k in (9, 10, 16, 17, 24, 25, 133) for x in (1, 1.5, 2.5, 3)]
HARD = np.array([*_ENDS, *(-x for x in _ENDS)], F32)
HARD = np.concatenate([HARD, _RNG.integers(0, 1 << 32, 4096 - len(HARD), dtype=np.uint32).view(F32)])
HARD[1024:2048] = _RNG.uniform(-500, 500, 1024)
NORMAL = _RNG.standard_normal(64).astype(F32)
BITS = _RNG.integers(0, 256, 256, dtype=np.uint8)
ROUNDINGS = {"ROUND_R": "even", "ROUND_A": "away", "ROUND_F": "floor", "ROUND_C": "ceil", "ROUND_Z": "zero"}


def _each(count: int, statement: str) -> str:
    return f"for (int32_t i = 0; i < {count}; ++i) {{ {statement} }}"


def _narrow(target: str, controls: str) -> str:
    part, store, raw = ("PART_EVEN", "vsts_pack_b32", "uint16_t")
    if TYPES[target].itemsize == 1:
        # TileLang's vsts_pack_quarter has no case for float8_e5m2_t: it would store nothing.
        part, store, raw = ("PART_P0", "vsts_pack_quarter", "uint8_t")
    convert = f"auto x = vcvt<{target}>(LOAD(float, i * 64), ALL32, {controls}, {part}, MODE_ZEROING);"
    return _each(len(HARD) // 64, f"{convert} {store}((vec_t<{raw}>&)x, OUT({raw}, i * 64), 0, ALL32);")


def _widen(source: str, count: int) -> str:
    part, load = ("PART_EVEN", "vlds_unpack") if TYPES[source].itemsize == 2 else ("PART_P0", "vlds_unpack4")
    value = f"vcvt<float>({load}<{source}>(IN({source}, i * 64), 0), ALL32, {part}, MODE_ZEROING)"
    return _each(count // 64, f"STORE(float, i * 64, {value}, ALL32);")


def _quarters(dtype: np.dtype) -> list[np.ndarray]:
    every = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    return np.split(every, 4) if dtype.itemsize == 2 else [every]


REGIONS = {
    **{f"widen {n} {k}": (x, _widen(n, len(x))) for n, t in TYPES.items() for k, x in enumerate(_quarters(t))},
    **{f"narrow {t} {r}": (HARD, _narrow(t, f"{r}, RS_DISABLE")) for t in ("half", "bfloat16_t") for r in ROUNDINGS},
    **{f"narrow {t} R": (HARD, _narrow(t, "ROUND_R, RS_DISABLE")) for t in ("float8_e4m3_t", "float8_e5m2_t")},
    **{f"saturate {t}": (HARD, _narrow(t, "ROUND_R, RS_ENABLE")) for t in TYPES},
    "to int32": (
        HARD,
        _each(
            64,
            "STORE(int32_t, i * 64, vcvt<int32_t>(LOAD(float, i * 64), ALL32, ROUND_R, RS_ENABLE,"
            " MODE_ZEROING), ALL32);",
        ),
    ),
    "fp4 to bfloat16": (
        np.arange(256, dtype=np.uint8),
        _each(
            4,
            "auto x = vlds_unpack4<float4_e2m1x2_t>(IN(float4_e2m1x2_t, i * 64), 0);"
            "STORE(bfloat16_t, i * 128, vcvt<bfloat16_t>(x, ALL32, PART_P0, MODE_ZEROING), ALL16);",
        ),
    ),
    "bfloat16 to fp4": (
        np.linspace(-7, 7, 128).astype(ml_dtypes.bfloat16),
        "auto x = vcvt<float4_e2m1x2_t>(LOAD(bfloat16_t, 0), ALL32, ROUND_R, PART_P0, MODE_ZEROING);"
        "vsts_pack_quarter(x, OUT(float4_e2m1x2_t, 0), 0, ALL32);",
    ),
    "odd part merged": (
        NORMAL,
        "auto x = vcvt<half>(LOAD(float, 0), ALL32, ROUND_R, RS_DISABLE, PART_EVEN, MODE_ZEROING);"
        "::vcvt(x, LOAD(float, 0), ALL32, ROUND_R, RS_DISABLE, PART_ODD, MODE_MERGING); STORE(half, 0, x, ALL16);",
    ),
    # --- masks: a bit a byte, that of a lane's first byte is the lane's
    "masks": (
        BITS,
        "psts_norm(asc_create_mask_b32(PAT_VL3), OUT(uint32_t, 0), 0);"
        " psts_norm(asc_create_mask_b16(PAT_M3), OUT(uint32_t, 8), 0);"
        "psts_norm(asc_create_mask_b8(PAT_Q), OUT(uint32_t, 16), 0);"
        " psts_norm(update_mask_b16(5), OUT(uint32_t, 24), 0);"
        "psts_norm(vcmps_gt(LOAD(float, 0), 0.0f, asc_create_mask_b32(PAT_H)), OUT(uint32_t, 32), 0);"
        "psts_norm(update_mask_b8(0), OUT(uint32_t, 40), 0);"
        " psts_norm(asc_create_mask_b32(PAT_M4), OUT(uint32_t, 48), 0);",
    ),
    "mask moves": (
        BITS,
        "auto a = plds_norm(IN(uint32_t, 0), 0); auto b = plds_norm(IN(uint32_t, 8), 0);"
        "psts_norm(ppack(a, LOWER), OUT(uint32_t, 0), 0); psts_norm(ppack(a, HIGHER), OUT(uint32_t, 8), 0);"
        "psts_norm(punpack(a, LOWER), OUT(uint32_t, 16), 0); psts_norm(punpack(a, HIGHER), OUT(uint32_t, 24), 0);"
        "auto c = pintlv_b16(a, b); psts_norm(c.v0, OUT(uint32_t, 32), 0); psts_norm(c.v1, OUT(uint32_t, 40), 0);"
        "auto d = pdintlv_b8(a, b); psts_norm(d.v0, OUT(uint32_t, 48), 0); psts_norm(d.v1, OUT(uint32_t, 56), 0);"
        "psts_norm(psel(a, b, plds_norm(IN(uint32_t, 16), 0)), OUT(uint32_t, 64), 0);"
        "psts_norm(pnot(a, b), OUT(uint32_t, 72), 0); psts_pack(a, OUT(uint32_t, 80), 0);"
        "psts_norm(plds_upsample(IN(uint32_t, 0), 0), OUT(uint32_t, 88), 0);"
        "psts_norm(plds_downsample(IN(uint32_t, 0), 0), OUT(uint32_t, 96), 0);",
    ),
    # --- arithmetic
    "float": (
        np.concatenate([NORMAL, _RNG.standard_normal(64).astype(F32)]),
        "auto a = LOAD(float, 0); auto b = LOAD(float, 64); auto few = asc_create_mask_b32(PAT_VL32);"
        "STORE(float, 0, vdiv_0ulp_ftz_true(a, b, ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 64, vadd(a, b, few, MODE_ZEROING), ALL32);"
        "auto c = b; ::vmul(c, a, b, few, MODE_MERGING); STORE(float, 128, c, ALL32);"
        "c = b; vmula(&c, a, a, ALL32, MODE_ZEROING); STORE(float, 192, c, ALL32);"
        "STORE(float, 256, vmax(a, b, ALL32, MODE_ZEROING), ALL32);"
        " STORE(float, 320, vabsdif(a, b, ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 384, vlrelu(a, 0.25f, ALL32), ALL32); STORE(float, 448, vneg(a, few, MODE_ZEROING), ALL32);",
    ),
    "special": (
        np.array([np.nan, 1, -0.0, 0.0, np.inf, -1] + [0] * 58 + [1, np.nan, 0.0, -0.0, np.nan, -2] + [0] * 58, F32),
        "auto a = LOAD(float, 0); auto b = LOAD(float, 64);"
        "STORE(float, 0, vmax(a, b, ALL32, MODE_ZEROING), ALL32);"
        " STORE(float, 64, vmin(a, b, ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 128, vrelu(a, ALL32, MODE_ZEROING), ALL32);"
        " STORE(float, 192, vabs(a, ALL32, MODE_ZEROING), ALL32);",
    ),
    "integers": (
        np.concatenate([BITS.view(np.int32), BITS[::-1].copy().view(np.int32)]),
        "auto a = LOAD(int32_t, 0); auto b = LOAD(int32_t, 64); auto u = LOAD(uint32_t, 0);"
        "STORE(int32_t, 0, vadd(a, b, ALL32, MODE_ZEROING), ALL32);"
        " STORE(int32_t, 64, vmul(a, b, ALL32, MODE_ZEROING), ALL32);"
        "STORE(int32_t, 128, vshls(a, (int16_t)3, ALL32, MODE_ZEROING), ALL32);"
        "STORE(int32_t, 192, vshrs(a, (int16_t)5, ALL32, MODE_ZEROING), ALL32);"
        "STORE(uint32_t, 256, vshrs(u, (int16_t)40, ALL32, MODE_ZEROING), ALL32);"
        "auto w = vmull(a, b, ALL32); STORE(int32_t, 320, w.v0, ALL32); STORE(int32_t, 384, w.v1, ALL32);"
        "auto s = vaddc(a, b, ALL32); STORE(int32_t, 448, s.v1, ALL32); psts_norm(s.v0, OUT(uint32_t, 512), 0);"
        "auto t = vsubcs(a, b, s.v0, ALL32); STORE(int32_t, 576, t.v1, ALL32); psts_norm(t.v0, OUT(uint32_t, 640), 0);",
    ),
    # --- across lanes
    "sums": (
        (_RNG.standard_normal(64) * np.exp(_RNG.uniform(-3, 12, 64))).astype(F32),
        "auto x = LOAD(float, 0); STORE(float, 0, vcadd(x, ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 64, vcadd(x, asc_create_mask_b32(PAT_M3), MODE_ZEROING), ALL32);"
        "STORE(float, 128, vcgadd(x, ALL32, MODE_ZEROING), ALL32);"
        " STORE(float, 192, vcpadd(x, ALL32, MODE_ZEROING), ALL32);",
    ),
    "sums of 16 bits": (
        BITS.view(np.int16),
        "STORE(int32_t, 0, vcadd(LOAD(int16_t, 0), ALL16, MODE_ZEROING), ALL32);",
    ),
    "extremes": (
        np.concatenate([NORMAL, np.where(np.arange(64) == 9, np.nan, NORMAL)]).astype(F32),
        "STORE(float, 0, vcmax(LOAD(float, 0), ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 64, vcmin(LOAD(float, 0), asc_create_mask_b32(PAT_VL16), MODE_ZEROING), ALL32);"
        "STORE(float, 128, vcmax(LOAD(float, 64), ALL32, MODE_ZEROING), ALL32);"
        "STORE(float, 192, vcmax(LOAD(float, 0), update_mask_b32(0), MODE_ZEROING), ALL32);"
        "STORE(float, 256, vcgmax(LOAD(float, 0), ALL32, MODE_ZEROING), ALL32);",
    ),
    "rearranged": (
        np.arange(256, dtype=np.uint8),
        "auto a = LOAD(uint16_t, 0); auto p = vintlv(a, vadds(a, (uint16_t)1, ALL16, MODE_ZEROING));"
        "STORE(uint16_t, 0, p.v0, ALL16); STORE(uint16_t, 128, p.v1, ALL16); auto q = vdintlv(p.v0, p.v1);"
        "STORE(uint16_t, 256, q.v0, ALL16); STORE(uint16_t, 384, q.v1, ALL16);"
        "STORE(uint8_t, 1024, vpack<uint8_t>(a, LOWER), ALL8); STORE(uint8_t, 1280, vpack<uint8_t>(a, HIGHER), ALL8);"
        "STORE(int16_t, 768, vunpack(LOAD(int8_t, 0), HIGHER), ALL16);"
        " STORE(uint16_t, 896, vunpack(LOAD(uint8_t, 0), LOWER), ALL16);"
        "auto m = asc_create_mask_b16(PAT_M3); STORE(uint16_t, 1024, vsqz(a, m, MODE_ZEROING), ALL16);"
        "STORE(uint16_t, 1152, vusqz<uint16_t>(m), ALL16); STORE(int16_t, 1280, vci<int16_t>(7, DEC_ORDER), ALL16);",
    ),
    "histograms": (
        BITS,
        "auto few = asc_create_mask_b8(PAT_VL128); vector_u16 c[4];"
        + _each(4, "c[i] = vdup<uint16_t>((uint16_t)3, ALL16, MODE_ZEROING);")
        + "dhistv2(&c[0], LOAD(uint8_t, 0), few, Bin_N0); dhistv2(&c[1], LOAD(uint8_t, 0), few, Bin_N1);"
        "chistv2(&c[2], LOAD(uint8_t, 0), few, Bin_N0); chistv2(&c[3], LOAD(uint8_t, 0), few, Bin_N1);"
        + _each(4, "STORE(uint16_t, i * 128, c[i], ALL16);"),
    ),
    # --- loads and stores
    "loads": (
        np.arange(1024, dtype=np.uint16),
        "STORE(uint16_t, 0, vlds_brc_elem<uint16_t>(IN(uint16_t, 5), 0), ALL16);"
        "STORE(uint16_t, 128, vlds_upsample<uint16_t>(IN(uint16_t, 0), 0), ALL16);"
        "STORE(uint16_t, 256, vlds_downsample<uint16_t>(IN(uint16_t, 0), 0), ALL16);"
        "STORE(uint16_t, 384, vlds_unpack<uint16_t>(IN(uint16_t, 64), 0), ALL16);"
        "STORE(uint16_t, 512, vlds_brc_datablock<uint16_t>(IN(uint16_t, 16), 0), ALL16);"
        "STORE(uint16_t, 640, vlds_brc_elem2datablock<uint16_t>(IN(uint16_t, 16), 0), ALL16);"
        "auto p = vld_x2<uint16_t>(IN(uint16_t, 0), DINTLV_B16); STORE(uint16_t, 768, p.v0, ALL16);"
        " STORE(uint16_t, 896, p.v1, ALL16);"
        "auto q = vlds_norm_postupdate<uint16_t>(IN(uint16_t, 16), 32);"
        " STORE(uint16_t, 1024, vlds_norm<uint16_t>(q.v1, 0), ALL16);",
    ),
    "gathers": (
        np.concatenate([np.arange(128, dtype=np.uint32)[::-1], np.arange(128, dtype=np.uint32) * 32]),
        "auto few = asc_create_mask_b32(PAT_VL16); auto i = LOAD(uint32_t, 0);"
        "STORE(uint32_t, 0, vgather2(IN(uint32_t, 0), i, few), ALL32);"
        " STORE(uint32_t, 64, vgatherb<uint32_t>(IN(uint32_t, 0), LOAD(uint32_t, 128)), ALL32);"
        "STORE(uint32_t, 128, vselr(i, vci<uint32_t>(3, DEC_ORDER)), ALL32);"
        "vscatter(i, OUT(uint32_t, 256), vshls(vci<uint32_t>(0, INC_ORDER), (int16_t)1, ALL32, MODE_ZEROING), few);",
    ),
    "stores": (
        np.arange(128, dtype=np.uint32) * 0x01020304,
        "auto x = LOAD(uint32_t, 0); auto m = asc_create_mask_b32(PAT_M3);"
        "STORE(uint32_t, 0, x, m); vsts_1st(x, OUT(uint32_t, 64), 0, m); vsts_pack_b32(x, OUT(uint32_t, 128), 0, m);"
        "vsts_pack_quarter(x, OUT(uint32_t, 192), 0, ALL32);"
        "auto to = vsstb(x, OUT(uint32_t, 256), (3 << 16) | 1, ALL32, POST_UPDATE);"
        " vsstb(x, to, (3 << 16) | 1, ALL32);",
    ),
}


@pytest.fixture(scope="module")
def results():
    return snippets.run_regions(REGIONS)


def test_every_narrow_value_has_its_float(results):
    for name, dtype in TYPES.items():
        for k, x in enumerate(_quarters(dtype)):
            got, want = results[f"widen {name} {k}"].view(F32)[: len(x)], x.astype(F32)
            np.testing.assert_array_equal(got, want, err_msg=f"{name} {k}")
            np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def _between(x: np.ndarray, dtype: np.dtype, rounding: str) -> np.ndarray:
    """What rounding to one of all finite values of a type gives, found by search among them, in float64."""
    every = np.sort(np.unique(np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)))
    every = every[np.isfinite(every)]
    above = every[np.clip(np.searchsorted(every, x, side="left"), 0, len(every) - 1)]
    below = every[np.clip(np.searchsorted(every, x, side="right") - 1, 0, len(every) - 1)]
    if rounding == "floor":
        return below
    if rounding == "ceil":
        return above
    if rounding == "zero":
        return np.where(x > 0, below, above)
    closer_up = (above - x < x - below) | ((above - x == x - below) & (x > 0))  # a tie goes away from zero
    return np.where(closer_up, above, below)


def test_floats_are_rounded_as_asked(results):
    with np.errstate(all="ignore"):
        for target in ("half", "bfloat16_t"):
            dtype = TYPES[target]
            even = results[f"narrow {target} ROUND_R"].view(dtype)[: len(HARD)]
            want = HARD.astype(dtype)
            np.testing.assert_array_equal(even.astype(F32), want.astype(F32), err_msg=target)
            inside = np.abs(HARD) <= float(ml_dtypes.finfo(dtype).max)
            for name, rounding in list(ROUNDINGS.items())[1:]:
                got = results[f"narrow {target} {name}"].view(dtype)[: len(HARD)].astype(np.float64)
                np.testing.assert_array_equal(
                    got[inside], _between(HARD.astype(np.float64), dtype, rounding)[inside], err_msg=f"{target} {name}"
                )


def test_what_is_beyond_eight_bits_is_nan_infinite_or_the_largest(results):
    with np.errstate(all="ignore"):
        for target in ("float8_e4m3_t", "float8_e5m2_t"):
            dtype = TYPES[target]
            np.testing.assert_array_equal(
                results[f"narrow {target} R"].view(dtype)[: len(HARD)].astype(F32), HARD.astype(dtype).astype(F32)
            )
        for target, dtype in TYPES.items():
            most = float(ml_dtypes.finfo(dtype).max)
            want = np.clip(HARD, -most, most).astype(dtype)
            got = results[f"saturate {target}"].view(dtype)[: len(HARD)]
            np.testing.assert_array_equal(got.astype(F32), want.astype(F32), err_msg=target)


def test_floats_become_integers_and_back(results):
    got = results["to int32"].view(np.int32)[: len(HARD)]
    with np.errstate(invalid="ignore"):
        want = np.where(np.isnan(HARD), 0, np.clip(np.rint(HARD.astype(np.float64)), -(2**31), 2**31 - 1)).astype(
            np.int64
        )
    np.testing.assert_array_equal(got, want)


def test_four_bit_floats(results):
    pairs = np.arange(256, dtype=np.uint8)
    want = np.stack([pairs & 15, pairs >> 4], -1).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32).reshape(-1)
    got = results["fp4 to bfloat16"].view(ml_dtypes.bfloat16)[:512].astype(F32)
    np.testing.assert_array_equal(got, want)
    wide = np.linspace(-7, 7, 128).astype(ml_dtypes.bfloat16)
    nibbles = wide.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(results["bfloat16 to fp4"][:64], nibbles[::2] | nibbles[1::2] << 4)


def test_a_conversion_that_merges_fills_the_other_part(results):
    got = results["odd part merged"].view(np.float16)[:128]
    np.testing.assert_array_equal(got, np.repeat(NORMAL.astype(np.float16), 2))


def _lanes(chosen: np.ndarray, width: int) -> np.ndarray:
    """The 256 bits of a mask whose lanes of ``width`` bytes are chosen."""
    bits = np.zeros(256, np.uint8)
    bits[::width] = chosen
    return bits


def _bits(result: np.ndarray, word: int, count: int = 256) -> np.ndarray:
    return np.unpackbits(result[4 * word :][: count // 8], bitorder="little")


def test_patterns_choose_lanes_by_their_first_byte(results):
    got = results["masks"]
    lane = np.arange(256)
    for word, width, chosen in [
        (0, 4, lane[:64] < 3),
        (8, 2, lane[:128] % 3 == 0),
        (16, 1, lane < 64),
        (24, 2, lane[:128] < 5),
        (32, 4, (lane[:64] < 32) & (BITS.view(F32) > 0)),
        (40, 1, lane < 0),
        (48, 4, lane[:64] % 4 == 0),
    ]:
        np.testing.assert_array_equal(_bits(got, word), _lanes(chosen, width), err_msg=str(word))


def test_masks_are_packed_interleaved_and_combined(results):
    got = results["mask moves"]
    a, b, c = (np.unpackbits(BITS[32 * k :][:32], bitorder="little") for k in range(3))
    half, zero = a[::2], np.zeros(128, np.uint8)
    spread = lambda x: np.stack([x, np.zeros_like(x)], -1).reshape(-1)  # noqa: E731
    groups = lambda x: x.reshape(-1, 2)  # noqa: E731
    woven = np.stack([groups(a), groups(b)], 1).reshape(-1)
    both = np.concatenate([a, b])
    for word, want in [
        (0, np.concatenate([half, zero])),
        (8, np.concatenate([zero, half])),
        (16, spread(a[:128])),
        (24, spread(a[128:])),
        (32, woven[:256]),
        (40, woven[256:]),
        (48, both[::2]),
        (56, both[1::2]),
        (64, np.where(c, a, b)),
        (72, (1 - a) & b),
        (88, np.repeat(a[:128], 2)),
        (96, np.concatenate([a, b])[::2]),
    ]:
        np.testing.assert_array_equal(_bits(got, word), want, err_msg=str(word))
    np.testing.assert_array_equal(_bits(got, 80, 128), half)


def test_float_arithmetic_is_numpys_and_masks_make_zero_or_keep(results):
    a, b = REGIONS["float"][0][:64], REGIONS["float"][0][64:]
    got = results["float"].view(F32)
    few = np.arange(64) < 32
    fused = (a.astype(np.float64) * a + b).astype(F32)  # the product is exact in float64
    for at, want in [
        (0, a / b),
        (64, np.where(few, a + b, 0)),
        (128, np.where(few, a * b, b)),
        (192, fused),
        (256, np.maximum(a, b)),
        (320, np.abs(a - b)),
        (384, np.where(a > 0, a, a * F32(0.25))),
        (448, np.where(few, -a, 0)),
    ]:
        np.testing.assert_array_equal(got[at : at + 64], want.astype(F32), err_msg=str(at))


def test_nan_and_signed_zeros(results):
    got = results["special"].view(np.uint32).reshape(-1, 64)[:4, :6]
    nan, one, zero, minus_zero, minus_one, minus_two, inf = (
        np.array([np.nan, 1, 0.0, -0.0, -1, -2, np.inf], F32).view(np.uint32).tolist()
    )
    assert got[0].tolist() == [nan, nan, zero, zero, nan, minus_one]
    assert got[1].tolist() == [nan, nan, minus_zero, minus_zero, nan, minus_two]
    assert got[2].tolist() == [nan, one, minus_zero, zero, inf, zero]
    assert got[3].tolist() == [nan, one, zero, zero, inf, one]


def test_integers_wrap_and_shift_and_carry(results):
    a, b = REGIONS["integers"][0][:64], REGIONS["integers"][0][64:]
    got = results["integers"]
    words = got.view(np.int32)
    u, v = a.view(np.uint32).astype(np.uint64), b.view(np.uint32).astype(np.uint64)
    low32 = lambda x: (x & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)  # noqa: E731
    product = a.astype(np.int64) * b.astype(np.int64)
    shifted = ((u << np.uint64(3)) & np.uint64(0x7FFFFFFF)) | (u & np.uint64(0x80000000))  # the sign stays
    inverse, carried = np.uint64(0xFFFFFFFF) - v, (u + v) >> np.uint64(32)
    for at, want in [
        (0, low32(u + v)),
        (64, low32(u * v)),
        (128, low32(shifted)),
        (192, a >> 5),
        (256, np.zeros(64, np.int32)),
        (320, low32(product.view(np.uint64))),
        (384, (product >> 32).astype(np.int32)),
        (448, low32(u + v)),
        (576, low32(u + inverse + carried)),
    ]:
        np.testing.assert_array_equal(words[at : at + 64], want, err_msg=str(at))
    np.testing.assert_array_equal(_bits(got, 512)[::4], carried)
    np.testing.assert_array_equal(_bits(got, 640)[::4], (u + inverse + carried) >> np.uint64(32))


def _tree(x: np.ndarray) -> np.ndarray:
    """Sums in pairs of neighbours, over the last dimension."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def test_sums_go_in_pairs_of_neighbours(results):
    x = REGIONS["sums"][0]
    got = results["sums"].view(F32).reshape(-1, 64)[:4]
    others = [np.add.accumulate(x)[-1], _tree(x.reshape(2, 32).T.reshape(64)), _tree(x.reshape(8, 8).T.reshape(64))]
    assert _tree(x) not in others, "the order must show in this sum"
    third = np.where(np.arange(64) % 3 == 0, x, 0).astype(F32)
    np.testing.assert_array_equal(got[0], [_tree(x)] + [0] * 63)
    np.testing.assert_array_equal(got[1], [_tree(third)] + [0] * 63)
    np.testing.assert_array_equal(got[2], [*_tree(x.reshape(8, 8)), *[0] * 56])
    np.testing.assert_array_equal(got[3], [*(x[::2] + x[1::2]), *[0] * 32])
    sums = results["sums of 16 bits"].view(np.int32)[:64]
    assert sums.tolist() == [int(BITS.view(np.int16).astype(np.int64).sum())] + [0] * 63


def test_extremes_tell_where_they_are_first_and_nan_wins(results):
    got = results["extremes"].view(F32).reshape(-1, 64)[:5]
    index = got.view(np.uint32)[:, 1]
    assert (got[0, 0], index[0]) == (NORMAL.max(), NORMAL.argmax())
    assert (got[1, 0], index[1]) == (NORMAL[:16].min(), NORMAL[:16].argmin())
    assert np.isnan(got[2, 0]) and index[2] == 9
    assert (got[3, 0], index[3]) == (-np.inf, 0)
    np.testing.assert_array_equal(got[:4, 2:], 0)
    np.testing.assert_array_equal(got[4], [*NORMAL.reshape(8, 8).max(1), *[0] * 56])


def test_lanes_are_rearranged(results):
    got = results["rearranged"]
    words = got.view(np.uint16)
    raw = np.arange(256, dtype=np.uint8)
    a = raw.view(np.uint16)
    woven = np.stack([a, a + 1], -1).reshape(-1)
    np.testing.assert_array_equal(words[:256], woven)
    np.testing.assert_array_equal(words[256:512], np.concatenate([a, a + 1]))
    np.testing.assert_array_equal(got[1024:1280], np.concatenate([a & 255, 0 * a]))
    np.testing.assert_array_equal(got[1280:1536], np.concatenate([0 * a, a & 255]))
    np.testing.assert_array_equal(words[768:896].view(np.int16), raw[128:].view(np.int8))
    np.testing.assert_array_equal(words[896:1024], raw[:128])
    chosen = np.arange(128) % 3 == 0
    np.testing.assert_array_equal(words[1024:1152], [*a[chosen], *[0] * (~chosen).sum()])
    np.testing.assert_array_equal(words[1152:1280], np.cumsum(chosen) - chosen)
    np.testing.assert_array_equal(words[1280:1408], np.arange(128)[::-1] + 7)


def test_histograms_count_what_the_mask_chooses(results):
    got = results["histograms"].view(np.uint16)[:512].reshape(4, 128)
    count = np.bincount(BITS[:128], minlength=256)
    np.testing.assert_array_equal(got[:2].reshape(-1), count + 3)
    np.testing.assert_array_equal(got[2:].reshape(-1), np.cumsum(count) + 3)


def test_loads_distribute(results):
    got = results["loads"].view(np.uint16).reshape(-1, 128)[:9]
    x = np.arange(1024, dtype=np.uint16)
    np.testing.assert_array_equal(got[0], 5)
    np.testing.assert_array_equal(got[1], np.repeat(x[:64], 2))
    np.testing.assert_array_equal(got[2], x[:256:2])
    np.testing.assert_array_equal(got[3], np.stack([x[64:128], 0 * x[:64]], -1).reshape(-1))
    np.testing.assert_array_equal(got[4], np.tile(x[16:32], 8))
    np.testing.assert_array_equal(got[5], np.repeat(x[16:24], 16))
    np.testing.assert_array_equal(got[6:8], [x[:256:2], x[1:256:2]])
    np.testing.assert_array_equal(got[8], x[48:176])


def test_gathers_and_scatters(results):
    got = results["gathers"].view(np.uint32)
    x = REGIONS["gathers"][0]
    np.testing.assert_array_equal(got[:64], np.where(np.arange(64) < 16, x[x[:64]], 0))
    np.testing.assert_array_equal(got[64:128], x[: 8 * 8].reshape(8, 8)[:8].reshape(-1))
    np.testing.assert_array_equal(got[128:192], x[(np.arange(64)[::-1] + 3) % 64])
    np.testing.assert_array_equal(got[256:288:2], x[:16])
    np.testing.assert_array_equal(got[257:288:2], 0xFFFFFFFF)


def test_stores_write_only_what_they_should(results):
    x = REGIONS["stores"][0][:64]
    third = np.arange(64) % 3 == 0
    got = results["stores"]
    words = got.view(np.uint32)
    np.testing.assert_array_equal(words[:64], np.where(third, x, 0xFFFFFFFF))
    assert words[64] == x[0] and words[65] == 0xFFFFFFFF
    np.testing.assert_array_equal(words[128:160].view(np.uint16), np.where(third, x & 0xFFFF, 0xFFFF))
    np.testing.assert_array_equal(got[768:832], x & 0xFF)
    blocks = words[256 : 256 + 8 * 8 * 3 + 8].reshape(-1, 8)
    np.testing.assert_array_equal(blocks[0:24:3], x.reshape(8, 8))
    np.testing.assert_array_equal(blocks[1:25:3], x.reshape(8, 8))
    np.testing.assert_array_equal(blocks[2:24:3], 0xFFFFFFFF)
