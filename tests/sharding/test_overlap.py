"""Products with communication in them, and gradients in buckets, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glass_jax import errors, sharding


def on_devices(ranks: int, **options):
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    return lambda f, **specs: jax.shard_map(f, mesh=mesh, **options, **specs)


def simulated(ranks: int):
    return sharding.SimulatedMesh({"x": ranks}).shard_map


COLUMNS = {"in_specs": (P("x"), P(None, "x")), "out_specs": P(None, "x")}
ROWS = {"in_specs": (P(None, "x"), P("x")), "out_specs": P("x")}


def operands(ranks: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(ranks)
    shapes = (3 * ranks, 5 * ranks), (5 * ranks, 2 * ranks)
    return tuple(np.asarray(jnp.asarray(rng.standard_normal(shape), dtype)) for shape in shapes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("product", [sharding.all_gather_gemm, sharding.gemm_reduce_scatter])
@pytest.mark.parametrize("place", [on_devices, simulated])
def test_values_and_gradients(product, ranks, place):
    x, w = operands(ranks)
    specs = COLUMNS if product is sharding.all_gather_gemm else ROWS
    f = place(ranks)(lambda x, w: product(x, w, "x"), **specs)
    y, (dx, dw) = jax.jit(lambda x, w: (f(x, w), jax.grad(lambda x, w: 0.5 * jnp.sum(f(x, w) ** 2), (0, 1))(x, w)))(
        x, w
    )
    x, w = x.astype(np.float64), w.astype(np.float64)
    np.testing.assert_allclose(y, x @ w, atol=1e-4)
    np.testing.assert_allclose(dx, x @ w @ w.T, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(dw, x.T @ (x @ w), rtol=1e-4, atol=1e-2)


def test_forward_and_second_derivatives():
    x, w = operands(4)
    f = simulated(4)(lambda x, w: sharding.gemm_reduce_scatter(x, w, "x"), **ROWS)
    tangent = jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, w)))(x, w)[1]
    np.testing.assert_allclose(tangent, 2 * (x @ w), rtol=1e-4, atol=1e-4)
    hessian_times = jax.jit(
        lambda x, w, t: jax.jvp(lambda x: jax.grad(lambda x: 0.5 * jnp.sum(f(x, w) ** 2))(x), (x,), (t,))[1]
    )
    np.testing.assert_allclose(hessian_times(x, w, x), x @ w @ w.T, rtol=1e-4, atol=1e-2)


def test_replicated_weights_get_the_sum_of_all_ranks_gradients():
    x, w = operands(4)
    f = on_devices(4)(
        lambda x, w: jnp.sum(sharding.all_gather_gemm(x, w, "x"))[None], in_specs=(P("x"), P()), out_specs=P("x")
    )
    dw = jax.jit(jax.grad(lambda w: jnp.sum(f(x, w))))(w)
    np.testing.assert_allclose(dw, 4 * np.tile(x.sum(axis=0)[:, None], (1, w.shape[1])), rtol=1e-4, atol=1e-4)


def test_narrow_products_sum_over_ranks_in_float32():
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.uniform(0.5, 1.5, (64, 128)), jnp.bfloat16))
    w = np.asarray(jnp.asarray(rng.uniform(0.5, 1.5, (128, 4)), jnp.bfloat16))
    y = jax.jit(simulated(64)(lambda x, w: sharding.gemm_reduce_scatter(x, w, "x"), **ROWS))(x, w)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(y).astype(np.float64), x.astype(np.float64) @ w.astype(np.float64), rtol=2**-8
    )


def test_a_gemm_of_ones_own():
    shapes = []

    def gemm(lhs, rhs):
        shapes.append((lhs.shape, rhs.shape))
        return lhs @ rhs

    x, w = operands(4)
    f = simulated(4)(lambda x, w: sharding.all_gather_gemm(x, w, "x", gemm=gemm), **COLUMNS)
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)
    assert set(shapes) == {((3, 20), (20, 2))}


def test_messages_do_not_wait_for_products():
    """In each step's body the permutes take the loop's blocks themselves, not anything computed in the step."""
    f = on_devices(8)(lambda x, w: sharding.all_gather_gemm(x, w, "x"), **COLUMNS)
    x, w = operands(8)
    text = jax.jit(f).lower(x, w).as_text()
    body = text[text.index("stablehlo.while") :]
    permuted = [
        line.split("(")[1].split(")")[0] for line in body.splitlines() if "stablehlo.collective_permute" in line
    ]
    products = [line.split("=")[0].strip() for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert permuted and products and not set(permuted) & set(products)
    assert text.count("stablehlo.collective_permute") == 2 + 2 + 1  # to start, in the loop, to the opposite rank


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x, w: sharding.all_gather_gemm(x, w.T, "x"), r"x is \(4, 6\) and w \(3, 6\)"),
        (lambda x, w: sharding.gemm_reduce_scatter(x[:3], w, "x"), "3, is not a multiple of 2; pad it to 4"),
        (lambda x, w: sharding.all_gather_gemm(x, w, "q"), "no mesh axis 'q'"),
        (lambda x, w: sharding.all_reduce_buckets([x], "x", bucket_bytes=0), "bucket_bytes=0"),
    ],
)
def test_errors(program, message):
    f = simulated(2)(program, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    with pytest.raises(errors.CollectiveError, match=message):
        jax.eval_shape(f, jnp.ones((4, 6)), jnp.ones((6, 3)))


def test_buckets():
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 7), "b": (3,), "c": (40, 2), "d": (), "e": (6,)}
    tree = {name: rng.standard_normal((4, *shape)).astype(np.float32) for name, shape in shapes.items()}
    tree["e"] = tree["e"].astype(np.float16)

    def program(tree):
        tree = jax.tree.map(lambda x: x[0], tree)
        return sharding.all_reduce_buckets(tree, "x", bucket_bytes=200, algorithm="halving_doubling")

    f = simulated(4)(program, in_specs=P("x"), out_specs=P())
    for name, total in jax.jit(f)(tree).items():
        assert total.dtype == tree[name].dtype
        want = tree[name].sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(total, want, rtol=1e-3 if name == "e" else 1e-5, atol=1e-3 if name == "e" else 1e-5)
    # From the last leaf: e (float16), d and ... until 200 bytes, c alone with 320, and b with a.
    sizes = [eqn.invars[0].aval.size for eqn in _collectives(jax.make_jaxpr(f)(tree).jaxpr)]
    assert sizes == [4 * 6, 4 * 1, 4 * 80, 4 * (3 + 35)]


def _collectives(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "glass_collective":
            yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _collectives(inner.jaxpr)


@pytest.mark.parametrize(("place", "options"), [(on_devices, {}), (on_devices, {"check_vma": False}), (simulated, {})])
def test_gradients_reduced_inside_the_backward_scan(place, options):
    layers, width = 3, 4
    rng = np.random.default_rng(0)
    params = rng.standard_normal((layers, width, width)).astype(np.float32) / 2
    x = rng.standard_normal((8, width)).astype(np.float32)

    def loss(params, x, reduced):
        def layer(h, w):
            w = sharding.with_reduced_gradients(w, "x", algorithm="ring") if reduced else w
            return jnp.tanh(h @ w), None

        return jnp.sum(lax.scan(layer, x, params)[0] ** 2)

    f = place(4, **options)(lambda p, x: jax.grad(loss)(p, x, True), in_specs=(P(), P("x")), out_specs=P())
    want = jax.grad(loss)(params, x, False)
    np.testing.assert_allclose(jax.jit(f)(params, x), want, rtol=1e-4, atol=1e-5)
