"""sparse_mla_prefill under grad, vmap, scan, shard_map, on meshes and in an export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import sparse_mla_prefill_reference as ref
from benchmarks.shapes import sparse_mla_prefill as shapes
from compiled import collectives

RUNS_HERE = ("xla", "npu_model")
SMALL = {"depth": 32, "scattered": True, "unnamed": 0.1}
OPTIONS = {"head_dim_v": 16, "softmax_scale": 0.2}


def call(implementation="xla", **options):
    return functools.partial(glass.sparse_mla_prefill, implementation=implementation, **OPTIONS | options)


def operands(seed=0, **options):
    return ref.operands(8, 4, 30, 12, seed=seed, **SMALL | options)


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64))


# --- gradients ------------------------------------------------------------------------------------------------------


def dense(q, kv, indices, sink):
    """out and lse of queries that all name a token, written in JAX."""
    seen = (indices[:, 0] >= 0) & (indices[:, 0] < len(kv))
    tokens = kv[jnp.where(seen, indices[:, 0], 0), 0]
    scores = jnp.einsum("qhd,qkd->qhk", q, tokens) * OPTIONS["softmax_scale"]
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, jnp.broadcast_to(sink[:, None], (len(q), len(sink), 1))], -1))
    out = jnp.einsum("qhk,qkd->qhd", weights[..., :-1], tokens[..., : OPTIONS["head_dim_v"]])
    return out, jax.nn.logsumexp(scores, axis=-1)


def loss(results, weights):
    return sum(jnp.sum(x.astype(y.dtype) * y) for x, y in zip(results, weights, strict=True))


def weights_of(seed, queries=8, heads=4):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((queries, heads, 16))), jnp.asarray(rng.standard_normal((queries, heads)))


def test_gradients_in_float64():
    with jax.enable_x64(True):
        q, kv, indices = operands(dtype="float64")
        indices = indices.at[0, 0, 4:7].set(indices[0, 0].max() % 30)  # some token more than once
        q, sink, weights = q / 10, jnp.linspace(-1.0, 2, 4), weights_of(1)

        def mine(q, kv, sink):
            out, _, lse = call(attn_sink=sink)(q, kv, indices)
            return out, lse

        check_grads(mine, (q, kv, sink), order=1, modes=["fwd", "rev"])
        wanted = jax.grad(lambda *xs: loss(dense(*xs[:2], indices, xs[2]), weights), (0, 1, 2))(q, kv, sink)
        given = jax.jit(jax.grad(lambda *xs: loss(mine(*xs), weights), (0, 1, 2)))(q, kv, sink)
        for x, y in zip(given, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype, implementation", [("float32", "xla"), ("bfloat16", "xla"), ("float16", "npu_model")])
def test_gradients_of_narrow_types(dtype, implementation):
    q, kv, indices = operands(dtype=dtype)
    weights = [x.astype(jnp.float32) for x in weights_of(2)]
    f = lambda q, kv: loss(call(implementation)(q, kv, indices)[::2], weights)  # noqa: E731
    given = jax.jit(jax.grad(jax.checkpoint(f), (0, 1)))(q, kv)
    exact = [x.astype(jnp.float32) for x in (q, kv)]
    no_sink = jnp.full(4, -jnp.inf)
    wanted = jax.grad(lambda q, kv: loss(dense(q, kv, indices, no_sink), weights), (0, 1))(*exact)
    eps = float(jnp.finfo(dtype).eps)
    for x, y in zip(given, wanted, strict=True):
        assert x.dtype == dtype
        assert np.linalg.norm(x.astype(np.float32) - y) <= 2 * eps * np.linalg.norm(y) + 1e-5


def test_queries_without_tokens_and_tokens_without_queries_have_gradient_0():
    q, kv, indices = operands(dtype="float32", unnamed=np.nan)
    indices, sink = indices.at[3].set(-1), jnp.zeros(4)
    f = lambda q, kv, sink: call(attn_sink=sink)(q, kv, indices)[0].sum()  # noqa: E731
    d_q, d_kv, d_sink = jax.grad(f, (0, 1, 2))(q, kv, sink)
    named = np.isin(np.arange(len(kv)), indices)
    assert not d_q[3].any() and not d_kv[~named].any()
    assert np.isfinite(d_q).all() and np.isfinite(d_kv).all() and np.isfinite(d_sink).all()
    assert d_q[2].any() and d_kv[named].any() and d_sink.any()


def test_the_largest_score_counts_as_constant():
    q, kv, indices = operands(dtype="float32")
    assert not jax.grad(lambda q: call()(q, kv, indices)[1].sum())(q).any()


def test_second_derivatives_are_refused():
    q, kv, indices = operands(dtype="float32")
    f = lambda q: call()(q, kv, indices)[0].sum()  # noqa: E731
    with pytest.raises(glass.errors.UnsupportedError, match="no second derivatives"):
        jax.grad(lambda q: jax.grad(f)(q).sum())(q)


def test_memory_of_gradients_does_not_grow_with_topk():
    def temporary(topk):
        arrays = shapes.Shape(16, 4096, topk, 8, depth=64, head_dim_v=64).arguments()
        f = lambda q, kv, indices: call(head_dim_v=64)(q, kv, indices)[0].astype(jnp.float32).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_query = 1024 * (64 * 4 * 3 + 8 * 4 * 6)  # tokens, their gradients, scores
    assert temporary(2048) - temporary(1024) < 2 * (one_query + 16 * 1024 * 4)


# --- vmap and scan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["q", "k", "i", "qk", "qki"])
def test_vmap(mapped):
    stacked = [jnp.stack(xs) for xs in zip(*(operands(seed) for seed in range(3)), strict=True)]
    arrays = [x if name in mapped else x[0] for x, name in zip(stacked, "qki", strict=True)]
    in_axes = tuple(0 if name in mapped else None for name in "qki")
    results = jax.jit(jax.vmap(call(), in_axes))(*arrays)
    for i in range(3):
        one = [x[i] if axis == 0 else x for x, axis in zip(arrays, in_axes, strict=True)]
        assert_same([x[i] for x in results], call()(*one))
        ref.check([x[i] for x in results], ref.attention(*one, **OPTIONS))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_vmap_keeps_tokens_apart(implementation):
    """NaN of one mapped array of tokens does not reach the results of another; axes anywhere."""
    stacked = [jnp.stack(xs) for xs in zip(*(operands(seed, unnamed=np.nan) for seed in range(2)), strict=True)]
    expected = [call(implementation)(*(x[i] for x in stacked)) for i in range(2)]
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, (2, 0, 1), strict=True)]
    results = jax.vmap(call(implementation), (2, 0, 1), 1)(*moved)
    assert_same(results, [jnp.stack(pair, 1) for pair in zip(*expected, strict=True)])


def test_nested_vmap():
    stacked = [jnp.stack(xs) for xs in zip(*(operands(seed) for seed in range(2)), strict=True)]
    results = jax.vmap(jax.vmap(call(), (0, None, None)), (None, 0, 0))(*stacked)
    assert_same([x[1, 0] for x in results], call()(stacked[0][0], stacked[1][1], stacked[2][1]))


def test_vmap_over_sinks_and_lengths():
    arrays = operands()
    sinks, lengths = jnp.array([[-1.0, 0, 1, 2], [3, 2, 1, 0]]), jnp.array([[3] * 8, [12] * 8])
    f = lambda sink, n: call(attn_sink=sink, topk_length=n)(*arrays)  # noqa: E731
    results = jax.vmap(f)(sinks, lengths)
    for i in range(2):
        assert_same([x[i] for x in results], f(sinks[i], lengths[i]))


def test_vmap_of_gradients():
    stacked = [jnp.stack(xs) for xs in zip(*(operands(s, dtype="float32") for s in range(2)), strict=True)]
    gradient = jax.grad(lambda q, kv, indices: call()(q, kv, indices)[0].sum(), (0, 1))
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, None)):
        arrays = [x if axis == 0 else x[0] for x, axis in zip(stacked, axes, strict=True)]
        results = jax.jit(jax.vmap(gradient, axes))(*arrays)
        for i in range(2):
            one = gradient(*(x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)))
            for x, y in zip(results, one, strict=True):
                np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-5)


def test_scan_over_checkpointed_layers():
    q, kv, indices = operands(dtype="float32")
    layers = jnp.array([0.5, 1.0, 1.5])

    def final(q, layers):
        def layer(q, factor):
            out, _, _ = call()(q, kv * factor, indices)
            return q.at[..., :16].add(out), None

        return jax.lax.scan(jax.checkpoint(layer), q, layers)[0].sum()

    def unrolled(q, layers):
        for factor in layers:
            out, _ = dense(q, kv * factor, indices, jnp.full(4, -jnp.inf))
            q = q.at[..., :16].add(out)
        return q.sum()

    for x, y in zip(jax.jit(jax.grad(final, (0, 1)))(q, layers), jax.grad(unrolled, (0, 1))(q, layers), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


# --- meshes ---------------------------------------------------------------------------------------------------------

SPECS = {  # of q and the indices on a 4 x 2 mesh; the tokens are whole
    "queries": (("x",), ("x",)),
    "heads": ((None, "y"), ()),
    "queries_and_heads": (("x", "y"), ("x",)),
    "queries_over_all": ((("x", "y"),), (("x", "y"),)),
}


def on_mesh(axis_type):
    return jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)


def place(arrays, specs, mesh):
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize(
    "case, implementation", [*((case, "xla") for case in SPECS), ("queries_and_heads", "npu_model")]
)
def test_queries_and_heads_stay_where_they_are(case, axis_type, implementation):
    mesh = on_mesh(axis_type)
    q, indices = (jax.P(*spec) for spec in SPECS[case])
    arrays, sink = operands(), jnp.arange(4.0)
    with jax.set_mesh(mesh):
        placed = place(arrays, (q, jax.P(), indices), mesh)
        compiled = jax.jit(call(implementation, attn_sink=sink)).lower(*placed).compile()
        results = compiled(*placed)
    ref.check(results, ref.attention(*arrays, attn_sink=sink, **OPTIONS))
    assert not collectives(compiled)
    for x in results:
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, q), x.ndim)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_gradients_on_a_mesh(axis_type):
    mesh = on_mesh(axis_type)
    arrays, sink = operands(dtype="float32"), jnp.arange(4.0)
    gradient = jax.jit(jax.grad(lambda q, kv, i, s: call(attn_sink=s)(q, kv, i)[0].sum(), (0, 1, 3)))
    expected = gradient(*arrays, sink)
    with jax.set_mesh(mesh):
        placed = place((*arrays, sink), (jax.P("x", "y"), jax.P(), jax.P("x"), jax.P("y")), mesh)
        found = collectives(gradient.lower(*placed).compile())
        given = gradient(*placed)
    found["all-reduce"] -= 30 * 32  # of the tokens' gradients
    assert 0 <= sum(found.values()) <= 16  # XLA adds up those of the sinks its own way
    for x, y in zip(given, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    spec = jax.P("x", "y")
    f = jax.shard_map(
        call(implementation), mesh=on_mesh(AxisType.Auto), in_specs=(spec, jax.P(), jax.P("x")),
        out_specs=(spec,) * 3, check_vma=True,
    )  # fmt: skip
    arrays = operands()
    ref.check(jax.jit(f)(*arrays), ref.attention(*arrays, **OPTIONS))


def test_gradients_of_shard_map_are_summed_over_devices():
    arrays, sink = operands(dtype="float32"), jnp.arange(4.0)
    f = lambda q, kv, i, s: call(attn_sink=s)(q, kv, i)[0]  # noqa: E731
    specs = (jax.P("x", "y"), jax.P(), jax.P("x"), jax.P("y"))
    split = jax.shard_map(f, mesh=on_mesh(AxisType.Auto), in_specs=specs, out_specs=jax.P("x", "y"), check_vma=True)
    given, expected = (
        jax.jit(jax.grad(lambda *xs, g=g: jnp.sin(g(*xs)).sum(), (0, 1, 3)))(*arrays, sink) for g in (split, f)
    )
    for x, y in zip(given, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_export(tmp_path):
    glass.export(call(None), *operands(), path=tmp_path / "bundle")
    (source,) = (tmp_path / "bundle" / "kernels").glob("*.asc")
    assert "mla_decode" in source.read_text()
