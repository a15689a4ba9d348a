"""What the tests of ``glass.fuse`` share: layers in NumPy float64, and what a function consists of."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

import glass_jax as glass
import numpy_reference as ref


def operations(fn, *args) -> dict[str, int]:
    """How often each of the library's operations stands in the jaxpr of ``fn``, loops and calls inside it included."""
    return dict(collections.Counter(re.findall(r"glass_(\w+)\[", str(jax.make_jaxpr(fn)(*args)))))


def reasons(fn, *args, **options) -> dict[str, str]:
    """The reason for each pattern that is left alone in ``fn``."""
    return {site.pattern: site.reason for site in glass.fuse(fn, report=True, **options)(*args).not_fused}


def arrays(*shapes, dtype="float32", seed=0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [ref.random(rng, shape, dtype) for shape in shapes]


def layer_norm(x, gamma=1.0, beta=0.0, eps=1e-5) -> np.ndarray:
    x = ref.f64(x)
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * ref.f64(gamma) + ref.f64(beta)


def gelu(x: np.ndarray, approximate=True) -> np.ndarray:
    if approximate:
        return ref.activate(x, "gelu")
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2)))


def plain_norm(x, gamma, beta, eps=1e-5):
    """A layer norm as one writes it."""
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + eps) * gamma + beta
