"""gemm under vmap, grad, jvp, checkpoint and shard_map."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import glass_jax as glass
import numpy_reference as ref

ACTIVATIONS = [None, "relu", "gelu", "silu"]


def _arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [ref.random(rng, shape, dtype) for shape in shapes]


# --- vmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize(
    ("in_axes", "shapes"),
    [
        ((0, None, None), [(3, 4, 8), (8, 5), (5,)]),
        ((2, None, None), [(4, 8, 3), (8, 5), (5,)]),
        ((None, 0, None), [(4, 8), (3, 8, 5), (5,)]),
        ((None, 1, 1), [(4, 8), (8, 3, 5), (5, 3)]),
        ((None, None, 0), [(4, 8), (8, 5), (3, 5)]),
        ((0, 0, 0), [(3, 4, 8), (3, 8, 5), (3, 5)]),
    ],
    ids=str,
)
def test_vmap(in_axes, shapes, implementation):
    lhs, rhs, bias = _arrays(*shapes)
    f = lambda a, b, c: glass.gemm(a, b, bias=c, activation="silu", implementation=implementation)  # noqa: E731
    out = jax.jit(jax.vmap(f, in_axes))(lhs, rhs, bias)
    moved = [
        np.moveaxis(ref.f64(x), d, 0) if d is not None else [ref.f64(x)] * 3
        for x, d in zip((lhs, rhs, bias), in_axes, strict=True)
    ]
    ref.assert_close(out, np.stack([ref.gemm(*args, "silu") for args in zip(*moved, strict=True)]))


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_nested_vmap_over_different_operands(implementation):
    lhs, rhs = _arrays((2, 4, 8), (3, 8, 5))
    f = functools.partial(glass.gemm, implementation=implementation)
    out = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(lhs, rhs)
    ref.assert_close(out, np.einsum("amk,bkn->abmn", ref.f64(lhs), ref.f64(rhs)))


@pytest.mark.parametrize(
    ("in_axes", "lhs", "rhs"),
    [((0, None), (64, 2, 32), (32, 256)), ((None, 0), (256, 32), (64, 32, 2))],
    ids=["lhs", "rhs"],
)
def test_vmap_does_not_copy_the_operand_that_is_not_mapped(in_axes, lhs, rhs):
    compiled = jax.jit(jax.vmap(glass.gemm, in_axes)).lower(jnp.zeros(lhs), jnp.zeros(rhs)).compile()
    copies = 64 * 256 * 32 * 4  # bytes of the unmapped operand, once for each of the 64 positions
    assert compiled.memory_analysis().temp_size_in_bytes < copies / 8


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 12)] * 3),
    size=st.integers(1, 4),
    lhs_axis=st.sampled_from([None, 0, 1, 2, -1]),
    rhs_axis=st.sampled_from([None, 0, 1, 2, -2]),
    transpose_rhs=st.booleans(),
    jit=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_vmap_and_grad_of_any_shape(shape, size, lhs_axis, rhs_axis, transpose_rhs, jit, seed):
    """vmap over any axes, and the gradient through it, agree with NumPy's products."""
    (m, n, k), in_axes = shape, (lhs_axis, rhs_axis)
    assume(in_axes != (None, None))
    whole = [(m, k), (n, k) if transpose_rhs else (k, n)]
    shapes = [
        x if axis is None else tuple(np.insert(x, axis if axis >= 0 else axis + 3, size))
        for x, axis in zip(whole, in_axes, strict=True)
    ]
    lhs, rhs = _arrays(*shapes, seed=seed)
    mapped = jax.vmap(functools.partial(glass.gemm, transpose_rhs=transpose_rhs), in_axes)
    weight = _arrays((size, m, n), seed=seed + 1)[0]

    def loss(lhs, rhs):
        out = mapped(lhs, rhs)
        return jnp.sum(out * weight), out

    grad = jax.grad(loss, (0, 1), has_aux=True)
    (d_lhs, d_rhs), out = (jax.jit(grad) if jit else grad)(lhs, rhs)
    a, b = (
        np.moveaxis(ref.f64(x), axis, 0) if axis is not None else ref.f64(x)[None]
        for x, axis in zip((lhs, rhs), in_axes, strict=True)
    )
    b = np.swapaxes(b, -1, -2) if transpose_rhs else b
    w = ref.f64(weight)
    ref.assert_close(out, a @ b)
    expected = [w @ np.swapaxes(b, -1, -2), np.swapaxes(a, -1, -2) @ w]
    expected[1] = np.swapaxes(expected[1], -1, -2) if transpose_rhs else expected[1]
    for actual, each, axis in zip((d_lhs, d_rhs), expected, in_axes, strict=True):
        each = each.sum(0) if axis is None else np.moveaxis(each, 0, axis)
        # Sums of products of both signs cancel; 12 terms of magnitude up to 4 leave this much of float32.
        np.testing.assert_allclose(actual, each, atol=3e-5)


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(
    "shapes", [((4, 6), (6, 5), (5,)), ((2, 4, 6), (6, 5), (5,)), ((4, 6), (2, 6, 5), (2, 5))], ids=str
)
def test_first_and_second_derivatives(shapes, transpose_rhs, activation):
    with jax.enable_x64(True):
        lhs, rhs, bias = (x.astype(jnp.float64) for x in _arrays(*shapes))
        rhs = jnp.swapaxes(rhs, -1, -2) if transpose_rhs else rhs
        f = lambda a, b, c: glass.gemm(a, b, bias=c, activation=activation, transpose_rhs=transpose_rhs)  # noqa: E731
        # relu has no second derivative at 0 and none that is not 0 elsewhere.
        check_grads(f, (lhs, rhs, bias), order=1 if activation == "relu" else 2, modes=("fwd", "rev"))


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_gradient_is_the_formula(batch, implementation):
    lhs, rhs, weight = _arrays((*batch, 6, 16), (16, 8), (*batch, 6, 8))
    loss = lambda a, b: jnp.sum(glass.gemm(a, b, implementation=implementation) * weight)  # noqa: E731
    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    ref.assert_close(d_lhs, ref.f64(weight) @ ref.f64(rhs).T)
    ref.assert_close(
        d_rhs, np.einsum("bmk,bmn->kn", ref.f64(lhs).reshape(-1, 6, 16), ref.f64(weight).reshape(-1, 6, 8))
    )


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_gradient_of_a_fused_epilogue_on_every_implementation(implementation):
    lhs, rhs, bias = _arrays((6, 16), (16, 8), (8,))
    loss = lambda *a: jnp.sum(glass.gemm(a[0], a[1], bias=a[2], activation="silu", implementation=implementation))  # noqa: E731
    z = ref.gemm(lhs, rhs, bias)
    s = 1 / (1 + np.exp(-z))
    dz = s * (1 + z * (1 - s))
    d_lhs, d_rhs, d_bias = jax.grad(loss, (0, 1, 2))(lhs, rhs, bias)
    ref.assert_close(d_lhs, dz @ ref.f64(rhs).T)
    ref.assert_close(d_rhs, ref.f64(lhs).T @ dz)
    ref.assert_close(d_bias, dz.sum(0))


def test_the_result_is_the_same_with_and_without_differentiation():
    lhs, rhs = _arrays((6, 16), (16, 8), dtype="bfloat16")
    f = lambda a: glass.gemm(a, rhs, activation="gelu")  # noqa: E731
    np.testing.assert_array_equal(f(lhs), jax.vjp(f, lhs)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_keep_the_dtype_of_the_operands(dtype):
    lhs, rhs = _arrays((6, 16), (16, 8), dtype=dtype)
    bias = jnp.ones(8, dtype)
    loss = lambda *a: glass.gemm(a[0], a[1], bias=a[2], preferred_element_type=jnp.float32).sum()  # noqa: E731
    grads = jax.grad(loss, (0, 1, 2))(lhs, rhs, bias)
    assert [g.dtype for g in grads] == [jnp.dtype(dtype)] * 3
    ref.assert_close(grads[0], np.ones((6, 8)) @ ref.f64(rhs).T)


def test_batched_gradient_sums_inside_the_product():
    """The gradient of shared weights is one product over batch and rows, not a product a batch entry."""
    lhs, rhs = jnp.zeros((64, 16, 32)), jnp.zeros((32, 48))
    grad = jax.jit(jax.grad(lambda b: glass.gemm(lhs, b).sum()))
    assert grad.lower(rhs).compile().memory_analysis().temp_size_in_bytes < 64 * 32 * 48 * 4


def test_checkpoint_recomputes():
    lhs, rhs = _arrays((6, 16), (16, 16))
    f = lambda b: glass.gemm(glass.gemm(lhs, b, activation="gelu"), b, activation="gelu").sum()  # noqa: E731
    chex.assert_trees_all_close(jax.grad(f)(rhs), jax.grad(jax.checkpoint(f))(rhs), rtol=1e-5)
    count = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(rhs)).count("glass_gemm")  # noqa: E731
    assert count(jax.checkpoint(f)) > count(f)


def test_scan_and_jvp():
    lhs, rhs = _arrays((6, 16), (3, 16, 16))
    scanned = lambda w: jax.lax.scan(lambda x, w: (glass.gemm(x, w, activation="silu"), None), lhs, w)[0]  # noqa: E731
    plain = lambda w: functools.reduce(lambda x, i: jax.nn.silu(x @ w[i]), range(3), lhs)  # noqa: E731
    chex.assert_trees_all_close(jax.jvp(scanned, (rhs,), (rhs,)), jax.jvp(plain, (rhs,), (rhs,)), rtol=2e-4, atol=1e-4)


# --- shard_map -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_shard_map_data_parallel(devices, implementation):
    mesh = jax.make_mesh(
        (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(jax.sharding.AxisType.Auto,)
    )
    lhs, rhs = _arrays((16, 24), (24, 8))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"), check_vma=True
    )
    def f(lhs, rhs):
        return glass.gemm(lhs, rhs, activation="relu", implementation=implementation)

    ref.assert_close(f(lhs, rhs), ref.gemm(lhs, rhs, activation="relu"))
    # The invariant operand's gradient is summed over the axis: the same as on one device.
    grad = jax.grad(lambda b: f(lhs, b).sum())(rhs)
    expected = ref.f64(lhs).T @ (ref.gemm(lhs, rhs) > 0)
    ref.assert_close(grad, expected)


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_shard_map_contraction(implementation):
    mesh = jax.make_mesh((4,), ("k",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    lhs, rhs = _arrays((8, 32), (32, 8))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(None, "k"), jax.P("k")), out_specs=jax.P(), check_vma=True
    )
    def f(lhs, rhs):
        return jax.lax.psum(glass.gemm(lhs, rhs, implementation=implementation), "k")

    ref.assert_close(jax.jit(f)(lhs, rhs), ref.gemm(lhs, rhs))
