"""rms_norm and layer_norm against NumPy float64: every implementation that runs here, dtype and shape; the chips."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glass_jax as glass
import normalization_reference
import numpy_reference as ref
from benchmarks.shapes import normalization as shapes

RUNS_HERE = ("xla", "npu_model")
NORMS = ("rms_norm", "layer_norm")


def _operands(norm, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    weights = [ref.random(rng, shape[-1:], "float32") for _ in range(1 + (norm == "layer_norm"))]
    return [ref.random(rng, shape, dtype) + 1, *weights]


def _expected(norm, *operands, **options):
    return getattr(normalization_reference, norm)(*operands, **options)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((7,), "float32"),
        ((5, 3, 64), "bfloat16"),
        ((33, 1001), "float16"),
        ((130, 512), "float32"),
        ((66, 77), "bfloat16"),
        ((2, 7168), "float32"),
        ((65, 18432), "float32"),
    ],
    ids=str,
)
def test_any_shape(shape, dtype, norm, implementation):
    operands = _operands(norm, shape, dtype)
    out = jax.jit(functools.partial(getattr(glass, norm), implementation=implementation))(*operands)
    assert out.dtype == dtype
    ref.assert_close(out, _expected(norm, *operands))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "width"), [*itertools.product(shapes.TOKENS[:2], shapes.WIDTHS), (4096, "v2_lite_hidden")], ids=str
)
def test_model_shapes(tokens, width, dtype, norm, implementation):
    operands = _operands(norm, (tokens, shapes.WIDTHS[width]), dtype)
    ref.assert_close(getattr(glass, norm)(*operands, implementation=implementation), _expected(norm, *operands))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weights", ["float16", "bfloat16", "float64"])
def test_weights_of_any_float_type(norm, weights):
    with jax.enable_x64(weights == "float64"):
        x, *vectors = _operands(norm, (9, 40), "bfloat16")
        vectors = [vector.astype(weights) for vector in vectors]
        out = getattr(glass, norm)(x, *vectors)
        assert out.dtype == jnp.bfloat16
        ref.assert_close(out, _expected(norm, x, *vectors))


@pytest.mark.parametrize("norm", NORMS)
def test_float64(norm):
    with jax.enable_x64(True):
        operands = [operand.astype(jnp.float64) for operand in _operands(norm, (9, 40), "float32")]
        ref.assert_close(getattr(glass, norm)(*operands), _expected(norm, *operands))
        with pytest.raises(glass.errors.UnsupportedError, match="float64"):
            getattr(glass, norm)(*operands, implementation="npu_model")


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("norm", NORMS)
def test_eps(norm, implementation):
    x, *weights = _operands(norm, (4, 64), "float32")
    x = x.at[1].set(0)
    for eps in (1e-3, 0.5):
        out = getattr(glass, norm)(x, *weights, eps=eps, implementation=implementation)
        ref.assert_close(out, _expected(norm, x, *weights, eps=eps))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_a_large_mean_does_not_spoil_the_variance(implementation):
    x, gamma, beta = _operands("layer_norm", (4, 512), "float32")
    x = 1000 + x
    out = glass.layer_norm(x, gamma, beta, implementation=implementation)
    # The mean has an error of a few units in the last place of 1000, 6e-5 of the deviation each.
    ref.assert_close(out, _expected("layer_norm", x, gamma, beta), tolerance=3e-4)


@pytest.mark.parametrize("implementation", [*RUNS_HERE, None])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (2, 0)], ids=str)
def test_empty(shape, norm, implementation):
    operands = _operands(norm, shape, "bfloat16")
    out = getattr(glass, norm)(*operands, implementation=implementation)
    assert out.shape == shape and out.dtype == jnp.bfloat16


# --- on the chips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", shapes.TOKENS)
@pytest.mark.parametrize("width", shapes.WIDTHS)
def test_the_chips_take_every_model_shape(width, tokens, chip):
    size = shapes.WIDTHS[width]
    x = jax.ShapeDtypeStruct((tokens, size), "float32" if tokens == 128 else "bfloat16")
    weight = jax.ShapeDtypeStruct((size,), "float32")
    both = lambda x, gamma, beta: (glass.rms_norm(x, gamma), glass.layer_norm(x, gamma, beta))  # noqa: E731
    assert glass.verify(both, x, weight, weight, chip=chip) == []


def test_export(tmp_path):
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _operands("layer_norm", (5, 77), "bfloat16")]
    glass.export(glass.layer_norm, *operands, path=tmp_path / "bundle")
    (source,) = (tmp_path / "bundle" / "kernels").glob("*.asc")
    assert "layer_norm_bfloat16_5x77" in source.read_text()


def test_nothing_is_padded():
    """The kernel takes rows of any length: what is strict about alignment has nothing to refuse."""
    operands = _operands("rms_norm", (3, 7), "float16")
    with glass.configure(alignment="strict"):
        ref.assert_close(glass.rms_norm(*operands, implementation="npu_model"), _expected("rms_norm", *operands))


def test_debug_shows_the_tiles(capsys):
    operands = _operands("rms_norm", (200, 96), "float32")
    with glass.configure(debug=True):
        glass.rms_norm(*operands, implementation="npu_model")
    assert "tiles of 4 rows, 50 tiles on 50 vector units in 1 waves" in capsys.readouterr().err


# --- errors, each before anything compiles -------------------------------------------------------------------------

X, GAMMA = jnp.ones((4, 8)), jnp.ones(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.rms_norm(X, jnp.ones(7)), r"rms_norm: gamma has shape \(7,\), expected \[D\] with D = 8"),
        (lambda: glass.layer_norm(X, GAMMA, jnp.ones((1, 8))), r"layer_norm: beta has shape \(1, 8\), expected \[D\]"),
        (lambda: glass.rms_norm(jnp.float32(1), GAMMA), r"x has shape \(\)"),
        (lambda: glass.rms_norm(X.astype(jnp.int32), GAMMA), r"x is int32; use float32, float16 or bfloat16"),
        (lambda: glass.layer_norm(X, GAMMA, jnp.ones(8, int)), r"beta is int32"),
        (lambda: glass.rms_norm(X, GAMMA, implementation="cuda"), r"implementation='cuda' is not one of"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_row_that_does_not_fit_the_chip():
    x, gamma = jnp.ones((1, 40000)), jnp.ones(40000)
    with pytest.raises(glass.errors.OutOfOnChipMemoryError, match=r"40000 float32 .* takes 160768 bytes .* 950DT"):
        glass.rms_norm(x, gamma, implementation="npu_model")
    assert jnp.isfinite(glass.rms_norm(x, gamma)).all()
