"""gemm against NumPy float64: every implementation that runs here, dtype, layout and shape."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glass_jax as glass
import numpy_reference as ref

RUNS_HERE = ("xla", "npu_model")
FLOATS = ("float32", "float16", "bfloat16")


def _operands(shape, dtype, seed=0, *, transpose_rhs=False):
    m, n, k = shape
    rng = np.random.default_rng(seed)
    return ref.random(rng, (m, k), dtype), ref.random(rng, (n, k) if transpose_rhs else (k, n), dtype)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@pytest.mark.parametrize("shape", [(1, 7, 5), (17, 33, 65), (100, 576, 512)], ids=str)
def test_ragged_shapes(shape, dtype, implementation):
    lhs, rhs = _operands(shape, dtype)
    out = jax.jit(lambda a, b: glass.gemm(a, b, implementation=implementation))(lhs, rhs)
    assert out.dtype == (jnp.int32 if dtype == "int8" else dtype)
    ref.assert_close(out, ref.gemm(lhs, rhs))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 2112, 7168), "bfloat16"),
        ((100, 576, 7168), "float32"),
        ((100, 576, 7168), "int8"),
        ((1024,) * 3, "float16"),
    ],
    ids=str,
)
def test_model_shapes(shape, dtype, implementation):
    lhs, rhs = _operands(shape, dtype)
    ref.assert_close(glass.gemm(lhs, rhs, implementation=implementation), ref.gemm(lhs, rhs))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@pytest.mark.parametrize(
    "shape", [(128, 2112, 7168), (100, 576, 7168), (1024, 1024, 1024), (4096, 7168, 2048)], ids=str
)
def test_model_shapes_in_every_dtype(shape, dtype, implementation):
    lhs, rhs = _operands(shape, dtype)
    ref.assert_close(glass.gemm(lhs, rhs, implementation=implementation), ref.gemm(lhs, rhs))


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 3, 0), (0, 0, 0)], ids=str)
def test_empty(shape, implementation):
    lhs, rhs = _operands(shape, "float32")
    bias = jnp.arange(shape[1], dtype=jnp.float32) - 1
    out = glass.gemm(lhs, rhs, bias=bias, activation="relu", implementation=implementation)
    np.testing.assert_array_equal(out, ref.gemm(lhs, rhs, bias, "relu"))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rhs_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8(dtype, rhs_dtype, implementation):
    rng = np.random.default_rng(1)
    lhs, rhs = ref.random(rng, (40, 96), dtype), ref.random(rng, (96, 48), rhs_dtype)
    out = glass.gemm(lhs, rhs, implementation=implementation)
    assert out.dtype == jnp.float32
    ref.assert_close(out, ref.gemm(lhs, rhs))
    ref.assert_close(
        glass.gemm(lhs, rhs, preferred_element_type=jnp.bfloat16, implementation=implementation), ref.gemm(lhs, rhs)
    )


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_epilogue(activation, transpose_rhs, implementation):
    lhs, rhs = _operands((33, 50, 40), "bfloat16", transpose_rhs=transpose_rhs)
    bias = ref.random(np.random.default_rng(2), (50,), "float32")
    out = glass.gemm(
        lhs, rhs, bias=bias, activation=activation, transpose_rhs=transpose_rhs,
        preferred_element_type=jnp.float32, implementation=implementation,
    )  # fmt: skip
    # float32 out of exact bfloat16 operands: only the float32 sums and the activation may round.
    ref.assert_close(out, ref.gemm(lhs, rhs, bias, activation, transpose_rhs))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_int8_bias_and_relu_are_exact(implementation):
    lhs, rhs = _operands((19, 21, 64), "int8")
    bias = jnp.arange(-10, 11, dtype=jnp.int32) * 1000
    out = glass.gemm(lhs, rhs, bias=bias, activation="relu", implementation=implementation)
    np.testing.assert_array_equal(out, ref.gemm(lhs, rhs, bias, "relu"))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("lhs_batch", "rhs_batch", "bias_batch"),
    [
        ((3,), (), ()),
        ((2, 3), (2, 3), ()),
        ((3,), (3,), (3,)),
        ((), (3,), ()),
        ((2, 1), (1, 3), ()),
        ((2, 3), (3,), (2, 1)),
    ],
    ids=str,
)
def test_batches(lhs_batch, rhs_batch, bias_batch, implementation):
    rng = np.random.default_rng(3)
    lhs = ref.random(rng, (*lhs_batch, 9, 24), "float32")
    rhs = ref.random(rng, (*rhs_batch, 24, 10), "float32")
    bias = ref.random(rng, (*bias_batch, 10), "float32")
    out = jax.jit(lambda *a: glass.gemm(a[0], a[1], bias=a[2], implementation=implementation))(lhs, rhs, bias)
    ref.assert_close(out, ref.gemm(lhs, rhs, bias))


def test_wider_floats_mix():
    rng = np.random.default_rng(4)
    lhs, rhs = ref.random(rng, (5, 8), "bfloat16"), ref.random(rng, (8, 6), "float32")
    out = glass.gemm(lhs, rhs)
    assert out.dtype == jnp.float32
    ref.assert_close(out, ref.gemm(lhs, rhs))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40)),
    dtype=st.sampled_from([*FLOATS, "int8", "float8_e4m3fn"]),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    shared_rhs=st.booleans(),
    transpose_rhs=st.booleans(),
    bias=st.booleans(),
    relu=st.booleans(),
    jit=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_call_agrees_with_numpy(shape, dtype, batch, shared_rhs, transpose_rhs, bias, relu, jit, seed):
    m, n, k = shape
    rng = np.random.default_rng(seed)
    lhs = ref.random(rng, (*batch, m, k), dtype)
    rhs = ref.random(rng, (*(() if shared_rhs else batch), *((n, k) if transpose_rhs else (k, n))), dtype)
    row = ref.random(rng, (n,), jnp.int8 if dtype == "int8" else jnp.float32) if bias else None
    row = row.astype(jnp.int32) if bias and dtype == "int8" else row
    activation = "relu" if relu else None

    def fn(lhs, rhs, row):
        return glass.gemm(lhs, rhs, bias=row, activation=activation, transpose_rhs=transpose_rhs)

    out = (jax.jit(fn) if jit else fn)(lhs, rhs, row)
    expected = ref.gemm(lhs, rhs, row, activation, transpose_rhs)
    # A sum may cancel: judge against the size of its terms, as the analysis of floating-point sums does.
    terms = ref.gemm(
        abs(ref.f64(lhs)), abs(ref.f64(rhs)), None if row is None else abs(ref.f64(row)), None, transpose_rhs
    )
    scale = max(np.linalg.norm(terms), 1e-30)
    limit = ref.TOLERANCE[str(out.dtype)]
    assert np.linalg.norm(ref.f64(out) - expected) <= limit * scale


# --- errors, each before anything compiles -------------------------------------------------------------------------

X = jnp.ones((4, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.gemm(X, jnp.ones((7, 3))), r"K of lhs is 8 .* K of rhs is 7"),
        (lambda: glass.gemm(X, jnp.ones((3, 8))), r"transpose_rhs=True"),
        (lambda: glass.gemm(X[0], X.T), r"x\[None, :\]"),
        (lambda: glass.gemm(X.astype(complex), X.T), r"lhs is complex"),
        (lambda: glass.gemm(X.astype(jnp.int32), X.T), r"lhs is int32; use float32"),
        (lambda: glass.gemm(X.astype(jnp.int8), X.T), r"int8 times float32 has no meaning"),
        (lambda: glass.gemm(X, X.T, bias=jnp.ones(5)), r"bias has shape \(5,\); expected \(4,\)"),
        (lambda: glass.gemm(X, X.T, bias=jnp.ones(4, jnp.int32)), r"bias is int32"),
        (lambda: glass.gemm(X, X.T, activation="tanh"), r"activation='tanh'"),
        (lambda: glass.gemm(X, X.T, preferred_element_type=jnp.int32), r"preferred_element_type=int32"),
        (
            lambda: glass.gemm(jnp.ones((2, 4, 8)), jnp.ones((3, 8, 4))),
            r"\(2,\) of lhs and \(3,\) of rhs do not broadcast",
        ),
        (
            lambda: glass.gemm(X, X.T, implementation="cuda"),
            r"implementation='cuda' is not one of xla, npu_model, host, ascend",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_strict_alignment_names_dimension_multiple_and_next_size():
    lhs, rhs = jnp.ones((4, 24), jnp.float16), jnp.ones((24, 32), jnp.float16)
    with (
        glass.configure(alignment="strict"),
        pytest.raises(
            glass.errors.HardwareConstraintError, match="K is 24, not a multiple of 16 .* next valid size is 32"
        ),
    ):
        glass.gemm(lhs, rhs)
    np.testing.assert_array_equal(glass.gemm(lhs, rhs), np.full((4, 32), 24.0))


def test_float64_is_refused_by_the_npu():
    with jax.enable_x64(True), pytest.raises(glass.errors.UnsupportedError, match="no float64"):
        glass.gemm(jnp.ones((2, 2)), jnp.ones((2, 2)), implementation="npu_model")


def test_ascend_does_not_run_on_a_cpu():
    with pytest.raises(glass.errors.UnsupportedError, match="glass.export"):
        glass.gemm(X, X.T, implementation="ascend")


# --- configuration -------------------------------------------------------------------------------------------------


def test_configure_takes_effect_on_a_jitted_function():
    f = jax.jit(glass.gemm)
    lhs, rhs = _operands((8, 8, 16), "float32")
    seen = []

    def implementation():
        f(lhs, rhs)
        (eqn,) = [
            e for e in jax.make_jaxpr(f)(lhs, rhs).jaxpr.eqns[0].params["jaxpr"].eqns if "glass" in e.primitive.name
        ]
        return eqn.params["params"].implementation

    seen.append(implementation())
    with glass.configure(implementation="npu_model"):
        seen.append(implementation())
        with glass.configure(implementation="xla"):
            seen.append(implementation())
        seen.append(implementation())
    seen.append(implementation())
    assert seen == [None, "npu_model", "xla", "npu_model", None]


def test_alignment_set_after_a_trace_is_not_stale():
    f = jax.jit(glass.gemm)
    lhs, rhs = _operands((4, 7, 5), "float32")
    f(lhs, rhs)
    with glass.configure(alignment="strict"), pytest.raises(glass.errors.HardwareConstraintError):
        f(lhs, rhs)
    f(lhs, rhs)


# --- derivatives are in test_gemm_transformations.py; here only that what cannot be differentiated says so ----------


def test_integer_products_have_no_gradient():
    lhs, rhs = _operands((4, 4, 4), "int8")
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda a: glass.gemm(a, rhs).sum().astype(jnp.float32))(lhs)


def test_every_dtype_and_batch_has_the_shape_of_matmul():
    for dtype, batch in itertools.product([*FLOATS, "int8"], [(), (2,), (2, 3)]):
        lhs, rhs = jax.ShapeDtypeStruct((*batch, 3, 4), dtype), jax.ShapeDtypeStruct((4, 5), dtype)
        assert jax.eval_shape(glass.gemm, lhs, rhs).shape == jax.eval_shape(jnp.matmul, lhs, rhs).shape
