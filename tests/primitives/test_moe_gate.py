"""moe_gate against NumPy float64: the gates of V2, V3 and V4, ties, groups, gradients, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import moe_gate_reference

MODELS = {
    "v2_lite": (64, {"k": 6, "score": "softmax", "renormalize": False}),
    "v2": (
        160,
        {"k": 6, "score": "softmax", "num_groups": 8, "topk_groups": 3, "route_scale": 16.0, "renormalize": False},
    ),
    "v3": (256, {"k": 8, "score": "sigmoid", "num_groups": 8, "topk_groups": 4, "route_scale": 2.5}),
    "v4": (256, {"k": 6, "score": "sqrt_softplus", "route_scale": 1.5}),
    "odd": (21, {"k": 4, "score": "sigmoid", "num_groups": 3, "topk_groups": 2}),
    "groups_of_one": (5, {"k": 3, "score": "sigmoid", "num_groups": 5, "topk_groups": 4}),
}
BIASED = ("v3", "v4", "odd", "groups_of_one")


def _logits(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 2, dtype)


def _operands(model, *batch, seed=0):
    experts, options = MODELS[model]
    rng = np.random.default_rng(seed)
    bias = jnp.asarray(rng.uniform(-0.3, 0.3, experts), jnp.float32) if model in BIASED else None
    return _logits(*batch, experts, seed=seed), bias, options


def _check(actual, expected, rtol=1e-6):
    (weights, indices), (want_weights, want_indices) = actual, expected
    np.testing.assert_array_equal(indices, want_indices)
    np.testing.assert_allclose(np.asarray(weights, np.float64), want_weights, rtol=rtol)


@pytest.mark.parametrize("batch", [(1,), (33,), (2, 7), ()], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_gates_of_models(model, batch):
    logits, bias, options = _operands(model, *batch)
    weights, indices = jax.jit(functools.partial(glass.moe_gate, **options))(logits, bias)
    assert weights.dtype == jnp.float32 and indices.dtype == jnp.int32
    _check((weights, indices), moe_gate_reference.moe_gate(logits, bias, **options), rtol=5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_are_computed_in_float32_or_float64(dtype):
    with jax.enable_x64(dtype == "float64"):
        logits, bias, options = _operands("odd", 16)
        logits = logits.astype(dtype)
        weights, indices = jax.jit(functools.partial(glass.moe_gate, **options))(logits, bias)
        assert weights.dtype == ("float64" if dtype == "float64" else "float32") and indices.dtype == jnp.int32
        rtol = 1e-14 if dtype == "float64" else 1e-6
        _check((weights, indices), moe_gate_reference.moe_gate(logits, bias, **options), rtol)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("score", "experts", "num_groups", "topk_groups", "k"),
    [
        ("softmax", 12, 1, 1, 5),
        ("softmax", 12, 4, 2, 6),
        ("softmax", 4, 4, 3, 3),
        ("sigmoid", 12, 1, 1, 12),
        ("sigmoid", 12, 3, 2, 5),
        ("sigmoid", 6, 3, 1, 2),
    ],
)
def test_ties(score, experts, num_groups, topk_groups, k, renormalize):
    """Logits and biases of few values, so that experts and groups are often exactly equal."""
    rng = np.random.default_rng(experts * k)
    # With sigmoid, logits are 0 or so large that scores are 0.5 and 1 exactly; softmax has powers of equal values.
    logits = rng.choice([0.0, 60.0] if score == "sigmoid" else [0.0, 1.0], (200, experts))
    bias = rng.choice([-0.25, 0.0, 0.5], experts) if score == "sigmoid" else None
    options = {
        "k": k, "score": score, "num_groups": num_groups, "topk_groups": topk_groups, "renormalize": renormalize,
    }  # fmt: skip
    operands = (jnp.asarray(logits, jnp.float32), None if bias is None else jnp.asarray(bias, jnp.float32))
    actual = jax.jit(functools.partial(glass.moe_gate, **options))(*operands)
    _check(actual, moe_gate_reference.moe_gate(logits, bias, **options))


def test_bias_decides_the_choice_and_not_the_weights():
    weights, indices = glass.moe_gate(jnp.zeros((1, 4)), jnp.array([0.0, 1.0, 0.0, 2.0]), k=2, renormalize=False)
    np.testing.assert_array_equal(indices, [[3, 1]])
    np.testing.assert_array_equal(weights, [[0.5, 0.5]])


def test_experts_stay_distinct_and_in_their_groups_where_scores_underflow():
    logits = jnp.array([[-50.0, -60.0, -70.0, -80.0, 80.0, -1e4, -1e4, -1e4]])
    weights, indices = glass.moe_gate(logits, k=4, score="softmax", num_groups=2, renormalize=False)
    np.testing.assert_array_equal(indices, [[4, 5, 6, 7]])
    np.testing.assert_array_equal(weights, [[1.0, 0.0, 0.0, 0.0]])


def test_an_expert_is_switched_off_by_its_bias():
    bias = jnp.array([-jnp.inf, 0.0, 0.0, -jnp.inf])
    _, indices = glass.moe_gate(_logits(32, 4), bias, k=2, num_groups=2, topk_groups=2)
    assert set(np.unique(indices)) == {1, 2}
    _, indices = glass.moe_gate(_logits(32, 4), bias, k=4)
    assert (np.sort(indices) == np.arange(4)).all()


def test_a_nan_reaches_the_weights_and_the_indices_stay_valid():
    weights, indices = glass.moe_gate(jnp.array([[0.0, jnp.nan, 1.0]]), k=2)
    assert np.isnan(weights).all()
    np.testing.assert_array_equal(indices, [[1, 2]])


@pytest.mark.parametrize("tokens", [(0,), (3, 0)], ids=str)
def test_no_tokens(tokens):
    weights, indices = glass.moe_gate(jnp.zeros((*tokens, 8)), k=3)
    assert weights.shape == indices.shape == (*tokens, 3)


# --- transformations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "renormalize"), [("softmax", False), ("sigmoid", True), ("sqrt_softplus", True)], ids=str
)
def test_gradients_through_the_weights(score, renormalize):
    groups = {} if score == "sqrt_softplus" else {"num_groups": 3, "topk_groups": 2}
    with jax.enable_x64(True):
        gate = functools.partial(glass.moe_gate, k=3, score=score, renormalize=renormalize, route_scale=2.5, **groups)
        fn = jax.jit(lambda x: gate(x)[0])
        check_grads(fn, (_logits(2, 9, dtype=jnp.float64, seed=1),), order=2, modes=("fwd", "rev"))


def test_bias_has_no_gradient():
    logits, bias, options = _operands("v3", 4)
    grad = jax.jit(jax.grad(lambda b: glass.moe_gate(logits, b, **options)[0].sum()))(bias)
    np.testing.assert_array_equal(grad, np.zeros_like(bias))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_gradients_are_finite_for_any_logits(score):
    logits = jnp.array([[-300.0, -150.0, -90.0, -40.0, 0.0, 40.0, 90.0, 300.0]])
    for k in (1, 8):
        grad = jax.jit(jax.grad(lambda x, k=k: glass.moe_gate(x, k=k, score=score)[0][0, 0]))(logits)
        assert np.isfinite(grad).all()


def test_sqrt_softplus_far_below_zero():
    logits = np.array([[-170.0, -120.0, -41.0, -39.0, -1.0, 3.0]])
    weights, _ = glass.moe_gate(jnp.asarray(logits, jnp.float32), k=6, score="sqrt_softplus", renormalize=False)
    # log1p(exp(x)) in float64 is good to here, where float32's softplus is long 0.
    np.testing.assert_allclose(weights, np.sqrt(np.log1p(np.exp(logits[:, ::-1]))), rtol=3e-6)


def test_vmap_scan_and_checkpoint():
    logits, bias, options = _operands("odd", 5, 7)
    gate = jax.jit(functools.partial(glass.moe_gate, **options))
    expected = gate(logits, bias)
    mapped = jax.vmap(gate, (1, None), 1)(logits, bias)
    scanned = jax.lax.scan(lambda carry, x: (carry, gate(x, bias)), 0, logits)[1]
    biases = jnp.stack([bias, -bias])
    for actual in (mapped, scanned, [x[0] for x in jax.vmap(gate, (None, 0))(logits, biases)]):
        _check(actual, expected)
    loss = lambda x: (gate(x, bias)[0] ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(logits), jax.grad(jax.checkpoint(loss))(logits), rtol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("spec", [jax.P("x", None, None), jax.P(None, "x", None)], ids=str)
def test_tokens_stay_on_their_devices(spec, axis_type):
    logits, bias, options = _operands("odd", 8, 8)
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(logits, spec)
        gate = jax.jit(lambda x: glass.moe_gate(x, bias, **options))
        grad = jax.jit(jax.grad(lambda x: glass.moe_gate(x, bias, **options)[0][..., 0].sum()))
        _check(gate(sharded), moe_gate_reference.moe_gate(logits, bias, **options), rtol=5e-6)
        for fn in (gate, grad):
            text = fn.lower(sharded).compile().as_text()
            assert "all-gather" not in text and "all-to-all" not in text
        assert gate(sharded)[0].sharding.is_equivalent_to(sharded.sharding, 3)


def test_shard_map():
    logits, bias, options = _operands("v3", 16)
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    gate = jax.shard_map(
        lambda x, b: glass.moe_gate(x, b, **options),
        mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"), check_vma=True,
    )  # fmt: skip
    _check(jax.jit(gate)(logits, bias), moe_gate_reference.moe_gate(logits, bias, **options), rtol=5e-6)


# --- errors --------------------------------------------------------------------------------------------------------

X = jnp.zeros((2, 12))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glass.moe_gate(X.astype(jnp.int32), k=2), r"logits is int32; use float32"),
        (lambda: glass.moe_gate(jnp.float32(1), k=1), r"logits has shape \(\), expected \[\.\.\., E\]"),
        (lambda: glass.moe_gate(X, jnp.zeros(11), k=2), r"bias has shape \(11,\), expected \[E\] with E = 12"),
        (lambda: glass.moe_gate(X, jnp.zeros(12, int), k=2), r"bias is int32"),
        (lambda: glass.moe_gate(X, k=2, score="tanh"), r"score='tanh' is not one of softmax, sigmoid, sqrt_softplus"),
        (lambda: glass.moe_gate(X, k=2, score="sqrt_softplus", num_groups=2), r"num_groups=2: no score of a group"),
        (lambda: glass.moe_gate(X, k=2, num_groups=5), r"num_groups=5 does not divide the 12 experts"),
        (lambda: glass.moe_gate(X, k=2, num_groups=4, topk_groups=5), r"topk_groups=5 of num_groups=4: .* 1 to 4"),
        (lambda: glass.moe_gate(X, k=7, num_groups=4, topk_groups=2), r"k=7: choose from 1 to 6, .* 2 of 4 groups"),
        (lambda: glass.moe_gate(X, k=0), r"k=0: choose from 1 to 12"),
    ],
)
def test_errors(call, message):
    with pytest.raises(glass.errors.HardwareConstraintError, match=message):
        call()
