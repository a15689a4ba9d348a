import jax
import jax.numpy as jnp
import module_weights
import numpy as np
import pytest
from flax import nnx

import deepseek_reference as reference
import random_modules
from glass_jax.nn import Gate, MoE, balanced, load_statistics

FEATURES, EXPERTS = 12, 8
GATES = {
    "v2": Gate(k=3, score="softmax", route_scale=1.5, renormalize=False, use_bias=False),
    "v2 groups": Gate(k=2, score="softmax", num_groups=4, topk_groups=2, renormalize=False, use_bias=False),
    "v3": Gate(k=3, num_groups=4, topk_groups=2, route_scale=2.5),
    "v4": Gate(k=2, score="sqrt_softplus"),
}


def make(gate, num_shared=1, dtype=None):
    sizes = {"num_experts": EXPERTS, "num_shared": num_shared}
    return random_modules.random_module(
        lambda: MoE(FEATURES, 10, gate=gate, dtype=dtype, rngs=nnx.Rngs(0), **sizes), deviation=0.5
    )


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (2, 7, FEATURES), dtype)


def expected(moe, x):
    return reference.mixture(np.asarray(x, np.float64).reshape(-1, FEATURES), *module_weights.of_mixture(moe))


@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_against_numpy(gate, num_shared):
    moe, x = make(gate, num_shared), inputs()
    want, want_load = expected(moe, x)
    out, load = nnx.jit(MoE.with_load)(moe, x)
    np.testing.assert_array_equal(load, want_load)
    np.testing.assert_allclose(out.reshape(want.shape), want, atol=2e-5)


def test_tokens_that_are_not_valid_choose_no_expert():
    moe, x = make(GATES["v3"], num_shared=0), inputs()
    valid = jnp.arange(7) < jnp.array([[7], [2]])
    out, load = nnx.jit(MoE.with_load)(moe, x, valid)
    want = nnx.jit(MoE.__call__)(moe, x)
    np.testing.assert_allclose(out, jnp.where(valid[..., None], want, 0), atol=1e-6)
    assert int(load.sum()) == 9 * 3


@pytest.mark.parametrize("gate", [GATES["v2"], GATES["v3"]], ids=["v2", "v3"])
def test_gradient_against_float64_differences(gate):
    """By the input and the gate: through experts, weights and shared experts; choices stay as they are."""
    moe, x = make(gate), inputs()
    rng = np.random.default_rng(2)
    cotangent, direction = rng.standard_normal((2, 14, FEATURES))
    weights, raw = module_weights.of_mixture(moe)
    point, gate_direction = np.asarray(x, np.float64).reshape(14, FEATURES), rng.standard_normal((EXPERTS, FEATURES))

    def value(step):
        moved = weights | {"gate.weight": weights["gate.weight"] + step * gate_direction}
        return float(np.sum(reference.mixture(point + step * direction, moved, raw)[0] * cotangent))

    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)

    def loss(params, x):
        return jnp.sum(jax.checkpoint(nnx.merge(graphdef, params, rest))(x).reshape(14, FEATURES) * cotangent)

    grads, to_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    slope = float(np.sum(to_x.reshape(14, FEATURES) * direction) + np.sum(grads["router"][...].T * gate_direction))
    assert slope == pytest.approx((value(1e-6) - value(-1e-6)) / 2e-6, rel=1e-4, abs=1e-3)


def test_bias_moves_against_the_load():
    moe = make(GATES["v3"])
    before = np.asarray(moe.bias[...])
    moe.update_bias(jnp.array([0, 4, 4, 4, 4, 4, 8, 4]), rate=0.01)
    np.testing.assert_allclose(np.asarray(moe.bias[...]) - before, [0.01, 0, 0, 0, 0, 0, -0.01, 0], atol=1e-7)
    with pytest.raises(ValueError, match="use_bias=False"):
        make(GATES["v2"]).update_bias(jnp.zeros(EXPERTS))


def test_bias_updates_balance_a_skewed_gate():
    """A gate that prefers two experts spreads its tokens over all of them after some updates."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((512, EXPERTS)) + np.array([3, 3, 0, 0, 0, 0, 0, 0]), jnp.float32)

    def step(bias, _):
        _, indices = Gate(k=2).choose(logits, bias)
        load = jnp.bincount(indices.ravel(), length=EXPERTS)
        return balanced(bias, load, 0.01), load_statistics(load)["max_violation"]

    _, violations = jax.lax.scan(step, jnp.zeros(EXPERTS), length=200)
    assert violations[0] > 2
    assert violations[-1] < 0.15


def test_load_statistics():
    statistics = load_statistics(jnp.array([[4, 0, 2, 2], [2, 2, 2, 2], [0, 0, 0, 0]]))
    np.testing.assert_allclose(statistics["fractions"], [[2, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    np.testing.assert_allclose(statistics["max_violation"], [1, 0, -1])
    np.testing.assert_array_equal(statistics["unused"], [1, 0, 4])


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 0.02), (jnp.float16, 3e-3)])
def test_narrow_types(dtype, tolerance):
    moe, x = make(GATES["v3"], dtype=dtype), inputs(dtype)
    want, _ = expected(moe, x.astype(jnp.float32))
    out = nnx.jit(MoE.__call__)(moe, x)
    assert out.dtype == dtype
    error = np.linalg.norm(np.asarray(out, np.float64).reshape(want.shape) - want)
    assert error <= tolerance * np.linalg.norm(want)
