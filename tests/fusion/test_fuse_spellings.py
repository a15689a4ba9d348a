"""Ways to write the same layers: each becomes the same operation, with NumPy's result."""

import fusing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusing import arrays, operations
from hypothesis import given, settings
from hypothesis import strategies as st

import glass_jax as glass
import numpy_reference as ref

EPS = 1e-5


def two_pass(x, g, b):
    return fusing.plain_norm(x, g, b, EPS)


def square_root(x, g, b):
    return g * ((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + EPS)) + b


def fast_variance(x, g, b):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean**2)
    return b + (x - mean) * (jax.lax.rsqrt(variance + EPS) * g)


def sums(x, g, b):
    centered = x - jnp.sum(x, -1, keepdims=True) / x.shape[-1]
    variance = jnp.sum(centered * centered, -1) / x.shape[-1]
    return centered * ((variance + EPS) ** -0.5)[..., None] * g + b


def reduced_then_expanded(x, g, b):
    mean, mean2 = jnp.mean(x, -1), jnp.mean(jnp.square(x), -1)
    rstd = 1 / jnp.sqrt(mean2 - mean * mean + EPS)
    return (x - mean[..., None]) * rstd[..., None] * g + b


def scale_and_shift_folded(x, g, b):
    mean = jnp.mean(x, -1, keepdims=True)
    scale = g / jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return x * scale + (b - mean * scale)


def in_float32(x, g, b):
    return two_pass(x.astype(jnp.float32), g.astype(jnp.float32), b.astype(jnp.float32)).astype(x.dtype)


def standardized(x, g, b):
    return jax.nn.standardize(x, epsilon=EPS) * g + b


jitted = jax.jit(lambda x, g, b, eps: fusing.plain_norm(x, g, b, eps))


def in_jit(x, g, b):
    return jitted(x, g, b, EPS)


NORMS = [
    two_pass, square_root, fast_variance, sums, reduced_then_expanded, scale_and_shift_folded, in_float32,
    standardized, in_jit,
]  # fmt: skip

TANH_GELUS = {
    "jax": jax.nn.gelu,
    "by hand": lambda y: 0.5 * y * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
    "constants in JAX": lambda y: y * (0.5 + 0.5 * jnp.tanh(jnp.sqrt(2 / jnp.pi) * y * (1 + 0.044715 * y * y))),
    "sigmoid": lambda y: y * jax.nn.sigmoid(2 * np.sqrt(2 / np.pi) * (y + 0.044715 * jnp.power(y, 3))),
    "exponential": lambda y: y / (1 + jnp.exp(-2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y * jnp.square(y)))),
}
ERF_GELUS = {
    "jax": lambda y: jax.nn.gelu(y, approximate=False),
    "by hand": lambda y: 0.5 * y * (1 + jax.lax.erf(y / np.sqrt(2))),
    "constants in JAX": lambda y: y * (1 - 0.5 * jax.lax.erfc(y / jnp.sqrt(2.0))),
    "negated": lambda y: -0.5 * y * (jax.lax.erf(-y * np.sqrt(0.5)) - 1),
}
GELUS = [(name, True, fn) for name, fn in TANH_GELUS.items()] + [(name, False, fn) for name, fn in ERF_GELUS.items()]
SILUS = {"jax": jax.nn.silu, "by hand": lambda z: z / (1 + jnp.exp(-z)), "swish": lambda z: jax.nn.sigmoid(z) * z}
RELUS = {
    "jax": jax.nn.relu,
    "maximum": lambda z: jnp.maximum(0, z),
    "clip": lambda z: jnp.clip(z, 0),
}


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layer_norms(norm, dtype):
    x, g, b, w = arrays((5, 24), (24,), (24,), (24, 16), dtype=dtype)
    before = lambda x, g, b, w: jax.nn.gelu(norm(x, g, b)) @ w  # noqa: E731
    after = lambda x, g, b, w: jax.nn.gelu(norm(x @ w, g[:16], b[:16]))  # noqa: E731
    assert operations(glass.fuse(before), x, g, b, w) == {"ln_gelu_linear": 1}
    assert operations(glass.fuse(after), x, g, b, w) == {"linear_ln_gelu": 1}
    ref.assert_close(glass.fuse(before)(x, g, b, w), fusing.gelu(fusing.layer_norm(x, g, b)) @ ref.f64(w))
    ref.assert_close(
        glass.fuse(after)(x, g, b, w), fusing.gelu(fusing.layer_norm(ref.gemm(x, w), g[:16], b[:16])), tolerance=2e-2
        if dtype == "bfloat16" else None,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "approximate", "gelu"), GELUS, ids=[f"{n}-{a}" for n, a, _ in GELUS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelus(name, approximate, gelu, dtype):
    x, g, b, w = arrays((5, 24), (24,), (24,), (24, 16), dtype=dtype)
    fn = lambda x, g, b, w: gelu(two_pass(x, g, b)) @ w  # noqa: E731
    (site,) = glass.fuse(fn, report=True)(x, g, b, w).sites
    assert (site.pattern, site.fused) == ("ln_gelu_linear", True)
    assert ("erf" in site.parts) != approximate
    ref.assert_close(glass.fuse(fn)(x, g, b, w), fusing.gelu(fusing.layer_norm(x, g, b), approximate) @ ref.f64(w))


@pytest.mark.parametrize(
    ("activation", "fn"),
    [("gelu", f) for f in TANH_GELUS.values()]
    + [("silu", f) for f in SILUS.values()]
    + [("relu", f) for f in RELUS.values()],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations(activation, fn, dtype):
    x, w, c = arrays((5, 24), (24, 16), (16,), dtype=dtype)
    fused = glass.fuse(lambda x, w, c: fn(x @ w + c))
    assert operations(fused, x, w, c) == {"gemm": 1}
    assert f"activation='{activation}'" in str(jax.make_jaxpr(fused)(x, w, c))
    ref.assert_close(fused(x, w, c), ref.gemm(x, w, c, activation))


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: x @ w.T.T,
        lambda x, w: jnp.einsum("bsk,kn->bsn", x, w),
        lambda x, w: jax.lax.dot_general(x, w.T, (((2,), (1,)), ((), ()))),
        lambda x, w: (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1),
    ],
    ids=["matmul", "transposed", "einsum", "dot_general", "reshaped"],
)
def test_products(product):
    x, w, c, g, b = arrays((2, 5, 24), (24, 16), (16,), (16,), (16,))
    fused = glass.fuse(lambda x, w, c: jax.nn.relu(product(x, w) + c))
    assert operations(fused, x, w, c) == {"gemm": 1}
    assert "transpose[" not in str(jax.make_jaxpr(fused)(x, w, c))
    ref.assert_close(fused(x, w, c), ref.gemm(x, w, c, "relu"))
    normed = glass.fuse(lambda *a: jax.nn.gelu(two_pass(product(a[0], a[1]) + a[2], a[3], a[4])))
    assert operations(normed, x, w, c, g, b) == {"linear_ln_gelu": 1}
    ref.assert_close(normed(x, w, c, g, b), fusing.gelu(fusing.layer_norm(ref.gemm(x, w, c), g, b)))


def test_products_with_batch_dimensions_and_of_vectors():
    x, w, c, v = arrays((3, 5, 8), (3, 8, 4), (4,), (8,))
    batched = glass.fuse(lambda x, w, c: jax.nn.silu(x @ w + c))
    assert operations(batched, x, w, c) == {"gemm": 1}
    ref.assert_close(batched(x, w, c), ref.gemm(x, w, np.broadcast_to(c, (3, 4)), "silu"))
    vector = glass.fuse(lambda v, w, c: jax.nn.silu(v @ w + c))
    assert operations(vector, v, w[0], c) == {"gemm": 1}
    ref.assert_close(vector(v, w[0], c), ref.gemm(v[None], w[0], c, "silu")[0])


@pytest.mark.parametrize("bias", ["vector", "row", "array", "scalar"])
def test_biases(bias):
    x, w, c = arrays((5, 24), (24, 16), (16,))
    c = {"vector": c, "row": c[None], "scalar": c[0], "array": c}[bias]
    spread = (lambda c: jnp.broadcast_to(c, (5, 16))) if bias == "array" else (lambda c: c)
    fused = glass.fuse(lambda x, w, c: x @ w + spread(c))
    assert operations(fused, x, w, c) == {"gemm": 1}
    ref.assert_close(fused(x, w, c), ref.f64(x) @ ref.f64(w) + ref.f64(c))


def test_scale_or_shift_may_be_missing():
    x, g, b, w = arrays((5, 24), (24,), (24,), (24, 16))
    for norm, expected in (
        (lambda x: fusing.plain_norm(x, 1, 0), fusing.layer_norm(x)),
        (lambda x: fusing.plain_norm(x, g, 0), fusing.layer_norm(x, g)),
        (lambda x: fusing.plain_norm(x, 1, b), fusing.layer_norm(x, 1.0, b)),
        (lambda x: fusing.plain_norm(x, 1 + g, b, eps=1e-3), fusing.layer_norm(x, 1 + ref.f64(g), b, 1e-3)),
    ):
        fused = glass.fuse(lambda x, norm=norm: jax.nn.gelu(norm(x)) @ w)
        assert operations(fused, x) == {"ln_gelu_linear": 1}
        ref.assert_close(fused(x), fusing.gelu(expected) @ ref.f64(w))


# Each shape is compiled anew, so there are few: rows, K and N; single rows and columns, none, and odd sizes.
SHAPES = [((), 2, 1), ((1,), 7, 3), ((0,), 5, 4), ((3, 2), 33, 9), ((2, 0, 3), 4, 1)]


def _assert_no_less_precise(out, plain, expected, magnitude, *types):
    """``out`` is of the type of ``plain`` and as close to ``expected``, up to a few last places of what is summed."""
    assert (out.dtype, out.shape) == (plain.dtype, plain.shape)
    off, off_plain = (np.abs(ref.f64(x) - expected) for x in (out, plain))
    rounding = 4 * max(float(jnp.finfo(t).eps) for t in types)
    assert np.all(off <= np.maximum(off_plain, rounding * magnitude))


@settings(max_examples=15)
@given(
    st.sampled_from(NORMS), st.sampled_from(GELUS), st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(SHAPES), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_never_less_precise(norm, gelu, dtype, shape, with_bias, seed):
    """Any spelling, shape and dtype: at least as close to float64 as the function as it was written."""
    rows, k, n = shape
    x, g, b, w, c = arrays((*rows, k), (k,), (k,), (k, n), (n,), dtype=dtype, seed=seed)
    _, approximate, activation = gelu

    def fn(x):
        y = activation(norm(x, g, b)).astype(dtype) @ w
        return y + c if with_bias else y

    fused = jax.jit(glass.fuse(fn))
    assert operations(fused, x) == {"ln_gelu_linear": 1}
    a = fusing.gelu(fusing.layer_norm(x, g, b), approximate)
    c = ref.f64(c) if with_bias else np.zeros(n)
    # What a row holds is small beside its scale where differences from its mean cancel.
    magnitude = (np.abs(a) + np.abs(ref.f64(g)) + np.abs(ref.f64(b))) @ np.abs(ref.f64(w)) + np.abs(c)
    _assert_no_less_precise(fused(x), jax.jit(fn)(x), a @ ref.f64(w) + c, magnitude, dtype)


@settings(max_examples=15)
@given(
    st.sampled_from([("relu", f) for f in RELUS.values()] + [("silu", f) for f in SILUS.values()]
                    + [("gelu", f) for f in TANH_GELUS.values()] + [(None, lambda z: z)]),
    st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(["float32", "bfloat16", None]),
    st.sampled_from(SHAPES), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_epilogues_never_less_precise(activation, dtype, cast, shape, transposed, seed):
    rows, k, n = shape
    x, w, c = arrays((*rows, k), (n, k) if transposed else (k, n), (n,), dtype=dtype, seed=seed)
    name, activate = activation

    def fn(x):
        z = activate(x @ (w.T if transposed else w) + c)
        return z if cast is None else z.astype(cast)

    fused = jax.jit(glass.fuse(fn))
    assert operations(fused, x) == {"gemm": 1}
    w, c = ref.f64(w).T if transposed else ref.f64(w), ref.f64(c)
    expected = ref.activate(ref.f64(x) @ w + c, name)
    magnitude = np.abs(ref.f64(x)) @ np.abs(w) + np.abs(c)
    _assert_no_less_precise(fused(x), jax.jit(fn)(x), expected, magnitude, dtype, cast or dtype)
