"""Fractals and products of the host runtime against NumPy; operands are small integers where a sum must be exact."""

import shutil

import ml_dtypes
import numpy as np
import pytest
import snippets

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

AREA = 1 << 16  # bytes of global memory that a snippet reads, and that it writes
_RNG = np.random.default_rng(0)
TYPES = {
    "half": np.float16,
    "bfloat16_t": ml_dtypes.bfloat16,
    "float": np.float32,
    "int8_t": np.int8,
    "float8_e4m3_t": ml_dtypes.float8_e4m3fn,
    "float8_e5m2_t": ml_dtypes.float8_e5m2,
}
M, K, N = 37, 83, 50  # no multiple of a fractal
B = 16384  # where in its area a snippet finds the second operand

_KERNEL = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/gemm.h>
#define THEN(from, to) asc_sync_notify(from, to, event_t(0)); asc_sync_wait(from, to, event_t(0));
#define L2 static_cast<asc_load_l2_cache_mode>(0)
#define OUT_L2 static_cast<asc_store_l2_cache_mode>(0)
#define UP(n, to) (((n) + (to) - 1) / (to) * (to))
extern "C" __global__ __mix__(1, 2) void products(__gm__ uint8_t* x, __gm__ uint8_t* y) {{
  asc_init();
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  __cbuf__ uint8_t *l1 = (__cbuf__ uint8_t *)0;
  __gm__ uint8_t* in = x + block_idx * {area};
  __gm__ uint8_t* out = y + block_idx * {area};
  if ASC_IS_AIC {{
{cube}
  }}
  if ASC_IS_AIV {{
    int32_t sid = asc_get_sub_block_id();
{vector}
  }}
}}
"""


def _load(type_: str, to: int, at: int, rows: int, columns: int, transposed: bool = False) -> str:
    """Rows and columns as they shall lie in L1; transposed ones lie column by column in global memory."""
    size = np.dtype(TYPES.get(type_, np.uint16)).itemsize
    call, pitch = ("asc_copy_gm2l1_dn2nz", rows) if transposed else ("asc_copy_gm2l1_nd2nz", columns)
    return (
        f"asc_set_gm2l1_nz_para(1, 1, UP({rows}, 16), 0);"
        f"{call}((__cbuf__ {type_}*)(l1 + {to}), (__gm__ {type_}*)(in + {at}), {pitch * size}, L2,"
        f" {rows}, {columns}, 0, 0);"
    )


def _to_l0(core: str, type_: str, rows: int, k: int) -> str:
    """A whole operand, ``a`` or ``b``, from its place in L1 to L0."""
    fractals, columns = -(-rows // 16), -(-k * np.dtype(TYPES[type_]).itemsize // 32)
    at = 0 if core == "a" else 65536
    return (
        f"asc_copy_l12l0{core}((__c{core}__ {type_}*)0, (__cbuf__ {type_}*)(l1 + {at}), 0, 0, {fractals}, {columns},"
        f" {fractals}, {fractals});"
    )


def _product(type_: str, m: int, k: int, n: int, result: str = "float", to_l0b: str | None = None) -> str:
    """L1's operands to L0, multiplied into L0C."""
    return (
        "THEN(PIPE_MTE2, PIPE_MTE1)"
        + _to_l0("a", type_, m, k)
        + (to_l0b or _to_l0("b", type_, n, k))
        + "THEN(PIPE_MTE1, PIPE_M)"
        + f"asc_mmad((__cc__ {result}*)0, (__ca__ {type_}*)0, (__cb__ {type_}*)0, {m}, {k}, {n}, 0, true, false, true);"
        + "THEN(PIPE_M, PIPE_FIX)"
    )


def _take(result: str, to: str, m: int, n: int, quantization: int, pitch: int, rows: int) -> str:
    return (
        "asc_set_l0c_copy_nz_para(1, 0, 0);"
        f"asc_copy_l0c2gm((__gm__ {to}*)out, (__cc__ {result}*)0, {n}, {m}, {pitch}, {rows}, OUT_L2,"
        f" asc_unit_flag_mode(0),"
        f" asc_quant_mode({quantization}), asc_relu_pre_mode(0), 0, 1, 0, 0);"
    )


def _integers(dtype, *shape: int) -> np.ndarray:
    return _RNG.integers(-4, 5, shape).astype(dtype)


def _operands(type_: str, m: int = M, k: int = K, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    return _integers(TYPES[type_], m, k), _integers(TYPES[type_], n, k)


SNIPPETS: dict[str, tuple[list[tuple[int, np.ndarray]], str, str]] = {}
for _type in TYPES:
    _a, _b = _operands(_type)
    _sum = "int32_t" if _type == "int8_t" else "float"
    SNIPPETS[_type] = (
        [(0, _a), (B, _b)],
        _load(_type, 0, 0, M, K)
        + _load(_type, 65536, B, N, K)
        + _product(_type, M, K, N, _sum)
        + _take(_sum, _sum, M, N, 0, N, 48),
        "",
    )
_a, _b = _operands("half")
# The second operand lies [K, N] in global memory: transposed on the way to L1, or on the way to L0B.
SNIPPETS["transposed into L1"] = (
    [(0, _a), (B, np.ascontiguousarray(_b.T))],
    _load("half", 0, 0, M, K)
    + _load("half", 65536, B, N, K, transposed=True)
    + _product("half", M, K, N)
    + _take("float", "float", M, N, 0, N, 48),
    "",
)
for _type in ("half", "float", "int8_t"):
    _a, _b = _operands(_type, 32, 64, 96)
    _sum = "int32_t" if _type == "int8_t" else "float"
    _transposed = (
        f"asc_copy_l12l0b_transpose((__cb__ {_type}*)0, (__cbuf__ {_type}*)(l1 + 65536), 0, 0, 4,"
        f" {96 * _b.itemsize // 32}, 4, 6);"
    )
    SNIPPETS[f"{_type} transposed into L0B"] = (
        [(0, _a), (B, np.ascontiguousarray(_b.T))],
        _load(_type, 0, 0, 32, 64)
        + _load(_type, 65536, B, 64, 96)
        + _product(_type, 32, 64, 96, _sum, to_l0b=_transposed)
        + _take(_sum, _sum, 32, 96, 0, 96, 32),
        "",
    )
_a, _b = _integers(np.float16, 64, 64), _integers(np.float16, 48, 64)
# Rows 16 to 48 and columns 32 to 64 of the first operand, accumulated over two products, taken out as bfloat16.
SNIPPETS["part of L1"] = (
    [(0, _a), (B, _b)],
    _load("half", 0, 0, 64, 64) + _load("half", 65536, B, 48, 64) + "THEN(PIPE_MTE2, PIPE_MTE1)"
    "asc_copy_l12l0a((__ca__ half*)0, (__cbuf__ half*)l1, 1, 2, 2, 2, 4, 2);"
    "asc_copy_l12l0b((__cb__ half*)0, (__cbuf__ half*)(l1 + 65536), 0, 2, 3, 2, 3, 3);"
    "THEN(PIPE_MTE1, PIPE_M)"
    "asc_mmad((__cc__ float*)0, (__ca__ half*)0, (__cb__ half*)0, 32, 32, 48, 0, true, false, true);"
    "asc_mmad((__cc__ float*)0, (__ca__ half*)0, (__cb__ half*)0, 32, 32, 48, 0, true, false, false);"
    "THEN(PIPE_M, PIPE_FIX)" + _take("float", "bfloat16_t", 32, 48, 16, 64, 32),
    "",
)
_a, _b = (_RNG.standard_normal((16, 8)).astype(np.float32) for _ in range(2))
for _mode, _name in (("NEAREST_EVEN", "even"), ("NEAREST_AWAY", "away")):
    SNIPPETS[f"HF32 {_name}"] = (
        [(0, _a), (B, _b)],
        _load("float", 0, 0, 16, 8)
        + _load("float", 65536, B, 16, 8)
        + f"asc_enable_hf32(); asc_set_hf32_round_mode(asc_hf32_round_mode::{_mode});"
        + _product("float", 16, 8, 16)
        + "asc_disable_hf32();"
        + _take("float", "float", 16, 16, 0, 16, 16),
        "",
    )
_a = _integers(np.float16, 32, 32)
# From L0C to both vector cores' UB, by halves of rows or of columns, and from there through L1 and out.
for _dual, (_rows, _columns) in {1: (16, 32), 2: (32, 16)}.items():
    SNIPPETS[f"dual {_dual}"] = (
        [(0, _a), (B, np.eye(32, dtype=np.float16))],
        _load("half", 0, 0, 32, 32)
        + _load("half", 65536, B, 32, 32)
        + _product("half", 32, 32, 32)
        + f"asc_copy_l0c2ub((__ubuf__ half*)(ub + 256), (__cc__ float*)0, 32, 32, {_columns}, 32, 0,"
        f" asc_dual_dst_mode({_dual}),"
        " asc_unit_flag_mode(0), asc_quant_mode(1), asc_relu_pre_mode(0), 0, 1, 0, 0);"
        "asc_sync_intra_arrive(PIPE_FIX, 3); asc_sync_intra_arrive(PIPE_FIX, 19);",
        "asc_sync_intra_wait(PIPE_MTE3, 3);"
        "asc_copy_ub2gm_align(out + sid * 1024, ub + 256, 1, 1024, OUT_L2, 1024, 1024);",
    )
_nz = _RNG.integers(0, 100, (2, 16, 16)).astype(np.float16)  # two columns of one fractal each
SNIPPETS["UB to L1"] = (
    [(0, _nz), (B, np.eye(32, dtype=np.float16))],
    _load("half", 65536, B, 32, 32)
    + "asc_sync_intra_wait(PIPE_MTE1, 2);"
    + _product("half", 16, 32, 32)
    + _take("float", "float", 16, 32, 0, 32, 16),
    "if (sid == 0) { asc_copy_gm2ub_align(ub, in, 1, 1024, 0, 0, 0, L2, 1024, 1024); THEN(PIPE_MTE2, PIPE_MTE3)"
    "asc_copy_ub2l1((__cbuf__ void*)l1, (__ubuf__ void*)ub, 2, 16, 0, 0); asc_sync_intra_arrive(PIPE_MTE3, 2); }",
)


def _scales(rows: int, k: int, *least: int) -> np.ndarray:
    """Exponents of e8m0, [K / 64, rows, 2]: the pairs of 64 elements, as they lie in global memory.

    Seven of them, from ``least`` on, for each part of the rows.
    """
    first = np.repeat(least, rows // len(least))[:, None]
    return (first + _RNG.integers(0, 7, (k // 64, rows, 2))).astype(np.uint8)


def _mx(type_: str, bytes_of_k: int) -> str:
    """A block-scaled product of 32 x 128 x 48 by TileLang's own template."""
    raw = "int8_t"
    scale = lambda to, at, rows: (  # noqa: E731
        "asc_set_gm2l1_nz_para(1, 1, 2, 0);"
        f"asc_copy_gm2l1_nd2nz((__cbuf__ uint16_t*)(l1 + {to}), (__gm__ uint16_t*)(in + {at}),"
        f" {2 * rows}, L2, 2, {rows}, 0, 0);"
    )
    return (
        _load(raw, 0, 0, 32, bytes_of_k)
        + _load(raw, 65536, B, 48, bytes_of_k)
        + scale(131072, 2 * B, 32)
        + scale(139264, 3 * B, 48)
        + "THEN(PIPE_MTE2, PIPE_MTE1)"
        f"ascend_blockscaled_gemm_l1<32, 128, 48, 64, true, 2, {type_}, uint16_t,"
        f" float>((__cc__ float*)0, (__cbuf__ {type_}*)l1,"
        f" (__cbuf__ {type_}*)(l1 + 65536), (__cbuf__ uint16_t*)(l1 + 131072),"
        f" (__cbuf__ uint16_t*)(l1 + 139264), 1, 0, 0, 0);"
        "THEN(PIPE_M, PIPE_FIX)" + _take("float", "float", 32, 48, 0, 48, 32)
    )


_scale_a, _scale_b = _scales(32, 128, 0, 60), _scales(48, 128, 248)  # the smallest and the largest among them
_mx_a, _mx_b = _integers(np.float32, 32, 128), _integers(np.float32, 48, 128)


def _pack_fp4(x: np.ndarray) -> np.ndarray:
    nibbles = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


SNIPPETS["MX of 8 bits"] = (
    [
        (0, _mx_a.astype(ml_dtypes.float8_e4m3fn)),
        (B, _mx_b.astype(ml_dtypes.float8_e4m3fn)),
        (2 * B, _scale_a),
        (3 * B, _scale_b),
    ],
    _mx("float8_e4m3_t", 128),
    "",
)
SNIPPETS["MX of 4 bits"] = (
    [(0, _pack_fp4(_mx_a)), (B, _pack_fp4(_mx_b)), (2 * B, _scale_a), (3 * B, _scale_b)],
    _mx("float4_e2m1x2_t", 64),
    "",
)


@pytest.fixture(scope="module")
def results():
    x = np.zeros((len(SNIPPETS), AREA), np.uint8)
    parts: tuple[list[str], list[str]] = ([], [])
    for number, (arrays, *codes) in enumerate(SNIPPETS.values()):
        for at, array in arrays:
            x[number, at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        for part, code in zip(parts, codes, strict=True):
            part.append(f"    if (block_idx == {number}) {{\n      {code}\n    }}")
    library = snippets.compiled(_KERNEL.format(area=AREA, cube="\n".join(parts[0]), vector="\n".join(parts[1])))
    outcomes = []
    for policy in snippets.POLICIES:
        y = np.full((len(SNIPPETS), AREA), 0xEE, np.uint8)
        outcome = snippets.launch(library, {"x": x, "y": y}, ["y"], len(SNIPPETS), policy=policy)
        assert outcome.ended and not outcome.findings, outcome
        outcomes.append(y)
    assert all((y == outcomes[0]).all() for y in outcomes), "policies differ"
    return dict(zip(SNIPPETS, outcomes[0], strict=True))


def _matrix(result: np.ndarray, dtype, rows: int, columns: int, pitch: int | None = None) -> np.ndarray:
    pitch = pitch or columns
    return result.view(dtype)[: rows * pitch].reshape(rows, pitch)[:, :columns]


def _exact(name: str) -> np.ndarray:
    (_, a), (_, b) = SNIPPETS[name][0]
    b = b.T if "transposed" in name else b
    return a.astype(np.float64) @ b.astype(np.float64).T


def _type_of(name: str) -> type:
    return np.int32 if name.startswith("int8") else np.float32


@pytest.mark.parametrize("name", [*TYPES, "transposed into L1"])
def test_products_with_partial_fractals_are_exact(results, name):
    np.testing.assert_array_equal(_matrix(results[name], _type_of(name), M, N), _exact(name))
    assert (results[name][M * N * 4 :] == 0xEE).all(), "nothing else may be written"


@pytest.mark.parametrize("name", [n for n in SNIPPETS if n.endswith("into L0B")])
def test_operands_are_transposed_on_the_way_to_l0b(results, name):
    np.testing.assert_array_equal(_matrix(results[name], _type_of(name), 32, 96), _exact(name))


def test_part_of_a_tile_is_taken_and_products_accumulate(results):
    (_, a), (_, b) = SNIPPETS["part of L1"][0]
    want = 2 * a[16:48, 32:].astype(np.float64) @ b[:, 32:].astype(np.float64).T
    got = _matrix(results["part of L1"], ml_dtypes.bfloat16, 32, 48, pitch=64)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_hf32_rounds_operands_to_eleven_bits(results):
    for name in ("even", "away"):
        (_, a), (_, b) = SNIPPETS[f"HF32 {name}"][0]

        def rounded(x, name=name):
            mantissa, exponent = np.frexp(x.astype(np.float64))
            whole = mantissa * 2**12  # one bit before the point and 11 behind it
            near = np.rint(whole) if name == "even" else np.trunc(whole + np.copysign(0.5, whole))
            return np.ldexp(near / 2**12, exponent)

        np.testing.assert_allclose(
            _matrix(results[f"HF32 {name}"], np.float32, 16, 16), rounded(a) @ rounded(b).T, rtol=2e-6, atol=1e-6
        )


def test_both_vector_cores_get_their_half(results):
    (_, a), _ = SNIPPETS["dual 1"][0]
    rows = results["dual 1"].view(np.float16)[:1024].reshape(32, 32)
    np.testing.assert_array_equal(rows, a)
    (_, a), _ = SNIPPETS["dual 2"][0]
    columns = results["dual 2"].view(np.float16)[:1024].reshape(2, 32, 16)
    np.testing.assert_array_equal(columns, [a[:, :16], a[:, 16:]])


def test_a_vector_core_fills_l1(results):
    want = np.concatenate([_nz[0], _nz[1]], axis=1)
    np.testing.assert_array_equal(_matrix(results["UB to L1"], np.float32, 16, 32), want)


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_of_blocks_of_32_multiply(results, bits):
    def scaled(x, scales):
        powers = 2.0 ** (scales.transpose(1, 0, 2).reshape(len(x), -1).astype(np.float64) - 127)
        narrow = x.astype(ml_dtypes.float8_e4m3fn if bits == 8 else ml_dtypes.float4_e2m1fn)
        return narrow.astype(np.float64) * np.repeat(powers, 32, axis=1)

    want = scaled(_mx_a, _scale_a) @ scaled(_mx_b, _scale_b).T
    np.testing.assert_array_equal(_matrix(results[f"MX of {bits} bits"], np.float32, 32, 48), want)
