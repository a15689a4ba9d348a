"""ln_gelu_linear and linear_ln_gelu against NumPy float64: every implementation that runs here, dtype and shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_linear_reference as judge
import glass_jax as glass
import numpy_reference as ref
from benchmarks.shapes.fused_linear import SHAPES

RUNS_HERE = ("xla", "npu_model")
BOTH = {"ln_gelu_linear": glass.ln_gelu_linear, "linear_ln_gelu": glass.linear_ln_gelu}


def operands(name, shape, dtype, *, bias=True, batch=(), vector_dtype="float32", seed=0):
    """Operands whose means are not zero; ``shape`` is M, K and N, ``batch`` leads x only."""
    m, k, n = shape
    rng = np.random.default_rng(seed)

    def array(values, dtype):
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    x = array(rng.standard_normal((*batch, m, k)) + 1.5, dtype)
    w = array(rng.standard_normal((k, n)) / max(k, 1) ** 0.5, dtype)
    b = array(rng.standard_normal(n), vector_dtype) if bias else None
    width = k if name == "ln_gelu_linear" else n
    gamma, beta = (array(rng.standard_normal(width), vector_dtype) for _ in range(2))
    return (x, gamma, beta, w, b) if name == "ln_gelu_linear" else (x, w, b, gamma, beta)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(
    ("shape", "dtype", "bias", "approximate"),
    [
        ((18, 70, 90), "float32", False, False),
        ((18, 70, 90), "float16", True, False),
        ((18, 70, 90), "bfloat16", False, True),
        pytest.param((100, 256, 576), "bfloat16", True, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BOTH)
def test_against_numpy(name, shape, dtype, bias, approximate, implementation):
    args = operands(name, shape, dtype, bias=bias)
    out = BOTH[name](*args, approximate=approximate, implementation=implementation)
    assert out.dtype == dtype
    ref.assert_close(out, getattr(judge, name)(*args, approximate=approximate))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape.rows * shape.outputs < 2**24])
@pytest.mark.parametrize("name", BOTH)
def test_model_shapes(name, shape, implementation):
    sizes = SHAPES[shape]
    args = operands(name, (sizes.rows, sizes.inputs, sizes.outputs), sizes.dtype, bias=sizes.bias)
    ref.assert_close(BOTH[name](*args, implementation=implementation), getattr(judge, name)(*args))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_only_the_activations_and_the_result_are_rounded(implementation):
    args = operands("ln_gelu_linear", (18, 70, 90), "bfloat16")
    x, gamma, beta, w, b = args
    activations = jnp.asarray(judge.layer_norm_gelu(x, gamma, beta), "float32").astype("bfloat16")
    exact = judge.linear(activations, w, b)
    last_rounding = ref.error(jnp.asarray(exact, "float32").astype("bfloat16"), exact)
    ref.assert_close(glass.ln_gelu_linear(*args, implementation=implementation), exact, 1.1 * last_rounding)
    args = operands("linear_ln_gelu", (18, 70, 90), "bfloat16")
    exact = judge.linear_ln_gelu(*args)
    last_rounding = ref.error(jnp.asarray(exact, "float32").astype("bfloat16"), exact)
    ref.assert_close(glass.linear_ln_gelu(*args, implementation=implementation), exact, 1.1 * last_rounding)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", BOTH)
def test_a_mean_far_from_zero_does_not_cancel(name, implementation):
    """The variance is of differences from the mean: means of squares would leave nothing of it in float32."""
    args = list(operands(name, (18, 70, 90), "float32", vector_dtype="float32"))
    shifted = 0 if name == "ln_gelu_linear" else 2  # x, or the bias, the same for all columns
    args[shifted] = (args[shifted] * (1 if shifted == 0 else 0) + 3000).astype("float32")
    # What is left of an element is a 24-bit number of which 12 bits are the mean.
    ref.assert_close(BOTH[name](*args, implementation=implementation), getattr(judge, name)(*args), 2e-3)


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_empty(name, shape, implementation):
    args = operands(name, shape, "float32")
    out = BOTH[name](*args, implementation=implementation)
    assert out.shape == (shape[0], shape[2]) and out.dtype == jnp.float32
    if shape == (4, 0, 8):
        ref.assert_close(out, getattr(judge, name)(*args) if name == "linear_ln_gelu" else np.tile(args[-1], (4, 1)))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("name", BOTH)
def test_rows_of_any_rank(name, implementation):
    args = operands(name, (3, 70, 90), "float32", batch=(2, 3))
    fn = functools.partial(BOTH[name], implementation=implementation)
    out = fn(*args)
    assert out.shape == (2, 3, 3, 90)
    ref.assert_close(out, getattr(judge, name)(*args))
    row = fn(args[0][1, 2, 0], *args[1:])
    ref.assert_close(row, ref.f64(out[1, 2, 0]))


@pytest.mark.parametrize("name", BOTH)
def test_wider_floats_mix(name):
    args = list(operands(name, (4, 8, 6), "bfloat16", vector_dtype="bfloat16"))
    w = 3 if name == "ln_gelu_linear" else 1
    args[w] = args[w].astype("float32")
    out = BOTH[name](*args)
    assert out.dtype == jnp.float32
    ref.assert_close(out, getattr(judge, name)(*args))


@settings(max_examples=20)
@given(
    name=st.sampled_from(list(BOTH)),
    shape=st.tuples(st.integers(1, 20), st.integers(2, 40), st.integers(2, 40)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    bias=st.booleans(),
    approximate=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-3, 1.0]),
    jit=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_call_agrees_with_numpy(name, shape, dtype, bias, approximate, eps, jit, seed):
    args = operands(name, shape, dtype, bias=bias, seed=seed)
    options = {"eps": eps, "approximate": approximate}
    fn = functools.partial(BOTH[name], **options)
    out = (jax.jit(fn) if jit else fn)(*args)
    expected = getattr(judge, name)(*args, **options)
    # Normalization divides by the deviation: of few columns it may be small, and rounding errors grow by as much.
    scale = max(np.linalg.norm(expected), np.sqrt(expected.size))
    assert np.linalg.norm(ref.f64(out) - expected) <= 4 * ref.TOLERANCE[dtype] * scale


# --- errors, each before anything compiles -------------------------------------------------------------------------

X, W, K, N = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.ones(8), jnp.ones(6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.ln_gelu_linear(X, N, K, W), r"gamma has shape \(6,\), expected \[K\] with K = 8 \(of x\)"),
        (lambda: glass.ln_gelu_linear(X, K, K, W.T), r"w has shape \(6, 8\), expected \[K, N\] with K = 8 \(of x\)"),
        (lambda: glass.ln_gelu_linear(X, K, K, W, K), r"b has shape \(8,\), expected \[N\] with N = 6 \(of w\)"),
        (lambda: glass.ln_gelu_linear(X[0, 0], K, K, W), r"x has shape \(\), expected \[\.\.\., K\]"),
        (lambda: glass.ln_gelu_linear(X, K, K, W.astype(int)), r"w is int32; use float32, float16 or bfloat16"),
        (lambda: glass.linear_ln_gelu(X, W, K, N, N), r"b has shape \(8,\), expected \[N\] with N = 6 \(of w\)"),
        (lambda: glass.linear_ln_gelu(X, W, None, N, K), r"beta has shape \(8,\), expected \[N\] with N = 6"),
        (lambda: glass.linear_ln_gelu(X.astype(complex), W, N, N, N), r"linear_ln_gelu: x is complex"),
        (lambda: glass.linear_ln_gelu(X, W, N, N, N, implementation="cuda"), r"implementation='cuda' is not one of"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_strict_alignment_names_dimension_multiple_and_next_size():
    with glass.configure(alignment="strict"):
        with pytest.raises(glass.errors.HardwareConstraintError, match="K is 8, not a multiple of 64 .* size is 64"):
            glass.ln_gelu_linear(X, K, K, W)
        with pytest.raises(glass.errors.HardwareConstraintError, match="N is 6, not a multiple of 8 .* size is 8"):
            glass.linear_ln_gelu(X, W, N, N, N)


def test_padding_is_said(capsys):
    with glass.configure(debug=True):
        glass.ln_gelu_linear(X, K, K, W, implementation="npu_model")
        glass.linear_ln_gelu(X, W, N, N, N, implementation="npu_model")
    said = capsys.readouterr().err
    assert "ln_gelu_linear {'k': 8, 'n': 6}: padding K 8 -> 64, N 6 -> 8" in said
    assert "linear_ln_gelu {'k': 8, 'n': 6}: padding N 6 -> 8" in said


@pytest.mark.parametrize("name", BOTH)
def test_float64_is_refused_by_the_npu(name):
    with jax.enable_x64(True):
        args = [None if a is None else a.astype("float64") for a in operands(name, (2, 4, 6), "float32")]
        with pytest.raises(glass.errors.UnsupportedError, match="computes no float64"):
            BOTH[name](*args, implementation="npu_model")


def test_more_columns_than_the_chip_has_room_for():
    k = 16384
    args = jnp.ones((4, k)), jnp.ones(k), jnp.ones(k), jnp.ones((k, 8))
    with pytest.raises(glass.errors.OutOfOnChipMemoryError, match="K = 16384 .* 1048576 of 524288 bytes of L1.*gemm"):
        glass.ln_gelu_linear(*args, implementation="npu_model")


def test_configure_takes_effect_on_a_jitted_function():
    f = jax.jit(glass.linear_ln_gelu)
    f(X, W, N, N, N)
    with glass.configure(alignment="strict"), pytest.raises(glass.errors.HardwareConstraintError):
        f(X, W, N, N, N)
    f(X, W, N, N, N)
