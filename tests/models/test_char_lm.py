import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import data
from models.char_lm import CharLM

SMALL = CharLM(context=5, embedding=6, hidden=16, layers=2)


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    return random.integers(0, 96, (8, SMALL.context)), random.integers(0, 96, 8)


def numpy_loss(params, contexts, targets):
    """Loss and logits in float64, written from the definition."""
    x = params["embedding"][contexts].reshape(len(contexts), -1)
    for layer in params["layers"][:-1]:
        z = x @ layer["w"] + layer["b"]
        x = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    logits = x @ params["layers"][-1]["w"] + params["layers"][-1]["b"]
    probability = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return -np.log(probability[np.arange(len(targets)), targets]).mean(), logits


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_logits_and_loss_against_numpy(batch, dtype, tolerance):
    model = CharLM(context=5, embedding=6, hidden=16, layers=2, dtype=dtype)
    params = model.init(jax.random.key(1))
    loss, logits = model.loss(params, *batch), model.logits(params, batch[0])
    want_loss, want = numpy_loss(in_float64(params), *batch)
    assert logits.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(logits, np.float64) - want) <= tolerance * np.linalg.norm(want)
    assert float(loss) == pytest.approx(want_loss, rel=tolerance)


def test_gradient_against_central_differences_in_float64(batch):
    params = SMALL.init(jax.random.key(2))
    grads = in_float64(jax.grad(lambda params: SMALL.loss(params, *batch))(params))
    params, random, step = in_float64(params), np.random.default_rng(3), 1e-6
    for _ in range(3):
        direction = jax.tree.map(lambda x: random.standard_normal(x.shape), params)
        ends = (jax.tree.map(lambda x, d, s=sign: x + s * step * d, params, direction) for sign in (1, -1))
        high, low = (numpy_loss(end, *batch)[0] for end in ends)
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float(np.sum(g * d)), grads, direction)))
        assert slope == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-5)


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary(batch):
    params = jax.tree.map(jnp.zeros_like, SMALL.init(jax.random.key(0)))
    assert float(SMALL.loss(params, *batch)) == pytest.approx(np.log(len(data.VOCABULARY)))


def test_initial_activations_keep_their_scale():
    model = CharLM(context=8, embedding=32, hidden=256, layers=4)
    params = model.init(jax.random.key(0))
    contexts = np.random.default_rng(0).integers(0, 96, (64, 8))
    assert 0.3 < float(jnp.std(model.logits(params, contexts))) < 3


def test_generate_follows_the_model():
    params = jax.tree.map(jnp.zeros_like, SMALL.init(jax.random.key(0)))
    a = data.VOCABULARY.index("a")
    params["layers"][-1]["b"] = params["layers"][-1]["b"].at[a].set(50.0)
    drawn = SMALL.generate(params, jnp.zeros(SMALL.context, jnp.int32), 12, jax.random.key(0), temperature=1.0)
    assert data.decode(np.asarray(drawn)) == "a" * 12


def test_generate_draws_from_the_window_it_extends():
    """A model that says the first character of its window again repeats its prompt for ever."""
    model = CharLM(context=3, embedding=96, hidden=96, layers=1)
    first = np.zeros((3 * 96, 96), np.float32)
    first[:96] = 20 * np.eye(96)
    layers = [
        {"w": first, "b": np.zeros(96, np.float32)},
        {"w": 20 * np.eye(96, dtype=np.float32), "b": np.zeros(96, np.float32)},
    ]
    params = jax.tree.map(jnp.asarray, {"embedding": np.eye(96, dtype=np.float32), "layers": layers})
    drawn = model.generate(params, jnp.asarray(data.encode("abc")), 7, jax.random.key(0), temperature=1.0)
    assert data.decode(np.asarray(drawn)) == "abcabca"
