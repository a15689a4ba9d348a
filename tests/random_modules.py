"""Modules with given or random parameters, on the current mesh or without one; no initialization is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def random_values(make, deviation=0.3, seed=0):
    """Parameters for what ``make()`` makes: normally distributed, the scales of norms around 1."""
    rng = np.random.default_rng(seed)

    def value(path, x):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return np.asarray(mean + deviation * rng.standard_normal(x.shape), x.dtype)

    return jax.tree.map_with_path(value, nnx.to_pure_dict(nnx.state(nnx.eval_shape(make))))


def build(make, values):
    """What ``make()`` makes, with parameters ``values``, each where it belongs."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        values = jax.tree.map(jnp.asarray, values)
    else:
        values = jax.device_put(values, nnx.to_pure_dict(nnx.get_named_sharding(state, mesh)))
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graphdef, state)


def random_module(make, deviation=0.3, seed=0):
    """What ``make()`` makes, with :func:`random_values`."""
    return build(make, random_values(make, deviation, seed))
