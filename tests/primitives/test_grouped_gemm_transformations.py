"""grouped_gemm and masked_grouped_gemm under vmap, grad, jvp, checkpoint, scan and shard_map."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import glass_jax as glass
import grouped_gemm_reference as reference
import numpy_reference as ref

RUNS_HERE = ("xla", "npu_model")
SIZES = np.array([4, 0, 9, 3], np.int32)  # 16 of 18 rows


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [ref.random(rng, shape, dtype) for shape in shapes]


# --- vmap ----------------------------------------------------------------------------------------------------------

OTHER_SIZES = np.array([[4, 0, 9, 3], [0, 0, 0, 18], [1, 2, 3, 4]], np.int32)


@pytest.mark.parametrize(
    ("mapped", "implementation"),
    [*((m, "xla") for m in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]), ((1,), "npu_model"),
     ((0, 2), "npu_model")],
    ids=str,
)  # fmt: skip
def test_vmap_of_some_operands(mapped, implementation):
    shapes = [(18, 16), (4, 16, 8)]
    lhs, rhs = arrays(*((3, *s) if i in mapped else s for i, s in enumerate(shapes)))
    sizes = OTHER_SIZES if 2 in mapped else SIZES
    in_axes = tuple(0 if i in mapped else None for i in range(3))
    f = functools.partial(glass.grouped_gemm, implementation=implementation)
    out = jax.jit(jax.vmap(f, in_axes))(lhs, rhs, sizes)
    each = [x if i in mapped else [x] * 3 for i, x in enumerate((lhs, rhs, sizes))]
    ref.assert_close(out, np.stack([reference.grouped_gemm(*args) for args in zip(*each, strict=True)]))


@pytest.mark.parametrize("in_axes", [((0, None, 0), (0, None, 0)), ((0, None, None), (None, 0, None))], ids=str)
def test_nested_vmap(in_axes):
    lead = [tuple(2 + d for d, axes in enumerate(in_axes) if axes[i] is not None) for i in range(3)]
    lhs, rhs = arrays((*lead[0], 18, 16), (*lead[1], 4, 16, 8))
    sizes = np.broadcast_to(SIZES, (*lead[2], 4)) + np.zeros((*lead[2], 4), np.int32)
    out = jax.vmap(jax.vmap(glass.grouped_gemm, in_axes[1]), in_axes[0])(lhs, rhs, sizes)
    assert out.shape == (2, 3, 18, 8)
    for i, j in np.ndindex(2, 3):
        at = [
            x[tuple(p for p, axes in zip((i, j), in_axes, strict=True) if axes[n] is not None)]
            for n, x in enumerate((lhs, rhs, sizes))
        ]
        ref.assert_close(out[i, j], reference.grouped_gemm(*at))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_vmap_of_a_masked_product(implementation):
    lhs, rhs = arrays((2, 3, 10, 16), (3, 16, 8))
    counts = np.array([[3, 0, 10], [10, 1, 2]], np.int32)
    out = jax.vmap(functools.partial(glass.masked_grouped_gemm, implementation=implementation), (0, None, 0))(
        lhs, rhs, counts
    )
    ref.assert_close(
        out, np.stack([reference.masked_grouped_gemm(a, rhs, n) for a, n in zip(lhs, counts, strict=True)])
    )


def test_vmap_does_not_copy_matrices_that_are_not_mapped():
    lhs, rhs = jnp.zeros((32, 8, 64)), jnp.zeros((16, 64, 128))
    f = jax.jit(jax.vmap(glass.grouped_gemm, (0, None, None)))
    compiled = f.lower(lhs, rhs, jnp.zeros(16, jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * rhs.nbytes


# --- derivatives ---------------------------------------------------------------------------------------------------


def f64(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("modes", ["fwd", "rev"])
@pytest.mark.parametrize("operation", ["grouped", "masked", "mapped"])
def test_gradients_of_second_order(operation, modes):
    f = {
        "grouped": lambda a, b: glass.grouped_gemm(a, b, SIZES),
        "masked": lambda a, b: glass.masked_grouped_gemm(a, b, np.array([3, 0, 5, 1])),
        "mapped": lambda a, b: jax.vmap(glass.grouped_gemm, (0, None, 0))(a, b, OTHER_SIZES[:2]),
    }[operation]
    rows = {"grouped": (18, 5), "masked": (4, 5, 5), "mapped": (2, 18, 5)}[operation]
    with jax.enable_x64(True):
        check_grads(lambda *args: jnp.sin(f(*args)), f64(rows, (4, 5, 3)), order=2, modes=(modes,))


@pytest.mark.parametrize("operation", ["grouped", "shared"])
def test_gradients_of_the_gradient_of_the_matrices(operation):
    """The product over rows is itself differentiated, where one set of matrices serves several lists of groups, too."""

    def weights_gradient(lhs, cotangent):
        if operation == "grouped":
            return jax.vjp(lambda b: glass.grouped_gemm(lhs, b, SIZES), jnp.zeros((4, 5, 3)))[1](cotangent)[0]
        f = jax.vmap(glass.grouped_gemm, (0, None, None))
        return jax.vjp(lambda b: f(lhs, b, SIZES), jnp.zeros((4, 5, 3)))[1](cotangent)[0]

    lead = () if operation == "grouped" else (2,)
    with jax.enable_x64(True):
        args = f64((*lead, 18, 5), (*lead, 18, 3))
        check_grads(lambda *a: jnp.sin(weights_gradient(*a)), args, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [*((dtype, "xla") for dtype in ("float32", "bfloat16", "float16")), ("float32", "npu_model"),
     ("bfloat16", "npu_model")],
)  # fmt: skip
def test_gradient_is_the_formula(dtype, implementation):
    lhs, rhs = arrays((18, 40), (4, 40, 24), dtype=dtype)
    weight = arrays((18, 24), seed=1)[0]
    loss = lambda a, b: jnp.sum(  # noqa: E731
        glass.grouped_gemm(a, b, SIZES, preferred_element_type=jnp.float32, implementation=implementation) * weight
    )
    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    assert (d_lhs.dtype, d_rhs.dtype) == (lhs.dtype, rhs.dtype)
    expected = reference.gradients(lhs, rhs, SIZES, weight)
    ref.assert_close(d_lhs, expected[0])
    ref.assert_close(d_rhs, expected[1])
    np.testing.assert_array_equal(d_lhs[16:], 0)  # rows of no group
    np.testing.assert_array_equal(d_rhs[1], 0)  # a group without rows


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_gradient_of_a_masked_product(implementation):
    lhs, rhs, weight = arrays((3, 10, 16), (3, 16, 8), (3, 10, 8))
    counts = np.array([3, 0, 10], np.int32)
    loss = lambda a, b: jnp.sum(glass.masked_grouped_gemm(a, b, counts, implementation=implementation) * weight)  # noqa: E731
    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    for g, n in enumerate(counts):
        expected = reference.gradients(lhs[g], rhs[g : g + 1], [n], weight[g])
        ref.assert_close(d_lhs[g], expected[0])
        ref.assert_close(d_rhs[g], expected[1][0])


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_gradient_of_matrices_that_serve_several_lists(implementation):
    lhs, rhs, weight = arrays((3, 18, 16), (4, 16, 8), (3, 18, 8))
    f = jax.vmap(functools.partial(glass.grouped_gemm, implementation=implementation), (0, None, 0))
    d_lhs, d_rhs = jax.jit(jax.grad(lambda a, b: jnp.sum(f(a, b, OTHER_SIZES) * weight), (0, 1)))(lhs, rhs)
    expected = [reference.gradients(a, rhs, s, w) for a, s, w in zip(lhs, OTHER_SIZES, weight, strict=True)]
    ref.assert_close(d_lhs, np.stack([a for a, _ in expected]))
    ref.assert_close(d_rhs, sum(b for _, b in expected))


@given(sizes=st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_gradients_for_any_sizes(sizes):
    lhs, rhs, weight = arrays((30, 8), (5, 8, 6), (30, 6))
    d_lhs, d_rhs = _gradients(lhs, rhs, np.array(sizes, np.int32), weight)
    expected = reference.gradients(lhs, rhs, sizes, weight)
    ref.assert_close(d_lhs, expected[0])
    ref.assert_close(d_rhs, expected[1])


@jax.jit
def _gradients(lhs, rhs, sizes, weight):
    return jax.grad(lambda a, b: jnp.sum(glass.grouped_gemm(a, b, sizes) * weight), (0, 1))(lhs, rhs)


def test_sizes_have_no_tangents():
    lhs, rhs = arrays((18, 16), (4, 16, 8))
    zero = np.zeros(4, jax.dtypes.float0)
    sizes = jnp.asarray(SIZES)
    out, tangent = jax.jvp(glass.grouped_gemm, (lhs, rhs, sizes), (lhs, rhs * 0, zero))
    ref.assert_close(out, reference.grouped_gemm(lhs, rhs, SIZES))
    ref.assert_close(tangent, reference.grouped_gemm(lhs, rhs, SIZES))
    grads = jax.vjp(glass.grouped_gemm, lhs, rhs, sizes)[1](out)
    assert grads[2].dtype == jax.dtypes.float0


def test_integer_products_have_no_gradient():
    lhs, rhs = arrays((18, 16), (4, 16, 8), dtype="int8")
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda a: glass.grouped_gemm(a, rhs, SIZES).sum().astype(jnp.float32))(lhs)


def test_the_result_is_the_same_with_and_without_differentiation():
    lhs, rhs = arrays((18, 16), (4, 16, 8), dtype="bfloat16")
    f = lambda a: glass.grouped_gemm(a, rhs, SIZES)  # noqa: E731
    np.testing.assert_array_equal(f(lhs), jax.vjp(f, lhs)[0])


def test_checkpoint_recomputes():
    lhs, rhs = arrays((18, 16), (4, 16, 16))
    f = lambda b: jnp.sin(glass.grouped_gemm(jnp.sin(glass.grouped_gemm(lhs, b, SIZES)), b, SIZES)).sum()  # noqa: E731
    chex.assert_trees_all_close(jax.grad(f)(rhs), jax.grad(jax.checkpoint(f))(rhs), rtol=1e-5)
    count = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(rhs)).count("glass_grouped_gemm")  # noqa: E731
    assert count(jax.checkpoint(f)) > count(f)


def test_scan_over_layers():
    lhs, rhs = arrays((18, 16), (3, 4, 16, 16))
    sizes = jnp.asarray(OTHER_SIZES)

    def layers(rhs):
        return jax.lax.scan(lambda x, w: (jnp.sin(glass.grouped_gemm(x, *w)), None), lhs, (rhs, sizes))[0].sum()

    def plain(rhs):
        return functools.reduce(
            lambda x, w: jnp.sin(jax.lax.ragged_dot(x, *w)), zip(rhs, sizes, strict=True), lhs
        ).sum()

    chex.assert_trees_all_close(jax.grad(layers)(rhs), jax.grad(plain)(rhs), rtol=1e-3, atol=1e-3)
