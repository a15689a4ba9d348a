"""What every operation gets from `Operation`, shown by a small one with two results."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import glass_jax as glass
from glass_jax import errors
from glass_jax.lowering import partition
from glass_jax.primitives import axes, checks, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    power: int = 1


def _both(x, w, params):
    y = x**params.power * w
    return y, y.sum(-1)


def _reported(x, w, params):
    """Stands for a tile kernel: its results can be told from the formula's."""
    return tuple(-out for out in _both(x, w, params))


def _abstract_eval(x, w, *, params):
    shape = np.broadcast_shapes(x.shape, (*w.shape[:-1], 1, w.shape[-1]))
    return jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape[:-1], x.dtype)


def _batch(operands, dims, *, params):
    x, w = axes.lead(operands, dims)
    return _vmapped(x, w, params), (0, 0)


def _vmapped(x, w, params):
    w = jnp.broadcast_to(w, (x.shape[0], w.shape[-1]))
    rows = [WEIGHTED.bind(a, b, params=params) for a, b in zip(x, w, strict=True)]
    return tuple(map(jnp.stack, zip(*rows, strict=True)))


WEIGHTED = operation.Operation(
    "test_weighted",
    abstract_eval=_abstract_eval,
    formula=_both,
    tiled=_reported,
    batch=_batch,
    dimensions=lambda x, w, params: partition.Dimensions("b d, d -> b d, b", parallel="b"),
    multiple_results=True,
    derivative=_both,
)


def weighted(x, w, implementation=None, power=2):
    return WEIGHTED.bind(x, w, params=Params.chosen(implementation, power=power))


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(8, 5))), jnp.asarray(rng.normal(size=5))


def _expected(x, w):
    y = np.asarray(x) ** 2 * np.asarray(w)
    return y, y.sum(-1)


def _close(have, want, sign=1):
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), sign * b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("implementation", "sign"), [(None, 1), ("xla", 1), ("npu_model", -1)])
def test_the_implementation_that_was_asked_for_runs(operands, implementation, sign):
    _close(weighted(*operands, implementation), _expected(*operands), sign)
    _close(jax.jit(lambda *a: weighted(*a, implementation))(*operands), _expected(*operands), sign)
    if implementation:
        with glass.configure(implementation=implementation):
            _close(weighted(*operands), _expected(*operands), sign)


def test_ascend_needs_an_npu(operands):
    with pytest.raises(errors.UnsupportedError, match="test_weighted"):
        weighted(*operands, "ascend")


def test_float64_does_not_reach_the_npu():
    with jax.enable_x64(), pytest.raises(errors.UnsupportedError, match="float64"):
        weighted(jnp.ones((8, 5)), jnp.ones(5), "npu_model")


@pytest.mark.parametrize(("implementation", "sign"), [("xla", 1), ("npu_model", -1)])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, "x"), jax.P()], ids=str)
def test_over_a_mesh(implementation, sign, kind, spec):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=4).astype("float32")
    mesh = jax.make_mesh((4,), ("x",), (kind,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
        call = jax.jit(lambda a, b: weighted(a, b, implementation))
        y, total = call(sharded, jnp.asarray(w))
        _close((y, total), _expected(x, w), sign)
        if spec == jax.P("x"):
            assert y.sharding.spec == jax.P("x", None) or y.sharding.spec == jax.P("x")
            assert total.sharding.spec == jax.P("x")
            text = call.lower(sharded, jnp.asarray(w)).compile().as_text()
            assert not [name for name in ("all-gather", "all-reduce", "all-to-all") if name in text]


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
def test_inside_shard_map(operands, implementation):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    x, w = operands
    sign = -1 if implementation == "npu_model" else 1
    fn = jax.shard_map(
        lambda a, b: weighted(a, b, implementation), mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x")
    )
    _close(jax.jit(fn)(x, w), _expected(x, w), sign)

    def loss(w):
        return fn(x, w)[1].sum()

    np.testing.assert_allclose(jax.grad(loss)(w), (np.asarray(x) ** 2).sum(0), rtol=1e-5)


def test_what_a_device_does_counts_as_made_in_one_place():
    """XLA takes a part's lines of source for those of the whole program, and hangs where these make a circle."""
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 5)), jax.NamedSharding(mesh, jax.P("x")))

    def step(_, x):
        x = jnp.sin(x)
        return x * 2

    def split(x):
        rows, how = partition.Dimensions("a b -> a b", parallel="a"), partition.Split.PROPAGATED
        loop = lambda x: jax.lax.fori_loop(0, 3, step, x)  # noqa: E731
        return partition.over_mesh(loop, rows, how, x, sum_of_parts=None)

    text = jax.jit(split).lower(x).compile().as_text()
    (sine,), (product,) = (re.findall(rf" {name}\(.*stack_frame_id=(\d+)", text) for name in ("sine", "multiply"))
    assert sine == product


def test_derivatives_are_those_of_the_given_form(operands):
    with jax.enable_x64():
        x, w = (jnp.asarray(np.asarray(v), jnp.float64) for v in operands)
        check_grads(weighted, (x, w), order=2, modes=("fwd", "rev"))
    # The value of a differentiated call is the implementation's, the derivative the given form's.
    (y, _), pull = jax.vjp(lambda x: weighted(x, operands[1], "npu_model"), operands[0])
    np.testing.assert_allclose(y, -_expected(*operands)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull((jnp.ones_like(y), jnp.zeros(8)))[0], 2 * operands[0] * operands[1], rtol=1e-5)


def test_vmap_with_an_operand_that_is_not_mapped(operands):
    x, w = operands
    y, total = jax.vmap(lambda v: weighted(v[None], w))(x)
    _close((y[:, 0], total[:, 0]), _expected(x, w))


def test_shapes_that_do_not_fit_are_named():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 7))
    with pytest.raises(errors.HardwareConstraintError, match=r"op: w has shape \(5, 7\), expected \[K, N\] with K = 4"):
        checks.dimensions("op", x=(x, "... K"), w=(w, "K N"))
    with pytest.raises(errors.HardwareConstraintError, match=r"op: w has shape \(5, 7\), expected \[K\]"):
        checks.dimensions("op", w=(w, "K"))
    with pytest.raises(errors.HardwareConstraintError, match=r"expected \[p, 1, d\]"):
        checks.dimensions("op", w=(jnp.ones((5, 7, 2)), "p 1 d"))
    assert checks.dimensions("op", x=(x, "... K"), b=(jnp.ones((1, 9)), "1 N")) == {"K": 4, "N": 9}


def test_dtypes_that_do_not_fit_are_named():
    with pytest.raises(errors.HardwareConstraintError, match="op: x is int32; use float32"):
        checks.floats("op", x=jnp.ones(3, jnp.int32))
    with pytest.raises(errors.HardwareConstraintError, match="op: n is float32; use int32"):
        checks.integers("op", n=jnp.ones(3))
