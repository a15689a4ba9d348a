"""Loops of SIMD regions, at once where that is the same and one after the other where it is not, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw import programs
from tests.hw import simd_programs as simd
from tests.hw.simd_programs import address, pset, register

ZEROING = ("MODE_ZEROING",)
ROWS, COLUMNS = 16, 128
X = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def _run(body, others=(), x=X, out=(ROWS, COLUMNS), dtype="float32", units=1, unit=None):
    """The UB buffer ``out`` after a SIMD region that begins with ``x`` in UB, and the compiled program's text."""
    m = programs.buffer("m", Space.GM, x.shape, x.dtype.name)
    result = programs.buffer("result", Space.GM, (units, *out), dtype)
    xs, outs = programs.buffer("x", Space.UB, x.shape, x.dtype.name), programs.buffer("out", Space.UB, out, dtype)
    back = programs.copy(programs.region(outs), programs.region(result, unit or 0, *(0,) * len(out), extents=(1, *out)))
    kernel = programs.program(
        [m, result],
        [xs, outs, *others],
        programs.copy(m, xs),
        ir.Fill(programs.region(outs), programs.const(0, dtype)),
        ir.Simd(tuple(body)),
        back,
        units=units,
        unit=unit,
    )
    compiled = jax.jit(lambda a: executor.run(kernel, (a,), (1,))).lower(x).compile()
    return np.asarray(compiled(x)[0]), compiled.as_text()


def _vld(buffer, *indices, dist="NORM", dtype="float32"):
    return simd.vld(buffer, *indices, dtype=dtype, dist=dist)


def _store(*indices, value, dist="NORM_B32"):
    return simd.vsts("out", *indices, value=value, dist=dist)


def _op(name, *args, dtype="float32"):
    return register(name, *args, pset(32), dtype=dtype, modes=ZEROING)


def _chunks(row, *, name="c"):
    """For each half of a row: what ``row`` returns for its first column."""
    return programs.loop(name, 2, ir.Let(programs.var("col"), programs.op("mul", name, 64)), row(programs.var("col")))


def test_rows_are_evaluated_at_once():
    """A softmax: the loops over rows and chunks leave no loop behind, a maximum and a sum go through memory."""
    best = programs.buffer("best", Space.UB, (ROWS,), "float32")
    total = programs.buffer("total", Space.UB, (ROWS,), "float32")
    halves = [_vld("x", "r", 0), _vld("x", "r", 64)]
    exponents = [_op("vexpdif", half, _vld("best", "r", dist="BRC_B32")) for half in halves]
    row_best, row_total = _vld("best", "r", dist="BRC_B32"), _vld("total", "r", dist="BRC_B32")
    body = [
        programs.loop("r", ROWS, simd.vsts("best", "r", value=_op("vcmax", _op("vmax", *halves)), dist="ONEPT_B32")),
        programs.loop(
            "r", ROWS, simd.vsts("total", "r", value=_op("vcadd", _op("vadd", *exponents)), dist="ONEPT_B32")
        ),
        programs.loop(
            "r",
            ROWS,
            _chunks(
                lambda col: _store(
                    "r", col, value=_op("vdiv", _op("vexpdif", _vld("x", "r", col), row_best), row_total)
                )
            ),
        ),
    ]
    out, text = _run(body, (best, total))
    exp = np.exp(X.astype(np.float64) - X.max(1, keepdims=True))
    np.testing.assert_allclose(out[0], exp / exp.sum(1, keepdims=True), rtol=1e-5)
    assert "while" not in text


def test_an_accumulator_is_carried_through_its_loop_only():
    """Sums of rows, a register that adds up both halves of each row: it is every row's own."""
    acc = programs.buffer("acc", Space.FRAGMENT, (1, 64), "float32")
    register_of = ir.Load("acc", (programs.ZERO,), "float32x64")
    add = ir.Store("acc", (programs.ZERO,), _op("vadd", register_of, _vld("x", "r", programs.op("mul", "c", 64))))
    body = [
        programs.loop(
            "r",
            ROWS,
            ir.Store("acc", (programs.ZERO,), _op("vdup", programs.const(1.0, "float32"))),
            programs.loop("c", 2, add),
            _store("r", 0, value=_op("vcadd", register_of)),
        )
    ]
    out, text = _run(body, (acc,))
    np.testing.assert_allclose(out[0, :, 0], X.sum(1) + 64, rtol=1e-5)
    assert text.count(" while(") == 1


def test_a_carried_register_goes_from_row_to_row():
    acc = programs.buffer("acc", Space.FRAGMENT, (1, 64), "float32")
    register_of = ir.Load("acc", (programs.ZERO,), "float32x64")
    body = [
        ir.Store("acc", (programs.ZERO,), _op("vdup", programs.const(0.0, "float32"))),
        programs.loop(
            "r",
            ROWS,
            ir.Store("acc", (programs.ZERO,), _op("vadd", register_of, _vld("x", "r", 0))),
            _store("r", 0, value=register_of),
        ),
    ]
    out, _ = _run(body, (acc,))
    np.testing.assert_allclose(out[0, :, :64], np.cumsum(X[:, :64].astype(np.float64), axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [1, -1])
def test_iterations_that_need_each_other(step):
    """Each row adds a neighbour that another iteration stores: the one before it, or the one after it."""
    neighbour = programs.op("add", "r", 1 - step)
    target = programs.op("add", "r", 1)
    body = [
        programs.loop(
            "r",
            ROWS - 2,
            simd.vsts(
                "x", target, 0, value=_op("vadd", _vld("x", neighbour, 0), _vld("x", target, 0)), dist="NORM_B32"
            ),
        ),
        programs.loop("r", ROWS, _store("r", 0, value=_vld("x", "r", 0))),
    ]
    out, _ = _run(body)
    want = X[:, :64].copy()
    for row in range(1, ROWS - 1):
        want[row] += want[row - step]
    np.testing.assert_array_equal(out[0, :, :64], want)


def test_a_narrowing_in_place():
    """float32 rows become float16 in the same memory: each half is written where an earlier one has been read."""
    narrow = ir.Buffer("narrow", Space.UB, (ROWS, 2 * COLUMNS), "float16", "x")
    convert = _op("vcvt", _vld("x", "r", "col"), dtype="float16")
    body = [
        programs.loop(
            "r", ROWS, _chunks(lambda col: simd.vsts("narrow", "r", col, value=convert, mask=pset(32), dist="PK_B32"))
        ),
        programs.loop(
            "r", ROWS, simd.vsts("out", "r", 0, value=_vld("narrow", "r", 0, dtype="float16"), dist="NORM_B16")
        ),
    ]
    out, text = _run(body, (narrow,), dtype="float16")
    np.testing.assert_array_equal(out[0], X.astype(np.float16))
    assert "while" not in text


def test_a_mask_that_follows_the_iteration():
    """Rows of 96 elements: of the second register only the first half belongs to the row."""
    left = programs.op("min", programs.op("sub", 96, "col"), 64)
    inside = register("update_mask", left, programs.const(32), dtype="bool")
    store = lambda col: simd.vsts("out", "r", col, value=_vld("x", "r", col), mask=inside, dist="NORM_B32")  # noqa: E731
    out, text = _run([programs.loop("r", ROWS, _chunks(store))])
    np.testing.assert_array_equal(out[0, :, :96], X[:, :96])
    np.testing.assert_array_equal(out[0, :, 96:], 0)
    assert "while" not in text


def test_pointers_that_advance():
    """Addresses in bytes that grow with the iteration, rows of 96 elements packed to 64."""
    source = address("x", 0, 0, offset=programs.op("mul", "r", 96 * 4))
    target = address("out", 0, 0, offset=programs.op("mul", "r", 64 * 4))
    load = register("vld", source, dtype="float32", modes=("NORM",))
    body = [programs.loop("r", 20, ir.Op("vsts", (target, load, pset(32), "NORM_B32")))]
    out, text = _run(body)
    want = np.stack([X.ravel()[96 * r : 96 * r + 64] for r in range(20)])
    np.testing.assert_array_equal(out.ravel()[: 20 * 64], want.ravel())
    assert "while" not in text


def test_rows_by_twos_with_columns_interleaved():
    even, odd = programs.op("mul", "r", 2), programs.op("add", programs.op("mul", "r", 2), 1)
    body = [
        programs.loop(
            "r",
            ROWS // 2,
            *(_store(row, 0, value=_vld("x", other, 64)) for row, other in ((even, odd), (odd, even))),
            *(_store(row, 64, value=_vld("x", row, 0)) for row in (even, odd)),
        )
    ]
    out, text = _run(body)
    np.testing.assert_array_equal(out[0, ::2, :64], X[1::2, 64:])
    np.testing.assert_array_equal(out[0, 1::2, :64], X[::2, 64:])
    np.testing.assert_array_equal(out[0, :, 64:], X[:, :64])
    assert "while" not in text and "scatter" not in text and "gather" not in text


@pytest.mark.parametrize("condition", ["loop", "memory"])
def test_rows_under_a_condition(condition):
    """A condition on the row, or on a scalar read from memory in each of them."""
    scalar = ir.Load("x", (programs.var("r"), programs.ZERO), "float32")
    holds = (
        programs.op("lt", "r", 5) if condition == "loop" else programs.op("gt", scalar, programs.const(0.0, "float32"))
    )
    branch = ir.If(
        holds,
        (_store("r", 0, value=_op("vmuls", _vld("x", "r", 0), scalar)),),
        (_store("r", 64, value=_vld("x", "r", 0)),),
    )
    out, text = _run([programs.loop("r", ROWS, branch)])
    chosen = np.arange(ROWS) < 5 if condition == "loop" else X[:, 0] > 0
    np.testing.assert_allclose(out[0, :, :64], np.where(chosen[:, None], X[:, :64] * X[:, :1], 0), rtol=1e-6)
    np.testing.assert_array_equal(out[0, :, 64:], np.where(chosen[:, None], 0, X[:, :64]))
    assert "while" not in text


def test_elements_and_registers_in_one_region():
    """A parallel loop over elements between loops over registers."""
    i, j = programs.var("i"), programs.var("j")
    double = programs.op("mul", ir.Load("x", (i, j), "float32"), programs.const(2.0, "float32"))
    body = [
        programs.parallel({"i": ROWS, "j": COLUMNS}, ir.Store("x", (i, j), double)),
        programs.loop("r", ROWS, _chunks(lambda col: _store("r", col, value=_op("vneg", _vld("x", "r", col))))),
    ]
    out, _ = _run(body)
    np.testing.assert_array_equal(out[0], -2 * X)


def test_gathers_and_scatters_in_a_loop():
    """Each row takes its elements backwards and puts them at every second place, modulo the row."""
    lane = register("vci", programs.const(0, "int32"), dtype="int32", modes=("INC_ORDER",))
    backwards = register("vci", programs.const(63, "int32"), dtype="int32", modes=("DEC_ORDER",))
    twice = register("reinterpret", _op("vadd", lane, lane, dtype="int32"), dtype="uint32")
    taken = register(
        "vgather2", address("x", "r", 0), register("reinterpret", backwards, dtype="uint32"), pset(32), dtype="float32"
    )
    body = [programs.loop("r", ROWS, ir.Op("vscatter", (taken, address("out", "r", 0), twice, pset(32))))]
    out, _ = _run(body)
    want = np.zeros((ROWS, COLUMNS), np.float32)
    want[:, ::2] = X[:, 63::-1]
    np.testing.assert_array_equal(out[0], want)


def test_each_vector_unit_has_its_own_registers():
    """The units store other rows; a register bound before a branch on the unit is each one's own."""
    row = programs.op("add", "r", programs.op("mul", "sid", 4))
    mine = ir.Var("mine", "float32x64")
    branch = ir.If(programs.op("eq", "sid", 1), (_store(15, 0, value=mine),), (_store(14, 0, value=mine),))
    body = [
        programs.loop("r", 4, _store(row, 0, value=_vld("x", row, 0))),
        ir.Let(mine, _op("vadds", _vld("x", programs.op("mul", "sid", 8), 0), programs.const(1.0, "float32"))),
        branch,
    ]
    out, _ = _run(body, units=2, unit="sid")
    for unit in (0, 1):
        want = np.zeros((ROWS, 64), np.float32)
        want[4 * unit : 4 * unit + 4] = X[4 * unit : 4 * unit + 4, :64]
        want[14 + unit] = X[8 * unit, :64] + 1
        np.testing.assert_array_equal(out[unit, :, :64], want)


def test_a_loop_whose_length_is_read_from_memory():
    """A predicate and a number of rows that are known only when the kernel runs."""
    counts = np.array([3, 20, 0, 0, 0, 0, 0, 0], np.int32)
    trips = ir.Load("x", (programs.ZERO,), "int32")
    mask = register("update_mask", ir.Load("x", (programs.const(1),), "int32"), programs.const(32), dtype="bool")
    ones = register("vdup", programs.const(1, "int32"), mask, dtype="int32", modes=ZEROING)
    loop = ir.For(programs.var("r"), programs.ZERO, trips, "serial", (_store("r", 0, value=ones),))
    out, _ = _run([loop], x=counts, out=(5, 64), dtype="int32")
    np.testing.assert_array_equal(out[0], (np.arange(5)[:, None] < 3) & (np.arange(64) < 20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_walks_through_memory(dtype):
    """Loads and stores at arbitrary steps, sizes and orders, against one iteration after the other."""
    rng = np.random.default_rng(7)
    n = simd.lanes(dtype)
    for _ in range(6):
        x = rng.standard_normal((8, 2 * n)).astype(jnp.dtype(dtype))
        accesses = [
            (int(rng.integers(0, 3)), int(rng.integers(0, 4)), int(rng.integers(0, 3)), int(rng.integers(0, 4)))
            for _ in range(2)
        ]
        half = n // 2
        body, want = [], x.copy().ravel()
        for a, b, c, d in accesses:
            load = programs.op("add", programs.op("mul", "r", a * half), b * half)
            store = programs.op("add", programs.op("mul", "r", c * half), d * half)
            body.append(simd.vsts("x", 0, store, value=_vld("x", 0, load, dtype=dtype), dist=f"NORM_B{2048 // n}"))
        for r in range(4):
            for a, b, c, d in accesses:
                want[(r * c + d) * half :][:n] = want[(r * a + b) * half :][:n]
        body = [programs.loop("r", 4, *body)]
        body.append(
            programs.loop(
                "r",
                8,
                *(
                    simd.vsts("out", "r", n * k, value=_vld("x", "r", n * k, dtype=dtype), dist=f"NORM_B{2048 // n}")
                    for k in (0, 1)
                ),
            )
        )
        out, _ = _run(body, x=x, out=x.shape, dtype=dtype)
        np.testing.assert_array_equal(out.ravel().view(np.uint8), want.view(np.uint8), err_msg=str(accesses))


def test_a_loop_that_fills_an_array_of_registers():
    """Each iteration writes one register of the array, all of which are needed afterwards."""
    regs = programs.buffer("regs", Space.FRAGMENT, (4, 64), "float32")
    filled = ir.Store("regs", (programs.var("i"),), _vld("x", "i", 0))
    first, last = (ir.Load("regs", (programs.const(n),), "float32x64") for n in (0, 3))
    body = [programs.loop("i", 4, filled), _store(0, 0, value=_op("vadd", first, last))]
    out, _ = _run(body, (regs,))
    np.testing.assert_array_equal(out[0, 0, :64], X[0, :64] + X[3, :64])
