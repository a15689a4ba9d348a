"""mla_decode under vmap, scan, shard_map, on meshes and in an export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import glass_jax as glass
import mla_decode_reference as ref
from compiled import collectives

RUNS_HERE = ("xla", "npu_model")
SMALL = {"depth": 32, "page": 16, "queries": 2}
OPTIONS = {"head_dim_v": 16, "causal": True}


def call(implementation="xla"):
    return functools.partial(glass.mla_decode, implementation=implementation, **OPTIONS)


def several(count=3, **options):
    """Each operand ``count`` times over, all of the same shape."""
    sets = [ref.operands([20 + seed, 3], 4, seed=seed, **SMALL | options) for seed in range(count)]
    return [jnp.stack(xs) for xs in zip(*sets, strict=True)]


def same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64))


@pytest.mark.parametrize("mapped", ["q", "c", "ctl", "qctl", "qtl", "l"])
def test_vmap(mapped):
    stacked = several(unused=0.5)  # where a cache is not mapped, tables of one set reach what another leaves unused
    arrays = [x if name in mapped else x[0] for x, name in zip(stacked, "qctl", strict=True)]
    in_axes = tuple(0 if name in mapped else None for name in "qctl")
    results = jax.jit(jax.vmap(call(), in_axes))(*arrays)
    for i in range(3):
        one = [x[i] if axis == 0 else x for x, axis in zip(arrays, in_axes, strict=True)]
        ref.check([x[i] for x in results], ref.attention(*one, **OPTIONS))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_vmap_keeps_sequences_apart_and_changes_no_bit(implementation):
    """NaN of one mapped cache does not reach the results of another; axes anywhere, maps nested."""
    stacked = several(2)
    expected = [call(implementation)(*(x[i] for x in stacked)) for i in range(2)]
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, (2, 1, 0, 1), strict=True)]
    results = jax.vmap(call(implementation), (2, 1, 0, 1), 1)(*moved)
    same(results, [jnp.stack(pair, 1) for pair in zip(*expected, strict=True)])
    nested = jax.vmap(jax.vmap(call(implementation), (0, None, None, None)), (None, 0, 0, 0))
    same([x[1, 1] for x in nested(*stacked)], expected[1])


def test_vmap_over_sinks():
    arrays = ref.operands([20, 3], 4, **SMALL)
    sinks = jnp.array([[-1.0, 0, 1, 2], [3, 2, 1, 0]])
    results = jax.vmap(lambda sink: glass.mla_decode(*arrays, attn_sink=sink, **OPTIONS))(sinks)
    for i in range(2):
        ref.check([x[i] for x in results], ref.attention(*arrays, attn_sink=sinks[i], **OPTIONS))


def test_vmap_over_queries_does_not_copy_the_cache():
    q, *rest = ref.operands([2000, 3000], 4, **SMALL)
    compiled = jax.jit(jax.vmap(call(), (0, None, None, None))).lower(jnp.stack([q] * 8), *rest).compile()
    step = 512 * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < rest[0].nbytes / 2 + 2 * step


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_scan_generates_token_after_token(implementation):
    q, cache, table, lengths = ref.operands([20, 3], 4, unused=0.25, **SMALL)

    @jax.jit
    def generate(lengths):
        step = lambda lengths, _: (lengths + 1, call(implementation)(q, cache, table, lengths))  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), lengths, length=3)[1]

    for i, results in enumerate(zip(*generate(lengths), strict=True)):
        ref.check(results, ref.attention(q, cache, table, lengths + i, **OPTIONS))


# --- meshes ---------------------------------------------------------------------------------------------------------

SPECS = {  # of q, the table and the lengths on a 4 x 2 mesh; the cache is whole
    "rows": (("x",), ("x",), ("x",)),
    "heads": ((None, None, "y"), (), ()),
    "rows_and_heads": (("x", None, "y"), ("x",), ("x",)),
    "rows_over_all": ((("x", "y"),), (("x", "y"),), (("x", "y"),)),
}
LENGTHS = [20, 3, 0, 16, 17, 33, 1, 40]


def on_mesh(axis_type):
    return jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize(
    "case, implementation",
    [*((case, "xla") for case in SPECS), ("heads", "npu_model"), ("rows_and_heads", "npu_model")],
)
def test_rows_and_heads_stay_where_they_are(case, axis_type, implementation):
    mesh = on_mesh(axis_type)
    q, table, lengths = (jax.P(*spec) for spec in SPECS[case])
    arrays = ref.operands(LENGTHS, 4, **SMALL)
    sink = jnp.arange(4.0)
    f = functools.partial(call(implementation), attn_sink=sink)
    with jax.set_mesh(mesh):
        specs = (q, jax.P(), table, lengths)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(f).lower(*placed).compile()
        out, lse = compiled(*placed)
    ref.check((out, lse), ref.attention(*arrays, attn_sink=sink, **OPTIONS))
    assert not collectives(compiled)
    rows, _, heads = (*q, None, None, None)[:3]
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, q), 4)
    assert lse.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(rows, heads)), 3)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    f = jax.shard_map(
        call(implementation),
        mesh=on_mesh(AxisType.Auto),
        in_specs=(jax.P("x", None, "y"), jax.P(), jax.P("x"), jax.P("x")),
        out_specs=(jax.P("x", None, "y"), jax.P("x", "y")),
        check_vma=True,
    )
    arrays = ref.operands(LENGTHS, 4, **SMALL)
    ref.check(jax.jit(f)(*arrays), ref.attention(*arrays, **OPTIONS))


def test_export(tmp_path):
    arrays = ref.operands([20, 3], 4, **SMALL)
    glass.export(call(None), *arrays, path=tmp_path / "bundle")
    (source,) = (tmp_path / "bundle" / "kernels").glob("*.asc")
    assert "mla_decode" in source.read_text()
