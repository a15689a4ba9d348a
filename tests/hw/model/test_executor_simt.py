"""Parallel regions of the vector units on the NPU model, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.model import executor
from tests.hw.programs import buffer, const, copy, load, loop, op, parallel, program, region, simt, store, var

ROWS, COLUMNS = 6, 16


def tile(name: str, dtype: str, shape: tuple[int, ...] = (ROWS, COLUMNS), space: Space = Space.UB) -> ir.Buffer:
    return buffer(name, space, shape, dtype)


def elementwise(inputs: dict[str, str], out: str, value, *, indices=("i", "j"), body=None) -> ir.Program:
    """``out[i, j] = value(input tiles)`` between copies from and to GM; ``body`` replaces the store."""
    params = [tile(f"gm_{name}", dtype, space=Space.GM) for name, dtype in inputs.items()]
    tiles = [tile(name, dtype) for name, dtype in inputs.items()]
    result, o = tile("gm_o", out, space=Space.GM), tile("o", out)
    stmt = store(o, indices, value(*tiles)) if body is None else body(o, *tiles)
    nest = parallel({"i": ROWS, "j": COLUMNS}, stmt)
    loads = [copy(source, target) for source, target in zip(params, tiles, strict=True)]
    return program([*params, result], [*tiles, o], *loads, simt(nest), copy(o, result))


def run(p: ir.Program, *arrays):
    outputs = [len(p.params) - 1]
    return np.asarray(jax.jit(lambda *xs: executor.run(p, xs, outputs)[0])(*map(jnp.asarray, arrays)))


def equations(p: ir.Program, *arrays) -> str:
    return str(jax.make_jaxpr(lambda *xs: executor.run(p, xs, [len(p.params) - 1]))(*map(jnp.asarray, arrays)))


NUMPY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "floordiv": np.floor_divide, "floormod": np.remainder, "truncdiv": lambda x, y: np.trunc(x / y).astype(x.dtype),
    "truncmod": np.fmod, "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "pow": np.power,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
FLOAT_OPS = ["add", "sub", "mul", "div", "min", "max", "pow", "floordiv", "floormod", "truncmod"]
INT_OPS = [
    "add", "sub", "mul", "min", "max", "floordiv", "floormod", "truncdiv", "truncmod", "bitand", "bitor", "bitxor",
    "shl", "shr",
]  # fmt: skip
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]


def values(dtype: str, seed: int, low: int = -7, high: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if np.issubdtype(jnp.dtype(dtype), np.integer):
        return rng.integers(low, high, (ROWS, COLUMNS)).astype(dtype)
    return np.asarray(jnp.asarray(rng.standard_normal((ROWS, COLUMNS)), dtype))


@pytest.mark.parametrize("name", FLOAT_OPS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_binary_floats(name, dtype):
    x, y = np.abs(values(dtype, 1)) + np.asarray(0.5, jnp.dtype(dtype)), values(dtype, 2)
    p = elementwise({"x": dtype, "y": dtype}, dtype, lambda a, b: op(name, load(a, "i", "j"), load(b, "i", "j")))
    # One rounding of the exact result, up to the accuracy of the function itself.
    exact = NUMPY[name](x.astype(np.float64), y.astype(np.float64))
    ulp = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        run(p, x, y).astype(np.float64), exact, rtol=4 * ulp if name == "pow" else ulp, atol=8 * ulp
    )


@pytest.mark.parametrize("name", INT_OPS)
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "int16", "uint32"])
def test_binary_integers(name, dtype):
    unsigned = dtype.startswith("u")
    x, y = values(dtype, 3, 0 if unsigned else -100, 100), values(dtype, 4, 1, 7)
    p = elementwise({"x": dtype, "y": dtype}, dtype, lambda a, b: op(name, load(a, "i", "j"), load(b, "i", "j")))
    np.testing.assert_array_equal(run(p, x, y), NUMPY[name](x, y))


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_comparisons_select(name, dtype):
    x, y = values(dtype, 5, -2, 3), values(dtype, 6, -2, 3)
    p = elementwise(
        {"x": dtype, "y": dtype},
        dtype,
        lambda a, b: ir.Select(
            op(name, load(a, "i", "j"), load(b, "i", "j")), load(a, "i", "j"), const(9, dtype), dtype
        ),
    )
    np.testing.assert_array_equal(run(p, x, y), np.where(NUMPY[name](x, y), x, np.asarray(9, dtype)))


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("exp", np.exp), ("tanh", np.tanh), ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x)), ("abs", np.abs),
        ("log", np.log), ("floor", np.floor), ("ceil", np.ceil), ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("round_away", lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5)), ("nearbyint", np.rint),
    ],
)  # fmt: skip
def test_functions(name, reference):
    x = np.abs(values("float32", 7)) + np.float32(0.5)
    p = elementwise({"x": "float32"}, "float32", lambda a: ir.Call(name, (load(a, "i", "j"),), "float32"))
    np.testing.assert_allclose(run(p, x), reference(x.astype(np.float64)), rtol=2e-6)


def test_predicate_leaves_what_it_does_not_select():
    inside = op("and", op("lt", "i", 4), op("ge", "j", 3))
    p = elementwise(
        {"x": "float32"}, "float32", None, body=lambda o, x: ir.If(inside, (store(o, ("i", "j"), load(x, "i", "j")),))
    )
    x = values("float32", 8)
    selected = (np.arange(ROWS) < 4)[:, None] & (np.arange(COLUMNS) >= 3)
    np.testing.assert_array_equal(run(p, x), np.where(selected, x, np.nan))


def test_predicate_on_values_with_an_else():
    def body(o, x):
        positive = op("gt", load(x, "i", "j"), const(0.0, "float32"))
        return ir.If(
            positive,
            (store(o, ("i", "j"), load(x, "i", "j")),),
            (store(o, ("i", "j"), op("mul", const(-2.0, "float32"), load(x, "i", "j"))),),
        )

    x = values("float32", 9)
    np.testing.assert_array_equal(
        run(elementwise({"x": "float32"}, "float32", None, body=body), x), np.where(x > 0, x, -2 * x)
    )


def test_guarded_neighbour_is_not_read_outside():
    below = ir.Select(
        op("lt", op("add", "i", 1), ROWS),
        load(tile("x", "float32"), op("add", "i", 1), "j"),
        const(0.0, "float32"),
        "float32",
    )
    x = values("float32", 10)
    p = elementwise({"x": "float32"}, "float32", lambda a: below)
    np.testing.assert_array_equal(run(p, x), np.concatenate([x[1:], np.zeros_like(x[:1])]))


@pytest.mark.parametrize(
    ("indices", "reference"),
    [
        (("i", "j"), lambda x: x),
        ((2, "j"), lambda x: np.broadcast_to(x[2], x.shape)),
        (("i", 3), lambda x: np.broadcast_to(x[:, 3:4], x.shape)),
        ((op("floormod", "j", ROWS), "i"), lambda x: x[np.arange(COLUMNS) % ROWS][:, :ROWS].T),
        (("i", op("sub", COLUMNS - 1, "j")), lambda x: x[:, ::-1]),
        (("i", op("floordiv", "j", 2)), lambda x: np.repeat(x[:, : COLUMNS // 2], 2, axis=1)),
    ],
    ids=["same", "row", "column", "transposed", "reversed", "repeated"],
)
def test_load_patterns(indices, reference):
    x = values("float32", 11)
    p = elementwise({"x": "float32"}, "float32", lambda a: load(a, *indices))
    np.testing.assert_array_equal(run(p, x), reference(x))


def test_strided_and_merged_indices():
    x, o = buffer("x", Space.GM, (48,), "int32"), buffer("o", Space.GM, (48,), "int32")
    u, v = buffer("u", Space.UB, (48,), "int32"), buffer("v", Space.UB, (48,), "int32")
    place = op("add", op("mul", "j", 8), "i")  # transposed order
    nest = parallel(
        {"i": 8, "j": 6}, store(v, (place,), op("mul", load(u, op("add", op("mul", "i", 6), "j")), const(2)))
    )
    p = program([x, o], [u, v], copy(x, u), simt(nest), copy(v, o))
    data = np.arange(48, dtype=np.int32)
    np.testing.assert_array_equal(run(p, data), 2 * data.reshape(8, 6).T.ravel())
    assert "gather" not in equations(p, data) and "scatter" not in equations(p, data)


def test_rows_at_a_traced_offset():
    x, o = buffer("x", Space.GM, (ROWS, COLUMNS), "float32"), buffer("o", Space.GM, (ROWS, COLUMNS), "float32")
    u, v = tile("u", "float32"), tile("v", "float32")
    row = op("add", op("mul", "r", 2), "i")
    nest = parallel({"i": 2, "j": COLUMNS}, store(v, (row, "j"), op("add", load(u, row, "j"), const(1.0, "float32"))))
    p = program([x, o], [u, v], copy(x, u), loop("r", ROWS // 2, simt(nest)), copy(v, o))
    data = values("float32", 12)
    np.testing.assert_array_equal(run(p, data), data + 1)
    assert "gather" not in equations(p, data) and "scatter" not in equations(p, data)


def test_index_loaded_from_memory():
    x, t, o = (buffer(n, Space.GM, (COLUMNS,), d) for n, d in (("x", "float32"), ("t", "int32"), ("o", "float32")))
    u, w, v = (buffer(n, Space.UB, (COLUMNS,), d) for n, d in (("u", "float32"), ("w", "int32"), ("v", "float32")))
    nest = parallel({"i": COLUMNS}, store(v, ("i",), load(u, load(w, "i"))))
    p = program([x, t, o], [u, w, v], copy(x, u), copy(t, w), simt(nest), copy(v, o))
    data, table = values("float32", 13)[0], np.random.default_rng(0).permutation(COLUMNS).astype(np.int32)
    np.testing.assert_array_equal(run(p, data, table), data[table])
    assert np.isnan(run(p, data, np.full(COLUMNS, -1, np.int32))).all()  # outside memory: poison, not the last element


def test_dependent_iterations_run_in_order():
    """A running sum reads what the iteration before wrote."""
    x, o = buffer("x", Space.GM, (COLUMNS,), "float32"), buffer("o", Space.GM, (COLUMNS,), "float32")
    u = buffer("u", Space.UB, (COLUMNS,), "float32")
    nest = loop(
        "i",
        COLUMNS - 1,
        store(u, ("i",), op("add", load(u, "i"), load(u, op("sub", "i", 1)))),
        kind="parallel",
        start=1,
    )
    p = program([x, o], [u], copy(x, u), simt(nest), copy(u, o))
    data = np.arange(COLUMNS, dtype=np.float32)
    np.testing.assert_array_equal(run(p, data), np.cumsum(data))


def test_iterations_that_meet_at_another_step_of_a_loop_run_in_order():
    """Row i at step k reads what row i - 1 writes at step k + 1: the patterns differ, the elements do not."""
    x, o = buffer("x", Space.GM, (4, 8), "float32"), buffer("o", Space.GM, (4, 8), "float32")
    u = buffer("u", Space.UB, (4, 8), "float32")
    source = load(u, op("sub", "i", 1), op("add", "k", 1))
    body = loop("k", 7, store(u, ("i", "k"), op("add", load(u, "i", "k"), source)))
    p = program([x, o], [u], copy(x, u), simt(ir.For(var("i"), const(1), const(3), "parallel", (body,))), copy(u, o))
    data = np.arange(32, dtype=np.float32).reshape(4, 8)
    expected = data.copy()
    for i in range(1, 4):
        for k in range(7):
            expected[i, k] += expected[i - 1, k + 1]
    np.testing.assert_array_equal(run(p, data), expected)


def test_transposing_in_place_runs_in_order():
    x, o, u = (
        buffer(name, space, (8, 8), "float32") for name, space in (("x", Space.GM), ("o", Space.GM), ("u", Space.UB))
    )
    p = program(
        [x, o], [u], copy(x, u), simt(parallel({"i": 8, "j": 8}, store(u, ("i", "j"), load(u, "j", "i")))), copy(u, o)
    )
    data = np.arange(64, dtype=np.float32).reshape(8, 8)
    # Above the diagonal each element is replaced by its mirror image, which then finds the replaced one.
    np.testing.assert_array_equal(run(p, data), np.tril(data) + np.tril(data, -1).T)


def test_dependence_through_a_view_runs_in_order():
    x, o = buffer("x", Space.GM, (COLUMNS,), "float32"), buffer("o", Space.GM, (COLUMNS,), "float32")
    u, v = (
        buffer("u", Space.UB, (COLUMNS,), "float32"),
        buffer("v", Space.UB, (COLUMNS // 4, 4), "float32", storage="u"),
    )
    before = op("sub", "i", 1)
    above = load(v, op("floordiv", before, 4), op("floormod", before, 4))
    nest = loop("i", COLUMNS - 1, store(u, ("i",), op("add", above, const(1.0, "float32"))), kind="parallel", start=1)
    p = program([x, o], [u, v], copy(x, u), simt(nest), copy(u, o))
    np.testing.assert_array_equal(run(p, np.zeros(COLUMNS, np.float32)), np.arange(COLUMNS))


def test_last_write_wins():
    o, u = buffer("o", Space.GM, (1,), "float32"), buffer("u", Space.UB, (1,), "float32")
    p = program([o], [u], simt(parallel({"i": 8}, store(u, (0,), ir.Cast(var("i"), "float32")))), copy(u, o))
    assert run(p) == [7.0]


def test_scalar_of_each_lane():
    """A row sum in a scalar variable that every row has for itself."""
    x, o = buffer("x", Space.GM, (ROWS, COLUMNS), "float32"), buffer("o", Space.GM, (ROWS,), "float32")
    u, v, s = (
        tile("u", "float32"),
        buffer("v", Space.UB, (ROWS,), "float32"),
        buffer("s", Space.SCALAR, (1,), "float32"),
    )
    nest = loop(
        "i",
        ROWS,
        store(s, (0,), const(0.0, "float32")),
        loop("k", COLUMNS, store(s, (0,), op("add", load(s, 0), load(u, "i", "k")))),
        store(v, ("i",), load(s, 0)),
        kind="parallel",
    )
    p = program([x, o], [u, v, s], copy(x, u), simt(nest), copy(v, o))
    data = values("float32", 14)
    np.testing.assert_allclose(run(p, data), data.astype(np.float64).sum(1), rtol=1e-5)
    # All rows together: one loop over the columns, none over the rows.
    assert equations(p, data).count("scan[") == 1


def test_a_threads_own_scalar_in_a_parallel_loop_is_refused():
    """Which thread runs an iteration is the compiler's choice, so the sums of the threads are nobody's to predict."""
    x, o = buffer("x", Space.GM, (COLUMNS,), "float32"), buffer("o", Space.GM, (1,), "float32")
    u, v = buffer("u", Space.UB, (COLUMNS,), "float32"), buffer("v", Space.UB, (1,), "float32")
    s = buffer("s", Space.SCALAR, (1,), "float32")
    total = parallel({"i": COLUMNS}, store(s, (0,), op("add", load(s, 0), load(u, "i"))))
    body = copy(x, u), store(s, (0,), const(0.5, "float32")), simt(total, store(v, (0,), load(s, 0))), copy(v, o)
    with pytest.raises(UnsupportedError, match="s: which thread runs an iteration is the compiler's choice"):
        run(program([x, o], [u, v, s], *body), values("float32", 20)[0])


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("sum", np.sum), ("max", np.max), ("min", np.min), ("absmax", lambda x, axis: np.abs(x).max(axis))],
)
@pytest.mark.parametrize("clear", [True, False])
def test_reductions(kind, reference, clear):
    x, o = buffer("x", Space.GM, (ROWS, COLUMNS), "float32"), buffer("o", Space.GM, (ROWS,), "float32")
    u, v = tile("u", "float32", space=Space.FRAGMENT), buffer("v", Space.FRAGMENT, (ROWS,), "float32")
    reduce = ir.Op("reduce", (region(u), region(v)), {"kind": kind, "dim": 1, "clear": clear})
    p = program([x, o], [u, v], copy(x, u), ir.Fill(region(v), const(0.25, "float32")), simt(reduce), copy(v, o))
    data = values("float32", 15)
    expected = reference(data.astype(np.float64), axis=1)
    if not clear:
        expected = {"sum": np.add, "max": np.maximum, "min": np.minimum, "absmax": np.maximum}[kind](expected, 0.25)
    np.testing.assert_allclose(run(p, data), expected, rtol=1e-5, atol=1e-6)


def test_threads():
    """Statements outside parallel loops run in every thread."""
    o, u = buffer("o", Space.GM, (256,), "int32"), buffer("u", Space.UB, (256,), "int32")
    body = (
        ir.Let(var("t"), op("mul", "tx", 3)),
        store(u, ("tx",), op("add", "t", 1)),
        ir.If(op("lt", "tx", 4), (store(u, ("tx",), const(0)),)),
    )
    p = program([o], [u], simt(*body), copy(u, o))
    expected = 3 * np.arange(256) + 1
    expected[:4] = 0
    np.testing.assert_array_equal(run(p), expected)


@pytest.mark.parametrize(
    ("source", "target", "given", "expected"),
    [
        ("float32", "float16", [1 + 2**-11, 1 + 3 * 2**-11, 70000, 1e-8], [1, 1 + 2**-9, np.inf, 0]),
        ("float32", "bfloat16", [1 + 2**-8, 1 + 3 * 2**-8], [1, 1 + 2**-6]),
        ("float32", "float8_e4m3fn", [1e6, -1e6, 1.0625, np.nan], [448, -448, 1, np.nan]),
        ("float32", "float8_e5m2", [1e6, -1e6, 1.125], [57344, -57344, 1]),
        ("float32", "int32", [1.9, -1.9, 3e9, -3e9, np.nan], [1, -1, 2**31 - 1, -(2**31), 0]),
        ("float32", "int8", [1.9, -1.9, 300, -300], [1, -1, 127, -128]),
        ("int32", "int8", [1, 128, 257], [1, -128, 1]),
        ("int32", "float16", [2049, -3], [2048, -3]),
    ],
)
def test_conversions(source, target, given, expected):
    x, o = buffer("x", Space.GM, (len(given),), source), buffer("o", Space.GM, (len(given),), target)
    u, v = buffer("u", Space.UB, (len(given),), source), buffer("v", Space.UB, (len(given),), target)
    nest = parallel({"i": len(given)}, store(v, ("i",), ir.Cast(load(u, "i"), target)))
    p = program([x, o], [u, v], copy(x, u), simt(nest), copy(v, o))
    result = run(p, np.asarray(given, source)).astype(np.float64)
    np.testing.assert_array_equal(result, np.asarray(expected, np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_arithmetic_rounds_after_every_operation(dtype):
    x = np.asarray(values(dtype, 16))

    def value(a):
        rounded = op("sub", op("add", load(a, "i", "j"), const(1000.0, dtype)), const(1000.0, dtype))
        return ir.Cast(op("mul", rounded, load(a, "i", "j")), "float32")

    thousand = np.asarray(1000, x.dtype)
    expected = ((x + thousand) - thousand) * x
    np.testing.assert_array_equal(run(elementwise({"x": dtype}, "float32", value), x), expected.astype(np.float32))


def test_a_rounding_is_kept_between_two_conversions():
    x = values("float32", 18)
    p = elementwise({"x": "float32"}, "float32", lambda a: ir.Cast(ir.Cast(load(a, "i", "j"), "bfloat16"), "float32"))
    np.testing.assert_array_equal(run(p, x), np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).astype(np.float32))


def test_a_copy_in_a_parallel_loop_runs_once_an_iteration():
    x, o = buffer("x", Space.GM, (ROWS, COLUMNS), "float32"), buffer("o", Space.GM, (ROWS, COLUMNS), "float32")
    u = buffer("u", Space.UB, (1, COLUMNS), "float32")
    row = {"extents": (1, COLUMNS)}
    body = copy(region(x, "i", 0, **row), u), ir.If(op("lt", "i", 4), (copy(u, region(o, "i", 0, **row)),))
    p = program([x, o], [u], loop("i", ROWS, *body, kind="parallel"))
    data = values("float32", 19)
    np.testing.assert_array_equal(run(p, data), np.where(np.arange(ROWS)[:, None] < 4, data, np.nan))


def test_unknown_function_names_itself_and_its_line():
    p = elementwise(
        {"x": "float32"},
        "float32",
        None,
        body=lambda o, x: store(o, ("i", "j"), ir.Call("bessel", (load(x, "i", "j"),), "float32"), loc="kernel.py:7"),
    )
    with pytest.raises(UnsupportedError, match=r"kernel\.py:7: .*'bessel'.*yet"):
        run(p, values("float32", 17))


# --- random expressions ---------------------------------------------------------------------------------------------

X, Y = tile("x", "float32"), tile("y", "float32")
LOADS = st.sampled_from([load(X, "i", "j"), load(Y, "i", "j"), load(Y, 1, "j")])
INDICES = st.sampled_from(["i", "j"]).map(lambda name: ir.Cast(var(name), "float32"))


def constants(values):
    return values.map(lambda value: const(float(value), "float32"))


def arithmetic(children):
    binary = st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max"]), children, children).map(lambda t: op(*t))
    return st.one_of(binary, children.map(lambda e: ir.Call("abs", (e,), "float32")))


def with_choices(children):
    chosen = st.tuples(st.sampled_from(["lt", "ge"]), children, children, children, children).map(
        lambda t: ir.Select(op(t[0], t[1], t[2]), t[3], t[4], "float32")
    )
    return st.one_of(arithmetic(children), chosen)


def with_functions(children):
    functions = st.tuples(st.sampled_from(["tanh", "exp"]), children).map(
        lambda t: (
            ir.Call("tanh", (t[1],), "float32")
            if t[0] == "tanh"
            else ir.Call("exp", (ir.Call("tanh", (t[1],), "float32"),), "float32")
        )
    )
    return st.one_of(arithmetic(children), functions)


# Small integers: every result is an integer below 2**24, so float32 is exact and comparisons cannot tip over.
EXACT = st.recursive(st.one_of(LOADS, INDICES, constants(st.integers(-4, 4))), with_choices, max_leaves=6)
SMOOTH = st.recursive(st.one_of(LOADS, INDICES, constants(st.floats(-4, 4, width=32))), with_functions, max_leaves=6)


def interpret(node: ir.Expr, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The expression in NumPy float64."""
    if isinstance(node, ir.Const):
        return np.full(x.shape, node.value, np.float64)
    if isinstance(node, ir.Load):
        return (
            x if node.buffer == "x" else np.broadcast_to(y[1], y.shape) if isinstance(node.indices[0], ir.Const) else y
        )
    if isinstance(node, ir.Cast):
        return np.indices(x.shape)[("i", "j").index(node.value.name)].astype(np.float64)
    if isinstance(node, ir.Binary):
        return NUMPY[node.op](interpret(node.lhs, x, y), interpret(node.rhs, x, y))
    if isinstance(node, ir.Call):
        return {"abs": np.abs, "exp": np.exp, "tanh": np.tanh}[node.name](interpret(node.args[0], x, y))
    return np.where(interpret(node.condition, x, y), interpret(node.then, x, y), interpret(node.orelse, x, y))


@settings(max_examples=40, deadline=None)
@given(node=EXACT, seed=st.integers(0, 100))
def test_random_exact_expressions(node, seed):
    x, y = np.random.default_rng(seed).integers(-4, 5, (2, ROWS, COLUMNS))
    p = elementwise({"x": "float32", "y": "float32"}, "float32", lambda a, b: node)
    np.testing.assert_array_equal(run(p, x.astype(np.float32), y.astype(np.float32)), interpret(node, x, y))


@settings(max_examples=40, deadline=None)
@given(node=SMOOTH, seed=st.integers(0, 100))
def test_random_smooth_expressions(node, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)
    p = elementwise({"x": "float32", "y": "float32"}, "float32", lambda a, b: node)
    expected = interpret(node, x.astype(np.float64), y.astype(np.float64))
    scale = 1 + np.abs(expected).max()
    np.testing.assert_allclose(run(p, x, y) / scale, expected / scale, rtol=0, atol=1e-4)
