"""The paged cache of latent attention: batches of unequal sequences, and tokens that have no place in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import random_modules
from glass_jax.nn import MLA, Indexer, latent_cache
from glass_jax.nn.mesh import DEFAULT_AXES

FEATURES, LENGTH = 24, 11


@pytest.fixture(scope="module", params=[None, 5], ids=["all", "chosen"])
def mla(request):
    """Attention to all tokens, and to the 5 that an indexer chooses."""

    def make():
        common = {"q_lora_rank": 10, "qk_rope_head_dim": 4, "rngs": nnx.Rngs(0)}
        indexer = request.param and Indexer(FEATURES, num_heads=2, head_dim=10, topk=request.param, **common)
        sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "v_head_dim": 5}
        return MLA(FEATURES, num_heads=3, indexer=indexer, **common, **sizes)

    return random_modules.random_module(make)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (4, LENGTH, FEATURES))


@pytest.fixture(scope="module")
def whole(mla, x):
    """What attention to whole sequences gives, and the rows of a cache."""
    return nnx.jit(MLA.prefill)(mla, x)


def stored(mla, rows, table, lengths, cache=None):
    """The cache, NaN where nothing is, with the first tokens of each sequence."""
    if cache is None:
        cache = jax.tree.map(lambda each: jnp.full_like(each, jnp.nan), mla.empty_cache(12, 4, jnp.float32))
    positions = np.broadcast_to(np.arange(LENGTH), (4, LENGTH))
    return mla.store(cache, rows, table, jnp.asarray(np.where(positions < np.c_[lengths], positions, -1)))


def changed(after, before):
    """Page and place in it of each row that is another, of all arrays of a cache the same ones."""
    leaves = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    found = [np.argwhere(~((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=(2, 3))).tolist() for a, b in leaves]
    assert all(each == found[0] for each in found)
    return found[0]


MASKS = {
    "filled up behind": [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
    "filled up in front": [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
    "and in between": [[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
}


def test_sequences_with_unequally_many_new_tokens(mla, x, whole):
    """The mask says which tokens there are: three, one and none, and of a sequence that does not exist none either."""
    want, rows = whole
    table = jnp.array([[3, 0, 7], [1, 11, 2], [5, 6, 4], [0, 1, 2]], jnp.int32)
    lengths, counts = np.array([5, 0, 7, -1], np.int32), np.array([3, 1, 0, 0])
    before = stored(mla, rows, table, lengths)
    right = stored(mla, rows, table, lengths + counts)
    step = nnx.jit(lambda mla, x, valid: mla.decode(x, before, table, jnp.asarray(lengths), valid=valid))
    for mask in MASKS.values():
        valid = np.array(mask, bool)
        new, expected = np.full((4, 4, FEATURES), 9, np.float32), np.zeros((4, 4, FEATURES))
        for row in (0, 1):
            tokens = slice(lengths[row], lengths[row] + counts[row])
            new[row, valid[row]], expected[row, valid[row]] = x[row, tokens], want[row, tokens]
        out, after = step(mla, new, jnp.asarray(valid))
        np.testing.assert_allclose(out, expected, atol=2e-6)
        for got, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_tokens_without_a_place(mla, x, whole):
    """Pages that there are not, -1 and 12, and lengths beyond the table: nothing is written, results are NaN, and what
    has its place is as it would be alone.
    """
    want, rows = whole
    table = jnp.array([[3, 0], [1, -1], [12, 2], [5, 6]], jnp.int32)
    lengths = np.array([6, 3, 2, 30], np.int32)
    before = stored(mla, rows, table, lengths)
    for pages in jax.tree.leaves(before):
        assert np.flatnonzero(~np.isnan(pages).all(axis=(1, 2, 3))).tolist() == [0, 1, 3, 5, 6]
    new = jnp.stack([x[0, 6:10], x[1, 3:7], x[2, 2:6], x[3, :4]])
    out, after = nnx.jit(MLA.decode)(mla, new, before, table, jnp.asarray(lengths))
    np.testing.assert_allclose(out[0, :2], want[0, 6:8], atol=2e-6)
    np.testing.assert_allclose(out[1, :1], want[1, 3:4], atol=2e-6)
    assert all(np.all(np.isnan(each)) for each in (out[0, 2:], out[1, 1:], out[2:]))
    # Two tokens of the first sequence and one of the second; of the third those that are in page 2.
    assert changed(after, before) == [[0, 2], [0, 3], [1, 3], [2, 0], [2, 1]]


def test_pages_of_other_devices_are_not_written():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cache = latent_cache.empty(4, 2, 3, jnp.float32, DEFAULT_AXES)
        table = jnp.array([[1, 2], [3, 0]], jnp.int32)  # pages 0 and 1 are of the first device and sequence
        positions = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
        write = jax.jit(latent_cache.write, static_argnums=4)
        after = write(cache, table, jnp.ones((2, 4, 3)), positions, DEFAULT_AXES)
    np.testing.assert_array_equal(np.asarray(after).any(axis=(1, 2, 3)), [False, True, False, True])
