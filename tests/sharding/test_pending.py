"""Post and wait: values, and an order that jit, grad, vmap and scan keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glass_jax import sharding


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])


def equations(jaxpr):
    """All equations, those of inner jaxprs in place."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def overlapped(x, w):
    pending = sharding.post_all_reduce(x, "x", algorithm="ring")
    y = jnp.dot(w, w)
    total, y = sharding.wait(pending, y)
    return total, y


def _ties(jaxpr) -> list[set[str]]:
    """For every barrier: the primitives whose results it ties together."""
    made, ties = {}, []
    for equation in equations(jaxpr):
        if equation.primitive.name == "optimization_barrier":
            ties.append({made.get(v) for v in equation.invars} - {None})
        for v in equation.outvars:
            made[v] = equation.primitive.name
    return ties


@pytest.mark.parametrize("place", ["devices", "simulated"])
def test_values_and_tie(place):
    shard_map = jax.shard_map if place == "devices" else sharding.SimulatedMesh({"x": 4}).shard_map
    options = {"mesh": mesh_of(4)} if place == "devices" else {}
    f = shard_map(overlapped, in_specs=(P("x"), P()), out_specs=(P(), P()), **options)
    x, w = np.arange(8, dtype=np.float32), np.eye(3, dtype=np.float32) * 2
    total, y = jax.jit(f)(x, w)
    np.testing.assert_array_equal(total, x.reshape(4, 2).sum(axis=0))
    np.testing.assert_array_equal(y, w @ w)
    assert {"glass_collective", "dot_general"} in _ties(jax.make_jaxpr(f)(x, w).jaxpr)


def test_tie_survives_lowering():
    f = jax.shard_map(overlapped, mesh=mesh_of(4), in_specs=(P("x"), P()), out_specs=(P(), P()))
    text = jax.jit(f).lower(jnp.ones(8), jnp.ones((3, 3))).as_text()
    barrier = next(line for line in text.splitlines() if "optimization_barrier" in line)
    product = next(line for line in text.splitlines() if "dot_general" in line).split("=")[0].strip()
    assert product in barrier  # with the sum, which is the other operand
    assert barrier.count("tensor<") == 2


def test_gradient_has_the_transposed_collective_between_transposed_wait_and_post():
    def loss(x, w):
        pending = sharding.post_all_gather(x, "x", algorithm="ring")
        gathered, y = sharding.wait(pending, jnp.sin(w) @ w)
        return jnp.sum(gathered**2) + jnp.sum(y)

    mesh = sharding.SimulatedMesh({"x": 4})
    f = mesh.shard_map(jax.grad(loss, argnums=(0, 1)), in_specs=(P("x"), P()), out_specs=(P("x"), P()), check_vma=False)
    x, w = np.arange(8, dtype=np.float32), np.eye(3, dtype=np.float32)
    dx, dw = jax.jit(f)(x, w)
    np.testing.assert_array_equal(dx, 2 * 4 * x)
    np.testing.assert_allclose(dw, (np.cos(w) * (np.ones((3, 3)) @ w.T)) + np.sin(w).T @ np.ones((3, 3)), rtol=1e-6)
    names = [equation.primitive.name for equation in equations(jax.make_jaxpr(f)(x, w).jaxpr)]
    barriers = [i for i, name in enumerate(names) if name == "optimization_barrier"]
    assert len(barriers) == 2
    assert "glass_collective" in names[barriers[1] :]  # the reduce-scatter, after the transposed wait


def test_posted_in_one_step_of_a_scan_and_waited_for_in_the_next():
    xs = np.arange(40, dtype=np.float32).reshape(5, 8)

    def program(xs):
        def step(pending, x):
            following = sharding.post_all_reduce(x, "x", algorithm="ring")
            total, following = sharding.wait(pending, following)
            return following, total

        first = sharding.post_all_reduce(xs[0], "x", algorithm="ring")
        last, totals = lax.scan(step, first, xs[1:])
        return jnp.concatenate([totals, sharding.wait(last)[None]])

    f = jax.shard_map(program, mesh=mesh_of(4), in_specs=P(None, "x"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(f)(xs), xs.reshape(5, 4, 2).sum(axis=1))
    gradient = jax.jit(jax.grad(lambda xs: jnp.sum(f(xs) ** 2)))(xs)
    np.testing.assert_array_equal(gradient, np.tile(2 * xs.reshape(5, 4, 2).sum(axis=1), (1, 4)))


def test_every_post_and_after():
    def program(x):
        first = sharding.post_send_recv(x, "x", [(0, 1), (1, 0)])
        gathered = sharding.wait(sharding.post_all_gather(x, "x", after=first))
        scattered = sharding.wait(sharding.post_reduce_scatter(gathered, "x", after=gathered))
        exchanged = sharding.wait(sharding.post_all_to_all(x, "x"))
        sent = sharding.wait(sharding.post_broadcast(x, "x", root=1))
        return sharding.wait(first), scattered[0], exchanged, sent

    f = sharding.SimulatedMesh({"x": 2}).shard_map(program, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = np.arange(4, dtype=np.float32)
    received, scattered, exchanged, sent = jax.jit(f)(x)
    np.testing.assert_array_equal(received, [2, 3, 0, 1])
    np.testing.assert_array_equal(scattered, 2 * x)
    np.testing.assert_array_equal(exchanged, [0, 2, 1, 3])
    np.testing.assert_array_equal(sent, [2, 3, 2, 3])
    ties = _ties(jax.make_jaxpr(f)(x).jaxpr)
    assert {"glass_collective"} in ties


def test_waiting_for_something_else():
    with pytest.raises(TypeError, match="post_"):
        sharding.wait(jnp.ones(3))
