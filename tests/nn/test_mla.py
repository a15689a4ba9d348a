import jax
import jax.numpy as jnp
import module_weights
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import deepseek_reference as reference
import random_modules
from glass_jax import errors
from glass_jax.nn import MLA, YaRN

FEATURES, HEADS = 24, 3
YARN = YaRN(factor=4, original_length=16, mscale=1.0, mscale_all_dim=0.7)
VARIANTS = {
    "plain queries": {"rope_interleave": True},
    "latent queries": {"q_lora_rank": 10, "rope_interleave": False},
    "yarn": {"q_lora_rank": 10, "yarn": YARN},
}


def make(dtype=None, **options):
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return random_modules.random_module(
        lambda: MLA(FEATURES, num_heads=HEADS, dtype=dtype, rngs=nnx.Rngs(0), **sizes, **options)
    )


def inputs(batch, length, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (batch, length, FEATURES), dtype)


def decoded(mla, x, table, chunks, page_size=4, pages=12):
    """All of ``x`` through the absorbed form, in chunks of tokens."""

    @nnx.jit
    def step(mla, x, cache, lengths):
        return mla.decode(x, cache, table, lengths)

    cache = jnp.full((pages, page_size, 1, 20), jnp.nan)
    outputs, start = [], 0
    for chunk in chunks:
        lengths = jnp.full(len(x), start, jnp.int32)
        out, cache = step(mla, x[:, start : start + chunk], cache, lengths)
        outputs.append(out)
        start += chunk
    return jnp.concatenate(outputs, axis=1)


TABLE = jnp.array([[3, 0, 7], [1, 11, 2]], jnp.int32)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_against_numpy(options):
    mla, x = make(**options), inputs(2, 11)
    weights, raw = module_weights.of_attention(mla)
    want = [reference.attention(np.asarray(each, np.float64), weights, raw) for each in x]
    np.testing.assert_allclose(nnx.jit(MLA.__call__)(mla, x), want, atol=1e-5)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_absorbed_is_plain(options):
    """Tokens that go through the paged cache, one by one or several at a time, give what attention on expanded heads
    gives. What was not written to the cache is NaN.
    """
    mla, x = make(**options), inputs(2, 11)
    np.testing.assert_allclose(decoded(mla, x, TABLE, (4, 1, 1, 1, 4)), nnx.jit(MLA.__call__)(mla, x), atol=2e-6)


def test_prefilled_cache_continues():
    """A prefill and decode steps, sequences of unequal length: as if each had come whole."""
    mla, x, lengths = make(q_lora_rank=10), inputs(2, 11), jnp.array([8, 3], jnp.int32)
    want, rows = nnx.jit(MLA.prefill)(mla, x)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    stored = jnp.where(positions < lengths[:, None], positions, -1)
    cache = mla.store(jnp.full((12, 4, 1, 20), jnp.nan), rows[:, :8], TABLE, stored)
    for step in range(3):
        new = jnp.stack([x[0, 8 + step], x[1, 3 + step]])[:, None]
        out, cache = nnx.jit(MLA.decode)(mla, new, cache, TABLE, lengths + step)
        np.testing.assert_allclose(out[0, 0], want[0, 8 + step], atol=2e-6)
        np.testing.assert_allclose(out[1, 0], want[1, 3 + step], atol=2e-6)


def test_a_sequence_that_does_not_exist_writes_nothing():
    mla, x = make(), inputs(2, 1)
    cache = mla.empty_cache(12, 4, jnp.float32)
    out, after = nnx.jit(MLA.decode)(mla, x, cache, TABLE, jnp.array([-1, 0], jnp.int32))
    written = np.flatnonzero(np.any(np.asarray(after) != 0, axis=(1, 2, 3)))
    assert written.tolist() == [int(TABLE[1, 0])]
    assert not np.any(np.asarray(out[0]))


def test_packed_sequences_do_not_see_each_other():
    mla, x = make(), inputs(1, 8)
    segments = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]], jnp.int32)
    packed = nnx.jit(MLA.__call__)(mla, x, jnp.arange(8)[None] % 4, segment_ids=segments)
    apart = nnx.jit(MLA.__call__)(mla, x.reshape(2, 4, FEATURES))
    np.testing.assert_allclose(packed.reshape(apart.shape), apart, atol=2e-6)


def test_gradient_against_float64_differences():
    mla, x = make(q_lora_rank=10), inputs(1, 6)
    weights, raw = module_weights.of_attention(mla)
    cotangent = np.random.default_rng(2).standard_normal((6, FEATURES))

    def value(point):
        return float(np.sum(reference.attention(point, weights, raw) * cotangent))

    grad = jax.jit(jax.grad(lambda x: jnp.sum(jax.checkpoint(mla)(x)[0] * cotangent)))(x)[0]
    direction = np.random.default_rng(3).standard_normal((6, FEATURES))
    point = np.asarray(x[0], np.float64)
    slope = (value(point + 1e-5 * direction) - value(point - 1e-5 * direction)) / 2e-5
    assert float(np.sum(grad * direction)) == pytest.approx(slope, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 0.03), (jnp.float16, 4e-3)])
def test_narrow_types(dtype, tolerance):
    """Parameters stay float32, activations and the cache are narrow."""
    mla, x = make(dtype, q_lora_rank=10), inputs(2, 11)
    want = nnx.jit(MLA.__call__)(make(q_lora_rank=10), x)
    out = nnx.jit(MLA.__call__)(mla, x.astype(dtype))
    assert out.dtype == dtype
    assert mla.k_up[...].dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=tolerance)
    cache = mla.empty_cache(12, 4, dtype)
    stepped, cache = nnx.jit(MLA.decode)(mla, x.astype(dtype), cache, TABLE, jnp.zeros(2, jnp.int32))
    assert stepped.dtype == cache.dtype == dtype
    np.testing.assert_allclose(stepped.astype(jnp.float32), want, atol=tolerance)


def test_cache_on_a_mesh_splits_evenly():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    with jax.set_mesh(mesh):
        mla = random_modules.random_module(lambda: MLA(FEATURES, num_heads=2, rngs=nnx.Rngs(0), **sizes))
        cache = mla.empty_cache(4, 8, jnp.float32)
        assert cache.sharding.spec == jax.P("data", None, None, None)
        with pytest.raises(errors.HardwareConstraintError, match="5 pages do not split over the 2 devices"):
            mla.empty_cache(5, 8, jnp.float32)
        with pytest.raises(errors.HardwareConstraintError, match="3 sequences do not split .* a multiple of 2"):
            mla.decode(inputs(3, 1), cache, jnp.zeros((3, 1), jnp.int32), jnp.zeros(3, jnp.int32))
