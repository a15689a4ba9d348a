"""The indexer's choices, and latent attention that follows them, against NumPy float64 and on meshes."""

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
from glass_jax.nn import MLA, Indexer

FEATURES, LATENT, HEADS, LENGTH, TOPK = 24, 10, 4, 13, 5
NONE = 2**31 - 1


def make(dtype=None, *, topk=TOPK, **options):
    def module():
        common = {"q_lora_rank": LATENT, "qk_rope_head_dim": 4, "dtype": dtype, "rngs": nnx.Rngs(0)}
        indexer = Indexer(FEATURES, num_heads=8, head_dim=10, topk=topk, **common, **options)
        sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "v_head_dim": 5}
        return MLA(FEATURES, num_heads=HEADS, indexer=indexer, **common, **sizes)

    return random_modules.random_module(module)


def inputs(batch=2, length=LENGTH, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).standard_normal((batch, length, FEATURES)), dtype)


def weights_of(mla):
    weights, raw = module_weights.of_attention(mla)
    index_weights, index_raw = module_weights.of_indexer(mla.indexer)
    return weights | index_weights, raw, index_raw


def choices(mla, x):
    """The tokens that NumPy chooses, in float64, by sequence and token."""
    weights, _, raw = weights_of(mla)
    scores = [reference.index_scores(np.asarray(each, np.float64), weights, raw) for each in x]
    return [reference.choices(each, TOPK) for each in scores]


def index(mla, x):
    return mla.indexer(x, mla.q_norm(mla.q_down(x)))


@pytest.mark.parametrize(
    "options", [{}, {"rope_interleave": True, "rope_theta": 100.0}], ids=["default", "interleaved"]
)
def test_choices_and_scores_against_numpy(options):
    mla, x = make(**options), inputs()
    chosen = np.asarray(nnx.jit(index)(mla, x))
    assert chosen.shape == (2, LENGTH, TOPK) and chosen.dtype == np.int32
    want = choices(mla, x)
    for sequence, rows in enumerate(chosen):
        for token, row in enumerate(rows):
            assert sorted(row[row != NONE].tolist()) == want[sequence][token]
    scores = nnx.jit(lambda mla, x: mla.indexer.scores(x, mla.q_norm(mla.q_down(x))))(mla, x)
    weights, _, raw = weights_of(mla)
    for got, each in zip(scores, x, strict=True):
        for token, row in enumerate(reference.index_scores(np.asarray(each, np.float64), weights, raw)):
            np.testing.assert_allclose(got[token, : token + 1], row, atol=1e-5)
            assert np.all(np.isneginf(got[token, token + 1 :]))


def test_sparse_attention_against_numpy():
    mla, x = make(), inputs()
    weights, raw, _ = weights_of(mla)
    want = [
        reference.attention(np.asarray(each, np.float64), weights, raw, chosen=chosen)
        for each, chosen in zip(x, choices(mla, x), strict=True)
    ]
    np.testing.assert_allclose(nnx.jit(MLA.__call__)(mla, x), want, atol=1e-5)


TABLE = jnp.array([[3, 0, 7, 5], [1, 11, 2, 9]], jnp.int32)


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (4, 1, 5, 3)], ids=["one by one", "several at a time"])
def test_through_the_cache(chunks):
    """What was not written to the cache is NaN."""
    mla, x = make(), inputs()
    step = nnx.jit(lambda mla, x, cache, lengths: mla.decode(x, cache, TABLE, lengths))
    cache = jax.tree.map(lambda each: jnp.full_like(each, jnp.nan), mla.empty_cache(12, 4, jnp.float32))
    outputs, start = [], 0
    for chunk in chunks:
        out, cache = step(mla, x[:, start : start + chunk], cache, jnp.full(2, start, jnp.int32))
        outputs.append(out)
        start += chunk
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), nnx.jit(MLA.__call__)(mla, x), atol=2e-6)


def test_prefilled_cache_continues():
    """Sequences of unequal length, and one that does not exist."""
    mla, x, lengths = make(), inputs(3), jnp.array([8, -1, 12], jnp.int32)
    table = jnp.array([[3, 0, 7, 5], [99, 99, 99, 99], [1, 11, 2, 9]], jnp.int32)
    want, rows = nnx.jit(MLA.prefill)(mla, x)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (3, LENGTH))
    cache = jax.tree.map(lambda each: jnp.full_like(each, jnp.nan), mla.empty_cache(12, 4, jnp.float32))
    cache = mla.store(cache, rows, table, jnp.where(positions < lengths[:, None], positions, -1))
    new = jnp.stack([x[0, 8], x[1, 0], x[2, 12]])[:, None]
    out, after = nnx.jit(MLA.decode)(mla, new, cache, table, lengths)
    np.testing.assert_allclose(out[0, 0], want[0, 8], atol=2e-6)
    np.testing.assert_allclose(out[2, 0], want[2, 12], atol=2e-6)
    assert not np.any(np.asarray(out[1]))
    for each in after:  # 8 + 1 and 12 + 1 tokens
        assert np.count_nonzero(~np.isnan(each).any(axis=-1)) == 22


def test_short_sequences_are_attended_to_whole():
    """With as many choices as tokens the sparse form is the plain one; one choice fewer, and it is not."""
    x, dense = inputs(), make(topk=LENGTH)
    weights, raw, _ = weights_of(dense)
    want = np.stack([reference.attention(np.asarray(each, np.float64), weights, raw) for each in x])
    np.testing.assert_allclose(nnx.jit(MLA.__call__)(dense, x), want, atol=1e-5)
    sparse = np.asarray(nnx.jit(MLA.__call__)(make(topk=LENGTH - 1), x))
    np.testing.assert_allclose(sparse[:, :-1], want[:, :-1], atol=1e-5)
    assert np.abs(sparse[:, -1] - want[:, -1]).max() > 1e-3


def test_gradients():
    """Through the attention to its own parameters; through the scores, and nothing else, to the indexer's."""
    mla, x = make(), inputs()
    cotangent = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.float32)
    attention = nnx.to_pure_dict(nnx.jit(nnx.grad(lambda mla: jnp.sum(mla(x) * cotangent)))(mla))
    assert all(np.any(leaf) for leaf in jax.tree.leaves({k: v for k, v in attention.items() if k != "indexer"}))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(attention["indexer"]))

    def scores(indexer):
        return jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), indexer.scores(x, mla.q_norm(mla.q_down(x))), 0)

    trained = nnx.to_pure_dict(nnx.jit(nnx.grad(lambda indexer: jnp.sum(jnp.square(scores(indexer)))))(mla.indexer))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(trained))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_on_a_mesh(kind):
    x, want = inputs(), nnx.jit(MLA.__call__)(make(), inputs())
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        mla = make()
        assert mla.indexer.q.kernel[...].sharding.spec == jax.P(None, "tensor")
        out = nnx.jit(MLA.__call__)(mla, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
        table = jnp.array([[2, 0, 1, 3], [5, 4, 7, 6]], jnp.int32)  # of each device's own part of the pages
        cache = mla.empty_cache(8, 4, jnp.float32)
        last, cache = nnx.jit(MLA.decode)(mla, x, cache, table, jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(last, want, atol=2e-6)
    assert [each.sharding.shard_shape(each.shape)[0] for each in cache] == [4, 4]


SEGMENTS = {
    "packed": [0] * 5 + [1] * 7 + [2],
    "entangled": [0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0],
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_segments_choose_among_themselves(segments):
    """Each text as if it were alone, by NumPy; 2 choices, so that other texts' keys would take places."""
    mla, x, segments = make(topk=2), inputs(), np.array([segments, [0] * 12 + [1]])
    positions = np.zeros_like(segments)
    want, few = np.zeros(x.shape), 0
    weights, raw, index_raw = weights_of(mla)
    for row, ids in enumerate(segments):
        for segment in set(ids.tolist()):
            (tokens,) = np.nonzero(ids == segment)
            positions[row, tokens] = np.arange(len(tokens))
            alone = np.asarray(x[row, tokens], np.float64)
            chosen = reference.choices(reference.index_scores(alone, weights, index_raw), 2)
            few += sum(len(each) < 2 for each in chosen)
            want[row, tokens] = reference.attention(alone, weights, raw, chosen=chosen)
    assert few == len(set(segments[0].tolist())) + 2
    out = nnx.jit(lambda mla, x, positions, ids: mla(x, positions, segment_ids=ids))(mla, x, positions, segments)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_a_nan_stays_one():
    """In what sees the token that has it, and nowhere else; through the cache, too, and in derivatives."""
    mla, x = make(), inputs()
    bad = x.at[0, 7].set(jnp.nan)

    @nnx.jit
    def call(mla, x):
        out, pullback = jax.vjp(mla, x)
        return out, pullback(jnp.ones_like(out))[0]

    (want, _), (out, gradient) = call(mla, x), call(mla, bad)
    np.testing.assert_allclose(out[0, :7], want[0, :7], atol=2e-6)
    np.testing.assert_allclose(out[1], want[1], atol=2e-6)
    assert np.isnan(out[0, 7:]).all()
    decoded, _ = nnx.jit(MLA.decode)(mla, bad, mla.empty_cache(12, 4, jnp.float32), TABLE, jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(out))
    assert np.isnan(gradient[0]).any() and np.isfinite(gradient[1]).all()


def test_a_score_of_minus_infinity_is_no_choice():
    indexer = make().indexer
    scores = jnp.array([[-jnp.inf, 2.0, -jnp.inf, 1.0, 0.5], [jnp.nan, 1.0, 3.0, 2.0, 0.5]])
    chosen, poisoned = jax.jit(indexer.choose)(scores, jnp.array([0, 1]), jnp.array([4, 4]))
    assert [sorted(row) for row in chosen.tolist()] == [[1, 3, NONE, NONE, NONE], [1, 2, 3, NONE, NONE]]
    assert poisoned.tolist() == [False, False]


def test_gradients_on_a_mesh():
    """Sequences longer than the choices, over a data axis whose types tell."""

    def gradient(mla, x):
        return nnx.to_pure_dict(nnx.grad(lambda mla: jnp.sum(jnp.sin(mla(x))))(mla))

    want = nnx.jit(gradient)(make(), inputs())
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        given = nnx.jit(gradient)(make(), jax.device_put(inputs(), jax.P("data")))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), given, want)


def test_narrow_types():
    mla, x = make(jnp.bfloat16), inputs(dtype=jnp.bfloat16)
    out = nnx.jit(MLA.__call__)(mla, x)
    assert out.dtype == jnp.bfloat16 and np.isfinite(out.astype(jnp.float32)).all()
    assert nnx.jit(index)(mla, x).dtype == jnp.int32


def test_what_an_indexer_cannot_do():
    with pytest.raises(errors.HardwareConstraintError, match="pass q_lora_rank, too"):
        MLA(FEATURES, num_heads=2, indexer=make().indexer, rngs=nnx.Rngs(0))
