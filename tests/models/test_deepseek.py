import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import deepseek_reference as reference
import glass_jax as glass
import random_modules
from glass_jax.nn import GateBias, YaRN
from models import hf
from models.deepseek import TINY, V2_LITE, V3, DeepSeek, next_token_loss
from models.hf_config import config_to_hf
from models.safetensors import Checkpoint

SMALL = dataclasses.replace(
    TINY,
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=24,
    num_attention_heads=2,
    kv_lora_rank=8,
    q_lora_rank=6,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=4,
    moe_intermediate_size=8,
    initializer_range=0.3,
)
MODELS = {
    "v3": SMALL,
    "v2": dataclasses.replace(
        SMALL,
        q_lora_rank=None,
        scoring_func="softmax",
        norm_topk_prob=False,
        n_shared_experts=2,
        yarn=YaRN(factor=4, original_length=8, mscale=0.707, mscale_all_dim=0.707),
    ),
}


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 40, (4, 12)).astype(np.int32)


def make(config=SMALL, **options):
    return DeepSeek(config, rngs=nnx.Rngs(0), **options)


def parameters(config):
    """Parameters of ``config``, from the shapes of models with one layer of a kind more."""

    def size(layers, dense):
        shapes = dataclasses.replace(config, num_hidden_layers=layers, first_k_dense_replace=dense)
        return sum(x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: make(shapes)))))

    none, one_dense, one_mixture = size(0, 0), size(1, 1), size(1, 0)
    dense = config.first_k_dense_replace
    return none + dense * (one_dense - none) + (config.num_hidden_layers - dense) * (one_mixture - none)


def test_published_sizes():
    """15.7 billion parameters (arXiv:2405.04434, B) and 671 billion (arXiv:2412.19437)."""
    assert parameters(V2_LITE) == pytest.approx(15.7e9, rel=0.005)
    assert parameters(V3) == pytest.approx(671e9, rel=0.001)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_against_numpy(config, ids, tmp_path):
    """The whole model, by an implementation that knows only the public checkpoints' tensors."""
    model = random_modules.random_module(lambda: make(config))
    hf.save_hf(tmp_path, model)
    got = nnx.jit(DeepSeek.__call__)(model, ids[:2])
    assert got.dtype == jnp.float32
    want = [reference.logits(row, Checkpoint(tmp_path), config_to_hf(config)) for row in ids[:2]]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_prefill_and_decode_are_the_whole_model(ids):
    model = random_modules.random_module(make)
    want = nnx.jit(DeepSeek.__call__)(model, ids)
    cache = [jnp.full_like(pages, jnp.nan) for pages in model.empty_cache(13, 4)]
    table = jnp.asarray(np.random.default_rng(1).permutation(12).reshape(4, 3), jnp.int32)
    lengths = jnp.array([8, 1, 5, 0], jnp.int32)
    scores, cache = nnx.jit(DeepSeek.prefill)(model, ids[:, :8], lengths, cache, table)
    for row in range(3):
        np.testing.assert_allclose(scores[row], want[row, lengths[row] - 1], atol=5e-6)
    new = jnp.stack([jnp.asarray(ids[row, n : n + 2]) for row, n in enumerate(lengths.tolist())])
    existing = jnp.where(lengths > 0, lengths, -1)
    valid = jnp.array([[1, 1], [1, 0], [0, 1], [1, 1]], bool)  # two tokens, one, and one that comes second
    new = new.at[1, 1].set(7).at[2].set(jnp.array([7, ids[2, 5]]))
    scores, cache = nnx.jit(DeepSeek.decode)(model, new, existing, cache, table, valid=valid)
    np.testing.assert_allclose(scores[0], want[0, 8:10], atol=5e-6)
    np.testing.assert_allclose(scores[1, 0], want[1, 1], atol=5e-6)
    np.testing.assert_allclose(scores[2, 1], want[2, 5], atol=5e-6)
    for pages in cache:  # the row that does not exist wrote nothing
        assert np.all(np.isnan(pages[table[3]]))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AxisType.Explicit, id="explicit"),
        pytest.param(AxisType.Auto, id="auto", marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh(kind, ids):
    """Logits, loads and a decode step on 8 devices."""

    def run(model, ids):
        logits, load = model.with_load(ids)
        table = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
        lengths = jnp.array([8, 1, 5, -1], jnp.int32)
        _, cache = model.prefill(ids[:, :8], jnp.maximum(lengths, 0), model.empty_cache(8, 8), table)
        return logits, load, model.decode(ids[:, 8:9], lengths, cache, table)[0]

    values = random_modules.random_values(make)
    want = jax.device_get(nnx.jit(run)(random_modules.build(make, values), ids))
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(kind,) * 3, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        model = random_modules.build(make, values)
        got = jax.device_get(nnx.jit(run)(model, ids))
    assert model.blocks[1].attention.q.kernel[...].sharding.spec == jax.P(None, "tensor")
    np.testing.assert_array_equal(got[1], want[1])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_training_step(ids):
    """The step of the module's docstring: the loss falls, biases move against the load, nothing else changes."""
    model = random_modules.random_module(make)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert {type(x) for x in jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))} == {GateBias}
    (before,) = jax.tree.leaves(rest)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, rest, state, ids):
        def loss(params, ids):
            logits, load = nnx.merge(graphdef, params, rest).with_load(ids[:, :-1])
            return next_token_loss(logits, ids[:, 1:]), load

        (value, load), grads = jax.value_and_grad(loss, has_aux=True)(params, ids)
        updates, state = optimizer.update(grads, state, params)
        model = nnx.merge(graphdef, optax.apply_updates(params, updates), rest)
        model.update_biases(load)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return params, rest, state, value, load

    state, losses = optimizer.init(params), []
    for _ in range(8):
        params, rest, state, value, load = step(params, rest, state, ids)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.3
    assert int(load.sum()) == 4 * 11 * SMALL.num_experts_per_tok
    (bias,) = jax.tree.leaves(rest)
    assert 0 < float(jnp.abs(bias - before).max()) <= 8e-3 + 1e-6


def test_loss_against_numpy():
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((2, 3, 5)), rng.integers(0, 5, (2, 3))
    weights = np.array([[1.0, 1, 0], [1, 0, 0]])
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    losses = -np.log(np.take_along_axis(shares, targets[..., None], axis=-1)[..., 0])
    assert float(next_token_loss(jnp.asarray(logits), targets)) == pytest.approx(losses.mean(), rel=1e-6)
    want = (losses * weights).sum() / weights.sum()
    assert float(next_token_loss(jnp.asarray(logits), targets, weights)) == pytest.approx(want, rel=1e-6)


def test_narrow_activations(ids):
    values = random_modules.random_values(make)
    model = random_modules.build(lambda: make(dtype=jnp.bfloat16, param_dtype=jnp.float32), values)
    assert model.embedding[...].dtype == jnp.float32
    got, want = (nnx.jit(DeepSeek.__call__)(m, ids[:1]) for m in (model, random_modules.build(make, values)))
    assert got.dtype == jnp.float32
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.1
    assert model.empty_cache(2, 4)[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_on_the_npu_model(ids):
    """Every kernel of a forward pass, a prefill and a decode step, on the model of the NPU."""
    model = random_modules.random_module(make)

    def run(model, ids):
        table, lengths = jnp.arange(4, dtype=jnp.int32).reshape(2, 2), jnp.array([4, 2], jnp.int32)
        scores, cache = model.prefill(ids[:, :4], lengths, model.empty_cache(4, 4), table)
        return model(ids), scores, model.decode(ids[:, 4:5], lengths, cache, table)[0]

    want = nnx.jit(run)(model, ids[:2, :7])
    with glass.configure(implementation="npu_model"):
        got = nnx.jit(run)(model, ids[:2, :7])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
