"""Matrix products on the NPU model, against NumPy in float64."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw import programs

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


@pytest.mark.parametrize("fused", [True, False])
def test_vmap_over_some_operands(fused):
    program = programs.gemm(20, 24, 40, TILES, "float32", "float32", fused=fused)
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


# --- K loops that are not the product of whole arrays ---------------------------------------------------------------


def one_tile(rows: int, steps: int, k_start: str | int = 0):
    """A tile of ``lhs @ rhs`` from a row that is read from memory, ``steps`` tiles of K deep."""
    lhs, rhs = (
        programs.buffer("lhs", Space.GM, (rows, 100), "float32"),
        programs.buffer("rhs", Space.GM, (100, 48), "float32"),
    )
    row, out = programs.buffer("row", Space.GM, (1,), "int32"), programs.buffer("out", Space.GM, (16, 48), "float32")
    a, b = programs.buffer("a", Space.L1, (16, 32), "float32"), programs.buffer("b", Space.L1, (48, 32), "float32")
    c = programs.buffer("c", Space.L0C, (16, 48), "float32")
    k = programs.op("add", k_start, programs.op("mul", "k", 32))
    body = (
        programs.copy(programs.region(lhs, "m", k, extents=(16, 32)), a),
        programs.copy(programs.region(rhs, k, 0, extents=(32, 48)), b, transpose=True),
        ir.Gemm(programs.region(a), programs.region(b), programs.region(c), False, True, programs.op("eq", "k", 0)),
    )
    start = ir.Let(programs.var("m"), programs.load(row, 0))
    return programs.program(
        [lhs, rhs, row, out], [a, b, c], start, programs.loop("k", steps, *body), programs.copy(c, out)
    )


@pytest.mark.parametrize("row", [0, 5, 24, 30, 50])
def test_one_tile_at_a_row_from_memory(row):
    """The rest of the product is not computed; rows beyond the end count as zero."""
    program = one_tile(40, 4)
    rng = np.random.default_rng(1)
    lhs, rhs = rng.standard_normal((40, 100)).astype(np.float32), rng.standard_normal((100, 48)).astype(np.float32)
    expected = np.zeros((16, 48))
    expected[: max(0, 40 - row)] = lhs[row : row + 16].astype(np.float64) @ rhs
    np.testing.assert_allclose(run(program, lhs, rhs, np.array([row], np.int32)), expected, atol=1e-4)
    shapes = str(jax.make_jaxpr(lambda *xs: executor.run(program, xs, [3]))(lhs, rhs, np.array([row], np.int32)))
    assert "f32[40,48]" not in shapes and shapes.count("dot_general") == 1


@pytest.mark.parametrize(("steps", "k_start"), [(1, 0), (2, 0), (2, 32), (3, 64), (4, 32)])
def test_a_part_of_k(steps, k_start):
    program = one_tile(16, steps, k_start)
    rng = np.random.default_rng(2)
    lhs, rhs = rng.standard_normal((16, 100)).astype(np.float32), rng.standard_normal((100, 48)).astype(np.float32)
    part = slice(k_start, k_start + 32 * steps)
    result = run(program, lhs, rhs, np.array([0], np.int32))
    np.testing.assert_allclose(result, lhs[:, part].astype(np.float64) @ rhs[part], atol=1e-4)


def test_batches_of_both_operands_go_together():
    batch, m, n, k = 3, 16, 16, 40
    lhs = programs.buffer("lhs", Space.GM, (batch, m, k), "float32")
    rhs = programs.buffer("rhs", Space.GM, (batch, k, n), "float32")
    scratch, out = (
        programs.buffer("unused", Space.GM, (1,), "float32"),
        programs.buffer("out", Space.GM, (batch, m, n), "float32"),
    )
    a, b = programs.buffer("a", Space.L1, (m, 32), "float32"), programs.buffer("b", Space.L1, (n, 32), "float32")
    c = programs.buffer("c", Space.L0C, (m, n), "float32")
    step = programs.op("mul", "k", 32)
    body = (
        programs.copy(programs.region(lhs, "bx", 0, step, extents=(1, m, 32)), a),
        programs.copy(programs.region(rhs, "bx", step, 0, extents=(1, 32, n)), b, transpose=True),
        ir.Gemm(programs.region(a), programs.region(b), programs.region(c), False, True, programs.op("eq", "k", 0)),
    )
    store = programs.copy(c, programs.region(out, "bx", 0, 0, extents=(1, m, n)))
    program = programs.program([lhs, rhs, scratch, out], [a, b, c], programs.loop("k", 2, *body), store, blocks=batch)
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((batch, m, k)).astype(np.float32), rng.standard_normal((batch, k, n)).astype(np.float32)
    np.testing.assert_allclose(run(program, x, y, np.zeros(1, np.float32)), x.astype(np.float64) @ y, atol=1e-4)


def test_accumulating_onto_what_is_there():
    """A K loop that never clears adds to what an earlier one left."""
    program = programs.gemm(32, 32, 64, TILES, "float32", "float32")
    loop = next(stmt for stmt in ir.walk(program.body) if isinstance(stmt, ir.For) and stmt.var.name == "k")
    again = dataclasses.replace(
        loop,
        body=tuple(
            dataclasses.replace(s, clear=ir.Const(False, "bool")) if isinstance(s, ir.Gemm) else s for s in loop.body
        ),
    )

    def twice(body):
        result = []
        for stmt in body:
            blocks = {
                field: twice(getattr(stmt, field))
                for field in ("body", "then")
                if hasattr(stmt, field) and stmt is not loop
            }
            result += [stmt, again] if stmt is loop else [dataclasses.replace(stmt, **blocks) if blocks else stmt]
        return tuple(result)

    doubled = dataclasses.replace(program, body=twice(program.body))
    lhs, rhs, bias = operands(program)
    assert error(run(doubled, lhs, rhs, bias), 2 * expected([lhs, rhs, 0 * bias]) + np.asarray(bias)) < 1e-5


def test_products_under_a_condition_from_memory_are_not_computed_ahead():
    """Of a grid that mostly does nothing, the whole product would be wasted."""
    program = programs.gemm(64, 64, 64, TILES, "float32", "float32")
    bias = program.buffers["bias"]
    guarded = ir.If(programs.op("gt", programs.load(bias, 0), programs.const(0.0, "float32")), program.body)
    program = dataclasses.replace(program, body=(guarded,))
    lhs, rhs, bias = operands(program)
    result = run(program, lhs, rhs, abs(bias))
    assert error(result, expected([lhs, rhs, abs(bias)])) < TOLERANCE["float32"]
    assert np.isnan(run(program, lhs, rhs, -abs(bias))).all()
    jaxpr = str(jax.make_jaxpr(lambda *xs: executor.run(program, xs, [3]))(lhs, rhs, bias))
    assert "f32[64,64] = dot_general" not in jaxpr and "dot_general" in jaxpr
