"""paged_attention under vmap, scan, shard_map and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import glass_jax as glass
import numpy_reference as ref
from compiled import collectives
from paged_attention_reference import operands, paged_attention

RUNS_HERE = ("xla", "npu_model")


def call(implementation="xla"):
    return functools.partial(glass.paged_attention, implementation=implementation)


def several(count=3):
    """Each operand ``count`` times over, all of the same shape."""
    sets = [operands(4, 2, 32, 16, [20 + seed, 3], seed=seed) for seed in range(count)]
    return [jnp.stack(xs) for xs in zip(*sets, strict=True)]


@pytest.mark.parametrize(
    "mapped",
    [
        (True, False, False, False, False),
        (False, True, False, False, False),
        (False, True, True, True, True),
        (True, True, True, True, True),
        (True, False, False, True, True),
        (False, False, False, False, True),
    ],
    ids=lambda mapped: "".join("qkvtl"[i] for i in range(5) if mapped[i]),
)
def test_vmap(mapped):
    stacked = several()
    # Where some of the caches and tables stay the same, what is not NaN in one is read by the tables of another.
    stacked[1:3] = [jnp.nan_to_num(x, nan=0.5) for x in stacked[1:3]]
    arrays = [x if is_mapped else x[0] for x, is_mapped in zip(stacked, mapped, strict=True)]
    in_axes = tuple(0 if is_mapped else None for is_mapped in mapped)
    out = jax.jit(jax.vmap(call(), in_axes))(*arrays)
    for i in range(3):
        one = [x[i] if is_mapped else x for x, is_mapped in zip(arrays, mapped, strict=True)]
        ref.assert_close(out[i], paged_attention(*one))


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_vmap_keeps_contexts_apart_and_changes_no_bit(implementation):
    """NaN of one mapped cache does not reach the results of another; axes anywhere, maps nested."""
    stacked = several(2)
    expected = [call(implementation)(*(x[i] for x in stacked)) for i in range(2)]
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, (2, 1, 0, 1, 1), strict=True)]
    out = jax.vmap(call(implementation), (2, 1, 0, 1, 1), 1)(*moved)
    np.testing.assert_array_equal(out, jnp.stack(expected, 1))
    nested = jax.vmap(jax.vmap(call(implementation), (0, None, None, None, None)), (None, 0, 0, 0, 0))
    np.testing.assert_array_equal(nested(stacked[0], *stacked[1:])[1, 1], expected[1])


def test_vmap_over_queries_does_not_copy_the_caches():
    q, *rest = operands(4, 2, 32, 16, [2000, 3000])
    compiled = jax.jit(jax.vmap(call(), (0, None, None, None, None))).lower(jnp.stack([q] * 8), *rest).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * rest[0].nbytes


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_scan_generates_token_after_token(implementation):
    q, k, v, table, lengths = operands(4, 2, 32, 16, [20, 3])
    k, v = (jnp.nan_to_num(x, nan=0.25) for x in (k, v))

    @jax.jit
    def generate(lengths):
        step = lambda lengths, _: (lengths + 1, call(implementation)(q, k, v, table, lengths))  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), lengths, length=3)[1]

    for i, out in enumerate(generate(lengths)):
        ref.assert_close(out, paged_attention(q, k, v, table, lengths + i))


# --- meshes ---------------------------------------------------------------------------------------------------------

SPECS = {  # of q, the caches, the table and the lengths on a 4 x 2 mesh
    "rows": (("x",), (), ("x",), ("x",)),
    "heads": ((None, "y"), (None, None, "y"), (), ()),
    "rows_and_heads": (("x", "y"), (None, None, "y"), ("x",), ("x",)),
    "rows_over_all": ((("x", "y"),), (), (("x", "y"),), (("x", "y"),)),
}


def _inputs(kv_heads=2):
    return operands(4, kv_heads, 32, 16, [20, 3, 0, 16, 17, 33, 1, 40])


@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "xla") for case in SPECS), ("rows_and_heads", "npu_model")], ids=str
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_rows_and_heads_stay_where_they_are(case, axis_type, implementation):
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)
    q, cache, table, lengths = (jax.P(*spec) for spec in SPECS[case])
    arrays = _inputs()
    specs = (q, cache, cache, table, lengths)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(call(implementation)).lower(*placed).compile()
        out = compiled(*placed)
    ref.assert_close(out, paged_attention(*arrays))
    assert not collectives(compiled)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, q), out.ndim)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
def test_query_heads_of_one_key_value_head_are_shared_out(axis_type):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(axis_type,))
    q, *rest = arrays = _inputs(kv_heads=1)
    with jax.set_mesh(mesh):
        placed = jax.device_put(q, jax.NamedSharding(mesh, jax.P(None, "x")))
        rest = [jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for x in rest]
        compiled = jax.jit(call()).lower(placed, *rest).compile()
        out = compiled(placed, *rest)
    ref.assert_close(out, paged_attention(*arrays))
    assert not collectives(compiled)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(AxisType.Auto,) * 2)
    cache = jax.P(None, None, "y")
    f = jax.shard_map(
        call(implementation),
        mesh=mesh,
        in_specs=(jax.P("x", "y"), cache, cache, jax.P("x"), jax.P("x")),
        out_specs=jax.P("x", "y"),
        check_vma=True,
    )
    arrays = _inputs()
    ref.assert_close(jax.jit(f)(*arrays), paged_attention(*arrays))
