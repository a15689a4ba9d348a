"""TileLang kernels on the NPU model: decoded, executed as JAX, and compared with NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tilelang.ascend.language as T

from glass_jax.hw.model import executor
from glass_jax.lowering.tilelang.decode import decode
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel
from glass_jax.lowering.tiling import GemmTiles

ROWS, COLUMNS, BLOCK = 24, 40, 8


def run(func, *arrays):
    program = decode(func)
    result = jax.jit(lambda *xs: executor.run(program, xs, [len(program.params) - 1])[0])(*map(jnp.asarray, arrays))
    return np.asarray(result).astype(np.float64)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "out", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("float16", "float16", 2e-3),
        ("bfloat16", "bfloat16", 1e-2),
        ("float8_e4m3fn", "float32", 1e-5),
        ("int8", "int32", 0),
    ],
)
@pytest.mark.parametrize("tiles", [None, GemmTiles(32, 32, 64, 2)])
def test_the_gemm_kernel(dtype, out, tolerance, tiles):
    m, n, k = 40, 64, 160
    kernel = GemmKernel(2, True, False, m, n, k, dtype, out, bias=True, activation="relu", tiles=tiles)
    rng = np.random.default_rng(1)
    if dtype == "int8":
        lhs, rhs = (jnp.asarray(rng.integers(-128, 128, shape), dtype) for shape in ((2, m, k), (1, k, n)))
    else:
        lhs, rhs = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((2, m, k), (1, k, n)))
    bias = jnp.asarray(rng.integers(-9, 9, (1, n)), kernel.accumulator)
    exact = np.asarray(lhs).astype(np.float64) @ np.asarray(rhs).astype(np.float64) + np.asarray(bias)
    exact = np.maximum(exact, 0)
    result = run(kernel.build("950DT"), lhs, rhs, bias)
    assert np.linalg.norm(result - exact) <= tolerance * np.linalg.norm(exact)


def test_rows_normalized_by_a_reduction(x):
    @T.prim_func
    def kernel(
        source: T.Tensor((ROWS, COLUMNS), "float32"),
        scale: T.Tensor((COLUMNS,), "float32"),
        result: T.Tensor((ROWS, COLUMNS), "float16"),
    ):
        with T.Kernel(ROWS // BLOCK) as block:
            rows = T.alloc_shared((BLOCK, COLUMNS), "float32")
            weights = T.alloc_shared((COLUMNS,), "float32")
            out = T.alloc_shared((BLOCK, COLUMNS), "float16")
            T.copy(source[block * BLOCK : block * BLOCK + BLOCK, :], rows)
            T.copy(scale, weights)
            with T.SimtVF(threads=256):
                values = T.alloc_fragment((BLOCK, COLUMNS), "float32")
                squares = T.alloc_fragment((BLOCK, COLUMNS), "float32")
                total = T.alloc_fragment((BLOCK,), "float32")
                T.copy(rows, values)
                for i, j in T.Parallel(BLOCK, COLUMNS):
                    squares[i, j] = values[i, j] * values[i, j]
                T.reduce_sum(squares, total, dim=1)
                for i in T.Parallel(BLOCK):
                    total[i] = T.rsqrt(total[i] / COLUMNS + 1e-6)
                for i, j in T.Parallel(BLOCK, COLUMNS):
                    out[i, j] = T.cast(values[i, j] * total[i] * weights[j], "float16")
            T.copy(out, result[block * BLOCK : block * BLOCK + BLOCK, :])

    scale = np.random.default_rng(2).standard_normal(COLUMNS).astype(np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(run(kernel, x, scale), exact, rtol=2**-10, atol=1e-6)


def test_predicates(x):
    @T.prim_func
    def kernel(source: T.Tensor((ROWS, COLUMNS), "float32"), result: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(ROWS // BLOCK) as block:
            rows = T.alloc_shared((BLOCK, COLUMNS), "float32")
            out = T.alloc_shared((BLOCK, COLUMNS), "float32")
            T.copy(source[block * BLOCK : block * BLOCK + BLOCK, :], rows)
            with T.SimtVF(threads=128):
                for i, j in T.Parallel(BLOCK, COLUMNS):
                    value = rows[i, j]
                    if value > 0.0:
                        out[i, j] = T.log(1.0 + T.exp(value))
                    else:
                        out[i, j] = T.if_then_else(j < 10, value, -value)
            T.copy(out, result[block * BLOCK : block * BLOCK + BLOCK, :])

    z = x.astype(np.float64)
    exact = np.where(z > 0, np.log1p(np.exp(z)), np.where(np.arange(COLUMNS) < 10, z, -z))
    np.testing.assert_allclose(run(kernel, x), exact, rtol=1e-6)


def test_a_loop_over_rows(x):
    @T.prim_func
    def kernel(source: T.Tensor((ROWS, COLUMNS), "float32"), result: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(ROWS // BLOCK) as block:
            rows = T.alloc_shared((BLOCK, COLUMNS), "float32")
            out = T.alloc_shared((BLOCK, COLUMNS), "float32")
            T.copy(source[block * BLOCK : block * BLOCK + BLOCK, :], rows)
            with T.SimtVF(threads=128):
                for row in T.serial(BLOCK):
                    values = T.alloc_fragment((COLUMNS,), "float32")
                    largest = T.alloc_fragment((1,), "float32")
                    for j in T.Parallel(COLUMNS):
                        values[j] = rows[row, j]
                    T.reduce_max(values, largest, dim=0)
                    for j in T.Parallel(COLUMNS):
                        out[row, j] = T.exp(values[j] - largest[0])
            T.copy(out, result[block * BLOCK : block * BLOCK + BLOCK, :])

    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(run(kernel, x), exact, rtol=1e-6)
