"""topk under vmap, grad, jvp, checkpoint, scan, shard_map and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import glass_jax as glass
import topk_reference

RUNS_HERE = ("xla", "npu_model")
K = 3


def _random(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def _topk(implementation="xla", **options):
    return lambda x, end, start=None: glass.topk(x, K, start=start, end=end, implementation=implementation, **options)


# --- vmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize(("x_axis", "end_axis"), [(0, None), (1, 0), (None, 0)])
def test_vmap(x_axis, end_axis, implementation):
    x, end = _random(4, 5, 20), np.arange(20).reshape(4, 5) + 1
    operands = (
        x[0] if x_axis is None else jnp.moveaxis(x, 0, x_axis),
        end[0] if end_axis is None else end,
    )
    values, indices = jax.jit(jax.vmap(_topk(implementation), (x_axis, end_axis)))(*operands)
    rows = jnp.broadcast_to(x[0], x.shape) if x_axis is None else x
    topk_reference.check(rows, K, values, indices, np.broadcast_to(end[0], end.shape) if end_axis is None else end)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_nested_vmap_over_different_operands(implementation):
    x, end, start = _random(4, 20), np.arange(5) + 4, np.array([0, 6, 3, 2])
    select = jax.jit(jax.vmap(jax.vmap(_topk(implementation), (None, 0, None)), (0, None, 0)))
    values, indices = select(x, end, start)
    rows, ends = jnp.broadcast_to(x[:, None], (4, 5, 20)), np.broadcast_to(end, (4, 5))
    topk_reference.check(rows, K, values, indices, ends, start=np.broadcast_to(start[:, None], (4, 5)))


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [20, 2])
def test_derivatives(end):
    with jax.enable_x64(True):
        x = _random(2, 20, dtype="float64")
        chosen = lambda x: jnp.where(jnp.arange(K) < end, _topk(sorted=True)(x, np.full(2, end))[0], 0) ** 3  # noqa: E731
        check_grads(jax.jit(chosen), (x,), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_goes_to_the_elements_that_were_chosen(dtype, implementation):
    x, end = _random(4, 20, dtype=dtype), np.array([20, 20, 7, 2])
    weight = jnp.arange(1, 5, dtype=dtype)
    total = lambda x: jnp.sum(jnp.where(jnp.isinf(v := _topk(implementation)(x, end)[0]), 0, v) * weight[:, None])  # noqa: E731
    gradient = jax.jit(jax.grad(total))(x)
    expected = np.zeros((4, 20))
    for row, indices in enumerate(topk_reference.topk(x, K, end)[1]):
        expected[row, indices[indices < 20]] = row + 1
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, expected)


def test_vmapped_gradient_of_an_operand_that_is_not_mapped():
    x, ends = _random(20), np.array([1, 20])
    gradient = jax.jit(jax.grad(lambda x: jax.vmap(_topk(), (None, 0))(x, ends)[0][:, 0].sum()))(x)
    expected = np.zeros(20)
    for end in ends:
        expected[topk_reference.topk(x, 1, end)[1][0]] += 1
    np.testing.assert_array_equal(gradient, expected)


def test_gradient_of_a_row_with_a_nan_has_one():
    x = _random(3, 20).at[1, 4].set(jnp.nan)
    gradient = jax.grad(lambda x: glass.topk(x, K)[0].sum())(x)
    np.testing.assert_array_equal(jnp.isnan(gradient).any(-1), [False, True, False])


def test_checkpoint_scan_and_jvp():
    x, end = _random(4, 20), np.full(4, 20)
    step = lambda x, _: (x.at[:, :K].add(_topk(sorted=True)(x, end)[0]), None)  # noqa: E731
    scanned = lambda step: lambda x: jnp.sum(jax.lax.scan(step, x, None, length=3)[0] ** 2)  # noqa: E731
    plain = lambda x: jnp.sum(functools.reduce(lambda x, _: step(x, None)[0], range(3), x) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(plain))(x)
    for body in (step, jax.checkpoint(step)):
        np.testing.assert_allclose(jax.jit(jax.grad(scanned(body)))(x), expected, rtol=1e-4, atol=1e-5)
    _, tangent = jax.jit(lambda x: jax.jvp(scanned(step), (x,), (x,)))(x)
    np.testing.assert_allclose(tangent, jnp.vdot(expected, x), rtol=1e-4)


# --- meshes --------------------------------------------------------------------------------------------------------


def _collectives(fn, *operands) -> list[str]:
    text = fn.lower(*operands).compile().as_text()
    return [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if f" {name}" in text]


@pytest.mark.parametrize("implementation", RUNS_HERE)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("spec", [jax.P("x", "y", None), jax.P(("x", "y"), None, None), jax.P("x", None, "y")], ids=str)
def test_rows_stay_on_their_devices(spec, axis_type, implementation):
    x, start, end = _random(8, 2, 24), np.arange(16).reshape(8, 2) // 2, np.arange(16).reshape(8, 2) + 1
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8], axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        operands = jax.device_put(x, spec), *(jax.device_put(bound, jax.P(*spec[:2])) for bound in (end, start))
        select = jax.jit(_topk(implementation))
        values, indices = select(*operands)
        kept = jax.P(*spec[:2], None)
        assert values.sharding.is_equivalent_to(jax.NamedSharding(mesh, kept), 3)
        assert indices.sharding.is_equivalent_to(jax.NamedSharding(mesh, kept), 3)
        assert _collectives(select, *operands) == ([] if spec[2] is None else ["all-gather"])
        total = lambda x, end, start: _topk(implementation)(x, end, start)[0][..., :1].sum()  # noqa: E731
        gradient = jax.jit(jax.grad(total))(*operands)
    topk_reference.check(x, K, values, indices, end, start=start)
    np.testing.assert_array_equal(np.asarray(gradient).sum(-1), 1)


@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_shard_map(implementation):
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    x = _random(16, 24)
    select = jax.shard_map(
        lambda x: glass.topk(x, K, implementation=implementation),
        mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=True,
    )  # fmt: skip
    topk_reference.check(x, K, *jax.jit(select)(x))
    gradient = jax.jit(jax.grad(lambda x: select(x)[0].sum()))(x)
    np.testing.assert_array_equal(gradient.sum(-1), K)
