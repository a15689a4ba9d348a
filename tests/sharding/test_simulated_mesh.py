"""SimulatedMesh against jax.shard_map on devices, and its errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glass_jax import errors, sharding

SHAPE = {"a": 2, "b": 4}


def both(f, *args, **specs):
    """Results on 8 devices and on 8 simulated ranks."""
    mesh = jax.make_mesh(tuple(SHAPE.values()), tuple(SHAPE), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    device = jax.jit(jax.shard_map(f, mesh=mesh, **specs))(*args)
    return device, jax.jit(sharding.SimulatedMesh(SHAPE).shard_map(f, **specs))(*args)


def test_cuts_and_joins_as_shard_map_does():
    def f(tree, scale):
        number = lax.axis_index(("a", "b"))
        total = lax.psum(tree["x"], "b")
        return {"x": tree["x"] * scale + number, "total": total, "own": (tree["y"].T, number[None])}

    tree = {"x": jnp.arange(64.0).reshape(8, 8), "y": jnp.arange(48.0).reshape(2, 24)}
    specs = {
        "in_specs": ({"x": P("a", "b"), "y": P(None, ("b", "a"))}, P()),
        "out_specs": {"x": P("a", "b"), "total": P("a"), "own": P(("b", "a"))},
    }
    chex.assert_trees_all_equal(*both(f, tree, jnp.float32(3), **specs))


def test_keeps_the_order_of_axes_in_a_dimension():
    x = jnp.arange(16.0)
    for spec in (P(("a", "b")), P(("b", "a")), P("b"), P("a"), P()):
        chex.assert_trees_all_equal(
            *both(lambda x: x[None] + lax.axis_index("b"), x, in_specs=spec, out_specs=P(("a", "b")))
        )


def test_casts_of_what_a_loop_carries():
    """A carry that begins as a constant has to be cast to what the loop makes of it, for one axis or several."""

    def f(x):
        carry = lax.pcast(jnp.zeros(2), ("a", "b"), to="varying")
        along = lax.pcast(lax.psum(x, "b"), "b", to="varying")
        summed, _ = lax.scan(lambda c, row: (c + sharding.all_reduce(row, "a"), None), carry, x)
        return lax.while_loop(lambda c: c[0] < 9, lambda c: c + 1, summed) + along[0]

    x = jnp.arange(32.0).reshape(16, 2)
    specs = {"in_specs": P(("a", "b")), "out_specs": P(("a", "b"))}
    chex.assert_trees_all_equal(*both(f, x, **specs))
    mesh = sharding.SimulatedMesh(SHAPE)
    np.testing.assert_array_equal(mesh.shard_map(f, **specs)(x), both(f, x, **specs)[0])  # op by op
    only = mesh.shard_map(
        lambda x: lax.pcast(jnp.zeros(1), "b", to="varying") + x, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}
    )
    np.testing.assert_array_equal(only(x[:4, 0]), x[:4, 0])


def test_some_axes_only():
    mesh = sharding.SimulatedMesh(SHAPE)
    f = mesh.shard_map(lambda x: lax.psum(x, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"})
    np.testing.assert_array_equal(f(jnp.arange(8.0)), [0 + 2 + 4 + 6, 1 + 3 + 5 + 7])


def test_transformations():
    mesh = sharding.SimulatedMesh({"x": 6})
    f = mesh.shard_map(lambda x: sharding.all_reduce(jnp.sin(x), "x", algorithm="ring"), in_specs=P("x"), out_specs=P())
    x = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    np.testing.assert_allclose(jax.vmap(f)(x), np.sin(x).reshape(3, 6, 2).sum(axis=1), atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x[0]), np.cos(x[0]), atol=1e-6)

    def steps(x):
        return lax.scan(lambda c, _: (c + mesh_mean(c), None), x, length=3)[0]

    mesh_mean = mesh.shard_map(
        lambda c: sharding.all_reduce(c, "x") / 6, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    want = x[0].astype(np.float64)
    for _ in range(3):
        want = want + np.tile(want.reshape(6, 2).mean(axis=0), 6)
    np.testing.assert_allclose(jax.jit(steps)(x[0]), want, rtol=1e-5, atol=1e-5)


def test_checks_replication_as_shard_map_does():
    f = sharding.SimulatedMesh({"x": 4}).shard_map(lambda x: x, in_specs=P("x"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        f(jnp.ones(8))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("z"), "'z', which is no axis of"),
        (P("a", None, None), "3 entries"),
        (P(None, "b"), r"dimension 1, 6, is to be cut into 4 parts along 'b'; pad it to 8"),
    ],
)
def test_errors(spec, message):
    f = sharding.SimulatedMesh(SHAPE).shard_map(lambda x: x, in_specs=spec, out_specs=spec)
    with pytest.raises(errors.CollectiveError, match=message):
        f(jnp.ones((4, 6)))


@pytest.mark.parametrize(
    ("shape", "message"), [({}, "at least"), ({"x": 0}, "at least"), ({"x": 4.0}, "extent of 'x' is 4.0, a float")]
)
def test_shapes_that_are_none(shape, message):
    with pytest.raises(errors.CollectiveError, match=message):
        sharding.SimulatedMesh(shape)
