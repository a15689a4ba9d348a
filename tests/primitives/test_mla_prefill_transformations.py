"""mla_prefill under grad, vmap, checkpoint, scan and shard_map, and over meshes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import mla_prefill_reference as ref

RUNS_HERE = ("xla", "npu_model")
_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes]


def finite(results):
    """lse with 0 where a query sees nothing, whose infinity has no derivative."""
    return results[0], jnp.where(jnp.isinf(results[1]), 0, results[1])


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "causal", "ids"),
    [((7, 7), True, None), ((9, 5), True, None), ((5, 9), False, None), ((6, 6), True, [[0, 0, 1, 1, 1, 2]])],
    ids=str,
)
def test_first_and_second_derivatives(lengths, causal, ids):
    queries, keys = lengths
    ids = None if ids is None else jnp.asarray(ids)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal(s)) for s in ((1, queries, 2, 6), (1, keys, 2, 6), (1, keys, 2, 5)))
        f = lambda *qkv: finite(glass.mla_prefill(*qkv, causal=causal, segment_ids=ids))  # noqa: E731
        check_grads(f, (q, k, v), order=2, modes=("fwd", "rev"))
        gradient = jax.grad(lambda *qkv: sum(jnp.sum(jnp.sin(x)) for x in f(*qkv)), (0, 1, 2))
        check_grads(gradient, (q, k, v), order=1, modes=("fwd", "rev"))


def test_derivatives_over_several_blocks():
    """Two blocks of queries and of keys, and a part of a third of queries."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((1, 300, 1, width))) for width in (3, 3, 2))
        check_grads(glass.mla_prefill, (q, k, v), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_tangents_are_the_transpose_of_gradients(implementation):
    """Also in 16 bits, of one operand alone, and of queries that see no key: <w, J t> is <J' w, t>."""
    q, k, v, t = arrays((1, 7, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16), dtype="bfloat16")
    f = lambda k: glass.mla_prefill(q, k, v, implementation=implementation)  # noqa: E731
    value, tangents = jax.jvp(jax.jit(f), (k,), (t,))
    jax.tree.map(np.testing.assert_array_equal, value, jax.jit(f)(k))
    assert not tangents[0][:, :2].any() and not tangents[1][:, :, :2].any()  # queries without a key
    finite = lambda k: (f(k)[0], f(k)[1][:, :, 2:])  # noqa: E731
    weights = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), finite(k))
    (gradient,) = jax.vjp(finite, k)[1](weights)
    forward = ref.f64(weights[0]).ravel() @ ref.f64(tangents[0]).ravel()
    forward += ref.f64(weights[1]).ravel() @ ref.f64(tangents[1][:, :, 2:]).ravel()
    size = np.linalg.norm(ref.f64(gradient)) * np.linalg.norm(ref.f64(t))
    assert abs(forward - ref.f64(gradient).ravel() @ ref.f64(t).ravel()) < 2.0**-7 * size


def test_one_result_alone_has_a_gradient():
    q, k, v = arrays((1, 5, 1, 8), (1, 5, 1, 8), (1, 5, 1, 8))
    d_lse = jax.grad(lambda q: glass.mla_prefill(q, k, v)[1].sum())(q)
    expected = ref.attention(q, k, v, d_out=np.zeros((1, 5, 1, 8)), d_lse=np.ones((1, 1, 5)))
    ref.assert_close(d_lse, expected[2][0], 2e-6)


def test_the_value_is_the_same_with_and_without_differentiation():
    q, k, v = arrays((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8), dtype="bfloat16")
    plain, (seen, _) = glass.mla_prefill(q, k, v), jax.vjp(glass.mla_prefill, q, k, v)
    jax.tree.map(np.testing.assert_array_equal, plain, seen)


def test_checkpoint_recomputes():
    (x,) = arrays((1, 6, 2, 8))
    f = lambda x: glass.mla_prefill(*[glass.mla_prefill(x, x, x)[0]] * 3)[0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(x), jax.grad(jax.checkpoint(f))(x), rtol=1e-5, atol=1e-6)
    count = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(x)).count("glass_mla_prefill[")  # noqa: E731
    assert count(jax.checkpoint(f)) > count(f)


def test_scan():
    x, weights = arrays((1, 6, 2, 8), (3, 8, 8))

    def layers(weights, over):
        return over(lambda x, w: (x + glass.mla_prefill(x @ w, x, x)[0], None), x, weights)[0].sum()

    def unrolled(layer, x, weights):
        return functools.reduce(lambda x, w: layer(x, w)[0], weights, x), None

    scanned, plain = (jax.grad(layers)(weights, over) for over in (jax.lax.scan, unrolled))
    np.testing.assert_allclose(scanned, plain, rtol=1e-4, atol=1e-5)


# --- vmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("in_axes", [(0, None, None, None), (2, 0, 1, None), (None, 0, None, 1), (1, 1, 1, 0)], ids=str)
def test_vmap(in_axes, implementation):
    base = [(2, 5, 2, 16), (2, 5, 2, 16), (2, 5, 2, 8), (2, 5)]
    shapes = [s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(base, in_axes, strict=True)]
    q, k, v = arrays(*shapes[:3])
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 2, shapes[3]), jnp.int32)
    f = lambda q, k, v, ids: glass.mla_prefill(q, k, v, segment_ids=ids, implementation=implementation)  # noqa: E731
    out, lse = jax.jit(jax.vmap(f, in_axes))(q, k, v, ids)
    rows = [
        [x] * 3 if a is None else np.moveaxis(np.asarray(x), a, 0) for x, a in zip((q, k, v, ids), in_axes, strict=True)
    ]
    for i, (q, k, v, ids) in enumerate(zip(*rows, strict=True)):
        ref.assert_attention((out[i], lse[i]), ref.attention(q, k, v, segment_ids=ids))


def test_nested_vmap_and_its_gradient():
    q, k, v = arrays((2, 1, 5, 1, 8), (3, 1, 5, 1, 8), (3, 1, 5, 1, 4))
    over = jax.vmap(jax.vmap(lambda q, k, v: glass.mla_prefill(q, k, v)[0], (None, 0, 0)), (0, None, None))
    gradient = jax.grad(lambda k: over(q, k, v).sum())(k)
    expected = np.zeros(k.shape)
    for i, j in np.ndindex(2, 3):
        results = ref.attention(q[i], k[j], v[j], d_out=np.ones((1, 5, 1, 4)), d_lse=np.zeros((1, 1, 5)))
        ref.assert_close(over(q, k, v)[i, j], results[0], 2e-6)
        expected[j] += results[2][1]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


# --- over devices --------------------------------------------------------------------------------------------------


def mesh_of(shape, axis_type):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, ("x", "y"), devices=devices, axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize(
    ("devices", "spec", "implementation"),
    [
        ((4, 2), ("x", None, "y"), "xla"),
        ((4, 2), ("x", None, "y"), "npu_model"),
        ((1, 8), (None, None, ("x", "y")), "xla"),
    ],
    ids=str,
)
def test_batch_and_heads_stay_where_they_are(devices, spec, axis_type, implementation):
    """Value and gradient need no communication; results are sharded as the operands are."""
    whole = arrays((4, 9, 8, 16), (4, 9, 8, 16), (4, 9, 8, 8), (4, 9, 8, 8))
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 9)), jnp.int32)
    mesh = mesh_of(devices, axis_type)

    def value_and_gradients(q, k, v, d_out):
        f = lambda *qkv: glass.mla_prefill(*qkv, segment_ids=ids, implementation=implementation)  # noqa: E731
        results, pullback = jax.vjp(f, q, k, v)
        return results, pullback((d_out, jnp.zeros_like(results[1])))

    with jax.set_mesh(mesh):
        q, k, v, d_out = (jax.device_put(x, jax.P(*spec)) for x in whole)
        fn = jax.jit(value_and_gradients)
        found = set(_COLLECTIVE.findall(fn.lower(q, k, v, d_out).compile().as_text()))
        results, grads = fn(q, k, v, d_out)
    assert not found
    expected = ref.attention(*whole[:3], segment_ids=ids, d_out=whole[3], d_lse=np.zeros((4, 8, 9)))
    ref.assert_attention(results, expected[:2])
    for actual, want in zip(grads, expected[2], strict=True):
        ref.assert_close(actual, want, 4e-6)
    if axis_type is AxisType.Explicit:
        assert jax.typeof(results[0]).sharding.spec == jax.P(*spec, None)
        assert jax.typeof(results[1]).sharding.spec == jax.P(spec[0], spec[2], None)
        assert jax.typeof(grads[1]).sharding.spec == jax.P(*spec, None)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_a_sequence_that_is_sharded_is_made_whole(axis_type):
    whole = arrays((2, 8, 2, 16), (2, 8, 2, 16), (2, 8, 2, 8))
    with jax.set_mesh(mesh_of((2, 2), axis_type)):
        results = jax.jit(glass.mla_prefill)(*(jax.device_put(x, jax.P(None, "x")) for x in whole))
    ref.assert_attention(results, ref.attention(*whole))


def test_vmap_over_an_explicit_mesh():
    whole = arrays((4, 3, 9, 4, 16), (4, 9, 4, 16), (4, 9, 4, 8))
    with jax.set_mesh(mesh_of((2, 2), AxisType.Explicit)):
        q = jax.device_put(whole[0], jax.P("x", None, None, "y"))
        k, v = (jax.device_put(x, jax.P("x", None, "y")) for x in whole[1:])
        out, _ = jax.jit(jax.vmap(glass.mla_prefill, (1, None, None)))(q, k, v)
    assert jax.typeof(out).sharding.spec == jax.P(None, "x", None, "y", None)
    for i in range(3):
        ref.assert_close(out[i], ref.attention(whole[0][:, i], *whole[1:])[0], 2e-6)


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("shared", [False, True])
def test_shard_map(shared, implementation):
    """Over the heads, and with keys that all devices share, whose gradient is summed over the mesh."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    q, k, v = arrays((2, 9, 4, 16), (2, 9, 1 if shared else 4, 16), (2, 9, 1 if shared else 4, 8))
    spec = jax.P(None, None, "x")
    fn = jax.shard_map(
        lambda q, k, v: glass.mla_prefill(q, k, v, implementation=implementation)[0],
        mesh=mesh,
        in_specs=(spec, jax.P() if shared else spec, jax.P() if shared else spec),
        out_specs=spec,
        check_vma=True,
    )
    whole = (q, *(jnp.broadcast_to(x, (2, 9, 4, x.shape[-1])) for x in (k, v)))
    expected = ref.attention(*whole, d_out=np.ones((2, 9, 4, 8)), d_lse=np.zeros((2, 4, 9)))
    ref.assert_close(jax.jit(fn)(q, k, v), expected[0], 2e-6)
    gradient = jax.jit(jax.grad(lambda k: fn(q, k, v).sum()))(k)
    want = expected[2][1].sum(2, keepdims=True) if shared else expected[2][1]
    np.testing.assert_allclose(gradient, want, atol=1e-5)
