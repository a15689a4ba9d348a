"""grouped_gemm and masked_grouped_gemm against NumPy float64: every implementation that runs here."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import glass_jax as glass
import grouped_gemm_reference as reference
import numpy_reference as ref
from benchmarks.shapes.grouped_gemm import SHAPES, Shape

RUNS_HERE = ("xla", "npu_model")
FLOATS = ("float32", "float16", "bfloat16")


@functools.cache
def jitted(function, implementation, **options):
    return jax.jit(functools.partial(function, implementation=implementation, **options))


grouped = functools.partial(jitted, glass.grouped_gemm)
masked = functools.partial(jitted, glass.masked_grouped_gemm)


def operands(groups, m, n, k, dtype="float32", seed=0, rhs_dtype=None):
    rng = np.random.default_rng(seed)
    return ref.random(rng, (m, k), dtype), ref.random(rng, (groups, k, n), rhs_dtype or dtype)


def masked_operands(groups, m, n, k, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return ref.random(rng, (groups, m, k), dtype), ref.random(rng, (groups, k, n), dtype)


# --- group sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_every_pattern_of_empty_groups(implementation):
    """All 256 of eight groups; sizes are traced, so that it is one program."""
    lhs, rhs = operands(8, 40, 8, 16)
    for present in itertools.product([0, 1], repeat=8):
        sizes = np.array(present, np.int32) * np.array([5, 1, 9, 2, 3, 7, 4, 9], np.int32)
        ref.assert_close(grouped(implementation)(lhs, rhs, sizes), reference.grouped_gemm(lhs, rhs, sizes))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    "sizes",
    [
        [40, 0, 0],
        [0, 0, 40],
        [7, 11, 2],  # 20 of 40 rows: the others are zero
        [0, 0, 0],
        [30, 30, 30],  # more than there are
        [100, 1, 1],
        [2**31 - 1, 2**31 - 1, 5],  # whose sum is not an int32
        [5, -3, 35],
    ],
    ids=str,
)
def test_sizes_of_any_kind(sizes, implementation):
    lhs, rhs = operands(3, 40, 8, 16)
    out = grouped(implementation)(lhs, rhs, np.array(sizes, np.int32))
    expected = reference.grouped_gemm(lhs, rhs, sizes)
    ref.assert_close(out, expected)
    np.testing.assert_array_equal(out[expected.any(1) == 0], 0)


@given(sizes=st.lists(st.integers(0, 60), min_size=6, max_size=6), implementation=st.sampled_from(RUNS_HERE))
def test_any_sizes(sizes, implementation):
    lhs, rhs = operands(6, 100, 16, 24)
    out = grouped(implementation)(lhs, rhs, np.array(sizes, np.int32))
    ref.assert_close(out, reference.grouped_gemm(lhs, rhs, sizes))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_sizes_of_any_integer_type(dtype):
    lhs, rhs = operands(3, 40, 8, 16)
    sizes = np.array([9, 100, 20], dtype)
    ref.assert_close(glass.grouped_gemm(lhs, rhs, sizes), reference.grouped_gemm(lhs, rhs, sizes))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("masked_m", [[0, 17, 3], [17, 17, 17], [0, 0, 0], [-4, 99, 1]], ids=str)
def test_masked_rows(masked_m, implementation):
    lhs, rhs = masked_operands(3, 17, 8, 16)
    out = masked(implementation)(lhs, rhs, np.array(masked_m, np.int32))
    expected = reference.masked_grouped_gemm(lhs, rhs, masked_m)
    ref.assert_close(out, expected)
    np.testing.assert_array_equal(out[expected.any(2) == 0], 0)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_what_belongs_to_no_group_may_be_nan(implementation):
    """Rows of no group, and matrices of empty groups."""
    lhs, rhs = operands(4, 30, 8, 16)
    sizes = np.array([8, 0, 9, 0], np.int32)
    expected = reference.grouped_gemm(lhs, rhs, sizes)
    poisoned = lhs.at[17:].set(jnp.nan), rhs.at[1::2].set(jnp.nan)
    ref.assert_close(grouped(implementation)(*poisoned, sizes), expected)

    lhs, rhs = masked_operands(3, 10, 8, 16)
    counts = np.array([4, 0, 10], np.int32)
    expected = reference.masked_grouped_gemm(lhs, rhs, counts)
    poisoned = lhs.at[0, 4:].set(jnp.nan).at[1].set(jnp.nan), rhs.at[1].set(jnp.nan)
    ref.assert_close(masked(implementation)(*poisoned, counts), expected)


# --- types and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "float8_e4m3fn", "float8_e5m2"])
def test_types(dtype, implementation):
    """Extents that nothing divides."""
    lhs, rhs = operands(4, 50, 33, 41, dtype)
    sizes = np.array([13, 0, 19, 15], np.int32)
    out = grouped(implementation)(lhs, rhs, sizes)
    assert out.dtype == {"int8": "int32", "float8_e4m3fn": "float32", "float8_e5m2": "float32"}.get(dtype, dtype)
    ref.assert_close(out, reference.grouped_gemm(lhs, rhs, sizes))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_types_that_mix(implementation):
    sizes = np.array([10, 7], np.int32)
    for lhs, rhs, preferred, expected in [
        ("bfloat16", "float32", None, "float32"),
        ("float8_e4m3fn", "float8_e5m2", None, "float32"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bfloat16"),
    ]:
        a, b = operands(2, 20, 8, 32, lhs, rhs_dtype=rhs)
        out = glass.grouped_gemm(a, b, sizes, preferred_element_type=preferred, implementation=implementation)
        assert out.dtype == expected
        ref.assert_close(out, reference.grouped_gemm(a, b, sizes))


def scaled(shape: Shape) -> Shape:
    """As many groups, rows over 32 and matrices over 16, for two cores."""
    m = max(shape.m // 32, 3 if shape.masked else shape.groups)
    return Shape(shape.groups, m, max(shape.n // 16, 1), max(shape.k // 16, 1), shape.masked, shape.dtype)


SMALL = ("v2_lite_up", "v3_local_down", "masked_6_down", "one_row")


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SMALL else pytest.mark.slow) for n in SHAPES])
def test_shapes_of_models(name, implementation):
    shape, rng = scaled(SHAPES[name]), np.random.default_rng(1)
    sizes = (shape.groups, shape.m, shape.n, shape.k, shape.dtype)
    if shape.masked:
        lhs, rhs = masked_operands(*sizes)
        counts = rng.integers(0, shape.m + 1, shape.groups).astype(np.int32)
        expected = reference.masked_grouped_gemm(lhs, rhs, counts)
        ref.assert_close(masked(implementation)(lhs, rhs, counts), expected)
    else:
        lhs, rhs = operands(*sizes)
        counts = reference.uneven(rng, shape.groups, shape.m)
        ref.assert_close(grouped(implementation)(lhs, rhs, counts), reference.grouped_gemm(lhs, rhs, counts))


def test_float64():
    with jax.enable_x64(True):
        lhs, rhs = (x.astype(jnp.float64) for x in operands(3, 20, 8, 16))
        out = glass.grouped_gemm(lhs, rhs, np.array([5, 9, 2]))
        assert out.dtype == jnp.float64
        ref.assert_close(out, reference.grouped_gemm(lhs, rhs, [5, 9, 2]))


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("empty", ["groups", "m", "n", "k"])
def test_empty_arrays(empty, implementation):
    sizes = {"groups": 3, "m": 6, "n": 8, "k": 16} | {empty: 0}
    lhs, rhs = operands(**sizes)
    counts = np.full(sizes["groups"], 2, np.int32)
    out = glass.grouped_gemm(lhs, rhs, counts, implementation=implementation)
    np.testing.assert_array_equal(out, np.zeros((sizes["m"], sizes["n"])))
    lhs, rhs = masked_operands(**sizes)
    out = glass.masked_grouped_gemm(lhs, rhs, counts, implementation=implementation)
    np.testing.assert_array_equal(out, np.zeros((sizes["groups"], sizes["m"], sizes["n"])))


# --- cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_formula_neither_converts_nor_copies_all_matrices(dtype):
    """Eight rows of 64 groups: what is held beside the operands is less than a tenth of the matrices."""
    lhs, rhs = jax.ShapeDtypeStruct((8, 256), dtype), jax.ShapeDtypeStruct((64, 256, 128), dtype)
    compiled = jax.jit(glass.grouped_gemm).lower(lhs, rhs, jax.ShapeDtypeStruct((64,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rhs.size * rhs.dtype.itemsize / 10


# --- errors, each before anything compiles -------------------------------------------------------------------------

X, W, S = jnp.ones((6, 8)), jnp.ones((3, 8, 4)), jnp.ones(3, jnp.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.grouped_gemm(X, jnp.ones((3, 7, 4)), S), r"rhs has shape \(3, 7, 4\), .* K = 8 \(of lhs\)"),
        (lambda: glass.grouped_gemm(X, W[0], S), r"rhs has shape \(8, 4\), expected \[G, K, N\]"),
        (lambda: glass.grouped_gemm(X[0], W, S), r"lhs has shape \(8,\), expected \[M, K\]"),
        (lambda: glass.grouped_gemm(X, W, S[:2]), r"group_sizes has shape \(2,\), expected \[G\] with G = 3"),
        (lambda: glass.grouped_gemm(X, W, S * 1.0), r"group_sizes is float32; use int32"),
        (lambda: glass.grouped_gemm(X.astype(complex), W, S), r"grouped_gemm: lhs is complex"),
        (lambda: glass.grouped_gemm(X.astype(jnp.int8), W, S), r"grouped_gemm: int8 times float32 has no meaning"),
        (lambda: glass.grouped_gemm(X, W, S, preferred_element_type=jnp.int32), r"preferred_element_type=int32"),
        (lambda: glass.grouped_gemm(X, W, S, implementation="cuda"), r"implementation='cuda' is not one of"),
        (lambda: glass.masked_grouped_gemm(X, W, S), r"masked_grouped_gemm: lhs has shape \(6, 8\)"),
        (lambda: glass.masked_grouped_gemm(X[None], W, S), r"rhs has shape \(3, 8, 4\), .* G = 1 \(of lhs\)"),
        (lambda: glass.masked_grouped_gemm(W, W, S), r"rhs has shape \(3, 8, 4\), .* K = 4"),
        (
            lambda: glass.masked_grouped_gemm(jnp.ones((3, 5, 8)), W, S.astype(bool)),
            r"masked_grouped_gemm: masked_m is bool; use int32",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(
        glass.errors.HardwareConstraintError if "implementation" not in message else ValueError
    ) as error:
        call()
    assert error.match(message)


def test_strict_alignment_names_dimension_multiple_and_next_size():
    lhs, rhs = operands(3, 7, 32, 24, "float16")
    sizes = np.array([1, 2, 3], np.int32)
    with glass.configure(alignment="strict"):
        with pytest.raises(glass.errors.HardwareConstraintError, match="grouped_gemm: K is 24, not a multiple of 16"):
            glass.grouped_gemm(lhs, rhs, sizes)
        with pytest.raises(glass.errors.HardwareConstraintError, match="N is 24, .* next valid size is 32"):
            glass.grouped_gemm(lhs[:, :16], rhs[:, :16, :24], sizes)
        glass.grouped_gemm(lhs[:, :16], rhs[:, :16], sizes)  # any number of rows, in groups of any size


def test_debug_says_what_is_padded(capsys):
    lhs, rhs = operands(3, 7, 30, 24, "float16")
    with glass.configure(debug=True):
        glass.grouped_gemm(lhs, rhs, np.array([1, 2, 3], np.int32), implementation="npu_model")
    said = capsys.readouterr().err
    assert "grouped_gemm {'n': 30, 'k': 24}: padding N 30 -> 32, K 24 -> 32" in said
    assert re.search(r"tiles 16x\d+x32 \(4 stages\), at most \d tiles on \d cores", said)


def test_float64_is_refused_by_the_npu():
    with jax.enable_x64(True), pytest.raises(glass.errors.UnsupportedError, match="no float64"):
        glass.grouped_gemm(X.astype(jnp.float64), W.astype(jnp.float64), S, implementation="npu_model")


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(glass.errors.UnsupportedError, match="glass.export"):
        glass.grouped_gemm(X, W, S, implementation="ascend")
