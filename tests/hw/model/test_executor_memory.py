"""Copies, views, poison, units and control flow on the NPU model, against NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax.errors import HardwareConstraintError, UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw.programs import buffer, const, copy, load, loop, op, parallel, program, region, simt, store, var

M, N = 8, 16


def run(p: ir.Program, *arrays, outputs=None):
    outputs = [len(p.params) - 1] if outputs is None else outputs
    results = jax.jit(lambda *xs: executor.run(p, xs, outputs))(*map(jnp.asarray, arrays))
    return np.asarray(results[0]) if len(results) == 1 else tuple(map(np.asarray, results))


def matrix(m: int = M, n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, n)).astype(np.float32)


def gm(name: str, *shape: int, dtype: str = "float32") -> ir.Buffer:
    return buffer(name, Space.GM, shape, dtype)


def ub(name: str, *shape: int, dtype: str = "float32", storage: str | None = None) -> ir.Buffer:
    return buffer(name, Space.UB, shape, dtype, storage)


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int8", "uint8"])
def test_memory_nobody_wrote_shows(dtype):
    o, u = gm("o", M, N, dtype=dtype), ub("u", M, N, dtype=dtype)
    result = run(program([o], [u], copy(u, o)))
    if dtype.startswith(("float", "bfloat")):
        assert np.isnan(result.astype(np.float32)).all()
    else:
        assert (result > np.iinfo(result.dtype).max / 2).all()


def test_an_output_that_nobody_wrote_shows():
    x, o, u = gm("x", M, N), gm("o", M, N), ub("u", M // 2, N)
    p = program([x, o], [u], copy(region(x, extents=(M // 2, N)), u), copy(u, region(o, extents=(M // 2, N))))
    data = matrix()
    result = run(p, data)
    np.testing.assert_array_equal(result[: M // 2], data[: M // 2])
    assert np.isnan(result[M // 2 :]).all()


def test_memory_is_poisoned_anew_in_every_block():
    x, o, u = gm("x", 2, N), gm("o", 2, N), ub("u", 1, N)
    first = ir.If(op("eq", "bx", 0), (copy(region(x, 0, 0, extents=(1, N)), u),))
    p = program([x, o], [u], first, copy(u, region(o, "bx", 0, extents=(1, N))), blocks=2)
    data = matrix(2)
    result = run(p, data)
    np.testing.assert_array_equal(result[0], data[0])
    assert np.isnan(result[1]).all()


# --- copies at the edge of an array ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(M, N), (5, 11), (2 * M, 3 * N), (19, 35), (3, 40)], ids=str)
def test_clamped_both_ways(shape):
    """Tiles of [8, 16] over an array: nothing is read or written outside, every element goes through."""
    x, o, u = gm("x", *shape), gm("o", *shape), ub("u", M, N)
    rows, columns = (-(-size // block) for size, block in zip(shape, (M, N), strict=True))
    starts = op("mul", op("floordiv", "bx", columns), M), op("mul", op("floormod", "bx", columns), N)
    body = copy(region(x, *starts, extents=(M, N)), u), copy(u, region(o, *starts, extents=(M, N)))
    data = matrix(*shape)
    np.testing.assert_array_equal(run(program([x, o], [u], *body, blocks=rows * columns), data), data)


@pytest.mark.parametrize("start", [0, 3, 5, 8])
@pytest.mark.parametrize("traced", [False, True])
def test_gm_to_ub_leaves_the_tail_and_gm_to_l1_fills_it_with_zeros(start, traced):
    x, s = gm("x", M, N), gm("s", 1, dtype="int32")
    o, z = gm("o", M, N), gm("z", M, N)
    u, a, c = ub("u", M, N), buffer("a", Space.L1, (M, N), "float32"), buffer("c", Space.L0C, (M, M), "float32")
    unit = buffer("e", Space.L1, (M, N), "float32")
    identity = gm("i", M, N)
    place = ir.Let(var("p"), load(s, 0) if traced else const(start))
    source = region(x, "p", 0, extents=(M, N))
    body = (
        place, copy(source, u), copy(u, o), copy(source, a), copy(identity, unit),
        ir.Gemm(region(unit), region(a), region(c), False, True, const(True, "bool")),
        copy(c, region(z, extents=(M, M))),
    )  # fmt: skip
    p = program([x, s, identity, o, z], [u, a, c, unit], *body)
    data, eye = matrix(), np.eye(M, N, dtype=np.float32)
    left, filled = run(p, data, np.array([start], np.int32), eye, outputs=[3, 4])
    expected = np.full((M, N), np.nan, np.float32)
    expected[: M - start] = data[start:]
    np.testing.assert_array_equal(left, expected)
    np.testing.assert_allclose(filled[:, :M], np.nan_to_num(expected)[:, :M].T, rtol=1e-6)


def test_the_tail_that_a_copy_leaves_is_that_of_the_iteration_before():
    x, o, u = gm("x", 12, N), gm("o", 2, M, N), ub("u", M, N)
    body = copy(region(x, op("mul", "k", M), 0, extents=(M, N)), u), copy(u, region(o, "k", 0, 0, extents=(1, M, N)))
    data = matrix(12)
    result = run(program([x, o], [u], loop("k", 2, *body)), data)
    np.testing.assert_array_equal(result, np.stack([data[:M], np.concatenate([data[M:], data[4:M]])]))


def test_beyond_the_end_of_rows_too():
    x, o, u = gm("x", 5, 11), gm("o", M, N), ub("u", M, N)
    p = program(
        [x, o], [u], ir.Fill(region(u), const(7.0, "float32")), copy(region(x, 2, 3, extents=(M, N)), u), copy(u, o)
    )
    data, expected = matrix(5, 11), np.full((M, N), 7, np.float32)
    expected[:3, :8] = data[2:, 3:]
    np.testing.assert_array_equal(run(p, data), expected)


def test_transposed_converted_and_unit_dimensions():
    x, o = gm("x", 2, M, N), gm("o", N, M)
    a, e = buffer("a", Space.L1, (N, M), "float16"), buffer("e", Space.L1, (N, N), "float16")
    c, eye = buffer("c", Space.L0C, (N, M), "float32"), gm("eye", N, N)
    gemm = ir.Gemm(region(e), region(a), region(c), False, False, const(True, "bool"))
    fetch = copy(region(x, 1, 0, 0, extents=(1, M, N)), a, transpose=True)
    p = program([x, eye, o], [a, e, c], fetch, copy(eye, e), gemm, copy(c, o))
    data = np.stack([matrix(seed=1), matrix(seed=2)])
    np.testing.assert_array_equal(run(p, data, np.eye(N, dtype=np.float32)), data[1].T.astype(np.float16))


def test_shapes_that_do_not_fit_are_named():
    x, o, u = gm("x", M, N), gm("o", M, N), ub("u", M, N // 4)
    p = program([x, o], [u], copy(region(x, extents=(M, N)), u, loc="kernel.py:3"), copy(u, o))
    with pytest.raises(HardwareConstraintError, match=r"kernel\.py:3: .*'x' to 'u'.*\(8, 16\).*\(8, 4\)"):
        run(p, matrix())


# --- vector units ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", ["rows", "columns"])
def test_dual_copy_splits_and_joins(dual):
    half = (M // 2, N) if dual == "rows" else (M, N // 2)
    x, o, u, v = gm("x", M, N), gm("o", M, N), ub("u", *half), ub("v", *half)
    nest = parallel(
        {"i": half[0], "j": half[1]}, store(v, ("i", "j"), op("add", load(u, "i", "j"), ir.Cast(var("sid"), "float32")))
    )
    p = program(
        [x, o], [u, v], copy(x, u, dual=dual), simt(nest), copy(v, o, dual=dual, double=True), units=2, unit="sid"
    )
    data = matrix()
    second = np.zeros_like(data)
    (second[M // 2 :] if dual == "rows" else second[:, N // 2 :])[...] = 1
    np.testing.assert_array_equal(run(p, data), data + second)


def test_dual_copy_to_a_ragged_array():
    x, o, u = gm("x", 5, N), gm("o", 5, N), ub("u", M // 2, N)
    p = program(
        [x, o],
        [u],
        copy(region(x, extents=(M, N)), u, dual="rows"),
        copy(u, region(o, extents=(M, N)), dual="rows"),
        units=2,
    )
    data = matrix(5)
    np.testing.assert_array_equal(run(p, data), data)


def test_copies_and_branches_of_each_unit():
    """What depends on the unit's index is done by each unit for itself."""
    x, o, u = gm("x", M, N), gm("o", M, N), ub("u", M // 2, N)
    start = op("mul", "sid", M // 2)
    first = ir.If(op("eq", "sid", 0), (ir.Fill(region(u), const(0.0, "float32")),))
    half = {"extents": (M // 2, N)}
    p = program(
        [x, o],
        [u],
        copy(region(x, start, 0, **half), u),
        first,
        copy(u, region(o, start, 0, **half)),
        units=2,
        unit="sid",
    )
    data = matrix()
    expected = data.copy()
    expected[: M // 2] = 0
    np.testing.assert_array_equal(run(p, data), expected)


def test_what_one_unit_does_leaves_the_other_units_memory():
    """A loop and a fill that only the first unit executes: the fill does not make the loop's result unneeded."""
    x, o, u = gm("x", M, N), gm("o", M, N), ub("u", M // 2, N)
    double = simt(
        parallel({"i": M // 2, "j": N}, store(u, ("i", "j"), op("mul", const(2.0, "float32"), load(u, "i", "j"))))
    )
    first = ir.If(op("eq", "sid", 0), (loop("k", 3, double), ir.Fill(region(u), const(0.0, "float32"))))
    p = program([x, o], [u], copy(x, u, dual="rows"), first, copy(u, o, dual="rows"), units=2, unit="sid")
    data = matrix()
    expected = data.copy()
    expected[: M // 2] = 0
    np.testing.assert_array_equal(run(p, data), expected)


def test_both_units_writing_one_place():
    o, u = gm("o", 1, N), ub("u", 1, N)
    nest = parallel({"j": N}, store(u, (0, "j"), ir.Cast(var("sid"), "float32")))
    p = program([o], [u], simt(nest), copy(u, o), units=2, unit="sid")
    np.testing.assert_array_equal(run(p), np.ones((1, N)))


def test_both_units_writing_global_memory_themselves():
    o = gm("o", N)
    p = program(
        [o], [], simt(parallel({"j": N}, store(o, ("j",), ir.Cast(var("sid"), "float32")))), units=2, unit="sid"
    )
    np.testing.assert_array_equal(run(p), np.ones(N))
    own = store(o, (op("add", op("mul", "sid", N // 2), "j"),), ir.Cast(var("sid"), "float32"))
    p = program([o], [], simt(parallel({"j": N // 2}, own)), units=2, unit="sid")
    np.testing.assert_array_equal(run(p), np.repeat([0, 1], N // 2))


# --- views ----------------------------------------------------------------------------------------------------------


def test_reshaped_view():
    x, o, u, v = gm("x", M, N), gm("o", M * N), ub("u", M, N), ub("v", M * N, storage="u")
    data = matrix()
    np.testing.assert_array_equal(run(program([x, o], [u, v], copy(x, u), copy(v, o)), data), data.ravel())


def test_bytes_read_as_another_type():
    x, o = gm("x", M, N), gm("o", M, 2 * N, dtype="int16")
    u, v = ub("u", M, N), ub("v", M, 2 * N, dtype="int16", storage="u")
    data = matrix()
    np.testing.assert_array_equal(run(program([x, o], [u, v], copy(x, u), copy(v, o)), data), data.view(np.int16))


def test_writing_a_smaller_view_keeps_the_rest():
    x, o = gm("x", M, N), gm("o", M, N)
    u, v = ub("u", M, N), ub("v", N, dtype="int32", storage="u")
    nest = parallel({"j": N}, store(v, ("j",), var("j")))
    data = matrix()
    expected = data.copy()
    expected[0] = np.arange(N, dtype=np.int32).view(np.float32)
    np.testing.assert_array_equal(run(program([x, o], [u, v], copy(x, u), simt(nest), copy(u, o)), data), expected)


# --- control flow ---------------------------------------------------------------------------------------------------


def test_while_and_scalar_variables():
    """The number of halvings until a value read from memory is 0."""
    x, o = gm("x", 1, dtype="int32"), gm("o", 1, dtype="int32")
    n, count, u = (buffer(name, Space.SCALAR, (1,), "int32") for name in ("n", "count", "u"))
    result = ub("r", 1, dtype="int32")
    body = (
        store(n, (0,), load(x, 0)),
        store(count, (0,), const(0)),
        ir.While(
            op("gt", load(n, 0), 0),
            (store(n, (0,), op("floordiv", load(n, 0), 2)), store(count, (0,), op("add", load(count, 0), 1))),
        ),
        simt(store(result, (0,), load(count, 0))),
        copy(result, o),
    )
    p = program([x, o], [n, count, u, result], *body)
    for value in (0, 1, 37):
        assert run(p, np.array([value], np.int32)) == [value.bit_length()]


@pytest.mark.parametrize("flag", [0, 1])
def test_if_on_a_value_from_memory(flag):
    x, s, o, u = gm("x", M, N), gm("s", 1, dtype="int32"), gm("o", M, N), ub("u", M, N)
    branch = ir.If(op("eq", load(s, 0), 1), (copy(x, u),), (ir.Fill(region(u), const(5.0, "float32")),))
    data = matrix()
    result = run(program([x, s, o], [u], branch, copy(u, o)), data, np.array([flag], np.int32))
    np.testing.assert_array_equal(result, data if flag else np.full_like(data, 5))


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_loop_of_a_length_from_memory(trips):
    """What a loop writes stays as it was if the loop does not run."""
    x, s, o, u = gm("x", M, N), gm("s", 1, dtype="int32"), gm("o", M, N), ub("u", M, N)
    double = simt(parallel({"i": M, "j": N}, store(u, ("i", "j"), op("mul", const(2.0, "float32"), load(u, "i", "j")))))
    p = program([x, s, o], [u], copy(x, u), loop("k", load(s, 0), double), copy(u, o))
    data = matrix()
    np.testing.assert_array_equal(run(p, data, np.array([trips], np.int32)), data * 2**trips)


@pytest.mark.parametrize("cores", [1, 3, 5, 8])
def test_guard_of_a_persistent_loop(cores):
    """Each row once, whatever the number of cores; the guard also tells that rows are inside."""
    rows = 7
    x, o, u = gm("x", rows, N), gm("o", rows, N), ub("u", 1, N)
    tile = op("add", op("mul", "w", cores), "bx")
    work = copy(region(x, tile, 0, extents=(1, N)), u), copy(u, region(o, tile, 0, extents=(1, N)))
    persistent = loop("w", -(-rows // cores), ir.If(op("lt", tile, rows), work))
    p = program([x, o], [u], persistent, blocks=cores)
    data = matrix(rows)
    np.testing.assert_array_equal(run(p, data), data)
    jaxpr = str(jax.make_jaxpr(lambda x: executor.run(p, [x], [1]))(data))
    assert "cond[" not in jaxpr and "pad[" not in jaxpr


def test_a_guard_does_not_lengthen_its_loop():
    rows, cores = 7, 3
    x, o, u = gm("x", rows, N), gm("o", rows, N), ub("u", 1, N)
    tile = op("add", op("mul", "w", cores), "bx")
    work = copy(region(x, tile, 0, extents=(1, N)), u), copy(u, region(o, tile, 0, extents=(1, N)))
    p = program([x, o], [u], loop("w", 2, ir.If(op("lt", tile, rows), work)), blocks=cores)
    data = matrix(rows)
    np.testing.assert_array_equal(run(p, data), np.where(np.arange(rows)[:, None] < 2 * cores, data, np.nan))


def test_an_accumulator_goes_through_a_loop_and_a_temporary_does_not():
    x, o = gm("x", 4, N), gm("o", 1, N)
    total, row = ub("total", 1, N), ub("row", 1, N)
    step = (
        copy(region(x, "k", 0, extents=(1, N)), row),
        simt(parallel({"j": N}, store(row, (0, "j"), op("mul", const(3.0, "float32"), load(row, 0, "j"))))),
        simt(parallel({"j": N}, store(total, (0, "j"), op("add", load(total, 0, "j"), load(row, 0, "j"))))),
    )
    p = program(
        [x, o], [total, row], ir.Fill(region(total), const(0.0, "float32")), loop("k", 4, *step), copy(total, o)
    )
    data = matrix(4)
    np.testing.assert_allclose(run(p, data), 3 * data.sum(0, keepdims=True), rtol=1e-5)


# --- arguments ------------------------------------------------------------------------------------------------------


def simple() -> ir.Program:
    x, o, u = gm("x", M, N), gm("o", M, N), ub("u", M, N)
    return program([x, o], [u], copy(x, u), copy(u, o))


@pytest.mark.parametrize(
    "bad", [np.zeros((M, N + 1), np.float32), np.zeros((M, N), np.float16), np.zeros(N, np.float32)]
)
def test_wrong_argument_is_named(bad):
    with pytest.raises(HardwareConstraintError, match=r"'x' of 'kernel' is float32\[8, 16\], the argument is float"):
        run(simple(), bad)


def test_wrong_number_of_arguments():
    with pytest.raises(HardwareConstraintError, match=r"takes 1 arrays \(x\), not 2"):
        run(simple(), matrix(), matrix())


def test_dynamic_dimension_is_the_arguments():
    rows = ir.Var("rows")
    x, o, u = gm("x", M, N), gm("o", 3 * M, N), ub("u", M, N)
    x = dataclasses.replace(x, shape=(rows, N))
    start = op("mul", "k", M)
    count = op("floordiv", op("add", rows, M - 1), M)
    body = copy(region(x, start, 0, extents=(M, N)), u), copy(u, region(o, start, 0, extents=(M, N)))
    p = program([x, o], [u], loop("k", count, *body))
    data = matrix(2 * M)
    result = run(p, data)
    np.testing.assert_array_equal(result[: 2 * M], data)
    assert np.isnan(result[2 * M :]).all()


def test_what_is_not_there_yet_says_so():
    p = program([gm("x", M, N)], [], ir.Op("no_such_operation", (), loc="kernel.py:12"))
    with pytest.raises(UnsupportedError, match=r"kernel\.py:12: .*'no_such_operation' yet"):
        executor.run(p, [], [0])
