"""Numbering the choices of experts, and finding them by their number, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.sharding import exchange

SIZES = [(0, 3), (1, 1), (7, 3), (64, 8), (300, 5), (300, 400)]


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_positions(size, count):
    keys = np.random.default_rng(size).integers(0, count + 1, size).astype(np.int32)
    before, counts = exchange.positions(jnp.asarray(keys), count)
    np.testing.assert_array_equal(before, [np.sum(keys[:i] == key) for i, key in enumerate(keys)])
    np.testing.assert_array_equal(counts, np.bincount(keys, minlength=count + 1)[:count])
    assert before.dtype == counts.dtype == jnp.int32


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_inverse(size, count):
    rng = np.random.default_rng(size)
    index = rng.permutation(max(size, count))[:size].astype(np.int32)
    index[rng.random(size) < 0.3] = count  # nowhere
    want = np.full(count, size)
    want[index[index < count]] = np.flatnonzero(index < count)
    found = exchange.inverse(jnp.asarray(index), count)
    np.testing.assert_array_equal(found, want)
    assert found.dtype == jnp.int32


def test_too_many_to_number():
    keys = jnp.zeros(2**16, jnp.int32)
    with pytest.raises(errors.UnsupportedError, match="65536 choices among 65535 experts cannot be sorted"):
        exchange.positions(keys, 2**16 - 1)
