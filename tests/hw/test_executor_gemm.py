"""Matrix products on the NPU model, against NumPy in float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from glass_jax.hw import executor

TILES = (32, 32, 32)
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def operands(program, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    arrays = []
    for name in program.params[:-1]:
        buffer = program.buffers[name]
        if buffer.dtype.startswith("int"):
            values = rng.integers(-128, 128, buffer.shape)
        else:
            values = rng.standard_normal(buffer.shape)
        arrays.append(jnp.asarray(values, buffer.dtype))
    return arrays


def expected(arrays, transpose_lhs=False, transpose_rhs=False, epilogue=None) -> np.ndarray:
    lhs, rhs, bias = (np.asarray(array).astype(np.float64) for array in arrays)
    lhs = lhs.swapaxes(-1, -2) if transpose_lhs else lhs
    z = lhs @ (rhs.T if transpose_rhs else rhs) + bias
    if epilogue == "relu":
        return np.maximum(z, 0)
    if epilogue == "gelu":
        return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return z


def error(actual, reference) -> float:
    actual = np.asarray(actual).astype(np.float64)
    return np.linalg.norm(actual - reference) / np.linalg.norm(reference)


def run(program, *arrays):
    return jax.jit(lambda *xs: executor.run(program, xs, [3])[0])(*arrays)


@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 7, 5), (17, 33, 65), (100, 40, 130), (33, 96, 32)], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_ragged_shapes(shape, fused):
    program = programs.gemm(*shape, TILES, fused=fused)
    arrays = operands(program)
    assert error(run(program, *arrays), expected(arrays)) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float32"),
    ],
)
def test_dtypes(dtype, out):
    program = programs.gemm(33, 40, 70, TILES, dtype, out)
    arrays = operands(program)
    result = run(program, *arrays)
    assert result.dtype == out
    assert error(result, expected(arrays)) < TOLERANCE[out]


@pytest.mark.parametrize("fused", [True, False])
def test_int8_is_exact(fused):
    program = programs.gemm(8, 16, 2500, (16, 16, 512), "int8", "int32", fused=fused)
    arrays = operands(program)
    # The largest sums there are: float32 would not hold them exactly.
    arrays[0], arrays[1] = jnp.full_like(arrays[0], -128).at[0].set(127), jnp.full_like(arrays[1], -128).at[0, 0].set(1)
    np.testing.assert_array_equal(run(program, *arrays), expected(arrays).astype(np.int64))


@pytest.mark.parametrize(("transpose_lhs", "transpose_rhs", "fused"), list(itertools.product([False, True], repeat=3)))
def test_transposes(transpose_lhs, transpose_rhs, fused):
    program = programs.gemm(
        40,
        33,
        70,
        (32, 16, 64),
        "float32",
        "float32",
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        fused=fused,
    )
    arrays = operands(program)
    assert error(run(program, *arrays), expected(arrays, transpose_lhs, transpose_rhs)) < TOLERANCE["float32"]


@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("cores", [1, 3, 32])
def test_batched_grid_with_epilogue(epilogue, cores):
    program = programs.gemm(40, 70, 33, TILES, "float16", "float32", batch=3, cores=cores, epilogue=epilogue)
    arrays = operands(program)
    assert error(run(program, *arrays), expected(arrays, epilogue=epilogue)) < 1e-5


def test_without_jit():
    program = programs.gemm(16, 16, 64, TILES)
    arrays = operands(program)
    (result,) = executor.run(program, arrays, [3])
    assert error(result, expected(arrays)) < TOLERANCE["float16"]


def test_vmap_over_some_operands():
    program = programs.gemm(20, 24, 40, TILES, "float32", "float32")
    lhs, rhs, bias = operands(program)
    several = jnp.stack([lhs, 2 * lhs, lhs + 1])
    results = jax.vmap(lambda x: run(program, x, rhs, bias))(several)
    for result, x in zip(results, several, strict=True):
        assert error(result, expected([x, rhs, bias])) < TOLERANCE["float32"]


@pytest.mark.parametrize("fused", [True, False])
def test_inside_shard_map_with_varying_axes(fused):
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec
    program = programs.gemm(20, 24, 70, TILES, "float32", "float32", batch=1, fused=fused)
    lhs, rhs, bias = operands(program)
    both = jnp.concatenate([lhs, 3 * lhs])

    @jax.jit
    def sharded(x, rhs, bias):
        return jax.shard_map(
            lambda *xs: executor.run(program, xs, [3])[0],
            mesh=mesh,
            in_specs=(spec("x"), spec(), spec()),
            out_specs=spec("x"),
            check_vma=True,
        )(x, rhs, bias)

    placed = [
        jax.device_put(array, jax.NamedSharding(mesh, s))
        for array, s in ((both, spec("x")), (rhs, spec()), (bias, spec()))
    ]
    assert error(sharded(*placed), expected([both, rhs, bias])) < TOLERANCE["float32"]


def primitives(jaxpr) -> list[str]:
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            found += primitives(inner) if hasattr(inner, "eqns") else []
    return found


def traced(program) -> list[str]:
    arrays = operands(program)
    return primitives(jax.make_jaxpr(lambda *xs: executor.run(program, xs, [3]))(*arrays).jaxpr)


def test_compact_whatever_the_grid():
    small = traced(programs.gemm(64, 64, 64, TILES, cores=2))
    large = traced(programs.gemm(640, 640, 640, TILES, cores=16))
    assert len(large) == len(small)


def test_a_k_loop_is_one_product_and_the_guard_a_trip_count():
    found = traced(programs.gemm(64, 64, 640, TILES))
    assert found.count("dot_general") == 1
    assert "cond" not in found and "gather" not in found and "scatter" not in found
    # The grid, and the tiles of a core; nothing else loops.
    assert sum(name in ("while", "scan") for name in found) == 2
