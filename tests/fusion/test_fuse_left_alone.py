"""What is not fused, and the reason that the report gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusing import arrays, operations, plain_norm, reasons

import glass_jax as glass

X, G, B, W, C = arrays((4, 8), (8,), (8,), (8, 16), (16,))
WIDE = {name: v.astype(jnp.bfloat16) for name, v in (("x", X), ("w", W), ("c", C))}


def before(x, w=W):
    return jax.nn.gelu(plain_norm(x, G, B)) @ w


def after(x, w=W):
    return jax.nn.gelu(plain_norm(x @ w, C, C))


# --- used elsewhere ------------------------------------------------------------------------------------------------


def test_an_intermediate_is_a_result():
    def fn(x):
        z = x @ W + C
        return z, jax.nn.silu(z)

    (site,) = glass.fuse(fn, report=True)(X).sites
    assert (site.fused, site.parts) == (True, "product + bias")
    assert "product + bias + silu: its add at" in site.reason and "is a result of the function" in site.reason
    assert operations(glass.fuse(fn), X) == {"gemm": 1}


@pytest.mark.parametrize("which", ["mean", "normed", "activated", "product"])
def test_an_intermediate_is_used_again(which):
    def fn(x):
        mean = jnp.mean(x, -1, keepdims=True)
        normed = (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * G + B
        activated = jax.nn.gelu(normed)
        product = activated @ W
        again = {"mean": mean, "normed": normed, "activated": activated, "product": product}[which]
        return product + C, jnp.sin(again)

    reason = reasons(fn, X).get("ln_gelu_linear")
    if which == "product":  # without the bias it still is one
        assert operations(glass.fuse(fn), X) == {"ln_gelu_linear": 1}
    else:
        assert "is used again, by sin at" in reason
        assert "ln_gelu_linear" not in operations(glass.fuse(fn), X)


def test_the_input_may_be_used_again():
    fn = lambda x: x + (before(x) @ W.T)  # noqa: E731
    assert operations(glass.fuse(fn), X) == {"ln_gelu_linear": 1}


# --- numbers would change ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.F16_F16_F32])
def test_precision(precision):
    product = lambda x, w: jnp.matmul(x, w, precision=precision)  # noqa: E731
    found = reasons(lambda x: jax.nn.relu(product(x, W)), X)
    assert found == {"gemm_activation": found["gemm_activation"]} and "precision" in found["gemm_activation"]
    assert "precision" in reasons(lambda x: product(jax.nn.gelu(plain_norm(x, G, B)), W), X)["ln_gelu_linear"]


def test_default_precision_of_the_configuration():
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in reasons(lambda x: jax.nn.relu(x @ W), X)["gemm_activation"]


def test_float64_stays():
    with jax.enable_x64(True):
        x, w = X.astype(jnp.float64), W.astype(jnp.float64)
        assert reasons(lambda x: jax.nn.relu(x @ w), x) == {"gemm_activation": "float64 stays as it is"}
        assert reasons(lambda x: before(x, w), x)["ln_gelu_linear"] == "float64 stays as it is"
        widened = lambda x: jax.nn.relu((x @ W).astype(jnp.float64))  # noqa: E731
        assert "float64 stays as it is" in reasons(widened, X)["gemm_activation"]


@pytest.mark.parametrize("dtype", ["int32", "int8", "complex64"])
def test_other_types_stay(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    assert f"{dtype} stays as it is" in reasons(lambda x: x @ w + w[0], x)["gemm_activation"]


def test_rounding_to_fp8_stays():
    fn = lambda x: jax.nn.relu((x @ W).astype(jnp.float8_e4m3fn).astype(jnp.float32))  # noqa: E731
    assert reasons(fn, X) == {"gemm_activation": "float8_e4m3fn stays as it is"}


def _half(x):
    return x.astype(jnp.float16)


OVERFLOWS = {
    "before the activation": lambda x: jax.nn.silu(_half(x @ W)),
    "and back": lambda x: jax.nn.gelu(_half(x @ W).astype(jnp.float32)),
    "before the bias": lambda x: jax.nn.silu(_half(x @ W).astype(jnp.float32) + C),
    "of a bfloat16": lambda x: jax.nn.silu(_half(x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16))),
    "the product's own": lambda x: jax.nn.silu(
        jnp.matmul(x, W, preferred_element_type=jnp.float16).astype("float32") + C
    ),
    "before the layer norm": lambda x: jax.nn.gelu(plain_norm(_half(x @ W).astype(jnp.float32), C, C)),
    "after the layer norm": lambda x: jax.nn.gelu(_half(plain_norm(x, 1e5 * G, B)).astype(jnp.float32)) @ W,
}


@pytest.mark.parametrize("fn", OVERFLOWS.values(), ids=OVERFLOWS)
def test_casts_to_a_smaller_range_stay(fn):
    """They make infinities, and those NaN or zeros; fused without them there would be numbers."""
    x = -1e6 * jnp.abs(X)
    plain, fused = fn(x), glass.fuse(fn)(x)
    assert np.isnan(plain).any() or np.isinf(plain).any()
    np.testing.assert_array_equal(np.isfinite(fused), np.isfinite(plain))
    assert any("range is smaller than that of" in reason for reason in reasons(fn, x).values())


def test_a_cast_at_the_end_is_the_operations():
    fn = lambda x: _half(jax.nn.relu(x @ W + C))  # noqa: E731
    assert operations(glass.fuse(fn), X) == {"gemm": 1}
    x = 1e6 * X
    np.testing.assert_array_equal(np.isinf(glass.fuse(fn)(x)), np.isinf(fn(x)))
    narrow = lambda x: jnp.matmul(_half(jax.nn.gelu(plain_norm(x, G, B))), _half(W))  # noqa: E731
    assert operations(glass.fuse(narrow), _half(X)) == {"ln_gelu_linear": 1}


def test_fp8_operands_are_products_of_gemm():
    x, w = X.astype(jnp.float8_e4m3fn), W.astype(jnp.float8_e5m2)
    fn = lambda x, w: jax.nn.relu(jax.lax.dot(x, w, preferred_element_type=jnp.float32) + C)  # noqa: E731
    assert operations(glass.fuse(fn), x, w) == {"gemm": 1}
    np.testing.assert_allclose(glass.fuse(fn)(x, w), fn(x, w), rtol=1e-5, atol=1e-5)
    normed = lambda x, w: jax.nn.gelu(plain_norm(jax.lax.dot(x, w, preferred_element_type=jnp.float32), C, C))  # noqa: E731
    assert "stays as it is" in reasons(normed, x, w)["linear_ln_gelu"]


def test_a_result_wider_than_the_operands():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    wide = lambda x: jnp.matmul(jax.nn.gelu(plain_norm(x, G, B)).astype(x.dtype), w, preferred_element_type="float32")  # noqa: E731
    assert reasons(wide, x)["ln_gelu_linear"].startswith("result of float32 and product of bfloat16")
    assert reasons(lambda x: after(x, w), x)["linear_ln_gelu"].startswith("result of float32 and product of bfloat16")
    assert operations(glass.fuse(lambda x: wide(x).astype(jnp.bfloat16)), x) == {"ln_gelu_linear": 1}


def test_a_layer_norm_wider_than_the_product():
    narrow = lambda x: jax.nn.gelu(plain_norm(x, G, B)).astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)  # noqa: E731
    assert reasons(narrow, X)["ln_gelu_linear"].startswith("layer norm of float32 and product of bfloat16")


def test_a_narrower_input_is_widened():
    fn = lambda x: jax.nn.gelu(plain_norm(x.astype(jnp.float32), G, B)) @ W  # noqa: E731
    x = X.astype(jnp.bfloat16)
    assert operations(glass.fuse(fn), x) == {"ln_gelu_linear": 1}
    np.testing.assert_allclose(glass.fuse(fn)(x), fn(x), rtol=1e-5, atol=1e-5)


def test_gelu_of_gemm_is_the_tanh_form():
    erf = lambda z: jax.nn.gelu(z, approximate=False)  # noqa: E731
    assert "tanh form" in reasons(lambda x: erf(x @ W), X)["gemm_activation"]
    (site,) = glass.fuse(lambda x: erf(x @ W + C), report=True)(X).sites
    assert (site.fused, site.parts) == (True, "product + bias") and "tanh form" in site.reason


def test_eps_is_a_number():
    fn = lambda x, eps: jax.nn.gelu(plain_norm(x, G, B, eps)) @ W  # noqa: E731
    assert reasons(fn, X, 1e-5)["ln_gelu_linear"] == "eps of the layer norm is an array, not a number"
    assert operations(glass.fuse(lambda x: fn(x, 1e-3)), X) == {"ln_gelu_linear": 1}


# --- other shapes, and what only looks like it ---------------------------------------------------------------------


def test_products_that_are_not_of_matrices():
    vector = lambda x: jax.nn.relu(x @ W[:, 0])  # noqa: E731
    heads = lambda x: jax.nn.relu(jnp.einsum("bk,khd->bhd", x, W.reshape(8, 4, 4)))  # noqa: E731
    first = lambda x: jax.nn.relu(jnp.einsum("kb,kn->bn", x, W))  # noqa: E731
    for fn, x in ((vector, X), (heads, X)):
        assert "it is no [..., K] times [K, N]" in reasons(fn, x)["gemm_activation"]
    assert "it is no [..., K] times [K, N]" in reasons(lambda x: jax.nn.relu(jax.lax.dot_general(
        x, W, (((0,), (0,)), ((), ())))), X.T)["gemm_activation"]  # fmt: skip
    np.testing.assert_allclose(glass.fuse(first)(X.T), first(X.T), rtol=1e-5)


def test_batched_weights():
    x, w = jnp.stack([X, X]), jnp.stack([W, -W])
    assert "(2, 8, 16), not [K, N]" in reasons(before, x, w)["ln_gelu_linear"]
    assert "(2, 8, 16), not [K, N]" in reasons(after, x, w)["linear_ln_gelu"]


def _mixed_up(x):
    mean, var = jnp.mean(x, -1), jnp.var(x, -1)
    return (x - mean[None, :]) * jax.lax.rsqrt(var + 1e-5)[None, :] * G + B


# A square array, so that rows and columns are told apart by their place and not by their size.
SQUARE = arrays((8, 8))[0]
NOT_LAYER_NORMS = {
    "first axis": lambda x: plain_norm(x.T, G, B).T,
    "both axes": lambda x: (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5) * G + B,
    "columns": lambda x: (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * G + B,
    "statistics along the other axis": _mixed_up,
    "unbiased variance": lambda x: (
        (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5)
    ),
    "eps outside": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5),
    "rms norm": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * G,
    "another mean": lambda x: (x - (2 * x).mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "doubled": lambda x: 2 * plain_norm(x, G, B),
    "a little more": lambda x: plain_norm(x, G, B) + 1e-6,
    "masked": lambda x: jnp.where(x[0, 0] > 0, plain_norm(x, 1, 0), 0),
    "two shifts": lambda x: plain_norm(x, G, B) + G,
    "scale of a row": lambda x: plain_norm(x, G[:, None], B),
    "scale in the statistics": lambda x: (
        (x - x.mean(-1, keepdims=True)) * (jax.lax.rsqrt(x.var(-1) + 1e-5) * G)[:, None]
    ),
    "scale of an element": lambda x: plain_norm(x, jnp.outer(G, G), B),
    "scale from the input": lambda x: plain_norm(x, jnp.sin(x[0]), B) + jnp.sin(x),
    "stopped gradient": lambda x: (
        (x - jax.lax.stop_gradient(x.mean(-1, keepdims=True))) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
}


@pytest.mark.parametrize("name", NOT_LAYER_NORMS)
def test_not_layer_norms(name):
    fn = lambda x: jax.nn.gelu(NOT_LAYER_NORMS[name](x)) @ W  # noqa: E731
    assert operations(glass.fuse(fn), SQUARE) == {}
    np.testing.assert_array_equal(glass.fuse(fn)(SQUARE), fn(SQUARE))


NOT_ACTIVATIONS = {
    "leaky": jax.nn.leaky_relu,
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "quick gelu": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "another constant": lambda z: 0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.04 * z**3))),
    "of two": lambda z: z * jax.nn.sigmoid(z[::-1]),
    "transposed gate": lambda z: z * jax.nn.sigmoid(z.T),
    "sigmoid": jax.nn.sigmoid,
    "absolute value": lambda z: jnp.sqrt(z**2),
    "high power": lambda z: (1e30 * z) ** 100,
    # Of NaN it makes 0.
    "where": lambda z: jnp.where(z > 0, z, 0),
}


@pytest.mark.parametrize("name", NOT_ACTIVATIONS)
def test_not_activations(name):
    x, w = arrays((8, 4), (4, 8))
    fn = lambda x: NOT_ACTIVATIONS[name](x @ w)  # noqa: E731
    assert operations(glass.fuse(fn), x) == {}
    assert reasons(fn, x)["gemm_activation"] == "neither a bias nor an activation follows"
    np.testing.assert_array_equal(glass.fuse(fn)(x), fn(x))


def test_a_derivative_of_its_own_is_not_relu():
    @jax.custom_jvp
    def straight_through(z):
        return jnp.maximum(z, 0)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
    fn = lambda x: straight_through(x @ W).sum()  # noqa: E731
    assert operations(glass.fuse(fn), X) == {}
    np.testing.assert_array_equal(jax.grad(glass.fuse(fn))(X), jax.grad(fn)(X))


@pytest.mark.parametrize("what", ["rows", "array", "input"])
def test_not_biases(what):
    x, w = arrays((8, 8), (8, 8))
    added = {"rows": G[:, None], "array": jnp.outer(G, G), "input": x}[what]
    assert operations(glass.fuse(lambda x: x @ w + added), x) == {}


def test_a_bias_made_of_the_product_stays_behind():
    fn = lambda x: (z := x @ W) + jnp.max(z, 0)  # noqa: E731
    assert "is used again, by reduce_max at" in reasons(fn, X)["gemm_activation"]
    np.testing.assert_array_equal(glass.fuse(fn)(X), fn(X))


# --- the report ----------------------------------------------------------------------------------------------------


def test_overlapping_patterns_go_by_their_order():
    w2 = W.T
    fn = lambda x: jax.nn.gelu(plain_norm(x @ W + C, C, C)) @ w2 + B  # noqa: E731
    assert operations(glass.fuse(fn), X) == {"ln_gelu_linear": 1, "gemm": 1}
    assert "is fused with the dot_general at" in reasons(fn, X)["linear_ln_gelu"]
    other = glass.fuse(fn, patterns=("linear_ln_gelu", "ln_gelu_linear", "gemm_activation"))
    assert operations(other, X) == {"linear_ln_gelu": 1, "gemm": 1}
    np.testing.assert_allclose(other(X), fn(X), rtol=1e-4, atol=1e-4)


def test_only_the_patterns_asked_for():
    fn = lambda x: jax.nn.relu(before(x) + C)  # noqa: E731
    assert operations(glass.fuse(fn, patterns=("gemm_activation",)), X) == {"gemm": 1}
    assert operations(glass.fuse(fn, patterns=("linear_ln_gelu",)), X) == {}
    assert operations(glass.fuse(fn, patterns=()), X) == {}
    assert glass.fuse(fn, patterns=("linear_ln_gelu",), report=True)(X).sites == ()


def test_unknown_pattern():
    with pytest.raises(
        ValueError, match="unknown pattern 'layer_norm'; the patterns are ln_gelu_linear, linear_ln_gelu"
    ):
        glass.fuse(before, patterns=("layer_norm",))
    with pytest.raises(ValueError, match="patterns='gemm_activation' is one name: pass a sequence of them"):
        glass.fuse(before, patterns="gemm_activation")


def test_report_runs_nothing_and_reads_well(capfd):
    def fn(x, w):
        jax.debug.print("runs")
        return jax.lax.scan(lambda x, _: (jax.nn.relu(x @ w + G), None), x, None, length=2)[0] @ w

    shapes = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    report = glass.fuse(fn, report=True)(*shapes)
    assert "runs" not in capfd.readouterr().out
    assert [site.fused for site in report.sites] == [False, True]
    (fused,), (left,) = report.fused, report.not_fused
    assert (fused.parts, fused.within, fused.reason) == ("product + bias + relu", "scan", "")
    assert fused.operands == "float32[4, 8] x float32[8, 8]"
    assert "test_fuse_left_alone.py:" in fused.where and left.reason
    lines = str(report).splitlines()
    assert lines[0] == "glass.fuse: 1 of 2 sites fused"
    assert [line.split()[:2] for line in lines[2:]] == [["left", "gemm_activation"], ["fused", "gemm_activation"]]
    assert str(glass.fuse(jnp.sin, report=True)(X)) == "glass.fuse: no matrix products"


def test_a_result_that_would_be_sharded_otherwise():
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, jax.P(None, "n"))
        assert "instead of" in reasons(after, jax.device_put(X, jax.P()), w)["linear_ln_gelu"]


def test_what_an_operation_refuses_is_the_reason():
    with glass.configure(alignment="strict"):
        found = reasons(lambda x: jax.nn.relu(x @ W[:, :15] + C[:15]), X)
    assert "gemm" in found["gemm_activation"] and "15" in found["gemm_activation"]
