"""Patterns inside and across the calls, loops and transformations of JAX."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusing import arrays, operations, plain_norm
from jax.sharding import AxisType

import glass_jax as glass

X, G, B, W, C = arrays((4, 8), (8,), (8,), (8, 16), (16,))


def before(x, w=W):
    return jax.nn.gelu(plain_norm(x, G, B)) @ w + C


def layer(x, w=W):
    """[4, 8] -> [4, 8]: one site of each of two patterns."""
    return jax.nn.silu(before(x, w) @ w.T + B)


def assert_fused(fn, *args, **expected):
    fused = glass.fuse(fn)
    assert operations(fused, *args) == expected
    chex.assert_trees_all_close(jax.jit(fused)(*args), jax.jit(fn)(*args), rtol=1e-5, atol=1e-5)


# --- inside --------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def custom_jvp(x):
    return layer(x)


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), 3.0 * tangents[0]))


@jax.custom_vjp
def custom_vjp(x):
    return layer(x)


custom_vjp.defvjp(lambda x: (layer(x), x), lambda x, g: (5.0 * g,))

INSIDE = {
    "jit": jax.jit(layer),
    "jit in jit": jax.jit(lambda x: 2 * jax.jit(layer)(x)),
    "sharded jit": jax.jit(layer, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    "checkpoint": jax.checkpoint(layer),
    "scan": lambda x: jax.lax.scan(lambda x, w: (layer(x, w), x), x, jnp.stack([W, -W])),
    "scan of checkpoint": lambda x: jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, W[None])[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, x: layer(x), x),
    "while_loop": lambda x: jax.lax.while_loop(lambda x: layer(x).sum() < -1, lambda x: x + 1, x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, layer, lambda x: x, x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "associative": lambda x: jax.lax.map(layer, jnp.stack([x, x])),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name):
    assert_fused(INSIDE[name], X, ln_gelu_linear=1, gemm=1)


@pytest.mark.parametrize("fn", [custom_jvp, custom_vjp], ids=["custom_jvp", "custom_vjp"])
def test_custom_derivatives_stay(fn):
    grad = lambda f: jax.grad(lambda x: f(x).sum())(X)  # noqa: E731
    np.testing.assert_array_equal(grad(glass.fuse(fn)), grad(fn))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map(kind):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(kind,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"), check_vma=True)
    def fn(x, w):
        return jax.nn.relu(layer(x, w) @ w)

    loss = lambda f: lambda w: (f(x, w) ** 2).sum()  # noqa: E731
    with jax.set_mesh(mesh):
        assert_fused(fn, x, W, ln_gelu_linear=1, gemm=2)
        fused, plain = (jax.jit(jax.grad(loss(f)))(W) for f in (glass.fuse(fn), fn))
        chex.assert_trees_all_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_within_shard_map():
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    mapped = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P()))  # noqa: E731
    fn = lambda x: jax.lax.psum(layer(x), "d")  # noqa: E731
    assert operations(mapped(glass.fuse(fn)), X) == {"ln_gelu_linear": 1, "gemm": 1}
    chex.assert_trees_all_close(mapped(glass.fuse(fn))(X), mapped(fn)(X), rtol=1e-5, atol=1e-5)


def test_explicit_mesh():
    mesh = jax.make_mesh((2, 2), ("d", "n"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w, c = (jax.device_put(v, jax.P(*p)) for v, p in ((X, "d"), (W, (None, "n")), (C, "n")))
        fn = lambda x, w, c: jax.nn.gelu(plain_norm(x, G, B)) @ w + c  # noqa: E731
        assert_fused(fn, x, w, c, ln_gelu_linear=1)
        assert jax.typeof(glass.fuse(fn)(x, w, c)).sharding.spec == jax.P("d", "n")


# --- across --------------------------------------------------------------------------------------------------------


def test_across_jit():
    """A pattern in pieces, each jitted: a gelu, a layer norm, a linear layer that closes over its weights."""
    norm, act = jax.jit(plain_norm), jax.jit(jax.nn.gelu)
    dense = jax.jit(lambda x: x @ W + C)
    assert_fused(lambda x: dense(act(norm(x, G, B, 1e-5))), X, ln_gelu_linear=1)
    assert_fused(lambda x: act(norm(dense(x), C, C, 1e-5)), X, linear_ln_gelu=1)
    assert_fused(jax.jit(lambda x: act(dense(x))), X, gemm=1)


def test_jit_calls_without_patterns_stay():
    text = str(jax.make_jaxpr(glass.fuse(lambda x: layer(jax.jit(jnp.sin)(x))))(X))
    assert "name=sin" in text
    assert "name=_var" not in text


def test_nothing_changes_where_nothing_is_found():
    fn = jax.jit(lambda x: jnp.sin(x) @ W)
    text = lambda f: str(jax.make_jaxpr(f)(X))  # noqa: E731
    assert text(glass.fuse(fn)) == text(fn)


def test_uses_that_are_not_needed():
    """Neither dead code nor a call with a result that is dropped stands in the way."""
    both = jax.jit(lambda x, z: (jnp.sin(x), jnp.cos(z)))

    def fn(x):
        z = x @ W + C
        jnp.sum(z * z)
        return jax.nn.silu(z), both(x, z)[0]

    assert_fused(fn, X, gemm=1)


def test_not_across_checkpoint():
    fn = lambda x: jax.nn.silu(jax.checkpoint(lambda x: x @ W + C)(x))  # noqa: E731
    assert_fused(fn, X, gemm=1)
    assert "logistic" in str(jax.make_jaxpr(glass.fuse(fn))(X))


def test_one_operation_for_each_use_of_a_function():
    twice = jax.jit(layer)
    assert_fused(lambda x: twice(twice(x)), X, ln_gelu_linear=2, gemm=2)


# --- transformed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_gradients(jit):
    loss = lambda x, w: jnp.sum(layer(x, w) ** 2)  # noqa: E731
    fused, plain = jax.grad(glass.fuse(loss), (0, 1)), jax.grad(loss, (0, 1))
    chex.assert_trees_all_close((jax.jit(fused) if jit else fused)(X, W), plain(X, W), rtol=2e-4, atol=2e-4)
    assert operations(fused, X, W)["ln_gelu_linear"] >= 1


def test_second_derivatives_and_jvp():
    loss = lambda x: jnp.sum(before(x) ** 2)  # noqa: E731
    hessian = lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)))(X)  # noqa: E731
    chex.assert_trees_all_close(hessian(glass.fuse(loss)), hessian(loss), rtol=1e-3, atol=1e-3)


def test_relu_has_its_derivative_at_zero():
    loss = lambda w: jax.nn.relu(jnp.zeros((4, 8)) @ w + jnp.zeros(16)).sum()  # noqa: E731
    bias = lambda c: jax.nn.relu(jnp.zeros((4, 8)) @ W + c).sum()  # noqa: E731
    for fn, arg in ((loss, W), (bias, jnp.zeros(16))):
        assert operations(glass.fuse(fn), arg) == {"gemm": 1}
        np.testing.assert_array_equal(jax.grad(glass.fuse(fn))(arg), jax.grad(fn)(arg))


def test_of_a_gradient():
    """The forward pass's intermediates are needed again: only what is not is fused, and the result is the same."""
    grad = jax.grad(lambda x: jnp.sum(layer(x)))
    chex.assert_trees_all_close(glass.fuse(grad)(X), grad(X), rtol=1e-4, atol=1e-4)
    report = glass.fuse(grad, report=True)(X)
    (site,) = [site for site in report.sites if site.pattern == "ln_gelu_linear"]
    assert not site.fused and "used again" in site.reason


# Weights that differ from entry to entry make products that ln_gelu_linear does not take, or gemm neither.
@pytest.mark.parametrize(
    ("in_axes", "inside"),
    [((0, None), {"ln_gelu_linear": 1, "gemm": 1}), ((None, 0), {"gemm": 1}), ((0, 0), {"gemm": 2})],
    ids=["x", "w", "both"],
)
def test_vmap(in_axes, inside):
    x = jnp.stack([X, 2 * X, -X]) if in_axes[0] == 0 else X
    w = jnp.stack([W, -W, 2 * W]) if in_axes[1] == 0 else W
    plain = jax.vmap(layer, in_axes)(x, w)
    outside = jax.vmap(glass.fuse(layer), in_axes)
    assert operations(outside, x, w) == {"ln_gelu_linear": 1, "gemm": 1}
    chex.assert_trees_all_close(outside(x, w), plain, rtol=1e-4, atol=1e-4)
    fused = glass.fuse(jax.vmap(layer, in_axes))
    assert operations(fused, x, w) == inside
    chex.assert_trees_all_close(fused(x, w), plain, rtol=1e-4, atol=1e-4)


def test_vmap_with_an_axis_name():
    fn = lambda x: jax.lax.psum(layer(x), "i")  # noqa: E731
    stacked = jnp.stack([X, 2 * X])
    mapped = lambda f: jax.vmap(f, axis_name="i")(stacked)  # noqa: E731
    chex.assert_trees_all_close(mapped(glass.fuse(fn)), mapped(fn), rtol=1e-5, atol=1e-5)


def test_vmapped_relu():
    fn = jax.vmap(lambda x: jax.nn.relu(x @ W + C))
    assert operations(glass.fuse(fn), jnp.stack([X, X])) == {"gemm": 1}
    assert "max" not in str(jax.make_jaxpr(glass.fuse(fn))(jnp.stack([X, X])))


# --- arguments and effects -----------------------------------------------------------------------------------------


def test_arguments_and_results_keep_their_structure():
    def fn(params, *, x, scale=2.0):
        return {"out": scale * (x @ params["w"] + params["c"]), "none": None, "same": (x, 3)}

    params = {"w": W, "c": C}
    fused = functools.partial(glass.fuse(functools.partial(fn, scale=3.0)), params)
    out = jax.jit(fused)(x=X)
    chex.assert_trees_all_close(out, fn(params, x=X, scale=3.0), rtol=1e-5)
    assert jax.tree.structure(out) == jax.tree.structure(fn(params, x=X))
    assert operations(lambda x: fused(x=x), X) == {"gemm": 1}


def test_closed_over_tracers():
    loss = lambda w: glass.fuse(lambda x: layer(x, w))(X).sum()  # noqa: E731
    chex.assert_trees_all_close(jax.grad(loss)(W), jax.grad(lambda w: layer(X, w).sum())(W), rtol=1e-4, atol=1e-4)


def test_effects_stay_and_keep_their_order(capfd):
    def fn(x):
        jax.debug.print("first {}", x[0, 0] * 0)
        z = x @ W
        jax.debug.print("second {}", x[0, 0] * 0)
        return jax.nn.silu(z + C)

    assert operations(glass.fuse(fn), X) == {"gemm": 1}
    jax.block_until_ready(glass.fuse(fn)(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["first 0.0", "second 0.0"]


def test_a_printed_intermediate_stays(capfd):
    def fn(x):
        z = x @ W + C
        jax.debug.print("{}", z[0, 0])
        return jax.nn.silu(z)

    (site,) = glass.fuse(fn, report=True)(X).sites
    assert (site.parts, site.fused) == ("product + bias", True)
    assert "not with product + bias + silu" in site.reason


def test_configuration_is_that_of_the_call():
    fused = jax.jit(glass.fuse(lambda x: jax.nn.relu(x @ W + C)))
    assert "implementation=None" in str(jax.make_jaxpr(fused)(X))
    with glass.configure(implementation="npu_model"):
        assert "implementation='npu_model'" in str(jax.make_jaxpr(fused)(X))
    assert "implementation=None" in str(jax.make_jaxpr(fused)(X))
