"""Linear maps with transposes of their own: forward, in reverse, batched over axes with and without names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.sharding import transposable


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """Each rank's ``x`` times ``factor`` goes ``step`` ranks on. The transpose says that it is one by a sign."""

    step: int
    sign: int = 1

    def result(self, x):
        return x

    def run(self, x, factor):
        ranks = lax.axis_size("x")
        on = [(rank, (rank + self.step) % ranks) for rank in range(ranks)]
        if self.step > 0:
            return self.sign * lax.ppermute(x * factor, "x", on)
        return self.sign * lax.ppermute(x, "x", on) * factor

    def transposed(self, x):
        return Neighbour(-self.step, -self.sign)


def send(x, factor):
    return transposable.apply(Neighbour(1), x, factor)


X, FACTOR, TANGENT = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
EXPECTED = np.roll(X * FACTOR, 1, axis=0)
BACK = -np.roll(TANGENT, -1, axis=0) * FACTOR  # with the sign of the map's own transpose


def ranks(f, *args, **options):
    return jax.jit(jax.vmap(f, axis_name="x", **options))(*args)


def test_value_tangent_and_gradient():
    value, tangent = ranks(lambda x, f, t: jax.jvp(lambda x: send(x, f), (x,), (t,)), X, FACTOR, TANGENT)
    np.testing.assert_allclose(value, EXPECTED)
    np.testing.assert_allclose(tangent, np.roll(TANGENT * FACTOR, 1, axis=0))
    np.testing.assert_allclose(
        ranks(lambda x, f, t: jax.vjp(lambda x: send(x, f), x)[1](t)[0], X, FACTOR, TANGENT), BACK
    )


def test_differentiated_outside_of_the_axis():
    gradient = jax.grad(lambda x: jnp.sum(TANGENT * ranks(send, x, FACTOR)))(X)
    np.testing.assert_allclose(gradient, BACK)
    # Twice transposed it is the map again, both signs gone.
    again = jax.grad(lambda t: jnp.sum(X * jax.vjp(lambda x: ranks(send, x, FACTOR), X)[1](t)[0]))(TANGENT)
    np.testing.assert_allclose(again, EXPECTED)


def test_what_is_given_has_no_derivative():
    gradient = jax.grad(lambda f: jnp.sum(ranks(send, X, f)))(FACTOR)
    np.testing.assert_array_equal(gradient, 0)


def test_batches_inside_and_outside_of_the_axis():
    many = np.stack([X, 2 * X, 3 * X], axis=2)
    inside = ranks(lambda x, f: jax.vmap(send, (1, None), 1)(x, f), many, FACTOR)
    outside = jax.vmap(lambda x: ranks(send, x, FACTOR), 2, 2)(many)
    for out in (inside, outside):
        np.testing.assert_allclose(out, EXPECTED[:, :, None] * np.array([1, 2, 3], np.float32), rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(TANGENT[..., None] * jax.vmap(lambda x: ranks(send, x, FACTOR), 2, 2)(x)))(
        many
    )
    np.testing.assert_allclose(gradient, np.repeat(BACK[..., None], 3, axis=2))


def test_devices():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(send, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    np.testing.assert_allclose(jax.jit(sharded)(X, FACTOR), EXPECTED)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: jnp.sum(TANGENT * sharded(x, FACTOR))))(X), BACK)
