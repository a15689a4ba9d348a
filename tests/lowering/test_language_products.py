"""Products of the cube unit on the NPU model: from L1 and L0, in HF32, int8, 8-bit floats and MX formats."""

import ml_dtypes
import npu
import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax import errors

RNG = np.random.default_rng(3)


def floats(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def product(dtype, accumulate, m=32, n=48, k=128, *, level="l1", hf32=None, out=None):
    out = out or accumulate

    @T.prim_func
    def kernel(x: T.Tensor((m, k), dtype), w: T.Tensor((n, k), dtype), y: T.Tensor((m, n), out)):
        with T.Kernel(1):
            x_l1 = T.alloc_l1((m, k), dtype)
            w_l1 = T.alloc_l1((n, k), dtype)
            acc = T.alloc_l0c((m, n), accumulate)
            if hf32 is not None:
                T.set_hf32_mode(hf32)
            T.copy(x, x_l1)
            T.copy(w, w_l1)
            if level == "l1":
                T.gemm(x_l1, w_l1, acc, transpose_B=True, clear_accum=True)
            else:
                a = T.alloc_l0a((m, k // 2), dtype)
                b = T.alloc_l0b((n, k // 2), dtype)
                for step in T.serial(2):
                    T.copy(x_l1[:, step * (k // 2) : (step + 1) * (k // 2)], a)
                    T.copy(w_l1[:, step * (k // 2) : (step + 1) * (k // 2)], b)
                    T.gemm(a, b, acc, transpose_B=True, clear_accum=step == 0)
            T.copy(acc, y)

    return kernel


@pytest.mark.parametrize("level", ["l1", "l0"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_floats(dtype, level):
    x, w = floats(32, 128, dtype=dtype), floats(48, 128, dtype=dtype)
    (got,) = npu.run(product(dtype, "float32", level=level), x, w)
    np.testing.assert_allclose(got, x.astype(np.float64) @ w.astype(np.float64).T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("level", ["l1", "l0"])
def test_integers_are_exact(level):
    x, w = (RNG.integers(-128, 128, (rows, 128)).astype(np.int8) for rows in (32, 48))
    (got,) = npu.run(product("int8", "int32", level=level), x, w)
    np.testing.assert_array_equal(got, x.astype(np.int64) @ w.astype(np.int64).T)


def test_transposed_and_shortened_operands_in_l0():
    """A product of part of the tiles in L0, whose operands lie the other way round."""

    @T.prim_func
    def kernel(x: T.Tensor((32, 64), "float16"), w: T.Tensor((32, 48), "float16"), y: T.Tensor((64, 48), "float32")):
        with T.Kernel(1):
            x_l1 = T.alloc_l1((32, 64), "float16")
            w_l1 = T.alloc_l1((32, 48), "float16")
            a = T.alloc_l0a((32, 64), "float16")
            b = T.alloc_l0b((32, 48), "float16")
            acc = T.alloc_l0c((64, 48), "float32")
            T.copy(x, x_l1)
            T.copy(w, w_l1)
            T.copy(x_l1, a)
            T.copy(w_l1, b)
            T.gemm(a[:24, :], b[:24, :], acc, transpose_A=True, clear_accum=True)
            T.copy(acc, y)

    x, w = floats(32, 64, dtype="float16"), floats(32, 48, dtype="float16")
    (got,) = npu.run(kernel, x, w)
    np.testing.assert_allclose(got, x[:24].astype(np.float64).T @ w[:24].astype(np.float64), rtol=1e-5, atol=1e-5)


def hf32(x, away):
    """float32 with a mantissa of 11 bits, by scaling to integers in float64."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    scaled = mantissa * 2**12
    rounded = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5) if away else np.rint(scaled)
    return np.ldexp(rounded, exponent - 12)


@pytest.mark.parametrize("mode, away", [("nearest_even", False), ("nearest_zero", True), (None, None)])
def test_hf32(mode, away):
    x, w = floats(16, 32), floats(16, 32)
    x[0] = np.float32(1 + 2.0**-12) * 2.0 ** np.arange(-16, 16)  # ties, and
    x[1] = -np.float32(1 + 3 * 2.0**-12)  # ties that go up in both modes
    (got,) = npu.run(product("float32", "float32", 16, 16, 32, hf32=mode), x, w)
    a, b = (v.astype(np.float64) if mode is None else hf32(v, away) for v in (x, w))
    np.testing.assert_allclose(got, a @ b.T, rtol=2e-6, atol=1e-5)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert mode is None or not np.allclose(got, exact, rtol=2e-6, atol=1e-5)


def test_a_mode_that_an_operation_of_another_type_does_not_feel():
    x, w = floats(32, 128, dtype="float16"), floats(48, 128, dtype="float16")
    (got,) = npu.run(product("float16", "float32", hf32="nearest_even"), x, w)
    np.testing.assert_allclose(got, x.astype(np.float64) @ w.astype(np.float64).T, rtol=2e-5, atol=2e-5)


# --- MX formats -----------------------------------------------------------------------------------------------------


def scaled(x, scales):
    """Values of an MX format in float64: an e8m0 byte s, for 32 elements of a row, stands for 2**(s - 127)."""
    return x.astype(np.float64) * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)


@pytest.mark.parametrize("level", ["l1", "l0"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_block_scaled_products(dtype, pairs, level):
    """Scales as bytes, a row for a row of the operand; or as pairs in 16 bits, transposed on the way to L1."""
    m, n, k = 32, 48, 256
    scale_dtype, per = ("uint16", 64) if pairs else ("uint8", 32)
    columns = k // per

    def shape(rows):
        return (columns, rows) if pairs else (rows, columns)

    @T.prim_func
    def kernel(
        x: T.Tensor((m, k), dtype), w: T.Tensor((n, k), dtype), sx: T.Tensor(shape(m), scale_dtype),
        sw: T.Tensor(shape(n), scale_dtype), y: T.Tensor((m, n), "float32"),
    ):  # fmt: skip
        with T.Kernel(1):
            x_l1 = T.alloc_l1((m, k), dtype)
            w_l1 = T.alloc_l1((n, k), dtype)
            sx_l1 = T.alloc_l1((m, columns), scale_dtype)
            sw_l1 = T.alloc_l1((n, columns), scale_dtype)
            acc = T.alloc_l0c((m, n), "float32")
            T.copy(x, x_l1)
            T.copy(w, w_l1)
            T.copy(sx, sx_l1, transpose=pairs)
            T.copy(sw, sw_l1, transpose=pairs)
            half = columns // 2
            if level == "l1":
                T.gemm_blockscaled(x_l1, w_l1, acc, sx_l1, sw_l1, transpose_B=True, clear_accum=True)
            else:
                a = T.alloc_l0a((m, k // 2), dtype)
                b = T.alloc_l0b((n, k // 2), dtype)
                sa = T.alloc_l0a_sf(a, scale_dtype)
                sb = T.alloc_l0b_sf(b, scale_dtype)
                for step in T.serial(2):
                    T.copy(x_l1[:, step * (k // 2) : (step + 1) * (k // 2)], a)
                    T.copy(w_l1[:, step * (k // 2) : (step + 1) * (k // 2)], b)
                    T.copy(sx_l1[:, step * half : (step + 1) * half], sa)
                    T.copy(sw_l1[:, step * half : (step + 1) * half], sb)
                    T.gemm_blockscaled(a, b, acc, sa, sb, transpose_B=True, clear_accum=step == 0)
            T.copy(acc, y)

    x, w = floats(m, k, dtype=dtype), floats(n, k, dtype=dtype)
    sx, sw = (RNG.integers(120, 135, (rows, k // 32)).astype(np.uint8) for rows in (m, n))
    given = [np.ascontiguousarray(s.view(np.uint16).T) if pairs else s for s in (sx, sw)]
    (got,) = npu.run(kernel, x, w, *given)
    want = scaled(x, sx) @ scaled(w, sw).T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_packed_four_bit_floats():
    """Two to a byte in GM, the first in the low half, read through a view."""

    @T.prim_func
    def kernel(
        x: T.Tensor((16, 32), "int8"), w: T.Tensor((16, 64), "float4_e2m1fn"), s: T.Tensor((16, 2), "uint8"),
        y: T.Tensor((16, 16), "float32"),
    ):  # fmt: skip
        four_bits = T.view(x, (16, 64), "float4_e2m1fn")
        with T.Kernel(1):
            x_l1 = T.alloc_l1((16, 64), "float4_e2m1fn")
            w_l1 = T.alloc_l1((16, 64), "float4_e2m1fn")
            s_l1 = T.alloc_l1((16, 2), "uint8")
            acc = T.alloc_l0c((16, 16), "float32")
            T.copy(four_bits, x_l1)
            T.copy(w, w_l1)
            T.copy(s, s_l1)
            T.gemm_blockscaled(x_l1, w_l1, acc, s_l1, s_l1, transpose_B=True, clear_accum=True)
            T.copy(acc, y)

    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = RNG.integers(0, 16, (16, 64))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    w = values[RNG.integers(0, 16, (16, 64))]
    s = np.full((16, 2), 128, np.uint8)
    (got,) = npu.run(kernel, packed, w.astype(ml_dtypes.float4_e2m1fn), s)
    np.testing.assert_array_equal(got, 4 * values[codes] @ w.T)


def test_too_few_scales():
    @T.prim_func
    def kernel(
        x: T.Tensor((16, 128), "float8_e4m3fn"), s: T.Tensor((16, 2), "uint8"), y: T.Tensor((16, 16), "float32")
    ):
        with T.Kernel(1):
            x_l1 = T.alloc_l1((16, 128), "float8_e4m3fn")
            s_l1 = T.alloc_l1((16, 2), "uint8")
            acc = T.alloc_l0c((16, 16), "float32")
            T.copy(x, x_l1)
            T.copy(s, s_l1)
            T.gemm_blockscaled(x_l1, x_l1, acc, s_l1, s_l1, transpose_B=True, clear_accum=True)
            T.copy(acc, y)

    x = floats(16, 128, dtype="float8_e4m3fn")
    with pytest.raises(errors.HardwareConstraintError, match=r"test_language_products\.py:\d+: scales \[16, 2\]"):
        npu.run(kernel, x, np.full((16, 2), 127, np.uint8))
